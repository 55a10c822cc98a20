"""Where nodes of real and of written graphs stand in the model."""

from __future__ import annotations

import itertools
from collections import Counter

import onnx_ir as ir
import pytest
from small_graphs import make_spec, parsed, portable_graph

from mod_export.graph.places import module_of, numbered_layer, place_of

SCOPES = "pkg.torch.onnx.name_scopes"


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


@pytest.fixture(scope="module")
def graph() -> ir.Model:
    """Layer 0 is dense, layer 1 is routed."""
    return portable_graph(make_spec(layers=(1,)), 2, 16)


def test_every_node_of_an_export_has_a_place(graph: ir.Model) -> None:
    count = Counter(module_of(node) for node in graph.graph)
    assert {"layers.0", "layers.1", "norm", "embedding"} <= count.keys()
    assert count["layers.0"] > 15
    assert count["layers.1"] > 30
    # Next to nothing is left: the mask of real tokens, the slices of the tables.
    other = sum(count[name] for name in count.keys() - {"layers.0", "layers.1", "norm", "embedding"})
    assert other < len(graph.graph) / 5


def test_routing_belongs_to_its_layer(graph: ir.Model) -> None:
    for op_type in ("TopK", "ScatterND", "GatherND", "GatherElements"):
        places = {module_of(node) for node in graph.graph if node.op_type == op_type}
        assert places <= {"layers.1"}
    (routed,) = [value for value in graph.graph.outputs if value.name == "routed_1"]
    producer = routed.producer()
    assert producer is not None
    assert module_of(producer) == "layers.1"


def test_products_belong_to_the_layer_of_their_weights(graph: ir.Model) -> None:
    for node in graph.graph:
        for value in node.inputs:
            if value is not None and str(value.name).startswith("layers."):
                assert module_of(node) == ".".join(str(value.name).split(".")[:2])


def test_residuals_belong_to_the_layer_that_adds(graph: ir.Model) -> None:
    """The exporter says nothing of what a block does itself; what the sum draws on does."""
    adds = [module_of(node) for node in graph.graph if node.op_type == "Add"]
    assert {"layers.0", "layers.1"} <= set(adds)


def chain(*scopes: str) -> ir.Model:
    """One node after the other, each with the module path that the exporter noted."""
    names = ["x", *(f"v{i}" for i in range(len(scopes)))]
    body = " ".join(f"{after} = Neg ({before})" for before, after in itertools.pairwise(names))
    model = parsed(f"g (float[2] x) => (float[2] {names[-1]}) {{ {body} }}")
    for node, scope in zip(model.graph, scopes, strict=True):
        node.name = f"node_{node.outputs[0].name}"
        if scope:
            node.metadata_props[SCOPES] = f"['', '{scope}']"
    return model


def places(model: ir.Model) -> list[str]:
    return [module_of(node) for node in model.graph]


def test_a_node_without_a_path_is_placed_by_what_it_draws_on() -> None:
    assert places(chain("layers.0.mlp", "", "layers.1", "")) == ["layers.0", "layers.0", "layers.1", "layers.1"]


def test_or_by_the_only_layer_that_draws_on_it() -> None:
    assert places(chain("", "layers.2", "layers.3")) == ["layers.2", "layers.2", "layers.3"]


def test_what_two_layers_draw_on_is_of_neither() -> None:
    model = parsed("g (float[2] x) => (float[2] a, float[2] b) { m = Neg (x) a = Neg (m) b = Abs (m) }")
    mask, one, other = model.graph
    mask.name = "node_mask"
    for node, layer in ((one, "layers.0"), (other, "layers.1")):
        node.metadata_props[SCOPES] = f"['', '{layer}']"
    assert module_of(mask) == "node_mask"


def test_the_latest_of_several_layers_counts() -> None:
    model = parsed("g (float[2] x) => (float[2] y) { a = Neg (x) b = Abs (x) y = Add (a, b) }")
    first, second, total = model.graph
    first.metadata_props[SCOPES], second.metadata_props[SCOPES] = "['', 'layers.4']", "['', 'layers.2']"
    assert module_of(total) == "layers.4"


def test_for_messages_the_name_stands_beside_the_place() -> None:
    model = chain("layers.3.attention", "")
    assert [place_of(node) for node in model.graph] == ["layers.3 (node_v0)", "layers.3 (node_v1)"]
    (lonely,) = parsed("g (float[2] x) => (float[2] y) { y = Neg (x) }").graph
    lonely.name = "lonely"
    assert (place_of(lonely), module_of(lonely)) == ("lonely", "lonely")
    lonely.name = None
    assert (place_of(lonely), module_of(lonely)) == ("Neg", "Neg")
