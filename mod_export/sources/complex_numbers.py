"""Complex numbers of a captured program as pairs of real ones, because no engine has them.

Rotary positions are often written so, as in Llama 2: `view_as_complex`, a product with a table of `polar(1, angle)`,
`view_as_real`. A complex tensor (...) becomes a real one (..., 2), with its real part first, which is what
`view_as_real` gives; a product becomes (ac - bd, ad + bc), which may differ from PyTorch's own in the last bit.

Nothing else is known of them: what is not in the table here is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from mod_export.errors import CaptureError
from mod_export.export.not_static import place_of
from mod_export.export.program_nodes import argument_of

ATEN = torch.ops.aten
REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}
SAME = {
    ATEN.resolve_conj.default, ATEN.clone.default, ATEN.contiguous.default, ATEN.detach.default, ATEN.detach_.default,
    ATEN.alias.default, ATEN.lift_fresh_copy.default,
}  # fmt: skip
"""A pair stays what it is."""
INSTEAD = (
    "Write rotary positions with cos and sin, or as a product of torch.view_as_complex(...) and torch.polar(...)\n"
    'See "Complex numbers and float64" in docs/porting.md'
)
VIEWS = {ATEN.view_as_complex.default, ATEN.view_as_real.default}
SUMS = {ATEN.add.Tensor, ATEN.sub.Tensor, ATEN.index.Tensor, ATEN.neg.default}
"""The same operation of pairs: the last dimension is left alone, and is as long on both sides."""
SIZES = {
    ATEN.view.default: 2, ATEN.reshape.default: 2, ATEN._unsafe_view.default: 2, ATEN.expand.default: 2,
    ATEN.repeat.default: 1,
}  # fmt: skip
"""Operations that are given sizes, and the size of a pair there."""
DIMS = {
    ATEN.select.int, ATEN.slice.Tensor, ATEN.transpose.int, ATEN.flatten.using_ints, ATEN.unflatten.int,
    ATEN.squeeze.dim, ATEN.squeeze.dims, ATEN.unsqueeze.default, ATEN.permute.default, ATEN.index_select.default,
    ATEN.cat.default, ATEN.stack.default, ATEN.repeat_interleave.self_int,
}  # fmt: skip
"""Operations on dimensions, of which -1 would be that of the pair."""
DIM_ARGUMENTS = ("dim", "dims", "dim0", "dim1", "start_dim", "end_dim")
ONE_MORE = {ATEN.unsqueeze.default, ATEN.stack.default}
"""Of these, a dimension is one of the result."""


def as_pairs(module: fx.GraphModule, held: Mapping[fx.Node, Any], where: str) -> dict[fx.Node, torch.Tensor]:
    """Rewrites a graph in place, if it has complex numbers at all.

    Args:
        module: of a captured program; its nodes have their values of before in `meta["val"]`.
        held: placeholder -> the tensor that it reads; not of inputs.
        where: what messages call the program.

    Returns:
        What complex weights and buffers are instead.

    Raises:
        CaptureError: a complex input or output, or an operation that is not known here.
    """
    if any(_is_complex(node) for inner in _inner_graphs(module) for node in inner.nodes):
        raise CaptureError(
            f"{where}: computes with complex numbers in a branch of torch.cond, which no engine has\n{INSTEAD}"
        )
    if not any(_is_complex(node) for node in module.graph.nodes):
        return {}
    found: dict[fx.Node, torch.Tensor] = {}
    pairs = _Pairs(module.graph)
    for node in list(module.graph.nodes):
        if node.op == "placeholder" and _is_complex(node):
            if node not in held:
                raise CaptureError(f"{where}: its input {node.name} is complex; give real and imaginary parts apart")
            found[node] = torch.view_as_real(held[node].detach().resolve_conj()).contiguous()
            pairs.ranks[node] = held[node].dim()
            node.meta["val"] = torch.view_as_real(node.meta["val"])
        elif node.op == "output":
            if any(one in pairs.ranks for one in node.all_input_nodes):
                raise CaptureError(f"{where}: returns complex numbers; return torch.view_as_real of them")
        elif (_is_complex(node) or any(one in pairs.ranks for one in node.all_input_nodes)) and not pairs.rewrite(node):
            raise CaptureError(
                f"{where}: {node.target} of complex numbers, which no engine has,{place_of(node)}\n{INSTEAD}"
            )
    module.recompile()
    return found


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return any(isinstance(one, torch.Tensor) and one.is_complex() for one in _all(value))


def _all(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _inner_graphs(module: fx.GraphModule) -> list[fx.Graph]:
    return [one.graph for one in module.modules() if isinstance(one, fx.GraphModule) and one is not module]


class _Pairs:
    """The rewritten graph so far; `ranks` has the nodes that are pairs, and how many dimensions they had before."""

    def __init__(self, graph: fx.Graph) -> None:
        self.ranks: dict[fx.Node, int] = {}
        self._graph = graph
        self._beside: fx.Node
        self._rewrites: dict[Any, Callable[[Any], fx.Node | None]] = {
            **dict.fromkeys(SAME, lambda node: node.args[0]),
            **dict.fromkeys(VIEWS, lambda node: self._add(ATEN.alias.default, node.args[0])),
            **dict.fromkeys(SUMS, self._sum),
            **dict.fromkeys(SIZES, self._sized),
            **dict.fromkeys(DIMS, self._on_dims),
            ATEN.mul.Tensor: self._product,
            ATEN.polar.default: lambda node: self._turned(*node.args),
            ATEN.complex.default: lambda node: self._stack(*node.args),
            ATEN._conj.default: self._conjugate,
            ATEN.conj_physical.default: self._conjugate,
            ATEN.exp.default: lambda node: self._turned(
                self._add(ATEN.exp.default, self._part(node.args[0], 0)), self._part(node.args[0], 1)
            ),
            ATEN.real.default: lambda node: self._part(node.args[0], 0),
            ATEN.imag.default: lambda node: self._part(node.args[0], 1),
            ATEN.gather.default: self._gathered,
            ATEN.to.dtype: self._cast,
            ATEN._to_copy.default: self._cast,
            ATEN._assert_tensor_metadata.default: lambda node: node.args[0],
        }

    def rewrite(self, node: fx.Node) -> bool:
        """Puts real operations in the place of a node; False where there are none."""
        self._beside = node
        rewrite = self._rewrites.get(node.target)
        with self._graph.inserting_before(node):
            new = None if rewrite is None else rewrite(node)
        if new is None:
            return False
        if _is_complex(node):
            self.ranks[new] = node.meta["val"].dim()
        node.replace_all_uses_with(new)
        self._graph.erase_node(node)
        return True

    def _add(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        # Values are inferred for the whole graph later.
        node = self._graph.call_function(target, args, kwargs)
        node.meta = {key: one for key, one in self._beside.meta.items() if key != "val"}
        return node

    def _part(self, node: Any, number: int) -> fx.Node:
        return self._add(ATEN.select.int, node, -1, number)

    def _stack(self, real: Any, imaginary: Any) -> fx.Node:
        return self._add(ATEN.stack.default, [real, imaginary], -1)

    def _turned(self, length: Any, angle: Any) -> fx.Node:
        parts = (self._add(one, angle) for one in (ATEN.cos.default, ATEN.sin.default))
        return self._stack(*(self._add(ATEN.mul.Tensor, length, part) for part in parts))

    def _sum(self, node: fx.Node) -> fx.Node | None:
        first, second = node.args[0], (*node.args, None)[1]
        if node.target in (ATEN.add.Tensor, ATEN.sub.Tensor) and not {first, second} <= self.ranks.keys():
            return None  # A real number is added to the real part alone.
        return self._add(node.target, *node.args, **node.kwargs)

    def _sized(self, node: fx.Node) -> fx.Node:
        # To mypy, an argument or a target of a node may be almost anything; the table says what these are.
        return self._add(node.target, node.args[0], [*node.args[1], SIZES[node.target]])  # type: ignore[misc,index]

    def _on_dims(self, node: fx.Node) -> fx.Node:
        first: Any = node.args[0]
        rank = self.ranks[first[0] if isinstance(first, (list, tuple)) else first] + (node.target in ONE_MORE)
        kwargs = {}
        for argument in node.target._schema.arguments[1:]:  # type: ignore[union-attr]  # An operator has one.
            value = argument_of(node, argument.name)
            if argument.name in DIM_ARGUMENTS and value is not None:
                value = [one % rank for one in value] if isinstance(value, (list, tuple)) else value % rank
            kwargs[argument.name] = value
        if node.target is ATEN.permute.default:
            kwargs["dims"] = [*kwargs["dims"], rank]
        return self._add(node.target, first, **kwargs)

    def _product(self, node: fx.Node) -> fx.Node:
        one, other = node.args
        if one not in self.ranks:
            one, other = other, one
        if one not in self.ranks:  # A real tensor times a complex number.
            one, other = (other, one) if isinstance(one, complex) else (one, other)
            assert isinstance(other, complex)
            return self._stack(*(self._add(ATEN.mul.Tensor, one, part) for part in (other.real, other.imag)))
        if other not in self.ranks:
            factor = self._add(ATEN.unsqueeze.default, other, -1) if isinstance(other, fx.Node) else other
            return self._add(ATEN.mul.Tensor, one, factor)
        (a, b), (c, d) = ([self._part(pair, number) for number in (0, 1)] for pair in (one, other))
        ac, bd, ad, bc = (self._add(ATEN.mul.Tensor, *two) for two in ((a, c), (b, d), (a, d), (b, c)))
        return self._stack(self._add(ATEN.sub.Tensor, ac, bd), self._add(ATEN.add.Tensor, ad, bc))

    def _conjugate(self, node: fx.Node) -> fx.Node:
        return self._stack(self._part(node.args[0], 0), self._add(ATEN.neg.default, self._part(node.args[0], 1)))

    def _gathered(self, node: fx.Node) -> fx.Node:
        source, dim, index = node.args[:3]
        wide = self._add(ATEN.unsqueeze.default, index, -1)
        wide = self._add(ATEN.expand.default, wide, [*node.meta["val"].shape, 2])
        # To mypy, an argument may be almost anything: these are a number and a node.
        return self._add(ATEN.gather.default, source, dim % self.ranks[source], wide)  # type: ignore[operator,index]

    def _cast(self, node: fx.Node) -> fx.Node | None:
        dtype = REAL.get(argument_of(node, "dtype"))
        source = node.args[0]
        if dtype is None or source not in self.ranks:
            return None
        return self._add(ATEN.to.dtype, source, dtype)
