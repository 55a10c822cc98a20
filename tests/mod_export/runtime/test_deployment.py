"""A server's view: a moved build folder, numpy, one engine library, and nothing that built it."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from build_folders import file_entry, rewrite_manifest
from graph_folders import job_of

import mod_export
from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.engines import openvino as openvino_target
from mod_export.engines.ort_shared import SharedRunner
from mod_export.environment import cpu_features, package_version, usable_cores
from mod_export.errors import BuildFolderError, TargetError, UsageError
from mod_export.folder.manifest import open_folder
from mod_export.model.model import Model
from mod_export.runtime.deployment import Deployment, runnable_engines
from mod_export.types import Bucket, Engine, Variant, graph_of

TOLERANCE = 1e-5
"""Absolute tolerance for float32 logits of magnitude one on another library's kernels."""

SERVER = """
import sys
for name in ("torch", "onnx", "onnx_ir", "onnxscript", "safetensors", "mod_models", "polygraphy"):
    sys.modules[name] = None
import numpy as np
import mod_export
requests, logits = np.load(sys.argv[2]), {}
for model in ("mod", "dense"):
    with mod_export.load(sys.argv[1], model=model) as deployment:
        print(deployment.target, deployment.dtype, *(bucket.name for bucket in deployment.buckets))
        for name in (name for name in requests if name.startswith("ids")):
            found = deployment.run(requests[name], requests[name.replace("ids", "lengths")])
            logits[name.replace("ids", model)] = found
np.savez(sys.argv[3], **logits)
"""
REQUESTS = [
    ((1, 64), [64], Bucket(1, 64)),
    ((1, 20), [20], Bucket(1, 64)),
    ((1, 33), [9], Bucket(1, 64)),
    ((2, 32), [32, 5], Bucket(2, 32)),
    ((2, 7), [7, 1], Bucket(2, 32)),
]
"""Shape, lengths, and the bucket that the request fits."""


