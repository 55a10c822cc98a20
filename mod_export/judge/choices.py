"""Discrete choices of a model's captured program that are not routing sites, and the rows of its outputs that depend on
them.

The selection of a routing site can be forced, so the reference can follow the candidate there. Other operations with
results that jump (an argmax, a bucket index, `round`, a comparison of scores) cannot be forced. An input can be so
close to a jump that rounding decides. In a row of one repeated token, all scores are equal but for rounding, so its
argmax can be any of them. There the reference is as arbitrary as the candidate, and comparing means nothing.

Choices are recognized by their dtypes: they read floating point and return integers or booleans. STEPS are operations
that jump although they return floating point. Values that follow from sizes, weights and constants alone are the same
on every input, so they are no choices. Values that only decide what a routing site selects belong to that site.

Whether a row is determined is measured on the reference alone, without the candidate (`movement`): the values that each
choice reads are moved up and down by as much as a sound engine may be off. A row of an output that then moves by more
than half of what the gate allows is not judged. A choice whose jump is not visible in the output, such as `x > 0` in a
leaky ReLU, leaves every row judged. Three wrappers around the operations of a run do this:

* `Recorder` records the outcomes of a float32 run, and values of named operations;
* `Holder` imposes these outcomes on another run (float64, other weights), so that the runs differ by rounding only;
* `Nudger` moves the values that choices read.

Shape legend: B batch, R rows of an output.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from mod_export.graph.program_nodes import argument_of, module_path
from mod_export.graph.refusals import place_of
from mod_export.graph.sites import Runnable
from mod_export.judge.compare import ROUNDOFF, Slack
from mod_export.marker import MARKER
from mod_export.types import Site

if TYPE_CHECKING:
    from mod_export.judge.inputs import Batch
    from mod_export.judge.reference import Reference, Traced

ATEN = torch.ops.aten
WRAPS = {
    ATEN.fmod.Tensor, ATEN.fmod.Scalar, ATEN.remainder.Tensor, ATEN.remainder.Scalar, ATEN.frac.default,
}  # fmt: skip
"""Remainders of a division: the result moves with the input, and jumps."""
STEPS = WRAPS | {
    ATEN.round.default, ATEN.round.decimals, ATEN.floor.default, ATEN.ceil.default, ATEN.trunc.default,
    ATEN.fix.default, ATEN.sign.default, ATEN.sgn.default, ATEN.heaviside.default, ATEN.floor_divide.default,
    ATEN.floor_divide.Scalar, ATEN.div.Tensor_mode, ATEN.div.Scalar_mode, ATEN.hardshrink.default,
    ATEN.threshold.default, ATEN.fake_quantize_per_tensor_affine.default,
}  # fmt: skip
"""Operations that read and return floating point, and jump."""
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
"""Operations that return entries of their first argument unchanged, or changed without a jump, such as relu. So
`x == x.max()` reads the scores once: both sides are moved together, and the largest score always equals itself."""
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
"""Competing operations for which PyTorch does not define which of several equal entries comes first."""
UNIT = ROUNDOFF["float32"]
LEAST = math.sqrt(torch.finfo(torch.float32).tiny)
"""Least magnitude assumed for tied entries, so that they can be moved apart even if all are 0."""
MOST_BLAMED = 8
"""Number of choices that are tried one by one if several can jump: the report names one of them."""
Outcomes = Mapping[str, tuple[Tensor, ...]]
"""Name of a choice's node -> the discrete parts of its result."""
Rows = Callable[[int, np.ndarray], np.ndarray]
"""(n, the n-th output) -> its rows that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A discrete choice.

    Attributes:
        node: its node in the captured program.
        told: the operation and its place, as text.
        origins: the nodes whose values decide it, in order.
        chain: the PICKS between the origins and the choice, in order.
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
        """Names of all nodes whose values are needed to repeat the choice."""
        return {source.name for node in (*self.chain, self.node) for source in node.all_input_nodes} | {
            source.name for source in self.origins
        }

    @property
    def contest(self) -> fx.Node | None:
        """The operation in which entries compete; None if each entry is judged by itself."""
        return next((node for node in (self.node, *self.chain) if node.target in COMPETING), None)

    @property
    def dim(self) -> int | None:
        """The dimension along which entries compete; None if all entries of the tensor compete, -1 if none do."""
        if self.contest is None:
            return -1
        dim = argument_of(self.contest, "dim")
        dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
        return dim if isinstance(dim, int) else None


def choices_of(program: Runnable) -> list[Choice]:
    """Returns the discrete choices that a program's own outputs depend on, in the order in which it makes them."""
    nodes = list(program.graph_module.graph.nodes)
    behind, before = _behind_inputs(program, nodes), _before_outputs(nodes)
    choices = []
    for node in nodes:
        if node.op != "call_function" or node not in behind or node not in before:
            continue
        if node.target is MARKER or node.target is operator.getitem or not _jumps(node, before):
            continue
        read = [source for source in node.all_input_nodes if source in behind and is_float(source.meta.get("val"))]
        if read:
            origins, chain = _origins(read, behind, nodes)
            choices.append(Choice(node=node, told=told_of(node), origins=origins, chain=chain))
    return choices


