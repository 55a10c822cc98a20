"""What holds for every kind of model: who is chosen by which rule, parts of blocks, exits, experts, in any mixture.

"Equal" is bit for bit here, as in test_routing_properties.py, which looks at top-k of whole blocks more closely.
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

from mod_export.export.routing_sites import Selection, SiteRun
from mod_models.checkpoint import Checkpoint
from mod_models.declarations import CHOICES, COMBINES, GATES, LEARNED_ROUTERS, PARTS, POSITIONS, SELECTIONS
from mod_models.routing import Decisions
from mod_models.selection import FIRST_COME, RANK
from mod_models.spec import ExpertsSpec, ModelSpec, RoutingSpec, Site
from mod_models.stream import Tokens
from mod_models.transformer import RoutedBlock, Transformer

few_examples = settings(max_examples=25)
some_examples = settings(max_examples=60)
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
    combines = [name for name in COMBINES if name != "ffn_gated" or part in ("block", "mlp")]
    return RoutingSpec(
        layers=layers, selection=selection, parts=part, noise_seed=draw(st.integers(0, 2)),
        predictor_hidden=0 if selection == "random" else 2,
        capacity=tuple(sorted(capacity, reverse=True) if exits else capacity),
        capacity_rule=draw(st.sampled_from(["ceil", "floor_min1"] if exits else ["ceil", "floor", "floor_min1"])),
        positions="original" if exits else draw(st.sampled_from(POSITIONS)), gate=draw(st.sampled_from(gates)),
        combine=draw(st.sampled_from(combines)), router=draw(st.sampled_from(LEARNED_ROUTERS)), router_hidden=3,
        router_input=draw(st.sampled_from(["raw", "normed"])),
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
        """The stream before the first layer, and after each one: of the model cut off there."""
        layers, found = self.model.layers, []
        # Cut off, the model has fewer sites; the others are forced in the same way.
        with torch.no_grad(), Observing(SiteRun(self.ids_BS.shape[1], forced)):
            for depth in range(len(layers) + 1):
                self.model.layers = layers[:depth]
                found.append(self.model.stream(self.ids_BS, self.lengths_B, Decisions()))
        self.model.layers = layers
        return found


def token_ids(seed: int, batch: int, seq: int) -> Tensor:
    """From a seed: to draw each id would leave a search little room for specs. Some texts have few different tokens."""
    return torch.randint(16 if seed % 3 else 3, (batch, seq), generator=torch.Generator().manual_seed(seed))


@st.composite
def examples(draw: st.DrawFn, of: st.SearchStrategy[ModelSpec] | None = None) -> Example:
    spec = draw(specs() if of is None else of)
    batch, seq, seed = draw(st.integers(1, 3)), draw(st.sampled_from([8, 1, 2, 5, 10])), draw(st.integers(0, 999))
    lengths_B = torch.tensor(draw(st.lists(st.integers(0, seq - 1), min_size=batch, max_size=batch)))
    model = lively_checkpoint(spec, seed).module()
    return Example(spec, model, token_ids(seed, batch, seq), seq - lengths_B)


def taken(routing: Selection, b: int) -> list[int]:
    positions: list[int] = routing.index_BK[b][routing.live_BK[b]].tolist()
    return positions


def assert_same_routing(one: dict[Site, Selection], other: dict[Site, Selection], rows: slice = slice(None)) -> None:
    assert list(one) == list(other)
    for site, routing in one.items():
        assert torch.equal(routing.index_BK[rows], other[site].index_BK[rows])
        assert torch.equal(routing.live_BK[rows], other[site].live_BK[rows])


@given(examples())
@some_examples
def test_each_place_takes_what_its_rule_says(example: Example) -> None:
    """Never more than k, from the scores of the tokens that were open to it: the k best, or the first k above 0."""
    _, decided = example.trace()
    k_by_layer = example.spec.k_by_layer(example.ids_BS.shape[1])
    assert list(decided) == [site for site, k in k_by_layer.items() if k > 0]
    for site, routing in decided.items():
        k = k_by_layer[site]
        assert routing.index_BK.shape == routing.live_BK.shape == (len(example.ids_BS), k)
        assert routing.index_BK.dtype == torch.int64
        assert routing.score_BS.dtype == torch.float32
        for b, length in enumerate(example.lengths_B.tolist()):
            score = routing.score_BS[b].tolist()
            candidates = routing.open_BS[b].nonzero().flatten().tolist()
            assert all(t < length for t in candidates)
            best = sorted(candidates, key=lambda t: (-score[t], t))[:k]
            first = [t for t in candidates if score[t] > 0][:k]
            assert taken(routing, b) == {RANK: sorted(best), FIRST_COME: first}[routing.rule]


@given(examples())
@some_examples
def test_surplus_places_come_last_and_are_marked(example: Example) -> None:
    """-1, or padding positions where a part of a block takes the top k of whole rows and the layer has no other."""
    _, decided = example.trace()
    routing = example.spec.routing
    for site, made in decided.items():
        by_rank = made.rule == RANK and isinstance(site, int)
        whole = by_rank and (routing is None or routing.selection != "exit" or site == example.spec.routed_layers[0])
        for b, length in enumerate(example.lengths_B.tolist()):
            n_live = int(made.live_BK[b].sum())
            assert made.live_BK[b].tolist() == [i < n_live for i in range(made.live_BK.shape[1])]
            surplus = made.index_BK[b, n_live:].tolist()
            if whole:
                assert surplus == list(range(length, length + len(surplus)))
            else:
                assert surplus == [-1] * len(surplus)


@given(examples(specs(parts=("block", "separate"))))
@some_examples
def test_who_passes_by_is_untouched(example: Example) -> None:
    """Not chosen, or found all places taken: the bits that came in come out."""
    _, decided = example.trace()
    streams = example.depths()
    for layer in example.spec.routed_layers:
        passed_BS = example.real_BS.clone()
        for site in (layer, f"{layer}.attention", f"{layer}.mlp"):
            for b in range(len(passed_BS)):
                passed_BS[b, taken(decided[site], b) if site in decided else []] = False
        assert torch.equal(streams[layer + 1][passed_BS], streams[layer][passed_BS])


@given(examples(routings(("exit",)).map(lambda routing: make_spec(routing=routing))), st.data())
@few_examples
def test_who_left_never_comes_back(example: Example, data: st.DataObject) -> None:
    """Nor is changed again, whoever is told to leave."""
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
                    here_BS[b, taken(decided[layer], b)] = True
            gone_BS = example.real_BS & ~here_BS
            assert torch.equal(streams[layer + 1][gone_BS], streams[layer][gone_BS])


@pytest.mark.parametrize("parts", ["attention", "mlp"])
@given(data=st.data())
@few_examples
def test_the_other_part_runs_on_every_token(parts: str, data: st.DataObject) -> None:
    """A token that is not chosen gets what the part that is not routed adds, and nothing else."""
    routing = data.draw(routings(tuple(name for name in SELECTIONS if name != "exit"), (parts,)))
    example = data.draw(examples(st.just(make_spec(routing=routing))))
    _, decided = example.trace()
    streams, seq = example.depths(), example.ids_BS.shape[1]
    for site, made in decided.items():
        block = example.model.layers[int(site)]
        assert isinstance(block, RoutedBlock)
        tokens = Tokens(
            streams[int(site)], example.real_BS, example.model.rope_cos[:seq], example.model.rope_sin[:seq], None, seq
        )
        with torch.no_grad():
            delta = block.attended(tokens, Decisions()) if parts == "mlp" else block.transformed(tokens, Decisions())
        for b, length in enumerate(example.lengths_B.tolist()):
            passed = [t for t in range(length) if t not in taken(made, b)]
            expected = streams[int(site)][b, passed] + delta[b, passed]
            assert torch.equal(streams[int(site) + 1][b, passed], expected)


@given(examples(), st.data())
@some_examples
def test_padding_is_inert(example: Example, data: st.DataObject) -> None:
    logits_BSV, decided = example.trace()
    real_BS = example.real_BS
    other_BS = token_ids(data.draw(st.integers(0, 999)), *real_BS.shape)
    changed, again = example.trace(torch.where(real_BS, example.ids_BS, other_BS))
    assert torch.equal(logits_BSV[real_BS], changed[real_BS])
    assert_same_routing(decided, again)


@given(examples(), st.data())
@some_examples
def test_rows_are_independent(example: Example, data: st.DataObject) -> None:
    """Experts too: their places are counted for each row by itself."""
    batch, seq = example.ids_BS.shape
    ids_BS = token_ids(data.draw(st.integers(0, 999)), batch, seq)
    lengths_B = torch.tensor(data.draw(st.lists(st.integers(1, seq), min_size=batch, max_size=batch)))
    kept = data.draw(st.integers(0, batch - 1))
    ids_BS[kept], lengths_B[kept] = example.ids_BS[kept], example.lengths_B[kept]
    (before, decided), (after, again) = example.trace(), example.trace(ids_BS, lengths_B)
    length = int(example.lengths_B[kept])
    assert torch.equal(before[kept, :length], after[kept, :length])
    assert_same_routing(decided, again, slice(kept, kept + 1))


@given(examples(specs(selections=CAUSAL, choices=("token",))), st.data())
@some_examples
def test_causal_where_nothing_looks_ahead(example: Example, data: st.DataObject) -> None:
    """Other tokens after t, or none at all, change no decision and no logit up to t."""
    assert example.spec.looks_ahead == ()
    batch, seq = example.ids_BS.shape
    t = data.draw(st.integers(0, seq - 1))
    later_BS = token_ids(data.draw(st.integers(0, 999)), batch, seq)
    ids_BS = torch.where(torch.arange(seq) <= t, example.ids_BS, later_BS)
    (before, decided), (after, again) = example.trace(), example.trace(ids_BS)
    _, cut = example.trace(ids_BS, example.lengths_B.clamp(max=t + 1))
    assert list(decided) == list(again) == list(cut)
    for b, length in enumerate(example.lengths_B.tolist()):
        known = min(t + 1, length)
        assert torch.equal(before[b, :known], after[b, :known])
        for site in decided:
            early = [p for p in taken(decided[site], b) if p < known]
            assert early == [p for p in taken(again[site], b) if p < known] == taken(cut[site], b)


NOT_CAUSAL = {
    "routing.selection=topk": make_spec(),
    "routing.selection=random": make_spec(selection="random"),
    "routing.selection=exit": make_spec(selection="exit", capacity_rule="ceil"),
    "routing.gate=softmax_selected": make_spec(selection="threshold", gate="softmax_selected", capacity=1.0),
    "experts.choice=expert": make_spec(routing=None, experts=experts(choice="expert")),
}


@pytest.mark.parametrize("reason", NOT_CAUSAL)
def test_what_looks_ahead_does(reason: str) -> None:
    """For each thing that `looks_ahead` names there is a later token that changes an earlier one's logits."""
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
def test_decisions_can_be_forced(example: Example, data: st.DataObject) -> None:
    """A run's own decisions, all or some of them, give that run again."""
    logits_BSV, decided = example.trace()
    some = data.draw(st.sets(st.sampled_from(list(decided)))) if decided else set()
    for sites in (set(decided), some):
        again, forced = example.trace(forced={site: decided[site].index_BK for site in sites})
        assert torch.equal(logits_BSV[example.real_BS], again[example.real_BS])
        for site, made in decided.items():
            assert [taken(made, b) for b in range(len(again))] == [taken(forced[site], b) for b in range(len(again))]


