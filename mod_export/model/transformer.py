"""The transformer of this project as a model to export: the one module of mod_export that knows `mod_models`.

It is registered as the entry point `mod_transformer`, like an architecture of any other package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mod_export.model.architecture import Architecture, Converted
from mod_export.model.model import GeneratingModel, GraphSource, LayerCost, Model, TokenIds
from mod_export.model.tokenizer_files import TokenizerFiles, has_tokenizer, read_tokenizer, settings_in
from mod_export.types import Outputs, Site
from mod_models.cache import (
    cache_layout,
    prefill_inputs,
    prefill_outputs,
    sites,
    slots_of_layer,
    step_inputs,
    step_outputs,
)
from mod_models.checkpoint import ARCHITECTURE, Checkpoint, load_checkpoint, random_checkpoint, save_checkpoint
from mod_models.convert import declared_in, is_foreign, read_foreign
from mod_models.convert.foreign import ForeignModel, MadeFile, write_folder
from mod_models.flops import layer_costs
from mod_models.generate import generate_eager
from mod_models.generation_spec import for_generation, why_not
from mod_models.spec import ModelSpec, RoutingSpec, is_expert, layer_of
from mod_models.step import DecodeStep, Prefill, narrow_slots, slots_of_step
from mod_models.train.corpus import batch_at, read_split
from mod_models.transformer import Transformer

BYTE_VOCABULARY = 256
META = torch.device("meta")
DECIDES = re.compile(r"layers\.(\d+)\.(experts\.)?(mlp_)?(router|predictor)\.")
"""Names of the weights that compute scores. Groups: layer, `experts.`, `mlp_` (second router of the layer), kind."""
PART = re.compile(r"layers\.(\d+)\.(attention_norm|attention|mlp_norm|mlp|experts|adapter)\.")
"""Names of the weights that a step reads only if their part runs (adapters: only if it is skipped), unlike those of
routers and predictors. Groups: layer, part.
"""
OF_KEYS_VALUES = re.compile(r"layers\.\d+\.(attention_norm|attention\.([kv]_proj|k_norm))\.")
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
"""Spec of 40 M parameters, large enough to measure a speed-up: every other layer is routed at 12.5 %."""


class TransformerModel(Model):
    """A checkpoint of the transformer."""

    has_capacity = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    @cached_property
    def spec(self) -> Mapping[str, Any]:
        return self.checkpoint.spec.to_dict()

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.checkpoint.weights

    def module(self, outputs: Outputs = "logits") -> Transformer:
        return self.checkpoint.module(outputs)

    def skeleton(self, outputs: Outputs = "logits") -> Transformer:
        return self.checkpoint.skeleton(outputs)

    @property
    def tokens(self) -> TokenIds:
        return TokenIds(self.checkpoint.spec.vocab_size, self.checkpoint.spec.max_positions)

    @property
    def d_model(self) -> int:
        return self.checkpoint.spec.d_model

    def head(self, hidden_ND: np.ndarray) -> np.ndarray:
        name = "embedding.weight" if self.checkpoint.spec.tie_embeddings else "head.weight"
        weight_VD = self.checkpoint.weights[name].float()
        return torch.nn.functional.linear(torch.from_numpy(hidden_ND), weight_VD).numpy()

    def k_by_layer(self, seq: int) -> dict[Site, int]:
        return self.checkpoint.spec.k_by_layer(seq)

    @property
    def looks_ahead(self) -> Sequence[str]:
        return self.checkpoint.spec.looks_ahead

    @property
    def routes_depth(self) -> bool:
        return bool(self.checkpoint.spec.routed_layers)

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

    def dense(self) -> TransformerModel | None:
        return TransformerModel(self.checkpoint.dense()) if self.routes_depth else None

    @property
    def capacity(self) -> float | None:
        return self.checkpoint.spec.capacity

    def with_capacity(self, capacity: float) -> TransformerModel:
        return TransformerModel(replace(self.checkpoint, spec=self.checkpoint.spec.with_capacity(capacity)))

    def routed(self, layers: Sequence[int], parts: str, capacity: float, keys_values: str) -> TransformerModel | None:
        spec = self.checkpoint.spec
        if spec.routing is not None or spec.experts is not None:
            return None
        routing = RoutingSpec(
            layers=tuple(layers),
            parts=parts,
            capacity=capacity,
            selection="threshold",
            skipped_keys_values="absent" if parts == "mlp" else keys_values,
        )
        return TransformerModel(Checkpoint(spec=replace(spec, routing=routing), weights={}))

    def layers(self, batch: int, seq: int) -> tuple[LayerCost, ...]:
        return tuple(LayerCost(**asdict(cost)) for cost in layer_costs(self.checkpoint.spec, batch, seq))

    def sample_ids(self, batch: int, seq: int, seed: int) -> np.ndarray | None:
        """Returns held-out bytes of the training corpus; None if the vocabulary is not bytes."""
        if not self._reads_bytes:
            return None
        text_N = read_split("held_out")
        return None if len(text_N) <= seq else batch_at(text_N, batch, seq, seed).numpy()

    def token_texts(self, ids_S: np.ndarray) -> Sequence[str] | None:
        """Returns each byte as its ISO 8859-1 character; None if the vocabulary is not bytes."""
        return [chr(token) for token in ids_S] if self._reads_bytes else None

    def ids_of_text(self, text: str) -> np.ndarray | None:
        """Returns the UTF-8 bytes of the text; None if the vocabulary is not bytes."""
        if not self._reads_bytes:
            return None
        return np.frombuffer(text.encode(errors="surrogateescape"), dtype=np.uint8).astype(np.int64)

    @property
    def _reads_bytes(self) -> bool:
        return self.checkpoint.spec.vocab_size == BYTE_VOCABULARY

    def why_not_generating(self) -> str | None:
        return why_not(self.checkpoint.spec)

    def generating(self, window: int, slack: int = 0) -> GeneratingTransformer:
        return GeneratingTransformer(self.checkpoint, window, slack)


class GeneratingTransformer(GeneratingModel):
    """A checkpoint that writes texts of up to `window` tokens.

    A graph needs only shapes, so the modules of prefill and step live on the meta device.
    """

    whole_rows: TransformerModel

    def __init__(self, checkpoint: Checkpoint, window: int, slack: int = 0) -> None:
        """The arguments are those of `generation_spec.for_generation`.

        Raises:
            GenerationError: the model cannot generate, or not in this window; the message gives the way out.
        """
        self._spec = for_generation(checkpoint.spec, window, slack)
        self.window, self.whole_rows = window, TransformerModel(replace(checkpoint, spec=self._spec))

    @property
    def sites(self) -> tuple[Site, ...]:
        return sites(self._spec)

    @property
    def capacity(self) -> dict[Site, int]:
        return self._spec.k_by_layer(self.window)

    def prefill(self, rows: int, seq: int, length: int, room: int = 0) -> GraphSource:
        """Graph that reads up to `seq` tokens of each row, of texts of up to `length`; see `Prefill`."""
        layout = cache_layout(self._spec, rows, length, room)
        with META:
            narrow = narrow_slots(self._spec, seq, self.window)
            module = Prefill(self._spec, length, narrow)
            full, short = (
                (
                    torch.zeros(rows, seq, dtype=torch.int64),
                    torch.full((rows,), tokens),
                    torch.zeros(rows, dtype=torch.int64),
                    *(torch.zeros(entry.shape, dtype=entry.dtype) for entry in layout),
                )
                for tokens in (seq, 1)
            )
        inputs, outputs = tuple(prefill_inputs(self._spec, length)), tuple(prefill_outputs(self._spec))
        return GraphSource(_on_meta(module), (full, short), inputs, outputs, bool(narrow))

    def step(self, rows: int, length: int, slots: str = "all", *, skip: bool = True) -> GraphSource:
        """Graph that reads one token of each row with a cache for texts of up to `length` tokens; see `DecodeStep`.

        `slots` is how many rows can run at each routing site in one step: `all`, or `fair` (`slots_of_step`).
        """
        in_step = slots_of_step(self._spec, rows, length) if slots == "fair" else None
        with META:
            module = DecodeStep(self._spec, rows, length, in_step, skip=skip)
            first, second = (
                (
                    torch.zeros(rows, dtype=torch.int64),
                    torch.full((rows,), position),
                    *(torch.zeros(entry.shape, dtype=entry.dtype) for entry in cache_layout(self._spec, rows, length)),
                )
                for position in (0, -1)
            )
        inputs, outputs = tuple(step_inputs(self._spec, length)), tuple(step_outputs(self._spec))
        return GraphSource(_on_meta(module), (first, second), inputs, outputs, skip and bool(self.sites))

    def kv_bytes(self, length: int) -> dict[int, int]:
        slot = 4 * 2 * self._spec.n_kv_heads * self._spec.d_head
        return {layer: slot * slots for layer, slots in slots_of_layer(self._spec, length).items()}

    def least_bytes(
        self, rows: int, length: int, executed: Mapping[Site, float], stored: Mapping[str, int] | None = None
    ) -> int:
        total = 0.0
        for name, weight in self.whole_rows.weights.items():
            if name == "embedding.weight" and not self._spec.tie_embeddings:
                continue  # A step reads only one row of it for each text.
            total += (stored or {}).get(name, 4 * weight.numel()) * self._share(name, rows, executed)
        for layer, size in self.kv_bytes(length).items():
            site = self._site(layer, "attention")
            total += rows * size * (1.0 if site is None else executed[site])
        return round(total)

    def write(self, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        return generate_eager(self.whole_rows.module(), prompt_ids, max_new_tokens, window=self.window).ids

    def _share(self, name: str, rows: int, executed: Mapping[Site, float]) -> float:
        """The share of a weight that a step reads on average."""
        match = PART.match(name)
        if match is None:
            return 1.0
        site = self._site(int(match[1]), "attention" if match[2].startswith("attention") else "mlp")
        share = 1.0 if site is None else executed[site]
        routing = self._spec.routing
        if site is not None and routing is not None:
            if routing.skipped_keys_values == "kept" and OF_KEYS_VALUES.match(name):
                return 1.0
            if match[2] == "adapter":
                # Of several rows, at least one is nearly always skipped.
                return 1.0 - share if rows == 1 else 1.0
            if match[2] == "mlp_norm" and routing.skipped_result == "adapter":
                return 1.0
        experts = self._spec.experts
        if experts is not None and match[2] == "experts" and not name.endswith("router.projection.weight"):
            share *= min(1.0, rows * experts.top_k / experts.n_experts)
        return share

    def _site(self, layer: int, part: str) -> Site | None:
        """The routing site that decides whether a part of a layer runs; None if the part always runs."""
        routing = self._spec.routing
        deciding = self._spec.router_of_layer.get(layer)
        if routing is None or deciding is None or routing.parts not in ("block", "separate", part):
            return None
        return f"{layer}.{part}" if routing.parts == "separate" else deciding


class ModTransformer(Architecture):
    """The architecture `mod_transformer`."""

    name = ARCHITECTURE

    @property
    def package(self) -> str:
        # An architecture of another package may be a subclass with modules of its own.
        return "mod_models" if super().package == "mod_export" else super().package

    def read(self, path: Path) -> TransformerModel:
        """Reads model.pt, a folder, or another format that `convert` knows; raises as `checkpoint.load_checkpoint`."""
        if not is_foreign(path):
            return TransformerModel(load_checkpoint(path))
        foreign = read_foreign(path)
        foreign.check_finite()
        return TransformerModel(foreign.checkpoint())

    def outline(self, path: Path) -> TransformerModel | None:
        spec = declared_in(path)
        return None if spec is None else TransformerModel(Checkpoint(spec=spec, weights={}))

    def restore(self, spec: Mapping[str, Any], weights: Mapping[str, Tensor]) -> TransformerModel:
        return TransformerModel(Checkpoint(spec=ModelSpec.from_dict(spec), weights=weights))

    def demo_checkpoint(self) -> Path | None:
        return _shipped("stdlib-3m.pt")

    def text_checkpoint(self) -> Path | None:
        return _shipped("python-4m")

    def timed_checkpoint(self, seed: int, path: Path) -> bool:
        save_checkpoint(path, random_checkpoint(TIMED_SPEC, seed))
        return True

    def look(self, source: Path) -> Converted:
        """See `convert.read_foreign`."""
        return _converted(_with_tokenizer(read_foreign(source)))

    def convert(
        self,
        source: Path,
        out: Path,
        max_positions: int | None,
        ignored: Collection[str],
        written: Callable[[int, int], None],
        implementation: str | None = None,
        capacity: float | None = None,
        base: Path | None = None,
    ) -> Converted:
        """See `convert.read_foreign` and `convert.foreign.write_folder`."""
        foreign = _with_tokenizer(read_foreign(source, max_positions, ignored, implementation, capacity, base))
        write_folder(foreign, out, written)
        return _converted(foreign)


MOD_TRANSFORMER = ModTransformer()


def _shipped(name: str) -> Path | None:
    path = Path(str(files("mod_models").joinpath("checkpoints", name)))
    return path if path.exists() else None


def _with_tokenizer(foreign: ForeignModel) -> ForeignModel:
    """Replaces the tokenizer of a published folder by what transformers makes of it, and says where texts end."""
    folder = foreign.tokenizer or foreign.path
    if not folder.is_dir():
        return foreign
    if has_tokenizer(folder):
        files = read_tokenizer(folder, foreign.path)
    else:
        files = TokenizerFiles(folder, settings_in(foreign.path))
    companions = tuple(MadeFile(name, content) for name, content in files.contents.items())
    return replace(foreign, companions=companions, notes=(*foreign.notes, *files.notes))


def _converted(foreign: ForeignModel) -> Converted:
    return Converted(
        family=foreign.family,
        parameters=foreign.parameters,
        companions={companion.name: companion.read_bytes for companion in foreign.companions},
        notes=foreign.notes,
    )


def _on_meta(module: Transformer) -> Transformer:
    return module.eval().requires_grad_(False).to("meta")
