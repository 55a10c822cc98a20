"""Build folders of every release: those of this format are run and served, the others are refused with the way out.

Nothing here needs PyTorch: it is what a server does. `make pythons` runs these tests, alone and in an environment with
the extras of a server only, in every Python that it finds.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np
import pytest
from click.testing import CliRunner

import mod_export
from mod_export.cli import cli
from mod_export.config import config_from_toml
from mod_export.errors import BuildFolderError
from mod_export.folder.manifest import FORMAT_VERSION, open_folder, read_manifest, with_checksum

ROOT = Path(__file__).parents[2]
FOLDERS = Path(__file__).parent / "folders"
OPENED = ("0.2.0",)
REFUSED = {"0.1.0": 1}
"""Release -> the format version of its folders."""
TOLERANCE = 1e-3
PATIENCE_S = 60
ASK = build_opener(ProxyHandler({})).open


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every build folder, each under the name of its release."""
    root = tmp_path_factory.mktemp("released")
    for archive in FOLDERS.glob("*.tar.gz"):
        with tarfile.open(archive) as packed:
            packed.extractall(root, filter="data")
    return root


def results(release: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDERS / f"{release}.json").read_text(encoding="utf-8"))
    return found


def ids_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)[None]


def test_a_folder_of_every_release_is_kept() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## (\d\S*)", changelog, re.MULTILINE)
    assert sorted(released) == sorted([*OPENED, *REFUSED]), "keep a folder of the new release: folders/README.md"
    assert all((FOLDERS / f"{release}.tar.gz").exists() for release in released)


