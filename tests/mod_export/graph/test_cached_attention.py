"""A step whose attention writes the cache leaves the eager step's cache, in branches and where rows skip."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from generating import GENERATING, WINDOW
from small_graphs import session
from step_graphs import step_graph_of
from test_decoding_graphs import random_state
from tiny_models import lively_checkpoint

from mod_export.engines.ort import OrtCpu
from mod_export.engines.ort_session import DTYPES
from mod_export.graph.nodes import branches_of
from mod_export.graph.rewrites import apply_rewrites
from mod_export.graph.rewrites.cached_attention import CachedAttention
from mod_export.types import IDLE, VACANT, DType
from mod_models.cache import sites, step_inputs, step_outputs
from mod_models.generate import write_rows
from mod_models.generation_spec import for_generation
from mod_models.spec import ModelSpec
from mod_models.step import DecodeStep, _site_of_cache
from mod_models.transformer import Transformer

STATES = 9
CACHES = ("keys_", "values_")


def wide(name: str, width: int = 8) -> ModelSpec:
    """Spec with heads wide enough for the operator, which also rotates heads of width 16."""
    return dataclasses.replace(GENERATING[name], d_head=width)


def rewritten(name: str, rows: int, width: int, dtype: DType = "float32") -> ir.Model:
    model = step_graph_of(wide(name, width), rows)
    applied = apply_rewrites(model, OrtCpu.limits, dtype)
    packed = 5 if "values kept" in name else 3
    assert (applied["cached_attention"], applied["packed_attention"]) == (3, packed if width == 16 else 0)
    assert applied["scaled_queries"] == sum(node.op_type == "GroupQueryAttention" for node in model.graph.all_nodes())
    assert set(apply_rewrites(model, OrtCpu.limits, dtype).values()) <= {0}
    branches = [branch for node in model.graph.all_nodes() for branch in branches_of(node)]
    assert all(value.uses() for branch in branches for value in branch.initializers.values())
    return model


def in_place(running: Any, feeds: Mapping[str, np.ndarray], longer: int = 1) -> dict[str, np.ndarray]:
    """Runs an engine that writes its caches, so many slots longer, to the addresses from which it reads them."""
    inputs = {
        key: np.pad(array, ((0, 0), (0, 0), (0, longer), (0, 0))) if key.startswith(CACHES) else array
        for key, array in feeds.items()
    }
    binding = running.io_binding()
    for key, array in inputs.items():
        binding.bind_input(key, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    outputs = {
        output.name: inputs.get(output.name.removeprefix("present_"), np.zeros(output.shape, DTYPES[output.type]))
        for output in running.get_outputs()
    }
    for key, array in outputs.items():
        binding.bind_output(key, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    running.run_with_iobinding(binding)
    return outputs


def free_slot(spec: ModelSpec, layer: int, feeds: Mapping[str, np.ndarray], row: int) -> int | None:
    """The slot of the cache that a row writes to if it keeps nothing; None for the extra one."""
    site, capacity = _site_of_cache(spec, layer), feeds[f"keys_{layer}"].shape[2]
    if site is None:
        return 0 if feeds["positions"][row] == VACANT else None
    used = int(feeds["counts"][row, sites(spec).index(site)])
    return used if used < capacity else None


@pytest.mark.parametrize(
    ("name", "rows", "width"),
    [
        ("predictor", 3, 16),
        ("dense", 1, 8),
        pytest.param("compact positions", 1, 16, marks=pytest.mark.slow),
        pytest.param("routed apart by predictors", 4, 8, marks=pytest.mark.slow),
        pytest.param("MLP routed", 2, 16, marks=pytest.mark.slow),
        pytest.param("normed heads", 2, 16, marks=pytest.mark.slow),
        pytest.param("experts in routed blocks", 2, 16, marks=pytest.mark.slow),
        ("keys and values kept", 1, 16),
        pytest.param("keys and values kept, attention routed", 3, 16, marks=pytest.mark.slow),
        pytest.param("keys and values kept, adapter", 1, 8, marks=pytest.mark.slow),
        pytest.param("keys and values kept, routed apart", 2, 16, marks=pytest.mark.slow),
    ],
)
def test_a_step_leaves_the_cache_of_the_eager_step(name: str, rows: int, width: int) -> None:
    model = rewritten(name, rows, width)
    spec = for_generation(wide(name, width), WINDOW)
    eager = Transformer(spec).sharing(lively_checkpoint(wide(name, width), 1).module())
    step = DecodeStep(spec, rows, WINDOW).sharing(eager)
    running = session(model)
    kinds = Counter(node.op_type for node in model.graph.all_nodes())
    # Experts weigh their results with a Softmax.
    softmax = 3 if "experts" in name else 0
    # Where a condition skips attention, the operator writes the key that is kept.
    routed = 2 if "values kept" in name else 0
    expected_kinds = (3 + routed, softmax, 0 if width == 16 else 6 + routed)
    assert (kinds["GroupQueryAttention"], kinds["Softmax"], kinds["RotaryEmbedding"]) == expected_kinds
    capacity = torch.tensor([spec.k_by_layer(WINDOW)[site] for site in step.sites])
    kept = {True: 0, False: 0}
    for seed in range(STATES):
        inputs = random_state(spec, rows, seed)
        if seed % 3 == 2:
            inputs[1][seed % rows] = (IDLE, VACANT)[seed % 2]
        if seed % 3 == 1 and step.sites:
            inputs[-1][seed % rows] = capacity  # All its slots are used.
        with torch.no_grad():
            expected = dict(zip(step_outputs(spec), step(*inputs), strict=True))
        feeds = dict(zip(step_inputs(spec, WINDOW), (tensor.numpy() for tensor in inputs), strict=True))
        caches = {key: torch.from_numpy(array.copy()) for key, array in feeds.items() if key.startswith(CACHES)}
        outputs = in_place(running, feeds)
        write_rows(caches, {key: expected[key.replace("_", "_row_")] for key in caches}, expected["slots"])
        for output in ("slots", "new_counts", "wanted", "ran") if step.sites else ("slots",):
            np.testing.assert_array_equal(outputs[output], expected[output].numpy())
        for key, tensor in caches.items():
            layer = int(key.rpartition("_")[2])
            expected_BGLE, found_BGLE = tensor.numpy(), outputs[f"present_{key}"][:, :, :-1]
            for row, slot in enumerate(expected["slots"][:, layer].tolist()):
                kept[slot >= 0] += 1
                free = free_slot(spec, layer, feeds, row)
                if slot < 0 and free is not None:
                    found_BGLE[row, :, free : free + 1] = expected_BGLE[row, :, free : free + 1]
            np.testing.assert_allclose(found_BGLE, expected_BGLE, rtol=0, atol=5e-5)
        active = feeds["positions"] >= 0
        logits = expected["logits"].numpy()[active]
        tolerance = 5e-5 * max(1.0, np.abs(logits).max(initial=0))
        np.testing.assert_allclose(outputs["logits"][active], logits, rtol=0, atol=tolerance)
    assert kept[True] > 0
    assert kept[False] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "slots"), [("dense", "all"), ("predictor", "fair")])
def test_what_the_operator_does_not_do_stays(name: str, slots: str) -> None:
    """Heads are too narrow for it, or some rows have no slot in a layer, so that its caches are gathered."""
    spec = GENERATING[name] if slots == "all" else wide(name)
    model = step_graph_of(spec, 4, slots)
    assert apply_rewrites(model, OrtCpu.limits, "float32")["cached_attention"] == (0 if slots == "all" else 1)
    assert list(CachedAttention().ensures(model, OrtCpu.limits, "float32")) == []
    session(model)


@pytest.mark.parametrize("position", [IDLE, VACANT])
def test_of_a_row_that_holds_nothing_only_one_slot_is_read(position: int) -> None:
    """NaN in the cache of the row shows in its logits if it is read."""
    spec, width = for_generation(wide("dense", 16), WINDOW), 16
    running = session(rewritten("dense", 2, width))
    inputs = random_state(spec, 2, 0)
    feeds = dict(zip(step_inputs(spec, WINDOW), (tensor.numpy() for tensor in inputs), strict=True))
    feeds["positions"][1] = position
    for name, array in feeds.items():
        if name.startswith(CACHES):
            array[1] = np.nan
    logits_BV = in_place(running, feeds)["logits"]
    assert np.isfinite(logits_BV[0]).all()
    assert np.isfinite(logits_BV[1]).all() == (position == VACANT)