def eager(model: Model, kind: Any, bucket: Bucket, ids_BS: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    """Logits of the eager model at a bucket, cut to the rows and columns of the request."""
    B, S = ids_BS.shape
    padded_BS = torch.zeros(bucket.batch, bucket.seq, dtype=torch.int64)
    padded_BS[:B, :S] = torch.from_numpy(ids_BS)
    padded_B = torch.ones(bucket.batch, dtype=torch.int64)
    padded_B[:B] = torch.from_numpy(lengths_B)
    with torch.no_grad():
        logits_BSV: torch.Tensor = {"mod": model, "dense": model.dense()}[kind].module()(padded_BS, padded_B)[0]
    found: np.ndarray = logits_BSV[:B, :S].numpy()
    return found


def real(logits_BSV: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    found: np.ndarray = logits_BSV[np.arange(logits_BSV.shape[1]) < lengths_B[:, None]]
    return found


def text(batch: int, seq: int) -> np.ndarray:
    # The first three bytes are quotes, which would tie in their scores, so the data starts at the first word of this
    # file.
    data = np.frombuffer(Path(__file__).read_bytes(), dtype=np.uint8)[3 : 3 + batch * seq]
    return data.astype(np.int64).reshape(batch, seq)


def test_a_server_gives_the_eager_models_logits(built_copy: Path, tmp_path: Path, model: Model) -> None:
    requests: dict[str, np.ndarray] = {}
    for number, (shape, lengths, _) in enumerate(REQUESTS):
        requests |= {f"ids{number}": text(*shape), f"lengths{number}": np.array(lengths)}
    np.savez(tmp_path / "requests.npz", **requests)
    arguments = [str(built_copy), str(tmp_path / "requests.npz"), str(tmp_path / "logits.npz")]
    found = subprocess.run([sys.executable, "-c", SERVER, *arguments], capture_output=True, text=True, check=False)
    assert found.stdout == 2 * "ort-cpu float32 b1s64 b2s32\n", found.stderr
    assert found.stderr == ""
    logits = np.load(tmp_path / "logits.npz")
    assert len(logits) == 2 * len(REQUESTS)
    for number, (shape, lengths, bucket) in enumerate(REQUESTS):
        lengths_B = np.array(lengths)
        for kind in ("mod", "dense"):
            logits_BSV = logits[f"{kind}{number}"]
            assert logits_BSV.shape == (*shape, 256)
            assert logits_BSV.dtype == np.float32
            expected_BSV = eager(model, kind, bucket, text(*shape), lengths_B)
            pair = real(logits_BSV, lengths_B), real(expected_BSV, lengths_B)
            np.testing.assert_allclose(*pair, rtol=0, atol=TOLERANCE, err_msg=f"{kind} {shape} {lengths}")


@pytest.fixture(scope="module")
def deployment(built: Path) -> Iterator[Deployment]:
    with mod_export.load(built) as found:
        yield found


def test_padding_changes_nothing(deployment: Deployment) -> None:
    lengths_B = np.array([20])
    ids, padded = text(1, 40), text(1, 40)
    padded[0, 20:] = 7
    np.testing.assert_array_equal(
        real(deployment.run(ids, lengths_B), lengths_B), real(deployment.run(padded, lengths_B), lengths_B)
    )
    np.testing.assert_array_equal(deployment.run(ids[:, :20]), deployment.run(ids, lengths_B)[:, :20])


def test_ids_of_any_whole_type(deployment: Deployment) -> None:
    expected = deployment.run(text(1, 8))
    for dtype in (np.uint8, np.int32, np.uint64):
        np.testing.assert_array_equal(deployment.run(text(1, 8).astype(dtype)), expected)
    np.testing.assert_array_equal(deployment.run(text(1, 8).tolist()), expected)


def test_the_smallest_bucket_that_holds_a_request(deployment: Deployment) -> None:
    requests = [(1, 1), (1, 32), (1, 64), (2, 1), (2, 32)]
    found = [deployment.bucket_for(batch, seq).name for batch, seq in requests]
    assert found == ["b1s64", "b1s64", "b1s64", "b2s32", "b2s32"]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        *(
            (
                np.zeros(shape, int),
                f"no bucket holds a batch of {shape[0]} x {shape[1]} tokens; built: b1s64, b2s32. Bu",
            )
            for shape in ((1, 65), (2, 33), (3, 1))
        ),
        (np.zeros(4, dtype=np.int64), "expected token ids as whole numbers (batch, sequence), got int64 (4,)"),
        (np.zeros((1, 4)), "expected token ids as whole numbers (batch, sequence), got float64 (1, 4)"),
        (np.zeros((1, 0), dtype=np.int64), "expected token ids as whole numbers (batch, sequence), got int64 (1, 0)"),
        (np.zeros((0, 4), dtype=np.int64), "expected token ids as whole numbers (batch, sequence), got int64 (0, 4)"),
        ([["a", "b"]], "expected token ids as whole numbers (batch, sequence), got <U1 (1, 2)"),
        ([[0, 256]], "expected token ids from 0 to 255, got 0 to 256"),
        ([[-1, 3]], "expected token ids from 0 to 255, got -1 to 3"),
        (np.array([[2**64 - 1]], dtype=np.uint64), f"expected token ids from 0 to 255, got {2**64 - 1} to {2**64 - 1}"),
    ],
)
def test_what_cannot_be_run(deployment: Deployment, ids: Any, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        deployment.run(ids)


@pytest.mark.parametrize("lengths", [[4], [4, 4, 4], [0, 4], [4, 5], [[4, 4]], [1.5, 4.0], ["a", "b"], 4])
def test_what_are_no_lengths(deployment: Deployment, lengths: Any) -> None:
    message = f"expected 2 lengths from 1 to 4, got {np.asarray(lengths).tolist()}"
    with pytest.raises(UsageError, match=re.escape(message)):
        deployment.run(text(2, 4), lengths)


def sessions() -> int:
    """Number of open ONNX Runtime sessions in this process."""
    return sum(type(item) is SharedRunner and item._session is not None for item in gc.get_objects())


def test_engines_are_opened_when_needed_and_closed(built: Path) -> None:
    gc.collect()  # Other tests may have left sessions that nothing refers to.
    before = sessions()
    with mod_export.load(str(built)) as deployment:
        assert sessions() == before
        first = deployment.run(text(1, 8))
        deployment.run(text(1, 9))
        deployment.run(text(2, 8))
        assert sessions() == before + 2
    assert sessions() == before
    np.testing.assert_array_equal(deployment.run(text(1, 8)), first)
    # An error inside the block closes it too.
    with pytest.raises(UsageError, match="no bucket holds"), deployment:
        deployment.run(text(1, 65))
    assert sessions() == before


def test_by_name(built: Path, deployment: Deployment) -> None:
    with mod_export.load(built, "ort-cpu", "float32", "dense") as dense:
        assert (dense.target, dense.dtype) == ("ort-cpu", "float32")
        assert np.abs(dense.run(text(1, 64)) - deployment.run(text(1, 64))).max() > TOLERANCE


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"target": "inductor"}, TargetError, "built: holds no engine for inductor; built for ort-cpu"),
        ({"dtype": "float16"}, TargetError, "built: holds no float16 engine for ort-cpu"),
        ({"model": "moe"}, UsageError, "built: holds no engine of model 'moe'; expected 'mod' or 'dense'"),
    ],
)
def test_what_the_folder_does_not_hold(
    built: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        mod_export.load(built, **arguments)


def test_damaged_files(built_copy: Path) -> None:
    """Sizes are checked when loading, contents before a bucket first runs; the other bucket is still served."""
    path = built_copy / "engines/ort-cpu/mod-b1s64-float32.onnx"
    path.write_bytes(path.read_bytes()[::-1])
    with mod_export.load(built_copy) as deployment:
        for _ in range(2):
            with pytest.raises(BuildFolderError, match=r"mod-b1s64-float32\.onnx has been changed since it was built"):
                deployment.run(text(1, 8))
        assert deployment.run(text(2, 8)).shape == (2, 8, 256)
    with path.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(BuildFolderError, match=r"mod-b1s64-float32\.onnx has 1000 bytes, \d+ were written"):
        mod_export.load(built_copy)


def test_graphs_are_read_back_from_the_manifest(built: Path) -> None:
    graphs = {graph.path: graph for graph in open_folder(built, verify=False).graphs}
    assert len(graphs) == 2 * 2 * 2  # Two models, two buckets; portable and of the target.
    routed = graphs["graphs/mod-b1s64.onnx"]
    # JSON has no numbers as keys.
    assert (routed.k_by_layer, graphs["graphs/dense-b2s32.onnx"].k_by_layer) == ({1: 8, 3: 8}, {})
    assert (routed.bucket, routed.dtype, routed.target, routed.model) == (Bucket(1, 64), "float32", None, "mod")


def test_engines_that_run_here(built: Path) -> None:
    cpu_engines = list(open_folder(built, verify=False).engines)
    assert runnable_engines(built, cpu_engines, []) == runnable_engines(built, cpu_engines, ["ort-cpu"]) == cpu_engines
    with pytest.raises(TargetError, match=r"built: holds no engine for inductor, abacus; built for ort-cpu$"):
        runnable_engines(built, cpu_engines, ["inductor", "ort-cpu", "abacus"])
    found = ENGINES["ort-cuda"].availability()
    if not found.runs:
        cuda_engines = [replace(engine, target="ort-cuda") for engine in cpu_engines]
        # A target that cannot run is left out unless it is asked for.
        assert {engine.target for engine in runnable_engines(built, cpu_engines + cuda_engines, [])} == {"ort-cpu"}
        for engines, targets in ((cpu_engines + cuda_engines, ["ort-cuda"]), (cuda_engines, [])):
            with pytest.raises(TargetError, match=rf"built: no engine runs here: ort-cuda: {re.escape(found.reason)}$"):
                runnable_engines(built, engines, targets)


def test_every_physical_core_by_default(built: Path, deployment: Deployment) -> None:
    with mod_export.load(built, threads=3) as three:
        assert (deployment.threads, three.threads) == (usable_cores(), 3)
        np.testing.assert_allclose(deployment.run(text(1, 64)), three.run(text(1, 64)), atol=TOLERANCE)
    with pytest.raises(UsageError, match=r"^threads: expected 1 or more, or 0 for the library's own choice, got -1$"):
        mod_export.load(built, threads=-1)


@pytest.fixture
def both(built_copy: Path, config: BuildConfig) -> Path:
    """A folder with engines of two targets; the second has only the MoD model's."""
    manifest = open_folder(built_copy)
    (built_copy / "engines/openvino").mkdir()
    added = []
    for engine in manifest.engines:
        if engine.model == "mod":
            path = f"engines/openvino/{engine.stem}.blob"
            graph = graph_of(engine, [graph for graph in manifest.graphs if graph.target is None])
            assert graph is not None
            ENGINES["openvino"].build(job_of(built_copy, graph), Variant(dtype="float32"), built_copy / path, config)
            added.append(asdict(replace(engine, target="openvino", path=path)))

    def add(found: dict[str, Any]) -> None:
        found["engines"] += added
        found["files"] |= {engine["path"]: file_entry(built_copy / engine["path"]) for engine in added}

    rewrite_manifest(built_copy, add)
    return built_copy


def timed(folder: Path, **ms: float) -> None:
    """Writes latencies of the MoD model's engines into a manifest."""
    rows = [
        {"model": "mod", "role": "forward", "target": target.replace("_", "-"), "dtype": "float32", "ms": milliseconds}
        for target, milliseconds in ms.items()
    ]
    rewrite_manifest(folder, lambda found: found.update(measured=rows))


def test_the_fastest_engines_are_served_where_none_are_named(both: Path) -> None:
    def served(**arguments: Any) -> str:
        with mod_export.load(both, **arguments) as deployment:
            return deployment.target

    timed(both)
    assert served() == "ort-cpu"
    timed(both, ort_cpu=2.0, openvino=1.0)
    assert (served(), served(dtype="float32"), served(target="ort-cpu")) == ("openvino", "openvino", "ort-cpu")
    with mod_export.load(both) as fast, mod_export.load(both, "ort-cpu") as slow:
        np.testing.assert_allclose(fast.run(text(1, 64)), slow.run(text(1, 64)), atol=TOLERANCE)
    assert served(model="dense") == "ort-cpu"
    timed(both, ort_cpu=1.0, openvino=2.0)
    assert served() == "ort-cpu"


def test_engines_made_for_another_machine_are_passed_over(written_copy: Path) -> None:
    """They are chosen only by name, and then their first run says why they do not run here."""
    path = "engines/inductor/mod-b1s16-float32.pt2"
    (written_copy / "engines/inductor").mkdir()
    with zipfile.ZipFile(written_copy / path, "w") as package:
        package.writestr("mod/data/aotinductor/model/mod_metadata.json", json.dumps({"machine": "Plan 9 mips"}))

    def add(found: dict[str, Any]) -> None:
        made = next(engine for engine in found["engines"] if engine["path"].endswith("mod-b1s16-float32.onnx"))
        found["engines"].append({**made, "target": "inductor", "path": path})
        found["files"][path] = file_entry(written_copy / path)

    rewrite_manifest(written_copy, add)
    timed(written_copy, ort_cpu=2.0, inductor=1.0)
    with mod_export.load(written_copy) as deployment:
        assert deployment.target == "ort-cpu"
        assert deployment.run(text(1, 8)).shape == (1, 8, 256)
    reason = r"mod-b1s16-float32\.pt2: compiled on Plan 9 mips, and this is .*; build again here"
    with mod_export.load(written_copy, "inductor") as deployment, pytest.raises(TargetError, match=reason):
        deployment.run(text(1, 8))

    def keep(found: dict[str, Any]) -> None:
        found["engines"] = [engine for engine in found["engines"] if engine["target"] == "inductor"]
        found["files"] = {name: entry for name, entry in found["files"].items() if "engines/ort-cpu/" not in name}

    rewrite_manifest(written_copy, keep)
    with pytest.raises(TargetError, match=f"no engine runs here: .*{reason}$"):
        mod_export.load(written_copy)
    rewrite_manifest(written_copy, lambda found: found["files"][path].update(sha256="0" * 64))
    with pytest.raises(BuildFolderError, match=r"float32\.pt2 has been changed"):  # Is not even loaded.
        mod_export.load(written_copy)


def test_a_file_says_on_which_machine_it_was_made(tmp_path: Path) -> None:
    """Files of OpenVINO name its release, the processor and its instruction sets."""
    engine = Engine(target="openvino", model="mod", bucket=Bucket(1, 16), dtype="float32", path="e.blob", weights="w")
    core = openvino_target._core()
    here = {"openvino": package_version("openvino"), "cpu": core.get_property("CPU", "FULL_DEVICE_NAME")}
    here["features"] = sorted(cpu_features())
    changes: list[dict[str, Any]] = [{}, {"openvino": "2020.1"}, {"cpu": "another"}, {"features": ["another"]}]
    found = []
    for change in changes:
        (tmp_path / engine.path).write_bytes(json.dumps({**here, **change}).encode() + b"\nblob")
        found.append(ENGINES["openvino"].made_here(tmp_path, engine))
    assert found == [True, False, False, False]
    (tmp_path / engine.path).write_bytes(b"damaged")
    assert ENGINES["openvino"].made_here(tmp_path, engine)  # Its first run says what is wrong with it.


def test_engines_that_missed_their_gates_are_never_the_fastest(both: Path) -> None:
    timed(both, ort_cpu=2.0, openvino=1.0)
    path = "engines/openvino/mod-b1s64-float32.blob"
    rewrite_manifest(both, lambda found: found["refused"].update({path: ["wrong"]}))
    with mod_export.load(both) as deployment:
        assert deployment.target == "ort-cpu"
    with pytest.raises(TargetError, match=r"the float32 engines for openvino missed their gates .*\(wrong\)"):
        mod_export.load(both, "openvino")
