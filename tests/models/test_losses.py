"""Losses: the weights that each one trains, and its targets."""

import math

import pytest
import torch
from observing import observed
from tiny_models import lively_checkpoint, make_spec
from torch.nn import functional
from variants import VARIANTS

from mod_models.routing import Decisions
from mod_models.train import TrainConfig
from mod_models.train.losses import LossModule, losses
from mod_models.transformer import Transformer

SPEC = make_spec(vocab_size=256, d_model=16, predictor_hidden=4, layers=(0, 2), capacity=0.25, max_positions=32)
NEXT_TOKEN_ONLY = TrainConfig(predictor_loss=0.0)


def fresh(spec=SPEC) -> Transformer:
    model = Transformer(spec)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def some_rows(batch: int = 2, vocabulary: int = 256) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, 17), generator=torch.Generator().manual_seed(3))


def with_gradient(model: Transformer) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_next_token_is_the_models_cross_entropy() -> None:
    model, rows = fresh(), some_rows()
    found = losses(model, rows, NEXT_TOKEN_ONLY)
    logits_BSV, _ = observed(model, rows[:, :-1], torch.tensor([16, 16]))
    expected = -torch.log_softmax(logits_BSV.double(), -1).gather(2, rows[:, 1:, None]).mean()
    assert found.next_token.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.equal(found.total, found.next_token)
    assert found.next_token.item() == pytest.approx(math.log(256), rel=0.05)


@pytest.mark.parametrize("name", ["predictor", "experts, two of a token"])
def test_total_is_the_weighted_sum(name: str) -> None:
    weights = {"predictor_loss": 0.5, "router_loss": 0.25, "balance_loss": 7.0}
    found = losses(fresh(VARIANTS[name]), some_rows(2, 16), TrainConfig(**weights))
    parts = [weights[name] * value for name, value in found.metrics.items() if name in weights]
    assert found.total.item() == pytest.approx(found.next_token.item() + sum(parts), rel=1e-6)
    assert sum(parts) > 0


def test_predictors_learn_and_touch_nothing_else() -> None:
    """The predictors' loss has gradients only in the predictors, and the other loss has none there."""
    model = fresh()
    found = losses(model, some_rows())
    (found.total - found.next_token).backward(retain_graph=True)
    # The difference is exactly zero where only the next-token loss has a gradient.
    touched = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert touched == {name for name, _ in model.named_parameters() if ".predictor." in name}
    model.zero_grad()
    found.next_token.backward()
    assert with_gradient(model) == {name for name, _ in model.named_parameters() if ".predictor." not in name}


@pytest.mark.parametrize("router_input", ["raw", "normed"])
def test_predictors_see_what_the_router_sees(router_input: str) -> None:
    model = fresh(make_spec(vocab_size=256, predictor_hidden=4, router_input=router_input, layers=(0,)))
    block, rows = model.layers[0], some_rows()
    found = losses(model, rows)
    with torch.no_grad():
        x_BSD = model.embedding(rows[:, :-1])
        logit_BS = block.predictor(block.attention_norm(x_BSD) if router_input == "normed" else x_BSD)
        _, decided = observed(model, rows[:, :-1], torch.tensor([16, 16]))
        chosen_BS = torch.zeros(2, 16).scatter(1, decided[0].index_BK, 1.0)
        expected = functional.binary_cross_entropy_with_logits(logit_BS, chosen_BS)
    assert found.metrics == {
        "predictor_accuracy/0": ((logit_BS > 0) == (chosen_BS > 0)).float().mean().item(),
        "predictor_loss": expected.item(),
    }


