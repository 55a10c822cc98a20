"""A model of two routed layers, its exported graph, and inputs for both."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
from captures import ports
from small_graphs import make_model, make_spec, portable_graph, session

from mod_export.config import config_from_toml
from mod_export.engines.ort_session import OrtRunner
from mod_export.graph.rewrites import PORTABLE, apply_rewrites
from mod_export.graph.weights import WeightsFile, bind_weights, state_of, write_weights
from mod_export.judge.candidates import Candidate
from mod_export.judge.inputs import Batch, parity_batches
from mod_export.judge.parity import judge_runner
from mod_export.judge.reference import Reference
from mod_export.model.transformer import TransformerModel
from mod_export.rows.correctness import ParityRow
from mod_export.types import Bucket, Engine, Graph, Setting
from mod_models.checkpoint import Checkpoint
from mod_models.spec import ModelSpec

SPEC = replace(make_spec(layers=(0, 1), capacity=0.25), vocab_size=256)
BUCKET = Bucket(2, 16)
SETTING = Setting(target="ort-cpu", dtype="float32", model="mod", role="forward", bucket=BUCKET)
GATE = config_from_toml(None).parity.float32
WEIGHTS = "graphs/weights-float32.data"
ENGINE = "engines/ort-cpu/mod-b2s16-float32.onnx"
Judge = Callable[..., ParityRow]


@pytest.fixture(scope="session")
def spec() -> ModelSpec:
    """Spec with bytes as vocabulary, so that inputs include text; four of sixteen tokens are routed."""
    return SPEC


@pytest.fixture(scope="session")
def bucket() -> Bucket:
    return BUCKET


@pytest.fixture(scope="session")
def loaded() -> TransformerModel:
    return TransformerModel(Checkpoint(spec=SPEC, weights=make_model(SPEC).state_dict()))


@pytest.fixture(scope="session")
def reference(loaded: TransformerModel) -> Reference:
    return Reference(loaded)


@pytest.fixture(scope="session")
def batches(loaded: TransformerModel) -> list[Batch]:
    return parity_batches(loaded, BUCKET, loaded.k_by_layer(BUCKET.seq).values(), 0, 1, 2)


@pytest.fixture
def graph() -> ir.Model:
    """The portable graph, which a test may change."""
    model = portable_graph(SPEC, BUCKET.batch, BUCKET.seq)
    apply_rewrites(model, PORTABLE, "float32")
    return model


@pytest.fixture
def row_of(reference: Reference, batches: list[Batch]) -> Judge:
    """Judges a graph as the candidate of a reference on inputs, with the gates of default.toml."""

    def judged(model: ir.Model, by: Reference = reference, on: list[Batch] = batches) -> ParityRow:
        with OrtRunner(session(model), "candidate", 1) as runner:
            return judge_runner([(runner, on)], by, GATE, SETTING)

    return judged


@pytest.fixture(scope="session")
def candidate(loaded: TransformerModel) -> Candidate:
    """The engine of `folder`."""
    graph = Graph(
        path="graphs/mod-b2s16.onnx", model="mod", bucket=BUCKET, dtype="float32", target=None,
        k_by_layer=loaded.k_by_layer(BUCKET.seq), **ports(BUCKET, 256),
    )  # fmt: skip
    engine = Engine(target="ort-cpu", model="mod", bucket=BUCKET, dtype="float32", path=ENGINE, weights=WEIGHTS)
    return Candidate(setting=engine.setting, path=ENGINE, weights=WEIGHTS, graph=graph, engine=engine)


@pytest.fixture(scope="session")
def _folder(tmp_path_factory: pytest.TempPathFactory, reference: Reference, candidate: Candidate) -> Path:
    root = tmp_path_factory.mktemp("folder")
    for path in (candidate.path, candidate.graph.path):
        (root / path).parent.mkdir(parents=True)
    write_weights(root / WEIGHTS, state_of(reference.module), "float32")
    model = portable_graph(SPEC, BUCKET.batch, BUCKET.seq)
    apply_rewrites(model, PORTABLE, "float32")
    bind_weights(model, [WeightsFile.open(root / WEIGHTS)], root / "graphs")
    for path in (candidate.path, candidate.graph.path):
        (root / path).write_bytes(ir.to_proto(model).SerializeToString())
    return root


@pytest.fixture
def fresh(_folder: Path) -> Callable[[Graph], bytes]:
    """Returns the bytes of a new export of the folder's only graph."""
    return lambda graph: (_folder / graph.path).read_bytes()


@pytest.fixture
def folder(_folder: Path, tmp_path: Path) -> Path:
    """A folder with weights, the portable graph and the engine, which is the same graph; a test may change it."""
    return Path(shutil.copytree(_folder, tmp_path / "folder"))
