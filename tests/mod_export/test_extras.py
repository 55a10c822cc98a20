"""Installed without an extra: exit code 2 and the name of the extra, wherever its module is first imported."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from command_line import command

from mod_export.environment import EXTRAS

WITHOUT_EXTRA = "for name in {names}: sys.modules[name] = None"


@pytest.mark.parametrize(
    ("arguments", "absent", "extra"),
    [
        (["build", "MODEL", "-o", "OUT"], ["torch"], "build"),
        (["build", "MODEL", "-o", "OUT"], ["onnxscript"], "build"),
        (["sweep", "MODEL", "-o", "OUT"], ["torch"], "build"),
        (["demo", "-o", "OUT"], ["torch"], "build"),
        (["inspect", "MODEL"], ["torch"], "build"),
        (["inspect", "GRAPH"], ["onnx", "onnx_ir"], "build"),
        (["validate", "DIR"], ["torch"], "build"),
        (["validate", "DIR"], ["onnx"], "build"),
        (["bench", "DIR"], ["onnxruntime"], "ort"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_missing_extra_is_named(
    arguments: list[str], absent: list[str], extra: str, built: Path, checkpoint: Path, tmp_path: Path
) -> None:
    names = {"MODEL": checkpoint, "DIR": built, "OUT": tmp_path / "out", "GRAPH": built / "graphs/mod-b1s64.onnx"}
    found = command(*(names.get(argument, argument) for argument in arguments), code=WITHOUT_EXTRA.format(names=absent))
    assert found.returncode == 2, found.stderr
    assert found.stdout == ""
    message = rf"error: `mod-export {arguments[0]}` needs \S+, which cannot be imported here \(.*\)\n"
    assert re.fullmatch(rf'{message} +install it: pip install "mod-export\[{extra}\]"\n', found.stderr)


def test_targets_say_that_building_needs_an_extra() -> None:
    found = command("targets", code="sys.modules['onnx'] = None")
    assert found.returncode == 0, found.stderr
    ort = next(line for line in found.stdout.splitlines() if line.startswith("ort-cpu"))
    assert re.fullmatch(
        r'ort-cpu +runs +onnxruntime \S+; to build, pip install "mod-export\[build\]" \(missing: onnx\)', ort
    )


def test_the_import_of_something_else_is_a_bug() -> None:
    found = command("targets", code="sys.modules['mod_export.engines'] = None")
    assert found.returncode == 1
    assert re.search(r"\nbug in mod-export \S+: ModuleNotFoundError; please report the text above\n$", found.stderr)


def test_every_extra_of_the_table_is_declared() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    declared = tomllib.loads(text)["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        names = " ".join(declared[extra]).replace("-", "_")
        assert all(re.search(rf"\b{module}\b", names) for module in modules), extra
