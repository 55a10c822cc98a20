"""The request for a model repository, and the models that go into it.

Whole rows are run by mod-export inside Triton (`forward="python"`), or by Triton's own backends: then there is a model
for each bucket, and a router that forwards requests to them. Text is always written by mod-export.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mod_export.errors import ModExportError, TargetError, UsageError
from mod_export.folder.manifest import BESIDE_TOKENIZER, MANIFEST, Manifest, open_folder
from mod_export.folder.ports import ANY, TensorPort, any_rows, any_size, ports_of
from mod_export.runtime.deployment import fastest_engines, served_engines, threads_to_use
from mod_export.serve import MAX_QUEUE
from mod_export.triton.config import FOLDER, TritonModel, Warmup, parameters_of
from mod_export.types import (
    PRIMARY,
    ROUTED,
    TOKEN_INPUTS,
    Bucket,
    DType,
    Engine,
    Graph,
    Role,
    Unavailable,
    graph_of,
    having,
    primary_output,
)

Forward = Literal["python", "onnxruntime", "tensorrt"]
VERSION = "1"
"""Name of the single version folder of every model."""
MODEL_PY = f"{VERSION}/model.py"
RUNS_PACKAGE = '''"""Runs the build folder beside this file. Written by `mod-export triton`."""

from mod_export.triton.{module} import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''
OPTIONS = (
    TensorPort("max_tokens", "INT64", (1,), optional=True),
    # 64 bits, so that the same values and seed give the same text as from Python.
    TensorPort("temperature", "FP64", (1,), optional=True),
    TensorPort("top_p", "FP64", (1,), optional=True),
    TensorPort("top_k", "INT64", (1,), optional=True),
    TensorPort("seed", "INT64", (1,), optional=True),
)
NUMPY_TYPES = {"float32": "FP32", "float16": "FP16", "float64": "FP64", "bool": "BOOL"}
LENGTHS = TOKEN_INPUTS[1]
PLANS = "tensorrt"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


@dataclass(slots=True, kw_only=True)
class RepositoryRequest:
    """The options of a model repository. Creating it opens the build folder and checks the options.

    Attributes:
        folder: the build folder.
        forward: Triton backend that runs whole rows.
        name: name of the model that runs whole rows; None stands for the name of the checkpoint.
        target: target of the engines that the Python models run; None selects the fastest that run here.
        dtype: dtype of those engines, or of the plans if `forward` is `tensorrt`.
        threads: threads of an engine inside one operator; None uses every physical core.
        max_queue: how many requests may wait for a model.
        instances: number of copies of each model.
        manifest: manifest of the build folder.
        model_name: `name`, or the name of the checkpoint; names of the other models begin with it.
        vocab_size: vocabulary size; None if the model does not read token ids.

    Raises:
        BuildFolderError: the folder is not a finished build folder.
        UsageError: an option is out of range.
    """

    folder: Path
    forward: Forward = "python"
    name: str | None = None
    target: str | None = None
    dtype: str | None = None
    threads: int | None = None
    max_queue: int = MAX_QUEUE
    instances: int = 1
    manifest: Manifest = field(init=False)
    model_name: str = field(init=False)
    vocab_size: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.manifest = open_folder(self.folder, verify=False)
        facts = self.manifest.models["mod"]
        self.model_name = facts.name if self.name is None else self.name
        self.vocab_size = facts.vocab_size
        if not _NAME.fullmatch(self.model_name):
            raise UsageError(
                f"--name: got {self.model_name!r}, expected at most 100 letters, digits, '.', '_' and '-', the first "
                "of them a letter or digit, as it becomes a folder and part of URLs; give another one with --name"
            )
        threads_to_use(self.threads)
        for option, value in (("--max-queue", self.max_queue), ("--instances", self.instances)):
            if value < 1:
                raise UsageError(f"{option}: expected a whole number of at least 1, got {value}")


def forward_models(request: RepositoryRequest) -> list[TritonModel]:
    """Returns the models that run whole rows; the first is the one that clients address.

    Raises:
        UsageError: the folder has nothing for this `forward`.
        TargetError: no engine runs here, or the engines or graphs missed their gates.
    """
    if request.forward == "onnxruntime":
        return _portable_models(request)
    return _plan_models(request) if request.forward == "tensorrt" else [_folder_model(request)]


# Models that run mod-export inside Triton.


def _folder_model(request: RepositoryRequest) -> TritonModel:
    """Returns a model that runs whole rows with the engines that `mod_export.load` chooses."""
    manifest = request.manifest
    engines = served_engines(request.folder, manifest, "mod", request.target, request.dtype)
    graphs = _by_size({engine.bucket: _graph(request, engine) for engine in engines})
    inputs = {
        bucket: tuple(
            TensorPort(name, NUMPY_TYPES.get(dtype, dtype.upper()), shape)
            for name, (dtype, shape) in graph.inputs.items()
        )
        for bucket, graph in graphs.items()
    }
    return TritonModel(
        name=request.model_name,
        about=f"Runs whole rows with {engines[0].target} in {engines[0].dtype}: {_names_of(graphs)}.",
        backend="python",
        inputs=_merged(request, inputs.values()),
        outputs=_merged(request, [_results_of(request, graph) for graph in graphs.values()]),
        files=_files(request, engines, "forward_model"),
        parameters=parameters_of(engines[0].target, engines[0].dtype, request.threads, request.max_queue),
        instances=request.instances,
        max_queue=request.max_queue,
        warmups=tuple(
            Warmup(bucket.name, tuple(p for p in ports if request.vocab_size is None or p.name != LENGTHS))
            for bucket, ports in inputs.items()
        ),
    )


def text_model(request: RepositoryRequest) -> TritonModel | Unavailable:
    """Returns a model that writes text with the engines of `mod_export.load_generator`, or why there is none."""
    manifest = request.manifest
    if isinstance(manifest.generation, Unavailable):
        return manifest.generation
    # With --forward tensorrt, the dtype is that of the plans and not of the engines that write text.
    dtype = None if request.forward == "tensorrt" else request.dtype
    try:
        engines = served_engines(request.folder, manifest, "mod", request.target, dtype, texts=True)
    except ModExportError as error:
        return Unavailable(str(error))
    ids, token = TensorPort("input_ids", "INT64", (ANY,)), TensorPort("token", "INT64", (1,))
    finish = TensorPort("finish_reason", "BYTES", (1,))
    inputs: tuple[TensorPort, ...] = (ids, *OPTIONS)
    outputs: tuple[TensorPort, ...] = (token, finish)
    if manifest.tokenizer is not None:
        text, stop = (
            TensorPort("text", "BYTES", (1,), optional=True),
            TensorPort("stop", "BYTES", (ANY,), optional=True),
        )
        inputs = (text, TensorPort("input_ids", "INT64", (ANY,), optional=True), *OPTIONS, stop)
        outputs = (TensorPort("text", "BYTES", (1,)), token, finish)
    beside = [name for name in (manifest.tokenizer or "", *BESIDE_TOKENIZER) if name in manifest.files]
    return TritonModel(
        name=f"{request.model_name}-text",
        about=f"Writes text with {engines[0].target} in {engines[0].dtype}, several texts at once.",
        backend="python",
        inputs=inputs,
        outputs=outputs,
        files=_files(request, engines, "text_model", beside),
        parameters=parameters_of(engines[0].target, engines[0].dtype, request.threads, request.max_queue),
        instances=request.instances,
        # Requests stay in Triton's queue only until they are read. But if they arrive at once, it must hold as many as
        # the scheduler accepts.
        max_queue=request.max_queue + max(engine.bucket.batch for engine in having(engines, role="decode")),
        decoupled=True,
    )


def _files(
    request: RepositoryRequest, engines: Sequence[Engine], module: str, others: Iterable[str] = ()
) -> dict[str, Path | bytes]:
    """model.py, and the files of the build folder that it opens: the manifest, engines, weights and `others`."""
    paths = dict.fromkeys([MANIFEST, *(path for engine in engines for path in engine.files), *others])
    placed: dict[str, Path | bytes] = {f"{VERSION}/{FOLDER}/{path}": request.folder / path for path in paths}
    return {MODEL_PY: RUNS_PACKAGE.format(module=module).encode(), **placed}


# Models that Triton's own backends run.


def _portable_models(request: RepositoryRequest) -> list[TritonModel]:
    """Returns a router and, for each bucket, the portable graph on Triton's ONNX Runtime backend."""
    manifest, folder = request.manifest, request.folder
    portable = having(manifest.graphs, model="mod", role="forward", target=None)
    if not portable:
        raise UsageError(f"{folder}: holds no portable graph of whole rows; build again, or use --forward python")
    _check_gates(request, [g.path for g in portable], "portable graphs")
    graphs = _by_size({g.bucket: g for g in portable})
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


