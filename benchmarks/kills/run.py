"""Kills commands at random moments, hundreds of times, and checks what is left (`make kills`).

    make kills                                # 100 kills of each command, three quarters of an hour
    make kills ARGS="--kills 500 build"

A command is killed (SIGKILL) at a random moment of the time that it takes without kills, and started again, until it
ends by itself; then it begins anew in an empty folder. After each kill, whatever has its final name must be whole;
after each end, the result must equal that of a run without kills. Processes are forked from one that has imported
PyTorch, so that kills fall into the work and not into imports.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.kills.works import WORKS, DamagedError, Work
from mod_export.cli import main as mod_export_command
from mod_models.train.__main__ import main as train_command

POLL_S = 0.001
EARLIEST = 0.02
"""Share of the command's time before which it is not killed: it is importing."""


@dataclass
class Tally:
    """What kills of a command came to.

    Attributes:
        seconds: time of a run without kills.
        kills: number of kills.
        ends: number of runs that ended by themselves after kills.
        left: number of kills that left an unfinished folder, which the next run went on with.
    """

    seconds: float
    kills: int = 0
    ends: int = 0
    left: int = 0


def started(arguments: list[str], log: Path) -> int:
    """Starts a command in a fork of this process, and returns its process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            program, *rest = arguments
            if program == "train":
                code = train_command(rest)
            else:
                sys.argv[:] = arguments
                mod_export_command()
                code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def ended(process: int, within_s: float) -> int | None:
    """Waits for a process; returns its exit code, or None if it takes longer."""
    end = time.monotonic() + within_s
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(POLL_S)


def kill(process: int) -> None:
    """Kills a process and what it has started, and waits for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)


def tally_of(work: Work, kills: int, chance: random.Random, folder: Path) -> Tally:
    """Kills a command until there were so many kills and the last run has ended.

    Raises:
        DamagedError: a kill left something that is not whole, the command did not go on, or its result differs.
    """
    log, out = folder / "log", folder / "undisturbed"
    work.prepare(out)
    begin = time.perf_counter()
    if (code := ended(started(work.arguments(out), log), 600)) != 0:
        raise DamagedError(f"without a kill it ends with {code}\n{log.read_text(errors='replace')[-2000:]}")
    tally = Tally(time.perf_counter() - begin)
    expected = work.result(out)
    out = folder / "killed"
    while True:
        if not out.exists():
            work.prepare(out)
        # The last one is left alone, so that every series of kills has an end.
        moment = chance.uniform(EARLIEST, 1) * tally.seconds if tally.kills < kills else 600.0
        process = started(work.arguments(out), log)
        code = ended(process, moment)
        if code is None:
            kill(process)
            tally.kills += 1
            work.check(out)
            tally.left += out.exists()
            if not work.done(out):
                continue
        elif code:
            raise DamagedError(
                f"after {tally.kills} kills it ends with {code}\n{log.read_text(errors='replace')[-2000:]}"
            )
        tally.ends += 1
        found = work.result(out)
        if differing := sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name)):
            raise DamagedError(f"after {tally.kills} kills its result differs: {', '.join(differing[:5])}")
        if tally.kills >= kills:
            return tally
        shutil.rmtree(out)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(WORKS)))
@click.option("--kills", type=click.IntRange(1), default=100, show_default=True, help="Kills of each command.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the moments.")
def main(names: tuple[str, ...], kills: int, seed: int) -> None:
    """Kill commands; default: all of them. Exit code 1 if something was damaged."""
    failed = False
    for name in names or WORKS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "inputs").mkdir()
            try:
                tally = tally_of(WORKS[name](folder / "inputs"), kills, random.Random(f"{seed} {name}"), folder)
            except DamagedError as error:
                print(f"{name:9} FAIL: {error}", flush=True)
                failed = True
                continue
        print(
            f"{name:9} {tally.kills} kills of a command of {tally.seconds:.1f} s: nothing damaged; {tally.left} left "
            f"something to go on with, and {tally.ends} runs ended with the same result",
            flush=True,
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
