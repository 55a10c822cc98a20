"""The options given to Ray, and one replica without a cluster."""

from __future__ import annotations

import asyncio
import json
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import ValidationError
from starlette.types import ASGIApp

from mod_export.errors import BuildFolderError, EngineError, UsageError
from mod_export.serve.scheduler import Scheduler
from mod_export.serve.service import ServiceOptions

# Ray's modules warn when they are imported.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")

    from mod_export.serve.ray_app import BESIDE_TEXTS, Arguments, OpenFolder, Replica, app

NAME = "tiny"
PAGE = "https://chat.example"
PATIENCE_S = 60.0
PROMPT = [7, 3, 200, 41, 5]


def test_arguments_become_a_deployment(written: Path, built: Path, tmp_path: Path) -> None:
    arguments = {"folder": str(written), "rows": "8", "max_queue": "16", "threads": "2", "gpus": "0.5", "drain_s": "7"}
    args = Arguments.model_validate(
        {**arguments, "name": "tiny", "max_wait_s": "4", "target": "ort-cpu", "dtype": "float32"}
    )
    assert args.options == ServiceOptions(
        name="tiny", rows=8, max_queue=16, max_wait_s=4, target="ort-cpu", dtype="float32", threads=2
    )
    deployment = app(args)._bound_deployment
    assert deployment.max_ongoing_requests == deployment.max_queued_requests == 8 + 2 * 16 + 1 + BESIDE_TEXTS
    assert deployment.ray_actor_options == {"num_cpus": 2, "num_gpus": 0.5}
    assert deployment._deployment_config.graceful_shutdown_timeout_s == 7
    assert (deployment.num_replicas, deployment._deployment_config.autoscaling_config) == (1, None)
    # Rows are looked up if they are not given.
    deployment = app(Arguments(folder=written, max_queue=0, replicas=2, max_replicas=4))._bound_deployment
    assert deployment.max_ongoing_requests == 3 + 1 + BESIDE_TEXTS
    assert deployment.max_queued_requests == 4 * (3 + 1 + BESIDE_TEXTS)
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 4, 3)
    # This many of several folders may be open at once.
    folders = {"a": written, "b": built, "c": built}
    deployment = app(Arguments(folders=folders, max_queue=0, open_folders=1))._bound_deployment
    assert deployment.max_ongoing_requests == 2 * (3 + 1) + BESIDE_TEXTS


