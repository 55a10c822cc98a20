"""Why measured and predicted speed-up differ: reasons in words, and what each part of the model contributes.

A cause that the numbers do not support is not named. The contributions: with d and m for the milliseconds of a part in
the dense and in the MoD engine, upper case for the sums over the parts, and ' for predicted, the speed-ups are
S = D / M and S' = D' / M'. Because D' - S' M' = 0,

    S - S' = (D - S' M) / M = ((D - D') - S' (M - M')) / M = sum over parts of ((d - d') - S' (m - m')) / M

So a part that takes as long as predicted in both engines contributes nothing; time that the dense engine loses beyond
its prediction raises the speed-up, time that the MoD engine loses lowers it, S' times as much. The contributions add up
to the difference exactly. Times are those of the profiles, so S may differ from the ratio of latencies by what a
profile leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mod_export.results.cost import CostRow, PartRow
from mod_export.types import Bucket, Site, is_expert

__all__ = ["Gap", "GapRow", "explain", "gaps_of"]

WORTH_HAVING = 1.1
"""A predicted ratio below this is itself the reason: fixed costs of routing eat what little FLOPs promise."""
LARGE_SHARE = 1 / 3
"""Of the FLOPs that are left: a part this large holds back more than all savings elsewhere can bring."""
FEW_ROWS = 16
"""Rows of a matrix product. Kernels work on tiles of 4 to 16 rows on CPUs, 64 and more on GPUs; what is smaller is
padded to a tile, and reads each weight for a few FLOPs."""
FEW_FLOP_PER_BYTE = 4.0
"""Every current processor can do more than this many float32 FLOPs in the time in which it reads a byte from memory."""
SLOW_GFLOPS = 2.0
"""One core of any current CPU multiplies large matrices ten times as fast."""
BLOCKS = ("attention_projections", "attention", "experts", "mlp")
"""Parts that routing makes smaller."""
HELD_BACK = {
    "head": "the head, which runs for every token, is {percent:.0f} % of the MoD model's FLOPs",
    "attention": "attention scores, quadratic in the layers that are not routed, are {percent:.0f} % of them",
    "attention_projections": "projections of the layers that are not routed are {percent:.0f} % of them",
}


def explain(
    bucket: Bucket,
    dense: CostRow,
    mod: CostRow,
    *,
    dense_ms: float,
    k_by_layer: Mapping[Site, int] | None = None,
    parts: Sequence[PartRow] = (),
) -> str:
    """One sentence or two: what FLOPs predict, and what stands against it.

    Args:
        bucket: batch and sequence.
        dense: FLOPs and bytes of the dense baseline.
        mod: likewise of the model.
        dense_ms: median latency of the dense baseline, milliseconds.
        k_by_layer: tokens that each routed layer takes of a row; None where it is not known.
        parts: measured parts of both engines; may be empty.
    """
    # Experts divide the tokens of a layer among themselves; only depth routing takes tokens away.
    known = k_by_layer is not None
    k_by_layer = {site: k for site, k in (k_by_layer or {}).items() if not is_expert(site)}
    predicted = dense.flops / mod.flops
    if known and not k_by_layer:
        return _sentences(
            [f"FLOPs predict {predicted:.2f}x", "no token skips a block, and skipping is what saves time"]
        )
    if predicted < WORTH_HAVING:
        return _sentences([f"FLOPs predict {predicted:.2f}x", *_of_flops(bucket, dense, mod, k_by_layer)])
    causes = [
        *_of_parts(parts),
        *_of_fixed_costs(dense, dense_ms),
        *_of_few_rows(bucket, k_by_layer),
        *_of_memory(mod),
    ]
    unknown = "no cause that can be counted accounts for the rest; a profile of the engine may"
    return _sentences([f"FLOPs predict {predicted:.2f}x", *(causes[:2] or [unknown])])


def _sentences(parts: Sequence[str]) -> str:
    return "; ".join(parts)


def _of_flops(bucket: Bucket, dense: CostRow, mod: CostRow, k_by_layer: Mapping[Site, int]) -> list[str]:
    """Why routing removes so little."""
    shares = {part: mod.flops_by_part.get(part, 0) / mod.flops for part in HELD_BACK}
    largest = sorted((part for part in HELD_BACK if shares[part] > LARGE_SHARE), key=lambda part: -shares[part])
    before, after = (sum(row.flops_by_part.get(part, 0) for part in BLOCKS) for row in (dense, mod))
    layers = "routed layer" if len(k_by_layer) == 1 else "routed layers"
    took = f" by {len(k_by_layer)} {layers} with k = {_range(k_by_layer)} of {bucket.seq}" if k_by_layer else ""
    removed = f"routing removes {100 * (1 - after / before):.0f} % of the blocks' FLOPs{took}" if before else ""
    return [
        *(HELD_BACK[part].format(percent=100 * shares[part]) for part in largest[:1]),
        *([removed] if removed else []),
    ]


def _of_parts(parts: Sequence[PartRow]) -> list[str]:
    """The part whose time lies farthest above what its FLOPs leave of the dense baseline's time."""
    timed = {(row.model, row.part): row for row in parts if row.measured_ms is not None}
    worst = ("", 0.0, 0.0, 0.0)
    for (model, part), row in timed.items():
        dense_part = timed.get(("dense", part))
        if model != "mod" or row.measured_ms is None:
            continue
        spent = dense_part.measured_ms if dense_part is not None and dense_part.measured_ms is not None else 0.0
        # What has no FLOPs, such as norms, is not promised to become cheaper.
        fair = spent * row.flops / dense_part.flops if dense_part is not None and dense_part.flops else spent
        if row.measured_ms - fair > worst[1] - worst[2]:
            worst = (part, row.measured_ms, fair, spent)
    part, took, fair, spent = worst
    if not part:
        return []
    if not spent:
        return [f"{part} takes {took:.3g} ms of the profile, and the dense baseline has none"]
    return [
        f"{part} takes {took:.3g} ms, where its FLOPs would leave {fair:.3g} of the dense baseline's {spent:.3g} ms"
    ]


