"""A model without a static graph is refused with the line, the problem there, and what to write instead."""

from __future__ import annotations

import builtins
import importlib
import linecache
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dynamic_models as models
import pytest
import torch
from torch import Tensor, nn

from mod_export.errors import CaptureError
from mod_export.graph import refusals
from mod_export.graph.capture import captured, exported, prove_static

HERE = Path(__file__).parent
DOCS = HERE.parents[2] / "docs/models.md"
Way = Callable[[nn.Module, Sequence[Tensor]], object]


def proof(module: nn.Module, example: Sequence[Tensor]) -> object:
    return prove_static(module, [example, tuple(x * 2 for x in example)], "mine at b2s16")


def export(module: nn.Module, example: Sequence[Tensor]) -> object:
    return captured(module, example, "mine at b2s16")


BOTH = (proof, export)


def line_of(text: str) -> str:
    """FILE:LINE of the only line of the models with this text."""
    lines = linecache.getlines(models.__file__)
    (number,) = (number for number, line in enumerate(lines, 1) if line.strip() == text)
    return f"{models.__file__}:{number}"


def message_of(name: str, way: Way, device: str = "cpu") -> str:
    module = getattr(models, name)().eval().to(device)
    with pytest.raises(CaptureError) as caught:
        way(module, (torch.randn(2, 16, models.D, device=device),))
    return str(caught.value)


TOP_K = """\
    index_BK = scores_BS.topk(k).indices.sort().values  # k = max(1, int(capacity * S))
    wide_BKD = index_BK[..., None].expand(-1, -1, x_BSD.shape[-1])  # all rows at once, without a loop
    x_BSD = x_BSD.scatter(1, wide_BKD, self.block(x_BSD.gather(1, wide_BKD)))
"""
MASKS = 'See "Boolean masks" in docs/models.md'
MASK = f"A boolean mask picks tokens, and how many depends on the data. Write instead:\n{TOP_K}"
NONZERO = """\
`nonzero`, or `torch.where` with a condition alone, returns as many indices as are true. Write instead:
    rank_BS = chosen_BS.to(torch.int32).sort(dim=1, descending=True, stable=True).indices
    index_BK = rank_BS[:, :k]  # the first k that are true, then others; live_BK = chosen_BS.gather(1, index_BK)
See "Indices of what is true" in docs/models.md"""
CONDITION = """\
Python chooses its way by a value that depends on the data. Write instead:
    x_BSD = torch.where(condition, changed_BSD, x_BSD)  # both are computed
    index_BK = scores_BS.topk(k).indices  # or no condition: there are always k tokens, never none or too many
See "Numbers and conditions" in docs/models.md"""
LOOP = f"""\
Python chooses its way by a value that depends on the data, for one row or token after the other. Write instead:
{TOP_K}See "Loops over rows" in docs/models.md"""
K_FROM_DATA = """\
An integer is computed from the data, such as a number of tokens. Write instead:
    k = max(1, int(capacity * x_BSD.shape[1]))  # a Python number, from a shape and constants
    index_BK = scores_BS.topk(k).indices.sort().values  # the same k for all rows
See "k from data" in docs/models.md"""
NUMBER = """\
A number is read out of a tensor, and Python computes with it. Write instead:
    weight = scores_BS.mean()  # without .item(), float() or bool(): a tensor multiplies as a number does
See "Numbers and conditions" in docs/models.md"""
LIST = """\
Numbers are read out of a tensor, one by one, and used as indices or sizes. Write instead:
    wide_BKD = index_BK[..., None].expand(-1, -1, x_BSD.shape[-1])  # all rows at once, without a loop
    x_BSD = x_BSD.scatter(1, wide_BKD, self.block(x_BSD.gather(1, wide_BKD)))
See "Loops over rows" in docs/models.md"""
MESSAGE = """\
The forward pass writes a message, which a graph cannot. Write instead:
    if not torch.compiler.is_compiling():  # or leave it out
        print(...)
See "Prints and other side effects" in docs/models.md"""

