"""`inspect` distinguishes a checkpoint, a graph and a build folder, and describes each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest

from mod_export.errors import BuildFolderError, CheckpointError, GraphError, UsageError
from mod_export.inspect import describe
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec


def test_checkpoint(checkpoint: Path) -> None:
    text = describe(checkpoint)
    assert text.startswith("tiny  mod_transformer  45,408 parameters  sha256 ")
    assert 'routing: layers={"every": 2, "offset": 1, "skip_first": 0, "skip_last": 0}' in text
    assert "not causal" in text
    assert max(map(len, text.splitlines())) <= 120
    assert text.isascii()
    routed, flops = text.split("FLOPs of b1s256")
    assert [line.split() for line in routed.splitlines() if line.startswith(("0 ", "1 "))] == [
        ["0", "-", "-", "-", "36.2", "KiB", "32.0", "KiB", "32.0", "KiB"],
        ["1", "block", "by", "topk", "16", "32", "36.4", "KiB", "4.0", "KiB", "32.0", "KiB"],
    ]
    assert "; % of a bucket: of what the dense baseline costs there\n" in flops
    assert "routing of" not in text


def test_checkpoint_with_a_text(checkpoint: Path) -> None:
    text = describe(checkpoint, text="def main():\n    return 0")
    assert "routing of the text that was given: 24 tokens\n# ran, . skipped\n\n" in text
    assert "      0  def main():\N{MIDDLE DOT}    return 0\n" in text
    lanes = {line[:7]: line[9:] for line in text.splitlines() if line.startswith("layer ") and line[6].isdecimal()}
    assert {name: (len(marks), marks.count("#")) for name, marks in lanes.items()} == {
        "layer 1": (24, 3), "layer 3": (24, 3),
    }  # fmt: skip


def test_a_text_in_a_model_that_routes_nothing(tmp_path: Path, tiny_spec: ModelSpec) -> None:
    save_checkpoint(tmp_path / "d.pt", random_checkpoint(tiny_spec.dense(), 0))
    text = describe(tmp_path / "d.pt", text="x")
    assert text.endswith("\nno routing map: every layer runs every token\n")
    assert "dense" not in text


@pytest.mark.parametrize(
    ("asked", "named"), [({"text": "x"}, "--text"), ({"text": "x", "html": Path("a")}, "--text, --html")]
)
def test_only_models_are_drawn(built: Path, asked: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=rf"^{named}: .* is a build folder, which report --format html shows"):
        describe(built, **asked)
    with pytest.raises(UsageError, match=rf"^{named}: .*\.onnx is a graph; give the checkpoint of a model$"):
        describe(built / "graphs" / "mod-b1s64.onnx", **asked)


def test_a_page_is_written_where_that_is_possible(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(UsageError, match=r"is a folder; choose another place with --html$"):
        describe(checkpoint, html=tmp_path)
    describe(checkpoint, html=tmp_path / "new" / "a.html")
    assert "Held-out text" in (tmp_path / "new" / "a.html").read_text(encoding="utf-8")


def test_graph_and_folder(built: Path) -> None:
    text = describe(built / "graphs" / "mod-b1s64.onnx")
    assert text.startswith("mod-b1s64.onnx  opset 23  IR 10  ")
    assert "out  routed_1 INT64 [1,8]" in text
    assert "FLOPs" in text
    assert re.search(r"^TopK +4$", text, re.MULTILINE)
    text = describe(built)
    assert "every file is as it was built" in text
    assert "engines/ort-cpu/mod-b1s64-float32.onnx" in text
    assert "b1s64" in text.split("dense FLOPs")[1]


def test_damaged_folder_is_not_described(built_copy: Path) -> None:
    engine = built_copy / "engines" / "ort-cpu" / "mod-b1s64-float32.onnx"
    engine.write_bytes(engine.read_bytes()[:-1])
    with pytest.raises(BuildFolderError, match=r"mod-b1s64-float32\.onnx has .* bytes, .* were written"):
        describe(built_copy)


@pytest.mark.parametrize(
    ("inputs", "body", "said"),
    [
        ("float[N, 4] x", "ReduceSum <keepdims=0> (x)", "FLOPs not counted: the first input is not (batch, sequence)"),
        ("float[3, 4] x", "ReduceSum <keepdims=0> (x)", "0 FLOPs, 0 bytes of weights"),
        ("float[3, 4] x", 'Einsum <equation="ij->"> (x)', "0 FLOPs, 0 bytes of weights"),
        ("float[3, 4] x", "vendor.Sum (x)", "0 FLOPs, 0 bytes of weights; not counted: vendor.Sum (1)"),
    ],
)
def test_a_graph_of_somebody_else(tmp_path: Path, inputs: str, body: str, said: str) -> None:
    text = f'<ir_version: 10, opset_import: ["" : 23, "vendor" : 1]> g ({inputs}) => (float y) {{ y = {body} }}'
    path = tmp_path / "theirs.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    assert said in describe(path)


def test_what_is_none_of_them(tmp_path: Path) -> None:
    (tmp_path / "junk.onnx").write_bytes(b"not a graph at all")
    for name, error, message in (
        ("junk.onnx", GraphError, r"junk\.onnx: not a readable ONNX graph"),
        ("absent.onnx", GraphError, r"absent\.onnx: not a readable ONNX graph \(.*No such file"),
        ("absent.pt", CheckpointError, r"absent\.pt: no such file or folder"),
    ):
        with pytest.raises(error, match=message):
            describe(tmp_path / name)
