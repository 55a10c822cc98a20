"""Properties of every kind of model, for any sizes, declarations and input. "Equal" means bit for bit here: the same
operations on the same numbers, in tensors of the same shape.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observing import Observing, observed
from tiny_models import lively_checkpoint, make_spec
from torch import Tensor
from variants import EVERY, VARIANTS, experts

from mod_export.graph.sites import Selection, SiteRun
from mod_models.checkpoint import Checkpoint
from mod_models.declarations import CHOICES, COMBINES, FFN_GATED, GATES, LEARNED_ROUTERS, PARTS, POSITIONS, SELECTIONS
from mod_models.routing import Decisions
from mod_models.selection import FIRST_COME, RANK, Tokens
from mod_models.spec import ExpertsSpec, ModelSpec, RoutingSpec, Site, is_expert
from mod_models.transformer import Transformer

few_examples = settings(max_examples=10)
some_examples = settings(max_examples=22)
CAUSAL = ("threshold", "predictor")


@st.composite
def mixtures(draw: st.DrawFn, choices: tuple[str, ...] = CHOICES) -> ExpertsSpec:
    choice, n_experts, noop = draw(st.sampled_from(choices)), draw(st.integers(2, 4)), draw(st.integers(0, 2))
    top_k = draw(st.integers(1, min(3, n_experts + noop - 1))) if choice == "token" else 1
    layers = draw(st.sampled_from([EVERY, (0,), (1, 2)]))
    factor = draw(st.sampled_from([0.2, 0.7, 1.0, 1.25, 4.0]))
    return ExpertsSpec(
        layers=layers, n_experts=n_experts, choice=choice, top_k=top_k, capacity_factor=factor, noop_experts=noop
    )


@st.composite
def routings(draw: st.DrawFn, selections: tuple[str, ...] = SELECTIONS, parts: tuple[str, ...] = PARTS) -> RoutingSpec:
    selection = draw(st.sampled_from(selections))
    exits = selection == "exit"
    part = "block" if exits else draw(st.sampled_from(parts))
    layers = draw(st.sets(st.integers(0, 2), min_size=1).map(lambda chosen: tuple(sorted(chosen))))
    capacity = draw(st.lists(st.floats(0.05, 1), min_size=len(layers), max_size=len(layers)))
    gates = [gate for gate in GATES if gate != "softmax_selected" or selection not in CAUSAL]
    combines = [name for name in COMBINES if name not in FFN_GATED or part in ("block", "mlp")]
    return RoutingSpec(
        layers=layers, selection=selection, parts=part, noise_seed=draw(st.integers(0, 2)),
        predictor_hidden=0 if selection == "random" else 2,
        capacity=tuple(sorted(capacity, reverse=True) if exits else capacity),
        capacity_rule=draw(st.sampled_from(["ceil", "floor_min1"] if exits else ["ceil", "floor", "floor_min1"])),
        positions="original" if exits else draw(st.sampled_from(POSITIONS)), gate=draw(st.sampled_from(gates)),
        combine=draw(st.sampled_from(combines)), router=draw(st.sampled_from(LEARNED_ROUTERS)), router_hidden=3,
        router_input=draw(st.sampled_from(["raw", "normed"])), always_first=draw(st.sampled_from([0, 0, 2])),
    )  # fmt: skip


@st.composite
def specs(
    draw: st.DrawFn, selections: tuple[str, ...] = SELECTIONS, choices: tuple[str, ...] = CHOICES,
    parts: tuple[str, ...] = PARTS,
) -> ModelSpec:  # fmt: skip
    routing, mixture = routings(selections, parts), mixtures(choices)
    pairs = [st.tuples(routing, st.none()), st.tuples(st.none(), mixture), st.tuples(routing, mixture)]
    declared, with_experts = draw(st.one_of(pairs))
    return make_spec(routing=declared, experts=with_experts)


@dataclasses.dataclass
class Example:
    spec: ModelSpec
    model: Transformer
    ids_BS: Tensor
    lengths_B: Tensor

    @property
    def real_BS(self) -> Tensor:
        return torch.arange(self.ids_BS.shape[1]) < self.lengths_B[:, None]

    def trace(
        self, ids_BS: Tensor | None = None, lengths_B: Tensor | None = None, forced: dict[Site, Tensor] | None = None
    ) -> tuple[Tensor, dict[Site, Selection]]:
        ids_BS = self.ids_BS if ids_BS is None else ids_BS
        with torch.no_grad():
            return observed(self.model, ids_BS, self.lengths_B if lengths_B is None else lengths_B, forced)

    def depths(self, forced: dict[Site, Tensor] | None = None) -> list[Tensor]:
        """Stream before the first layer and after each one, from the model cut off there."""
        layers, found = self.model.layers, []
        # The model that is cut off has fewer sites; they are forced in the same way.
        with torch.no_grad(), Observing(SiteRun(self.ids_BS.shape[1], forced)):
            for depth in range(len(layers) + 1):
                self.model.layers = layers[:depth]
                found.append(self.model.stream(self.ids_BS, self.lengths_B, Decisions()))
        self.model.layers = layers
        return found


def token_ids(seed: int, batch: int, seq: int) -> Tensor:
    """Ids from a seed: drawing them would leave the search little room for specs. Some texts have few different ids."""
    return torch.randint(16 if seed % 3 else 3, (batch, seq), generator=torch.Generator().manual_seed(seed))


@st.composite
def examples(draw: st.DrawFn, of: st.SearchStrategy[ModelSpec] | None = None) -> Example:
    spec = draw(specs() if of is None else of)
    batch, seq, seed = draw(st.integers(1, 3)), draw(st.sampled_from([8, 1, 2, 5, 10])), draw(st.integers(0, 999))
    lengths_B = torch.tensor(draw(st.lists(st.integers(0, seq - 1), min_size=batch, max_size=batch)))
    model = lively_checkpoint(spec, seed).module()
    return Example(spec, model, token_ids(seed, batch, seq), seq - lengths_B)


def selected(routing: Selection, b: int) -> list[int]:
    positions: list[int] = routing.index_BK[b][routing.live_BK[b]].tolist()
    return positions


@given(examples())
@some_examples
def test_each_site_selects_what_its_rule_says(example: Example) -> None:
    """At most k tokens are selected, from the scores of the tokens available to the site: the k best, or the first k
    above 0. Empty slots come last. They are -1, or padding positions if a site selects the top k of whole rows.
    """
    _, decided = example.trace()
    k_by_layer, routing = example.spec.k_by_layer(example.ids_BS.shape[1]), example.spec.routing
    assert list(decided) == [site for site, k in k_by_layer.items() if k > 0]
    for site, selection in decided.items():
        k = k_by_layer[site]
        assert selection.index_BK.shape == selection.live_BK.shape == (len(example.ids_BS), k)
        assert (selection.index_BK.dtype, selection.score_BS.dtype) == (torch.int64, torch.float32)
        by_rank = selection.rule == RANK and isinstance(site, int)
        whole = by_rank and (routing is None or routing.selection != "exit" or site == example.spec.routed_layers[0])
        for b, length in enumerate(example.lengths_B.tolist()):
            score = selection.score_BS[b].tolist()
            candidates = selection.open_BS[b].nonzero().flatten().tolist()
            assert all(t < length for t in candidates)
            best = sorted(candidates, key=lambda t: (-score[t], t))[:k]
            first = [t for t in candidates if score[t] > 0][:k]
            expected = {RANK: sorted(best), FIRST_COME: first}[selection.rule]
            assert selected(selection, b) == expected
            n_live = len(expected)
            assert selection.live_BK[b].tolist() == [i < n_live for i in range(k)]
            empty = range(length, length + k - n_live) if whole else [-1] * (k - n_live)
            assert selection.index_BK[b, n_live:].tolist() == list(empty)


@given(examples(specs(parts=("block", "separate"))))
@some_examples
def test_skipped_tokens_are_untouched(example: Example) -> None:
    """The values of tokens that were not selected, or overflowed, stay the same bit for bit."""
    _, decided = example.trace()
    streams = example.depths()
    for layer in example.spec.routed_layers:
        skipped_BS = example.real_BS.clone()
        for site in (layer, f"{layer}.attention", f"{layer}.mlp"):
            for b in range(len(skipped_BS)):
                skipped_BS[b, selected(decided[site], b) if site in decided else []] = False
        assert torch.equal(streams[layer + 1][skipped_BS], streams[layer][skipped_BS])


@given(examples(routings(("exit",)).map(lambda routing: make_spec(routing=routing))), st.data())
@few_examples
def test_tokens_that_exit_never_come_back(example: Example, data: st.DataObject) -> None:
    """They are never changed again, whichever tokens are told to exit."""
    k_by_layer = example.spec.k_by_layer(example.ids_BS.shape[1])
    sites = [site for site in k_by_layer if site in example.spec.routed_layers]
    emptied = {site: torch.full((len(example.ids_BS), k_by_layer[site]), -1) for site in sites}
    for site in sites:
        emptied[site][:, 0] = data.draw(st.integers(-1, example.ids_BS.shape[1] - 1))
    for forced in (None, emptied):
        _, decided = example.trace(forced=forced)
        streams, here_BS = example.depths(forced), example.real_BS
        for layer in range(example.spec.n_layers):
            if layer in sites:
                assert torch.equal(decided[layer].open_BS, here_BS)
                here_BS = torch.zeros_like(here_BS)
                for b in range(len(here_BS)):
                    here_BS[b, selected(decided[layer], b)] = True
            gone_BS = example.real_BS & ~here_BS
            assert torch.equal(streams[layer + 1][gone_BS], streams[layer][gone_BS])


@pytest.mark.parametrize("parts", ["attention", "mlp"])
@given(data=st.data())
@few_examples
def test_the_other_part_runs_on_every_token(parts: str, data: st.DataObject) -> None:
    """A skipped token gets only the update of the part that is not routed."""
    routing = data.draw(routings(tuple(name for name in SELECTIONS if name != "exit"), (parts,)))
    example = data.draw(examples(st.just(make_spec(routing=routing))))
    _, decided = example.trace()
    streams, seq = example.depths(), example.ids_BS.shape[1]
    for site, selection in decided.items():
        block = example.model.layers[int(site)]
        tokens = Tokens(
            streams[int(site)], example.real_BS, example.model.rope_cos[:seq], example.model.rope_sin[:seq], None, seq
        )
        with torch.no_grad():
            delta = block.attended(tokens, Decisions()) if parts == "mlp" else block.transformed(tokens, Decisions())
        for b, length in enumerate(example.lengths_B.tolist()):
            skipped = [t for t in range(length) if t not in selected(selection, b)]
            expected = streams[int(site)][b, skipped] + delta[b, skipped]
            assert torch.equal(streams[int(site) + 1][b, skipped], expected)


@given(examples(), st.data())
@some_examples
def test_other_rows_and_padding_change_nothing(example: Example, data: st.DataObject) -> None:
    """Rows are independent, even in experts: their slots are counted for each row separately."""
    batch, seq = example.ids_BS.shape
    kept = data.draw(st.integers(0, batch - 1))
    length = int(example.lengths_B[kept])
    ids_BS = token_ids(data.draw(st.integers(0, 999)), batch, seq)
    lengths_B = torch.tensor(data.draw(st.lists(st.integers(1, seq), min_size=batch, max_size=batch)))
    ids_BS[kept, :length], lengths_B[kept] = example.ids_BS[kept, :length], length
    (before, decided), (after, again) = example.trace(), example.trace(ids_BS, lengths_B)
    assert torch.equal(before[kept, :length], after[kept, :length])
    assert list(decided) == list(again)
    for site, selection in decided.items():
        assert torch.equal(selection.index_BK[kept], again[site].index_BK[kept])
        assert torch.equal(selection.live_BK[kept], again[site].live_BK[kept])


@given(examples(specs(selections=CAUSAL, choices=("token",))), st.data())
@some_examples
def test_causal_where_nothing_looks_ahead(example: Example, data: st.DataObject) -> None:
    """Replacing or removing the tokens after t changes no decision and no logit up to t."""
    assert example.spec.looks_ahead == ()
    batch, seq = example.ids_BS.shape
    t = data.draw(st.integers(0, seq - 1))
    later_BS = token_ids(data.draw(st.integers(0, 999)), batch, seq)
    ids_BS = torch.where(torch.arange(seq) <= t, example.ids_BS, later_BS)
    (before, decided), (after, again) = example.trace(), example.trace(ids_BS)
    _, cut = example.trace(ids_BS, example.lengths_B.clamp(max=t + 1))
    assert list(decided) == list(again) == list(cut)
    for b, length in enumerate(example.lengths_B.tolist()):
        unchanged = min(t + 1, length)
        assert torch.equal(before[b, :unchanged], after[b, :unchanged])
        for site in decided:
            early = [p for p in selected(decided[site], b) if p < unchanged]
            assert early == [p for p in selected(again[site], b) if p < unchanged] == selected(cut[site], b)


NOT_CAUSAL = {
    "routing.selection=topk": make_spec(),
    "routing.selection=random": make_spec(selection="random"),
    "routing.selection=exit": make_spec(selection="exit", capacity_rule="ceil"),
    "routing.gate=softmax_selected": make_spec(selection="threshold", gate="softmax_selected", capacity=1.0),
    "experts.choice=expert": make_spec(routing=None, experts=experts(choice="expert")),
}


@pytest.mark.parametrize("reason", NOT_CAUSAL)
def test_what_looks_ahead_does(reason: str) -> None:
    """For each item of `looks_ahead`, some later token changes an earlier token's logits."""
    spec = NOT_CAUSAL[reason]
    assert spec.looks_ahead == (reason,)
    model = lively_checkpoint(spec).module()
    ids_BS = torch.tensor([[3, 1, 4, 15, 9, 2, 6, 5]])
    changed = []
    with torch.no_grad():
        for last in range(16):
            logits_BSV, _ = observed(model, torch.cat([ids_BS[:, :-1], torch.tensor([[last]])], 1), torch.tensor([8]))
            changed.append(logits_BSV[0, :7])
    assert max((other - changed[0]).abs().max() for other in changed) > 0.01


