"""Routers and adapters fitted to a dense model: the regressions are right, and the model is better for them."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import distinct_ids, lively_checkpoint, make_spec
from training_runs import lines, rows, state

from mod_models.checkpoint import ROUTES, Checkpoint, load_checkpoint
from mod_models.routing import Decisions
from mod_models.selection import Tokens
from mod_models.train import TrainConfig, approximate
from mod_models.train.approximate import STRENGTH
from mod_models.train.corpus import read_corpus
from mod_models.train.evaluation import evaluate
from mod_models.train.fit import CLIPPED, ROUTER_STRENGTH, fitted, rows_to_fit
from mod_models.train.retrofit import retrofitted, routed_spec
from mod_models.train.run import train
from mod_models.transformer import Transformer

DENSE = make_spec(routing=None, vocab_size=256, d_model=16, d_ff=24, n_layers=4, max_positions=32)
LAYERS = (1, 3)
CONFIG = TrainConfig(steps=4, batch=2, seq=16, warmup=2, eval_every=2, eval_batches=1, log_every=1, learning_rate=1e-3)


def adapted(
    dense: Checkpoint, parts: str, capacity: float = 0.5, adapter: str = "linear", layers: tuple[int, ...] = LAYERS
) -> Checkpoint:
    spec = routed_spec(dense.spec, layers, capacity, parts, "predictor", adapter=adapter, routers="fitted")
    return retrofitted(dense, spec, 0)


def weight_of(checkpoint: Checkpoint, layer: int) -> torch.Tensor:
    return checkpoint.weights[f"layers.{layer}.adapter.down_proj.weight"]


def text(batches: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (2, 32), generator=generator) for _ in range(batches)]


def ranking(checkpoint: Checkpoint) -> Transformer:
    """The model with top-k in place of predictors."""
    routing = dataclasses.replace(checkpoint.spec.routing, selection="topk")
    return Checkpoint(spec=dataclasses.replace(checkpoint.spec, routing=routing), weights=checkpoint.weights).module()


def tokens_of(x_BSD: torch.Tensor, model: Transformer) -> Tokens:
    S = x_BSD.shape[1]
    live_BS = torch.ones(x_BSD.shape[:2], dtype=torch.bool)
    return Tokens(x_BSD, live_BS, model.rope_cos[:S], model.rope_sin[:S], None, S)


def regression(x: np.ndarray, y: np.ndarray, strength: float) -> np.ndarray:
    """Ridge is least squares with D more rows: sqrt(lambda) I, for which the answer is 0."""
    D = x.shape[1]
    ridge = strength * np.square(x).sum(0).mean()
    rows = np.concatenate([x, math.sqrt(ridge) * np.eye(D)])
    return np.linalg.lstsq(rows, np.concatenate([y, np.zeros((D, y.shape[1]))]), rcond=None)[0]


def seen_by(model: Transformer, dense: Transformer, layer: int, parts: str, ids_BS: torch.Tensor) -> list[np.ndarray]:
    """What router and adapter of a layer read and what its part would add, with all earlier layers routed."""
    streams = []
    hook = model.layers[layer].register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0].x_BTD))
    model.stream(ids_BS, torch.full((len(ids_BS),), ids_BS.shape[1]), Decisions())
    hook.remove()
    block, x_BSD = dense.layers[layer], streams[0]
    after_BSD = block(tokens_of(x_BSD, dense), Decisions())
    attended_BSD = x_BSD + block.attended(tokens_of(x_BSD, dense), Decisions())
    reads = {
        "block": (block.attention_norm(x_BSD), block.mlp_norm(x_BSD), after_BSD - x_BSD),
        "attention": (block.attention_norm(x_BSD), block.attention_norm(x_BSD), attended_BSD - x_BSD),
        "mlp": (block.mlp_norm(attended_BSD), block.mlp_norm(attended_BSD), after_BSD - attended_BSD),
    }
    return [tensor.flatten(0, 1).double().detach().numpy() for tensor in reads[parts]]


@pytest.mark.parametrize(("parts", "adapter"), [("block", "linear"), ("mlp", "linear"), ("attention", "none")])
def test_the_fit_is_that_of_numpy(parts: str, adapter: str) -> None:
    dense, batches = lively_checkpoint(DENSE), text()
    found = fitted(adapted(dense, parts, 0.25, adapter), batches)
    model, plain = ranking(found.checkpoint), dense.module()
    assert list(found.explained) == (list(LAYERS) if adapter == "linear" else [])
    for layer in LAYERS:
        r_ND, z_ND, y_ND = (
            np.concatenate(parts_of)
            for parts_of in zip(*(seen_by(model, plain, layer, parts, ids_BS) for ids_BS in batches), strict=True)
        )
        first_DD = regression(z_ND, y_ND, STRENGTH) if adapter == "linear" else np.zeros((16, 16))
        error_N = np.square(y_ND - z_ND @ first_DD).sum(1)
        error_N = np.minimum(error_N, np.quantile(error_N, CLIPPED))
        error_N -= error_N.mean()
        r_ND = r_ND - r_ND.mean(0)
        direction_D = regression(r_ND, error_N[:, None], ROUTER_STRENGTH)[:, 0]
        score_N = r_ND @ direction_D
        router_D = found.checkpoint.weights[f"layers.{layer}.router.projection.weight"][0].numpy()
        np.testing.assert_allclose(router_D, direction_D / score_N.std(), rtol=1e-2, atol=1e-3)
        rest = np.square(error_N - score_N).sum() / np.square(error_N).sum()
        assert found.foreseen[layer] == pytest.approx(1 - rest, abs=1e-3)
        assert 0.01 < found.foreseen[layer] < 1
        if adapter == "none":
            continue
        # The adapter is fitted to the tokens that top-k leaves in each row.
        score_BS = (r_ND @ router_D.astype(np.float64)).reshape(-1, 32)
        skipped_BS = np.ones(score_BS.shape, bool)
        np.put_along_axis(skipped_BS, np.argsort(-score_BS)[:, :8], False, axis=1)
        z_ND, y_ND = z_ND[skipped_BS.flatten()], y_ND[skipped_BS.flatten()]
        expected_DD = regression(z_ND, y_ND, STRENGTH)
        weight_DD = weight_of(found.checkpoint, layer)
        assert weight_DD.dtype == torch.float32
        np.testing.assert_allclose(weight_DD.numpy(), expected_DD.T, rtol=1e-3, atol=1e-4)
        rest = np.square(y_ND - z_ND @ expected_DD).sum() / np.square(y_ND).sum()
        assert found.explained[layer] == pytest.approx(1 - rest, abs=1e-4)
        assert 0.02 < found.explained[layer] < 0.98


def test_a_linear_part_is_found_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a gate so steep that silu is linear, and attention that adds nothing, the block is W norm(x)."""
    dense = lively_checkpoint(DENSE)
    weights = dict(dense.weights)
    expected = {}
    for layer in LAYERS:
        prefix = f"layers.{layer}."
        up_FD, down_DF = weights[f"{prefix}mlp.up_proj.weight"], weights[f"{prefix}mlp.down_proj.weight"]
        weights[f"{prefix}attention.o_proj.weight"] = torch.zeros_like(weights[f"{prefix}attention.o_proj.weight"])
        weights[f"{prefix}mlp.gate_proj.weight"] = torch.zeros_like(up_FD)
        # A bias of the gate makes every gate silu(1).
        weights[f"{prefix}mlp.gate_proj.bias"] = torch.ones(len(up_FD))
        expected[layer] = torch.nn.functional.silu(torch.tensor(1.0)) * (down_DF @ up_FD)
    spec = dataclasses.replace(DENSE, mlp_bias=True)
    for name, shape in lively_checkpoint(spec).weights.items():
        weights.setdefault(name, torch.zeros_like(shape))
    linear = Checkpoint(spec=spec, weights=weights)
    # The usual ridge makes small directions shorter.
    monkeypatch.setattr(approximate, "STRENGTH", 1e-12)
    for parts in ("block", "mlp"):
        found = fitted(adapted(linear, parts), text())
        for layer in LAYERS:
            torch.testing.assert_close(weight_of(found.checkpoint, layer), expected[layer], rtol=1e-3, atol=1e-3)
            assert found.explained[layer] == pytest.approx(1, abs=1e-5)


