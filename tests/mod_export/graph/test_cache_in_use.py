"""A prefill whose conditions choose how much of the cache it reads gives the eager prefill's results."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
import torch
from generating import GENERATING, WINDOW
from runtimes import RUNTIMES
from step_graphs import prefill_graph
from tiny_models import lively_checkpoint

from mod_export.engines import ENGINES
from mod_export.graph.rewrites import apply_rewrites
from mod_export.graph.rewrites.cache_in_use import CacheInUse
from mod_export.graph.rewrites.cached_attention import is_cache
from mod_export.graph.target import check_limits
from mod_export.types import TargetLimits
from mod_models.cache import COUNTS, cache_layout, prefill_inputs, prefill_outputs
from mod_models.generation_spec import for_generation
from mod_models.spec import ModelSpec
from mod_models.step import Prefill
from mod_models.transformer import Transformer

SEQ = 3
L = WINDOW + SEQ
LENGTHS = (0, L // 4, L // 2)
OPENVINO = ENGINES["openvino"].limits
CONDITIONS = {"dense": 2, "predictor": 1, "MLP routed": 3, "normed heads": 2}
"""Name -> attentions of all tokens in the main graph, to caches of every token."""
LIMITS = {
    "openvino": OPENVINO,
    "onnxruntime": TargetLimits(name="with branches", max_opset=23, branches=True, cache_in_use=True),
}


def state(spec: ModelSpec, position: int, seed: int) -> list[torch.Tensor]:
    """Tokens, their number, their position, and a cache of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    ids_1S = torch.randint(0, 16, (1, SEQ), generator=generator)
    cache = []
    for entry in cache_layout(spec, 1, WINDOW, SEQ):
        if entry.name == COUNTS:
            cache.append(torch.full(entry.shape, min(position, 2)))
        else:
            cache.append(torch.randn(entry.shape, generator=generator))
    return [ids_1S, torch.tensor([1 + seed % SEQ]), torch.tensor([position]), *cache]


@pytest.mark.fast("dense-onnxruntime", "dense-openvino")
@pytest.mark.parametrize("runtime", LIMITS)
@pytest.mark.parametrize("name", CONDITIONS)
def test_every_number_of_slots_in_use(name: str, runtime: str) -> None:
    model, limits = prefill_graph(name, SEQ), LIMITS[runtime]
    applied = apply_rewrites(model, limits, "float32")
    assert applied["cache_in_use"] == CONDITIONS[name]
    assert set(apply_rewrites(model, limits, "float32").values()) <= {0}
    # A file keeps the sizes of all values.
    model = ir.from_proto(ir.to_proto(model))
    check_limits(model, limits, "float32")
    spec = for_generation(GENERATING[name], WINDOW)
    prefill = Prefill(spec, WINDOW).sharing(Transformer(spec).sharing(lively_checkpoint(GENERATING[name], 1).module()))
    running, names = RUNTIMES[runtime](model), [value.name for value in model.graph.outputs]
    for position in range(WINDOW - SEQ + 1):
        tensors = state(spec, position, position)
        with torch.no_grad():
            expected = dict(zip(prefill_outputs(spec), prefill(*tensors), strict=True))
        feeds = dict(zip(prefill_inputs(spec, WINDOW), (tensor.numpy() for tensor in tensors), strict=True))
        found = dict(zip(names, running(feeds), strict=True))
        tolerance = 5e-5 * max(1.0, float(expected["last_logits"].abs().max()))
        for output, tensor in expected.items():
            # Rows of keys and values that are not of the text are arbitrary.
            kept = expected["kept"][0, int(output[-1])] if is_cache(output) else None
            wanted = tensor.numpy()[:, :, :kept] if is_cache(output) else tensor.numpy()
            actual = found[output][:, :, :kept] if is_cache(output) else found[output]
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=tolerance)


def test_slots_that_are_not_in_use_are_not_read() -> None:
    """They hold NaN here, which an attention to them would return, although their weight is 0."""
    model = prefill_graph("dense", SEQ)
    apply_rewrites(model, OPENVINO, "float32")
    spec = for_generation(GENERATING["dense"], WINDOW)
    running, names = RUNTIMES["openvino"](model), [value.name for value in model.graph.outputs]
    for position in range(WINDOW - SEQ + 1):
        tensors = state(spec, position, 0)
        read = next((n for n in LENGTHS if position <= n), L)
        for cache in tensors[3:7]:  # The last layer has one query, and reads every slot.
            cache[:, :, read:] = np.nan
        feeds = dict(zip(prefill_inputs(spec, WINDOW), (tensor.numpy() for tensor in tensors), strict=True))
        found = dict(zip(names, running(feeds), strict=True))
        assert np.isfinite(found["last_logits"]).all()
        assert np.isfinite(found["keys_rows_2"]).all()


def test_a_short_cache_is_read_as_a_whole() -> None:
    model = prefill_graph("dense", 6)
    assert CacheInUse().run(model, OPENVINO, "float32") == 0
    assert not any(node.op_type == "If" for node in model.graph)


def test_attentions_with_one_mask_share_masks_and_conditions() -> None:
    model = prefill_graph("dense", SEQ)
    before = Counter(node.op_type for node in model.graph)
    CacheInUse().run(model, OPENVINO, "float32")
    added = Counter(node.op_type for node in model.graph) - before
    assert (added["If"], added["LessOrEqual"], added["Where"]) == (2, len(LENGTHS), len(LENGTHS) + 1)
    inner = [node for node in model.graph.all_nodes() if node.op_type == "Attention" and node.graph is not model.graph]
    assert len(inner) == 2 * (len(LENGTHS) + 1)
    assert all(isinstance(node, ir.Node) and node.metadata_props for node in inner)
