"""Each family compared with transformers: logits of whole prompts, token by token, and greedy text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hugging_face import CONFIGS, change_config, of, saved
from safetensors.torch import load_file

from mod_export.model.transformer import MOD_TRANSFORMER
from mod_models.checkpoint import Checkpoint, load_checkpoint
from mod_models.convert import read_foreign
from mod_models.convert.config_json import Config
from mod_models.convert.foreign import write_folder
from mod_models.convert.hugging_face import FAMILIES, spec_of
from mod_models.generate import Session
from mod_models.generation_spec import for_generation
from mod_models.spec import ModelSpec
from mod_models.transformer import Transformer

TOLERANCE = 1e-5
LENGTH = 40
each_family = pytest.mark.parametrize("name", [name for name in CONFIGS if "of 16" not in name])


def converted(source: Path, out: Path) -> Checkpoint:
    write_folder(read_foreign(source), out)
    return load_checkpoint(out)


def ids(rows: int = 2, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, 96, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


@each_family
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    for seed in (0, 1):
        theirs = saved(name, tmp_path / f"source{seed}", seed)
        ours = converted(tmp_path / f"source{seed}", tmp_path / f"out{seed}")
        with torch.no_grad():
            expected_BSV = theirs(ids()).logits
            (found_BSV,) = ours.module()(ids(), torch.tensor([LENGTH, LENGTH]))
        assert expected_BSV.abs().max() > 1
        assert (found_BSV - expected_BSV).abs().max() < TOLERANCE


@pytest.mark.fast("Llama 3.1", "Mistral", "Qwen2", "Qwen3 with biases", "Phi-3", "Gemma, one key")
@each_family
def test_token_by_token(name: str, tmp_path: Path) -> None:
    """Reads a prompt of 9 tokens, then each token with the cache; greedy text agrees as well."""
    theirs = saved(name, tmp_path / "source", 2)
    checkpoint = converted(tmp_path / "source", tmp_path / "out")
    model = Transformer(for_generation(checkpoint.spec, 64)).sharing(checkpoint.module())
    ids_1S = ids(1)
    with torch.no_grad():
        expected_1SV = theirs(ids_1S).logits
    session = Session(model, 64)
    found = [session.read(ids_1S[:, :9], torch.tensor([9]))]
    found += [session.write(ids_1S[:, t]) for t in range(9, LENGTH)]
    assert (torch.stack(found, 1) - expected_1SV[:, 8:]).abs().max() < TOLERANCE
    # An end-of-text token would stop transformers, and is not compared here.
    theirs.generation_config.eos_token_id = None
    written = theirs.generate(ids_1S[:, :9], max_new_tokens=32, do_sample=False, pad_token_id=0)[0, 9:].tolist()
    generating = MOD_TRANSFORMER.read(tmp_path / "out").generating(64)
    assert generating.write(ids_1S[0, :9].tolist(), 32) == written


def test_a_window_hides_nothing_of_rows_as_long_as_it_is(tmp_path: Path) -> None:
    """Rows that are one token longer differ, so they cannot be asked for."""
    theirs = saved("Mistral, a window of 16", tmp_path / "source")
    foreign = read_foreign(tmp_path / "source", max_positions=16)
    longer = replace(foreign.checkpoint(), spec=replace(foreign.spec, max_positions=17))
    differences = []
    for length in (16, 17):
        with torch.no_grad():
            (found_BSV,) = longer.module()(ids()[:, :length], torch.tensor([length, length]))
            differences.append((theirs(ids()[:, :length]).logits - found_BSV).abs().amax((0, 2)))
    assert differences[0].max() < TOLERANCE
    assert differences[1][:16].max() < TOLERANCE
    assert differences[1][16] > 100 * TOLERANCE


def test_every_family_is_compared() -> None:
    assert {CONFIGS[name]().model_type for name in CONFIGS} == set(FAMILIES)
    assert {FAMILIES[CONFIGS[name]().model_type].architecture for name in CONFIGS} == {
        "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM",
        "GemmaForCausalLM",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["Llama 3.1", "Qwen2", "Phi-3", "Gemma"])
def test_read_without_being_written(name: str, tmp_path: Path) -> None:
    """`mod-export build` gets the same spec and weights, mapped from their original files."""
    saved(name, tmp_path / "source")
    ours = converted(tmp_path / "source", tmp_path / "out")
    read = MOD_TRANSFORMER.read(tmp_path / "source").checkpoint
    assert read.spec == ours.spec
    assert read.weights.keys() == ours.weights.keys()
    assert all(torch.equal(read.weights[name], tensor) for name, tensor in ours.weights.items())


@pytest.mark.parametrize("name", ["Llama 3.1", "Llama 2 long", "Qwen2", "Gemma"])
def test_the_fields_of_transformers_4(name: str, tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` replace `rope_parameters`, and the kind and the dtype have other names."""
    saved(name, tmp_path / "source")
    expected = read_foreign(tmp_path / "source").spec
    parameters = dict(CONFIGS[name]().rope_parameters)
    theta, kind = parameters.pop("rope_theta"), parameters.pop("rope_type")
    scaling = None if kind == "default" else {"type": kind, **parameters}
    change_config(
        tmp_path / "source",
        rope_parameters=...,
        rope_theta=theta,
        rope_scaling=scaling,
        torch_dtype="float32",
        dtype=...,
    )
    assert read_foreign(tmp_path / "source").spec == expected


def spec_in(fields: dict[str, Any]) -> ModelSpec:
    family = FAMILIES[fields["model_type"]]
    config = Config(fields, family.defaults)
    spec = spec_of(family, config, None)
    assert spec is not None, config.problems
    return spec


@each_family
def test_what_a_config_leaves_out_is_what_transformers_assumes(name: str) -> None:
    """Leaves out each field alone. 32 heads can be grouped by every default number of keys."""
    config = of(type(CONFIGS[name]()), hidden_size=128, num_attention_heads=32)()
    required = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "max_position_embeddings", "model_type"}  # fmt: skip
    stated = config.to_dict()
    for left_out in stated.keys() - required:
        fields = {field: value for field, value in stated.items() if field != left_out}
        theirs = transformers.AutoConfig.for_model(**fields).to_dict()
        assert spec_in(fields) == spec_in(theirs), left_out


def test_weights_keep_their_dtype_and_norms_of_gemma_become_float32(tmp_path: Path) -> None:
    saved("Gemma", tmp_path / "wide").to(torch.bfloat16).save_pretrained(tmp_path / "source")
    ours = converted(tmp_path / "source", tmp_path / "out")
    dtypes = {name: tensor.dtype for name, tensor in ours.weights.items()}
    assert {dtype for name, dtype in dtypes.items() if not name.endswith("norm.weight")} == {torch.bfloat16}
    assert {dtype for name, dtype in dtypes.items() if name.endswith("norm.weight")} == {torch.float32}
    stored = load_file(tmp_path / "source" / "model.safetensors")
    assert torch.equal(ours.weights["norm.weight"], 1 + stored["model.norm.weight"].float())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    with torch.no_grad():
        expected_BSV = theirs(ids()).logits
        (found_BSV,) = ours.module()(ids(), torch.tensor([LENGTH, LENGTH]))
    assert (found_BSV - expected_BSV).abs().max() < TOLERANCE
