"""Programs that exporters get of a generating model, and the number of bytes that one of its steps has to read."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from generating import GENERATING, WINDOW
from tiny_models import lively_checkpoint, make_spec
from variants import experts

from mod_export.model.transformer import GeneratingTransformer
from mod_models.cache import cache_layout, prefill_inputs, prefill_outputs, step_inputs, step_outputs
from mod_models.checkpoint import Checkpoint
from mod_models.generation_spec import for_generation
from mod_models.spec import ModelSpec

ATTENTION = 8 + 16 * 8 + 2 * 8 * 8 + 8 * 16
"""Number of weights of a block's attention: norm, queries of 4 x 4, keys and values of 2 x 4, and the output."""
MLP = 8 + 3 * 8 * 12
HEAD = 8 + 16 * 8
"""Number of weights of the last norm, and of the embedding as the head."""
SLOT = 2 * 4 * 2 * 4
"""Bytes of a key and a value: 2 heads of 4 float32 numbers each."""
PLACES = int(0.375 * WINDOW)


def graphs_of(spec: ModelSpec) -> tuple[GeneratingTransformer, dict[str, torch.Tensor]]:
    checkpoint = lively_checkpoint(spec)
    return GeneratingTransformer(checkpoint, WINDOW), dict(checkpoint.weights)


def routers(weights: dict[str, torch.Tensor]) -> int:
    """Number of weights of routers and predictors."""
    found = [weight for name, weight in weights.items() if "router" in name or "predictor" in name]
    return sum(weight.numel() for weight in found)


def test_dense() -> None:
    graphs, _ = graphs_of(make_spec(routing=None))
    assert graphs.sites == ()
    found = graphs.least_bytes(2, WINDOW, {})
    assert found == 4 * (3 * (ATTENTION + MLP) + HEAD) + 2 * 3 * WINDOW * SLOT


@pytest.mark.parametrize("executed", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(
    ("parts", "routed", "always", "slots"),
    [("block", ATTENTION + MLP, 0, PLACES), ("attention", ATTENTION, MLP, PLACES), ("mlp", MLP, ATTENTION, WINDOW)],
)
def test_routed_parts(parts: str, routed: int, always: int, slots: int, executed: float) -> None:
    """Layers 0 and 2 are routed. If only the MLP is routed, every token is in the cache."""
    graphs, weights = graphs_of(make_spec(parts=parts, selection="threshold"))
    found = graphs.least_bytes(3, WINDOW, dict.fromkeys(graphs.sites, executed))
    numbers = ATTENTION + MLP + HEAD + routers(weights) + 2 * (always + executed * routed)
    share = 1.0 if parts == "mlp" else executed
    assert found == round(4 * numbers + 3 * SLOT * (WINDOW + 2 * slots * share))


@pytest.mark.parametrize("rows", [1, 3])
def test_what_skipped_tokens_leave_is_read(rows: int) -> None:
    """Keys and values are computed for every token, and the norm of the MLP has a reader in both cases."""
    kept = make_spec(
        selection="threshold",
        skipped_keys_values="kept",
        skipped_result="adapter",
        adapter="bottleneck",
        adapter_hidden=3,
    )
    graphs, weights = graphs_of(kept)
    executed = 0.25
    keys_values, norms, adapter = 2 * 8 * 8, 2 * 8, 2 * 3 * 8
    always = keys_values + norms
    routed = always + executed * (ATTENTION + MLP - always) + (1 - executed if rows == 1 else 1) * adapter
    found = graphs.least_bytes(rows, WINDOW, dict.fromkeys(graphs.sites, executed))
    numbers = ATTENTION + MLP + HEAD + routers(weights) + 2 * routed
    assert found == round(4 * numbers + rows * SLOT * WINDOW * (1 + 2 * executed))


def test_parts_that_are_routed_apart() -> None:
    graphs, weights = graphs_of(make_spec(parts="separate", selection="predictor", predictor_hidden=2))
    assert graphs.sites == ("0.attention", "0.mlp", "2.attention", "2.mlp")
    executed = dict(zip(graphs.sites, (0.5, 0.25, 0.0, 1.0), strict=True))
    found = graphs.least_bytes(1, WINDOW, executed)
    numbers = ATTENTION + MLP + HEAD + routers(weights) + 0.5 * ATTENTION + 0.25 * MLP + 0.0 * ATTENTION + 1.0 * MLP
    assert found == round(4 * numbers + SLOT * (WINDOW + 0.5 * PLACES))


@pytest.mark.parametrize(("rows", "share"), [(1, 0.25), (3, 0.75), (4, 1.0), (9, 1.0)])
def test_experts_are_read_as_rows_can_take_them(rows: int, share: float) -> None:
    """Each row runs one of four experts, so at most as many experts as rows are read."""
    graphs, weights = graphs_of(make_spec(routing=None, experts=experts()))
    every = sum(weight.numel() for name, weight in weights.items() if ".experts." in name and "router" not in name)
    found = graphs.least_bytes(rows, WINDOW, dict.fromkeys(graphs.sites, 1.0))
    norms_and_mlp = 2 * 8 + MLP
    numbers = 3 * ATTENTION + norms_and_mlp + HEAD + routers(weights) + share * every
    assert found == round(4 * numbers + rows * SLOT * 3 * WINDOW)
    assert found == graphs.least_bytes(rows, WINDOW, dict.fromkeys(graphs.sites, 0.0))


def test_an_embedding_that_is_no_head_is_read_in_one_row() -> None:
    tied, _ = graphs_of(make_spec(routing=None))
    apart, _ = graphs_of(dataclasses.replace(make_spec(routing=None), tie_embeddings=False))
    assert tied.least_bytes(1, WINDOW, {}) == apart.least_bytes(1, WINDOW, {})


@pytest.mark.parametrize("name", GENERATING)
def test_sources(name: str) -> None:
    """Sources are on the meta device, with the cache's names and shapes; no tensor occurs twice in the examples."""
    spec = GENERATING[name]
    graphs, generating = GeneratingTransformer(Checkpoint(spec=spec, weights={}), WINDOW), for_generation(spec, WINDOW)
    assert list(graphs.capacity) == list(graphs.sites)
    prefill, step = graphs.prefill(2, 9, 12, 5), graphs.step(3, 12)
    assert prefill.inputs == tuple(prefill_inputs(generating, 12))
    assert prefill.outputs == tuple(prefill_outputs(generating))
    assert step.inputs == tuple(step_inputs(generating, 12))
    assert step.outputs == tuple(step_outputs(generating))
    for source in (prefill, step):
        assert not source.module.training
        assert all(tensor.is_meta for tensor in source.module.state_dict().values())
        assert {*source.module.state_dict()} == {*lively_checkpoint(spec).module().state_dict()}
        for example, again in zip(*source.examples, strict=True):
            assert example.is_meta
            assert (example.shape, example.dtype) == (again.shape, again.dtype)
        assert len({id(tensor) for example in source.examples for tensor in example}) == 2 * len(source.examples[0])
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in step.examples[0][2:]]
    assert shapes == [(item.shape, item.dtype) for item in cache_layout(generating, 3, 12)]
    assert [tuple(tensor.shape) for tensor in prefill.examples[0][:3]] == [(2, 9), (2,), (2,)]
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in prefill.examples[0][3:]]
    assert shapes == [(item.shape, item.dtype) for item in cache_layout(generating, 2, 12, 5)]
