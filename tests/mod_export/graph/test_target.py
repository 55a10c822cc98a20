"""One LimitError names all that a target cannot take: layer, limit and remedy. Weights must lie beside the graph."""

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import TENSORRT, make_spec, parsed, portable_graph

from mod_export.errors import GraphError, LimitError
from mod_export.graph.target import check_external_data, check_limits
from mod_export.types import AttentionKernels, TargetLimits

ANY = TargetLimits(name="Any", max_opset=23)


def test_names_every_problem_at_once_with_its_layer() -> None:
    narrow = dataclasses.replace(TENSORRT, name="Narrow", max_opset=22, topk_limit=3)
    with pytest.raises(LimitError) as caught:
        check_limits(portable_graph(make_spec()), narrow, "float32")
    lines = str(caught.value).splitlines()
    start = "Narrow cannot take this float32 graph: "
    assert all(line.startswith(start) for line in lines)
    said = [line.removeprefix(start) for line in lines]
    assert said[0] == "it is of opset 23, the highest allowed is 22; export it with a lower opset"
    assert [line.partition(" (")[0] for line in said[1:]] == ["layers.0", "layers.1", "layers.1", "layers.1"]
    assert "TopK takes K = 16, the limit is 3; lower the capacity or the sequence length, or build another" in said[2]
    assert "the Attention operator runs on FLOAT, allowed is bfloat16, float16; decompose it into MatMul and" in said[1]


BRANCHES = dataclasses.replace(ANY, branches=True, topk_limit=2)
KERNELS = dataclasses.replace(
    TENSORRT, attention_kernels=AttentionKernels(narrowest=9, widest=256, fewest_heads=2, fewest_vectors=4)
)
MICROSOFT = dataclasses.replace(ANY, extra_domains=frozenset({"com.microsoft"}))
OTHER = dataclasses.replace(ANY, extra_domains=frozenset({"org.example"}))
FOREIGN = "g (float[4] x) => (float[4] y) { y = com.microsoft.Gelu (x) }"
SCATTER = """g (float[4,2] x, int64[3,1] i, float[3,2] u) => (float[4,2] y)
{ y = ScatterND <reduction = "add"> (x, i, u) }"""
LOOP = """g (int64 n, bool go, float[2] x) => (float[2] y)
{ y = Loop (n, go, x) <body = b (int64 i, bool c, float[2] p) => (bool d, float[2] q)
{ d = Identity (c) q = Neg (p) }> }"""
IF = """g (bool flag, float[4] x) => (float[2] y) {{ y = If (flag) <
then_branch = a () => (float[2] p) {{ {0} }},
else_branch = b () => (float[2] q) {{ k = Constant <value = int64[1] {{2}}> () q, j = TopK (x, k) }}> }}"""
TWO = IF.format("l = Constant <value = int64[1] {2}> () p, i = TopK (x, l)")
THREE = IF.format("""l = Constant <value = int64[1] {3}> () o, i = TopK (x, l)
s = Constant <value = int64[1] {0}> () e = Constant <value = int64[1] {2}> () p = Slice (o, s, e)""")


def attention(dtype: str, width: int, heads: int = 2, queries: int = 4) -> str:
    shape = f"{dtype}[1,{heads},{queries},{width}]"
    return f"g ({shape} q, {shape} k, {shape} v) => ({shape} y) {{ y = Attention (q, k, v) }}"


def parsed_with_domains(text: str) -> ir.Model:
    return (
        parsed(text)
        if "com.microsoft" not in text
        else ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]> {text}')
    )


@pytest.mark.parametrize(
    ("text", "limits", "words"),
    [
        ("g (float[2,S] x) => (float[2,S] y) { y = Neg (x) }", ANY,
         "input x has the shape [2,S], expected fixed sizes; export one graph for each bucket without"),
        ("g (float[4] x, int64[1] k) => (float[k] v, int64[k] i) { v, i = TopK (x, k) }", ANY,
         "TopK: K of this TopK is computed while the graph runs, expected a constant; derive k from the static"),
        ("g (float[4] x) => (int64[1,N] y) { y = NonZero (x) }", ANY,
         "NonZero: the size of what NonZero returns depends on the data, expected fixed sizes; take a fixed number"),
        ("g (int64 start, int64 end, int64 step) => (int64[N] y) { y = Range (start, end, step) }", ANY,
         "Range: Range returns y of shape [N], expected fixed sizes; export one graph for each bucket"),
        (SCATTER, TENSORRT,
         "ScatterND: ScatterND reduces by 'add', only reduction 'none' is allowed; gather, compute, and write"),
        (TWO, ANY, "If: If holds a graph of its own, expected one static graph; write the branch or loop of the model"),
        (LOOP, BRANCHES, "Loop: Loop holds a graph of its own"),
        (THREE, BRANCHES, "TopK: TopK takes K = 3, the limit is 2; lower the capacity or the sequence length"),
        (FOREIGN, ANY, "Gelu: the operator com.microsoft::Gelu is not allowed, only standard ONNX; export without"),
        (FOREIGN, OTHER, "only standard ONNX and org.example;"),
        (attention("float", 16), TENSORRT, "the Attention operator runs on FLOAT, allowed is bfloat16, float16;"),
        (attention("float16", 8), KERNELS, "heads of width 8, allowed is 9 to 256; decompose it into MatMul and"),
        (attention("float16", 257), KERNELS, "heads of width 257, allowed is 9 to 256"),
        (attention("float16", 16, 1), KERNELS, "has 1 query head, allowed are 2 or more; decompose it into MatMul and"),
        (attention("float16", 16, 3, 1), KERNELS, "has one query in each of 1 x 3 heads, allowed are 4 heads or more;"),
        (SCATTER, ANY, None),
        (TWO, BRANCHES, None),
        (FOREIGN, MICROSOFT, None),
        (attention("bfloat16", 9), KERNELS, None),
        (attention("bfloat16", 9, 4, 1), KERNELS, None),
    ],
)  # fmt: skip
def test_what_a_dialect_may_hold(text: str, limits: TargetLimits, words: str | None) -> None:
    if words is None:
        check_limits(parsed_with_domains(text), limits, "float32")
        return
    with pytest.raises(LimitError) as caught:
        check_limits(parsed_with_domains(text), limits, "float32")
    assert words in str(caught.value)


