"""Builds sound folders to plant faults into, and signs folders with faults again.

A changed file has another hash, which `validate` would report at once. That would not test the checks that look for
faults, so every faulty folder is signed again: its manifest gets the hashes of the faulty files, as if the build had
made them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
import torch
from build_folders import Silent
from captures import captured_module
from foreign_models import Masked, made, masked_inputs, token_ids
from mod_dialects import Inner, Model
from torch import nn

from mod_export.api import build as build_module
from mod_export.config import BuildConfig, config_from_toml
from mod_export.folder.manifest import MANIFEST, with_checksum
from mod_export.graph.onnx_export import onnx_from_captured
from mod_export.graph.rewrites import PORTABLE, apply_rewrites
from mod_export.graph.weights import WeightsFile, bind_weights, state_of
from mod_export.model.request import Request
from mod_export.pipeline.stages import build
from mod_export.rows.report import BuildReport
from mod_export.types import TOKEN_INPUTS, Bucket
from mod_models.checkpoint import Checkpoint, random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec, RoutingSpec

SPEC = ModelSpec(
    vocab_size=256, d_model=32, n_layers=4, n_heads=4, n_kv_heads=2, d_head=8, d_ff=64, max_positions=64,
    routing=RoutingSpec(capacity=0.25),
)  # fmt: skip
SKIPPED_SPEC = replace(
    SPEC,
    routing=RoutingSpec(
        capacity=0.5, selection="threshold", router="norm_mlp", router_hidden=8, router_activation="tanh",
        router_input="normed", gate="sigmoid", combine="ffn_gated", skipped_keys_values="kept",
        skipped_result="adapter", adapter="gated", adapter_hidden=16, adapter_gate="rest",
    ),
)  # fmt: skip
"""A model whose skipped tokens keep their keys and values and run an adapter, as those of FlexiDepth do."""
NESTED_SPEC = replace(
    SPEC,
    routing=RoutingSpec(
        layers=(0, 2), blocks_per_router=2, candidates="previous", capacity=(0.75, 0.5), selection="threshold",
        gate="sigmoid", combine="double_residual",
    ),
)  # fmt: skip
"""A model of Mixture-of-Recursions whose routers decide by the sign of the score."""
SHAPE = Bucket(2, 32)
BUCKET = SHAPE.name
CAPACITY_ONE_MORE = replace(SPEC, routing=RoutingSpec(capacity=9 / 32))
CAPACITY_ROUNDED_DOWN = replace(SPEC, routing=RoutingSpec(capacity=7 / 32))
"""Capacity with k = 7, which 0.249 x 32 gives when it is rounded down; 0.25 x 32 gives 8."""
STD = 0.15
"""Standard deviation of the weights: large enough that every block changes the result, as in a trained model."""
FOREIGN_STD = 0.3
"""Standard deviation of the weights of users' modules, which are narrower."""

FolderName = Literal["graphs", "skipped", "nested", "compiled", "foreign", "two outputs", "compiled foreign"]
FOREIGN_SHAPES = [(2, 16), (1, 32)]
FEW_RUNS = """
[latency]
samples = 5
warmup = 1
bootstrap = 100
min_speedup = 0.0
[cost]
profile_runs = 0
[generation]
build = "never"
"""
GRAPHS = f"""
buckets = [[2, 32]]
targets = ["ort-cpu", "tensorrt-rtx"]
[target.tensorrt-rtx]
dtypes = ["float16"]
architectures = ["sm89"]
{FEW_RUNS}"""
ONLY_ORT = f"""
buckets = [[2, 32]]
targets = ["ort-cpu"]
{FEW_RUNS}"""
COMPILED = f"""
buckets = [[2, 32]]
targets = ["inductor"]
{FEW_RUNS}"""


