"""Queries that are scaled in place of scores: the operator gives what it gave before."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import session

from mod_export.engines.ort import OrtCpu
from mod_export.graph.rewrites.scaled_queries import ScaledQueries

B, H, G, L, E, USED = 2, 4, 2, 8, 16, 5


def attention(tokens: int, *, packed: bool, attributes: str) -> ir.Model:
    width = H + 2 * G if packed else H
    own = "" if packed else f", float[{B},{tokens},{G * E}] k, float[{B},{tokens},{G * E}] v"
    names = "q, , " if packed else "q, k, v"
    return ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["": 23, "com.microsoft": 1]>
        attention (float[{B},{tokens},{width * E}] q{own}, float[{B},{G},{L},{E}] keys, float[{B},{G},{L},{E}] values,
        int32[{B}] last, int32 slots)
        => (float[{B},{tokens},{H * E}] y, float[{B},{G},{L},{E}] new_keys, float[{B},{G},{L},{E}] new_values) {{
          y, new_keys, new_values = com.microsoft.GroupQueryAttention
            <num_heads = {H}, kv_num_heads = {G}{attributes}> ({names}, keys, values, last, slots)
        }}"""
    )


def results(model: ir.Model) -> list[np.ndarray]:
    running, rng = session(model), np.random.default_rng(0)
    feeds = {
        item.name: rng.standard_normal(item.shape, np.float32)
        for item in running.get_inputs()
        if item.type == "tensor(float)"
    }
    feeds |= {"last": np.array([USED, USED - 2], np.int32), "slots": np.array(L, np.int32)}
    return list(running.run(None, feeds))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("attributes", ["", ", scale = 0.3"])
def test_the_operator_gives_what_it_gave(packed: bool, attributes: str) -> None:
    model = attention(1, packed=packed, attributes=attributes)
    before = results(model)
    assert ScaledQueries().run(model, OrtCpu.limits, "float32") == 1
    (node,) = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    assert (node.attributes["scale"].as_float(), node.attributes["qk_output"].as_int()) == (1.0, 1)
    for found, expected in zip(results(model), before, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert ScaledQueries().run(model, OrtCpu.limits, "float32") == 0


def test_several_tokens_stay_as_they_are() -> None:
    model = attention(2, packed=False, attributes="")
    assert ScaledQueries().run(model, OrtCpu.limits, "float32") == 0


def test_queries_whose_result_nobody_reads_are_not_scaled() -> None:
    model = attention(1, packed=False, attributes="")
    model.graph.outputs.pop(0)
    assert ScaledQueries().run(model, OrtCpu.limits, "float32") == 1
    assert [node.op_type for node in model.graph] == ["GroupQueryAttention"]
    assert len(results(model)) == 2


@pytest.mark.parametrize(("machine", "scaled"), [("x86_64", True), ("AMD64", True), ("aarch64", False)])
def test_only_for_processors_whose_products_have_a_kernel_for_one_row(
    machine: str, scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mod_export.engines.ort.platform.machine", lambda: machine)
    assert OrtCpu().limits_here().scaled_queries == scaled
