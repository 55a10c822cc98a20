"""Explains why a model is not faster than its dense baseline. Only causes that the numbers support are named."""

from __future__ import annotations

from collections.abc import Mapping

from mod_export.rows.cost import CostRow, PartRow, not_counted_text
from mod_export.types import Bucket, ModelKind, Setting, Site, is_expert

WORTH_HAVING = 1.1
"""A predicted ratio below this is itself the reason: fixed costs of routing use up the small saving of FLOPs."""
LARGE_SHARE = 1 / 3
"""A part with a larger share of the remaining FLOPs limits the speed-up, whatever is saved elsewhere."""
FEW_ROWS = 16
"""A matrix product of at most this many rows would take little longer with more. Kernels work on tiles of 4 to 16 rows
on CPUs, of 64 and more on GPUs; a smaller product is padded to a tile, and reads each weight for a few FLOPs."""
FEW_FLOP_PER_BYTE = 4.0
"""Every current processor can do more float32 FLOPs than this in the time that it takes to read a byte from memory."""
SLOW_GFLOPS = 2.0
"""One core of any current CPU multiplies large matrices ten times as fast."""
BLOCKS = ("attention_projections", "attention", "experts", "mlp")
"""Parts that routing makes smaller."""
NOTHING_SKIPPED = "no token skips a block, and skipping is what saves time"
HELD_BACK = {
    "head": "the head, which runs for every token, is {percent:.0f} % of the MoD model's FLOPs",
    "attention": "attention scores, quadratic in the layers that are not routed, are {percent:.0f} % of them",
    "attention_projections": "projections of the layers that are not routed are {percent:.0f} % of them",
}


def explain(
    setting: Setting,
    dense: CostRow,
    mod: CostRow,
    *,
    flops: Mapping[ModelKind, int] | None,
    dense_ms: float,
    k_by_layer: Mapping[Site, int] | None = None,
    dense_parts: Mapping[str, PartRow] | None = None,
    mod_parts: Mapping[str, PartRow] | None = None,
) -> str:
    """Returns what FLOPs predict, and the causes that keep the model from reaching it.

    Args:
        setting: dtype and bucket of the engines.
        dense: FLOPs and bytes of the dense baseline's portable graph.
        mod: FLOPs and bytes of the model's portable graph.
        flops: FLOPs of each model that its prediction follows from, those of the engines if known; None if nothing can
            be predicted.
        dense_ms: median latency of the dense baseline, milliseconds.
        k_by_layer: routing site -> slots; None if not known.
        dense_parts: part -> its time in the dense engine, as far as known.
        mod_parts: part -> its time in the model's engine, as far as known.
    """
    # Experts divide the tokens of a layer among themselves; only depth routing lets tokens skip it.
    depth = {site: k for site, k in (k_by_layer or {}).items() if not is_expert(site)}
    skips_nothing = k_by_layer is not None and not depth
    if flops is None:
        unknown = not_counted_text(dense.not_counted | mod.not_counted)
        why = f"not all were counted ({unknown})" if unknown else "the model has no product of matrices"
        return "; ".join([f"FLOPs predict nothing: {why}", *([NOTHING_SKIPPED] if skips_nothing else [])])
    predicted, bucket = flops["dense"] / flops["mod"], setting.bucket
    if skips_nothing:
        causes = [NOTHING_SKIPPED]
    elif predicted < WORTH_HAVING:
        causes = _of_flops(bucket, dense, mod, depth)
    else:
        known = [
            *_of_parts(dense_parts or {}, mod_parts or {}),
            *_of_fixed_costs(flops["dense"], dense_ms),
            *_of_few_rows(bucket, depth),
            # Bytes are counted in float32, and other dtypes compute faster too.
            *(_of_memory(flops["mod"], mod) if setting.dtype == "float32" else ()),
        ]
        causes = known[:2] or ["no cause that can be counted explains the rest; a profile of the engine may show one"]
    return "; ".join([f"FLOPs predict {predicted:.2f}x", *causes])


def _of_flops(bucket: Bucket, dense: CostRow, mod: CostRow, k_by_layer: Mapping[Site, int]) -> list[str]:
    """Explains why routing removes so few FLOPs."""
    shares = {part: mod.flops_by_part.get(part, 0) / max(1, mod.flops) for part in HELD_BACK}
    largest = sorted((part for part in HELD_BACK if shares[part] > LARGE_SHARE), key=lambda part: -shares[part])
    before, after = (sum(row.flops_by_part.get(part, 0) for part in BLOCKS) for row in (dense, mod))
    layers = "routed layer" if len(k_by_layer) == 1 else "routed layers"
    by = f" by {len(k_by_layer)} {layers} with k = {_range(k_by_layer)} of {bucket.seq}" if k_by_layer else ""
    removed = f"routing removes {100 * (1 - after / before):.0f} % of the blocks' FLOPs{by}" if before else ""
    held_back = (HELD_BACK[part].format(percent=100 * shares[part]) for part in largest[:1])
    return [*held_back, *([removed] if removed else [])]


def _of_parts(dense: Mapping[str, PartRow], mod: Mapping[str, PartRow]) -> list[str]:
    """Names the part that takes the most time beyond what its FLOPs suggest: its time in the dense baseline, scaled by
    the ratio of its FLOPs in the two models.
    """
    worst = ("", 0.0, 0.0, 0.0)
    for part, row in mod.items():
        baseline = dense.get(part)
        ms, spent = row.measured_ms or 0.0, (baseline and baseline.measured_ms) or 0.0
        # Parts without FLOPs, such as norms, are not expected to become cheaper.
        fair = spent * row.flops / baseline.flops if baseline is not None and baseline.flops else spent
        if ms - fair > worst[1] - worst[2]:
            worst = (part, ms, fair, spent)
    part, ms, fair, spent = worst
    if not part:
        return []
    if not spent:
        return [f"{part} takes {ms:.3g} ms of the profile, and the dense baseline has none"]
    return [f"{part} takes {ms:.3g} ms, where its FLOPs would leave {fair:.3g} of the dense baseline's {spent:.3g} ms"]


def _of_fixed_costs(dense_flops: int, dense_ms: float) -> list[str]:
    gflops = dense_flops / dense_ms / 1e6 if dense_ms > 0 else float("inf")
    if not gflops < SLOW_GFLOPS:
        return []
    return [f"even the dense baseline reaches {gflops:.2g} GFLOP/s only: fixed costs of operators take the time"]


def _of_few_rows(bucket: Bucket, k_by_layer: Mapping[Site, int]) -> list[str]:
    rows = bucket.batch * min((k for k in k_by_layer.values() if k), default=FEW_ROWS + 1)
    if rows > FEW_ROWS:
        return []
    return [
        f"routed layers multiply {rows} row{'' if rows == 1 else 's'} at a time (k = {_range(k_by_layer)} of "
        f"{bucket.seq}), which takes hardly less time than more rows would"
    ]


def _of_memory(mod_flops: int, mod: CostRow) -> list[str]:
    moved = mod.weight_bytes + mod.activation_bytes
    if not moved or mod_flops / moved >= FEW_FLOP_PER_BYTE:
        return []
    return [
        f"memory-bound: {mod_flops / moved:.1f} FLOP for each byte of weights and activations, and routing "
        "does not make the weights smaller"
    ]


def _range(k_by_layer: Mapping[Site, int]) -> str:
    low, high = min(k_by_layer.values()), max(k_by_layer.values())
    return str(low) if low == high else f"{low} to {high}"
