"""Linear adapters fitted to a dense model: the regression is right, and the retrofitted model is better for it."""

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
from mod_models.train import TrainConfig
from mod_models.train.corpus import read_corpus
from mod_models.train.evaluation import evaluate
from mod_models.train.retrofit import retrofitted, routed_spec
from mod_models.train.ridge import STRENGTH, fitted, rows_to_fit
from mod_models.train.run import train
from mod_models.transformer import Transformer

DENSE = make_spec(routing=None, vocab_size=256, d_model=16, d_ff=24, n_layers=4, max_positions=32)
LAYERS = (1, 3)
CONFIG = TrainConfig(steps=4, batch=2, seq=16, warmup=2, eval_every=2, eval_batches=1, log_every=1, learning_rate=1e-3)


def adapted(
    dense: Checkpoint, parts: str, capacity: float = 0.5, adapter: str = "linear", layers: tuple[int, ...] = LAYERS
) -> Checkpoint:
    return retrofitted(dense, routed_spec(dense.spec, layers, capacity, parts, "predictor", adapter=adapter), 0)


def weight_of(checkpoint: Checkpoint, layer: int) -> torch.Tensor:
    return checkpoint.weights[f"layers.{layer}.adapter.down_proj.weight"]


def text(batches: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (2, 32), generator=generator) for _ in range(batches)]


def streams(dense: Checkpoint, ids_BS: torch.Tensor) -> list[torch.Tensor]:
    """The stream before each block and after the last."""
    model, found = dense.module(), []
    for block in model.layers:
        block.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].x_BTD))
    found.append(model.stream(ids_BS, torch.full((len(ids_BS),), ids_BS.shape[1]), Decisions()))
    return found


def tokens_of(x_BSD: torch.Tensor, model: Transformer) -> Tokens:
    S = x_BSD.shape[1]
    live_BS = torch.ones(x_BSD.shape[:2], dtype=torch.bool)
    return Tokens(x_BSD, live_BS, model.rope_cos[:S], model.rope_sin[:S], None, S)


@pytest.mark.parametrize("parts", ["block", "mlp"])
def test_the_fit_is_that_of_numpy(parts: str) -> None:
    dense = lively_checkpoint(DENSE)
    found = fitted(adapted(dense, parts), text())
    model = dense.module()
    for layer in LAYERS:
        z, y = [], []
        for ids_BS in text():
            before_BSD, after_BSD = streams(dense, ids_BS)[layer : layer + 2]
            block = model.layers[layer]
            normed_BSD = block.mlp_norm(before_BSD)
            delta_BSD = after_BSD - before_BSD
            if parts == "mlp":
                # The adapter stands in for the MLP alone, and reads the stream after attention.
                attended_BSD = before_BSD + block.attended(tokens_of(before_BSD, model), Decisions())
                normed_BSD, delta_BSD = block.mlp_norm(attended_BSD), after_BSD - attended_BSD
            z.append(normed_BSD.flatten(0, 1).double().numpy())
            y.append(delta_BSD.flatten(0, 1).double().numpy())
        z_ND, y_ND = np.concatenate(z), np.concatenate(y)
        # Ridge is least squares with D more rows: sqrt(lambda) I, for which the answer is 0.
        ridge = STRENGTH * np.square(z_ND).sum(0).mean()
        rows_ND = np.concatenate([z_ND, math.sqrt(ridge) * np.eye(16)])
        expected_DD = np.linalg.lstsq(rows_ND, np.concatenate([y_ND, np.zeros((16, 16))]), rcond=None)[0].T
        weight_DD = weight_of(found.checkpoint, layer)
        assert weight_DD.dtype == torch.float32
        np.testing.assert_allclose(weight_DD.numpy(), expected_DD, rtol=1e-3, atol=1e-4)
        rest = np.square(y_ND - z_ND @ expected_DD.T).sum() / np.square(y_ND).sum()
        assert found.explained[layer] == pytest.approx(1 - rest, abs=1e-4)
        assert 0.02 < found.explained[layer] < 0.98


def test_a_linear_part_is_found_exactly() -> None:
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
    for parts in ("block", "mlp"):
        # Without a ridge it is exact; with one, shrunk a little.
        found = fitted(adapted(linear, parts), text(), strength=1e-12)
        for layer in LAYERS:
            torch.testing.assert_close(weight_of(found.checkpoint, layer), expected[layer], rtol=1e-3, atol=1e-3)
            assert found.explained[layer] == pytest.approx(1, abs=1e-5)
        shrunk = fitted(adapted(linear, parts), text(), strength=1.0)
        for layer in LAYERS:
            assert weight_of(shrunk.checkpoint, layer).norm() < 0.9 * expected[layer].norm()


