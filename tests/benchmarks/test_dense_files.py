"""A dense checkpoint in the file formats of other programs, which read and compute the same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from benchmarks.rivals.cases import Case
from benchmarks.rivals.dense_files import write_gguf, write_hugging_face
from mod_models.checkpoint import Checkpoint, load_checkpoint, random_checkpoint
from mod_models.convert import read_foreign
from mod_models.convert.foreign import write_folder


@pytest.fixture(scope="module")
def dense() -> Checkpoint:
    spec = Case("XS", 64, vocab=300).spec.dense()
    return random_checkpoint(replace(spec, rope_theta=50_000.0, norm_eps=1e-6), 0)


def same(found: Checkpoint, expected: Checkpoint) -> bool:
    return found.weights.keys() == expected.weights.keys() and all(
        torch.equal(found.weights[name], tensor.float()) for name, tensor in expected.weights.items()
    )


def test_transformers_computes_the_same(dense: Checkpoint, tmp_path: Path) -> None:
    folder = write_hugging_face(dense, tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids_1S = torch.arange(40)[None]
    with torch.no_grad():
        found_1SV = model(ids_1S).logits
        (expected_1SV,) = dense.module()(ids_1S, torch.tensor([40]))
    torch.testing.assert_close(found_1SV, expected_1SV, rtol=0, atol=2e-5)
    # The tokenizer has an id for each byte, and filler words.
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.decode(tokenizer.encode("Naïve café").ids) == "Naïve café"


def test_both_forms_are_converted_back(dense: Checkpoint, tmp_path: Path) -> None:
    for source in (write_hugging_face(dense, tmp_path / "hf"), write_gguf(dense, tmp_path / "dense.gguf")):
        found = read_back(source, tmp_path / f"{source.stem}-back")
        assert same(found, dense)
        assert found.spec == dense.spec


def test_float16_is_rounded_and_norms_are_not(dense: Checkpoint, tmp_path: Path) -> None:
    reader = gguf.GGUFReader(write_gguf(dense, tmp_path / "half.gguf", np.float16))
    kinds = {tensor.name: tensor.data.dtype for tensor in reader.tensors}
    assert kinds["blk.0.ffn_up.weight"] == np.float16
    assert kinds["output_norm.weight"] == np.float32
    up = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_up.weight")
    assert np.array_equal(up.data, dense.weights["layers.0.mlp.up_proj.weight"].numpy().astype(np.float16))


def test_what_llama_has_not_is_refused(dense: Checkpoint, tmp_path: Path) -> None:
    routed = Checkpoint(spec=Case("XS", 64).spec, weights=dense.weights)
    with pytest.raises(ValueError, match="dense Llama model, and this one declares routing"):
        write_hugging_face(routed, tmp_path)
    biased = Checkpoint(spec=replace(dense.spec, attention_bias="qkv"), weights=dense.weights)
    with pytest.raises(ValueError, match="declares attention_bias"):
        write_gguf(biased, tmp_path / "no.gguf")


def read_back(source: Path, out: Path) -> Checkpoint:
    write_folder(read_foreign(source), out)
    return load_checkpoint(out)
