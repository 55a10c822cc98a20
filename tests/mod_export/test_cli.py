"""The command line: what each stream shows, and names that do not change."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import click
import pytest
from command_line import FAST_TOML, invoke, toml_file

from mod_export.cli import cli
from mod_export.cli.docs import cli_page
from mod_export.config import BuildConfig, config_from_toml
from mod_export.engines import ENGINES
from mod_export.folder.manifest import read_manifest
from mod_export.rows.report import report_from_json
from mod_models.checkpoint import load_checkpoint, random_checkpoint, save_checkpoint

MAIN = [sys.executable, "-c", "from mod_export.cli import main; main()"]
COMMON = ["--help", "--quiet", "--verbose", "-h", "-q", "-v"]
OPTIONS = {
    "build": ["--baseline", "--buckets", "--capacity", "--config", "--max-memory", "--no-evidence", "--out", "--report",
              "--samples", "--target", "--text", "--tokenizer", "-c", "-o", "models"],
    "convert": ["--base", "--capacity", "--ignore-field", "--implementation", "--max-positions", "out", "source"],
    "generate": ["--chat", "--dtype", "--ids", "--ignore-eos", "--json", "--max-new-tokens", "--model",
                 "--no-special-tokens", "--prompt", "--prompt-file", "--roll", "--seed", "--selection", "--stop",
                 "--system", "--target", "--temperature", "--template", "--threads", "--top-k", "--top-p",
                 "--trusted-key", "folder", "text_arguments"],
    "serve": ["--allow-origin", "--api-key-file", "--drain", "--dtype", "--host", "--keep-alive", "--log-format",
              "--max-queue", "--max-wait", "--model", "--name", "--port", "--prefix-cache", "--reload", "--rows",
              "--supervise", "--target", "--threads", "--traces", "--trusted-key", "folder"],
    "triton": ["--dtype", "--forward", "--instances", "--max-queue", "--name", "--out", "--target", "--threads",
               "--trusted-key", "-o", "folder"],
    "sign": ["--key", "--keyless", "--password-file", "folder"],
    "verify": ["--identity", "--issuer", "--key", "folder"],
    "validate": ["--config", "--model", "--target", "--text", "-c", "folder"],
    "bench": ["--config", "--rivals", "--target", "--text", "-c", "folder"],
    "report": ["--format", "folder"],
    "inspect": ["--html", "--text", "path"],
    "plan": ["--bandwidth", "--length", "--machine", "--prompt", "--rows", "--texts", "--tflops", "--weight-bytes",
             "source"],
    "targets": [],
    "config show": ["config_file"],
    "config explain": [],
    "demo": ["--out", "-o"],
    "sweep": ["--batch", "--capacity", "--config", "--out", "--ray", "--seq", "--target", "-c", "-o", "model"],
}  # fmt: skip
"""Names that users' scripts rely on: each is added on purpose, and none is removed."""


def test_the_page_of_the_commands_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "cli.md"
    assert page.read_text(encoding="utf-8") == cli_page(), "docs/cli.md is out of date: make docs"


def test_quiet_and_verbose(small_folder: Path, small_copy: Path) -> None:
    """-q writes nothing to stderr, -v names every step."""
    arguments = ["build", small_folder / "small.pt", "-c", small_folder / "small.toml", "-o", small_copy]
    quiet = invoke(*arguments, "-q")
    assert (quiet.exit_code, quiet.stderr) == (0, "")
    assert quiet.stdout.endswith(f"PASS  every gate met: {small_copy}\n")
    named = [line.strip() for line in invoke(*arguments, "-v").stderr.splitlines() if line.startswith("    ")]
    assert named == list(read_manifest(small_copy)["steps"])


@pytest.mark.parametrize("name", ["build", "inspect"])
def test_a_traceback_only_when_asked_for(name: str, tmp_path: Path) -> None:
    plain, verbose = invoke(name, tmp_path / "absent.pt"), invoke(name, tmp_path / "absent.pt", "-v")
    assert plain.exit_code == verbose.exit_code == 2
    assert "Traceback" not in plain.stderr
    assert verbose.stderr.startswith("Traceback (most recent call last)")
    assert verbose.stderr.endswith(plain.stderr)


