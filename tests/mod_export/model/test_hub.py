"""hf:// names against a server that answers like the hub: what is fetched, and each reason why it cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import COMMIT, Hub, hub_environment, serving_hub
from hugging_face import saved
from tokenizers import Tokenizer, models

from mod_export.errors import CheckpointError
from mod_export.model.hub import fetched, name_of
from mod_models.checkpoint import load_checkpoint

MODEL = "org/tiny-model"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in shards with pickles beside it, one of pickles only, adapters, and a repository of one GGUF file."""
    root = tmp_path_factory.mktemp("hub")
    folder = root / MODEL
    saved("Qwen2", folder, max_shard_size="60KB")
    for name in ("README.md", "onnx/model.onnx", "pytorch_model.bin", "original/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    Tokenizer(models.WordLevel({f"w{number}": number for number in range(96)}, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )
    old = saved("Llama", root / "org" / "old")
    (root / "org" / "old" / "model.safetensors").unlink()
    torch.save(old.state_dict(), root / "org" / "old" / "pytorch_model.bin")
    for name, suffix in (("adapter", "safetensors"), ("old-adapter", "bin")):
        (root / "org" / name).mkdir()
        for file in ("adapter_config.json", f"adapter_model.{suffix}", "README.md", "training_args.bin"):
            fields = {"peft_type": "LORA", "base_model_name_or_path": "org/old", "auto_mapping": {"file": file}}
            (root / "org" / name / file).write_text(json.dumps(fields))
    (root / "org" / "files").mkdir()
    (root / "org" / "files" / "some.gguf").write_bytes(b"GGUF, but not really")
    return root


@pytest.fixture(scope="module")
def endpoint(root: Path) -> Iterator[str]:
    with serving_hub(root) as address:
        yield address


def in_process(code: str, endpoint: str, cache: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs the code in its own process."""
    environment = hub_environment(endpoint, cache) | more
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def asked(sources: list[str], endpoint: str, cache: Path, **more: str) -> list[str]:
    """For each source, the path that `fetched` returns, or its error message."""
    code = f"""
import json
from mod_export.errors import CheckpointError
from mod_export.model.hub import fetched
found = []
for source in {sources!r}:
    try:
        found.append(fetched(source))
    except CheckpointError as error:
        found.append(str(error))
print(json.dumps(found))
"""
    done = in_process(code, endpoint, cache, **more)
    assert done.returncode == 0, done.stderr
    answers: list[str] = json.loads(done.stdout.splitlines()[-1])
    return answers


def cli(*words: object) -> str:
    listed = ["mod-export", *map(str, words)]
    return f"import sys\nsys.argv = {listed!r}\nfrom mod_export.cli import main\nmain()"


def test_a_model_is_fetched_and_converted(root: Path, endpoint: str, tmp_path: Path) -> None:
    """Only the files that are read are downloaded, and none of them a second time."""
    Hub.sent.clear()
    done = in_process(cli("convert", f"hf://{MODEL}@v1", tmp_path / "out"), endpoint, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    expected = {*(path.name for path in (root / MODEL).glob("model*")), "config.json", "generation_config.json",
                "tokenizer.json"}  # fmt: skip
    assert sorted(Hub.sent) == sorted(expected)
    assert len(expected) > 5
    assert load_checkpoint(tmp_path / "out").spec.attention_bias == "qkv"
    Hub.sent.clear()
    (folder,) = asked([f"hf://{MODEL}@v1"], endpoint, tmp_path / "cache")
    assert Hub.sent == []
    assert name_of(Path(folder)) == "tiny-model"
    # Without a network, the cache gives the same folder.
    assert asked([f"hf://{MODEL}@v1"], "http://127.0.0.1:9", tmp_path / "cache") == [folder]
    assert asked([f"hf://{MODEL}@{COMMIT}"], endpoint, tmp_path / "cache", HF_HUB_OFFLINE="1") == [folder]


def test_a_model_of_pickles_and_a_file(endpoint: str, tmp_path: Path) -> None:
    Hub.sent.clear()
    folder, file = asked(["hf://org/old", "hf://org/files/some.gguf"], endpoint, tmp_path / "cache")
    assert set(Hub.sent) == {"config.json", "generation_config.json", "pytorch_model.bin", "some.gguf"}
    assert (Path(folder) / "pytorch_model.bin").is_file()
    assert Path(file).read_bytes() == b"GGUF, but not really"
    assert name_of(Path(file)) == "some.gguf"


@pytest.mark.fast("adapter-safetensors")
@pytest.mark.parametrize(("name", "suffix"), [("adapter", "safetensors"), ("old-adapter", "bin")])
def test_an_adapter(name: str, suffix: str, endpoint: str, tmp_path: Path) -> None:
    """The second command has the adapter from the first, and fetches only the model that it belongs to."""
    Hub.sent.clear()
    words = ("convert", f"hf://org/{name}", tmp_path / "out")
    alone, with_base = cli(*words), cli(*words, "--base", "hf://org/old")
    code = f"try:\n    exec({alone!r})\nexcept SystemExit as ended:\n    print(ended.code)\n{with_base}"
    done = in_process(code, endpoint, tmp_path / "cache")
    assert sorted(Hub.sent[:2]) == ["adapter_config.json", f"adapter_model.{suffix}"]
    assert sorted(Hub.sent[2:]) == ["config.json", "generation_config.json", "pytorch_model.bin"]
    assert (done.returncode, done.stdout) == (2, "2\n")
    assert ": a LoRA adapter of org/old, and no model; name the folder of that model: " in done.stderr
    assert f"adapter_model.{suffix}: not " in done.stderr


def test_what_cannot_be_fetched(endpoint: str, tmp_path: Path) -> None:
    sources = ["hf://org/none", "hf://org/gated", f"hf://{MODEL}@v7", "hf://org/files/none.gguf", "hf://one",
               "hf://org/name--twice", "hf://org/files"]  # fmt: skip
    *messages, empty = asked(sources, endpoint, tmp_path)
    assert messages == [
        "hf://org/none: no such repository on the hub, or a private one without its HF_TOKEN",
        "hf://org/gated: access has to be asked for on the hub; then set HF_TOKEN",
        f"hf://{MODEL}@v7: the repository has no such revision",
        "hf://org/files/none.gguf: the repository has no such file",
        "hf://one: expected hf://ORG/NAME or hf://ORG/NAME@REVISION",
        messages[5],
    ]
    assert messages[5].startswith("hf://org/name--twice: ")
    assert empty == (
        "hf://org/files: the repository holds no config.json, so no model of transformers; of a repository of GGUF "
        "files name one, hf://org/files/FILE.gguf"
    )


@pytest.mark.parametrize("offline", ["1", pytest.param("0", marks=pytest.mark.slow)])  # The client retries for seconds.
def test_without_a_network(offline: str, tmp_path: Path) -> None:
    sources = [f"hf://{MODEL}", "hf://org/files/some.gguf"]
    messages = asked(sources, "http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE=offline)
    for source, message in zip(sources, messages, strict=True):
        assert message.startswith(f"{source}: cannot be fetched, and is not in the hub's cache (")
        assert "\n" not in message


def test_without_the_package(tmp_path: Path) -> None:
    for command in ("convert", "build"):
        words: list[Any] = [command, f"hf://{MODEL}", *([] if command == "build" else [tmp_path / "out"])]
        code = "import sys\nsys.modules['huggingface_hub'] = None\n" + cli(*words)
        done = in_process(code, "http://127.0.0.1:9", tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(
            f"error: `mod-export {command}` needs huggingface_hub.errors, which cannot be imported"
        )
        assert 'install it: pip install "mod-export[convert]"' in done.stderr


def test_other_sources_stay_as_they_are() -> None:
    assert fetched("some/folder") == "some/folder"
    with pytest.raises(CheckpointError, match="expected hf://ORG/NAME or hf://ORG/NAME@REVISION"):
        fetched("hf://")
