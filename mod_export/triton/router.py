"""A model for Triton's Python backend that pads a request to the smallest bucket that fits, and calls the model of
that bucket (business logic scripting). `mod-export triton` copies this file into a model repository.

It imports nothing from mod-export and needs only numpy, which every Triton container has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


class Buckets:
    """The shapes that a model was built for.

    Args:
        known: plain data from the parameter `buckets` of config.pbtxt: `inputs` (bucket, smallest first -> input name
            -> data type and shape) and `outputs`; for a model of token ids also `vocab_size`, and whether the output
            has `positions`, which are cut to those of the request.
    """

    def __init__(self, known: Mapping[str, Any]) -> None:
        self.outputs: list[str] = known["outputs"]
        self.inputs: dict[str, dict[str, tuple[str, list[int]]]] = known["inputs"]
        self.vocab_size: int | None = known["vocab_size"]
        self.positions: bool = known["positions"]

    def route(self, arrays: Arrays) -> tuple[str, Arrays]:
        """Returns the bucket of a request, and the inputs for its model.

        Raises:
            ValueError: no bucket fits, or an id or length is out of range.
        """
        if self.vocab_size is None:
            shapes = {name: list(array.shape) for name, array in arrays.items()}
            for bucket, inputs in self.inputs.items():
                if {name: list(shape) for name, (_, shape) in inputs.items()} == shapes:
                    return bucket, arrays
            raise ValueError(f"no bucket was built for {shapes}; built: {', '.join(self.inputs)}")
        ids_BS = arrays["input_ids"]
        if ids_BS.ndim != 2 or 0 in ids_BS.shape:
            raise ValueError(f"expected token ids (batch, sequence), got {list(ids_BS.shape)}")
        # Viewed as unsigned, negative ids are the largest, so one comparison finds both kinds of invalid ids.
        if ids_BS.view(np.uint64).max() >= self.vocab_size:
            raise ValueError(
                f"expected token ids from 0 to {self.vocab_size - 1}, got {ids_BS.min()} to {ids_BS.max()}"
            )
        B, S = ids_BS.shape
        lengths_B = arrays.get("lengths", np.full(B, S, dtype=np.int64))
        if lengths_B.shape != (B,) or lengths_B.min() < 1 or lengths_B.max() > S:
            raise ValueError(f"expected {B} lengths from 1 to {S}, got {lengths_B.tolist()}")
        bucket, (rows, seq) = self._smallest(B, S)
        feeds = {"input_ids": np.pad(ids_BS, ((0, rows - B), (0, seq - S)))}
        if "lengths" in self.inputs[bucket]:
            feeds["lengths"] = np.pad(lengths_B, (0, rows - B), constant_values=1)
        return bucket, feeds

    def cut(self, outputs: Arrays, arrays: Arrays) -> Arrays:
        """Returns the outputs of a bucket's model without padding."""
        if self.vocab_size is None:
            return outputs
        B, S = arrays["input_ids"].shape
        return {name: array[:B, :S] if self.positions else array[:B] for name, array in outputs.items()}

    def _smallest(self, B: int, S: int) -> tuple[str, list[int]]:
        for bucket, inputs in self.inputs.items():
            _, shape = inputs["input_ids"]
            if shape[0] >= B and shape[1] >= S:
                return bucket, shape
        raise ValueError(
            f"no bucket holds a batch of {B} x {S} tokens; built: {', '.join(self.inputs)}. Build a larger one"
        )


class TritonPythonModel:
    """The class that Triton's Python backend runs."""

    def initialize(self, args: Mapping[str, str]) -> None:
        import triton_python_backend_utils as utils

        self._utils = utils
        config = json.loads(args["model_config"])
        self._name = args["model_name"]
        self._inputs = [port["name"] for port in config["input"]]
        self._buckets = Buckets(json.loads(config["parameters"]["buckets"]["string_value"]))

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        utils = self._utils
        tensors = {name: utils.get_input_tensor_by_name(request, name) for name in self._inputs}
        arrays = {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}
        try:
            bucket, feeds = self._buckets.route(arrays)
        except ValueError as error:
            return utils.InferenceResponse(error=utils.TritonError(str(error), utils.TritonError.INVALID_ARG))
        bucket_request = utils.InferenceRequest(
            model_name=f"{self._name}-{bucket}",
            requested_output_names=self._buckets.outputs,
            inputs=[utils.Tensor(name, np.ascontiguousarray(array)) for name, array in feeds.items()],
            # Outputs of a model on a GPU are then returned in memory that numpy can read.
            preferred_memory=utils.PreferredMemory(utils.TRITONSERVER_MEMORY_CPU),
        )
        answer = bucket_request.exec()
        if answer.has_error():
            return utils.InferenceResponse(error=answer.error())
        outputs = {name: utils.get_output_tensor_by_name(answer, name).as_numpy() for name in self._buckets.outputs}
        cut = self._buckets.cut(outputs, arrays)
        return utils.InferenceResponse([utils.Tensor(name, np.ascontiguousarray(array)) for name, array in cut.items()])
