"""Predictions of gains: exact where only FLOPs or only bytes count, and what the command says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import invoke, refused
from tiny_models import lively_checkpoint, make_spec

from mod_export.errors import UsageError
from mod_export.inspect.gains import gain_lines
from mod_export.measure.gain import MACHINES, Machine, Proposal, gain_of, machine_of, proposals
from mod_export.model.module import model_from_module
from mod_export.model.transformer import GeneratingTransformer, TransformerModel
from mod_export.types import Bucket
from mod_models.checkpoint import Checkpoint, save_checkpoint
from mod_models.spec import ExpertsSpec, ModelSpec

SPEC = ModelSpec(
    vocab_size=512, d_model=128, n_layers=8, n_heads=4, n_kv_heads=2, d_head=32, d_ff=384, max_positions=1024,
)  # fmt: skip
DENSE = TransformerModel(Checkpoint(spec=SPEC, weights={}))
ENDLESS = 1e30
LAYERS = (1, 3, 5, 7)
WAYS = [
    Proposal("block", LAYERS, 0.25), Proposal("block", LAYERS, 0.25, "kept"), Proposal("attention", LAYERS, 0.5),
    Proposal("attention", LAYERS, 0.5, "kept"), Proposal("mlp", LAYERS, 0.125),
]  # fmt: skip


def routed(way: Proposal) -> TransformerModel:
    model = DENSE.routed(way.layers, way.parts, way.capacity, way.keys_values)
    assert model is not None
    return model


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_where_only_flops_count(way: Proposal) -> None:
    """The gain of a prompt is the ratio of FLOPs, with the head of one token in each row."""
    machine = Machine("fast memory", "float32", 1e9, ENDLESS, 4, 4)
    model = routed(way)
    found = gain_of(model, DENSE, machine, 2, 64, 128, [1, 9])
    layers, dense = (
        sum(sum(layer.flops.values()) for layer in each.layers(2, 64)[:-1]) + 2 * 2 * 512 * 128
        for each in (model, DENSE)
    )
    assert found.prefill == pytest.approx(dense / layers)
    # A step costs as much for each text, whatever the number of texts.
    assert found.texts[1] == pytest.approx(found.texts[9])
    whole, whole_dense = (sum(sum(layer.flops.values()) for layer in each.layers(1, 128)) for each in (model, DENSE))
    assert found.texts[1] == pytest.approx(whole_dense / whole, rel=2e-2)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_where_only_bytes_count(way: Proposal) -> None:
    """The gain of a step is that of the bytes that a step of the real model reads; norms and routers are small."""
    machine = Machine("fast processor", "float32", ENDLESS, 1e9, 4, 4)
    model = routed(way)
    found = gain_of(model, DENSE, machine, 1, 64, 1024, [1, 4, 32]).texts
    weights = lively_checkpoint(model.checkpoint.spec).weights
    mod = GeneratingTransformer(Checkpoint(spec=model.checkpoint.spec, weights=weights), 1024)
    dense_weights = lively_checkpoint(SPEC).weights
    dense = GeneratingTransformer(Checkpoint(spec=SPEC, weights=dense_weights), 1024)
    for texts in (1, 4, 32):
        executed = dict.fromkeys(mod.sites, 1 - (1 - way.capacity) ** texts)
        least = mod.least_bytes(texts, 1024, executed)
        # `least_bytes` lets every text read the cache of a layer that runs; here only the texts that run do.
        cache = sum(mod.kv_bytes(1024)[layer] for layer in LAYERS) * texts
        read = executed[mod.sites[0]] if way.parts != "mlp" else 0.0
        least -= round(cache * (read - (way.capacity if way.parts != "mlp" else 0.0)))
        assert found[texts] == pytest.approx(dense.least_bytes(texts, 1024, {}) / least, rel=2e-2)


def test_narrower_weights_leave_the_cache_as_it_is() -> None:
    """Where only the cache counts, so many texts that their caches are far larger than the weights gain the same."""
    model = routed(Proposal("block", LAYERS, 0.25))
    machine, narrow = (machine_of("h100", None, None, weight_bytes) for weight_bytes in (None, 0.5))
    assert (narrow.weight_bytes, narrow.cache_bytes) == (0.5, machine.cache_bytes)
    wide_gain, narrow_gain, even_gain = (
        gain_of(model, DENSE, replace(each, flops=ENDLESS), 1, 64, 1024, [1]).texts[1]
        for each in (machine, narrow, replace(narrow, cache_bytes=0.5))
    )
    # The cache gains more than the weights, which are a smaller share of the bytes if only they are narrower.
    assert even_gain == pytest.approx(wide_gain)
    assert narrow_gain > wide_gain * 1.01
    assert [MACHINES[name].cache_bytes for name in MACHINES] == [2, 2, 2]


def test_a_product_of_few_rows_gains_nothing() -> None:
    """Below `fewest_rows` a product takes as long as its weights take to be read."""
    machine = MACHINES["h100"]
    assert round(machine.fewest_rows) == 295
    assert replace(machine, weight_bytes=1).fewest_rows == pytest.approx(machine.fewest_rows / 2)
    short, long = (gain_of(routed(WAYS[0]), DENSE, machine, rows, 256, 1024, [1]) for rows in (1, 64))
    assert short.prefill < 1.15  # Attention alone gains.
    assert long.prefill > 1.4
    assert (short.slots, long.slots) == (64, 64 * 64)


def test_adapters_are_read_by_those_who_skip() -> None:
    machine = Machine("fast processor", "float32", ENDLESS, 1e9, 4, 4)
    spec = routed(Proposal("mlp", LAYERS, 0.25)).checkpoint.spec
    assert spec.routing is not None
    with_adapter = replace(spec, routing=replace(spec.routing, skipped_result="adapter"))
    found = gain_of(TransformerModel(Checkpoint(spec=with_adapter, weights={})), DENSE, machine, 1, 64, 1024, [1, 64])
    plain = gain_of(routed(Proposal("mlp", LAYERS, 0.25)), DENSE, machine, 1, 64, 1024, [1, 64])
    assert found.texts[1] < plain.texts[1]
    assert found.texts[64] < 1 < plain.texts[64] * 1.01


def test_ways_of_every_size_can_be_built() -> None:
    for n_layers in (1, 2, 5, 32):
        model = TransformerModel(Checkpoint(spec=replace(SPEC, n_layers=n_layers), weights={}))
        if n_layers > 1:
            for way in proposals(n_layers):
                assert model.routed(way.layers, way.parts, way.capacity, way.keys_values) is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mine", None, None, None), "--machine mine: unknown; known: this, h100, a100, rtx4090"),
        (("this", 3.0, None, None), "--tflops and --bandwidth describe a machine together; give both or none"),
    ],
)
def test_machines_that_are_not_described(arguments: tuple[str, float | None, None, None], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        machine_of(*arguments)


def test_another_machine() -> None:
    assert machine_of("this", 2.0, 100.0, None) == Machine("a machine", "16 bits", 2e12, 1e11, 2, 2)
    assert machine_of("h100", None, None, 1).weight_bytes == 1
    assert machine_of("this", None, None, None).dtype == "float32"


def test_models_without_an_answer() -> None:
    experts = TransformerModel(Checkpoint(spec=replace(SPEC, experts=ExpertsSpec()), weights={}))
    with pytest.raises(UsageError, match="cannot be routed: it routes already or has experts"):
        gain_lines(experts, MACHINES["h100"], 1, 64, 128, [1])
    module = model_from_module(
        torch.nn.Linear(2, 2), lambda batch, seq, seed: torch.zeros(batch, 2), [Bucket(1, 2)], "Linear"
    )
    with pytest.raises(UsageError, match="Linear does not declare its layers, so their costs are not known"):
        gain_lines(module, MACHINES["h100"], 1, 64, 128, [1])


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 128,
    "intermediate_size": 384, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


def test_the_command_on_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    found = invoke("plan", path, "--machine", "h100", "--prompt", 128, "--texts", "1,256").stdout
    assert found.startswith("NVIDIA H100 SXM, bfloat16: 989 TFLOP/s, 3,350 GB/s\n")
    assert "prompt 1 x 128" in found
    assert "12.5 % in 4 of 8 blocks, keys kept" in found
    assert "a product of fewer than 295 rows takes as long as its weights take to be read; in 16 of 16 ways" in found
    assert "for this prompt no way gains 5.0 %" in found


@pytest.mark.parametrize(
    ("machine", "prompt", "told"),
    [
        ("h100", 2000, "500 rows take as long as 512"),
        ("h100", 2048, ""),
        ("h100", 100, ""),
        # Fewer rows than a product needs to be busy, but not in whole tiles.
        ("a100", 560, "140 rows take as long as 256"),
    ],
)
def test_rows_that_fill_no_tile_are_named(machine: str, prompt: int, told: str, tmp_path: Path) -> None:
    """Where a product waits for its weights, in short prompts, more rows take no longer."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "max_position_embeddings": 4096}))
    found = invoke("plan", path, "--machine", machine, "--prompt", prompt).stdout
    assert ("products are computed in tiles of 128 rows" in found) == bool(told)
    assert told in found


def test_the_command_on_a_routed_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model.pt", lively_checkpoint(make_spec()))
    found = invoke("plan", tmp_path / "model.pt", "--tflops", 1, "--bandwidth", 50, "--prompt", 16).stdout
    assert "as declared, 6 of 16 tokens" in found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json: not readable JSON"),
        ('{"model_type": "t5"}', "config.json: model_type: 't5' is no family that can be converted"),
        ('{"a": 1}', "config.json: declares no model; expected the config.json of a model, or a spec"),
        ('{"spec": {"d_model": 4}}', "spec.vocab_size: missing"),
        ('{"architecture": "other", "spec": {"d_model": 4}}', "config.json: declares no model"),
    ],
)
def test_configurations_of_no_model(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    refused(invoke("plan", tmp_path / "config.json", "--machine", "h100"), re.escape(message))


def test_numbers_that_are_none() -> None:
    found = invoke("plan", "config.json", "--texts", "1,x")
    assert found.exit_code == 2
    assert "expected whole numbers of at least 1 with commas between them, got '1,x'" in found.stderr