@given(examples(), st.data())
@some_examples
def test_other_decisions_are_obeyed(example: Example, data: st.DataObject) -> None:
    """Whoever is forced on a place runs there if it is open to it, in order, and nobody else does."""
    batch, seq = example.ids_BS.shape
    forced = {}
    for site, k in example.spec.k_by_layer(seq).items():
        positions = st.lists(st.integers(0, seq - 1), max_size=k, unique=True)
        wanted = [sorted(data.draw(positions)) for _ in range(batch)]
        forced[site] = torch.tensor([[*row, *[-1] * (k - len(row))] for row in wanted], dtype=torch.int64)
    logits_BSV, decided = example.trace(forced=forced)
    assert bool(torch.isfinite(logits_BSV[example.real_BS]).all())
    for site, made in decided.items():
        for b in range(batch):
            assert taken(made, b) == [t for t in forced[site][b].tolist() if t >= 0 and made.open_BS[b, t]]


@pytest.mark.parametrize("name", [name for name, spec in VARIANTS.items() if spec.routing or spec.experts])
def test_silent_routers_choose_the_earlier(name: str) -> None:
    """Equal scores: the first tokens, and the experts with the lowest numbers; 0 is not above a threshold."""
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
    selection = spec.routing.selection if spec.routing else "none"
    for site, made in decided.items():
        for b in range(2):
            candidates = made.open_BS[b].nonzero().flatten().tolist()
            first = candidates[: made.index_BK.shape[1]]
            if ".expert" in str(site) and spec.experts is not None and spec.experts.choice == "token":
                expected = first if int(str(site).partition(".expert")[2]) < spec.experts.top_k else []
            elif ".expert" not in str(site) and selection in CAUSAL:
                expected = []
            elif ".expert" not in str(site) and spec.routing is not None and spec.routing.draws:
                continue
            else:
                expected = first
            assert taken(made, b) == expected, site


