"""Fuzzes readers of untrusted bytes, guided by the branches that they take (atheris, which is libFuzzer for Python).

    make fuzz                                        # all readers, a minute each
    make fuzz ARGS="--seconds 600 gguf pt2"          # some of them for longer
    make fuzz ARGS="--seconds 60 --drawn $(git rev-parse HEAD)"     # one reader, which the commit draws
    make fuzz ARGS="--cases 200"                     # instead, 200 inputs of each in its format (`cases.py`)

A finding is an error that is no refusal, or a read that takes more than 10 seconds or 1 GiB of memory; with cases also
every event that `watch.py` reports. A finding is written to tests/fuzz/inputs/, where it becomes a test. The exit code
is 1 if there is one.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import click

from benchmarks.fuzz.cases import case
from benchmarks.fuzz.readers import INPUTS, READERS, inputs_of

SLOW_S = 10
MOST_MIB = 1024
"""More than a reader may take for one input."""
BESIDE_MIB = 2048
"""What the process takes without an input: PyTorch, and what libFuzzer counts of mapped files."""
EXECUTED = re.compile(r"stat::number_of_executed_units: (\d+)")
BRANCHES = re.compile(r"cov: (\d+)")


class Round(NamedTuple):
    """Result of fuzzing one reader.

    Attributes:
        executed: number of inputs.
        branches: branches of the project's code that were taken.
        finding: file of the input that was found, which is kept beside the others; None if there is none.
        output: what the fuzzer wrote.
    """

    executed: int
    branches: int
    finding: Path | None
    output: str


def fuzz(name: str, seconds: int) -> Round:
    """Fuzzes a reader for some seconds, or until the first finding."""
    with tempfile.TemporaryDirectory() as scratch:
        grown, found = Path(scratch) / "grown", Path(scratch) / "found"
        grown.mkdir()
        found.mkdir()
        command = [
            sys.executable, "-m", "benchmarks.fuzz.one", name, grown, INPUTS / name,
            f"-max_total_time={seconds}", f"-timeout={SLOW_S}", f"-rss_limit_mb={BESIDE_MIB + MOST_MIB}",
            f"-malloc_limit_mb={MOST_MIB}", f"-max_len={READERS[name].longest}", f"-artifact_prefix={found}/",
            "-print_final_stats=1", "-reload=0",
        ]  # fmt: skip
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace")
        output = done.stdout + done.stderr
        executed, branches = EXECUTED.findall(output), BRANCHES.findall(output)
        if done.returncode and not list(found.iterdir()):
            raise click.ClickException(f"{name}: the fuzzer failed\n{output[-4000:]}")
        kept = None
        for path in found.iterdir():
            kept = INPUTS / name / f"found-{sha256(path.read_bytes()).hexdigest()[:12]}"
            shutil.copyfile(path, kept)
        return Round(int(executed[-1]) if executed else 0, int(branches[-1]) if branches else 0, kept, output)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(READERS)))
@click.option("--seconds", type=click.IntRange(1), default=60, show_default=True, help="Time for each reader.")
@click.option("--cases", type=click.IntRange(1), help="In place of fuzzing, so many cases for each reader.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the cases.")
@click.option("--drawn", metavar="COMMIT", help="Only one reader, which this name draws.")
def main(names: tuple[str, ...], seconds: int, cases: int | None, seed: int, drawn: str | None) -> None:
    """Fuzz readers; default: all of them."""
    chosen = list(names or READERS)
    if drawn is not None:
        chosen = [chosen[int(sha256(drawn.encode()).hexdigest(), 16) % len(chosen)]]
    findings = 0
    for name in chosen:
        if cases is not None:
            findings += _show_cases(name, cases, seed)
            continue
        result = fuzz(name, seconds)
        kept = len(inputs_of(name)) - (result.finding is not None)
        line = f"{name:20} {result.executed:>9,} inputs  {result.branches:>6,} branches  from {kept} inputs"
        print(line, flush=True)
        if result.finding is not None:
            findings += 1
            said = [line for line in result.output.splitlines() if "INFO: " not in line]
            print(f"{name}: found {result.finding.relative_to(INPUTS.parents[2])}", *said[-40:], sep="\n")
    sys.exit(bool(findings))


def _show_cases(name: str, count: int, seed: int) -> int:
    command = [sys.executable, "-m", "benchmarks.fuzz.watch", name, str(count), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise click.ClickException(f"{name}: the process ended with {done.returncode}\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    line = f"{name:20} {count:>9,} cases  {found['taken']:>6,} taken  slowest {found['slowest_s']:.2f} s"
    print(f"{line}  {len(found['problems'])} problems", flush=True)
    for number, problem in found["problems"]:
        content = case(name, number, seed)
        kept = INPUTS / name / f"found-{sha256(content).hexdigest()[:12]}"
        kept.write_bytes(content)
        print(f"  case {number}: {problem}; {kept.name}")
    return len(found["problems"])


if __name__ == "__main__":
    main()
