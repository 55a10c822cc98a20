"""The operation that makes NaN is named, in the model and in a graph; so is the first wrong node of a graph."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from command_line import FEW_SAMPLES
from torch import Tensor, nn

from benchmarks.faults.graph_surgery import Surgery, plant
from mod_export.api import build
from mod_export.config import BuildConfig, config_from_toml
from mod_export.judge.candidates import Candidate
from mod_export.judge.compare import Slack
from mod_export.judge.inputs import Batch
from mod_export.judge.locate import locate_against_reference, origin_in_graph, origin_in_reference
from mod_export.judge.parity import parity_of
from mod_export.judge.reference import Reference
from mod_export.model.module import model_from_module
from mod_export.rows.correctness import Located, ParityRow
from mod_export.types import Bucket

D, BUCKET = 8, Bucket(2, 6)
ENGINE = "engines/ort-cpu/mod-b2s16-float32.onnx"
CONFIG = config_from_toml(None)
SLACK = Slack(units=16.0, near_tie=1e-3, max_abs=1e-4, narrow=False)


class Logarithm(nn.Module):
    """Takes the logarithm of negative numbers; an earlier NaN is replaced, and does not reach the output."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        replaced = torch.sqrt(-x.abs() - 1).nan_to_num()
        return torch.log(self.mix(x) - 100) * 2 + replaced


class Overflow(Logarithm):
    """Subtracts an infinity from itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(self.mix(x) * 0 + 1000)
        return (y - y) * 2


class Normalized(Logarithm):
    """Divides by a norm that is zero for rows of equal values, so only inputs that are made of ties give NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x - x.mean(1, keepdim=True)) + (x - x[:, :1]).sum(1, keepdim=True) / (x - x[:, :1]).norm(
            dim=1, keepdim=True
        )


def embeddings(batch: int, seq: int) -> Tensor:
    return torch.randn(batch, seq, D)


@functools.cache
def reference_of(kind: type[nn.Module]) -> Reference:
    torch.manual_seed(0)
    return Reference(model_from_module(kind().eval(), embeddings, [BUCKET], "undefined"))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Logarithm, r"aten\.log in model at .*test_undefined\.py:\d+ makes the first"),
        (
            Overflow,
            r"aten\.sub\.Tensor in model at .*test_undefined\.py:\d+ makes the first, of an infinity that aten\.exp in "
            r"model at .*test_undefined\.py:\d+ makes",
        ),
    ],
)
def test_the_operation_of_the_model(kind: type[nn.Module], told: str) -> None:
    batch = Batch("sample", BUCKET, {"x": np.random.default_rng(0).standard_normal((2, 6, D), np.float32)})
    origin = origin_in_reference(reference_of(kind), batch)
    assert origin is not None
    assert re.fullmatch(told, origin), origin


def test_nan_that_stands_in_the_inputs() -> None:
    batch = Batch("sample", BUCKET, {"x": np.full((2, 6, D), np.nan, np.float32)})
    assert origin_in_reference(reference_of(Overflow), batch) == "x holds the first"


def test_a_model_that_gives_none() -> None:
    batch = Batch("sample", BUCKET, {"x": np.random.default_rng(0).standard_normal((2, 6, D), np.float32)})
    assert origin_in_reference(reference_of(Normalized), batch) is None


def test_inputs_made_of_ties_are_left_out_where_the_model_is_undefined(tmp_path: Path) -> None:
    torch.manual_seed(0)
    (tmp_path / "c.toml").write_text(f'targets = ["ort-cpu"]\n{FEW_SAMPLES}', encoding="utf-8")
    shape = (BUCKET.batch, BUCKET.seq)
    report = build(Normalized().eval(), embeddings, [shape], out=tmp_path / "built", config=tmp_path / "c.toml")
    assert report.verdict.status == "pass", report.verdict.reasons
    row = next(row for row in report.parity if row.target == "ort-cpu")
    (left,) = row.left_out
    assert (row.inputs, left.inputs, left.rows) == (("sample",), ("ties",), 12)
    assert re.match(
        r"the model itself returns NaN there: aten\.div\.Tensor in model at .*:\d+ makes the first", left.because
    )


def nan_in_layer(s: Surgery) -> None:
    """Inserts the square root of a negative number."""
    node = s.node(1, "MatMul", -1)
    s.feed(node, 0, "Sqrt")