@given(examples(mixtures(("token",)).map(lambda mixture: make_spec(routing=None, experts=mixture))))
@few_examples
def test_a_token_runs_in_no_more_experts_than_it_may(example: Example) -> None:
    mixture = example.spec.experts
    assert mixture is not None
    _, decided = example.trace()
    for layer in example.spec.expert_layers:
        sites = [made for site, made in decided.items() if str(site).startswith(f"{layer}.expert")]
        for b in range(len(example.ids_BS)):
            runs = [t for made in sites for t in taken(made, b)]
            assert all(runs.count(t) <= mixture.top_k for t in runs)


@given(examples(routings(("predictor",)).map(lambda routing: make_spec(routing=routing))))
@few_examples
def test_a_predictor_decides_only_when_it_is_trained(example: Example) -> None:
    """In training mode it is the top k of the router, the same model with `topk`; in eval mode, what is above 0."""
    assert example.spec.routing is not None
    ranked = dataclasses.replace(example.spec, routing=dataclasses.replace(example.spec.routing, selection="topk"))
    model = Transformer(ranked)
    model.load_state_dict(example.model.state_dict())
    with torch.no_grad():
        expected, by_rank = observed(model.eval(), example.ids_BS, example.lengths_B)
        example.model.train()
        found, decided = example.trace()
        example.model.eval()
    assert torch.equal(found[example.real_BS], expected[example.real_BS])
    assert_same_routing(decided, by_rank)
    _, alone = example.trace()
    assert {made.rule for made in alone.values()} <= {FIRST_COME}
