"""Says as text what routing would gain on a machine, and where it cannot gain anything."""

from __future__ import annotations

from collections.abc import Sequence

from mod_export.errors import UsageError
from mod_export.measure.gain import Gain, Machine, Proposal, gain_of, proposals
from mod_export.model.model import Model
from mod_export.report.tables import table_lines
from mod_export.report.wording import percent_text, ratio_text

WORTH = 1.05
"""A smaller predicted gain is not worth training for: selection, gather and scatter take more."""


def gain_lines(model: Model, machine: Machine, rows: int, prompt: int, length: int, texts: Sequence[int]) -> list[str]:
    """Returns the prediction for a model, or for ways to route it if it is dense.

    Raises:
        UsageError: the costs of the model's layers are not declared, or it cannot be routed.
    """
    layers = model.layers(1, 1)
    if layers is None:
        raise UsageError(f"{model.name} does not declare its layers, so their costs are not known before it is built")
    dense = model.dense()
    if dense is not None:
        named_gains = [(_declared(model, prompt), gain_of(model, dense, machine, rows, prompt, length, texts))]
    else:
        n_layers = sum(layer.name.isdecimal() for layer in layers)
        named_gains = [
            (_proposed(proposal, n_layers), gain_of(routed, model, machine, rows, prompt, length, texts))
            for proposal in proposals(n_layers)
            if (routed := model.routed(proposal.layers, proposal.parts, proposal.capacity, proposal.keys_values))
            is not None
        ]
        if not named_gains:
            raise UsageError(f"{model.name} cannot be routed: it routes already or has experts")
    head = ["routing", "FLOPs", f"prompt {rows} x {prompt:,}", *(_text_head(n) for n in texts), "keys and values"]
    cells = [
        [
            name,
            ratio_text(gain.flops),
            ratio_text(gain.prefill),
            *(ratio_text(gain.texts[n]) for n in texts),
            percent_text(gain.cache),
        ]
        for name, gain in named_gains
    ]
    return [
        f"{machine.name}, {machine.dtype}: {machine.flops / 1e12:,.3g} TFLOP/s, {machine.bandwidth / 1e9:,.4g} GB/s",
        "",
        *table_lines(head, cells, numbers_from=1),
        "",
        f"ratios: dense / routed, texts of {length:,} tokens; only products of matrices and the cache, at the limits "
        "of the machine: what is measured is less",
        *_warnings(named_gains, machine, texts),
    ]


def _text_head(texts: int) -> str:
    return "1 text" if texts == 1 else f"{texts:,} texts"


def _declared(model: Model, prompt: int) -> str:
    slots = [k for k in (model.k_by_layer(prompt) or {}).values() if k]
    return f"as declared, {min(slots, default=0):,} of {prompt:,} tokens"


def _proposed(proposal: Proposal, n_layers: int) -> str:
    part_names = {"block": "blocks", "attention": "attention", "mlp": "MLPs"}[proposal.parts]
    suffix = ", keys kept" if proposal.keys_values == "kept" else ""
    return f"{percent_text(proposal.capacity)} in {len(proposal.layers)} of {n_layers} {part_names}{suffix}"


def _warnings(named_gains: Sequence[tuple[str, Gain]], machine: Machine, texts: Sequence[int]) -> list[str]:
    """Says where routing cannot pay: in narrow products, and for many texts."""
    lines = []
    narrow = [name for name, gain in named_gains if gain.slots < machine.fewest_rows]
    if narrow:
        lines.append(
            f"a product of fewer than {machine.fewest_rows:,.0f} rows takes as long as its weights take to be read; "
            f"in {len(narrow)} of {len(named_gains)} ways a routed product of this prompt is narrower: longer prompts, "
            "more rows or a larger capacity use the machine better"
        )
    filled = {gain.slots: gain.slots + -gain.slots % machine.tile_rows for _, gain in named_gains}
    # If a product with whole tiles waits for its weights, it waits as long for fewer rows.
    filled = {slots: rows for slots, rows in filled.items() if rows > max(slots, machine.fewest_rows)}
    if filled:
        slots = max(filled, key=lambda slots: filled[slots] / slots)
        lines.append(
            f"products are computed in tiles of {machine.tile_rows} rows: {slots:,} rows take as long as "
            f"{filled[slots]:,}; choose a capacity and a length of prompts whose k is a multiple of {machine.tile_rows}"
        )
    for n in texts:
        best = max(gain.texts[n] for _, gain in named_gains)
        if best < WORTH:
            lines.append(
                f"with {_text_head(n)} at once no way gains {percent_text(WORTH - 1)}: some text runs nearly every "
                "layer, so its weights are read anyway"
            )
    if max(gain.prefill for _, gain in named_gains) < WORTH:
        lines.append(f"for this prompt no way gains {percent_text(WORTH - 1)}")
    return lines
