"""Hugging Face folders on the command line, converted and built directly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch
from command_line import FEW_SAMPLES, invoke, refused
from gguf_files import as_gguf
from hugging_face import change_config, saved
from implementation_models import Astramind, ByRow, Dlo, FlexiDepth, Ohara, SkipGpt
from packages import OnlyReads
from safetensors.torch import load_file, save_file
from serving import PATIENCE_S, serving
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel

import mod_export
from mod_export.errors import CheckpointError
from mod_export.folder.manifest import read_manifest
from mod_export.model import checkpoint
from mod_export.model.checkpoint import companions_in, convert
from mod_export.model.request import Request
from mod_export.runtime.generator import load_generator
from mod_models.checkpoint import load_checkpoint
from mod_models.convert.implementations import IMPLEMENTATIONS
from mod_models.train.__main__ import main as train

WRITING_TOML = f"""
buckets = [[1, 16]]
targets = ["ort-cpu"]
{FEW_SAMPLES}
[cost]
profile_runs = 0
[generation]
window = 32
prompts = [8]
caches = [32]
batches = [1]
compared_texts = 1
judged_tokens = 8
measured_tokens = 5
"""


def model_folder(name: str, folder: Path) -> PreTrainedModel:
    """Saves a model with a tokenizer of 96 words, as transformers stores it."""
    model = saved(name, folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(96)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return model


def test_a_folder_is_converted(tmp_path: Path) -> None:
    saved("Qwen2", tmp_path / "plain", max_shard_size="60KB")
    found = invoke("convert", tmp_path / "plain", tmp_path / "one")
    assert (found.exit_code, found.stderr) == (0, "")
    assert found.stdout == (
        f"{tmp_path / 'one'}  qwen2, 0.07 M parameters; copied generation_config.json; no tokenizer.json in "
        f"{tmp_path / 'plain'}, so its ids stand for no text\n"
    )
    assert load_checkpoint(tmp_path / "one").spec.attention_bias == "qkv"
    model_folder("Qwen2", tmp_path / "whole")
    found = invoke("convert", tmp_path / "whole", tmp_path / "two", "-q")
    files = "copied tokenizer.json, tokenizer_config.json, generation_config.json\n"
    assert found.stdout == f"{tmp_path / 'two'}  qwen2, 0.07 M parameters; {files}"


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    refused(invoke("convert", source, out), "source: no such file or folder")
    saved("Mistral", source)
    change_config(source, sliding_window=16, note="mine")
    message = r"config.json: sliding_window: .* --max-positions 16; note: unknown field"
    refused(invoke("convert", source, out), message)
    refused(invoke("build", source, "-o", out), message)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    arguments = ["convert", source, out, "--max-positions", 16, "--ignore-field", "note"]
    found = invoke(*arguments)
    assert found.exit_code == 0, found.output
    assert load_checkpoint(out).spec.max_positions == 16
    refused(invoke(*arguments), "out: exists already; name another folder, or delete it")


def test_an_adapter_is_merged(tmp_path: Path) -> None:
    """Its tokenizer is its own; where texts end is what its base model says."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model_folder("Llama", base)
    adapter.mkdir()
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file({f"{module}.lora_A.weight": torch.ones(2, 48), f"{module}.lora_B.weight": torch.ones(48, 2)},
              adapter / "adapter_model.safetensors")  # fmt: skip
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 1, "base_model_name_or_path": "org/tiny"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    named = (
        r"adapter: a LoRA adapter of org/tiny, and no model; name the folder of that model: mod-export convert \S+ OUT"
    )
    refused(invoke("convert", adapter, tmp_path / "out"), f"{named} --base FOLDER")
    found = invoke("convert", adapter, tmp_path / "one", "--base", base)
    assert found.exit_code == 0, found.output
    assert found.stderr == f"note: {adapter}: merged into {base}\n"
    words = Tokenizer(models.WordLevel({f"w{95 - number}": number for number in range(96)}, unk_token="w0"))
    words.save(str(adapter / "tokenizer.json"))
    (adapter / "chat_template.jinja").write_text("mine")
    assert invoke("convert", adapter, tmp_path / "two", "--base", base).exit_code == 0
    first = [Tokenizer.from_file(str(tmp_path / out / "tokenizer.json")).id_to_token(0) for out in ("one", "two")]
    assert first == ["w0", "w95"]
    assert (tmp_path / "two" / "chat_template.jinja").read_text() == "mine"
    for out in ("one", "two"):
        assert json.loads((tmp_path / out / "generation_config.json").read_text())["eos_token_id"] == 2
    weights = [load_checkpoint(folder).weights for folder in (tmp_path / "one", tmp_path / "two")]
    changed = "layers.0.attention.q_proj.weight"
    before = load_file(base / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert all(torch.allclose(of[changed], before + 1) for of in weights)


WORDS = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "abc", *(f"[PAD{number}]" for number in range(91))],
    "tokenizer.ggml.token_type": [1] * 96, "tokenizer.ggml.eos_token_id": 4, "tokenizer.chat_template": "x",
}  # fmt: skip


