"""/v2: runs whole rows through the Open Inference Protocol of KServe and Triton.

Numbers are sent as JSON, or as raw bytes after the JSON (the extension `binary_tensor_data`), as `tritonclient` does.

Source: https://github.com/kserve/open-inference-protocol, and Triton Inference Server, "Binary Tensor Data Extension".
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mod_export import __version__
from mod_export.folder.ports import TensorPort, any_rows, any_size, ports_of
from mod_export.runtime.deployment import Deployment, graph_files
from mod_export.serve.endpoint import ApiError, json_of, read_body, service_of, unless_gone
from mod_export.serve.service import Scoring, Service
from mod_export.types import Unavailable

DTYPES: Mapping[str, str] = {
    "BOOL": "bool",
    "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
    "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64",
    "FP16": "float16", "FP32": "float32", "FP64": "float64",
}  # fmt: skip
"""Name of a data type in the protocol -> name in NumPy."""
NAMES = {numpy: name for name, numpy in DTYPES.items()}
LIVE = ("/health/live", "/v2/health/live")
READY = ("/health/ready", "/v2/health/ready", "/health")
"""Addresses that supervisors ask: the usual ones with Kubernetes, those of the Open Inference Protocol, and the one of
vLLM, which clients of OpenAI's API ask before they send requests.
"""
JSON_LENGTH = "Inference-Header-Content-Length"
BYTES_OF_A_NUMBER = 32
"""Upper limit for a number written as JSON."""
BESIDE_NUMBERS = 1 << 20
MOST_DIGITS = 20
MOST_DIMENSIONS = 8
MOST_TENSORS = 64
MOST_JSON_NUMBERS = 1 << 20
"""Limit for an output. Writing more numbers as JSON takes seconds, during which the texts of other clients stop."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class Tensor(_Strict):
    """An input. Its numbers are in `data`, or after the JSON (`binary_data_size` among its parameters)."""

    name: str
    shape: Annotated[list[Annotated[int, Field(ge=0, le=2**40)]], Field(max_length=MOST_DIMENSIONS)]
    datatype: str
    parameters: dict[str, Any] = {}
    data: list[Any] | None = None


class WantedOutput(_Strict):
    """An output that the answer has to contain; as raw bytes after the JSON with `binary_data` among its parameters."""

    name: str
    parameters: dict[str, Any] = {}


class InferRequest(_Strict):
    """POST /v2/models/NAME/infer. Without `outputs` the answer contains all of them."""

    id: str | None = None
    parameters: dict[str, Any] = {}
    inputs: Annotated[list[Tensor], Field(max_length=MOST_TENSORS, fail_fast=True)]
    outputs: Annotated[list[WantedOutput], Field(max_length=MOST_TENSORS, fail_fast=True)] | None = None


async def server_metadata(_: Request) -> Response:
    """GET /v2."""
    return JSONResponse({"name": "mod-export", "version": __version__, "extensions": ["binary_tensor_data"]})


async def live(request: Request) -> Response:
    """Answers each address of LIVE: 200, or 503 if the server must be restarted."""
    service = service_of(request)
    return JSONResponse({"live": service.live}, 200 if service.live else 503)


async def ready(request: Request) -> Response:
    """Answers each address of READY: 200 while the server accepts requests, otherwise 503."""
    service = service_of(request)
    return JSONResponse({"ready": service.ready}, 200 if service.ready else 503)


async def model_ready(request: Request) -> Response:
    """GET /v2/models/NAME/ready."""
    service, _ = _scoring(request)
    return JSONResponse({"name": service.name, "ready": service.ready}, 200 if service.ready else 503)


async def model_metadata(request: Request) -> Response:
    """GET /v2/models/NAME. A size of -1 means any size that fits a bucket."""
    service, scoring = _scoring(request)
    inputs, outputs = await asyncio.to_thread(_ports, scoring.deployment)
    about = {"name": service.name, "versions": ["1"], "platform": f"mod_export_{scoring.deployment.target}"}
    return JSONResponse({**about, "inputs": _described(inputs), "outputs": _described(outputs)})


