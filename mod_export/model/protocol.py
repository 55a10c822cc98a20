"""What a model has to provide: `ExportableModel`, which export needs from every model, and capabilities that only some
models have and that are asked for by type. A function's argument has the narrowest of these protocols that is enough.
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
    """What a graph is captured from."""

    @property
    def module(self) -> torch.nn.Module:
        """In eval mode, on the meta device, so without values."""

    @property
    def examples(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Two sets of inputs for it, with equal shapes and different values."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Their names, in order."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what it returns, in order."""

    @property
    def conditions(self) -> bool:
        """Whether parts of it stand in conditions on the data."""


class ExportableModel(Protocol):
    """What export itself needs, beside one of `TokenIds` and `SampledInputs`, which say what the model reads. Routing
    sites and their slots are read from the captured program (`graph/routing_sites.py`).
    """

    @property
    def spec(self) -> Mapping[str, Any]:
        """Everything but the weights, as plain data: what `Architecture.restore` needs."""

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """state_dict name -> tensor, as stored."""

    def module(self, outputs: Outputs = "logits") -> torch.nn.Module:
        """Eager float32 module in eval mode, with its weights: a tuple of tensors of its inputs."""

    def skeleton(self, outputs: Outputs = "logits") -> torch.nn.Module:
        """The same module with its parameters on the meta device, where they have shapes and no values. Graphs are
        captured from it, so that capturing needs no memory for weights. Buffers that `weights` does not contain have
        values.
        """


@runtime_checkable
class TokenIds(Protocol):
    """A model that reads (input_ids int64 (B, S), lengths int64 (B,)), the real tokens of each row, at any length.

    For the outputs `logits` its module returns logits (B, S, V); for `last`, logits (B, V) of each row's last real
    token; for `none`, hidden states (B, S, D) after the final norm. It returns nothing else.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def max_positions(self) -> int:
        """Tokens of the longest row."""


@runtime_checkable
class SampledInputs(Protocol):
    """A model of any inputs and outputs, at the shapes that it was captured at."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """These shapes, ascending: rows, and the tokens of a row that its routing selects from."""

    @property
    def output_names(self) -> Sequence[str]:
        """Of what its module returns, in order."""

    def sample(self, bucket: Bucket, seed: int) -> Mapping[str, np.ndarray]:
        """Inputs of one run, by name, in the order of the module's arguments. Other seeds give other values."""


@runtime_checkable
class DeclaredRouting(Protocol):
    """What a spec declares about routing. A captured program that marks other sites or numbers of slots is refused."""

    def k_by_layer(self, seq: int) -> dict[Site, int]:
        """Slots of each routing site in a row of `seq` tokens, in the order in which the model decides; empty for a
        dense model. Sites with k = 0 are included.
        """

    @property
    def looks_ahead(self) -> Sequence[str]:
        """What in the spec makes a token's logits depend on later tokens, as readable text; empty if causal."""

    @property
    def routes_depth(self) -> bool:
        """Whether tokens skip blocks, so that the dense baseline is another model. Experts alone skip no blocks."""

    def router_weights(self) -> Mapping[str, Sequence[Site]]:
        """Weight -> the routing sites whose scores are computed with it, as `k_by_layer` names them. If all weights of
        a site are zero, all tokens have equal scores there. Empty for a dense model.
        """


@runtime_checkable
class DenseBaseline(Protocol):
    """A model that has a dense baseline of its own."""

    def dense(self) -> ExportableModel:
        """The dense baseline: every token through every block, without routers."""


@runtime_checkable
class OutputHead(Protocol):
    """A model that can return hidden states in place of logits (`outputs = "none"`)."""

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""

    def head(self, hidden_ND: np.ndarray) -> np.ndarray:
        """Float32 logits (N, V) of float32 hidden states (N, D) after the final norm."""


