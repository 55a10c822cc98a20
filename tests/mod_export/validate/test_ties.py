from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from observing import observed
from tiny_models import lively_checkpoint, make_spec

from mod_export.config import BuildConfig
from mod_export.types import Site
from mod_export.validate.candidates import Candidate
from mod_export.validate.compare import Judged
from mod_export.validate.inputs import Batch
from mod_export.validate.reference import Reference
from mod_export.validate.ties import judged_without_routers, ties_of_runs, zeroed_experts, zeroed_routers
from mod_models.architecture import LoadedTransformer
from mod_models.checkpoint import Checkpoint
from mod_models.spec import ExpertsSpec

BATCH = Batch("padded", np.zeros((2, 6), np.int64), np.array([6, 2]))
EQUAL: dict[Site, Judged] = {7: Judged("rank", np.zeros((2, 6), np.float32), BATCH.real_BS)}


@pytest.mark.parametrize("router", ["linear", "linear_bias", "mlp"])
def test_a_router_of_zeros_scores_all_tokens_alike(router: str) -> None:
    spec = make_spec(router=router)
    loaded = LoadedTransformer(lively_checkpoint(spec))
    zeros = zeroed_routers(loaded, 16)
    assert zeros
    assert all(name in loaded.weights for name in zeros)
    assert {tuple(array.shape) for array in zeros.values()} == {tuple(loaded.weights[name].shape) for name in zeros}
    weights = {name: tensor * (name not in zeros) for name, tensor in loaded.weights.items()}
    silenced = LoadedTransformer(Checkpoint(spec=spec, weights=weights))
    ids_BS = torch.arange(16)[None].expand(2, -1)
    _, decided = observed(silenced.module(), ids_BS, torch.tensor([16, 9]))
    for routing in decided.values():
        assert routing.score_BS.unique().numel() == 1


def test_a_dense_model_has_no_router() -> None:
    assert zeroed_routers(LoadedTransformer(lively_checkpoint(make_spec())).dense(), 16) == {}


def test_a_router_that_takes_no_token_is_left_alone() -> None:
    loaded = LoadedTransformer(lively_checkpoint(make_spec(capacity=(0.05, 0.5))))
    assert loaded.k_by_layer(16) == {0: 0, 2: 8}
    assert list(zeroed_routers(loaded, 16)) == ["layers.2.router.projection.weight"]
    assert zeroed_routers(loaded, 1) == {}
    # Experts of a layer whose blocks take nobody are asked all the same where attention alone is routed.
    experts = ExpertsSpec(n_experts=2, layers=(0, 2))
    spec = make_spec(capacity=(0.05, 0.5), parts="attention", experts=experts)
    assert list(zeroed_routers(LoadedTransformer(lively_checkpoint(spec)), 16)) == [
        "layers.0.experts.router.projection.weight",
        "layers.2.experts.router.projection.weight",
        "layers.2.router.projection.weight",
    ]


def test_experts_behind_a_router_are_asked_by_themselves_too() -> None:
    spec = make_spec(capacity=0.5, experts=ExpertsSpec(n_experts=2, layers=(0, 2)))
    loaded = LoadedTransformer(lively_checkpoint(spec))
    zeros = zeroed_routers(loaded, 16)
    assert len(zeros) == 4
    assert set(zeroed_experts(loaded, zeros)) == {f"layers.{i}.experts.router.projection.weight" for i in (0, 2)}
    alone = loaded.dense()
    assert zeroed_experts(alone, zeroed_routers(alone, 16)) == {}


def test_the_reference_is_as_it_was_after_its_routers_were_silent() -> None:
    reference = Reference(LoadedTransformer(lively_checkpoint(make_spec())))
    before = {name: tensor.clone() for name, tensor in reference.module.state_dict().items()}
    judged = judged_without_routers(reference, zeroed_routers(reference.loaded, 6), [BATCH])
    assert all((one.score_BS == 0).all() for one in judged[0].values())
    assert all(torch.equal(before[name], tensor) for name, tensor in reference.module.state_dict().items())


def test_the_first_real_tokens_of_each_row() -> None:
    # The second row has two real tokens; what stands in its third place is padding, whichever.
    assert ties_of_runs([{"logits": np.ones(3), "routed_7": np.array([[0, 1, 2], [0, 1, 5]])}], [BATCH], [EQUAL]) == []


@pytest.mark.parametrize(
    ("routed", "wrong"), [([[0, 1, 3], [0, 1, 2]], 1), ([[3, 4, 5], [0, 1, 2]], 3), ([[0, 1, 2], [0, 2, 3]], 1)]
)
def test_slots_that_go_to_somebody_else_are_counted(routed: list[list[int]], wrong: int) -> None:
    assert ties_of_runs([{"routed_7": np.array(routed)}], [BATCH], [EQUAL]) == [
        f"padded: layer 7 routing: {wrong} slots do not go to the earlier of tokens with equal scores"
    ]


def test_the_same_is_said_once() -> None:
    found = {"routed_7": np.array([[1, 2, 3], [0, 1, 2]])}
    assert len(ties_of_runs([found, found], [BATCH, BATCH], [EQUAL, EQUAL])) == 1


def test_where_tokens_choose_nobody_above_zero_is_nobody() -> None:
    judged: dict[Site, Judged] = {"1.expert0": Judged("first_come", np.zeros((2, 6), np.float32), BATCH.real_BS)}
    nobody = {"routed_1.expert0": np.full((2, 3), -1)}
    assert ties_of_runs([nobody], [BATCH], [judged]) == []
    somebody = {"routed_1.expert0": np.array([[0, -1, -1], [-1, -1, -1]])}
    assert ties_of_runs([somebody], [BATCH], [judged]) == [
        "padded: layer 1.expert0 routing: 1 slots do not go to the earlier of tokens with equal scores"
    ]


def test_an_engine_with_equal_scores(
    folder: Path, candidate: Candidate, config: BuildConfig, loaded: LoadedTransformer, batches: list[Batch]
) -> None:
    zeros = zeroed_routers(loaded, 16)
    judged = judged_without_routers(Reference(loaded), zeros, batches)
    with candidate.open(folder, config, zeros) as runner:
        outputs = [runner.run(batch.feeds) for batch in batches]
    assert ties_of_runs(outputs, batches, judged) == []
    with candidate.open(folder, config) as runner:
        assert ties_of_runs([runner.run(batches[0].feeds)], batches[:1], judged[:1])
