"""Minutes of load that the server can carry: no request fails and no resource grows. Locust makes the load."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import psutil

from benchmarks.load.arrivals import early_and_late, poisson_times, prompts
from benchmarks.load.outcomes import Check, at_most, equal, told
from benchmarks.load.raw_client import HOST
from benchmarks.load.served import Sample, ServerProcess, Setting, greedy
from benchmarks.load.sustained import CLIENTS_PER_ROW, WARM_S

ROOT = Path(__file__).parents[2]

TOKENS = 64
PROMPTS = 16
MEASURE_S = 30.0
SHARE = 0.6
"""Offered load as a share of the capacity. A core of a shared machine may lose a fifth of its speed within an hour,
and beyond the capacity requests are refused; `scenario_overload.py` is about that.
"""
MOST_RSS_GROWTH = 0.05
MOST_MORE_DESCRIPTORS = 12
"""Allowed growth of a tenth's mean. Requests arrive at random, so the number under way varies."""
END_S = 90.0
"""Time for locust to start and for the last texts to end."""


async def steady(setting: Setting) -> list[Check]:
    """Poisson arrivals at a share of the measured capacity of the server."""
    if not setting.locust.exists():
        raise RuntimeError(f"{setting.locust}: not there; `make load` installs it, or name it with --locust")
    payloads = [greedy(prompt, TOKENS) for prompt in prompts(PROMPTS, 64, setting.seed)]
    with ServerProcess(setting, "steady") as server:
        clients = CLIENTS_PER_ROW * await server.rows()
        most = await locust(
            setting, server, {"payloads": payloads, "seconds": MEASURE_S, "clients": clients, "warm_s": WARM_S}
        )
        before = server.sample()
        offered = SHARE * most["requests_s"]
        times = poisson_times(offered, setting.steady_s, setting.seed)
        samples: list[Sample] = []
        cpu_before = psutil.Process().cpu_times(), server.process.cpu_times()
        watching = asyncio.create_task(server.watch(samples))
        results = await locust(setting, server, {"payloads": payloads, "seconds": setting.steady_s, "times": times})
        watching.cancel()
        del samples[int(setting.steady_s) :]
        cpu_after = server.process.cpu_times()
        cores = (cpu_after.user + cpu_after.system - cpu_before[1].user - cpu_before[1].system) / setting.steady_s
        return [
            told("capacity, requests of 64 tokens", f"{most['requests_s']:.1f} requests/s"),
            told("offered", f"{offered:.1f} requests/s for {setting.steady_s / 60:.1f} minutes"),
            equal("failed of all requests", f"{results['failed']} of {results['sent']}", f"0 of {len(times)}"),
            equal("prompts that got more than one text", results["prompts_with_several_texts"], 0),
            told("time to first token, p50, p95, p99", milliseconds(results["first_s"])),
            told("between tokens, p50, p95, p99", milliseconds(results["between_s"], 1)),
            told("whole request, p50, p95, p99", milliseconds(results["whole_s"])),
            told("cores that the server used", f"{cores:.2f}"),
            *flat(samples, before),
            await server.descriptors_back(before.descriptors),
            await server.idle(5),
            *await server.end(),
        ]


def flat(samples: list[Sample], before: Sample) -> list[Check]:
    """Checks that nothing grew from the second tenth of the time to the last."""
    rss, descriptors, threads = (early_and_late(column) for column in zip(*samples, strict=True))
    growth = rss[1] / rss[0] - 1
    return [
        told("RSS, before, second tenth, last tenth",
             f"{before.rss / 2**20:.1f}, {rss[0] / 2**20:.1f}, {rss[1] / 2**20:.1f} MiB"),
        at_most("growth of RSS between these tenths", 100 * growth, 100 * MOST_RSS_GROWTH, " %", 2),
        told("descriptors in these tenths", f"{descriptors[0]:.1f}, {descriptors[1]:.1f}"),
        at_most("more of them", descriptors[1] - descriptors[0], MOST_MORE_DESCRIPTORS, "", 1),
        at_most("more threads", threads[1] - threads[0], 0.5, "", 1),
    ]  # fmt: skip


def milliseconds(found: dict[str, float], digits: int = 0) -> str:
    """Text of three percentiles in milliseconds and the number of samples."""
    shown = ", ".join(f"{1e3 * found[name]:.{digits}f}" for name in ("p50", "p95", "p99"))
    return f"{shown} ms ({found['samples']:,} samples)"


async def locust(setting: Setting, server: ServerProcess, plan: dict[str, Any]) -> dict[str, Any]:
    """Runs locust with a plan, and returns its results."""
    folder = (setting.results / "locust").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    results = folder / "results.json"
    results.unlink(missing_ok=True)
    log = folder / "log.txt"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            # Links are not resolved, because Python finds its environment by the path of the program.
            setting.locust.absolute(), "--locustfile", Path(__file__).with_name("locust_streams.py"), "--headless",
            "--users", "1", "--host", f"http://{HOST}:{server.port}", "--only-summary", "--exit-code-on-error", "0",
            stdout=output, stderr=output,
            env={
                # Locust runs in its own environment, which finds this package only by PYTHONPATH.
                **os.environ, "PYTHONPATH": str(ROOT), "LOAD_PLAN": str(folder / "plan.json"),
                "LOAD_RESULTS": str(results),
            },
        )  # fmt: skip
        try:
            await asyncio.wait_for(process.wait(), plan["seconds"] + END_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if not results.exists():
        raise RuntimeError(f"locust left no results: {log.read_text(errors='replace')[-500:]}")
    measured: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    return measured
