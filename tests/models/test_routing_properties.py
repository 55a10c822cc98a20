"""What holds for every routed model, whatever its sizes, its declarations and its input.

"Equal" is bit for bit here: the same operations on the same numbers, in tensors of the same shape.
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from observing import Observing, observed
from tiny_models import lively_checkpoint, make_spec
from torch import Tensor

from mod_export.export.routing_sites import Selection, SiteRun
from mod_models.checkpoint import Checkpoint
from mod_models.declarations import COMBINES, GATES, LEARNED_ROUTERS, POSITIONS, ROUTER_INPUTS
from mod_models.routing import Decisions
from mod_models.selection import select_topk
from mod_models.spec import CAPACITY_RULES, ModelSpec, Site
from mod_models.stream import Tokens
from mod_models.transformer import RoutedBlock, Transformer

SCORES = st.sampled_from([float("-inf"), -2.0, -1.0, -0.0, 0.0, 1.0, 1.0000001, 3e38, float("inf")])
few_examples = settings(max_examples=20)
some_examples = settings(max_examples=50)
many_examples = settings(max_examples=300)


@st.composite
def scores(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Scores with many ties and every extreme, lengths, and k."""
    batch, seq = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    score_BS = torch.tensor(
        draw(st.lists(st.lists(SCORES, min_size=seq, max_size=seq), min_size=batch, max_size=batch))
    )
    lengths_B = torch.tensor(draw(st.lists(st.integers(0, seq), min_size=batch, max_size=batch)))
    return score_BS, lengths_B, draw(st.integers(1, seq))


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    rule = draw(st.sampled_from(sorted(CAPACITY_RULES)))
    shares = st.floats(0.05, 1) if rule != "absolute" else st.integers(1, 9)
    layers = draw(st.sets(st.integers(0, 2), min_size=1).map(lambda chosen: tuple(sorted(chosen))))
    capacity = draw(st.one_of(shares, st.lists(shares, min_size=len(layers), max_size=len(layers)).map(tuple)))
    return make_spec(
        layers=layers, capacity_rule=rule, capacity=capacity, n_kv_heads=draw(st.sampled_from([1, 2, 4])),
        tie_embeddings=draw(st.booleans()), router=draw(st.sampled_from(LEARNED_ROUTERS)),
        router_input=draw(st.sampled_from(ROUTER_INPUTS)), gate=draw(st.sampled_from(GATES)),
        combine=draw(st.sampled_from(COMBINES)), positions=draw(st.sampled_from(POSITIONS)),
    )  # fmt: skip


@dataclasses.dataclass
class Example:
    spec: ModelSpec
    model: Transformer
    ids_BS: Tensor
    lengths_B: Tensor

    def trace(
        self, ids_BS: Tensor | None = None, lengths_B: Tensor | None = None
    ) -> tuple[Tensor, dict[Site, Selection]]:
        ids_BS = self.ids_BS if ids_BS is None else ids_BS
        with torch.no_grad():
            return observed(self.model, ids_BS, self.lengths_B if lengths_B is None else lengths_B)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    spec = draw(specs())
    batch, seq = draw(st.integers(1, 3)), draw(st.integers(1, 10))
    ids_BS = torch.tensor(
        draw(st.lists(st.lists(st.integers(0, 15), min_size=seq, max_size=seq), min_size=batch, max_size=batch))
    )
    lengths_B = torch.tensor(draw(st.lists(st.integers(1, seq), min_size=batch, max_size=batch)))
    return Example(spec, lively_checkpoint(spec, seed=draw(st.integers(0, 99))).module(), ids_BS, lengths_B)


@dataclasses.dataclass
class BlockExample:
    """One routed block and a stream for it: `run` is its forward pass with k places."""

    block: RoutedBlock
    x_BSD: Tensor
    real_BS: Tensor
    k: int
    run: Callable[..., tuple[Tensor, Selection]]


