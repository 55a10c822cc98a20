"""Compares a model with its dense baseline layer by layer: routing, slots, FLOPs by part, weights, keys and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mod_export.measure.parts import PARTS
from mod_export.model.model import LayerCost, Model
from mod_export.report.charts import part_text
from mod_export.report.tables import table_lines
from mod_export.report.wording import bytes_text, count_text, flops_text, percent_text, ratio_text
from mod_export.types import Bucket, Site, is_expert

SHORT_NAMES = {"mlp": "MLP", "attention_projections": "projections"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The cost rows of one model at one bucket, in order, and their sums."""

    rows: Sequence[LayerCost]

    @property
    def flops_by_part(self) -> Mapping[str, int]:
        """Part -> FLOPs, for parts that have any, in the order of `PARTS`, followed by other parts."""
        flops: Counter[str] = Counter()
        for row in self.rows:
            flops.update(row.flops)
        return {part: flops[part] for part in dict.fromkeys([*PARTS, *flops]) if flops[part]}

    @property
    def flops(self) -> int:
        return sum(flops_of(row) for row in self.rows)

    @property
    def needed_flops(self) -> int:
        """FLOPs without the attention scores that a causal mask hides."""
        return sum(row.needed_flops for row in self.rows)

    @property
    def weight_bytes(self) -> int:
        return sum(row.weight_bytes for row in self.rows)

    @property
    def kv_bytes(self) -> int:
        return sum(row.kv_bytes for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Data of the tables and figures.

    Attributes:
        buckets: buckets in ascending order; absolute numbers are shown for the last one.
        mod: bucket -> costs of the model itself.
        dense: bucket -> costs of its dense baseline, with the same row names in the same order. None if the model has
            no baseline, or if no token skips a block, so that the baseline would equal the model.
    """

    buckets: tuple[Bucket, ...]
    mod: Mapping[Bucket, Costs]
    dense: Mapping[Bucket, Costs] | None

    @property
    def largest(self) -> Bucket:
        return self.buckets[-1]

    @property
    def own(self) -> Costs:
        """Costs of the model itself at the largest bucket."""
        return self.mod[self.largest]

    @property
    def baseline(self) -> Costs | None:
        """Costs of the dense baseline at the largest bucket; None if there is no baseline."""
        return None if self.dense is None else self.dense[self.largest]

    @property
    def drawn(self) -> Sequence[tuple[int, LayerCost, LayerCost | None]]:
        """(index, row of `own`, row of `baseline` or None) for each row that has FLOPs, as charts show them."""
        dense = self.baseline.rows if self.baseline else [None] * len(self.own.rows)
        rows = zip(self.own.rows, dense, strict=True)
        return [(index, row, dense_row) for index, (row, dense_row) in enumerate(rows) if row.flops]

    @property
    def most_flops(self) -> int:
        """The largest FLOPs of any single row, including rows of the dense baseline."""
        return max(flops_of(row) for _, *rows in self.drawn for row in rows if row)

    @property
    def parts(self) -> list[str]:
        """Parts that have FLOPs in the model or in its dense baseline."""
        return list(dict.fromkeys([*self.own.flops_by_part, *(self.baseline.flops_by_part if self.baseline else ())]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable:
    """A table of text cells. `total` holds the sums. Columns from index `numbers_from` on hold numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    total: Sequence[str]
    numbers_from: int

    def lines(self) -> list[str]:
        """Returns the table as lines of plain text."""
        return table_lines(self.head, self.rows, numbers_from=self.numbers_from, total=self.total)


def layers_of(model: Model, buckets: Sequence[Bucket]) -> Layers | None:
    """Computes the costs of a model and its dense baseline for at least one bucket; None if they are not declared."""
    mod, dense = _costs(model, buckets), model.dense()
    if mod is None:
        return None
    return Layers(
        buckets=tuple(sorted(buckets, key=lambda bucket: (bucket.batch * bucket.seq, bucket))),
        mod=mod,
        dense=None if dense is None else _costs(dense, buckets),
    )


def _costs(model: Model, buckets: Sequence[Bucket]) -> dict[Bucket, Costs] | None:
    layers = {bucket: model.layers(bucket.batch, bucket.seq) for bucket in buckets}
    costs = {bucket: Costs(rows=rows) for bucket, rows in layers.items() if rows is not None}
    return costs if len(costs) == len(layers) else None


def layer_lines(layers: Layers) -> list[str]:
    """Returns both tables as text. With up to five buckets and six parts they fit into 120 columns."""
    shares = "" if layers.dense is None else "; % of a bucket: of what the dense baseline costs there"
    flops = [f"FLOPs of {layers.largest.name}{shares}", *flops_table(layers).lines(), "", flops_sentence(layers)]
    return [*routing_table(layers).lines(), "", *flops]


def routing_table(layers: Layers) -> LayerTable:
    """Returns a table of each layer: routing, slots per row, weights, and keys and values at the largest bucket."""
    costs, baseline = layers.own, layers.baseline
    lengths = dict.fromkeys(bucket.seq for bucket in layers.buckets)
    first = {bucket.seq: bucket for bucket in reversed(layers.buckets)}
    rows = []
    for index, row in enumerate(costs.rows):
        selected = [tokens_text(layers.mod[first[seq]].rows[index].selected) for seq in lengths]
        dense = [] if baseline is None else [_bytes(baseline.rows[index].kv_bytes)]
        rows.append([row.name, row.routed or "-", *selected, _bytes(row.weight_bytes), _bytes(row.kv_bytes), *dense])
    sums = [
        _bytes(costs.weight_bytes),
        _bytes(costs.kv_bytes),
        *([] if baseline is None else [_bytes(baseline.kv_bytes)]),
    ]
    return LayerTable(
        head=[
            "layer", "routed", *(f"k of {seq:,}" for seq in lengths), "weights", f"KV {layers.largest.name}",
            *([] if baseline is None else ["dense KV"]),
        ],
        rows=rows,
        total=["all", "", *("" for _ in lengths), *sums],
        numbers_from=2,
    )  # fmt: skip


def flops_table(layers: Layers) -> LayerTable:
    """Returns a table of the FLOPs of the largest bucket by part. If there is a dense baseline, the table adds its
    FLOPs, and the share of them that the model needs in every bucket.
    """
    costs, dense = layers.own, layers.dense
    parts = list(costs.flops_by_part)
    rows = []
    for index, row, dense_row in layers.drawn:
        line = [row.name, *(_count(row.flops.get(part, 0)) for part in parts), _count(flops_of(row))]
        if dense_row is not None:
            line += [_count(flops_of(dense_row)), *(share_of(layers, bucket, index) for bucket in layers.buckets)]
        rows.append(line)
    head = ["layer", *map(part_name, parts), "FLOPs"]
    total = ["all", *(_count(flops) for flops in costs.flops_by_part.values()), _count(costs.flops)]
    if dense is not None:
        head += ["dense", *(f"% {bucket.name}" for bucket in layers.buckets)]
        shares = [percent_text(layers.mod[bucket].flops / dense[bucket].flops) for bucket in layers.buckets]
        total += [_count(dense[layers.largest].flops), *shares]
    return LayerTable(head=head, rows=rows, total=total, numbers_from=1)


def flops_sentence(layers: Layers) -> str:
    """States the FLOPs of the largest bucket, the share that the causal mask hides, and those of the dense baseline."""
    costs = layers.own
    hidden = percent_text((costs.flops - costs.needed_flops) / costs.flops)
    sentence = f"{layers.largest.name}: {flops_text(costs.flops)}, of which the causal mask hides {hidden}"
    if layers.baseline is None:
        return sentence
    dense = layers.baseline.flops
    return f"{sentence}; the dense baseline {flops_text(dense)}, {ratio_text(dense / costs.flops)}"


def share_of(layers: Layers, bucket: Bucket, index: int) -> str:
    """FLOPs of a row as a share of those in the dense baseline, such as 12.4 %; a dash if the baseline has none."""
    assert layers.dense is not None
    flops, baseline = flops_of(layers.mod[bucket].rows[index]), flops_of(layers.dense[bucket].rows[index])
    return percent_text(flops / baseline if baseline else None)


def tokens_text(selected: Mapping[Site, int]) -> str:
    """Slots of the routing sites of one layer: "64", "64 + 64", or with eight experts of 10 slots "64, 8 x 10"."""
    experts = Counter(k for site, k in selected.items() if is_expert(site))
    others = " + ".join(f"{k:,}" for site, k in selected.items() if not is_expert(site))
    text = ", ".join(filter(None, [others, *(f"{count} x {k:,}" for k, count in experts.items())]))
    return text or "-"


def part_name(part: str) -> str:
    """Short name of a part of the model, for headings."""
    return SHORT_NAMES.get(part, part_text(part))


def flops_of(row: LayerCost) -> int:
    """Sum of the FLOPs of all parts of a row."""
    return sum(row.flops.values())


def _bytes(count: int) -> str:
    return bytes_text(count) if count else "-"


def _count(flops: int) -> str:
    return count_text(flops) if flops else "-"