def parity(folder: Path, candidate: Candidate, reference: Reference, fresh: object) -> ParityRow:
    config: BuildConfig = CONFIG
    return parity_of(folder, candidate, reference, config, fresh)  # type: ignore[arg-type]  # What a test gives.


def test_the_node_of_a_graph(folder: Path, batches: list[Batch]) -> None:
    assert origin_in_graph(folder, ENGINE, batches) is None
    plant(folder / ENGINE, nan_in_layer)
    origin = origin_in_graph(folder, ENGINE, batches)
    assert origin is not None
    assert (origin.layer, origin.makes_nan) == ("layers.1", True)
    assert re.fullmatch(r"the first NaN is made in layers\.1, Sqrt \S*", str(origin)), str(origin)


@pytest.mark.slow
def test_both_the_node_that_differs_and_that_which_makes_nan_are_named(
    folder: Path, candidate: Candidate, reference: Reference, fresh: object
) -> None:
    plant(folder / ENGINE, nan_in_layer)
    row = parity(folder, replace(candidate, source=candidate.path), reference, fresh)
    assert row.reasons[-2].startswith("differs first in layers.1, ")
    assert row.reasons[-1].startswith("the first NaN is made in layers.1, Sqrt ")
    assert re.fullmatch(r"and \d+ more reasons?", row.reasons[-3]), row.reasons
    assert len(row.reasons) <= 7


class SmallEpsilon(nn.Module):
    """A norm whose epsilon matters, because rows are small or zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, D), nn.Linear(D, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * 0.02
        return self.head(x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-5))


def without_epsilon(s: Surgery) -> None:
    """Bypasses the epsilon, like an optimizer that treats a small number as zero."""
    node = next(each for each in s.graph if each.op_type == "Add" and each.outputs[0].name == "add")
    ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])


def removed_epsilon(s: Surgery) -> None:
    without_epsilon(s)
    s.graph.remove(next(each for each in s.graph if each.outputs[0].name == "add"), safe=True)


def identity_epsilon(s: Surgery) -> None:
    node = next(each for each in s.graph if each.op_type == "Add" and each.outputs[0].name == "add")
    node.op_type = "Identity"
    node.resize_inputs(1)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("epsilon")
    torch.manual_seed(0)
    (root / "c.toml").write_text(f'targets = ["ort-cpu"]\n{FEW_SAMPLES}', encoding="utf-8")
    report = build(SmallEpsilon().eval(), ids, [(2, 6)], out=root / "built", config=root / "c.toml")
    assert report.verdict.status == "pass", report.verdict.reasons
    assert located(root / "built") is None
    return root / "built"


def ids(batch: int, seq: int) -> Tensor:
    return torch.randint(0, 20, (batch, seq), generator=torch.Generator().manual_seed(0))


@functools.cache
def reference_of_epsilon() -> Reference:
    torch.manual_seed(0)
    return Reference(model_from_module(SmallEpsilon().eval(), ids, [BUCKET], "epsilon"))


def located(root: Path) -> Located | None:
    path = next((root / "graphs").glob("mod-b2s6*.onnx")).relative_to(root)
    batch = Batch("sample", BUCKET, {"ids": ids(2, 6).numpy()})
    return locate_against_reference(root, str(path), reference_of_epsilon(), [batch], SLACK)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            removed_epsilon,
            "Reciprocal node_rsqrt, in front of which the graph has no value of aten.add.Tensor in model at ",
        ),
        (without_epsilon, "Reciprocal node_rsqrt, which does not read aten.add.Tensor in model at "),
        (identity_epsilon, "Identity node_add"),
    ],
)
def test_a_node_that_a_rewrite_removed_is_named_with_the_users_line(
    built: Path, change: Callable[[Surgery], object], told: str
) -> None:
    """It is named even if a fresh export leaves it out as well."""
    path = next((built / "graphs").glob("mod-b2s6*.onnx"))
    sound = path.read_bytes()
    try:
        plant(path, change)
        fault = located(built)
    finally:
        path.write_bytes(sound)
    assert fault is not None
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = 1 + next(n for n, text in enumerate(lines) if "torch.rsqrt(" in text)
    assert fault.operator == (f"{told}{__file__}:{line}" if told.endswith(" at ") else told)
    assert fault.error > fault.allowed > 0
    assert ": differs by " in str(fault)
    assert " from the model in float64, rounding explains " in str(fault)
    assert math.isfinite(fault.error)
