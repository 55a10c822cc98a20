"""Smaller dense models, which a routed model has to beat at the same speed: without blocks, or with narrower MLPs.

Shape legend: N tokens, B rows, S tokens of a row, D model width, K neurons that are kept.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mod_models.checkpoint import Checkpoint
from mod_models.routing import Decisions
from mod_models.train.approximate import neurons
from mod_models.train.fit import inputs_of_part, row_tokens
from mod_models.train.retrofit import kept_neurons
from mod_models.transformer import Block


def without(dense: Checkpoint, layers: Collection[int]) -> Checkpoint:
    """Removes these blocks from a dense model; later ones move up."""
    kept = [layer for layer in range(dense.spec.n_layers) if layer not in layers]
    new_of = {f"layers.{old}.": f"layers.{new}." for new, old in enumerate(kept)}
    weights = {}
    for name, tensor in dense.weights.items():
        prefix = re.match(r"layers\.\d+\.", name)
        if prefix is None:
            weights[name] = tensor
        elif prefix[0] in new_of:
            weights[new_of[prefix[0]] + name.removeprefix(prefix[0])] = tensor
    return Checkpoint(spec=replace(dense.spec, n_layers=len(kept)), weights=weights)


@torch.no_grad()
def narrowed(dense: Checkpoint, share: float, rows: Sequence[Tensor]) -> Checkpoint:
    """Keeps a share of the neurons of every MLP, and fits their outgoing weights to the output of the whole MLP.

    Layers are narrowed from the first to the last, and each sees the stream that the narrowed layers before it leave,
    as `train.fit` fits a routed model; neurons are chosen and fitted as those of its adapters.

    Args:
        dense: a dense model with gated MLPs.
        share: share of the neurons, of which `kept_neurons` makes a width.
        rows: batches of int64 (B, S) token ids, without padding.
    """
    width, model = kept_neurons(dense.spec.d_ff, share), dense.module()
    streams = [model.embedded(ids_BS) for ids_BS in rows]
    weights = dict(dense.weights)
    for layer, block in enumerate(model.layers):
        assert isinstance(block, Block)
        part_inputs = [inputs_of_part(block, row_tokens(model, x_BSD), "mlp") for x_BSD in streams]
        kept = neurons(block.mlp, [(of.adapter_ND, of.delta_ND) for of in part_inputs], width)
        prefix = f"layers.{layer}.mlp."
        for name in [name for name in weights if name.startswith((f"{prefix}gate_proj.", f"{prefix}up_proj."))]:
            weights[name] = weights[name][kept.kept_K].clone()
        weights[f"{prefix}down_proj.weight"] = kept.down_DK
        # The layers after it see an MLP whose other neurons add nothing. The given weights stay as they are.
        block.mlp.down_proj.weight = torch.nn.Parameter(
            torch.zeros_like(block.mlp.down_proj.weight).index_copy(1, kept.kept_K, kept.down_DK)
        )
        streams = [block(row_tokens(model, x_BSD), Decisions()) for x_BSD in streams]
    return Checkpoint(spec=replace(dense.spec, d_ff=width), weights=weights)
