"""Folders as users find them: shards, pickles, tensors that do not fit; output is written whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face import change_config, saved
from safetensors.torch import load_file, save_file

from mod_models.checkpoint import CheckpointError, load_checkpoint
from mod_models.convert import foreign, read_foreign
from mod_models.convert.foreign import write_folder

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with one file, with shards, with fused projections, and with a head that is the embedding."""
    root = tmp_path_factory.mktemp("originals")
    saved("Llama", root / "whole")
    saved("Llama", root / "sharded", max_shard_size="60KB")
    saved("Phi-3", root / "fused")
    saved("SmolLM", root / "tied")
    return root


@pytest.fixture
def copy(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    def of(name: str) -> Path:
        return Path(shutil.copytree(originals / name, tmp_path / name))

    return of


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Copies of the tensors in the only file."""
    return {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Changes tensors of the only file; one that becomes None is removed. `__` in a name stands for `.`."""
    tensors = tensors_of(folder)
    named = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    tensors = {name: tensor for name, tensor in {**tensors, **named}.items() if tensor is not None}
    save_file(tensors, folder / WEIGHTS)


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def refused(source: Path, out: Path) -> str:
    """Returns the message of a refusal, without the path in front, and checks that no file is left behind."""
    around = sorted(out.parent.iterdir())
    with pytest.raises(CheckpointError) as caught:
        write_folder(read_foreign(source), out)
    assert sorted(out.parent.iterdir()) == around
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(source), "SOURCE").replace(str(out), "OUT")


def test_shards_and_one_file_are_the_same(originals: Path, tmp_path: Path) -> None:
    assert len([*(originals / "sharded").glob("*.safetensors")]) > 3
    for name in ("whole", "sharded"):
        write_folder(read_foreign(originals / name), tmp_path / name)
    assert (tmp_path / "whole" / WEIGHTS).read_bytes() == (tmp_path / "sharded" / WEIGHTS).read_bytes()


def pickled(folder: Path, shards: int = 1) -> None:
    """Writes weights as transformers did before safetensors."""
    tensors = tensors_of(folder)
    (folder / WEIGHTS).unlink()
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    names = [f"pytorch_model-{number + 1:05}-of-{shards:05}.bin" for number in range(shards)]
    file_of = {name: names[i % shards] for i, name in enumerate(tensors)}
    for name in names:
        torch.save({tensor: tensors[tensor] for tensor, file in file_of.items() if file == name}, folder / name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": file_of}))


@pytest.mark.parametrize("shards", [1, 3])
def test_pickles_of_tensors(shards: int, copy: Callable[[str], Path], tmp_path: Path) -> None:
    source = copy("fused")
    write_folder(read_foreign(source), tmp_path / "expected")
    pickled(source, shards)
    write_folder(read_foreign(source), tmp_path / "found")
    assert (tmp_path / "found" / WEIGHTS).read_bytes() == (tmp_path / "expected" / WEIGHTS).read_bytes()


class Runs:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": Runs()}, "SOURCE/pytorch_model.bin: refused, its pickle asks for posix.system, which is more than plain "
         "data and tensors and could run code. Save the model again as safetensors, as save_pretrained of transformers "
         "does"),
        ({"state": {"a": 1}}, "SOURCE/pytorch_model.bin: 'state' in it is no tensor, expected a state_dict"),
        (b"no archive", "SOURCE/pytorch_model.bin: not a file of tensors as torch.save writes it; it may be truncated, "
         "or a bare pickle, which could run code. Save the model again as safetensors, as save_pretrained of "
         "transformers does"),
    ],
    ids=["runs code", "no state_dict", "damaged"],
)  # fmt: skip
def test_pickles_of_anything_else(content: Any, message: str, copy: Callable[[str], Path], tmp_path: Path) -> None:
    source = copy("whole")
    (source / WEIGHTS).unlink()
    if isinstance(content, bytes):
        (source / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, source / "pytorch_model.bin")
    assert refused(source, tmp_path / "out") == message


