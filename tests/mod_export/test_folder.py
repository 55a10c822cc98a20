"""A finished build folder, moved and without its checkpoint: measured again, and faults that parity must notice."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from click.testing import CliRunner

from mod_export.artifacts import Bucket
from mod_export.cli import cli
from mod_export.config import BuildConfig
from mod_export.engine import ENGINES
from mod_export.errors import BuildFolderError, TargetError
from mod_export.folder import bench_folder, runnable_engines, validate_folder
from mod_export.graph.capture import exported_from_module
from mod_export.graph.onnx_export import onnx_from_exported
from mod_export.graph.passes import PORTABLE, run_passes
from mod_export.graph.weights import WeightsFile, bind_weights, state_of
from mod_export.runtime import opened_folder
from mod_export.workspace import read_manifest
from mod_models.checkpoint import Checkpoint, load_checkpoint

ENGINE = "engines/ort-cpu/mod-b1s64-float32.onnx"
WEIGHTS = "graphs/weights-float32.data"


def rewrite_manifest(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the manifest and makes it look as if it had been written so."""
    manifest = read_manifest(root)
    change(manifest)
    checksum = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (root / "manifest.json").write_text(json.dumps({**manifest, "checksum": checksum}))


def plant(root: Path, model: ir.Model) -> None:
    """Puts a graph in the engine's place, hashes included: only its numbers can give it away."""
    ir.save(model, root / ENGINE)
    data = (root / ENGINE).read_bytes()
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def refresh(manifest: dict[str, Any]) -> None:
        manifest["files"][ENGINE] = entry
        manifest["steps"]["engine/ort-cpu/mod-b1s64-float32"]["outputs"][ENGINE] = entry

    rewrite_manifest(root, refresh)


# Faults. Each changes the graph of the routed model in one place.

Fault = Callable[[ir.Model], None]


def _producer(value: ir.Value | None) -> ir.Node:
    assert value is not None
    node = value.producer()
    assert isinstance(node, ir.Node)
    return node


def _selection(model: ir.Model, layer: int) -> ir.Node:
    """The TopK that chooses a layer's tokens; a second one sorts them."""
    (routed,) = [value for value in model.graph.outputs if value.name == f"routed_{layer}"]
    node = _producer(_producer(routed).inputs[0])
    assert node.op_type == "TopK"
    return node


def _users(model: ir.Model, name: str) -> list[ir.Node]:
    return [node for node in model.graph if any(value is not None and value.name == name for value in node.inputs)]


def _times(model: ir.Model, weight: str) -> ir.Node:
    """The matrix product with a weight, which is stored transposed."""
    (transposed,) = _users(model, weight)
    (product,) = transposed.outputs[0].consumers()
    assert product.op_type == "MatMul"
    return product


def scaled_weight(model: ir.Model) -> None:
    product = _times(model, "layers.2.mlp.down_proj.weight")
    factor = ir.Value(name="factor", const_value=ir.tensor(1.01, dtype=ir.DataType.FLOAT, name="factor"))
    model.graph.register_initializer(factor)
    scaled = ir.node("Mul", [product.inputs[0], factor])
    model.graph.insert_before(product, scaled)
    product.replace_input_with(0, scaled.outputs[0])


def dropped_gate(model: ir.Model) -> None:
    """The routed block's delta goes in as it is, not times the router's weight."""
    (weight,) = [node for node in _users(model, "routed_1") if node.op_type == "GatherElements" and _scores(node)]
    (column,) = weight.outputs[0].consumers()
    (gate,) = column.outputs[0].consumers()
    assert gate.op_type == "Mul"
    delta = gate.inputs[1]
    assert delta is not None
    gate.outputs[0].replace_all_uses_with(delta)


def _scores(node: ir.Node) -> bool:
    """Whether the router's scores are gathered, and not which tokens are real."""
    gathered = node.inputs[0]
    return gathered is not None and gathered.dtype == ir.DataType.FLOAT


def swapped_weights(model: ir.Model) -> None:
    """Two weights of one shape: nothing but numbers tells them apart."""
    _swap(model, "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight")


def swapped_routers(model: ir.Model) -> None:
    _swap(model, "layers.1.router.projection.weight", "layers.3.router.projection.weight")


