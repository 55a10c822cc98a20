"""Rewrites complex numbers of a captured program as pairs of real numbers, because no engine supports them.

Rotary positions are often complex, as in Llama 2: `view_as_complex`, a product with a table of `polar(1, angle)`,
`view_as_real`. Every complex tensor becomes two real tensors of its shape, its real and its imaginary part. No table
says how an operator treats the parts. Instead, the rules in `_RULES` are tried on small random integers:

* an operator that moves, copies, adds or scales numbers is applied to each part;
* an operator that is linear in each of two complex operands gives (ac - bd, ad + bc).

A product may differ from PyTorch's own in the last bit. A few other operators (polar, exp, division, absolute value)
have their own rules in `_OWN`. Operators without a rule are refused.

Every engine is compared with the rewritten program, so nothing after this step would notice a wrong rule. Each rule is
therefore also compared with PyTorch's complex numbers on the samples of the model, one operator at a time: a whole
program may amplify roundings, because it selects by comparing scores.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from mod_export.errors import CaptureError
from mod_export.graph.refusals import place_of
from mod_export.model.fourier import TRANSFORMS, transformed

ATEN = torch.ops.aten
NARROW = (torch.float16, torch.bfloat16)
"""Dtypes whose operations become operations in float32."""
REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}
INSTEAD = (
    "Write rotary positions with cos and sin, or as a product of torch.view_as_complex(...) and torch.polar(...)\n"
    'See "Complex numbers and float64" in docs/models.md'
)
IN_PARTS = (
    "Write it with torch.fft.rfft and irfft of fixed length, or as a product with a matrix of cosines and sines\n"
    'See "Complex numbers and float64" in docs/models.md'
)
CLOSE = 1e-5
"""Tolerance of a trial with numbers below LARGEST: two roundings differ by less, a wrong rule is off by more."""
LARGEST = 5
ROUNDING = 1e-4
"""Tolerance on a sample, in units of the largest number of an operator: a long Fourier transform differs by less."""


class Parts(NamedTuple):
    """The real and the imaginary part of one value: nodes of the graph, or tensors in a trial."""

    real: Any
    imaginary: Any


Evaluate = Callable[..., Any]
"""Applies an operator to arguments: adds a node to the graph, or computes the result in a trial."""


def as_real_parts(
    module: fx.GraphModule, held: Mapping[fx.Node, Any], runs: Sequence[Sequence[Any]], where: str
) -> dict[fx.Node, Tensor]:
    """Rewrites a graph in place if it has complex numbers.

    Args:
        module: graph of a captured program, without operators that write into their arguments. Its nodes have their
            values in `meta["val"]`. Values of new nodes are not inferred.
        held: placeholder -> the tensor that it reads, without the program's inputs.
        runs: the values of all placeholders in each run that rules are compared on.
        where: name of the program in messages.

    Returns:
        Placeholder of each complex weight or buffer (...) -> its new tensor (..., 2), the real part first.

    Raises:
        CaptureError: an input or output is complex, an operation has no rule here, or its rule is wrong on a sample.
    """
    if not any(_is_complex(node) for node in module.graph.nodes):
        return {}
    rules = {node: _rule_of(node) for node in module.graph.nodes if node.op == "call_function" and _has_complex(node)}
    for values in runs:
        _Compared(module, rules, where).run(*values, enable_io_processing=False)
    tensors: dict[fx.Node, Tensor] = {}
    parts: dict[fx.Node, Parts] = {}
    for node in list(module.graph.nodes):
        if node.op == "placeholder" and _is_complex(node):
            if node not in held:
                raise CaptureError(f"{where}: its input {node.name} is complex; give real and imaginary parts apart")
            tensors[node] = torch.view_as_real(held[node].detach().resolve_conj()).contiguous()
            with module.graph.inserting_after(node):
                imaginary = module.graph.call_function(ATEN.select.int, (node, -1, 1))
                real = module.graph.call_function(ATEN.select.int, (node, -1, 0))
            parts[node] = Parts(real, imaginary)
        elif node.op == "output":
            if any(arg in parts for arg in node.all_input_nodes):
                raise CaptureError(f"{where}: returns complex numbers; return torch.view_as_real of them")
        elif node in rules and not _rewrite(node, rules[node], parts):
            raise _refusal(node, where, "which no engine has")
    _erase(parts)
    module.recompile()
    return tensors


def _erase(parts: Mapping[fx.Node, Parts]) -> None:
    """Removes complex nodes that nothing reads any more. Weights and buffers get the `val` of their new tensors."""
    for node in reversed(list(parts)):
        if node.op == "placeholder":
            node.meta["val"] = torch.view_as_real(node.meta["val"])
        else:
            node.graph.erase_node(node)


def _is_complex(node: fx.Node) -> bool:
    return any(map(_is_complex_tensor, pytree.tree_leaves(node.meta.get("val"))))


def _is_complex_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def _has_complex(node: fx.Node) -> bool:
    """Returns whether an operator reads or returns complex numbers."""
    return any(map(_is_complex, (node, *node.all_input_nodes)))


def _refusal(node: fx.Node, where: str, reason: str) -> CaptureError:
    instead = IN_PARTS if "fft" in str(node.target) else INSTEAD
    return CaptureError(f"{where}: {node.target} of complex numbers, {reason},{place_of(node)}\n{instead}")


def _rewrite(node: fx.Node, rule: Rule | None, parts: dict[fx.Node, Parts]) -> bool:
    """Replaces a node by real operations. Returns False if no rule fits."""
    graph = node.graph

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        # Values are inferred for the whole graph later.
        new = graph.call_function(target, args, kwargs)
        new.meta = {key: value for key, value in node.meta.items() if key != "val"}
        return new

    def parts_of(argument: Any) -> Any:
        return parts.get(argument, argument) if isinstance(argument, fx.Node) else argument

    leaves, tree = pytree.tree_flatten((node.args, node.kwargs))
    with graph.inserting_before(node):
        result = None if rule is None else rule(add, node.target, [parts_of(leaf) for leaf in leaves], tree)
    if result is None:
        return False
    if isinstance(result, Parts):
        parts[node] = result
    else:
        result.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    return True


Rule = Callable[[Evaluate, Any, list[Any], pytree.TreeSpec], Any]
"""Applies an operator to arguments of which the complex ones are `Parts`. Returns the parts of its result, or the
result if it is real; None if the rule does not fit the arguments.
"""


def _rule_of(node: fx.Node) -> Rule | None:
    if node.target is operator.getitem:
        return _each_part
    if node.target in TRANSFORMS:
        return partial(_transform, node)
    if node.target in _OWN:
        return _own
    return next((rule for rule in _RULES if _holds(rule, node)), None)


def _transform(node: fx.Node, evaluate: Evaluate, _target: Any, leaves: list[Any], _tree: pytree.TreeSpec) -> Any:
    source = leaves[0] if isinstance(leaves[0], Parts) else (leaves[0], None)
    real, imaginary = transformed(evaluate, node, *source)
    return real if imaginary is None else Parts(real, imaginary)


def _own(evaluate: Evaluate, target: Any, leaves: list[Any], tree: pytree.TreeSpec) -> Any:
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    return _OWN[target](evaluate, *args, **kwargs)


def _each_part(evaluate: Evaluate, target: Any, leaves: list[Any], tree: pytree.TreeSpec) -> Parts:
    """Applies the operator to each part. A real operand, such as a factor, is the same for both parts."""
    return Parts(*(_applied(evaluate, target, [_part(leaf, n) for leaf in leaves], tree) for n in (0, 1)))


def _each_part_beside_real(
    evaluate: Evaluate,
    target: Any,
    leaves: list[Any],
    tree: pytree.TreeSpec,
    *,
    integers: bool = False,
    numbers: tuple[type, ...] = (float,),
) -> Parts:
    """Like `_each_part`, but a real operand, such as a summand, has the imaginary part 0. Operands are floating-point
    tensors, with `integers` also integer tensors, and Python numbers of the types `numbers`. Anything else, such as an
    index, a mask or a dimension, is the same for both parts.
    """

    def imaginary(leaf: Any) -> Any:
        if isinstance(leaf, (Parts, complex, torch.dtype)):
            return _part(leaf, 1)
        if _is_floating(leaf) or (integers and _is_integer(leaf)):
            return evaluate(ATEN.mul.Scalar, leaf, 0)
        return 0 if type(leaf) in numbers else leaf

    real = _applied(evaluate, target, [_part(leaf, 0) for leaf in leaves], tree)
    return Parts(real, _applied(evaluate, target, [imaginary(leaf) for leaf in leaves], tree))


def _product(evaluate: Evaluate, target: Any, leaves: list[Any], tree: pytree.TreeSpec) -> Parts | None:
    """Applies an operator that is linear in each of two complex operands; None unless there are two."""
    if sum(isinstance(leaf, (Parts, complex)) for leaf in leaves) != 2:
        return None

    def of(first: int, second: int) -> Any:
        wanted = iter((first, second))
        chosen = [_part(leaf, next(wanted) if isinstance(leaf, (Parts, complex)) else 0) for leaf in leaves]
        return _applied(evaluate, target, chosen, tree)

    return Parts(
        evaluate(ATEN.sub.Tensor, of(0, 0), of(1, 1)),
        evaluate(ATEN.add.Tensor, of(0, 1), of(1, 0)),
    )


_RULES: tuple[Rule, ...] = (
    _each_part,
    _each_part_beside_real,
    # An integer tensor is a summand in these rules, and an index in the one before. An integer is a summand in the last
    # of them, and an argument such as a dimension in the others.
    partial(_each_part_beside_real, integers=True),
    partial(_each_part_beside_real, integers=True, numbers=(float, int)),
    _product,
)
"""Rules in the order in which they are tried. The first rule that reproduces an operator's result is used."""