REFUSED: dict[str, tuple[Sequence[Way], str, str]] = {
    "RowMasks": (BOTH, "chosen = x[row][mask]", MASK + MASKS),
    "Threshold": (
        BOTH,
        "early = x[mask].mean(0)",
        f"{MASK}Others: {line_of('late = x[~mask].mean(0)')}\n{MASKS}",
    ),
    "Nonzero": (BOTH, "index = (self.router(x)[0, :, 0] > 0.005).nonzero().squeeze(1)", NONZERO),
    "WhereAlone": (BOTH, "rows, index = torch.where(self.router(x).squeeze(-1) > 0)", NONZERO),
    "AnySelected": (BOTH, "if mask.any():", CONDITION),
    "SkippedLayer": (BOTH, "if gate.mean() < 0.3:", CONDITION),
    "TryExcept": (BOTH, "if scores.sum() > 0:", CONDITION),
    "Equal": (BOTH, "if torch.equal(update, x):", CONDITION),
    "NanCheck": (
        BOTH,
        'assert not torch.isnan(weight).any(), "NaN in the router"',
        """\
A check looks at values while the model runs. Write instead:
    if not torch.compiler.is_compiling():  # or leave it out; parity finds NaN and infinity
        ...
See "Numbers and conditions" in docs/models.md""",
    ),
    "Item": (BOTH, "weight = self.router(x).mean().item()", NUMBER),
    "Float": (BOTH, "strength = float(self.router(x).mean())", NUMBER),
    "CountedK": (BOTH, "k = int((scores > 0).sum(1).max())", K_FROM_DATA),
    "ShareAsK": (BOTH, "k = int(scores.sigmoid().mean() * x.shape[1])", K_FROM_DATA),
    "RowsOfTheirOwnK": (BOTH, "own_k = int((scores > 0).sum())", K_FROM_DATA),
    "TooMany": (BOTH, "if wants.sum() > k:", CONDITION),
    "LayersInTurn": (BOTH, "if self.router(x).mean() > 0:", CONDITION),
    "TokenByToken": (BOTH, "if self.router(token) > 0:", LOOP),
    "ReadScores": (BOTH, "if score.item() > 0:", LOOP),
    "RowsInTurn": (
        BOTH,
        "return torch.stack([self.block(row) if self.router(row).mean() > 0 else row for row in x])",
        LOOP,
    ),
    "CutRows": (
        BOTH,
        "rows.append(self.block(x[row, : count[row]]).sum(0))",
        """\
A slice has an end that depends on the data, such as the length of a row. Write instead:
    real_BS = torch.arange(x_BSD.shape[1], device=x_BSD.device) < lengths_B[:, None]
    scores_BS = scores_BS.masked_fill(~real_BS, -torch.inf)  # padding is selected last; no row is cut
See "Loops over rows" in docs/models.md""",
    ),
    "OneByOne": (BOTH, "return x + self.block(x[:, self.router(x)[0, :, 0].argmax().item()])[:, None]", LIST),
    "BestToken": ([export], "best = int(self.router(x)[0, :, 0].argmax())", LIST),
    "ToList": (BOTH, "out[row, position] = self.block(x[row, position])", LIST),
    "ToSizes": (BOTH, "sizes = (self.router(x) > 0).sum((1, 2)).tolist()", LIST),
    "Unique": (
        BOTH,
        "index = torch.unique(self.router(x)[0, :, 0].topk(4).indices)",
        """\
`unique` returns as many entries as differ. Write instead:
    index_BK = scores_BS.topk(k).indices.sort().values  # those of one row differ already
See "Indices of what is true" in docs/models.md""",
    ),
    "MaskedSelect": (
        BOTH,
        "chosen = torch.masked_select(x, mask).view(-1, D)",
        f"`masked_select` returns as many elements as the mask has true ones. Write instead:\n{TOP_K}{MASKS}",
    ),
    "AskedSize": (
        BOTH,
        "if chosen.shape[0] == 0:",
        f"Python asks for a size that depends on the data. Write instead:\n{TOP_K}{MASKS}",
    ),
    "Repeats": (
        BOTH,
        "return torch.repeat_interleave(x, count, dim=0)",
        f"""\
The size of what `repeat_interleave` returns depends on the data. Write instead:
    y_BKD = torch.where(live_BK[..., None], y_BKD, 0)  # of a fixed size K, where what is not live is masked
{MASKS}""",
    ),
    # torch.export runs this Python code and does not record it; only the proof with torch.compile sees it.
    "Printing": ([proof], 'print("weights", weight)  # noqa: T201', MESSAGE),
    "Warns": ([proof], 'warnings.warn("attention without a mask", stacklevel=2)', MESSAGE),
    "Logging": ([proof], 'logging.getLogger("model").info("%d tokens", x.shape[1])', MESSAGE),
    "Annealed": (
        [proof],
        "self.step += 1",
        """\
The graph holds only while `self.step == 0`, and the next call finds something else. Write instead:
    if self.training:  # counters and schedules of training have no place in inference
        self.step += 1
See "State that changes" in docs/models.md""",
    ),
    # Here only torch.export refuses, because torch.compile supports numpy.
    "Numpy": (
        [export],
        "order = self.router(x)[..., 0].detach().numpy().argsort()",
        """\
The forward pass leaves PyTorch for numpy. Write instead:
    rank_BS = scores_BS.argsort(dim=1, descending=True, stable=True)  # the operation of torch, not numpy's
See "Prints and other side effects" in docs/models.md""",
    ),
}


