"""Runs single operations of a captured program on numbers that were made for it, to see what they do with elements.

Which operators exist is not known here. What one does is seen from what comes out: whether elements were moved, copied,
looked up or put somewhere. Floats are float32 in these runs, so that whole numbers up to 2^24 pass through unchanged,
and tensors that are constant along a dimension are held as views without memory for it.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils.flop_counter import FlopCounterMode

ATEN = torch.ops.aten
LARGEST = 2**27
"""Elements of what is computed here; a larger tensor is not looked at."""
_REMEMBERED = 2**16
_LARGE, _SAMPLES = 2**20, 17
_LIKE = ("new_", "zeros_like", "ones_like", "full_like", "empty_like")
_IS_PRODUCT: dict[Any, bool] = {}
Values = Callable[[fx.Node], Any]


def tensor_of(node: fx.Node) -> Tensor | None:
    """The tensor without values that a node stands for; None where it is no tensor of fixed shape."""
    found = node.meta.get("val")
    if not isinstance(found, torch.Tensor) or any(not isinstance(size, int) for size in found.shape):
        return None
    return found


def ran(node: fx.Node, values: Values) -> Any:
    """What the operation of a node gives for these values of its inputs; None where it cannot be run with them."""
    if node.op != "call_function" or any(size > LARGEST for size in _sizes(node)):
        return None
    found = _tried(node, values)
    # A tensor may have no such view where another of its shape has one.
    return _tried(node, lambda one: _contiguous(values(one))) if found is None else found


def _tried(node: fx.Node, values: Values) -> Any:
    args, kwargs = fx.node.map_aggregate(fx.map_arg((node.args, node.kwargs), values), _here)
    target: Any = node.target
    try:
        with torch.no_grad():
            return target(*_written_apart(node, args), **kwargs)
    except Exception:  # Any operator of any library is run here, on numbers that it was not written for.
        return None


def _sizes(node: fx.Node) -> list[int]:
    found = tensor_of(node)
    return [] if found is None else [found.numel()]


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def _here(argument: Any) -> Any:
    """Floats are float32, and everything is on the CPU."""
    if isinstance(argument, torch.dtype) and argument.is_floating_point:
        return torch.float32
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _written_apart(node: fx.Node, args: tuple[Any, ...]) -> list[Any]:
    """Copies of what an operation changes in place."""
    written = [one.alias_info is not None and one.alias_info.is_write for one in arguments_of(node)]
    return [
        argument.clone(memory_format=torch.contiguous_format)
        if isinstance(argument, Tensor) and number < len(written) and written[number]
        else argument
        for number, argument in enumerate(args)
    ]


def arguments_of(node: fx.Node) -> Any:
    """The declared arguments of an operator; none where the target is no operator."""
    schema = getattr(node.target, "_schema", None)
    return () if schema is None else schema.arguments


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the result is computed of the elements at its own place, as PyTorch declares."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_product(node: fx.Node) -> bool:
    """Whether an operation costs FLOPs, as PyTorch counts them: blocks consist of such operations."""
    target: Any = node.target
    # An equation of `einsum` can say anything.
    key = (target, node.args[0] if node.args and isinstance(node.args[0], str) else None)
    if key not in _IS_PRODUCT:
        counter = FlopCounterMode(display=False)
        with contextlib.suppress(Exception), torch.no_grad(), counter:  # As in `ran`; here of tensors without values.
            args, kwargs = fx.map_arg((node.args, node.kwargs), _shape_alone)
            target(*args, **kwargs)
        _IS_PRODUCT[key] = counter.get_total_flops() > 0
    return _IS_PRODUCT[key]


def _shape_alone(node: fx.Node) -> Any:
    found = tensor_of(node)
    return None if found is None else torch.empty(found.shape, dtype=found.dtype, device="meta")


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """What runs operations leaves no warnings behind, and random numbers as they were."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        yield


def is_view(node: fx.Node) -> bool:
    """Whether the result is memory of what is given, as PyTorch declares."""
    return any(one.alias_info is not None and not one.alias_info.is_write for one in arguments_of(node))


def filled(node: fx.Node, number: float) -> Any:
    """A tensor of one number in the place of what is not known; None where it is no tensor."""
    found = tensor_of(node)
    if found is None:
        return None
    dtype = torch.float32 if found.dtype.is_floating_point else found.dtype
    number = number if found.dtype.is_floating_point else 0
    return torch.tensor(number, dtype=dtype).expand(found.shape)


