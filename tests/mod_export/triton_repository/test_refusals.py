"""Every refusal of `mod-export triton`, which leaves no files behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from build_folders import flip
from command_line import refused

from mod_export.folder.manifest import read_manifest
from mod_export.folder.workspace import amend
from mod_export.triton.repository import MARKER

MISSED = "routing agreement of 12.0 %, expected 99.0 %"
PLAN = ("forward", "b1s16", "float16", "sm89")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "a b"], r"--name: got 'a b', expected at most 100 letters, digits.*; give another one with --name"),
        (["--name", ".a"], "the first of them a letter"),
        (["--name", "x" * 101], "at most 100"),
        (["--max-queue", 0], "--max-queue: expected a whole number of at least 1, got 0"),
        (["--instances", -1], "--instances: expected a whole number of at least 1, got -1"),
        (["--threads", -1], "threads: expected 1 or more, or 0"),
        (["--target", "inductor"], "holds no engine for inductor; built for ort-cpu"),
        (["--dtype", "int8"], "holds no int8 engine for ort-cpu"),
        (["--forward", "tensorrt"], r'no plan of TensorRT for whole rows \(built for ort-cpu\); build with targets = '
                                    r'\["tensorrt"\] on the GPU that serves, or use another --forward'),
    ],
)  # fmt: skip
def test_arguments(written: Path, repository: Path, write: Any, arguments: list[object], message: str) -> None:
    refused(write(written, "-o", repository, *arguments), message)
    assert not list(repository.parent.iterdir())


def test_what_is_no_build_folder(tmp_path: Path, write: Any) -> None:
    refused(write(tmp_path, "-o", tmp_path / "r"), "no manifest.json here, so this is not a build folder")


def test_what_missed_its_gates(written_copy: Path, repository: Path, write: Any) -> None:
    paths = ["engines/ort-cpu/mod-b1s16-float32.onnx", "graphs/mod-b1s16.onnx"]
    amend(written_copy, lambda: ({"refused": {path: [MISSED] for path in paths}}, {}))
    refused(write(written_copy, "-o", repository), f"missed their gates and are not served \\({MISSED}\\)")
    refused(
        write(written_copy, "-o", repository, "--forward", "onnxruntime"),
        f"portable graphs missed their gates and are not served \\({MISSED}\\); use another --forward or --dtype",
    )


def test_engines_that_write_text_and_missed_their_gates_are_left_out(
    written_copy: Path, repository: Path, write: Any
) -> None:
    amend(written_copy, lambda: ({"refused": {"engines/ort-cpu/mod-decode-b1s48-float32.onnx": [MISSED]}}, {}))
    found = write(written_copy, "-o", repository, "--name", "demo")
    assert found.exit_code == 0
    assert found.stderr.startswith(f"note: no demo-text: {written_copy}: the float32 engines for ort-cpu missed their")
    assert not (repository / "demo-text").exists()


def test_a_folder_without_portable_graphs(written_copy: Path, repository: Path, write: Any) -> None:
    data = read_manifest(written_copy)
    graphs = [graph for graph in data["graphs"] if graph["path"] != "graphs/mod-b1s16.onnx"]
    files = {path: entry for path, entry in data["files"].items() if path != "graphs/mod-b1s16.onnx"}
    amend(written_copy, lambda: ({"graphs": graphs, "files": files}, {}))
    found = write(written_copy, "-o", repository, "--forward", "onnxruntime")
    refused(found, "holds no portable graph of whole rows; build again, or use --forward python")


def test_plans_that_missed_their_gates(with_plans: Any, repository: Path, write: Any) -> None:
    folder = with_plans(PLAN, ("prefill", "b1s8", "float16", "sm89"))
    paths = {role: f"engines/tensorrt/mod-{role}b1s{size}-float16-sm89.engine" for role, size in
             (("", 16), ("prefill-", 8))}  # fmt: skip
    amend(folder, lambda: ({"refused": {paths["prefill-"]: [MISSED]}}, {}))
    assert write(folder, "-o", repository, "--name", "demo", "--forward", "tensorrt").exit_code == 0
    assert not (repository / "demo-prefill-b1s8").exists()
    amend(folder, lambda: ({"refused": {paths[""]: [MISSED]}}, {}))
    refused(
        write(folder, "-o", repository, "--name", "demo", "--forward", "tensorrt"),
        "float16 plans missed their gates and are not served",
    )


def test_the_fastest_plans_that_met_their_gates_are_taken(with_plans: Any, repository: Path, write: Any) -> None:
    dtypes = ("float16", "bfloat16", "float32")
    folder = with_plans(*[("forward", "b1s16", dtype, "sm89") for dtype in dtypes])
    times = dict(zip(dtypes, (1.0, 2.0, 3.0), strict=True))
    measured = [
        {"model": "mod", "role": "forward", "target": "tensorrt", "dtype": dtype, "ms": ms}
        for dtype, ms in times.items()
    ]

    def served(name: str, **facts: Any) -> str:
        amend(folder, lambda: (facts, {}))
        assert write(folder, "-o", repository, "--name", name, "--forward", "tensorrt").exit_code == 0
        plan = repository / f"{name}-b1s16" / "1" / "model.plan"
        return next(dtype for dtype in dtypes if plan.samefile(folder / plan_of(dtype)))

    def plan_of(dtype: str) -> str:
        return f"engines/tensorrt/mod-b1s16-{dtype}-sm89.engine"

    assert served("first") == "float16"
    assert served("passed", refused={plan_of("float16"): [MISSED]}) == "bfloat16"
    assert served("measured", measured=measured) == "bfloat16"
    assert served("slowest", refused={plan_of(dtype): [MISSED] for dtype in dtypes[:2]}) == "float32"
    assert served("fastest", refused={}) == "float16"


def test_plans_of_tensorrt_rtx(with_plans: Any, repository: Path, write: Any) -> None:
    folder = with_plans(PLAN, target="tensorrt-rtx")
    refused(
        write(folder, "-o", repository, "--forward", "tensorrt"),
        r"built for ort-cpu, tensorrt-rtx\). Plans of TensorRT-RTX are of another library, which Triton has no backend "
        r'for; build with targets = \["tensorrt"\] on the GPU that serves, or use --forward onnxruntime',
    )


def test_a_dtype_without_plans(with_plans: Any, repository: Path, write: Any) -> None:
    arguments = ("-o", repository, "--forward", "tensorrt", "--dtype", "bfloat16")
    refused(write(with_plans(PLAN), *arguments), "holds no bfloat16 plan for whole rows; built: float16")


def test_a_damaged_file_is_not_handed_on(written_copy: Path, repository: Path, write: Any) -> None:
    flip(written_copy / "graphs" / "weights-float32.data")
    refused(write(written_copy, "-o", repository), r"weights-float32.data has been changed since it was built")
    assert not repository.exists()


def test_a_damaged_graph(written_copy: Path, repository: Path, write: Any) -> None:
    path = written_copy / "graphs" / "mod-b1s16.onnx"
    path.write_bytes(path.read_bytes()[:100])
    found = write(written_copy, "-o", repository, "--forward", "onnxruntime")
    refused(found, "mod-b1s16.onnx: expected an ONNX graph of static shapes, cannot read it .*; build again")


def test_places(written: Path, written_copy: Path, tmp_path: Path, write: Any) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    refused(write(written, "-o", tmp_path / "file"), "file: is a file; name a new folder with -o")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("", encoding="utf-8")
    foreign = r"mine: holds files that `mod-export triton` did not write \(notes.txt\); name a new folder with -o"
    refused(write(written, "-o", tmp_path / "mine"), foreign)
    refused(write(written_copy, "-o", written_copy / "served"), "served: lies in the build folder")
    refused(write(written_copy, "-o", written_copy), "lies in the build folder")


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}'])
def test_a_damaged_marker(written: Path, repository: Path, write: Any, text: str) -> None:
    repository.mkdir()
    (repository / MARKER).write_text(text, encoding="utf-8")
    refused(write(written, "-o", repository), rf"{MARKER}: cannot be read \(.*\); name a new folder with -o")


def test_models_of_others(written: Path, repository: Path, write: Any) -> None:
    assert write(written, "-o", repository, "--name", "one").exit_code == 0
    again = write(written, "-o", repository, "--name", "one-text")
    refused(again, "holds a model one-text, which was written for --name one; give another --name")
    (repository / "two").mkdir()
    again = write(written, "-o", repository, "--name", "two")
    refused(again, "holds a model two, which this command did not write; give another --name")


@pytest.mark.skipif(os.geteuid() == 0, reason="whoever may write everywhere is refused nowhere")
def test_a_place_without_the_right_to_write(written: Path, tmp_path: Path, write: Any) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    refused(write(written, "-o", tmp_path / "closed" / "r"), r"cannot write .* \(Permission denied\); name a new")


def test_a_place_that_cannot_exist(written: Path, write: Any) -> None:
    refused(write(written, "-o", "/proc/r"), r"/proc/r: cannot write .*; name a new folder with -o")
