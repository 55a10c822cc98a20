"""After the passes, TensorRT-RTX builds the graphs of every kind of model, ours and those of users."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from graph_folders import job_of, write_graph
from mod_dialects import DIALECTS, dialect_graph
from mod_manners import MANNERS, manner_graph
from observing import observed
from rtx_builds import BUCKET, RTX, build, needs_rtx
from small_graphs import make_model, parsed
from step_graphs import prefill_graph, step_graph

from mod_export.errors import EngineError, LimitError
from mod_export.graph.rewrites import apply_rewrites
from mod_export.graph.target import check_limits
from mod_export.types import FLOAT_DTYPES, Bucket, DType, Graph
from mod_models.spec import ModelSpec, RoutingSpec


def build_plan(folder: Path, model: ir.Model, dtype: DType) -> int:
    """Builds a plan of this graph, and returns its size in bytes."""
    (folder / "graph.onnx").write_bytes(ir.to_proto(model).SerializeToString())
    graph = Graph(path="graph.onnx", model="mod", bucket=BUCKET, dtype=dtype, target=None, k_by_layer={})
    build(job_of(folder, graph), dtype, folder / "plan.engine")
    return (folder / "plan.engine").stat().st_size


GRAPHS = {
    "a step that skips": lambda: step_graph("predictor", 4, "fair"),
    # Without a condition, only the dependency on the logits keeps the writes after the reads.
    "a step without conditions": lambda: step_graph("predictor", skip=False),
    "a prompt": lambda: prefill_graph("predictor"), "a short prompt": lambda: prefill_graph("predictor", 5),
    "normed heads": lambda: step_graph("normed heads"), "a prompt with biases": lambda: prefill_graph("biases"),
}  # fmt: skip

SPECIAL = {
    "a step that skips": {"If", "TensorScatter"}, "a step without conditions": {"TensorScatter"},
    "a short prompt": {"If"}, "normed heads": {"TensorScatter"},
}  # fmt: skip


@pytest.mark.slow
@needs_rtx
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("a step without conditions", "float16"), ("a short prompt", "float16"), ("a step that skips", "bfloat16"),
        ("a step that skips", "float32"), ("a step that skips", "float16"), ("a prompt", "float32"),
        ("a short prompt", "float32"), ("a short prompt", "bfloat16"), ("normed heads", "float16"),
        ("a prompt with biases", "bfloat16"),
    ],
)  # fmt: skip
def test_builds_the_graphs_of_models_that_write_text(tmp_path: Path, kind: str, dtype: DType) -> None:
    model = GRAPHS[kind]()
    apply_rewrites(model, RTX.limits, dtype)
    check_limits(model, RTX.limits, dtype)
    assert build_plan(tmp_path, model, dtype) > 100_000
    assert {node.op_type for node in model.graph} & {"If", "TensorScatter"} == SPECIAL.get(kind, set())


@needs_rtx
@pytest.mark.parametrize(
    "name", [name if name == "index_add" else pytest.param(name, marks=pytest.mark.slow) for name in DIALECTS]
)
def test_builds_models_that_were_not_written_for_it(tmp_path: Path, name: str) -> None:
    model = dialect_graph(name, BUCKET.batch, BUCKET.seq)
    apply_rewrites(model, RTX.limits, "float32")
    assert build_plan(tmp_path, model, "float32") > 50_000


@needs_rtx
@pytest.mark.parametrize(
    "name", [name if name == "class_apart" else pytest.param(name, marks=pytest.mark.slow) for name in MANNERS]
)
def test_builds_every_manner_of_routing(tmp_path: Path, name: str) -> None:
    model = manner_graph(name)
    apply_rewrites(model, RTX.limits, "float32")
    assert build_plan(tmp_path, model, "float32") > 50_000


WRITTEN_OUT = """g (float[2,16,96] x) => (float[2,16,32] y)
<int64[1] last = {-1}, int64[5] parts = {2,16,3,2,16}, int64[3] flat = {2,16,32}, int64 zero = {0}, int64 one = {1},
 int64 two = {2}, int64[2] square = {16,16}, float low = {-inf}, float eps = {0.00001}, float power = {2.0},
 float nought = {0.0}, float scale = {0.25}> {
    m = ReduceMean (x, last) c = Sub (x, m) s = Pow (c, power) v = ReduceMean (s, last) e = Add (v, eps) r = Sqrt (e)
    n = Div (c, r)
    z = Reshape (n, parts) p = Transpose <perm = [2,0,3,1,4]> (z)
    q = Gather (p, zero) k = Gather (p, one) u = Gather (p, two)
    kt = Transpose <perm = [0,1,3,2]> (k) a = MatMul (q, kt) w = Mul (a, scale)
    t = ConstantOfShape <value = float[1] {1.0}> (square) l = Trilu <upper = 0> (t) hidden = Equal (l, nought)
    f = Where (hidden, low, w) g = Softmax (f) o = MatMul (g, u)
    back = Transpose <perm = [0,2,1,3]> (o) h = Reshape (back, flat)
    hs = Mul (h, h) hv = ReduceMean (hs, last) he = Add (hv, eps) hr = Sqrt (he) hi = Reciprocal (hr) i = Mul (h, hi)
    norm = ReduceL2 (i, last) larger = Max (norm, eps) y = Div (i, larger)
}"""


@needs_rtx
@pytest.mark.fast("float16")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_builds_norms_and_attention_that_were_written_out(tmp_path: Path, dtype: DType) -> None:
    model = parsed(WRITTEN_OUT)
    applied = apply_rewrites(model, RTX.limits, dtype)
    assert (applied["norm_operator"], applied["attention_operator"]) == (2, 2)
    check_limits(model, RTX.limits, dtype)
    assert build_plan(tmp_path, model, dtype) > 10_000


@needs_rtx
@pytest.mark.fast("one query in two heads", "four heads")
@pytest.mark.parametrize(
    ("heads", "queries", "masked", "kernel"),
    [(1, 16, True, False), (2, 1, True, False), (3, 1, False, False), (4, 1, True, True), (2, 2, True, True)],
    ids=["one head", "one query in two heads", "one query in three heads", "four heads", "two queries"],
)
def test_where_it_has_an_attention_kernel(tmp_path: Path, heads: int, queries: int, masked: bool, kernel: bool) -> None:
    """The last layer of a model of few heads has a single query, because only one row of logits is asked for."""
    mask = (f", bool[1,1,{queries},16] m", ", m") if masked else ("", "")
    shape, keys = f"float16[1,{heads},{queries},32]", f"float16[1,{heads},16,32]"
    text = f"g ({shape} q, {keys} k, {keys} v{mask[0]}) => ({shape} y) {{ y = Attention (q, k, v{mask[1]}) }}"
    model = parsed(text)
    if kernel:
        build_plan(tmp_path, model, "float16")
    else:
        with pytest.raises(EngineError, match="was not supported by a dedicated kernel"):
            build_plan(tmp_path, model, "float16")
        with pytest.raises(LimitError, match="the Attention operator has"):
            check_limits(model, RTX.limits, "float16")
    apply_rewrites(model, RTX.limits, "float16")
    check_limits(model, RTX.limits, "float16")
    assert [node.op_type for node in model.graph].count("Attention") == kernel
    build_plan(tmp_path, model, "float16")


IN_PLACE = "g (bool f, float[1,2,9,4] c, float[1,2,1,4] u, int64[1] i) => (float[1,2,9,4] y)"


@needs_rtx
@pytest.mark.fast("plain", "in a branch")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = TensorScatter (c, u, i)", None),
        ("d = Neg (c) y = TensorScatter (d, u, i)", "The cache tensor must be a network input"),
        ("d = TensorScatter (c, u, i) y = Neg (d)", "The output tensor must be a network output"),
        (
            """y = If (f) <then_branch = a () => (float[1,2,9,4] p) { p = TensorScatter (c, u, i) },
            else_branch = b () => (float[1,2,9,4] q) { q = Identity (c) }>""",
            "The cache tensor must be a network input",
        ),
        ('y = TensorScatter <mode = "circular"> (c, u, i)', "Only linear mode is supported"),
    ],
    ids=["plain", "no input", "no output", "in a branch", "circular"],
)
def test_where_it_takes_a_write_in_place(tmp_path: Path, body: str, reason: str | None) -> None:
    """These limits are why `cache_in_place` writes outside of branches, from an input to an output."""
    model = parsed(f"{IN_PLACE} {{ {body} }}", opset=24)
    if reason is None:
        build_plan(tmp_path, model, "float32")
        return
    with pytest.raises(EngineError, match=reason):
        build_plan(tmp_path, model, "float32")


@needs_rtx
def test_selects_more_tokens_than_its_topk_can_in_the_order_of_their_scores(tmp_path: Path) -> None:
    model = parsed(
        """g (float[1,9000] s, float[1,9000,4] x) => (float[1,9000,4] y, int64[1,5000] index)
        <int64[1] k = {5000}, int64[1] last = {-1}, int64[3] wide = {1, 5000, 4}> {
            values, index = TopK (s, k)
            i = Unsqueeze (index, last) j = Expand (i, wide) taken = GatherElements <axis = 1> (x, j)
            v = Unsqueeze (values, last) u = Mul (taken, v)
            y = ScatterElements <axis = 1, reduction = "add"> (x, j, u)
        }"""
    )
    for number, node in enumerate(model.graph):
        node.name = f"node_{number}"
    apply_rewrites(model, RTX.limits, "float32")
    check_limits(model, RTX.limits, "float32")
    assert build_plan(tmp_path, model, "float32") > 10_000


@needs_rtx
@pytest.mark.fast("and some left")
@pytest.mark.parametrize(("S", "dtype"), [(24_000, "float32"), (24_001, "float16")], ids=["groups", "and some left"])
def test_selects_from_a_long_axis_in_groups(tmp_path: Path, S: int, dtype: DType) -> None:
    model = parsed(
        f"""g (float[2,{S}] s) => (float[2,300] best, int64[2,300] index) <int64[1] k = {{300}}> {{
            t = Neg (s) best, index = TopK (t, k)
        }}"""
    )
    assert apply_rewrites(model, RTX.limits, dtype)["grouped_topk"] == 1
    check_limits(model, RTX.limits, dtype)
    assert build_plan(tmp_path, model, dtype) > 10_000


@needs_rtx
@pytest.mark.slow
def test_selects_more_tokens_than_its_topk_can(tmp_path: Path) -> None:
    """5,120 of 40,960 tokens are routed; on a CPU, the same graph routes like the model."""
    import onnxruntime

    spec = ModelSpec(
        vocab_size=16, d_model=16, n_layers=2, n_heads=1, n_kv_heads=1, d_head=16, d_ff=16, max_positions=40_960,
        routing=RoutingSpec(layers=(0, 1), capacity=0.125),
    )  # fmt: skip
    module, bucket = make_model(spec), Bucket(1, 40_960)
    for dtype in FLOAT_DTYPES:
        job = write_graph(tmp_path, spec, bucket, RTX.limits, dtype)
        build(job, dtype, tmp_path / dtype)
        # A mask of 5,120 x 5,120 stored in the plan would alone be 26 MB.
        assert (tmp_path / dtype).stat().st_size < 20_000_000
    job = write_graph(tmp_path, spec, bucket, RTX.limits, "float32")
    ids, lengths = torch.randint(0, 16, (1, 40_960)), torch.tensor([40_001])
    session = onnxruntime.InferenceSession(tmp_path / job.graph.path, providers=["CPUExecutionProvider"])
    logits, *routed = session.run(None, {"input_ids": ids.numpy(), "lengths": lengths.numpy()})
    with torch.no_grad():
        reference, selections = observed(module, ids, lengths)
    assert [index.shape for index in routed] == [(1, 5120)] * 2
    for index, expected in zip(routed, selections.values(), strict=True):
        np.testing.assert_array_equal(index, expected.index_BK.numpy())
    np.testing.assert_allclose(logits[0, :40_001], reference[0, :40_001].numpy(), atol=1e-5)
