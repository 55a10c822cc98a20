"""Explains why a model is not one static graph: the line of its code, what the line does, and what to write instead.

torch reports such a line in five ways: as an operation whose result is a number, or has a size, that is only known when
the graph runs; as a condition that it cannot decide; as Python that it cannot capture; as a recompilation; and as an
error of the line itself. An error that the model also raises without capture is its own, and gets no advice.
docs/models.md has a section for each pattern.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.fx.experimental import symbolic_shapes
from torch.utils import _pytree as pytree

from mod_export.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Pattern:
    """A way of writing code that gives no static graph.

    Attributes:
        section: the section of docs/models.md.
        seen: one sentence that says what such code does.
        instead: lines of code that do the same with fixed sizes.
    """

    section: str
    seen: str
    instead: tuple[str, ...]


_RUN = (
    "wide_BKD = index_BK[..., None].expand(-1, -1, x_BSD.shape[-1])  # all rows at once, without a loop",
    "x_BSD = x_BSD.scatter(1, wide_BKD, self.block(x_BSD.gather(1, wide_BKD)))",
)
_TOP_K = ("index_BK = scores_BS.topk(k).indices.sort().values  # k = max(1, int(capacity * S))", *_RUN)
MASK = Pattern("Boolean masks", "A boolean mask picks tokens, and how many depends on the data", _TOP_K)
MASKED_SELECT = Pattern("Boolean masks", "`masked_select` returns as many elements as the mask has true ones", _TOP_K)
SIZE = Pattern("Boolean masks", "Python asks for a size that depends on the data", _TOP_K)
NONZERO = Pattern(
    "Indices of what is true",
    "`nonzero`, or `torch.where` with a condition alone, returns as many indices as are true",
    (
        "rank_BS = chosen_BS.to(torch.int32).sort(dim=1, descending=True, stable=True).indices",
        "index_BK = rank_BS[:, :k]  # the first k that are true, then others; live_BK = chosen_BS.gather(1, index_BK)",
    ),
)
UNIQUE = Pattern(
    "Indices of what is true",
    "`unique` returns as many entries as differ",
    ("index_BK = scores_BS.topk(k).indices.sort().values  # those of one row differ already",),
)
K_FROM_DATA = Pattern(
    "k from data",
    "An integer is computed from the data, such as a number of tokens",
    (
        "k = max(1, int(capacity * x_BSD.shape[1]))  # a Python number, from a shape and constants",
        "index_BK = scores_BS.topk(k).indices.sort().values  # the same k for all rows",
    ),
)
LIST = Pattern(
    "Loops over rows",
    "Numbers are read out of a tensor, one by one, and used as indices or sizes",
    _RUN,
)
LOOP = Pattern(
    "Loops over rows",
    "Python chooses its way by a value that depends on the data, for one row or token after the other",
    _TOP_K,
)
LENGTHS = Pattern(
    "Loops over rows",
    "A slice has an end that depends on the data, such as the length of a row",
    (
        "real_BS = torch.arange(x_BSD.shape[1], device=x_BSD.device) < lengths_B[:, None]",
        "scores_BS = scores_BS.masked_fill(~real_BS, -torch.inf)  # padding is selected last; no row is cut",
    ),
)
NUMBER = Pattern(
    "Numbers and conditions",
    "A number is read out of a tensor, and Python computes with it",
    ("weight = scores_BS.mean()  # without .item(), float() or bool(): a tensor multiplies as a number does",),
)
CONDITION = Pattern(
    "Numbers and conditions",
    "Python chooses its way by a value that depends on the data",
    (
        "x_BSD = torch.where(condition, changed_BSD, x_BSD)  # both are computed",
        "index_BK = scores_BS.topk(k).indices  # or no condition: there are always k tokens, never none or too many",
    ),
)
CHECK = Pattern(
    "Numbers and conditions",
    "A check looks at values while the model runs",
    ("if not torch.compiler.is_compiling():  # or leave it out; parity finds NaN and infinity", "    ..."),
)
PRINTS = Pattern(
    "Prints and other side effects",
    "The forward pass writes a message, which a graph cannot",
    ("if not torch.compiler.is_compiling():  # or leave it out", "    print(...)"),
)
NUMPY = Pattern(
    "Prints and other side effects",
    "The forward pass leaves PyTorch for numpy",
    ("rank_BS = scores_BS.argsort(dim=1, descending=True, stable=True)  # the operation of torch, not numpy's",),
)
STATE = Pattern(
    "State that changes",
    "The graph holds only while `{}`, and the next call finds something else",
    ("if self.training:  # counters and schedules of training have no place in inference", "    self.step += 1"),
)

OTHER = Pattern(
    "Boolean masks",
    "The size of what `{}` returns depends on the data",
    ("y_BKD = torch.where(live_BK[..., None], y_BKD, 0)  # of a fixed size K, where what is not live is masked",),
)

_BY_NAME = {
    "nonzero": NONZERO, "nonzero_numpy": NONZERO, "argwhere": NONZERO, "where": NONZERO,
    "masked_select": MASKED_SELECT, "topk": K_FROM_DATA, "arange": K_FROM_DATA,
    "unique_dim": UNIQUE, "_unique2": UNIQUE, "unique_consecutive": UNIQUE,
}  # fmt: skip
_BRANCHES = ("Data-dependent branching", "Data dependent operator")
_SLICES = ("slice", "narrow")
_INDICES = ("arg", "tolist(")
_CHECKS = ("isnan", "isinf", "isfinite", "assert", "raise", "allclose")
_MESSAGES = re.compile(r"\bprint\(|\bwarn(ings)?\b|\blog(ger|ging)?\.")
_CAPTURING = (
    torch.__path__[0] + os.sep, "torch/fx/", str(Path(__file__).parents[1]) + os.sep, "<frozen", "<eval_with_key>",
)  # fmt: skip
"""Path prefixes of code that captures a model and does not belong to it."""
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = ("site-packages", "dist-packages")
_INTEGER = re.compile(r"\b(int|round|floor|ceil)\(")
_ASKS = re.compile(r"^(if|elif|while|assert)\b|\bif .+ else\b")
_LOOP = re.compile(r"\bfor .+? in (?P<over>.+)")
_OWN_PARTS = re.compile(r"\bself(\.\w+)+(?![\w.(])")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+).*(?:\n +(?!File "|\^)(?P<text>.+))?')
_MODULE = re.compile(r"\._modules\['(\w+)'\]")
_GUARD = re.compile(r"- \d+/\d+: (.+?) +#")


class _Line(NamedTuple):
    file: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


class NotCompiledError(CaptureError):
    """torch cannot capture a module in one way, but sizes and values are not the reason, so another way may work. For
    example, torch.export may work if torch.compile does not know a context manager or sees a `print`.
    """


class StateError(CaptureError):
    """The next call of a module finds another state than the captured call."""


def refuse_dynamic(graph: fx.Graph, where: str) -> None:
    """Refuses a graph, captured by torch.compile or torch.export, in which a size or number depends on the data.

    Raises:
        CaptureError: a size or number depends on the data. The message names every line where one comes from.
    """
    origins: dict[str, tuple[fx.Node, _Line | None]] = {}
    for node in graph.nodes:
        # What is computed from such a size or number depends on the data too; only the first node is reported.
        if _depends(node) and not any(_depends(source) for source in node.all_input_nodes):
            line = _line_of_node(node)
            origins.setdefault(str(line), (node, line))
    if origins:
        (node, line), *rest = origins.values()
        raise CaptureError(_message(where, _of_node(node, line), line, [str(next_line) for _, next_line in rest]))


def place_of(node: fx.Node) -> str:
    """The line of the model's own code that an operation comes from, as the end of a sentence; empty if unknown."""
    return _shown(" at", _line_of_node(node))