def _noise(node: fx.Node) -> Any:
    found = tensor_of(node)
    if found is None or not found.dim():
        return filled(node, 1.0)
    noise = torch.rand(found.shape[-1], generator=torch.Generator().manual_seed(1)) * 3
    return (noise if found.dtype.is_floating_point else noise.to(found.dtype)).expand(found.shape)


def is_among(values: Tensor, others: Tensor) -> bool:
    """Whether every value is one of the others, or 0."""
    one = narrowest(values).contiguous()
    return bool(((one == 0) | torch.isin(one, narrowest(others).contiguous())).all())


def narrowest(tensor: Tensor) -> Tensor:
    """The same elements, with a size of 1 in dimensions along which they do not differ."""
    for dim in range(tensor.dim() - 1, -1, -1):
        if tensor.shape[dim] > 1:
            first = tensor.narrow(dim, 0, 1)
            if tensor.stride(dim) == 0 or bool((_samples(tensor, dim) == first).all()):
                tensor = first
    return tensor


def _samples(tensor: Tensor, dim: int) -> Tensor:
    """Parts along a dimension; of a large tensor a few, from its first to its last."""
    if tensor.numel() <= _LARGE or tensor.shape[dim] <= _SAMPLES:
        return tensor
    return tensor.index_select(dim, torch.linspace(0, tensor.shape[dim] - 1, _SAMPLES).long())


def compact(value: Any) -> Any:
    """The same tensor, or tensors, without memory for dimensions along which elements do not differ."""
    if isinstance(value, (tuple, list)):
        return [compact(one) for one in value]
    if not isinstance(value, Tensor):
        return value
    value = value.float() if value.is_floating_point() else value
    return narrowest(value).expand(value.shape) if value.numel() > _REMEMBERED else value


def moves(node: fx.Node) -> bool:
    """Whether the result of an operation on one tensor consists of elements of that tensor, whatever they are."""
    sources = node.all_input_nodes
    if len(sources) != 1 or tensor_of(node) is None or (shape := tensor_of(sources[0])) is None:
        return False
    numbers = torch.arange(1, shape.numel() + 1).reshape(shape.shape)
    numbers = numbers.float() if shape.dtype.is_floating_point else numbers
    found, other = ran(node, lambda _: numbers), ran(node, lambda _: shape.numel() + 1 - numbers)
    if not isinstance(found, Tensor) or not isinstance(other, Tensor) or found.shape != other.shape:
        return False
    return bool(torch.isin(found, numbers).all()) and torch.equal(other, shape.numel() + 1 - found)


