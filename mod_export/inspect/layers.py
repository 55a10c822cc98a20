"""A model layer by layer, beside its dense baseline: routing, tokens, FLOPs by part, weights, keys and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mod_export.measure.model_parts import PARTS
from mod_export.model.model import Model
from mod_export.model.protocol import ExportableModel, LayerCost, LayerCosts
from mod_export.report.charts import part_text
from mod_export.report.tables import table_lines
from mod_export.report.wording import bytes_text, count_text, flops_text, percent_text, ratio_text
from mod_export.types import Bucket, Site, is_expert

SHORT_NAMES = {"mlp": "MLP", "attention_projections": "projections"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The rows of one model at one bucket, in order, and their sums."""

    rows: Sequence[LayerCost]

    @property
    def flops_by_part(self) -> Mapping[str, int]:
        """Of the parts that cost something, in the order of `PARTS`, others behind them."""
        found: Counter[str] = Counter()
        for row in self.rows:
            found.update(row.flops)
        return {part: found[part] for part in dict.fromkeys([*PARTS, *found]) if found[part]}

    @property
    def flops(self) -> int:
        return sum(flops_of(row) for row in self.rows)

    @property
    def needed_flops(self) -> int:
        """Without the scores that a causal mask hides."""
        return sum(row.needed_flops for row in self.rows)

    @property
    def weight_bytes(self) -> int:
        return sum(row.weight_bytes for row in self.rows)

    @property
    def kv_bytes(self) -> int:
        return sum(row.kv_bytes for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """What the tables and figures are made of.

    Attributes:
        buckets: ascending; the last one is the one that absolute numbers are given for.
        mod: bucket -> rows of the model itself.
        dense: bucket -> rows of its dense baseline, of the same names in the same order; None where no token skips a
            block, so that the baseline would be the model itself, and where it has none.
    """

    buckets: tuple[Bucket, ...]
    mod: Mapping[Bucket, Costs]
    dense: Mapping[Bucket, Costs] | None

    @property
    def largest(self) -> Bucket:
        return self.buckets[-1]

    @property
    def own(self) -> Costs:
        """Of the model itself at the largest bucket."""
        return self.mod[self.largest]

    @property
    def baseline(self) -> Costs | None:
        """The same of the dense baseline."""
        return None if self.dense is None else self.dense[self.largest]

    @property
    def drawn(self) -> Sequence[tuple[int, LayerCost, LayerCost | None]]:
        """Of each row that a chart shows its number, the row of `own`, and that of `baseline`."""
        dense = self.baseline.rows if self.baseline else [None] * len(self.own.rows)
        rows = zip(self.own.rows, dense, strict=True)
        return [(index, row, beside) for index, (row, beside) in enumerate(rows) if row.flops]

    @property
    def most_flops(self) -> int:
        """Of one row, the dense baseline's too."""
        return max(flops_of(row) for _, *rows in self.drawn for row in rows if row)

    @property
    def parts(self) -> list[str]:
        """Of the model and of its dense baseline, those that cost something."""
        return list(dict.fromkeys([*self.own.flops_by_part, *(self.baseline.flops_by_part if self.baseline else ())]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable:
    """Cells as text, every row as long as the head. `total` sums the rows up. Numbers start at `numbers_from`."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    total: Sequence[str]
    numbers_from: int

    def lines(self) -> list[str]:
        """As plain text."""
        return table_lines(self.head, self.rows, numbers_from=self.numbers_from, total=self.total)


def layers_of(model: Model, buckets: Sequence[Bucket]) -> Layers:
    """`buckets`: one at least; those of a build by default."""

    def costs(of: ExportableModel) -> dict[Bucket, Costs]:
        assert isinstance(of, LayerCosts)
        return {bucket: Costs(rows=of.layers(bucket.batch, bucket.seq)) for bucket in buckets}

    return Layers(
        buckets=tuple(sorted(buckets, key=lambda bucket: (bucket.batch * bucket.seq, bucket))),
        mod=costs(model.loaded),
        dense=costs(model.of_kind("dense")) if "dense" in model.kinds else None,
    )


def layer_lines(layers: Layers) -> list[str]:
    """Both tables as text. With up to five buckets and six parts they fit 120 columns."""
    shares = "" if layers.dense is None else "; % of a bucket: of what the dense baseline costs there"
    flops = [f"FLOPs of {layers.largest.name}{shares}", *flops_table(layers).lines(), "", flops_sentence(layers)]
    return [*routing_table(layers).lines(), "", *flops]


def routing_table(layers: Layers) -> LayerTable:
    """What is routed, the slots for a row, weights, and keys and values of the largest bucket."""
    own, baseline = layers.own, layers.baseline
    lengths = dict.fromkeys(bucket.seq for bucket in layers.buckets)
    first = {bucket.seq: bucket for bucket in reversed(layers.buckets)}
    rows = []
    for index, row in enumerate(own.rows):
        selected = [tokens_text(layers.mod[first[seq]].rows[index].selected) for seq in lengths]
        dense = [] if baseline is None else [_bytes(baseline.rows[index].kv_bytes)]
        rows.append([row.name, row.routed or "-", *selected, _bytes(row.weight_bytes), _bytes(row.kv_bytes), *dense])
    sums = [_bytes(own.weight_bytes), _bytes(own.kv_bytes), *([] if baseline is None else [_bytes(baseline.kv_bytes)])]
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
    """FLOPs of the largest bucket by part; beside those of the dense baseline, the share of them in every bucket."""
    own, dense = layers.own, layers.dense
    parts = list(own.flops_by_part)
    rows = []
    for index, row, beside in layers.drawn:
        line = [row.name, *(_count(row.flops.get(part, 0)) for part in parts), _count(flops_of(row))]
        if beside is not None:
            line += [_count(flops_of(beside)), *(share_of(layers, bucket, index) for bucket in layers.buckets)]
        rows.append(line)
    head = ["layer", *map(part_name, parts), "FLOPs"]
    total = ["all", *(_count(flops) for flops in own.flops_by_part.values()), _count(own.flops)]
    if dense is not None:
        head += ["dense", *(f"% {bucket.name}" for bucket in layers.buckets)]
        shares = [percent_text(layers.mod[bucket].flops / dense[bucket].flops) for bucket in layers.buckets]
        total += [_count(dense[layers.largest].flops), *shares]
    return LayerTable(head=head, rows=rows, total=total, numbers_from=1)


def flops_sentence(layers: Layers) -> str:
    """All FLOPs of the largest bucket, beside those of the dense baseline, and the share that the causal mask hides."""
    own = layers.own
    hidden = percent_text((own.flops - own.needed_flops) / own.flops)
    found = f"{layers.largest.name}: {flops_text(own.flops)}, of which the causal mask hides {hidden}"
    if layers.baseline is None:
        return found
    dense = layers.baseline.flops
    return f"{found}; the dense baseline {flops_text(dense)}, {ratio_text(dense / own.flops)}"


def share_of(layers: Layers, bucket: Bucket, index: int) -> str:
    """What a row costs, as a share of its cost in the dense baseline: 12.4 %; a dash where that is nothing."""
    assert layers.dense is not None
    own, baseline = flops_of(layers.mod[bucket].rows[index]), flops_of(layers.dense[bucket].rows[index])
    return percent_text(own / baseline if baseline else None)


def tokens_text(selected: Mapping[Site, int]) -> str:
    """Slots of the routing sites of one layer: 64, or 64 + 64, or 64, 8 x 10 with experts inside."""
    experts = Counter(k for site, k in selected.items() if is_expert(site))
    others = " + ".join(f"{k:,}" for site, k in selected.items() if ".expert" not in str(site))
    found = ", ".join(filter(None, [others, *(f"{count} x {k:,}" for k, count in experts.items())]))
    return found or "-"


def part_name(part: str) -> str:
    """The name of a part of the model in a heading: short."""
    return SHORT_NAMES.get(part, part_text(part))


def flops_of(row: LayerCost) -> int:
    """Of all parts."""
    return sum(row.flops.values())


def _bytes(count: int) -> str:
    return bytes_text(count) if count else "-"


def _count(flops: int) -> str:
    return count_text(flops) if flops else "-"