def test_only_adapters_change() -> None:
    begin = adapted(lively_checkpoint(DENSE), "block")
    before = {name: tensor.clone() for name, tensor in begin.weights.items()}
    found = fitted(begin, text(2)).checkpoint
    assert found.spec == begin.spec
    changed = {name for name, tensor in found.weights.items() if not torch.equal(tensor, before[name])}
    assert changed == {f"layers.{layer}.adapter.down_proj.weight" for layer in LAYERS}
    # The given weights stay zeros.
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


def test_as_many_tokens_as_asked() -> None:
    corpus, config = read_corpus(), TrainConfig(batch=3, seq=20)
    batches = list(rows_to_fit(corpus, config, 100))
    assert [ids_BS.shape for ids_BS in batches] == [(3, 20), (3, 20)]
    assert not torch.equal(batches[0], batches[1])
    assert torch.equal(batches[0], next(rows_to_fit(corpus, config)))


# Training.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("dense")
    config = TrainConfig(
        steps=300, batch=8, seq=32, warmup=5, eval_every=300, eval_batches=1, learning_rate=2e-2, log_every=300
    )
    list(train(DENSE, config, folder))
    return Checkpoint(spec=DENSE, weights=state(folder)["model"])


@pytest.mark.parametrize("parts", ["block", "mlp"])
def test_before_training_the_loss_is_lower_than_without_adapters(trained: Checkpoint, parts: str) -> None:
    """Which quarter of the tokens runs is arbitrary here, because the routers are new; top-k decides."""
    corpus, config = read_corpus(), TrainConfig(batch=8, seq=32, eval_batches=8)
    layers = (0, 1, 2, 3)
    plain, begin = (adapted(trained, parts, 0.25, adapter, layers) for adapter in ("none", "linear"))
    found = fitted(begin, rows_to_fit(corpus, config, 10_000))
    assert all(0 < share < 1 for share in found.explained.values())

    def bits(checkpoint: Checkpoint) -> float:
        routing = dataclasses.replace(checkpoint.spec.routing, selection="topk")
        spec = dataclasses.replace(checkpoint.spec, routing=routing)
        model = Checkpoint(spec=spec, weights=checkpoint.weights).module()
        return float(evaluate(model, config, corpus)["bits_per_byte"])

    without, with_adapters = bits(plain), bits(found.checkpoint)
    assert with_adapters < without - 0.03, (with_adapters, without)


def test_a_run_fits_before_its_first_step_and_resumes_to_the_same(trained: Checkpoint, tmp_path: Path) -> None:
    begin, whole, parts = adapted(trained, "mlp"), tmp_path / "whole", tmp_path / "parts"
    config = dataclasses.replace(CONFIG, distill=1.0)
    said = lines(train(begin.spec, config, whole, initial=begin, fit=True))
    assert said[0].startswith("adapters fitted; what they explain of each layer: 1: ")
    list(train(begin.spec, config, parts, initial=begin, fit=True, stop_after=2))
    assert lines(train(begin.spec, config, parts, initial=begin, fit=True))[0] == "resumed at step 2"
    assert (parts / "log.csv").read_text() == (whole / "log.csv").read_text()
    assert (parts / "model.pt").read_bytes() == (whole / "model.pt").read_bytes()
    assert bool(weight_of(load_checkpoint(whole / "model.pt"), 1).abs().sum() > 0)


def test_adapters_have_the_normal_rate(trained: Checkpoint, tmp_path: Path) -> None:
    begin = adapted(trained, "mlp")
    config = dataclasses.replace(CONFIG, learning_rate=0.0, router_learning_rate=1e-2)
    list(train(begin.spec, config, tmp_path / "routers", initial=begin))
    config = dataclasses.replace(CONFIG, train="routers")
    list(train(begin.spec, config, tmp_path / "all", initial=begin))
    for folder, moved in (("routers", r"router|predictor"), ("all", r"router|predictor|adapter")):
        for name, tensor in state(tmp_path / folder)["model"].items():
            expected = ROUTES.match(name) is not None and any(kind in name for kind in moved.split("|"))
            assert torch.equal(tensor, begin.weights[name]) != expected, name
    assert rows(tmp_path / "all")