def test_a_gguf_file_is_converted(tmp_path: Path) -> None:
    """Its tokenizer is converted too, or a message says why not."""
    source = tmp_path / "small.gguf"
    as_gguf("Llama", source, change=lambda metadata, tensors: metadata.update(WORDS))
    found = invoke("convert", source, tmp_path / "one")
    assert (found.exit_code, found.stderr) == (0, "")
    files = "copied tokenizer.json, tokenizer_config.json, generation_config.json\n"
    assert found.stdout == f"{tmp_path / 'one'}  llama, 0.06 M parameters; {files}"
    assert Tokenizer.from_file(str(tmp_path / "one" / "tokenizer.json")).encode("abcab").ids == [4, 3]
    as_gguf("Llama", source, change=lambda metadata, tensors: metadata.update({**WORDS, "tokenizer.ggml.pre": "mine"}))
    found = invoke("convert", source, tmp_path / "two")
    assert found.exit_code == 0
    assert found.stderr.startswith(
        "note: its tokenizer cannot be written as tokenizer.json (tokenizer.ggml.pre: 'mine'"
    )
    assert "copied tokenizer_config.json, generation_config.json; no tokenizer.json in" in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["gpt-2", "mine"])
def test_a_gguf_file_is_built_as_it_is(pre: str, tmp_path: Path, fast: Path) -> None:
    """The served model gives the logits of transformers, and the tokenizer is in the build folder."""
    source, out = tmp_path / "small.gguf", tmp_path / "out"
    words = {**WORDS, "tokenizer.ggml.pre": pre}
    theirs = as_gguf("Llama 3.1", source, change=lambda metadata, tensors: metadata.update(words))
    found = invoke("build", source, "-c", fast, "-o", out)
    assert found.exit_code == 0, found.output
    assert '"small"' in (out / "report.json").read_text()
    assert (out / "tokenizer.json").is_file() == (pre == "gpt-2")
    assert ("note: its tokenizer cannot be written" in found.stderr) == (pre == "mine")
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": 4}
    assert "generation_config.json" in read_manifest(out)["files"]
    ids_BS = np.random.default_rng(0).integers(3, 96, (1, 16))
    with torch.no_grad():
        expected_BSV = theirs(torch.from_numpy(ids_BS)).logits.numpy()
    source.unlink()
    with mod_export.load(out) as deployment:
        np.testing.assert_allclose(deployment.run(ids_BS), expected_BSV, rtol=0, atol=1e-5)


def test_a_gguf_file_is_known_by_its_first_bytes_too(tmp_path: Path) -> None:
    """Some programs store such files under names without a suffix."""
    source = tmp_path / "sha256-1f"
    as_gguf("Llama", source.with_suffix(".gguf"), change=lambda metadata, tensors: metadata.update(WORDS))
    source.with_suffix(".gguf").rename(source)
    request = Request(sources=(str(source),))
    request.check()
    model, _ = request.models()
    assert model.origin.name == "sha256-1f"
    files, notes = request.tokenizer()
    assert files is not None
    assert files.has_vocabulary
    assert notes == ()


