"""Parts of nodes: on a real routed graph, and rule by rule."""

from __future__ import annotations

import dataclasses
from collections import Counter

import onnx_ir as ir
import pytest
from small_graphs import make_spec, parsed, portable_graph

from mod_export.benchmark.model_parts import NODE_PARTS, part_of_operator, parts_of_nodes
from mod_export.benchmark.products import PARTS
from mod_models.spec import ExpertsSpec


def operators_by_part(model: ir.Model) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for node, part in parts_of_nodes(model.graph).items():
        found.setdefault(part, Counter())[node.op_type] += 1
    return found


def only(text: str, output: str = "y") -> str:
    """The part of the node that makes `output`."""
    parts = parts_of_nodes(parsed(text).graph)
    return next(part for node, part in parts.items() if node.outputs[0].name == output)


def test_a_routed_graph_falls_into_its_parts() -> None:
    found = operators_by_part(portable_graph(make_spec(), 1, 32))
    assert set(found) == set(NODE_PARTS) - {"experts", "other"}
    assert found["attention"] == {"Attention": 2}
    assert found["norms"] == {"RMSNormalization": 5}
    assert found["embedding"] == {"Gather": 1}
    assert found["mlp"] == {"MatMul": 6}
    assert found["head"] == {"MatMul": 1}
    assert found["routing"]["TopK"] == 2
    assert found["routing"]["ScatterND"] == found["routing"]["MatMul"] == 1
    # Rows, and both rotary tables at the routed positions.
    assert found["routing"]["Gather"] == 3
    assert {"Transpose", "Concat", "Sigmoid"} <= set(found["elementwise"])
    assert "TopK" not in found["elementwise"]


@pytest.mark.parametrize("choice", ["token", "expert"])
def test_experts_are_a_part_of_their_own(choice: str) -> None:
    experts = ExpertsSpec(n_experts=2, choice=choice, layers=(0,))
    spec = dataclasses.replace(make_spec(), routing=None, experts=experts)
    found = operators_by_part(portable_graph(spec, 1, 32))
    assert found["experts"]["MatMul"] == found["mlp"]["MatMul"] == 3
    # The softmax over experts is no attention.
    assert found["attention"] == {"Attention": 2}
    assert found["routing"]["MatMul"] == found["routing"]["Softmax"] == 1


def test_a_dense_graph_routes_nothing() -> None:
    assert "routing" not in operators_by_part(portable_graph(make_spec().dense(), 1, 32))


def test_the_gate_and_what_writes_back_are_routing() -> None:
    graph = portable_graph(make_spec(gate="sigmoid"), 1, 32).graph
    parts = parts_of_nodes(graph)
    scatter = next(node for node in graph if node.op_type == "ScatterND")
    seen, waiting = set(), [scatter]
    # Upwards from the scatter until the sums of the block: write-back, choice of live rows, sum, gate.
    while waiting:
        node = waiting.pop()
        seen.add((node.op_type, parts.get(node)))
        if node.op_type in ("ScatterND", "Reshape", "Where"):
            waiting += [value.producer() for value in node.inputs if value is not None and value.producer() in parts]
    assert ("Where", "routing") in seen
    assert ("Add", "routing") in seen
    gates = [node for node in graph if node.op_type == "Mul" and parts[node] == "routing"]
    assert gates


def test_constants_that_are_folded_have_no_part() -> None:
    graph = portable_graph(make_spec(), 1, 32).graph
    parts = parts_of_nodes(graph)
    transposed = [node for node in graph if node.op_type == "Transpose" and node not in parts]
    assert len(transposed) == len([node for node in graph if node.op_type == "MatMul"])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("g (float[2,3] x) => (float[2,3] y) { y = Softmax(x) }", "attention"),
        ("g (float[2,3,4] q, float[2,4,3] k) => (float[2,3,3] y) { s = MatMul(q, k) y = Mul(s, s) }", "attention"),
        ("g (float[2,3,4] q, float[2,4,3] k) => (float[3,2,3] y) { s = MatMul(q, k) y = Transpose <perm=[1,0,2]> (s) }",
         "elementwise"),
        ("g (float[2,3] x) => (float[2,3] y) { y = Mul(x, x) }", "elementwise"),
        ("g (float[2,3] x) => (bool[2,3] y) { y = Less(x, x) }", "routing"),
        ("g (int64[2,3] x) => (int64[2,3] y) { y = Add(x, x) }", "routing"),
        ("g (float[2,3] x) => (float[2,3] y) { n = CumSum(x, a) y = Exp(n) }", "routing"),
        ("g (float[2,3] x, int64[2] i) => (float[2,3] y) { y = Gather(x, i) }", "routing"),
        ("g (float[2,3] x) => (float[3,2] y) { y = Reshape(x, a) }", "elementwise"),
        ("g (float[2,4,3] x, float[2,4] z) => (float[2,4,3] y) { n = CumSum(z, a) g = Unsqueeze(n, a) y = Mul(x, g) }",
         "routing"),
        ("g (float[2,4,3] x, float[2,4,3] z) => (float[2,4,3] y) { n = CumSum(z, a) y = Mul(x, n) }", "elementwise"),
    ],
)  # fmt: skip
def test_rules(text: str, part: str) -> None:
    # `a` is a constant axis or shape, whatever the operator wants there.
    constant = "<int64[2] a = {3, 2}>" if "Reshape" in text else "<int64[1] a = {2}>"
    constant = "<int64 a = {1}>" if "CumSum" in text and "Unsqueeze" not in text else constant
    head, _, body = text.partition("{")
    assert only(f"{head}{constant} {{{body}" if "(x, a)" in text or "(z, a)" in text else text) == part


def test_operators_that_say_it_all() -> None:
    assert part_of_operator("SkipLayerNormalization") == "norms"
    assert part_of_operator("GroupQueryAttention") == "attention"
    assert part_of_operator("TopK") == "routing"
    assert part_of_operator("Gather") is None
    assert part_of_operator("Mul") is None


def test_parts_of_products_come_first_in_tables() -> None:
    assert list(NODE_PARTS[: len(PARTS) - 1]) == [part for part in PARTS if part != "other"]
    assert NODE_PARTS[-1] == "other"