class LayerCost(Protocol):
    """The calculated cost of one layer, or of what comes before or after all layers. Bytes are those of float32."""

    @property
    def name(self) -> str:
        """The number of the layer, or `embedding`, `head`."""

    @property
    def routed(self) -> str:
        """What is routed and how; empty where every token runs."""

    @property
    def selected(self) -> Mapping[Site, int]:
        """Routing site -> tokens of a row that it selects."""

    @property
    def flops(self) -> Mapping[str, int]:
        """Part (`benchmark.model_parts.PARTS`) -> FLOPs of its matrix products, two for each multiply-add, attention as
        the full square, as `torch.utils.flop_counter` counts the eager module.
        """

    @property
    def needed_flops(self) -> int:
        """The sum of `flops` without the scores that the causal mask hides."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kv_bytes(self) -> int:
        """Keys and values of the tokens that attention reads."""


@runtime_checkable
class LayerCosts(Protocol):
    """A model whose costs can be calculated from its spec."""

    def layers(self, batch: int, seq: int) -> Sequence[LayerCost]:
        """The cost of each layer, in order, with what comes before and after them; together the whole model."""


@runtime_checkable
class AdjustableCapacity(Protocol):
    """A model whose capacity can be changed without training, for a sweep."""

    @property
    def capacity(self) -> float | None:
        """Share of a row's tokens, or number of tokens, that every routed layer selects; None where layers differ, and
        for a dense model.
        """

    def with_capacity(self, capacity: float) -> ExportableModel:
        """The same weights and the same declarations, with this capacity in every routed layer.

        Raises:
            ValueError: the model is dense, or its rule does not allow this capacity; with a message for the user.
        """


@runtime_checkable
class Text(Protocol):
    """A model whose token ids can represent text."""

    def sample_ids(self, batch: int, seq: int, seed: int) -> np.ndarray | None:
        """Inputs of the kind the model was trained on, from text that was not used in training.

        int64 (batch, seq), or None if there is no such text for the model's vocabulary.
        """

    def token_texts(self, ids_S: np.ndarray) -> Sequence[str] | None:
        """Readable text for each of the ids int64 (S,), or None if they do not represent text."""

    def ids_of_text(self, text: str) -> np.ndarray | None:
        """The ids int64 (S,) of a text, or None if ids do not represent text."""


class GeneratingModel(Protocol):
    """A model that writes texts of up to `window` tokens.

    Its graphs use the weights of the checkpoint, by name. Shape legend: B rows, S tokens of a prompt, V vocabulary, G
    key and value heads, L slots of a layer's cache, E head width, N routing sites.
    """

    @property
    def window(self) -> int: ...

    @property
    def loaded(self) -> ExportableModel:
        """The same weights as a model that reads whole texts and makes the same decisions: the reference for parity."""

    @property
    def sites(self) -> Sequence[Site]:
        """The N routing sites: the columns of `counts`, `wanted` and `ran`."""

    @property
    def capacity(self) -> Mapping[Site, int]:
        """Routing site -> slots for the tokens of one text."""

    def prefill(self, rows: int, seq: int) -> GraphSource:
        """Reads prompts: (input_ids int64 (B, S), lengths int64 (B,)) -> `last_logits` (B, V), of each last token;
        `keys_<layer>` and `values_<layer>` (B, G, L, E), the content of the cache; and in a model that routes `counts`
        int64 (B, N), slots in use, and `wanted` int64 (B, N), tokens that wanted a slot.
        """

    def step(self, rows: int, length: int, slots: str = "all", *, skip: bool = True) -> GraphSource:
        """Reads a token of each row: (input_ids int64 (B,), positions int64 (B,), negative for a row without a token,
        keys_0, values_0, ..., counts) -> `logits` (B, V); `keys_row_<layer>` and `values_row_<layer>` (B, G, E);
        `slots` int64 (B, layers), the slots that these belong to, -1 for none; and in a model that routes `new_counts`
        int64 (B, N), `wanted` and `ran` bool (B, N).

        Args:
            rows: texts at once.
            length: tokens that a text can have in this cache.
            slots: how many rows can run at each routing site in one step: `all`, or a `fair` share of them.
            skip: whether routed parts are inside conditions, so that a part in which no row runs is not executed.
        """

    def kv_bytes(self, length: int) -> Mapping[int, int]:
        """Layer -> float32 bytes of one row's keys and values."""

    def least_bytes(
        self, rows: int, length: int, executed: Mapping[Site, float], stored: Mapping[str, int] | None = None
    ) -> int:
        """Bytes that a step has to read: weights that it multiplies by, and slots of the cache.

        Args:
            rows: texts at once.
            length: tokens that a text can have in the cache.
            executed: for each routing site, the share of the steps in which some row runs there.
            stored: name of a weight -> bytes that it is stored in, where that is not float32.
        """

    def write(self, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """The eager model's own greedy continuation of one text."""


@runtime_checkable
class Generation(Protocol):
    """A model that can say whether it is able to write text token by token."""

    def why_not_generating(self) -> str | None:
        """The reason why it cannot, and what to do about it; None if it can."""

    def generating(self, window: int, slack: int = 0) -> GeneratingModel:
        """The form of the model that decides about one token at a time, for texts of up to `window` tokens, prompt and
        answer.

        Each routed layer has `slack` slots more than its capacity in a row of `window` tokens.

        Raises:
            ValueError: it cannot generate, or not in this window, with a message for the user.
        """


@runtime_checkable
class Architecture(Protocol):
    """One entry of the entry-point group `mod_export.architectures`."""

    name: str

    def read(self, path: Path) -> ExportableModel:
        """Reads a checkpoint.

        Raises:
            LookupError: the checkpoint names another architecture (the error's text is that name).
            ValueError: the checkpoint is unusable for any other reason, with a message for the user.
        """

    def restore(self, spec: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> ExportableModel:
        """The inverse of `ExportableModel.spec` and `.weights`."""

    def demo_checkpoint(self) -> Path | None:
        """A small trained checkpoint that ships with the package, or None."""

    def timed_spec(self) -> Mapping[str, Any] | None:
        """A spec that is large enough to measure a speed-up, for the demo, or None."""

    def random(self, spec: Mapping[str, Any], seed: int, path: Path) -> None:
        """Writes a checkpoint with initial weights, to measure a size before it is trained."""


class Companion(Protocol):
    """A file that belongs to a model in another format; a `Path` is one, and it may be made for the purpose."""

    @property
    def name(self) -> str: ...

    def read_bytes(self) -> bytes: ...


class Converted(Protocol):
    """A model in another format."""

    @property
    def family(self) -> str:
        """What the other format calls the model's architecture."""

    @property
    def parameters(self) -> int:
        """Number of weights."""

    @property
    def companions(self) -> Sequence[Companion]:
        """Files beside the weights, such as a tokenizer."""

    @property
    def notes(self) -> Sequence[str]:
        """What a person should know of it, a sentence each."""


@runtime_checkable
class Converter(Protocol):
    """An architecture that knows models in other formats as its own. Its `read` reads them too."""

    def look(self, source: Path) -> Converted:
        """A model in another format, of which no weights are read.

        Raises:
            ValueError: the model cannot be converted, with a message for the user.
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
        """Writes a model in another format as a checkpoint folder, whole or not at all.

        Args:
            source: the model.
            out: a folder that does not exist yet, or is empty.
            max_positions: the longest row, where it shall be shorter than the model allows.
            ignored: fields of the model's configuration that change nothing.
            written: is told how many bytes of weights are written, and how many there will be.
            dialect: the implementation that stored the model, where its files do not say what its tensors mean.
            capacity: of routed layers, where it is not what the model or the dialect says.

        Raises:
            ValueError: the model cannot be converted, or not be written there, with a message for the user.
        """
