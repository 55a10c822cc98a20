"""Without an extra: exit code 2 and the name of the extra, no matter where its module is first imported."""

from __future__ import annotations

import re
import struct
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from command_line import commands

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


def test_targets_say_that_building_needs_an_extra() -> None:
    ((code, stdout, _),) = commands([["targets"]], without(["onnx"]))
    assert code == 0
    ort = next(line for line in stdout.splitlines() if line.startswith("ort-cpu"))
    missing = r'to build, pip install "mod-export\[build\]" \(missing: onnx\)'
    assert re.fullmatch(rf"ort-cpu +runs +onnxruntime \S+; {missing}", ort)


def test_the_import_of_something_else_is_a_bug() -> None:
    ((code, _, stderr),) = commands([["targets"]], "sys.modules['mod_export.engines'] = None")
    assert code == 1
    assert re.search(r"\nbug in mod-export \S+: ModuleNotFoundError; please report the text above\n$", stderr)


def test_every_extra_of_the_table_is_declared() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    declared = tomllib.loads(text)["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        names = " ".join(declared[extra]).replace("-", "_")
        # The distribution opentelemetry-api provides the module opentelemetry.
        assert all(re.search(rf"\b{module.replace('.', '_')}", names) for module in modules), extra
