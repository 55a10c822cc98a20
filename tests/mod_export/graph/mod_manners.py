"""Further styles of Mixture-of-Depths: models, their routing sites and their inputs.

Shape legend: B rows, S tokens, K selected tokens, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir
import torch
from manner_blocks import (
    AdditiveMask,
    AllKeys,
    BoolOrder,
    Compared,
    Embedding,
    EncoderLayer,
    FirstTokens,
    IndexCopy,
    MaskOrder,
    PutAccumulate,
    PutInPlace,
    Region,
    RowLoop,
    ScatterReduce,
    SortedPut,
    Stacked,
    TakeAlong,
    WeightedRows,
)
from manner_models import (
    ChannelsFirst,
    ClassApart,
    ClassForced,
    ClassShifted,
    FlatBatch,
    Nested,
    Patches,
    Pruned,
    Recursions,
    SequenceFirst,
    SequenceFirstFlat,
    SharedIndex,
    TopLevel,
    Transformers,
    TwoRouters,
)
from mod_dialects import Inner, Model, Routed, V, graph_of
from torch import Tensor, nn

from mod_export.graph.capture import captured
from mod_export.graph.sites import RoutingSite
from mod_export.types import BY_POSITION, BY_SCORE

B, S, K = 2, 16, 4


def _image_model(*blocks: type[Inner] | type[Routed]) -> Patches:
    return Patches(Inner(causal=False), *(block(causal=False) for block in blocks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """A model, its routing sites and its inputs; a site selects from `tokens` tokens of each row."""

    make: Callable[[], nn.Module]
    sites: list[RoutingSite]
    rows: int = B
    tokens: int = S
    image: bool = False

    def inputs(self, seed: int) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        if self.image:
            return (torch.randn(B, 3, 16, 16, generator=generator),)
        return (torch.randint(0, V, (B, S), generator=generator),)


def _blocks(routed: type[nn.Module], rule: str) -> Manner:
    """A model whose second and fourth blocks are routed."""
    return Manner(make=lambda: Model(routed), sites=[RoutingSite(f"blocks.{n}", K, rule) for n in (1, 3)])


def _names(prefixes: list[str], k: int, rule: str) -> list[RoutingSite]:
    return [RoutingSite(name, k, rule) for name in prefixes]


MANNERS = {
    "take_along_dim": _blocks(TakeAlong, BY_POSITION),
    "index_copy": _blocks(IndexCopy, BY_POSITION),
    "scatter_reduce": _blocks(ScatterReduce, BY_SCORE),
    "put_accumulate": _blocks(PutAccumulate, BY_SCORE),
    "put_in_place": _blocks(PutInPlace, BY_POSITION),
    "sorted_put": _blocks(SortedPut, BY_SCORE),
    "embedding": _blocks(Embedding, BY_SCORE),
    "row_loop": _blocks(RowLoop, BY_POSITION),
    "compared": _blocks(Compared, BY_SCORE),
    "mask_order": _blocks(MaskOrder, BY_POSITION),
    "bool_order": _blocks(BoolOrder, BY_POSITION),
    "two_routers": Manner(
        make=lambda: Model(TwoRouters),
        sites=_names([f"blocks.{n}.{part}" for n in (1, 3) for part in ("attention", "mlp")], K, BY_SCORE),
    ),
    "nested": Manner(
        make=lambda: Model(Nested),
        sites=[RoutingSite(f"blocks.{n}.{depth}", k, BY_POSITION) for n in (1, 3) for depth, k in enumerate((8, 4))],
    ),
    "recursions": Manner(
        make=lambda: Model(Recursions),
        sites=[RoutingSite(f"blocks.{n}.{i}", k, BY_POSITION) for n in (1, 3) for i, k in enumerate((12, 8, 4))],
    ),
    "sequence_first": _blocks(SequenceFirst, BY_SCORE),
    "sequence_first_flat": _blocks(SequenceFirstFlat, BY_SCORE),
    "flat_batch": Manner(
        make=lambda: Model(FlatBatch), sites=_names(["blocks.1", "blocks.3"], B * K, BY_SCORE), rows=1, tokens=B * S
    ),
    "shared_index": _blocks(SharedIndex, BY_POSITION),
    "encoder_layer": _blocks(EncoderLayer, BY_POSITION),
    "top_level": Manner(make=TopLevel, sites=_names(["h.1", "h.3"], K, BY_POSITION)),
    "transformers": Manner(make=Transformers, sites=_names(["layers.1"], K, BY_POSITION)),
    "stacked": _blocks(Stacked, BY_POSITION),
    "channels_first": _blocks(ChannelsFirst, BY_SCORE),
    "region": Manner(make=lambda: Model(Region), sites=_names(["blocks.1", "blocks.3"], K, BY_SCORE), tokens=10),
    "first_tokens": Manner(
        make=lambda: Model(FirstTokens), sites=_names(["blocks.1", "blocks.3"], K, BY_SCORE), tokens=10
    ),
    "weighted_rows": _blocks(WeightedRows, BY_SCORE),
    "additive_mask": _blocks(AdditiveMask, BY_POSITION),
    "all_keys": _blocks(AllKeys, BY_POSITION),
    "class_apart": Manner(
        make=lambda: _image_model(ClassApart), sites=[RoutingSite("blocks.1", K, BY_POSITION)], image=True
    ),
    "class_shifted": Manner(
        make=lambda: _image_model(ClassShifted), sites=[RoutingSite("blocks.1", K, BY_SCORE)], image=True
    ),
    "class_forced": Manner(
        make=lambda: _image_model(ClassForced), sites=[RoutingSite("blocks.1", 5, BY_SCORE)], image=True, tokens=17
    ),
    "pruned": Manner(
        make=lambda: _image_model(Pruned, Pruned, Inner),
        sites=[RoutingSite("blocks.1", 8, BY_SCORE), RoutingSite("blocks.2", 4, BY_SCORE)],
        image=True,
    ),
}


def manner_graph(name: str) -> ir.Model:
    """The portable graph of the model of this name, with its weights in it."""
    torch.manual_seed(0)
    module = MANNERS[name].make().eval()
    return graph_of(captured(module, MANNERS[name].inputs(0), name), module)
