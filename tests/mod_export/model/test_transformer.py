"""The transformer as a model to export."""

import json
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
import torch
from observing import observed
from tiny_models import distinct_ids, lively_checkpoint, make_spec

from mod_export.model.model import TokenIds
from mod_export.model.transformer import MOD_TRANSFORMER, ModTransformer, TransformerModel
from mod_models.checkpoint import Checkpoint, save_checkpoint
from mod_models.flops import layer_costs
from mod_models.train import DEFAULT_SPEC
from mod_models.train.corpus import read_split

SPEC = make_spec(predictor_hidden=2)


@pytest.fixture
def loaded(tmp_path: Path) -> TransformerModel:
    save_checkpoint(tmp_path / "model.pt", lively_checkpoint(SPEC))
    return MOD_TRANSFORMER.read(tmp_path / "model.pt")


def test_entry_point() -> None:
    (entry,) = entry_points(group="mod_export.architectures", name="mod_transformer")
    assert entry.load() is MOD_TRANSFORMER
    assert MOD_TRANSFORMER.name == "mod_transformer"


@pytest.mark.slow  # lint-imports checks the same of the source.
def test_the_models_import_nothing_of_the_exporter() -> None:
    code = "import sys, mod_models.convert, mod_models.train; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {name.split(".")[0] for name in modules}.isdisjoint({"onnx", "onnx_ir", "onnxruntime", "onnxscript"})
    assert {name for name in modules if name.startswith("mod_export")} == {"mod_export", "mod_export.marker"}


def test_what_was_read(loaded: TransformerModel) -> None:
    assert loaded.spec == SPEC.to_dict() == json.loads(json.dumps(loaded.spec))
    assert loaded.weights.keys() == lively_checkpoint(SPEC).weights.keys()
    assert loaded.tokens == TokenIds(vocab_size=16, max_positions=16)
    assert loaded.k_by_layer(8) == {0: 3, 2: 3}
    assert loaded.dense().k_by_layer(8) == {}
    assert [asdict(cost) for cost in loaded.layers(2, 8)] == [asdict(cost) for cost in layer_costs(SPEC, 2, 8)]


def test_restore_is_the_inverse(loaded: TransformerModel) -> None:
    again = MOD_TRANSFORMER.restore(json.loads(json.dumps(loaded.spec)), loaded.weights)
    assert again.checkpoint.spec == SPEC
    assert again.weights is loaded.weights


def test_sites_are_observed_and_forced(loaded: TransformerModel) -> None:
    module, ids_BS, lengths_B = loaded.module(), distinct_ids(SPEC, 2, 8), torch.tensor([8, 2])
    (logits_BSV,) = module(ids_BS, lengths_B)
    again_BSV, free = observed(module, ids_BS, lengths_B)
    assert torch.equal(logits_BSV, again_BSV)
    assert list(free) == [0, 2]
    forced_BK = torch.tensor([[0, 1, 2], [0, 1, 2]])
    forced_BSV, decided = observed(module, ids_BS, lengths_B, {2: forced_BK})
    assert decided[2].index_BK.tolist() == [[0, 1, 2], [0, 1, -1]] or torch.equal(decided[2].index_BK, forced_BK)
    assert torch.equal(decided[0].index_BK, free[0].index_BK)
    assert not torch.equal(forced_BSV, logits_BSV)


def test_text_of_a_vocabulary_of_bytes(loaded: TransformerModel) -> None:
    bytes_model = TransformerModel(Checkpoint(spec=make_spec(vocab_size=256), weights={}))
    ids_BS = bytes_model.sample_ids(3, 64, seed=5)
    assert (ids_BS.shape, ids_BS.dtype) == ((3, 64), np.int64)
    held_out = bytes(read_split("held_out").numpy())
    assert all(bytes(row.astype(np.uint8)) in held_out for row in ids_BS)
    assert np.array_equal(ids_BS, bytes_model.sample_ids(3, 64, seed=5))
    assert bytes_model.sample_ids(1, len(held_out), seed=0) is None
    assert bytes_model.token_texts(np.array([72, 105, 10, 0, 233])) == ["H", "i", "\n", "\x00", "\xe9"]
    ids_S = bytes_model.ids_of_text("H\u00e9\udcff")
    assert ids_S.dtype == np.int64
    assert ids_S.tolist() == [72, 0xC3, 0xA9, 0xFF]
    # The text of other vocabularies is unknown.
    assert loaded.sample_ids(1, 4, seed=0) is loaded.token_texts(np.array([1, 2])) is loaded.ids_of_text("H") is None


