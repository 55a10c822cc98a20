"""What `make load` runs: a real server under load, in several scenarios, and a table of what was found.

    python -m benchmarks.load.run [--only NAME,...] [--folder DIR] [--minutes N] [--seed N] [--results DIR] [--list]

Each scenario starts `mod-export serve` at a free port of 127.0.0.1, watches it from outside, and ends it by a signal.
It has a limit of time; what it did not finish until then is a failed row. Writes load.md and load.json. The scenario
`steady` needs locust in an environment of its own (`.venv/load`), because locust and tritonclient need different
versions of the same package.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.load.outcomes import Check, Outcome, holds, table, told
from benchmarks.load.scenario_batching import batching
from benchmarks.load.scenario_drain import drain
from benchmarks.load.scenario_fuzz import fuzz
from benchmarks.load.scenario_kill import kill
from benchmarks.load.scenario_late_short import late_short
from benchmarks.load.scenario_leaving import leaving
from benchmarks.load.scenario_overload import overload
from benchmarks.load.scenario_slow_readers import slow_readers
from benchmarks.load.scenario_steady import steady
from benchmarks.load.served import Setting, keep_clients_apart, machine_line
from mod_export.errors import GATE_FAILED, BuildFolderError
from mod_export.folder.manifest import open_folder

CHECKPOINT = Path("models/checkpoints/stdlib-3m.pt")


class Scenario(NamedTuple):
    """`run` within `limit_s`; None: the steady load's time decides."""

    run: Callable[[Setting], Awaitable[list[Check]]]
    limit_s: float | None


SCENARIOS: dict[str, Scenario] = {
    "batching": Scenario(batching, 240),
    "late_short": Scenario(late_short, 120),
    "steady": Scenario(steady, None),
    "overload": Scenario(overload, 180),
    "leaving": Scenario(leaving, 300),
    "slow_readers": Scenario(slow_readers, 300),
    "kill": Scenario(kill, 180),
    "drain": Scenario(drain, 180),
    "fuzz": Scenario(fuzz, 300),
}
BESIDE_STEADY_S = 240.0
QUIET_CORES = 0.1
"""Of other programs; with more, times say little."""


def main(words: Sequence[str] | None = None) -> int:
    given = _given(words)
    if given.list:
        print("\n".join(SCENARIOS))
        return 0
    given.results.mkdir(parents=True, exist_ok=True)
    folder = given.folder or built_folder(given.results)
    setting = Setting(folder, given.results, given.seed, 60 * given.minutes, given.locust)
    keep_clients_apart()
    print(f"seed {given.seed}; {machine_line()}", flush=True)
    outcomes = []
    for name in given.only:
        print(f"{name} ...", flush=True)
        outcomes.append(run(name, setting))
        print(table(outcomes[-1:]), flush=True)
        print(f"{name}: {'pass' if outcomes[-1].passed else 'FAIL'}, {outcomes[-1].seconds:.0f} s", flush=True)
    found = {"machine": machine_line(), "seed": given.seed, "scenarios": [one.as_json() for one in outcomes]}
    (given.results / "load.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (given.results / "load.md").write_text(f"{machine_line()}\n\n{table(outcomes)}\n", encoding="utf-8")
    failed = [one.scenario for one in outcomes if not one.passed]
    print(f"failed: {', '.join(failed) or 'none'}; the table is in {given.results / 'load.md'}")
    return 1 if failed else 0


def run(name: str, setting: Setting) -> Outcome:
    """Runs one scenario. Whatever becomes of it is a row."""
    scenario = SCENARIOS[name]
    limit = BESIDE_STEADY_S + setting.steady_s if scenario.limit_s is None else scenario.limit_s
    outcome = Outcome(name)
    begin, used = time.monotonic(), cpu_seconds()

    async def within() -> list[Check]:
        return await asyncio.wait_for(scenario.run(setting), limit)

    try:
        outcome.checks = asyncio.run(within())
    except TimeoutError:
        outcome.checks.append(holds("time", False, "not done", f"done within {limit:.0f} s"))
        traceback.print_exc()
    except Exception as error:  # The other scenarios can run all the same.
        outcome.checks.append(holds("the scenario", False, f"{type(error).__name__}: {error}"[:300], "runs to its end"))
        traceback.print_exc()
    outcome.seconds = time.monotonic() - begin
    others = sum(now - then for now, then in zip(cpu_seconds(), used, strict=True)) / outcome.seconds
    disturbed = " (disturbed)" if others > QUIET_CORES else ""
    outcome.checks.append(told("cores that other programs used", f"{max(0.0, others):.2f}{disturbed}"))
    return outcome


def cpu_seconds() -> tuple[float, float]:
    """Seconds in which cores were busy, and less those of this process and of what it has started and seen end."""
    all_of_it, own = psutil.cpu_times(), os.times()
    busy = sum(all_of_it) - all_of_it.idle - getattr(all_of_it, "iowait", 0.0) - getattr(all_of_it, "guest", 0.0)
    return busy, -(own.user + own.system + own.children_user + own.children_system)


def built_folder(results: Path) -> Path:
    """The build folder of the checkpoint that the project brings along; built if it is not there or not complete."""
    folder = results / "stdlib-3m"
    try:
        open_folder(folder)
        return folder
    except BuildFolderError:
        print(f"{folder}: is built first, which takes minutes", flush=True)
    program = Path(sys.executable).with_name("mod-export")
    command = [program, "build", CHECKPOINT, "--target", "ort-cpu", "--out", folder, "--quiet"]
    code = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
    # What missed a gate of speed on a busy machine can be served all the same.
    if code not in (0, GATE_FAILED):
        raise SystemExit(f"{CHECKPOINT}: the build ended with {code}; name a finished build folder with --folder")
    return folder


def _given(words: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        unknown = [name for name in found if name not in SCENARIOS]
        if unknown or not found:
            raise argparse.ArgumentTypeError(f"{text}: expected some of {', '.join(SCENARIOS)}")
        return found

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", type=names, default=list(SCENARIOS), help="scenarios; all by default")
    parser.add_argument("--folder", type=Path, help="a build folder that writes text; stdlib-3m is built by default")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the steady load (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of everything random (%(default)s)")
    parser.add_argument("--results", type=Path, default=Path("build/load"))
    parser.add_argument("--locust", type=Path, default=Path(".venv/load/bin/locust"), help="the program (%(default)s)")
    parser.add_argument("--list", action="store_true", help="name the scenarios, and run nothing")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
