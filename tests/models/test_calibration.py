"""Predictors that are set from their routers: they predict what top-k takes, and change nothing else."""

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny_models import distinct_ids, lively_checkpoint, make_spec
from training_runs import CONFIG, SPEC, evaluations, state

from mod_models.routing import Decisions
from mod_models.train import TrainConfig, TrainError
from mod_models.train.parallel import Workers
from mod_models.train.retrofit import calibrate, quantile
from mod_models.train.run import train
from mod_models.transformer import Transformer


def lively(
    parts: str = "block", router: str = "linear_bias", capacity: float = 0.25, always_first: int = 0
) -> Transformer:
    spec = make_spec(
        vocab_size=256,
        max_positions=64,
        parts=parts,
        router=router,
        capacity=capacity,
        always_first=always_first,
        predictor_hidden=4,
        selection="predictor",
        gate="sigmoid",
    )
    return lively_checkpoint(spec).module()


def seen_by(model: Transformer, ids_BS: torch.Tensor) -> Decisions:
    decisions = Decisions()
    model.hidden(ids_BS, torch.full((len(ids_BS),), ids_BS.shape[1]), decisions)
    return decisions


@pytest.mark.parametrize("share", [0.0, 0.3, 0.875, 1.0])
def test_the_threshold_is_the_quantile(share: float) -> None:
    score_N = torch.randn(101)
    torch.testing.assert_close(quantile(score_N, share), torch.quantile(score_N, share))


def test_the_quantile_of_more_scores_than_torch_takes() -> None:
    score_N = torch.arange(2**24 + 1, dtype=torch.float32).flip(0)
    assert quantile(score_N, 0.875) == pytest.approx(0.875 * 2**24)


def test_predictors_among_the_tokens_of_the_router_before() -> None:
    """Each says yes to as many of the tokens that it may select from as its router selects."""
    steps = {"n_layers": 6, "layers": (0, 2, 4), "blocks_per_router": 2, "candidates": "previous"}
    spec = make_spec(
        vocab_size=256, max_positions=64, capacity=(0.75, 0.5, 0.25), predictor_hidden=4, selection="predictor", **steps
    )
    model = lively_checkpoint(spec).module().train()
    ids_BS = distinct_ids(spec, 4, 32)
    calibrate(model, [ids_BS])
    for site, seen in seen_by(model, ids_BS).seen.items():
        assert seen.predictor is not None
        yes_BT = (seen.predictor(seen.x_BTD) > 0) & seen.live_BT
        assert int(seen.live_BT.sum()) == 4 * {0: 32, 2: 24, 4: 16}[int(site)]
        assert abs(int(yes_BT.sum()) - 4 * seen.k) <= 1


@pytest.mark.parametrize("router", ["linear", "linear_bias"])
@pytest.mark.parametrize("parts", ["block", "attention", "mlp", "separate"])
def test_a_predictor_says_what_its_router_says(parts: str, router: str) -> None:
    model = lively(parts, router).train()
    ids_BS = distinct_ids(model.spec, 4, 32)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items() if "predictor" not in name}
    calibrate(model, [ids_BS[:2], ids_BS[2:]])
    assert model.training
    for name, tensor in weights.items():
        assert torch.equal(model.state_dict()[name], tensor), name
    seen = seen_by(model, ids_BS).seen
    assert len(seen) == len(model.spec.routed_layers) * (2 if parts == "separate" else 1)
    for seen_block in seen.values():
        assert seen_block.predictor is not None
        logit_BT = seen_block.predictor(seen_block.x_BTD)
        # Predictions rise linearly with the scores, so they have the router's order.
        score_N, logit_N = seen_block.l_BT.flatten(), logit_BT.flatten()
        slope, offset = (logit_N.max() - logit_N.min()) / (score_N.max() - score_N.min()), 0.0
        offset = (logit_N - slope * score_N).mean()
        torch.testing.assert_close(logit_N, slope * score_N + offset, rtol=1e-4, atol=1e-4)
        assert slope > 0
        # Over these rows, as many tokens pass as top-k takes.
        assert abs(int((logit_BT > 0).sum()) - seen_block.k * len(ids_BS)) <= 1


