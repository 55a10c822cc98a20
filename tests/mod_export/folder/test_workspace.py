"""Steps of a build are made, reused, made again, forgotten, and resumed after a kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workspaces import STEPS, build, files_of, in_process, writing

from mod_export.errors import BuildFolderError
from mod_export.folder.files import FileEntry, verify_files
from mod_export.folder.manifest import MANIFEST, read_manifest, with_checksum
from mod_export.folder.workspace import Workspace, amend

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
        assert (step.name, [*step.outputs], step.result, step.reused) == (
            "one",
            ["deep/down/a", "b"],
            {"files": 2},
            False,
        )
        again = workspace.step("one", {"x": 1}, ["deep/down/a", "b"], writing("other"))
        assert (again.outputs, again.result, again.reused) == (step.outputs, step.result, True)
        assert again.seconds == step.seconds
        assert not workspace.step("one", {"x": 1}, ["deep/down/a"], writing()).reused
    assert files_of(tmp_path / "b") == {"deep/down/a", "b", MANIFEST, ".lock"}
    assert (tmp_path / "b/b").read_text() == "content"
    umask = os.umask(0)
    os.umask(umask)
    for name in ("b", MANIFEST):
        assert (tmp_path / "b" / name).stat().st_mode & 0o777 == 0o666 & ~umask


def test_results_are_plain_data(tmp_path: Path) -> None:
    """JSON has no numbers as keys, and as text "11" comes before "9"."""
    with Workspace(tmp_path / "b") as workspace:
        step = workspace.step("one", {}, [], lambda paths: {"pair": (1, 2.5), "nan": float("nan")})
        workspace.close({"k_by_layer": {9: 1, 11: 2}})
    assert step.result["pair"] == [1, 2.5]
    assert read_manifest(tmp_path / "b")["k_by_layer"] == {"9": 1, "11": 2}
    with Workspace(tmp_path / "b") as workspace:
        assert str(workspace.step("one", {}, [], writing()).result) == str(step.result)


def test_hashes_of_outputs(tmp_path: Path) -> None:
    with Workspace(tmp_path / "b") as workspace:
        workspace.step("one", {}, ["a"], writing(""))
        assert workspace.hash_of("a") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        assert workspace.files() == {"a": FileEntry(bytes=0, sha256=workspace.hash_of("a"))}
        with pytest.raises(KeyError, match="absent"):
            workspace.hash_of("absent")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=6,
)


@settings(max_examples=30)
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


def _linked(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (Path.unlink, "is missing or not a regular file"),
    (_linked, "is missing or not a regular file"),
    (lambda path: path.write_text("tw"), "has 2 bytes, 3 were written"),
    (lambda path: path.write_text("Two"), r"has been changed since it was built \(SHA-256 differs\)"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_output_is_reported_and_made_again(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    root, path = tmp_path / "b", tmp_path / "b/parts/two.txt"
    build(root)
    files = {name: FileEntry(**entry) for name, entry in read_manifest(root)["files"].items()}
    verify_files(root, files)
    damage(path)
    with pytest.raises(BuildFolderError, match=f"b: parts/two.txt {message}. Build again to repair it"):
        verify_files(root, files)
    assert build(root) == {"one": True, "two": False, "three": True}
    assert path.read_text() == "two"
    assert not path.is_symlink()


def test_steps_that_are_no_longer_asked_for_are_forgotten_with_their_files(tmp_path: Path) -> None:
    root = tmp_path / "b"
    with Workspace(root) as workspace:
        workspace.step("old", {}, ["old/one/a", "shared/b", "shared/c"], writing())
        workspace.close({})
    (root / "shared/c").unlink()  # It may be gone already.
    with Workspace(root) as workspace:
        workspace.step("new", {}, ["shared/b"], writing("new"))
        workspace.close({"header": 1})
    assert files_of(root) == {"shared/b", MANIFEST, ".lock"}
    assert not (root / "old").exists()
    manifest = read_manifest(root)
    assert manifest["steps"].keys() == {"new"}
    assert manifest["files"].keys() == {"shared/b"}
    assert manifest["header"] == 1


def test_a_step_that_failed_is_left_out_with_what_it_made_before(tmp_path: Path) -> None:
    def fail(paths: Sequence[Path]) -> None:
        paths[0].write_text("half")
        raise ValueError("no")

    for make in (writing(), fail):
        with Workspace(tmp_path / "b") as workspace:
            workspace.step("one", {}, ["one"], writing())
            with contextlib.suppress(ValueError):
                workspace.step("two", {"by": make.__name__}, ["two"], make)
            workspace.step("three", {}, ["three"], writing())
            workspace.close({})
        left = {"one", "three"} | ({"two"} if make is not fail else set())
        assert read_manifest(tmp_path / "b")["files"].keys() == left
        assert files_of(tmp_path / "b") == {*left, MANIFEST, ".lock"}
    with Workspace(tmp_path / "b") as workspace:
        reused = [workspace.step(name, {}, [name], writing()).reused for name in ("one", "three")]
        workspace.leave_out("three")
        workspace.close({})
    assert reused == [True, True]
    assert files_of(tmp_path / "b") == {"one", MANIFEST, ".lock"}


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
    # After SIGKILL, only the next run can clean up.
    assert bool(list(root.glob(".partial-*"))) is left
    assert build(root) == {"one": True, "two": False, "three": False}
    assert files_of(root) == {*(f"parts/{name}.txt" for name in STEPS), MANIFEST, ".lock"}


def test_a_kill_while_outputs_are_put_in_place_is_noticed(tmp_path: Path) -> None:
    root = tmp_path / "b"
    build(root)
    code = """
    import mod_export.folder.workspace
    place = mod_export.folder.workspace._place
    def slow(path, final):
        place(path, final)
        if final.name == "two.txt":
            print("placed", flush=True)
            time.sleep(60)
    mod_export.folder.workspace._place = slow
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


def test_results_are_not_added_to_a_folder_in_which_another_build_began(tmp_path: Path) -> None:
    root = tmp_path / "b"
    build(root)
    data = read_manifest(root)
    (root / MANIFEST).write_text(json.dumps(with_checksum({key: data[key] for key in data if key != "files"})))
    with pytest.raises(BuildFolderError, match="another build has begun here and has not ended; build again"):
        amend(root, lambda: ({"verified": True}, {}))


def test_two_builds_at_once_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "b"
    process = in_process(root, STOP_IN_SECOND_STEP, "started")
    try:
        with pytest.raises(BuildFolderError, match="another build is writing here; wait for it, or name another -o"):
            build(root)
        assert list(root.glob(".partial-*"))  # The other build's unfinished step stays.
    finally:
        process.kill()
        process.communicate(timeout=60)
    assert build(root)["one"] is True


def test_steps_may_be_made_at_once(tmp_path: Path) -> None:
    """Each step waits for the others, so running them one after the other would never end."""
    meeting = threading.Barrier(4, timeout=30)

    def make(paths: Sequence[Path]) -> int:
        meeting.wait()
        paths[0].write_text(paths[0].name)
        return meeting.parties

    with Workspace(tmp_path / "build") as workspace, ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(workspace.step, f"step/{i}", {}, [f"parts/{i}.txt"], make) for i in range(4)]
        steps = [future.result() for future in waiting]
        workspace.close({"header": 1})
    assert [step.result for step in steps] == [4] * 4
    assert set(read_manifest(tmp_path / "build")["files"]) == {f"parts/{i}.txt" for i in range(4)}
    with Workspace(tmp_path / "build") as workspace:
        assert all(workspace.step(f"step/{i}", {}, [f"parts/{i}.txt"], make).reused for i in range(4))
