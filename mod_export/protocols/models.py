"""What an architecture brings: a checkpoint as a model that can be judged, exported, and made to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mod_export.artifacts import Outputs, Site

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["Architecture", "GeneratingModel", "GraphSource", "LayerCost", "LoadedModel", "ReferenceTrace"]


class ReferenceTrace(Protocol):
    """What the reference decided in one place.

    index int64 (B, k): the positions that run, ascending, then surplus places with padding positions or -1; live bool
    (B, k); score float32 (B, S); open bool (B, S), the tokens that could be chosen; rule `rank`, the k largest scores,
    ties to the earlier token, or `first_come`, the first k tokens whose score is above 0.
    """

    @property
    def index_BK(self) -> torch.Tensor: ...
    @property
    def live_BK(self) -> torch.Tensor: ...
    @property
    def score_BS(self) -> torch.Tensor: ...
    @property
    def open_BS(self) -> torch.Tensor: ...
    @property
    def rule(self) -> str: ...


class LayerCost(Protocol):
    """What one layer costs on paper, or what stands before or after all layers.

    name: the number of the layer, or `embedding`, `head`; routed: what is routed and how, empty where every token runs;
    taken: tokens of a row that each place of routing takes; flops: of all matrix products, two for each multiply-add,
    by part (`measure.products.PARTS`), attention as the full square, as `torch.utils.flop_counter` counts the eager
    module; needed_flops: all of them without the scores that the causal mask hides; weight_bytes and kv_bytes (keys and
    values of the tokens that attention sees): in float32.
    """

    @property
    def name(self) -> str: ...
    @property
    def routed(self) -> str: ...
    @property
    def taken(self) -> Mapping[Site, int]: ...
    @property
    def flops(self) -> Mapping[str, int]: ...
    @property
    def needed_flops(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...


class GraphSource(Protocol):
    """What one graph is made of: a module without values on the meta device, in eval mode; two sets of inputs for it,
    equal in shape and different in value; and the names of its inputs and outputs, in order.
    """

    @property
    def module(self) -> torch.nn.Module: ...
    @property
    def examples(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...


class GeneratingModel(Protocol):
    """A model that writes texts of up to `window` tokens.

    Its graphs have the weights of the checkpoint, by their names. Shape legend: B rows, S tokens of a prompt, G key and
    value heads, L slots of a layer, E head width, N places of routing.
    """

    @property
    def window(self) -> int: ...

    @property
    def loaded(self) -> LoadedModel:
        """The same weights as a model of whole texts that decides as this one does: what it is judged by."""

    @property
    def sites(self) -> Sequence[Site]:
        """The N places of routing: the columns of `counts`, `wanted` and `ran`."""

    @property
    def capacity(self) -> Mapping[Site, int]:
        """How many tokens of a text each of them takes."""

    def prefill(self, rows: int, seq: int) -> GraphSource:
        """Reads prompts: (input_ids int64 (B, S), lengths int64 (B,)) -> `logits` (B, V) of each last token;
        `keys_<layer>` and `values_<layer>` (B, G, L, E), what the slots hold; and in a model that routes `counts` int64
        (B, N), places that are taken, `wanted` int64 (B, N), tokens that chose to run, and `routed_<site>` int64
        (B, K), the positions that run, ascending, then -1.
        """

    def step(self, rows: int, length: int, places: str = "all", *, skip: bool = True) -> GraphSource:
        """Reads a token of each row: (input_ids int64 (B,), positions int64 (B,), negative for a row without a token,
        keys_0, values_0, ..., counts) -> `logits` (B, V); `keys_row_<layer>` and `values_row_<layer>` (B, G, E);
        `slots` int64 (B, layers), where these belong, -1 for nowhere; and in a model that routes `new_counts` int64
        (B, N), `wanted` and `ran` bool (B, N).

        Args:
            rows: texts at once.
            length: tokens that a text can have in this cache.
            places: rows that can run in each routed part in one step, `all`, or a `fair` share of them.
            skip: whether routed parts stand in conditions, so that one that no row takes is not executed.
        """

    def kv_bytes(self, length: int) -> Mapping[int, int]:
        """Layer -> float32 bytes of one row's keys and values."""

    def least_bytes(self, rows: int, length: int, executed: Mapping[Site, float]) -> int:
        """Float32 bytes that a step cannot do without: weights that it multiplies by, and slots of the cache.
        `executed` says for each place of routing in which share of the steps some row runs there.
        """

    def write(self, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """The eager model's own greedy continuation of one text."""


class LoadedModel(Protocol):
    """A checkpoint that an architecture has read and found sound."""

    @property
    def spec(self) -> Mapping[str, Any]:
        """The spec as plain data: what `Architecture.restore` needs beside the weights."""

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """state_dict name -> tensor, as stored."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def capacity(self) -> float | None:
        """Share of a row's tokens, or number of tokens, that every routed layer takes; None where layers differ, and
        for a dense model.
        """

    def with_capacity(self, capacity: float) -> LoadedModel:
        """The same weights and the same declarations, with this capacity in every routed layer.

        Raises:
            ValueError: a dense model, or no capacity of the model's rule, with a message for the user.
        """

    def k_by_layer(self, seq: int) -> dict[Site, int]:
        """Tokens that each place of routing takes out of `seq`, in the order in which the model decides; empty for a
        dense model. Layers with k = 0 are included.
        """

    def layers(self, batch: int, seq: int) -> Sequence[LayerCost]:
        """What each layer costs, in order, with what stands before and after them; together the whole model."""

    @property
    def looks_ahead(self) -> Sequence[str]:
        """What in the spec lets a token's logits depend on later tokens, for a person to read; empty if causal."""

    @property
    def routes_depth(self) -> bool:
        """Whether tokens pass blocks by, so that the dense twin is another model; experts alone do not do that."""

    def router_weights(self) -> Mapping[str, Sequence[Site]]:
        """Weight -> the places of routing whose scores it makes, as `k_by_layer` names them. With all weights of a
        place zero, the scores of every token there are equal. Empty for a dense model.
        """

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""

    def module(self, outputs: Outputs = "logits") -> torch.nn.Module:
        """Eager float32 module in eval mode: (input_ids int64 (B, S), lengths int64 (B,)) -> (what `outputs` says, then
        int64 (B, k) for each place of routing with k > 0, in the order of `k_by_layer`).

        First come, for `logits`, logits (B, S, V); for `last`, logits (B, V) of each row's last real token; for `none`,
        hidden states (B, S, D) after the final norm.
        """

    def head(self, hidden_ND: np.ndarray) -> np.ndarray:
        """Float32 hidden states after the final norm to float32 logits (N, V)."""

    def skeleton(self, outputs: Outputs = "logits") -> torch.nn.Module:
        """The same module with parameters on the meta device, which have shapes and no values: graphs are made of it,
        so that no graph costs the memory of the weights. Buffers that `weights` does not hold are real.
        """

    def trace(
        self,
        module: torch.nn.Module,
        ids_BS: torch.Tensor,
        lengths_B: torch.Tensor,
        forced: Mapping[Site, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, Mapping[Site, ReferenceTrace]]:
        """Logits of every token, whatever the module's own outputs are, and every decision.

        `forced` replaces the router's choice in the places it names, with positions (B, k), negative ones for empty.
        """

    def dense(self) -> LoadedModel:
        """The dense twin: every token through every block, routers gone."""

    def why_not_generating(self) -> str | None:
        """Why the model cannot write text token by token, with the way out; None where it can."""

    def generating(self, window: int, slack: int = 0) -> GeneratingModel:
        """The model as it decides about one token at a time, for texts of up to `window` tokens, prompt and answer.

        `slack` gives every routed layer so many places more than its capacity in a row of `window` tokens.

        Raises:
            ValueError: it cannot generate, or not in this window, with a message for the user.
        """

    def sample_ids(self, batch: int, seq: int, seed: int) -> np.ndarray | None:
        """Real inputs of the kind the model was trained on, from text that no training step saw.

        int64 (batch, seq), or None when the model's vocabulary has no such text here.
        """

    def token_texts(self, ids_S: np.ndarray) -> Sequence[str] | None:
        """What a person can read of each of the ids int64 (S,), or None when they stand for no text."""

    def ids_of_text(self, text: str) -> np.ndarray | None:
        """The ids int64 (S,) that a text is read as, or None when ids stand for no text."""


@runtime_checkable
class Architecture(Protocol):
    """One entry of the entry-point group `mod_export.architectures`."""

    name: str

    def read(self, path: Path) -> LoadedModel:
        """Reads a checkpoint.

        Raises:
            LookupError: a sound checkpoint that names another architecture (the error's text is that name).
            ValueError: anything else that makes it unusable, with a message for the user.
        """

    def restore(self, spec: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> LoadedModel:
        """The inverse of `LoadedModel.spec` and `.weights`."""

    def demo_checkpoint(self) -> Path | None:
        """A small trained checkpoint that ships with the package, if there is one."""

    def timed_spec(self) -> Mapping[str, Any] | None:
        """A size that is large enough for a speed-up to be measured, for the demo, if there is one."""

    def random(self, spec: Mapping[str, Any], seed: int, path: Path) -> None:
        """Writes a checkpoint with initial weights, for measuring a size that nobody has trained yet."""
