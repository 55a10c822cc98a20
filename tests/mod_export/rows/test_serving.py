"""Which engines are served if none is named."""

from __future__ import annotations

import pytest
from sample_report import _decode
from sample_rows import changed, latency_row

from mod_export.rows.speed import ALONE, EngineSpeed, measured_from_rows, served_of
from mod_export.types import DType, ModelKind


def timed(ms: float, target: str = "ort-cpu", dtype: DType = "float32", **fields: str) -> EngineSpeed:
    return EngineSpeed.model_validate(
        {"model": "mod", "role": "forward", "target": target, "dtype": dtype, "ms": ms, **fields}
    )


def test_engines_are_measured_over_all_their_buckets() -> None:
    def row(target: str, bucket: str, ms: float, model: ModelKind = "mod") -> object:
        return latency_row((ms, ms), target=target, bucket=bucket, model=model)

    rows = [
        row("ort-cpu", "b1s128", 2.0), row("ort-cpu", "b1s512", 8.0), row("openvino", "b1s128", 1.0),
        row("openvino", "b1s512", 9.0), row("inductor", "b1s512", 0.5), row("ort-cpu", "b1s512", 12.0, "dense"),
    ]  # fmt: skip
    steps = [_decode(1, 2.0, 3.0, (1.4, 1.6)), _decode(8, 8.0, 12.0, (1.4, 1.6))]
    found = {(timing.model, timing.role, timing.target): timing.ms for timing in measured_from_rows(rows, steps)}  # type: ignore[arg-type]
    # An engine that was measured in only one of two buckets is left out.
    assert found == {
        ("mod", "forward", "ort-cpu"): pytest.approx(4),
        ("mod", "forward", "openvino"): pytest.approx(3),
        ("dense", "forward", "ort-cpu"): pytest.approx(12),
        ("mod", "decode", "ort-cpu"): pytest.approx(4),
        ("dense", "decode", "ort-cpu"): pytest.approx(6),
    }


def test_the_fastest_that_met_its_gates_is_served() -> None:
    measured = [timed(2.0), timed(1.0, "openvino", "bfloat16"), timed(1.5, "openvino"), timed(3.0, role="decode")]
    rows, text = served_of(measured, ())
    assert (rows.target, rows.dtype, rows.ms) == ("openvino", "bfloat16", 1.0)
    assert rows.reason == "the fastest of those that met their gates; openvino float32 1.5 ms, ort-cpu float32 2 ms"
    assert (text.role, text.target, text.reason) == ("decode", "ort-cpu", ALONE)
    refused: list[tuple[ModelKind, bool, str, DType]] = [("mod", False, "openvino", "bfloat16")]
    assert next(iter(served_of(measured, refused))).dtype == "float32"
    # The engine that writes text is another one.
    assert served_of(measured, [("mod", True, "openvino", "bfloat16")])[0].dtype == "bfloat16"
    assert served_of([], ()) == []
    assert served_of([changed(timed(1.0), target="a"), changed(timed(1.0), target="b")], ())[0].target == "a"