@pytest.mark.parametrize(
    ("router", "parts"),
    [
        ("linear", ["projection.weight"]),
        ("linear_bias", ["projection.weight", "projection.bias"]),
        ("mlp", ["hidden.weight", "hidden.bias", "projection.weight", "projection.bias"]),
        ("norm_mlp", ["hidden.weight", "hidden.bias", "norm.weight", "projection.weight", "projection.bias"]),
    ],
)
def test_weights_of_routers(router: str, parts: list[str]) -> None:
    """Weights of the predictors, which decide nothing here, are not included."""
    loaded = TransformerModel(lively_checkpoint(make_spec(router=router, predictor_hidden=2)))
    assert any(".predictor." in name for name in loaded.weights)
    assert sorted(loaded.router_weights()) == sorted(f"layers.{i}.router.{part}" for i in (0, 2) for part in parts)
    assert {name: sites for name, sites in loaded.router_weights().items() if sites not in ((0,), (2,))} == {}
    assert loaded.dense().router_weights() == {}


def test_a_float64_model_routes_and_gates_in_float64() -> None:
    """Its distance from float32 measures the rounding error, so nothing in it may be rounded to float32."""
    spec = make_spec(router="mlp")
    loaded = TransformerModel(lively_checkpoint(spec))
    ids_BS, lengths_B = distinct_ids(spec, 2, 8), torch.tensor([8, 5])
    logits_BSV, decided = observed(loaded.module().double(), ids_BS, lengths_B)
    assert logits_BSV.dtype == torch.float64
    for routing in decided.values():
        assert routing.score_BS.dtype == torch.float64
        assert not torch.equal(routing.score_BS, routing.score_BS.float().double())
    single_BSV, _ = observed(
        loaded.module(), ids_BS, lengths_B, {layer: routing.index_BK for layer, routing in decided.items()}
    )
    real_BS = torch.arange(8) < lengths_B[:, None]
    error = (logits_BSV - single_BSV)[real_BS].abs().max().item()
    # Both have float32 RoPE tables.
    assert 0 < error < 1e-5


def test_a_checkpoint_that_is_large_enough_to_be_timed(tmp_path: Path) -> None:
    assert MOD_TRANSFORMER.timed_checkpoint(7, tmp_path / "timed")
    model = MOD_TRANSFORMER.read(tmp_path / "timed")
    assert model.parameters == 39_599_616
    assert model.k_by_layer(512) == dict.fromkeys((1, 3, 5, 7, 9, 11), 64)


def test_code_that_graphs_depend_on() -> None:
    """A subclass in another package has modules of its own."""
    assert MOD_TRANSFORMER.package == "mod_models"
    assert type("Other", (ModTransformer,), {"__module__": "other.models"})().package == "other"


def test_demo_checkpoint() -> None:
    """The included model is the trained one that its card describes: on unseen text it is far better than chance."""
    path = MOD_TRANSFORMER.demo_checkpoint()
    assert path.stat().st_size < 8 * 2**20
    assert path.with_suffix(".md").exists()
    shipped = MOD_TRANSFORMER.read(path)
    assert shipped.checkpoint.spec == DEFAULT_SPEC
    ids_BS = torch.from_numpy(shipped.sample_ids(4, 257, seed=0))
    with torch.no_grad():
        logits_BSV, _ = observed(shipped.module(), ids_BS[:, :-1], torch.full((4,), 256))
    bits = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), ids_BS[:, 1:].flatten()).item() / 0.6931
    assert bits < 2.5
