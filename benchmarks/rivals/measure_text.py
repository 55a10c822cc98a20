"""Measures text for one model, precision and number of threads. Programs take turns, each in its own process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rivals.prepared import prepare
from benchmarks.rivals.programs import versions
from benchmarks.rivals.text_models import TextCase, dense_checkpoint
from benchmarks.rivals.text_routes import BATCHES, MODELS, ROUTES, STEPS, TextRoute, opened
from mod_export.environment import describe_machine
from mod_export.graph.weights import BYTES, Form, quantized_tensors
from mod_export.measure.turns import RouteError, Worker, opened_workers, other_load, rounds
from mod_models.spec import ModelSpec

WARMUP, FEWEST_ROUNDS = 1, 3
ANCHOR = "mod-export, ort-cpu, dense"
FLOAT_BYTES = {"float32": 4.0, "bfloat16": 2.0}
FORMS: Mapping[str, Form] = {"int8": "int8_blocks64", "int4": "int4"}
HEAD_FORMS: Mapping[str, Form] = {"int8": "int8_blocks", "int4": "int8_blocks64"}
"""Precision -> the form in which the engine of a step on ort-cpu reads the weights of its layers, and that of its head.
"""
PACKAGES = ("torch", "openvino", "onnxruntime", "onnxruntime-genai", "openvino-genai", "llama_cpp_python",
            "transformers", "nncf")  # fmt: skip


def measure(
    case: TextCase, precision: str, threads: int, seconds: float, folder: Path, routes: Sequence[TextRoute] = ROUTES
) -> dict[str, Any]:
    """Returns milliseconds to the first token and tokens per second of every round, by program and batch, and the
    quality and a sample of each program. A program that failed to prepare, open or run has the reason instead.
    """
    chosen = {route.name: route for route in routes if route.precision == precision}
    if precision != "float32" and case.anchored:
        chosen |= {
            f"{ANCHOR}, float32": route for route in routes if (route.name, route.precision) == (ANCHOR, "float32")
        }
    missing = prepare(STEPS, dict.fromkeys((MODELS, *(route.step for route in chosen.values()))), case, folder)
    if MODELS in missing:
        raise RuntimeError(f"{case.name}: {missing[MODELS]}")
    openers = {
        name: (opened, (route, case, folder, threads)) for name, route in chosen.items() if route.step not in missing
    }
    with opened_workers(folder / "measured.log", openers) as (workers, failed):
        failed |= {name: missing[route.step] for name, route in chosen.items() if route.step in missing}
        answers, failed_here = _asked(workers)
        failed |= failed_here
        turns = _turns({name: worker for name, worker in workers.items() if name not in failed})
        load = other_load()
        taken, failed_later = rounds(turns, WARMUP, FEWEST_ROUNDS, seconds)
    failed |= {name: reason for (name, _), reason in failed_later.items()}
    spec, machine = dense_checkpoint(case).spec, describe_machine()
    ran = [answer["ran"] for answer in answers.values() if answer.get("ran")]
    return {
        "model": case.name, "trained": bool(case.model), "capacity": case.capacity,
        "prompt": case.prompt, "new": case.new, "judged": case.judged, "window": case.window,
        "predicted_bytes": gain_by_bytes(spec, precision, ran[0]) if ran else None,
        "d_model": spec.d_model, "n_layers": spec.n_layers, "vocab": spec.vocab_size,
        "precision": precision, "threads": threads,
        "routes": {
            name: {
                "ours": route.ours, "kind": route.kind, "precision": route.precision, "failed": failed.get(name),
                "batches": {} if name in failed else {
                    str(batch): {
                        "first_ms": [1e3 * first for _, (first, _, _) in taken[name, batch]],
                        "tokens_per_s": [tokens / rest for _, (_, rest, tokens) in taken[name, batch]],
                    }
                    for batch in BATCHES
                },
                **answers.get(name, {}),
            }
            for name, route in chosen.items()
        },
        "other_load": load,
        "machine": {key: machine[key] for key in ("cpu", "cores", "memory_bytes")},
        "versions": versions(PACKAGES),
    }  # fmt: skip


def _turns(workers: Mapping[str, Worker]) -> dict[tuple[str, int], Callable[[], tuple[float, Any]]]:
    """Returns a turn for each batch size of each program. A program gets other prompts in each turn."""

    def turn(worker: Worker, batch: int) -> Callable[[], tuple[float, Any]]:
        count = itertools.count(1)
        return lambda: worker.ask("write", batch, next(count))

    return {(name, batch): turn(worker, batch) for name, worker in workers.items() for batch in BATCHES}


def _asked(workers: Mapping[str, Worker]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns quality and sample of each program, and the reasons of those that failed."""
    answers: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name, worker in workers.items():
        try:
            answers[name] = {"quality": worker.ask("quality")[1], **worker.ask("sample")[1]}
        except RouteError as error:
            failed[name] = str(error)
    return answers, failed


def gain_by_bytes(spec: ModelSpec, precision: str, ran: Mapping[str, float]) -> float:
    """Returns the bytes of weights that a step of the dense model reads, divided by those of the MoD model, given the
    share of tokens that ran in each routed layer.
    """
    heads = (2 * spec.n_heads + 2 * spec.n_kv_heads) * spec.d_head
    layer = (heads + 3 * spec.d_ff) * spec.d_model * _bytes_of_a_weight(precision, FORMS)
    head = spec.vocab_size * spec.d_model * _bytes_of_a_weight(precision, HEAD_FORMS)
    left_out = sum(1 - share for share in ran.values())
    return (head + spec.n_layers * layer) / (head + (spec.n_layers - left_out) * layer)


def _bytes_of_a_weight(precision: str, forms: Mapping[str, Form]) -> float:
    """Returns the bytes of one number of a long weight, with its share of scales and zero points."""
    if precision in FLOAT_BYTES:
        return FLOAT_BYTES[precision]
    length = 128
    tensors = quantized_tensors("weight", (1, length), forms[precision]).values()
    return sum(BYTES[dtype] * math.prod(shape) for dtype, shape in tensors) / length
