"""Steps of both models in turns: what a row of the report says is what the text did."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from observing import observed
from writing import WINDOW

from mod_export.benchmark.decoding import Text, decode_row, first_token_row, read_text
from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.results.generation import DecodeRow, StepBytes
from mod_export.runtime.generate.decoder import Decoder, Prompts
from mod_export.sources.checkpoint import Model
from mod_export.sources.protocol import GeneratingModel
from mod_export.stages.context import step_bytes
from mod_export.types import KINDS, Bucket, Engine, ModelKind

SEQ = 16
"""Of the texts: what a prompt holds."""


@contextlib.contextmanager
def opened(
    folder: Path, config: BuildConfig, bucket: Bucket
) -> Iterator[tuple[dict[ModelKind, Prompts], dict[ModelKind, Decoder]]]:
    with contextlib.ExitStack() as stack:

        def load(kind: ModelKind, role: str, one: Bucket) -> Any:
            path = f"engines/ort-cpu/{kind}-{role}-{one.name}-float32.onnx"
            weights = "graphs/weights-float32.data"
            engine = Engine(target="ort-cpu", model=kind, bucket=one, dtype="float32", path=path, weights=weights)
            return stack.enter_context(ENGINES["ort-cpu"].load(folder, engine, config, 1))

        prompts = {kind: Prompts({SEQ: load(kind, "prefill", Bucket(1, SEQ))}) for kind in KINDS}
        yield prompts, {kind: Decoder(load(kind, "decode", bucket), bucket.seq, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def models(writing_model: Model) -> dict[ModelKind, GeneratingModel]:
    return {kind: writing_model.of_kind(kind).generating(WINDOW) for kind in KINDS}


def texts(rows: int) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 256, (rows, SEQ))


def decided(model: GeneratingModel, ids_BS: np.ndarray) -> dict[int | str, np.ndarray]:
    """Which tokens run, as the eager model says."""
    ran = {}
    with torch.no_grad():
        _, found = observed(model.loaded.module(), torch.from_numpy(ids_BS), torch.full((len(ids_BS),), SEQ))
    for site, one in found.items():
        ran[site] = np.zeros(ids_BS.shape, dtype=bool)
        for row, (index_K, live_K) in enumerate(zip(one.index_BK, one.live_BK, strict=True)):
            ran[site][row, index_K[live_K].numpy()] = True
    return ran


@pytest.fixture(scope="module", params=[1, 3])
def measured(
    request: pytest.FixtureRequest, written: Path, writing_config: BuildConfig, models: dict[ModelKind, GeneratingModel]
) -> tuple[Text, DecodeRow]:
    bucket = Bucket(request.param, WINDOW)
    with opened(written, writing_config, bucket) as (prompts, decoders):
        text = read_text(texts(bucket.batch), prompts, {kind: models[kind].sites for kind in KINDS})
        row = decode_row(
            decoders, text, 100, target="ort-cpu", bucket=bucket.name, dtype="float32", threads=1, seed=0,
            least={kind: step_bytes(models[kind], bucket) for kind in KINDS}, bandwidth_gbs=10.0,
        )  # fmt: skip
    return text, row


def test_a_text_is_what_both_models_read(
    measured: tuple[Text, DecodeRow], models: dict[ModelKind, GeneratingModel]
) -> None:
    text, _ = measured
    expected = decided(models["mod"], text.ids_BS)
    assert list(text.ran["mod"]) == list(expected)
    for site, ran_BS in expected.items():
        np.testing.assert_array_equal(text.ran["mod"][site], ran_BS)
    assert text.ran["dense"] == {}
    for kind in KINDS:
        assert [kept.length for kept in text.kept[kind]] == [SEQ] * len(text.ids_BS)
    assert all(kept.count_N is None for kept in text.kept["dense"])


def test_executed_and_share_are_those_of_the_text(measured: tuple[Text, DecodeRow]) -> None:
    """All positions but the first were timed: so they can be counted."""
    text, row = measured
    assert row.positions == SEQ - 1
    for site, ran_BS in text.ran["mod"].items():
        assert row.executed[str(site)] == pytest.approx(ran_BS[:, 1:].any(0).mean())
        assert row.selected[str(site)] == pytest.approx(ran_BS[:, 1:].mean())
    assert max(row.selected.values()) > 0
    assert min(row.selected.values()) < 1


def test_times_and_their_bound(measured: tuple[Text, DecodeRow]) -> None:
    text, row = measured
    B = len(text.ids_BS)
    assert all(0 < ms < 1000 for ms in row.ms.values())
    assert row.tokens_per_second == pytest.approx({kind: 1e3 * B / ms for kind, ms in row.ms.items()})
    assert row.measured == pytest.approx(row.ms["dense"] / row.ms["mod"])
    assert row.ci95[0] <= row.measured <= row.ci95[1]
    assert row.predicted_bytes == row.least_bytes["dense"] / row.least_bytes["mod"] > 1
    assert row.efficiency == pytest.approx(row.measured / row.predicted_bytes)
    assert row.predicted_ms == {kind: size / 10.0 / 1e6 for kind, size in row.least_bytes.items()}


def test_a_routed_layer_has_a_cache_of_its_capacity(measured: tuple[Text, DecodeRow]) -> None:
    text, row = measured
    B, slot = len(text.ids_BS), 2 * 2 * 8 * 4
    assert row.kv_bytes == {"mod": B * (18 + WINDOW + 18) * slot, "dense": B * 3 * WINDOW * slot}
    assert row.routed_kv_bytes == {"mod": B * 36 * slot, "dense": B * 2 * WINDOW * slot}
    assert row.routed_kv_bytes["mod"] <= (18 / WINDOW + 0.02) * row.routed_kv_bytes["dense"]


def test_without_a_roofline_there_is_no_bound_in_time(
    written: Path, writing_config: BuildConfig, models: dict[ModelKind, GeneratingModel]
) -> None:
    bucket = Bucket(1, WINDOW)
    with opened(written, writing_config, bucket) as (prompts, decoders):
        text = read_text(texts(1), prompts, {kind: models[kind].sites for kind in KINDS})
        row = decode_row(
            decoders, text, 5, target="ort-cpu", bucket=bucket.name, dtype="float32", threads=1, seed=0,
            least={kind: step_bytes(models[kind], bucket) for kind in KINDS}, bandwidth_gbs=None,
        )  # fmt: skip
        first = first_token_row(prompts, text.ids_BS[0], target="ort-cpu", bucket="b1s16", dtype="float32")
    assert row.predicted_ms is None
    assert row.positions == 5
    assert (first.tokens, first.dtype) == (SEQ, "float32")
    assert first.measured == first.ms["dense"] / first.ms["mod"] > 0


def test_bytes_of_a_step_by_what_was_executed(models: dict[ModelKind, GeneratingModel]) -> None:
    assert StepBytes(always=100, sites={"1": 10, "3": 20}).of({"1": 0.5, "3": 0.25, "other": 1.0}) == 110
    assert StepBytes(always=100, sites={}).of({"1": 1.0}) == 100
    bucket = Bucket(3, WINDOW)
    found = {kind: step_bytes(models[kind], bucket) for kind in KINDS}
    assert set(found["mod"].sites) == {"0", "2"}
    everything = found["mod"].of({"0": 1.0, "2": 1.0})
    assert everything == models["mod"].least_bytes(3, WINDOW, {0: 1.0, 2: 1.0})
    # Where everybody runs, routers are read as well, and a routed layer's cache is shorter.
    model, twin = models["mod"].loaded.weights, models["dense"].loaded.weights
    routers = sum(4 * weight.numel() for name, weight in model.items() if name not in twin)
    assert everything - routers == found["dense"].of({}) - 3 * 2 * (WINDOW - 18) * 2 * 2 * 8 * 4
