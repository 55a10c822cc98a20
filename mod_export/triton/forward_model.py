"""A model for Triton's Python backend that runs whole rows with a build folder, like `mod_export.load`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from mod_export.errors import BuildFolderError, ModExportError, UsageError
from mod_export.runtime.deployment import load
from mod_export.triton.config import settings_of


class TritonPythonModel:
    """The class that Triton's Python backend runs.

    The `model_warmup` requests in config.pbtxt, one for each bucket, open the engines before Triton reports the model
    as ready.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        import triton_python_backend_utils as utils

        self._utils = utils
        settings = settings_of(args)
        config = json.loads(args["model_config"])
        self._inputs = [port["name"] for port in config["input"]]
        self._outputs = [port["name"] for port in config["output"]]
        self._deployment = load(settings.folder, settings.target, settings.dtype, threads=settings.threads)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def finalize(self) -> None:
        self._deployment.__exit__()

    def _answer(self, request: Any) -> Any:
        utils = self._utils
        tensors = {name: utils.get_input_tensor_by_name(request, name) for name in self._inputs}
        arrays = {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}
        try:
            outputs = self._deployment.answer(arrays)
        except ModExportError as error:
            # A damaged build folder is an internal error, not an invalid request.
            is_usage = isinstance(error, UsageError) and not isinstance(error, BuildFolderError)
            code = utils.TritonError.INVALID_ARG if is_usage else utils.TritonError.INTERNAL
            return utils.InferenceResponse(error=utils.TritonError(str(error), code))
        return utils.InferenceResponse(
            [utils.Tensor(name, np.ascontiguousarray(outputs[name])) for name in self._outputs]
        )