def _swap(model: ir.Model, one: str, other: str) -> None:
    (of_one,), (of_other,) = _users(model, one), _users(model, other)
    first, second = of_one.inputs[0], of_other.inputs[0]
    of_one.replace_input_with(0, second)
    of_other.replace_input_with(0, first)


def smallest_scores(model: ir.Model) -> None:
    """Layer 1 takes the tokens that it should leave out."""
    _selection(model, 1).attributes["largest"] = ir.AttrInt64("largest", 0)


def padding_selected(model: ir.Model) -> None:
    """Padding takes part in the choice of layer 3."""
    selection = _selection(model, 3)
    masked = _producer(selection.inputs[0])
    assert masked.op_type == "Where"
    selection.replace_input_with(0, masked.inputs[1])


FAULTS: dict[Fault, str] = {
    scaled_weight: r"logits: max abs error \S+ given the same routing, allowed",
    dropped_gate: r"logits: max abs error \S+ given the same routing, allowed",
    swapped_weights: r"logits: max abs error \S+ given the same routing, allowed",
    swapped_routers: r"layer 1 routing: \d+ tokens differ by more than a near-tie",
    smallest_scores: r"layer 1 routing: \d+ tokens differ by more than a near-tie",
    padding_selected: r"padded: layer 3 routing: ",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_parity_notices(fault: Fault, built_copy: Path) -> None:
    model = ir.load(built_copy / ENGINE)
    fault(model)
    plant(built_copy, model)
    found = CliRunner().invoke(cli, ["validate", str(built_copy)])
    assert found.exit_code == 4, found.output
    assert re.search(rf"  - ort-cpu b1s64 float32 mod: parity: .*{FAULTS[fault]}", found.stdout), found.stdout
    # What was not touched still passes.
    rows, _ = validate_folder(built_copy, None, ())
    assert [(row.bucket, row.model) for row in rows if not row.passed] == [("b1s64", "mod")]


@pytest.mark.slow
def test_parity_notices_another_k(built_copy: Path, checkpoint: Path) -> None:
    found = load_checkpoint(checkpoint)
    assert found.spec.routing is not None
    generous = Checkpoint(
        spec=replace(found.spec, routing=replace(found.spec.routing, capacity=0.25)), weights=found.weights
    )
    module = generous.module()
    model = onnx_from_exported(exported_from_module(module, Bucket(1, 64), "mod"), state_of(module), [1, 3])
    run_passes(model, PORTABLE, "float32")
    bind_weights(model, {ir.DataType.FLOAT: WeightsFile.open(built_copy / WEIGHTS)}, built_copy / "graphs")
    plant(built_copy, model)
    _, verdict = validate_folder(built_copy, None, ())
    assert verdict.status == "fail"
    reason = r"layer 1 routing: the engine gives routed positions of shape \[1, 16\], expected \[1, 8\]"
    assert any(re.search(reason, said) for said in verdict.reasons)
    assert CliRunner().invoke(cli, ["validate", str(built_copy)]).exit_code == 4


@pytest.mark.parametrize("again", [validate_folder, bench_folder])
@pytest.mark.parametrize("name", [ENGINE, WEIGHTS, "graphs/dense-b2s32.onnx", "report.html"])
def test_a_changed_byte(name: str, again: Callable[..., object], built_copy: Path) -> None:
    data = bytearray((built_copy / name).read_bytes())
    data[len(data) // 3] ^= 1
    (built_copy / name).write_bytes(data)
    with pytest.raises(
        BuildFolderError, match=rf"moved: {name} has been changed since it was built \(SHA-256 differs\)"
    ):
        again(built_copy, None, ())


def test_validate_a_moved_folder(built_copy: Path) -> None:
    rows, verdict = validate_folder(built_copy, None, ["ort-cpu"])
    assert verdict.status == "pass"
    assert [(row.target, row.bucket, row.model) for row in rows] == [
        ("ort-cpu", bucket, kind) for bucket in ("b1s64", "b2s32") for kind in ("mod", "dense")
    ]
    # The reference is built from the folder's own weights: what was found at the time is found again.
    told = json.loads((built_copy / "report.json").read_text())["parity"]
    for row, then in zip(rows, told, strict=True):
        assert row.routing["agreed"] == then["routing"]["agreed"]
        assert row.error["max_abs"] <= then["gate"]["max_abs"]


def test_bench_a_moved_folder(built_copy: Path) -> None:
    config = BuildConfig.model_validate(read_manifest(built_copy)["config"])
    latency, speedup, verdict = bench_folder(built_copy, None, ())
    assert verdict.status == "pass"
    assert [(row.bucket, row.model) for row in latency] == [
        (bucket, kind) for bucket in ("b1s64", "b2s32") for kind in ("mod", "dense")
    ]
    assert all(len(row.samples_ms) >= config.latency.samples for row in latency)
    assert [row.bucket for row in speedup] == ["b1s64", "b2s32"]


def test_a_config_of_ones_own(built_copy: Path) -> None:
    config = BuildConfig.model_validate(read_manifest(built_copy)["config"])
    latency = config.latency.model_copy(update={"samples": 9})
    rows, _, _ = bench_folder(built_copy, config.model_copy(update={"latency": latency}), ())
    # Whole blocks of rounds are taken.
    assert {len(row.samples_ms) for row in rows} == {16}


def test_neither_needs_the_modules_that_are_not_theirs(built_copy: Path) -> None:
    code = """
    import sys
    from pathlib import Path
    for name in ("onnx", "onnx_ir", "onnxscript", *sys.argv[3:]):
        sys.modules[name] = None
    from mod_export import folder
    print(getattr(folder, sys.argv[1])(Path(sys.argv[2]), None, ())[-1].status)
    """
    script = "\n".join(line.strip() if not line.startswith("        ") else line[4:] for line in code.splitlines())
    for name, blocked in (("validate_folder", []), ("bench_folder", ["torch", "safetensors", "mod_models"])):
        found = subprocess.run(
            [sys.executable, "-c", script, name, str(built_copy), *blocked], capture_output=True, text=True, check=False
        )
        assert found.stdout == "pass\n", found.stderr


@pytest.mark.parametrize("again", [validate_folder, bench_folder])
def test_a_target_that_is_not_in_the_folder(again: Callable[..., object], built: Path) -> None:
    with pytest.raises(TargetError, match=r"built: holds no engine for inductor, abacus; built for ort-cpu$"):
        again(built, None, ["inductor", "ort-cpu", "abacus"])


def test_a_target_that_cannot_run_here(built_copy: Path) -> None:
    found = ENGINES["ort-cuda"].availability()
    if found.runs:
        pytest.skip("CUDA runs here")
    everywhere = opened_folder(built_copy)
    everywhere["engines"] = [*everywhere["engines"], *({**e, "target": "ort-cuda"} for e in everywhere["engines"])]
    reason = rf"moved: cannot run here: ort-cuda: {re.escape(found.reason)}$"
    with pytest.raises(TargetError, match=reason):
        runnable_engines(built_copy, everywhere, ["ort-cuda"])
    # Not asked for, it is left out.
    assert {engine.target for engine in runnable_engines(built_copy, everywhere, [])} == {"ort-cpu"}
    elsewhere = {**everywhere, "engines": everywhere["engines"][4:]}
    with pytest.raises(TargetError, match=reason):
        runnable_engines(built_copy, elsewhere, [])


@pytest.mark.parametrize("again", [validate_folder, bench_folder])
def test_an_unfinished_build(again: Callable[..., object], built_copy: Path) -> None:
    rewrite_manifest(built_copy, lambda manifest: manifest.pop("files"))
    with pytest.raises(
        BuildFolderError, match=r"moved: the build was not finished; run the same build again, it resumes"
    ):
        again(built_copy, None, ())


def test_an_architecture_that_is_not_installed(built_copy: Path) -> None:
    def rename(manifest: dict[str, Any]) -> None:
        manifest["models"]["mod"]["architecture"] = "mamba"

    rewrite_manifest(built_copy, rename)
    found = CliRunner().invoke(cli, ["validate", str(built_copy)])
    assert found.exit_code == 2
    assert found.stderr == "error: architecture 'mamba' is not installed here; known: mod_transformer\n"
    assert CliRunner().invoke(cli, ["bench", str(built_copy)]).exit_code == 0
