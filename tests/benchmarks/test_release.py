"""`make dist`: the same commit gives the same bytes, and files outside of pyproject.toml name the same version."""

from __future__ import annotations

import io
import os
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from benchmarks.release.run import CONSTRAINTS, ROOT, SERVED_WITH, built, differing, digests, packed_again, run, time_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION = PROJECT["version"]
EPOCH = 1_700_000_000


@pytest.mark.slow
def test_two_builds_of_a_commit_are_the_same(tmp_path: Path) -> None:
    commit = run("git", "rev-parse", "HEAD", cwd=ROOT).strip()
    paths = built(tmp_path / "one" / "clone", tmp_path / "first", commit)
    os.utime(tmp_path / "one" / "clone" / "README.md")
    again = built(tmp_path / "another-clone", tmp_path / "second", commit)
    assert differing(digests(paths), digests(again)) == []
    source, wheel = sorted(paths, key=lambda path: path.suffix)
    version = tomllib.loads(run("git", "show", f"{commit}:pyproject.toml", cwd=ROOT))["project"]["version"]
    assert [source.name, wheel.name] == [f"mod_export-{version}.tar.gz", f"mod_export-{version}-py3-none-any.whl"]
    with tarfile.open(source) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
        times = {entry.mtime for entry in packed}
    assert names >= {"CHANGELOG.md", "LICENSE", "README.md", "constraints.txt", "mod_export/py.typed"}
    assert not any(name.startswith(("tests", "benchmarks", ".")) for name in names)
    assert times == {time_of(commit)}
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert tops == {"mod_export", "mod_models", "mod_export_configs", f"mod_export-{version}.dist-info"}


def test_an_archive_depends_on_its_files_alone(tmp_path: Path) -> None:
    archives = []
    for place, mode, when in (("one", 0o644, 10**9), ("another", 0o600, 1.5 * 10**9)):
        folder = tmp_path / place / "mod_export-1"
        folder.mkdir(parents=True)
        for name in ("b.py", "a.py") if place == "one" else ("a.py", "b.py"):
            (folder / name).write_text(name)
            (folder / name).chmod(mode)
            os.utime(folder / name, (when, when))
        packed_again(folder, tmp_path / f"{place}.tar.gz", EPOCH)
        archives.append((tmp_path / f"{place}.tar.gz").read_bytes())
    assert archives[0] == archives[1]
    with tarfile.open(fileobj=io.BytesIO(archives[0])) as packed:
        found = [(entry.name, oct(entry.mode), entry.uname, entry.mtime) for entry in packed]
    assert found == [
        ("mod_export-1", "0o755", "", EPOCH),
        ("mod_export-1/a.py", "0o644", "", EPOCH),
        ("mod_export-1/b.py", "0o644", "", EPOCH),
    ]


def test_what_differs_is_named() -> None:
    assert differing({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "3"}) == ["b", "c", "d"]


def test_a_command_that_fails_shows_why(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^git rev-parse nonsense: exit 128\n(?s:.*)"):
        run("git", "rev-parse", "nonsense", cwd=tmp_path)


def test_one_version_everywhere() -> None:
    for name in ("deploy/kubernetes.yaml", "deploy/kserve.yaml"):
        tags = re.findall(r"/mod-export:(\S+)", (ROOT / name).read_text(encoding="utf-8"))
        assert set(tags) == {VERSION}, name


def test_what_the_release_is_built_with_is_pinned() -> None:
    pins = (ROOT / CONSTRAINTS).read_text(encoding="utf-8").splitlines()
    assert [line for line in pins if re.fullmatch(r"setuptools==[\d.]+", line)]
    image = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    assert f"ARG EXTRAS={SERVED_WITH}\n" in image


def test_classifiers_are_within_what_is_required() -> None:
    assert PROJECT["requires-python"] == ">=3.11"
    minors = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert minors == ["3.11", "3.12", "3.13"]