@pytest.mark.parametrize("name", ["topk", "threshold"])
def test_router_loss_is_binary_cross_entropy_of_membership(name: str) -> None:
    """Membership means the top k of its own scores, also where tokens choose."""
    model, rows = fresh(VARIANTS[name]), some_rows(2, 16)
    found = losses(model, rows, TrainConfig(router_loss=1.0))
    _, decided = observed(model, rows[:, :-1], torch.tensor([16, 16]))
    expected = 0.0
    for layer, routing in decided.items():
        p_BS = torch.sigmoid(routing.score_BS.double())
        index_BK = routing.score_BS.argsort(dim=1, descending=True, stable=True)[:, : model.spec.k_by_layer(16)[layer]]
        chosen_BS = torch.zeros(2, 16, dtype=torch.bool).scatter(1, index_BK, True)
        expected += -torch.where(chosen_BS, p_BS.log(), (1 - p_BS).log()).mean().item()
        agreement = ((p_BS > 0.5) == chosen_BS).float().mean().item()
        assert found.metrics[f"router_accuracy/{layer}"] == pytest.approx(agreement)
    assert found.metrics["router_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"selection": "topk", "capacity": 0.375},
        {"selection": "predictor", "capacity": 0.375},
        {"selection": "topk", "capacity": 0.125},  # Two slots for three tokens that always run.
        {"selection": "exit", "capacity_rule": "ceil", "capacity": (0.75, 0.375)},
    ],
)
def test_where_first_tokens_always_run_the_losses_learn_the_selection_that_runs(changes: dict[str, object]) -> None:
    """These tokens take slots whatever their scores are, and the tokens with the best scores get the rest."""
    spec = make_spec(vocab_size=256, always_first=3, predictor_hidden=4, layers=(0, 2), **changes)
    model, rows = lively_checkpoint(spec).module().train(), some_rows(4)
    found = losses(model, rows, TrainConfig(router_loss=1.0)).metrics
    decisions = Decisions()
    model.hidden(rows[:, :-1], torch.full((4,), 16), decisions)
    given_BT, expected = torch.arange(16).expand(4, 16), {"router": 0.0, "predictor": 0.0}
    for site, seen in decisions.seen.items():
        position_BK = decisions.made[site].position_BK
        ran_BT = (given_BT[..., None] == position_BK[:, None]).any(-1)
        assert bool(ran_BT[:, : min(3, seen.k)].all())
        for name, logit_BT in (("router", seen.l_BT), ("predictor", seen.predictor(seen.x_BTD))):
            expected[name] += functional.binary_cross_entropy_with_logits(logit_BT, ran_BT.float()).item()
            agreement = ((logit_BT > 0) == ran_BT).float().mean().item()
            assert found[f"{name}_accuracy/{site}"] == pytest.approx(agreement)
        given_BT = position_BK if spec.routing.selection == "exit" else given_BT
    for name, value in expected.items():
        assert found[f"{name}_loss"] == pytest.approx(value, rel=1e-5)


def test_router_loss_reaches_the_router_and_the_stream() -> None:
    # "ones" has no gradient, so the router's gradient comes from this loss.
    model = fresh(make_spec(vocab_size=256, layers=(1,), gate="ones", combine="replace_ungated"))
    losses(model, some_rows()).total.backward()
    assert "layers.1.router.projection.weight" not in with_gradient(model)
    model.zero_grad()
    found = losses(model, some_rows(), TrainConfig(router_loss=1.0))
    (found.total - found.next_token).backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert {"layers.1.router.projection.weight", "embedding.weight", "layers.0.attention.q_proj.weight"} <= touched
    assert "layers.2.attention.q_proj.weight" not in touched


