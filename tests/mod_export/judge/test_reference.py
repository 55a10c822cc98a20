from __future__ import annotations

import copy

import numpy as np
import psutil
import pytest
import torch
from captures import bucket_example

from mod_export.errors import CaptureError
from mod_export.graph.capture import exported
from mod_export.judge import reference as reference_module
from mod_export.judge.inputs import Batch
from mod_export.judge.reference import KeptRuns, Reference, _Move, check_program, routing_map
from mod_export.model.model import tokens_sample
from mod_export.model.module import model_from_module
from mod_export.model.transformer import TransformerModel
from mod_export.types import Bucket


def test_a_run_is_plain_arrays_of_the_eager_module(reference: Reference, batches: list[Batch]) -> None:
    for batch in batches:
        run = reference.free(batch)
        assert (run.logits_BSV.shape, run.logits_BSV.dtype) == ((2, 16, 256), np.float32)
        assert list(run.routed) == list(run.judged) == [0, 1]
        assert {(index_BK.shape, index_BK.dtype.name) for index_BK in run.routed.values()} == {((2, 4), "int64")}
        assert {judged.score_BS.dtype.name for judged in run.judged.values()} == {"float32"}
        (logits_BSV,) = reference.module(torch.from_numpy(batch.ids_BS), torch.from_numpy(batch.lengths_B))
        np.testing.assert_array_equal(run.logits_BSV, logits_BSV.numpy())


def test_runs_are_kept_by_content(loaded: TransformerModel, batches: list[Batch]) -> None:
    kept, batch = Reference(loaded), batches[0]
    again = Batch.of_tokens("another", batch.ids_BS.copy(), batch.lengths_B.copy())
    assert kept.free(batch) is kept.free(again)
    assert kept.free(Batch.of_tokens(batch.kind, batch.ids_BS, batch.lengths_B - 1)) is not kept.free(batch)
    routing = {1: np.tile(np.arange(4), (2, 1))}
    assert kept.forced(batch, routing) is kept.forced(again, copy.deepcopy(routing))
    assert kept.forced(batch, routing) is not kept.free(batch)
    assert kept.forced(batch, {0: routing[1]}) is not kept.forced(batch, routing)
    assert kept.exact(batch, routing) is not kept.forced(batch, routing)


