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
from benchmarks.load.scenario_crash import crash
from benchmarks.load.scenario_drain import drain
from benchmarks.load.scenario_fuzz import fuzz
from benchmarks.load.scenario_kill import kill
from benchmarks.load.scenario_late_short import late_short
from benchmarks.load.scenario_leaving import leaving
from benchmarks.load.scenario_overload import overload
from benchmarks.load.scenario_prefix import prefix
from benchmarks.load.scenario_slow_readers import slow_readers
from benchmarks.load.scenario_steady import steady
from benchmarks.load.served import Setting, keep_clients_apart, machine_line
from mod_export.errors import GATE_FAILED, BuildFolderError
from mod_export.folder.manifest import open_folder

CHECKPOINT = Path("models/checkpoints/stdlib-3m.pt")


class Scenario(NamedTuple):
    """A scenario that must end within `limit_s`. If that is None, the time of the steady load decides the limit."""

    run: Callable[[Setting], Awaitable[list[Check]]]
    limit_s: float | None


SCENARIOS: dict[str, Scenario] = {
    "batching": Scenario(batching, 240),
    "late_short": Scenario(late_short, 120),
    "prefix": Scenario(prefix, 240),
    "steady": Scenario(steady, None),
    "overload": Scenario(overload, 180),
    "leaving": Scenario(leaving, 300),
    "slow_readers": Scenario(slow_readers, 300),
    "kill": Scenario(kill, 180),
    "crash": Scenario(crash, 240),
    "drain": Scenario(drain, 180),
    "fuzz": Scenario(fuzz, 300),
}
BESIDE_STEADY_S = 240.0
QUIET_CORES = 0.1
"""Cores that other programs may use; with more, the measured times are not reliable."""


def main(words: Sequence[str] | None = None) -> int:
    options = _given(words)
    if options.list:
        print("\n".join(SCENARIOS))
        return 0
    options.results.mkdir(parents=True, exist_ok=True)
    folder = options.folder or built_folder(options.results)
    setting = Setting(folder, options.results, options.seed, 60 * options.minutes, options.locust)
    keep_clients_apart()
    print(f"seed {options.seed}; {machine_line()}", flush=True)
    outcomes = []
    for name in options.only:
        print(f"{name} ...", flush=True)
        outcomes.append(run(name, setting))
        print(table(outcomes[-1:]), flush=True)
        print(f"{name}: {'pass' if outcomes[-1].passed else 'FAIL'}, {outcomes[-1].seconds:.0f} s", flush=True)
    report = {"machine": machine_line(), "seed": options.seed, "scenarios": [each.as_json() for each in outcomes]}
    (options.results / "load.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (options.results / "load.md").write_text(f"{machine_line()}\n\n{table(outcomes)}\n", encoding="utf-8")
    failed = [outcome.scenario for outcome in outcomes if not outcome.passed]
    print(f"failed: {', '.join(failed) or 'none'}; the table is in {options.results / 'load.md'}")
    return 1 if failed else 0


def run(name: str, setting: Setting) -> Outcome:
    """Runs one scenario. A timeout or an error becomes a failed row."""
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
    except Exception as error:  # The other scenarios must still run.
        outcome.checks.append(holds("the scenario", False, f"{type(error).__name__}: {error}"[:300], "runs to its end"))
        traceback.print_exc()
    outcome.seconds = time.monotonic() - begin
    other_cores = sum(now - then for now, then in zip(cpu_seconds(), used, strict=True)) / outcome.seconds
    disturbed = " (disturbed)" if other_cores > QUIET_CORES else ""
    outcome.checks.append(told("cores that other programs used", f"{max(0.0, other_cores):.2f}{disturbed}"))
    return outcome


def cpu_seconds() -> tuple[float, float]:
    """Returns busy CPU seconds of the machine, and the negative of those of this process and its ended children."""
    machine, process = psutil.cpu_times(), os.times()
    busy = sum(machine) - machine.idle - getattr(machine, "iowait", 0.0) - getattr(machine, "guest", 0.0)
    return busy, -(process.user + process.system + process.children_user + process.children_system)


def built_folder(results: Path) -> Path:
    """Returns the build folder of the project's own checkpoint. Builds it if it is missing or incomplete."""
    folder = results / "stdlib-3m"
    try:
        open_folder(folder)
        return folder
    except BuildFolderError:
        print(f"{folder}: is built first, which takes minutes", flush=True)
    program = Path(sys.executable).with_name("mod-export")
    command = [program, "build", CHECKPOINT, "--target", "ort-cpu", "--out", folder, "--quiet"]
    code = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
    # A build that missed a gate of speed on a busy machine can still be served.
    if code not in (0, GATE_FAILED):
        raise SystemExit(f"{CHECKPOINT}: the build ended with {code}; name a finished build folder with --folder")
    return folder


def _given(words: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        unknown = [name for name in chosen if name not in SCENARIOS]
        if unknown or not chosen:
            raise argparse.ArgumentTypeError(f"{text}: expected some of {', '.join(SCENARIOS)}")
        return chosen

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
