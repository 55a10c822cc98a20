"""What a target cannot take is said in one LimitError with layer, limit and way out; weights lie beside a graph."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import TENSORRT, make_spec, parsed, portable_graph

from mod_export.errors import GraphError, LimitError
from mod_export.export.dialect import check_dialect, check_external_data
from mod_export.export.passes import run_passes
from mod_export.types import FLOAT_DTYPES, Dialect

ANY = Dialect(name="Any", max_opset=23)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("spec", [make_spec(), make_spec().dense()], ids=["mod", "dense"])
def test_accepts_our_graphs_after_the_passes(spec, dtype) -> None:
    model = portable_graph(spec, 2, 16)
    run_passes(model, TENSORRT, dtype)
    check_dialect(model, TENSORRT, dtype)


def test_names_every_problem_at_once_with_its_layer() -> None:
    narrow = dataclasses.replace(TENSORRT, name="Narrow", max_opset=22, topk_limit=3)
    with pytest.raises(LimitError) as caught:
        check_dialect(portable_graph(make_spec(), 2, 16), narrow, "float32")
    lines = str(caught.value).splitlines()
    start = "Narrow cannot take this float32 graph: "
    assert all(line.startswith(start) for line in lines)
    said = [line.removeprefix(start) for line in lines]
    assert said[0] == "it is of opset 23, the highest allowed is 22; export it with a lower opset"
    assert [line.partition(" (")[0] for line in said[1:]] == ["layers.0", "layers.1", "layers.1", "layers.1"]
    assert "TopK takes K = 16, the limit is 3; lower the capacity or the sequence length, or build another" in said[2]
    assert "the Attention operator runs on FLOAT, allowed is bfloat16, float16; decompose it into MatMul and" in said[1]


@pytest.mark.parametrize(
    ("text", "dialect", "message"),
    [
        (
            "g (float[2,S] x) => (float[2,S] y) { y = Neg (x) }",
            ANY,
            r"input x has the shape \[2,S\], expected fixed sizes; export one graph for each bucket without",
        ),
        (
            "g (float[4] x, int64[1] k) => (float[k] v, int64[k] i) { v, i = TopK (x, k) }",
            ANY,
            r"TopK: K of this TopK is computed while the graph runs, expected a constant; derive k from the static",
        ),
        (
            "g (float[4] x) => (int64[1,N] y) { y = NonZero (x) }",
            ANY,
            r"NonZero: the size of what NonZero returns depends on the data, expected fixed sizes; take a fixed number",
        ),
        (
            """g (bool flag, float[2] x) => (float[2] y) { y = If (flag)
            <then_branch = a () => (float[2] p) { p = Neg (x) }, else_branch = b () => (float[2] q) { q = Abs (x) }>
            }""",
            ANY,
            r"If: If holds a graph of its own, expected one static graph; write the branch or loop of the model",
        ),
        (
            "g (int64 start, int64 end, int64 step) => (int64[N] y) { y = Range (start, end, step) }",
            ANY,
            r"Range: Range returns y of shape \[N\], expected fixed sizes; export one graph for each bucket",
        ),
        (
            """g (float[4,2] x, int64[3,1] i, float[3,2] u) => (float[4,2] y)
            { y = ScatterND <reduction = "add"> (x, i, u) }""",
            TENSORRT,
            r"ScatterND: ScatterND reduces by 'add', only reduction 'none' is allowed; gather, compute, and write",
        ),
        (
            """g (float[4,2] x, int64[3,2] i, float[3,2] u) => (float[4,2] y)
            { y = ScatterElements <reduction = "max"> (x, i, u) }""",
            TENSORRT,
            r"ScatterElements: ScatterElements reduces by 'max'",
        ),
    ],
    ids=["dynamic input", "dynamic k", "data-dependent", "control flow", "dynamic size", "scatter", "scatter elements"],
)
def test_refuses(text: str, dialect: Dialect, message: str) -> None:
    with pytest.raises(LimitError, match=message):
        check_dialect(parsed(text), dialect, "float32")


def test_refuses_foreign_operators() -> None:
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>
        g (float[4] x) => (float[4] y) { y = com.microsoft.Gelu (x) }"""
    )
    message = (
        r"Gelu: the operator com\.microsoft::Gelu is not allowed, only standard ONNX; export without optimisations"
    )
    with pytest.raises(LimitError, match=message):
        check_dialect(model, ANY, "float32")
    check_dialect(model, dataclasses.replace(ANY, extra_domains=frozenset({"com.microsoft"})), "float32")
    with pytest.raises(LimitError, match=r"only standard ONNX and org\.example;"):
        check_dialect(model, dataclasses.replace(ANY, extra_domains=frozenset({"org.example"})), "float32")


IF = """g (bool flag, float[4] x) => (float[2] y) {{ y = If (flag) <
then_branch = a () => (float[2] p) {{ {0} }},
else_branch = b () => (float[2] q) {{ k = Constant <value = int64[1] {{2}}> () q, j = TopK (x, k) }}> }}"""
TAKES_TWO = "l = Constant <value = int64[1] {2}> () p, i = TopK (x, l)"
TAKES_THREE = """l = Constant <value = int64[1] {3}> () o, i = TopK (x, l)
s = Constant <value = int64[1] {0}> () e = Constant <value = int64[1] {2}> () p = Slice (o, s, e)"""


