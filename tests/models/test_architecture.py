"""What an exporter finds behind the entry point, and that this package needs no exporter."""

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import distinct_ids, lively_checkpoint, make_spec

from mod_models.architecture import MOD_TRANSFORMER, LoadedTransformer
from mod_models.checkpoint import Checkpoint, CheckpointError, save_checkpoint
from mod_models.corpus import read_split
from mod_models.routing import Routing
from mod_models.spec import ModelSpec, SpecError
from mod_models.train import DEFAULT_SPEC
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
    assert {name.split(".")[0] for name in modules}.isdisjoint({"mod_export", "onnx", "onnxruntime", "onnxscript"})


def test_what_was_read(loaded: LoadedTransformer) -> None:
    assert loaded.spec == SPEC.to_dict() == json.loads(json.dumps(loaded.spec))
    assert loaded.weights.keys() == lively_checkpoint(SPEC).weights.keys()
    assert loaded.vocab_size == 16
    assert loaded.max_positions == 16
    assert loaded.k_by_layer(8) == {0: 3, 2: 3}


def test_reading_something_else(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        MOD_TRANSFORMER.read(tmp_path / "model.pt")
    assert issubclass(CheckpointError, ValueError)


def test_restore_is_the_inverse(loaded: LoadedTransformer) -> None:
    again = MOD_TRANSFORMER.restore(json.loads(json.dumps(loaded.spec)), loaded.weights)
    assert again.checkpoint.spec == SPEC
    assert again.weights is loaded.weights


def test_trace(loaded: LoadedTransformer) -> None:
    module, ids_BS, lengths_B = loaded.module(), distinct_ids(SPEC, 2, 8), torch.tensor([8, 2])
    logits_BSV, *indices = module(ids_BS, lengths_B)
    traced_BSV, decided = loaded.trace(module, ids_BS, lengths_B, None)
    assert torch.equal(logits_BSV, traced_BSV)
    assert list(decided) == [0, 2]
    assert all(
        torch.equal(routing.index_BK, index_BK) for routing, index_BK in zip(decided.values(), indices, strict=True)
    )
    assert all(isinstance(routing, Routing) for routing in decided.values())
    forced_BK = torch.tensor([[0, 1, 2], [0, 1, 2]])
    forced_BSV, decided = loaded.trace(module, ids_BS, lengths_B, {2: forced_BK})
    assert torch.equal(decided[2].index_BK, forced_BK)
    assert torch.equal(decided[0].index_BK, indices[0])
    assert not torch.equal(forced_BSV, traced_BSV)


def test_dense_twin(loaded: LoadedTransformer) -> None:
    twin = loaded.dense()
    assert twin.k_by_layer(8) == {}
    assert twin.spec["routing"] is None
    assert len(twin.module()(distinct_ids(SPEC, 1, 4), torch.tensor([4]))) == 1


def test_sample_ids_are_held_out_text() -> None:
    bytes_model = LoadedTransformer(Checkpoint(spec=make_spec(vocab_size=256), weights={}))
    ids_BS = bytes_model.sample_ids(3, 64, seed=5)
    assert isinstance(ids_BS, np.ndarray)
    assert ids_BS.shape == (3, 64)
    assert ids_BS.dtype == np.int64
    text = bytes(read_split("held_out").numpy())
    assert all(bytes(row.astype(np.uint8)) in text for row in ids_BS)
    assert np.array_equal(ids_BS, bytes_model.sample_ids(3, 64, seed=5))
    assert bytes_model.sample_ids(1, len(text), seed=0) is None


def test_no_sample_for_another_vocabulary(loaded: LoadedTransformer) -> None:
    assert loaded.sample_ids(1, 4, seed=0) is None


@pytest.mark.parametrize("spec", [SPEC.to_dict(), dict(MOD_TRANSFORMER.timed_spec())], ids=["tiny", "timed"])
def test_random(tmp_path: Path, spec: dict[str, object]) -> None:
    spec = {**spec, "vocab_size": 32, "d_model": 8}
    MOD_TRANSFORMER.random(spec, 7, tmp_path / "a.pt")
    MOD_TRANSFORMER.random(spec, 7, tmp_path / "b.pt")
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    assert MOD_TRANSFORMER.read(tmp_path / "a.pt").spec == spec
    with pytest.raises(SpecError, match=r"^spec\.n_layers: missing$"):
        MOD_TRANSFORMER.random(
            {name: value for name, value in spec.items() if name != "n_layers"}, 0, tmp_path / "c.pt"
        )
    assert not (tmp_path / "c.pt").exists()


def test_timed_spec() -> None:
    spec = ModelSpec.from_dict(MOD_TRANSFORMER.timed_spec())
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in Transformer(spec).parameters())
    assert size == 39_599_616
    assert spec.k_by_layer(512) == dict.fromkeys((1, 3, 5, 7, 9, 11), 64)


def test_demo_checkpoint() -> None:
    """The shipped model is the trained one that its card describes: far better than chance on text it never saw."""
    path = MOD_TRANSFORMER.demo_checkpoint()
    assert path is not None
    assert path.stat().st_size < 8 * 2**20
    assert path.with_suffix(".md").exists()
    shipped = MOD_TRANSFORMER.read(path)
    assert shipped.checkpoint.spec == DEFAULT_SPEC
    ids_BS = torch.from_numpy(shipped.sample_ids(4, 257, seed=0))
    with torch.no_grad():
        logits_BSV, _ = shipped.trace(shipped.module(), ids_BS[:, :-1], torch.full((4,), 256), None)
    bits = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), ids_BS[:, 1:].flatten()).item() / 0.6931
    assert bits < 2.5