def _of_fixed_costs(dense: CostRow, dense_ms: float) -> list[str]:
    gflops = dense.flops / dense_ms / 1e6 if dense_ms > 0 else float("inf")
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


def _of_memory(mod: CostRow) -> list[str]:
    moved = mod.weight_bytes + mod.activation_bytes
    if not moved or mod.flops / moved >= FEW_FLOP_PER_BYTE:
        return []
    return [
        f"memory-bound: {mod.flops / moved:.1f} FLOP for each byte of weights and activations, and routing "
        "does not make the weights smaller"
    ]


def _range(k_by_layer: Mapping[Site, int]) -> str:
    low, high = min(k_by_layer.values()), max(k_by_layer.values())
    return str(low) if low == high else f"{low} to {high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GapRow:
    """One part of both engines; a part that one of them lacks takes it 0 ms.

    Attributes:
        part: of the model.
        dense_ms: measured.
        mod_ms: measured.
        dense_predicted_ms: by the roofline.
        mod_predicted_ms: by the roofline.
        ratio: dense_ms / mod_ms; None where the MoD engine spends no time.
        predicted_ratio: the same of the predictions.
        contribution: to the gap, in units of the speed-up.
    """

    part: str
    dense_ms: float
    mod_ms: float
    dense_predicted_ms: float
    mod_predicted_ms: float
    ratio: float | None
    predicted_ratio: float | None
    contribution: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """One setting: `measured` is the speed-up of the profiled times, `predicted` that of the roofline, and the
    contributions of `rows` add up to measured - predicted.
    """

    target: str
    bucket: str
    dtype: str
    measured: float
    predicted: float
    rows: tuple[GapRow, ...]


def gaps_of(parts: Iterable[PartRow]) -> tuple[Gap, ...]:
    """One for each setting whose two engines were both profiled, in the order of `parts`."""
    settings: dict[tuple[str, str, str], list[PartRow]] = {}
    for row in parts:
        settings.setdefault((row.target, row.bucket, row.dtype), []).append(row)
    found = (_gap(*setting, rows) for setting, rows in settings.items())
    return tuple(gap for gap in found if gap is not None)


def _gap(target: str, bucket: str, dtype: str, rows: Sequence[PartRow]) -> Gap | None:
    dense = {row.part: row for row in rows if row.model == "dense"}
    mod = {row.part: row for row in rows if row.model == "mod"}
    D, M = _measured(dense), _measured(mod)
    predicted_D, predicted_M = (sum(row.predicted_ms for row in model.values()) for model in (dense, mod))
    if not D or not M or not predicted_M:
        return None
    predicted = predicted_D / predicted_M
    names = dict.fromkeys(row.part for row in (*mod.values(), *dense.values()))
    return Gap(
        target=target,
        bucket=bucket,
        dtype=dtype,
        measured=D / M,
        predicted=predicted,
        rows=tuple(_row(name, dense.get(name), mod.get(name), predicted, M) for name in names),
    )


def _row(part: str, dense: PartRow | None, mod: PartRow | None, predicted: float, M: float) -> GapRow:
    d, m = ((row.measured_ms or 0.0) if row else 0.0 for row in (dense, mod))
    predicted_d, predicted_m = (row.predicted_ms if row else 0.0 for row in (dense, mod))
    return GapRow(
        part=part,
        dense_ms=d,
        mod_ms=m,
        dense_predicted_ms=predicted_d,
        mod_predicted_ms=predicted_m,
        ratio=d / m if m else None,
        predicted_ratio=predicted_d / predicted_m if predicted_m else None,
        contribution=((d - predicted_d) - predicted * (m - predicted_m)) / M,
    )


def _measured(rows: Mapping[str, PartRow]) -> float | None:
    """Milliseconds of a profiled engine; None for one that was not profiled."""
    times = [row.measured_ms for row in rows.values()]
    known = [ms for ms in times if ms is not None]
    return sum(known) if known and len(known) == len(times) else None