@pytest.mark.parametrize("release", OPENED)
def test_it_computes_what_it_computed(folders: Path, release: str) -> None:
    manifest = json.loads((folders / release / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["format_version"] == FORMAT_VERSION, (
        f"folders of {release} have format version {manifest['format_version']}, and this release reads "
        f"{FORMAT_VERSION}. Move {release} from OPENED to REFUSED; say in the changelog, under what users have to "
        "change, that folders have to be built again"
    )
    expected = results(release)
    with mod_export.load(folders / release) as deployment:
        logits_V = deployment.run(ids_of(expected["prompt"]))[0, -1]
    np.testing.assert_allclose(logits_V, expected["logits"], rtol=TOLERANCE, atol=TOLERANCE)
    with mod_export.load_generator(folders / release) as generator:
        new = len(expected["ids"])
        (written,) = generator.generate([expected["prompt"]], new, temperature=0, ignore_eos=True)
    assert written.ids == expected["ids"]
    assert {str(site): tokens for site, tokens in written.ran.items()} == expected["ran"]


def test_a_gate_that_is_newer_than_a_folder_has_its_default(folders: Path, tmp_path: Path) -> None:
    """Otherwise every new gate would make all folders of earlier releases unreadable."""
    copy = shutil.copytree(folders / OPENED[-1], tmp_path / "folder")
    manifest = read_manifest(copy)
    del manifest["config"]["parity"]["int4"]["max_kl"]
    (copy / "manifest.json").write_text(json.dumps(with_checksum(manifest)), encoding="utf-8")
    assert open_folder(copy).config.parity.int4.max_kl == config_from_toml(None).parity.int4.max_kl


def posted(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with ASK(request, timeout=PATIENCE_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder in a process of its own, and yields the address."""
    command = [sys.executable, "-m", "mod_export", "serve", str(folder), "--port", "0", "--drain", "5"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines: list[str] = []
        while not lines or not (found := re.search(r"(http://\S+)", lines[-1])):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


@pytest.mark.parametrize("release", OPENED)
def test_it_is_served(folders: Path, release: str) -> None:
    expected = results(release)
    with served(folders / release) as url:
        with ASK(f"{url}/v1/models", timeout=PATIENCE_S) as answer:
            name = json.load(answer)["data"][0]["id"]
        body = {"model": name, "prompt": expected["prompt"], "max_tokens": len(expected["ids"]), "temperature": 0}
        choice = posted(f"{url}/v1/completions", {**body, "ignore_eos": True})["choices"][0]
        ids = {"name": "input_ids", "shape": [1, 16], "datatype": "INT64", "data": [1] * 16}
        shape = posted(f"{url}/v2/models/{name}/infer", {"inputs": [ids]})["outputs"][0]["shape"]
    assert choice["text"] == bytes(expected["ids"]).decode("utf-8", "replace")
    assert shape == [1, 16, 256]


@pytest.mark.parametrize("release", OPENED)
@pytest.mark.parametrize("command", ["report", "inspect"])
def test_it_is_shown(folders: Path, release: str, command: str) -> None:
    found = CliRunner().invoke(cli, [command, str(folders / release)])
    assert found.exit_code == 0, found.output
    assert "kept" in found.stdout


# Folders that this release does not read.

WAYS: dict[str, Callable[[Path], object]] = {
    "load": mod_export.load,
    "load_generator": mod_export.load_generator,
    "open_folder": open_folder,
}
COMMANDS = ["report", "bench", "inspect", "serve", "generate", "triton"]
if find_spec("torch"):  # Without it, `validate` says so and opens nothing.
    COMMANDS.append("validate")


def refusal(release: str) -> str:
    return (
        rf"{release}: format version {REFUSED[release]}, written by mod-export {re.escape(release)}; this release "
        rf"reads version {FORMAT_VERSION}: delete the folder and build again \(mod-export build kept\.pt.*\)"
    )


@pytest.mark.parametrize("release", REFUSED)
def test_another_format_is_refused_with_the_command(folders: Path, release: str, tmp_path: Path) -> None:
    for opened in WAYS.values():
        with pytest.raises(BuildFolderError, match=f"{refusal(release)}$"):
            opened(folders / release)
    for command in COMMANDS:
        more = {"generate": ["text"], "triton": ["-o", str(tmp_path / "repository")], "serve": ["--port", "0"]}
        found = CliRunner().invoke(cli, [command, str(folders / release), *more.get(command, [])])
        assert (found.exit_code, found.stdout) == (2, ""), (command, found.output)
        assert re.search(f"^error: .*{refusal(release)}\n$", found.stderr), (command, found.stderr)


@pytest.mark.parametrize("report", [None, "{", "[]", '{"command": 1}', "{}"])
def test_without_the_command_the_model_is_named_by_the_user(folders: Path, tmp_path: Path, report: str | None) -> None:
    folder = Path(shutil.copytree(folders / "0.1.0", tmp_path / "0.1.0"))
    (folder / "report.json").unlink()
    if report is not None:
        (folder / "report.json").write_text(report, encoding="utf-8")
    with pytest.raises(BuildFolderError, match=r"delete the folder and build again \(mod-export build MODEL\)$"):
        open_folder(folder)


@pytest.mark.parametrize("release", OPENED)
def test_engines_that_read_prompts_whole_are_refused(folders: Path, release: str, tmp_path: Path) -> None:
    """As in folders of this format that were built before 0.2.0 was released; their whole rows run."""
    folder = Path(shutil.copytree(folders / release, tmp_path / "before"))
    manifest = read_manifest(folder)
    for graph in manifest["graphs"]:
        if graph["role"] == "prefill":
            del graph["inputs"]["positions"]
    (folder / "manifest.json").write_text(json.dumps(with_checksum(manifest)), encoding="utf-8")
    with mod_export.load(folder) as deployment:
        assert deployment.run(ids_of("def main():")).shape == (1, 11, 256)
    message = r"before: its engines read prompts whole, as engines did before mod-export 0\.2\.0 was released; delete"
    with pytest.raises(
        BuildFolderError, match=rf"{message} the folder and build again \(mod-export build kept\.pt.*\)$"
    ):
        mod_export.load_generator(folder)