def test_folders_have_names(written: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b").symlink_to(written)
    (tmp_path / "a").symlink_to(built)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert Arguments(folders=Path()).by_name() == {"a": tmp_path / "a", "b": tmp_path / "b"}
    assert list(Arguments(folders={"x": Path("b"), "w": Path("a")}).by_name().items()) == [
        ("x", tmp_path / "b"), ("w", tmp_path / "a"),
    ]  # fmt: skip
    assert Arguments(folder=Path("b")).by_name() == {None: tmp_path / "b"}
    for hosts in ("a,b", "A, b ", ["a", " B"]):
        assert Arguments.model_validate({"folder": "b", "hosts": hosts}).hosts == ("a", "b")
    listed = {"allow_origins": f"{PAGE}, null", "trusted_keys": "x.pem, y.pem", "hosts": "*"}
    args = Arguments.model_validate({"folder": "b", **listed})
    assert args.allow_origins == (PAGE, "null")
    assert args.trusted_keys == (Path("x.pem"), Path("y.pem"))


def test_a_time_that_no_thread_can_wait() -> None:
    with pytest.raises(ValueError, match="drain_s\n  Input should be less than or equal to 9223372036"):
        Arguments(folder=Path("b"), drain_s=1e10)


def test_a_replica_by_itself(written: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one key\n")
    args = Arguments(folders={"a": written, "b": written}, api_key_file=tmp_path / "keys")

    async def live() -> None:
        replica = Replica(args, args.by_name())
        found = await replica.__serve_build_asgi_app__()
        async with found.router.lifespan_context(found):
            assert await asked(found, "/v2/health/ready") == (200, {"ready": True})
            assert (await asked(found, "/v1/models"))[0] == 401
            status, models = await asked(found, "/v1/models", authorization="Bearer one key")
            assert (status, [model["id"] for model in models["data"]]) == (200, ["a"])
            replica.check_health()
            (folder,) = replica.open_folders
            assert isinstance(folder.service.writing, Scheduler)
            folder.service.writing.stop()
            with pytest.raises(EngineError, match="a: its engines keep failing, or it writes no more"):
                replica.check_health()
        assert folder.closed

    asyncio.run(live())
    with pytest.raises(UsageError, match="nowhere: cannot be read as API keys"):
        Replica(Arguments(folder=written, api_key_file=Path("nowhere")), {None: written})


def test_a_replica_answers_the_pages_that_it_is_told(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = Arguments.model_validate(
        {"folders": {"a": str(written), "b": str(written)}, "allow_origins": f"{PAGE},x://y"}
    )
    assert args.allow_origins == (PAGE, "x://y")

    async def live() -> None:
        replica = Replica(args, args.by_name())
        found = await replica.__serve_build_asgi_app__()
        async with found.router.lifespan_context(found):
            for status, origin in ((200, PAGE), (403, "https://other.example")):
                sent = await messages(found, "/v1/models", host="localhost", origin=origin)
                shown = dict(sent[0]["headers"]).get(b"access-control-allow-origin")
                assert (sent[0]["status"], shown) == (status, PAGE.encode() if status == 200 else None)
            # A refusal of the replica itself.
            monkeypatch.setattr(serve, "get_multiplexed_model_id", lambda: "c")
            sent = await messages(found, "/v1/models", host="localhost", origin=PAGE)
            shown = dict(sent[0]["headers"]).get(b"access-control-allow-origin")
            assert (sent[0]["status"], shown) == (404, PAGE.encode())

    asyncio.run(live())


async def asked(app: ASGIApp, path: str, **headers: str) -> tuple[int, Any]:
    """Status and JSON of a request to the application, without a server."""
    sent = await messages(app, path, **headers)
    return sent[0]["status"], json.loads(b"".join(one.get("body", b"") for one in sent[1:]))


async def messages(app: ASGIApp, path: str, **headers: str) -> list[Any]:
    """What the application sends."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    listed = [(name.encode(), value.encode()) for name, value in headers.items()]
    await app({"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": listed}, receive, send)
    return sent


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "expected a build folder as folder=DIR, or several as folders=DIR, and not both"),
        ({"folder": "a", "folders": "b"}, "expected a build folder as folder=DIR, or several as folders=DIR"),
        ({"folders": "b", "name": "x"}, "name: is for one folder; those of `folders` have their own names"),
        ({"folder": "a", "allow_origins": "*"}, "allow_origins [*]: every web page that a user of this machine opens"),
        ({"folder": "a", "allow_origins": "a.b"}, "allow_origins a.b: expected an origin as browsers send it"),
        ({"folder": "a", "rows": "0"}, "rows\n.*greater than or equal to 1"),
        ({"folder": "a", "max_queu": "1"}, "max_queu\n.*not permitted"),
    ],
)
def test_arguments_that_are_refused(given: Mapping[str, str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Arguments.model_validate(given)


def test_a_folder_must_be_signed_if_keys_are_trusted(written: Path, tmp_path: Path) -> None:
    key = tmp_path / "key.pub"
    options = Arguments.model_validate({"folder": written, "trusted_keys": f"{key},{key}"}).options
    assert options.trusted_keys == (key, key)
    with pytest.raises(UsageError, match=r"key.pub: cannot be read \(No such file or directory\)"):
        OpenFolder.of(written, options, (), None, 30)
    secret = ec.generate_private_key(ec.SECP256R1())
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    key.write_bytes(secret.public_key().public_bytes(*form))
    with pytest.raises(BuildFolderError, match="is not signed"):
        OpenFolder.of(written, options, (), None, 30)
    assert Arguments(folder=written).options.trusted_keys is None


def test_no_folder_is_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"folders: expected build folders, and there is none in {tmp_path}"):
        app(Arguments(folders=tmp_path))
    with pytest.raises(BuildFolderError, match="not a build folder"):
        app(Arguments(folder=tmp_path))


def test_a_folder_closes_when_its_requests_are_answered(written: Path) -> None:
    folder = OpenFolder.of(written, ServiceOptions(threads=1), (), None, 30)
    began, go_on, sent = threading.Event(), threading.Event(), []
    body = json.dumps({"prompt": PROMPT, "max_tokens": 3}).encode()

    async def receive() -> dict[str, Any]:
        if began.is_set():
            await asyncio.sleep(PATIENCE_S)
        began.set()
        await asyncio.to_thread(go_on.wait)
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    asking = threading.Thread(target=lambda: asyncio.run(folder(scope, receive, send)))
    asking.start()
    began.wait()
    closing = threading.Thread(target=folder.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    folder.check()
    go_on.set()
    asking.join()
    closing.join()
    assert sent[0]["status"] == 200
    assert folder.closed
    folder.check()
    folder.close()


def test_a_folder_that_is_not_live(written: Path) -> None:
    folder = OpenFolder.of(written, ServiceOptions(name="tiny", threads=1), (), None, 30)
    folder.check()
    assert isinstance(folder.service.writing, Scheduler)
    folder.service.writing.stop()
    with pytest.raises(
        EngineError,
        match=r"tiny: its engines keep failing, or it writes no more; the log says why. Start another process",
    ):
        folder.check()
    folder.close()