def test_a_shard_that_runs_code(copy: Callable[[str], Path], tmp_path: Path) -> None:
    """This holds for any shard, no matter what the index says about it."""
    source = copy("whole")
    pickled(source, 3)
    shard = source / "pytorch_model-00002-of-00003.bin"
    torch.save({"model.norm.weight": Runs()}, shard)
    message = refused(source, tmp_path / "out")
    assert message.startswith(
        "SOURCE/pytorch_model-00002-of-00003.bin: refused, its pickle asks for posix.system, which is "
    )
    shard.unlink()
    assert refused(source, tmp_path / "out").startswith("SOURCE/pytorch_model-00002-of-00003.bin: missing; ")


LAYER = "model__layers__1__"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("whole", {"model__norm__weight": None}, "SOURCE: model.norm.weight is missing, expected [48]"),
        ("whole", {"model__norm__weight": torch.ones(47)},
         "SOURCE: model.norm.weight has shape [47], config.json says [48]"),
        ("whole", {LAYER + "self_attn__q_proj__bias": torch.ones(48)},
         "SOURCE: 'model.layers.1.self_attn.q_proj.bias' belongs to nothing that config.json describes"),
        ("whole", {"model__layers__3__input_layernorm__weight": torch.ones(48)},
         "SOURCE: 'model.layers.3.input_layernorm.weight' belongs to nothing that config.json describes"),
        ("whole", {"model__norm__weight": torch.ones(48, dtype=torch.int8)},
         "SOURCE: model.norm.weight holds I8, expected floating-point numbers of 16, 32 or 64 bits"),
        ("whole", {"lm_head__weight": None}, "SOURCE: lm_head.weight is missing, expected [96, 48]"),
        ("tied", {"lm_head__weight": torch.ones(96, 72)},
         "SOURCE: tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight"),
        ("tied", {"lm_head__weight": torch.tensor(1.0)},
         "SOURCE: tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight"),
        ("tied", {name: torch.ones(96, 72).char() for name in ("lm_head__weight", "model__embed_tokens__weight")},
         "SOURCE: model.embed_tokens.weight holds I8, expected floating-point numbers of 16, 32 or 64 bits; "
         "'lm_head.weight' belongs to nothing that config.json describes"),
        ("fused", {LAYER + "self_attn__qkv_proj__weight": torch.ones(97, 48)},
         "SOURCE: model.layers.1.self_attn.qkv_proj.weight has shape [97, 48], config.json says [96, 48]"),
        ("fused", {LAYER + "mlp__gate_up_proj__weight": None},
         "SOURCE: model.layers.1.mlp.gate_up_proj.weight is missing, expected [160, 48]"),
        ("whole", {LAYER + "mlp__down_proj__weight": torch.full((48, 80), float("nan"))},
         "SOURCE: layers.1.mlp.down_proj.weight holds values that are NaN or infinite in float32"),
        ("whole", {LAYER + "mlp__down_proj__weight": torch.full((48, 80), 1e300, dtype=torch.float64)},
         "SOURCE: layers.1.mlp.down_proj.weight holds values that are NaN or infinite in float32"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(
    name: str, changes: Mapping[str, torch.Tensor | None], message: str, copy: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copy(name)
    change_tensors(source, **changes)
    assert refused(source, tmp_path / "out") == message


def test_a_config_that_lies(copy: Callable[[str], Path], tmp_path: Path) -> None:
    """Every size may be wrong: the tensors contradict it, with one problem for each up to a limit."""
    for field, value in (("num_hidden_layers", 2), ("num_hidden_layers", 4), ("vocab_size", 97), ("hidden_size", 44),
                         ("intermediate_size", 79), ("num_key_value_heads", 4), ("head_dim", 14)):  # fmt: skip
        source = copy("whole")
        change_config(source, **{field: value})
        message = refused(source, tmp_path / "out")
        assert re.match(r"SOURCE: (\S+ has shape|\S+ is missing|\S+ belongs to nothing)", message), message
        assert message.count("; ") <= 8
        shutil.rmtree(source)


SECOND = "model-00002-of-00005.safetensors"
SHARDS = r"SOURCE/model-0000\d-of-00005.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda source: (source / SECOND).unlink(), rf"SOURCE/{SECOND}: missing; {INDEX} says that \S+ is in it"),
        (lambda source: os.truncate(source / SECOND, 2000),
         rf"SOURCE/{SECOND}: not readable, it may be truncated \(.*\)"),
        (lambda source: (source / SECOND).write_bytes(b"\xff" * 100),
         rf"SOURCE/{SECOND}: not readable, it may be truncated \(.*\)"),
        (lambda source: (source / INDEX).write_text("{"), rf"SOURCE/{INDEX}: not readable JSON \(.*\)"),
        (lambda source: (source / INDEX).write_text("[]"), f"SOURCE/{INDEX}: holds list, expected an object"),
        (lambda source: (source / INDEX).write_text('{"weight_map": 3}'),
         f"SOURCE/{INDEX}: holds no table 'weight_map' of tensors and their files"),
        (lambda source: change_index(source, lambda files: files.update(extra="../x.safetensors")),
         f"SOURCE/{INDEX}: names the file '../x.safetensors', expected one beside the index"),
        (lambda source: change_index(source, lambda files: files.update(extra="x" * 300)),
         f"SOURCE/{'x' * 300}: missing; {INDEX} says that 'extra' is in it"),
        (lambda source: change_index(source, lambda files: files.update(extra=[3])),
         rf"SOURCE/\[3\]: missing; {INDEX} says that 'extra' is in it"),
        (lambda source: shutil.copy(source / SECOND, source / SECOND.replace("00002", "00003")),
         rf"{SHARDS}: holds '\S+', which {SECOND} holds too"),
        (lambda source: [path.unlink() for path in source.glob("model*")],
         "SOURCE: holds no weights; expected one of model.safetensors, "
         "pytorch_model.bin, model.safetensors.index.json, pytorch_model.bin.index.json"),
    ],
)  # fmt: skip
def test_shards_that_are_damaged(
    damage: Callable[[Path], object], message: str, copy: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copy("sharded")
    damage(source)
    assert re.fullmatch(message, refused(source, tmp_path / "out"))


def test_a_shard_that_shrinks_while_it_is_read(copy: Callable[[str], Path], tmp_path: Path) -> None:
    source = copy("whole")
    model = read_foreign(source)
    os.truncate(source / WEIGHTS, 3000)
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read \("):
        write_folder(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_head_that_is_the_embedding_and_tables_that_follow_from_the_config(
    copy: Callable[[str], Path], tmp_path: Path
) -> None:
    """Some files contain them nevertheless."""
    source = copy("tied")
    before = read_foreign(source)
    embedding = tensors_of(source)["model.embed_tokens.weight"]
    inv_freq = {f"model__layers__{layer}__self_attn__rotary_emb__inv_freq": torch.ones(4) for layer in range(3)}
    change_tensors(source, lm_head__weight=embedding, **inv_freq)
    assert read_foreign(source).parts.keys() == before.parts.keys()


def test_what_belongs_to_the_model_is_copied(copy: Callable[[str], Path], tmp_path: Path) -> None:
    source = copy("whole")
    files = {"tokenizer.json": "{}", "tokenizer_config.json": '{"a": 1}', "chat_template.jinja": "x", "README.md": "no"}
    for name, text in files.items():
        (source / name).write_text(text)
    write_folder(read_foreign(source), tmp_path / "deep" / "out")
    out = tmp_path / "deep" / "out"
    assert {path.name for path in out.iterdir()} == {
        "config.json", WEIGHTS, "generation_config.json", *files.keys() - {"README.md"},
    }  # fmt: skip
    assert (out / "tokenizer_config.json").read_text() == '{"a": 1}'
    load_checkpoint(out)


def test_a_file_beside_the_weights_that_is_gone(copy: Callable[[str], Path], tmp_path: Path) -> None:
    source = copy("whole")
    model = read_foreign(source)
    (source / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"generation_config.json: cannot be read \(No such file or directory\)"):
        write_folder(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["file", "folder", "empty folder"])
def test_where_something_stands_already(kind: str, originals: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
    if kind == "empty folder":
        write_folder(read_foreign(originals / "whole"), out)
        load_checkpoint(out)
        return
    if kind == "folder":
        (out / "mine").write_text("mine")
    assert refused(originals / "whole", out) == "OUT: exists already; name another folder, or delete it"


def test_where_nothing_can_be_written(originals: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/out: could not be written \(File exists\)"):
        write_folder(read_foreign(originals / "whole"), tmp_path / "file" / "out")


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limit")
def test_a_disk_that_is_full(originals: Path, tmp_path: Path) -> None:
    """A limit on file sizes, reached in the middle of the weights, simulates it."""
    import resource

    model, limits = read_foreign(originals / "whole"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"out: could not be written \(File too large\)"):
            write_folder(model, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_bytes_are_counted(originals: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    model = read_foreign(originals / "whole")
    write_folder(model, tmp_path / "out", lambda done, all_: seen.append((done, all_)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {all_ for _, all_ in seen} == {seen[-1][0]} == {4 * model.parameters}


def test_pieces_are_the_whole(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds for parts of a tensor, and for pieces shorter than a row."""
    for name in ("fused", "tied"):
        model = read_foreign(originals / name)
        write_folder(model, tmp_path / name)
        for size in (1, 1000, 4 * 48 * 7):
            monkeypatch.setattr(foreign, "PIECE_BYTES", size)
            counted: list[int] = []
            write_folder(model, tmp_path / f"{name}{size}", lambda done, all_, counted=counted: counted.append(done))
            monkeypatch.undo()
            assert (tmp_path / f"{name}{size}" / WEIGHTS).read_bytes() == (tmp_path / name / WEIGHTS).read_bytes()
            assert max(b - a for a, b in pairwise([0, *counted])) <= max(size, 4 * 160)


CONVERT = """
import sys
from pathlib import Path
from mod_models.convert import foreign, read_foreign
from mod_models.convert.foreign import write_folder
Path("/proc/self/clear_refs").write_text("5")
def kib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))
before = kib("VmRSS")
write_folder(read_foreign(Path(sys.argv[1])), Path(sys.argv[2]))
print(kib("VmHWM") - before)
"""


def sparse(source: Path, megabytes: int) -> None:
    """Makes the embedding this large without writing it: a file can have holes."""
    rows, others = megabytes * 2**20 // (4 * 48), tensors_of(source)
    del others["lm_head.weight"], others["model.embed_tokens.weight"]
    change_config(source, vocab_size=rows, tie_word_embeddings=True)
    table, end = {}, 0
    for name, tensor in others.items():
        table[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    table["model.embed_tokens.weight"] = {"dtype": "F32", "shape": [rows, 48], "data_offsets": [end, end + rows * 192]}
    header = json.dumps(table).encode()
    with (source / WEIGHTS).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + b"".join(t.numpy().tobytes() for t in others.values()))
        file.truncate(8 + len(header) + end + rows * 192)


def adapter_of(source: Path, rows: int, folder: Path) -> None:
    """Writes a LoRA adapter of an embedding of this many rows."""
    folder.mkdir()
    halves = {"A": torch.ones(1, rows), "B": torch.ones(48, 1)}
    tensors = {f"base_model.model.model.embed_tokens.lora_embedding_{half}": halves[half] for half in halves}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "base_model_name_or_path": str(source)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.slow
@pytest.mark.parametrize("of", ["model", "adapter"])
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_memory_does_not_grow_with_the_model(of: str, copy: Callable[[str], Path], tmp_path: Path) -> None:
    """A large tensor is read in pieces; torch's modules need the rest (docs/models.md has 7 B)."""
    source = copy("whole")
    sparse(source, 512)
    if of == "adapter":
        adapter_of(source, 512 * 2**20 // (4 * 48), tmp_path / "adapter")
        source = tmp_path / "adapter"
    command = [sys.executable, "-c", CONVERT, str(source), str(tmp_path / "out")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (tmp_path / "out" / WEIGHTS).stat().st_size > 2**29
    assert int(found.stdout) < 300 * 1024
    if of == "adapter":
        assert load_file(tmp_path / "out" / WEIGHTS)["embedding.weight"][-1].eq(1).all()
