"""Prompts of which few tokens run: a routed layer computes few slots, and all results stay the same."""

from __future__ import annotations

import pytest
import torch
from generating import GENERATING, WINDOW, empty_cache, generating_model, texts
from test_decoding import assert_split
from torch import Tensor

from mod_export.model.transformer import GeneratingTransformer
from mod_models.cache import prefill_outputs
from mod_models.checkpoint import Checkpoint
from mod_models.generation_spec import for_generation
from mod_models.routing import Decisions
from mod_models.spec import ModelSpec, RoutingSpec, layer_of
from mod_models.step import Prefill, narrow_slots
from mod_models.transformer import RoutedBlock, Transformer

KINDS = (
    "predictor", "routed apart by predictors", "attention routed", "MLP routed", "compact positions", "FFN gated",
    "everybody may", "biases", "keys and values kept", "keys and values kept, routed apart",
    "keys and values kept, adapter", "skipped have a bottleneck adapter", "skipped are scaled",
)  # fmt: skip
"""Names in GENERATING: each part of a block that decides for itself, and each form of positions and weights."""
NARROW = 3


def prefill_of(model: Transformer, narrow: int) -> Prefill:
    with torch.device("meta"):
        prefill = Prefill(model.spec, WINDOW, dict.fromkeys(model.spec.routed_layers, narrow))
    return prefill.sharing(model)


def read(prefill: Prefill, ids_BS: Tensor, lengths_B: Tensor) -> tuple[tuple[Tensor, ...], Decisions]:
    decisions = Decisions()
    cache = empty_cache(prefill.spec, len(ids_BS), WINDOW)
    with torch.no_grad():
        return prefill.read(ids_BS, lengths_B, torch.zeros_like(lengths_B), tuple(cache.values()), decisions), decisions


def slots_in_use(output: str, decisions: Decisions, value: Tensor, *, kept: bool) -> Tensor:
    """1 where a row of keys or values is that of a token; others are arbitrary numbers. With `kept`, every token has
    one.
    """
    part, _, layer = output.rpartition("_")
    sites = [
        site
        for site in (layer, f"{layer}.attention")
        if part in ("keys_rows", "values_rows") and site in map(str, decisions.made)
    ]
    if not sites or kept:
        return torch.ones_like(value)
    live_BK = next(selection.live_BK for site, selection in decisions.made.items() if str(site) == sites[0])
    return live_BK[:, None, :, None]


@pytest.mark.parametrize("name", KINDS)
def test_every_number_of_slots_gives_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of every length, one alone and three together; the row that runs most tokens decides for all."""
    model, ids_BS = generating_model(name), texts(3)
    few, every = prefill_of(model, NARROW), prefill_of(model, 0)
    routing = few.spec.routing
    kept = routing is not None and (routing.skipped_keys_values == "kept" or routing.parts == "mlp")
    computed: list[int] = []
    run = RoutedBlock.run
    monkeypatch.setattr(
        RoutedBlock,
        "run",
        lambda self, inner, *rest: (computed.append(inner.x_BTD.shape[1]), run(self, inner, *rest))[1],
    )
    widths = set()
    for length in range(1, WINDOW + 1):
        for rows in (1, 3) if length % 3 else (1,):
            lengths_B = torch.tensor([length, max(1, length - 4), max(1, length // 2)][:rows])
            computed.clear()
            found, decisions = read(few, ids_BS[:rows, :length], lengths_B)
            slots = [(int(left.live_BK.sum(1).max()), left.live_BK.shape[1]) for left in decisions.made.values()]
            sites_of_last = [site for site in decisions.made if layer_of(site) == few.spec.n_layers - 1]
            # The last layer computes the last token only.
            widths_expected = [NARROW if ran <= NARROW < k else k for ran, k in slots]
            if sites_of_last:
                widths_expected[-1] = 1
            assert computed == widths_expected
            widths |= {NARROW if ran <= NARROW < k else "all" for ran, k in slots if k > NARROW}
            expected, others = read(every, ids_BS[:rows, :length], lengths_B)
            assert list(decisions.made) == list(others.made)
            for (_, left), right in zip(decisions.made.items(), others.made.values(), strict=True):
                assert torch.equal(left.position_BK, right.position_BK)
                assert torch.equal(left.live_BK, right.live_BK)
            for output, left, right in zip(prefill_outputs(few.spec), found, expected, strict=True):
                used = slots_in_use(output, decisions, left, kept=kept)
                torch.testing.assert_close(left * used, right * used, rtol=0, atol=1e-9)
    assert widths == {NARROW, "all"}


@pytest.mark.parametrize("name", KINDS)
def test_steps_continue_what_few_slots_have_read(name: str) -> None:
    """Rows of one prompt run different numbers of tokens."""
    for split in (4, 7, 11):
        assert_split(generating_model(name), texts(2), split, WINDOW, NARROW)


def windows(capacity: float | tuple[float, ...], window: int = 1024, **routing: object) -> ModelSpec:
    """Spec for a window, of four layers, two of which are routed."""
    sizes = {"vocab_size": 16, "d_model": 8, "n_layers": 4, "n_heads": 2, "n_kv_heads": 1, "d_head": 4, "d_ff": 12}
    options = {"layers": (0, 2), "capacity": capacity, "selection": "threshold", **routing}
    declared = RoutingSpec(**options)  # type: ignore[arg-type]
    return for_generation(ModelSpec(**sizes, max_positions=1024, routing=declared), window)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capacity", "seq", "slots"),
    [
        (0.125, 32, 6), (0.125, 128, 24), (0.125, 256, 48), (0.125, 512, 96), (0.125, 1024, 0), (0.25, 128, 48),
        (0.5, 128, 96), (1.0, 128, 96),
    ],
)  # fmt: skip
def test_slots_of_a_short_prompt(capacity: float, seq: int, slots: int) -> None:
    """They are 1.5 times the share of the prompt, and at most three quarters of the prompt."""
    assert narrow_slots(windows(capacity), seq, 1024) == ({0: slots, 2: slots} if slots else {})


def test_each_layer_by_its_own_capacity() -> None:
    assert narrow_slots(windows((0.125, 0.25)), 300, 1024) == {0: 57, 2: 113}


def test_the_last_layer_computes_one_token() -> None:
    """It has no narrow form, unless its attention is routed apart from its MLP."""
    last = (0, 3)
    assert narrow_slots(windows(0.125, layers=last), 128, 1024) == {0: 24}
    assert narrow_slots(windows(0.125, layers=last, parts="separate"), 128, 1024) == {0: 24, 3: 24}


def test_layers_with_experts_compute_all_of_their_slots() -> None:
    spec = for_generation(GENERATING["experts in routed MLPs"], WINDOW)
    assert spec.routed_layers == (0, 2)
    assert spec.expert_layers == (1, 2)
    assert list(narrow_slots(spec, 6, WINDOW)) == [0]


@pytest.mark.parametrize(("name", "seq"), [("predictor", 6), ("dense", 6), ("predictor", WINDOW)])
def test_a_source_says_whether_it_has_conditions(name: str, seq: int) -> None:
    source = GeneratingTransformer(Checkpoint(spec=GENERATING[name], weights={}), WINDOW).prefill(1, seq, WINDOW)
    assert source.conditions == (name == "predictor" and seq < WINDOW)
