"""The probe: the rise of the loss if tokens skip one layer, compared with models in which they do."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tiny_models import lively_checkpoint, make_spec
from tokenizers import Tokenizer, models
from torch.nn import functional

from mod_models import probe
from mod_models.checkpoint import Checkpoint, save_checkpoint
from mod_models.probe import PARTS, Cost, costs_of
from mod_models.spec import ExpertsSpec, RoutingSpec
from mod_models.train import TrainError
from mod_models.train.corpus import read_corpus
from mod_models.train.retrofit import layers_of

DENSE = make_spec(routing=None, vocab_size=256, d_model=16, n_layers=3, max_positions=64)
QUICK = ["--seq", "16", "--batches", "2", "--batch", "1", "--threads", "1"]


@pytest.fixture(scope="module")
def dense() -> Checkpoint:
    return lively_checkpoint(DENSE)


def batches(count: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 256, (2, 17), generator=generator) for _ in range(count)]


def loss_of(checkpoint: Checkpoint, ids_BS1: torch.Tensor) -> float:
    (logits_BSV,) = checkpoint.module()(ids_BS1[:, :-1], torch.tensor([16, 16]))
    return float(functional.cross_entropy(logits_BSV.flatten(0, 1), ids_BS1[:, 1:].flatten()))


@pytest.mark.parametrize("skip", [0.25, 1.0])
def test_costs_are_those_of_models_in_which_tokens_skip(dense: Checkpoint, skip: float) -> None:
    *_, (loss, found) = costs_of(dense, batches(), skip=skip)
    expected = sum(loss_of(dense, ids) for ids in batches()) / 2
    assert loss == pytest.approx(expected, rel=1e-6)
    assert [(cost.layer, cost.part) for cost in found] == [(layer, part) for layer in range(3) for part in PARTS]
    for cost in found:
        routing = RoutingSpec(
            layers=(cost.layer,), parts=cost.part, router="noise", gate="ones", combine="replace_ungated",
            capacity_rule="floor", capacity=max(1 - skip, 1e-9),
        )  # fmt: skip
        skipping = Checkpoint(spec=dataclasses.replace(DENSE, routing=routing), weights=dense.weights)
        with_skips = sum(loss_of(skipping, ids) for ids in batches()) / 2
        assert cost.cost == pytest.approx(with_skips - expected, abs=2e-6)
        assert cost.cost != 0


def test_a_layer_that_does_nothing_costs_nothing(dense: Checkpoint) -> None:
    weights = dict(dense.weights)
    for name in ("layers.1.attention.o_proj.weight", "layers.1.mlp.down_proj.weight"):
        weights[name] = torch.zeros_like(weights[name])
    *_, (_, found) = costs_of(Checkpoint(spec=DENSE, weights=weights), batches(1))
    assert {cost.layer for cost in found if cost.cost == 0} == {1}
    assert [cost for cost in found if cost.layer == 1] == [Cost(1, part, 0.0) for part in PARTS]


def test_the_command(
    dense: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "dense", dense)
    out = tmp_path / "probe.json"
    assert probe.main([str(tmp_path / "dense"), "--out", str(out), *QUICK]) == 0
    said = capsys.readouterr()
    assert said.err == "batch 1/2\nbatch 2/2\n"
    result = json.loads(out.read_text())
    assert (result["tokens"], result["skip"]) == (32, 0.5)
    costs = {(row["layer"], row["part"]): row["cost"] for row in result["rows"]}
    text = said.out.splitlines()
    assert text[0] == (f"held-out loss {result['loss']:.4f} nats a token; what it rises by if 50% of the tokens skip:")
    assert text[2].split() == ["layer", *PARTS]
    assert text[4].split() == ["1", *(f"{costs[1, part]:+.4f}" for part in PARTS)]
    ranked = sorted(range(3), key=lambda layer: costs[layer, "mlp"])
    assert f"mlp, cheapest first: {', '.join(map(str, ranked))}" in text
    # Training reads the same ranking.
    assert layers_of(f"{out}:2", 3, "mlp") == tuple(sorted(ranked[:2]))
    # With one part alone, training can read no other.
    assert probe.main([str(tmp_path / "dense"), "--parts", "mlp", "--out", str(out), *QUICK]) == 0
    with pytest.raises(TrainError, match="has no cost of --parts block for each of the 3 layers"):
        layers_of(f"{out}:2", 3, "block")


@pytest.mark.parametrize("named", ["folder", "model.pt"])
def test_the_tokenizer_in_the_checkpoints_folder(dense: Checkpoint, tmp_path: Path, named: str) -> None:
    folder, text = tmp_path / "dense", tmp_path / "text.txt"
    folder.mkdir()
    path = folder if named == "folder" else folder / named
    save_checkpoint(path, dense)
    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(folder / "tokenizer.json"))
    text.write_text("abba" * 200)
    out = tmp_path / "probe.json"
    assert probe.main([str(path), "--data", str(text), "--parts", "mlp", "--out", str(out), *QUICK]) == 0
    assert json.loads(out.read_text())["data"] == read_corpus(text, folder / "tokenizer.json").fingerprint


def test_models_and_shares_that_cannot_be_probed(dense: Checkpoint) -> None:
    with pytest.raises(TrainError, match=r"^expected a dense model, this one routes$"):
        next(costs_of(lively_checkpoint(make_spec()), batches()))
    with pytest.raises(TrainError, match=r"^expected a dense model, this one has experts$"):
        next(costs_of(lively_checkpoint(make_spec(routing=None, experts=ExpertsSpec())), batches()))
    with pytest.raises(TrainError, match=r"^--skip: expected a share above 0 and up to 1, got 0$"):
        next(costs_of(dense, batches(), skip=0.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["dense", "--seq", "65"], "--seq, --batch, --batches: expected 1 at least, and rows of 64 tokens at most"),
        (["dense", "--batches", "0"], "--seq, --batch, --batches: expected 1 at least"),
        (["small"], "the tokens of this Python's sources need a vocabulary of 256, got 16"),
        (["dense", "--out", "dense/config.json/x"], "[Errno 17] File exists: 'dense/config.json'"),
        (["foreign.pt"], "foreign.pt: holds the architecture other, which is none of this package"),
    ],
)
def test_command_line_errors(
    dense: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    options: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    save_checkpoint(Path("dense"), dense)
    save_checkpoint(Path("small"), lively_checkpoint(make_spec(routing=None)))
    torch.save({"format_version": 1, "architecture": "other", "spec": {}, "weights": {}}, "foreign.pt")
    with pytest.raises(SystemExit) as caught:
        probe.main([*QUICK, *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
