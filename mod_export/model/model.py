"""The model: the abstract class that every reader of models returns, and that every stage reads.

A model needs `spec`, `weights`, `module` and `skeleton`, and says what it reads. Everything else is optional: for
something that a model lacks, a method returns None or nothing, or raises ValueError with the reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mod_export.environment import source_digest
from mod_export.errors import CheckpointError
from mod_export.graph.weights import state_of
from mod_export.types import PRIMARY, TOKEN_INPUTS, Bucket, Outputs, Site

if TYPE_CHECKING:
    import torch

    from mod_export.model.plain_programs import PlainProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a model comes from.

    Attributes:
        name: name of the model in messages and reports.
        architecture: name of its architecture in the entry-point group, or `PROGRAM` for captured programs.
        package: the Python package whose code computes the module.
        checkpoint_sha256: SHA-256 of the checkpoint, or of programs and weights.
    """

    name: str = "model"
    architecture: str = ""
    package: str = "mod_export"
    checkpoint_sha256: str = ""

    @property
    def code_sha256(self) -> str:
        """SHA-256 of the source code of `package`, because graphs depend on it."""
        return source_digest(self.package)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """The sizes of a model that reads token ids at any length: input_ids int64 (B, S), and lengths int64 (B,), the
    number of real tokens in each row.

    For the outputs `logits` its module returns logits (B, S, V); for `last`, logits (B, V) of each row's last real
    token; for `none`, hidden states (B, S, D) after the final norm. It returns nothing else.

    Attributes:
        vocab_size: number of token ids.
        max_positions: number of tokens of the longest row that the model can read.
    """

    vocab_size: int
    max_positions: int


@dataclass(frozen=True, slots=True)
class GraphSource:
    """The source that a graph is captured from.

    Attributes:
        module: module in eval mode on the meta device, so its tensors have no values.
        examples: two sets of inputs for the module, with equal shapes and different values.
        inputs: names of the module's inputs, in order.
        outputs: names of the module's outputs, in order.
        conditions: whether parts of the module run only under conditions on the data.
    """

    module: torch.nn.Module
    examples: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    conditions: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """The calculated cost of one layer, or of the part before or after all layers. Bytes are bytes in float32.

    Attributes:
        name: number of the layer, or `embedding` or `head`.
        routed: text that says what is routed and how; empty if every token runs.
        selected: routing site -> number of tokens that it selects in a row.
        flops: part (`measure.parts.PARTS`) -> FLOPs of its matrix products: two for each multiply-add, and
            attention as the full square, as `torch.utils.flop_counter` counts the eager module.
        needed_flops: sum of `flops` without the scores that the causal mask hides.
        weight_bytes: bytes of the weights.
        kv_bytes: bytes of the keys and values that attention reads.
    """

    name: str
    routed: str = ""
    selected: Mapping[Site, int] = field(default_factory=dict)
    flops: Mapping[str, int]
    needed_flops: int
    weight_bytes: int
    kv_bytes: int = 0


