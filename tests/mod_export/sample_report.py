"""A complete report as a build would give it: two targets that ran, one built for elsewhere, two missing."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from report_evidence import causality, generation, judged, parts, roofline, routing_map, speedup, spread, token_parity

from mod_export.results.cost import CostRow
from mod_export.results.report import BuildReport, Verdict
from mod_export.types import Bucket, DType, ModelKind

BUCKETS = (Bucket(1, 128), Bucket(1, 512))
MEDIANS_MS = {
    ("ort-cpu", "b1s128"): {"dense": 171.0, "mod": 113.0},
    ("ort-cpu", "b1s512"): {"dense": 672.0, "mod": 401.0},
    ("inductor", "b1s128"): {"dense": 189.0, "mod": 131.0},
    ("inductor", "b1s512"): {"dense": 746.0, "mod": 448.0},
}
PROVIDERS = {"ort-cpu": ("CPUExecutionProvider",), "inductor": ("AOTInductor cpu",)}
SUFFIX = {"ort-cpu": "onnx", "inductor": "pt2"}
INPUTS = ("padded", "random", "text", "ties")
ROUTED_LAYERS = (1, 3, 5, 7, 9, 11)
KINDS: tuple[ModelKind, ...] = ("dense", "mod")


@pytest.fixture
def report() -> BuildReport:
    """A report whose gates are all met."""
    return BuildReport.model_validate(_content())


@pytest.fixture
def failed_report() -> BuildReport:
    """The same build with a routing fault in one layer of one engine, and a speed-up below its gate."""
    content = _content()
    row = next(row for row in content["parity"] if (row["target"], row["bucket"], row["model"]) == _FAULTY)
    row["routing"]["layers"][2] |= {"agreed": 253, "near_ties": 1, "faults": 2, "worst_flip": 0.031}
    row["routing"]["by_input"][2]["agreed"] -= 3
    row["routing"] |= {"agreed": row["routing"]["agreed"] - 3, "near_ties": 1}
    reasons = ("text: layer 5 routing: 2 tokens differ by more than a near-tie",)
    row |= {
        "passed": False,
        "reasons": list(reasons),
        "error": {"max_abs": 3.1e-3, "mean_abs": 2e-6, "max_rel": 0.04, "rms": 3e-6},
    }
    row |= {"located": {"layer": "layers.5.router", "operator": "node_linear_31", "input": "text", "error": 0.031,
                        "allowed": 4.4e-06}}  # fmt: skip
    unsure, lost, slow = (next(r for r in content["speedup"] if (r["target"], r["bucket"]) == key) for key in _SLOW)
    unsure |= {"verdict": "inconclusive", "reason": "the control is 1.040 [1.020, 1.060] and should be 1",
               "measured": 1.03, "ci95": [0.97, 1.09],
               "control": {"measured": 1.04, "ci99": [1.02, 1.06], "covers_one": False}}  # fmt: skip
    lost |= {"verdict": "not faster", "reason": "the head takes 61 % of the FLOPs, and MoD does not touch it",
             "measured": 1.004, "ci95": [0.999, 1.008], "predicted_roofline": 1.01}  # fmt: skip
    slow |= {"gate": 1.8, "passed": False}
    flags = ["drift: the last third of the samples is 8.3% slower than the first", "7 of 30 samples are outliers"]
    content["latency"][-1] |= {"flags": flags, "drift": 0.083, "outliers": 7, "stable": False}
    content["verdict"] = Verdict(
        status="fail",
        reasons=(
            f"inductor b1s512 float32 mod: parity: {reasons[0]}",
            "inductor b1s512 float32: speed-up 1.665x (95 % interval 1.650 to 1.680, FLOPs predict 1.69x) "
            "does not reach the gate of 1.80x",
        ),
    )
    return BuildReport.model_validate(content)


@pytest.fixture
def renamed() -> Callable[[BuildReport, str], BuildReport]:
    """The same report of a model with another name."""

    def rename(report: BuildReport, name: str) -> BuildReport:
        return report.model_copy(update={"model": report.model.model_copy(update={"name": name})})

    return rename


_FAULTY = ("inductor", "b1s512", "mod")
_SLOW = (("ort-cpu", "b1s128"), ("inductor", "b1s128"), ("inductor", "b1s512"))


def _content() -> dict[str, Any]:
    latency = [_latency(*key, kind) for key in MEDIANS_MS for kind in KINDS]
    cost = [_cost(bucket, kind) for bucket in BUCKETS for kind in KINDS]
    flops = {(row.bucket, row.model): row.flops_by_part for row in cost}
    return {
        "schema_version": 2,
        "command": "mod-export build checkpoints/medium.pt -o build/medium",
        "verdict": Verdict(status="pass", reasons=()),
        "model": {
            "name": "medium",
            "architecture": "mod_transformer",
            "parameters": 40_906_240,
            "checkpoint_sha256": _sha256("medium.pt"),
            "spec": {"vocab_size": 8192, "d_model": 512, "n_layers": 12, "routing": {"capacity": 0.125}},
        },
        "environment": {
            "mod_export": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cpu", "onnx": "1.23.2", "onnxruntime": "1.31.1",
            "tensorrt": None, "tensorrt_rtx": "1.5.0.76", "cpu": "AMD EPYC 7763 64-Core Processor", "cores": 2,
            "gpu": None, "threads": 1, "load_average": [0.42, 0.61, 0.55],
        },
        "config": {
            "buckets": [[1, 128], [1, 512]], "targets": [], "seed": 0, "target": {"ort-cpu": {"dtypes": ["float32"]}},
            "latency": {"samples": 30, "warmup": 5, "threads": 1, "bootstrap": 2000, "min_speedup": 1.0},
        },
        "stages": [
            {"name": name, "status": status, "seconds": seconds, "peak_rss_bytes": rss}
            for name, status, seconds, rss in (
                ("load", "built", 0.21, 612_000_000), ("capture", "built", 14.2, 1_310_000_000),
                ("onnx", "built", 9.8, 1_420_000_000), ("passes", "reused", 0.0, None),
                ("engines", "built", 62.5, 2_950_000_000), ("validate", "built", 21.9, 1_200_000_000),
                ("measure", "built", 121.3, 1_150_000_000),
            )
        ],
        "artifacts": list(_artifacts()),
        "targets": [
            _target("ort-cpu", True, True, "onnxruntime 1.31.1"),
            _target("inductor", True, True, "torch 2.13.0, C++ compiler g++ 12.2"),
            _target("tensorrt-rtx", True, False, "builds ahead of time; running needs an NVIDIA RTX GPU"),
            _target("ort-cuda", False, False, "onnxruntime has no CUDAExecutionProvider here: no NVIDIA driver"),
            _target("tensorrt", False, False, "no NVIDIA GPU; TensorRT builds on the GPU that it runs on"),
        ],
        "parity": [_parity(*key, kind) for key in MEDIANS_MS for kind in reversed(KINDS)] + token_parity(),
        "latency": latency,
        "speedup": [speedup(*key) for key in MEDIANS_MS],
        "cost": cost,
        "structure": [
            {"path": f"graphs/{kind}-{bucket.name}.onnx", "checked": ["weights", "shapes"], "passed": True,
             "reasons": []}
            for bucket in BUCKETS for kind in KINDS
        ],
        "causality": [causality(*key, kind) for key in MEDIANS_MS for kind in reversed(KINDS)],
        "routing_maps": [routing_map("b1s128", ROUTED_LAYERS)],
        "roofline": [roofline()],
        "parts": [part for key in MEDIANS_MS for kind in KINDS
                  for part in parts(*key, kind, flops[key[1], kind], MEDIANS_MS[key][kind])],
        "generation": generation(),
    }  # fmt: skip


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _target(name: str, available: bool, ran: bool, reason: str) -> dict[str, Any]:
    return {"target": name, "available": available, "reason": reason, "ran": ran}


def _latency(target: str, bucket: str, kind: ModelKind) -> dict[str, Any]:
    rng = random.Random(f"{target} {bucket} {kind}")
    median = MEDIANS_MS[target, bucket][kind]
    samples_ms = tuple(round(median * (1 + abs(rng.gauss(0, 0.02)) + rng.gauss(0, 0.002)), 4) for _ in range(30))
    p50, p90, p99 = (float(value) for value in np.percentile(samples_ms, (50, 90, 99)))
    return {
        "target": target, "bucket": bucket, "dtype": "float32", "model": kind, "providers": PROVIDERS[target],
        "threads": 1, "warmup": 5, "samples_ms": samples_ms, "p50_ms": p50, "p90_ms": p90, "p99_ms": p99,
        "mean_ms": float(np.mean(samples_ms)), "stdev_ms": float(np.std(samples_ms, ddof=1)),
        **spread(samples_ms, p50, p90, p99),
    }  # fmt: skip


def _cost(bucket: Bucket, kind: ModelKind) -> CostRow:
    S, D, F, V, L, E = bucket.seq, 512, 1408, 8192, 12, 512
    tokens = [S // 8 if kind == "mod" and layer in ROUTED_LAYERS else S for layer in range(L)]
    parts = {
        "routing": 2 * S * D * len(ROUTED_LAYERS) if kind == "mod" else 0,
        "attention_projections": sum(8 * t * D * D for t in tokens),
        "attention": sum(4 * t * t * E for t in tokens),
        "mlp": sum(6 * t * D * F for t in tokens),
        "head": 2 * S * D * V,
        "other": 0,
    }
    return CostRow(
        model=kind, bucket=bucket.name, flops=sum(parts.values()), flops_by_part=parts,
        needed_flops=sum(parts.values()), weight_bytes=163_624_960,
        activation_bytes=sum(t * 48_000 for t in tokens), kv_bytes=sum(8 * t * D for t in tokens),
    )  # fmt: skip


def _parity(target: str, bucket: str, kind: ModelKind) -> dict[str, Any]:
    k = int(bucket.removeprefix("b1s")) // 8
    layers = [
        {
            "layer": layer,
            "k": k,
            "routed": 4 * k,
            "agreed": 4 * k,
            "overflow": 0,
            "near_ties": 0,
            "faults": 0,
            "min_margin": 0.0013 * layer,
            "score_bound": 3.1e-6 * layer,
            "worst_flip": None,
        }
        for layer in (ROUTED_LAYERS if kind == "mod" else ())
    ]
    routed, margin = sum(layer["routed"] for layer in layers), 0.0013 if layers else None
    return {
        "target": target, "bucket": bucket, "dtype": "float32", "model": kind, "reference": "torch eager float32",
        "inputs": list(INPUTS),
        "routing": {"layers": layers, "routed": routed, "agreed": routed, "near_ties": 0, "min_margin": margin,
                    "by_input": [{"input": name, "routed": routed // 4, "agreed": routed // 4} for name in INPUTS]},
        "error": {"max_abs": 6.1e-06 if kind == "mod" else 4.8e-06, "mean_abs": 4.0e-07, "max_rel": 2.2e-05,
                  "rms": 5.0e-07},
        "next_token_agreement": 1.0,
        "gate": {"max_abs": 1e-4, "near_tie": 1e-4, "next_token_agreement": 0.999, "rounding_error": 16.0,
                 "rounding_error_rms": 4.0, "max_kl": 1e-8,
                 "max_perplexity_ratio": 1.0001},
        "passed": True, "reasons": [], **judged(kind, f"engines/{target}/{kind}-{bucket}-float32.{SUFFIX[target]}"),
    }  # fmt: skip


def _artifacts() -> list[dict[str, Any]]:
    def artifact(path: str, kind: str, size: int, **fields: Any) -> dict[str, Any]:
        known = {"target": None, "model": None, "bucket": None, "dtype": "float32", "role": None}
        return {"path": path, "kind": kind, "bytes": size, "sha256": _sha256(path), **known, **fields}

    files = [artifact("graphs/weights-float32.data", "weights", 163_624_960)]
    dtypes: tuple[DType, ...] = ("float32", "float16", "bfloat16")
    for bucket in (bucket.name for bucket in BUCKETS):
        for kind in reversed(KINDS):
            one: dict[str, Any] = {"model": kind, "bucket": bucket}
            files.append(artifact(f"graphs/{kind}-{bucket}.onnx", "graph", 301_122, **one))
            for target, suffix in SUFFIX.items():
                path = f"engines/{target}/{kind}-{bucket}-float32.{suffix}"
                files.append(artifact(path, "engine", 412_033, target=target, **one))
            for dtype in dtypes:
                for arch in ("sm89", "sm120"):
                    path = f"engines/tensorrt-rtx/{kind}-{bucket}-{dtype}-{arch}.engine"
                    files.append(artifact(path, "engine", 84_215_900, target="tensorrt-rtx", **one | {"dtype": dtype}))
    return files
