"""A linear map, or some neurons of an MLP, in place of what a part adds: the regressions are those of NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import make_spec

from mod_models.layers import GatedMlp
from mod_models.train import approximate
from mod_models.train.approximate import SHORTENED, STRENGTH, linear_map, neurons

D, F = 16, 48
SPEC = make_spec(routing=None, d_model=D, d_ff=F)


def mlp_of(*, bias: bool = False) -> GatedMlp:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return GatedMlp(SPEC, F, bias=bias)


def tokens(count: int = 400, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed))


def regression(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Ridge is least squares with more rows: sqrt(lambda) I, for which the answer is 0."""
    rows = np.sqrt(STRENGTH * np.square(x).sum(0).mean()) * np.eye(x.shape[1])
    return np.linalg.lstsq(np.concatenate([x, rows]), np.concatenate([y, np.zeros((len(rows), D))]), rcond=None)[0]


def test_a_linear_map_is_that_of_numpy() -> None:
    batches = [tokens(100, seed) for seed in range(3)]
    noisy = [z_ND @ tokens(D, 9) + tokens(100, seed + 10) for seed, z_ND in enumerate(batches)]
    found = linear_map(list(zip(batches, noisy, strict=True)))
    z_ND, y_ND = torch.cat(batches).double().numpy(), torch.cat(noisy).double().numpy()
    expected_DD = regression(z_ND, y_ND)
    np.testing.assert_allclose(found.weight_DD.numpy(), expected_DD.T, rtol=1e-3, atol=1e-4)
    rest = np.square(y_ND - z_ND @ expected_DD).sum() / np.square(y_ND).sum()
    assert found.explained == pytest.approx(1 - rest, abs=1e-4)
    assert 0.5 < found.explained < 0.98


@pytest.mark.parametrize("bias", [False, True])
def test_neurons_are_those_of_numpy(bias: bool) -> None:
    mlp, batches = mlp_of(bias=bias), [tokens(100, seed) for seed in range(3)]
    # What an MLP adds to a token that also skips attention: its own output and something else.
    adds = [mlp(z_ND).detach() + 0.1 * tokens(100, seed + 10) for seed, z_ND in enumerate(batches)]
    found = neurons(mlp, list(zip(batches, adds, strict=True)), 20)
    h_NF, y_ND, lengths = [], [], []
    for z_ND, added_ND in zip(batches, adds, strict=True):
        left_ND = (added_ND - mlp.down_proj.bias if bias else added_ND).detach().double().numpy()
        lengths.append(np.linalg.norm(left_ND, axis=1))
        h_NF.append(mlp.hidden(z_ND).detach().double().numpy())
        y_ND.append(left_ND)
    length_N = np.concatenate(lengths)
    scale_N1 = np.minimum(1, np.quantile(length_N, SHORTENED) / length_N)[:, None]
    h, y = np.concatenate(h_NF) * scale_N1, np.concatenate(y_ND) * scale_N1
    down_DF = mlp.down_proj.weight.detach().double().numpy()
    kept = np.sort(np.argsort(-np.linalg.norm(h, axis=0) * np.linalg.norm(down_DF, axis=0))[:20])
    assert found.kept_K.tolist() == kept.tolist()
    expected = down_DF[:, kept] + regression(h[:, kept], y - h[:, kept] @ down_DF[:, kept].T).T
    assert found.down_DK.dtype == torch.float32
    np.testing.assert_allclose(found.down_DK.numpy(), expected, rtol=1e-3, atol=1e-4)
    rest = np.square(y - h[:, kept] @ expected.T).sum() / np.square(y).sum()
    assert found.explained == pytest.approx(1 - rest, abs=1e-4)
    assert 0.3 < found.explained < 0.98
    # They explain more than with the weights that they had.
    assert np.square(y - h[:, kept] @ expected.T).sum() < 0.9 * np.square(y - h[:, kept] @ down_DF[:, kept].T).sum()


@pytest.mark.parametrize("bias", [False, True])
def test_all_neurons_are_the_mlp(bias: bool) -> None:
    mlp, z_ND = mlp_of(bias=bias), tokens()
    found = neurons(mlp, [(z_ND, mlp(z_ND).detach())], F)
    assert found.kept_K.tolist() == list(range(F))
    torch.testing.assert_close(found.down_DK, mlp.down_proj.weight.detach(), rtol=1e-5, atol=1e-6)
    assert found.explained == pytest.approx(1, abs=1e-6)


def test_neurons_that_add_nothing_are_not_kept() -> None:
    mlp, z_ND = mlp_of(), tokens()
    silent = [0, 7, 30, 47]
    with torch.no_grad():
        mlp.down_proj.weight[:, silent[:2]] = 0.0
        mlp.up_proj.weight[silent[2:]] = 0.0
    found = neurons(mlp, [(z_ND, mlp(z_ND).detach())], F - len(silent))
    assert found.kept_K.tolist() == [neuron for neuron in range(F) if neuron not in silent]
    assert found.explained == pytest.approx(1, abs=1e-6)


def test_a_few_long_outputs_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens of four hundred make eight neurons a million times as large as others are."""
    mlp, z_ND = mlp_of(), tokens()
    with torch.no_grad():
        for projection in (mlp.gate_proj, mlp.up_proj):
            projection.weight[:8] = 0.0
            projection.weight[:, 0] = 0.0
            projection.weight[:8, 0] = 1.0
        z_ND[:, 0] = 1e-3
        z_ND[:2, 0] = 1000.0
    pairs = [(z_ND, mlp(z_ND).detach())]
    assert min(neurons(mlp, pairs, F - 8).kept_K.tolist()) == 8
    monkeypatch.setattr(approximate, "SHORTENED", 1.0)
    assert neurons(mlp, pairs, F - 8).kept_K.tolist()[:8] == list(range(8))


def test_a_part_that_adds_nothing_or_reads_nothing() -> None:
    mlp, z_ND = mlp_of(), tokens()
    zeros_ND = torch.zeros_like(z_ND)
    line, found = linear_map([(z_ND, zeros_ND)]), neurons(mlp, [(z_ND, zeros_ND)], F)
    assert (line.explained, found.explained) == (1.0, 1.0)
    assert float(line.weight_DD.abs().max()) == 0.0
    # What the neurons would add is taken away.
    left_ND = mlp.hidden(z_ND).detach() @ found.down_DK.T
    assert float(left_ND.norm() / mlp(z_ND).detach().norm()) < 0.1
    line, found = linear_map([(zeros_ND, z_ND)]), neurons(mlp, [(zeros_ND, z_ND)], 16)
    assert (line.explained, found.explained) == (0.0, 0.0)
    assert torch.equal(found.down_DK, mlp.down_proj.weight[:, found.kept_K])
