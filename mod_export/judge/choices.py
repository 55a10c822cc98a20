"""Discrete choices of a captured program that are no routing sites, and what they do in a run of the reference.

A routing site can be told what to select, so the reference follows the candidate there. Any other operation whose
result jumps (an argmax, a bucket, `round`, a comparison of scores) cannot: where what it reads is as near to its edge
as rounding is large, the model itself does not determine the result, and nothing can be compared with it.

Which operations choose follows from their types: they read floating point, and give integers or booleans. STEPS are
those whose results jump and are floating point all the same. What is derived from sizes, weights and constants alone
is the same on every input and chooses nothing, and what only decides what a routing site selects is that site's.

* `Recorder` notes the outcomes of a run in float32, and if asked what was read for them;
* `Holder` gives another run (float64, other weights) these outcomes, so that its differences are rounding and no jumps;
* `Nudger` moves what is read by as much as a sound engine may be off there, up and down: where nothing moves in the
  outputs then, the outcome is determined (`determined.py`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from mod_export.graph.not_static import place_of
from mod_export.graph.program_nodes import argument_of, module_path
from mod_export.graph.routing_sites import Runnable
from mod_export.judge.compare import Slack
from mod_export.marker import MARKER

ATEN = torch.ops.aten
WRAPS = {
    ATEN.fmod.Tensor, ATEN.fmod.Scalar, ATEN.remainder.Tensor, ATEN.remainder.Scalar, ATEN.frac.default,
}  # fmt: skip
"""What is left over of a division: moves with its input, and jumps."""
STEPS = WRAPS | {
    ATEN.round.default, ATEN.round.decimals, ATEN.floor.default, ATEN.ceil.default, ATEN.trunc.default,
    ATEN.fix.default, ATEN.sign.default, ATEN.sgn.default, ATEN.heaviside.default, ATEN.floor_divide.default,
    ATEN.floor_divide.Scalar, ATEN.div.Tensor_mode, ATEN.div.Scalar_mode, ATEN.hardshrink.default,
    ATEN.threshold.default, ATEN.fake_quantize_per_tensor_affine.default,
}  # fmt: skip
"""Of floating point to floating point, with jumps."""
PICKS = {
    ATEN.view.default, ATEN.reshape.default, ATEN.expand.default, ATEN.permute.default, ATEN.transpose.int,
    ATEN.t.default, ATEN.squeeze.default, ATEN.squeeze.dim, ATEN.squeeze.dims, ATEN.unsqueeze.default,
    ATEN.flatten.using_ints, ATEN.clone.default, ATEN.alias.default, ATEN.contiguous.default, ATEN.detach.default,
    ATEN.select.int, ATEN.slice.Tensor, ATEN.narrow.default, ATEN.index_select.default, ATEN.gather.default,
    ATEN.index.Tensor, ATEN.flip.default, ATEN.split.Tensor, ATEN.split_with_sizes.default, ATEN.chunk.default,
    ATEN.unbind.int, ATEN.max.default, ATEN.max.dim, ATEN.min.default, ATEN.min.dim, ATEN.amax.default,
    ATEN.amin.default, ATEN.topk.default, ATEN.sort.default, ATEN.sort.stable, ATEN.kthvalue.default,
    ATEN.median.default, ATEN.median.dim, ATEN.relu.default, ATEN.abs.default, ATEN.neg.default, ATEN.clamp.default,
    ATEN.clamp_min.default, ATEN.clamp_max.default, ATEN.hardtanh.default, ATEN.masked_fill.Scalar,
    operator.getitem,
}  # fmt: skip
"""What gives entries of the first argument as they are, or bent without a jump. `x == x.max()` reads the scores once:
both sides are moved together, and the largest is always equal to itself."""

Outcomes = Mapping[str, tuple[Tensor, ...]]
"""Choice, by the name of its node -> what it gave, its discrete parts alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A discrete choice.

    Attributes:
        node: of the captured program.
        told: the operation and its place, as text.
        origins: the nodes whose values it chooses by, in order.
        chain: the PICKS between them and the choice, in order.
    """

    node: fx.Node
    told: str
    origins: tuple[fx.Node, ...]
    chain: tuple[fx.Node, ...]

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def read(self) -> set[str]:
        """Names of all nodes whose values are needed to make the choice again."""
        return {one.name for node in (*self.chain, self.node) for one in node.all_input_nodes} | {
            one.name for one in self.origins
        }

    @property
    def contest(self) -> fx.Node | None:
        """The operation in which entries compete; None where each is judged by itself."""
        return next((node for node in (self.node, *self.chain) if node.target in COMPETING), None)

    @property
    def dim(self) -> int | None:
        """The dimension along which entries compete; None for all of them."""
        if self.contest is None:
            return -1
        found = argument_of(self.contest, "dim")
        found = found[0] if isinstance(found, (list, tuple)) and len(found) == 1 else found
        return found if isinstance(found, int) else None


COMPETING = {
    ATEN.argmax.default, ATEN.argmin.default, ATEN.max.default, ATEN.max.dim, ATEN.min.default, ATEN.min.dim,
    ATEN.amax.default, ATEN.amin.default, ATEN.topk.default, ATEN.sort.default, ATEN.sort.stable,
    ATEN.argsort.default, ATEN.argsort.stable, ATEN.kthvalue.default, ATEN.median.default, ATEN.median.dim,
    ATEN.mode.default, ATEN.cummax.default, ATEN.cummin.default,
}  # fmt: skip

UNORDERED = {
    ATEN.topk.default, ATEN.sort.default, ATEN.argsort.default, ATEN.kthvalue.default, ATEN.median.default,
    ATEN.median.dim, ATEN.mode.default,
}  # fmt: skip
"""Of these, PyTorch does not say which of equal entries comes first."""


def choices_of(program: Runnable) -> list[Choice]:
    """The discrete choices that a program's own outputs depend on, in the order in which it makes them."""
    nodes = list(program.graph_module.graph.nodes)
    behind, before = _behind_inputs(program, nodes), _before_outputs(nodes)
    found = []
    for node in nodes:
        if node.op != "call_function" or node not in behind or node not in before:
            continue
        if node.target is MARKER or node.target is operator.getitem or not _jumps(node, before):
            continue
        read = [one for one in node.all_input_nodes if one in behind and _is_float(one.meta.get("val"))]
        if read:
            origins, chain = _origins(read, behind, nodes)
            found.append(Choice(node=node, told=told_of(node), origins=origins, chain=chain))
    return found


