"""New versions of a folder that is being served: taken without losing a text, or refused while the old one goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from build_folders import flip, rewrite_manifest
from serving import PATIENCE_S, command, metric, until

from mod_export.folder.manifest import MANIFEST
from mod_export.serve import reload

STEPS = """
import pathlib, time
from mod_export.runtime.decoder import Decoder
step, first = Decoder.step, []
def held(self, *arguments):
    first[:] = first or [self]
    while {held} and not pathlib.Path({go!r}).exists():
        time.sleep(0.01)
    return step(self, *arguments)
Decoder.step = held
"""
"""Holds the steps of engines until a file exists: those of the first version only, or of both."""
OF_THE_FIRST, OF_BOTH = "self is first[0]", "True"
LONG = {"prompt": "def f(", "max_tokens": 40, "ignore_eos": True, "temperature": 0}


class Link:
    """A symbolic link that is served, and leads to one version after the other."""

    def __init__(self, path: Path, version: Path) -> None:
        self.path = path
        self.path.symlink_to(version)

    def lead_to(self, version: Path) -> None:
        new = self.path.with_name("new")
        new.symlink_to(version)
        os.replace(new, self.path)  # noqa: PTH105  # Atomic, as `mv --no-target-directory` is.


@pytest.fixture
def link(written: Path, tmp_path: Path) -> Link:
    return Link(tmp_path / "current", written)


@pytest.fixture
def again(written: Path, tmp_path: Path) -> Path:
    """Another version: the same files, under another name of the model."""
    return copied(written, tmp_path / "again", "again")


def copied(written: Path, path: Path, name: str) -> Path:
    shutil.copytree(written, path, ignore=shutil.ignore_patterns(".partial-*"))
    rewrite_manifest(path, lambda manifest: manifest["models"]["mod"].update(name=name))
    return path


def served(url: str) -> str:
    name: str = httpx2.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"][0]["id"]
    return name


class Asking:
    """A client that asks for one long text."""

    def __init__(self, url: str) -> None:
        self.answer: httpx2.Response | None = None
        self._url = url
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()
        until(lambda: metric(url, "busy_rows") > 0)

    def _ask(self) -> None:
        self.answer = httpx2.post(f"{self._url}/v1/completions", json=LONG, timeout=PATIENCE_S)

    def text(self) -> dict[str, Any]:
        self._thread.join(PATIENCE_S)
        assert self.answer is not None
        assert self.answer.status_code == 200, self.answer.text
        found: dict[str, Any] = self.answer.json()
        return found


def log_of(process: subprocess.Popen[str]) -> str:
    """Ends the server, and returns the rest of what it wrote."""
    process.terminate()
    assert process.stderr is not None
    output = process.stderr.read()
    assert process.wait(PATIENCE_S) == 0, output
    return output


def test_a_text_ends_on_the_version_on_which_it_began(link: Link, again: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with command(link.path, "--reload", code=STEPS.format(held=OF_THE_FIRST, go=str(go))) as (process, url):
        before = served(url)
        asking = Asking(url)
        link.lead_to(again)
        until(lambda: served(url) == "again")
        # The old version still writes; the new one is not kept waiting by it.
        assert asking.answer is None
        new = httpx2.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 1}, timeout=PATIENCE_S).json()
        assert (new["model"], asking.answer) == ("again", None)
        go.touch()
        text = asking.text()
        assert (text["model"], text["usage"]["completion_tokens"]) == (before, 40)
        # One registry counts both.
        assert metric(url, 'texts_total{finish="length"}') == 2
        assert metric(url, 'reloads_total{result="taken"}') == 1
        assert "info: again: serves a new version: writes " in log_of(process)


@pytest.mark.slow
def test_no_request_is_lost_over_many_versions(link: Link, written: Path, again: Path) -> None:
    statuses: list[int] = []
    stop = threading.Event()

    def ask(url: str) -> None:
        with httpx2.Client(timeout=PATIENCE_S) as client:
            while not stop.is_set():
                body = {"prompt": "def f(", "max_tokens": 8, "ignore_eos": True}
                statuses.append(client.post(f"{url}/v1/completions", json=body).status_code)

    with command(link.path, "--reload") as (process, url):
        clients = [threading.Thread(target=ask, args=[url]) for _ in range(3)]
        for client in clients:
            client.start()
        for count, version in enumerate((again, written, again), start=1):
            link.lead_to(version)
            until(lambda: metric(url, 'reloads_total{result="taken"}') == count)  # noqa: B023  # Called at once.
        stop.set()
        for client in clients:
            client.join(PATIENCE_S)
        log_of(process)
    assert len(statuses) > 20
    assert set(statuses) == {200}


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["engine", "manifest", "missing"])
def test_a_version_that_cannot_be_opened_is_refused(link: Link, again: Path, tmp_path: Path, broken: str) -> None:
    bad = Path(shutil.copytree(again, tmp_path / "bad"))
    if broken == "engine":
        flip(next((bad / "engines").rglob("mod-decode-*")))
    elif broken == "manifest":
        (bad / MANIFEST).write_text("{", encoding="utf-8")
    with command(link.path, "--reload") as (process, url):
        before = served(url)
        if broken == "missing":
            link.path.unlink()
            process.send_signal(signal.SIGHUP)
        else:
            link.lead_to(bad)
        until(lambda: metric(url, 'reloads_total{result="failed"}') >= 1)
        assert served(url) == before
        assert httpx2.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200
        # It is mended by a version that can be opened, without a signal.
        if broken == "missing":
            link.path.symlink_to(again)
        else:
            link.lead_to(again)
        until(lambda: served(url) == "again")
        output = log_of(process)
    assert f"error: {link.path}: cannot be taken, so the version before is served on: " in output
    assert "Traceback" not in output


def missing_gates(*roles: str) -> Callable[[dict[str, Any]], object]:
    """Changes a manifest as if engines of these roles had missed their gates."""

    def change(manifest: dict[str, Any]) -> None:
        missed = {one["path"]: ["they agree too seldom"] for one in manifest["engines"] if one["role"] in roles}
        manifest["refused"].update(missed)

    return change


@pytest.mark.fast("texts")
@pytest.mark.parametrize(("change", "reason"), [
    (missing_gates("prefill", "decode"), "missed their gates and are not served (they agree too seldom)"),
    (missing_gates("forward"), "missed their gates and are not served (they agree too seldom)"),
    (lambda manifest: manifest.update(generation={"reason": "generation.build is never"}), "generation.build is never"),
], ids=["texts", "whole rows", "no texts at all"])  # fmt: skip
def test_a_version_that_can_do_less_is_refused(
    link: Link, written: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    """Clients of the version before would get nothing but refusals from it."""
    less, go = copied(written, tmp_path / "less", "less"), tmp_path / "go"
    rewrite_manifest(less, change)
    with command(link.path, "--reload", code=STEPS.format(held=OF_THE_FIRST, go=str(go))) as (process, url):
        before = served(url)
        asking = Asking(url)
        link.lead_to(less)
        until(lambda: metric(url, 'reloads_total{result="failed"}') >= 1)
        # Gauges are still those of the version that serves.
        assert (served(url), metric(url, "busy_rows"), metric(url, 'reloads_total{result="taken"}')) == (before, 1, 0)
        # The same version is not opened a second time, which would take memory and threads from the one that serves.
        time.sleep(3 * reload.LOOK_S)
        assert metric(url, 'reloads_total{result="failed"}') == 1
        go.touch()
        assert asking.text()["model"] == before
        output = log_of(process)
    refusal = f"error: {link.path}: cannot be taken, so the version before is served on: it cannot do all that the "
    assert any(line.startswith(refusal) and reason in line for line in output.splitlines()), output


@pytest.mark.slow
def test_a_signal_asks_for_a_folder_that_looks_unchanged(written: Path) -> None:
    with command(written, "--reload") as (process, url):
        process.send_signal(signal.SIGHUP)  # Perhaps before the server listens to it; it must not end the server.
        assert httpx2.get(f"{url}/health/live", timeout=PATIENCE_S).status_code == 200
        process.send_signal(signal.SIGHUP)
        until(lambda: metric(url, 'reloads_total{result="taken"}') >= 1)
        assert httpx2.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200


@pytest.mark.slow
def test_without_the_option_a_folder_stays(link: Link, again: Path) -> None:
    with command(link.path) as (_, url):
        before = served(url)
        link.lead_to(again)
        time.sleep(3 * reload.LOOK_S)
        assert served(url) == before


@pytest.mark.slow
def test_a_bug_in_a_new_version_ends_no_text(link: Link, again: Path) -> None:
    code = (
        "from mod_export.serve import folder_app\nopened = folder_app.open_service\n"
        "def fails(path, *rest):\n    if path.name == 'again': raise ZeroDivisionError('a bug')\n"
        "    return opened(path, *rest)\nfolder_app.open_service = fails"
    )
    with command(link.path, "--reload", code=code) as (process, url):
        link.lead_to(again)
        until(lambda: metric(url, 'reloads_total{result="failed"}') >= 1)
        assert httpx2.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200
        output = log_of(process)
    assert "ZeroDivisionError: a bug" in output


@pytest.mark.slow
def test_a_signal_to_end_lets_the_texts_of_both_versions_finish(link: Link, again: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with command(link.path, "--reload", code=STEPS.format(held=OF_BOTH, go=str(go))) as (process, url):
        old = Asking(url)
        link.lead_to(again)
        until(lambda: served(url) == "again")
        new = Asking(url)
        assert old.answer is None
        process.terminate()
        until(lambda: httpx2.get(f"{url}/health/ready").status_code == 503)
        go.touch()
        assert process.wait(PATIENCE_S) == 0
        assert [text["usage"]["completion_tokens"] for text in (old.text(), new.text())] == [40, 40]


@pytest.mark.slow
def test_what_takes_longer_than_it_may_is_cut_on_the_old_version_too(link: Link, again: Path) -> None:
    slow = STEPS.format(held="not time.sleep(1) and False", go="")
    with command(link.path, "--reload", "--drain", "0.2", code=slow) as (process, url):
        old = Asking(url)
        link.lead_to(again)
        until(lambda: served(url) == "again")
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    until(lambda: old.answer is not None)
    assert old.answer is not None
    assert (old.answer.status_code, old.answer.json()["error"]["code"]) == (503, "shutting_down")


@pytest.mark.slow
def test_a_signal_to_end_while_a_version_is_opened(link: Link, again: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    code = (
        "import time, pathlib\nfrom mod_export.serve import folder_app\nopened = folder_app.open_service\n"
        f"def slow(path, *rest):\n    if path.name == 'again': pathlib.Path({str(begun)!r}).touch(); time.sleep(2)\n"
        "    return opened(path, *rest)\nfolder_app.open_service = slow"
    )
    with command(link.path, "--reload", code=code) as (process, _):
        link.lead_to(again)
        until(begun.exists)
        output = log_of(process)
    assert "Traceback" not in output


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A private key and its public one."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    private, public = tmp_path / "key.pem", tmp_path / "key.pub"
    form = serialization.Encoding.PEM
    private.write_bytes(key.private_bytes(form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(form, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def test_a_new_version_must_be_signed_as_well(
    link: Link, written: Path, again: Path, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    from mod_export.folder.signature import sign_folder

    private, public = keys
    first = copied(written, tmp_path / "first", "first")
    sign_folder(first, private)
    link.lead_to(first)
    with command(link.path, "--reload", "--trusted-key", public) as (process, url):
        link.lead_to(again)
        until(lambda: metric(url, 'reloads_total{result="failed"}') >= 1)
        assert served(url) == "first"
        assert httpx2.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200
        sign_folder(again, private)
        process.send_signal(signal.SIGHUP)
        until(lambda: served(url) == "again")
        output = log_of(process)
    refusal = f"error: {link.path}: cannot be taken, so the version before is served on: "
    assert any(line.startswith(refusal) and "is not signed" in line for line in output.splitlines())
    assert "Traceback" not in output
