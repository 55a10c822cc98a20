"""Versions, the machine and its memory, as far as they can be found out."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from command_line import invoke
from safetensors.torch import load_file, save_file

import mod_export
from mod_export import environment
from mod_export.environment import (
    PACKAGES,
    _control_groups,
    _cpu_quotas,
    _left_in_groups,
    cpu_features,
    describe_machine,
    free_bytes,
    let_go,
    limited,
    package_version,
    source_digest,
    usable_cores,
    versions,
)


def test_versions_and_of_this_package_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    assert package_version("mod_export") == mod_export.__version__
    monkeypatch.setitem(PACKAGES, "absent", ("no-such-distribution",))
    found = versions("torch", "mod_export", "absent")
    digest = source_digest("mod_export")
    assert found == {"torch": sys.modules["torch"].__version__, "mod_export": digest, "absent": None}
    assert (len(digest), digest == source_digest("mod_models")) == (64, False)
    with pytest.raises(KeyError, match="numpy"):
        versions("numpy")


def test_the_machine_is_described_as_plain_data() -> None:
    machine = describe_machine()
    assert json.loads(json.dumps(machine)) == machine
    assert machine.keys() >= {*PACKAGES, "python", "platform", "cpu", "cores", "memory_bytes", "load_average", "gpu"}
    assert machine["cpu"]
    assert 1 <= machine["cores"] <= machine["logical_cores"]
    assert machine["memory_bytes"] > 2**28
    assert machine["python"] == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (("model\t\t: 17", "model name\t: AMD EPYC", "cpu family\t: 25"), "AMD EPYC (family 25, model 17)"),
        (("cpu family\t: 26", "model\t\t: 2", "model name\t: AMD EPYC"), "AMD EPYC (family 26, model 2)"),
        (("CPU implementer\t: 0x41", "CPU part\t: 0xd4f"), "{arm} (implementer 0x41, part 0xd4f)"),
        ((), "{arm}"),
    ],
)
def test_processors_of_one_name_are_told_apart(
    lines: tuple[str, ...], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Virtual machines call several generations of processors "AMD EPYC"."""
    (tmp_path / "cpuinfo").write_text("\n".join(("processor\t: 0", *lines, "", "processor\t: 1", *lines)))
    monkeypatch.setattr(environment, "CPUINFO", tmp_path / "cpuinfo")
    assert describe_machine()["cpu"] == name.format(arm=platform.processor() or platform.machine())


@pytest.mark.parametrize(
    ("tool", "found"),
    [
        (b'#!/bin/sh\necho "NVIDIA RTX 6000 Ada, 570.86"; echo "another"', "NVIDIA RTX 6000 Ada, 570.86"),
        (b"#!/bin/sh\nexit 0", None),
        (b"#!/bin/sh\necho broken >&2; exit 1", None),
        (b"\x7fELF not really", None),
        (None, None),
    ],
)
def test_a_gpu_is_named_with_its_driver(
    tool: bytes | None, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-smi names it, if the tool exists, runs and finds a GPU."""
    monkeypatch.setenv("PATH", str(tmp_path))
    if tool is not None:
        (tmp_path / "nvidia-smi").write_bytes(tool)
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert describe_machine()["gpu"] == found


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


def test_quotas_of_a_control_group_and_those_above_it(tmp_path: Path) -> None:
    group = tmp_path / "fs/pod/app"
    group.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("0::/pod/app\n")
    groups = _control_groups(tmp_path / "fs", tmp_path / "cgroup")
    assert groups == [group, tmp_path / "fs/pod", tmp_path / "fs"]
    assert _cpu_quotas(groups) == []
    (tmp_path / "fs/cpu.max").write_text("800000 100000\n")
    (tmp_path / "fs/pod/cpu.max").write_text("400000 100000\n")
    for text, quotas in (("150000 100000", [1.5]), ("max 100000", []), ("nonsense", [])):
        (group / "cpu.max").write_text(f"{text}\n")
        assert _cpu_quotas(groups) == [*quotas, 4.0, 8.0]
    assert _control_groups(tmp_path / "fs", tmp_path / "absent") == []


def test_memory_that_a_container_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container sees the memory of its host in /proc/meminfo."""
    group = tmp_path / "fs/pod"
    group.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("0::/pod\n")
    (group / "memory.current").write_text("900\n")
    (group / "memory.stat").write_text("anon 500\ninactive_file 300\nactive_file 100\n")
    for limit, left in (("max", []), ("1000", [500]), ("100", [0]), ("nonsense", [])):
        (group / "memory.max").write_text(f"{limit}\n")
        assert _left_in_groups(_control_groups(tmp_path / "fs", tmp_path / "cgroup")) == left
    (group / "memory.max").write_text("1000\n")
    monkeypatch.setattr(environment, "CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(environment, "MEMBERSHIP", tmp_path / "cgroup")
    assert free_bytes() == 500


def test_a_budget_counts_what_this_process_has() -> None:
    assert free_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    with limited(2**62):
        assert free_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    memory = psutil.Process().memory_info()
    with limited(memory.rss + 2**26):
        assert free_bytes() <= memory.rss + 2**26
    with limited(1):
        assert free_bytes() == 0
    assert free_bytes() > 0


def test_too_small_a_budget_is_refused_before_anything_is_built(small_folder: Path, small_copy: Path) -> None:
    arguments = ["build", small_folder / "small.pt", "-c", small_folder / "small.toml", "--max-memory"]
    result = invoke(*arguments, "10MiB", "-o", small_copy.parent / "out")
    assert result.exit_code == 2, result.output
    found = re.search(r"max_memory: this build needs about ([\d.]+) GiB, 0\.0 GiB are allowed", result.stderr)
    assert found, result.stderr
    assert not (small_copy.parent / "out").exists()
    assert invoke(*arguments, f"{float(found[1]) + 0.1:.1f}GiB", "-o", small_copy).exit_code == 0
    no_size = invoke(*arguments, "12 apples", "-o", small_copy)
    assert no_size.exit_code == 2
    assert "max_memory: " in no_size.stderr


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssFile:"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for what is resident")
def test_what_was_read_from_a_file_is_given_back(tmp_path: Path) -> None:
    size = 2**26
    save_file({"large": torch.arange(size // 4, dtype=torch.float32)}, tmp_path / "w.safetensors")
    tensors = load_file(tmp_path / "w.safetensors")
    total = tensors["large"].double().sum()
    before = resident_bytes()
    let_go(tensors.values())
    assert before - resident_bytes() > size // 2
    assert tensors["large"].double().sum() == total


def test_what_is_in_memory_alone_stays() -> None:
    tensors = [torch.arange(2**16), torch.zeros(0), torch.ones(3), torch.arange(2**14).reshape(128, 128).T]
    copies = [tensor.clone() for tensor in tensors]
    let_go(tensors)
    assert all(torch.equal(one, kept) for one, kept in zip(tensors, copies, strict=True))


def test_other_systems_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(environment.ctypes, "CDLL", None)
    let_go([torch.zeros(2**16)])


PEAKS = """
from mod_export.environment import peak_rss_bytes, reset_peak_rss
reset_peak_rss()
before = peak_rss_bytes()
held = bytearray(64 * 2**20)
during = peak_rss_bytes()
del held
reset_peak_rss()
print(before, during, peak_rss_bytes())
"""


def test_peak_memory_is_that_since_the_last_reset() -> None:
    # Other tests may free memory at any time, so this one runs in its own process.
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    before, during, after = map(int, done.stdout.split())
    assert during - before > 48 * 2**20
    assert after < during
