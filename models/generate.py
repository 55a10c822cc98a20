"""Text generation with the eager model: a prefill of the whole prompt, then one token at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mod_models.cache import cache_layout, prefill_outputs, sites, step_outputs
from mod_models.generation_spec import GenerationError, for_generation
from mod_models.routing import Decisions
from mod_models.spec import Site
from mod_models.step import DecodeStep, Prefill
from mod_models.transformer import Transformer


class Generated(NamedTuple):
    """The continuation of a text.

    Attributes:
        ids: the new tokens; ties of logits go to the smaller id.
        logits_NV: the logits that each new token was taken from.
        ran: routing site -> positions of the tokens that ran there. The last new token is never read, so it is not
            counted.
        overflow: routing site -> number of tokens that wanted to run there and found no slot.
    """

    ids: list[int]
    logits_NV: Tensor
    ran: dict[Site, list[int]]
    overflow: dict[Site, int]


def write_rows(cache: Mapping[str, Tensor], rows: Mapping[str, Tensor], slot_BL: Tensor) -> None:
    """Writes the keys and values of a step into the cache in place, one slot of each row.

    Args:
        cache: name -> tensor, as in `cache_layout`.
        rows: `keys_<layer>` and `values_<layer>`, each (B, G, E).
        slot_BL: int64 (B, layers), the slot to write; negative if the row keeps nothing in this layer.
    """
    for name, row_BGE in rows.items():
        slot_B = slot_BL[:, int(name.rpartition("_")[2])]
        kept_N = (slot_B >= 0).nonzero().squeeze(1)
        cache[name][kept_N, :, slot_B[kept_N]] = row_BGE[kept_N]


def append_rows(cache: Mapping[str, Tensor], rows: Mapping[str, Tensor], slot_BL: Tensor, kept_BL: Tensor) -> None:
    """Writes the keys and values of a prefill into the cache in place.

    Args:
        cache: name -> tensor, as in `cache_layout`.
        rows: `keys_<layer>` and `values_<layer>`, each (B, G, T, E).
        slot_BL: int64 (B, layers), the slot of the first of the T tokens.
        kept_BL: int64 (B, layers), how many of them are kept.
    """
    for name, row_BGTE in rows.items():
        layer = int(name.rpartition("_")[2])
        for b, (slot, count) in enumerate(zip(slot_BL[:, layer].tolist(), kept_BL[:, layer].tolist(), strict=True)):
            cache[name][b, :, slot : slot + count] = row_BGTE[b, :, :count]


class Session:
    """Rows of text that are being written, and their cache. Each row reads a prompt and then one token at a time."""

    def __init__(self, model: Transformer, max_len: int, rows: int = 1) -> None:
        """The model must have a spec from `for_generation`."""
        self.spec = model.spec
        with torch.device("meta"):  # They take the model's weights, so no initial weights are drawn.
            prefill, step = Prefill(model.spec, max_len), DecodeStep(model.spec, rows, max_len)
        self.prefill, self.step = prefill.sharing(model), step.sharing(model)
        self.prefill_names, self.step_names = prefill_outputs(model.spec), step_outputs(model.spec)
        layout = cache_layout(model.spec, rows, max_len)
        dtype = model.head_weight.dtype
        self.cache = {
            tensor.name: torch.zeros(tensor.shape, dtype=dtype if tensor.dtype.is_floating_point else tensor.dtype)
            for tensor in layout
        }
        self.length_B = torch.zeros(rows, dtype=torch.int64)
        self.ran: list[dict[Site, list[int]]] = [{site: [] for site in sites(model.spec)} for _ in range(rows)]
        self.overflow_BN = torch.zeros(rows, len(sites(model.spec)), dtype=torch.int64)

    def read(self, ids_BS: Tensor, lengths_B: Tensor) -> Tensor:
        """Reads the next tokens of each row, padded on the right, and returns the logits (B, V) after them."""
        decisions = Decisions()
        with torch.no_grad():
            outputs = self.prefill.read(ids_BS, lengths_B, self.length_B, tuple(self.cache.values()), decisions)
        by_name: dict[str, Tensor] = dict(zip(self.prefill_names, outputs, strict=True))
        rows = {name: by_name[name.replace("_", "_rows_")] for name in self.cache if "_" in name}
        append_rows(self.cache, rows, by_name["slots"], by_name["kept"])
        self.length_B = self.length_B + lengths_B
        for site in sites(self.spec):
            routing = decisions.made[site]
            for ran, position_K, live_K in zip(self.ran, routing.position_BK, routing.live_BK, strict=True):
                ran[site] += position_K[live_K].tolist()
        if self.overflow_BN.numel():
            ran_BN = by_name["new_counts"] - self.cache["counts"]
            self.overflow_BN = self.overflow_BN + by_name["wanted"] - ran_BN
            self.cache["counts"] = by_name["new_counts"]
        return by_name["last_logits"]

    def write(self, ids_B: Tensor, active_B: Tensor | None = None) -> Tensor:
        """Reads one more token of each row, or only of rows in `active_B`, and returns the logits (B, V)."""
        active_B = torch.ones_like(self.length_B, dtype=torch.bool) if active_B is None else active_B
        position_B = torch.where(active_B, self.length_B, -1)
        with torch.no_grad():
            outputs = self.step(ids_B, position_B, *self.cache.values())
        by_name: dict[str, Tensor] = dict(zip(self.step_names, outputs, strict=True))
        rows = {name: by_name[name.replace("_", "_row_")] for name in self.cache if "_" in name}
        write_rows(self.cache, rows, by_name["slots"])
        if sites(self.spec):
            self.cache["counts"].copy_(by_name["new_counts"])
            self.overflow_BN = self.overflow_BN + (by_name["wanted"] & ~by_name["ran"])
            for b, column in by_name["ran"].nonzero().tolist():
                self.ran[b][sites(self.spec)[column]].append(int(self.length_B[b]))
        self.length_B = self.length_B + active_B
        return by_name["logits"]


def generate_eager(
    model: Transformer, prompt_ids: Sequence[int], max_new_tokens: int, *, window: int = 0, slack: int = 0
) -> Generated:
    """Writes the greedy continuation of one text: a prefill of the prompt, then one token at a time.

    Args:
        model: any model that can generate, in eval mode.
        prompt_ids: at least one token.
        max_new_tokens: at least one.
        window: the longest text, for which slots are counted; 0 for the number of tokens that are read here.
        slack: see `for_generation`.

    Raises:
        GenerationError: the model cannot generate, or the text does not fit the window.
    """
    if not prompt_ids or max_new_tokens < 1:
        raise GenerationError(
            f"expected a prompt and at least one new token, got {len(prompt_ids)} and {max_new_tokens}"
        )
    # The last new token is never read.
    needed = len(prompt_ids) + max_new_tokens - 1
    if window and needed > window:
        raise GenerationError(f"the text has {needed} tokens to read, and the window {window}; give a longer window")
    window = window or needed
    with torch.device("meta"):
        causal = Transformer(for_generation(model.spec, window, slack))
    model = causal.sharing(model)
    session = Session(model, window)
    logits_1V = session.read(torch.tensor([list(prompt_ids)]), torch.tensor([len(prompt_ids)]))
    logits, ids = [logits_1V[0]], [int(logits_1V[0].argmax())]
    while len(ids) < max_new_tokens:
        logits.append(session.write(torch.tensor([ids[-1]]))[0])
        ids.append(int(logits[-1].argmax()))
    overflow = dict(zip(sites(model.spec), session.overflow_BN[0].tolist(), strict=True))
    return Generated(ids, torch.stack(logits), session.ran[0], overflow)
