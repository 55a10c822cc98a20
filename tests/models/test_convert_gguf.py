"""GGUF files of every family and every block type compared with transformers: logits, greedy text, values."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf_files import as_gguf, metadata_of, tensors_of, write_gguf
from hugging_face import CONFIGS, LLAMA3, made, of
from transformers import LlamaConfig, Qwen3Config

from mod_export.model.transformer import MOD_TRANSFORMER
from mod_models.checkpoint import Checkpoint, load_checkpoint
from mod_models.convert import foreign, gguf_file, read_foreign
from mod_models.convert.foreign import write_folder
from mod_models.convert.gguf_file import BLOCKS, read_gguf_file
from mod_models.declarations import RopeScaling

TOLERANCE = 1e-5
LENGTH = 40
# A GGUF file states no activation and no window: llama.cpp has one activation per architecture.
NAMES = [name for name in CONFIGS if "of 16" not in name and "eps" not in name]


def converted(source: Path, out: Path) -> Checkpoint:
    write_folder(read_foreign(source), out)
    return load_checkpoint(out)


def ids(rows: int = 2, vocab: int = 96) -> torch.Tensor:
    return torch.randint(3, vocab, (rows, LENGTH), generator=torch.Generator().manual_seed(3))


def furthest(theirs: Any, ours: Checkpoint) -> float:
    with torch.no_grad():
        expected_BSV = theirs(ids()).logits
        (found_BSV,) = ours.module()(ids(), torch.tensor([LENGTH, LENGTH]))
    assert expected_BSV.abs().max() > 1
    return float((found_BSV - expected_BSV).abs().max())


@pytest.mark.fast(
    "Llama 2 long",
    "Llama 3.1",
    "Llama with biases",
    "SmolLM",
    "Mistral",
    "Qwen2",
    "Qwen3 with biases",
    "Phi-3",
    "Gemma",
)
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_text_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = as_gguf(name, tmp_path / "model.gguf", 4)
    ours = converted(tmp_path / "model.gguf", tmp_path / "out")
    assert furthest(theirs, ours) < TOLERANCE
    theirs.generation_config.eos_token_id = None
    written = theirs.generate(ids(1)[:, :9], max_new_tokens=32, do_sample=False, pad_token_id=0)[0, 9:].tolist()
    assert MOD_TRANSFORMER.read(tmp_path / "model.gguf").generating(64).write(ids(1)[0, :9].tolist(), 32) == written


@pytest.mark.parametrize("name", ["Llama", "SmolLM", "Qwen2", "Qwen3 of 128", "Phi-3"])
def test_transformers_reads_the_same_file_as_the_same_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs must be able to read the files of these tests; transformers knows no Gemma."""
    # transformers does not read Qwen3's head width, and takes 128.
    monkeypatch.setitem(CONFIGS, "Qwen3 of 128", of(Qwen3Config, head_dim=128))
    padding = {"tokenizer.ggml.padding_token_id": 0}
    as_gguf(name, tmp_path / "model.gguf", 5, change=lambda metadata, tensors: metadata.update(padding))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    ).eval()
    assert furthest(theirs, converted(tmp_path / "model.gguf", tmp_path / "out")) < TOLERANCE


def random_blocks(kind: Kind, rows: int, numbers: int) -> np.ndarray:
    """Random bytes, with small numbers as scales."""
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(kind.value).integers(0, 256, (rows, numbers // per_block, block_bytes), np.uint8)
    scales = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q6_K: (208,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2)}
    two = (Kind.Q4_1, Kind.Q5_1)
    for at in scales.get(kind, (0, 2) if kind in two else (0,)):
        blocks[:, :, at : at + 2] = np.float16(0.001 * (1 + at)).reshape(1).view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, *(Kind[name] for name in BLOCKS)])
