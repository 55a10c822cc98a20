"""Measures whole rows for one case, precision and number of threads. Routes take turns, each in its own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rivals.cases import KINDS, Case
from benchmarks.rivals.prepared import prepare
from benchmarks.rivals.programs import versions
from benchmarks.rivals.routes import (
    ANCHOR,
    MODELS,
    PORTABLE,
    ROUTES,
    STEPS,
    Route,
    graph_of_ours,
    opened,
    write_reference,
)
from mod_export.environment import describe_machine
from mod_export.graph.nodes import graph_from_file
from mod_export.measure.cost import cost_row
from mod_export.measure.roofline import product
from mod_export.measure.turns import RouteError, Worker, opened_workers, other_load, rounds

WARMUP, FEWEST_ROUNDS = 1, 5
REFERENCE = "reference"
GEMM = "GEMM"
PACKAGES = ("torch", "openvino", "onnxruntime", "nncf")
ALL_STEPS = {**STEPS, REFERENCE: (MODELS, write_reference)}


def measure(
    case: Case, precision: str, threads: int, seconds: float, folder: Path, routes: Sequence[Route] = ROUTES
) -> dict[str, Any]:
    """Returns the milliseconds of every round by route and kind, the quality of each route, and the milliseconds of
    matrix products of the model's sizes in the same rounds. A route that failed to prepare, open or run has the reason
    instead of times.
    """
    chosen = [route for route in routes if route.precision == precision]
    anchor = [
        route for route in routes if (route.name, route.precision) == (ANCHOR, "float32") and precision != "float32"
    ]
    steps = [REFERENCE, PORTABLE, *(route.step for route in (*chosen, *anchor))]
    missing = prepare(ALL_STEPS, dict.fromkeys(steps), case, folder)
    if reason := missing.get(REFERENCE) or missing.get(PORTABLE):
        raise RuntimeError(f"{case.name}: {reason}")
    names = {**{route.name: route for route in chosen}, **{_title(route, precision): route for route in anchor}}
    openers: dict[str, Any] = {
        name: (opened, (route, case, folder, threads)) for name, route in names.items() if route.step not in missing
    }
    openers[GEMM] = (_products, (case, threads))
    with opened_workers(folder / "measured.log", openers) as (workers, failed):
        failed |= {name: missing[route.step] for name, route in names.items() if route.step in missing}
        quality, failed_here = _quality(workers)
        failed |= failed_here
        turns = _turns({name: worker for name, worker in workers.items() if name not in failed})
        load = other_load()
        taken, failed_later = rounds(turns, WARMUP, FEWEST_ROUNDS, seconds)
    failed |= {name: reason for (name, _), reason in failed_later.items()}
    ms = {key: [1e3 * took for took, _ in samples] for key, samples in taken.items()}
    machine = describe_machine()
    return {
        "size": case.size, "seq": case.seq, "batch": case.batch, "vocab": case.vocab,
        "precision": precision, "threads": threads, **_costs(case, folder),
        "routes": {
            name: {
                "ours": route.ours, "precision": route.precision, "failed": failed.get(name),
                "ms": {} if name in failed else {kind: ms[name, kind] for kind in KINDS},
                "quality": quality.get(name, {}),
            }
            for name, route in names.items()
        },
        "gemm_flops": sum(2 * a * b * c for a, b, c in _sizes(case)), "gemm_ms": ms[GEMM, GEMM],
        "other_load": load,
        "machine": {key: machine[key] for key in ("cpu", "cores", "memory_bytes")},
        "versions": versions(PACKAGES),
    }  # fmt: skip


def _title(route: Route, precision: str) -> str:
    return route.name if route.precision == precision else f"{route.name}, {route.precision}"


def _turns(workers: Mapping[str, Worker]) -> dict[tuple[str, str], Callable[[], tuple[float, Any]]]:
    """Returns a turn for both models of every route, and one for the matrix products."""
    kinds = {name: (GEMM,) if name == GEMM else KINDS for name in workers}
    return {(name, kind): partial(workers[name].ask, kind) for name in workers for kind in kinds[name]}


def _quality(workers: Mapping[str, Worker]) -> tuple[dict[str, Any], dict[str, str]]:
    quality: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name, worker in workers.items():
        if name != GEMM:
            try:
                quality[name] = {kind: worker.ask("quality", kind)[1] for kind in KINDS}
            except RouteError as error:
                failed[name] = str(error)
    return quality, failed


def _costs(case: Case, folder: Path) -> dict[str, Any]:
    """Returns the FLOPs of the portable graphs, with and without the scores that the causal mask hides."""
    rows = {kind: cost_row(graph_from_file(graph_of_ours(folder, kind, case)), kind, case.bucket) for kind in KINDS}
    return {
        "flops": {kind: row.flops for kind, row in rows.items()},
        "needed_flops": {kind: row.needed_flops for kind, row in rows.items()},
    }


def _sizes(case: Case) -> list[tuple[int, int, int]]:
    """Sizes (m, k, n) of matrix products of a block of the dense model."""
    spec, rows = case.spec, case.batch * case.seq
    return [
        (rows, spec.d_model, spec.n_heads * spec.d_head),
        (rows, spec.d_model, spec.d_ff),
        (rows, spec.d_ff, spec.d_model),
    ]


def _products(case: Case, threads: int) -> dict[str, Callable[[], None]]:
    products = [product("onnxruntime", threads, *size) for size in _sizes(case)]

    def run() -> None:
        for multiply in products:
            multiply()

    return {GEMM: run}
