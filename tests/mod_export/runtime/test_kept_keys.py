"""Texts of models whose skipped tokens keep their keys: equal to eager texts, and bit-equal with kept prefixes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from build_folders import Silent, once
from prefix_requests import LARGE, requests, same
from tiny_models import lively_checkpoint
from writing import SPEC, WRITING_TOML, eager, prompts_of_lengths

from mod_export.config import config_from_toml
from mod_export.model.request import Request
from mod_export.model.transformer import TransformerModel
from mod_export.pipeline.stages import build
from mod_export.runtime.generator import load_generator
from mod_models.checkpoint import Checkpoint, save_checkpoint
from mod_models.spec import RoutingSpec

pytestmark = pytest.mark.slow
ROUTING = RoutingSpec(
    layers=(0, 2), capacity=0.375, selection="threshold", router="norm_mlp", router_hidden=8, router_activation="tanh",
    router_input="normed", gate="sigmoid", combine="ffn_gated", skipped_keys_values="kept", skipped_result="adapter",
    adapter="gated", adapter_hidden=8, adapter_gate="rest",
)  # fmt: skip
CHECKPOINTS: dict[str, Checkpoint] = {
    "adapter": lively_checkpoint(replace(SPEC, routing=ROUTING), 6),
    # Heads of 16, so that the attention operator also rotates.
    "wide heads": lively_checkpoint(replace(SPEC, d_head=16, routing=ROUTING), 6),
    "routed apart": lively_checkpoint(
        replace(SPEC, routing=RoutingSpec(
            layers=(0, 2), capacity=0.375, parts="separate", selection="threshold", router_stream="block", gate="ones",
            skipped_keys_values="kept", router="mlp", router_hidden=8, router_activation="relu",
        )), 6,
    ),
}  # fmt: skip


Built = Callable[[str], Path]


@pytest.fixture(scope="session")
def keeping(shared_folder: Path, _roofline: None) -> Built:
    """Returns the read-only build of a checkpoint by its name, which the first test that needs it makes."""

    def made(name: str) -> Path:
        folder = shared_folder / f"keeps {name}"
        return once(folder, lambda: build_for_both(name, folder)) / "build"

    return made


def build_for_both(name: str, folder: Path) -> None:
    save_checkpoint(folder / "model.pt", CHECKPOINTS[name])
    targets = '"ort-cpu", "openvino"'
    (folder / "c.toml").write_text(WRITING_TOML.replace('"ort-cpu"', targets), encoding="utf-8")
    models: Callable[..., object] = Request.checkpoint(folder / "model.pt").models
    report = build(models, config_from_toml(folder / "c.toml"), folder / "build", Silent(), "mod-export build")
    assert report.verdict.status == "pass", report.verdict.reasons


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("target", ["ort-cpu", "openvino"])
def test_texts_are_those_of_eager(name: str, target: str, keeping: Built) -> None:
    reference = eager(TransformerModel(CHECKPOINTS[name]))
    prompts = prompts_of_lengths([3, 9, 16, 21, 30], 4)
    with load_generator(keeping(name), target) as generator:
        for batch in ([prompts[0]], prompts[1:4], prompts[4:]):
            for prompt, text in zip(batch, generator.generate(batch, 12, ignore_eos=True), strict=True):
                assert text.ids == reference.write(prompt, 12)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_prefixes_are_taken_bit_for_bit(name: str, keeping: Built) -> None:
    folder, taken = keeping(name), 0
    with (
        load_generator(folder, "ort-cpu") as generator,
        load_generator(folder, "ort-cpu", prefix_cache_bytes=LARGE) as cached,
    ):
        for prompts, new, options in requests(5):
            found = cached.generate(prompts, new, **options)
            assert all(map(same, found, generator.generate(prompts, new, **options)))
            taken += sum(completion.cached for completion in found)
    assert taken > 0