def test_every_problem_is_named_inside_of_branches_too() -> None:
    with pytest.raises(LimitError) as caught:
        check_limits(parsed(THREE), dataclasses.replace(BRANCHES, branches=False), "float32")
    first, second = str(caught.value).splitlines()
    assert "If: If holds a graph of its own" in first
    assert "TopK takes K = 3" in second


def write(folder: Path, location: str = "w.data", offset: int = 0, length: int = 16) -> Path:
    """Writes a graph that claims that its weight of 4 float32 numbers lies at this location."""
    model = parsed("g (float[4] x) => (float[4] y) <float[4] w = {1.0, 2.0, 3.0, 4.0}> { y = Add (x, w) }")
    model.graph.initializers["w"].const_value = ir.ExternalTensor(
        location, offset, length, ir.DataType.FLOAT, shape=ir.Shape([4]), name="w", base_dir=folder
    )
    path = folder / "g.onnx"
    path.write_bytes(ir.to_proto(model).SerializeToString())
    return path


def test_accepts_a_plain_file_beside_the_graph(tmp_path: Path) -> None:
    (tmp_path / "w.data").write_bytes(np.arange(5, dtype=np.float32).tobytes())
    check_external_data(write(tmp_path))
    check_external_data(write(tmp_path, offset=4))


@pytest.mark.parametrize(
    ("lies", "make", "words"),
    [
        *(
            ({"location": location}, lambda path: None, f"in {location!r}, which is no plain file name; expected a")
            for location in ("../w.data", "/w.data", "sub/w.data", "..", "sub\\w.data")
        ),
        # TensorRT follows links.
        ({}, lambda path: path.symlink_to(path.with_name("g.onnx")), "in w.data, which is a link or no regular file"),
        ({}, os.mkfifo, "in w.data, which is a link or no regular file"),
        ({}, lambda path: None, "in w.data, which cannot be read (No such file"),
        *(
            (
                {"offset": offset, "length": length},
                lambda path: path.write_bytes(bytes(16)),
                f"needs 16 bytes and is said to be bytes {offset} to {offset + length} of w.data, which has 16",
            )
            for offset, length in ((4, 16), (0, 12), (0, 20))
        ),
    ],
)
def test_weights_that_are_not_beside_the_graph(
    tmp_path: Path, lies: dict, make: Callable[[Path], object], words: str
) -> None:
    path = write(tmp_path, **lies)
    make(tmp_path / "w.data")
    with pytest.raises(GraphError, match=rf"^g\.onnx: the weight w (lies )?{re.escape(words)}"):
        check_external_data(path)


def test_looks_into_constants_too(tmp_path: Path) -> None:
    model = parsed(
        "g (float[4] x) => (float[4] y) { c = Constant <value = float[4] {1.0, 2.0, 3.0, 4.0}> () y = Add (x, c) }"
    )
    outside = ir.ExternalTensor("../w", 0, 16, ir.DataType.FLOAT, shape=ir.Shape([4]), name="c", base_dir=tmp_path)
    model.graph[0].attributes["value"] = ir.AttrTensor("value", outside)
    path = tmp_path / "g.onnx"
    path.write_bytes(ir.to_proto(model).SerializeToString())
    with pytest.raises(GraphError, match=r"the weight c lies in '../w'"):
        check_external_data(path)


def test_refuses_what_is_no_graph(tmp_path: Path) -> None:
    (tmp_path / "g.onnx").write_bytes(b"junk")
    for name in ("g.onnx", "absent.onnx"):
        with pytest.raises(GraphError, match=rf"{name}: not a readable ONNX graph \("):
            check_external_data(tmp_path / name)
