"""Prefill and steps: logits and routing equal those of the causal model on the whole text, wherever it is split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from generating import GENERATING, WINDOW, empty_cache, generating_model, meaning, texts
from loop_reference import reference
from observing import observed
from torch import Tensor

from mod_export.model.transformer import MOD_TRANSFORMER
from mod_models.cache import routed_sites, sites, slots_of_layer
from mod_models.generate import Session, generate_eager
from mod_models.generation_spec import GenerationError, for_generation
from mod_models.spec import Site
from mod_models.step import DecodeStep, slots_of_step
from mod_models.transformer import RoutedBlock, Transformer

FEW = (
    "dense", "trained by rank", "routed apart by predictors", "MLP routed, normed, adapter", "compact positions",
    "experts in routed MLPs", "experts after routed attention",
)  # fmt: skip
"""Names in GENERATING: each part of a block that decides for itself, and each kind of cache."""
each_kind = pytest.mark.parametrize("name", GENERATING)
a_few_kinds = pytest.mark.parametrize("name", FEW)


def assert_split(model: Transformer, ids_BS: Tensor, split: int, max_len: int, narrow: int = 0) -> Session:
    """Reads `split` tokens at once and the others one at a time, and compares with the causal model on all of them."""
    expected = meaning(model, ids_BS)
    assert expected.margin > 1e-5, "a decision too close for two ways of computing it; use another seed"
    session = Session(model, max_len, len(ids_BS))
    for block in session.prefill.layers:
        if isinstance(block, RoutedBlock):
            block.narrow = narrow
    found = [session.read(ids_BS[:, :split], torch.full((len(ids_BS),), split))]
    found += [session.write(ids_BS[:, t]) for t in range(split, ids_BS.shape[1])]
    error = (torch.stack(found, 1) - expected.logits_BSV[:, split - 1 :]).abs().max()
    assert error < 1e-9
    assert session.ran == expected.ran
    assert session.overflow_BN.tolist() == [list(row.values()) for row in expected.overflow]
    return session


@each_kind
def test_every_split_of_a_text_gives_the_same(name: str) -> None:
    model, ids_BS = generating_model(name), texts(1)
    caches = [assert_split(model, ids_BS, split, WINDOW) for split in (1, 9, WINDOW)]
    for session in caches[1:]:
        for tensor, same in zip(session.cache.values(), caches[0].cache.values(), strict=True):
            if tensor.dtype == torch.int64:
                assert torch.equal(tensor, same)
    # Steps of the first cache wrote every slot but one; the prompt of the last cache must leave the same keys.
    for layer in range(model.spec.n_layers):
        used = slots_in_use(caches[0], layer)
        for part in ("keys", "values"):
            stepped, prefilled = (session.cache[f"{part}_{layer}"][:, :, :used] for session in (caches[0], caches[-1]))
            torch.testing.assert_close(stepped, prefilled, rtol=0, atol=1e-9)


@pytest.mark.fast(
    "0-predictor", "0-experts in routed blocks", "2-threshold", "2-MLP routed", "2-keys and values kept, adapter",
    "2-routed apart by predictors",
)  # fmt: skip
@each_kind
@pytest.mark.parametrize("narrow", [0, 2])
def test_every_size_of_parts_gives_the_same(name: str, narrow: int) -> None:
    """A text is read in parts of the same number of tokens, the last one padded, each on the cache of those before."""
    model, ids_BS = generating_model(name), texts(2)
    expected = meaning(model, ids_BS)
    for size in (1, 3, 4, 8):
        session = Session(model, WINDOW, len(ids_BS))
        for block in session.prefill.layers:
            if isinstance(block, RoutedBlock) and block.layer not in model.spec.expert_layers:
                block.narrow = narrow
        for start in range(0, WINDOW, size):
            tokens = min(size, WINDOW - start)
            part_BS = torch.nn.functional.pad(ids_BS[:, start : start + tokens], (0, size - tokens), value=5)
            logits_BV = session.read(part_BS, torch.full((len(ids_BS),), tokens))
            assert (logits_BV - expected.logits_BSV[:, start + tokens - 1]).abs().max() < 1e-9
        assert session.ran == expected.ran
        assert session.overflow_BN.tolist() == [list(row.values()) for row in expected.overflow]


@each_kind
def test_rows_that_have_read_different_numbers_of_tokens(name: str) -> None:
    model, ids_BS = generating_model(name), texts(3)
    expected = meaning(model, ids_BS)
    session, rows_B = Session(model, WINDOW, 3), torch.arange(3)
    for lengths in ([1, 5, 3], [6, 2, 4], [3, 1, 5]):
        number_BS = (session.length_B[:, None] + torch.arange(6)).clamp(max=WINDOW - 1)
        logits_BV = session.read(torch.gather(ids_BS, 1, number_BS), torch.tensor(lengths))
        torch.testing.assert_close(logits_BV, expected.logits_BSV[rows_B, session.length_B - 1], rtol=0, atol=1e-9)
    for ran, whole, length in zip(session.ran, expected.ran, session.length_B.tolist(), strict=True):
        assert ran == {site: [position for position in some if position < length] for site, some in whole.items()}


def test_the_kinds_meet_slots_that_are_full() -> None:
    """Slots of blocks and of experts become full: if every token found a slot, agreement would say less."""
    found = {name: meaning(generating_model(name), texts(1)).overflow[0] for name in GENERATING}
    turned = {name for name, row in found.items() for site, n in row.items() if n and ".expert" not in str(site)}
    dropped = {name for name, row in found.items() for site, n in row.items() if n and ".expert" in str(site)}
    assert len(turned) >= 6
    assert len(dropped) >= 3


def slots_in_use(session: Session, layer: int) -> int:
    """Number of slots that the first row uses."""
    routing = session.spec.routing
    if routing is None or layer not in session.spec.routed_layers or routing.parts == "mlp":
        return int(session.length_B[0])
    site: Site = f"{layer}.attention" if routing.parts == "separate" else layer
    return len(session.ran[0][site])


@each_kind
def test_it_means_what_the_loops_say(name: str) -> None:
    """Compares the causal model, which prefill and steps equal, with the second implementation."""
    model, ids_BS = generating_model(name), texts(1)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    (row,) = reference(model.spec.to_dict(), weights, ids_BS.tolist(), [WINDOW])
    expected = meaning(model, ids_BS)
    # RoPE tables have 32 bits.
    np.testing.assert_allclose(expected.logits_BSV[0].numpy(), np.array(row.logits), rtol=0, atol=2e-5)
    assert expected.ran == [row.chosen]
    assert sum(expected.overflow[0].values()) == row.overflow


def test_a_token_that_finds_no_slot_leaves_every_cached_bit_alone() -> None:
    model, ids_BS = generating_model("threshold"), texts(1)
    session = Session(model, WINDOW)
    session.read(ids_BS[:, :12], torch.tensor([12]))
    assert session.cache["counts"][0, 0] == 5
    before = {name: session.cache[name].clone() for name in ("keys_0", "values_0")}
    pointers = {name: tensor.data_ptr() for name, tensor in session.cache.items()}
    overflow = int(session.overflow_BN[0, 0])
    for token in range(2):
        session.write(ids_BS[:, 12 + token])
    assert session.overflow_BN[0, 0] > overflow
    assert all(torch.equal(session.cache[name], tensor) for name, tensor in before.items())
    assert {name: tensor.data_ptr() for name, tensor in session.cache.items()} == pointers


@a_few_kinds
def test_rows_of_different_lengths_are_rows_alone(name: str) -> None:
    """Three prompts in one bucket, then steps in which some rows wait: each row routes exactly as it does alone, and
    uses as many slots as its own tokens ran.
    """
    model, ids_BS = generating_model(name), texts(3)
    lengths, total = [1, 6, 4], [9, 8, 12]
    together = Session(model, WINDOW, 3)
    last_BV = together.read(ids_BS[:, :6], torch.tensor(lengths))
    rows: list[list[Tensor]] = [[last_V] for last_V in last_BV]
    for _ in range(8):
        active_B = together.length_B < torch.tensor(total)
        position_B = together.length_B.clamp(max=WINDOW - 1)
        logits_BV = together.write(ids_BS[torch.arange(3), position_B], active_B)
        for b in active_B.nonzero().flatten().tolist():
            rows[b].append(logits_BV[b])
    for b in range(3):
        alone = Session(model, WINDOW)
        expected = [alone.read(ids_BS[b : b + 1, : lengths[b]], torch.tensor(lengths[b : b + 1]))[0]]
        expected += [alone.write(ids_BS[b : b + 1, t])[0] for t in range(lengths[b], total[b])]
        torch.testing.assert_close(torch.stack(rows[b]), torch.stack(expected), rtol=0, atol=1e-9)
        assert together.ran[b] == alone.ran[0]
        if "counts" in alone.cache:
            assert torch.equal(together.cache["counts"][b], alone.cache["counts"][0])


@a_few_kinds
def test_a_short_cache_and_a_long_one_agree(name: str) -> None:
    """Slots are counted for the window, so a bucket of prompts or steps computes the same as a longer one."""
    model, ids_BS = generating_model(name), texts(1)
    short = assert_split(model, ids_BS[:, :8], 3, 8)
    long = assert_split(model, ids_BS[:, :8], 3, WINDOW)
    assert short.ran == long.ran
    for layer, slots in slots_of_layer(model.spec, 8).items():
        assert short.cache[f"keys_{layer}"].shape[2] == slots
        assert slots <= slots_of_layer(model.spec, WINDOW)[layer]
    padded_1S = torch.nn.functional.pad(ids_BS[:, :3], (0, 8))
    session = Session(model, WINDOW)
    torch.testing.assert_close(
        session.read(padded_1S, torch.tensor([3])), Session(model, 8).read(ids_BS[:, :3], torch.tensor([3]))
    )


def test_keys_and_values_of_a_routed_layer_are_its_share() -> None:
    model = MOD_TRANSFORMER.read(MOD_TRANSFORMER.demo_checkpoint())
    spec = for_generation(model.checkpoint.spec, 2048)
    routed, dense = (version.generating(2048) for version in (model, model.dense()))
    assert set(dense.kv_bytes(2048).values()) == {2 * 2 * 2048 * 32 * 4}  # Keys and values, heads, slots, width, bytes.
    for layer, size in routed.kv_bytes(2048).items():
        assert size == dense.kv_bytes(2048)[layer] * (0.125 if layer in spec.routed_layers else 1)
    tensors = empty_cache(spec, 3, 2048)
    numbers = sum(tensor.numel() for name, tensor in tensors.items() if name != "counts")
    assert 4 * numbers == 3 * sum(routed.kv_bytes(2048).values())


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_more_rows_than_slots_in_a_step(slots: int) -> None:
    """The largest scores run, ties go to the lower row; the others are skipped, leave no key, and are counted."""
    model = generating_model("threshold")
    # Row 3 equals row 1.
    ids_B = torch.tensor([3, 0, 12, 0, 6, 9])
    free, narrow = (
        DecodeStep(model.spec, 6, WINDOW, slots_by_layer).sharing(model) for slots_by_layer in (None, {0: slots})
    )
    position_B, cache = torch.zeros(6, dtype=torch.int64), empty_cache(model.spec, 6, WINDOW)
    everyone, some = free(ids_B, position_B, *cache.values()), narrow(ids_B, position_B, *cache.values())
    with torch.no_grad():
        score_B = model.layers[0].router(model.embedding(ids_B[:, None]))[:, 0]
    assert score_B.argsort(descending=True, stable=True).tolist()[:3] == [1, 3, 0]
    able = (score_B > 0).nonzero().flatten().tolist()
    assert able == [0, 1, 2, 3, 5]
    expected = sorted([1, 3, 0][:slots])
    assert everyone[-1][:, 0].nonzero().flatten().tolist() == able
    assert some[-1][:, 0].nonzero().flatten().tolist() == expected
    assert torch.equal(some[-2][:, 0], everyone[-2][:, 0])
    slot_B, keys_BGE = some[7][:, 0], some[1]
    assert slot_B.tolist() == [0 if b in expected else -1 for b in range(6)]
    assert torch.equal(some[-3][:, 0], (slot_B == 0).to(torch.int64))
    for b in range(6):
        if b in expected:
            torch.testing.assert_close(keys_BGE[b], everyone[1][b])
    # A token without a slot continues as if its score were below 0: as the whole model does with that layer empty.
    turned = next(b for b in able if b not in expected)
    forced = {0: torch.full((1, 1), -1)}
    with torch.no_grad():
        logits_11V, _ = observed(model, ids_B[turned : turned + 1, None], torch.tensor([1]), forced)
    torch.testing.assert_close(some[0][turned], logits_11V[0, 0])


@pytest.mark.parametrize("name", FEW[1:])
def test_rows_that_have_slots_are_as_if_all_had(name: str) -> None:
    model, ids_B = generating_model(name), texts(1)[0, :5]
    position_B, cache = torch.zeros(5, dtype=torch.int64), empty_cache(model.spec, 5, WINDOW)
    free = DecodeStep(model.spec, 5, WINDOW).sharing(model)(ids_B, position_B, *cache.values())
    for slots in (1, 2, 4):
        step = DecodeStep(model.spec, 5, WINDOW, dict.fromkeys(slots_of_step(model.spec, 5, WINDOW), slots)).sharing(
            model
        )
        for skip in (True, False):
            step.skip = skip
            found = step(ids_B, position_B, *cache.values())
            columns = [sites(model.spec).index(site) for site in routed_sites(model.spec)]
            assert int(found[-1][:, columns].sum(0).max()) <= slots
            same_B = (found[-1] == free[-1]).all(1)
            torch.testing.assert_close(found[0][same_B], free[0][same_B], rtol=0, atol=1e-9)


def test_a_row_without_a_token_uses_no_slot() -> None:
    model = generating_model("threshold")
    ids_B, cache = torch.tensor([7, 7]), empty_cache(model.spec, 2, WINDOW)
    step = DecodeStep(model.spec, 2, WINDOW, {0: 1, 2: 1}).sharing(model)
    both = step(ids_B, torch.tensor([0, 0]), *cache.values())
    second = step(ids_B, torch.tensor([-1, 0]), *cache.values())
    assert both[-1][:, 0].tolist() == [True, False]
    assert second[-1][:, 0].tolist() == [False, True]
    assert second[7][0].tolist() == [-1, -1, -1]
    assert second[-2][0].tolist() == [False, False]


def test_slots_of_a_step() -> None:
    spec = for_generation(GENERATING["schedule"], 10)
    assert slots_of_step(spec, 8, 10) == {0: 2, 2: 5}
    assert slots_of_step(spec, 1, 10) == {0: 1, 2: 1}
    for wrong in ({0: 0}, {0: 9}, {1: 2}):
        with pytest.raises(ValueError, match=r"slots: expected 1 to 8 for sites among 0, 2, got"):
            DecodeStep(spec, 8, 10, wrong)


def assert_greedy(model: Transformer, prompt: list[int], new: int, window: int) -> None:
    """Each token has the highest logit of the model after the whole text before it."""
    written = generate_eager(model, prompt, new, window=window)
    expected = meaning(model, torch.tensor([[*prompt, *written.ids[:-1]]]))
    torch.testing.assert_close(written.logits_NV, expected.logits_BSV[0, len(prompt) - 1 :], rtol=0, atol=1e-9)
    assert written.ids == written.logits_NV.argmax(-1).tolist()
    assert (len(written.ids), written.ran, written.overflow) == (new, expected.ran[0], expected.overflow[0])


@a_few_kinds
def test_writing_is_what_the_definition_says(name: str) -> None:
    for prompt in ([4], [1, 5, 2, 9]):
        assert_greedy(generating_model(name), prompt, 8, WINDOW)


@pytest.mark.parametrize(
    ("prompt", "new", "window", "said"),
    [
        ([], 3, 0, "expected a prompt and at least one new token, got 0 and 3"),
        ([1], 0, 0, "expected a prompt and at least one new token, got 1 and 0"),
        ([1, 2], 3, 3, "the text has 4 tokens to read, and the window 3; give a longer window"),
        ([1, 2], 16, 0, "window: expected a number of tokens from 1 to the model's max_positions 16, got 17"),
    ],
)
def test_a_text_that_cannot_be_written(prompt: list[int], new: int, window: int, said: str) -> None:
    with pytest.raises(GenerationError, match=said):
        generate_eager(generating_model("dense"), prompt, new, window=window)


def test_the_shipped_checkpoint_writes_as_it_reads() -> None:
    """Real weights: a predictor trained beside top-k, 48 tokens of held-out text, split early and late."""
    loaded = MOD_TRANSFORMER.read(MOD_TRANSFORMER.demo_checkpoint())
    model = Transformer(for_generation(loaded.checkpoint.spec, 64, slack=2)).sharing(loaded.module()).double()
    ids_1S = torch.from_numpy(loaded.sample_ids(1, 48, 0))
    for split in (24, 47):
        session = assert_split(model, ids_1S, split, 64)
        assert all(session.ran[0].values())
    assert_greedy(model, ids_1S[0].tolist(), 12, 64)