@given(examples(), st.data())
@some_examples
def test_other_decisions_are_obeyed(example: Example, data: st.DataObject) -> None:
    """A token that is forced into a slot runs there if it is available, in order, and no other token runs."""
    batch, seq = example.ids_BS.shape
    forced = {}
    for site, k in example.spec.k_by_layer(seq).items():
        positions = st.lists(st.integers(0, seq - 1), max_size=k, unique=True)
        wanted = [sorted(data.draw(positions)) for _ in range(batch)]
        forced[site] = torch.tensor([[*row, *[-1] * (k - len(row))] for row in wanted], dtype=torch.int64)
    logits_BSV, decided = example.trace(forced=forced)
    assert bool(torch.isfinite(logits_BSV[example.real_BS]).all())
    for site, selection in decided.items():
        for b in range(batch):
            assert selected(selection, b) == [t for t in forced[site][b].tolist() if t >= 0 and selection.open_BS[b, t]]


@pytest.mark.parametrize("name", [name for name, spec in VARIANTS.items() if spec.routing or spec.experts])
def test_silent_routers_choose_the_earlier(name: str) -> None:
    """Equal scores select the first tokens and the experts with the lowest numbers; 0 is not above a threshold."""
    spec = VARIANTS[name]
    decides = ("router.", "predictor.")
    silent = {
        weight: torch.zeros_like(tensor) if any(part in weight for part in decides) else tensor
        for weight, tensor in lively_checkpoint(spec).weights.items()
    }
    with torch.no_grad():
        _, decided = observed(
            Checkpoint(spec=spec, weights=silent).module(), torch.randint(16, (2, 8)), torch.tensor([8, 3])
        )
    for site, selection in decided.items():
        expert = int(str(site).partition(".expert")[2]) if is_expert(site) else None
        if expert is None and spec.routing.draws:
            continue
        if expert is None:
            chooses = spec.routing.selection not in CAUSAL
        else:
            chooses = spec.experts.choice == "expert" or expert < spec.experts.top_k
        always = 0 if expert is not None else spec.routing.always_first
        for b in range(2):
            first = selection.open_BS[b].nonzero().flatten().tolist()[: selection.index_BK.shape[1]]
            assert selected(selection, b) == (first if chooses else [t for t in first if t < always]), site