def told_of(node: fx.Node) -> str:
    """Describes an operation: its name, its module, and the user's source line if the program knows it."""
    place = place_of(node).partition("\n")[0]
    return f"{str(node.target).removesuffix('.default')} in {module_path(node)}{place}"


def _behind_inputs(program: Runnable, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    specs = program.graph_signature.input_specs
    behind = {node for node, spec in zip(nodes, specs, strict=False) if spec.kind is InputKind.USER_INPUT}
    for node in nodes:
        if any(source in behind for source in node.all_input_nodes):
            behind.add(node)
    return behind


def _before_outputs(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Returns the nodes that outputs depend on, without those that only decide a selection: selections are forced."""
    before = {nodes[-1]}
    for node in reversed(nodes):
        if node in before and node.target is not MARKER:
            before.update(node.all_input_nodes)
    return before


def _jumps(node: fx.Node, before: set[fx.Node]) -> bool:
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        used = [use for use in node.users if use in before]
        return any(_is_discrete(use.meta.get("val")) for use in used if use.target is operator.getitem)
    return node.target in STEPS or _is_discrete(value)


def is_float(value: Any) -> bool:
    """Whether a value of a program is a tensor of floating point."""
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
        elif is_float(node.meta.get("val")):
            origins[node] = None
    # A node that only picks from another value is part of the chain, and no origin.
    return tuple(origins), tuple(node for node in nodes if node in chain)


def _holds_float(value: Any) -> bool:
    return any(map(is_float, value)) if isinstance(value, (list, tuple)) else is_float(value)


def discrete_parts(value: Any) -> tuple[Tensor, ...]:
    """Returns the discrete parts of a result: the tensor itself, or the integer and boolean ones of several tensors."""
    if isinstance(value, Tensor):
        return (value,)
    return tuple(part for part in value if _is_discrete(part))


class Recorder:
    """Records the `outcomes` of choices, and the `values` of the operations `read`, by the names of their nodes."""

    def __init__(self, choices: Sequence[Choice], read: Collection[str] = ()) -> None:
        self._choices, self._read = {choice.name for choice in choices}, set(read)
        self.outcomes: dict[str, tuple[Tensor, ...]] = {}
        self.values: dict[str, Any] = {}

    def __call__(self, node: fx.Node, compute: Callable[[], Any]) -> Any:
        value = compute()
        if node.name in self._choices:
            # Copies, because a program may overwrite its values in place.
            self.outcomes[node.name] = tuple(part.clone() for part in discrete_parts(value))
        if node.name in self._read:
            self.values[node.name] = pytree.tree_map_only(Tensor, Tensor.clone, value)
        return value


class Holder:
    """Imposes the outcomes of one run on others. Given the `values` that choices read in the first run, it also finds
    for each of them the largest difference beyond one rounding of the number itself (`spread`), and which entries are
    equal in all runs (`same`).
    """

    def __init__(self, choices: Sequence[Choice], outcomes: Outcomes, values: Mapping[str, Any] | None = None) -> None:
        self._choices, self._outcomes = {choice.name: choice for choice in choices}, outcomes
        self._values = {} if values is None else values
        self._origins = {origin.name for choice in choices for origin in choice.origins}
        self._divisors: dict[str, Any] = {
            divisor.name: None for choice in choices if isinstance(divisor := _divisor(choice.node), fx.Node)
        }
        self.spread: dict[str, float] = {}
        self.same: dict[str, Tensor] = {}

    def __call__(self, node: fx.Node, compute: Callable[[], Any]) -> Any:
        value = compute()
        if node.name in self._origins and node.name in self._values:
            self._compare(node.name, value)
        if node.name in self._divisors:
            # In float64 a weight is still its float32 tensor, which is widened where it is used.
            self._divisors[node.name] = getattr(value, "tensor", value)
        return self._held(node, value) if node.name in self._choices else value

    def _compare(self, name: str, value: Tensor) -> None:
        before = self._values[name]
        off = (value.double() - before.double()).abs().nan_to_num(0.0, 0.0, 0.0)
        beyond = off - before.double().abs().nan_to_num(0.0, 0.0, 0.0) * UNIT
        self.spread[name] = max(self.spread.get(name, 0.0), float(beyond.max()) if beyond.numel() else 0.0)
        same = value.double() == before.double()
        self.same[name] = same & self.same.get(name, same)

    def _held(self, node: fx.Node, value: Any) -> Any:
        outcome = self._outcomes[node.name]
        if not isinstance(value, Tensor):
            parts = iter(outcome)
            return type(value)(next(parts) if _is_discrete(part) else part for part in value)
        (before,) = outcome
        if node.target in WRAPS:
            divisor = _divisor(node)
            step = abs(self._divisors[divisor.name] if isinstance(divisor, fx.Node) else divisor)
            # A difference of more than half the divisor is a jump, and not the rounding of what is divided.
            return torch.where((value - before).abs() > step / 2, before.to(value.dtype), value)
        return before.to(value.dtype)


def _divisor(node: fx.Node) -> Any:
    """The divisor of a remainder: a number, or the node that computes it; None for other operations."""
    if node.target not in WRAPS:
        return None
    return node.args[1] if len(node.args) > 1 else 1.0


class Nudger:
    """Moves the values that choices read. Competing entries are moved up and down alternately by rank, so that
    neighbours by rank change places if they are close enough.
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
        """`direction` is 1 or -1; `opposed` moves every second value that a choice reads in the opposite direction."""
        self._choices = {choice.name: choice for choice in choices}
        self._slack, self._spread, self._same = slack, spread, same
        self._direction, self._opposed = direction, opposed
        self._read = {name for choice in choices for name in choice.read}
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
        return type(value)(new if _is_discrete(part) else part for part, new in zip(value, nudged, strict=True))

    def outcome(self, choice: Choice, values: Mapping[str, Any]) -> Any:
        """Returns the result of the operation when the values that it reads are moved."""
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
        """Whether three or more competing entries are so close together that any of them may win."""
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
        """Moves equal entries apart, because each runtime decides for itself which of them comes first."""
        known = torch.where(value.isfinite(), value, 0.0)
        off = self._slack.units * UNIT * known.abs().clamp(min=max(_rms(known), LEAST))
        tied = _is_tied(value, dim) & value.isfinite()
        return torch.where(tied, value + self._direction * off * _parity(value, dim), value)

    def _off(self, name: str, value: Tensor) -> Tensor:
        """Returns how far each entry may be off in a sound engine; 0 for numbers that rounding does not change."""
        finite = value.isfinite()
        known = torch.where(finite, value, 0.0)
        off = self._slack.units * (UNIT * known.abs() + self._spread.get(name, 0.0))
        off = off.clamp(max=self._slack.near_tie * _rms(known))
        same = self._same.get(name)
        if same is not None and self._slack.narrow:
            # Numbers that are equal in float32 and float64 are still rounded if they do not fit into 16 bits.
            same = same & (value == value.bfloat16())
        return off.masked_fill(~finite if same is None else ~finite | same, 0.0)


def _rms(value: Tensor) -> float:
    return float(value.double().square().mean().sqrt()) if value.numel() else 0.0


def _is_tied(value: Tensor, dim: int | None) -> Tensor:
    """Returns the entries that equal another entry that they compete with, as a boolean tensor."""
    if not value.dim() or not value.numel():
        return torch.zeros_like(value, dtype=torch.bool)
    rows, along = _contestants(value, dim)
    ordered, place = rows.sort(dim=along)
    last = ordered.shape[along] - 1
    equal = ordered.narrow(along, 0, last) == ordered.narrow(along, 1, last)
    untied = torch.zeros_like(ordered.narrow(along, 0, 1), dtype=torch.bool)
    tied = torch.cat([equal, untied], along) | torch.cat([untied, equal], along)
    return torch.zeros_like(tied).scatter(along, place, tied).reshape(value.shape)


def _parity(value: Tensor, dim: int | None) -> Tensor:
    """Returns 1 and -1 alternately, by the rank of each entry among those that it competes with."""
    if not value.dim() or not value.numel():
        return torch.ones_like(value)
    rows, along = _contestants(value, dim)
    rank = rows.argsort(dim=along, stable=True).argsort(dim=along, stable=True)
    return (1 - 2 * (rank % 2)).to(value.dtype).reshape(value.shape)


def _contestants(value: Tensor, dim: int | None) -> tuple[Tensor, int]:
    """Returns the competing entries, and the dimension along which they compete."""
    if dim is None or not -value.dim() <= dim < value.dim():
        return value.reshape(-1), 0
    return value, dim


# Rows that the model does not determine


@dataclass(frozen=True, slots=True, eq=False)
class Movement:
    """How far the results of the reference move when discrete choices that are close to a jump are made to jump.

    Attributes:
        outputs: for each output float64 (R,), the largest change of a value in each compared row; infinite if a value
            becomes NaN.
        scores: site -> float64 (B,), the largest change of a score in each row; infinite if the tokens that can be
            selected change.
        told: the operation that decides, and its place; empty if no choice jumps.
    """

    outputs: tuple[np.ndarray, ...]
    scores: Mapping[Site, np.ndarray]
    told: str = ""


def movement(
    reference: Reference, batch: Batch, routing: Mapping[Site, np.ndarray], slack: Slack, rows: Rows
) -> Movement | None:
    """Measures the movement on one batch, given the selections; None if the program makes no other discrete choices."""
    choices = reference.choices(batch.bucket)
    if not choices:
        return None
    recorder = Recorder(choices, {name for choice in choices for name in choice.read})
    base = reference.forced(batch, routing, recorder)
    holder = Holder(choices, recorder.outcomes, recorder.values)
    reference.exact(batch, routing, holder)
    reference.shaken(batch, routing, holder)
    several = any(len(choice.origins) > 1 for choice in choices)
    ways = list(itertools.product((1, -1), (False, True) if several else (False,)))

    def nudgers(nudged: Sequence[Choice]) -> list[Nudger]:
        return [
            Nudger(nudged, slack, holder.spread, holder.same, direction, opposed=opposed) for direction, opposed in ways
        ]

    # Until a choice jumps, all values of a run are those of `base`, so the first choice to jump is in `jumping`. If
    # that is empty, every further run would repeat `base`.
    jumping = [
        choice
        for choice in choices
        if any(_differ(choice, nudger.outcome(choice, recorder.values), recorder) for nudger in nudgers([choice]))
    ]
    if not jumping:
        still = tuple(np.zeros(len(rows(n, output))) for n, output in enumerate(base.outputs))
        return Movement(still, {site: np.zeros(len(judged.score_BS)) for site, judged in base.judged.items()})

    def moved(nudged: Sequence[Choice]) -> Movement:
        return _moved(base, [reference.forced(batch, routing, nudger) for nudger in nudgers(nudged)], rows)

    combined = moved(choices)
    if any(nudgers([choice])[0].is_crowded(choice, recorder.values) for choice in jumping):
        combined = _whole_inputs(combined, base, rows)
    return replace(combined, told=_deciding(jumping, moved))


def _differ(choice: Choice, nudged: object, recorder: Recorder) -> bool:
    pairs = zip(discrete_parts(nudged), recorder.outcomes[choice.name], strict=True)
    return not all(torch.equal(after, before) for after, before in pairs)


def _moved(base: Traced, runs: Sequence[Traced], rows: Rows) -> Movement:
    """Returns the largest changes over runs of the same batch, at least one."""

    def score_change(run: Traced, site: Site) -> np.ndarray:
        before, after = base.judged[site], run.judged[site]
        return np.where((after.open_BS == before.open_BS).all(1), _change(after.score_BS, before.score_BS), np.inf)

    outputs = [
        np.max([_change(rows(n, run.outputs[n]), rows(n, before)) for run in runs], axis=0)
        for n, before in enumerate(base.outputs)
    ]
    scores = {site: np.max([score_change(run, site) for run in runs], axis=0) for site in base.judged}
    return Movement(tuple(outputs), scores)


def _whole_inputs(combined: Movement, base: Traced, rows: Rows) -> Movement:
    """Gives all rows that belong to one row of the batch the largest change among them. If many entries are nearly
    equal, other entries may win than those that the runs tried.
    """
    outputs = []
    for n, array in enumerate(base.outputs):
        shape = (array.shape[0], *[1] * (array.ndim - 1)) if array.ndim else ()
        dtype = np.float64 if array.dtype.kind == "f" else np.int64
        numbers = np.broadcast_to(np.arange(array.shape[0] if array.ndim else 1).reshape(shape), array.shape)
        batch_R = rows(n, numbers.astype(dtype))[:, :1].reshape(-1).astype(np.int64)
        largest = np.zeros(array.shape[0] if array.ndim else 1)
        if batch_R.size:
            np.maximum.at(largest, batch_R, combined.outputs[n])
        outputs.append(largest[batch_R] if batch_R.size else combined.outputs[n])
    return replace(combined, outputs=tuple(outputs))


def _change(rows: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Returns float64 (R,), the largest absolute difference in each row."""
    if not rows.size:
        return np.zeros(len(rows))
    rows, before = rows.astype(np.float64), before.astype(np.float64)
    same = (rows == before) | (np.isnan(rows) & np.isnan(before))
    with np.errstate(invalid="ignore"):
        change = np.where(same, 0.0, np.abs(rows - before))
    largest: np.ndarray = np.nan_to_num(change, nan=np.inf, posinf=np.inf).max(1)
    return largest


def _deciding(jumping: Sequence[Choice], moved: Callable[[Sequence[Choice]], Movement]) -> str:
    """Describes the choice that moves the outputs most when it alone is moved."""
    if len(jumping) == 1:
        return jumping[0].told

    def largest_change(choice: Choice) -> float:
        return max((float(rows.max(initial=0.0)) for rows in moved([choice]).outputs), default=0.0)

    return max(jumping[:MOST_BLAMED], key=largest_change).told