def test_what_is_called_in_evaluation_stays_there_and_is_decided_by_top_k() -> None:
    """Streams must be those of training, or the second routed layer would be measured behind other choices."""
    first, second = lively().train(), lively().eval()
    ids_BS = distinct_ids(first.spec, 4, 32)
    for model in (first, second):
        calibrate(model, [ids_BS])
    assert not second.training
    for (name, tensor), expected in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(tensor, expected), name


def test_where_every_token_runs_predictors_say_yes() -> None:
    model = lively(capacity=1.0)
    ids_BS = distinct_ids(model.spec, 2, 32)
    calibrate(model, [ids_BS])
    for seen_block in seen_by(model, distinct_ids(model.spec, 3, 16)).seen.values():
        assert seen_block.predictor is not None
        assert bool((seen_block.predictor(seen_block.x_BTD) > 0).all())


@pytest.mark.parametrize("always_first", [3, 8, 12, 32, 40])
def test_tokens_that_always_run_leave_the_predictors_fewer_slots(always_first: int) -> None:
    """Eight of 32 tokens run. Those that the predictors add to the first ones are as many as top-k adds."""
    model = lively(always_first=always_first).train()
    ids_BS = distinct_ids(model.spec, 4, 32)
    calibrate(model, [ids_BS[:2], ids_BS[2:]])
    for seen_block in seen_by(model, ids_BS).seen.values():
        assert seen_block.k == 8
        assert seen_block.predictor is not None
        added_BT = seen_block.predictor(seen_block.x_BTD)[:, always_first:] > 0
        expected = max(0, 8 - always_first) * len(ids_BS)
        assert abs(int(added_BT.sum()) - expected) <= (1 if expected else 0)


def test_a_run_calibrates_before_it_evaluates_and_resumes_to_the_same(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, calibrate=2)
    whole, parts, plain = tmp_path / "whole", tmp_path / "parts", tmp_path / "plain"
    list(train(SPEC, config, whole))
    list(train(SPEC, config, parts, stop_after=5))
    list(train(SPEC, config, parts))
    list(train(SPEC, CONFIG, plain))
    assert evaluations(whole) == evaluations(parts)
    for name, tensor in state(whole)["model"].items():
        assert torch.equal(state(parts)["model"][name], tensor), name
    name = "held_out_predictor_accuracy/2"
    accuracy = [float(evaluations(folder)[-1][name]) for folder in (whole, plain)]
    assert accuracy[0] > accuracy[1] + 0.05, accuracy


SAID = (
    "calibrate: sets predictors of at least two hidden units to what linear routers say (spec.routing: "
    "predictor_hidden, router=linear), and this model has none"
)


@pytest.mark.parametrize(
    "changed",
    [{"selection": "threshold", "predictor_hidden": 0}, {"router": "mlp", "router_hidden": 4}, {"predictor_hidden": 1}],
)
def test_a_model_that_cannot_be_calibrated(tmp_path: Path, changed: dict[str, object]) -> None:
    assert SPEC.routing is not None
    spec = dataclasses.replace(SPEC, routing=dataclasses.replace(SPEC.routing, **changed))
    config = dataclasses.replace(CONFIG, calibrate=1, router_loss=0.01)
    with pytest.raises(TrainError) as caught:
        next(train(spec, config, tmp_path))
    assert str(caught.value) == SAID


def test_shards_cannot_be_calibrated(tmp_path: Path) -> None:
    config = TrainConfig(seq=16, calibrate=1)
    with pytest.raises(
        TrainError, match="calibrate: needs whole routers and predictors, and --parallel fsdp cuts them"
    ):
        next(train(SPEC, config, tmp_path, workers=Workers(parallel="fsdp")))