class Model(ABC):
    """A model that can be exported.

    Routing sites and their slots are read from the captured program (`graph/sites.py`). A model may declare
    them as well; then a captured program with other sites or numbers of slots is refused.
    """

    origin = Origin()
    """Set by the code that reads the model, so an instance must accept this attribute. A dense baseline with the
    model's own weights needs none.
    """

    @property
    def name(self) -> str:
        """Name of the model in messages and reports."""
        return self.origin.name

    @property
    @abstractmethod
    def spec(self) -> Mapping[str, Any]:
        """Everything but the weights, as plain data; `Architecture.restore` needs it."""

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, torch.Tensor]:
        """state_dict name -> tensor, in the dtype in which it is stored."""

    @abstractmethod
    def module(self, outputs: Outputs = "logits") -> torch.nn.Module:
        """Returns the eager float32 module in eval mode, with its weights. It computes a tuple of tensors."""

    @abstractmethod
    def skeleton(self, outputs: Outputs = "logits") -> torch.nn.Module:
        """Returns the same module with its parameters on the meta device, where they have shapes and no values. Graphs
        are captured from it, so capture needs no memory for weights. Buffers that `weights` does not contain have
        values.
        """

    @property
    def parameters(self) -> int:
        """Number of weights, predictors included."""
        return sum(tensor.numel() for tensor in self.weights.values())

    # Inputs and outputs.

    @property
    def tokens(self) -> TokenIds | None:
        """The sizes of a model of token ids; None if it reads any inputs at the shapes in `buckets`."""
        return None

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Shapes at which the model was captured, ascending: rows, and the number of tokens in a row that routing
        selects from. Empty if it reads rows of any length.
        """
        return ()

    @property
    def programs(self) -> Mapping[Bucket, PlainProgram]:
        """Programs that the model consists of, by shape; empty if its module is captured when it is built."""
        return {}

    def sample(self, bucket: Bucket, seed: int) -> Mapping[str, np.ndarray]:
        """Returns inputs of one run by name, in the order of the module's arguments. Other seeds give other values.

        A model of token ids gets full rows of random ids.
        """
        return tokens_sample(token_ids(self).vocab_size, bucket, seed)

    def output_names(self, outputs: Outputs = "logits") -> tuple[str, ...]:
        """Names of the outputs of the model's module, in order."""
        return (PRIMARY[outputs],)

    @property
    def constant_outputs(self) -> frozenset[str]:
        """Names of the outputs that depend on no input."""
        return frozenset()

    @property
    def d_model(self) -> int | None:
        """Width of the residual stream, if the model can return hidden states in place of logits (`outputs = none`)."""
        return None

    def head(self, hidden_ND: np.ndarray) -> np.ndarray | None:
        """Returns float32 logits (N, V) of float32 hidden states (N, D) after the final norm, if there is `d_model`."""
        return None

    # Routing, and variants of the model that differ only in routing.

    def k_by_layer(self, seq: int) -> dict[Site, int] | None:
        """Returns the number of slots of each routing site in a row of `seq` tokens, in the order in which the model
        decides. Sites with k = 0 are included. Empty for a dense model; None if the model declares no routing.
        """
        return None

    @property
    def looks_ahead(self) -> Sequence[str] | None:
        """Parts of the spec that make a token's logits depend on later tokens, as readable text; empty if causal. None
        if the model does not declare it.
        """
        return None

    @property
    def routes_depth(self) -> bool | None:
        """Whether tokens skip blocks, so that the dense baseline is another model. Experts alone skip no blocks. If
        this is None, the model does not declare it, and its captured graphs decide.
        """
        return None

    def router_weights(self) -> Mapping[str, Sequence[Site]]:
        """Returns weight -> the routing sites whose scores are computed with it, named as in `k_by_layer`. If all
        weights of a site are zero, all tokens have equal scores there. Empty for a dense model, or if not declared.
        """
        return {}

    def dense(self) -> Model | None:
        """Returns the dense baseline: every token through every block, without routers. None if the model has none of
        its own, or is dense itself.
        """
        return None

    @property
    def has_capacity(self) -> bool:
        """Whether the capacity of its routed layers can be changed without training."""
        return False

    @property
    def capacity(self) -> float | None:
        """Share of a row's tokens, or number of tokens, that every routed layer selects. None if layers differ, for a
        dense model, and without `has_capacity`.
        """
        return None

    def with_capacity(self, capacity: float) -> Model:
        """Returns a model with the same weights and declarations, and this capacity in every routed layer.

        Raises:
            ValueError: the model cannot have this capacity; the message is for the user.
        """
        raise ValueError(f"that of {self.name} cannot be changed without training")

    def routed(self, layers: Sequence[int], parts: str, capacity: float, keys_values: str) -> Model | None:
        """Returns this dense model with these layers routed, only to calculate its costs: it need not have weights.
        None if the model cannot be routed, or its costs cannot be calculated.

        Args:
            layers: numbers of the layers, ascending.
            parts: what is routed in them: `block`, `attention` or `mlp`.
            capacity: share of the tokens that run.
            keys_values: `absent` or `kept`, for tokens that skip attention.
        """
        return None

    def layers(self, batch: int, seq: int) -> Sequence[LayerCost] | None:
        """Returns the costs of the whole model in order: the part before the layers, each layer, the part after. None
        if they cannot be calculated from the spec.
        """
        return None

    # Text.

    def sample_ids(self, batch: int, seq: int, seed: int) -> np.ndarray | None:
        """Returns ids int64 (batch, seq) of text like the model's training data that was not used in training.

        None if there is no such text for the model's vocabulary.
        """
        return None

    def token_texts(self, ids_S: np.ndarray) -> Sequence[str] | None:
        """Returns readable text for each of the ids int64 (S,), or None if ids do not represent text."""
        return None

    def ids_of_text(self, text: str) -> np.ndarray | None:
        """Returns the ids int64 (S,) of a text, or None if ids do not represent text."""
        return None

    # Generation.

    def why_not_generating(self) -> str | None:
        """Returns why the model cannot generate, and what to do about it; None if it can."""
        return "it only reads whole rows"

    def generating(self, window: int, slack: int = 0) -> GeneratingModel:
        """Returns the form of the model that decides about one token at a time, for texts of up to `window` tokens,
        including the prompt.

        Each routed layer has `slack` slots more than its capacity in a row of `window` tokens.

        Raises:
            ValueError: the model cannot generate, or not in this window; the message is for the user.
        """
        raise ValueError(f"this model cannot generate token by token: {self.why_not_generating()}")