def _part(leaf: Any, number: int) -> Any:
    if isinstance(leaf, Parts):
        return leaf[number]
    if isinstance(leaf, complex):
        return (leaf.real, leaf.imag)[number]
    return REAL.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf


def _is_floating(leaf: Any) -> bool:
    value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_integer(leaf: Any) -> bool:
    value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
    if not isinstance(value, Tensor) or value.dtype is torch.bool:
        return False
    return not value.is_floating_point() and not value.is_complex()


def _applied(evaluate: Evaluate, target: Any, leaves: list[Any], tree: pytree.TreeSpec) -> Any:
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    return evaluate(target, *args, **kwargs)


def _holds(rule: Rule, node: fx.Node) -> bool:
    """Returns whether a rule reproduces the operator's result on random numbers of the node's shapes.

    There are two trials, because an integer of 0 cannot show what a rule does with summands, and a mask of one element
    has only one of its two values. The operator may refuse the second, such as an index of 1 where there is only 0.
    """
    return _reproduces(rule, node, 0) is True and _reproduces(rule, node, 1) is not False


def _reproduces(rule: Rule, node: fx.Node, number: int) -> bool | None:
    """Tries a rule with this number, 0 or 1, in place of all integers; masks are inverted for 1. Returns None if the
    operator itself does not accept such operands.
    """
    generator, seeds = torch.Generator(), count()
    leaves, tree = pytree.tree_flatten((node.args, node.kwargs))

    def drawn(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        generator.manual_seed(next(seeds))
        if value.dtype is torch.bool:
            return torch.randint(0, 2, value.shape, generator=generator) != number
        if _is_integer(value):
            # Integers may be indices: 0 is valid in every dimension.
            return torch.full(value.shape, number, dtype=value.dtype)
        numbers = torch.randint(1, LARGEST, (*value.shape, 2), generator=generator).float()
        numbers *= torch.randint(0, 2, numbers.shape, generator=generator) * 2 - 1
        return torch.view_as_complex(numbers) if value.is_complex() else numbers[..., 0].to(value.dtype)

    values = [pytree.tree_map(drawn, arg.meta["val"]) if isinstance(arg, fx.Node) else arg for arg in leaves]
    try:
        expected = pytree.tree_leaves(_applied(_call, node.target, values, tree))
    except NOT_ACCEPTED:
        return None
    try:
        result = rule(_call, node.target, [_halved(value) for value in values], tree)
    except NOT_ACCEPTED:
        return False  # The operator does not accept the parts at these arguments.
    if result is None:
        return False
    real, imaginary = (pytree.tree_leaves(arg) for arg in result)
    return len(real) == len(imaginary) == len(expected) and all(map(_is_same, expected, real, imaginary))


NOT_ACCEPTED = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
"""What operators raise for operands that they do not accept."""


def _call(target: Any, *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)


def _halved(leaf: Any) -> Any:
    return Parts(leaf.real, leaf.imag) if _is_complex_tensor(leaf) else leaf


def _is_same(expected: Any, real: Any, imaginary: Any) -> bool:
    if not (isinstance(expected, Tensor) and isinstance(real, Tensor) and isinstance(imaginary, Tensor)):
        return False
    if not expected.is_complex() or real.shape != expected.shape or imaginary.shape != expected.shape:
        return False
    parts = ((expected.real, real), (expected.imag, imaginary))
    return all(torch.allclose(reference, part.to(reference.dtype), rtol=CLOSE, atol=CLOSE) for reference, part in parts)


class _Compared(fx.Interpreter):
    """Runs a program, and compares the rule of each operator on complex numbers with what the operator returns."""

    def __init__(self, module: fx.GraphModule, rules: Mapping[fx.Node, Rule | None], where: str) -> None:
        super().__init__(module)
        self.extra_traceback = False  # It would be added to messages.
        self._rules, self._where = rules, where

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        # Widened for one operator at a time: there is no second copy of all weights.
        return pytree.tree_map_only(Tensor, _widened, super().fetch_args_kwargs_from_env(n))

    def run_node(self, n: fx.Node) -> Any:
        with torch.no_grad():
            expected = super().run_node(n)
            if (rule := self._rules.get(n)) is not None:
                leaves, tree = pytree.tree_flatten(self.fetch_args_kwargs_from_env(n))
                result = rule(_call, n.target, [_halved(leaf) for leaf in leaves], tree)
                if result is not None and not _is_close(expected, result, leaves):
                    raise _refusal(n, self._where, "whose real form gives other numbers on a sample")
        return expected


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype in NARROW else tensor


def _is_close(expected: Any, result: Any, operands: Sequence[Any]) -> bool:
    """Returns whether what a rule computes differs by roundings only, wherever the operator's own result is finite."""
    parts = result if isinstance(result, Parts) else (result,)
    found = [_joined(*leaves) for leaves in zip(*map(pytree.tree_leaves, parts), strict=True)]
    values = [value.to(torch.complex128) for value in pytree.tree_leaves(expected)]
    # Summands may cancel each other, so their size counts too.
    sizes = [
        tensor.abs().nan_to_num(0, 0, 0)
        for tensor in (*values, *operands)
        if _is_floating(tensor) or _is_complex_tensor(tensor)
    ]
    allowed = ROUNDING * max((size.max().item() for size in sizes if size.numel()), default=0.0)
    return all(
        bool((((value - other).abs() <= allowed) | ~value.isfinite()).all())
        for value, other in zip(values, found, strict=True)
    )


def _joined(real: Tensor, imaginary: Tensor | None = None) -> Tensor:
    return real.to(torch.complex128) if imaginary is None else torch.complex(real.double(), imaginary.double())


def _as_parts(add: Evaluate, operand: Any) -> Parts:
    if isinstance(operand, Parts):
        return operand
    if isinstance(operand, (fx.Node, Tensor)):
        return Parts(operand, add(ATEN.mul.Scalar, operand, 0))
    return Parts(complex(operand).real, complex(operand).imag)


def _turned(add: Evaluate, length: Any, angle: Any, **_out: Any) -> Parts:
    return Parts(*(add(ATEN.mul.Tensor, length, add(op, angle)) for op in (ATEN.cos.default, ATEN.sin.default)))


def _squares(add: Evaluate, z: Parts) -> Any:
    return add(ATEN.add.Tensor, *(add(ATEN.mul.Tensor, part, part) for part in z))


def _times(add: Evaluate, z: Parts, w: Parts) -> Parts:
    (a, b), (c, d) = z, w
    ac, bd, ad, bc = (add(ATEN.mul.Tensor, *two) for two in ((a, c), (b, d), (a, d), (b, c)))
    return Parts(add(ATEN.sub.Tensor, ac, bd), add(ATEN.add.Tensor, ad, bc))


def _quotient(add: Evaluate, dividend: Any, divisor: Any) -> Parts:
    if not isinstance(divisor, Parts):
        real = divisor.real if isinstance(divisor, complex) and not divisor.imag else divisor
        if not isinstance(real, complex):
            return Parts(*(add(ATEN.div.Tensor, part, real) for part in dividend))
        return _times(add, dividend, _as_parts(add, 1 / real))
    return _times(add, _as_parts(add, dividend), _inverse(add, divisor))


def _inverse(add: Evaluate, z: Parts) -> Parts:
    squares = _squares(add, z)
    real, imaginary = (add(ATEN.div.Tensor, part, squares) for part in z)
    return Parts(real, add(ATEN.neg.default, imaginary))


def _power(add: Evaluate, base: Parts, exponent: Any) -> Parts | None:
    if not isinstance(exponent, int) or exponent < 1:
        return None
    result = base
    for _ in range(exponent - 1):
        result = _times(add, result, base)
    return result


def _conjugate(add: Evaluate, z: Parts) -> Parts:
    return Parts(z.real, add(ATEN.neg.default, z.imaginary))


def _cast(add: Evaluate, operand: Any, dtype: torch.dtype | None = None, **_how: Any) -> Any:
    """Casts to another complex dtype, to a real dtype (keeps the real part), or a real tensor to a complex dtype."""
    if dtype is None or not isinstance(operand, Parts):
        return operand if isinstance(operand, Parts) else _as_parts(add, operand)
    if dtype.is_complex:
        return Parts(*(add(ATEN._to_copy.default, part, dtype=REAL[dtype]) for part in operand))
    return add(ATEN._to_copy.default, operand.real, dtype=dtype)


def _ones(target: Any) -> Callable[..., Parts]:
    def made(add: Evaluate, *args: Any, **kwargs: Any) -> Parts:
        kwargs = {name: REAL.get(arg, arg) if isinstance(arg, torch.dtype) else arg for name, arg in kwargs.items()}
        real = add(target, *(arg.real if isinstance(arg, Parts) else arg for arg in args), **kwargs)
        return Parts(real, add(ATEN.mul.Scalar, real, 0))

    return made


_OWN: dict[Any, Callable[..., Any]] = {
    ATEN.view_as_complex.default: lambda add, z: Parts(*(add(ATEN.select.int, z, -1, n) for n in (0, 1))),
    ATEN.view_as_real.default: lambda add, z: add(ATEN.stack.default, list(z), -1),
    ATEN.complex.default: lambda add, real, imaginary: Parts(real, imaginary),
    ATEN.polar.default: _turned,
    ATEN.real.default: lambda add, z: z.real,
    ATEN.imag.default: lambda add, z: z.imaginary,
    ATEN.abs.default: lambda add, z: add(ATEN.sqrt.default, _squares(add, z)),
    ATEN.angle.default: lambda add, z: add(ATEN.atan2.default, z.imaginary, z.real),
    ATEN._conj.default: _conjugate,
    ATEN.conj_physical.default: _conjugate,
    ATEN.exp.default: lambda add, z: _turned(add, add(ATEN.exp.default, z.real), z.imaginary),
    ATEN.div.Tensor: _quotient,
    ATEN.reciprocal.default: _inverse,
    ATEN.pow.Tensor_Scalar: _power,
    ATEN.square.default: lambda add, z: _times(add, z, z),
    ATEN._to_copy.default: _cast,
    ATEN.ones.default: _ones(ATEN.ones.default),
    ATEN.ones_like.default: _ones(ATEN.ones_like.default),
}
"""Rules of operators that `_RULES` does not cover."""