@st.composite
def blocks(draw: st.DrawFn, **fixed: str) -> BlockExample:
    batch, seq, seed = draw(st.integers(1, 3)), draw(st.integers(1, 10)), draw(st.integers(0, 99))
    model = lively_checkpoint(with_routing(draw(specs()), **fixed), seed).module()
    block = model.layers[model.spec.routed_layers[0]]
    assert isinstance(block, RoutedBlock)
    k = draw(st.integers(1, seq))
    x_BSD = torch.randn(batch, seq, 8, generator=torch.Generator().manual_seed(seed))
    lengths_B = torch.tensor(draw(st.lists(st.integers(0, seq), min_size=batch, max_size=batch)))

    def run(x_BSD: Tensor, forced_BK: Tensor | None = None) -> tuple[Tensor, Selection]:
        sites = SiteRun(seq, {} if forced_BK is None else {block.layer: forced_BK})
        tokens = Tokens(x_BSD, real_BS, model.rope_cos[:seq], model.rope_sin[:seq], None, seq)
        with torch.no_grad(), Observing(sites):
            y_BSD = block(tokens, Decisions(), k)
        return y_BSD, sites.selections[block.layer]

    real_BS = torch.arange(seq) < lengths_B[:, None]
    return BlockExample(block, x_BSD, real_BS, k, run)


def with_routing(spec: ModelSpec, **fixed: str) -> ModelSpec:
    assert spec.routing is not None
    return dataclasses.replace(spec, routing=dataclasses.replace(spec.routing, **fixed))


@given(scores())
@many_examples
def test_selection_is_a_stable_ranking(example: tuple[Tensor, Tensor, int]) -> None:
    """The k best real tokens, of equals the earlier; then padding; and -0.0 equals 0.0."""
    score_BS, lengths_B, k = example
    index_BK, live_BK = select_topk(score_BS, torch.arange(score_BS.shape[1]) < lengths_B[:, None], k)
    for b, row in enumerate(score_BS.tolist()):
        length = int(lengths_B[b])
        ranked = sorted(range(length), key=lambda t: (-row[t], t)) + list(range(length, len(row)))
        assert index_BK[b].tolist() == sorted(ranked[:k])
        assert live_BK[b].tolist() == [t < length for t in sorted(ranked[:k])]


@given(examples())
@some_examples
def test_capacity_is_respected(example: Example) -> None:
    _, decided = example.trace()
    batch, seq = example.ids_BS.shape
    k_by_layer = example.spec.k_by_layer(seq)
    assert tuple(k_by_layer) == example.spec.routed_layers
    assert list(decided) == [layer for layer, k in k_by_layer.items() if k > 0]
    for layer, routing in decided.items():
        k = k_by_layer[layer]
        assert routing.index_BK.shape == (batch, k)
        assert routing.index_BK.dtype == torch.int64
        assert bool((routing.index_BK.diff() > 0).all())  # ascending, so unique
        assert int(routing.index_BK.min()) >= 0
        assert int(routing.index_BK.max()) < seq
        assert routing.live_BK.sum(1).tolist() == [min(k, length) for length in example.lengths_B.tolist()]
        assert routing.score_BS.dtype == torch.float32


@given(examples(), st.data())
@some_examples
def test_padding_is_inert(example: Example, data: st.DataObject) -> None:
    """Whatever stands in the padding, no real token's logits and no choice changes."""
    logits_BSV, decided = example.trace()
    real_BS = torch.arange(example.ids_BS.shape[1]) < example.lengths_B[:, None]
    other = data.draw(st.lists(st.integers(0, 15), min_size=real_BS.numel(), max_size=real_BS.numel()))
    changed, decided_again = example.trace(torch.where(real_BS, example.ids_BS, torch.tensor(other).view_as(real_BS)))
    assert torch.equal(logits_BSV[real_BS], changed[real_BS])
    for layer, routing in decided.items():
        assert torch.equal(routing.index_BK, decided_again[layer].index_BK)


@given(examples(), st.data())
@some_examples
def test_rows_are_independent(example: Example, data: st.DataObject) -> None:
    """Other ids and lengths in the other rows change nothing in a row."""
    batch, seq = example.ids_BS.shape
    assume(batch > 1)
    ids_BS = torch.tensor(data.draw(st.lists(st.integers(0, 15), min_size=batch * seq, max_size=batch * seq)))
    lengths_B = torch.tensor(data.draw(st.lists(st.integers(1, seq), min_size=batch, max_size=batch)))
    ids_BS = ids_BS.view(batch, seq)
    kept = data.draw(st.integers(0, batch - 1))
    ids_BS[kept], lengths_B[kept] = example.ids_BS[kept], example.lengths_B[kept]
    before, after = example.trace(), example.trace(ids_BS, lengths_B)
    assert torch.equal(before[0][kept], after[0][kept])
    for layer, routing in before[1].items():
        assert torch.equal(routing.index_BK[kept], after[1][layer].index_BK[kept])


