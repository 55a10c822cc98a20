"""Other projects' Mixture-of-Depths models compared with re-implementations of their code: logits, text, refusals."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from implementation_models import (
    Astramind,
    ByRow,
    DLlm,
    Dlo,
    FlexiDepth,
    MindSkip,
    Ohara,
    PMod,
    SkipGpt,
    Sramshetty,
)
from recursions_model import Recursions
from safetensors.torch import load_file, save_file

from mod_models.checkpoint import Checkpoint, load_checkpoint
from mod_models.convert import read_foreign
from mod_models.convert.foreign import ForeignModel, write_folder
from mod_models.generate import Session
from mod_models.generation_spec import for_generation
from mod_models.routing import Decisions
from mod_models.spec import layer_of
from mod_models.transformer import Transformer

TOLERANCE = 1e-5
LENGTH = 40

MODELS: dict[str, tuple[str, Callable[[int], ByRow], float | None]] = {
    "astramind, Llama": ("astramind", lambda seed: Astramind("Llama", seed), None),
    "astramind, Mistral": ("astramind", lambda seed: Astramind("Mistral", seed), None),
    "astramind, Qwen2": ("astramind", lambda seed: Astramind("Qwen2", seed), None),
    "DLO": ("dlo", Dlo, 1.0),
    "DLO without weights": ("dlo", lambda seed: Dlo(seed, rescales=False), 1.0),
    "ohara": ("ohara", Ohara, None),
    "sramshetty": ("sramshetty", Sramshetty, None),
    "sramshetty with a second router": ("sramshetty", lambda seed: Sramshetty(seed, auxiliary=True), None),
    "D-LLM": ("d-llm", DLlm, 1.0),
    "FlexiDepth, Llama": ("flexidepth", lambda seed: FlexiDepth("Llama", seed), 1.0),
    "FlexiDepth, Llama with GELU": ("flexidepth", lambda seed: FlexiDepth("Llama, a head for each, eps", seed), 1.0),
    "FlexiDepth, Qwen3": ("flexidepth", lambda seed: FlexiDepth("Qwen3", seed), 1.0),
    "SkipGPT": ("skipgpt", SkipGpt, 1.0),
    "MindSkip, attention": ("mindskip", lambda seed: MindSkip("Llama", seed, "attn_token"), 1.0),
    "MindSkip, block": ("mindskip", lambda seed: MindSkip("Mistral", seed, "block_token", 0.4), 1.0),
    "MindSkip, MLP": ("mindskip", lambda seed: MindSkip("Qwen2", seed, "mlp_token", 0.6), 1.0),
    "recursions": ("recursions", Recursions, None),
    "recursions without other layers, MLP routers": (
        "recursions",
        lambda seed: Recursions(seed, 12, middle=False, auxiliary=True),
        None,
    ),
    "p-MoD": ("p-mod", PMod, None),
    "p-MoD without biases": ("p-mod", lambda seed: PMod(seed, bias=False), None),
}  # fmt: skip
"""Name -> (implementation, the reference model from a seed, the capacity that must be given)."""
CAUSAL = [name for name, (of, _, capacity) in MODELS.items() if capacity is not None or of == "p-mod"]


def distinct_ids(rows: int = 2, seed: int = 3) -> torch.Tensor:
    """No id occurs twice in a row: equal tokens have equal scores, and the published code takes any of them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([3 + torch.randperm(93, generator=generator)[:LENGTH] for _ in range(rows)])


def read(name: str, folder: Path, seed: int = 0) -> tuple[ByRow, ForeignModel]:
    implementation, make, capacity = MODELS[name]
    theirs = make(seed)
    theirs.save(folder)
    return theirs, read_foreign(folder, implementation=implementation, capacity=capacity)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[ByRow, ForeignModel]]:
    """Makes and reads the model of a name once for all tests, which leave it as it is."""
    return functools.cache(lambda name: read(name, tmp_path_factory.mktemp("example") / "source"))