def test_a_gguf_file_that_is_none(tmp_path: Path) -> None:
    source, out = tmp_path / "small.gguf", tmp_path / "out"
    source.write_bytes(b"GGUF\3\0\0\0")
    for words in (["convert", source, out], ["build", source, "-o", out]):
        refused(
            invoke(*words), r"small.gguf: speaks of 2 numbers, and 0 bytes are left; it may be truncated or damaged"
        )
    assert not out.exists()


def test_where_no_architecture_converts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "architectures", lambda: {"other": OnlyReads()})
    with pytest.raises(CheckpointError, match="source: no architecture that is installed here converts models of"):
        convert(tmp_path / "source", tmp_path / "out")
    assert companions_in(tmp_path / "source") == (None, ())


@pytest.mark.filterwarnings("ignore::mod_export.errors.UnverifiedWarning")
@pytest.mark.parametrize("name", ["Gemma", pytest.param("Phi-3", marks=pytest.mark.slow)])
def test_a_folder_is_built_as_it_is(name: str, tmp_path: Path, fast: Path) -> None:
    """The served model gives the logits of transformers, and the tokenizer's files are in the build folder."""
    source, out = tmp_path / "source", tmp_path / "out"
    theirs = model_folder(name, source)
    found = invoke("build", source, "-c", fast, "-o", out, "--no-evidence")
    assert found.exit_code == 0, found.output
    assert {path.name for path in out.glob("*token*.json")} == {"tokenizer.json", "tokenizer_config.json"}
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 2
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= read_manifest(out)["files"].keys()
    ids_BS = np.random.default_rng(0).integers(3, 96, (1, 16))
    with torch.no_grad():
        expected_BSV = theirs(torch.from_numpy(ids_BS)).logits.numpy()
    shutil.rmtree(source)
    with mod_export.load(out) as deployment:
        np.testing.assert_allclose(deployment.run(ids_BS), expected_BSV, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3 with biases", "Gemma, one key", "Llama 3.1"])
def test_a_folder_that_was_built_writes_as_transformers_does(name: str, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    theirs = model_folder(name, source)
    (tmp_path / "writing.toml").write_text(WRITING_TOML)
    found = invoke("build", source, "-c", tmp_path / "writing.toml", "-o", out)
    assert found.exit_code == 0, found.output
    theirs.generation_config.eos_token_id = None
    prompt = [5, 17, 80, 4, 33, 9]
    ids_1S = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)
    with load_generator(out) as generator:
        (written,) = generator.generate([prompt], 20)
    assert written.ids == ids_1S[0, len(prompt) :].tolist()


def test_an_implementation_is_declared(tmp_path: Path) -> None:
    """Without a declaration it is refused with the way out; the output says how the result routes."""
    source, out = tmp_path / "source", tmp_path / "out"
    Dlo(0).save(source)
    for words in (["convert", source, out], ["build", source, "-o", out]):
        refused(
            invoke(*words),
            r"Implementations with such names: dlo\. .* mod-export convert .*source OUT --implementation NAME",
        )
    refused(invoke("convert", source, out, "--implementation", "dlo"), "give --capacity: dlo runs every token")
    assert not out.exists()
    found = invoke("convert", source, out, "--implementation", "dlo", "--capacity", "1")
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith(
        f"{out}  llama as dlo stores it, 0.06 M parameters; copied generation_config.json; no tokenizer.json in "
    )
    assert found.stderr.splitlines() == [
        "note: routed layers 1, 2; threshold, capacity 1.0 by the rule floor_min1",
        "note: causal; can write text token by token",
        "note: every token has a slot, as in its code; a prompt costs as much as in the dense model, and no less",
    ]


def test_the_implementations_that_help_names_are_those_that_are_read() -> None:
    found = invoke("convert", "--help")
    named = " ".join(found.stdout.split()).partition("routers route: ")[2].partition(".")[0]
    assert named.split(", ") == [name for name, implementation in IMPLEMENTATIONS.items() if implementation.read]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["astramind", "ohara", "dlo"])