@pytest.mark.fast("bench", "report", "inspect")
@pytest.mark.parametrize("name", ["validate", "bench", "report", "inspect"])
def test_results_on_stdout_and_nothing_else_and_no_color(
    name: str, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in {"NO_COLOR": "1", "FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(variable, value)
    # On a terminal, which FORCE_COLOR simulates, the command also shows that it is at work, unless -q is given.
    found = invoke(name, small, "-q")
    assert found.exit_code == 0, found.output
    assert found.stderr == ""
    assert found.stdout.endswith("\n")
    assert not re.search(r"\x1b\[(\d+;)*(3|4|9|10)\d", found.stdout)


def test_a_verdict_has_a_color(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for variable, value in {"FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(variable, value)
    assert re.search(r"\x1b\[(\d+;)*32m", invoke("report", small).stdout)


def test_report_formats(small: Path) -> None:
    shown = invoke("report", small)
    assert shown.stdout.endswith(f"PASS  every gate met: {small}\n")
    assert invoke("report", small, "--format", "text").stdout == shown.stdout
    data = invoke("report", small, "--format", "json").stdout
    assert data == (small / "report.json").read_text()
    assert json.loads(data)["schema_version"] == 2
    page = invoke("report", small, "--format", "html").stdout
    assert page == (small / "report.html").read_text()
    assert page.startswith("<!doctype html>")


def test_formats_for_machines_are_utf8(tmp_path: Path, small_folder: Path, small_copy: Path) -> None:
    shutil.copy(small_folder / "small.pt", tmp_path / "模型.pt")
    arguments = ["-c", small_folder / "small.toml", "-o", small_copy, "-q"]
    renamed = invoke("build", tmp_path / "模型.pt", *arguments)
    assert renamed.exit_code == 0, renamed.output
    script = f"""
import contextlib, sys
from mod_export.cli import main
for form in ("html", "text"):
    sys.argv = ["mod-export", "report", {str(small_copy)!r}, "--format", form]
    with contextlib.suppress(SystemExit):
        main()
"""
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, env=env)
    page = (small_copy / "report.html").read_bytes()
    assert shown.stdout.startswith(page)
    text = shown.stdout.removeprefix(page).decode("latin-1")
    assert "PASS  every gate met" in text
    assert "模型" not in text


def test_nobody_reads_the_result(small: Path) -> None:
    process = subprocess.Popen([*MAIN, "report", str(small)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141
    assert errors == b""


@pytest.mark.slow
def test_bench_and_validate_take_a_config(small: Path, tmp_path: Path) -> None:
    text = FAST_TOML.replace("min_speedup = 0.0", "min_speedup = 90.0") + "[parity.float32]\nrounding_error = 0.0\n"
    strict = toml_file(tmp_path, text)
    for name, expected in (("validate", "FAIL"), ("bench", "90.00x FAIL")):
        found = invoke(name, small, "-c", strict, "--target", "ort-cpu")
        assert found.exit_code == 4
        assert expected in found.stdout


@pytest.mark.slow
def test_a_baseline_of_ones_own(tmp_path: Path, small_folder: Path) -> None:
    # It has fewer layers, so the numbers can only be those of the baseline.
    spec = replace(load_checkpoint(small_folder / "small.pt").spec.dense(), n_layers=1)
    save_checkpoint(tmp_path / "base", random_checkpoint(spec, 3))
    out = tmp_path / "out"
    arguments = ["-c", small_folder / "small.toml", "-o", out, "--baseline", tmp_path / "base"]
    found = invoke("build", small_folder / "small.pt", *arguments)
    assert found.exit_code == 0, found.output
    manifest = read_manifest(out)
    assert manifest["models"]["dense"]["name"] == "base"
    assert manifest["models"]["dense"]["spec"]["n_layers"] == 1
    assert set(manifest["files"]) >= {"graphs/weights-float32.data", "graphs/weights-baseline-float32.data"}
    report = report_from_json((out / "report.json").read_text())
    assert [row.model for row in report.parity if row.passed] == 2 * ["mod", "dense"]
    flops = {row.model: row.flops for row in report.cost}
    assert flops["dense"] < flops["mod"]
    # The baseline's weights are in the folder, which no longer needs either checkpoint.
    moved = out.rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "base")
    assert invoke("validate", moved).exit_code == 0


def test_targets_lists_all_with_reasons() -> None:
    found = invoke("targets")
    assert found.exit_code == 0
    rows = [re.split(r"  +", line.strip(), maxsplit=2) for line in found.stdout.splitlines()]
    assert [row[0] for row in rows] == list(ENGINES)
    for name, can, reason in rows:
        availability = ENGINES[name].availability()
        verbs = [verb for verb, able in (("builds", availability.builds), ("runs", availability.runs)) if able]
        assert can == (", ".join(verbs) or "-")
        assert reason == availability.reason != ""


def test_config_show_round_trip(tmp_path: Path, config_file: Path) -> None:
    for arguments, expected in (([], config_from_toml(None)), ([config_file], config_from_toml(config_file))):
        found = invoke("config", "show", *arguments)
        assert found.exit_code == 0
        assert found.stderr == ""
        (tmp_path / "again.toml").write_text(found.stdout)
        assert config_from_toml(tmp_path / "again.toml") == expected
        assert set(tomllib.loads(found.stdout)) == set(BuildConfig.model_fields)
        assert invoke("config", "show", tmp_path / "again.toml").stdout == found.stdout


def test_inspect_of_each_kind(small_folder: Path, small: Path) -> None:
    for path, text in (
        (small_folder / "small.pt", "block by topk"),
        (small / "graphs/mod-b1s16.onnx", "FLOPs"),
        (small, "every file is as it was built"),
    ):
        found = invoke("inspect", path)
        assert found.exit_code == 0, found.output
        assert text in found.stdout


def test_folders_that_a_command_chooses(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a folder has the model's name; the demo's second folder is beside the first, and is checked first."""
    working_folder = tmp_path / "here"
    (working_folder / "build").mkdir(parents=True)
    (working_folder / "deep").mkdir()
    monkeypatch.chdir(working_folder)
    for path in ("here/build/tiny", "here-timed"):
        (tmp_path / path).write_text("in the way")
    assert invoke("build", checkpoint).stderr == "error: build/tiny: is a file; name a folder with -o\n"
    # A model lies where its build folder would be.
    (working_folder / "build/model").mkdir()
    (working_folder / "build/model-build").write_text("in the way")
    for name in ("config.json", "model.safetensors"):
        (working_folder / "build/model" / name).write_text("not read yet")
    assert invoke("build", Path("build/model")).stderr == "error: build/model-build: is a file; name a folder with -o\n"
    for out in (".", "deep/.."):
        found = invoke("demo", "-o", out)
        assert found.stderr == f"error: {tmp_path / 'here-timed'}: is a file; name a folder with -o\n"
        assert found.exit_code == 2
    assert len([*tmp_path.rglob("*")]) == 9


def test_commands_and_options_are_frozen() -> None:
    expected = {name: sorted([*COMMON, *options]) for name, options in OPTIONS.items()}
    assert {name: sorted(_names(command)) for name, command in _commands(cli.commands)} == expected
    assert _names(cli) == ["--version", "-h", "--help"]


def _commands(found: Mapping[str, click.Command], prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, subcommand in found.items():
        if isinstance(subcommand, click.Group):
            yield from _commands(subcommand.commands, f"{name} ")
        else:
            yield prefix + name, subcommand


def _names(one: click.Command) -> list[str]:
    context = click.Context(one, help_option_names=["-h", "--help"])
    return [name for parameter in one.get_params(context) for name in (parameter.opts or [parameter.name])]


def test_help_and_version() -> None:
    shown = invoke("--help").stdout
    assert set(re.findall(r"^  (\w+)  ", shown, re.MULTILINE)) == set(cli.commands)
    assert re.fullmatch(r"mod-export, version \S+\n", invoke("--version").stdout)
    module = subprocess.run(
        [sys.executable, "-m", "mod_export", "--version"], capture_output=True, text=True, check=True
    )
    assert module.stdout == invoke("--version").stdout
