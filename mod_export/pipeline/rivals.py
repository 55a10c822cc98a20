"""Times engines of a folder beside other programs that run the same model: `mod-export bench --rivals`.

A rival gets what the folder gives to anybody: its portable graph, which is standard ONNX with float32 weights, or the
eager module that is restored from it. Every route has a process of its own, and all take turns on the same inputs,
because thread pools of several libraries in one process disturb each other.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.environment import package_version
from mod_export.measure.other_programs import Run, compile_module, open_onnxruntime, open_openvino
from mod_export.measure.sampling import RUNS_PER_ROUND
from mod_export.measure.statistics import quantile_interval, ratio_interval, ratio_of_medians
from mod_export.measure.turns import RouteError, Worker, opened_workers, other_load, rounds
from mod_export.pipeline.build import Build
from mod_export.rows.speed import RivalRow
from mod_export.types import Bucket, DType, Engine, ModelKind, having, primary_output

Feeds = Mapping[str, np.ndarray]
CPU_TARGETS = tuple(name for name, engine in ENGINES.items() if not engine.nvidia)
"""Targets of the engines that are compared: the rivals run on the CPU."""
WARMUP = 2
"""Rounds before the first sample."""
FEWEST_ROUNDS = 8
"""Rounds that are sampled even if they take longer than `latency.max_seconds`."""
SECONDS_SHARE = 2 / 3
"""Share of `latency.max_seconds` for sampling, as for a comparison with the dense baseline."""


@dataclass(frozen=True, slots=True)
class Task:
    """What the process of a route needs to open one model at one bucket.

    Attributes:
        root: the build folder.
        graph: path of the portable graph.
        kind: the model.
        bucket: the static shape.
        inputs: names of the inputs, in the order of the module's arguments.
        config: the resolved configuration.
        feeds: inputs by name.
    """

    root: Path
    graph: Path
    kind: ModelKind
    bucket: Bucket
    inputs: tuple[str, ...]
    config: BuildConfig
    feeds: Feeds

    @property
    def threads(self) -> int:
        """CPU threads of every route; 0: its library chooses."""
        return self.config.latency.threads


@dataclass(frozen=True, slots=True)
class Rival:
    """A program that runs the model.

    Attributes:
        package: the package whose version is shown.
        dtype: precision of its matrix products.
        open: opens the model in the process that is timed.
    """

    package: str
    dtype: DType
    open: Callable[[Task], Run]


def _onnxruntime(task: Task) -> Run:
    return open_onnxruntime(task.graph, task.threads)


def _openvino(precision: str, task: Task) -> Run:
    return open_openvino(task.graph, task.threads, precision)


def _compiled(task: Task) -> Run:
    """Compiles the eager module that is restored from the folder."""
    module = Build.open(task.root, None, (), verify=False).model(task.kind).module(task.config.returned)
    return compile_module(module, task.inputs, task.threads)


RIVALS: dict[str, Rival] = {
    "onnxruntime": Rival("onnxruntime", "float32", _onnxruntime),
    "openvino": Rival("openvino", "float32", partial(_openvino, "f32")),
    "torch.compile": Rival("torch", "float32", _compiled),
    "openvino, hint bf16": Rival("openvino", "bfloat16", partial(_openvino, "bf16")),
}
"""Name of the route -> program."""


def open_route(open_model: Callable[[Task], Run], task: Task) -> dict[str, Callable[[], Any]]:
    """Opens a route and runs it once, in the process that is timed; returns what that process can be asked for."""
    run = open_model(task)
    first = np.array(run(task.feeds), dtype=np.float32)

    def times() -> list[float]:
        taken = []
        for _ in range(RUNS_PER_ROUND):
            begin = time.perf_counter()
            run(task.feeds)
            taken.append(1e3 * (time.perf_counter() - begin))
        return taken

    return {"first": lambda: first, "times": times}


def _engine(engine: Engine, task: Task) -> Run:
    """Opens an engine of the folder."""
    # The process ends with its route, so nothing closes the runner.
    runner = ENGINES[engine.target].load(task.root, engine, task.config, task.threads).__enter__()
    primary = primary_output(runner.outputs)
    return lambda feeds: runner.run({name: feeds[name] for name in runner.inputs}, [primary])[primary]


def measure_rivals(build: Build) -> Iterator[RivalRow]:
    """Times every runnable engine of whole rows beside every rival, for each bucket and model."""
    engines = [engine for engine in build.runnable("forward") if engine.target in CPU_TARGETS]
    for graph in having(build.graphs, role="forward", target=None):
        own = having(engines, model=graph.model, bucket=graph.bucket)
        if own:
            feeds = build.feeds(graph.bucket)
            task = Task(
                build.root, build.root / graph.path, graph.model, graph.bucket, tuple(graph.inputs), build.config, feeds
            )
            yield from _rows(own, task)


def _rows(engines: Sequence[Engine], task: Task) -> list[RivalRow]:
    ours = {f"mod-export, {engine.target} {engine.dtype}": engine for engine in engines}
    dtypes = {name: engine.dtype for name, engine in ours.items()}
    dtypes |= {name: rival.dtype for name, rival in RIVALS.items()}
    opening: dict[str, Callable[[Task], Run]] = {name: partial(_engine, engine) for name, engine in ours.items()}
    opening |= {name: rival.open for name, rival in RIVALS.items()}
    with tempfile.TemporaryDirectory(prefix="mod-export-rivals-") as scratch:
        openers = {name: (open_route, (open_model, task)) for name, open_model in opening.items()}
        with opened_workers(Path(scratch) / "log", openers) as (workers, failed):
            busy = other_load()
            turns = {name: partial(worker.ask, "times") for name, worker in workers.items()}
            taken, failed_later = rounds(turns, WARMUP, FEWEST_ROUNDS, SECONDS_SHARE * task.config.latency.max_seconds)
            samples = {name: np.array([times for _, times in results]) for name, results in taken.items()}
            errors = _errors({name: worker for name, worker in workers.items() if name in samples})
    reasons = failed | failed_later
    return [
        RivalRow(
            bucket=task.bucket.name,
            model=task.kind,
            program=name,
            version=None if name in ours else package_version(RIVALS[name].package),
            dtype=dtype,
            threads=task.threads,
            other_load=busy,
            reason=reasons.get(name),
            error=errors.get(name),
            **(_numbers(name, dtype, samples, ours, task.config) if name in samples else {}),
        )
        for name, dtype in dtypes.items()
    ]


def _errors(workers: Mapping[str, Worker]) -> dict[str, float]:
    """Returns for each route the root mean square of its difference from the first float32 rival that ran, as a share
    of the root mean square of what that rival returned; NaN if the shapes or the infinities differ.
    """
    reference: np.ndarray | None = None
    errors: dict[str, float] = {}
    # That rival comes first, and only one other output is in memory at a time.
    exact = [name for name, rival in RIVALS.items() if rival.dtype == "float32" and name in workers]
    for name in [*exact, *(name for name in workers if name not in exact)]:
        try:
            output = workers[name].ask("first")[1]
        except RouteError:
            continue
        if reference is None:
            if name not in exact:
                return {}
            reference = output
        errors[name] = _distance(output, reference)
    return errors


def _distance(output: np.ndarray, reference: np.ndarray) -> float:
    finite = np.isfinite(reference)
    if output.shape != reference.shape or not np.array_equal(finite, np.isfinite(output)):
        return math.nan
    difference = output[finite] - reference[finite]
    scale = float(np.mean(reference[finite] ** 2, dtype=np.float64)) if difference.size else 0.0
    return math.sqrt(float(np.mean(difference**2, dtype=np.float64)) / scale) if scale else 0.0


def _numbers(
    name: str, dtype: DType, samples: Mapping[str, np.ndarray], ours: Mapping[str, Engine], config: BuildConfig
) -> dict[str, Any]:
    """Returns the median of a route, and for a rival how many times as long it takes as our fastest engine of its
    dtype, or of float32 if there is none of its dtype.
    """
    samples_ms = samples[name].reshape(-1)
    numbers = {
        "p50_ms": float(np.median(samples_ms)),
        "p50_ci95": quantile_interval(samples_ms, 0.5),
        "samples_ms": tuple(samples_ms.tolist()),
    }
    measured = {other: engine.dtype for other, engine in ours.items() if other in samples}
    alike = [other for other, own_dtype in measured.items() if own_dtype == dtype]
    alike = alike or [other for other, own_dtype in measured.items() if own_dtype == "float32"]
    if name in ours or not alike:
        return numbers
    fastest = min(alike, key=lambda other: float(np.median(samples[other])))
    return numbers | {
        "against": fastest,
        "measured": ratio_of_medians(samples[name], samples[fastest]),
        "ci95": ratio_interval(
            samples[name], samples[fastest], confidence=0.95, resamples=config.latency.bootstrap, seed=config.seed
        ),
    }
