"""Recognises files and folders that look like a model but are not one. One sentence says what each of them is, and what
to do.

Downloads can leave files that have the name of a model but another content, and other libraries store models in folders
that look like those of transformers. These checks run before PyTorch is loaded and before any file is read in full.
"""

from __future__ import annotations

import json
import re
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
OF_TEXTS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "generation_config.json", "chat_template.jinja",
)  # fmt: skip
"""Files beside the weights that are about text: tokenizer, settings of generation, chat template."""
POINTER = b"version https://git-lfs.github.com/spec/"
PAGES = (b"<!doctype html", b"<html")
OLD_LLAMA_CPP = (b"lmgg", b"fmgg", b"tjgg", b"algg")
"""First bytes of the formats that llama.cpp had before GGUF."""
OLD_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of what torch.save wrote before version 1.6: a number, pickled."""
ZIP, GGUF = b"PK\3\4", b"GGUF"
TENSORS = (".safetensors", ".bin", ".pt", ".pth")
ANSWER = re.compile(
    rb'\{\s*"(?:errors?|detail|message)"|access to (?:model|dataset) |(?:entry |repository |file )?not found|'
    rb"unauthorized|invalid username or password",
    re.IGNORECASE,
)
"""Start of what servers answer in place of a file."""
SHARD = re.compile(r"-\d{5}-of-\d{5}\.")
VARIANT = re.compile(r"(?:model|pytorch_model)(?:-\d{5}-of-\d{5})?\.([\w-]+?)(?:-\d{5}-of-\d{5})?\.(?:safetensors|bin)")
"""Name of a file of weights of a variant of a model, such as model.fp16.safetensors. Group: the variant."""
START = 512
LONGEST_ANSWER = 80
LONGEST_HEADER = 10**8
"""The longest header that the safetensors library reads."""
AS_A_MODULE = (
    "to build it, write a function that returns it as a PyTorch module: mod-export build my_model.py:make_model"
)
ORIGINAL = "name the folder of the original model"
Fields = Mapping[str, Any]


def what_file(path: Path) -> str:
    """Says what a file is if it cannot hold what its name says; empty if no problem is known.

    Raises:
        OSError: the file cannot be read.
    """
    if not path.is_file():
        return _dangling(path)
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
    return _other_kind(path, start) or (_truncated(path, start) if path.suffix == ".safetensors" else "")


def _dangling(path: Path) -> str:
    """Describes a link whose file does not exist; empty for any other path."""
    if not path.is_symlink() or path.exists():
        return ""
    return f"{path}: a link to {path.readlink()}, which is not there; fetch the file again, or copy the file itself"


def _other_kind(path: Path, start: bytes) -> str:
    """Describes a file that is of another kind than its name says; empty for any other file."""
    if path.suffix == ".safetensors" and _is_safetensors(start):
        return ""  # The first byte belongs to a number, so it can be any character.
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if ANSWER.match(text):
        answer = " ".join(text.decode(errors="replace").split())
        answer = answer if len(answer) <= LONGEST_ANSWER else f"{answer[:LONGEST_ANSWER]}..."
        return (
            f"{path}: a text in place of the file, which begins with {answer!r}; fetch it again, with HF_TOKEN if "
            "access has to be asked for"
        )
    if path.suffix not in TENSORS:
        return ""
    if _is_safetensors(start):
        return f"{path}: a safetensors file under the name of a pickle; {_rename(path)}"
    if start.startswith(GGUF):
        return f"{path}: a GGUF file; rename it, so that its name ends in .gguf, and name it in place of the folder"
    if start.startswith(OLD_TORCH):
        return (
            f"{path}: in torch's format before 1.6, which is not read here; load and save it again: "
            "torch.save(torch.load(FILE, weights_only=True), FILE)"
        )
    if path.suffix == ".safetensors" and start.startswith((ZIP, b"\x80")):
        return f"{path}: a pickle of torch.save under the name of a safetensors file; {_rename(path)}"
    return ""


def _rename(path: Path) -> str:
    """Says how to rename a file of weights whose name and content are swapped: a safetensors file named as a pickle, or
    a pickle named as safetensors.
    """
    if path.suffix == ".safetensors":
        name = path.with_suffix(".bin").name
        name = f"pytorch_{name}" if name.startswith("model") else name
    else:
        name = path.with_suffix(".safetensors").name.removeprefix("pytorch_")
    indexed = ", as all others of the model, and delete their index" if SHARD.search(name) else ""
    return f"rename it {name}{indexed}"


def _is_safetensors(start: bytes) -> bool:
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= LONGEST_HEADER


def _truncated(path: Path, start: bytes) -> str:
    """Describes a safetensors file that is shorter than its own header says; empty for any other file."""
    size, length = path.stat().st_size, int.from_bytes(start[:8], "little")
    if not _is_safetensors(start):
        return ""  # The reader of the file reports any other content.
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
    """Says why no model can be read from a source; empty if no problem is known.

    Raises:
        OSError: a file cannot be read.
    """
    problem = what_files(path)
    if problem or not path.is_dir():
        return problem
    if problem := next(filter(None, (_dangling(path / name) for name in OF_TEXTS)), ""):
        return problem
    config = _fields(path / CONFIG)
    if "spec" in config:
        return ""
    return next((f"{path}: {problem}" for problem in _kinds(path, config)), "")


def what_files(path: Path) -> str:
    """Like `what_source`, but looks only at files that are read: the configuration and weights of a folder, or the file
    itself.

    Other files may be pointers of git-lfs, because users who clone a model often pull only one of its formats.
    """
    return next(filter(None, map(what_file, _read_of(path) if path.is_dir() else [path])), "")


def _read_of(folder: Path) -> list[Path]:
    config = [folder / CONFIG, folder / ADAPTER_CONFIG]
    adapter = [folder / name for name in ADAPTER]
    # Links without a file are listed as well, so glob is not enough.
    inside = sorted(folder.iterdir())
    kinds = [[file for file in inside if any(map(file.match, kind))] for kind in WEIGHTS]
    whole = (kind for kind in kinds if any(file.exists() for file in kind))
    return [*config, *adapter, *next(whole, next(filter(None, kinds), []))]


def _kinds(path: Path, config: Fields) -> Iterator[str]:
    """Yields descriptions of a folder that another library has written."""
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


def _of_training(path: Path) -> Iterator[str]:
    """Yields descriptions of a folder that a training run has written."""
    if steps := [(int(file.name[11:]), file) for file in path.glob("checkpoint-*/") if file.name[11:].isdecimal()]:
        others = f", or one of {len(steps) - 1} others" if len(steps) > 1 else ""
        yield f"a folder of checkpoints of a training; name one of them: {max(steps)[1]}{others}"
    if _has(path, "zero_to_fp32.py", "global_step*/*.pt", "*_model_states.pt"):
        yield (
            "a checkpoint of DeepSpeed, whose weights are in parts; join them with the zero_to_fp32.py that it wrote, "
            f"and name the folder of the result, with {CONFIG} in it"
        )
    parts = [file.parent for pattern in (".metadata", "*.distcp") for file in path.glob(pattern)]
    parts += [file.parent for pattern in ("*/.metadata", "*/*.distcp") for file in sorted(path.glob(pattern))]
    if parts:
        yield (
            f"a checkpoint of FSDP, whose weights are in parts; join them: accelerate merge-weights {parts[0]} OUT, "
            f"and name OUT, with {CONFIG} in it"
        )


def _without_weights(path: Path) -> Iterator[str]:
    """Yields descriptions of a folder that holds other files in place of weights that can be read."""
    if snapshots := sorted(path.glob("snapshots/*/")):
        yield f"a folder of the hub's cache; name the folder of the model in it: {_snapshot(path, snapshots)}"
    yield from _of_training(path)
    if variant := next(filter(None, (VARIANT.fullmatch(file.name) for file in sorted(path.iterdir()))), None):
        yield (
            f"a folder of weights of the variant {variant[1]} alone ({variant[0]}); save them under the usual names: "
            f"from_pretrained(FOLDER, variant={variant[1]!r}) and save_pretrained of transformers"
        )
    if files := sorted(path.glob("*.gguf")):
        others = f", or one of {len(files) - 1} others" if len(files) > 1 else ""
        yield f"a folder of GGUF files; name one of them: {files[0]}{others}"
    if _has(path, "*.onnx", "onnx/*.onnx"):
        yield f"a folder of ONNX files without the weights that they were made from; {ORIGINAL}"
    if _has(path, "openvino_*model.xml", "openvino/openvino_*model.xml"):
        yield f"a folder of OpenVINO files without the weights that they were made from; {ORIGINAL}"
    if _has(path, "tf_model.h5", "flax_model.msgpack", "saved_model.pb"):
        yield (
            "a folder of weights of TensorFlow or Flax; load them with from_tf or from_flax of transformers 4, and "
            "save them with save_pretrained"
        )
    if _has(path, "consolidated*.pth", "consolidated*.safetensors"):
        yield "weights in the format of their publisher (consolidated); name a folder in the format of transformers"


def _snapshot(path: Path, snapshots: list[Path]) -> Path:
    """The revision `main` of a folder in the hub's cache, or the first that is there."""
    try:
        main = path / "snapshots" / (path / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return snapshots[0]
    return main if main in snapshots else snapshots[0]


def _has(path: Path, *patterns: str) -> bool:
    return any(next(path.glob(pattern), None) is not None for pattern in patterns)


def adapter_to_convert(path: Path) -> str:
    """Says how to build from an adapter if the path is the folder of an adapter; otherwise empty."""
    if not (path / ADAPTER_CONFIG).is_file():
        return ""
    return (
        f"{path}: an adapter ({ADAPTER_CONFIG}), and no model; merge it into its base model, and build OUT: mod-export "
        f"convert {path} OUT --base FOLDER"
    )


def lone_file(path: Path) -> str:
    """Describes a file that models are not converted from; empty if the path is no such file."""
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
