"""Models that run mod-export inside Triton: one for whole rows, like `mod_export.load`, and one for text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from mod_export.errors import ModExportError
from mod_export.folder.manifest import BESIDE_TOKENIZER, MANIFEST
from mod_export.runtime.deployment import served_engines
from mod_export.triton.config import ANY, Port, TritonModel, Warmup
from mod_export.triton.onnx_ports import ports_of
from mod_export.triton.request import VERSION, RepositoryRequest
from mod_export.triton.served import FOLDER, parameters_of
from mod_export.types import PRIMARY, ROUTED, TOKEN_INPUTS, Bucket, Engine, Graph, graph_of, primary_output

MODEL_PY = f"{VERSION}/model.py"
RUNS_PACKAGE = '''"""Runs the build folder beside this file. Written by `mod-export triton`."""

from mod_export.triton.{module} import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''
OPTIONS = (
    Port("max_tokens", "INT64", (1,), optional=True),
    # 64 bits, so that the same values and seed give the same text as from Python.
    Port("temperature", "FP64", (1,), optional=True),
    Port("top_p", "FP64", (1,), optional=True),
    Port("top_k", "INT64", (1,), optional=True),
    Port("seed", "INT64", (1,), optional=True),
)
NUMPY_TYPES = {"float32": "FP32", "float16": "FP16", "float64": "FP64", "bool": "BOOL"}


def folder_model(request: RepositoryRequest) -> TritonModel:
    """Returns a model that runs whole rows with the engines that `mod_export.load` chooses.

    Raises:
        UsageError: the folder has no such engines.
        TargetError: no engine runs here, or the engines missed their gates.
    """
    manifest = request.manifest
    engines = served_engines(request.folder, manifest, "mod", request.target, request.dtype)
    own_graphs = [graph_of(engine, manifest.graphs) for engine in engines]
    graphs = by_size({graph.bucket: graph for graph in own_graphs if graph is not None})
    inputs = {bucket: _inputs(graph) for bucket, graph in graphs.items()}
    outputs = [results_of(request, graph) for graph in graphs.values()]
    reads_tokens = manifest.models["mod"].vocab_size is not None
    merged = any_rows if reads_tokens else any_size
    return TritonModel(
        name=request.name,
        about=f"Runs whole rows with {engines[0].target} in {engines[0].dtype}: {names_of(graphs)}.",
        backend="python",
        inputs=merged(list(inputs.values())),
        outputs=merged(outputs),
        files=_files(request, engines, "forward_model"),
        parameters=parameters_of(engines[0].target, engines[0].dtype, request.threads, request.max_queue),
        instances=request.instances,
        max_queue=request.max_queue,
        warmups=tuple(
            Warmup(bucket.name, tuple(port for port in ports if not (reads_tokens and port.name == TOKEN_INPUTS[1])))
            for bucket, ports in inputs.items()
        ),
    )


def text_model(request: RepositoryRequest) -> TritonModel | str:
    """Returns a model that writes text with the engines of `mod_export.load_generator`, or the reason why it cannot."""
    manifest = request.manifest
    if isinstance(manifest.generation, str):
        return manifest.generation
    # With --forward tensorrt, the dtype is that of the plans and not of the engines that write text.
    dtype = None if request.forward == "tensorrt" else request.dtype
    try:
        engines = served_engines(request.folder, manifest, "mod", request.target, dtype, texts=True)
    except ModExportError as error:
        return str(error)
    ids, token = Port("input_ids", "INT64", (ANY,)), Port("token", "INT64", (1,))
    finish = Port("finish_reason", "BYTES", (1,))
    inputs: tuple[Port, ...] = (ids, *OPTIONS)
    outputs: tuple[Port, ...] = (token, finish)
    tokenizer_files = (manifest.tokenizer, *BESIDE_TOKENIZER)
    kept = [name for name in tokenizer_files if name is not None and name in manifest.files]
    if manifest.tokenizer is not None:
        text, stop = Port("text", "BYTES", (1,), optional=True), Port("stop", "BYTES", (ANY,), optional=True)
        inputs = (text, Port("input_ids", "INT64", (ANY,), optional=True), *OPTIONS, stop)
        outputs = (Port("text", "BYTES", (1,)), token, finish)
    return TritonModel(
        name=f"{request.name}-text",
        about=f"Writes text with {engines[0].target} in {engines[0].dtype}, several texts at once.",
        backend="python",
        inputs=inputs,
        outputs=outputs,
        files=_files(request, engines, "text_model", kept),
        parameters=parameters_of(engines[0].target, engines[0].dtype, request.threads, request.max_queue),
        instances=request.instances,
        # Requests stay in Triton's queue only until they are read. But if they arrive at once, it must hold as many as
        # the scheduler accepts.
        max_queue=request.max_queue + max(engine.bucket.batch for engine in engines if engine.role == "decode"),
        decoupled=True,
    )


def results_of(request: RepositoryRequest, graph: Graph) -> tuple[Port, ...]:
    """Returns the model's own outputs: the primary one if it reads token ids, otherwise all but the routed positions.

    Raises:
        BuildFolderError: the graph cannot be read.
    """
    _, outputs = ports_of(request.folder / graph.path)
    ports = tuple(port for port in outputs if not port.name.startswith(ROUTED))
    if request.manifest.models["mod"].vocab_size is None:
        return ports
    name = primary_output(port.name for port in ports)
    return tuple(port for port in ports if port.name == name)


def by_size(graphs: dict[Bucket, Graph]) -> dict[Bucket, Graph]:
    """Sorts the graphs by bucket, smallest first: a request takes the first bucket that fits."""
    return dict(sorted(graphs.items(), key=lambda pair: (pair[0].batch * pair[0].seq, pair[0])))


def names_of(buckets: Iterable[Bucket]) -> str:
    """Returns the names of buckets, joined for a message."""
    return ", ".join(bucket.name for bucket in buckets)


def _files(
    request: RepositoryRequest, engines: Sequence[Engine], module: str, others: Sequence[str] = ()
) -> dict[str, Path | bytes]:
    """model.py, and the files of the build folder that it opens: the manifest, engines, weights and `others`."""
    paths = dict.fromkeys([MANIFEST, *(path for engine in engines for path in engine.files), *others])
    placed: dict[str, Path | bytes] = {f"{VERSION}/{FOLDER}/{path}": request.folder / path for path in paths}
    return {MODEL_PY: RUNS_PACKAGE.format(module=module).encode(), **placed}


def _inputs(graph: Graph) -> tuple[Port, ...]:
    return tuple(
        Port(name, NUMPY_TYPES.get(dtype, dtype.upper()), shape) for name, (dtype, shape) in graph.inputs.items()
    )


def any_rows(buckets: Sequence[Sequence[Port]]) -> tuple[Port, ...]:
    """Ports of a model of token ids: any batch and length, padded to a bucket by the model; `lengths` is optional."""
    ports = []
    for port in buckets[0]:
        free = 1 if port.name in (TOKEN_INPUTS[1], PRIMARY["last"]) else 2
        dims = (ANY,) * free + port.dims[free:]
        ports.append(Port(port.name, port.dtype, dims, optional=port.name == TOKEN_INPUTS[1]))
    return tuple(ports)


def any_size(buckets: Sequence[Sequence[Port]]) -> tuple[Port, ...]:
    """Merges the ports of all buckets; a dimension is `ANY` if its sizes differ."""
    return tuple(
        Port(ports[0].name, ports[0].dtype, tuple(sizes[0] if len(set(sizes)) == 1 else ANY for sizes in dims))
        for ports in zip(*buckets, strict=True)
        for dims in [list(zip(*(port.dims for port in ports), strict=True))]
    )
