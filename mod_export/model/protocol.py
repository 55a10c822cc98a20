"""Protocols of models: `ExportableModel`, which export needs from every model, and capabilities that only some models
have, tested with isinstance. The type of a function's argument is the narrowest protocol that is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mod_export.types import Bucket, Outputs, Site

if TYPE_CHECKING:
    import numpy as np
    import torch


class GraphSource(Protocol):
    """The source that a graph is captured from."""

    @property
    def module(self) -> torch.nn.Module:
        """Module in eval mode on the meta device, so its tensors have no values."""

    @property
    def examples(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Two sets of inputs for the module, with equal shapes and different values."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the module's inputs, in order."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the module's outputs, in order."""

    @property
    def conditions(self) -> bool:
        """Whether parts of the module run only under conditions on the data."""


class ExportableModel(Protocol):
    """A model that can be exported. It also needs to be `TokenIds` or `SampledInputs`, which say what the model reads.
    Routing sites and their slots are read from the captured program (`graph/routing_sites.py`).
    """

    @property
    def spec(self) -> Mapping[str, Any]:
        """Everything but the weights, as plain data; `Architecture.restore` needs it."""

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """state_dict name -> tensor, in the dtype in which it is stored."""

    def module(self, outputs: Outputs = "logits") -> torch.nn.Module:
        """Returns the eager float32 module in eval mode, with its weights. It computes a tuple of tensors."""

    def skeleton(self, outputs: Outputs = "logits") -> torch.nn.Module:
        """Returns the same module with its parameters on the meta device, where they have shapes and no values. Graphs
        are captured from it, so capture needs no memory for weights. Buffers that `weights` does not contain have
        values.
        """


@runtime_checkable
class TokenIds(Protocol):
    """A model that reads token ids at any length: input_ids int64 (B, S), and lengths int64 (B,), the number of real
    tokens in each row.

    For the outputs `logits` its module returns logits (B, S, V); for `last`, logits (B, V) of each row's last real
    token; for `none`, hidden states (B, S, D) after the final norm. It returns nothing else.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def max_positions(self) -> int:
        """Number of tokens of the longest row that the model can read."""


@runtime_checkable
class SampledInputs(Protocol):
    """A model with any inputs and outputs, at the shapes at which it was captured."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """These shapes, ascending: rows, and the number of tokens in a row that routing selects from."""

    @property
    def output_names(self) -> Sequence[str]:
        """Names of the module's outputs, in order."""

    def sample(self, bucket: Bucket, seed: int) -> Mapping[str, np.ndarray]:
        """Returns inputs of one run by name, in the order of the module's arguments. Other seeds give other values."""


@runtime_checkable
class DeclaredRouting(Protocol):
    """A model whose spec declares its routing. A captured program with other sites or numbers of slots is refused."""

    def k_by_layer(self, seq: int) -> dict[Site, int]:
        """Returns the number of slots of each routing site in a row of `seq` tokens, in the order in which the model
        decides. Sites with k = 0 are included. Empty for a dense model.
        """

    @property
    def looks_ahead(self) -> Sequence[str]:
        """Parts of the spec that make a token's logits depend on later tokens, as readable text; empty if causal."""

    @property
    def routes_depth(self) -> bool:
        """Whether tokens skip blocks, so that the dense baseline is another model. Experts alone skip no blocks."""

    def router_weights(self) -> Mapping[str, Sequence[Site]]:
        """Returns weight -> the routing sites whose scores are computed with it, named as in `k_by_layer`. If all
        weights of a site are zero, all tokens have equal scores there. Empty for a dense model.
        """


@runtime_checkable
class DenseBaseline(Protocol):
    """A model that has a dense baseline of its own."""

    def dense(self) -> ExportableModel:
        """Returns the dense baseline: every token through every block, without routers."""


@runtime_checkable
class OutputHead(Protocol):
    """A model that can return hidden states in place of logits (`outputs = "none"`)."""

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""

    def head(self, hidden_ND: np.ndarray) -> np.ndarray:
        """Returns float32 logits (N, V) of float32 hidden states (N, D) after the final norm."""


