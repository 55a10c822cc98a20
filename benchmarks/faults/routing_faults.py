"""Faults in routing: selection, gates, gather and scatter."""

from __future__ import annotations

from benchmarks.faults.fault_table import BFLOAT, FLOAT, HALF, f32, fault, faults, gate_mul, i64, shape_of
from benchmarks.faults.graph_surgery import Surgery


@fault("positions in the order of their scores", "layers.1")
def unsorted(s: Surgery) -> None:
    take = s.take(1)
    ascend = next(use.node for use in take.outputs[1].uses())
    s.replace(ascend.outputs[0], take.outputs[1])


@fault("last place holds the token before it again", "layers.1")
def repeated(s: Surgery) -> None:
    routed = s.output("routed_1")
    k = shape_of(routed)[1]
    s.after(routed, "Gather", i64(*range(k - 1), k - 2), axis=1)


@fault("padding is admitted", "layers.1")
def pads(s: Surgery) -> None:
    take = s.take(1)
    where = take.inputs[0].producer()
    take.replace_input_with(0, where.inputs[1])


@fault("ties go to the later token", "layers.1")
def later(s: Surgery) -> None:
    take = s.take(1)
    seq = shape_of(take.inputs[0])[1]
    s.feed(take, 0, "Gather", i64(*range(seq - 1, -1, -1)), axis=1)
    positions = take.outputs[1]
    ascend = next(use.node for use in positions.uses())
    last = s.constant(i64(seq - 1))
    ascend.replace_input_with(0, s.op(ascend, "Sub", [last, positions], like=positions))


@fault("router in bfloat16, for selection only", "layers.1")
def coarse_selection(s: Surgery) -> None:
    where = s.node(1, "Where", 0)
    s.feed(where, 1, "Cast", to=int(BFLOAT))
    s.feed(where, 1, "Cast", to=int(FLOAT))


@fault("router reads the normed stream", "layers.1")
def normed_router(s: Surgery) -> None:
    scale = s.graph.initializers["layers.1.attention_norm.weight"]
    router = s.node(1, "MatMul", 0)
    stream = router.inputs[0]
    normed = s.op(router, "RMSNormalization", [stream, scale], {"axis": -1, "epsilon": 1e-5})
    router.replace_input_with(0, normed)


@fault("gate applied twice", "layers.1")
def gate_twice(s: Surgery) -> None:
    mul = gate_mul(s)
    gate = mul.inputs[0]
    mul.replace_input_with(1, s.op(mul, "Mul", [mul.inputs[1], gate]))


@fault("gate on the whole block instead of the delta", "layers.1")
def gate_block(s: Surgery) -> None:
    mul = gate_mul(s)
    residual = mul.outputs[0].uses()[0].node
    x = residual.inputs[0]
    mul.replace_input_with(1, s.op(mul, "Add", [x, mul.inputs[1]]))
    s.replace(residual.outputs[0], mul.outputs[0])


@fault("gates of other tokens", "layers.1")
def rolled_gates(s: Surgery) -> None:
    mul = gate_mul(s)
    k = shape_of(mul.inputs[0])[1]
    s.feed(mul, 0, "Gather", i64(k - 1, *range(k - 1)), axis=1)


@fault("gate on the MLP only", "layers.1")
def gate_mlp(s: Surgery) -> None:
    mul = gate_mul(s)
    total = mul.inputs[1].producer()
    attention, mlp = total.inputs
    mul.replace_input_with(1, mlp)
    after = mul.outputs[0].uses()[0].node
    after.replace_input_with(1, s.op(after, "Add", [mul.outputs[0], attention]))


@fault("scatter to the wrong row of the batch", "layers.1")
def scatter_row(s: Surgery) -> None:
    scatter = s.node(1, "ScatterND", 0)
    total = shape_of(scatter.inputs[0])[0]
    index = s.op(scatter, "Add", [scatter.inputs[1], i64(total // 2)])
    scatter.replace_input_with(1, s.op(scatter, "Mod", [index, i64(total)]))


@fault("scatter one position too far", "layers.1")
def scatter_far(s: Surgery) -> None:
    scatter = s.node(1, "ScatterND", 0)
    total = shape_of(scatter.inputs[0])[0]
    index = s.op(scatter, "Add", [scatter.inputs[1], i64(1)])
    scatter.replace_input_with(1, s.op(scatter, "Mod", [index, i64(total)]))


@fault("results in the reverse order of their tokens", "layers.1")
def scatter_reversed(s: Surgery) -> None:
    scatter = s.node(1, "ScatterND", 0)
    s.feed(scatter, 2, "Gather", i64(*reversed(range(shape_of(scatter.inputs[2])[0]))), axis=0)


@fault("gathers the stream before the layer below", "layers.3")
def gathers_old(s: Surgery) -> None:
    reader = next(node for node in s.nodes(3, "Gather") if shape_of(node.outputs[0])[-1] == 32)
    older = next(node for node in s.nodes(1, "ScatterND")).outputs[0]
    reader.replace_input_with(0, older)


faults(
    {
        "one pad of each row counts as real": (
            None,
            lambda s: setattr(s.node(None, "Less", 0), "op_type", "LessOrEqual"),
        ),
        "the length of the first row is used for all": (
            None,
            lambda s: s.feed(s.node(None, "Less", 0), 1, "Gather", i64(0, 0), axis=0),
        ),
        "the lowest scores are taken": ("layers.1", lambda s: s.feed(s.node(1, "Where", 0), 1, "Neg")),
        "the largest absolute scores are taken": ("layers.1", lambda s: s.feed(s.node(1, "Where", 0), 1, "Abs")),
        "router in half precision": ("layers.1", lambda s: s.rounded(s.node(1, "MatMul", 0).outputs[0], HALF)),
        "routing of the first row is used for all": (
            "layers.1",
            lambda s: s.after(s.output("routed_1"), "Gather", i64(0, 0), axis=0),
        ),
        "scores of the neighbour to the left": (
            "layers.1",
            lambda s: s.feed(s.node(1, "Where", 0), 1, "Gather", i64(0, *range(31)), axis=1),
        ),
        "gate missing": ("layers.1", lambda s: s.bypass(gate_mul(s), 1)),
        "gate doubled": ("layers.1", lambda s: s.feed(gate_mul(s), 0, "Mul", f32(2.0))),
        "gate through a sigmoid": ("layers.1", lambda s: s.feed(gate_mul(s), 0, "Sigmoid")),
        "gates of the other row": ("layers.1", lambda s: s.feed(gate_mul(s), 0, "Gather", i64(1, 0), axis=0)),
        "gate 0.1 % too large": ("layers.1", lambda s: s.feed(gate_mul(s), 0, "Mul", f32(1.001))),
        "scatter adds instead of replacing": ("layers.1", lambda s: s.set(s.node(1, "ScatterND", 0), reduction="add")),
        "tokens that pass by are lost": ("layers.1", lambda s: s.feed(s.node(1, "ScatterND", 0), 0, "Mul", f32(0.0))),
        "row offset missing": ("layers.1", lambda s: s.bypass(s.node(1, "Add", 0), 0)),
    }
)