class GeneratingModel(ABC):
    """A model that generates texts of up to `window` tokens.

    Its graphs use the weights of the checkpoint, by name. Shape legend: B rows, S tokens of a prompt, T those that a
    layer attends to, V vocabulary, G key and value heads, L slots of a layer's cache, E head width, N routing sites.

    Attributes:
        window: tokens of the longest text.
        whole_rows: a model of the same weights that reads whole texts and decides in the same way: the reference for
            parity.
    """

    window: int
    whole_rows: Model

    @property
    @abstractmethod
    def sites(self) -> Sequence[Site]:
        """The N routing sites: the columns of `counts`, `wanted` and `ran`."""

    @property
    @abstractmethod
    def capacity(self) -> Mapping[Site, int]:
        """Routing site -> number of slots for the tokens of one text."""

    @abstractmethod
    def prefill(self, rows: int, seq: int, length: int, room: int = 0) -> GraphSource:
        """Returns the source of the graph that reads the next tokens of each row: (input_ids int64 (B, S), lengths
        int64 (B,) of these tokens, positions int64 (B,), the number of tokens before them, keys_0, values_0, ...,
        counts) -> `last_logits` (B, V) of each row's last token; `keys_rows_<layer>` and `values_rows_<layer>` (B, G,
        T, E) of the T tokens that the layer attends to; `slots` and `kept` int64 (B, layers), the cache slot for the
        first of these and how many are of the text. A model that routes also returns int64 (B, N) `new_counts`, the
        slots in use, and `wanted`, the tokens that wanted a slot.

        Args:
            rows: number of texts.
            seq: most tokens that are read at once.
            length: number of tokens that a text can have in this cache.
            room: further slots of each layer of the cache, so that a runtime can write padding behind a text.
        """

    @abstractmethod
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

    @abstractmethod
    def kv_bytes(self, length: int) -> Mapping[int, int]:
        """Returns layer -> float32 bytes of one row's keys and values."""

    @abstractmethod
    def least_bytes(
        self, rows: int, length: int, executed: Mapping[Site, float], stored: Mapping[str, int] | None = None
    ) -> int:
        """Returns the bytes that a step has to read on average: weights that it multiplies by, and slots of the cache.

        Args:
            rows: number of texts that are generated at once.
            length: number of tokens that a text can have in the cache.
            executed: for each routing site, the share of the steps in which some row runs there.
            stored: name of a weight -> bytes in which it is stored, if that is not float32.
        """

    @abstractmethod
    def write(self, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """Returns the eager model's own greedy continuation of one text."""


def token_ids(model: Model) -> TokenIds:
    """Returns the sizes of a model that must read token ids."""
    assert model.tokens is not None, "the model reads no token ids"
    return model.tokens


def tokens_sample(vocab_size: int, bucket: Bucket, seed: int) -> dict[str, np.ndarray]:
    """Returns full rows of random ids, for a model of token ids."""
    ids_BS = np.random.default_rng(seed).integers(0, vocab_size, (bucket.batch, bucket.seq), dtype=np.int64)
    return dict(zip(TOKEN_INPUTS, (ids_BS, np.full(bucket.batch, bucket.seq, dtype=np.int64)), strict=True))


def stored_state(model: Model) -> dict[str, torch.Tensor]:
    """Returns the state dict without building the module with its weights: the weights as the checkpoint stores them,
    except float64, which becomes float32; and the other buffers.

    Raises:
        CheckpointError: the module has a parameter that the checkpoint holds nothing for.
    """
    state = {name: model.weights.get(name, tensor) for name, tensor in state_of(model.skeleton()).items()}
    missing = [name for name, tensor in state.items() if tensor.is_meta]
    if missing:
        raise CheckpointError(f"the checkpoint holds no value for {', '.join(missing[:3])}")
    wide = {name for name, weight in model.weights.items() if weight.is_floating_point() and weight.dtype.itemsize > 4}
    return {name: tensor.float() if name in wide else tensor for name, tensor in state.items()}
