"""What is taken for a model and is none: one sentence says the file, what it is and the next step."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from command_line import invoke, refused
from gguf_files import as_gguf, metadata_of, tensors_of, write_gguf
from hugging_face import change_config, made, saved
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from mod_export.errors import CheckpointError
from mod_export.model.checkpoint import convert, look_at_checkpoint
from mod_export.model.other_files import what_file, what_source

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4" * 64 + b"\nsize 988097824\n"
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Hugging Face</title>"
AS_MODULE = "to build it, write a function that returns it as a PyTorch module: mod-export build my_model.py:make_model"
ORIGINAL = "name the folder of the original model"
SHARDS = "{source}/model-0000{}-of-00005.safetensors"
Make = Callable[[Path], object]


def folder(change: Make, name: str = "Llama", **options: Any) -> Make:
    """Makes a folder of a small model, and changes it."""

    def make(source: Path) -> None:
        saved(name, source, **options)
        change(source)

    return make


def without_weights(change: Make) -> Make:
    def make(source: Path) -> None:
        (source / "model.safetensors").unlink()
        change(source)

    return folder(make)


def writes(name: str, content: bytes | str) -> Make:
    data = content if isinstance(content, bytes) else content.encode()

    def make(source: Path) -> None:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)

    return make


def config(**fields: Any) -> Make:
    return writes("config.json", json.dumps(fields))


def quantized(**fields: Any) -> Make:
    return folder(lambda source: change_config(source, quantization_config=fields))


def says(**metadata: Any) -> Make:
    """Makes a GGUF file whose metadata also say this. `__` in a name stands for `.`."""
    named = {name.replace("__", "."): value for name, value in metadata.items()}
    return lambda source: as_gguf("Llama", source, change=lambda known, tensors: known.update(named))


def vocabulary(source: Path) -> None:
    words = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "general.architecture": "llama"}
    write_gguf(source, words, {})


def kind_of_tensor(number: int) -> Make:
    """Makes a GGUF file, and changes the type of one of its tensors."""

    def make(source: Path) -> None:
        as_gguf("Llama", source)
        data, name = bytearray(source.read_bytes()), b"blk.1.ffn_gate.weight"
        at = data.index(name) + len(name) + 4 + 16
        data[at : at + 4] = struct.pack("<I", number)
        source.write_bytes(data)

    return make


def in_type(kind: gguf.GGMLQuantizationType, bytes_of_row: int) -> Make:
    """Makes a GGUF file with matrices of zeros in a type that is not read, and that `gguf` cannot quantize to."""

    def make(source: Path) -> None:
        model = made("Llama")
        tensors = {
            name: np.zeros((len(array), bytes_of_row), np.uint8) if "ffn_gate" in name else array
            for name, array in tensors_of(model).items()
        }
        write_gguf(source, metadata_of(model), tensors, lambda name: kind if "ffn_gate" in name else Kind.F32)

    return make


Kind = gguf.GGMLQuantizationType


def old_version(number: int, order: str = "<") -> Make:
    return lambda source: source.write_bytes(b"GGUF" + struct.pack(f"{order}IQQ", number, 0, 0))


def all_parts(source: Path) -> None:
    says(split__count=2)(source)
    writes(source.name.replace("00001", "00002"), b"")(source.parent)


def truncated(source: Path) -> None:
    os.truncate(source / "model.safetensors", 5000)


def older_torch(source: Path) -> None:
    weights = {"model.norm.weight": torch.ones(2)}
    torch.save(weights, source / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def renamed(name: str) -> Make:
    """Gives the weights another name."""
    return folder(lambda source: (source / "model.safetensors").rename(source / name))


def pickled(source: Path) -> None:
    torch.save({"model.norm.weight": torch.ones(2)}, source / "model.safetensors")


def link(name: str, target: str) -> Make:
    """Makes a folder of a model with a link to a file that is gone."""

    def make(source: Path) -> None:
        (source / name).unlink(missing_ok=True)
        (source / name).symlink_to(target)

    return folder(make)


def of_steps(source: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-100", "checkpoint-last", "runs"):
        writes("config.json", "{}")(source / name)


def of_the_cache(source: Path) -> None:
    writes("refs/main", "b2\n")(source)
    for name in ("a1", "b2"):
        writes("config.json", "{}")(source / "snapshots" / name)


def with_code(source: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), source / "pytorch_model.bin")


def trained_quantized(source: Path) -> None:
    """Weights as AutoGPTQ stores them."""
    writes("quantize_config.json", '{"bits": 4}')(source)
    save_file({"model.layers.0.self_attn.q_proj.qweight": torch.ones(4, 4, dtype=torch.int32)},
              source / "model.safetensors")  # fmt: skip


MLX = {"group_size": 64, "bits": 4}
NO_WEIGHTS = "a folder of ONNX files without the weights that they were made from"
THEY = "which are not read here; name the folder of the original model, or a GGUF file of it"
REMOVED = "which llama.cpp has removed; take the model in another quantization, or quantize the original again"
GATE = "SOURCE: tensor 'blk.1.ffn_gate.weight' is of the type"
CASES: dict[str, tuple[str, Make, str]] = {
    "pointer, weights": ("source", folder(writes("model.safetensors", POINTER)),
        "SOURCE/model.safetensors: a pointer of git-lfs, not the file itself; run `git lfs pull` in SOURCE"),
    "pointer, shard": ("source", folder(writes("model-00002-of-00005.safetensors", POINTER), max_shard_size="60KB"),
        "SOURCE/model-00002-of-00005.safetensors: a pointer of git-lfs, not the file itself; run `git lfs pull` in "
        "SOURCE"),
    "pointer, pickle": ("source", without_weights(writes("pytorch_model.bin", POINTER)),
        "SOURCE/pytorch_model.bin: a pointer of git-lfs, not the file itself; run `git lfs pull` in SOURCE"),
    "pointer, tokenizer": ("source", folder(writes("tokenizer.json", POINTER)),
        "SOURCE/tokenizer.json: a pointer of git-lfs, not the file itself; run `git lfs pull` in SOURCE"),
    "pointer, GGUF": ("source.gguf", lambda source: source.write_bytes(POINTER),
        "SOURCE: a pointer of git-lfs, not the file itself; run `git lfs pull` in PARENT"),
    "pointer, adapter": ("source", lambda source: (writes("adapter_config.json", "{}")(source),
                                                   writes("adapter_model.safetensors", POINTER)(source)),
        "SOURCE/adapter_model.safetensors: a pointer of git-lfs, not the file itself; run `git lfs pull` in SOURCE"),
    "page, config": ("source", folder(writes("config.json", PAGE)),
        "SOURCE/config.json: a web page (HTML), not the file; fetch it from the address of the download, which on the "
        "hub has /resolve/ in place of /blob/"),
    "page, GGUF": ("source.gguf", lambda source: source.write_bytes(PAGE),
        "SOURCE: a web page (HTML), not the file; fetch it from the address of the download, which on the hub has "
        "/resolve/ in place of /blob/"),
    "page, model.pt": ("source.pt", lambda source: source.write_bytes(b"\xef\xbb\xbf<HTML>"),
        "SOURCE: a web page (HTML), not the file; fetch it from the address of the download, which on the hub has "
        "/resolve/ in place of /blob/"),
    "empty, weights": ("source", folder(writes("model.safetensors", b"")),
        "SOURCE/model.safetensors: an empty file; fetch it again"),
    "empty, config": ("source", folder(writes("config.json", b"")),
        "SOURCE/config.json: an empty file; fetch it again"),
    "empty, tokenizer": ("source", folder(writes("tokenizer.json", b"")),
        "SOURCE/tokenizer.json: an empty file; fetch it again"),
    "empty, GGUF": ("source.gguf", lambda source: source.write_bytes(b""), "SOURCE: an empty file; fetch it again"),
    "empty, model.pt": ("source.pt", lambda source: source.write_bytes(b""), "SOURCE: an empty file; fetch it again"),
    "truncated": ("source", folder(truncated),
        "SOURCE/model.safetensors: truncated, it has 5000 of at least [...] bytes; fetch it again"),
    "truncated in its header": ("source", folder(lambda source: os.truncate(source / "model.safetensors", 50)),
        "SOURCE/model.safetensors: truncated, it has 50 of at least [...] bytes; fetch it again"),
    "a pickle with code": ("source", without_weights(with_code),
        "SOURCE/pytorch_model.bin: refused, its pickle asks for torch.nn.modules.linear.Linear, which is more than "
        "plain data and tensors and could run code. Save the model again as safetensors, as save_pretrained of "
        "transformers does"),
    "a pickle of old": ("source", without_weights(older_torch),
        "SOURCE/pytorch_model.bin: in torch's format before 1.6, which is not read here; load and save it again: "
        "torch.save(torch.load(FILE, weights_only=True), FILE)"),
    "a pickle with another name": ("source", folder(pickled),
        "SOURCE/model.safetensors: a pickle of torch.save under the name of a safetensors file; rename it "
        "pytorch_model.bin"),
    "a pickle without torch.save": ("source", folder(writes("model.safetensors", b"\x80\2}q\0.")),
        "SOURCE/model.safetensors: a pickle of torch.save under the name of a safetensors file; rename it "
        "pytorch_model.bin"),
    "safetensors with another name": ("source", renamed("pytorch_model.bin"),
        "SOURCE/pytorch_model.bin: a safetensors file under the name of a pickle; rename it model.safetensors"),
    "a shard with another name": ("source", renamed("pytorch_model-00001-of-00001.bin"),
        "SOURCE/pytorch_model-00001-of-00001.bin: a safetensors file under the name of a pickle; rename it "
        "model-00001-of-00001.safetensors, as all others of the model, and delete their index"),
    "GGUF with another name": ("source", folder(writes("model.safetensors", b"GGUF" + bytes(90))),
        "SOURCE/model.safetensors: a GGUF file; rename it, so that its name ends in .gguf, and name it in place of the "
        "folder"),
    "an answer, weights": ("source", folder(writes("model.safetensors", '{"error": "Repository\nnot found"}')),
        "SOURCE/model.safetensors: a text in place of the file, which begins with '{\"error\": \"Repository not found"
        "\"}'; fetch it again, with HF_TOKEN if access has to be asked for"),
    "an answer, no access": ("source", without_weights(writes("pytorch_model.bin",
        "Access to model org/name is restricted. You must have access to it and be authenticated to access it.")),
        "SOURCE/pytorch_model.bin: a text in place of the file, which begins with 'Access to model org/name is "
        "restricted. You must have access to it and be authen...'; fetch it again, with HF_TOKEN if access has to be "
        "asked for"),
    "an answer, config": ("source", folder(writes("config.json", '{"error": "x"}')),
        "SOURCE/config.json: a text in place of the file, which begins with '{\"error\": \"x\"}'; fetch it again, with "
        "HF_TOKEN if access has to be asked for"),
    "an answer, GGUF": ("source.gguf", lambda source: source.write_bytes(b'{"detail": 1}'),
        "SOURCE: a text in place of the file, which begins with '{\"detail\": 1}'; fetch it again, with HF_TOKEN if "
        "access has to be asked for"),
    "a link, weights": ("source", link("model.safetensors", "../../blobs/none"),
        "SOURCE/model.safetensors: a link to ../../blobs/none, which is not there; fetch the file again, or copy the "
        "file itself"),
    "a link, config": ("source", link("config.json", "none"),
        "SOURCE/config.json: a link to none, which is not there; fetch the file again, or copy the file itself"),
    "a link, tokenizer": ("source", link("tokenizer.json", "none"),
        "SOURCE/tokenizer.json: a link to none, which is not there; fetch the file again, or copy the file itself"),
    "a link, GGUF": ("source.gguf", lambda source: source.symlink_to("none"),
        "SOURCE: a link to none, which is not there; fetch the file again, or copy the file itself"),
    "a variant": ("source", renamed("model.fp16.safetensors"),
        "SOURCE: a folder of weights of the variant fp16 alone (model.fp16.safetensors); save them under the usual "
        "names: from_pretrained(FOLDER, variant='fp16') and save_pretrained of transformers"),
    "a variant in shards": ("source", renamed("pytorch_model.bf16-00001-of-00002.bin"),
        "SOURCE: a folder of weights of the variant bf16 alone (pytorch_model.bf16-00001-of-00002.bin); save them "
        "under the usual names: from_pretrained(FOLDER, variant='bf16') and save_pretrained of transformers"),
    "the hub's cache": ("source", of_the_cache,
        "SOURCE: a folder of the hub's cache; name the folder of the model in it: SOURCE/snapshots/b2"),
    "the hub's cache without its main": ("source", writes("snapshots/a1/config.json", "{}"),
        "SOURCE: a folder of the hub's cache; name the folder of the model in it: SOURCE/snapshots/a1"),
    "checkpoints": ("source", of_steps,
        "SOURCE: a folder of checkpoints of a training; name one of them: SOURCE/checkpoint-100, or one of 1 others"),
    "DeepSpeed": ("source", without_weights(writes("global_step7/mp_rank_00_model_states.pt", b"x")),
        "SOURCE: a checkpoint of DeepSpeed, whose weights are in parts; join them with the zero_to_fp32.py that it "
        "wrote, and name the folder of the result, with config.json in it"),
    "FSDP": ("source", without_weights(writes("pytorch_model_fsdp_0/.metadata", b"x")),
        "SOURCE: a checkpoint of FSDP, whose weights are in parts; join them: accelerate merge-weights "
        "SOURCE/pytorch_model_fsdp_0 OUT, and name OUT, with config.json in it"),
    "parts of FSDP": ("source", writes("__0_0.distcp", b"x"),
        "SOURCE: a checkpoint of FSDP, whose weights are in parts; join them: accelerate merge-weights SOURCE OUT, and "
        "name OUT, with config.json in it"),
    "OpenVINO": ("source", without_weights(writes("openvino_model.xml", b"<net/>")),
        f"SOURCE: a folder of OpenVINO files without the weights that they were made from; {ORIGINAL}"),
    "MLX": ("source", folder(lambda source: change_config(source, quantization=MLX, quantization_config=MLX)),
        f"SOURCE/config.json: quantization: weights quantized by MLX, {THEY}"),
    "ONNX": ("source", without_weights(writes("onnx/model.onnx", b"x")), f"SOURCE: {NO_WEIGHTS}; {ORIGINAL}"),
    "ONNX without a config": ("source", writes("model.onnx", b"x"), f"SOURCE: {NO_WEIGHTS}; {ORIGINAL}"),
    "TensorFlow": ("source", without_weights(writes("tf_model.h5", b"x")),
        "SOURCE: a folder of weights of TensorFlow or Flax; load them with from_tf or from_flax of transformers 4, and "
        "save them with save_pretrained"),
    "consolidated": ("source", writes("consolidated.safetensors", b"x"),
        "SOURCE: weights in the format of their publisher (consolidated); name a folder in the format of transformers"),
    "a folder of GGUF files": ("source", lambda source: (writes("a.Q4_0.gguf", b"x")(source),
                                                         writes("b.gguf", b"x")(source)),
        "SOURCE: a folder of GGUF files; name one of them: SOURCE/a.Q4_0.gguf, or one of 1 others"),
    "GPTQ": ("source", quantized(quant_method="gptq", bits=4),
        f"SOURCE/config.json: quantization_config: weights quantized by gptq, {THEY}"),
    "AWQ": ("source", quantized(quant_method="awq", bits=4),
        f"SOURCE/config.json: quantization_config: weights quantized by awq, {THEY}"),
    "bitsandbytes": ("source", quantized(quant_method="bitsandbytes", load_in_4bit=True),
        f"SOURCE/config.json: quantization_config: weights quantized by bitsandbytes, {THEY}"),
    "FP8": ("source", quantized(quant_method="fp8", weight_block_size=[128, 128]),
        f"SOURCE/config.json: quantization_config: weights quantized by fp8, {THEY}"),
    "GPTQ of AutoGPTQ": ("source", folder(trained_quantized),
        f"SOURCE: a folder of weights quantized by GPTQ, which are not read here; {ORIGINAL}"),
    "AWQ of AutoAWQ": ("source", folder(writes("quant_config.json", "{}")),
        f"SOURCE: a folder of weights quantized by AWQ, which are not read here; {ORIGINAL}"),
    "diffusers": ("source", writes("model_index.json", '{"_class_name": "StableDiffusionPipeline"}'),
        f"SOURCE: a folder of diffusers, which generates images or sound and no text; {AS_MODULE}"),
    "a part of diffusers": ("source", config(_class_name="UNet2DConditionModel", _diffusers_version="0.42.1"),
        f"SOURCE: a folder of diffusers, which generates images or sound and no text; {AS_MODULE}"),
    "timm": ("source", config(architecture="vit_tiny", num_classes=10, pretrained_cfg={}),
        f"SOURCE: a folder of timm, a model of images; {AS_MODULE}"),
    "timm of old": ("source", config(architecture="resnet18", num_classes=1000, num_features=512),
        f"SOURCE: a folder of timm, a model of images; {AS_MODULE}"),
    "sentence-transformers": ("source", folder(writes("modules.json", "[]")),
        f"SOURCE: a folder of sentence-transformers, which gives a vector for a text and no logits; {AS_MODULE}"),
    "GGUF, adapter": ("source.gguf", says(general__type="adapter", adapter__type="lora"),
        "SOURCE: a LoRA adapter, and no model; merge it into the GGUF file of its base model with llama-export-lora"),
    "GGUF, imatrix": ("source.gguf", says(general__type="imatrix"),
        "SOURCE: an importance matrix, with which a model was quantized, and no model; name the GGUF file of the "
        "model"),
    "GGUF, mmproj": ("source.gguf", says(general__type="mmproj"),
        "SOURCE: the projector of images or sound of a model (mmproj), and no model of text; name the GGUF file of "
        "that"),
    "GGUF, clip": ("source.gguf", lambda source: write_gguf(source, {"general.architecture": "clip"}, {}),
        "SOURCE: the projector of images or sound of a model (mmproj), and no model of text; name the GGUF file of "
        "that"),
    "GGUF, control vector": ("source.gguf",
        lambda source: write_gguf(source, {"general.architecture": "controlvector"}, {}),
        "SOURCE: a control vector, and no model; name the GGUF file of the model"),
    "GGUF, vocabulary": ("source.gguf", vocabulary,
        "SOURCE: a vocabulary without weights; name the GGUF file of the model"),
    **{f"GGUF, {name}": ("source.gguf", kind_of_tensor(number), f"{GATE} {name}, {REMOVED}")
       for number, name in ((4, "Q4_2"), (5, "Q4_3"), (31, "Q4_0_4_4"), (32, "Q4_0_4_8"), (33, "Q4_0_8_8"),
                            (36, "IQ4_NL_4_4"), (37, "IQ4_NL_4_8"), (38, "IQ4_NL_8_8"))},
    "GGUF, another type": ("source.gguf", in_type(Kind.IQ2_XXS, 66),
        "SOURCE: blk.0.ffn_gate.weight holds IQ2_XXS, expected F32, F16, [...], IQ4_XS, and so do 2 others; take the "
        "model in one of these types"),
    "GGUF, version 1": ("source.gguf", old_version(1),
        "SOURCE: GGUF version 1, this release reads 2 and 3; convert the original model again with "
        "convert_hf_to_gguf.py of llama.cpp"),
    "GGUF, big-endian": ("source.gguf", old_version(3, ">"),
        "SOURCE: is big-endian, which is not read here; convert it with gguf-convert-endian"),
    "before GGUF": ("source.gguf", lambda source: source.write_bytes(b"tjgg\3\0\0\0"),
        "SOURCE: a file of llama.cpp from before GGUF; fetch or convert the model again as GGUF"),
    "GGUF, a part": ("m-00002-of-00003.gguf", says(split__count=3, split__no=1),
        "SOURCE: one of 3 files of a model, of which m-00001-of-00003.gguf and 1 more are not beside it; fetch all of "
        "them"),
    "GGUF, the other part": ("m-00001-of-00002.gguf", says(split__count=2, split__no=0),
        "SOURCE: one of 2 files of a model, of which m-00002-of-00002.gguf is not beside it; fetch all of them"),
    "GGUF, all parts": ("m-00001-of-00002.gguf", all_parts,
        "SOURCE: one of 2 files of a model; join them: llama-gguf-split --merge SOURCE WHOLE.gguf"),
    "GGUF, a part with another name": ("source.gguf", says(split__count=2),
        "SOURCE: one of 2 files of a model; join them: llama-gguf-split --merge FIRST.gguf WHOLE.gguf"),
}  # fmt: skip
"""What it is -> (name of the source, function that makes it, the message, in which [...] is any text)."""


@pytest.mark.parametrize("what", CASES)
def test_what_it_is_and_what_to_do(what: str, tmp_path: Path) -> None:
    """Both commands that read models say the same."""
    name, make, message = CASES[what]
    source, out = tmp_path / "in" / name, tmp_path / "out"
    source.parent.mkdir()
    make(source)
    expected = message.replace("SOURCE", str(source)).replace("PARENT", str(source.parent))
    pattern = re.escape(f"error: {expected}").replace(re.escape("[...]"), ".*")
    for words in (["convert", source, out], ["build", source, "-o", out]):
        found = invoke(*words)
        refused(found, "")
        # A build that got as far as reading the model also says so.
        said, *others = found.stderr.splitlines()
        assert re.fullmatch(pattern, said)
        assert all("stage load failed" in other for other in others)
    assert not out.exists()


WORDS = Tokenizer(models.WordLevel({f"w{number}": number for number in range(96)}, unk_token="w0")).to_str()


def pulled_in_part(source: Path) -> None:
    """Pulls only the safetensors of a repository that has its model in two formats, and a tokenizer in two."""
    saved("Llama", source)
    for name in ("pytorch_model.bin", "model-00001-of-00002.safetensors", "optimizer.pt", "tokenizer.model"):
        (source / name).write_bytes(POINTER)
    (source / "tokenizer.json").write_text(WORDS)
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def with_another_format(source: Path) -> None:
    """The format that would be looked for first is gone, and the other one is whole."""
    saved("Llama", source)
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").symlink_to("none")
    (source / "model.fp16.safetensors").write_bytes(b"x")


def of_mod_export(source: Path) -> None:
    """Converts a model; then a file of another library comes to lie beside it."""
    saved("Llama", source.with_name("original"))
    assert invoke("convert", source.with_name("original"), source).exit_code == 0
    (source / "modules.json").write_text("[]")


@pytest.mark.parametrize("make", [pulled_in_part, with_another_format, of_mod_export])
def test_what_is_no_reason_against_a_model(make: Make, tmp_path: Path) -> None:
    make(tmp_path / "source")
    assert what_source(tmp_path / "source") == ""
    if make is not of_mod_export:
        found = invoke("convert", tmp_path / "source", tmp_path / "out")
        assert (found.exit_code, found.stderr) == (0, "")


def test_what_is_advised_helps(tmp_path: Path) -> None:
    """Weights that are saved again, or renamed, are read."""
    source = tmp_path / "source"
    saved("Llama", source)
    safetensors, pickle = source / "model.safetensors", source / "pytorch_model.bin"
    weights = {name: tensor.clone() for name, tensor in load_file(safetensors).items()}

    def converted(out: str) -> int:
        return invoke("convert", source, tmp_path / out).exit_code

    safetensors.rename(pickle)
    assert converted("a") == 2
    pickle.rename(safetensors)
    assert converted("a") == 0
    torch.save(weights, safetensors)
    assert converted("b") == 2
    safetensors.rename(pickle)
    assert converted("b") == 0
    torch.save(weights, pickle, _use_new_zipfile_serialization=False)
    assert converted("c") == 2
    torch.save(torch.load(pickle, weights_only=True), pickle)
    assert converted("c") == 0


def test_an_adapter_is_not_built(tmp_path: Path) -> None:
    writes("adapter_config.json", "{}")(tmp_path / "source")
    refused(
        invoke("build", tmp_path / "source", "-o", tmp_path / "out"),
        r"source: an adapter \(adapter_config.json\), and no model; merge it into its base model, and build OUT: "
        r"mod-export convert \S+/source OUT --base FOLDER\n$",
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.onnx", "an ONNX file, which mod-export makes and does not read; name the model that it was made from"),
        ("model.safetensors", "weights without a configuration; name the folder that holds them beside a config.json"),
        ("pytorch_model.bin", "weights without a configuration; name the folder that holds them beside a config.json"),
    ],
)
def test_a_file_of_a_folder(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x" * 100)
    refused(invoke("convert", tmp_path / name, tmp_path / "out"), f"/{re.escape(name)}: {message}\n$")


def test_the_base_model_of_an_adapter_and_a_folder_of_an_implementation(tmp_path: Path) -> None:
    """Of a folder of an implementation only the files are looked at: it has its own configuration."""
    writes("adapter_config.json", "{}")(tmp_path / "adapter")
    writes("model.safetensors", POINTER)(tmp_path / "base")
    message = r"base/model.safetensors: a pointer of git-lfs, not the file itself; run `git lfs pull` in \S+/base\n$"
    refused(invoke("convert", tmp_path / "adapter", tmp_path / "out", "--base", tmp_path / "base"), message)
    writes("consolidated.00.pth", POINTER)(tmp_path / "meta")
    refused(
        invoke("convert", tmp_path / "meta", tmp_path / "out", "--implementation", "d-llm"),
        "meta/consolidated.00.pth: a po",
    )
    (tmp_path / "meta" / "consolidated.00.pth").write_bytes(b"x")
    found = invoke("convert", tmp_path / "meta", tmp_path / "out", "--implementation", "d-llm")
    assert "format of their publisher" not in found.stderr


def test_a_tokenizer_that_is_named(tmp_path: Path) -> None:
    saved("Llama", tmp_path / "source")
    (tmp_path / "tokenizer.json").write_bytes(POINTER)
    words = ["build", tmp_path / "source", "-o", tmp_path / "out", "--tokenizer", tmp_path / "tokenizer.json"]
    refused(invoke(*words), r"tokenizer.json: a pointer of git-lfs, not the file itself; run `git lfs pull` in \S+\n$")


def test_quantization_that_the_user_knows_to_be_undone(tmp_path: Path) -> None:
    quantized(quant_method="fp8")(tmp_path / "source")
    words = ["convert", tmp_path / "source", tmp_path / "out", "--ignore-field", "quantization_config"]
    assert invoke(*words).exit_code == 0


@pytest.mark.parametrize(
    "header",
    [b"[]", b"{", b'{"a": 1}', b'{"a": {"data_offsets": [0, "9"]}}', b'{"a": {"data_offsets": [0]}}', b'{"a":' * 9000],
)
def test_headers_that_say_no_length(header: bytes, tmp_path: Path) -> None:
    """The reader of the file says what is wrong with them."""
    for length in (len(header), 2**63):
        (tmp_path / "a.safetensors").write_bytes(length.to_bytes(8, "little") + header)
        assert what_file(tmp_path / "a.safetensors") == ""


def test_whole_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.ones(0)}, tmp_path / "a.safetensors", {"format": "pt"})
    save_file({}, tmp_path / "b.safetensors")
    os.mkfifo(tmp_path / "c.safetensors")
    for name, first in (("d", b"\x80"), ("e", b"{")):
        header = json.dumps({"__metadata__": {"a": ""}}).encode().ljust(first[0])
        (tmp_path / f"{name}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    for name in "abcde":
        assert what_file(tmp_path / f"{name}.safetensors") == ""
    assert load_file(tmp_path / "a.safetensors")["a"].sum() == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    saved("Llama", tmp_path / "source")
    (tmp_path / "source" / "model.safetensors").chmod(0)
    for words in (["convert", tmp_path / "source", tmp_path / "out"], ["build", tmp_path / "source"]):
        refused(invoke(*words), r"source: cannot be read \(Permission denied\)")


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    for read in (lambda: convert(path, tmp_path / "out"), lambda: look_at_checkpoint(path)):
        with pytest.raises(CheckpointError, match=r"x: cannot be read \(File name too long\)"):
            read()