def converted(model: ForeignModel, out: Path) -> Checkpoint:
    write_folder(model, out)
    return load_checkpoint(out)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_published_code(
    name: str, example: Callable[[str], tuple[ByRow, ForeignModel]], tmp_path: Path
) -> None:
    theirs, found = example(name)
    module, ids_BS, decisions = converted(found, tmp_path / "out").module(), distinct_ids(), Decisions()
    for length in (LENGTH, 13):
        expected_BSV = theirs(ids_BS[:, :length])
        with torch.no_grad():
            (found_BSV,) = module(ids_BS[:, :length], torch.tensor([length, length]))
        assert expected_BSV.abs().max() > 1
        assert (found_BSV - expected_BSV).abs().max() < TOLERANCE
    # If routed layers ran every token or none, the comparison would say nothing.
    with torch.no_grad():
        module.hidden(ids_BS, torch.tensor([LENGTH, LENGTH]), decisions)
    assert {layer_of(site) for site in decisions.made} == set(found.spec.routed_layers)
    shares = [float(routing.live_BK.sum()) / ids_BS.numel() for routing in decisions.made.values()]
    # Every token runs the first step of Mixture-of-Recursions.
    for share in shares[1:] if MODELS[name][0] == "recursions" else shares:
        assert 0.05 < share < 0.95


@pytest.mark.parametrize("name", MODELS)
def test_what_is_said_about_text(name: str, example: Callable[[str], tuple[ByRow, ForeignModel]]) -> None:
    """Changes the last tokens: earlier logits stay the same if the note says causal, and change otherwise."""
    theirs, found = example(name)
    ids_BS = distinct_ids(1).repeat(24, 1)
    ids_BS[1:, -8:] = torch.randint(3, 96, (23, 8), generator=torch.Generator().manual_seed(0))
    logits_BSV = theirs(ids_BS)[:, :-8]
    causal = name in CAUSAL
    assert bool((logits_BSV - logits_BSV[:1]).abs().max() < TOLERANCE) == causal
    note_about_text = next(note for note in found.notes if "write text token by token" in note)
    assert note_about_text.startswith("causal; can write" if causal else "looks ahead: routing.selection=topk")
    assert (for_generation(found.spec, 64).looks_ahead == ()) if causal else "cannot write" in note_about_text


@pytest.mark.parametrize("name", CAUSAL)
def test_token_by_token(name: str, tmp_path: Path) -> None:
    """Reads a prompt of 9 tokens, then each token with the cache, with a slot for every token."""
    theirs, found = read(name, tmp_path / "source", 2)
    checkpoint = found.checkpoint()
    model = Transformer(for_generation(checkpoint.spec, 64)).sharing(checkpoint.module())
    ids_1S = distinct_ids(1)
    session = Session(model, 64)
    written = [session.read(ids_1S[:, :9], torch.tensor([9]))]
    written += [session.write(ids_1S[:, t]) for t in range(9, LENGTH)]
    assert (torch.stack(written, 1) - theirs(ids_1S)[:, 8:]).abs().max() < TOLERANCE


