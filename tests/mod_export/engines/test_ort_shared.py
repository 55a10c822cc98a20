"""Sessions that share weights return the same as other sessions, and hold the weights in memory only once."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from graph_folders import write_products

from mod_export.config import BuildConfig
from mod_export.engines import ort_shared
from mod_export.engines.ort import OrtCpu
from mod_export.engines.ort_c import OrtC, ort_c
from mod_export.engines.ort_session import CPU, OrtRunner, session_from_onnx
from mod_export.engines.ort_shared import SharedRunner, shared_runner
from mod_export.errors import EngineError
from mod_export.folder.manifest import open_folder
from mod_export.graph.weights import write_weights
from mod_export.types import Bucket, Engine

ROOM = 0.1
"""Memory that another bucket may add, as a share of the weights."""


@pytest.fixture
def api() -> OrtC:
    library = ort_c()
    assert library is not None
    return library


@pytest.fixture
def engine(built: Path) -> Engine:
    return next(one for one in open_folder(built, verify=False).engines if one.model == "mod" and one.bucket.batch == 2)


@pytest.fixture
def runner(api: OrtC, built: Path, engine: Engine) -> SharedRunner:
    return shared_runner(api, built / engine.path, built / str(engine.weights), "shared", 1)


def feeds(bucket: Bucket, seed: int = 0) -> dict[str, np.ndarray]:
    ids_BS = np.random.default_rng(seed).integers(0, 256, (bucket.batch, bucket.seq))
    return {"input_ids": ids_BS, "lengths": np.arange(bucket.batch) + bucket.seq // 2}


def test_it_is_what_ort_cpu_runs_where_the_library_is(
    built: Path, engine: Engine, config: BuildConfig, api: OrtC, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    assert api.version == onnxruntime.__version__
    for library, kind in ((api, SharedRunner), (None, OrtRunner)):
        monkeypatch.setattr("mod_export.engines.ort.ort_c", lambda library=library: library)
        with OrtCpu().load(built, engine, config, 1) as runner:
            assert isinstance(runner, kind)
            assert (runner.providers, runner.threads) == ((CPU,), 1)


def test_outputs_are_those_of_a_session_of_its_own(runner: SharedRunner, built: Path, engine: Engine) -> None:
    session = session_from_onnx(built / engine.path, built / "graphs", [CPU], 1, {})
    with OrtRunner(session, "own", 1) as separate:
        assert (runner.inputs, runner.outputs) == (separate.inputs, separate.outputs)
        for seed in range(3):
            outputs, expected = (each.run(feeds(engine.bucket, seed)) for each in (runner, separate))
            assert {name: array.dtype for name, array in outputs.items()} == {
                name: array.dtype for name, array in expected.items()
            }
            for name in separate.outputs:
                np.testing.assert_array_equal(outputs[name], expected[name])


def test_a_graph_or_weights_that_are_none(api: OrtC, built: Path, engine: Engine, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(b"nothing, but longer than a header's length")
    with pytest.raises(EngineError, match=r"bad: ONNX Runtime refuses this graph: .*Protobuf parsing failed"):
        shared_runner(api, bad, built / str(engine.weights), "bad", 1)
    with pytest.raises(EngineError, match="bad: not a weights file, or damaged"):
        shared_runner(api, built / engine.path, bad, "bad", 1)


@pytest.mark.slow
def test_weights_are_released_with_the_last_session(api: OrtC, built: Path, engine: Engine) -> None:
    gc.collect()
    before = len(ort_shared._weights_in_use)
    first, second = (
        shared_runner(api, built / engine.path, built / str(engine.weights), "shared", 1) for _ in range(2)
    )
    assert len(ort_shared._weights_in_use) == before + 1
    with first:
        pass
    expected = second.run(feeds(engine.bucket))["logits"]
    assert np.isfinite(expected).all()
    with second:
        pass
    del first, second
    gc.collect()
    assert len(ort_shared._weights_in_use) == before


MEMORY = """
import json, sys
from pathlib import Path
import psutil
from mod_export.engines.ort_c import ort_c
from mod_export.engines.ort_shared import shared_runner

opened, taken = [], []
for path in sys.argv[2:]:
    opened.append(shared_runner(ort_c(), Path(path), Path(sys.argv[1]), path, 1))
    taken.append(psutil.Process().memory_info().rss)
print(json.dumps(taken))
"""


def test_further_buckets_add_little_memory(tmp_path: Path) -> None:
    """Runs in its own process, because this one could reuse memory that it has freed."""
    names = [f"w{i}" for i in range(6)]
    write_weights(tmp_path / "w.data", {name: torch.eye(1024) for name in names}, "float32")
    graphs = []
    for seq in (16, 32, 48, 64):
        graphs.append(tmp_path / f"g{seq}.onnx")
        write_products(graphs[-1], tmp_path / "w.data", names, (seq, 1024))
    arguments = [sys.executable, "-c", MEMORY, str(tmp_path / "w.data"), *map(str, graphs)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    taken = json.loads(done.stdout)
    assert np.diff(taken).max() < ROOM * (tmp_path / "w.data").stat().st_size, taken
