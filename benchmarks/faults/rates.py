"""How many planted faults are caught, and how many sound builds are suspected: what `make faults` prints.

    python -m benchmarks.faults.rates [--clean N] [--first SEED] [--kinds K...] [--processes N] [--only TEXT]

The exit code is 1 if a fault was missed or its place was named wrongly, or if a sound build was suspected.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.faults.base_folder import FOLDERS
from benchmarks.faults.compiled_faults import write_packages
from benchmarks.faults.planting import FAULTS, Outcome, outcome_of
from benchmarks.faults.random_specs import (
    RandomBuild,
    RandomForeign,
    random_build,
    random_build_of_any_kind,
    random_foreign,
)
from mod_export.pipeline.rerun import validate_folder
from mod_export.rows.correctness import ParityRow

CLEAN_BUILDS = 200
Draw = Callable[[int], RandomBuild | RandomForeign]
DRAWN: Mapping[str, Draw] = {"topk": random_build, "any": random_build_of_any_kind, "foreign": random_foreign}
"""Kinds of sound builds: checkpoints routed by top-k, checkpoints routed in any way, and users' modules."""
REPORTED = 25


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clean", type=int, default=CLEAN_BUILDS, help="sound builds of random models of each kind")
    parser.add_argument(
        "--first", type=int, default=0, help="seed of the first one; gates were chosen with 0 to 199 in sight"
    )
    parser.add_argument("--kinds", nargs="+", choices=DRAWN, default=["topk", "foreign"], help="of sound builds")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="only faults with this text in their name")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as folder,
        ProcessPoolExecutor(options.processes, get_context("spawn"), initializer=quiet) as pool,
    ):
        chosen = [name for name in FAULTS if options.only in name]
        missed = print_faults(chosen, pool, Path(folder))
        alarms = sum(print_alarms(kind, options.first, options.clean, pool, Path(folder)) for kind in options.kinds)
    print(f"{time.monotonic() - begin:,.0f} s")
    return 1 if missed or alarms else 0


def quiet() -> None:
    """Sets one thread for each process, and hides the warnings of torch's exporter."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def print_faults(names: Sequence[str], pool: ProcessPoolExecutor, folder: Path) -> int:
    """Prints a line for each fault, and returns how many were missed or located wrongly."""
    needed = {FAULTS[name].folder for name in names}
    waiting = {name: pool.submit(make, folder / name) for name, make in FOLDERS.items() if name in needed}
    if any("compiled" in name for name in needed):
        pool.submit(write_packages, folder / "packages").result()
    for future in waiting.values():
        future.result()
    width = max(map(len, names), default=0)
    print(f"{'fault':<{width}}  caught  running  looking  place")
    caught = by_running = local = 0
    for name, outcome in zip(names, pool.map(partial(plant, folder), names), strict=True):
        caught += outcome.caught
        by_running += outcome.by_running
        local += FAULTS[name].where is not None
        marks = [("yes" if flag else "-") for flag in (outcome.by_running, outcome.by_looking)]
        state = "yes" if outcome.caught else "NO"
        print(f"{name:<{width}}  {state:<6}  {marks[0]:<7}  {marks[1]:<7}  {FAULTS[name].where or '-'}", flush=True)
        if not outcome.caught:
            print("".join(f"    {reason}\n" for reason in outcome.reasons) or "    passed\n", end="")
    print(
        f"planted faults: {len(names)}, caught: {caught} ({caught / max(1, len(names)):.1%}), "
        f"by running alone: {by_running}, local ones whose place was named: {local if caught == len(names) else '?'}"
    )
    return len(names) - caught


def plant(folder: Path, name: str) -> Outcome:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        return outcome_of(name, folder / FAULTS[name].folder / "build", folder / "packages", Path(scratch))


def print_alarms(kind: str, first: int, count: int, pool: ProcessPoolExecutor, folder: Path) -> int:
    """Prints a line for each sound build that was suspected, and returns their number."""
    alarms = 0
    worst = 0.0
    seeds = range(first, first + count)
    for seed, (reasons, ratio) in zip(seeds, pool.map(partial(build_clean, folder, DRAWN[kind]), seeds), strict=True):
        worst = max(worst, ratio)
        alarms += bool(reasons)
        if reasons:
            print(f"sound build {seed} of kind {kind} was suspected:", *reasons, sep="\n    ", flush=True)
        done = seed - first + 1
        if done % REPORTED == 0:
            print(f"{done} sound builds of kind {kind}, {alarms} suspected", flush=True)
    print(
        f"sound builds of kind {kind}: {count}, false alarms: {alarms}, "
        f"largest error / rounding of the reference: {worst:.2f}"
    )
    return alarms


def build_clean(folder: Path, draw: Draw, seed: int) -> tuple[tuple[str, ...], float]:
    """Builds and validates a random model. Returns the complaints, and the largest error over the rounding error."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        root = Path(scratch)
        report = draw(seed).build(root)
        rerun = validate_folder(root / "build", None, ())
    ratios: Iterator[float] = (
        row.error.max_abs / row.rounding_error for row in rerun.rows(ParityRow) if row.rounding_error
    )
    return (*report.verdict.reasons, *rerun.verdict.reasons), max(ratios, default=0.0)


if __name__ == "__main__":
    sys.exit(main())