def test_tokens_that_bend_the_regression_run() -> None:
    """The last token of each row has an MLP many times as long as others have."""
    weights = {name: tensor.clone() for name, tensor in lively_checkpoint(DENSE).weights.items()}
    weights["embedding.weight"][:, 3] = 0.0
    weights["embedding.weight"][7, 3] = 300.0
    for name in ("gate_proj", "up_proj"):
        weights[f"layers.0.mlp.{name}.weight"][:, 3] *= 30.0
    dense = Checkpoint(spec=DENSE, weights=weights)
    batches = [torch.cat([ids_BS[:, 1:].clamp(min=8), torch.full((len(ids_BS), 1), 7)], 1) for ids_BS in text()]
    found = fitted(adapted(dense, "mlp", 0.25, layers=(0,)), batches)
    decisions = Decisions()
    ranking(found.checkpoint).stream(batches[0], torch.tensor([32, 32]), decisions)
    assert bool((decisions.made[0].position_BK == 31).any(1).all())


@pytest.mark.parametrize("selection", ["predictor", "threshold"])
@pytest.mark.parametrize("parts", ["block", "attention", "mlp", "separate"])
def test_at_capacity_1_fitted_routers_change_nothing(parts: str, selection: str) -> None:
    dense = lively_checkpoint(DENSE)
    spec = routed_spec(DENSE, LAYERS, 1.0, parts, selection, routers="fitted")
    model = fitted(retrofitted(dense, spec, 0), text(2)).checkpoint.module()
    ids_BS, lengths_B = distinct_ids(DENSE, 3, 32), torch.tensor([32, 17, 1])
    (expected_BSV,), (found_BSV,) = dense.module()(ids_BS, lengths_B), model(ids_BS, lengths_B)
    for row, length in enumerate(lengths_B.tolist()):
        assert torch.equal(found_BSV[row, :length], expected_BSV[row, :length])


