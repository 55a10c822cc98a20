"""Reasons follow from numbers: each appears if its number calls for it, and not otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from sample_rows import cost_row, part_row

from mod_export.measure.explain import explain
from mod_export.measure.parts import PARTS
from mod_export.rows.cost import CostRow, PartRow
from mod_export.types import Bucket, DType, ModelKind, Setting

BUCKET = Bucket(1, 512)
K = {1: 64, 3: 64}


def timed(**found: tuple[int, float | None]) -> dict[str, PartRow]:
    """Rows by part, from (FLOPs, milliseconds)."""
    return {part: part_row(part=part, flops=flops, measured_ms=ms) for part, (flops, ms) in found.items()}


def cost(model: ModelKind, weight_bytes: int = 10**6, **mflops: int) -> CostRow:
    by_part = dict.fromkeys(PARTS, 0) | {part: count * 10**6 for part, count in mflops.items()}
    return cost_row(
        sum(by_part.values()), model=model, flops_by_part=by_part, weight_bytes=weight_bytes, activation_bytes=10**6
    )


def setting(bucket: Bucket, dtype: DType) -> Setting:
    return Setting(target="ort-cpu", dtype=dtype, model="mod", role="forward", bucket=bucket)


def said(dense: CostRow, mod: CostRow, **known: Any) -> str:
    flops = None if dense.not_counted | mod.not_counted or not mod.flops else {"dense": dense.flops, "mod": mod.flops}
    fields: dict[str, Any] = {"flops": flops, "dense_ms": dense.flops / 50e6, "k_by_layer": K, **known}
    return explain(setting(fields.pop("bucket", BUCKET), fields.pop("dtype", "float32")), dense, mod, **fields)


@pytest.mark.parametrize(
    ("dense", "mod", "words"),
    [
        ({"mlp": 400, "head": 4600}, {"mlp": 200, "head": 4600},
         ["1.04x", "the head, which runs for every token, is 96 % of the MoD model's FLOPs", "50 %"]),
        ({"mlp": 1050, "attention": 4000}, {"mlp": 1000, "attention": 4000},
         ["1.01x", "attention scores, quadratic in the layers that are not routed, are 80 % of them", "1 %"]),
        ({"mlp": 1050, "attention_projections": 4000}, {"mlp": 1000, "attention_projections": 4000},
         ["1.01x", "projections of the layers that are not routed are 80 % of them", "1 %"]),
    ],
)  # fmt: skip
def test_a_part_that_holds_most_flops(dense: dict[str, int], mod: dict[str, int], words: list[str]) -> None:
    predicted, part, removed = words
    assert said(cost("dense", **dense), cost("mod", **mod)).split("; ") == [
        f"FLOPs predict {predicted}", part,
        f"routing removes {removed} of the blocks' FLOPs by 2 routed layers with k = 64 of 512",
    ]  # fmt: skip


def test_what_is_not_known_of_routing_is_not_said() -> None:
    few = cost("dense", mlp=1000), cost("mod", mlp=960)
    removed = "FLOPs predict 1.04x; routing removes 4 % of the blocks' FLOPs"
    assert said(*few, k_by_layer={1: 448}) == f"{removed} by 1 routed layer with k = 448 of 512"
    assert said(*few, k_by_layer=None) == removed
    assert said(cost("dense", other=1000), cost("mod", other=1000), k_by_layer=None) == "FLOPs predict 1.00x"


def test_a_model_in_which_no_token_is_skipped() -> None:
    same = cost("dense", mlp=1000), cost("mod", mlp=1000)
    words = "FLOPs predict 1.00x; no token skips a block, and skipping is what saves time"
    assert said(*same, k_by_layer={}) == said(*same, k_by_layer={"0.expert0": 8}) == words


DENSE, MOD = cost("dense", mlp=4000), cost("mod", mlp=2000)


def test_nothing_is_made_up() -> None:
    assert said(DENSE, MOD) == (
        "FLOPs predict 2.00x; no cause that can be counted explains the rest; a profile of the engine may show one"
    )


@pytest.mark.parametrize(
    ("k", "batch", "rows"), [(16, 1, "16 rows"), (1, 1, "1 row"), (4, 2, "8 rows"), (17, 1, ""), (9, 2, ""), (0, 1, "")]
)
def test_few_rows(k: int, batch: int, rows: str) -> None:
    reason = said(DENSE, MOD, bucket=Bucket(batch, 512), k_by_layer={1: k, 3: 64, 5: 0})
    few = f"; routed layers multiply {rows} at a time (k = 0 to 64 of 512), which takes hardly"
    assert few in reason if rows else "rows" not in reason


def test_bound_by_memory() -> None:
    heavy = {"weight_bytes": 999 * 10**6}
    assert said(cost("dense", mlp=4000, **heavy), cost("mod", mlp=2000, **heavy)) == (
        "FLOPs predict 2.00x; memory-bound: 2.0 FLOP for each byte of weights and activations, and routing does not "
        "make the weights smaller"
    )


def test_bytes_of_float32_say_nothing_about_other_dtypes() -> None:
    heavy = {"weight_bytes": 999 * 10**6}
    both = cost("dense", mlp=4000, **heavy), cost("mod", mlp=2000, **heavy)
    assert "memory-bound" in said(*both)
    assert "memory-bound" not in said(*both, dtype="bfloat16")


def test_the_flops_of_the_engines_predict() -> None:
    """Attention in blocks of queries leaves out most of what the causal mask hides, which the portable graphs count."""
    flops = {"dense": 3000 * 10**6, "mod": 1000 * 10**6}
    assert said(DENSE, MOD, flops=flops).startswith("FLOPs predict 3.00x; no cause")
    # Half of the FLOPs of the portable graph in the same time is half the rate.
    slow = said(DENSE, MOD, flops={"dense": 2000 * 10**6, "mod": 1000 * 10**6}, dense_ms=1900.0)
    assert "even the dense baseline reaches 1.1 GFLOP/s only" in slow
    lacking = MOD.model_copy(update={"not_counted": {"Loop": 2}})
    assert said(DENSE, lacking, flops=flops).startswith("FLOPs predict 3.00x; ")


def test_fixed_costs() -> None:
    assert said(DENSE, MOD, dense_ms=4000.0) == (
        "FLOPs predict 2.00x; even the dense baseline reaches 1 GFLOP/s only: fixed costs of operators take the time"
    )
    assert "fixed" not in said(DENSE, MOD, dense_ms=2000.0)


def test_the_part_that_takes_longer_than_its_flops_is_named_first() -> None:
    dense = timed(mlp=(4000, 8.0), head=(1000, 2.0))
    mod = timed(mlp=(2000, 7.0), head=(1000, 2.0), routing=(10, 1.5), other=(0, None))
    first = "FLOPs predict 2.00x; mlp takes 7 ms, where its FLOPs would leave 4 of the dense baseline's 8 ms"
    assert said(DENSE, MOD, dense_parts=dense, mod_parts=mod) == first
    slow = said(DENSE, MOD, dense_parts=dense, mod_parts=mod, dense_ms=4000.0)
    assert slow.startswith(f"{first}; even the dense baseline")


def test_a_part_that_only_routing_has() -> None:
    dense, mod = timed(mlp=(4000, 8.0), other=(0, 3.0)), timed(mlp=(2000, 4.0), other=(0, 3.0), routing=(10, 1.5))
    found = said(DENSE, MOD, dense_parts=dense, mod_parts=mod)
    assert "; routing takes 1.5 ms of the profile, and the dense baseline has none" in found
    # The other parts took the time that their FLOPs predict, which explains nothing.
    del mod["routing"]
    assert said(DENSE, MOD, dense_parts=dense, mod_parts=mod) == said(DENSE, MOD)


def test_nothing_is_predicted_from_flops_that_were_not_all_counted() -> None:
    dense, mod = cost("dense", mlp=400), cost("mod", mlp=200)
    lacking = mod.model_copy(update={"not_counted": {"Loop": 2}})
    nothing = "FLOPs predict nothing: not all were counted (Loop (2))"
    assert said(dense, lacking) == said(dense.model_copy(update={"not_counted": {"Loop": 2}}), mod) == nothing
    skipped = f"{nothing}; no token skips a block, and skipping is what saves time"
    assert said(dense, lacking, k_by_layer={}) == skipped
    assert said(dense, cost("mod")) == "FLOPs predict nothing: the model has no product of matrices"
