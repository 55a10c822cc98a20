"""A model of Triton's Python backend that runs a build folder, in the way of `mod_export.load`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from mod_export.errors import BuildFolderError, ModExportError, UsageError
from mod_export.runtime.deployment import load
from mod_export.triton.served import settings_of


class TritonPythonModel:
    """What Triton's Python backend runs.

    Engines are opened by the requests of `model_warmup` in config.pbtxt, one for each bucket, before Triton says that
    the model is ready.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        import triton_python_backend_utils as utils

        self._utils = utils
        settings = settings_of(args)
        config = json.loads(args["model_config"])
        self._inputs = [one["name"] for one in config["input"]]
        self._outputs = [one["name"] for one in config["output"]]
        self._deployment = load(settings.folder, settings.target, settings.dtype, threads=settings.threads)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def finalize(self) -> None:
        self._deployment.__exit__()

    def _answer(self, request: Any) -> Any:
        utils = self._utils
        tensors = {name: utils.get_input_tensor_by_name(request, name) for name in self._inputs}
        given = {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}
        try:
            found = self._run(given)
        except ModExportError as error:
            # A folder that was damaged is no fault of the request.
            theirs = isinstance(error, UsageError) and not isinstance(error, BuildFolderError)
            code = utils.TritonError.INVALID_ARG if theirs else utils.TritonError.INTERNAL
            return utils.InferenceResponse(error=utils.TritonError(str(error), code))
        return utils.InferenceResponse(
            [utils.Tensor(name, np.ascontiguousarray(found[name])) for name in self._outputs]
        )

    def _run(self, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self._deployment.vocab_size is None:
            return self._deployment.infer(given)
        (output,) = self._outputs
        return {output: self._deployment.run(given["input_ids"], given.get("lengths"))}
