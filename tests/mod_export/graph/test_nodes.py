"""The place of a node in the model, and how rewrites add nodes to a graph."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import make_spec, parsed, portable_graph, run

from mod_export.errors import GraphError
from mod_export.graph.nodes import (
    Branches,
    NodeWriter,
    branches_of,
    constant_array,
    is_used,
    label_of,
    late_zero,
    made_by,
    module_of,
    numbered_layer,
    only_reader,
    require_static_shape,
    static_shape,
    substitute,
)

SCOPES = "pkg.torch.onnx.name_scopes"


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
    anchor.metadata_props[SCOPES] = "['', 'layers.1']"
    writer = NodeWriter(model.graph, anchor, "extra")
    tall = writer.op("Reshape", model.graph.inputs[0], [2, 1])
    values, order = writer.ops("TopK", 2, tall, [1], axis=0)
    vendors = writer.op("Gelu", values, domain="com.microsoft", like=tall)
    assert [node.name for node in model.graph] == ["Neg/extra_Reshape_0", "Neg/extra_TopK_1", "Neg/extra_Gelu_2", ""]
    types = [(value.dtype, static_shape(value)) for value in (tall, values, order, vendors)]
    FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
    assert types == [(FLOAT, (2, 1)), (FLOAT, (1, 1)), (INT64, (1, 1)), (FLOAT, (2, 1))]
    vendors.dtype = ir.DataType.FLOAT16
    assert tall.dtype == FLOAT  # The values do not share one type object.
    assert label_of(model.graph[0]) == "layers.1 (Neg/extra_Reshape_0)"


def test_constants_of_one_content_are_shared() -> None:
    model = parsed("g (float[2] x) => (float[2] y) { y = Neg (x) }")
    writer = NodeWriter(model.graph, model.graph[0], "extra")
    first = writer.constant(np.array([1, 2]))
    assert writer.constant(np.array([1, 2])) is first
    long = [np.arange(20), np.arange(20) + 1]
    others = [np.array([[1, 2]]), np.array([1, 3]), np.array([1, 2], np.int32), np.array([12]), *long]
    made = [writer.constant(array) for array in (np.array([1, 2]), *others)]
    assert len(model.graph.initializers) == len(made)
    for value, array in zip(made[1:], others, strict=True):
        stored = constant_array(value)
        np.testing.assert_array_equal(stored, array)
        assert stored.dtype == array.dtype


def test_a_value_in_the_place_of_another_has_its_name() -> None:
    model = parsed("g (float[2] x) => (float[2] y) { a = Neg (x) y = Neg (a) }")
    first, second = model.graph
    assert only_reader(first.outputs[0]) is second
    assert made_by(second.inputs[0], "Neg", "Abs") is first
    assert made_by(second.inputs[0], "Abs") is made_by(None, "Abs") is made_by(model.graph.inputs[0], "Abs") is None
    assert [is_used(value) for value in (first.outputs[0], second.outputs[0])] == [True, True]
    assert only_reader(second.outputs[0]) is None
    substitute(
        second.outputs[0], NodeWriter(model.graph, first, "same").op("Abs", model.graph.inputs[0]), second, first
    )
    assert [node.op_type for node in model.graph] == ["Abs"]
    assert [value.name for value in model.graph.outputs] == ["y"]


def test_a_late_zero_is_zero_whatever_it_waits_for() -> None:
    model = parsed("g (float[2,3] x, int64[1] n) => (int64[1] y) { y = Neg (n) }")
    negated = model.graph[0]
    zero = late_zero(NodeWriter(model.graph, negated, "late"), model.graph.inputs[0], ir.DataType.INT64, (1,))
    negated.replace_input_with(0, zero)
    for x in (np.zeros((2, 3)), np.full((2, 3), np.nan), np.full((2, 3), -np.inf)):
        assert run(model, {"x": x.astype(np.float32), "n": np.array([7])})[0].tolist() == [0]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("layers.3", (3, "layers.3")),
        ("layers.3.mlp.down_proj.weight", (3, "layers.3")),
        ("model.decoder.layers.12.router.projection.weight", (12, "model.decoder.layers.12")),
        ("['', 'layers.1', 'layers.1.attention', 'linear']", (1, "layers.1")),
        ("blocks.0.experts.5.w", (0, "blocks.0")),
        ("norm.weight", None),
        ("layers.3b.weight", None),
        ("layer3.weight", None),
        ("", None),
    ],
)
def test_the_layer_in_a_module_path(path: str, expected: tuple[int, str] | None) -> None:
    assert numbered_layer(path) == expected


def test_every_node_of_an_export_has_a_place() -> None:
    """Layer 0 is dense, layer 1 is routed. The exporter records no layer for nodes of `route` itself, such as TopK."""
    graph = portable_graph(make_spec())
    count = Counter(module_of(node) for node in graph.graph)
    assert {"layers.0", "layers.1", "norm", "embedding"} <= count.keys()
    assert count["layers.0"] > 15
    assert count["layers.1"] > 30
    # Few nodes are elsewhere: the mask of real tokens, the slices of the tables.
    other = sum(count[name] for name in count.keys() - {"layers.0", "layers.1", "norm", "embedding"})
    assert other < len(graph.graph) / 5
    for node in graph.graph:
        if node.op_type in ("TopK", "ScatterND", "GatherND", "GatherElements"):
            assert module_of(node) == "layers.1"
        for value in node.inputs:
            if value is not None and str(value.name).startswith("layers."):
                assert module_of(node) == ".".join(str(value.name).split(".")[:2])
    (routed,) = [value.producer() for value in graph.graph.outputs if value.name == "routed_1"]
    assert module_of(routed) == "layers.1"
    # The exporter records no place for a block's own nodes; the inputs of the residual's sum reveal it.
    assert {"layers.0", "layers.1"} <= {module_of(node) for node in graph.graph if node.op_type == "Add"}


@pytest.mark.parametrize(
    ("body", "scopes", "expected"),
    [
        # The place comes from the node's path or weight, from its inputs, or else from the only layer that reads it.
        ("a = Neg (x) b = Neg (a) y = Neg (b)", {"a": "layers.0.mlp", "y": "layers.1"}, "layers.0 layers.0 layers.1"),
        ("a = Add (x, w) y = Neg (a)", {}, "layers.4 layers.4"),
        ("a = Neg (x) b = Neg (a) y = Neg (b)", {"b": "layers.2", "y": "layers.3"}, "layers.2 layers.2 layers.3"),
        # Of several layers the latest counts; a node that two layers read belongs to neither.
        ("a = Neg (x) b = Abs (x) y = Add (a, b)", {"a": "layers.4", "b": "layers.2"}, "layers.4 layers.2 layers.4"),
        ("a = Neg (x) b = Neg (a) y = Abs (a)", {"b": "layers.0", "y": "layers.1"}, "node_a layers.0 layers.1"),
        ("y = Neg (x)", {"y": "linear_7"}, "node_y"),
    ],
)
def test_where_a_node_stands(body: str, scopes: dict[str, str], expected: str) -> None:
    """In messages, the name of the node follows its place."""
    model = parsed(f"g (float[2] x) => (float[2] y) <float[2] w = {{1.0, 2.0}}> {{ {body} }}")
    model.graph.initializers["w"].name = "layers.4.router.weight"
    for node in model.graph:
        node.name = f"node_{node.outputs[0].name}"
        if node.outputs[0].name in scopes:
            node.metadata_props[SCOPES] = f"['', '{scopes[node.outputs[0].name]}', 'linear_3']"
    places = expected.split()
    assert [module_of(node) for node in model.graph] == places
    names = [str(node.name) for node in model.graph]
    assert [label_of(node) for node in model.graph] == [
        name if place == name else f"{place} ({name})" for place, name in zip(places, names, strict=True)
    ]


def test_a_node_without_any_name_is_called_after_its_operator() -> None:
    (node,) = parsed("g (float[2] x) => (float[2] y) { y = Neg (x) }").graph
    node.name = None
    assert (label_of(node), module_of(node)) == ("Neg", "Neg")


TEXT = """g (bool flag, float[2] x) => (float[2] y) {
    h = Neg (x)
    given = If (flag) <
        then_branch = a () => (float[2] p) {
            p = If (flag) <
                then_branch = c () => (float[2] r) { r = Abs (h) },
                else_branch = d () => (float[2] s) { s = Exp (h) }>
        },
        else_branch = b () => (float[2] q) { q = Sin (h) }>
    y = Sqrt (given)
}"""


def test_makers_and_readers() -> None:
    graph = parsed(TEXT).graph
    branches, nodes = Branches(graph), {node.op_type: node for node in graph.all_nodes()}
    result = nodes["Sqrt"].inputs[0]
    assert result is not None
    assert {maker.op_type for maker in branches.makers(result) if maker} == {"Abs", "Exp", "Sin"}
    for inner in ("Abs", "Exp", "Sin"):
        assert [node.op_type for node in branches.readers(nodes[inner].outputs[0])] == ["Sqrt"]
    assert {node.op_type for node in branches.readers(nodes["Neg"].outputs[0])} == {"Abs", "Exp", "Sin"}
    assert list(branches.makers(graph.inputs[1])) == [None]
    assert [branch.name for branch in branches_of(graph[1])] == ["a", "b"]
    assert branches_of(graph[0]) == []
