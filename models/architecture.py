"""The entry point `mod_export.architectures: mod_transformer`, through which the exporter uses this package.

The exporter finds this object by its name in the entry-point group and never imports this package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mod_models.checkpoint import ARCHITECTURE, Checkpoint, load_checkpoint, random_checkpoint, save_checkpoint
from mod_models.convert import is_foreign, read_foreign
from mod_models.convert.foreign import ForeignModel, write_folder
from mod_models.decoding import DecodingGraphs
from mod_models.flops import LayerCost, layer_costs
from mod_models.generate import generate_eager
from mod_models.generation_spec import why_not
from mod_models.spec import ModelSpec, RoutingSpec, Site, is_expert, layer_of
from mod_models.train.corpus import batch_at, read_split
from mod_models.transformer import Transformer

BYTE_VOCABULARY = 256
DECIDES = re.compile(r"layers\.(\d+)\.(experts\.)?(mlp_)?(router|predictor)\.")
"""Names of the weights that compute scores. Groups: layer, `experts.`, `mlp_` (second router of the layer), kind."""
TIMED_SPEC = ModelSpec(
    vocab_size=8192,
    d_model=512,
    n_layers=12,
    n_heads=8,
    n_kv_heads=4,
    d_head=64,
    d_ff=1408,
    max_positions=2048,
    routing=RoutingSpec(),
)


class LoadedTransformer:
    """A checkpoint as the exporter sees it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        spec = checkpoint.spec
        self.checkpoint, self.weights = checkpoint, checkpoint.weights
        self.spec: Mapping[str, Any] = spec.to_dict()
        self.vocab_size, self.max_positions, self.d_model = spec.vocab_size, spec.max_positions, spec.d_model
        self.capacity, self.looks_ahead, self.routes_depth = spec.capacity, spec.looks_ahead, bool(spec.routed_layers)

    def with_capacity(self, capacity: float) -> LoadedTransformer:
        return LoadedTransformer(replace(self.checkpoint, spec=self.checkpoint.spec.with_capacity(capacity)))

    def k_by_layer(self, seq: int) -> dict[Site, int]:
        return self.checkpoint.spec.k_by_layer(seq)

    def layers(self, batch: int, seq: int) -> tuple[LayerCost, ...]:
        return layer_costs(self.checkpoint.spec, batch, seq)

    def router_weights(self) -> dict[str, tuple[Site, ...]]:
        spec = self.checkpoint.spec
        sites = spec.k_by_layer(spec.max_positions)
        selection = "topk" if spec.routing is None else spec.routing.selection
        # A random selection is decided by noise, which has no weights. Its router only makes the gates.
        deciding = {"predictor": "predictor", "random": None}.get(selection, "router")
        sites_of: dict[str, tuple[Site, ...]] = {}
        for name in self.checkpoint.weights:
            match = DECIDES.match(name)
            if match is None:
                continue
            layer, experts, second, kind = int(match[1]), match[2], match[3], match[4]
            if experts:
                sites_of[name] = tuple(site for site in sites if is_expert(site) and layer_of(site) == layer)
            elif kind == deciding:
                part = f"{layer}.mlp" if second else f"{layer}.attention"
                sites_of[name] = (part if spec.routing is not None and spec.routing.parts == "separate" else layer,)
        return sites_of

    def module(self, outputs: str = "logits") -> Transformer:
        return self.checkpoint.module(outputs)

    def skeleton(self, outputs: str = "logits") -> Transformer:
        return self.checkpoint.skeleton(outputs)

    def head(self, hidden_ND: np.ndarray) -> np.ndarray:
        name = "embedding.weight" if self.checkpoint.spec.tie_embeddings else "head.weight"
        weight_VD = self.checkpoint.weights[name].float()
        return torch.nn.functional.linear(torch.from_numpy(hidden_ND), weight_VD).numpy()

    def dense(self) -> LoadedTransformer:
        return LoadedTransformer(self.checkpoint.dense())

    def why_not_generating(self) -> str | None:
        return why_not(self.checkpoint.spec)

    def generating(self, window: int, slack: int = 0) -> GeneratingTransformer:
        return GeneratingTransformer(self.checkpoint, window, slack)

    def sample_ids(self, batch: int, seq: int, seed: int) -> np.ndarray | None:
        """Returns held-out bytes of the training corpus; None if the vocabulary is not bytes."""
        if self.vocab_size != BYTE_VOCABULARY:
            return None
        text_N = read_split("held_out")
        return None if len(text_N) <= seq else batch_at(text_N, batch, seq, seed).numpy()

    def token_texts(self, ids_S: np.ndarray) -> Sequence[str] | None:
        """Returns each byte as its ISO 8859-1 character; None if the vocabulary is not bytes."""
        return [chr(token) for token in ids_S] if self.vocab_size == BYTE_VOCABULARY else None

    def ids_of_text(self, text: str) -> np.ndarray | None:
        """Returns the UTF-8 bytes of the text; None if the vocabulary is not bytes."""
        if self.vocab_size != BYTE_VOCABULARY:
            return None
        return np.frombuffer(text.encode(errors="surrogateescape"), dtype=np.uint8).astype(np.int64)