def refusal(error: Exception, module: torch.nn.Module, example: Sequence[torch.Tensor], where: str) -> CaptureError:
    """Returns an error that explains why a model could not be captured, from the error that torch raised.

    If that says nothing about sizes and values, the model runs once without capture, because it may fail by itself.

    Args:
        error: the error that torch.compile or torch.export raised.
        module: the module to capture.
        example: its inputs.
        where: the name of the module in the message.
    """
    line = _line_of_error(error, module)
    pattern = _of_error(error, line)
    if pattern is not None:
        pattern = LOOP if pattern is CONDITION and line is not None and _is_in_loop(line) else pattern
        kind = NotCompiledError if pattern is PRINTS else CaptureError
        kind = StateError if pattern.section == STATE.section else kind
        return kind(_message(where, pattern, line, ()))
    model_error = _own_error(module, example)
    if model_error is None:
        return NotCompiledError(f"{where}: torch cannot capture the model{_shown(' at', line)}\n{_summary(error)}")
    place = _shown(" at", _line_of_error(model_error, module))
    return CaptureError(f"{where}: the model itself fails with these inputs{place}\n{_summary(model_error)}")


def state_that_changes(where: str, attributes: Sequence[str]) -> StateError:
    """Returns the error for a module whose results depend on attributes that a run changes. Each attribute is given as
    `name == value`.
    """
    seen = STATE.seen.format(" and ".join(attributes))
    return StateError(_message(where, replace(STATE, seen=seen), None, ()))