@pytest.mark.parametrize(("name", "way"), [(name, way) for name, (ways, _, _) in REFUSED.items() for way in ways])
def test_what_is_not_static_is_refused_with_the_static_form(name: str, way: Way) -> None:
    _, source, rest = REFUSED[name]
    assert message_of(name, way) == f"mine at b2s16: no static graph because of {line_of(source)}\n    {source}\n{rest}"


@pytest.mark.parametrize("name", ["RowMasks", "AnySelected", "CountedK", "Item"])
def test_models_without_values_are_refused_in_the_same_words(name: str) -> None:
    assert {message_of(name, way, "meta") for way in BOTH} == {message_of(name, proof)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [("SkippedLayer", export), ("WrongShapes", proof)])
def test_nothing_but_the_message_is_written(name: str, way: Way) -> None:
    """Runs in its own process, because pytest installs its own handlers for log records."""
    module = f"getattr(dynamic_models, {name!r})().eval()"
    code = f"""
import dynamic_models, test_not_static, torch
from mod_export.errors import CaptureError
try:
    test_not_static.{way.__name__}({module}, (torch.randn(2, 16, dynamic_models.D),))
except CaptureError:
    print("refused")
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=HERE)
    assert (process.stdout, process.stderr) == ("refused\n", "")


def test_state_of_a_part_is_named_as_in_the_code() -> None:
    with pytest.raises(CaptureError, match=r"\nThe graph holds only while `self\.part\.step == 0`, and the next"):
        proof(models.Holds(models.Annealed()).eval(), (torch.randn(2, 16, models.D),))


def test_what_a_model_writes_while_it_is_captured_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    class Speaks(models.Routed):
        def forward(self, x: Tensor) -> Tensor:
            sys.stderr.write("hello\n")
            return x * 2

    export(Speaks(), (torch.randn(2, 16, models.D),))
    assert capfd.readouterr() == ("", "hello\n")


def test_sections_that_messages_name_are_in_the_documentation() -> None:
    sections = set(re.findall(r"^### (.+)$", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    named = {pattern.section for pattern in vars(refusals).values() if isinstance(pattern, refusals.Pattern)}
    assert named <= sections
    assert len(named) == 7


OWN = {
    "WrongShapes": (
        "return self.router(x) @ x.new_zeros(3, 3)",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x1 and 3x3)",
    ),
    "Refuses": (r'raise ValueError("this model wants 3 tokens\nand no more")', "ValueError: this model wants 3 tokens"),
    "NoSuchKey": ('return {"logits": x}["hidden"]', "KeyError: 'hidden'"),
    "Silent": ("raise RuntimeError", "RuntimeError"),
}


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("name", OWN)
def test_a_model_that_fails_by_itself_gets_its_own_error(name: str, way: Way) -> None:
    source, error = OWN[name]
    place = f"{line_of(source)}\n    {source}"
    assert message_of(name, way) == f"mine at b2s16: the model itself fails with these inputs at {place}\n{error}"


@pytest.mark.parametrize("way", BOTH)
def test_a_missing_input_is_named(way: Way) -> None:
    error = "TypeError: WantsMask.forward() missing 1 required positional argument: 'mask'"
    assert message_of("WantsMask", way) == f"mine at b2s16: the model itself fails with these inputs\n{error}"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_python_is_refused_without_advice(device: str) -> None:
    place = f"{line_of('torch._dynamo.graph_break()')}\n    torch._dynamo.graph_break()"
    assert message_of("OtherPython", proof, device) == (
        f"mine at b2s16: torch cannot capture the model at {place}\nUnsupported: Call to `torch._dynamo.graph_break()`"
    )


CELL = """
import torch
class Cell(torch.nn.Module):
    def forward(self, x):
        return x[x > 0]
