"""GGUF files that are damaged, contradict themselves, or say what a spec cannot: one error each, and no file left."""

from __future__ import annotations

import os
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import as_gguf, metadata_of, tensors_of, write_gguf
from hugging_face import change_config, made, saved

from mod_models.checkpoint import CheckpointError, load_checkpoint
from mod_models.convert import read_foreign
from mod_models.convert.foreign import write_folder
from mod_models.convert.gguf_file import read_gguf_file

END = "; it may be truncated or damaged"
VOCABULARY = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "abc", *(f"[PAD{number}]" for number in range(91))],
    "tokenizer.ggml.token_type": [1] * 96, "tokenizer.ggml.eos_token_id": 4,
}  # fmt: skip


def refused(source: Path, out: Path) -> str:
    """Returns one line without the path in front, and checks that no file is left behind."""
    around = sorted(out.parent.iterdir())
    with pytest.raises(CheckpointError) as caught:
        write_folder(read_foreign(source), out)
    assert sorted(out.parent.iterdir()) == around
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{source}: ")
    return message.removeprefix(f"{source}: ")


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str = "a", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    """`shape` is in the file's order, with rows last."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def raw(*keys: bytes, tensors: tuple[bytes, ...] = (), data: int = 64, counts: tuple[int, int] | None = None) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", 3, *(counts or (len(tensors), len(keys)))) + b"".join((*keys, *tensors))
    return head + bytes(-len(head) % 32) + bytes(data)


ALIGN = "general.alignment"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file, which starts with b'GGUF'; this one with b''"),
        (b"PK\3\4" * 9, r"not a GGUF file, which starts with b'GGUF'; this one with b'PK\\x03\\x04'"),
        (b"GGUF", f"speaks of 1 numbers, and 0 bytes are left{END}"),
        (b"GGUF" + bytes(20), "GGUF version 0, this release reads 2 and 3"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(20),
         "GGUF version 1, this release reads 2 and 3; convert the original model again with .*"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(20), "is big-endian, which is not read here; convert it with .*"),
        (raw(counts=(2**63, 0)), rf"speaks of {2**63} tensors, and \d+ bytes are left{END}"),
        (raw(counts=(0, 2**40)), rf"speaks of {2**40} metadata keys, and \d+ bytes are left{END}"),
        (raw(struct.pack("<Q", 2**62)), rf"speaks of {2**62} bytes of a metadata key, and \d+ bytes are left{END}"),
        (raw(key("x", 8, struct.pack("<Q", 2**50))), rf"speaks of {2**50} bytes of the value of 'x', and .*{END}"),
        (raw(key("x", 9, struct.pack("<IQ", 8, 2**50))), rf"speaks of {2**50} strings of 'x', and .*{END}"),
        (raw(key("x", 9, struct.pack("<IQ", 4, 2**61))), rf"speaks of {2**61} numbers, and .*{END}"),
        (raw(key("x", 9, struct.pack("<IQ", 9, 1))), f"the metadata key 'x' is of the unknown type 9{END}"),
        (raw(key("x", 77, b"")), f"the metadata key 'x' is of the unknown type 77{END}"),
        (raw(key("x", 0, b"\1"), key("x", 0, b"\1")), f"holds the metadata key 'x' twice{END}"),
        (raw(key(ALIGN, 4, struct.pack("<I", 0))), f"{ALIGN}: expected a power of 2 of at least 8, got 0{END}"),
        (raw(key(ALIGN, 4, struct.pack("<I", 48))), f"{ALIGN}: expected a power of 2 of at least 8, got 48{END}"),
        (raw(key(ALIGN, 8, text("32"))), f"{ALIGN}: expected a power of 2 of at least 8, got '32'{END}"),
        (raw(tensors=(tensor(shape=()),)), f"tensor 'a' has 0 dimensions, expected 1 to 4{END}"),
        (raw(tensors=(tensor(shape=(1,) * 9),)), f"tensor 'a' has 9 dimensions, expected 1 to 4{END}"),
        (raw(tensors=(tensor(), tensor(offset=32))), f"holds the tensor 'a' twice{END}"),
        (raw(tensors=(tensor(), tensor("b"))), f"tensors 'a' and 'b' share bytes{END}"),
        (raw(tensors=(tensor(kind=199),)), f"tensor 'a' is of the unknown type 199{END}"),
        (raw(tensors=(tensor(shape=(33, 2), kind=8),)),
         f"tensor 'a' has rows of 33 numbers, and Q8_0 blocks of 32{END}"),
        (raw(tensors=(tensor(shape=(17,)),)), f"tensor 'a' is said to be in bytes 64 to 132 of 128{END}"),
        (raw(tensors=(tensor(offset=2**63),)), rf"tensor 'a' is said to be in bytes \d+ to \d+ of 128{END}"),
        (raw(tensors=(tensor(shape=(2**32, 2**32, 2**32)),)), rf"tensor 'a' is said to be in bytes .* of 160{END}"),
        (raw(tensors=(tensor(offset=8),)), f"tensor 'a' is said to be in bytes 72 to 88 of 128{END}"),
        (raw(), "general.architecture: None is no family that can be converted; known: llama, qwen2, .*, gemma"),
        (raw(key("general.architecture", 8, text(b"\xff\xfe"))), "general.architecture: .* is no family .*"),
        (raw(key("general.architecture", 8, text("deepseek2"))), "general.architecture: 'deepseek2' is no family .*"),
    ],
)  # fmt: skip
def test_files_that_are_damaged(content: bytes, message: str, tmp_path: Path) -> None:
    """Memory stays within the length of the file, no matter what a count says."""
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError):
        read_foreign(tmp_path / "model.gguf")  # Imports at first use are not counted.
    tracemalloc.start()
    found = refused(tmp_path / "model.gguf", tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert re.fullmatch(message, found), found
    assert peak < 2**20


Change = Callable[[dict[str, Any], dict[str, np.ndarray]], object]


def says(**changes: Any) -> Change:
    """Changes metadata of Llama; one that is None is removed. `__` in a name stands for `.`."""

    def change(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        for name, value in changes.items():
            name = name.replace("__", ".")
            name = name if name.startswith(("general.", "tokenizer.", "split.")) else f"llama.{name}"
            metadata.pop(name, None) if value is None else metadata.update({name: value})

    return change


def has(**changes: np.ndarray | None) -> Change:
    """Changes tensors; one that is None is removed."""

    def change(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        for name, value in changes.items():
            name = name.replace("__", ".")
            tensors.pop(name) if value is None else tensors.update({name: value})

    return change


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


NO_SIZE = "expected a whole number above 0, got"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (says(expert_count=8), "llama.expert_count: a spec cannot say 8; expected 0"),
        (says(logit_scale=2.0),
         "llama.logit_scale: unknown field with the value 2.0; it could change what the model computes. Where it does "
         "not, name it with --ignore-field"),
        (says(attention__causal=False), "llama.attention.causal: a spec cannot say False; expected true"),
        (says(rope__scaling__type="yarn"), "llama.rope.scaling.type: a spec cannot say 'yarn'; known: none, linear"),
        (says(rope__scaling__attn_factor=1.5), "llama.rope.scaling.attn_factor: a spec cannot say 1.5; expected 1.0"),
        (says(rope__dimension_count=6), "llama.rope.dimension_count: a spec cannot say 6; expected 12"),
        (says(attention__value_length=6), "llama.attention.value_length: a spec cannot say 6; expected 12"),
        (says(attention__key_length=None, attention__value_length=None, rope__dimension_count=None,
              attention__head_count=5),
         "llama.attention.key_length: missing, and 5 heads do not divide the width 48"),
        (says(attention__sliding_window=16), "llama.attention.sliding_window: a token sees 16 tokens of up to 128, and "
         "a spec has no window; for rows of up to 16 tokens, where it hides nothing, give --max-positions 16"),
        (says(block_count=None), "llama.block_count: missing"),
        (says(block_count="3"), f"llama.block_count: {NO_SIZE} '3'"),
        (says(block_count=0), f"llama.block_count: {NO_SIZE} 0"),
        (says(feed_forward_length=[80, 80, 40]), rf"llama.feed_forward_length: {NO_SIZE} \[80, 80, 40\]"),
        (says(attention__layer_norm_rms_epsilon=None),
         "llama.attention.layer_norm_rms_epsilon: expected a number above 0, got None"),
        (says(attention__head_count_kv=3), "spec.n_kv_heads: .*"),
        (says(block_count=4), "blk.3.attn_norm.weight is missing, expected \\[48\\]; .*"),
        (says(block_count=2), "'blk.2.attn_q.weight' belongs to nothing that its metadata describe; .*"),
        (says(block_count=2**31), "spec.n_layers: expected a whole number from 1 to 1024, got 2147483648"),
        (says(attention__key_length=2**30, attention__value_length=None, rope__dimension_count=None),
         "spec.d_head: expected a whole number from 1 to 4096, got 1073741824"),
        (says(embedding_length=44), "llama.attention.value_length.*|.* has shape .*"),
        (says(vocab_size=97), "token_embd.weight has shape .96, 48., its metadata says .97, 48.; .*"),
        (says(**VOCABULARY, vocab_size=97), "llama.vocab_size: 97, and tokenizer.ggml.tokens has 96"),
        (says(**{**VOCABULARY, "tokenizer.ggml.tokens": ["a", "b"]}, vocab_size=None),
         "token_embd.weight has shape .96, 48., its metadata says .2, 48.; .*"),
        (says(**{**VOCABULARY, "tokenizer.ggml.token_type": [1]}),
         "tokenizer.ggml.token_type: expected 96 numbers, one for each token"),
        (says(**{**VOCABULARY, "tokenizer.ggml.eos_token_id": "</s>"}),
         "tokenizer.ggml.eos_token_id: expected one of the 96 tokens, got '</s>'"),
        (says(**{**VOCABULARY, "tokenizer.ggml.merges": 7}),
         "tokenizer.ggml.merges: expected a list of strings, got 7"),
        (says(**{**VOCABULARY, "tokenizer.ggml.add_bos_token": 7}),
         "tokenizer.ggml.add_bos_token: expected true or false, got 7"),
        (says(**{**VOCABULARY, "tokenizer.ggml.model": "llama"}),
         "tokenizer.ggml.scores: expected 96 numbers, one for each token"),
        (says(**{"tokenizer.ggml.tokens": 7}), "tokenizer.ggml.tokens: expected a list of strings, got 7"),
        (says(split__count=3), "one of 3 files of a model; join them: llama-gguf-split --merge .*"),
        (has(output_norm__weight=None), r"output_norm.weight is missing, expected \[48\]"),
        (has(output_norm__weight=ones(47)), r"output_norm.weight has shape \[47\], its metadata says \[48\]"),
        (has(token_embd__weight=None), r"token_embd.weight is missing, expected \[96, 48\]"),
        (has(blk__1__attn_q_norm__weight=ones(12)),
         "'blk.1.attn_q_norm.weight' belongs to nothing that its metadata describe"),
        (has(blk__0__attn_q__bias=ones(48)), r"blk.0.attn_k.bias is missing, expected \[24\]; .*"),
        (has(rope_freqs__weight=ones(7)), r"rope_freqs.weight: expected 6 numbers of float32, got \[7\] of .*"),
        (has(rope_freqs__weight=ones(6) * 0), "rope_freqs.weight: holds factors that are not above 0"),
        (has(rope_freqs__weight=np.arange(1, 7, dtype=np.float32)),
         "rope_freqs.weight: its factors are not those of the rule of Llama 3.1, the only one that a spec can say"),
        (lambda metadata, tensors: (says(rope__scaling__factor=2.0)(metadata, tensors),
                                    has(rope_freqs__weight=ones(6) * 2)(metadata, tensors)),
         "llama.rope.scaling.factor: 2.0 beside rope_freqs.weight, and a spec has one of them"),
    ],
)  # fmt: skip
def test_files_that_lie_or_say_what_a_spec_cannot(change: Change, message: str, tmp_path: Path) -> None:
    as_gguf("Llama", tmp_path / "model.gguf", change=change)
    found = refused(tmp_path / "model.gguf", tmp_path / "out")
    assert re.fullmatch(message, found), found


def test_a_file_without_any_vocabulary(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        says(vocab_size=None)(metadata, tensors)
        has(token_embd__weight=None)(metadata, tensors)

    as_gguf("Llama", tmp_path / "model.gguf", change=change)
    found = refused(tmp_path / "model.gguf", tmp_path / "out")
    assert found == "llama.vocab_size: missing, and the file has no tokens and no embedding"


def test_more_positions_than_the_model_has(tmp_path: Path) -> None:
    as_gguf("Llama", tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"llama.context_length: 128, and --max-positions asks for 129"):
        read_foreign(tmp_path / "model.gguf", 129)


def test_a_key_that_changes_nothing_is_named(tmp_path: Path) -> None:
    as_gguf("Llama", tmp_path / "model.gguf", change=says(note="mine"))
    with pytest.raises(CheckpointError, match=r"llama.note: unknown field with the value 'mine'"):
        read_foreign(tmp_path / "model.gguf")
    assert read_foreign(tmp_path / "model.gguf", ignored=["llama.note"]).spec.n_layers == 3


def test_a_type_that_is_not_read(tmp_path: Path) -> None:
    model = made("Llama")
    tensors = tensors_of(model)
    write_gguf(tmp_path / "model.gguf", metadata_of(model), tensors)
    with (tmp_path / "model.gguf").open("rb") as file:
        data = bytearray(file.read())
    # int32 is a real type of the same size, but no weight has it.
    at = data.index(text("blk.1.ffn_gate.weight")) + len(text("blk.1.ffn_gate.weight")) + 4 + 16
    data[at : at + 4] = struct.pack("<I", Kind.I32.value)
    (tmp_path / "model.gguf").write_bytes(data)
    assert re.search(
        r"blk.1.ffn_gate.weight holds I32, expected F32, F16, BF16, F64, Q4_0, .*IQ4_XS",
        refused(tmp_path / "model.gguf", tmp_path / "out"),
    )


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for kind in (Kind.F32, Kind.Q8_0):
        tensors = {"a": np.ones((40, 64), np.float32)}
        write_gguf(path, {"general.architecture": "x"}, tensors, lambda name, kind=kind: kind)  # type: ignore[misc]
        tensor = read_gguf_file(path).tensors["a"]
        os.truncate(path, 300)
        with pytest.raises(CheckpointError, match=r"model.gguf: cannot be read \("):
            tensor.rows(0, 40)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(CheckpointError, match=r"folder.gguf: cannot be read \(Is a directory\)"):
        read_gguf_file(tmp_path / "folder.gguf")


@pytest.mark.fast("0", "1")
@pytest.mark.parametrize("seed", range(5))
def test_any_damage_is_refused_or_read(seed: int, tmp_path: Path) -> None:
    """Does one of these 50 times: flips bytes, makes numbers huge, cuts the file, or moves a piece of it."""
    path, out = tmp_path / "model.gguf", tmp_path / "out"
    as_gguf("Llama", path, kinds=lambda name: Kind.F16, change=says(**VOCABULARY))
    intact = path.read_bytes()
    read_foreign(path)
    header = intact.index(text("output_norm.weight")) + 60
    random = np.random.default_rng(seed)
    refusals: list[str] = []
    for _ in range(50):
        data = bytearray(intact)
        at = int(random.integers(4, header))
        match random.integers(4):
            case 0:
                for place in random.integers(4, header, 3):
                    data[place] ^= 1 << int(random.integers(8))
            case 1:
                data[at : at + 8] = struct.pack("<Q", (2**64 - 1, 2**63, 2**31, 2**20, 0)[random.integers(5)])
            case 2:
                del data[int(random.integers(0, len(data))) :]
            case 3:
                data[at:at] = data[at - 4 : at + int(random.integers(1, 40))]
        path.write_bytes(data)
        try:
            write_folder(read_foreign(path), out)
            load_checkpoint(out)
            refusals.append("")
        except CheckpointError as error:
            refusals.append(str(error))
        assert "\n" not in refusals[-1]
        assert out.exists() == (not refusals[-1])
        for file in out.glob("*"):
            file.unlink()
        if out.exists():
            out.rmdir()
        assert [left_over.name for left_over in tmp_path.iterdir()] == ["model.gguf"]
    assert len(list(filter(None, refusals))) > 25


@pytest.mark.parametrize("field", ["num_hidden_layers", "head_dim", "hidden_size"])
def test_a_config_that_says_sizes_beyond_any_memory(field: str, tmp_path: Path) -> None:
    """The sizes are in a Hugging Face folder; such a model is not made even without weights."""
    saved("Qwen3", tmp_path / "source")
    change_config(tmp_path / "source", **{field: 2**40})
    with pytest.raises(
        CheckpointError, match=r"config.json: spec.\w+: expected a whole number from 1 to \d+, got 1099511627776"
    ):
        read_foreign(tmp_path / "source")