async def infer(request: Request) -> Response:
    """POST /v2/models/NAME/infer."""
    service, scoring = _scoring(request)
    body = await read_body(request, _most_bytes(scoring.deployment))
    inference, rest = _parsed(body, request.headers.get(JSON_LENGTH))

    def run() -> tuple[bytes, int | None]:
        return _encoded(service.name, inference, scoring.answer(_feeds(inference.inputs, rest)))

    async def ran() -> tuple[bytes, int | None]:
        return await asyncio.get_running_loop().run_in_executor(scoring.pool, run)

    with scoring.admitted():
        content, json_bytes = await unless_gone(request.receive, ran())
    if json_bytes is None:
        return Response(content, media_type="application/json")
    return Response(content, headers={JSON_LENGTH: str(json_bytes)}, media_type="application/octet-stream")


def _scoring(request: Request) -> tuple[Service, Scoring]:
    service = service_of(request)
    name = request.path_params["name"]
    if name != service.name:
        raise ApiError(404, f"model {name[:80]!r}: not served here; this server has {service.name!r}")
    if request.path_params.get("version", "1") != "1":
        raise ApiError(404, f"version {request.path_params['version'][:80]}: this server has version 1")
    if isinstance(service.scoring, Unavailable):
        raise ApiError(400, f"this server reads no whole rows: {service.scoring}")
    return service, service.scoring


def _ports(deployment: Deployment) -> tuple[Sequence[TensorPort], Sequence[TensorPort]]:
    """Returns the inputs and outputs of all buckets, merged. Requests of token ids may be smaller than any bucket."""
    inputs = [
        [TensorPort(name, NAMES.get(dtype, dtype), shape) for name, (dtype, shape) in ports.items()]
        for ports in deployment.inputs.values()
    ]
    # The manifest has only the shapes of outputs. The graphs have their types, and routed positions beside them.
    names = deployment.outputs
    outputs = [
        [port for port in ports_of(path)[1] if port.name in names[bucket]]
        for bucket, path in graph_files(deployment).items()
    ]
    merged = any_size if deployment.vocab_size is None else any_rows
    return merged(inputs), merged(outputs)


def _described(ports: Sequence[TensorPort]) -> list[dict[str, Any]]:
    return [{"name": port.name, "datatype": port.dtype, "shape": list(port.dims)} for port in ports]


def _most_bytes(deployment: Deployment) -> int:
    numbers = max(sum(math.prod(shape) for _, shape in ports.values()) for ports in deployment.inputs.values())
    return BESIDE_NUMBERS + BYTES_OF_A_NUMBER * numbers


def _parsed(body: bytes, json_length: str | None) -> tuple[InferRequest, bytes]:
    """Parses the JSON of a body; returns it and the raw bytes after it."""
    size = len(body)
    if json_length is not None:
        number = json_length.isascii() and json_length.isdigit() and len(json_length) <= MOST_DIGITS
        if not number or int(json_length) > len(body):
            raise ApiError(400, f"{JSON_LENGTH}: expected a number up to {len(body)}, got {json_length[:80]!r}")
        size = int(json_length)
    return InferRequest.model_validate_json(json_of(body[:size])), body[size:]