def test_no_more_runs_are_kept_than_there_is_room_for(loaded: TransformerModel, batches: list[Batch]) -> None:
    nothing = Reference(loaded, kept=KeptRuns(0))
    first, second = nothing.free(batches[0]), nothing.free(batches[0])
    assert first is not second
    np.testing.assert_array_equal(first.logits_BSV, second.logits_BSV)
    limited = Reference(loaded, kept=KeptRuns(first.nbytes + first.nbytes // 2))
    kept = limited.free(batches[0])
    assert limited.free(batches[0]) is kept
    newer = limited.free(batches[1])
    # The oldest run was dropped to make room, also for another reference that keeps its runs there.
    assert limited.free(batches[1]) is newer
    assert limited.free(batches[0]) is not kept
    assert limited.returning("last").free(batches[0]) is limited.free(batches[0])


def test_kept_runs_leave_memory_that_others_need(
    loaded: TransformerModel, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may take a quarter of what would be free without them, whatever was free when they were kept."""
    size = Reference(loaded).free(batches[0]).nbytes
    monkeypatch.setattr("mod_export.judge.reference.KEPT_BYTES", 0)
    free = [100 * size]
    monkeypatch.setattr("mod_export.judge.reference.free_bytes", lambda: free[0])
    reference = Reference(loaded)
    first = [reference.free(batch) for batch in batches[:3]]
    assert [reference.free(batch) for batch in batches[:3]] == first
    free[0] = 0  # A quarter of what three runs take is less than one.
    last = reference.free(batches[3])
    assert last is not reference.free(batches[3])
    assert not any(reference.free(batch) in first for batch in batches[:2])


def test_references_that_share_room_do_not_take_each_others_runs(
    loaded: TransformerModel, batches: list[Batch]
) -> None:
    shared = KeptRuns()
    routed, dense = Reference(loaded, kept=shared), Reference(loaded.dense(), kept=shared)
    assert routed.free(batches[0]).routed != {}
    assert dense.free(batches[0]).routed == {}
    assert routed.with_weights({}).free(batches[0]) is not routed.free(batches[0])


def test_a_forced_reference_routes_what_it_is_told(reference: Reference, batches: list[Batch]) -> None:
    free = reference.free(batches[0])
    forced = reference.forced(batches[0], {1: np.tile(np.arange(4), (2, 1))})
    assert forced.routed[1].tolist() == [[0, 1, 2, 3]] * 2
    np.testing.assert_array_equal(forced.routed[0], free.routed[0])
    np.testing.assert_array_equal(forced.judged[0].score_BS, free.judged[0].score_BS)
    assert not np.array_equal(forced.logits_BSV, free.logits_BSV)


def test_float64_says_what_float32_rounds_away(reference: Reference, batches: list[Batch]) -> None:
    for batch in batches:
        free = reference.free(batch)
        exact = reference.exact(batch, free.routed)
        assert exact.logits_BSV.dtype == exact.judged[0].score_BS.dtype == np.float64
        error = np.abs(exact.logits_BSV - free.logits_BSV)[batch.real_BS]
        assert 1e-8 < error.max() < 1e-5
        for layer, judged in free.judged.items():
            score_BS, exact_BS = judged.score_BS, exact.judged[layer].score_BS
            np.testing.assert_array_equal(exact.routed[layer], free.routed[layer])
            # The scores are computed in float64, not cast to it.
            assert np.any(exact_BS.astype(np.float32).astype(np.float64) != exact_BS)
            np.testing.assert_allclose(exact_BS[batch.real_BS], score_BS[batch.real_BS], atol=1e-5)


class NamesNoDtype(torch.nn.Module):
    """Creates its tensors in the default dtype of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.mlp = torch.nn.Linear(8, 1), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, S, D = x.shape
        index = self.router(x)[..., 0].topk(4).indices.sort().values[..., None].expand(-1, -1, D)
        position = torch.arange(S)
        bias = torch.where(position[:, None] >= position, 0.0, -1e9)
        attended = torch.baddbmm(bias.expand(B, S, S), x, x.transpose(1, 2)).softmax(-1) @ x
        return attended + torch.zeros(B, S, D).scatter(1, index, self.mlp(x.gather(1, index)))


def test_what_has_the_default_dtype_is_float64_too() -> None:
    torch.manual_seed(0)
    bucket = Bucket(2, 16)
    model = model_from_module(NamesNoDtype(), lambda batch, seq: torch.randn(batch, seq, 8), [bucket], "mine")
    used, x = Reference(model), np.random.default_rng(0).standard_normal((2, 16, 8), np.float32)
    batch = Batch("sample", bucket, {"x": x})
    free = used.free(batch)
    exact = used.exact(batch, free.routed)
    assert exact is not None
    assert exact.outputs[0].dtype == np.float64
    assert 1e-9 < np.abs(exact.outputs[0] - free.outputs[0]).max() < 1e-5
    assert torch.get_default_dtype() == torch.float32


def test_shaken_runs_round_in_other_ways(reference: Reference, batches: list[Batch]) -> None:
    batch = batches[0]
    free = reference.free(batch)
    exact = reference.exact(batch, free.routed)
    runs = [free, *reference.shaken(batch, free.routed)]
    assert len(runs) == 3
    errors = [np.abs(run.logits_BSV - exact.logits_BSV)[batch.real_BS].max() for run in runs]
    # The errors differ, but have a similar size.
    assert len(set(errors)) == 3
    assert max(errors) < 8 * min(errors)
    for run in runs[1:]:
        assert run.logits_BSV.dtype == np.float32
        for layer, index_BK in free.routed.items():
            np.testing.assert_array_equal(run.routed[layer], index_BK)
    again = Reference(reference.model).shaken(batch, free.routed)
    np.testing.assert_array_equal(again[0].logits_BSV, runs[1].logits_BSV)


def test_every_weight_is_moved_to_one_of_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directions are repeated, and those of two rows differ."""
    monkeypatch.setattr("mod_export.judge.reference.PERIOD", 7)
    weight = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    moved = _Move(["weight"], 1)("weight", weight)
    down, up = (torch.nextafter(weight, torch.full_like(weight, end)) for end in (-torch.inf, torch.inf))
    assert ((moved == down) | (moved == up)).all()
    assert len({tuple(row) for row in (moved == up).tolist()}) == 7
    assert not torch.equal(_Move(["weight"], 2)("weight", weight), moved)
    for other in (torch.tensor(2.0), torch.ones(0, 3), weight.T):
        assert _Move(["weight"], 1)("weight", other).shape == other.shape
    assert _Move(["weight"], 1)("bias", weight) is weight


def test_the_float32_model_stays_what_it_is(loaded: TransformerModel, batches: list[Batch]) -> None:
    used = Reference(loaded)
    before = used.free(batches[0]).logits_BSV
    used.exact(batches[0], {})
    used.shaken(batches[0], {})
    assert {parameter.dtype for parameter in used.module.parameters()} == {torch.float32}
    np.testing.assert_array_equal(used.with_weights({}).free(batches[0]).logits_BSV, before)


def test_no_float64_where_the_model_does_not_fit_twice(
    loaded: TransformerModel, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Free memory is part of the environment, so the test replaces it.
    memory = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert Reference(loaded).exact(batches[0], {}) is None
    assert Reference(loaded).shaken(batches[0], {}) == []


def test_what_was_found_out_is_remembered_by_name(loaded: TransformerModel) -> None:
    remembers, answers = Reference(loaded), iter("abc")
    assert [remembers.remembered(name, answers.__next__) for name in ("one", "one", "other")] == ["a", "a", "b"]
    assert Reference(loaded).remembered("one", answers.__next__) == "c"


def test_weights_are_replaced_and_put_back_nowhere(reference: Reference, batches: list[Batch]) -> None:
    name, batch = "layers.0.mlp.down_proj.weight", batches[0]
    before = reference.free(batch).logits_BSV
    changed = reference.with_weights({name: np.zeros(reference.model.weights[name].shape, np.float32)})
    run = changed.free(batch)
    assert not np.array_equal(run.logits_BSV, before)
    exact = changed.exact(batch, run.routed)
    np.testing.assert_allclose(exact.logits_BSV[batch.real_BS], run.logits_BSV[batch.real_BS], atol=1e-5)
    np.testing.assert_array_equal(reference.with_weights({}).free(batch).logits_BSV, before)


class ChangesItsMind(torch.nn.Module):
    """Computes something else while it is exported, like code that asks whether it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, ids_BS: torch.Tensor, lengths_B: torch.Tensor) -> tuple[torch.Tensor]:
        scale = 1.0 if torch.compiler.is_exporting() else 1.0 + 2**-20
        return (ids_BS[..., None] * self.weight * scale,)


def test_a_program_that_is_not_the_module_is_refused() -> None:
    module, bucket = ChangesItsMind(), Bucket(2, 3)
    program = exported(module, bucket_example(module, bucket, 3), "model")
    message = r"the captured program is not the eager model: at b2s3 its output 0 differs by up to \d.*same bits"
    with pytest.raises(CaptureError, match=message):
        check_program(program, module, bucket, [tokens_sample(16, bucket, 0)])


def test_a_map_shows_which_token_went_through_which_layer(
    reference: Reference, bucket: Bucket, batches: list[Batch]
) -> None:
    shown = routing_map(reference, bucket, batches)
    (text, *_) = [batch for batch in batches if batch.kind == "text"]
    assert shown.bucket == "b2s16"
    assert "".join(shown.tokens).encode("latin-1") == bytes(text.ids_BS[0].astype(np.uint8))
    traced = reference.free(text)
    assert [layer.layer for layer in shown.layers] == [0, 1]
    for layer in shown.layers:
        scores = traced.judged[layer.layer].score_BS[0]
        assert layer.routed == tuple(sorted(np.argsort(-scores, kind="stable")[:4].tolist()))
        assert layer.k == 4
        np.testing.assert_allclose(np.array(layer.scores), scores, rtol=1e-3)


def test_other_maps(
    loaded: TransformerModel,
    reference: Reference,
    bucket: Bucket,
    batches: list[Batch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens that are not text are shown as numbers; a dense model, no input and a long row give no map."""
    others = [batch for batch in batches if batch.kind != "text"]
    assert routing_map(reference, bucket, others).tokens == tuple(map(str, others[0].ids_BS[0]))
    assert routing_map(Reference(loaded.dense()), bucket, batches) is None
    assert routing_map(reference, bucket, []) is None
    for most, drawn in ((16, True), (15, False)):
        monkeypatch.setattr(reference_module, "MOST_MAPPED_TOKENS", most)
        assert (routing_map(reference, bucket, batches) is not None) is drawn
