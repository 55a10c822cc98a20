"""Work: the same FLOPs as the cost model's, and bytes rule by rule."""

from __future__ import annotations

import pytest
from small_graphs import make_spec, parsed, portable_graph

from mod_export.benchmark.cost import Work, cost_row, flops_of, work_of_graph
from mod_export.benchmark.model_parts import parts_of_nodes
from mod_export.errors import GraphError
from mod_export.types import Bucket


def work(text: str, *, whole_scores: bool = False) -> list[tuple[int, int]]:
    return [(one.flops, one.bytes) for one in work_of_graph(parsed(text), "test", whole_scores=whole_scores)]


@pytest.mark.parametrize("whole_scores", [False, True])
@pytest.mark.parametrize("kind", ["mod", "dense"])
def test_all_work_is_counted_once(kind: str, whole_scores: bool) -> None:
    spec = make_spec() if kind == "mod" else make_spec().dense()
    model = portable_graph(spec, 2, 32)
    found = work_of_graph(model, "test", whole_scores=whole_scores)
    cost = cost_row(model, "mod", Bucket(2, 32))
    by_part = dict.fromkeys(cost.flops_by_part, 0)
    for one in found:
        by_part[one.part] = by_part.get(one.part, 0) + one.flops * len(one.nodes)
    assert cost.needed_flops is not None
    hidden = 0 if whole_scores else cost.flops - cost.needed_flops
    expected = {**cost.flops_by_part, "attention": cost.flops_by_part["attention"] - hidden}
    assert {part: by_part[part] for part in expected} == expected
    assert sum(by_part.values()) == flops_of(found) == cost.flops - hidden
    part_of_node = {name: one.part for one in found for name in one.nodes}
    assert part_of_node == {node.name: part for node, part in parts_of_nodes(model.graph).items()}


def test_equal_work_stands_together() -> None:
    model = parsed("g (float[2,3] x) => (float[2,3] y) { h = Exp(x) y = Exp(h) }")
    for name, node in zip(("first", "second"), model.graph, strict=True):
        node.name = name
    assert work_of_graph(model, "test", whole_scores=False) == (
        Work(part="elementwise", flops=0, bytes=2 * 24, nodes=("first", "second")),
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("g (float[2,3] x, float[3] b) => (float[2,3] y) { y = Add(x, b) }", 24 + 12 + 24),
        ("g (float[2,3] x) => (float[2,3] y) { y = Mul(x, x) }", 24 + 24),
        ("g (float[2,3] x) => (float16[2,3] y) { y = Cast<to=10>(x) }", 24 + 12),
        ("g (float[2,3] x) => (float[3,2] y) <int64[2] a = {3, 2}> { y = Reshape(x, a) }", 0),
        ("g (float[100,3] x, int64[2] i) => (float[2,3] y) { y = Gather(x, i) }", 2 * 24 + 16),
        ("g (float[100,3] x) => (float[2,3] y) <int64[1] b = {0}, int64[1] e = {2}> { y = Slice(x, b, e) }",
         2 * 24 + 8 + 8),
        ("g (float[1,3] x) => (float[2,3] y) <int64[2] a = {2, 3}> { y = Expand(x, a) }", 24),
        ("g (float[9,3] x, int64[2,1] i, float[2,3] u) => (float[9,3] y) { y = ScatterND(x, i, u) }",
         108 + 16 + 24 + 108),
        ("g (float[2,4] x) => (float[2,2] y, float[2,2] z) { y, z = Split<axis=1, num_outputs=2>(x) }", 32 + 32),
        ("g (float[2,4] x) => (int64[2,2] i) <int64[1] k = {2}> { v, i = TopK(x, k) }", 32 + 8 + 16 + 32),
        ("g (float[2,4] x) => (int64[2,2] i) <int64[1] k = {2}> { , i = TopK(x, k) }", 32 + 8 + 32),
    ],
)  # fmt: skip
def test_bytes(text: str, size: int) -> None:
    assert work(text) == [(0, size)]


def test_a_product_reads_both_sides_and_writes_the_result() -> None:
    text = "g (float[2,5,7] x, float[7,3] w) => (float[2,5,3] y) { y = MatMul(x, w) }"
    assert work(text) == [(2 * 2 * 5 * 7 * 3, 4 * (2 * 5 * 7 + 7 * 3 + 2 * 5 * 3))]


ATTENTION = """g (float[2,6,5,8] q, float[2,3,7,8] k, float[2,3,7,4] v) => (float[2,6,5,4] y)
{ y = Attention(q, k, v) }"""
SCORES = 2 * 6 * 5 * 7
FLOPS = 2 * SCORES * (8 + 4)
QUERY, KEY, VALUE, RESULT = 4 * 2 * 6 * 5 * 8, 4 * 2 * 3 * 7 * 8, 4 * 2 * 3 * 7 * 4, 4 * 2 * 6 * 5 * 4


def test_attention_that_holds_no_scores_is_one_product() -> None:
    assert work(ATTENTION) == [(FLOPS, QUERY + KEY + VALUE + RESULT)]


def test_attention_that_holds_its_scores_passes_them_through_memory() -> None:
    scores = 4 * SCORES
    assert work(ATTENTION, whole_scores=True) == [
        (FLOPS // 2, QUERY + KEY + scores),
        (0, 2 * scores),
        (FLOPS // 2, scores + VALUE + RESULT),
    ]


def test_what_has_no_rule_is_refused() -> None:
    text = "g (float[1,2,5] x, float[3,2,2] w) => (float[1,3,4] y) { y = Conv(x, w) }"
    with pytest.raises(GraphError, match=r"test: node .*: FLOPs of Conv cannot be counted"):
        work(text)