def checkpoint_with(spec: ModelSpec, seed: int, std: float) -> Checkpoint:
    """Returns a checkpoint whose weights have this standard deviation, with norms around one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.empty_like(tensor).normal_(1.0 if "norm" in name else 0.0, std, generator=generator)
        for name, tensor in random_checkpoint(spec, seed).weights.items()
    }
    return Checkpoint(spec=spec, weights=weights)


def build_folder(toml: str, folder: Path, spec: ModelSpec = SPEC) -> Path:
    """Returns a finished build of a spec. `folder` holds the checkpoint and the configuration too."""
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder / "model.pt", checkpoint_with(spec, 1, STD))
    (folder / "c.toml").write_text(toml, encoding="utf-8")
    config: BuildConfig = config_from_toml(folder / "c.toml")
    report = build(
        Request.checkpoint(folder / "model.pt").models, config, folder / "build", Silent(), "mod-export build model.pt"
    )
    assert report.verdict.status == "pass", report.verdict.reasons
    return folder / "build"


def randomized(module: nn.Module, seed: int, std: float) -> nn.Module:
    """Gives a user's module weights of this standard deviation, with norms around one, and returns it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            tensor.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, std, generator=generator)
    return module


def foreign_module() -> Model:
    """A module without marks for mod-export: blocks 1 and 3 are routed by `torch.topk` and `scatter_add`."""
    module = randomized(made("scatter_add"), 1, FOREIGN_STD)
    assert isinstance(module, Model)
    return module


def _foreign(folder: Path) -> BuildReport:
    dense = randomized(Model(Inner).eval(), 2, FOREIGN_STD)
    return build_module(
        foreign_module(),
        token_ids,
        FOREIGN_SHAPES,
        dense,
        folder / "build",
        ["ort-cpu"],
        config=folder / "c.toml",
        verbosity=-1,
    )


def _padded(batch: int, seq: int, seed: int) -> dict[str, torch.Tensor]:
    """Inputs with rows of different lengths."""
    inputs = masked_inputs(batch, seq, seed)
    inputs["attention_mask"][0, seq // 2 :] = 0
    return inputs


def _two_outputs(folder: Path) -> BuildReport:
    return _alone(randomized(made(Masked), 1, FOREIGN_STD), _padded, folder, "ort-cpu")


def compiled_foreign(folder: Path, module: nn.Module | None = None) -> BuildReport:
    """Builds an AOTInductor package of `module`, by default of `foreign_module`."""
    return _alone(module or foreign_module(), token_ids, folder, "inductor")


def _alone(module: nn.Module, inputs: Any, folder: Path, target: str) -> BuildReport:
    """Builds one bucket for one target, without a baseline."""
    return build_module(
        module, inputs, FOREIGN_SHAPES[:1], None, folder / "build", [target], config=folder / "c.toml", verbosity=-1
    )


def foreign_folder(make: Callable[[Path], BuildReport], folder: Path) -> Path:
    """Returns a finished build of a module that does not use mod-export."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "c.toml").write_text(FEW_RUNS, encoding="utf-8")
    report = make(folder)
    assert report.verdict.status == "pass", report.verdict.reasons
    return folder / "build"


FOLDERS: dict[FolderName, Callable[[Path], Path]] = {
    "graphs": partial(build_folder, GRAPHS),
    "skipped": partial(build_folder, ONLY_ORT, spec=SKIPPED_SPEC),
    "nested": partial(build_folder, ONLY_ORT, spec=NESTED_SPEC),
    "compiled": partial(build_folder, COMPILED),
    "foreign": partial(foreign_folder, _foreign),
    "two outputs": partial(foreign_folder, _two_outputs),
    "compiled foreign": partial(foreign_folder, compiled_foreign),
}
"""Name of a sound folder -> function that builds it in a folder, from a checkpoint or from a user's module."""


def sign(root: Path) -> None:
    """Writes the current sizes and hashes of all files into the manifest."""
    path = root / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest.pop("checksum")
    entries = [manifest["files"], *(record["outputs"] for record in manifest["steps"].values())]
    for files in entries:
        for name in files:
            data = (root / name).read_bytes()
            files[name] = {**files[name], "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_text(json.dumps(with_checksum(manifest)), encoding="utf-8")


def portable_graph_of(root: Path, spec: ModelSpec, bucket: Bucket = SHAPE) -> bytes:
    """Returns the graph of another spec or bucket, which refers to the weights of the folder."""
    module = Checkpoint(spec=spec, weights=checkpoint_with(SPEC, 1, STD).weights).module()
    model = onnx_from_captured(captured_module(module, bucket, "other"), state_of(module), TOKEN_INPUTS, ["logits"])
    apply_rewrites(model, PORTABLE, "float32")
    weights = WeightsFile.open(root / "graphs" / "weights-float32.data")
    bind_weights(model, [weights], root / "graphs")
    return bytes(ir.to_proto(model).SerializeToString())
