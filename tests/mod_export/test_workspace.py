from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uncovered import uncovered

from mod_export.errors import BuildFolderError
from mod_export.workspace import (
    MANIFEST,
    Workspace,
    check_root,
    peak_rss_bytes,
    read_manifest,
    reset_peak_rss,
    verify_files,
    verify_sizes,
)

STEPS = ("one", "two", "three")


def writing(text: str = "content") -> Callable[[Sequence[Path]], Any]:
    def make(paths: Sequence[Path]) -> dict[str, int]:
        for path in paths:
            path.write_text(text, encoding="utf-8")
        return {"files": len(paths)}

    return make


def build(root: Path, steps: Sequence[str] = STEPS, **inputs: Any) -> dict[str, bool]:
    """A whole build of some steps, each with one output; step -> whether it was reused."""
    with Workspace(root) as workspace:
        done = {
            name: workspace.step(name, {"of": name, **inputs}, [f"parts/{name}.txt"], writing(name)) for name in steps
        }
        workspace.close({"made": list(steps)})
    return {name: step.reused for name, step in done.items()}


def files_of(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def rewrite_manifest(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((root / MANIFEST).read_text())
    change(data)
    (root / MANIFEST).write_text(json.dumps(data))


def in_process(root: Path, code: str, wait_for: str = "", **options: Any) -> subprocess.Popen[str]:
    """Starts Python on `code`, which has the build folder as `root`, and waits until it has printed `wait_for`."""
    lines = ["import os, signal, sys, time", "from pathlib import Path", "from mod_export.workspace import Workspace"]
    # Whoever started the tests may have had this signal ignored, and that is inherited.
    lines.append("signal.signal(signal.SIGINT, signal.default_int_handler)")
    script = "\n".join([*lines, "root = Path(sys.argv[1])", textwrap.dedent(code)])
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    assert process.stdout is not None
    if wait_for:
        found = process.stdout.readline().strip()
        assert found == wait_for, process.communicate()
    return process


STOP_IN_SECOND_STEP = """
def stop(paths):
    paths[0].write_text("half")
    print("started", flush=True)
    time.sleep(60)

with Workspace(root) as workspace:
    workspace.step("one", {"of": "one"}, ["parts/one.txt"], lambda paths: paths[0].write_text("one"))
    workspace.step("two", {"of": "two"}, ["parts/two.txt"], stop)
"""


def test_a_step_is_made_and_then_reused(tmp_path: Path) -> None:
    with Workspace(tmp_path / "b") as workspace:
        step = workspace.step("one", {"x": 1}, ["deep/down/a", "b"], writing())
        assert (step.name, step.outputs, step.result, step.reused) == ("one", ("deep/down/a", "b"), {"files": 2}, False)
        again = workspace.step("one", {"x": 1}, ["deep/down/a", "b"], writing("other"))
        assert (again.outputs, again.result, again.reused) == (step.outputs, step.result, True)
        assert again.seconds == step.seconds
    assert files_of(tmp_path / "b") == {"deep/down/a", "b", MANIFEST, ".lock"}
    assert (tmp_path / "b/b").read_text() == "content"


def test_a_second_build_reuses_every_step(tmp_path: Path) -> None:
    assert not any(build(tmp_path / "b").values())
    assert all(build(tmp_path / "b").values())


def test_results_are_plain_data(tmp_path: Path) -> None:
    with Workspace(tmp_path / "b") as workspace:
        made = workspace.step("one", {}, [], lambda paths: {"pair": (1, 2.5), "nan": float("nan")})
    assert made.result["pair"] == [1, 2.5]
    with Workspace(tmp_path / "b") as workspace:
        assert str(workspace.step("one", {}, [], writing()).result) == str(made.result)


def test_files_belong_to_the_umask(tmp_path: Path) -> None:
    build(tmp_path / "b")
    umask = os.umask(0)
    os.umask(umask)
    for name in ("parts/one.txt", MANIFEST):
        assert (tmp_path / "b" / name).stat().st_mode & 0o777 == 0o666 & ~umask


def test_hashes_of_outputs(tmp_path: Path) -> None:
    with Workspace(tmp_path / "b") as workspace:
        workspace.step("one", {}, ["a"], writing(""))
        assert workspace.hash_of("a") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        assert workspace.files() == {"a": {"bytes": 0, "sha256": workspace.hash_of("a")}}
        with pytest.raises(KeyError, match="absent"):
            workspace.hash_of("absent")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=6,
)


@given(inputs=st.dictionaries(st.text(max_size=8), plain, min_size=1, max_size=4), data=st.data())
def test_any_changed_input_makes_a_step_again(
    tmp_path_factory: pytest.TempPathFactory, inputs: dict[str, Any], data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("b")
    with Workspace(root) as workspace:
        assert not workspace.step("one", inputs, ["a"], writing()).reused
        assert workspace.step("one", dict(reversed(inputs.items())), ["a"], writing()).reused
        key = data.draw(st.sampled_from(sorted(inputs)))
        other = data.draw(plain.filter(lambda value: json.dumps(value) != json.dumps(inputs[key])))
        assert not workspace.step("one", {**inputs, key: other}, ["a"], writing()).reused
        less = {name: value for name, value in inputs.items() if name != key}
        assert not workspace.step("one", less, ["a"], writing()).reused


def test_other_outputs_make_a_step_again(tmp_path: Path) -> None:
    with Workspace(tmp_path / "b") as workspace:
        workspace.step("one", {}, ["a"], writing())
        assert not workspace.step("one", {}, ["a", "b"], writing()).reused


def _deleted(path: Path) -> None:
    path.unlink()


def _shortened(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _changed(path: Path) -> None:
    path.write_bytes(b"X" + path.read_bytes()[1:])


def _linked(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


DAMAGE = {
    _deleted: "parts/two.txt is missing or not a regular file",
    _linked: "parts/two.txt is missing or not a regular file",
    _shortened: "parts/two.txt has 2 bytes, 3 were written",
    _changed: r"parts/two.txt has been changed since it was built \(SHA-256 differs\)",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_output_is_made_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    root = tmp_path / "b"
    build(root)
    damage(root / "parts/two.txt")
    assert build(root) == {"one": True, "two": False, "three": True}
    path = root / "parts/two.txt"
    assert path.read_text() == "two"
    assert not path.is_symlink()


@pytest.mark.parametrize(("damage", "message"), DAMAGE.items())
def test_damage_is_reported(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    root = tmp_path / "b"
    build(root)
    files = read_manifest(root)["files"]
    verify_files(root, files)
    damage(root / "parts/two.txt")
    with pytest.raises(BuildFolderError, match=f"{message}. Build again to repair it"):
        verify_files(root, files)


def test_steps_that_are_no_longer_asked_for_are_forgotten_with_their_files(tmp_path: Path) -> None:
    root = tmp_path / "b"
    with Workspace(root) as workspace:
        workspace.step("old", {}, ["old/one/a", "shared/b", "shared/c"], writing())
        workspace.close({})
    with Workspace(root) as workspace:
        workspace.step("new", {}, ["shared/b"], writing("new"))
        workspace.close({"header": 1})
    assert files_of(root) == {"shared/b", MANIFEST, ".lock"}
    assert not (root / "old").exists()
    manifest = read_manifest(root)
    assert manifest["steps"].keys() == {"new"}
    assert manifest["files"].keys() == {"shared/b"}
    assert manifest["header"] == 1


def test_a_stale_file_that_is_already_gone_is_no_error(tmp_path: Path) -> None:
    root = tmp_path / "b"
    build(root)
    (root / "parts/three.txt").unlink()
    assert build(root, STEPS[:2]) == {"one": True, "two": True}


def test_a_finished_build_has_a_header_until_something_in_it_changes(tmp_path: Path) -> None:
    root = tmp_path / "b"
    build(root)
    with Workspace(root) as workspace:
        workspace.step("one", {"of": "one"}, ["parts/one.txt"], writing())
        assert read_manifest(root)["made"] == list(STEPS)
        workspace.step("two", {"of": "other"}, ["parts/two.txt"], writing())
        assert read_manifest(root).keys() == {"format", "format_version", "steps"}


def test_a_failing_step_leaves_what_was_there(tmp_path: Path) -> None:
    root = tmp_path / "b"
    build(root)
    before = {name: (root / name).read_bytes() for name in files_of(root)}

    def fail(paths: Sequence[Path]) -> None:
        paths[0].write_text("half", encoding="utf-8")
        raise RuntimeError("no luck")

    with Workspace(root) as workspace, pytest.raises(RuntimeError, match="no luck"):
        workspace.step("two", {"of": "other"}, ["parts/two.txt"], fail)
    assert {name: (root / name).read_bytes() for name in files_of(root)} == before
    assert list(root.glob(".partial-*")) == []


@pytest.mark.parametrize(("kill", "left"), [(signal.SIGKILL, True), (signal.SIGINT, False)])
def test_the_next_run_resumes_after_a_kill_during_a_step(tmp_path: Path, kill: signal.Signals, left: bool) -> None:
    root = tmp_path / "b"
    process = in_process(root, STOP_IN_SECOND_STEP, "started")
    process.send_signal(kill)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (-kill if left else -signal.SIGINT), errors
    assert (root / "parts/one.txt").read_text() == "one"
    assert not (root / "parts/two.txt").exists()
    assert read_manifest(root)["steps"].keys() == {"one"}
    # Nobody can tidy up after SIGKILL but the next run.
    assert bool(list(root.glob(".partial-*"))) is left
    assert build(root) == {"one": True, "two": False, "three": False}
    assert files_of(root) == {*(f"parts/{name}.txt" for name in STEPS), MANIFEST, ".lock"}


def test_the_next_run_resumes_after_a_kill_between_steps(tmp_path: Path) -> None:
    root = tmp_path / "b"
    code = """
    with Workspace(root) as workspace:
        workspace.step("one", {"of": "one"}, ["parts/one.txt"], lambda paths: paths[0].write_text("one"))
        print("done", flush=True)
        time.sleep(60)
    """
    process = in_process(root, code, "done")
    process.kill()
    process.communicate(timeout=60)
    assert files_of(root) == {"parts/one.txt", MANIFEST, ".lock"}
    assert build(root) == {"one": True, "two": False, "three": False}


def test_a_kill_while_outputs_are_put_in_place_is_noticed(tmp_path: Path) -> None:
    root = tmp_path / "b"
    build(root)
    code = """
    import mod_export.workspace
    place = mod_export.workspace._place
    def slow(path, final):
        place(path, final)
        if final.name == "two.txt":
            print("placed", flush=True)
            time.sleep(60)
    mod_export.workspace._place = slow
    with Workspace(root) as workspace:
        workspace.step("two", {"of": "other"}, ["parts/two.txt"], lambda paths: paths[0].write_text("new"))
    """
    process = in_process(root, code, "placed")
    process.kill()
    process.communicate(timeout=60)
    assert (root / "parts/two.txt").read_text() == "new"
    assert "files" not in read_manifest(root)
    assert build(root) == {"one": True, "two": False, "three": True}


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    root = tmp_path / "b"
    build(root)
    (root / ".partial-manifest").write_text("{")
    (root / ".partial-folder/graphs").mkdir(parents=True)
    (root / ".partial-folder/graphs/half.onnx").write_text("half")
    (root / "parts/.partial-probe.onnx").write_text("half")
    (root / ".partial-link").symlink_to(tmp_path, target_is_directory=True)
    assert all(build(root).values())
    assert files_of(root) == {*(f"parts/{name}.txt" for name in STEPS), MANIFEST, ".lock"}


def test_two_builds_at_once_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "b"
    process = in_process(root, STOP_IN_SECOND_STEP, "started")
    try:
        with pytest.raises(BuildFolderError, match="another build is writing here; wait for it, or name another -o"):
            build(root)
        assert list(root.glob(".partial-*"))  # The other build's unfinished step is left alone.
    finally:
        process.kill()
        process.communicate(timeout=60)
    assert build(root)["one"] is True


def test_the_lock_is_given_back(tmp_path: Path) -> None:
    root = tmp_path / "b"
    with Workspace(root):
        pass
    with (root / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_foreign_folder_is_refused_and_kept(tmp_path: Path) -> None:
    for name in ("d", "b", "c", "a"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(BuildFolderError, match=r"holds files that mod-export did not write \(a, b, c\); name an empty"):
        build(tmp_path)
    assert files_of(tmp_path) == {"a", "b", "c", "d"}


def test_a_file_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("mine")
    with pytest.raises(BuildFolderError, match="b: is a file; name a folder with -o"):
        build(tmp_path / "b")
    assert (tmp_path / "b").read_text() == "mine"


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


def test_a_manifest_of_another_format_version_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "b")
    rewrite_manifest(tmp_path / "b", lambda data: data.update(format_version=2))
    with pytest.raises(BuildFolderError, match="format version 2, this release reads 1"):
        build(tmp_path / "b")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["steps"]["one"].update(fingerprint="0"),
        lambda data: data["steps"].update(one=5),
        lambda data: data["files"].popitem(),
        lambda data: data.pop("checksum"),
        lambda data: data.update(checksum=None),
        lambda data: data.update(extra=1),
    ],
)
def test_a_manifest_that_was_edited_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    build(tmp_path / "b")
    rewrite_manifest(tmp_path / "b", change)
    with pytest.raises(BuildFolderError, match="has been changed since it was written; delete the folder and build"):
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


def test_no_manifest(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    for root in (tmp_path, tmp_path / "absent", file):
        with pytest.raises(BuildFolderError, match=r"no manifest\.json here, so this is not a build folder"):
            read_manifest(root)


def test_a_manifest_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(BuildFolderError, match=r"manifest\.json: cannot be read \(Is a directory\)"):
        read_manifest(tmp_path)


def test_a_folder_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BuildFolderError, match=r"cannot write in .*file; name another folder with -o"):
        build(tmp_path / "file" / "b")
    assert files_of(tmp_path) == {"file"}


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(BuildFolderError, match=r"cannot write .* \(File name too long\)"):
        check_root(tmp_path / ("x" * 300))


def test_a_dangling_link_cannot_be_written(tmp_path: Path) -> None:
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


def test_peak_memory_is_that_since_the_last_reset() -> None:
    reset_peak_rss()
    before = peak_rss_bytes()
    held = bytearray(64 * 2**20)
    during = peak_rss_bytes()
    assert during - before > 48 * 2**20
    del held
    reset_peak_rss()
    assert peak_rss_bytes() < during


def test_steps_may_be_made_at_once(tmp_path: Path) -> None:
    """Each waits for the other, so that one after the other would never end."""
    meeting = threading.Barrier(4, timeout=30)

    def make(paths: Sequence[Path]) -> int:
        meeting.wait()
        paths[0].write_text(paths[0].name)
        return meeting.parties

    with Workspace(tmp_path / "build") as workspace, ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(workspace.step, f"step/{i}", {}, [f"parts/{i}.txt"], make) for i in range(4)]
        steps = [one.result() for one in waiting]
        workspace.close({"header": 1})
    assert [step.result for step in steps] == [4] * 4
    assert set(read_manifest(tmp_path / "build")["files"]) == {f"parts/{i}.txt" for i in range(4)}
    with Workspace(tmp_path / "build") as workspace:
        assert all(workspace.step(f"step/{i}", {}, [f"parts/{i}.txt"], make).reused for i in range(4))


def test_numbers_as_keys_may_sort_otherwise_as_text(tmp_path: Path) -> None:
    """A model with routed layers 9 and 11: JSON has no numbers for keys, and "11" comes before "9"."""
    with Workspace(tmp_path / "build") as workspace:
        workspace.close({"k_by_layer": {9: 1, 11: 2}})
    assert read_manifest(tmp_path / "build")["k_by_layer"] == {"9": 1, "11": 2}


def test_files_of_another_size_are_found_without_reading_them(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("four")
    verify_sizes(tmp_path, {"a": {"bytes": 4, "sha256": "never asked for"}})
    with pytest.raises(
        BuildFolderError, match=r"a has 4 bytes, 5 were written; b is missing or not a regular file\. Build"
    ):
        verify_sizes(tmp_path, {"a": {"bytes": 5}, "b": {"bytes": 1}})
