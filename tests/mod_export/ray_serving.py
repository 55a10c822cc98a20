"""Build folders on a real Ray Serve that is started here: applications, and code that runs inside their replicas. The
tiny model writes a text in milliseconds. If a text must last, the test occupies a row of the replica with a text of its
own that waits at every token, so that all the other texts wait too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from openai import OpenAI

# Ray's modules warn when they are imported.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    from ray.cluster_utils import Cluster

    from mod_export.serve.ray_app import Arguments, app

ENVIRONMENT = MappingProxyType(
    {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's sockets lie in folders below this one, and a socket's path has at most 107 characters.
        "RAY_TMPDIR": "/tmp",
        # By default workers run at a niceness of 15, and get almost no CPU time beside other tests.
        "RAY_worker_niceness": "0",
        # Otherwise the only proxy of these tests sends all requests to the replicas of its own node.
        "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",
        "RAY_SERVE_PROXY_PREFER_LOCAL_AZ_ROUTING": "0",
    }
)
NAME = "tiny"
PROMPT = [7, 3, 200, 41, 5]
STEP_S = 0.1
PATIENCE_S = 60.0


class Application:
    """A running application."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    def complete(self, tokens: int, **options: Any) -> Any:
        """Completes PROMPT greedily."""
        with self.client() as client:
            return client.completions.create(prompt=PROMPT, max_tokens=tokens, temperature=0, **options)

    def get(self, path: str, headers: Mapping[str, str] = MappingProxyType({})) -> tuple[int, str]:
        return self._answer(urllib.request.Request(self.url + path, headers=dict(headers)))[:2]

    def post(self, body: Mapping[str, Any], headers: Mapping[str, str] = MappingProxyType({})) -> tuple[int, str, Any]:
        """Posts a completion; returns status, text and headers."""
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        return self._answer(urllib.request.Request(f"{self.url}/v1/completions", data, headers))

    def metric(self, name: str) -> float:
        """Reads a number from /metrics."""
        found = re.search(rf"^mod_export_{re.escape(name)} (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else 0.0

    def replicas(self) -> list[Any]:
        """Actors of the running replicas."""
        named = ray.util.list_named_actors(all_namespaces=True)
        actors = [actor for actor in named if actor["name"].startswith(f"SERVE_REPLICA::{self.name}#")]
        found = []
        for actor in actors:
            with contextlib.suppress(ValueError):  # The actor may have ended meanwhile.
                found.append(ray.get_actor(actor["name"], namespace=actor["namespace"]))
        return found

    def running(self) -> int:
        """Number of replicas that take requests."""
        found = serve.status().applications[self.name].deployments["mod-export"].replica_states
        return int(found.get("RUNNING", 0))

    @staticmethod
    def _answer(request: urllib.request.Request) -> tuple[int, str, Any]:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as found:
                return found.status, found.read().decode(), found.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(), error.headers


class OnRay:
    """A cluster of one node with an open port."""

    def __init__(self, cluster: Cluster, port: int) -> None:
        self.cluster, self.port = cluster, port
        self._applications = 0

    @contextlib.contextmanager
    def application(self, **arguments: Any) -> Iterator[Application]:
        """Runs an application at its own address."""
        self._applications += 1
        name = f"test{self._applications}"
        serve.run(app(Arguments(**arguments)), name=name, route_prefix=f"/{name}")
        try:
            yield Application(name, f"http://127.0.0.1:{self.port}/{name}")
        finally:
            serve.delete(name)


@contextlib.contextmanager
def ray_serve(environment: Mapping[str, str] = MappingProxyType({})) -> Iterator[OnRay]:
    """Runs Ray Serve during the `with` block, with these environment variables beside those that tests need."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), socket.socket() as found:
        warnings.simplefilter("ignore")
        for name, value in {**ENVIRONMENT, **environment}.items():
            patch.setenv(name, value)
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        found.close()
        # Replicas run functions of this file but cannot import it.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
        try:
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            serve.start(
                proxy_location="HeadOnly",
                http_options={"host": "127.0.0.1", "port": port},
                logging_config={"log_level": "ERROR", "enable_access_log": False},
            )
            yield OnRay(cluster, port)
        finally:
            serve.shutdown()
            ray.shutdown()
            cluster.shutdown()


def until(said: Callable[[], bool], within_s: float = PATIENCE_S) -> float:
    """Waits until `said` returns True; returns the seconds that it took."""
    began = time.monotonic()
    while not said():
        assert time.monotonic() < began + within_s
        time.sleep(0.05)
    return time.monotonic() - began


def inside(replica: Any, act: Callable[[Any], Any]) -> Any:
    """Runs `act` on our object in the process of a replica, and returns its result."""
    return ray.get(replica.__ray_call__.remote(lambda _: act(serve.get_replica_context().servable_object)))


@contextlib.contextmanager
def slow(replica: Any, folder: int = 0, step_s: float = STEP_S) -> Iterator[None]:
    """Occupies one row with a text that delays every token of all texts by `step_s` seconds."""

    def begin(own: Any) -> None:
        own.over = threading.Event()
        writing = own.open_folders[folder].service.writing
        (text,) = writing.generator.texts([[1]], 47, ignore_eos=True)
        own.job = writing.submit([text], lambda event: own.over.wait(step_s))

    def end(own: Any) -> None:
        own.job.cancel()
        own.over.set()

    inside(replica, begin)
    try:
        yield
    finally:
        inside(replica, end)


def kill_while_it_writes(
    running: Application, rows: int, kill: Callable[[Any], object], step_s: float = STEP_S
) -> None:
    """Kills the only replica, of `rows` rows, while it writes texts. No request may hang, and another replica must
    write the same text as before.
    """
    before = running.complete(8, model=NAME).choices[0].text
    (replica,) = running.replicas()
    process = inside(replica, lambda _: os.getpid())
    with contextlib.suppress(ray.exceptions.RayError), slow(replica, step_s=step_s):
        with asking(lambda: running.post({"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True}), 2) as answers:
            until(lambda: running.metric("busy_rows") == rows)
            kill(replica)
        assert len(answers) == 2
        assert {status for status, _, _ in answers} <= {500, 503}
    until(lambda: running.post({"prompt": PROMPT})[0] == 200)
    assert running.complete(8, model=NAME).choices[0].text == before
    (replica,) = running.replicas()
    assert inside(replica, lambda _: os.getpid()) != process


@contextlib.contextmanager
def asking(ask: Callable[[], Any], times: int = 1) -> Iterator[list[Any]]:
    """Sends several requests at once. The list has all answers when the block ends."""
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(ask())) for _ in range(times)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        for thread in threads:
            thread.join()
