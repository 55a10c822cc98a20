"""Table of the known dialects: how to recognise each, and how to read it or why it cannot be converted."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from mod_models.checkpoint import CheckpointError
from mod_models.convert.dialect import Source, tensors_of
from mod_models.convert.dialects_of_their_own import read_d_llm, read_ohara, read_sramshetty
from mod_models.convert.dialects_of_transformers import read_astramind, read_dlo
from mod_models.convert.foreign import ForeignModel
from mod_models.spec import shown

NOT_A_MODEL = "it is a layer and no model: it has no embedding and no head, and leaves open what its block is"
SKIPPED_ARE_SEEN = "tokens that skip attention are still seen by the others there, and no token sees a skipped one here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The storage format of a public implementation.

    Attributes:
        repository: repository of the implementation.
        names: patterns; in every folder of the dialect, each one matches the whole name of some tensor.
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
        """Returns the reasons why these names are not of this dialect; empty if they can be."""
        problems = [f"no tensor is named like {regex}" for regex in self.names if _first(regex, tensors) is None]
        for pattern in self.never:
            if (name := _first(pattern, tensors)) is not None:
                problems.append(f"there is a tensor {shown(name)}")
        return problems


def _first(pattern: str, names: Iterable[str]) -> str | None:
    return next((name for name in names if re.fullmatch(pattern, name)), None)


N = r"\d+"
DIALECTS: dict[str, Dialect] = {
    "astramind": Dialect(
        repository="astramind-ai/Mixture-of-depths, LLaMA-Factory",
        names=(rf"model\.layers\.{N}\.router\.weight_predictor\.weight", rf"model\.layers\.{N}\.block\.self_attn\..*"),
        never=(rf"model\.layers\.{N}\.router\.hidden_layer\..*",),
        read=read_astramind,
    ),
    "dlo": Dialect(
        repository="DaizeDong/LLaMA-DLO",
        names=(rf"model\.routers\.{N}\.weight",),
        read=read_dlo,
    ),
    "ohara": Dialect(
        repository="joey00072/ohara",
        names=(
            rf"model\.layers\.{N}\.router\.weight",
            rf"model\.layers\.{N}\.transformer_decoder_block\.attn\.key\.weight",
            rf"model\.layers\.{N}\.aux_router\.0\.weight",
        ),
        read=read_ohara,
    ),
    "sramshetty": Dialect(
        repository="sramshetty/mixture-of-depths",
        names=(rf"layers\.{N}\.router\.weight", rf"layers\.{N}\.feed_forward\.w1\.weight"),
        read=read_sramshetty,
    ),
    "d-llm": Dialect(
        repository="Jyk-122/D-LLM",
        names=(rf"layers\.{N}\.router\.linear_1\.weight", rf"layers\.{N}\.feed_forward\.w1\.weight"),
        read=read_d_llm,
    ),
    "epfml": Dialect(
        repository="epfml/llm-baselines, branch mixture_of_depth",
        names=(r".*\.mod_router\.weight",),
        reason="its blocks are GPT-2's, with LayerNorm, learned positions and an MLP without a gate, and a spec "
        "describes Llama's. Its routing is gate identity, combine double_residual, capacity_rule floor",
    ),
    "kyegomez": Dialect(
        repository="kyegomez/Mixture-of-Depths",
        names=(r"router\.weight", r"aux_router\.0\.weight"),
        never=(r".*emb.*",),
        reason=f"{NOT_A_MODEL}. The models that it was written after are ohara",
    ),
    "mixture-ai": Dialect(
        repository="Mixture-AI/Mixture-of-Depths",
        names=(r"(.*\.)?router_mlp\.weight", r"(.*\.)?aux_mlp\.weight"),
        reason=NOT_A_MODEL,
    ),
    "mindskip": Dialect(
        repository="CASE-Lab-UMD/Router-Tuning-Mixture-of-Depths",
        names=(rf"model\.layers\.{N}\.router\.weight",),
        never=(r".*\.(block|transformer_decoder_block|decoder_layer)\..*",),
        reason="by granularity attn_sequence, which is its default, one decision is for a whole text, and a graph "
        f"cannot leave out what a text may need; by attn_token and block_token, {SKIPPED_ARE_SEEN}; and by mlp_token "
        "the router of an MLP reads what attention reads",
    ),
    "skipgpt": Dialect(
        repository="EIT-NLP/SkipGPT",
        names=(rf"model\.layers\.{N}\.router_attention\.hidden_layer\.weight", rf"model\.layers\.{N}\.router_mlp\..*"),
        reason=f"its routers draw Gumbel noise in evaluation too, so one text has no one result; {SKIPPED_ARE_SEEN}; "
        "and the router of an MLP reads what attention reads",
    ),
}  # fmt: skip
"""Name for `--dialect` -> dialect."""


def read_dialect(
    path: Path, name: str, capacity: float | None, max_positions: int | None, ignored: Collection[str]
) -> ForeignModel:
    """Reads the model of a folder in a dialect that the caller declares.

    Args:
        path: path of the folder.
        name: name of the dialect.
        capacity: capacity of the routed layers; None for the value of the folder or of the dialect.
        max_positions: tokens of the longest row; None for the value of the folder.
        ignored: configuration fields that the caller knows to change nothing.

    Raises:
        CheckpointError: the dialect is unknown or cannot be converted, or the folder is not in it or is damaged.
    """
    dialect = DIALECTS.get(name)
    if dialect is None:
        raise CheckpointError(f"--dialect {name}: unknown; known: {', '.join(DIALECTS)}")
    if dialect.read is None:
        raise CheckpointError(f"--dialect {name} ({dialect.repository}) cannot be converted: {dialect.reason}")
    tensors = tensors_of(path)
    if problems := dialect.unlike(tensors):
        fit = candidates(tensors)
        instead = f". Dialects that do fit: {'; '.join(fit)}" if fit else ""
        raise CheckpointError(f"{path}: not in the dialect {name}: {'; '.join(problems)}{instead}")
    return dialect.read(
        Source(
            path=path,
            dialect=name,
            tensors=tensors,
            capacity=capacity,
            max_positions=max_positions,
            ignored=ignored,
        )
    )


def candidates(tensors: Collection[str]) -> list[str]:
    """The dialects that fit these names of tensors, each with the reason if it cannot be converted."""
    return [
        name if dialect.read else f"{name}, which cannot be converted: {dialect.reason}"
        for name, dialect in DIALECTS.items()
        if not dialect.unlike(tensors)
    ]


def refuse_undeclared(path: Path) -> None:
    """Refuses a folder whose tensors fit a dialect, because no file of it says how the model routes.

    Raises:
        CheckpointError: the names fit a dialect; the message lists all such dialects.
    """
    try:
        tensors = tensors_of(path)
    except CheckpointError:
        return  # The reader of the folder reports this error.
    if fit := candidates(tensors):
        router = next(name for name in tensors if "router" in name)
        raise CheckpointError(
            f"{path}: has routers ({router}), and how they route is in no file. Dialects with such names: "
            f"{'; '.join(fit)}. If it is in one of them, say so: mod-export convert {path} OUT --dialect NAME"
        )