def test_a_threshold_lets_as_many_tokens_pass_as_the_capacity() -> None:
    spec = routed_spec(DENSE, LAYERS, 0.25, "separate", "threshold", routers="fitted")
    batches = text(40)
    found = fitted(retrofitted(lively_checkpoint(DENSE), spec, 0), batches)
    assert list(found.foreseen) == ["1.attention", "1.mlp", "3.attention", "3.mlp"]
    decisions = Decisions()
    ids_BS = torch.cat(batches)
    found.checkpoint.module().stream(ids_BS, torch.full((len(ids_BS),), 32), decisions)
    for site, seen in decisions.seen.items():
        # Attention that skips tokens changes what the MLP's router reads a little.
        assert float((seen.l_BT > 0).float().mean()) == pytest.approx(0.25, abs=0.1), site
        assert float(seen.l_BT.std()) == pytest.approx(1, abs=0.2), site


def test_adapters_beside_routers_that_learn_are_fitted_to_all_tokens() -> None:
    dense, batches = lively_checkpoint(DENSE), text()
    spec = routed_spec(DENSE, LAYERS, 0.25, "mlp", "predictor", adapter="linear", routers="learned")
    begin = retrofitted(dense, spec, 0)
    found = fitted(begin, batches)
    assert (list(found.explained), found.foreseen) == (list(LAYERS), {})
    # A model whose tokens all run has the streams of the dense model.
    full = dataclasses.replace(spec, routing=dataclasses.replace(spec.routing, capacity=1.0))
    model, plain = ranking(Checkpoint(spec=full, weights=begin.weights)), dense.module()
    for layer in LAYERS:
        _, z_ND, y_ND = (
            np.concatenate(parts_of)
            for parts_of in zip(*(seen_by(model, plain, layer, "mlp", ids_BS) for ids_BS in batches), strict=True)
        )
        expected_DD = regression(z_ND, y_ND, STRENGTH).T
        np.testing.assert_allclose(weight_of(found.checkpoint, layer).numpy(), expected_DD, rtol=1e-3, atol=1e-4)
    changed = {
        name for name, tensor in found.checkpoint.weights.items() if not torch.equal(tensor, begin.weights[name])
    }
    assert changed == {f"layers.{layer}.adapter.down_proj.weight" for layer in LAYERS}


