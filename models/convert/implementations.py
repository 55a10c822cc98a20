"""Public implementations of Mixture-of-Depths: how to recognise the folders of each, and how to read them or why not.

An implementation stores a model under names of tensors whose meaning is only in its code and in no file. So the user
declares the implementation of a folder with `--implementation`; it is never guessed from names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from mod_models.checkpoint import CheckpointError
from mod_models.convert.adapted_readers import read_flexidepth, read_mindskip, read_p_mod, read_skipgpt
from mod_models.convert.foreign import ForeignModel
from mod_models.convert.implementation_readers import (
    read_astramind,
    read_d_llm,
    read_dlo,
    read_ohara,
    read_sramshetty,
)
from mod_models.convert.implementation_source import Source, tensors_of
from mod_models.convert.recursions_reader import read_recursions
from mod_models.spec import shown

NOT_A_MODEL = "it is a layer and no model: it has no embedding and no head, and leaves open what its block is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """A public implementation of Mixture-of-Depths, by the way in which it stores a model.

    Attributes:
        repository: repository of the implementation.
        names: patterns; in every folder of the implementation, each one matches the whole name of some tensor.
        never: patterns that match no name of a tensor.
        read: builds the model; None if a spec cannot describe it.
        reason: why a spec cannot describe it.
    """

    repository: str
    names: tuple[str, ...]
    never: tuple[str, ...] = ()
    read: Callable[[Source], ForeignModel] | None = None
    reason: str = ""

    def unlike(self, tensors: Collection[str]) -> list[str]:
        """Returns the reasons why these names are not of this implementation; empty if they can be."""
        problems = [f"no tensor is named like {regex}" for regex in self.names if _first(regex, tensors) is None]
        for pattern in self.never:
            if (name := _first(pattern, tensors)) is not None:
                problems.append(f"there is a tensor {shown(name)}")
        return problems


def _first(pattern: str, names: Iterable[str]) -> str | None:
    return next((name for name in names if re.fullmatch(pattern, name)), None)


N = r"\d+"
IMPLEMENTATIONS: dict[str, Implementation] = {
    "astramind": Implementation(
        repository="astramind-ai/Mixture-of-depths, LLaMA-Factory",
        names=(rf"model\.layers\.{N}\.router\.weight_predictor\.weight", rf"model\.layers\.{N}\.block\.self_attn\..*"),
        never=(rf"model\.layers\.{N}\.router\.hidden_layer\..*",),
        read=read_astramind,
    ),
    "dlo": Implementation(
        repository="DaizeDong/LLaMA-DLO",
        names=(rf"model\.routers\.{N}\.weight",),
        read=read_dlo,
    ),
    "ohara": Implementation(
        repository="joey00072/ohara",
        names=(
            rf"model\.layers\.{N}\.router\.weight",
            rf"model\.layers\.{N}\.transformer_decoder_block\.attn\.key\.weight",
            rf"model\.layers\.{N}\.aux_router\.0\.weight",
        ),
        read=read_ohara,
    ),
    "sramshetty": Implementation(
        repository="sramshetty/mixture-of-depths",
        names=(rf"layers\.{N}\.router\.weight", rf"layers\.{N}\.feed_forward\.w1\.weight"),
        read=read_sramshetty,
    ),
    "d-llm": Implementation(
        repository="Jyk-122/D-LLM",
        names=(rf"layers\.{N}\.router\.linear_1\.weight", rf"layers\.{N}\.feed_forward\.w1\.weight"),
        read=read_d_llm,
    ),
    "flexidepth": Implementation(
        repository="xuan-luo/FlexiDepth-Llama-3-8B-Instruct",
        names=(
            rf"model\.layers\.{N}\.router\.router_enc\.weight",
            rf"model\.layers\.{N}\.router_proj\.gate_proj\.weight",
        ),
        read=read_flexidepth,
    ),
    "skipgpt": Implementation(
        repository="EIT-NLP/SkipGPT",
        names=(rf"model\.layers\.{N}\.router_attention\.hidden_layer\.weight", rf"model\.layers\.{N}\.router_mlp\..*"),
        read=read_skipgpt,
    ),
    "mindskip": Implementation(
        repository="CASE-Lab-UMD/Router-Tuning-Mixture-of-Depths",
        names=(rf"model\.layers\.{N}\.router\.weight",),
        never=(r".*\.(block|transformer_decoder_block|decoder_layer)\..*",),
        read=read_mindskip,
    ),
    "p-mod": Implementation(
        repository="MCG-NJU/p-MoD",
        names=(rf"model\.layers\.{N}\.router\.router\.weight", rf"model\.layers\.{N}\.decoder_layer\.self_attn\..*"),
        read=read_p_mod,
    ),
    "recursions": Implementation(
        repository="raymin0223/mixture_of_recursions",
        names=(rf"model\.layers\.{N}\.mor_router\..*", rf"model\.layers\.{N}\.block\.{N}\.self_attn\..*"),
        # Token choice has one router for all steps; relaxed steps have LoRA of their own.
        never=(rf"model\.layers\.{N}\.block\.{N}\.{N}\..*", r".*\.lora_[AB]\..*"),
        read=read_recursions,
    ),
    "epfml": Implementation(
        repository="epfml/llm-baselines, branch mixture_of_depth",
        names=(r".*\.mod_router\.weight",),
        reason="its blocks are GPT-2's, with LayerNorm, learned positions and an MLP without a gate, and a spec "
        "describes Llama's. Its routing is gate identity, combine double_residual, capacity_rule floor",
    ),
    "kyegomez": Implementation(
        repository="kyegomez/Mixture-of-Depths",
        names=(r"router\.weight", r"aux_router\.0\.weight"),
        never=(r".*emb.*",),
        reason=f"{NOT_A_MODEL}. The models that it was written after are ohara",
    ),
    "mixture-ai": Implementation(
        repository="Mixture-AI/Mixture-of-Depths",
        names=(r"(.*\.)?router_mlp\.weight", r"(.*\.)?aux_mlp\.weight"),
        reason=NOT_A_MODEL,
    ),
}  # fmt: skip
"""Name for `--implementation` -> implementation."""


def read_implementation(
    path: Path, name: str, capacity: float | None, max_positions: int | None, ignored: Collection[str]
) -> ForeignModel:
    """Reads the model of a folder of an implementation that the caller declares.

    Args:
        path: path of the folder.
        name: name of the implementation.
        capacity: capacity of the routed layers; None for the value of the folder or of the implementation.
        max_positions: tokens of the longest row; None for the value of the folder.
        ignored: configuration fields that the caller knows to change nothing.

    Raises:
        CheckpointError: the implementation is unknown or cannot be converted, or the folder is not of it or is damaged.
    """
    implementation = IMPLEMENTATIONS.get(name)
    if implementation is None:
        raise CheckpointError(f"--implementation {name}: unknown; known: {', '.join(IMPLEMENTATIONS)}")
    if implementation.read is None:
        raise CheckpointError(
            f"--implementation {name} ({implementation.repository}) cannot be converted: {implementation.reason}"
        )
    tensors = tensors_of(path)
    if problems := implementation.unlike(tensors):
        fit = candidates(tensors)
        instead = f". Implementations that do fit: {'; '.join(fit)}" if fit else ""
        raise CheckpointError(f"{path}: not a model of {name}: {'; '.join(problems)}{instead}")
    return implementation.read(
        Source(
            path=path,
            implementation=name,
            tensors=tensors,
            capacity=capacity,
            max_positions=max_positions,
            ignored=ignored,
        )
    )


def candidates(tensors: Collection[str]) -> list[str]:
    """The implementations that fit these names of tensors, each with the reason if it cannot be converted."""
    return [
        name if implementation.read else f"{name}, which cannot be converted: {implementation.reason}"
        for name, implementation in IMPLEMENTATIONS.items()
        if not implementation.unlike(tensors)
    ]


def refuse_undeclared(path: Path) -> None:
    """Refuses a folder whose tensors fit an implementation, because no file of it says how the model routes.

    Raises:
        CheckpointError: the names fit an implementation; the message lists all such implementations.
    """
    try:
        tensors = tensors_of(path)
    except CheckpointError:
        return  # The reader of the folder reports this error.
    if fit := candidates(tensors):
        router = next(name for name in tensors if "router" in name)
        raise CheckpointError(
            f"{path}: has routers ({router}), and how they route is in no file. Implementations with such names: "
            f"{'; '.join(fit)}. If one of them stored it, say so: mod-export convert {path} OUT --implementation NAME"
        )
