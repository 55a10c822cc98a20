"""Where NaN comes from: the first operation of a run of the reference, and the first node of a graph, that makes it.

From an output that is NaN the way goes back over what was NaN already; where nothing that is read is, NaN is made. If
what is read there is infinite, the infinity is followed in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mod_export.graph.nodes import graph_from_file, module_of
from mod_export.judge.inputs import Batch
from mod_export.judge.reference import Reference
from mod_export.judge.values import AT_ONCE, opened, producers
from mod_export.rows.parity import Located

if TYPE_CHECKING:
    import torch

N = TypeVar("N")


def made_first(
    outputs: Iterable[N], inputs_of: Callable[[N], Sequence[N]], has: Mapping[N, bool], order: Sequence[N]
) -> N | None:
    """The first node behind `outputs` that has something and reads nothing that has it; None where no output has it."""
    todo = [one for one in outputs if has.get(one)]
    seen, made = set(todo), set[N]()
    while todo:
        node = todo.pop()
        before = [one for one in inputs_of(node) if has.get(one)]
        if not before:
            made.add(node)
        todo += [one for one in before if one not in seen]
        seen.update(before)
    return next((one for one in order if one in made), None)


class _Watch:
    """Which operations of a run give NaN, and which give an infinity."""

    def __init__(self) -> None:
        self.nan: dict[Any, bool] = {}
        self.infinite: dict[Any, bool] = {}
        self.last: Any = None

    def __call__(self, node: torch.fx.Node, compute: Callable[[], Any]) -> Any:
        value = compute()
        parts = [one for one in (value if isinstance(value, (list, tuple)) else [value]) if _is_float(one)]
        self.nan[node] = any(bool(one.isnan().any()) for one in parts)
        self.infinite[node] = any(bool(one.isinf().any()) for one in parts)
        self.last = node
        return value


def _is_float(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.is_floating_point()


def origin_in_reference(reference: Reference, batch: Batch) -> str | None:
    """The operation of the model that makes the first NaN of this batch, with its place; None where it makes none."""
    from mod_export.judge.choices import told_of

    watch = _Watch()
    reference.observed(batch, {}, watch)
    order = list(watch.nan)

    def inputs_of(node: torch.fx.Node) -> list[torch.fx.Node]:
        return list(node.all_input_nodes)

    found = made_first(inputs_of(watch.last), inputs_of, watch.nan, order)
    if found is None:
        return None
    source = made_first(inputs_of(found), inputs_of, watch.infinite, order)
    of = "" if source is None or source.op != "call_function" else f", of an infinity that {told_of(source)} makes"
    if found.op != "call_function":
        own = dict(zip(reference.program(batch.bucket).graph_signature.user_inputs, batch.feeds, strict=False))
        return f"{own.get(found.name, found.name)} holds the first{of}"
    return f"{told_of(found)} makes the first{of}"


def origin_in_graph(root: Path, path: str, batches: Sequence[Batch]) -> Located | None:
    """The node of an ONNX file of the build folder that makes the first NaN, on the batches in turn; None where the
    graph gives none on ONNX Runtime without any optimisation.

    Raises:
        BuildError: it cannot be run.
    """
    model = graph_from_file(root / path)
    results = [value.producer() for value in model.graph.outputs]
    known = producers(model)
    names, nodes = list(known), list(model.graph)
    with opened(model, root, names) as runner:
        for batch in batches:
            feeds = batch.read_by(runner.inputs)
            has = dict.fromkeys(nodes, False)
            for start in range(0, len(names), AT_ONCE):
                for name, array in runner.run(feeds, names[start : start + AT_ONCE]).items():
                    has[known[name]] |= array.dtype.kind == "f" and bool(np.isnan(array).any())
            found = made_first(
                [one for one in results if one is not None], lambda one: list(one.predecessors()), has, nodes
            )
            if found is not None:
                return Located(
                    layer=module_of(found), operator=f"{found.op_type} {found.name}", input=batch.kind,
                    error=None, allowed=None, makes_nan=True,
                )  # fmt: skip
    return None
