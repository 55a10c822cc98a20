"""A complete report as a build writes it: two targets that ran, one built for another machine, two missing."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytest
from sample_rows import causality_row, changed, cost_row, latency_row, parity_row, part_row, speedup_row

from mod_export.report.charts import MODELS
from mod_export.rows.correctness import (
    ErrorNumbers,
    InputAgreement,
    LayerAgreement,
    Located,
    MapLayer,
    ParityRow,
    RoutingAgreement,
    RoutingMap,
    StructureRow,
    TextQuality,
)
from mod_export.rows.cost import CostRow, PartRow, Roofline
from mod_export.rows.report import Artifact, BuildReport, ReportedModel, Stage, Target, Verdict
from mod_export.rows.speed import (
    Compared,
    Control,
    DecodeRow,
    FirstTokenRow,
    GenerationReport,
    LatencyRow,
    QualityRow,
    StepsCompared,
    TextsRow,
)
from mod_export.types import KINDS, ModelKind

BUCKETS = {"b1s128": 128, "b1s512": 512}
MEDIANS_MS = {
    ("ort-cpu", "b1s128"): {"dense": 171.0, "mod": 113.0},
    ("ort-cpu", "b1s512"): {"dense": 672.0, "mod": 401.0},
    ("inductor", "b1s128"): {"dense": 189.0, "mod": 131.0},
    ("inductor", "b1s512"): {"dense": 746.0, "mod": 448.0},
}
SPEEDUPS = {
    ("ort-cpu", "b1s128"): (1.515055, (1.504940, 1.527600), 1.660997),
    ("ort-cpu", "b1s512"): (1.678734, (1.666731, 1.697393), 1.686406),
    ("inductor", "b1s128"): (1.442120, (1.431462, 1.450171), 1.660997),
    ("inductor", "b1s512"): (1.667580, (1.648390, 1.681934), 1.686406),
}
PROVIDERS = {"ort-cpu": ("CPUExecutionProvider",), "inductor": ("AOTInductor cpu",)}
SUFFIX = {"ort-cpu": "onnx", "inductor": "pt2"}
INPUTS = ("padded", "random", "text", "ties")
ROUTED_LAYERS = (1, 3, 5, 7, 9, 11)
PARTS = ("routing", "attention_projections", "attention", "mlp", "head", "other")
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


@pytest.fixture(scope="session")
def report() -> BuildReport:
    """A report that meets all gates."""
    cost = [_cost(bucket, kind) for bucket in BUCKETS for kind in MODELS]
    flops = {(row.bucket, row.model): row.flops_by_part for row in cost}
    return BuildReport(
        command="mod-export build checkpoints/medium.pt -o build/medium",
        verdict=Verdict(status="pass", reasons=()),
        model=ReportedModel(
            name="medium", architecture="mod_transformer", parameters=40_906_240,
            checkpoint_sha256=_sha256("medium.pt"),
            spec={"vocab_size": 8192, "d_model": 512, "n_layers": 12, "routing": {"capacity": 0.125}},
        ),
        environment={
            "mod_export": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cpu", "onnx": "1.23.2", "onnxruntime": "1.31.1",
            "tensorrt": None, "tensorrt_rtx": "1.5.0.76", "cpu": "AMD EPYC 7763 64-Core Processor", "cores": 2,
            "gpu": None, "threads": 1, "load_average": [0.42, 0.61, 0.55],
        },
        config={
            "buckets": [[1, 128], [1, 512]], "targets": [], "seed": 0, "target": {"ort-cpu": {"dtypes": ["float32"]}},
            "latency": {"samples": 30, "warmup": 5, "threads": 1, "bootstrap": 2000, "min_speedup": 1.0},
        },
        stages=(
            Stage(name="load", status="built", seconds=0.21, peak_rss_bytes=612_000_000),
            Stage(name="passes", status="reused", seconds=0.0, peak_rss_bytes=None),
            Stage(name="engines", status="built", seconds=62.5, peak_rss_bytes=2_950_000_000),
        ),
        artifacts=tuple(_artifacts()),
        targets=(
            Target(target="ort-cpu", available=True, ran=True, reason="onnxruntime 1.31.1"),
            Target(target="inductor", available=True, ran=True, reason="torch 2.13.0, C++ compiler g++ 12.2"),
            Target(target="tensorrt-rtx", available=True, ran=False,
                   reason="builds ahead of time; running needs an NVIDIA RTX GPU"),
            Target(target="ort-cuda", available=False, ran=False,
                   reason="onnxruntime has no CUDAExecutionProvider here: no NVIDIA driver"),
            Target(target="tensorrt", available=False, ran=False,
                   reason="no NVIDIA GPU; TensorRT builds on the GPU that it runs on"),
        ),
        parity=(*(_parity(*key, kind) for key in MEDIANS_MS for kind in KINDS), *_token_parity()),
        latency=tuple(_latency(*key, kind) for key in MEDIANS_MS for kind in MODELS),
        speedup=tuple(
            speedup_row(
                measured, target=target, bucket=bucket, ci95=ci95, predicted_flops=predicted,
                efficiency=measured / predicted, gate=1.0 if bucket == "b1s512" else None,
                passed=True if bucket == "b1s512" else None, predicted_roofline=predicted - 0.07,
                control=Control(measured=1.002, ci99=(0.996, 1.009), covers_one=True),
            )
            for (target, bucket), (measured, ci95, predicted) in SPEEDUPS.items()
        ),
        cost=tuple(cost),
        structure=tuple(
            StructureRow(path=f"graphs/{kind}-{bucket}.onnx", checked=("weights", "shapes"), passed=True, reasons=())
            for bucket in BUCKETS for kind in MODELS
        ),
        # MoD looks ahead; its dense baseline does not.
        causality=tuple(
            causality_row(
                target=target, bucket=bucket, model=kind, suffixes=12, causal=kind == "dense",
                earliest_change=37 if kind == "mod" else None, largest_change=4.7 if kind == "mod" else 9.5e-07,
                statement=STATEMENTS[kind],
            )
            for target, bucket in MEDIANS_MS for kind in KINDS
        ),
        routing_maps=(_routing_map(),),
        roofline=(
            Roofline(
                dtype="float32", threads=1, gemm_gflops=78.4, bandwidth_gbs=11.9, measured_at="2026-11-21 16:40",
                method="best of 20 products of 1024 x 1024, and of 20 copies of 256 MiB",
            ),
        ),
        parts=tuple(
            part for key in MEDIANS_MS for kind in MODELS
            for part in _parts(*key, kind, flops[key[1], kind], MEDIANS_MS[key][kind])
        ),
        generation=_generation(),
    )  # fmt: skip


@pytest.fixture(scope="session")
def failed_report(report: BuildReport) -> BuildReport:
    """The same build with a routing fault in one layer of one engine, and a speed-up below its gate."""
    reason = "text: layer 5 routing: 2 tokens differ by more than a near-tie"
    faulty = ("inductor", "b1s512", "mod")
    parity = [
        _faulty(row, reason) if (row.target, row.bucket, row.model) == faulty else row for row in report.parity
    ]  # fmt: skip
    first, fast, lost, slow = report.speedup
    unsure = changed(
        first, verdict="inconclusive", reason="the control is 1.040 [1.020, 1.060] and should be 1", measured=1.03,
        ci95=(0.97, 1.09), control=Control(measured=1.04, ci99=(1.02, 1.06), covers_one=False),
    )  # fmt: skip
    lost = changed(
        lost, verdict="not faster", reason="the head takes 61 % of the FLOPs, and MoD does not touch it",
        measured=1.004, ci95=(0.999, 1.008), predicted_roofline=1.01,
    )  # fmt: skip
    flags = ("drift: the last third of the samples is 8.3% slower than the first", "7 of 30 samples are outliers")
    reasons = (
        f"inductor b1s512 float32 mod: parity: {reason}",
        "inductor b1s512 float32: speed-up 1.665x (95 % interval 1.650 to 1.680, FLOPs predict 1.69x) "
        "does not reach the gate of 1.80x",
    )
    *latency, last = report.latency
    return changed(
        report,
        verdict=Verdict(status="fail", reasons=reasons),
        parity=tuple(parity),
        speedup=(unsure, fast, lost, changed(slow, gate=1.8, passed=False)),
        latency=(*latency, changed(last, flags=flags, drift=0.083, outliers=7, stable=False)),
    )


NO_BASELINE = "there is no dense baseline; give one with --baseline dense.pt"


@pytest.fixture(scope="session")
def alone_report(report: BuildReport) -> BuildReport:
    """The same build without a dense baseline."""
    tables = ("artifacts", "parity", "causality", "latency", "cost", "parts")
    mod_rows = {name: tuple(row for row in getattr(report, name) if row.model != "dense") for name in tables}
    structure = tuple(row for row in report.structure if "dense" not in row.path)
    generation = changed(
        report.generation,
        texts=tuple(row for row in report.generation.texts if row.model == "mod"),
        decode=tuple(_without_dense(row) for row in report.generation.decode),
        first_token=tuple(_without_dense(row) for row in report.generation.first_token),
    )
    return changed(report, **mod_rows, structure=structure, speedup=(), generation=generation, not_compared=NO_BASELINE)


def _without_dense(row: Any) -> Any:
    mod_values = {name: {"mod": value["mod"]} for name, value in row if isinstance(value, dict) and "dense" in value}
    return changed(row, **mod_values, compared=None)


def _faulty(row: ParityRow, reason: str) -> ParityRow:
    layers, by_input = list(row.routing.layers), list(row.routing.by_input)
    layers[2] = changed(layers[2], agreed=253, near_ties=1, faults=2, worst_flip=0.031)
    by_input[2] = changed(by_input[2], agreed=by_input[2].agreed - 3)
    routing = changed(
        row.routing, layers=tuple(layers), by_input=tuple(by_input), agreed=row.routing.agreed - 3, near_ties=1
    )
    located = Located(layer="layers.5.router", operator="node_linear_31", input="text", error=0.031, allowed=4.4e-06)
    error = ErrorNumbers(max_abs=3.1e-3, mean_abs=2e-6, max_rel=0.04, rms=3e-6)
    return changed(row, routing=routing, passed=False, reasons=(reason,), error=error, located=located)


def renamed(report: BuildReport, name: str) -> BuildReport:
    """The same report with another model name."""
    return changed(report, model=changed(report.model, name=name))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _latency(target: str, bucket: str, kind: ModelKind) -> LatencyRow:
    rng = random.Random(f"{target} {bucket} {kind}")
    median = MEDIANS_MS[target, bucket][kind]
    samples_ms = tuple(round(median * (1 + abs(rng.gauss(0, 0.02)) + rng.gauss(0, 0.002)), 4) for _ in range(30))
    p25, p50, p75, p90, p99 = (float(value) for value in np.percentile(samples_ms, (25, 50, 75, 90, 99)))
    mean, stdev = float(np.mean(samples_ms)), float(np.std(samples_ms, ddof=1))
    return latency_row(
        samples_ms, target=target, bucket=bucket, model=kind, providers=PROVIDERS[target], warmup=5, p50_ms=p50,
        p90_ms=p90, p99_ms=p99, mean_ms=mean, stdev_ms=stdev, p50_ci95=(0.997 * p50, 1.004 * p50),
        p90_ci95=(0.995 * p90, 1.008 * p90), p99_ci95=(0.99 * p99, 1.02 * p99), cv=stdev / mean, iqr_ms=p75 - p25,
        drift=0.004, outliers=1,
    )  # fmt: skip


def _cost(bucket: str, kind: ModelKind) -> CostRow:
    S, D, F, V, L, E = BUCKETS[bucket], 512, 1408, 8192, 12, 512
    tokens = [S // 8 if kind == "mod" and layer in ROUTED_LAYERS else S for layer in range(L)]
    parts = {
        "routing": 2 * S * D * len(ROUTED_LAYERS) if kind == "mod" else 0,
        "attention_projections": sum(8 * t * D * D for t in tokens),
        "attention": sum(4 * t * t * E for t in tokens),
        "mlp": sum(6 * t * D * F for t in tokens),
        "head": 2 * S * D * V,
        "other": 0,
    }
    return cost_row(
        sum(parts.values()), model=kind, bucket=bucket, flops_by_part=parts, weight_bytes=163_624_960,
        activation_bytes=sum(t * 48_000 for t in tokens), kv_bytes=sum(8 * t * D for t in tokens),
    )  # fmt: skip


def _parts(target: str, bucket: str, kind: ModelKind, flops_by_part: dict[str, int], total_ms: float) -> list[PartRow]:
    """Work and profiled times of each part; the torch profile cannot tell routing."""
    weights = {part: flops_by_part[part] / 72e6 for part in PARTS} | {"other": 0.03 * total_ms}
    scale = total_ms / sum(weights.values())
    measured_ms = {part: scale * weights[part] for part in PARTS if (target, part) != ("inductor", "routing")}
    return [
        part_row(
            target=target, bucket=bucket, model=kind, part=part, flops=flops_by_part[part],
            bytes=4_000_000 + flops_by_part[part] // 60, predicted_ms=flops_by_part[part] / 78.4e6,
            measured_ms=measured_ms.get(part), share=measured_ms[part] / total_ms if part in measured_ms else None,
            profiler="ONNX Runtime" if target == "ort-cpu" else "torch.profiler",
        )
        for part in PARTS
    ]  # fmt: skip


def _layer(number: int, k: int, routed: int, **fields: Any) -> LayerAgreement:
    """Selections of one layer, all of which agree with the reference."""
    usual = {"overflow": 0, "near_ties": 0, "faults": 0, "min_margin": 0.0013, "score_bound": 4e-05, "worst_flip": None}
    return LayerAgreement(**{"layer": number, "k": k, "routed": routed, "agreed": routed, **usual, **fields})


def _judged(
    kind: ModelKind, layers: list[LayerAgreement], by_input: tuple[InputAgreement, ...] = (), **fields: Any
) -> ParityRow:
    """A parity row that passed, in whose layers all selections agree with the reference."""
    routed = sum(layer.agreed for layer in layers)
    margin = 0.0013 if layers and by_input else None
    text = TextQuality(
        tokens=2032, perplexity=18.2914, reference_perplexity=18.2914, own_perplexity=18.2914, next_token_agreement=1.0
    )
    return parity_row(
        model=kind, text=text, kl=3.2e-12, ties_exact=True if kind == "mod" else None,
        routing=RoutingAgreement(
            layers=tuple(layers), routed=routed, agreed=routed, near_ties=0, min_margin=margin, by_input=by_input
        ),
        **fields,
    )  # fmt: skip


def _parity(target: str, bucket: str, kind: ModelKind) -> ParityRow:
    k, mod = BUCKETS[bucket] // 8, kind == "mod"
    numbers = ROUTED_LAYERS if mod else ()
    layers = [_layer(number, k, 4 * k, min_margin=0.0013 * number, score_bound=3.1e-6 * number) for number in numbers]
    batch = k * len(layers)
    return _judged(
        kind, layers, tuple(InputAgreement(input=name, routed=batch, agreed=batch) for name in INPUTS),
        target=target, bucket=bucket, inputs=INPUTS,
        artifact=f"engines/{target}/{kind}-{bucket}-float32.{SUFFIX[target]}",
        error=ErrorNumbers(max_abs=6.1e-06 if mod else 4.8e-06, mean_abs=4.0e-07, max_rel=2.2e-05, rms=5.0e-07),
        rounding_error=2.1e-06 if mod else 1.9e-06, allowed_max_abs=3.36e-05 if mod else 3.04e-05,
    )  # fmt: skip


def _token_parity() -> list[ParityRow]:
    """Parity of the engines that write text: two buckets of prompts, and two of steps."""
    buckets = (("prefill", "b1s128"), ("prefill", "b1s512"), ("decode", "b1s512"), ("decode", "b8s512"))
    return [
        _judged(
            kind, [_layer(number, 64, 60 + number, overflow=3 * number) for number in (1, 3) if kind == "mod"],
            role=role, bucket=bucket, reference="eager float32", inputs=("text", "random"),
            artifact=f"engines/ort-cpu/{kind}-{role}-{bucket}-float32.onnx", rounding_error=2.5e-05,
            error=ErrorNumbers(max_abs=2.7e-05, mean_abs=2.8e-06, max_rel=2.6e-06, rms=3.9e-06),
            allowed_max_abs=4.0e-04,
        )
        for kind in KINDS for role, bucket in buckets
    ]  # fmt: skip


def _artifacts() -> list[Artifact]:
    def artifact(path: str, kind: str, size: int, **fields: Any) -> Artifact:
        defaults = {"target": None, "model": None, "bucket": None, "dtype": "float32", "role": None}
        return Artifact(**{"path": path, "kind": kind, "bytes": size, "sha256": _sha256(path), **defaults, **fields})

    files = [artifact("graphs/weights-float32.data", "weights", 163_624_960)]
    for bucket in BUCKETS:
        for kind in KINDS:
            one: dict[str, Any] = {"model": kind, "bucket": bucket}
            files.append(artifact(f"graphs/{kind}-{bucket}.onnx", "graph", 301_122, **one))
            for target, suffix in SUFFIX.items():
                path = f"engines/{target}/{kind}-{bucket}-float32.{suffix}"
                files.append(artifact(path, "engine", 412_033, target=target, **one))
            for dtype in ("float32", "float16"):
                path = f"engines/tensorrt-rtx/{kind}-{bucket}-{dtype}-sm89.engine"
                files.append(artifact(path, "engine", 84_215_900, target="tensorrt-rtx", **one | {"dtype": dtype}))
    return files


def _routing_map() -> RoutingMap:
    """A text of 128 characters, of which every layer selects the best eighth."""
    tokens = [*(TEXT * 2)[:128]]
    rng = random.Random("b1s128")
    layers = []
    for layer in ROUTED_LAYERS:
        scores = [
            round(rng.gauss(0, 1) + (2 if token.isalpha() and before == " " else 0), 4)
            for token, before in zip(tokens, [" ", *tokens], strict=False)
        ]
        best = sorted(range(128), key=lambda position, scores=scores: -scores[position])[:16]
        layers.append(MapLayer(layer=layer, k=16, routed=tuple(sorted(best)), scores=tuple(scores)))
    return RoutingMap(bucket="b1s128", tokens=tuple(tokens), layers=tuple(layers))


def _decode(texts: int, mod_ms: float, dense_ms: float, ci95: tuple[float, float]) -> DecodeRow:
    """Measured steps of one bucket."""
    ms: dict[ModelKind, float] = {"mod": mod_ms, "dense": dense_ms}
    selected = {"1": 0.1042, "3": 0.0833}
    return DecodeRow(
        target="ort-cpu", bucket=f"b{texts}s512", dtype="float32", threads=1, positions=48,
        texts=max(4, texts), text="held_out", ms=ms,
        tokens_per_second={kind: 1e3 * texts / step for kind, step in ms.items()}, selected=selected,
        executed={site: round(1 - (1 - share) ** texts, 4) for site, share in selected.items()},
        least_bytes={"mod": 8_398_768, "dense": 14_889_728}, predicted_ms={"mod": 0.583, "dense": 1.034},
        kv_bytes={"mod": 1_179_648 * texts, "dense": 2_097_152 * texts},
        compared=StepsCompared(
            measured=dense_ms / mod_ms, ci95=ci95, verdict="faster" if ci95[0] > 1 else "inconclusive",
            predicted_bytes=1.7728, efficiency=dense_ms / mod_ms / 1.7728,
            routed_kv_bytes={"mod": 131_072 * texts, "dense": 1_048_576 * texts},
        ),
    )  # fmt: skip


def _first_token(tokens: int, mod_ms: float, dense_ms: float, ci95: tuple[float, float]) -> FirstTokenRow:
    return FirstTokenRow(
        target="ort-cpu", bucket=f"b1s{tokens}", tokens=tokens, dtype="float32", ms={"mod": mod_ms, "dense": dense_ms},
        compared=Compared(measured=dense_ms / mod_ms, ci95=ci95, verdict="faster" if ci95[0] > 1 else "inconclusive"),
    )  # fmt: skip


def _generation() -> GenerationReport:
    """A model that writes: two decode buckets, one of which is not certainly faster, and two of prompts."""
    return GenerationReport(
        window=512, capacity={"1": 64, "3": 64},
        texts=tuple(
            TextsRow(target="ort-cpu", bucket=bucket, dtype="float32", model=kind, texts=4, tokens=192, identical=4,
                     first_difference=None, same=192)
            for kind in KINDS for bucket in ("b1s512", "b8s512")
        ),
        decode=(_decode(1, 0.5127, 0.8313, (1.516, 1.732)), _decode(8, 3.477, 3.579, (0.96, 1.09))),
        first_token=(_first_token(128, 8.22, 9.88, (0.99, 1.31)), _first_token(512, 27.6, 49.9, (1.74, 1.83))),
        quality=QualityRow(
            tokens=2044, window=512, perplexity=3.137692, own_perplexity=3.093790,
            wanted={"1": 0.1074, "3": 0.1489}, selected={"1": 0.1074, "3": 0.1245}, overflow={"1": 0, "3": 50},
        ),
    )  # fmt: skip
