"""Sessions that share weights give what other sessions give, and take no memory for the weights a second time."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from graph_folders import write_graph

from mod_export.build_folder.manifest import open_folder
from mod_export.config import BuildConfig
from mod_export.engines import ort_shared
from mod_export.engines.ort import OrtCpu
from mod_export.engines.ort_c import OrtC, library_path, ort_c
from mod_export.engines.ort_session import CPU, OrtRunner, session_from_onnx
from mod_export.engines.ort_shared import SharedRunner, shared_runner
from mod_export.errors import EngineError
from mod_export.runtime.deployment import load
from mod_export.types import Bucket, Engine
from mod_models.spec import ModelSpec, RoutingSpec

ROOM = 0.1
"""Of the weights: what another bucket may add."""


@pytest.fixture
def api() -> OrtC:
    found = ort_c()
    assert found is not None
    return found


@pytest.fixture
def engine(built: Path) -> Engine:
    return next(one for one in open_folder(built, verify=False).engines if one.model == "mod" and one.bucket.batch == 2)


@pytest.fixture
def runner(api: OrtC, built: Path, engine: Engine) -> SharedRunner:
    return shared_runner(api, built / engine.path, built / str(engine.weights), "shared", 1)


def feeds(bucket: Bucket, seed: int = 0) -> dict[str, np.ndarray]:
    ids_BS = np.random.default_rng(seed).integers(0, 256, (bucket.batch, bucket.seq))
    return {"input_ids": ids_BS, "lengths": np.arange(bucket.batch) + bucket.seq // 2}


def test_it_is_what_ort_cpu_runs(built: Path, engine: Engine, config: BuildConfig) -> None:
    with OrtCpu().load(built, engine, config, 1) as runner:
        assert isinstance(runner, SharedRunner)
        assert runner.providers == (CPU,)
        assert runner.threads == config.latency.threads


def test_outputs_are_those_of_a_session_of_its_own(runner: SharedRunner, built: Path, engine: Engine) -> None:
    session = session_from_onnx(built / engine.path, built / "graphs", [CPU], 1, {})
    with OrtRunner(session, "own", 1) as own:
        assert (runner.inputs, runner.outputs) == (own.inputs, own.outputs)
        for seed in range(3):
            found, expected = (one.run(feeds(engine.bucket, seed)) for one in (runner, own))
            assert {name: array.dtype for name, array in found.items()} == {
                name: array.dtype for name, array in expected.items()
            }
            for name in own.outputs:
                np.testing.assert_array_equal(found[name], expected[name])


def test_only_what_is_asked_for_is_given(runner: SharedRunner, engine: Engine) -> None:
    assert list(runner.run(feeds(engine.bucket), ["logits"])) == ["logits"]


def test_feeds_that_do_not_lie_in_a_row(runner: SharedRunner, engine: Engine) -> None:
    given = feeds(engine.bucket)
    apart = np.repeat(given["input_ids"], 2, axis=1)[:, ::2]
    assert not apart.flags.c_contiguous
    expected = runner.run(given)["logits"]
    np.testing.assert_array_equal(runner.run({**given, "input_ids": apart})["logits"], expected)


def test_what_is_returned_is_not_written_again(runner: SharedRunner, engine: Engine) -> None:
    first = runner.run(feeds(engine.bucket))["logits"]
    kept = first.copy()
    runner.run(feeds(engine.bucket, 1))
    np.testing.assert_array_equal(first, kept)


def test_wrong_feeds(runner: SharedRunner, engine: Engine) -> None:
    with pytest.raises(EngineError, match=r"shared: got inputs \['input_ids'\], the engine has"):
        runner.run({"input_ids": feeds(engine.bucket)["input_ids"]})
    with pytest.raises(EngineError, match="shared: no output nothing; the engine has logits"):
        runner.run(feeds(engine.bucket), ["nothing"])


def test_what_the_engine_refuses_while_it_runs(runner: SharedRunner, engine: Engine) -> None:
    beyond = {**feeds(engine.bucket), "input_ids": np.full((engine.bucket.batch, engine.bucket.seq), 10_000)}
    with pytest.raises(EngineError, match=r"shared: ONNX Runtime failed: .*indices element out of data bounds"):
        runner.run(beyond)
    # And goes on.
    assert np.isfinite(runner.run(feeds(engine.bucket))["logits"]).all()


def test_a_graph_that_is_none(api: OrtC, built: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    with pytest.raises(EngineError, match=r"bad\.onnx: ONNX Runtime refuses this graph: .*Protobuf parsing failed"):
        shared_runner(api, tmp_path / "bad.onnx", built / "graphs/weights-float32.data", "bad", 1)


def test_weights_that_are_none(api: OrtC, built: Path, engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "bad.data").write_bytes(b"no weights, but longer than a header's length")
    with pytest.raises(EngineError, match=r"bad\.data: not a weights file, or damaged"):
        shared_runner(api, built / engine.path, tmp_path / "bad.data", "bad", 1)


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


def test_threads_may_run_one_session(built: Path) -> None:
    with load(built) as deployment:
        requests = [np.random.default_rng(seed).integers(0, 256, (1, 40)) for seed in range(4)]
        expected = [deployment.run(one) for one in requests]
        wrong: list[int] = []

        def work(index: int) -> None:
            for _ in range(50):
                if not np.array_equal(deployment.run(requests[index]), expected[index]):
                    wrong.append(index)

        threads = [threading.Thread(target=work, args=[index]) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_the_library_is_that_of_the_installed_wheel(api: OrtC) -> None:
    import onnxruntime

    assert api.version == onnxruntime.__version__
    path = library_path()
    assert path is not None
    assert path.parent.parent.name == "onnxruntime"


def test_without_the_library_sessions_are_pythons(
    built: Path, engine: Engine, config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mod_export.engines.ort.ort_c", lambda: None)
    with OrtCpu().load(built, engine, config, 1) as runner:
        assert isinstance(runner, OrtRunner)


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
    """In a process of its own, because this one has freed memory to give."""
    spec = ModelSpec(
        vocab_size=256, d_model=512, n_layers=4, n_heads=8, n_kv_heads=4, d_head=64, d_ff=1408, max_positions=64,
        routing=RoutingSpec(capacity=0.25),
    )  # fmt: skip
    graphs = []
    for seq in (16, 32, 48, 64):
        job = write_graph(tmp_path, spec, Bucket(1, seq), OrtCpu.dialect, "float32")
        graphs.append(str(tmp_path / job.graph.path))
    weights = tmp_path / job.weights
    arguments = [sys.executable, "-c", MEMORY, str(weights), *graphs]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    taken = json.loads(done.stdout)
    assert np.diff(taken).max() < ROOM * weights.stat().st_size, taken
