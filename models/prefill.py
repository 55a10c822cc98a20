"""A prompt at once: the logits that its next token is drawn from, and the cache from which steps go on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mod_models.cache import cache_layout, sites, slots_of_layer
from mod_models.generation_spec import check_generates
from mod_models.routing import Decisions
from mod_models.spec import ModelSpec
from mod_models.transformer import OUTPUTS, Transformer

__all__ = ["Prefill", "prefill_outputs"]


def prefill_outputs(spec: ModelSpec, max_len: int) -> list[str]:
    """Names of what `Prefill` returns, in order."""
    names = ["logits", *(one.name for one in cache_layout(spec, 1, max_len))]
    return names + (["wanted"] if sites(spec) else [])


class Prefill(Transformer):
    """The model of a prompt bucket, by the spec of `generation_spec.for_generation`. Static, without a condition."""

    def __init__(self, spec: ModelSpec, max_len: int) -> None:
        """`max_len` is that of the cache it fills, at least as long as the bucket.

        Raises:
            GenerationError: not a spec from `for_generation`.
        """
        check_generates(spec)
        super().__init__(spec, "last")
        self.slots = slots_of_layer(spec, max_len)

    def forward(self, ids_BS: Tensor, lengths_B: Tensor) -> tuple[Tensor, ...]:
        """Reads a prompt in each row.

        Args:
            ids_BS: int64 token ids, padded on the right.
            lengths_B: int64, how many leading tokens of each row are real, at least 1.

        Returns:
            logits_BV of each row's last real token; the tensors of the cache in the order of `cache.cache_layout`;
            and in a model that routes wanted_BN int64, how many tokens chose to run at each routing site (beyond
            the count of the cache they found no slot, and were skipped).
        """
        return self.read(ids_BS, lengths_B, Decisions())

    def read(self, ids_BS: Tensor, lengths_B: Tensor, decisions: Decisions) -> tuple[Tensor, ...]:
        """`forward`; `decisions` gets what was decided."""
        decisions.keys_values = {}
        logits_BV = OUTPUTS["last"](self, self.stream(ids_BS, lengths_B, decisions), lengths_B)
        cache = []
        for layer, slots in self.slots.items():
            for part_BGTE in decisions.keys_values[layer]:
                # After a row's count come padding and skipped tokens, and then zeros: no token attends to them.
                cache.append(functional.pad(part_BGTE, (0, 0, 0, slots - part_BGTE.shape[2])))
        routed = [decisions.made[site] for site in sites(self.spec)]
        if not routed:
            return logits_BV, *cache
        counts_BN = _columns([routing.live_BK for routing in routed])
        wanted_BN = _columns([routing.chosen_BT for routing in routed])
        return logits_BV, *cache, counts_BN, wanted_BN


def _columns(marks: list[Tensor]) -> Tensor:
    """How many are marked, int64 (B, N), one column for each of the N tensors of marks."""
    return torch.stack([mark.sum(1) for mark in marks], 1)