def test_router_loss_centres_the_scores() -> None:
    """After training with it, the sign of a score says whether top-k takes the token."""
    model, rows = fresh(make_spec(vocab_size=256, layers=(0,), router="linear_bias", d_model=32)), some_rows(4)
    weights = TrainConfig(router_loss=1.0)
    before = losses(model, rows, weights).metrics["router_accuracy/0"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        losses(model, rows, weights).total.backward()
        optimizer.step()
    after = losses(model, rows, weights).metrics["router_accuracy/0"]
    assert after > 0.95 > before


def test_only_what_the_model_has_is_metered() -> None:
    everything = TrainConfig(router_loss=1.0)
    dense = losses(fresh(make_spec(vocab_size=256, routing=None)), some_rows(), everything)
    assert dense.metrics == {}
    assert torch.equal(dense.total, dense.next_token)
    no_predictor = losses(fresh(make_spec(vocab_size=256)), some_rows(), everything)
    assert set(no_predictor.metrics) == {"router_loss", "router_accuracy/0", "router_accuracy/2"}
    # A layer that takes no token at this length decides nothing.
    small_capacity = make_spec(vocab_size=256, predictor_hidden=4, capacity_rule="floor", capacity=(1e-9, 0.5))
    assert set(losses(fresh(small_capacity), some_rows()).metrics) == {"predictor_loss", "predictor_accuracy/2"}


def test_halves_of_a_batch_average_to_the_batch() -> None:
    """Several processes equal one for this reason."""
    model, rows, weights = fresh(), some_rows(4), TrainConfig(router_loss=1.0)
    together, first, second = (losses(model, part, weights) for part in (rows, rows[:2], rows[2:]))
    assert together.total.item() == pytest.approx((first.total.item() + second.total.item()) / 2, abs=1e-6)
    for name, value in together.metrics.items():
        assert value == pytest.approx((first.metrics[name] + second.metrics[name]) / 2, abs=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_trains(name: str) -> None:
    """Every weight receives a gradient."""
    model, rows = fresh(VARIANTS[name]), some_rows(4, 16)
    found = losses(model, rows, TrainConfig(router_loss=1.0))
    assert math.isfinite(found.total.item())
    found.total.backward()
    assert with_gradient(model) == {name for name, _ in model.named_parameters()}


def kept_for_the_backward_pass(module: LossModule, rows: torch.Tensor) -> tuple[torch.Tensor, set[int]]:
    """Returns the total loss, and the addresses of the tensors that its graph keeps."""
    kept = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return module(rows).total, kept


@pytest.mark.parametrize("name", ["topk", "early exit", "early exit with experts"])
def test_activation_checkpointing_keeps_nothing_of_a_layer_and_changes_no_gradient(name: str) -> None:
    rows, gradients = some_rows(2, 16), []
    for recompute in ("none", "layers"):
        module = LossModule(fresh(VARIANTS[name]), TrainConfig(router_loss=1.0, recompute=recompute))
        total, kept = kept_for_the_backward_pass(module, rows)
        # A product keeps its matrix, so the matrices tell which layers keep anything.
        for layer in module.model.layers:
            matrices = {weight.untyped_storage().data_ptr() for weight in layer.parameters() if weight.dim() > 1}
            assert matrices.isdisjoint(kept) == (recompute == "layers"), layer.layer
        total.backward()
        gradients.append({n: weight.grad for n, weight in module.named_parameters()})
    for weight, gradient in gradients[0].items():
        assert torch.equal(gradients[1][weight], gradient), weight


def test_balance_is_one_when_even_and_more_when_not() -> None:
    model, rows = fresh(VARIANTS["experts, token choice"]), some_rows(4, 16)
    near_even = losses(model, rows).metrics["balance_loss"] / 2  # There are two layers.
    assert near_even == pytest.approx(1.0, abs=0.05)
    for layer in (0, 2):
        weight = model.layers[layer].experts.router.projection.weight
        torch.nn.init.zeros_(weight)
    collapsed = losses(model, rows)
    # Every token's first choice is the first expert, and all experts are equally probable.
    assert collapsed.metrics["balance_loss"] / 2 == pytest.approx(1.0)
    assert collapsed.metrics["overflow/0.expert0"] > 0.5
    assert collapsed.metrics["overflow/0.expert1"] == 0.0


def test_predictors_decide_when_they_have_learnt() -> None:
    """In training the model runs the top k; in evaluation it runs the predicted tokens, and counts the overflow."""
    model, rows = fresh(VARIANTS["predictor"]), some_rows(2, 16)
    trained = losses(model, rows).metrics
    assert {value for name, value in trained.items() if name.startswith("overflow")} == {0.0}
    k_of_layer = model.spec.k_of_layer(rows.shape[1] - 1)
    assert {layer: trained[f"tokens_run/{layer}"] * (rows.shape[1] - 1) for layer in k_of_layer} == k_of_layer
    evaluated = losses(model.eval(), rows).metrics
    assert evaluated.keys() == trained.keys()
    assert evaluated != trained
    _, decided = observed(model, rows[:, :-1], torch.full((2,), rows.shape[1] - 1))
    for layer, routing in decided.items():
        assert evaluated[f"tokens_run/{layer}"] == pytest.approx(routing.live_BK.sum().item() / rows[:, :-1].numel())


def test_a_row_of_which_no_token_reaches_the_experts_adds_nothing() -> None:
    model, rows = fresh(VARIANTS["staged MoDE, threshold"]), some_rows(2, 16)
    for layer in (0, 2):
        # x @ 0 = 0, and exactly 0 does not select.
        torch.nn.init.zeros_(model.layers[layer].router.projection.weight)
    found = losses(model, rows, TrainConfig(router_loss=1.0))
    assert found.metrics["balance_loss"] == 0.0
    assert math.isfinite(found.total.item())