def test_recursions_by_the_sign_of_the_score(tmp_path: Path) -> None:
    """Its auxiliary loss trains routers to say with sigmoid(l) > 0.5 which tokens run. A spec that declares so can
    write text; tokens read one by one give the logits of the whole row.
    """
    theirs = Recursions(1)
    theirs.save(tmp_path / "source")
    theirs.decided_by_zero = True
    write_folder(read_foreign(tmp_path / "source", implementation="recursions", capacity=1.0), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    fields = json.loads(path.read_text())
    fields["spec"]["routing"]["selection"] = "threshold"
    path.write_text(json.dumps(fields))
    checkpoint = load_checkpoint(tmp_path / "out")
    model = Transformer(for_generation(checkpoint.spec, 64)).sharing(checkpoint.module())
    ids_1S = distinct_ids(1)
    session = Session(model, 64)
    written = [session.read(ids_1S[:, :9], torch.tensor([9]))]
    written += [session.write(ids_1S[:, t]) for t in range(9, LENGTH)]
    expected_1SV = theirs(ids_1S)
    assert (torch.stack(written, 1) - expected_1SV[:, 8:]).abs().max() < TOLERANCE
    with torch.no_grad():
        (found_1SV,) = checkpoint.module()(ids_1S, torch.tensor([LENGTH]))
    assert (found_1SV - expected_1SV).abs().max() < TOLERANCE


def test_shared_weights_can_be_in_any_step(tmp_path: Path) -> None:
    """A safetensors file does not hold one tensor under several names."""
    theirs = Recursions(0)
    theirs.save(tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if not re.match(r"model.layers.[13].block", name)}
    save_file(kept, path)
    module = read_foreign(tmp_path / "source", implementation="recursions").checkpoint().module()
    ids_BS = distinct_ids()
    with torch.no_grad():
        (found_BSV,) = module(ids_BS, torch.tensor([LENGTH, LENGTH]))
    assert (found_BSV - theirs(ids_BS)).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("recursions", "a gate of 0.1 sigmoid(l), routers without a temperature, and keys and values of each step's"),
        ("recursions", "weights that steps share are stored once for each step"),
        ("recursions", "the capacities 1, 0.667, 0.333 are what its code sets"),
        ("recursions without other layers, MLP routers", "mlp_router is left out"),
        ("astramind, Llama", "capacity 0.125 is what its loader sets"),
        ("DLO", "every token has a slot, as in its code; a prompt costs as much as in the dense model"),
        ("ohara", "attn.key holds what queries are made of and attn.query what keys are"),
        ("sramshetty with a second router", "routes as in training; its own generation differs"),
        ("sramshetty with a second router", "aux_router is left out"),
        ("D-LLM", "LoRA is added to 12 projections in float32"),
        ("FlexiDepth, Llama", "both results are weighted, w * M and (1 - w) * adapter, as in the released models"),
        ("FlexiDepth, Llama", "every token has a slot"),
        ("SkipGPT", "the more probable class decides; its code draws Gumbel noise at inference too"),
        ("SkipGPT", "every token has a slot"),
        ("MindSkip, block", "its code also runs a token whose sigmoid(l) is exactly 0.4"),
        ("MindSkip, MLP", "every token has a slot"),
        ("p-MoD", "no layer is routed"),
        ("p-MoD", "tokens of images are not converted: the routers of 2 layers, which choose among them, and the"),
    ],
)
def test_notes(name: str, expected: str, example: Callable[[str], tuple[ByRow, ForeignModel]]) -> None:
    _, found = example(name)
    assert any(expected in note for note in found.notes)
    assert found.family.endswith(f" as {MODELS[name][0]} stores it")


def test_a_capacity_that_is_given(tmp_path: Path) -> None:
    """It applies if the implementation lets users set it; an implementation without capacity skips tokens by it."""
    theirs = Astramind("Llama", 5)
    theirs.capacity = 0.5
    theirs.save(tmp_path / "astramind")
    found = read_foreign(tmp_path / "astramind", implementation="astramind", capacity=0.5)
    ids_BS, lengths_B = distinct_ids(), torch.tensor([LENGTH, LENGTH])
    with torch.no_grad():
        (found_BSV,) = found.checkpoint().module()(ids_BS, lengths_B)
    assert (found_BSV - theirs(ids_BS)).abs().max() < TOLERANCE
    Dlo(0).save(tmp_path / "dlo")
    found = read_foreign(tmp_path / "dlo", implementation="dlo", capacity=0.1)
    assert found.spec.k_of_layer(40) == {1: 4, 2: 4}
    assert "tokens that want to run and find no slot are skipped; its code has no such limit (--capacity 1)" in (
        found.notes
    )
    Ohara(0).save(tmp_path / "ohara")
    assert read_foreign(tmp_path / "ohara", implementation="ohara", capacity=0.5).spec.capacity == 0.5
    Sramshetty(0).save(tmp_path / "sramshetty")
    assert read_foreign(tmp_path / "sramshetty", implementation="sramshetty", capacity=7).spec.capacity == 7


@pytest.mark.parametrize("capacity", [None, 0.25])
def test_one_selected_token(capacity: float | None, tmp_path: Path) -> None:
    """With k = 1 astramind takes the largest score, not the scores above it; k = 2 also gives one token."""
    theirs = Astramind("Llama", 0)
    theirs.capacity = capacity or theirs.capacity
    theirs.save(tmp_path / "source")
    found = read_foreign(tmp_path / "source", implementation="astramind", capacity=capacity)
    ids_BS = distinct_ids()[:, :8]
    with torch.no_grad():
        (found_BSV,) = found.checkpoint().module()(ids_BS, torch.tensor([8, 8]))
    assert found.spec.k_of_layer(8) == {1: 1}
    assert (found_BSV - theirs(ids_BS)).abs().max() < TOLERANCE


