"""Published implementations: what they compute, their sites, ONNX Runtime, and the whole pipeline."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import numpy as np
import published_originals
import pytest
import torch
from captured_graphs import portable
from layers import ImageAndText, Layer, SeenLayer, Text, Vision, ids
from published import PUBLISHED
from published_originals import ORIGINALS, original_of
from small_graphs import run
from torch import Tensor, nn

import mod_export
from mod_export.engines import ENGINES
from mod_export.errors import CaptureError
from mod_export.graph.capture import exported, prove_static
from mod_export.graph.rewrites import apply_rewrites
from mod_export.graph.sites import SiteRun, run_sites
from mod_export.graph.target import check_limits
from mod_export.types import Site

B, S = 2, 16
PAGE = Path(__file__).parents[3] / "docs/models.md"
MASKED = ("supermix", "skipgpt", "d_llm")
"""These are static as published, because they compute all tokens."""


def test_the_table_of_published_code_names_what_is_tested() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("\n## Published implementations\n")[2].partition("\n## ")[0]
    table = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    named = re.findall(r"\(`(\w+)`[;)]", table)
    assert sorted(named) == sorted(PUBLISHED)
    # The page has the sections to which the table refers.
    sections = set(re.findall(r"^### (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert {section.strip('"') for section in re.findall(r'"[A-Z][^"|]+"', table)} <= sections


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return PUBLISHED[name].make().eval()


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_static_form_computes_what_was_published(name: str) -> None:
    model = model_of(name)
    original = original_of(name, copy.deepcopy(model))
    for seed in range(10):
        inputs = PUBLISHED[name].inputs(B, S, seed)
        with torch.no_grad():
            torch.testing.assert_close(model(*inputs), original(*inputs), rtol=0, atol=2e-6)


@pytest.mark.fast("codedestructor", "mixture_ai", "praxis")
@pytest.mark.parametrize("name", sorted(ORIGINALS.keys() - set(MASKED)))
def test_what_was_published_is_refused(name: str) -> None:
    examples = [PUBLISHED[name].inputs(B, S, seed) for seed in range(2)]
    with pytest.raises(CaptureError, match=f"^mine: no static graph because of {published_originals.__file__}:"):
        prove_static(original_of(name, model_of(name)), examples, "mine")


@pytest.mark.fast(*(f"{name}-{S}" for name in ("recursions", "skipgpt", "epfml")))
@pytest.mark.parametrize("seq", [S, 32])
@pytest.mark.parametrize("name", PUBLISHED)
def test_sites_are_found_and_onnx_runtime_computes_the_same(name: str, seq: int) -> None:
    model, manner = model_of(name), PUBLISHED[name]
    examples = [manner.inputs(B, seq, seed) for seed in range(2)]
    prove_static(model, examples, name)
    graph, sites = portable(model, examples[0], ["y"])
    assert {site.name: site.k for site in sites} == manner.sites(seq)
    assert [str(value.name) for value in graph.graph.outputs] == ["y", *(f"routed_{site.name}" for site in sites)]
    limits = ENGINES["ort-cpu"].limits
    apply_rewrites(graph, limits, "float32")
    check_limits(graph, limits, "float32")
    for example in examples:
        y, *routed = run(graph, {f"x{number}": value.numpy() for number, value in enumerate(example)})
        with torch.no_grad():
            np.testing.assert_allclose(y, model(*example).numpy(), rtol=0, atol=2e-5)
        assert [value.shape[1] for value in routed] == [site.k for site in sites]


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_selected_is_seen_and_can_be_told(name: str) -> None:
    """The captured program equals the eager model bit for bit, also when its own selection is forced."""
    model, inputs = model_of(name), PUBLISHED[name].inputs(B, S, 0)
    program = exported(model, inputs, name)
    forced: dict[Site, Tensor] | None = None
    with torch.no_grad():
        expected = model(*inputs)
    for _ in range(2):
        run = SiteRun(S, forced)
        (y,) = run_sites(program, program.state_dict, inputs, run)
        assert torch.equal(y, expected), name
        forced = {site: choice.index_BK for site, choice in run.selections.items()}
    other = {site: (choice.index_BK + 1) % choice.score_BS.shape[1] for site, choice in run.selections.items()}
    (y,) = run_sites(program, program.state_dict, inputs, SiteRun(S, other))
    assert not torch.equal(y, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_whole_pipeline(name: str, tmp_path: Path) -> None:
    """Builds engines from the module; they are judged like those of our own models."""
    manner, model = PUBLISHED[name], model_of(name)
    if isinstance(model, Vision):
        baseline: nn.Module = Vision(*(SeenLayer() for _ in model.blocks))
    else:
        baseline = (Text if manner.inputs is ids else ImageAndText)(*(Layer() for _ in model.blocks))
    report = mod_export.build(
        model,
        inputs=manner.inputs,
        buckets=[(1, 16), (2, 32)],
        baseline=baseline.eval(),
        out=tmp_path / name,
        targets=["ort-cpu"],
    )
    assert report.parity
    assert all(row.passed for row in report.parity)