class LayerCost(Protocol):
    """The calculated cost of one layer, or of the part before or after all layers. Bytes are bytes in float32."""

    @property
    def name(self) -> str:
        """Number of the layer, or `embedding` or `head`."""

    @property
    def routed(self) -> str:
        """Text that says what is routed and how; empty if every token runs."""

    @property
    def selected(self) -> Mapping[Site, int]:
        """Routing site -> number of tokens that it selects in a row."""

    @property
    def flops(self) -> Mapping[str, int]:
        """Part (`measure.model_parts.PARTS`) -> FLOPs of its matrix products: two for each multiply-add, and attention
        as the full square, as `torch.utils.flop_counter` counts the eager module.
        """

    @property
    def needed_flops(self) -> int:
        """Sum of `flops` without the scores that the causal mask hides."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that attention reads."""


@runtime_checkable
class LayerCosts(Protocol):
    """A model whose costs can be calculated from its spec."""

    def layers(self, batch: int, seq: int) -> Sequence[LayerCost]:
        """Returns the costs of the whole model in order: the part before the layers, each layer, the part after."""


@runtime_checkable
class AdjustableCapacity(Protocol):
    """A model whose capacity can be changed without training, for a sweep."""

    @property
    def capacity(self) -> float | None:
        """Share of a row's tokens, or number of tokens, that every routed layer selects. None if layers differ, and for
        a dense model.
        """

    def with_capacity(self, capacity: float) -> ExportableModel:
        """Returns a model with the same weights and declarations, and with this capacity in every routed layer.

        Raises:
            ValueError: the model is dense, or its rule does not allow this capacity; the message is for the user.
        """


@runtime_checkable
class Text(Protocol):
    """A model whose token ids can represent text."""

    def sample_ids(self, batch: int, seq: int, seed: int) -> np.ndarray | None:
        """Returns ids int64 (batch, seq) of text like the model's training data that was not used in training.

        None if there is no such text for the model's vocabulary.
        """

    def token_texts(self, ids_S: np.ndarray) -> Sequence[str] | None:
        """Returns readable text for each of the ids int64 (S,), or None if ids do not represent text."""

    def ids_of_text(self, text: str) -> np.ndarray | None:
        """Returns the ids int64 (S,) of a text, or None if ids do not represent text."""


