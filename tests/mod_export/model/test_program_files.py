"""A model is restored from the graphs in a build folder, without its code, and gives the same graphs again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_models import Embedded, Images, Masked, made, masked_inputs, token_ids
from mod_dialects import DIALECTS, D, V
from torch import Tensor, fx, nn

from mod_export.errors import BuildFolderError
from mod_export.folder.programs import program_files
from mod_export.graph.capture import exported
from mod_export.model.module import model_from_module
from mod_export.model.program_files import changed_files, read_graphs, write_graphs
from mod_export.model.programs import ProgramModel
from mod_export.types import Bucket

SHORT, LONG = Bucket(2, 8), Bucket(2, 16)


def model_of(kind: Any, inputs: Any, buckets: list[Bucket], dtype: torch.dtype = torch.float32) -> ProgramModel:
    loaded = model_from_module(made(kind).to(dtype), inputs, buckets, "mine")
    assert isinstance(loaded, ProgramModel)
    return loaded


def embeddings(batch: int, seq: int) -> Tensor:
    return torch.randn(batch, seq, D)


def as_stored(model: ProgramModel) -> dict[str, Tensor]:
    """Weights as a float32 weights file stores them."""
    return {name: tensor.float().clone() for name, tensor in model.weights.items()}


def described(nodes: list[fx.Node]) -> list[Any]:
    return [
        (node.name, str(node.target), str(node.args), str(node.kwargs), str(node.meta.get("nn_module_stack")))
        for node in nodes
    ]


class OneBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(V, D), DIALECTS["index_put"]()

    def forward(self, ids: Tensor) -> Tensor:
        return self.block(self.embedding(ids))


@pytest.fixture(scope="module")
def masked() -> ProgramModel:
    """A model of one bucket, which tests do not change."""
    return model_of(Masked, masked_inputs, [SHORT])


CASES: dict[str, tuple[Any, Any, list[Bucket], torch.dtype]] = {
    "scatter_add": ("scatter_add", token_ids, [SHORT, LONG], torch.float32),
    "ids and mask": (Masked, masked_inputs, [SHORT, LONG], torch.float32),
    "embeddings": (Embedded, embeddings, [SHORT], torch.float32),
    "images": (Images, lambda batch, seq: torch.rand(batch, 3, 32, 32), [Bucket(1, 17)], torch.float32),
    "bfloat16": (OneBlock, token_ids, [SHORT], torch.bfloat16),
}


@pytest.mark.fast("embeddings", "bfloat16")
@pytest.mark.parametrize("case", CASES)
def test_a_restored_model_gives_the_same_graphs(case: str, tmp_path: Path) -> None:
    kind, inputs, buckets, dtype = CASES[case]
    model = model_of(kind, inputs, buckets, dtype)
    write_graphs(model, "mod", tmp_path)
    graphs = {f"mod-{bucket.name}.json" for bucket in buckets}
    assert {path.name for path in (tmp_path / "programs").iterdir()} == {
        *graphs,
        "mod-samples.npz",
        "mod-constants.npz",
    }
    spec = json.loads(json.dumps(model.spec))
    restored = read_graphs(tmp_path, "mod", spec, as_stored(model))
    assert restored.spec == model.spec
    assert (restored.input_names, restored.output_names()) == (model.input_names, model.output_names())
    for bucket in buckets:
        for seed in range(6):
            first, second = (found.sample(bucket, seed) for found in (model, restored))
            assert list(first) == list(second)
            assert all(np.array_equal(first[name], second[name]) for name in first)
        sample = [torch.from_numpy(array) for array in model.sample(bucket, 5).values()]
        found, expected = restored.module()(*sample), model.module()(*sample)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        first, second = (exported(which.module(), sample, "x") for which in (model, restored))
        assert described(list(first.graph.nodes)) == described(list(second.graph.nodes))
        assert str(first.graph_signature) == str(second.graph_signature)


def test_graphs_hold_no_weights(masked: ProgramModel, tmp_path: Path) -> None:
    write_graphs(masked, "dense", tmp_path)
    text = (tmp_path / "programs" / "dense-b2s8.json").read_bytes()
    assert masked.weights["embedding.weight"][0].numpy().tobytes() not in text
    with np.load(tmp_path / "programs" / "dense-constants.npz") as constants:
        assert set(constants) == {"scale", "position_ids", "offset"}
    with np.load(tmp_path / "programs" / "dense-samples.npz") as samples:
        assert np.array_equal(samples["b2s8/input_ids.0"], masked.sample(SHORT, 0)["input_ids"])


class PerLength(nn.Module):
    """Has a constant whose name is the same at each length, and whose value is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) * torch.tensor([1.0, float(ids.shape[1])])[1]