def _feeds(inputs: Sequence[Tensor], rest: bytes) -> dict[str, np.ndarray]:
    feeds: dict[str, np.ndarray] = {}
    for port in inputs:
        if port.datatype not in DTYPES:
            raise ApiError(400, f"{port.name}: datatype {port.datatype[:80]!r}, expected one of {', '.join(DTYPES)}")
        dtype = np.dtype(DTYPES[port.datatype])
        size = port.parameters.get("binary_data_size")
        if size is None:
            array = _numbers(port, dtype)
        elif not isinstance(size, int) or size != dtype.itemsize * math.prod(port.shape) or size > len(rest):
            expected = dtype.itemsize * math.prod(port.shape)
            problem = f"binary_data_size {str(size)[:80]}, expected {expected} for its shape"
            raise ApiError(400, f"{port.name}: {problem}, and {len(rest)} bytes are left in the body")
        else:
            array, rest = np.frombuffer(rest[:size], dtype), rest[size:]
        if array.size != math.prod(port.shape):
            raise ApiError(
                400, f"{port.name}: shape {port.shape} has {math.prod(port.shape)} numbers, got {array.size}"
            )
        try:
            feeds[port.name] = array.reshape(port.shape)
        except ValueError as error:  # A tensor without numbers may have any other dimensions.
            raise ApiError(400, f"{port.name}: shape {port.shape} is larger than an array can be") from error
    if rest:
        raise ApiError(400, f"{len(rest)} bytes of the body belong to no input")
    return feeds


def _numbers(tensor: Tensor, dtype: np.dtype[Any]) -> np.ndarray:
    if tensor.data is None:
        raise ApiError(400, f"{tensor.name}: expected data, or binary_data_size among its parameters")
    try:
        # NumPy would store strings in an array in which each takes as much memory as the longest.
        if not _are_numbers(tensor.data, MOST_DIMENSIONS):
            raise ValueError("expected numbers in at most 8 dimensions")
        array = np.asarray(tensor.data)
        whole = array.dtype.kind in "iu" or not array.size
        fits = dtype.kind == "f" if not whole else dtype.kind in "iuf"
        if not fits and not (array.dtype.kind == dtype.kind == "b"):
            raise ValueError(f"numbers of another kind than {tensor.datatype}")
        if whole and dtype.kind in "iu" and array.size:
            limits = np.iinfo(dtype)
            if int(array.min()) < limits.min or int(array.max()) > limits.max:
                raise ValueError(f"a number outside {limits.min} to {limits.max}")
        with np.errstate(over="ignore"):
            return array.astype(dtype).reshape(-1)
    except (ValueError, TypeError, OverflowError) as error:
        raise ApiError(400, f"{tensor.name}: data that is no {tensor.datatype} ({str(error)[:200]})") from error


def _are_numbers(values: list[Any], depth: int) -> bool:
    return depth > 0 and all(
        _are_numbers(v, depth - 1) if isinstance(v, list) else isinstance(v, int | float) for v in values
    )


def _encoded(model: str, asked: InferRequest, results: Mapping[str, np.ndarray]) -> tuple[bytes, int | None]:
    """Returns the body of a response, and the length of its JSON part; None if the body is only JSON."""
    wanted = asked.outputs or [WantedOutput(name=name) for name in results]
    unknown = [item.name for item in wanted if item.name not in results]
    if unknown:
        raise ApiError(400, f"output {unknown[0][:80]!r}: this model has {', '.join(results)}")
    outputs: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for item in wanted:
        array = results[item.name]
        about = {"name": item.name, "datatype": NAMES[array.dtype.name], "shape": list(array.shape)}
        if item.parameters.get("binary_data", asked.parameters.get("binary_data_output", False)) is True:
            blobs.append(array.tobytes())
            outputs.append({**about, "parameters": {"binary_data_size": array.nbytes}})
        elif array.size > MOST_JSON_NUMBERS:
            raise ApiError(400, f"{item.name}: has {array.size:,} numbers, too many for JSON; ask for binary_data")
        elif not np.isfinite(array).all():
            raise ApiError(400, f"{item.name}: has numbers that are not finite, which JSON lacks; ask for binary_data")
        else:
            outputs.append({**about, "data": array.reshape(-1).tolist()})
    head = {"model_name": model, "model_version": "1", "outputs": outputs}
    json_bytes = json.dumps(head if asked.id is None else {**head, "id": asked.id}).encode()
    return json_bytes + b"".join(blobs), len(json_bytes) if blobs else None