def _message(where: str, pattern: Pattern, line: _Line | None, others: Sequence[str]) -> str:
    further = [f"Others: {', '.join(others)}"] if others else []
    return "\n".join(
        [
            f"{where}: no static graph{_shown(' because of', line)}",
            f"{pattern.seen}. Write instead:",
            *(f"    {code}" for code in pattern.instead),
            *further,
            f'See "{pattern.section}" in docs/models.md',
        ]
    )


def _shown(before: str, line: _Line | None) -> str:
    if line is None:
        return ""
    return f"{before} {line}\n    {line.text}" if line.text else f"{before} {line}"


def _summary(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    kind = type(error).__name__
    return f"{kind}: {first}" if first else kind


def _own_error(module: torch.nn.Module, example: Sequence[torch.Tensor]) -> Exception | None:
    """The error that the model raises without capture, or None; a model without values cannot run and gives None."""
    tensors = [*module.parameters(), *module.buffers(), *example]
    if any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors):
        return None
    try:
        with torch.no_grad():
            module(*example)
    except Exception as error:  # The user's code may raise anything, and the user gets to see it.
        return error
    return None


def _line_of(lines: Sequence[_Line], packages: Collection[str]) -> _Line | None:
    """The innermost line of the model's own code, or else of any package; `lines` begin with the outermost one. A line
    is the model's own if its file is in no installed package, or in one of `packages`, which define the model's
    classes. Packages that these call, such as einops, do not count.
    """
    foreign = [line for line in lines if _is_foreign(line.file)]
    own_lines = [line for line in foreign if _package_of(line.file) in {None, *packages}]
    return next(reversed(own_lines or foreign), None)


def _line_of_node(node: fx.Node) -> _Line | None:
    # The text is read from the trace too, because a program can come from another machine: its files are not opened.
    frames = _FRAME.finditer(node.stack_trace or "")
    classes = [str(entry[1]) for entry in node.meta.get("nn_module_stack", {}).values() if len(entry) > 1]
    packages = {re.sub(r"^<class '", "", name).partition(".")[0] for name in classes}
    return _line_of(
        [_Line(frame["file"], int(frame["line"]), (frame["text"] or "").strip()) for frame in frames], packages
    )


def _is_foreign(file: str) -> bool:
    """Whether a file belongs neither to code that captures a model nor to Python itself."""
    if file.startswith(_CAPTURING):
        return False
    return not file.startswith(_STANDARD) or _package_of(file) is not None


def _package_of(file: str) -> str | None:
    """The installed package that a file belongs to, or None."""
    parts = Path(file).parts
    at = next((n for n, part in enumerate(parts) if part in _PACKAGES), len(parts))
    return parts[at + 1].removesuffix(".py") if at + 1 < len(parts) else None


def _packages_of(module: torch.nn.Module) -> set[str]:
    """The packages that define the classes of a model, except layers without weights, such as those of einops."""
    return {
        type(part).__module__.partition(".")[0] for part in module.modules() if any(True for _ in part.parameters())
    }


def _line_of_error(error: Exception, module: torch.nn.Module) -> _Line | None:
    frames = [(frame.filename, frame.lineno or 0) for frame in getattr(error, "real_stack", None) or ()]
    # For a recompilation, only the message names the line.
    frames = frames or [(frame["file"], int(frame["line"])) for frame in _FRAME.finditer(str(error))]
    ran = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    lines = [_Line(file, number, linecache.getline(file, number).strip()) for file, number in ran + frames]
    return _line_of(lines, _packages_of(module))