"""


@pytest.mark.parametrize("way", BOTH)
def test_code_without_a_file_is_named_by_its_line(way: Way) -> None:
    names: dict[str, type[nn.Module]] = {}
    exec(compile(CELL, "<cell 3>", "exec"), names)
    with pytest.raises(
        CaptureError, match=r"^mine at b2s16: no static graph because of <cell 3>:5\nA boolean mask picks"
    ):
        way(names["Cell"](), (torch.randn(2, 16),))


def test_a_program_is_refused_with_the_line_of_the_model_that_it_was_made_of() -> None:
    example = (torch.randn(2, 16, models.D),)
    program = torch.export.export(models.Threshold().eval(), example)
    with pytest.raises(CaptureError) as caught:
        export(program.module(), example)
    assert str(caught.value) == message_of("Threshold", proof)


def test_no_file_is_opened_that_a_program_names(tmp_path: Path) -> None:
    graph = torch.export.export(models.Nonzero().eval(), (torch.randn(2, 16, models.D),)).graph
    secret = tmp_path / "secret.txt"
    secret.write_text("secret", encoding="utf-8")
    for node in graph.nodes:
        node.meta["stack_trace"] = f'  File "{secret}", line 1, in forward\n    index = wants.nonzero()\n            ^'
    with pytest.raises(CaptureError) as caught:
        refusals.refuse_dynamic(graph, "mine")
    assert str(caught.value).splitlines()[:2] == [
        f"mine: no static graph because of {secret}:1",
        "    index = wants.nonzero()",
    ]


def test_further_arguments_by_name_are_no_obstacle() -> None:
    module, x = models.TakesAnything().eval(), torch.randn(2, 16, models.D)
    assert proof(module, (x,))
    (site,) = captured(module, (x,), "mine").sites
    assert (site.name, site.k) == ("block", 4)


def test_a_program_with_a_dynamic_length_is_captured_at_one() -> None:
    """In the program k depends on the length; in each capture it is a constant."""

    class Quarter(models.Routed):
        def forward(self, x: Tensor) -> Tensor:
            index = self.router(x).topk(x.shape[1] // 4, dim=1).indices.sort(1).values.expand(-1, -1, models.D)
            return x.scatter(1, index, self.block(x.gather(1, index)))

    length = 4 * torch.export.Dim("quarter", min=2, max=16)
    dynamic = torch.export.export(Quarter().eval(), (torch.randn(2, 16, models.D),), dynamic_shapes=({1: length},))
    for seq in (16, 32):
        x = torch.randn(2, seq, models.D)
        assert proof(dynamic.module(), (x,))
        program = exported(dynamic.module(), (x,), "mine")
        assert not program.range_constraints
        torch.testing.assert_close(program.module()(x), dynamic.module()(x))


PACKAGE = """
import builtins
import sys


def positive(x):
    return x[x > 0].sum() * x


def print_as_ray_does(*args):
    sys.stdout.write(" ".join(map(str, args)))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package that models call, in a folder site-packages."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "helping_package.py").write_text(PACKAGE, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("helping_package")
    del sys.modules["helping_package"]


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.function(x))


@pytest.mark.parametrize("way", BOTH)
def test_the_line_is_that_of_the_model_and_not_of_a_package_that_it_calls(package: Any, way: Way) -> None:
    with pytest.raises(CaptureError) as caught:
        way(Calls(package.positive), (torch.randn(2, 4),))
    first, line, *_ = str(caught.value).splitlines()
    assert first.startswith("mine at b2s16: no static graph because of ")
    assert "test_not_static.py:" in first
    assert "self.function(x)" in line


def test_a_print_that_a_library_has_replaced_is_a_print(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def printing(x: Tensor) -> Tensor:
        print("x")  # noqa: T201  # It is what this is about.
        return x

    monkeypatch.setattr(builtins, "print", package.print_as_ray_does)
    with pytest.raises(CaptureError, match=r"The forward pass writes a message, which a graph cannot") as caught:
        proof(Calls(printing), (torch.randn(2, 4),))
    assert 'print("x")' in str(caught.value)
