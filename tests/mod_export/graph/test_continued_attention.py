"""A prefill whose attention writes the cache leaves the eager prefill's cache, in branches and behind full slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
import torch
from generating import GENERATING, WINDOW
from small_graphs import session
from step_graphs import prefill_graph_of
from test_cached_attention import CACHES, in_place, wide
from tiny_models import lively_checkpoint

from mod_export.engines.ort import OrtCpu
from mod_export.graph.nodes import branches_of
from mod_export.graph.rewrites import apply_rewrites
from mod_export.graph.rewrites.continued_attention import ContinuedAttention
from mod_models.cache import COUNTS, cache_layout, prefill_inputs, prefill_outputs
from mod_models.generate import append_rows
from mod_models.generation_spec import for_generation
from mod_models.step import Prefill
from mod_models.transformer import Transformer

SEQ, STATES = 5, 12
WRITTEN = {
    "predictor": 3, "dense": 2, "routed apart by predictors": 5, "compact positions": 3, "MLP routed": 3,
    "normed heads": 2, "experts in routed blocks": 3, "attention routed": 3, "keys and values kept": 1,
    "keys and values kept, routed apart": 1,
}  # fmt: skip
"""Name -> attentions that the operator replaces: in each branch of a routed layer one, and none in the last layer,
unless all of its tokens have a query.
"""
FAST = ("predictor", "dense")


def rewritten(name: str, seq: int = SEQ) -> ir.Model:
    model = prefill_graph_of(wide(name), seq)
    apply_rewrites(model, OrtCpu.limits, "float32")
    assert set(apply_rewrites(model, OrtCpu.limits, "float32").values()) <= {0}
    return model


@pytest.mark.fast(*FAST)
@pytest.mark.parametrize("name", WRITTEN)
def test_a_part_leaves_the_cache_of_the_eager_prefill(name: str) -> None:
    model = rewritten(name)
    spec = for_generation(wide(name), WINDOW)
    eager = Transformer(spec).sharing(lively_checkpoint(wide(name), 1).module())
    prefill = Prefill(spec, WINDOW).sharing(eager)
    kinds = Counter(node.op_type for node in model.graph.all_nodes())
    assert kinds["GroupQueryAttention"] == WRITTEN[name]
    running, layout, names = session(model), cache_layout(spec, 1, WINDOW, SEQ), prefill_outputs(spec)
    in_use = {"full": 0, "free": 0}
    for seed in range(STATES):
        generator = torch.Generator().manual_seed(seed)
        ids_1S = torch.randint(0, 16, (1, SEQ), generator=generator)
        length_1, position_1 = torch.tensor([1 + seed % SEQ]), torch.tensor([seed % (WINDOW - SEQ)])
        cache = [torch.randn(entry.shape, generator=generator) for entry in layout if entry.name != COUNTS]
        if prefill.sites:
            # Every third text has all slots in use.
            capacity = [prefill.capacity[site] for site in prefill.sites]
            used = [most if seed % 3 == 2 else min(most, seed % 4) for most in capacity]
            in_use["full" if seed % 3 == 2 else "free"] += 1
            cache.append(torch.tensor([used]))
        with torch.no_grad():
            expected = dict(zip(names, prefill(ids_1S, length_1, position_1, *cache), strict=True))
        tensors = (ids_1S, length_1, position_1, *cache)
        feeds = {key: tensor.numpy().copy() for key, tensor in zip(prefill_inputs(spec, WINDOW), tensors, strict=True)}
        caches = {key: torch.from_numpy(array.copy()) for key, array in feeds.items() if key.startswith(CACHES)}
        rows = {key: expected[key.replace("_", "_rows_")] for key in caches}
        append_rows(caches, rows, expected["slots"], expected["kept"])
        outputs = in_place(running, feeds, 0)
        for output in ("slots", "kept", "new_counts", "wanted") if prefill.sites else ("slots", "kept"):
            np.testing.assert_array_equal(outputs[output], expected[output].numpy())
        np.testing.assert_allclose(outputs["last_logits"], expected["last_logits"].numpy(), rtol=5e-5, atol=5e-5)
        for key, tensor in caches.items():
            layer = int(key.rpartition("_")[2])
            kept = int(expected["kept"][0, layer])
            if f"present_{key}" in outputs:
                # What is behind the kept tokens is padding.
                end = int(expected["slots"][0, layer]) + kept
                found, wanted = outputs[f"present_{key}"][:, :, :end], tensor.numpy()[:, :, :end]
            else:
                found, wanted = outputs[key.replace("_", "_rows_")][:, :, :kept], rows[key].numpy()[:, :, :kept]
            np.testing.assert_allclose(found, wanted, rtol=0, atol=5e-5)
    assert not prefill.sites or min(in_use.values()) > 0


def attention_of(model: ir.Model) -> ir.Node:
    """The first attention, of all tokens of a part."""
    return next(node for node in model.graph.all_nodes() if node.op_type == "Attention")


def hide_one_more(model: ir.Model) -> None:
    """Hides each token from itself."""
    (joined,) = {node for node in model.graph if node.op_type == "Concat" and node.outputs[0].name == "cat_3"}
    own = joined.inputs[1]
    assert own is not None
    assert own.const_value is not None
    shifted = np.tril(own.const_value.numpy(), -1)
    own.const_value = ir.tensor(shifted, name=own.name)


def read_what_is_not_in_use(model: ir.Model) -> None:
    less = next(node for node in model.graph if node.op_type == "Less" and node.outputs[0].shape == (1, WINDOW + SEQ))
    less.replace_input_with(0, less.inputs[1])


def other_values(model: ir.Model) -> None:
    attention = attention_of(model)
    attention.replace_input_with(2, attention.inputs[1])


def return_scores(model: ir.Model) -> None:
    """Returns the result of attention itself, so that it is read twice."""
    result = attention_of(model).outputs[0]
    model.graph.outputs.append(result)


@pytest.mark.parametrize("change", [hide_one_more, read_what_is_not_in_use, other_values, return_scores])
def test_an_attention_of_another_form_stays(change: Callable[[ir.Model], None]) -> None:
    model = prefill_graph_of(wide("normed heads"), SEQ)
    attentions = sum(node.op_type == "Attention" for node in model.graph)
    change(model)
    assert ContinuedAttention().run(model, OrtCpu.limits, "float32") < attentions - 1


@pytest.mark.slow
def test_it_is_for_one_row_and_heads_of_eight() -> None:
    for model in (prefill_graph_of(wide("dense"), SEQ, 2), prefill_graph_of(GENERATING["dense"], SEQ)):
        assert ContinuedAttention().run(model, OrtCpu.limits, "float32") == 0


def test_each_branch_returns_the_cache() -> None:
    model = rewritten("predictor")
    names = {value.name for value in model.graph.outputs}
    assert {"present_keys_0", "present_values_0", "present_keys_1", "present_values_1"} <= names
    (condition,) = [node for node in model.graph if branches_of(node)]
    assert [value.name for value in condition.outputs[1:]] == ["present_keys_0", "present_values_0"]
    for branch in branches_of(condition):
        makers = {value.producer().op_type for value in branch.outputs[1:]}  # type: ignore[union-attr]
        assert makers == {"GroupQueryAttention"}
