"""Lets mishaps happen to commands at random moments, hundreds of times, and checks what is left (`make mishaps`).

    make mishaps                                          # 30 of each kind to each command, an hour
    make mishaps ARGS="--count 500 --kind kill build"

A command runs, and something happens to it (`mishaps.py`). Then every file under its final name must be whole, and a
command that failed without being killed must have said in a sentence what went wrong. It is started again, disturbed
or not, until it ends by itself. Its result must equal that of an undisturbed run. Then all begins anew, in an empty
folder. Processes are forked from one that has imported PyTorch, so that mishaps fall into the work, not into imports.

The tool starts itself again in a mount namespace (`unshare`, for small disks) and with a library that is compiled first
(`cc`, for renames and clocks), if the kinds that were asked for need them.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from benchmarks.mishaps.mishaps import LOADED, MISHAPS, FailingRename, HangError, Mishap, Undisturbed, ended_by_itself
from benchmarks.mishaps.shim import compiled_shim
from benchmarks.mishaps.works import WORKS, DamagedError, Work, serve_and_ask
from mod_export.cli import main as mod_export_command
from mod_models.train.__main__ import main as train_command

AGAIN = 0.5
"""Probability that something happens to the next run as well, and not only to the first."""
BUG = 1
ALREADY = "MISHAPS_STARTED"


@dataclass
class Tally:
    """Results of the mishaps of one kind to one command.

    Attributes:
        mishaps: number of mishaps that happened before the command had ended.
        survived: runs that succeeded, in spite of a mishap or because it came too late.
        ends: runs that ended by themselves afterwards, all with the expected result.
    """

    mishaps: int = 0
    survived: int = 0
    ends: int = 0


def started(arguments: Sequence[str], log: Path, folder: Path, mishap: Mishap | None) -> int:
    """Starts a command in a fork of this process, and returns its process id."""
    process = os.fork()
    if process:
        return process
    code = BUG
    try:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            # The threads of the process that was forked are not there, and OpenMP would wait for them for ever.
            torch.set_num_threads(1)
            if ALREADY in os.environ:
                LOADED.mishap_watch(os.fsencode(folder))
            if mishap is not None:
                mishap.within()
            program, *rest = arguments
            if program == "train":
                code = train_command(rest)
            elif program == "serve-and-ask":
                code = serve_and_ask(Path(rest[0]))
            else:
                sys.argv[:] = arguments
                mod_export_command()
                code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else BUG
    except BaseException:  # Whatever it is, this process must not go on as its parent.
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            if ALREADY in os.environ:
                log.with_suffix(".renames").write_text(str(LOADED.mishap_renames()))
        finally:
            os._exit(code)


def undisturbed(work: Work, out: Path, log: Path) -> Undisturbed:
    """Runs a command to which nothing happens.

    Raises:
        DamagedError: it fails.
    """
    work.prepare(out)
    begin, began_ns = time.perf_counter(), time.time_ns()
    code = ended_by_itself(started(work.arguments(out), log, out, None))
    seconds = time.perf_counter() - begin
    if code != 0:
        raise DamagedError(f"undisturbed it ends with {code}\n{end_of(log)}")
    written = [path.stat() for path in out.rglob("*") if path.is_file()]
    counted = log.with_suffix(".renames")
    return Undisturbed(
        seconds,
        sum(each.st_size for each in written if each.st_mtime_ns >= began_ns),
        int(counted.read_text()) if counted.exists() else 0,
    )


def tally_of(work: Work, kind: type[Mishap], count: int, chance: random.Random, folder: Path) -> Tally:
    """Lets `count` mishaps happen to a command, and then lets it end.

    Raises:
        DamagedError: one left something that is not whole, the command did not say what went wrong or did not go on
            afterwards, or its result differs.
    """
    log = folder / "log"
    alone = undisturbed(work, folder / "undisturbed", log)
    expected = work.result(folder / "undisturbed")
    if kind is FailingRename and not alone.renames:
        raise DamagedError("it renames nothing in its folder, so nothing was tried")
    tally, disk = Tally(), folder / "struck"
    while tally.mishaps < count:
        disk.mkdir()
        out = disk / "out"
        mishap = kind(chance, alone)
        with mishap.around(disk):
            work.prepare(out)
            story = []
            while True:
                code = _run(work, mishap, out, log)
                tally.mishaps += mishap.struck(code)
                story.append(str(mishap))
                _check(work, mishap, code, out, log, story)
                mishap.relieve(disk)
                if code == 0 or work.done(out):
                    tally.survived += code == 0
                    break
                if tally.mishaps >= count or chance.random() > AGAIN:
                    if code := ended_by_itself(started(work.arguments(out), log, out, None)):
                        raise DamagedError(f"after {', '.join(story)} it ends with {code}\n{end_of(log)}")
                    break
                # On the same file system, because the first has prepared it.
                mishap = kind(chance, alone)
            tally.ends += 1
            found = work.result(out)
            if differing := sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name)):
                raise DamagedError(f"after {', '.join(story)} its result differs: {', '.join(differing[:5])}")
        shutil.rmtree(disk)
    return tally


def _run(work: Work, mishap: Mishap, out: Path, log: Path) -> int | None:
    mishap.strike(out.parent)
    return mishap.end(started(work.arguments(out), log, out, mishap))


def _check(work: Work, mishap: Mishap, code: int | None, out: Path, log: Path, story: Sequence[str]) -> None:
    told = log.read_text(errors="replace")
    if code is not None and ("Traceback" in told or code == BUG or code < 0):
        raise DamagedError(f"after {', '.join(story)} it ends with {code} and a traceback\n{end_of(log)}")
    if code and not told.strip():
        raise DamagedError(f"after {', '.join(story)} it ends with {code} and says nothing")
    if mishap.harmless and code != 0:
        raise DamagedError(f"after {', '.join(story)} it ends with {code}\n{end_of(log)}")
    try:
        work.check(out)
    except DamagedError as error:
        raise DamagedError(f"after {', '.join(story)}: {error}\n{end_of(log)}") from error


def end_of(log: Path) -> str:
    """The last lines that a command wrote."""
    return log.read_text(errors="replace")[-2000:]


def start_again(kinds: Sequence[str]) -> None:
    """Starts this program again, with what the kinds of mishaps need. Does not return, unless nothing is needed."""
    chosen = [MISHAPS[kind] for kind in kinds]
    command = [sys.executable, "-m", "benchmarks.mishaps.run", *sys.argv[1:]]
    environment = {**os.environ, ALREADY: "1"}
    if not any(kind.needs_shim or kind.needs_disk for kind in chosen):
        return
    # Always loaded, because the functions of the library are called.
    environment["LD_PRELOAD"] = str(compiled_shim(Path("build/mishaps")))
    if any(kind.needs_disk for kind in chosen):
        command = ["unshare", "--user", "--map-root-user", "--mount", *command]
    os.execvpe(command[0], command, environment)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(WORKS)))
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(MISHAPS)), help="Only mishaps of this kind.")
@click.option("--count", type=click.IntRange(1), default=30, show_default=True, help="Mishaps of a kind to a command.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the moments.")
def main(names: Sequence[str], kinds: Sequence[str], count: int, seed: int) -> None:
    """Let mishaps happen to commands; default: all of them. Exit code 1 if something was damaged."""
    kinds = kinds or list(MISHAPS)
    if ALREADY not in os.environ:
        start_again(kinds)
    failed = False
    for name in names or WORKS:
        with tempfile.TemporaryDirectory() as temporary:
            (inputs := Path(temporary) / "inputs").mkdir()
            work = WORKS[name](inputs)
            for kind in kinds:
                if MISHAPS[kind].of_writers and not work.writes:
                    continue
                (folder := Path(temporary) / kind).mkdir()
                begin = time.perf_counter()
                try:
                    tally = tally_of(work, MISHAPS[kind], count, random.Random(f"{seed} {name} {kind}"), folder)
                except (DamagedError, HangError) as error:
                    print(f"{name:9} {kind:7} FAIL: {error}", flush=True)
                    failed = True
                    continue
                print(
                    f"{name:9} {kind:7} {tally.mishaps} in {time.perf_counter() - begin:.0f} s: nothing damaged; "
                    f"{tally.survived} runs succeeded, and {tally.ends} ended with the same result",
                    flush=True,
                )
    sys.exit(failed)


if __name__ == "__main__":
    main()
