"""Where a node stands, and how passes put nodes into a graph."""

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import make_spec, parsed, portable_graph, run

from mod_export.errors import GraphError
from mod_export.graph.nodes import NodeWriter, constant_array, late_zero, require_static_shape, static_shape
from mod_export.graph.places import place_of


def test_nodes_of_a_routed_block_are_placed_in_it() -> None:
    """The exporter notes no layer for what `route` does itself, such as the TopK and the scatter."""
    model = portable_graph(make_spec(layers=(0, 1)), 2, 16)
    places = [place_of(node) for node in model.graph if node.op_type in ("TopK", "ScatterND")]
    assert [place.partition(" ")[0] for place in places] == ["layers.0"] * 3 + ["layers.1"] * 3
    assert places[0] == "layers.0 (node_sort__1)"


def test_a_node_outside_all_layers_has_only_its_name() -> None:
    assert place_of(parsed("g (float[2] x) => (float[2] y) { y = Neg (x) }").graph[0]) == "Neg"


@pytest.mark.parametrize(
    ("scopes", "place"),
    [
        ("['', 'layers.12', 'layers.12.mlp', 'linear_3']", "layers.12 (Neg)"),
        ("['', 'model', 'model.layers.3.mlp.experts.5']", "model.layers.3 (Neg)"),
        ("['', 'linear_7']", "Neg"),
    ],
)
def test_reads_the_layer_from_the_module_path(scopes: str, place: str) -> None:
    node = parsed("g (float[2] x) => (float[2] y) { y = Neg (x) }").graph[0]
    node.metadata_props["pkg.torch.onnx.name_scopes"] = scopes
    assert place_of(node) == place


def test_reads_the_layer_from_the_weights_where_there_is_no_path() -> None:
    model = parsed("g (float[2] x) => (float[2] y) <float[2] w = {1.0, 2.0}> { a = Add (x, w) y = Neg (a) }")
    model.graph.initializers["w"].name = "layers.4.router.weight"
    assert place_of(model.graph[1]) == "layers.4 (Neg)"


def test_constants() -> None:
    model = parsed(
        "g (int64[1] x) => (int64[1] y) <int64[1] a = {3}> { b = Constant <value = int64[1] {4}> () c = Add (a, b) "
        "y = Add (x, c) }"
    )
    constant, total, _ = model.graph
    assert constant_array(model.graph.initializers["a"]).tolist() == [3]
    assert constant_array(constant.outputs[0]).tolist() == [4]
    assert constant_array(total.outputs[0]) is None
    assert constant_array(model.graph.inputs[0]) is None
    assert constant_array(None) is None


def test_shapes() -> None:
    model = parsed("g (float[2,S] x, float[2,3] z) => (float[2,S] y) { y = Neg (x) }")
    node = model.graph[0]
    assert [static_shape(value) for value in (*model.graph.inputs, None)] == [None, (2, 3), None]
    assert require_static_shape(model.graph.inputs[1], node) == (2, 3)
    with pytest.raises(
        GraphError, match=r"^Neg: Neg has x of shape \[2,S\], expected a static shape; export with fixed"
    ):
        require_static_shape(node.inputs[0], node)
    with pytest.raises(GraphError, match=r"^Neg: Neg has an absent input, expected a static shape"):
        require_static_shape(None, node)


def test_written_nodes_are_typed_named_and_placed_like_their_anchor() -> None:
    model = parsed("g (float[2] x) => (float[2] y) { y = Neg (x) }")
    anchor = model.graph[0]
    anchor.metadata_props["pkg.torch.onnx.name_scopes"] = "['', 'layers.1']"
    writer = NodeWriter(model.graph, anchor, "extra")
    doubled = writer.op("Add", [model.graph.inputs[0]] * 2, ir.DataType.FLOAT, (2,))
    anchor.replace_input_with(0, writer.op("Abs", [doubled], ir.DataType.FLOAT, None))
    assert [node.name for node in model.graph] == ["Neg/extra_Add_0", "Neg/extra_Abs_1", ""]
    assert (doubled.dtype, doubled.shape) == (ir.DataType.FLOAT, ir.Shape([2]))
    assert place_of(model.graph[0]) == "layers.1 (Neg/extra_Add_0)"


def test_constants_of_one_name_are_shared_and_must_agree() -> None:
    model = parsed("g (float[2] x) => (float[2] y) { y = Neg (x) }")
    writer = NodeWriter(model.graph, model.graph[0], "extra")
    first = writer.constant("k", np.array([1, 2]))
    assert writer.constant("k", np.array([1, 2])) is first
    assert list(model.graph.initializers) == ["constant/k"]
    with pytest.raises(AssertionError, match="constant/k"):
        writer.constant("k", np.array([1, 3]))
    with pytest.raises(AssertionError, match="constant/k"):
        writer.constant("k", np.array([1, 2], np.int32))


def test_a_late_zero_is_zero_whatever_it_waits_for() -> None:
    model = parsed("g (float[2,3] x, int64[1] n) => (int64[1] y) { y = Neg (n) }")
    negated = model.graph[0]
    zero = late_zero(NodeWriter(model.graph, negated, "late"), model.graph.inputs[0], ir.DataType.INT64, (1,))
    negated.replace_input_with(0, zero)
    for x in (np.zeros((2, 3)), np.full((2, 3), np.nan), np.full((2, 3), -np.inf)):
        assert run(model, {"x": x.astype(np.float32), "n": np.array([7])})[0].tolist() == [0]
