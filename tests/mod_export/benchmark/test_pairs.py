"""Which engines are compared, and that both are run on the same input in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mod_export.benchmark.latency import engine_pairs, measure_pair
from mod_export.build_folder.manifest import open_folder
from mod_export.config import BuildConfig
from mod_export.errors import EngineError
from mod_export.types import Bucket, Engine

BUCKET = Bucket(1, 64)


def engine(**fields: Any) -> Engine:
    usual: dict[str, Any] = {"target": "ort-cpu", "model": "mod", "bucket": BUCKET, "dtype": "float32", "path": "p"}
    return Engine(**usual | fields)


def test_a_pair_is_alike_in_all_but_the_model() -> None:
    mod, dense = engine(), engine(model="dense")
    half = engine(dtype="float16"), engine(dtype="float16", model="dense")
    assert engine_pairs([mod, half[1], dense, half[0]]) == {
        mod.setting: {"mod": mod, "dense": dense},
        half[0].setting: {"mod": half[0], "dense": half[1]},
    }


@pytest.mark.parametrize(
    "other", [{"target": "inductor"}, {"bucket": Bucket(2, 64)}, {"dtype": "float16"}, {"model": "mod"}]
)
def test_what_has_no_twin_is_left_out(other: dict[str, Any]) -> None:
    assert engine_pairs([engine(), engine(**{"model": "dense"} | other)]) == {}
    assert engine_pairs([]) == {}


def test_both_are_measured(built: Path, config: BuildConfig) -> None:
    (setting, pair), _ = engine_pairs(open_folder(built, verify=False).engines).items()
    rows = measure_pair(built, setting, pair, 256, config)
    assert [row.model for row in rows] == ["mod", "dense"]
    for row in rows:
        assert (row.target, row.bucket, row.dtype) == ("ort-cpu", "b1s64", "float32")
        # Whole blocks of four rounds with two samples each.
        assert (row.threads, len(row.samples_ms)) == (1, 8)
        assert row.warmup >= 2
        assert row.providers == ("CPUExecutionProvider",)
        assert all(sample > 0 for sample in row.samples_ms)


def test_an_engine_that_does_not_load(built_copy: Path, config: BuildConfig) -> None:
    (setting, pair), _ = engine_pairs(open_folder(built_copy, verify=False).engines).items()
    (built_copy / pair["dense"].path).write_bytes(b"nonsense")
    with pytest.raises(EngineError, match=r"dense-b1s64-float32\.onnx: ONNX Runtime refuses this graph"):
        measure_pair(built_copy, setting, pair, 256, config)
