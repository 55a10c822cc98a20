"""Attention that cannot fit into memory is refused before anything is run."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from small_graphs import parsed

from mod_export.engines import ENGINES
from mod_export.errors import LimitError
from mod_export.stages.passes import check_memory
from mod_export.types import Bucket, Graph

GRAPH = Graph(
    path="g.onnx", model="mod", bucket=Bucket(1, 65_536), dtype="float32", target=None, k_by_layer={}
)  # fmt: skip


def attention(tokens: int) -> ir.Model:
    """A causal attention of one head over this many tokens."""
    size = f"float[1,1,{tokens},8]"
    return parsed(f"g ({size} q, {size} k, {size} v) => ({size} y) {{ y = Attention <is_causal: int = 1> (q, k, v) }}")


def test_scores_beyond_memory() -> None:
    message = (
        r"ort-cpu, mod b1s65536: attention over 65536 tokens holds about 1953 GiB of scores, \d+ GiB are free; "
        r"build this bucket for other targets \(--target\), or a shorter one"
    )
    with pytest.raises(LimitError, match=message):
        check_memory(ENGINES["ort-cpu"], GRAPH, attention(512_000))
    check_memory(ENGINES["ort-cpu"], GRAPH, attention(64))
    # A target that never holds all scores.
    check_memory(ENGINES["inductor"], GRAPH, attention(512_000))
