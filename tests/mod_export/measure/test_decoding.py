"""Interleaved steps and prompts of both models: the rows of the report agree with what the text did."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from observing import observed
from writing import SPEC, WINDOW

from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.measure.decode import _steps, measure_prompts, measure_steps, read_text, step_bytes
from mod_export.model.model import GeneratingModel, Model
from mod_export.pipeline.build import Build
from mod_export.rows.speed import StepBytes
from mod_export.types import KINDS, Bucket, Engine, ModelKind, Role, pairs_of

LIMITS = ENGINES["ort-cpu"].limits
SEQ = 16
"""Tokens of each text, all of which a prompt holds."""


@pytest.fixture(scope="module")
def context(written: Path, writing_config: BuildConfig) -> Build:
    generation = writing_config.generation.model_copy(update={"measured_tokens": 100})
    return Build.open(written, writing_config.model_copy(update={"generation": generation}), (), verify=False)


@pytest.fixture(scope="module")
def models(writing_model: Model) -> dict[ModelKind, GeneratingModel]:
    return {kind: {"mod": writing_model, "dense": writing_model.dense()}[kind].generating(WINDOW) for kind in KINDS}


def pair_of(context: Build, role: Role, bucket: Bucket) -> dict[ModelKind, Engine]:
    pairs = pairs_of(context.runnable(role))
    return next(pair for setting, pair in pairs.items() if setting.bucket == bucket)


def texts(rows: int) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 256, (rows, SEQ))


def decided(model: GeneratingModel, ids_BS: np.ndarray) -> dict[int | str, np.ndarray]:
    """Masks of the tokens that run at each site of the eager model."""
    ran = {}
    with torch.no_grad():
        _, found = observed(model.whole_rows.module(), torch.from_numpy(ids_BS), torch.full((len(ids_BS),), SEQ))
    for site, selection in found.items():
        ran[site] = np.zeros(ids_BS.shape, dtype=bool)
        for row, (index_K, live_K) in enumerate(zip(selection.index_BK, selection.live_BK, strict=True)):
            ran[site][row, index_K[live_K].numpy()] = True
    return ran


def test_a_text_is_what_both_models_read(context: Build, models: dict[ModelKind, GeneratingModel]) -> None:
    found = context.decoding_engines()
    expected = decided(models["mod"], texts(2))
    with contextlib.ExitStack() as opened:
        prompts = {kind: opened.enter_context(found.prompts(kind, "ort-cpu", "float32")) for kind in KINDS}
        text = read_text(texts(2), prompts, {kind: models[kind].sites for kind in KINDS})
    assert list(text.ran["mod"]) == list(expected)
    for site, ran_BS in expected.items():
        np.testing.assert_array_equal(text.ran["mod"][site], ran_BS)
    assert text.ran["dense"] == {}
    for kind in KINDS:
        assert [kept.length for kept in text.kept[kind]] == [SEQ] * 2
    assert all(kept.count_N is None for kept in text.kept["dense"])


def test_steps_leave_the_text_in_the_cache(context: Build, models: dict[ModelKind, GeneratingModel]) -> None:
    """Also where a row keeps nothing and writes to a slot that holds a later token of its text."""
    found, pair = context.decoding_engines(), pair_of(context, "decode", Bucket(3, WINDOW))
    with contextlib.ExitStack() as opened:
        prompts = {kind: opened.enter_context(found.prompts(kind, "ort-cpu", "float32")) for kind in KINDS}
        decoders = {kind: opened.enter_context(found.decoder(pair[kind])) for kind in KINDS}
        text = read_text(texts(3), prompts, {kind: models[kind].sites for kind in KINDS})
        _, ran_PBN = _steps(decoders, text, np.arange(1, SEQ), 0, 1.0)
        # In some step a row ran and another did not, so the layer was executed and the other wrote.
        assert (ran_PBN.any(1) & ~ran_PBN.all(1)).any()
        for kind, decoder in decoders.items():
            for row, state in enumerate(text.kept[kind]):
                for name, row_GLE in state.rows.items():
                    site = next((s for s in text.ran[kind] if str(s) == name.rpartition("_")[2]), None)
                    used = SEQ if site is None else int(text.ran[kind][site][row].sum())
                    found_GLE = decoder.cache[name][row][:, :used]
                    np.testing.assert_array_equal(found_GLE, row_GLE[:, :used])


@pytest.mark.parametrize(("rows", "bandwidth_gbs"), [(1, None), (3, 10.0)])
def test_steps_are_those_of_the_text(
    context: Build, models: dict[ModelKind, GeneratingModel], rows: int, bandwidth_gbs: float | None
) -> None:
    bucket = Bucket(rows, WINDOW)
    row = measure_steps(
        context.decoding_engines(),
        pair_of(context, "decode", bucket),
        texts(rows)[None],
        {kind: models[kind].sites for kind in KINDS},
        {kind: step_bytes(models[kind], bucket) for kind in KINDS},
        LIMITS,
    ).predicted(bandwidth_gbs)
    assert (row.setting.role, row.setting.bucket) == ("decode", Bucket(rows, WINDOW))
    # Every position but the first was timed.
    assert row.positions == SEQ - 1
    for site, ran_BS in decided(models["mod"], texts(rows)).items():
        assert row.executed[str(site)] == pytest.approx(ran_BS[:, 1:].any(0).mean())
        assert row.selected[str(site)] == pytest.approx(ran_BS[:, 1:].mean())
    assert max(row.selected.values()) > 0
    assert min(row.selected.values()) < 1
    assert all(0 < ms < 1000 for ms in row.ms.values())
    assert row.tokens_per_second == pytest.approx({kind: 1e3 * rows / ms for kind, ms in row.ms.items()})
    found = row.compared
    assert found is not None
    assert found.measured == pytest.approx(row.ms["dense"] / row.ms["mod"])
    assert found.ci95[0] <= found.measured <= found.ci95[1]
    assert found.predicted_bytes == row.least_bytes["dense"] / row.least_bytes["mod"] > 1
    assert found.efficiency == pytest.approx(found.measured / found.predicted_bytes)
    # Without a roofline there is no bound in time.
    bound = bandwidth_gbs and {kind: size / bandwidth_gbs / 1e6 for kind, size in row.least_bytes.items()}
    assert row.predicted_ms == bound
    # A routed layer's cache holds its capacity, and each cache has one more slot for rows that keep nothing.
    slot = 2 * 2 * 8 * 4
    # A step reads the slots in use: at positions 1 to 15, those of 8 tokens on average.
    tokens = SEQ / 2
    executed = {site: row.executed[str(site)] for site in models["mod"].sites}
    mod_slots = tokens + sum(executed.values()) * 18 * tokens / WINDOW
    assert row.least_bytes == {
        "mod": pytest.approx(models["mod"].least_bytes(rows, 0, executed) + rows * mod_slots * slot, abs=1),
        "dense": models["dense"].least_bytes(rows, 0, {}) + rows * 3 * tokens * slot,
    }
    assert row.kv_bytes == {"mod": rows * (19 + WINDOW + 1 + 19) * slot, "dense": rows * 3 * (WINDOW + 1) * slot}
    assert found.routed_kv_bytes == {"mod": rows * 38 * slot, "dense": rows * 2 * (WINDOW + 1) * slot}


def test_texts_take_turns_and_share_the_positions(context: Build, models: dict[ModelKind, GeneratingModel]) -> None:
    """The first turn has the earliest positions, so its text is read no further."""
    bucket, turns = Bucket(1, WINDOW), 4
    row = measure_steps(
        context.decoding_engines(),
        pair_of(context, "decode", bucket),
        texts(turns)[:, None],
        {kind: models[kind].sites for kind in KINDS},
        {kind: step_bytes(models[kind], bucket) for kind in KINDS},
        LIMITS,
    )
    assert (row.texts, row.positions) == (turns, SEQ - 1)
    shares = np.array_split(np.arange(1, SEQ), turns)
    for site, ran_BS in decided(models["mod"], texts(turns)).items():
        ran = [ran_BS[turn, positions] for turn, positions in enumerate(shares)]
        assert row.selected[str(site)] == row.executed[str(site)] == pytest.approx(np.concatenate(ran).mean())
    assert len({tuple(ran_BS[turn]) for turn in range(turns)}) > 1


@pytest.mark.parametrize(("tokens", "positions"), [(2, 1), (5, 4), (6, 5)])
def test_steps_at_few_positions_give_no_verdict(
    context: Build, models: dict[ModelKind, GeneratingModel], tokens: int, positions: int
) -> None:
    """The bootstrap over a single position has no spread, so its interval would be certain of whatever was measured."""
    bucket = Bucket(1, WINDOW)
    row = measure_steps(
        context.decoding_engines(),
        pair_of(context, "decode", bucket),
        texts(1)[None, :, :tokens],
        {kind: models[kind].sites for kind in KINDS},
        {kind: step_bytes(models[kind], bucket) for kind in KINDS},
        LIMITS,
    )
    assert row.positions == positions
    assert row.compared is not None
    low, high = row.compared.ci95
    certain = low > 1 or high < 1 + context.config.latency.resolution
    assert (row.compared.verdict == "inconclusive") is (positions < 5 or not certain)


@pytest.mark.parametrize(("cached_attention", "tokens"), [(True, SEQ / 2), (False, WINDOW)])
def test_the_cache_is_read_as_the_engine_attends(
    context: Build, models: dict[ModelKind, GeneratingModel], cached_attention: bool, tokens: float
) -> None:
    """An engine without an operator for caches attends to all slots. Weights in fewer bits leave the cache as it is."""
    bucket, engine = Bucket(3, WINDOW), pair_of(context, "decode", Bucket(3, WINDOW))["dense"]
    narrow = step_bytes(models["dense"], bucket).stored_in("bfloat16")
    engines: dict[ModelKind, Engine] = {"mod": engine}
    limits = replace(LIMITS, cached_attention=cached_attention)
    row = measure_steps(context.decoding_engines(), engines, texts(3)[None], {"mod": ()}, {"mod": narrow}, limits)
    weights = models["dense"].least_bytes(3, 0, {}) / 2
    assert row.least_bytes["mod"] == pytest.approx(weights + 3 * 3 * tokens * 2 * 2 * 8 * 4, abs=1)


def test_steps_and_prompts_of_a_model_alone(context: Build, models: dict[ModelKind, GeneratingModel]) -> None:
    """The rows are the same without a dense baseline."""
    bucket, engines = Bucket(3, WINDOW), context.decoding_engines()
    alone: dict[ModelKind, Engine] = {"mod": pair_of(context, "decode", bucket)["mod"]}
    sites, least = models["mod"].sites, step_bytes(models["mod"], bucket)
    row = measure_steps(engines, alone, texts(3)[None], {"mod": sites}, {"mod": least}, LIMITS).predicted(10.0)
    assert row.compared is None
    assert 0 < row.ms["mod"] < 1000
    for site, ran_BS in decided(models["mod"], texts(3)).items():
        assert row.executed[str(site)] == pytest.approx(ran_BS[:, 1:].any(0).mean())
    in_use = SEQ / 2 / WINDOW
    assert row.least_bytes == {"mod": least.of(row.executed, in_use, in_use)}
    for of_models in (row.ms, row.tokens_per_second, row.predicted_ms, row.kv_bytes):
        assert of_models is not None
        assert list(of_models) == ["mod"]
    prompt = measure_prompts(engines, {"mod": pair_of(context, "prefill", Bucket(1, SEQ))["mod"]}, texts(1)[0])
    assert (list(prompt.ms), prompt.compared) == (["mod"], None)
    assert 0 < prompt.ms["mod"] < 1000


def test_a_prompt_is_timed_as_whole_rows_are(context: Build) -> None:
    row = measure_prompts(context.decoding_engines(), pair_of(context, "prefill", Bucket(1, SEQ)), texts(1)[0])
    assert (row.setting.role, row.setting.bucket, row.tokens) == ("prefill", Bucket(1, SEQ), SEQ)
    assert row.compared is not None
    assert row.compared.measured == pytest.approx(row.ms["dense"] / row.ms["mod"])
    assert 0 < row.compared.ci95[0] <= row.compared.measured <= row.compared.ci95[1]


def test_bytes_of_a_step_by_what_was_executed(models: dict[ModelKind, GeneratingModel]) -> None:
    assert StepBytes(always=100, sites={"1": 10, "3": 20}).of({"1": 0.5, "3": 0.25, "other": 1.0}) == 110
    assert StepBytes(always=100, sites={}).of({"1": 1.0}) == 100
    bucket = Bucket(3, WINDOW)
    found = {kind: step_bytes(models[kind], bucket) for kind in KINDS}
    assert set(found["mod"].sites) == {"0", "2"}
    everything = found["mod"].of({"0": 1.0, "2": 1.0})
    assert everything == models["mod"].least_bytes(3, WINDOW, {0: 1.0, 2: 1.0})
    # Without a cache, the weights are left.
    assert found["mod"].of({"0": 1.0, "2": 1.0}, 0.0, 0.0) == models["mod"].least_bytes(3, 0, {0: 1.0, 2: 1.0})
    # Weights stored in fewer bytes are read in fewer bytes; names that are no weights of this model count nothing.
    stored = {"layers.1.mlp.up_proj.weight": 100, "layers.0.mlp.up_proj.weight": 200, "other": 1}
    narrow = step_bytes(models["mod"], bucket, stored)
    up = 4 * SPEC.d_model * SPEC.d_ff
    assert found["mod"].always - narrow.always == up - 100
    assert found["mod"].sites["0"] - narrow.sites["0"] == up - 200
    assert found["mod"].sites["2"] == narrow.sites["2"]
    # If all tokens run, routers are read as well, and a routed layer's cache is shorter.
    model, twin = models["mod"].whole_rows.weights, models["dense"].whole_rows.weights
    routers = sum(4 * weight.numel() for name, weight in model.items() if name not in twin)
    assert everything - routers == found["dense"].of({}) - 3 * 2 * (WINDOW - 18) * 2 * 2 * 8 * 4
