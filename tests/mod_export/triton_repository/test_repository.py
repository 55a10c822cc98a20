"""Output of `mod-export triton`: files and configurations; the result can be moved and opened."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import FEW_SAMPLES
from foreign_models import Masked, made, masked_inputs
from google.protobuf import text_format
from tokenizer_folders import write_folder
from tritonclient.grpc import model_config_pb2

import mod_export
from mod_export.folder.files import entry_of
from mod_export.folder.manifest import read_manifest
from mod_export.folder.workspace import amend
from mod_export.triton.repository import MARKER

LIMITS = ("--max-queue", 5, "--instances", 2, "--threads", 1)


def config_of(repository: Path, model: str) -> Any:
    """Reads config.pbtxt as Triton does."""
    text = (repository / model / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def ports(listed: Any) -> dict[str, tuple[str, list[int], bool]]:
    """Data type, dims, and whether it is optional, by name."""
    names = model_config_pb2.DataType.Name
    return {port.name: (names(port.data_type), list(port.dims), getattr(port, "optional", False)) for port in listed}


def test_a_folder_that_writes_text_becomes_two_models(written: Path, repository: Path, write: Any) -> None:
    found = write(written, "-o", repository, "--name", "demo", *LIMITS)
    assert (found.exit_code, found.stderr) == (0, "")
    assert found.stdout.splitlines() == [
        "demo  python  Runs whole rows with ort-cpu in float32: b1s16.",
        "demo-text  python  Writes text with ort-cpu in float32, several texts at once.",
    ]
    engines = {"demo": ["mod-b1s16"], "demo-text": ["mod-prefill-b1s8", "mod-prefill-b1s16", "mod-decode-b1s48",
               "mod-decode-b3s48"]}  # fmt: skip
    for model, names in engines.items():
        engine_files = {f"1/build/engines/ort-cpu/{name}-float32.onnx" for name in names}
        beside = {"config.pbtxt", "1/model.py", "1/build/manifest.json", "1/build/graphs/weights-float32.data"}
        assert files_of(repository / model) == engine_files | beside
    assert {path.name for path in repository.iterdir()} == {"demo", "demo-text", MARKER}
    weights = repository / "demo" / "1" / "build" / "graphs" / "weights-float32.data"
    assert weights.samefile(written / "graphs" / "weights-float32.data")
    assert not any(path.is_symlink() for path in repository.rglob("*"))


def test_the_configuration_of_a_model_that_runs_a_folder(written: Path, repository: Path, write: Any) -> None:
    assert write(written, "-o", repository, "--name", "demo", *LIMITS).exit_code == 0
    config = config_of(repository, "demo")
    assert (config.name, config.backend, config.max_batch_size) == ("demo", "python", 0)
    assert ports(config.input) == {
        "input_ids": ("TYPE_INT64", [-1, -1], False),
        "lengths": ("TYPE_INT64", [-1], True),
    }
    assert ports(config.output) == {"logits": ("TYPE_FP32", [-1, -1, 256], False)}
    (group,) = config.instance_group
    assert (group.count, group.kind) == (2, model_config_pb2.ModelInstanceGroup.KIND_CPU)
    queue = config.dynamic_batching.default_queue_policy
    assert (queue.max_queue_size, queue.default_timeout_microseconds) == (5, 30_000_000)
    assert config.version_policy.latest.num_versions == 1
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    assert parameters == {"target": "ort-cpu", "dtype": "float32", "max_queue": "5", "threads": "1"}
    (warmup,) = config.model_warmup
    assert (warmup.name, warmup.batch_size, list(warmup.inputs)) == ("b1s16", 1, ["input_ids"])
    assert list(warmup.inputs["input_ids"].dims) == [1, 16]
    assert not config.model_transaction_policy.decoupled


def test_the_configuration_of_a_model_that_writes_text(written: Path, repository: Path, write: Any) -> None:
    assert write(written, "-o", repository, "--name", "demo").exit_code == 0
    config = config_of(repository, "demo-text")
    assert config.model_transaction_policy.decoupled
    integer, real = ("TYPE_INT64", [1], True), ("TYPE_FP64", [1], True)
    assert ports(config.input) == {
        "text": ("TYPE_STRING", [1], True), "input_ids": ("TYPE_INT64", [-1], True), "max_tokens": integer,
        "temperature": real, "top_p": real, "top_k": integer, "seed": integer, "stop": ("TYPE_STRING", [-1], True),
    }  # fmt: skip
    assert list(ports(config.output)) == ["text", "token", "finish_reason"]
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    assert parameters == {"target": "ort-cpu", "dtype": "float32", "max_queue": "64"}
    # There are three rows, and the queue of the scheduler.
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 67


def test_a_repository_can_be_moved(written: Path, repository: Path, tmp_path: Path, write: Any) -> None:
    assert write(written, "-o", repository, "--name", "demo").exit_code == 0
    moved = Path(shutil.copytree(repository, tmp_path / "elsewhere"))
    shutil.rmtree(repository)
    ids = np.arange(11)[None]
    with mod_export.load(written) as deployment, mod_export.load(moved / "demo" / "1" / "build") as moved_deployment:
        np.testing.assert_array_equal(moved_deployment.run(ids), deployment.run(ids))
    with mod_export.load_generator(moved / "demo-text" / "1" / "build") as generator:
        (completion,) = generator.generate("ab", max_new_tokens=4)
    assert len(completion.ids) == 4


def test_portable_graphs_stand_beside_their_weights(built: Path, repository: Path, write: Any) -> None:
    import onnxruntime as ort

    found = write(built, "-o", repository, "--forward", "onnxruntime", "--name", "demo", *LIMITS)
    assert found.exit_code == 0
    assert [line.split()[:2] for line in found.stdout.splitlines()] == [
        ["demo", "python"], ["demo-b1s64", "onnxruntime"], ["demo-b2s32", "onnxruntime"],
    ]  # fmt: skip
    assert found.stderr.startswith("note: no demo-text: ")
    with mod_export.load(built) as deployment:
        for bucket in deployment.buckets:
            model = repository / f"demo-{bucket.name}"
            expected = {"config.pbtxt", "1/model.onnx", "1/weights-float32.data", "warmup/lengths"}
            assert files_of(model) == expected
            # Triton opens it by its path, without an option that says where weights are.
            session = ort.InferenceSession(model / "1" / "model.onnx", providers=["CPUExecutionProvider"])
            # Tokens that differ, because equal ones have equal scores, and rounding would choose between them.
            ids = np.random.default_rng(0).integers(0, 200, (bucket.batch, bucket.seq))
            lengths = np.full(bucket.batch, bucket.seq)
            (logits,) = session.run(["logits"], {"input_ids": ids, "lengths": lengths})
            np.testing.assert_allclose(logits, deployment.run(ids), atol=1e-4)
            config = config_of(repository, model.name)
            for listed, ours in ((session.get_inputs(), config.input), (session.get_outputs(), config.output)):
                assert [(item.name, item.shape) for item in listed] == [(item.name, list(item.dims)) for item in ours]
            assert config.parameters["intra_op_thread_count"].string_value == "1"
            assert (config.backend, config.instance_group[0].count) == ("onnxruntime", 2)
            warmup = config.model_warmup[0].inputs
            assert warmup["input_ids"].zero_data
            assert warmup["lengths"].input_data_file == "lengths"
            lengths_read = np.fromfile(model / "warmup" / "lengths", dtype="<i8")
            np.testing.assert_array_equal(lengths_read, lengths)


def test_the_router_needs_nothing_of_this_project(built: Path, repository: Path, write: Any) -> None:
    assert write(built, "-o", repository, "--forward", "onnxruntime", "--name", "demo").exit_code == 0
    assert files_of(repository / "demo") == {"config.pbtxt", "1/model.py"}
    text = (repository / "demo" / "1" / "model.py").read_text(encoding="utf-8")
    imports = {line.split()[1] for line in text.splitlines() if line.lstrip().startswith(("import ", "from "))}
    assert imports == {"__future__", "json", "collections.abc", "typing", "numpy", "triton_python_backend_utils"}
    assert not config_of(repository, "demo").model_warmup


def test_plans_stand_where_tensorrt_looks_for_them(with_plans: Any, repository: Path, write: Any) -> None:
    folder = with_plans(
        ("forward", "b1s16", "float16", "sm89"), ("prefill", "b1s8", "float16", "sm89"),
        ("decode", "b1s48", "float16", "sm89"), ("forward", "b1s16", "float32", "sm89"),
    )  # fmt: skip
    found = write(folder, "-o", repository, "--forward", "tensorrt", "--name", "demo")
    assert [line.split()[:2] for line in found.stdout.splitlines()] == [
        ["demo", "python"], ["demo-b1s16", "tensorrt"], ["demo-prefill-b1s8", "tensorrt"], ["demo-text", "python"],
    ]  # fmt: skip
    plan = repository / "demo-b1s16" / "1" / "model.plan"
    assert plan.samefile(folder / "engines" / "tensorrt" / "mod-b1s16-float16-sm89.engine")
    config = config_of(repository, "demo-b1s16")
    assert (config.backend, config.platform) == ("tensorrt", "tensorrt_plan")
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_GPU
    assert dict(config.cc_model_filenames) == {"8.9": "model.plan"}
    assert list(ports(config_of(repository, "demo-prefill-b1s8").output))[:2] == ["last_logits", "keys_rows_0"]


def test_plans_for_several_gpus_are_told_apart(with_plans: Any, repository: Path, write: Any) -> None:
    folder = with_plans(("forward", "b1s16", "float32", "sm89"), ("forward", "b1s16", "float32", "sm120"))
    assert write(folder, "-o", repository, "--forward", "tensorrt", "--name", "demo").exit_code == 0
    config = config_of(repository, "demo-b1s16")
    assert dict(config.cc_model_filenames) == {"8.9": "model-sm89.plan", "12.0": "model-sm120.plan"}
    assert {"1/model-sm89.plan", "1/model-sm120.plan"} <= files_of(repository / "demo-b1s16")


def test_a_second_run_replaces_its_own_models_only(
    written: Path, built: Path, repository: Path, tmp_path: Path, write: Any
) -> None:
    assert write(written, "-o", repository, "--name", "one").exit_code == 0
    assert write(built, "-o", repository, "--name", "two", "--forward", "onnxruntime").exit_code == 0
    (repository / "other").mkdir()
    assert write(built, "-o", repository, "--name", "one", "--forward", "onnxruntime").exit_code == 0
    assert {path.name for path in repository.iterdir()} == {
        MARKER, "other", "two", "two-b1s64", "two-b2s32", "one", "one-b1s64", "one-b2s32",
    }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"repository"}


def test_files_are_copied_where_there_are_no_hard_links(
    written: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    def refuse(path: Path, source: Path) -> None:
        raise OSError(18, "Invalid cross-device link", str(path), None, str(source))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert write(written, "-o", repository, "--name", "demo").exit_code == 0
    placed = repository / "demo" / "1" / "build" / "graphs" / "weights-float32.data"
    weights = written / "graphs" / "weights-float32.data"
    assert placed.read_bytes() == weights.read_bytes()
    assert not placed.samefile(weights)


def test_a_repository_beside_which_nothing_can_be_written(
    written: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    repository.mkdir()
    monkeypatch.setattr("os.access", lambda *_: False)
    assert write(written, "-o", repository, "--name", "demo").exit_code == 0
    assert {path.name for path in repository.iterdir()} == {"demo", "demo-text", MARKER}


def test_an_empty_folder_becomes_a_repository(written: Path, repository: Path, write: Any) -> None:
    repository.mkdir()
    assert write(written, "-o", repository, "-q").stdout == ""
    assert {path.name for path in repository.iterdir()} == {"writing", "writing-text", MARKER}


@pytest.mark.slow
def test_a_model_of_other_inputs(tmp_path: Path, repository: Path, write: Any) -> None:
    (tmp_path / "c.toml").write_text(f'targets = ["ort-cpu"]\n{FEW_SAMPLES}', encoding="utf-8")
    folder, buckets = tmp_path / "built", [(1, 16), (2, 32)]
    mod_export.build(made(Masked), masked_inputs, buckets, out=folder, config=tmp_path / "c.toml")
    assert write(folder, "-o", repository, "--name", "one").exit_code == 0
    assert write(folder, "-o", repository, "--name", "two", "--forward", "onnxruntime").exit_code == 0
    with mod_export.load(folder) as deployment:
        first, *_ = deployment.buckets
        outputs = deployment.infer({name: array.numpy() for name, array in masked_inputs(1, 16).items()})
    for name in ("one", "two"):
        config = config_of(repository, name)
        # Only batch and sequence differ between the buckets.
        assert ports(config.input) == {
            "input_ids": ("TYPE_INT64", [-1, -1], False), "attention_mask": ("TYPE_FP32", [-1, -1], False),
        }  # fmt: skip
        found = {key: dims for key, (_, dims, _) in ports(config.output).items()}
        assert found == {key: [-1, -1, array.shape[2]] for key, array in outputs.items()}
    warmups = {one.name: list(one.inputs["attention_mask"].dims) for one in config_of(repository, "one").model_warmup}
    assert warmups == {"b1s16": [1, 16], "b2s32": [2, 32]}
    (warmup,) = config_of(repository, f"two-{first.name}").model_warmup
    assert all(one.zero_data for one in warmup.inputs.values())


def test_a_tokenizer_and_what_stands_beside_it_are_placed(written_copy: Path, repository: Path, write: Any) -> None:
    write_folder(written_copy, "smollm2")
    (written_copy / "config.json").unlink()
    (written_copy / "generation_config.json").write_text('{"eos_token_id": 3}', encoding="utf-8")
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    entries = {name: entry_of(written_copy / name).model_dump() for name in names}
    files = {**read_manifest(written_copy)["files"], **entries}
    amend(written_copy, lambda: ({"tokenizer": "tokenizer.json", "files": files}, {}))
    assert write(written_copy, "-o", repository, "--name", "demo").exit_code == 0
    placed = repository / "demo-text" / "1" / "build"
    assert {path.name for path in placed.glob("*.json")} == {"manifest.json", *names}
    with mod_export.load_generator(placed) as generator:
        assert generator.defaults.stop_ids == {3}
        assert generator.vocabulary is not None


def test_ids_that_stand_for_no_text(written_copy: Path, repository: Path, write: Any) -> None:
    amend(written_copy, lambda: ({"tokenizer": None}, {}))
    assert write(written_copy, "-o", repository, "--name", "demo").exit_code == 0
    config = config_of(repository, "demo-text")
    assert ports(config.input)["input_ids"] == ("TYPE_INT64", [-1], False)
    assert {"text", "stop"}.isdisjoint(ports(config.input))
    assert list(ports(config.output)) == ["token", "finish_reason"]


@pytest.mark.filterwarnings("default::mod_export.errors.UnverifiedWarning")
def test_a_folder_that_nobody_verified(written_copy: Path, repository: Path, write: Any) -> None:
    amend(written_copy, lambda: ({"verified": False}, {}))
    found = write(written_copy, "-o", repository)
    assert found.exit_code == 0
    assert "nothing in it was verified: it was built with --no-evidence" in found.stderr
