"""Merges a LoRA adapter of PEFT into the folder of the model that it was trained for, tensor by tensor.

An adapter is a folder of adapter_config.json and adapter_model.safetensors. For a matrix W it holds A and B, and the
adapted model computes with W + scale * B @ A (Hu et al., arXiv 2106.09685); scale is alpha / r, or alpha / sqrt(r) for
rsLoRA (arXiv 2312.03732). It can also replace whole tensors: biases, embeddings and `modules_to_save`. The sum is
computed in float32 when the rows are read, and has the dtype of W, as after `merge_and_unload` of PEFT.

Facts are from peft 0.21 (`tuners/lora/config.py`, `tuners/lora/layer.py`, `utils/save_and_load.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mod_models.checkpoint import CheckpointError
from mod_models.convert.config_json import Config
from mod_models.convert.foreign import ForeignModel, StoredTensor, refuse
from mod_models.convert.hugging_face import (
    CONFIG,
    EMBEDDING,
    FAMILIES,
    HEAD,
    KNOWN,
    companions_of,
    is_hugging_face,
    model_of,
    named_tensors,
)
from mod_models.convert.tensor_files import INDEXES, WHOLE_FILES, FileTensor, read_json, tensors_of_file
from mod_models.convert.tensor_names import without_wrappers
from mod_models.spec import shown

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
GENERATION_CONFIG = "generation_config.json"
OF_TEXTS = (GENERATION_CONFIG, "chat_template.jinja")
"""Files about how a model writes texts. Those of an adapter count only if its tokenizer is beside them."""
LORA = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<half>[AB])(?:\.weight)?")
REPLACED = re.compile(r"(?P<module>.+?)(?:\.base_layer)?\.(?P<kind>weight|bias)")
REPEATED = re.compile(r"\)[*+{]")
LARGEST_ALPHA = 1e30
"""Largest alpha that is accepted: a larger value, or one that is no number, must be a mistake."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")

