"""Models that Triton's own backends run: one for each bucket, and a router that forwards requests to them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from mod_export.errors import TargetError, UsageError
from mod_export.triton.config import Port, TritonModel, Warmup
from mod_export.triton.models import MODEL_PY, any_rows, any_size, by_size, names_of, results_of
from mod_export.triton.onnx_ports import ports_of
from mod_export.triton.request import VERSION, RepositoryRequest
from mod_export.types import PRIMARY, TOKEN_INPUTS, Bucket, DType, Engine, Graph, Role, graph_of

LENGTHS = TOKEN_INPUTS[1]
PLANS = "tensorrt"


def portable_models(request: RepositoryRequest) -> list[TritonModel]:
    """Returns a router and, for each bucket, the portable graph on Triton's ONNX Runtime backend.

    Raises:
        UsageError: the folder has no portable graph of whole rows.
        TargetError: a graph missed its gates.
    """
    manifest, folder = request.manifest, request.folder
    portable = [g for g in manifest.graphs if (g.model, g.role, g.target) == ("mod", "forward", None)]
    if not portable:
        raise UsageError(f"{folder}: holds no portable graph of whole rows; build again, or use --forward python")
    _check_gates(request, [g.path for g in portable], "portable graphs")
    graphs = by_size({g.bucket: g for g in portable})
    weights = manifest.models["mod"].weights
    threads = {} if request.threads is None else {"intra_op_thread_count": str(request.threads)}
    models = [
        _bucket_model(
            request,
            graph,
            backend="onnxruntime",
            about=f"The portable graph of bucket {bucket.name}, in float32.",
            # A graph names its weights as a file beside it, and ONNX Runtime refuses links that leave its folder.
            placed={
                f"{VERSION}/model.onnx": folder / graph.path,
                f"{VERSION}/{Path(weights).name}": folder / weights,
            },
            parameters=threads,
        )
        for bucket, graph in graphs.items()
    ]
    return [_router(request, graphs), *models]


def plan_models(request: RepositoryRequest) -> list[TritonModel]:
    """Returns a router, the plans of each forward bucket on Triton's TensorRT backend, and the prefill plans.

    Decode plans are left out: they update their inputs in place, which Triton's backend does not support.

    Raises:
        UsageError: the folder has no TensorRT plans for whole rows, or none of this dtype.
        TargetError: plans missed their gates.
    """
    engines = _plans(request, "forward")
    if not engines:
        raise UsageError(_without_plans(request))
    dtype = request.dtype or _best_dtype(request, engines)
    chosen = [engine for engine in engines if engine.dtype == dtype]
    if not chosen:
        built = ", ".join(dict.fromkeys(engine.dtype for engine in engines))
        raise UsageError(f"{request.folder}: holds no {dtype} plan for whole rows; built: {built}")
    _check_gates(request, [engine.path for engine in chosen], f"{dtype} plans")
    forward = _by_bucket(chosen)
    graphs = by_size({bucket: _graph(request, group[0]) for bucket, group in forward.items()})
    prompts = [
        engine
        for engine in _plans(request, "prefill")
        if engine.dtype == dtype and engine.path not in request.manifest.refused
    ]
    prefill = _by_bucket(prompts)
    models = [_plan_model(request, graph, forward[bucket]) for bucket, graph in graphs.items()]
    models += [_plan_model(request, _graph(request, prefill[bucket][0]), prefill[bucket]) for bucket in sorted(prefill)]
    return [_router(request, graphs), *models]


def _plans(request: RepositoryRequest, role: Role) -> list[Engine]:
    return [
        engine
        for engine in request.manifest.engines
        if (engine.target, engine.model, engine.role) == (PLANS, "mod", role)
    ]


def _without_plans(request: RepositoryRequest) -> str:
    built = dict.fromkeys(engine.target for engine in request.manifest.engines)
    what = f"{request.folder}: holds no plan of TensorRT for whole rows (built for {', '.join(built)})"
    if "tensorrt-rtx" in built:
        return (
            f"{what}. Plans of TensorRT-RTX are of another library, which Triton has no backend for; build with "
            'targets = ["tensorrt"] on the GPU that serves, or use --forward onnxruntime'
        )
    return f'{what}; build with targets = ["tensorrt"] on the GPU that serves, or use another --forward'


def _best_dtype(request: RepositoryRequest, engines: Sequence[Engine]) -> DType:
    """Returns the dtype of the fastest of these plans that met their gates.

    Without measurements it is the first that met its gates, and the first of all if none did.
    """
    refused = {engine.dtype for engine in engines if engine.path in request.manifest.refused}
    passed = [engine.dtype for engine in engines if engine.dtype not in refused]
    measured = [
        (row.ms, row.dtype)
        for row in request.manifest.measured
        if (row.model, row.role, row.target) == ("mod", "forward", PLANS) and row.dtype in passed
    ]
    return min(measured)[1] if measured else next(iter(passed), engines[0].dtype)


def _check_gates(request: RepositoryRequest, paths: list[str], what: str) -> None:
    missed = dict.fromkeys(reason for path in paths for reason in request.manifest.refused.get(path, ()))
    if missed:
        raise TargetError(
            f"{request.folder}: {what} missed their gates and are not served ({'; '.join(missed)}); use another "
            "--forward or --dtype, or build with another gate if this one is wrong for your use"
        )


def _by_bucket(engines: list[Engine]) -> dict[Bucket, list[Engine]]:
    groups: dict[Bucket, list[Engine]] = defaultdict(list)
    for engine in engines:
        groups[engine.bucket].append(engine)
    return groups


def _graph(request: RepositoryRequest, engine: Engine) -> Graph:
    graph = graph_of(engine, request.manifest.graphs)
    assert graph is not None, "every engine of a manifest has one"
    return graph


def _plan_model(request: RepositoryRequest, graph: Graph, engines: list[Engine]) -> TritonModel:
    is_single = len(engines) == 1
    names = {engine.path: "model.plan" if is_single else f"model-{engine.arch}.plan" for engine in engines}
    return _bucket_model(
        request,
        graph,
        backend=PLANS,
        about=f"The plan of {graph.role} bucket {graph.bucket.name}, in {engines[0].dtype}.",
        placed={f"{VERSION}/{names[engine.path]}": request.folder / engine.path for engine in engines},
        parameters={},
        plans={_capability(engine): names[engine.path] for engine in engines if engine.arch},
    )


def _capability(engine: Engine) -> str:
    """Compute capability of an architecture: 8.9 for sm89, 12.0 for sm120."""
    digits = (engine.arch or "").removeprefix("sm")
    return f"{digits[:-1]}.{digits[-1]}"


def _bucket_model(
    request: RepositoryRequest,
    graph: Graph,
    *,
    backend: str,
    about: str,
    placed: Mapping[str, Path],
    parameters: Mapping[str, str],
    plans: Mapping[str, str] | None = None,
) -> TritonModel:
    inputs, outputs = ports_of(request.folder / graph.path)
    contents: dict[str, Path | bytes] = dict(placed)
    zeros = inputs
    read: tuple[tuple[Port, str], ...] = ()
    lengths = next((port for port in inputs if port.name == LENGTHS), None)
    if lengths is not None and request.manifest.models["mod"].vocab_size is not None:
        # Warm-up lengths are not zeros: a row needs at least one token.
        contents[f"warmup/{LENGTHS}"] = np.full(lengths.dims, graph.bucket.seq, dtype="<i8").tobytes()
        zeros = tuple(port for port in inputs if port.name != LENGTHS)
        read = ((lengths, LENGTHS),)
    role = f"-{graph.role}" if graph.writes_text else ""
    return TritonModel(
        name=f"{request.name}{role}-{graph.bucket.name}",
        about=about,
        backend=backend,
        inputs=inputs,
        outputs=outputs,
        files=contents,
        parameters=parameters,
        instances=request.instances,
        gpu=backend == PLANS,
        max_queue=request.max_queue,
        warmups=(Warmup("zeros", zeros, read),),
        plans=plans or {},
    )


def _router(request: RepositoryRequest, graphs: Mapping[Bucket, Graph]) -> TritonModel:
    """Returns the router. It has no warm-up, because Triton may load the models of the buckets after it."""
    vocab_size = request.manifest.models["mod"].vocab_size
    inputs = {bucket: ports_of(request.folder / graph.path)[0] for bucket, graph in graphs.items()}
    outputs = [results_of(request, graph) for graph in graphs.values()]
    merged = any_size if vocab_size is None else any_rows
    names = [port.name for port in outputs[0]]
    routing: dict[str, Any] = {
        "inputs": {
            bucket.name: {port.name: [port.dtype, list(port.dims)] for port in ports}
            for bucket, ports in inputs.items()
        },
        "outputs": names,
        "vocab_size": vocab_size,
        "positions": names != [PRIMARY["last"]],
    }
    return TritonModel(
        name=request.name,
        about=f"Pads a request to its bucket and asks the model of it: {names_of(graphs)}.",
        backend="python",
        inputs=merged(list(inputs.values())),
        outputs=merged(outputs),
        files={MODEL_PY: files(__package__).joinpath("router.py").read_bytes()},
        parameters={"buckets": json.dumps(routing)},
        instances=request.instances,
        max_queue=request.max_queue,
    )
