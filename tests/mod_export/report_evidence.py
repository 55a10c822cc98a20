"""What validation and measurement found, as they would tell it: entries of report.json for tests of the report."""

from __future__ import annotations

import random
from typing import Any

from sample_rows import causality_row, parity_row, part_row, speedup_row

from mod_export.results.cost import PartRow
from mod_export.results.latency import Control
from mod_export.results.parity import TextQuality
from mod_export.results.structure import CausalityRow
from mod_export.types import ModelKind

TEXT = '''    def popitem(self):
        """Remove and return a pair."""
        key = next(iter(self))
        value = self[key]
        del self[key]
        return key, value
'''
STATEMENTS: dict[ModelKind, str] = {
    "mod": (
        "must not be used for autoregressive sampling: changing the end of a text changed logits from position 37 on "
        "before the change, by up to 4.7; it scores whole texts"
    ),
    "dense": "no logit before the change moved in 12 tries: nothing speaks against autoregressive sampling",
}
SPEEDUPS: dict[tuple[str, str], dict[str, Any]] = {
    ("ort-cpu", "b1s128"): {"measured": 1.515055, "ci95": [1.504940, 1.527600], "predicted_flops": 1.660997},
    ("ort-cpu", "b1s512"): {"measured": 1.678734, "ci95": [1.666731, 1.697393], "predicted_flops": 1.686406},
    ("inductor", "b1s128"): {"measured": 1.442120, "ci95": [1.431462, 1.450171], "predicted_flops": 1.660997},
    ("inductor", "b1s512"): {"measured": 1.667580, "ci95": [1.648390, 1.681934], "predicted_flops": 1.686406},
}
PARTS = ("routing", "attention_projections", "attention", "mlp", "head", "other")


def speedup(target: str, bucket: str) -> dict[str, Any]:
    """A MoD model that is faster, a gate at the largest bucket, and a control that holds 1."""
    row = SPEEDUPS[target, bucket]
    gated = bucket == "b1s512"
    return speedup_row(
        **row, target=target, bucket=bucket, efficiency=row["measured"] / row["predicted_flops"],
        gate=1.0 if gated else None, passed=True if gated else None, predicted_roofline=row["predicted_flops"] - 0.07,
        control=Control(measured=1.002, ci99=(0.996, 1.009), covers_one=True),
    ).model_dump()  # fmt: skip


def spread(samples_ms: tuple[float, ...], p50: float, p90: float, p99: float) -> dict[str, Any]:
    """Intervals, spread and conditions of one row of latency."""
    ordered = sorted(samples_ms)
    mean = sum(samples_ms) / len(samples_ms)
    stdev = (sum((sample - mean) ** 2 for sample in samples_ms) / (len(samples_ms) - 1)) ** 0.5
    return {
        "p50_ci95": [0.997 * p50, 1.004 * p50], "p90_ci95": [0.995 * p90, 1.008 * p90],
        "p99_ci95": [0.99 * p99, 1.02 * p99], "cv": stdev / mean, "drift": 0.004, "outliers": 1, "flags": [],
        "iqr_ms": ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4], "stable": True,
        "conditions": {"threads_used": 1.0, "frequency_mhz": [2445.0, 2448.0], "load": 0.42, "other_load": 0.013},
    }  # fmt: skip


def causality(target: str, bucket: str, kind: ModelKind) -> CausalityRow:
    """MoD looks ahead, its dense baseline does not."""
    return causality_row(
        target=target, bucket=bucket, model=kind, suffixes=12, causal=kind == "dense",
        earliest_change=37 if kind == "mod" else None, largest_change=4.7 if kind == "mod" else 9.5e-07,
        statement=STATEMENTS[kind],
    )  # fmt: skip


