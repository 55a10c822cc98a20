"""The tables of layers: their contents and their totals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from packages import WithoutBaseline

from mod_export.inspect.layers import (
    Costs,
    Layers,
    LayerTable,
    flops_of,
    flops_table,
    layer_lines,
    layers_of,
    part_name,
    routing_table,
    share_of,
    tokens_text,
)
from mod_export.model.model import Model
from mod_export.types import Bucket

ALL = ["dense", "experts", "routed", "routed apart", "staged MoDE", "threshold"]


@pytest.mark.parametrize("kind", ALL)
def test_tables_of_every_kind(loaded: Callable[[str], Model], layers: Callable[[str], Layers], kind: str) -> None:
    """Rows fit their heads, totals are sums, and a dense baseline is shown only if it is another model."""
    found, baseline = layers(kind), kind not in ("dense", "experts")
    for table in (routing_table(found), flops_table(found)):
        assert {len(row) for row in (*table.rows, table.total)} == {len(table.head)}
    lines = layer_lines(found)
    assert max(map(len, lines)) <= 120
    assert all(line.isascii() and line == line.rstrip() for line in lines)
    assert (found.dense is not None) is any("dense" in line for line in lines) is baseline
    for costs in (*found.mod.values(), *(found.dense or {}).values()):
        assert sum(costs.flops_by_part.values()) == costs.flops == sum(map(flops_of, costs.rows))
        assert 0 < costs.needed_flops < costs.flops
        assert costs.kv_bytes == sum(row.kv_bytes for row in costs.rows)
    stored = sum(tensor.numel() * 4 for tensor in loaded(kind).weights.values())
    assert found.mod[Bucket(1, 128)].weight_bytes == stored


def test_routed_layers_are_held_against_the_dense_baseline(layers: Callable[[str], Layers]) -> None:
    found = layers("routed")
    table = routing_table(found)
    assert table.head == ["layer", "routed", "k of 128", "k of 256", "weights", "KV b1s256", "dense KV"]
    assert table.rows[2][1:4] == ["block by topk", "16", "32"]
    assert table.rows[2][5:] == ["4.0 KiB", "32.0 KiB"]
    largest = Bucket(1, 256)
    assert share_of(found, largest, 1) == "100.0 %"
    assert found.baseline is not None
    own, dense = (flops_of(costs.rows[2]) for costs in (found.own, found.baseline))
    assert share_of(found, largest, 2) == f"{100 * own / dense:.1f} %"
    assert share_of(found, largest, 0) == "-", "an embedding multiplies nothing"


def test_a_model_without_a_baseline_is_shown_alone(loaded: Callable[[str], Model]) -> None:
    routed: Any = loaded("routed")
    alone: Any = WithoutBaseline(routed.checkpoint)
    found = layers_of(alone, [Bucket(1, 128)])
    assert found.dense is None
    assert not any("dense" in line for line in layer_lines(found))


def test_buckets_of_one_length_have_one_column_of_k(loaded: Callable[[str], Model]) -> None:
    found = layers_of(loaded("routed"), [Bucket(4, 64), Bucket(1, 64), Bucket(1, 128)])
    assert found.largest == Bucket(4, 64)
    assert routing_table(found).head[2:4] == ["k of 64", "k of 128"]
    assert flops_table(found).head[-3:] == ["% b1s64", "% b1s128", "% b4s64"]


@pytest.mark.parametrize(
    ("selected", "text"),
    [
        ({}, "-"),
        ({3: 1024}, "1,024"),
        ({"3.attention": 4, "3.mlp": 4}, "4 + 4"),
        ({"3.expert0": 5, "3.expert1": 5}, "2 x 5"),
        ({3: 8, "3.expert0": 5, "3.expert1": 5}, "8, 2 x 5"),
    ],
)
def test_tokens_of_a_layer(selected: dict[int | str, int], text: str) -> None:
    assert tokens_text(selected) == text


def test_parts_are_named_for_people() -> None:
    assert [part_name(part) for part in ("mlp", "attention_projections", "a_new_part")] == [
        "MLP", "projections", "a new part",
    ]  # fmt: skip


def test_a_part_that_nobody_knows_is_counted(layers: Callable[[str], Layers]) -> None:
    row = layers("dense").mod[Bucket(1, 128)].rows[-1]
    other = type(row)(
        name="x", routed="", selected={}, flops={"convolution": 7}, needed_flops=7, weight_bytes=0, kv_bytes=0
    )
    assert Costs(rows=[row, other]).flops_by_part == {"head": flops_of(row), "convolution": 7}


def test_a_total_stands_apart() -> None:
    table = LayerTable(head=["a", "n"], rows=[["x", "1"], ["y", "10"]], total=["all", "11"], numbers_from=1)
    assert [line.replace(" ", "") for line in table.lines()] == ["an", "-" * 7, "x1", "y10", "-" * 7, "all11"]