def told_of(node: fx.Node) -> str:
    """An operation, its module, and the user's line where the program knows it."""
    place = place_of(node).partition("\n")[0]
    return f"{str(node.target).removesuffix('.default')} in {module_path(node)}{place}"


def _behind_inputs(program: Runnable, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    specs = program.graph_signature.input_specs
    found = {node for node, spec in zip(nodes, specs, strict=False) if spec.kind is InputKind.USER_INPUT}
    for node in nodes:
        if any(one in found for one in node.all_input_nodes):
            found.add(node)
    return found


def _before_outputs(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """What a marker reads decides what its site selects, which is told in every run that is compared."""
    found = {nodes[-1]}
    for node in reversed(nodes):
        if node in found and node.target is not MARKER:
            found.update(node.all_input_nodes)
    return found


def _jumps(node: fx.Node, before: set[fx.Node]) -> bool:
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        used = [use for use in node.users if use in before]
        return any(_is_discrete(use.meta.get("val")) for use in used if use.target is operator.getitem)
    return node.target in STEPS or _is_discrete(value)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_discrete(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()


def _origins(
    read: Sequence[fx.Node], behind: set[fx.Node], nodes: Sequence[fx.Node]
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    origins, chain, todo = dict[fx.Node, None](), set[fx.Node](), list(read)
    while todo:
        node = todo.pop(0)
        source = node.args[0] if node.target in PICKS else None
        if isinstance(source, fx.Node) and source in behind and _holds_float(source.meta.get("val")):
            chain.add(node)
            todo.append(source)
        elif _is_float(node.meta.get("val")):
            origins[node] = None
    # What one origin is made of by picks alone is no origin of its own.
    return tuple(origins), tuple(node for node in nodes if node in chain)


def _holds_float(value: Any) -> bool:
    return any(map(_is_float, value)) if isinstance(value, (list, tuple)) else _is_float(value)


def discrete_parts(value: Any) -> tuple[Tensor, ...]:
    """Of what a choice gives: the tensor, or of several those of integers and booleans."""
    if isinstance(value, Tensor):
        return (value,)
    return tuple(one for one in value if _is_discrete(one))


class Recorder:
    """Notes `outcomes`; with `reading`, in `values` also what choices are made of, by the names of the nodes."""

    def __init__(self, choices: Sequence[Choice], *, reading: bool = False) -> None:
        self._choices = {one.name for one in choices}
        self._read = {name for one in choices for name in one.read} if reading else set()
        self.outcomes: dict[str, tuple[Tensor, ...]] = {}
        self.values: dict[str, Any] = {}

    def __call__(self, node: fx.Node, compute: Callable[[], Any]) -> Any:
        value = compute()
        if node.name in self._choices:
            # Copies: a program may write to what it has made.
            self.outcomes[node.name] = tuple(one.clone() for one in discrete_parts(value))
        if node.name in self._read:
            self.values[node.name] = pytree.tree_map_only(Tensor, Tensor.clone, value)
        return value


class Holder:
    """Gives a run the outcomes of another. With the `values` that were read there, it finds the largest difference in
    each of them beyond one rounding of the number itself (`spread`), and which entries are the same (`same`).
    """

    def __init__(self, choices: Sequence[Choice], outcomes: Outcomes, values: Mapping[str, Any] | None = None) -> None:
        self._choices, self._outcomes = {one.name: one for one in choices}, outcomes
        self._values = {} if values is None else values
        self._origins = {origin.name for one in choices for origin in one.origins}
        self.spread: dict[str, float] = {}
        self.same: dict[str, Tensor] = {}

    def __call__(self, node: fx.Node, compute: Callable[[], Any]) -> Any:
        value = compute()
        if node.name in self._origins and node.name in self._values:
            self._compare(node.name, value)
        return self._held(node, value) if node.name in self._choices else value

    def _compare(self, name: str, value: Tensor) -> None:
        before = self._values[name]
        off = (value.double() - before.double()).abs().nan_to_num(0.0, 0.0, 0.0)
        beyond = off - before.double().abs().nan_to_num(0.0, 0.0, 0.0) * UNIT
        self.spread[name] = max(self.spread.get(name, 0.0), float(beyond.max()) if beyond.numel() else 0.0)
        same = value.double() == before.double()
        self.same[name] = same & self.same.get(name, same)

    def _held(self, node: fx.Node, value: Any) -> Any:
        held = self._outcomes[node.name]
        if not isinstance(value, Tensor):
            parts = iter(held)
            return type(value)(next(parts) if _is_discrete(one) else one for one in value)
        (before,) = held
        if node.target in WRAPS:
            divisor: Any = node.args[1] if len(node.args) > 1 else 1.0
            # Of a tensor the smallest step that it may make.
            step = 1.0 if isinstance(divisor, fx.Node) else abs(divisor)
            return torch.where((value - before).abs() > step / 2, before.to(value.dtype), value)
        return before.to(value.dtype)


UNIT = 2.0**-24
"""Half the distance from 1 to the next number in float32."""


LEAST = math.sqrt(torch.finfo(torch.float32).tiny)
"""By which equal entries are moved apart where all are 0."""


class Nudger:
    """Moves what choices read before they are made: entries that compete in turn up and down by rank, so that two
    neighbours change places where they can.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        slack: Slack,
        spread: Mapping[str, float],
        same: Mapping[str, Tensor],
        direction: int,
        *,
        opposed: bool,
    ) -> None:
        """`direction` is 1 or -1; `opposed` moves every other value that a choice reads in the other direction."""
        self._choices = {one.name: one for one in choices}
        self._slack, self._spread, self._same = slack, spread, same
        self._direction, self._opposed = direction, opposed
        self._read = {name for one in choices for name in one.read}
        self._values: dict[str, Any] = {}

    def __call__(self, node: fx.Node, compute: Callable[[], Any]) -> Any:
        choice = self._choices.get(node.name)
        value = compute() if choice is None else self._chosen(choice, compute())
        if node.name in self._read:
            self._values[node.name] = value
        return value

    def _chosen(self, choice: Choice, value: Any) -> Any:
        nudged = self.outcome(choice, self._values)
        if isinstance(value, Tensor):
            return nudged
        return type(value)(new if _is_discrete(one) else one for one, new in zip(value, nudged, strict=True))

    def outcome(self, choice: Choice, values: Mapping[str, Any]) -> Any:
        """What the operation gives when what it reads is moved."""
        local: dict[fx.Node, Any] = {}
        for number, origin in enumerate(choice.origins):
            sign = self._direction * (-1 if self._opposed and number % 2 else 1)
            local[origin] = self._moved(origin.name, values[origin.name], choice.dim, sign)

        def value_of(node: fx.Node) -> Any:
            return local[node] if node in local else values[node.name]

        for node in (*choice.chain, choice.node):
            if node is choice.contest and node.target in UNORDERED:
                source: Any = node.args[0]
                local[source] = self._untied(value_of(source), choice.dim)
            args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
            local[node] = node.target(*args, **kwargs)  # type: ignore[operator]  # An operator.
        return local[choice.node]

    def is_crowded(self, choice: Choice, values: Mapping[str, Any]) -> bool:
        """Whether three entries or more that compete are so near to one another that any of them may win."""
        if choice.contest is None:
            return False
        for origin in choice.origins:
            value = values[origin.name]
            rows, along = _contestants(value, choice.dim)
            if rows.dim() and rows.shape[along] > 2:
                near = (rows.sort(along).values.diff(dim=along).abs() <= 2 * self._off(origin.name, value).max()).int()
                if bool(
                    (near.narrow(along, 0, near.shape[along] - 1) * near.narrow(along, 1, near.shape[along] - 1)).any()
                ):
                    return True
        return False

    def _moved(self, name: str, value: Tensor, dim: int | None, sign: int) -> Tensor:
        off = self._off(name, value)
        return torch.where(off == 0, value, value + sign * off * _parity(value, dim))

    def _untied(self, value: Tensor, dim: int | None) -> Tensor:
        """Moves equal entries apart, because each runtime decides by itself which of them comes first."""
        known = torch.where(value.isfinite(), value, 0.0)
        off = self._slack.units * UNIT * known.abs().clamp(min=max(_rms(known), LEAST))
        tied = _is_tied(value, dim) & value.isfinite()
        return torch.where(tied, value + self._direction * off * _parity(value, dim), value)

    def _off(self, name: str, value: Tensor) -> Tensor:
        """How far a sound engine may be off there; 0 where the number is the same however it is rounded."""
        finite = value.isfinite()
        known = torch.where(finite, value, 0.0)
        off = self._slack.units * (UNIT * known.abs() + self._spread.get(name, 0.0))
        off = off.clamp(max=self._slack.near_tie * _rms(known))
        same = self._same.get(name)
        if same is not None and self._slack.narrow:
            # The same in float32 and float64, but rounded where it does not fit into 16 bits.
            same = same & (value == value.bfloat16())
        return off.masked_fill(~finite if same is None else ~finite | same, 0.0)


def _rms(value: Tensor) -> float:
    return float(value.double().square().mean().sqrt()) if value.numel() else 0.0


def _is_tied(value: Tensor, dim: int | None) -> Tensor:
    """Where an entry is equal to another that it competes with."""
    if not value.dim() or not value.numel():
        return torch.zeros_like(value, dtype=torch.bool)
    rows, along = _contestants(value, dim)
    ordered, place = rows.sort(dim=along)
    last = ordered.shape[along] - 1
    equal = ordered.narrow(along, 0, last) == ordered.narrow(along, 1, last)
    one = torch.zeros_like(ordered.narrow(along, 0, 1), dtype=torch.bool)
    tied = torch.cat([equal, one], along) | torch.cat([one, equal], along)
    return torch.zeros_like(tied).scatter(along, place, tied).reshape(value.shape)


def _parity(value: Tensor, dim: int | None) -> Tensor:
    """1 and -1 in turn, by the rank of each entry among those that it competes with."""
    if not value.dim() or not value.numel():
        return torch.ones_like(value)
    rows, along = _contestants(value, dim)
    rank = rows.argsort(dim=along, stable=True).argsort(dim=along, stable=True)
    return (1 - 2 * (rank % 2)).to(value.dtype).reshape(value.shape)


def _contestants(value: Tensor, dim: int | None) -> tuple[Tensor, int]:
    """The entries, and the dimension along which they compete."""
    if dim is None or not -value.dim() <= dim < value.dim():
        return value.reshape(-1), 0
    return value, dim