def routing_map(bucket: str, layers: tuple[int, ...]) -> dict[str, Any]:
    """A text of as many characters as the bucket has positions, of which every layer selects the best eighth."""
    count = int(bucket.removeprefix("b1s"))
    tokens = [*(TEXT * (count // len(TEXT) + 1))[:count]]
    rng = random.Random(bucket)
    made = []
    for layer in layers:
        scores = [round(rng.gauss(0, 1) + (2 if token.isalpha() and before == " " else 0), 4)
                  for token, before in zip(tokens, [" ", *tokens], strict=False)]  # fmt: skip
        best = sorted(range(count), key=lambda position, scores=scores: -scores[position])[: count // 8]
        made.append({"layer": layer, "k": count // 8, "routed": sorted(best), "scores": scores})
    return {"bucket": bucket, "tokens": tokens, "layers": made}


def roofline() -> dict[str, Any]:
    """One dtype on one thread."""
    return {
        "dtype": "float32", "threads": 1, "gemm_gflops": 78.4, "bandwidth_gbs": 11.9,
        "method": "best of 20 products of 1024 x 1024, and of 20 copies of 256 MiB", "measured_at": "2026-11-21 16:40",
    }  # fmt: skip


def parts(target: str, bucket: str, kind: ModelKind, flops_by_part: dict[str, int], total_ms: float) -> list[PartRow]:
    """What each part needs, and what the profile says; that of torch cannot tell routing."""
    weights = {part: flops_by_part[part] / 72e6 for part in PARTS} | {"other": 0.03 * total_ms}
    scale = total_ms / sum(weights.values())
    told = {part: scale * weights[part] for part in PARTS if (target, part) != ("inductor", "routing")}
    return [
        part_row(
            target=target, bucket=bucket, model=kind, part=part, flops=flops_by_part[part],
            bytes=4_000_000 + flops_by_part[part] // 60, predicted_ms=flops_by_part[part] / 78.4e6,
            measured_ms=told.get(part), share=told[part] / total_ms if part in told else None,
            profiler="ONNX Runtime" if target == "ort-cpu" else "torch.profiler",
        )
        for part in PARTS
    ]  # fmt: skip


def judged(target: str, role: str, bucket: str, kind: ModelKind, layers: list[dict[str, Any]], **fields: Any) -> Any:
    """A row of parity that passed, whose layers selected what the reference did."""
    routed = sum(layer["agreed"] for layer in layers)
    about = {"target": target, "role": role, "bucket": bucket, "model": kind}
    routing = {"layers": layers, "routed": routed, "agreed": routed, "near_ties": 0, "min_margin": None, "by_input": []}
    text = TextQuality(
        tokens=2032, perplexity=18.2914, reference_perplexity=18.2914, own_perplexity=18.2914, next_token_agreement=1.0
    )
    made = parity_row(**about, text=text, kl=3.2e-12, ties_exact=True if kind == "mod" else None).model_dump()
    return {**made, **fields, "routing": routing | fields.get("routing", {})}


def layer(number: int, k: int, routed: int, **fields: Any) -> dict[str, Any]:
    """What one layer selected, all of it as the reference did."""
    return {"layer": number, "k": k, "routed": routed, "agreed": routed, "overflow": 0, "near_ties": 0, "faults": 0,
            "min_margin": 0.0013, "score_bound": 4e-05, "worst_flip": None, **fields}  # fmt: skip


def decoding(target: str, role: str, bucket: str, kind: ModelKind) -> dict[str, Any]:
    """A row of parity of an engine that writes text."""
    layers = [layer(number, 64, 60 + number, overflow=3 * number) for number in ((1, 3) if kind == "mod" else ())]
    return judged(
        target, role, bucket, kind, layers, reference="eager float32", inputs=["text", "random"],
        artifact=f"engines/{target}/{kind}-{role}-{bucket}-float32.onnx", rounding_error=2.5e-05,
        error={"max_abs": 2.7e-05, "mean_abs": 2.8e-06, "max_rel": 2.6e-06, "rms": 3.9e-06}, allowed_max_abs=4.0e-04,
        gate={"max_abs": 1e-4, "near_tie": 1e-3, "next_token_agreement": 0.999, "rounding_error": 16.0,
              "rounding_error_rms": 8.0, "max_kl": 1e-6, "max_perplexity_ratio": 1.0001},
    )  # fmt: skip


def decode(bucket: str, texts: int, ms: dict[str, float], ci95: tuple[float, float]) -> dict[str, Any]:
    """Steps of one bucket."""
    speedup = ms["dense"] / ms["mod"]
    return {
        "target": "ort-cpu", "bucket": bucket, "dtype": "float32", "threads": 1, "positions": 48, "ms": ms,
        "tokens_per_second": {kind: 1e3 * texts / one for kind, one in ms.items()}, "measured": speedup, "ci95": ci95,
        "verdict": "faster" if ci95[0] > 1 else "inconclusive",
        "executed": {"1": 0.1042, "3": 0.0833}, "selected": {"1": 0.1042, "3": 0.0833},
        "least_bytes": {"mod": 8_398_768, "dense": 14_889_728}, "predicted_bytes": 1.7728,
        "efficiency": speedup / 1.7728,
        "predicted_ms": {"mod": 0.583, "dense": 1.034},
        "kv_bytes": {"mod": 1_179_648 * texts, "dense": 2_097_152 * texts},
        "routed_kv_bytes": {"mod": 131_072 * texts, "dense": 1_048_576 * texts},
    }  # fmt: skip


def token_parity() -> list[dict[str, Any]]:
    """Parity of the engines that write text: two buckets of prompts, and two of steps."""
    kinds: tuple[ModelKind, ...] = ("mod", "dense")
    buckets = (("prefill", "b1s128"), ("prefill", "b1s512"), ("decode", "b1s512"), ("decode", "b8s512"))
    return [decoding("ort-cpu", *bucket, kind) for kind in kinds for bucket in buckets]


def generation() -> dict[str, Any]:
    """A model that writes: two decode buckets, one of them not certainly faster, and two of prompts."""
    kinds: tuple[ModelKind, ...] = ("mod", "dense")
    return {
        "window": 512, "capacity": {"1": 64, "3": 64},
        "texts": [
            {"target": "ort-cpu", "bucket": bucket, "dtype": "float32", "model": kind, "texts": 4, "tokens": 192,
             "identical": 4, "first_difference": None}
            for kind in kinds for bucket in ("b1s512", "b8s512")
        ],
        "decode": [
            decode("b1s512", 1, {"mod": 0.5127, "dense": 0.8313}, (1.516, 1.732)),
            decode("b8s512", 8, {"mod": 3.477, "dense": 3.579}, (0.96, 1.09)),
        ],
        "first_token": [
            {"target": "ort-cpu", "bucket": f"b1s{tokens}", "tokens": tokens, "dtype": "float32", "ms": ms,
             "measured": ms["dense"] / ms["mod"],
             "ci95": ci95, "verdict": "faster" if ci95[0] > 1 else "inconclusive"}
            for tokens, ms, ci95 in ((128, {"mod": 8.22, "dense": 9.88}, (0.99, 1.31)),
                                     (512, {"mod": 27.6, "dense": 49.9}, (1.74, 1.83)))
        ],
        "quality": {
            "tokens": 2044, "window": 512, "perplexity": 3.137692, "own_perplexity": 3.093790,
            "wanted": {"1": 0.1074, "3": 0.1489}, "selected": {"1": 0.1074, "3": 0.1245}, "overflow": {"1": 0, "3": 50},
        },
    }  # fmt: skip