@pytest.mark.parametrize("adapter", ["linear", "gated"])
def test_only_adapters_and_routers_change(adapter: str) -> None:
    begin = adapted(lively_checkpoint(DENSE), "block", adapter=adapter)
    before = {name: tensor.clone() for name, tensor in begin.weights.items()}
    found = fitted(begin, text(2)).checkpoint
    assert found.spec == begin.spec
    changed = {name for name, tensor in found.weights.items() if not torch.equal(tensor, before[name])}
    names = ["adapter.down_proj.weight", "router.projection.weight"]
    names += ["adapter.gate_proj.weight", "adapter.up_proj.weight"] * (adapter == "gated")
    assert changed == {f"layers.{layer}.{name}" for layer in LAYERS for name in names}
    # The given weights stay as they are.
    assert all(torch.equal(tensor, before[name]) for name, tensor in begin.weights.items())


def test_zeros_skip_and_at_capacity_1_adapters_are_not_seen() -> None:
    dense = lively_checkpoint(DENSE)
    ids_BS, lengths_B = distinct_ids(DENSE, 3, 32), torch.tensor([32, 32, 32])
    for parts in ("block", "mlp"):
        plain, zeros = adapted(dense, parts, adapter="none"), adapted(dense, parts)
        (expected_BSV,), (found_BSV,) = (model.module().train()(ids_BS, lengths_B) for model in (plain, zeros))
        torch.testing.assert_close(found_BSV, expected_BSV)
        full = fitted(adapted(dense, parts, 1.0), text(2)).checkpoint
        (dense_BSV,), (full_BSV,) = dense.module()(ids_BS, lengths_B), full.module().train()(ids_BS, lengths_B)
        assert torch.equal(dense_BSV, full_BSV)


def test_skipped_tokens_run_neurons_of_the_mlp() -> None:
    """The fewer they are, the larger the error."""
    ids_BS, lengths_B = distinct_ids(DENSE, 3, 32), torch.tensor([32, 32, 32])
    dense = lively_checkpoint(dataclasses.replace(DENSE, d_ff=48))
    (expected_BSV,) = dense.module()(ids_BS, lengths_B)
    distances = []
    for share in (0.3, 0.7):
        spec = routed_spec(
            dense.spec, LAYERS, 0.25, "mlp", "predictor", adapter="gated", adapter_share=share, routers="fitted"
        )
        found = fitted(retrofitted(dense, spec, 0), text())
        (found_BSV,) = ranking(found.checkpoint)(ids_BS, lengths_B)
        distances.append(float((found_BSV - expected_BSV).norm() / expected_BSV.norm()))
        mlp_FD, own_KD = (found.checkpoint.weights[f"layers.1.{name}.gate_proj.weight"] for name in ("mlp", "adapter"))
        assert len(own_KD) == {0.3: 16, 0.7: 32}[share]
        assert all(any(torch.equal(row_D, other_D) for other_D in mlp_FD) for row_D in own_KD)
    assert distances[0] > 1.5 * distances[1] > 0.01


@pytest.mark.parametrize("adapter", ["linear", "gated"])
def test_where_every_token_runs_adapters_stay_as_fitted_to_all_tokens(adapter: str) -> None:
    dense = lively_checkpoint(DENSE)
    found = fitted(adapted(dense, "mlp", 1.0, adapter, (1,)), text()).checkpoint
    learned = routed_spec(DENSE, (1,), 1.0, "mlp", "predictor", adapter=adapter, routers="learned")
    expected = fitted(retrofitted(dense, learned, 0), text()).checkpoint
    names = [name for name in expected.weights if ".adapter." in name]
    assert len(names) == {"linear": 1, "gated": 3}[adapter]
    for name in names:
        torch.testing.assert_close(found.weights[name], expected.weights[name])
    assert float(weight_of(found, 1).abs().sum()) > 0