def _plan_models(request: RepositoryRequest) -> list[TritonModel]:
    """Returns a router, the plans of each forward bucket on Triton's TensorRT backend, and the prefill plans.

    Decode plans are left out: they update their inputs in place, which Triton's backend does not support.
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
    prefill = _by_bucket(
        engine
        for engine in _plans(request, "prefill")
        if engine.dtype == dtype and engine.path not in request.manifest.refused
    )
    graphs = _by_size({bucket: _graph(request, plans[0]) for bucket, plans in forward.items()})
    plans_by_bucket = [*((bucket, forward[bucket]) for bucket in graphs), *sorted(prefill.items())]
    return [_router(request, graphs), *(_plan_model(request, plans) for _, plans in plans_by_bucket)]


def _plans(request: RepositoryRequest, role: Role) -> list[Engine]:
    return having(request.manifest.engines, target=PLANS, model="mod", role=role)


def _without_plans(request: RepositoryRequest) -> str:
    built = dict.fromkeys(engine.target for engine in request.manifest.engines)
    problem = f"{request.folder}: holds no plan of TensorRT for whole rows (built for {', '.join(built)})"
    if "tensorrt-rtx" in built:
        return (
            f"{problem}. Plans of TensorRT-RTX are of another library, which Triton has no backend for; build with "
            'targets = ["tensorrt"] on the GPU that serves, or use --forward onnxruntime'
        )
    return f'{problem}; build with targets = ["tensorrt"] on the GPU that serves, or use another --forward'


def _best_dtype(request: RepositoryRequest, engines: Sequence[Engine]) -> DType:
    """Returns the dtype of the fastest of these plans that met their gates.

    Without measurements it is the first that met its gates, and the first of all if none did.
    """
    fastest = fastest_engines(request.manifest, engines, texts=False)
    if fastest is not None:
        return fastest[1]
    refused = {engine.dtype for engine in engines if engine.path in request.manifest.refused}
    return next((engine.dtype for engine in engines if engine.dtype not in refused), engines[0].dtype)


def _check_gates(request: RepositoryRequest, paths: Sequence[str], what: str) -> None:
    missed = dict.fromkeys(reason for path in paths for reason in request.manifest.refused.get(path, ()))
    if missed:
        raise TargetError(
            f"{request.folder}: {what} missed their gates and are not served ({'; '.join(missed)}); use another "
            "--forward or --dtype, or build with another gate if this one is wrong for your use"
        )


def _by_bucket(engines: Iterable[Engine]) -> dict[Bucket, list[Engine]]:
    groups: dict[Bucket, list[Engine]] = defaultdict(list)
    for engine in engines:
        groups[engine.bucket].append(engine)
    return groups


def _plan_model(request: RepositoryRequest, engines: Sequence[Engine]) -> TritonModel:
    """Returns the model of one bucket; it has a plan for each GPU architecture that was built for."""
    graph = _graph(request, engines[0])
    is_single = len(engines) == 1
    names = {engine.path: "model.plan" if is_single else f"model-{engine.arch}.plan" for engine in engines}
    return _bucket_model(
        request,
        graph,
        backend=PLANS,
        about=f"The plan of {graph.role} bucket {graph.bucket.name}, in {engines[0].dtype}.",
        placed={f"{VERSION}/{names[engine.path]}": request.folder / engine.path for engine in engines},
        plans={_capability(engine.arch): names[engine.path] for engine in engines if engine.arch},
    )


def _capability(arch: str) -> str:
    """Returns the compute capability of an architecture: 8.9 for sm89, 12.0 for sm120."""
    digits = arch.removeprefix("sm")
    return f"{digits[:-1]}.{digits[-1]}"


def _bucket_model(
    request: RepositoryRequest,
    graph: Graph,
    *,
    backend: str,
    about: str,
    placed: Mapping[str, Path],
    parameters: Mapping[str, str] | None = None,
    plans: Mapping[str, str] | None = None,
) -> TritonModel:
    inputs, outputs = ports_of(request.folder / graph.path)
    contents: dict[str, Path | bytes] = dict(placed)
    # Warm-up lengths are not zeros: a row needs at least one token.
    read = tuple(port for port in inputs if port.name == LENGTHS and request.vocab_size is not None)
    for port in read:
        contents[f"warmup/{port.name}"] = np.full(port.dims, graph.bucket.seq, dtype="<i8").tobytes()
    role = f"-{graph.role}" if graph.writes_text else ""
    return TritonModel(
        name=f"{request.model_name}{role}-{graph.bucket.name}",
        about=about,
        backend=backend,
        inputs=inputs,
        outputs=outputs,
        files=contents,
        parameters=parameters or {},
        instances=request.instances,
        gpu=backend == PLANS,
        max_queue=request.max_queue,
        warmups=(Warmup("zeros", tuple(port for port in inputs if port not in read), read),),
        plans=plans or {},
    )


def _router(request: RepositoryRequest, graphs: Mapping[Bucket, Graph]) -> TritonModel:
    """Returns the router. It has no warm-up, because Triton may load the models of the buckets after it."""
    inputs = {bucket: ports_of(request.folder / graph.path)[0] for bucket, graph in graphs.items()}
    outputs = [_results_of(request, graph) for graph in graphs.values()]
    names = [port.name for port in outputs[0]]
    routing: dict[str, Any] = {
        "inputs": {
            bucket.name: {port.name: [port.dtype, list(port.dims)] for port in ports}
            for bucket, ports in inputs.items()
        },
        "outputs": names,
        "vocab_size": request.vocab_size,
        "positions": names != [PRIMARY["last"]],
    }
    return TritonModel(
        name=request.model_name,
        about=f"Pads a request to a bucket and passes it to the model of that bucket: {_names_of(graphs)}.",
        backend="python",
        inputs=_merged(request, inputs.values()),
        outputs=_merged(request, outputs),
        files={MODEL_PY: files(__package__).joinpath("router.py").read_bytes()},
        parameters={"buckets": json.dumps(routing)},
        instances=request.instances,
        max_queue=request.max_queue,
    )


# Graphs and their ports.


def _graph(request: RepositoryRequest, engine: Engine) -> Graph:
    graph = graph_of(engine, request.manifest.graphs)
    assert graph is not None, "every engine of a manifest has one"
    return graph


def _by_size(graphs: Mapping[Bucket, Graph]) -> dict[Bucket, Graph]:
    """Sorts the graphs by bucket, smallest first: a request takes the first bucket that fits."""
    return dict(sorted(graphs.items(), key=lambda pair: (pair[0].batch * pair[0].seq, pair[0])))


def _names_of(buckets: Iterable[Bucket]) -> str:
    return ", ".join(bucket.name for bucket in buckets)


def _results_of(request: RepositoryRequest, graph: Graph) -> tuple[TensorPort, ...]:
    """Returns the model's own outputs: the primary one if it reads token ids, otherwise all but the routed positions.

    Raises:
        BuildFolderError: the graph cannot be read.
    """
    _, outputs = ports_of(request.folder / graph.path)
    ports = tuple(port for port in outputs if not port.name.startswith(ROUTED))
    if request.vocab_size is None:
        return ports
    name = primary_output(port.name for port in ports)
    return tuple(port for port in ports if port.name == name)


def _merged(request: RepositoryRequest, ports_by_bucket: Iterable[Sequence[TensorPort]]) -> tuple[TensorPort, ...]:
    """Merges the inputs or outputs of all buckets into those of the model that takes requests for them."""
    return (any_size if request.vocab_size is None else any_rows)(list(ports_by_bucket))
