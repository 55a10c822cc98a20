"""Says what a file or folder is that is taken for a model and is none, and what to do: one sentence each.

Downloads leave things that have the name of a model and not its content, and other libraries store models in folders
that look like those of transformers. This is asked before PyTorch is loaded and before anything is read in full.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
WEIGHTS = (
    ("model.safetensors",),
    ("model.safetensors.index.json", "model-*.safetensors"),
    ("pytorch_model.bin",),
    ("pytorch_model.bin.index.json", "pytorch_model-*.bin"),
    ("*.pt", "*.pth"),
)
"""Patterns of the files of weights, in the order in which they are looked for. The first kind that is there is read."""
ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")
POINTER = b"version https://git-lfs.github.com/spec/"
PAGES = (b"<!doctype html", b"<html")
OLD_LLAMA_CPP = (b"lmgg", b"fmgg", b"tjgg", b"algg")
"""First bytes of the formats that llama.cpp had before GGUF."""
START = 512
LONGEST_HEADER = 10**8
"""The longest header that the safetensors library reads."""
AS_A_MODULE = (
    "to build it, write a function that returns it as a PyTorch module: mod-export build my_model.py:make_model"
)
ORIGINAL = "name the folder of the original model"
Fields = Mapping[str, Any]


def what_file(path: Path) -> str:
    """Returns what a file is that cannot hold what its name says; empty if nothing is known against it.

    Raises:
        OSError: the file cannot be read.
    """
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        start = file.read(START)
    if start.startswith(POINTER):
        return f"{path}: a pointer of git-lfs, not the file itself; run `git lfs pull` in {path.parent}"
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(PAGES):
        return (
            f"{path}: a web page (HTML), not the file; fetch it from the address of the download, which on the hub has "
            "/resolve/ in place of /blob/"
        )
    if start[:4] in OLD_LLAMA_CPP:
        return f"{path}: a file of llama.cpp from before GGUF; fetch or convert the model again as GGUF"
    if not start and path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json"):
        return f"{path}: an empty file; fetch it again"
    return _cut(path, start) if path.suffix == ".safetensors" else ""


def _cut(path: Path, start: bytes) -> str:
    """What a safetensors file is that is shorter than its own header says."""
    size, length = path.stat().st_size, int.from_bytes(start[:8], "little")
    if length > LONGEST_HEADER or start[8:9] != b"{":
        return ""  # It is anything else, which its reader says.
    with path.open("rb") as file:
        header = file.read(8 + length)[8:]
    try:
        table = json.loads(header) if len(header) == length else {}
        ends = [entry["data_offsets"][1] for name, entry in table.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return ""
    if type(expected) is int and size < expected:
        return f"{path}: truncated, it has {size} of at least {expected} bytes; fetch it again"
    return ""


def what_source(path: Path) -> str:
    """Returns what a source is that no model can be read from; empty if nothing is known against it.

    Raises:
        OSError: a file cannot be read.
    """
    said = what_files(path)
    if said or not path.is_dir():
        return said
    config = _fields(path / CONFIG)
    if "spec" in config:
        return ""
    return next((f"{path}: {said}" for said in _kinds(path, config)), "")


def what_files(path: Path) -> str:
    """Like `what_source`, of the files alone: the configuration and weights of a folder, or the file itself.

    Others may be pointers of git-lfs: who clones a model often pulls one of the formats that it is published in.
    """
    return next(filter(None, map(what_file, _read_of(path) if path.is_dir() else [path])), "")


def _read_of(folder: Path) -> list[Path]:
    config = [folder / CONFIG, folder / ADAPTER_CONFIG]
    adapter = [folder / name for name in ADAPTER]
    kinds = ([file for name in kind for file in sorted(folder.glob(name))] for kind in WEIGHTS)
    return [*config, *adapter, *next(filter(None, kinds), [])]


def _kinds(path: Path, config: Fields) -> Iterator[str]:
    """Yields what a folder is of that another library has written."""
    if _has(path, "model_index.json") or "_diffusers_version" in config:
        yield f"a folder of diffusers, which generates images or sound and no text; {AS_A_MODULE}"
    if _has(path, "modules.json", "config_sentence_transformers.json"):
        yield f"a folder of sentence-transformers, which gives a vector for a text and no logits; {AS_A_MODULE}"
    if "model_type" not in config and ("pretrained_cfg" in config or {"architecture", "num_classes"} <= config.keys()):
        yield f"a folder of timm, a model of images; {AS_A_MODULE}"
    if "quantization_config" not in config:
        yield from (
            f"a folder of weights quantized by {name}, which are not read here; {ORIGINAL}"
            for name, file in (("GPTQ", "quantize_config.json"), ("AWQ", "quant_config.json"))
            if _has(path, file)
        )
    if not _has(path, ADAPTER_CONFIG, *(name for kind in WEIGHTS[:-1] for name in kind)):
        yield from _without_weights(path)


def _without_weights(path: Path) -> Iterator[str]:
    """Yields what a folder holds in place of weights that are read."""
    if files := sorted(path.glob("*.gguf")):
        others = f", or one of {len(files) - 1} others" if len(files) > 1 else ""
        yield f"a folder of GGUF files; name one of them: {files[0]}{others}"
    if _has(path, "*.onnx", "onnx/*.onnx"):
        yield f"a folder of ONNX files without the weights that they were made from; {ORIGINAL}"
    if _has(path, "tf_model.h5", "flax_model.msgpack", "saved_model.pb"):
        yield (
            "a folder of weights of TensorFlow or Flax; load them with from_tf or from_flax of transformers 4, and "
            "save them with save_pretrained"
        )
    if _has(path, "consolidated*.pth", "consolidated*.safetensors"):
        yield "weights in the format of their publisher (consolidated); name a folder in the format of transformers"


def _has(path: Path, *patterns: str) -> bool:
    return any(next(path.glob(pattern), None) is not None for pattern in patterns)


def adapter_to_convert(path: Path) -> str:
    """Returns how to build from an adapter, if the path is the folder of one; else nothing."""
    if not (path / ADAPTER_CONFIG).is_file():
        return ""
    return (
        f"{path}: an adapter ({ADAPTER_CONFIG}), and no model; merge it into its base model, and build OUT: mod-export "
        f"convert {path} OUT --base FOLDER"
    )


def lone_file(path: Path) -> str:
    """Returns what a file is that a model is not converted from, if it is such a file; else nothing."""
    if path.suffix == ".onnx":
        return f"{path}: an ONNX file, which mod-export makes and does not read; name the model that it was made from"
    if path.suffix in (".safetensors", ".bin", ".pth") and path.is_file():
        return f"{path}: weights without a configuration; name the folder that holds them beside a {CONFIG}"
    return ""


def _fields(path: Path) -> Fields:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # The reader of the model says what is wrong with it.
    return fields if isinstance(fields, Mapping) else {}