@given(examples(routings(("topk",), ("block",)).map(lambda routing: make_spec(routing=routing))), st.data())
@some_examples
def test_causal_among_the_selected(example: Example, data: st.DataObject) -> None:
    """A selected token changes itself and later selected tokens; a skipped one changes no other. This is one block
    whose stream comes from elsewhere.
    """
    layer, seq = example.spec.routed_layers[0], example.ids_BS.shape[1]
    block, k = example.model.layers[layer], max(1, example.spec.k_of_layer(seq)[layer])
    x_BTD = torch.randn(*example.ids_BS.shape, 8, generator=torch.Generator().manual_seed(0))
    tables = example.model.rope_cos[:seq], example.model.rope_sin[:seq]

    def run(x_BTD: Tensor, forced: dict[Site, Tensor]) -> tuple[Tensor, Selection]:
        before, sites = x_BTD.clone(), SiteRun(seq, forced)
        with torch.no_grad(), Observing(sites):
            y_BTD = block(Tokens(x_BTD, example.real_BS, *tables, None, seq), Decisions(), k)
        assert torch.equal(x_BTD, before)
        return y_BTD, sites.selections[layer]

    y_BTD, selection = run(x_BTD, {})
    b = data.draw(st.integers(0, len(x_BTD) - 1))
    t = data.draw(st.integers(0, int(example.lengths_B[b]) - 1))
    other_BTD = x_BTD.clone()
    other_BTD[b, t] += 1.0
    changed, _ = run(other_BTD, {layer: selection.index_BK})
    differs = (changed != y_BTD).any(-1)
    among = selected(selection, b)
    allowed = torch.zeros_like(differs)
    # A gate that depends on all scores changes every selected token.
    weighed = example.spec.routing is not None and example.spec.routing.gate == "softmax_selected"
    allowed[b, [s for s in among if weighed or s >= t] if t in among else [t]] = True
    assert not bool(differs[~allowed].any())


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"combine": "replace_ungated"}, 0.0),
        ({"combine": "ffn_gated", "gate": "ones"}, 0.0),
        ({"combine": "replace", "gate": "ones"}, 0.0),
        ({"combine": "paper", "gate": "ones"}, 1e-4),  # x + (A + M); the dense block has (x + A) + M
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_a_slot_for_every_token_is_the_dense_block(changes: dict[str, str], tolerance: float) -> None:
    """With k = S and no weight, the model equals the dense baseline."""
    checkpoint = lively_checkpoint(make_spec(layers=(0, 1, 2), capacity=1.0, **changes))
    for seq, lengths in ((8, [8, 3]), (1, [1]), (5, [2])):
        ids_BS, lengths_B = token_ids(seq, len(lengths), seq), torch.tensor(lengths)
        real_BS = torch.arange(seq) < lengths_B[:, None]
        with torch.no_grad():
            routed_BSV, _ = observed(checkpoint.module(), ids_BS, lengths_B)
            dense_BSV, _ = observed(checkpoint.dense().module(), ids_BS, lengths_B)
        torch.testing.assert_close(routed_BSV[real_BS], dense_BSV[real_BS], rtol=0, atol=tolerance)