class GeneratingTransformer(DecodingGraphs):
    """A checkpoint that writes texts of up to `window` tokens, as the exporter sees it."""

    def __init__(self, checkpoint: Checkpoint, window: int, slack: int) -> None:
        super().__init__(checkpoint.spec, window, slack)
        self.loaded = LoadedTransformer(replace(checkpoint, spec=self.spec))

    def least_bytes(
        self, rows: int, length: int, executed: Mapping[Site, float], stored: Mapping[str, int] | None = None
    ) -> int:
        narrow = stored or {}
        sizes = {name: narrow.get(name, 4 * weight.numel()) for name, weight in self.loaded.weights.items()}
        return self.step_bytes(sizes, rows, length, executed)

    def write(self, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        return generate_eager(self.loaded.module(), prompt_ids, max_new_tokens, window=self.window).ids


class ModTransformer:
    """The architecture `mod_transformer`."""

    name = ARCHITECTURE

    def read(self, path: Path) -> LoadedTransformer:
        """Reads model.pt, a folder, or another format that `convert` knows; raises as `checkpoint.load_checkpoint`."""
        if not is_foreign(path):
            return LoadedTransformer(load_checkpoint(path))
        foreign = read_foreign(path)
        foreign.check_finite()
        return LoadedTransformer(foreign.checkpoint())

    def look(self, source: Path) -> ForeignModel:
        """See `convert.read_foreign`."""
        return read_foreign(source)

    def convert(
        self,
        source: Path,
        out: Path,
        max_positions: int | None,
        ignored: Collection[str],
        written: Callable[[int, int], None],
        dialect: str | None = None,
        capacity: float | None = None,
    ) -> ForeignModel:
        """See `convert.read_foreign` and `convert.folder.write_folder`."""
        foreign = read_foreign(source, max_positions, ignored, dialect, capacity)
        write_folder(foreign, out, written)
        return foreign

    def restore(self, spec: Mapping[str, Any], weights: Mapping[str, Tensor]) -> LoadedTransformer:
        """Rebuilds a model from its `LoadedTransformer.spec` and `.weights`."""
        return LoadedTransformer(Checkpoint(spec=ModelSpec.from_dict(spec), weights=weights))

    def demo_checkpoint(self) -> Path | None:
        """Path of the trained checkpoint that ships with this package; None if the file is missing."""
        path = Path(str(files("mod_models").joinpath("checkpoints", "stdlib-3m.pt")))
        return path if path.exists() else None

    def timed_spec(self) -> Mapping[str, Any]:
        """Spec of 40 M parameters: width 512, 12 layers, every other layer routed at 12.5 %."""
        return TIMED_SPEC.to_dict()

    def random(self, spec: Mapping[str, Any], seed: int, path: Path) -> None:
        """Writes a checkpoint with initial weights."""
        save_checkpoint(path, random_checkpoint(ModelSpec.from_dict(spec), seed))


MOD_TRANSFORMER = ModTransformer()
