"""/v2: whole rows through the Open Inference Protocol, as KServe and Triton speak it.

Numbers come as JSON, or as raw bytes after the JSON (the extension `binary_tensor_data`), which is how `tritonclient`
sends them.

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
from mod_export.runtime.deployment import Deployment
from mod_export.serve.body import read_body, unless_gone
from mod_export.serve.problems import ApiError
from mod_export.serve.service import Scoring, Service
from mod_export.types import Bucket

DTYPES: Mapping[str, str] = {
    "BOOL": "bool",
    "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
    "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64",
    "FP16": "float16", "FP32": "float32", "FP64": "float64",
}  # fmt: skip
"""Name of a type in the protocol -> NumPy's."""
NAMES = {numpy: name for name, numpy in DTYPES.items()}
JSON_LENGTH = "Inference-Header-Content-Length"
BYTES_OF_A_NUMBER = 32
"""At most, as JSON."""
BESIDE_NUMBERS = 1 << 20
MOST_DIGITS = 20
MOST_DIMENSIONS = 8
MOST_TENSORS = 64
MOST_JSON_NUMBERS = 1 << 20
"""Of an output. To write more of them as text takes seconds in which no text of others is written."""


class _Tensor(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    name: str
    shape: Annotated[list[Annotated[int, Field(ge=0, le=2**40)]], Field(max_length=MOST_DIMENSIONS)]
    datatype: str
    parameters: dict[str, Any] = {}
    data: list[Any] | None = None


class _Wanted(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    name: str
    parameters: dict[str, Any] = {}


class _InferRequest(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    id: str | None = None
    parameters: dict[str, Any] = {}
    inputs: Annotated[list[_Tensor], Field(max_length=MOST_TENSORS, fail_fast=True)]
    outputs: Annotated[list[_Wanted], Field(max_length=MOST_TENSORS, fail_fast=True)] | None = None


async def server_metadata(_: Request) -> Response:
    """GET /v2."""
    return JSONResponse({"name": "mod-export", "version": __version__, "extensions": ["binary_tensor_data"]})


async def live(request: Request) -> Response:
    """GET /v2/health/live: 200 unless a restart would help."""
    service: Service = request.app.state.service
    return JSONResponse({"live": service.live}, 200 if service.live else 503)


async def ready(request: Request) -> Response:
    """GET /v2/health/ready: 200 while requests are taken."""
    service: Service = request.app.state.service
    return JSONResponse({"ready": service.ready}, 200 if service.ready else 503)


async def model_ready(request: Request) -> Response:
    """GET /v2/models/NAME/ready."""
    service, _ = _scoring(request)
    return JSONResponse({"name": service.name, "ready": service.ready}, 200 if service.ready else 503)


async def model_metadata(request: Request) -> Response:
    """GET /v2/models/NAME. A size of -1 is whatever fits a bucket."""
    service, scoring = _scoring(request)
    deployment = scoring.deployment
    outputs = {
        bucket: {name: ("float32", shape) for name, shape in found.items()}
        for bucket, found in deployment.outputs.items()
    }
    about = {"name": service.name, "versions": ["1"], "platform": f"mod_export_{deployment.target}"}
    ids = deployment.vocab_size is not None
    return JSONResponse({**about, "inputs": _ports(deployment.inputs, ids=ids), "outputs": _ports(outputs, ids=ids)})


async def infer(request: Request) -> Response:
    """POST /v2/models/NAME/infer."""
    service, scoring = _scoring(request)
    body = await read_body(request, _most_bytes(scoring.deployment))
    asked, rest = _parsed(body, request.headers.get(JSON_LENGTH))

    def run() -> tuple[bytes, int | None]:
        return _encoded(service.name, asked, _run(scoring.deployment, _feeds(asked.inputs, rest)))

    async def ran() -> tuple[bytes, int | None]:
        return await asyncio.get_running_loop().run_in_executor(scoring.pool, run)

    with scoring.admitted():
        content, json_bytes = await unless_gone(request.receive, ran())
    if json_bytes is None:
        return Response(content, media_type="application/json")
    return Response(content, headers={JSON_LENGTH: str(json_bytes)}, media_type="application/octet-stream")


def _scoring(request: Request) -> tuple[Service, Scoring]:
    service: Service = request.app.state.service
    name = request.path_params["name"]
    if name != service.name:
        raise ApiError(404, f"model {name[:80]!r}: not served here; this server has {service.name!r}")
    if request.path_params.get("version", "1") != "1":
        raise ApiError(404, f"version {request.path_params['version'][:80]}: this server has version 1")
    if isinstance(service.scoring, str):
        raise ApiError(400, f"this server reads no whole rows: {service.scoring}")
    return service, service.scoring


def _ports(buckets: Mapping[Bucket, Mapping[str, tuple[str, tuple[int, ...]]]], *, ids: bool) -> list[dict[str, Any]]:
    """Inputs or outputs of all buckets as one: -1 where sizes differ, and for rows of `ids`, which may be fewer and
    shorter than any bucket.
    """
    found: dict[str, tuple[str, list[int]]] = {}
    for bucket, ports in buckets.items():
        for name, (dtype, shape) in ports.items():
            sizes = [-1 if ids and axis < 2 and size == (bucket.batch, bucket.seq)[axis] else size
                     for axis, size in enumerate(shape)]  # fmt: skip
            before = found.get(name, (dtype, sizes))[1]
            found[name] = dtype, [a if a == b else -1 for a, b in zip(before, sizes, strict=True)]
    return [
        {"name": name, "datatype": NAMES.get(dtype, dtype), "shape": shape} for name, (dtype, shape) in found.items()
    ]


def _most_bytes(deployment: Deployment) -> int:
    numbers = max(sum(math.prod(shape) for _, shape in ports.values()) for ports in deployment.inputs.values())
    return BESIDE_NUMBERS + BYTES_OF_A_NUMBER * numbers


def _parsed(body: bytes, json_length: str | None) -> tuple[_InferRequest, bytes]:
    """The JSON of a body, and the raw bytes after it."""
    size = len(body)
    if json_length is not None:
        number = json_length.isascii() and json_length.isdigit() and len(json_length) <= MOST_DIGITS
        if not number or int(json_length) > len(body):
            raise ApiError(400, f"{JSON_LENGTH}: expected a number up to {len(body)}, got {json_length[:80]!r}")
        size = int(json_length)
    return _InferRequest.model_validate_json(body[:size]), body[size:]


def _feeds(inputs: Sequence[_Tensor], rest: bytes) -> dict[str, np.ndarray]:
    feeds: dict[str, np.ndarray] = {}
    for one in inputs:
        if one.datatype not in DTYPES:
            raise ApiError(400, f"{one.name}: datatype {one.datatype[:80]!r}, expected one of {', '.join(DTYPES)}")
        dtype = np.dtype(DTYPES[one.datatype])
        size = one.parameters.get("binary_data_size")
        if size is None:
            array = _numbers(one, dtype)
        elif not isinstance(size, int) or size != dtype.itemsize * math.prod(one.shape) or size > len(rest):
            expected = dtype.itemsize * math.prod(one.shape)
            found = f"binary_data_size {str(size)[:80]}, expected {expected} for its shape"
            raise ApiError(400, f"{one.name}: {found}, and {len(rest)} bytes are left in the body")
        else:
            array, rest = np.frombuffer(rest[:size], dtype), rest[size:]
        if array.size != math.prod(one.shape):
            raise ApiError(400, f"{one.name}: shape {one.shape} has {math.prod(one.shape)} numbers, got {array.size}")
        feeds[one.name] = array.reshape(one.shape)
    if rest:
        raise ApiError(400, f"{len(rest)} bytes of the body belong to no input")
    return feeds


def _numbers(tensor: _Tensor, dtype: np.dtype[Any]) -> np.ndarray:
    if tensor.data is None:
        raise ApiError(400, f"{tensor.name}: expected data, or binary_data_size among its parameters")
    try:
        # Of texts NumPy would make an array in which each has the room of the longest.
        if not _are_numbers(tensor.data, MOST_DIMENSIONS):
            raise ValueError("expected numbers in at most 8 dimensions")
        found = np.asarray(tensor.data)
        whole = found.dtype.kind in "iu" or not found.size
        fits = dtype.kind == "f" if not whole else dtype.kind in "iuf"
        if not fits and not (found.dtype.kind == dtype.kind == "b"):
            raise ValueError(f"numbers of another kind than {tensor.datatype}")
        if whole and dtype.kind in "iu" and found.size:
            limits = np.iinfo(dtype)
            if int(found.min()) < limits.min or int(found.max()) > limits.max:
                raise ValueError(f"a number outside {limits.min} to {limits.max}")
        with np.errstate(over="ignore"):
            return found.astype(dtype).reshape(-1)
    except (ValueError, TypeError, OverflowError) as error:
        raise ApiError(400, f"{tensor.name}: data that is no {tensor.datatype} ({str(error)[:200]})") from error


def _are_numbers(values: list[Any], depth: int) -> bool:
    return depth > 0 and all(
        _are_numbers(one, depth - 1) if isinstance(one, list) else isinstance(one, int | float) for one in values
    )


def _run(deployment: Deployment, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Ids of any length that fits a bucket; inputs of a model of its own in exactly the shapes of one."""
    if deployment.vocab_size is None:
        return deployment.infer(feeds)
    if "input_ids" not in feeds or feeds.keys() - {"input_ids", "lengths"}:
        raise ApiError(400, f"expected the inputs input_ids and, if rows are padded, lengths; got {', '.join(feeds)}")
    name = next(iter(next(iter(deployment.outputs.values()))))
    return {name: deployment.run(feeds["input_ids"], feeds.get("lengths"))}


def _encoded(model: str, asked: _InferRequest, results: Mapping[str, np.ndarray]) -> tuple[bytes, int | None]:
    """The body of an answer, and how many bytes of it are JSON; None where all are."""
    wanted = asked.outputs or [_Wanted(name=name) for name in results]
    unknown = [one.name for one in wanted if one.name not in results]
    if unknown:
        raise ApiError(400, f"output {unknown[0][:80]!r}: this model has {', '.join(results)}")
    outputs: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for one in wanted:
        array = np.ascontiguousarray(results[one.name])
        about = {"name": one.name, "datatype": NAMES[array.dtype.name], "shape": list(array.shape)}
        if one.parameters.get("binary_data", asked.parameters.get("binary_data_output", False)) is True:
            blobs.append(array.tobytes())
            outputs.append({**about, "parameters": {"binary_data_size": array.nbytes}})
        elif array.size > MOST_JSON_NUMBERS:
            raise ApiError(400, f"{one.name}: has {array.size:,} numbers, too many for JSON; ask for binary_data")
        elif not np.isfinite(array).all():
            raise ApiError(400, f"{one.name}: has numbers that are not finite, which JSON lacks; ask for binary_data")
        else:
            outputs.append({**about, "data": array.reshape(-1).tolist()})
    head = {"model_name": model, "model_version": "1", "outputs": outputs}
    said = json.dumps(head if asked.id is None else {**head, "id": asked.id}).encode()
    return said + b"".join(blobs), len(said) if blobs else None