def test_as_many_tokens_as_asked() -> None:
    corpus, config = read_corpus(), TrainConfig(batch=3, seq=20)
    batches = rows_to_fit(corpus, config, 100)
    assert [ids_BS.shape for ids_BS in batches] == [(3, 20), (3, 20)]
    assert not torch.equal(batches[0], batches[1])
    assert torch.equal(batches[0], rows_to_fit(corpus, config)[0])


# Training.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("dense")
    config = TrainConfig(
        steps=150, batch=8, seq=32, warmup=5, eval_every=150, eval_batches=1, learning_rate=2e-2, log_every=150
    )
    list(train(DENSE, config, folder))
    return Checkpoint(spec=DENSE, weights=state(folder)["model"])


@pytest.mark.parametrize(
    ("parts", "adapter"),
    [("block", "linear"), ("block", "gated"), ("mlp", "linear"), ("mlp", "none")],
)
def test_before_training_the_loss_is_lower_than_at_an_arbitrary_start(
    trained: Checkpoint, parts: str, adapter: str
) -> None:
    """Each of the two helps: routers that are fitted, and adapters that are."""
    corpus, config = read_corpus(), TrainConfig(batch=8, seq=32, eval_batches=8)
    begin = adapted(trained, parts, 0.25, adapter, (0, 1, 2, 3))
    found = fitted(begin, rows_to_fit(corpus, config, 10_000)).checkpoint
    arbitrary = {name: tensor for name, tensor in begin.weights.items() if ".router." in name}
    only_adapters = Checkpoint(spec=begin.spec, weights={**found.weights, **arbitrary})

    def bits(checkpoint: Checkpoint) -> float:
        return float(evaluate(ranking(checkpoint), config, corpus)["bits_per_byte"])

    assert bits(found) < bits(only_adapters) - 0.03
    if adapter != "none":
        assert bits(only_adapters) < bits(begin) - 0.03


@pytest.mark.slow
def test_a_run_fits_before_its_first_step_and_resumes_to_the_same(trained: Checkpoint, tmp_path: Path) -> None:
    begin, whole, parts = adapted(trained, "mlp"), tmp_path / "whole", tmp_path / "parts"
    config = dataclasses.replace(CONFIG, distill=1.0)
    said = lines(train(begin.spec, config, whole, initial=begin, fit=True))
    assert said[0].startswith("adapters fitted; what they explain in each layer: 1: ")
    assert said[1].startswith("routers fitted; what they explain in each layer: 1: ")
    list(train(begin.spec, config, parts, initial=begin, fit=True, stop_after=2))
    assert lines(train(begin.spec, config, parts, initial=begin, fit=True))[0] == "resumed at step 2"
    assert (parts / "log.csv").read_text() == (whole / "log.csv").read_text()
    assert (parts / "model.pt").read_bytes() == (whole / "model.pt").read_bytes()
    assert bool(weight_of(load_checkpoint(whole / "model.pt"), 1).abs().sum() > 0)


def test_fitted_routers_stay_as_they_are(trained: Checkpoint, tmp_path: Path) -> None:
    begin = adapted(trained, "mlp")
    list(train(begin.spec, dataclasses.replace(CONFIG, distill=1.0), tmp_path, initial=begin))
    for name, tensor in state(tmp_path)["model"].items():
        assert torch.equal(tensor, begin.weights[name]) == (".router." in name), name


def test_adapters_have_the_normal_rate(trained: Checkpoint, tmp_path: Path) -> None:
    begin = retrofitted(trained, routed_spec(DENSE, LAYERS, 0.5, "mlp", "predictor", adapter="linear"), 0)
    config = dataclasses.replace(CONFIG, learning_rate=0.0, router_learning_rate=1e-2)
    list(train(begin.spec, config, tmp_path / "routers", initial=begin))
    config = dataclasses.replace(CONFIG, train="routers")
    list(train(begin.spec, config, tmp_path / "all", initial=begin))
    for folder, moved in (("routers", r"router|predictor"), ("all", r"router|predictor|adapter")):
        for name, tensor in state(tmp_path / folder)["model"].items():
            expected = ROUTES.match(name) is not None and any(kind in name for kind in moved.split("|"))
            assert torch.equal(tensor, begin.weights[name]) != expected, name
    assert rows(tmp_path / "all")