def test_branches_are_looked_into_where_they_may_stand() -> None:
    """A node in a branch has the limits of any other."""
    branching = dataclasses.replace(ANY, branches=True, topk_limit=2)
    check_dialect(parsed(IF.format(TAKES_TWO)), branching, "float32")
    with pytest.raises(LimitError, match=r"^Any cannot take this float32 graph: TopK: TopK takes K = 3, the limit is"):
        check_dialect(parsed(IF.format(TAKES_THREE)), branching, "float32")
    with pytest.raises(LimitError) as caught:
        check_dialect(parsed(IF.format(TAKES_THREE)), dataclasses.replace(branching, branches=False), "float32")
    first, second = str(caught.value).splitlines()
    assert "If: If holds a graph of its own" in first
    assert "TopK takes K = 3" in second


def test_branches_are_no_loops() -> None:
    text = """g (int64 n, bool go, float[2] x) => (float[2] y)
    { y = Loop (n, go, x) <body = b (int64 i, bool c, float[2] p) => (bool d, float[2] q)
    { d = Identity (c) q = Neg (p) }> }"""
    with pytest.raises(LimitError, match="Loop: Loop holds a graph of its own"):
        check_dialect(parsed(text), dataclasses.replace(ANY, branches=True), "float32")


def test_scatters_may_reduce_where_the_dialect_says_so() -> None:
    text = """g (float[4,2] x, int64[3,1] i, float[3,2] u) => (float[4,2] y)
    { y = ScatterND <reduction = "add"> (x, i, u) }"""
    check_dialect(parsed(text), ANY, "float32")


@pytest.mark.parametrize(("dtype", "allowed"), [("float", False), ("float16", True), ("bfloat16", True)])
def test_attention_is_judged_by_its_own_dtype(dtype: str, allowed: bool) -> None:
    model = parsed(
        f"g ({dtype}[1,1,4,16] q, {dtype}[1,1,4,16] k, {dtype}[1,1,4,16] v) => ({dtype}[1,1,4,16] y) "
        "{ y = Attention (q, k, v) }"
    )
    if allowed:
        check_dialect(model, TENSORRT, "float16")
    else:
        with pytest.raises(LimitError, match="Attention: the Attention operator runs on FLOAT"):
            check_dialect(model, TENSORRT, "float16")


def write(folder: Path, location: str = "w.data", offset: int = 0, length: int = 16) -> Path:
    """A graph whose weight of 4 float32 numbers is said to lie there."""
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


@pytest.mark.parametrize("location", ["../w.data", "/w.data", "sub/w.data", "..", "sub\\w.data"])
def test_refuses_paths(tmp_path: Path, location: str) -> None:
    with pytest.raises(
        GraphError, match=r"^g\.onnx: the weight w lies in '.*', which is no plain file name; expected a"
    ):
        check_external_data(write(tmp_path, location))


def test_refuses_a_link_which_tensorrt_would_follow(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(bytes(16))
    (tmp_path / "w.data").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GraphError, match=r"the weight w lies in w\.data, which is a link or no regular file"):
        check_external_data(write(tmp_path))


def test_refuses_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.data")
    with pytest.raises(GraphError, match=r"which is a link or no regular file"):
        check_external_data(write(tmp_path))


def test_refuses_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"the weight w lies in w\.data, which cannot be read \(No such file"):
        check_external_data(write(tmp_path))


@pytest.mark.parametrize(("offset", "length"), [(4, 16), (0, 12), (0, 20)], ids=["past the end", "short", "long"])
def test_refuses_bytes_that_are_not_there(tmp_path: Path, offset: int, length: int) -> None:
    (tmp_path / "w.data").write_bytes(bytes(16))
    message = (
        rf"the weight w needs 16 bytes and is said to be bytes {offset} to {offset + length} of w\.data, which has 16"
    )
    with pytest.raises(GraphError, match=message):
        check_external_data(write(tmp_path, offset=offset, length=length))


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
    with pytest.raises(GraphError, match=r"g\.onnx: cannot be read as ONNX \(.*\); build again"):
        check_external_data(tmp_path / "g.onnx")
    with pytest.raises(GraphError, match=r"absent\.onnx: cannot be read as ONNX"):
        check_external_data(tmp_path / "absent.onnx")


@pytest.mark.parametrize("width", [8, 257])
def test_attention_of_a_width_without_a_kernel(width: int) -> None:
    shape = f"float16[1,2,4,{width}]"
    model = parsed(f"g ({shape} q, {shape} k, {shape} v) => ({shape} y) {{ y = Attention (q, k, v) }}")
    dialect = dataclasses.replace(TENSORRT, attention_widths=(9, 256))
    with pytest.raises(LimitError, match=f"heads of width {width}, allowed is 9 to 256; decompose it into MatMul and"):
        check_dialect(model, dialect, "float16")
