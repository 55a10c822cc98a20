"""What a captured program does with the indices of a selection: which tokens they read, and where results are put.

Indices are followed through everything that gives them another shape, another order, or the form of one-hot rows. What
they read counts as tokens where it depends on an input of the program, holds all T tokens of all B rows, and has
features: not the weights of experts, a table of positions, or scores.

Shape legend: B rows, T tokens that a site can select from, K slots.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from mod_export.export.program_nodes import argument_of, shape_of

ATEN = torch.ops.aten
SORTS = {ATEN.sort.default, ATEN.sort.stable}
ARGSORTS = {ATEN.argsort.default, ATEN.argsort.stable}
SHAPES = {
    ATEN.view.default, ATEN.reshape.default, ATEN._unsafe_view.default, ATEN.flatten.using_ints, ATEN.squeeze.dim,
    ATEN.squeeze.default, ATEN.squeeze.dims, ATEN.unsqueeze.default, ATEN.unflatten.int, ATEN.expand.default,
    ATEN.expand_as.default, ATEN.repeat.default, ATEN.repeat_interleave.self_int, ATEN.transpose.int, ATEN.t.default,
    ATEN.permute.default, ATEN.movedim.int, ATEN.select.int, ATEN.clone.default, ATEN.contiguous.default,
    ATEN.alias.default, ATEN.detach.default, ATEN.lift_fresh_copy.default, ATEN.to.dtype, ATEN.to.dtype_layout,
    ATEN._to_copy.default, ATEN.type_as.default, ATEN.cat.default, ATEN.stack.default,
}  # fmt: skip
"""What gives indices, or one-hot rows of them, another shape or dtype, or puts others beside them."""
ARITHMETIC = {
    ATEN.add.Tensor, ATEN.add_.Tensor, ATEN.add.Scalar, ATEN.mul.Tensor, ATEN.mul_.Tensor, ATEN.mul.Scalar,
    ATEN.sub.Tensor, ATEN.sub.Scalar,
}  # fmt: skip
"""With these, an index of a row becomes an index of the flattened batch, or of a row that begins with other tokens."""
PRODUCTS = {ATEN.matmul.default, ATEN.bmm.default, ATEN.mm.default, ATEN.einsum.default}
GATHERS = {
    ATEN.gather.default, ATEN.index.Tensor, ATEN.index_select.default, ATEN.embedding.default,
    ATEN.take_along_dim.default,
}  # fmt: skip
SCATTERS = {
    ATEN.scatter.src, ATEN.scatter_.src, ATEN.scatter.value, ATEN.scatter_.value, ATEN.scatter_add.default,
    ATEN.scatter_add_.default, ATEN.scatter_reduce.two, ATEN.scatter_reduce_.two, ATEN.index_put.default,
    ATEN.index_put_.default, ATEN.index_add.default, ATEN.index_add_.default, ATEN.index_copy.default,
    ATEN.index_copy_.default,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A top-k, or a sort of which k entries are kept.

    Attributes:
        node: the operation.
        scores: what it compares.
        dim: of the scores, from 0: where the tokens are.
        indices: the node of the k indices.
        values: the nodes of the k scores.
        largest: False where the k smallest scores are selected.
    """

    node: fx.Node
    scores: fx.Node
    dim: int
    indices: fx.Node
    values: Sequence[fx.Node]
    largest: bool

    @property
    def tokens(self) -> int:
        """T."""
        return shape_of(self.scores)[self.dim]

    @property
    def k(self) -> int:
        """K."""
        return shape_of(self.indices)[self.dim]

    @property
    def rows(self) -> int:
        """B; 1 where one selection is made among the tokens of all rows."""
        return math.prod(shape_of(self.scores)) // self.tokens

    @property
    def is_tokens_first(self) -> bool:
        """Whether scores are (T, B), not (B, T)."""
        return math.prod(shape_of(self.scores)[: self.dim]) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form of the indices.

    Attributes:
        node: which has it.
        kind: `index`, `one_hot` rows over the tokens, or a `mask` of the selected ones.
        in_order: whether the slots are in the order of positions.
        places: the latest form of B * K positions of a row, in the order of these slots; None if there is none.
        shifted: whether a number was added.
        slots: of a row, those of other tokens that were put beside the indices included.
        first: the slot of the first index.
        one_row: whether these are the indices of one row of several.
        table: the integers that the indices were looked up in before, such as the positions of tokens selected earlier;
            None where there are none.
    """

    node: fx.Node
    kind: Literal["index", "one_hot", "mask"] = "index"
    in_order: bool = False
    places: fx.Node | None = None
    shifted: bool = False
    slots: int
    first: int = 0
    one_row: bool = False
    table: fx.Node | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """Where the indices of a selection are used.

    Attributes:
        gather: reads the tokens.
        scatter: puts results back; None where nothing does.
        read: the form in which the indices read the tokens.
        in_order: whether results are in the order of positions where they are put back, or where the tokens are read.
        forms: every form that the indices have.
        pairs: every operation that reads tokens whose results are put back, and the first that does that; where none
            are put back, `gather` alone.
    """

    gather: fx.Node
    scatter: fx.Node | None
    read: Form
    in_order: bool
    forms: Sequence[Form]
    pairs: Sequence[tuple[fx.Node, fx.Node | None]]


def behind(node: fx.Node) -> set[fx.Node]:
    """Whatever depends on a node."""
    found, waiting = {node}, [node]
    while waiting:
        new = [use for use in waiting.pop().users if use not in found]
        found.update(new)
        waiting += new
    return found


def behind_inputs(program: ExportedProgram) -> set[fx.Node]:
    """Whatever depends on an input of the program, and not on weights and constants alone."""
    found = {
        node
        for node, spec in zip(program.graph.nodes, program.graph_signature.input_specs, strict=False)
        if spec.kind is InputKind.USER_INPUT
    }
    for node in program.graph.nodes:
        if any(one in found for one in node.all_input_nodes):
            found.add(node)
    return found


def uses_of(selection: Selection, data: set[fx.Node]) -> Uses | None:
    """Where the indices read tokens, and where results are put back; None where no tokens are read.

    `data` is `behind_inputs`.
    """
    if not _is_of_tokens(selection):
        return None
    forms = [Form(node=selection.indices, slots=selection.k, places=selection.indices)]
    seen = {selection.indices}
    gathers, scatters = list[tuple[fx.Node, Form]](), list[tuple[fx.Node, Form]]()
    for form in forms:  # Which grows meanwhile.
        for use in form.node.users:
            kind = _kind_of_use(use, form, selection, data)
            if kind == "gather":
                gathers.append((use, form))
            elif kind == "scatter":
                scatters.append((use, form))
            elif use not in seen and (new := _next_form(use, form, selection)) is not None:
                seen.add(use)
                forms.append(new)
    return _paired(gathers, scatters, forms)


def _paired(
    gathers: list[tuple[fx.Node, Form]], scatters: list[tuple[fx.Node, Form]], forms: list[Form]
) -> Uses | None:
    """The first tokens that are read and whose results are put back, or else the first that are read."""
    if not gathers:
        return None
    pairs = []
    for gather, form in gathers:
        after = behind(gather)
        pairs.append((gather, form, next((one for one in scatters if one[0] in after), None)))
    gather, form, put = next((pair for pair in pairs if pair[2] is not None), pairs[0])
    return Uses(
        gather=gather,
        scatter=None if put is None else put[0],
        read=form,
        in_order=(form if put is None else put[1]).in_order,
        forms=forms,
        pairs=[(one, other[0]) for one, _, other in pairs if other is not None] or [(gather, None)],
    )


def _is_of_tokens(selection: Selection) -> bool:
    """Whether it can be a choice of k tokens for each row: not one of experts for each token, nor of nothing."""
    indices, scores = shape_of(selection.indices), shape_of(selection.scores)
    if 0 in indices or sum(size != 1 for size in indices) > 2:
        return False
    behind_them, before = math.prod(scores[selection.dim + 1 :]), math.prod(scores[: selection.dim])
    # Of (B, T), or of (T, B).
    return len(scores) > 0 and (behind_them == 1 or before == 1)


def _kind_of_use(use: fx.Node, form: Form, selection: Selection, data: set[fx.Node]) -> str:
    """Whether indices, or one-hot rows of them, `gather` tokens or `scatter` results here."""
    if use.target in GATHERS | SCATTERS and form.kind == "index" and is_index(form.node, use):
        is_gather = use.target in GATHERS
        source: Any = use.args[0]
        count = selection.k if form.one_row else form.slots * selection.rows
        # Tokens have features: what is as small as the indices are scores, or gates.
        if math.prod(shape_of(use)) <= count or not _holds_tokens(use, form, selection):
            return ""
        return ("gather" if source in data else "") if is_gather else "scatter"
    if use.target in PRODUCTS and form.kind == "one_hot":
        return _kind_of_product(use, form, selection, data)
    return ""


def _kind_of_product(use: fx.Node, form: Form, selection: Selection, data: set[fx.Node]) -> str:
    """One-hot rows (K, T) take tokens out of a row; transposed, (T, K), they put them back."""
    others = [one for one in use.all_input_nodes if one is not form.node]
    if len(others) != 1 or others[0] not in data:
        return ""
    many, few = selection.rows * selection.tokens, selection.rows * selection.k
    read, made = (math.prod(shape_of(one)) for one in (others[0], use))
    if read % many == 0 and made * many == read * few:
        return "gather"
    return "scatter" if read % few == 0 and made * few == read * many else ""


def _holds_tokens(use: fx.Node, form: Form, selection: Selection) -> bool:
    """Whether what is indexed are the T tokens of each of the B rows, those of the flattened batch, or those of one
    row; where numbers were added to the indices, there may be other tokens before them.
    """
    source: Any = use.args[0]
    shape, (dim, size) = shape_of(source), _indexed(use)
    rows, tokens = selection.rows, selection.tokens
    # Positions that were looked up are those of a longer row; so are those of its first tokens.
    longer = form.shifted or form.table is not None or (size > tokens and _are_first_of(selection, size))
    fits = size >= tokens if longer else size == tokens
    if form.one_row:
        return fits and (source.target is ATEN.select.int or _is_unbound(source))
    if rows == 1:
        return fits
    if form.shifted and size >= rows * tokens and size % rows == 0:
        return True
    # Experts that share the tokens of a row have no rows of their own.
    steps = source.meta["val"].stride()
    own = len(shape) > 2 and any(shape[n] == rows and steps[n] for n in (0, 1) if n != dim)
    return fits and own


def _are_first_of(selection: Selection, size: int) -> bool:
    """Whether the tokens that are compared are the first ones of `size`, such as the patches before a text."""
    seen, waiting = {selection.scores}, [selection.scores]
    while waiting:
        node = waiting.pop()
        if node.target is ATEN.slice.Tensor and not argument_of(node, "start") and argument_of(node, "step") == 1:
            source: Any = node.args[0]
            dim = (argument_of(node, "dim") or 0) % len(shape_of(source))
            if (shape_of(node)[dim], shape_of(source)[dim]) == (selection.tokens, size):
                return True
        new = [one for one in node.all_input_nodes if one not in seen]
        seen.update(new)
        waiting += new
    return False


def is_index(node: fx.Node, use: fx.Node) -> bool:
    """Whether an operation reads or writes at these indices."""
    index = argument_of(use, "index", "indices")
    return index is node or (isinstance(index, (list, tuple)) and node in index)


def _indexed(use: fx.Node) -> tuple[int, int]:
    """(number, size) of the dimension that indices are of."""
    source: Any = use.args[0]
    shape, dim = shape_of(source), argument_of(use, "dim")
    indices = argument_of(use, "indices")
    if isinstance(indices, (list, tuple)):
        dim = max(n for n, index in enumerate(indices) if index is not None)
    dim = 0 if dim is None else dim % len(shape)
    return dim, shape[dim]


def _next_form(use: fx.Node, form: Form, selection: Selection) -> Form | None:
    """The form that an operation gives to indices; None where what it gives are none."""
    if not isinstance(use.meta.get("val"), torch.Tensor):
        return _several(use, form, selection)
    found = replace(form, node=use)
    if _is_unbound(use):
        return found
    if use.target is operator.getitem:
        # A sort gives the indices in order as its values, and the order of a mask as its indices.
        return _placed(found, selection) if use.args[1] == (form.kind == "mask") else None
    if form.kind == "mask":
        return _from_mask(use, found, selection)
    return _from_one_hot(use, found, selection) if form.kind == "one_hot" else _from_index(use, form, selection)


def _from_index(use: fx.Node, form: Form, selection: Selection) -> Form | None:
    found = replace(form, node=use)
    size, rows, k, tokens = math.prod(shape_of(use)), selection.rows, selection.k, selection.tokens
    if use.target is ATEN.one_hot.default or (use.target is ATEN.eq.Tensor and size == rows * k * tokens):
        return replace(found, kind="one_hot")
    if use.target in ARITHMETIC:
        return None if use.meta["val"].dtype.is_floating_point else replace(found, shifted=True)
    if use.target in GATHERS | SCATTERS and is_index(form.node, use):
        if use.target in SCATTERS:
            return replace(found, kind="mask") if size == rows * tokens else None
        source: Any = use.args[0]
        # Positions that were selected before, so that those of the whole row go on.
        fits = math.prod(shape_of(source)) == rows * tokens and size == rows * k
        fits = fits and not source.meta["val"].dtype.is_floating_point
        return replace(found, places=use, table=source) if fits else None
    if use.target is ATEN.cat.default:
        return _beside(use, form)
    narrowed = use.target is ATEN.slice.Tensor and size == rows * k < math.prod(shape_of(form.node))
    if use.target not in SHAPES and not narrowed:
        return None
    one_row = use.target is ATEN.select.int and rows > 1 and size * rows == math.prod(shape_of(form.node))
    return _placed(replace(found, one_row=form.one_row or one_row), selection)


def _from_one_hot(use: fx.Node, found: Form, selection: Selection) -> Form | None:
    """Also multiplied with the gates."""
    whole = math.prod(shape_of(use)) == selection.rows * selection.k * selection.tokens
    return found if whole and use.target in SHAPES | ARITHMETIC else None


def _several(use: fx.Node, form: Form, selection: Selection) -> Form | None:
    """Of an operation that returns several tensors: the indices in order."""
    if use.target is ATEN.unbind.int and form.kind == "index" and argument_of(use, "dim") == 0:
        return replace(form, node=use, one_row=selection.rows > 1)
    if form.kind == "mask" and use.target in SORTS:
        return replace(form, node=use) if argument_of(use, "descending") else None
    if use.target is ATEN.topk.default:
        ascends = not argument_of(use, "largest") and argument_of(use, "k") == selection.k
        return replace(form, node=use, in_order=True, places=None) if ascends and form.kind == "index" else None
    if use.target not in SORTS or form.kind != "index":
        return None
    return replace(form, node=use, in_order=not argument_of(use, "descending"), places=None)


def _from_mask(use: fx.Node, found: Form, selection: Selection) -> Form | None:
    """The first K of a stable descending sort of a mask are the positions of the selected tokens in order."""
    if use.target in ARGSORTS:
        return found if argument_of(use, "descending") and argument_of(use, "stable") else None
    if use.target is ATEN.slice.Tensor and math.prod(shape_of(use)) == selection.rows * selection.k:
        return _placed(replace(found, kind="index", in_order=True), selection)
    return found if use.target in SHAPES else None


def _is_unbound(node: fx.Node) -> bool:
    """Whether it is one of the rows that a loop over a tensor gives."""
    source: Any = node.args[0] if node.target is operator.getitem else None
    return source is not None and source.target is ATEN.unbind.int


def _placed(form: Form, selection: Selection) -> Form:
    """With the positions of the tokens in it, if they are those of rows."""
    fits = math.prod(shape_of(form.node)) == selection.rows * selection.k
    return replace(form, places=form.node) if fits and not form.shifted else form


def _beside(use: fx.Node, form: Form) -> Form:
    """Beside others, such as the position of a class token."""
    parts: Any = use.args[0]
    dim = (argument_of(use, "dim") or 0) % len(shape_of(use))
    own, sizes = parts.index(form.node), [shape_of(part)[dim] for part in parts]
    found = replace(form, node=use)
    if sizes[own] != form.slots:
        return found
    return replace(found, slots=sum(sizes), first=form.first + sum(sizes[:own]))