def test_every_type(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of each type agree with the package `gguf` and separately with transformers, also in pieces."""
    monkeypatch.setattr(gguf_file, "PIECE_BYTES", 4096)
    floats = np.random.default_rng(0).standard_normal((24, 512)).astype(np.float32)
    data = random_blocks(kind, 24, 512) if kind.name in BLOCKS else gguf.quantize(floats, kind)
    expected = gguf.dequantize(data.view(np.uint8), kind).astype(np.float32)
    path = write_gguf(
        tmp_path / "one.gguf", {"general.architecture": "x"}, {"a": data.view(np.uint8)}, lambda name: kind
    )
    tensor = read_gguf_file(path).tensors["a"]
    assert tensor.shape == (24, 512)
    for start, stop in ((0, 24), (5, 6), (3, 21), (7, 7)):
        np.testing.assert_array_equal(tensor.rows(start, stop).float().numpy(), expected[start:stop])
    assert np.isfinite(expected).all()
    assert np.abs(expected).max() > 1e-3


@pytest.mark.fast("F16", "Q8_0", "Q4_1")
@pytest.mark.parametrize(
    "kind",
    [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1],
    ids=lambda kind: kind.name,
)
def test_a_quantized_model_is_that_of_transformers(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of queries and keys are reordered in every stored type."""
    monkeypatch.setitem(CONFIGS, "wide", of(LlamaConfig, hidden_size=64, intermediate_size=96))
    as_gguf("wide", tmp_path / "model.gguf", 6, lambda name: kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    ).eval()
    ours = converted(tmp_path / "model.gguf", tmp_path / "out")
    assert furthest(theirs, ours) < TOLERANCE
    assert ours.weights["embedding.weight"].dtype == {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}.get(
        kind, torch.float32
    )


def test_pieces_of_any_size_are_the_same_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_gguf("Llama", tmp_path / "model.gguf", 1)
    parts = read_foreign(tmp_path / "model.gguf").parts
    whole = {name: part.rows(0, part.length).clone() for name, part in parts.items()}
    monkeypatch.setattr(foreign, "PIECE_BYTES", 700)  # 3 rows; a head has 12.
    for name, part in parts.items():
        assert torch.equal(torch.cat(list(part.pieces())), whole[name]), name


@pytest.mark.parametrize(
    ("theta", "rope", "d_head"),
    [
        (500_000.0, {}, 128),
        (500_000.0, {"factor": 32.0}, 64),
        (10_000.0, {"factor": 3.0, "high_freq_factor": 2.5, "original_max_position_embeddings": 1000}, 96),
        (500.0, {"original_max_position_embeddings": 32}, 32),
        (500.0, {"low_freq_factor": 2.0, "high_freq_factor": 5.0, "original_max_position_embeddings": 64}, 64),
        (1e12, {"original_max_position_embeddings": 32}, 8),  # At such distant angles, at most one is a mixture.
    ],
)
def test_the_scaling_of_llama_3_is_found_again(
    theta: float, rope: dict[str, Any], d_head: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {**LLAMA3, "original_max_position_embeddings": 8192, **rope, "rope_theta": theta}
    monkeypatch.setitem(CONFIGS, "mine", of(LlamaConfig, rope_parameters=parameters, head_dim=d_head))
    theirs = as_gguf("mine", tmp_path / "model.gguf")
    ours = converted(tmp_path / "model.gguf", tmp_path / "out")
    assert furthest(theirs, ours) < TOLERANCE
    found, low = ours.spec.rope_scaling, parameters["low_freq_factor"]
    if d_head > 8:
        assert found == RopeScaling(
            kind="llama3",
            factor=parameters["factor"],
            low_freq_factor=1.0,
            high_freq_factor=parameters["high_freq_factor"] / low,
            original_positions=parameters["original_max_position_embeddings"] / low,
        )


def test_factors_of_one_and_of_one_number(tmp_path: Path) -> None:
    for number, expected in ((1.0, None), (4.0, RopeScaling(kind="linear", factor=4.0))):
        added = {"rope_freqs.weight": np.full(6, number, np.float32)}
        as_gguf("Llama", tmp_path / "model.gguf", change=lambda metadata, tensors, added=added: tensors.update(added))
        assert read_foreign(tmp_path / "model.gguf").spec.rope_scaling == expected


def test_what_a_file_leaves_out(tmp_path: Path) -> None:
    """Old files state less; the defaults are those of llama.cpp."""
    left_out = ("vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count",
                "rope.freq_base")  # fmt: skip

    def change(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        for key in left_out:
            del metadata[f"llama.{key}"]
        metadata |= {"llama.rope.scale_linear": 2.0, "llama.feed_forward_length": [80, 80, 80],
                     "llama.expert_count": 0, "general.name": "x"}  # fmt: skip

    as_gguf("Llama", tmp_path / "model.gguf", change=change)
    spec = read_foreign(tmp_path / "model.gguf").spec
    assert (spec.vocab_size, spec.d_head, spec.d_ff, spec.rope_theta) == (96, 12, 80, 10_000.0)
    assert spec.rope_scaling == RopeScaling(kind="linear", factor=2.0)


def test_a_window_as_long_as_rows(tmp_path: Path) -> None:
    as_gguf("Phi-3", tmp_path / "model.gguf", change=lambda metadata, tensors: metadata.update(
        {"phi3.attention.sliding_window": 16}))  # fmt: skip
    assert read_foreign(tmp_path / "model.gguf", max_positions=16).spec.max_positions == 16
    assert read_foreign(tmp_path / "model.gguf", 16, ()).family == "phi3"


def test_a_scale_that_is_not_finite(tmp_path: Path) -> None:
    """It is found when weights are read, as in any other format."""
    model = made("Llama")
    tensors = tensors_of(model)
    tensors["blk.1.ffn_down.weight"][3, 4] = math.inf
    write_gguf(tmp_path / "model.gguf", metadata_of(model), tensors)
    with pytest.raises(ValueError, match=r"layers.1.mlp.down_proj.weight holds values that are NaN or infinite"):
        write_folder(read_foreign(tmp_path / "model.gguf"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


CONVERT = """
import resource, sys
from pathlib import Path
from mod_models.convert import read_foreign
model = read_foreign(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(model.parameters)
model.check_finite()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts KiB")
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q6_K])
def test_memory_does_not_grow_with_the_model(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and embedding, 1 GB each in float32 and a fifth of it in the file, are dequantized in pieces."""
    wide = of(LlamaConfig, hidden_size=256, intermediate_size=256, num_attention_heads=2, num_hidden_layers=1)
    monkeypatch.setitem(CONFIGS, "wide", wide)
    block, size = gguf.GGML_QUANT_SIZES[kind]

    def change(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        rows = 2**20
        metadata["llama.vocab_size"] = rows
        for name in ("token_embd.weight", "output.weight"):
            tensors[name] = np.zeros((rows, 256 // block * size), np.uint8)

    as_gguf("wide", tmp_path / "model.gguf", kinds=lambda name: kind if name.startswith(("token", "out")) else Kind.F32,
            change=change)  # fmt: skip
    command = [sys.executable, "-c", CONVERT, str(tmp_path / "model.gguf")]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(found[0]) * 4 > 2**31
    assert int(found[1]) < 400 * 1024