def test_constants_that_differ_between_buckets(tmp_path: Path) -> None:
    model = model_of(PerLength, token_ids, [SHORT, LONG])
    assert set(model.constants) == {"b2s8.lifted_tensor_0", "b2s16.lifted_tensor_0"}
    write_graphs(model, "mod", tmp_path)
    restored = read_graphs(tmp_path, "mod", model.spec, as_stored(model))
    for seq in (8, 16):
        ids = token_ids(2, seq)
        assert torch.equal(restored.module()(ids)[0], model.weights["embedding.weight"][ids] * seq)


@pytest.mark.slow
def test_the_same_graphs_are_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path\n"
        "from foreign_models import Masked, made, masked_inputs\n"
        "from mod_export.model.module import model_from_module\n"
        "from mod_export.model.program_files import write_graphs\n"
        "from mod_export.types import Bucket\n"
        "model = model_from_module(made(Masked), masked_inputs, [Bucket(2, 8)], 'mine')\n"
        "write_graphs(model, 'mod', Path(sys.argv[1]))\n"
    )
    here, elsewhere = tmp_path / "own", tmp_path / "other"
    here.mkdir()
    elsewhere.mkdir()
    write_graphs(model_of(Masked, masked_inputs, [SHORT]), "mod", here)
    paths = [path for path in sys.path if path.endswith(("graph", "mod_export"))]
    subprocess.run([sys.executable, "-c", code, str(elsewhere), *paths], check=True, capture_output=True)
    files = sorted(path.relative_to(here) for path in here.rglob("*.*"))
    assert files == sorted(path.relative_to(elsewhere) for path in elsewhere.rglob("*.*"))
    assert all((here / name).read_bytes() == (elsewhere / name).read_bytes() for name in files)


def test_damaged_graphs_are_refused(masked: ProgramModel, tmp_path: Path) -> None:
    write_graphs(masked, "mod", tmp_path)
    graph = tmp_path / "programs" / "mod-b2s8.json"
    text = graph.read_text(encoding="utf-8")

    def restore() -> ProgramModel:
        return read_graphs(tmp_path, "mod", masked.spec, as_stored(masked))

    restore()
    graph.write_text(text.replace("torch.ops.aten.topk.default", "torch.os.system"), encoding="utf-8")
    with pytest.raises(BuildFolderError, match=r"mod-b2s8.json: missing or damaged \(calls torch.os.system, which is"):
        restore()
    graph.write_text(text[:-9], encoding="utf-8")
    with pytest.raises(BuildFolderError, match=r"mod-b2s8.json: missing or damaged"):
        restore()
    graph.unlink()
    with pytest.raises(BuildFolderError, match=r"mod-b2s8.json: missing or damaged"):
        restore()
    graph.write_text(text, encoding="utf-8")
    (tmp_path / "programs" / "mod-samples.npz").write_bytes(b"PK")
    with pytest.raises(BuildFolderError, match=r"mod-samples.npz: missing or damaged .*; build again"):
        restore()


def test_files_that_hold_something_else_than_was_captured_are_told(masked: ProgramModel, tmp_path: Path) -> None:
    write_graphs(masked, "mod", tmp_path)
    graph, samples, constants = program_files("mod", [SHORT.name])
    assert changed_files(tmp_path, "mod", masked.spec) == {graph: "", samples: "", constants: ""}
    (tmp_path / graph).write_text((tmp_path / graph).read_text().replace("1e-05", "1e-06"))
    np.savez(tmp_path / constants, **{name: array + 1 for name, array in masked.constants.items()})
    assert changed_files(tmp_path, "mod", masked.spec) == {
        graph: "not the graph that was captured",
        samples: "",
        constants: "not the constants that were captured",
    }
    (tmp_path / graph).unlink()
    (tmp_path / samples).write_bytes(b"no archive")
    problems = changed_files(tmp_path, "mod", masked.spec)
    assert problems[graph].startswith("missing or damaged")
    assert "mod-samples.npz: missing or damaged" in problems[samples]