def test_an_implementation_that_was_built_gives_the_logits_of_its_code(name: str, tmp_path: Path, fast: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    theirs = {"astramind": lambda: Astramind("Llama", 0), "ohara": lambda: Ohara(0), "dlo": lambda: Dlo(0)}[name]()
    theirs.save(source)
    capacity = ("--capacity", "1") if name == "dlo" else ()
    found = invoke("convert", source, tmp_path / "ours", "--implementation", name, *capacity)
    assert found.exit_code == 0, found.output
    fast.write_text(fast.read_text() + "[cost]\nprofile_runs = 0\n")
    found = invoke("build", tmp_path / "ours", "-c", fast, "-o", out)
    assert found.exit_code == 0, found.output
    ids_BS = np.stack([np.random.default_rng(0).permutation(96)[:16]])
    with mod_export.load(out) as deployment:
        np.testing.assert_allclose(deployment.run(ids_BS), theirs(torch.from_numpy(ids_BS)).numpy(), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flexidepth", "skipgpt"])
def test_an_implementation_that_was_built_writes_as_its_code(name: str, tmp_path: Path) -> None:
    """Logits of a row, and greedy texts, of models whose skipped tokens keep keys and values."""
    theirs: ByRow = {"flexidepth": lambda: FlexiDepth("Llama", 0), "skipgpt": lambda: SkipGpt(0)}[name]()
    theirs.save(tmp_path / "source")
    found = invoke("convert", tmp_path / "source", tmp_path / "ours", "--implementation", name, "--capacity", "1")
    assert found.exit_code == 0, found.output
    (tmp_path / "writing.toml").write_text(WRITING_TOML)
    out = tmp_path / "out"
    found = invoke("build", tmp_path / "ours", "-c", tmp_path / "writing.toml", "-o", out)
    assert found.exit_code == 0, found.output
    ids_BS = np.stack([np.random.default_rng(0).permutation(96)[:16]])
    with mod_export.load(out) as deployment:
        np.testing.assert_allclose(deployment.run(ids_BS), theirs(torch.from_numpy(ids_BS)).numpy(), rtol=0, atol=1e-5)
    with load_generator(out) as generator:
        for prompt in ([5, 17, 80, 4, 33, 9], [61]):
            text = list(prompt)
            (written,) = generator.generate([prompt], 20)
            for _ in written.ids:
                text.append(int(theirs(torch.tensor([text]))[0, -1].argmax()))
            assert (len(written.ids), written.ids) == (20, text[len(prompt) :])


@pytest.mark.slow
def test_from_a_folder_of_llama_factory_to_an_endpoint(tmp_path: Path) -> None:
    """The commands of docs/models.md, with a tokenizer as LLaMA-Factory stores it beside the model."""
    source, ours = tmp_path / "source", tmp_path / "ours"
    Astramind("Llama", 0).save(source)
    model_folder("Llama", tmp_path / "beside")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "beside" / name, source / name)
    found = invoke("convert", source, ours, "--implementation", "astramind")
    assert found.exit_code == 0, found.output
    (tmp_path / "text.jsonl").write_text(
        "".join(
            json.dumps({"text": " ".join(f"w{(row * 7 + i * i) % 96}" for i in range(40))}) + "\n" for row in range(99)
        )
    )
    training = ["--init", str(ours), "--selection", "predictor", "--train", "routers", "--steps", "2", "--batch", "2"]
    training += ["--data", str(tmp_path / "text.jsonl"), "--out", str(tmp_path / "writes"), "--seq", "32"]
    assert train([*training, "--eval-batches", "1"]) == 0
    (tmp_path / "writing.toml").write_text(WRITING_TOML)
    out = tmp_path / "served"
    found = invoke("build", tmp_path / "writes" / "model.pt", "-c", tmp_path / "writing.toml", "-o", out)
    assert found.exit_code == 0, found.output
    with serving(out) as server:
        body = {"prompt": "w3 w9 w27", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 5)