@given(examples())
@few_examples
def test_logits_are_finite(example: Example) -> None:
    logits_BSV, _ = example.trace()
    assert bool(torch.isfinite(logits_BSV).all())


@given(blocks())
@some_examples
def test_untouched_tokens_are_untouched(example: BlockExample) -> None:
    """Tokens that were not chosen, and padding in surplus slots, leave the block as they came."""
    y_BSD, routing = example.run(example.x_BSD)
    touched_BS = torch.zeros_like(example.real_BS).scatter(1, routing.index_BK, routing.live_BK)
    assert torch.equal(y_BSD[~touched_BS], example.x_BSD[~touched_BS])
    assert not bool(touched_BS[~example.real_BS].any())


@given(blocks())
@some_examples
def test_the_stream_that_came_in_is_not_written_to(example: BlockExample) -> None:
    before = example.x_BSD.clone()
    example.run(example.x_BSD)
    assert torch.equal(example.x_BSD, before)


@given(blocks(gate="sigmoid"), st.data())
@some_examples
def test_causal_among_the_selected(example: BlockExample, data: st.DataObject) -> None:
    """A chosen token changes itself and later chosen tokens; a token that was not chosen changes nobody else."""
    y_BSD, routing = example.run(example.x_BSD)
    b = data.draw(st.integers(0, len(example.x_BSD) - 1))
    assume(bool(example.real_BS[b].any()))
    t = data.draw(st.integers(0, int(example.real_BS[b].sum()) - 1))
    x_BSD = example.x_BSD.clone()
    x_BSD[b, t] += 1.0
    changed, _ = example.run(x_BSD, routing.index_BK)
    differs = (changed != y_BSD).any(-1)
    allowed = torch.zeros_like(differs)
    chosen = routing.index_BK[b]
    allowed[b, chosen[chosen >= t] if t in chosen.tolist() else [t]] = True
    assert not bool(differs[~allowed].any())
    assert bool(differs[b, t])


@given(blocks(), st.data())
@some_examples
def test_forced_positions(example: BlockExample, data: st.DataObject) -> None:
    """The router's own choice, forced, is what it would have done; any other choice is obeyed."""
    y_BSD, routing = example.run(example.x_BSD)
    again, _ = example.run(example.x_BSD, routing.index_BK)
    assert torch.equal(y_BSD, again)
    batch, seq = example.real_BS.shape
    positions = st.permutations(range(seq)).map(lambda order: sorted(order[: example.k]))
    forced_BK = torch.tensor([data.draw(positions) for _ in range(batch)])
    y_BSD, routing = example.run(example.x_BSD, forced_BK)
    for b, told_K in enumerate(forced_BK):
        assert routing.index_BK[b][routing.live_BK[b]].tolist() == told_K[example.real_BS[b][told_K]].tolist()
    touched_BS = torch.zeros_like(example.real_BS).scatter(1, forced_BK, True)
    assert torch.equal(y_BSD[~touched_BS], example.x_BSD[~touched_BS])


@pytest.mark.parametrize("router", LEARNED_ROUTERS)
@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=3), share=st.floats(0.1, 1))
@few_examples
def test_a_router_of_zeros_takes_the_first(router: str, lengths: list[int], share: float) -> None:
    spec = make_spec(router=router, capacity_rule="ceil", capacity=share)
    checkpoint = lively_checkpoint(spec)
    silent = {n: torch.zeros_like(t) if ".router." in n else t for n, t in checkpoint.weights.items()}
    model = Checkpoint(spec=spec, weights=silent).module()
    with torch.no_grad():
        _, decided = observed(model, torch.randint(16, (len(lengths), 10)), torch.tensor(lengths))
    for layer, routing in decided.items():
        assert routing.index_BK.tolist() == [list(range(spec.k_by_layer(10)[layer]))] * len(lengths)


