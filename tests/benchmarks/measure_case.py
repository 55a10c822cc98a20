"""One case in one process: every route, dense and routed, and matrix products of the model's own sizes, all in turn."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from routes import OURS, OURS_INT8, ROUTES, Case, Run, cost_of

from mod_export.benchmark.roofline import product
from mod_export.environment import describe_machine, package_version
from mod_export.types import Bucket
from mod_models.checkpoint import random_checkpoint
from mod_models.spec import ModelSpec, RoutingSpec

SIZES: dict[str, dict[str, Any]] = {
    "S": {"d_model": 256, "n_layers": 8, "n_heads": 4, "n_kv_heads": 2, "d_head": 64, "d_ff": 704},
    "M": {"d_model": 512, "n_layers": 12, "n_heads": 8, "n_kv_heads": 4, "d_head": 64, "d_ff": 1408},
    "L": {"d_model": 1024, "n_layers": 16, "n_heads": 16, "n_kv_heads": 8, "d_head": 64, "d_ff": 2816},
}
"""Llama-like decoders; every other block is routed at 12.5 %."""
WARMUP = 1
FEWEST_ROUNDS = 5
LAST = "mod-export, last token"


def measure(
    size: str, seq: int, batch: int, vocab: int, threads: int, seconds: float, routes: tuple[str, ...] = tuple(ROUTES)
) -> dict[str, Any]:
    """Milliseconds of every round, by kind and route; FLOPs; and matrix products of the model's sizes in between."""
    spec = ModelSpec(vocab_size=vocab, max_positions=max(seq, 128), routing=RoutingSpec(), **SIZES[size])
    checkpoint = random_checkpoint(spec, 0)
    bucket = Bucket(batch, seq)
    checkpoints = {"mod": checkpoint, "dense": checkpoint.dense()}
    costs = {kind: cost_of(Case(one, bucket), kind) for kind, one in checkpoints.items()}
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[tuple[str, str], Run] = {}
        for kind, one in checkpoints.items():
            for route, outputs in [*((route, "logits") for route in routes), (LAST, "last")]:
                make = ROUTES[OURS if route == LAST else route]
                runs[kind, route] = make(Case(one, bucket, outputs), f"{kind}-{outputs}", Path(folder), threads)
        feeds = Case(checkpoint, bucket).feeds
        difference = _largest_difference(runs, feeds, routes)
        flops, multiply = _products(spec, batch * seq, threads)
        timed = {key: _fed(run, feeds) for key, run in runs.items()}
        taken = _rounds({**timed, ("roofline", "GEMM"): multiply}, seconds)
    machine = describe_machine()
    return {
        "size": size, "seq": seq, "batch": batch, "vocab": vocab, "threads": threads,
        "parameters": sum(tensor.numel() for tensor in checkpoint.weights.values()),
        "flops": {kind: row.flops for kind, row in costs.items()},
        "needed_flops": {kind: row.needed_flops for kind, row in costs.items()},
        "largest_difference": difference,
        "gemm_flops": flops, "gemm_ms": taken.pop(("roofline", "GEMM")),
        "ms": {kind: {route: taken[kind, route] for k, route in runs if k == kind} for kind in checkpoints},
        "machine": {key: machine[key] for key in ("cpu", "cores", "memory_bytes") if key in machine},
        "versions": {
            "torch": version("torch"), "openvino": version("openvino"), "onnxruntime": package_version("onnxruntime"),
        },
    }  # fmt: skip


def _fed(run: Run, feeds: dict[str, np.ndarray]) -> Callable[[], object]:
    return lambda: run(feeds)


def _rounds(runs: dict[tuple[str, str], Callable[[], object]], seconds: float) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of every round after the warm-up, in which all take turns in an order that is drawn anew."""
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    keys, rng = list(runs), np.random.default_rng(0)
    gc.disable()
    deadline = np.inf
    done = 0
    while done < WARMUP + FEWEST_ROUNDS or time.perf_counter() < deadline:
        for index in rng.permutation(len(keys)):
            begin = time.perf_counter()
            runs[keys[index]]()
            taken[keys[index]].append(1e3 * (time.perf_counter() - begin))
        done += 1
        deadline = time.perf_counter() + seconds if done == WARMUP else deadline
    return {key: ms[WARMUP:] for key, ms in taken.items()}


def _products(spec: ModelSpec, rows: int, threads: int) -> tuple[int, Callable[[], None]]:
    """Matrix products as a block of the dense model has them, on ONNX Runtime: FLOPs, and what runs them."""
    sizes = [
        (rows, spec.d_model, spec.n_heads * spec.d_head),
        (rows, spec.d_model, spec.d_ff),
        (rows, spec.d_ff, spec.d_model),
    ]
    each = [product("onnxruntime", threads, *one) for one in sizes]

    def run() -> None:
        for one in each:
            one()

    return sum(2 * a * b * c for a, b, c in sizes), run


def _largest_difference(
    runs: dict[tuple[str, str], Run], feeds: dict[str, np.ndarray], routes: tuple[str, ...]
) -> dict[str, float]:
    """Of any float32 rival's logits from ours: a route that computes something else would be no rival.

    Of nine tokens in ten: where two scores are within rounding of each other, another token is routed, and may be.
    """
    found = {}
    for kind in ("mod", "dense"):
        ours = np.array(runs[kind, OURS](feeds))
        others = [np.array(runs[kind, route](feeds)) for route in routes if route not in (OURS, OURS_INT8)]
        found[kind] = max((float(np.quantile(np.abs(one - ours).max(-1), 0.9)) for one in others), default=0.0)
    return found


def save(path: Path, *case: Any) -> None:
    """Measures a case into a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(measure(*case)), encoding="utf-8")
    part.replace(path)
