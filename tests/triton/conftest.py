"""A build folder that writes text slowly enough to be interrupted, and real servers of its repository."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from build_folders import Silent
from command_line import invoke
from tiny_models import lively_checkpoint
from triton_server import WINDOW, Serve, TritonServer, backends
from writing import SPEC

from mod_export.config import config_from_toml
from mod_export.model.request import Request
from mod_export.pipeline.stages import build
from mod_models.checkpoint import save_checkpoint

CONFIG_TOML = f"""
buckets = [[1, 16], [2, 32], [1, 64]]
targets = ["ort-cpu"]

[generation]
window = {WINDOW}
prompts = [32]
batches = [1, 3]
"""
STANDS_IN = '''
import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as utils
from pathlib import Path


class TritonPythonModel:
    """In place of Triton's backend of ONNX Runtime, which the tested server does not carry."""

    def initialize(self, args):
        path = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        self._session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        answers = []
        for request in requests:
            feeds = {one.name(): one.as_numpy() for one in request.inputs()}
            names = list(request.requested_output_names())
            found = self._session.run(names, feeds)
            answers.append(utils.InferenceResponse([utils.Tensor(*pair) for pair in zip(names, found)]))
        return answers
'''


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build folder without evidence, which takes a minute and is not needed here."""
    root = tmp_path_factory.mktemp("folder")
    checkpoint = lively_checkpoint(replace(SPEC, max_positions=WINDOW, n_layers=6), 6)
    save_checkpoint(root / "model.pt", checkpoint)
    (root / "c.toml").write_text(CONFIG_TOML, encoding="utf-8")
    models = Request.checkpoint(root / "model.pt").models
    build(models, config_from_toml(root / "c.toml"), root / "build", Silent(), "mod-export build", evidence=False)
    return root / "build"


@pytest.fixture(scope="session")
def backend_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return backends(tmp_path_factory.mktemp("backends"))


@pytest.fixture(scope="session")
def serve(folder: Path, backend_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Makes a server, not yet started, of the repository that the command writes with these options."""

    default_folder = folder

    def make(*options: object, folder: Path = default_folder) -> TritonServer:
        root = tmp_path_factory.mktemp("serving")
        listed = [folder, "-o", root / "repository", "--name", "demo", "--threads", 1, *options]
        found = invoke("triton", *listed)
        assert found.exit_code == 0, found.output
        for path in (root / "repository").glob("*/config.pbtxt"):
            text = path.read_text(encoding="utf-8")
            python_config = re.sub('backend: "onnxruntime"\nplatform: .*\n', 'backend: "python"\n', text)
            if python_config != text:
                path.write_text(python_config, encoding="utf-8")
                (path.parent / "1" / "model.py").write_text(STANDS_IN, encoding="utf-8")
        return TritonServer(root / "repository", backend_folder, root / "log")

    return make


@pytest.fixture(scope="session")
def server(serve: Serve) -> Iterator[TritonServer]:
    """A server with --forward python and default limits."""
    with serve() as found:
        yield found