def test_rows_are_as_long_as_the_user_says(tmp_path: Path) -> None:
    for name, expected in (("ohara", 64), ("sramshetty", 2048), ("D-LLM", 2048), ("DLO", 128)):
        implementation, make, capacity = MODELS[name]
        make(0).save(tmp_path / name)
        options: dict[str, Any] = {"implementation": implementation, "capacity": capacity}
        assert read_foreign(tmp_path / name, **options).spec.max_positions == expected
        assert read_foreign(tmp_path / name, 50, **options).spec.max_positions == 50


def test_files_of_skipgpt(tmp_path: Path) -> None:
    """Its trainings write model.pth or model.bin."""
    theirs = SkipGpt(0)
    for file in ("model.pth", "model.bin"):
        theirs.save(tmp_path / file, file)
        (tmp_path / file / "README.md").write_text("SkipGPT")
        found = read_foreign(tmp_path / file, implementation="skipgpt", capacity=1.0)
        with torch.no_grad():
            (found_BSV,) = found.checkpoint().module()(distinct_ids(), torch.tensor([LENGTH, LENGTH]))
        assert (found_BSV - theirs(distinct_ids())).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "name"), [("llama_mindskip", "LlamaMindSkipForCausalLM"), ("llama_mod", "LlamaMoDForCausalLM")]
)
def test_older_classes_of_mindskip(kind: str, name: str, tmp_path: Path) -> None:
    MindSkip("Llama", 0, "attn-token").save(
        tmp_path / "source", model_type=kind, architectures=[name], train_threshold=False
    )
    found = read_foreign(tmp_path / "source", implementation="mindskip", capacity=1.0)
    assert (found.spec.routed_layers, found.family) == ((0, 2), "llama as mindskip stores it")


def test_the_sizes_and_layers_of_flexidepth_are_those_of_its_tensors(tmp_path: Path) -> None:
    FlexiDepth("Llama", 0).save(
        tmp_path / "source", model_type="vskip", routing_layers=None, router_reduction_factor=16
    )
    found = read_foreign(tmp_path / "source", implementation="flexidepth", capacity=0.5)
    routing = found.spec.routing
    assert routing is not None
    assert (routing.layers, routing.router_hidden, routing.adapter_hidden, routing.capacity) == ((1, 2), 12, 20, 0.5)
    assert any("tokens that want to run and find no slot are skipped" in note for note in found.notes)


def test_biases_of_ohara(tmp_path: Path) -> None:
    """With `bias`, output projections have biases too; old files hold the embedding once, others twice."""
    theirs = Ohara(3)
    for module in theirs.modules():
        if hasattr(module, "attn"):
            module.attn["proj"] = torch.nn.Linear(48, 48)
    theirs.eval()
    theirs.save(tmp_path / "source", kept=("model.token_emb.weight", "model.vocab_proj.weight"), bias=True)
    found = read_foreign(tmp_path / "source", implementation="ohara")
    assert found.spec.attention_bias == "all"
    ids_BS = distinct_ids()
    with torch.no_grad():
        (found_BSV,) = found.checkpoint().module()(ids_BS, torch.tensor([LENGTH, LENGTH]))
    assert (found_BSV - theirs(ids_BS)).abs().max() < TOLERANCE


def test_a_model_without_lora(tmp_path: Path) -> None:
    DLlm(0).save(tmp_path / "source", lora=False)
    found = read_foreign(tmp_path / "source", implementation="d-llm", capacity=1.0)
    assert not any("LoRA" in note for note in found.notes)
    theirs = DLlm(0)
    with torch.no_grad():
        (found_BSV,) = found.checkpoint().module()(distinct_ids(), torch.tensor([LENGTH, LENGTH]))
    assert (found_BSV - theirs(distinct_ids())).abs().max() < TOLERANCE