@given(st.lists(st.integers(0, 2), min_size=2, max_size=10), st.integers(0, 99))
@few_examples
def test_equal_tokens_go_to_the_earlier(ids: list[int], seed: int) -> None:
    """Of equal tokens a later one is never chosen before an earlier one.

    Their scores must be equal for that, and a matrix product does not promise to add up each row in the same order.
    Embeddings and router weights that are small multiples of a power of two make every order exact.
    """
    checkpoint = lively_checkpoint(make_spec(layers=(0,), capacity=0.5), seed)
    exact = {"embedding.weight", "layers.0.router.projection.weight"}
    weights = {n: (t * 8).round() / 8 if n in exact else t for n, t in checkpoint.weights.items()}
    with torch.no_grad():
        module = Checkpoint(spec=checkpoint.spec, weights=weights).module()
        _, decided = observed(module, torch.tensor([ids]), torch.tensor([len(ids)]))
    assert len(set(decided[0].score_BS[0].tolist())) <= len(set(ids))
    chosen = decided[0].index_BK[0].tolist()
    for t in chosen:
        assert all(earlier in chosen for earlier in range(t) if ids[earlier] == ids[t])


@given(examples())
@few_examples
def test_no_places_passes_the_block_by(example: Example) -> None:
    """With k = 0 the model is the one without that block, and forward has no positions to return."""
    spec = make_spec(layers=(1,), capacity_rule="floor", capacity=1e-9, gate="sigmoid")
    checkpoint = lively_checkpoint(spec)
    with torch.no_grad():
        outputs = checkpoint.module()(example.ids_BS, example.lengths_B)
    without = {n.replace("layers.2.", "layers.1."): t for n, t in checkpoint.weights.items() if "layers.1." not in n}
    shorter = Checkpoint(spec=dataclasses.replace(spec, n_layers=2, routing=None), weights=without)
    with torch.no_grad():
        assert torch.equal(outputs[0], shorter.module()(example.ids_BS, example.lengths_B)[0])
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"combine": "replace_ungated"}, 0.0),
        ({"combine": "ffn_gated", "gate": "ones"}, 0.0),
        ({"combine": "replace", "gate": "ones"}, 0.0),
        ({"combine": "paper", "gate": "ones"}, 1e-4),  # x + (A + M) where the dense block has (x + A) + M
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
@given(example=examples())
@few_examples
def test_all_places_are_the_dense_block(changes: dict[str, str], tolerance: float, example: Example) -> None:
    """k = S without a weight is the dense twin."""
    checkpoint = lively_checkpoint(make_spec(layers=(0, 1, 2), capacity=1.0, **changes))
    real_BS = torch.arange(example.ids_BS.shape[1]) < example.lengths_B[:, None]
    with torch.no_grad():
        routed_BSV, _ = observed(checkpoint.module(), example.ids_BS, example.lengths_B)
        dense_BSV, _ = observed(checkpoint.dense().module(), example.ids_BS, example.lengths_B)
    torch.testing.assert_close(routed_BSV[real_BS], dense_BSV[real_BS], rtol=0, atol=tolerance)


@given(specs())
@few_examples
def test_dense_twin_is_the_model_without_routing(spec: ModelSpec) -> None:
    """The twin keeps every weight that a model without routing has, and no other."""
    checkpoint = lively_checkpoint(spec)
    twin = checkpoint.dense()
    assert twin.spec == dataclasses.replace(spec, routing=None)
    with torch.device("meta"):
        assert set(twin.weights) == set(Transformer(twin.spec).state_dict())
    assert all(twin.weights[name] is checkpoint.weights[name] for name in twin.weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", GATES)
def test_scores_are_float32_in_every_dtype(dtype: torch.dtype, gate: str) -> None:
    model = lively_checkpoint(make_spec(gate=gate, router="mlp")).module().to(dtype)
    with torch.no_grad():
        logits_BSV, decided = observed(model, torch.randint(16, (2, 8)), torch.tensor([8, 3]))
    assert logits_BSV.dtype == dtype
    assert {routing.score_BS.dtype for routing in decided.values()} == {torch.float32}
