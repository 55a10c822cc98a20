"""One result of each kind with plain values, for tests that need only a few of its fields."""

from __future__ import annotations

from typing import Any, TypeVar

from mod_export.rows.base import Result
from mod_export.rows.correctness import CausalityRow, ErrorNumbers, Gate, ParityRow, RoutingAgreement
from mod_export.rows.cost import CostRow, PartRow
from mod_export.rows.speed import Conditions, Control, LatencyRow, PrecisionRow, SpeedupRow

Row = TypeVar("Row", bound=Result)
PAIR: dict[str, Any] = {"target": "ort-cpu", "dtype": "float32", "bucket": "b1s512"}
ENGINE: dict[str, Any] = {**PAIR, "model": "mod"}
GATE = Gate(
    max_abs=1e-4, near_tie=1e-4, next_token_agreement=0.999, rounding_error=16, rounding_error_rms=4, max_kl=1e-8,
    max_perplexity_ratio=1.0001,
)  # fmt: skip
QUIET = Conditions(threads_used=1.0, frequency_mhz=(2445.0, 2448.0), load=0.42, other_load=0.013)


def changed(row: Row, **fields: Any) -> Row:
    return row.model_copy(update=fields)


def parity_row(**fields: Any) -> ParityRow:
    values: dict[str, Any] = {
        **ENGINE, "artifact": "engines/x.onnx", "reference": "torch eager float32", "inputs": ("random",),
        "tokens": 512, "rounding_tokens": 128,
        "routing": RoutingAgreement(layers=(), routed=0, agreed=0, near_ties=0, min_margin=None, by_input=()),
        "error": ErrorNumbers(max_abs=1e-6, mean_abs=1e-7, max_rel=1e-6, rms=1e-7), "rounding_error": 1e-6,
        "allowed_max_abs": 1e-5, "next_token_agreement": 1.0, "kl": 1e-12, "text": None, "ties_exact": None,
        "located": None, "gate": GATE, "passed": True, "reasons": (),
    }  # fmt: skip
    return ParityRow(**values | fields)


def causality_row(**fields: Any) -> CausalityRow:
    values: dict[str, Any] = {
        **ENGINE, "suffixes": 4, "causal": True, "earliest_change": None, "largest_change": 0.0, "statement": "none",
    }  # fmt: skip
    return CausalityRow(**values | fields)


def latency_row(samples_ms: tuple[float, ...] = (1.0, 1.0), **fields: Any) -> LatencyRow:
    numbers = dict.fromkeys(("p90_ms", "p99_ms", "mean_ms", "stdev_ms", "cv", "iqr_ms", "drift"), 0.0)
    values: dict[str, Any] = {
        **ENGINE, **numbers, "providers": ("CPU",), "threads": 1, "warmup": 1, "samples_ms": samples_ms,
        "p50_ms": sorted(samples_ms)[len(samples_ms) // 2], "p50_ci95": None, "p90_ci95": None, "p99_ci95": None,
        "outliers": 0, "flags": (), "stable": True, "conditions": QUIET,
    }  # fmt: skip
    return LatencyRow(**values | fields)


def speedup_row(measured: float = 1.6, **fields: Any) -> SpeedupRow:
    values: dict[str, Any] = {
        **PAIR, "measured": measured, "ci95": (measured - 0.01, measured + 0.01), "predicted_flops": 1.69,
        "predicted_roofline": None, "efficiency": measured / 1.69, "gate": 1.0, "passed": True, "verdict": "faster",
        "reason": None, "control": Control(measured=1.0, ci99=(0.99, 1.01), covers_one=True),
    }  # fmt: skip
    return SpeedupRow(**values | fields)


def precision_row(**fields: Any) -> PrecisionRow:
    values: dict[str, Any] = {
        **ENGINE, "dtype": "int8", "bytes": 1_000_000, "float32_bytes": 4_000_000, "p50_ms": 2.0,
        "float32_p50_ms": 4.0, "measured": 2.0, "ci95": (1.9, 2.1), "verdict": "faster",
    }  # fmt: skip
    return PrecisionRow(**values | fields)


def cost_row(flops: int = 10**9, **fields: Any) -> CostRow:
    values: dict[str, Any] = {
        "model": "mod", "bucket": "b1s512", "flops": flops, "flops_by_part": {"mlp": flops}, "needed_flops": flops,
        "weight_bytes": 1, "activation_bytes": 1, "kv_bytes": 0,
    }  # fmt: skip
    return CostRow(**values | fields)


def part_row(**fields: Any) -> PartRow:
    values: dict[str, Any] = {
        **ENGINE, "part": "mlp", "flops": 0, "bytes": 0, "predicted_ms": 1.0, "measured_ms": 1.0, "share": None,
        "profiler": None,
    }  # fmt: skip
    return PartRow(**values | fields)