def _of_error(error: Exception, line: _Line | None) -> Pattern | None:
    text, source = str(error), line.text if line else ""
    if isinstance(error, torch._dynamo.exc.RecompileError):
        guard = _GUARD.search(text)
        holds = _MODULE.sub(r".\1", guard[1]) if guard else "the model is as it was"
        return replace(STATE, seen=STATE.seen.format(holds))
    if ".numpy() is not supported" in text:
        return NUMPY
    if "got SymInt" in text:
        return LIST
    if "data-dependent expression" in text:
        if "specialized integer" in text:
            return LIST if any(word in source for word in _INDICES) else K_FROM_DATA
        # torch's names for unknown floats begin with "zuf".
        if "expression zuf" in text:
            return _of_fraction(source)
        return SIZE if "Size-like symbols: u" in text else _of_condition(source)
    if isinstance(error, DataDependentOutputException) or any(words in text for words in _BRANCHES):
        return _of_condition(source)
    if isinstance(error, torch._dynamo.exc.Unsupported) and _MESSAGES.search(source):
        return PRINTS
    return None


def _of_condition(source: str) -> Pattern:
    return CHECK if any(word in source for word in _CHECKS) else CONDITION


def _of_fraction(source: str) -> Pattern:
    """The pattern of a float that becomes a size, a condition or a factor."""
    if _INTEGER.search(source):
        return K_FROM_DATA
    return _of_condition(source) if _ASKS.search(source) else NUMBER


def _is_in_loop(line: _Line) -> bool:
    """Whether the line is in a loop over rows or tokens. Loops over layers, which are parts of `self`, do not count."""
    lines = linecache.getlines(line.file)[: line.number]
    inside = len(lines[-1]) if lines else 0
    for text in reversed(lines):
        depth, code = len(text) - len(text.lstrip()), text.strip()
        if not code or code.startswith("#") or depth >= inside:
            continue
        loop = _LOOP.search(code)
        if loop and not _OWN_PARTS.search(loop["over"]):
            return True
        if code.startswith(("def ", "async def ", "class ")):
            return False
        inside = depth
    return False


def _of_node(node: fx.Node, line: _Line | None) -> Pattern:
    """The pattern of an operation that returns a size or number that depends on the data."""
    name, source = _name_of(node), line.text if line else ""
    if name in _BY_NAME:
        return _BY_NAME[name]
    if node.target in (torch.unique, torch.unique_consecutive):
        return UNIQUE
    if name in ("item", "_local_scalar_dense", "tolist"):
        return _of_number(node, source)
    if name in ("getitem", "index"):
        return MASK
    return replace(OTHER, seen=OTHER.seen.format(name))


def _of_number(node: fx.Node, source: str) -> Pattern:
    value = _value(node)
    if isinstance(value, torch.SymBool):
        return _of_condition(source)
    if not isinstance(value, torch.SymInt):
        return _of_fraction(source)
    if "tolist(" in source:
        return LIST
    # Some of the uses are range checks, which say nothing.
    uses = list(_uses(node))
    names = {_name_of(use) for use in uses}
    if "topk" not in names and any(_name_of(use) in _SLICES or _has_slice(use) for use in uses):
        return LENGTHS
    return LIST if names & {"getitem", "select"} else K_FROM_DATA


def _uses(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the uses of a number, and of the numbers that Python calculates from it."""
    for use in node.users:
        yield use
        if isinstance(_value(use), torch.SymInt):
            yield from _uses(use)


def _has_slice(use: fx.Node) -> bool:
    index: Any = use.args[1] if _name_of(use) == "getitem" else ()
    return any(isinstance(item, slice) for item in (index if isinstance(index, tuple) else (index,)))


def _name_of(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).removeprefix("aten::")
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def _depends(node: fx.Node) -> bool:
    value = _value(node)
    # Other leaves, such as a generator of random numbers, are objects without symbols.
    known = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return bool(
        symbolic_shapes.free_unbacked_symbols([leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, known)])
    )


def _value(node: fx.Node) -> Any:
    """An example of a node's result, with symbols for sizes and numbers that depend on the data."""
    return node.meta.get("example_value", node.meta.get("val"))