class GeneratingModel(Protocol):
    """A model that generates texts of up to `window` tokens.

    Its graphs use the weights of the checkpoint, by name. Shape legend: B rows, S tokens of a prompt, V vocabulary, G
    key and value heads, L slots of a layer's cache, E head width, N routing sites.
    """

    @property
    def window(self) -> int: ...

    @property
    def loaded(self) -> ExportableModel:
        """A model of the same weights that reads whole texts and decides in the same way: the reference for parity."""

    @property
    def sites(self) -> Sequence[Site]:
        """The N routing sites: the columns of `counts`, `wanted` and `ran`."""

    @property
    def capacity(self) -> Mapping[Site, int]:
        """Routing site -> number of slots for the tokens of one text."""

    def prefill(self, rows: int, seq: int) -> GraphSource:
        """Returns the source of the graph that reads prompts: (input_ids int64 (B, S), lengths int64 (B,)) ->
        `last_logits` (B, V) of each row's last token; `keys_<layer>` and `values_<layer>` (B, G, L, E), the content of
        the cache. A model that routes also returns int64 (B, N) `counts`, the slots in use, and `wanted`, the tokens
        that wanted a slot.
        """

    def step(self, rows: int, length: int, slots: str = "all", *, skip: bool = True) -> GraphSource:
        """Returns the source of the graph that reads one token of each row: (input_ids int64 (B,), positions int64
        (B,), negative for a row without a token, keys_0, values_0, ..., counts) -> `logits` (B, V); `keys_row_<layer>`
        and `values_row_<layer>` (B, G, E); `slots` int64 (B, layers), the cache slots for these, -1 for none. A model
        that routes also returns `new_counts` int64 (B, N), and `wanted` and `ran` bool (B, N).

        Args:
            rows: number of texts that are generated at once.
            length: number of tokens that a text can have in this cache.
            slots: how many rows can run at each routing site in one step: `all`, or a `fair` share of them.
            skip: whether routed parts are inside conditions, so that a part in which no row runs is not executed.
        """

    def kv_bytes(self, length: int) -> Mapping[int, int]:
        """Returns layer -> float32 bytes of one row's keys and values."""

    def least_bytes(
        self, rows: int, length: int, executed: Mapping[Site, float], stored: Mapping[str, int] | None = None
    ) -> int:
        """Returns the bytes that a step has to read: weights that it multiplies by, and slots of the cache.

        Args:
            rows: number of texts that are generated at once.
            length: number of tokens that a text can have in the cache.
            executed: for each routing site, the share of the steps in which some row runs there.
            stored: name of a weight -> bytes in which it is stored, if that is not float32.
        """

    def write(self, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """Returns the eager model's own greedy continuation of one text."""


@runtime_checkable
class Generation(Protocol):
    """A model that knows whether it can generate text token by token."""

    def why_not_generating(self) -> str | None:
        """Returns why the model cannot generate, and what to do about it; None if it can."""

    def generating(self, window: int, slack: int = 0) -> GeneratingModel:
        """Returns the form of the model that decides about one token at a time, for texts of up to `window` tokens,
        including the prompt.

        Each routed layer has `slack` slots more than its capacity in a row of `window` tokens.

        Raises:
            ValueError: the model cannot generate, or not in this window; the message is for the user.
        """


@runtime_checkable
class Architecture(Protocol):
    """One entry of the entry-point group `mod_export.architectures`."""

    name: str

    def read(self, path: Path) -> ExportableModel:
        """Reads a checkpoint.

        Raises:
            LookupError: the checkpoint names another architecture (the error's text is that name).
            ValueError: the checkpoint is unusable for any other reason; the message is for the user.
        """

    def restore(self, spec: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> ExportableModel:
        """Returns the model with this `ExportableModel.spec` and these `ExportableModel.weights`."""

    def demo_checkpoint(self) -> Path | None:
        """Returns a small trained checkpoint that ships with the package, or None."""

    def timed_spec(self) -> Mapping[str, Any] | None:
        """Returns a spec for the demo that is large enough to measure a speed-up, or None."""

    def random(self, spec: Mapping[str, Any], seed: int, path: Path) -> None:
        """Writes a checkpoint with initial weights, so that a model size can be measured before training."""


class Companion(Protocol):
    """A file that belongs to a model in another format: a `Path`, or an object that is made for this."""

    @property
    def name(self) -> str: ...

    def read_bytes(self) -> bytes: ...


class Converted(Protocol):
    """A model in another format."""

    @property
    def family(self) -> str:
        """Name of the model's architecture in the other format."""

    @property
    def parameters(self) -> int:
        """Number of weights."""

    @property
    def companions(self) -> Sequence[Companion]:
        """Files beside the weights, such as a tokenizer."""

    @property
    def notes(self) -> Sequence[str]:
        """Facts about the model that the user should know, each one sentence."""


@runtime_checkable
class Converter(Protocol):
    """An architecture that can convert models of other formats to its own. Its `read` reads them too."""

    def look(self, source: Path) -> Converted:
        """Describes a model in another format without reading its weights.

        Raises:
            ValueError: the model cannot be converted; the message is for the user.
        """

    def convert(
        self,
        source: Path,
        out: Path,
        max_positions: int | None,
        ignored: Collection[str],
        written: Callable[[int, int], None],
        dialect: str | None = None,
        capacity: float | None = None,
    ) -> Converted:
        """Writes a model in another format as a checkpoint folder, completely or not at all.

        Args:
            source: the model.
            out: a folder that does not exist yet or is empty.
            max_positions: length of the longest row, if it shall be shorter than the model allows.
            ignored: fields of the model's configuration that change nothing.
            written: called with the number of bytes of weights written so far, and with their total.
            dialect: the implementation that stored the model, if its files do not say what its tensors mean.
            capacity: capacity of routed layers, if it differs from that of the model or the dialect.

        Raises:
            ValueError: the model cannot be converted, or cannot be written there; the message is for the user.
        """
