"""Runs every pair of code blocks in docs/models.md: the original and the static form."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from captured_graphs import portable
from mod_dialects import D, Inner
from small_graphs import run
from torch import Tensor, nn
from torch.nn import functional as F

import mod_models
from mod_export import mark_selection
from mod_export.errors import CaptureError
from mod_export.graph.capture import captured, prove_static

PAGE = Path(__file__).parents[3] / "docs/models.md"
S, TEXTS = 16, 4


class Parts(nn.Module):
    """The modules and attributes that the examples use."""

    def __init__(self, capacity: float) -> None:
        super().__init__()
        self.capacity, self.texts, self.step = capacity, TEXTS, 10**6
        self.router, self.predictor, self.block = nn.Linear(D, 1), nn.Linear(D, 1), Inner()
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
        self.query, self.key, self.value, self.out = (nn.Linear(D, D) for _ in range(4))


def plain(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, S, D),)


def with_lengths(batch: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, S, D), torch.randint(1, S + 1, (batch,))


def with_text(batch: int) -> tuple[Tensor, ...]:
    places = torch.rand(batch, S).argsort(1)[:, :TEXTS]
    return torch.randn(batch, S, D), torch.zeros(batch, S, dtype=torch.bool).scatter(1, places, True)


class Case(NamedTuple):
    """A section: the k of its site, the ks of the original if that is captured, and the inputs of both."""

    k: int
    original: list[int] | None = None
    inputs: Callable[[int], tuple[Tensor, ...]] = plain
    batch: int = 2
    capacity: float = 0.25


CASES = {
    "Boolean masks": Case(3),
    "Indices of what is true": Case(14, capacity=0.9),
    "k from data": Case(14, capacity=0.9),
    "Loops over rows": Case(4, inputs=with_lengths),
    "Numbers and conditions": Case(4),
    "Prints and other side effects": Case(4),
    "State that changes": Case(4),
    "Masks that keep some results": Case(4, original=[]),
    "Attention that sees every token": Case(4, original=[]),
    "Top-k of the whole batch": Case(4, original=[8], batch=1),
    "Tokens that always run": Case(TEXTS + 3, inputs=with_text),
    "Tokens that change places": Case(4),
    "Skipped tokens that are changed too": Case(14, capacity=0.9),
}
SECTION_OF_MESSAGE = {
    "Tokens that always run": "Indices of what is true",
    "Tokens that change places": "Loops over rows",
    "Skipped tokens that are changed too": "Boolean masks",
}


def sections() -> dict[str, tuple[Any, Any]]:
    """Section -> (original, static form), compiled with the line numbers that they have on the page."""
    pairs: dict[str, tuple[Any, Any]] = {}
    page = PAGE.read_text(encoding="utf-8")
    titles = list(re.finditer(r"^##+ (.+)$", page, re.MULTILINE))
    for title, following in zip(titles, [*titles[1:], None], strict=True):
        end = following.start() if following else len(page)
        blocks = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL).finditer(page, title.end(), end)
        code = [compile("\n" * page.count("\n", 0, block.start(1)) + block[1], str(PAGE), "exec") for block in blocks]
        if title[0].startswith("### ") and code:
            original, static = code
            pairs[title[1]] = (original, static)
    return pairs


def forward_of(code: Any) -> Callable[..., Tensor]:
    helpers = {name: getattr(mod_models, name) for name in mod_models.__all__}
    names: dict[str, Any] = {"torch": torch, "F": F, "mark_selection": mark_selection, **helpers}
    exec(code, names)
    forward: Callable[..., Tensor] = names["forward"]
    return forward


def test_every_section_is_tested() -> None:
    assert sections().keys() == CASES.keys()


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module, Case]:
    """The two modules of a section, with the same weights."""
    case, made = CASES[request.param], []
    for code in sections()[request.param]:
        torch.manual_seed(0)
        made.append(type("Example", (Parts,), {"forward": forward_of(code)})(case.capacity).eval())
    return made[0], made[1], case


every_section = pytest.mark.parametrize("pair", CASES, indirect=True)


@every_section
def test_both_forms_compute_the_same(pair: tuple[nn.Module, nn.Module, Case]) -> None:
    original, static, case = pair
    for _ in range(10):
        inputs = case.inputs(case.batch)
        with torch.no_grad():
            torch.testing.assert_close(static(*inputs), original(*inputs), rtol=0, atol=1e-6)


@pytest.mark.fast(
    *(
        f"{name}-{name}"
        for name in (
            "Boolean masks", "k from data", "Numbers and conditions", "Prints and other side effects",
            "State that changes", "Masks that keep some results", "Attention that sees every token",
            "Top-k of the whole batch", "Tokens that change places",
        )
    )
)  # fmt: skip
@pytest.mark.parametrize(("pair", "section"), [(name, name) for name in CASES], indirect=["pair"])
def test_the_original_is_refused_or_has_another_site(pair: tuple[nn.Module, nn.Module, Case], section: str) -> None:
    original, _, case = pair
    examples = [case.inputs(2) for _ in range(2)]
    if case.original is not None:
        prove_static(original, examples, "mine")
        assert [site.k for site in captured(original, examples[0], "mine").sites] == case.original
        return
    message = f'See "{SECTION_OF_MESSAGE.get(section, section)}" in docs/models.md'
    with pytest.raises(CaptureError, match=f"^mine: no static graph because of {PAGE}:(.|\n)*{message}"):
        prove_static(original, examples, "mine")


@pytest.mark.fast("Top-k of the whole batch", "Indices of what is true")
@every_section
def test_the_static_form_has_its_site_and_computes_the_same_in_onnx_runtime(
    pair: tuple[nn.Module, nn.Module, Case],
) -> None:
    _, static, case = pair
    examples = [case.inputs(case.batch) for _ in range(2)]
    prove_static(static, examples, "mine")
    model, sites = portable(static, examples[0], ["y"])
    assert [site.k for site in sites] == [case.k]
    for example in examples:
        y, _ = run(model, {f"x{number}": tensor.numpy() for number, tensor in enumerate(example)})
        with torch.no_grad():
            np.testing.assert_allclose(y, static(*example).numpy(), rtol=0, atol=2e-6)


def test_tokens_that_want_a_slot_and_find_none_skip_the_block() -> None:
    """The first k tokens that want a slot get one."""
    static = forward_of(sections()["Indices of what is true"][1])
    module = type("Example", (Parts,), {"forward": static})(0.25).eval()
    nn.init.constant_(module.predictor.bias, 100.0)
    (x,) = plain(2)
    with torch.no_grad():
        y = module(x)
        expected = torch.cat([module.block(x[:, :4]) * module.router(x[:, :4]), x[:, 4:]], 1)
    torch.testing.assert_close(y, expected)