PROMPTS = (
    "PROMPT_TUNING",
    "MULTITASK_PROMPT_TUNING",
    "P_TUNING",
    "PREFIX_TUNING",
    "ADAPTION_PROMPT",
    "CPT",
    "CARTRIDGE",
)
"""Kinds of adapters that add tokens or keys to a text, not numbers to weights."""
KEEP_THE_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base model as it is. The others take a part out of its weights."""
ONLY: Mapping[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": ([],),
    "arrow_config": ({},),
    "init_lora_weights": KEEP_THE_BASE,
    "kasa_config": ({},),
    "layer_replication": ([],),
    "lora_bias": (False,),
    "monteclora_config": ({},),
    "peft_type": ("LORA",),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "use_bdlora": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "velora_config": ({},),
}
"""Field of adapter_config.json -> the values with which the adapter is plain LoRA. With other values the adapter is not
merged here.
"""
HARMLESS = (
    # Training, and where the adapter came from.
    "_name_or_path", "auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "inference_mode",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
    # Which modules have A and B, which the tensors show.
    "exclude_modules", "layers_pattern", "layers_to_transform", "target_modules",
    # PEFT treats this field as false for every module of the families here.
    "fan_in_fan_out",
    # Which other tensors are in the file, which the file shows.
    "bias", "modules_to_save",
    "base_model_name_or_path",
)  # fmt: skip
RESIZED = "resize its embeddings as in training (resize_token_embeddings of transformers), and name what is saved then"
PEFT_MERGES = "merge it with merge_and_unload of peft, and convert what save_pretrained then writes"


class LowRankProduct(NamedTuple):
    """A scaled product of an adapter: `up` @ `down`, or for an embedding its transpose.

    Attributes:
        down: A, (r, in).
        up: B, (out, r).
        scale: factor of the product.
        is_embedding: whether `down` has a column for each row of the sum.
    """

    down: StoredTensor
    up: StoredTensor
    scale: float
    is_embedding: bool

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.up.shape[0], self.down.shape[1]
        return shape[::-1] if self.is_embedding else shape

    def rows(self, start: int, stop: int) -> Tensor:
        down = self.down.rows(0, self.down.shape[0]).float()
        if self.is_embedding:
            product = down[:, start:stop].T @ self.up.rows(0, self.up.shape[0]).float().T
        else:
            product = self.up.rows(start, stop).float() @ down
        return product * self.scale


class _Half(NamedTuple):
    """A or B of a module in an adapter, and whether the module is an embedding."""

    tensor: FileTensor
    is_embedding: bool


@dataclass(frozen=True, slots=True)
class Merged:
    """A tensor of the base model plus a product, see `foreign.StoredTensor`."""

    source: StoredTensor
    product: LowRankProduct

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def stored(self) -> torch.dtype | str:
        return self.source.stored

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def rows(self, start: int, stop: int) -> Tensor:
        return (self.source.rows(start, stop).float() + self.product.rows(start, stop)).to(self.dtype)


def is_adapter(path: Path) -> bool:
    """Whether this is a folder with an adapter of PEFT."""
    return (path / ADAPTER_CONFIG).is_file()


def read_adapter(path: Path, base: Path | None, max_positions: int | None, ignored: Collection[str]) -> ForeignModel:
    """Reads the model that an adapter and its base model form together.

    Args:
        path: folder of the adapter.
        base: folder of the base model; None for the one that the adapter names, if it is a folder here.
        max_positions: tokens of the longest row, to make it shorter than the model allows.
        ignored: fields of config.json and adapter_config.json that the caller knows to change nothing.

    Raises:
        CheckpointError: the base model is not here, the adapter is of another kind, they do not fit, or either is
            damaged.
    """
    declared = read_json(path / ADAPTER_CONFIG)
    _check(path, declared, ignored)
    base = _base(path, declared) if base is None else base
    if not is_hugging_face(base):
        raise CheckpointError(
            f"{base}: the base model of an adapter is a Hugging Face folder (config.json with a model_type), and this "
            "is none"
        )
    fields = read_json(base / CONFIG)
    tensors, notes = named_tensors(base, fields)
    merged = {**tensors, **_changed(path, declared, tensors)}
    if _is_tied(fields) and any(merged.get(name) is not tensors.get(name) for name in (HEAD, EMBEDDING)):
        if declared.get("ensure_weight_tying") is True:
            raise CheckpointError(
                f"{path / ADAPTER_CONFIG}: ensure_weight_tying: an adapter of an embedding that stays the head is not "
                f"merged here; {PEFT_MERGES}"
            )
        # In training, PEFT changes one of the two uses of the tied tensor, not the other.
        fields = {**fields, "tie_word_embeddings": False}
        merged.setdefault(HEAD, tensors[EMBEDDING])
        notes += (f"{path}: changes the head or the embedding, which are one in {base}, so they are two now",)
    model = model_of(base, fields, merged, max_positions, ignored)
    has_tokenizer = any((path / name).is_file() for name in TOKENIZERS)
    if not has_tokenizer:
        notes += tuple(
            f"{file}: not used, because there is no tokenizer beside it; if the adapter was trained with it, copy it "
            f"into OUT"
            for file in companions_of(path)
            if file.name in OF_TEXTS
        )
    # PEFT itself reads no such file of an adapter. But if training saved a tokenizer with the adapter, the texts of the
    # adapted model may end in another way. So the adapter's files count, and of the base model's only a
    # generation_config.json that the adapter lacks. Without that tokenizer, the base model's files stay.
    companions = {file.name: file for file in model.companions if not has_tokenizer or file.name == GENERATION_CONFIG}
    companions |= {file.name: file for file in companions_of(path)} if has_tokenizer else {}
    return replace(
        model,
        companions=tuple(companions.values()),
        tokenizer=path if has_tokenizer else None,
        notes=(*notes, f"{path}: merged into {base}", *model.notes),
    )


def _base(path: Path, declared: Mapping[str, Any]) -> Path:
    """Finds the folder of the base model, without guessing.

    Raises:
        CheckpointError: no folder here is known to be the base model; the message names it, and the command.
    """
    named = declared.get("base_model_name_or_path")
    of_base = f"of {named}" if isinstance(named, str) and named else "of a base model that it does not name"
    command = f"mod-export convert {path} OUT --base FOLDER"
    if any((path / name).is_file() for name in (*WHOLE_FILES, *INDEXES)):
        raise CheckpointError(
            f"{path}: holds a model and a LoRA adapter {of_base}, and not whether they are merged already; to convert "
            f"the model alone, remove {ADAPTER_CONFIG}, and to merge them, name the base model: {command}"
        )
    if isinstance(named, str) and named:
        if _is_folder(Path(named)):
            return Path(named)
        # An adapter is often kept in the folder of its base model.
        if is_hugging_face(path.resolve().parent) and path.resolve().parent.name == Path(named).name:
            return path.resolve().parent
    raise CheckpointError(f"{path}: a LoRA adapter {of_base}, and no model; name the folder of that model: {command}")


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False  # For example, the name is too long.


def _check(path: Path, declared: Mapping[str, Any], ignored: Collection[str]) -> None:
    kind = declared.get("peft_type")
    where = f"{path / ADAPTER_CONFIG}: peft_type"
    if kind in PROMPTS:
        raise CheckpointError(f"{where}: {kind} changes no weights, so it cannot be merged into a model")
    if kind != "LORA":
        raise CheckpointError(f"{where}: {shown(kind)} is not merged here, only LORA is; {PEFT_MERGES}")
    config = Config(declared, {})
    for name, values in ONLY.items():
        value = config.get(name)
        if value is not None and not any(type(value) is type(known) and value == known for known in values):
            config.problem(name, f"{shown(value)} is more than LoRA, which is all that is merged here; {PEFT_MERGES}")
    for name in ("r", "lora_alpha"):
        config.get(name)
    config.flag("use_rslora")
    for name in ("rank_pattern", "alpha_pattern"):
        table = config.get(name)
        for pattern in table if isinstance(table, Mapping) else ():
            try:
                re.compile(_at_the_end(pattern))
            except (re.error, RecursionError, OverflowError) as error:
                config.problem(name, f"{shown(pattern)} is no regular expression ({error})")
            if REPEATED.search(pattern):
                config.problem(name, f"{shown(pattern)} repeats a group, and such patterns can take for ever to match")
    config.check_others(ignored, HARMLESS, {})
    refuse(path / ADAPTER_CONFIG, config.problems)


def _is_tied(fields: Mapping[str, Any]) -> bool:
    family = FAMILIES.get(str(fields.get("model_type")))
    default = family.defaults["tie_word_embeddings"] if family is not None else False
    return fields.get("tie_word_embeddings", default) is True


def _changed(path: Path, declared: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors of the base model that the adapter changes, by name.

    Raises:
        CheckpointError: the adapter has no tensors, or they do not fit the base model or adapter_config.json.
    """
    file = next((path / name for name in ADAPTER_FILES if (path / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"{path}: holds no weights of the adapter; expected {' or '.join(ADAPTER_FILES)}")
    problems: list[str] = []
    changed, halves = _tensors_of(file, tensors, problems)
    for module, of_module in halves.items():
        target = _in_model(f"{module}.weight")
        # A model whose head is its embedding stores it once.
        source = changed.get(target) or tensors.get(target) or tensors.get(EMBEDDING if target == HEAD else "")
        if source is None:
            problems.append(f"{target} is adapted, and the base model has none")
        elif of_module.keys() != {"A", "B"}:
            problems.append(f"{module} has lora_{next(iter(of_module))} alone, expected lora_A and lora_B")
        else:
            product = _product(declared, module, of_module["A"], of_module["B"], problems)
            if product is not None and product.shape != source.shape:
                problems.append(
                    f"{module} adds numbers of shape {list(product.shape)}, the base model has {list(source.shape)}"
                )
            elif product is not None:
                changed[target] = Merged(source, product)
    problems += [
        f"{name} has shape {list(tensor.shape)}, the base model has {list(tensors[name].shape)}"
        + (f"; {RESIZED}" if name in (HEAD, EMBEDDING) else "")
        for name, tensor in changed.items()
        if name in tensors and tensor.shape != tensors[name].shape
    ]
    refuse(file, problems)
    return changed


def _tensors_of(
    file: Path, tensors: Mapping[str, StoredTensor], problems: list[str]
) -> tuple[dict[str, StoredTensor], dict[str, dict[str, _Half]]]:
    """Reads the tensors of an adapter: those that replace one of the base model, by its name, and A and B of each
    module. Those that are neither become problems.
    """
    changed: dict[str, StoredTensor] = {}
    halves: dict[str, dict[str, _Half]] = {}
    named, _ = without_wrappers(file, tensors_of_file(file))
    for name, tensor in named.items():
        lora, whole = LORA.fullmatch(name), REPLACED.fullmatch(name)
        target = "" if whole is None else _in_model(f"{whole['module']}.{whole['kind']}")
        if not isinstance(tensor.stored, torch.dtype):
            problems.append(f"{shown(name)} holds {tensor.stored}, expected {KNOWN}")
        elif lora is not None:
            halves.setdefault(lora["module"], {})[lora["half"]] = _Half(tensor, lora["embedding"] is not None)
        elif target in tensors or (target == HEAD and EMBEDDING in tensors):
            changed[target] = tensor
        else:
            problems.append(f"{shown(name)} changes nothing that the base model has")
    return changed, halves


def _in_model(name: str) -> str:
    """Returns the name of a tensor in the model with its head, for an adapter of this model or of the model without a
    head.
    """
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def _product(
    declared: Mapping[str, Any], module: str, a: _Half, b: _Half, problems: list[str]
) -> LowRankProduct | None:
    down, up = a.tensor, b.tensor
    rank, alpha = (
        _value_for(declared, "rank_pattern", "r", module),
        _value_for(declared, "alpha_pattern", "lora_alpha", module),
    )
    if not (type(rank) is int and rank > 0):
        problems.append(f"{module} has the rank {shown(rank)}, expected a whole number above 0")
    elif type(alpha) not in (int, float) or not abs(alpha) <= LARGEST_ALPHA:
        problems.append(f"{module} has the lora_alpha {shown(alpha)}, expected a number")
    elif len(down.shape) != 2 or len(up.shape) != 2 or (down.shape[0], up.shape[1]) != (rank, rank):
        problems.append(
            f"{module} has lora_A {list(down.shape)} and lora_B {list(up.shape)}, {ADAPTER_CONFIG} says rank {rank}"
        )
    else:
        scale = alpha / (math.sqrt(rank) if declared.get("use_rslora") is True else rank)
        return LowRankProduct(down, up, scale, a.is_embedding)
    return None


def _value_for(declared: Mapping[str, Any], patterns: str, default: str, module: str) -> Any:
    """Returns the value for a module: that of the first pattern that matches the end of its name, as in PEFT, or else
    the default.
    """
    table = declared.get(patterns)
    for pattern, value in table.items() if isinstance(table, Mapping) else ():
        if re.match(_at_the_end(pattern), module):
            return value
    return declared.get(default, 8)


def _at_the_end(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"
