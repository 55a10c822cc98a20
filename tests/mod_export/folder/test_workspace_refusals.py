"""Where a workspace is refused: folders of other programs, damaged manifests, and places that cannot be written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import uncovered
from hypothesis import given
from hypothesis import strategies as st
from workspaces import STEPS, build, files_of, in_process, writing

from benchmarks.mishaps.shim import compiled_shim
from mod_export.errors import BuildFolderError
from mod_export.folder.manifest import MANIFEST, read_manifest
from mod_export.folder.workspace import Workspace, check_root


def test_a_foreign_folder_is_refused_and_kept(tmp_path: Path) -> None:
    for name in ("d", "b", "c", "a"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(BuildFolderError, match=r"holds files that mod-export did not write \(a, b, c\); name an empty"):
        build(tmp_path)
    assert files_of(tmp_path) == {"a", "b", "c", "d"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"manifest\.json: damaged \(.*\); delete the folder and build again"),
        ("\xff", r"manifest\.json: damaged \('utf-8' codec.*\); delete the folder and build again"),
        ("[" * 100_000, r"manifest\.json: damaged \(.*recursion.*\); delete"),
        ("[]", r"manifest\.json: not a manifest of mod-export; name another folder"),
        ('{"name": "my web app", "manifest_version": 3}', "not a manifest of mod-export; name another folder"),
        ('{"format": "mod-export build folder"}', "not a manifest of mod-export; name another folder"),
    ],
)
def test_a_manifest_that_is_none_is_refused_and_kept(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(BuildFolderError, match=message):
        build(tmp_path)
    assert (tmp_path / MANIFEST).read_text(encoding="latin-1") == text
    assert files_of(tmp_path) == {MANIFEST}


def test_a_manifest_that_was_edited_is_refused(tmp_path: Path) -> None:
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda data: data["steps"]["one"].update(fingerprint="0"),
        lambda data: data["steps"].update(one=5),
        lambda data: data["files"].popitem(),
        lambda data: data.pop("checksum"),
        lambda data: data.update(checksum=None),
        lambda data: data.update(extra=1),
    ]
    build(tmp_path / "b")
    path = tmp_path / "b" / MANIFEST
    text = path.read_text()
    for change in changes:
        data = json.loads(text)
        change(data)
        path.write_text(json.dumps(data))
        with pytest.raises(
            BuildFolderError, match="has been changed since it was written; delete the folder and build"
        ):
            read_manifest(tmp_path / "b")


@given(position=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_any_flipped_byte_of_a_manifest_is_noticed_or_means_the_same(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    root = tmp_path_factory.getbasetemp() / "flipped"
    if not root.exists():
        build(root)
    good = (root / MANIFEST).read_bytes()
    expected = read_manifest(root)
    bad = bytearray(good)
    bad[position % len(bad)] = byte
    (root / MANIFEST).write_bytes(bad)
    try:
        with contextlib.suppress(BuildFolderError):
            assert read_manifest(root) == expected
    finally:
        (root / MANIFEST).write_bytes(good)


def test_names_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(BuildFolderError, match=r"manifest\.json: cannot be read \(Is a directory\)"):
        read_manifest(tmp_path)
    with pytest.raises(BuildFolderError, match=r"cannot write .* \(File name too long\)"):
        check_root(tmp_path / ("x" * 300))
    (tmp_path / "b").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BuildFolderError, match=r"cannot write .* \(File exists\)"):
        build(tmp_path / "b")
    assert not (tmp_path / "nowhere").exists()


def test_a_name_taken_by_a_folder_cannot_be_written(tmp_path: Path) -> None:
    root = tmp_path / "b"
    build(root)
    (root / "taken").mkdir()
    with (
        Workspace(root) as workspace,
        pytest.raises(BuildFolderError, match=r"cannot write .*taken.* \(Is a dir"),
    ):
        workspace.step("taken", {}, ["taken"], writing())
    assert list(root.glob(".partial-*")) == []


def test_other_errors_of_a_step_are_not_disguised(tmp_path: Path) -> None:
    def fail(paths: Sequence[Path]) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with Workspace(tmp_path / "b") as workspace, pytest.raises(OSError, match="Input/output error"):
        workspace.step("one", {}, ["a"], fail)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    root = small_disk / "b"
    assert build(root, STEPS[:2]) == {"one": False, "two": False}
    with Workspace(root) as workspace, pytest.raises(BuildFolderError, match=r"no room left to write .*; free some"):
        workspace.step("large", {}, ["large"], lambda paths: paths[0].write_bytes(bytes(2**20)))
    assert files_of(root) == {"parts/one.txt", "parts/two.txt", MANIFEST, ".lock"}
    assert list(root.glob(".partial-*")) == []
    assert build(root, STEPS[:2]) == {"one": True, "two": True}


def test_a_disk_too_full_for_a_new_folder(small_disk: Path) -> None:
    with contextlib.suppress(OSError):
        (small_disk / "other").write_bytes(bytes(2**20))
    with pytest.raises(BuildFolderError, match="no room left to write"):
        build(small_disk / "b")
    assert files_of(small_disk) == {"other"}
    assert not (small_disk / "b").exists()


def test_a_full_disk_leaves_a_finished_build_as_it_was(small_disk: Path) -> None:
    root = small_disk / "b"
    build(root)
    before = {name: (root / name).read_bytes() for name in files_of(root)}
    other = small_disk / "other"
    with contextlib.suppress(OSError):
        other.write_bytes(bytes(2**20))
    with pytest.raises(BuildFolderError, match="no room left to write"):
        build(root)
    assert {name: (root / name).read_bytes() for name in files_of(root)} == before
    other.unlink()
    assert all(build(root).values())


def test_a_read_only_file_system(small_disk: Path) -> None:
    root = small_disk / "b"
    build(root)
    before = files_of(root)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(BuildFolderError, match=r"cannot write in .*; name another folder with -o"):
        build(root)
    assert files_of(root) == before


def test_a_file_over_the_allowed_size(tmp_path: Path) -> None:
    root = tmp_path / "b"
    code = """
    from mod_export.errors import BuildFolderError
    with Workspace(root) as workspace:
        workspace.step("one", {"of": "one"}, ["parts/one.txt"], lambda paths: paths[0].write_text("one"))
        try:
            workspace.step("large", {}, ["large"], lambda paths: paths[0].write_bytes(bytes(2**20)))
        except BuildFolderError as error:
            print(error, flush=True)
    """
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
    process = in_process(root, code, preexec_fn=limit, env=uncovered())
    output, errors = process.communicate(timeout=60)
    assert "no room left to write" in output, errors
    assert files_of(root) == {"parts/one.txt", MANIFEST, ".lock"}
    assert list(root.glob(".partial-*")) == []


@pytest.mark.fast("0", "3", "5")
@pytest.mark.parametrize("number", range(6))
def test_a_rename_that_fails(tmp_path: Path, number: int) -> None:
    """As on a network file system. The steps before it are kept, and the next build goes on after them."""
    root = tmp_path / "b"
    code = """
    import ctypes, errno, os
    from mod_export.errors import BuildFolderError
    from workspaces import STEPS, build
    ctypes.CDLL(None).mishap_watch(os.fsencode(root))
    ctypes.CDLL(None).mishap_fail_rename({number}, errno.EBUSY, 0)
    try:
        build(root)
    except BuildFolderError as error:
        print(error, flush=True)
    """.replace("{number}", str(number))
    library = {"LD_PRELOAD": str(compiled_shim(tmp_path)), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = in_process(root, code, env={**uncovered(), **library})
    output, errors = process.communicate(timeout=60)
    assert re.search(r"b: writing .* failed \(Device or resource busy\); what is finished is kept", output), errors
    before = files_of(root)
    build(root)
    assert before <= files_of(root)
    assert list(root.glob(".partial-*")) == []
