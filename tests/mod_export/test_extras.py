"""Without an extra: exit code 2 and the name of the extra, no matter where its module is first imported."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from command_line import commands, invoke
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mod_export.environment import EXTRAS

GRAPH = "graphs/mod-b1s16.onnx"

NEEDS: dict[tuple[str, ...], tuple[str, list[str]]] = {
    ("torch",): ("build", ["build MODEL -o OUT", "sweep MODEL -o OUT", "demo -o OUT", "inspect MODEL", "validate DIR"]),
    ("onnx", "onnx_ir"): ("build", ["inspect GRAPH", "validate DIR"]),
    ("onnxruntime",): ("ort", ["bench DIR"]),
    ("gguf",): ("convert", ["convert FILE OUT", "build FILE -o OUT"]),
    ("model_signing",): ("sign", ["sign DIR --key KEY", "verify DIR --key KEY"]),
    ("uvicorn",): ("serve", ["serve DIR"]),
    ("httptools",): ("serve", ["serve DIR"]),
    ("prometheus_client",): ("serve", ["serve DIR"]),
    ("opentelemetry",): ("serve", ["serve DIR"]),
    ("opentelemetry.exporter",): ("traces", ["serve DIR --traces"]),
    ("opentelemetry.sdk",): ("traces", ["serve DIR --traces"]),
}
"""Missing modules -> the extra that installs them, and commands that need one of them."""


def without(modules: Iterable[str]) -> str:
    return f"sys.modules.update(dict.fromkeys({list(modules)}))"


@pytest.mark.fast("torch", "onnxruntime", "model_signing", "uvicorn")
@pytest.mark.parametrize("absent", NEEDS, ids=lambda absent: absent[0])
def test_a_missing_extra_is_named(absent: tuple[str, ...], small_folder: Path, tmp_path: Path) -> None:
    extra, lines = NEEDS[absent]
    folder = small_folder / "build"
    names = {"MODEL": small_folder / "small.pt", "DIR": folder, "OUT": tmp_path / "out", "GRAPH": folder / GRAPH,
             "FILE": tmp_path / "one.gguf", "KEY": tmp_path / "key.pem"}  # fmt: skip
    # The package knows the size of a tensor's blocks.
    (tmp_path / "one.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(8))
    requests = [[names.get(word, word) for word in line.split()] for line in lines]
    for line, (code, stdout, stderr) in zip(lines, commands(requests, without(absent)), strict=True):
        assert (code, stdout) == (2, ""), (line, stderr)
        message = rf"error: `mod-export {line.split()[0]}` needs \S+, which cannot be imported here \(.*\)\n"
        assert re.fullmatch(rf'{message} +install it: pip install "mod-export\[{extra}\]"\n', stderr)


def test_targets_say_that_building_needs_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    found = invoke("targets")
    assert found.exit_code == 0
    ort = next(line for line in found.stdout.splitlines() if line.startswith("ort-cpu"))
    missing = r'to build, pip install "mod-export\[build\]" \(missing: onnx\)'
    assert re.fullmatch(rf"ort-cpu +runs +onnxruntime \S+; {missing}", ort)


def test_the_import_of_something_else_is_a_bug() -> None:
    ((code, _, stderr),) = commands([["targets"]], "sys.modules['mod_export.engines'] = None")
    assert code == 1
    assert re.search(r"\nbug in mod-export \S+: ModuleNotFoundError; please report the text above\n$", stderr)


def closure_of(requirements: Iterable[str]) -> set[str]:
    """Returns the names of the distributions that pip would install for these requirements."""
    names: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        extras = requirement.extras or {""}
        key = (canonicalize_name(requirement.name), *sorted(requirement.extras))
        if str(key) in names or not _installed(requirement.name):
            continue
        names |= {str(key), key[0]}
        for text in metadata.requires(requirement.name) or []:
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)
    return names


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.parametrize(
    ("extra", "module"), [("serve", "mod_export.serve.server"), ("ray-serve", "mod_export.serve.ray_app")]
)
def test_an_extra_installs_all_that_its_module_imports(extra: str, module: str) -> None:
    """In a new process in which what the code imports from other distributions is missing."""
    sources = (Path(__file__).parents[2] / "mod_export").rglob("*.py")
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", code, re.MULTILINE))
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"]
    allowed = closure_of([*project["dependencies"], *extras[extra], *extras["ort"]]) | {"mod-export"}
    absent = [
        name
        for name, owners in metadata.packages_distributions().items()
        if name in imported and allowed.isdisjoint(map(canonicalize_name, owners))
    ]
    assert "torch" in absent
    code = f"import sys\n{without(absent)}\nimport {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_extra_of_the_table_is_declared() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    declared = tomllib.loads(text)["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        names = " ".join(declared[extra]).replace("-", "_")
        # The distribution opentelemetry-api provides the module opentelemetry.
        assert all(re.search(rf"\b{module.replace('.', '_')}", names) for module in modules), extra


def test_the_wheel_has_every_package() -> None:
    """An editable installation finds a folder that the list of the wheel forgot."""
    root = Path(__file__).parents[2]
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {
        ".".join([name, *path.parent.relative_to(root / folder).parts])
        for name, folder in settings["package-dir"].items()
        for path in (root / folder).rglob("__init__.py")
    }
    assert set(settings["packages"]) == found