class Known:
    """Values of nodes that depend on constants and on indices of selections alone, for indices that are made up."""

    def __init__(self, program: ExportedProgram, indices: dict[fx.Node, Tensor]) -> None:
        """Every value behind `indices` that can be known.

        Args:
            program: with constants that hold values.
            indices: node of a selection -> int64, indices in the place of those that it selects.
        """
        self._lifted = _lifted(program)
        self._constants: dict[fx.Node, Any] = {}
        self._values: dict[fx.Node, Any] = dict(indices)
        self._behind = {node: frozenset((node,)) for node in indices}
        for node in program.graph.nodes:
            self._follow(node)

    def behind(self, node: fx.Node) -> frozenset[fx.Node]:
        """The nodes of the indices that a known value depends on; none where it is not known, or is a constant."""
        return self._behind.get(node, frozenset())

    def forms(self, indices: fx.Node) -> list[fx.Node]:
        """Every node whose value depends on these indices and is known, in the order of the graph."""
        return [node for node, sources in self._behind.items() if indices in sources]

    def value(self, node: fx.Node) -> Any:
        """What a node holds; None where that is not known."""
        return self._values[node] if node in self._values else self._constant(node)

    def _follow(self, node: fx.Node) -> None:
        sources = frozenset[fx.Node]().union(*(self.behind(one) for one in node.all_input_nodes))
        if node in self._values or not sources or node.op != "call_function":
            return
        if node.target is operator.getitem:
            found = _item(node, self.value)
        elif all(self.value(one) is not None for one in node.all_input_nodes):
            found = compact(ran(node, self.value))
        elif is_pointwise(node):
            found = self._weighted(node)
        elif self.behind(node.args[0] if node.args and isinstance(node.args[0], fx.Node) else node):
            found = self._whatever_else(node)
        else:
            found = None
        if found is not None:
            self._values[node], self._behind[node] = found, sources
            self._write_through(node, found, sources)

    def _weighted(self, node: fx.Node) -> Any:
        """One-hot rows, or a mask, that are multiplied with gates: still the same places."""
        if not any(_is_mask(self.value(one)) for one in node.all_input_nodes):
            return None
        one = ran(node, lambda node: _or(self.value(node), filled(node, 1.0)))
        two = ran(node, lambda node: _or(self.value(node), filled(node, 2.0)))
        return compact(one) if _is_mask(one) and isinstance(two, Tensor) and torch.equal(two, one * 2) else None

    def _whatever_else(self, node: fx.Node) -> Any:
        """What only takes the shape or dtype of something unknown, and so gives the same whatever that holds."""
        one = ran(node, lambda node: _or(self.value(node), filled(node, 0.0)))
        if not isinstance(one, Tensor) or not bool(one.any()):
            return None
        two = ran(node, lambda node: _or(self.value(node), _noise(node)))
        return compact(one) if isinstance(two, Tensor) and torch.equal(one, two) else None

    def _write_through(self, node: fx.Node, value: Any, sources: frozenset[fx.Node]) -> None:
        """What is written into a view is written into what it is a view of."""
        for base, whole in bases_after_write(node, value, self.value):
            self._values[base], self._behind[base] = whole, sources

    def _constant(self, node: fx.Node) -> Any:
        if node in self._lifted:
            return self._lifted[node]
        if node in self._constants or node.op != "call_function":
            return self._constants.get(node)
        self._constants[node] = None
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return None
        if node.target is operator.getitem:
            found = _item(node, self._constant)
        elif str(getattr(node.target, "_opname", "")).startswith(_LIKE):
            found = ran(node, lambda one: filled(one, 0))
        elif all(self._constant(one) is not None for one in node.all_input_nodes):
            found = ran(node, self._constant)
        else:
            return None
        found = compact(found)
        if isinstance(found, Tensor) and narrowest(found).numel() > _REMEMBERED:
            del self._constants[node]
        else:
            self._constants[node] = found
        return found


def bases_after_write(node: fx.Node, value: Any, values: Values) -> list[tuple[fx.Node, Tensor]]:
    """Every tensor that the one that an operation changes in place is a view of, as it is after the change."""
    written = next((n for n, one in enumerate(arguments_of(node)) if one.alias_info and one.alias_info.is_write), None)
    if written is None or written >= len(node.args) or not isinstance(value, Tensor):
        return []
    chain: list[Any] = [node.args[written]]
    while isinstance(chain[-1], fx.Node) and is_view(chain[-1]) and chain[-1].args:
        chain.append(chain[-1].args[0])
    if not all(isinstance(one, fx.Node) for one in chain):
        return []
    base = values(chain[-1])
    base = filled(chain[-1], 0.0) if base is None else base
    if not isinstance(base, Tensor):
        return []
    base = base.clone(memory_format=torch.contiguous_format)
    found: list[tuple[fx.Node, Tensor]] = [(chain[-1], base)]
    for one in reversed(chain[:-1]):
        seen = ran(one, dict(found).get)
        if not isinstance(seen, Tensor):
            return []
        found.append((one, seen))
    if found[-1][1].shape != value.shape:
        return []
    found[-1][1].copy_(value)
    return found


def _is_mask(value: Any) -> bool:
    """Whether it holds zeros and ones, as floats."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    narrow = narrowest(value)
    return bool(((narrow == 0) | (narrow == 1)).all()) and bool((narrow == 0).any())


def _item(node: fx.Node, values: Values) -> Any:
    """One of several results."""
    source, number = node.args
    whole = values(source) if isinstance(source, fx.Node) else None
    return whole[number] if isinstance(whole, (list, tuple)) and isinstance(number, int) else None


def _or(value: Any, other: Any) -> Any:
    return other if value is None else value


def _lifted(program: ExportedProgram) -> dict[fx.Node, Tensor]:
    """Constants and buffers that have values, such as a table of positions; no parameters."""
    found: dict[fx.Node, Tensor] = {}
    for node, spec in zip(program.graph.nodes, program.graph_signature.input_specs, strict=False):
        if spec.kind not in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            continue
        name = str(spec.target)
        value = program.constants.get(name, program.state_dict.get(name))
        if isinstance(value, Tensor) and type(value).__name__ != "FakeTensor" and not value.is_meta:
            found[node] = value.detach().float() if value.is_floating_point() else value.detach()
    return found
