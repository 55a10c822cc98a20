from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import mod_export
from mod_export.environment import (
    PACKAGES,
    _cgroup_quotas,
    cpu_features,
    describe_machine,
    package_version,
    source_digest,
    usable_cores,
    versions,
)


@pytest.fixture
def gpu_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts an nvidia-smi that runs this shell script on the path, before all others."""

    def place(script: str) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return place


def test_versions() -> None:
    assert package_version("mod_export") == mod_export.__version__
    assert package_version("torch") == sys.modules["torch"].__version__
    assert package_version("onnxruntime") is not None
    with pytest.raises(KeyError, match="numpy"):
        package_version("numpy")


def test_versions_by_name_and_of_this_package_its_source() -> None:
    assert versions("torch", "onnx") == {"torch": package_version("torch"), "onnx": package_version("onnx")}
    assert versions("mod_export") == {"mod_export": source_digest("mod_export")}
    assert versions() == {}
    with pytest.raises(KeyError, match="numpy"):
        versions("numpy")


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "absent", ("no-such-distribution",))
    assert versions("absent") == {"absent": None}


def test_the_machine_is_described_as_plain_data() -> None:
    machine = describe_machine()
    assert json.loads(json.dumps(machine)) == machine
    assert machine.keys() >= {*PACKAGES, "python", "platform", "cpu", "cores", "memory_bytes", "load_average", "gpu"}
    assert machine["cpu"]
    assert 1 <= machine["cores"] <= machine["logical_cores"]
    assert machine["memory_bytes"] > 2**28
    assert machine["python"] == ".".join(map(str, sys.version_info[:3]))


def test_no_gpu_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_machine()["gpu"] is None


def test_a_gpu_is_named_with_its_driver(gpu_tool: Callable[[str], None]) -> None:
    gpu_tool('echo "NVIDIA RTX 6000 Ada, 570.86"; echo "another"')
    assert describe_machine()["gpu"] == "NVIDIA RTX 6000 Ada, 570.86"


@pytest.mark.parametrize("script", ["exit 9", "exit 0", "echo broken >&2; exit 1"])
def test_a_gpu_tool_that_finds_nothing(gpu_tool: Callable[[str], None], script: str) -> None:
    gpu_tool(script)
    assert describe_machine()["gpu"] is None


def test_a_gpu_tool_that_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_bytes(b"\x7fELF not really")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_machine()["gpu"] is None


def test_the_digest_of_a_package_follows_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_with_digest"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "deep/code.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    digests = []
    for change in (lambda: None, lambda: (package / "deep/code.py").write_text("x = 2"), lambda: None):
        change()
        source_digest.cache_clear()
        digests.append(source_digest("package_with_digest"))
    assert digests[0] != digests[1] == digests[2]
    (package / "notes.txt").write_text("not code")
    source_digest.cache_clear()
    assert source_digest("package_with_digest") == digests[2]


def test_the_digest_is_of_this_package() -> None:
    assert source_digest("mod_export") != source_digest("mod_models")
    assert len(source_digest("mod_export")) == 64


def test_instruction_sets_are_those_that_compilers_use() -> None:
    features = cpu_features()
    assert not features & {"fpu", "vme", "hypervisor", "tsc", "pae"}
    if platform.machine() == "x86_64":
        assert {"sse", "sse2"} <= features


def test_usable_cores_are_those_of_the_affinity() -> None:
    assert 1 <= usable_cores() <= (psutil.cpu_count(logical=False) or os.cpu_count() or 1)
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from mod_export.environment import usable_cores; print(usable_cores())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "1\n"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, []),
        ({"": "max 100000"}, []),
        ({"pod/app": "150000 100000"}, [1.5]),
        ({"pod/app": "max 100000", "pod": "400000 100000", "": "800000 100000"}, [4.0, 8.0]),
        ({"pod/app": "nonsense"}, []),
    ],
)
def test_quotas_of_a_control_group_and_those_above_it(
    tmp_path: Path, limits: dict[str, str], expected: list[float]
) -> None:
    (tmp_path / "fs/pod/app").mkdir(parents=True)
    for group, text in limits.items():
        (tmp_path / "fs" / group / "cpu.max").write_text(text + "\n")
    (tmp_path / "cgroup").write_text("0::/pod/app\n")
    assert _cgroup_quotas(tmp_path / "fs", tmp_path / "cgroup") == expected
    assert _cgroup_quotas(tmp_path / "fs", tmp_path / "absent") == []
