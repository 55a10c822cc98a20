"""A real Triton Inference Server as a process on this machine, from the package nvidia-pytriton, which has only the
Python backend. `make triton` installs it in its own environment.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

ENVIRONMENT = Path(__file__).parents[2] / ".venv" / "triton"
SITE = ENVIRONMENT / "lib" / "python3.11" / "site-packages"
CARRIED = SITE / "pytriton" / "tritonserver"
STUB = CARRIED / "python_backend_stubs" / "3.11" / "triton_python_backend_stub"
READY_S, STOPPED_S = 60.0, 60.0
WINDOW = 2048
"""Tokens in the window of the served model."""


def backends(folder: Path) -> Path:
    """Makes a folder of backends: Python's, with the stub that runs models in the environment's interpreter."""
    if not STUB.exists():
        raise FileNotFoundError(f"{STUB}: there is no Triton; `make triton` installs it")
    shutil.copytree(CARRIED / "backends" / "python", folder / "python")
    shutil.copy(STUB, folder / "python")
    return folder


def free_ports(count: int) -> list[int]:
    """Ports on which nothing listens now."""
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [listener.getsockname()[1] for listener in opened]
    for listener in opened:
        listener.close()
    return found


class TritonServer:
    """Serves a repository during its `with` block.

    Attributes:
        http: host and port.
        grpc: host and port.
        process: the server.
    """

    def __init__(self, repository: Path, backend_folder: Path, log: Path) -> None:
        http, grpc, metrics = free_ports(3)
        self.http, self.grpc = f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        self._log = log
        self._command = [
            CARRIED / "bin" / "tritonserver",
            *("--model-repository", repository, "--backend-directory", backend_folder),
            *("--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics),
            *("--http-address", "127.0.0.1", "--grpc-address", "127.0.0.1", "--http-thread-count", 40),
        ]
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        libraries = [sysconfig.get_config_var("LIBDIR"), str(SITE / "nvidia_pytriton.libs")]
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": ":".join(libraries),
            # The stub uses the first python3 that it finds.
            "PATH": f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}",
        }
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(argument) for argument in self._command], stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOPPED_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def log(self) -> str:
        """Output of the server and its models."""
        return self._log.read_text(errors="replace")

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """Sends a request; returns status and body."""
        request = urllib.request.Request(f"http://{self.http}/v2/{path}", json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def get(self, path: str) -> tuple[int, str]:
        """Sends a request without a body; returns status and body."""
        try:
            with urllib.request.urlopen(f"http://{self.http}/v2/{path}") as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def events(self, model: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields responses of /generate_stream as they arrive; leaving the iterator closes the connection."""
        request = urllib.request.Request(
            f"http://{self.http}/v2/models/{model}/generate_stream", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"Triton ended with {self.process.returncode}:\n{self.log()}")
            try:
                if self.get("health/ready")[0] == 200:
                    return
            except (OSError, urllib.error.URLError):
                pass
            time.sleep(0.1)
        raise RuntimeError(f"Triton was not ready within {READY_S:g} s:\n{self.log()}")


Serve = Callable[..., TritonServer]
"""Function that makes a server of the repository which the command writes with these options."""
