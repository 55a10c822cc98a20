"""What a branch hands out is followed through its If, in both directions."""

from __future__ import annotations

from small_graphs import parsed

from mod_export.graph.branches import Branches, branches_of

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
