"""What an exporter finds at the entry point; this package needs no exporter."""

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
import torch
from observing import observed
from tiny_models import distinct_ids, lively_checkpoint, make_spec

from mod_models.architecture import MOD_TRANSFORMER, LoadedTransformer
from mod_models.checkpoint import Checkpoint, save_checkpoint
from mod_models.flops import layer_costs
from mod_models.spec import ModelSpec, SpecError
from mod_models.train import DEFAULT_SPEC
from mod_models.train.corpus import read_split
from mod_models.transformer import Transformer

SPEC = make_spec(predictor_hidden=2)


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedTransformer:
    save_checkpoint(tmp_path / "model.pt", lively_checkpoint(SPEC))
    return MOD_TRANSFORMER.read(tmp_path / "model.pt")


def test_entry_point() -> None:
    (entry,) = entry_points(group="mod_export.architectures", name="mod_transformer")
    assert entry.load() is MOD_TRANSFORMER
    assert MOD_TRANSFORMER.name == "mod_transformer"


def test_imports_nothing_of_the_exporter() -> None:
    code = "import sys, mod_models.architecture, mod_models.train; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {name.split(".")[0] for name in modules}.isdisjoint({"onnx", "onnx_ir", "onnxruntime", "onnxscript"})
    assert {name for name in modules if name.startswith("mod_export")} == {"mod_export", "mod_export.marker"}


def test_what_was_read(loaded: LoadedTransformer) -> None:
    assert loaded.spec == SPEC.to_dict() == json.loads(json.dumps(loaded.spec))
    assert loaded.weights.keys() == lively_checkpoint(SPEC).weights.keys()
    assert loaded.vocab_size == 16
    assert loaded.max_positions == 16
    assert loaded.k_by_layer(8) == {0: 3, 2: 3}
    assert loaded.dense().k_by_layer(8) == {}
    assert loaded.layers(2, 8) == layer_costs(SPEC, 2, 8)


def test_restore_is_the_inverse(loaded: LoadedTransformer) -> None:
    again = MOD_TRANSFORMER.restore(json.loads(json.dumps(loaded.spec)), loaded.weights)
    assert again.checkpoint.spec == SPEC
    assert again.weights is loaded.weights


def test_sites_are_observed_and_forced(loaded: LoadedTransformer) -> None:
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


def test_text_of_a_vocabulary_of_bytes(loaded: LoadedTransformer) -> None:
    bytes_model = LoadedTransformer(Checkpoint(spec=make_spec(vocab_size=256), weights={}))
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
    loaded = LoadedTransformer(lively_checkpoint(make_spec(router=router, predictor_hidden=2)))
    assert any(".predictor." in name for name in loaded.weights)
    assert sorted(loaded.router_weights()) == sorted(f"layers.{i}.router.{part}" for i in (0, 2) for part in parts)
    assert {name: sites for name, sites in loaded.router_weights().items() if sites not in ((0,), (2,))} == {}
    assert loaded.dense().router_weights() == {}


def test_a_float64_model_routes_and_gates_in_float64() -> None:
    """Its distance from float32 measures the rounding error, so nothing in it may be rounded to float32."""
    spec = make_spec(router="mlp")
    loaded = LoadedTransformer(lively_checkpoint(spec))
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


def test_random(tmp_path: Path) -> None:
    spec = SPEC.to_dict()
    for name in ("a.pt", "b.pt"):
        MOD_TRANSFORMER.random(spec, 7, tmp_path / name)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    assert MOD_TRANSFORMER.read(tmp_path / "a.pt").spec == spec
    del spec["n_layers"]
    with pytest.raises(SpecError, match=r"^spec\.n_layers: missing$"):
        MOD_TRANSFORMER.random(spec, 0, tmp_path / "c.pt")
    assert not (tmp_path / "c.pt").exists()


def test_timed_spec() -> None:
    spec = ModelSpec.from_dict(MOD_TRANSFORMER.timed_spec())
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in Transformer(spec).parameters())
    assert size == 39_599_616
    assert spec.k_by_layer(512) == dict.fromkeys((1, 3, 5, 7, 9, 11), 64)


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
