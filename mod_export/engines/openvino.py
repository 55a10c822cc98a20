"""OpenVINO on the CPU: an engine is a compiled model, whose weights are in a weights file in graphs/ wherever possible.

OpenVINO reads the graph of its target, rewrites it for the instruction sets of this processor, and exports the result.
The exported model refers to weights by their offset in the weights file (CACHE_MODE OPTIMIZE_SIZE, WEIGHTS_PATH), so
all buckets share one file on disk. Weights that are quantized in blocks (int4, and in models of moderate size int8 in
steps and short rows) are in the engine itself, once for each bucket. An engine runs only on the version of OpenVINO and
on the instruction sets that it was made for; OpenVINO checks that itself.

Attention is written out in blocks of queries, with the queries that share keys as rows of one matrix. OpenVINO makes
one kernel of that, which copies no keys and computes few of the scores that the mask hides (docs/LOG.md).

Weights of int8 and int4 stay integers. Where that is faster, the values that are multiplied by them are rounded to
8 bits at run time (DYNAMIC_QUANTIZATION_GROUP_SIZE).

Everything beside such weights is bfloat16, or float32 where the processor has no instructions for bfloat16. The types
of the graph decide what is computed in bfloat16, so routers stay in float32: a processor with bfloat16 keeps the types
if no precision is requested. OpenVINO's own way, INFERENCE_PRECISION_HINT bf16 on a float32 graph, rounds the scores of
routers too: it selects 2.3 tokens a row differently from the reference, instead of 1.7 (docs/LOG.md).

Source: https://docs.openvino.ai/2026/openvino-workflow/running-inference/optimize-inference/optimizing-latency/model-caching-overview.html
"""

from __future__ import annotations

import contextlib
import json
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mod_export.config import BuildConfig
from mod_export.engines.openvino_forms import Form, fastest_form, write_in
from mod_export.engines.openvino_products import ProductShape, products_of, wrong_products
from mod_export.engines.protocol import (
    Arrays,
    EngineBuilder,
    EngineJob,
    EngineRunner,
    OptionalArrays,
    Port,
    check_bound,
)
from mod_export.environment import cpu_features, package_version
from mod_export.errors import EngineError, TargetError
from mod_export.types import Availability, DType, Engine, Graph, TargetLimits, Variant

if TYPE_CHECKING:
    import openvino

CPU = "CPU"
BFLOAT16 = "BF16"
"""Name of bfloat16 among a device's OPTIMIZATION_CAPABILITIES."""
GROUP = 128
"""How many activations of a token share one scale when they are rounded to 8 bits, for weights that have a scale for
each column. This is the fastest of the sizes that were tried (docs/LOG.md).
"""
GROUP_OF_BLOCKS, SMALL_GROUP = 32, 16
"""The same for weights in blocks. SMALL_GROUP is more accurate, and int8 has it. A step of several texts then takes up
to 1.3 times as long, depending on the processor (docs/LOG.md).
"""
ALIGNMENT = 64
"""Bytes of which the place of OpenVINO's blob in the file is a multiple: a line of the cache, and a vector register."""
WEIGHTLESS = "WeightlessCacheAttribute_0"
"""Marks a constant that is stored in a weights file, with its offset there. OpenVINO's reader of ONNX files sets it."""
WIDE = ("f32", "f64")
DTYPES: Mapping[str, type[np.generic]] = {
    "f32": np.float32, "f16": np.float16, "bf16": np.uint16, "f64": np.float64, "boolean": np.bool_,
    "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
}  # fmt: skip
"""Element type of an input or output -> NumPy dtype. NumPy has no bfloat16, so its bits are uint16."""


@cache
def _core() -> openvino.Core:
    """Returns OpenVINO's runtime, one per process because plug-ins take time to load."""
    import openvino

    return openvino.Core()


def _message(error: BaseException) -> str:
    """Returns the last line of OpenVINO's error: the message, without locations in OpenVINO's sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class OpenVinoRunner(EngineRunner):
    """A compiled model with inputs and outputs of static shape. It reads feeds in place and returns arrays over memory
    of OpenVINO, without a copy. Later runs use that memory again once the arrays are gone. Several threads may run it.
    """

    def __init__(
        self,
        model: openvino.CompiledModel,
        inputs: Sequence[str],
        outputs: Sequence[str],
        where: str,
        threads: int,
        blob: openvino.Tensor | None = None,
    ) -> None:
        """`inputs` and `outputs` are names in the model's order, because in OpenVINO a port can have several names.
        `blob` is what the model was imported from: it reads constants there, and does not keep it.
        """
        self._inputs = dict(zip(inputs, model.inputs, strict=True))
        self._outputs = dict(zip(outputs, model.outputs, strict=True))
        ports = {name: _port(port) for name, port in self._inputs.items()}
        super().__init__(where, ports, outputs, ["OpenVINO CPU"], threads)
        self.ports: Mapping[str, Port] = {**ports, **{name: _port(port) for name, port in self._outputs.items()}}
        self._model: openvino.CompiledModel | None = model
        self._blob = blob
        self._idle: list[openvino.InferRequest] = []
        self._changing = threading.Lock()

    def _run(self, feeds: Arrays, wanted: list[str]) -> dict[str, np.ndarray]:
        with self._changing:
            model = self._opened()
            request = self._idle.pop() if self._idle else model.create_infer_request()
            lease = _Lease(self._idle, request, self._blob)
        # `ascontiguousarray` would add a dimension to an array without one.
        arrays = {name: np.asarray(array, order="C") for name, array in feeds.items()}
        with self._errors():
            self._set(request, arrays)
            request.infer()
        return {name: np.asarray(_OpenVinoResult(lease, self._outputs[name], self.ports[name])) for name in wanted}

    def bind(self, feeds: Arrays, outputs: Arrays) -> Callable[[], None]:
        check_bound(self._where, self.ports, feeds, outputs)
        with self._changing:
            request, blob = self._opened().create_infer_request(), self._blob
        arrays = {**feeds, **outputs}
        self._set(request, arrays)

        # OpenVINO only has the addresses of the arrays, and of the blob, which another thread may close meanwhile.
        def run(kept: object = (arrays, blob)) -> None:
            self._opened()
            with self._errors():
                request.infer()

        return run

    def _set(self, request: openvino.InferRequest, arrays: Arrays) -> None:
        import openvino

        for name, array in arrays.items():
            port = self._inputs.get(name) or self._outputs[name]
            # The tensor uses the array's own memory.
            request.set_tensor(port, openvino.Tensor(array, list(array.shape), port.element_type))

    def _opened(self) -> openvino.CompiledModel:
        if self._model is None:
            raise EngineError(f"{self._where}: the engine is closed; open another one")
        return self._model

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise EngineError(f"{self._where}: OpenVINO failed: {_message(error)}") from error

    def close(self) -> None:
        with self._changing:
            self._model = self._blob = None
            self._idle = []  # Leases that are still out return their requests to the old list.


class _Lease:
    """A request whose outputs are in use. It becomes idle when the last array over them is deleted."""

    def __init__(
        self, idle: list[openvino.InferRequest], request: openvino.InferRequest, blob: openvino.Tensor | None
    ) -> None:
        """Keeps `blob` alive, in which an output that is a constant may be."""
        self.request = request
        self._idle, self._blob = idle, blob

    def __del__(self) -> None:
        self._idle.append(self.request)


class _OpenVinoResult:
    """The memory of one output, as NumPy's array interface."""

    def __init__(self, lease: _Lease, output: openvino.ConstOutput, port: Port) -> None:
        self._lease = lease
        self.__array_interface__ = {
            "shape": port.shape,
            "typestr": port.dtype.str,
            "data": (lease.request.get_tensor(output).data.ctypes.data, False),
            "version": 3,
        }


def _port(port: openvino.ConstOutput) -> Port:
    return Port(tuple(port.shape), np.dtype(DTYPES[port.element_type.get_type_name()]))


class OpenVino(EngineBuilder):
    """OpenVINO's CPU plug-in."""

    name = "openvino"
    packages = ("openvino",)
    extra = "openvino"
    suffix = ".blob"
    binds = True
    limits = TargetLimits(
        name="OpenVINO",
        max_opset=23,
        branches=True,
        attention_dtypes=frozenset(),
        # Larger blocks are fewer products, and compute more scores that the mask hides: a smaller share of long rows.
        query_blocks_from=((0, 128), (4096, 256)),
        late_masks=True,
        grouped_rows=True,
        one_type_norms=True,
        cache_in_use=True,
        extra_domains=frozenset({"com.microsoft"}),
        rounds_activations=True,
        quantized_beside="bfloat16",
    )

    def _installed(self) -> Availability:
        about = f"openvino {package_version('openvino')}"
        if CPU not in _core().available_devices:
            return Availability(builds=False, runs=False, reason=f"{about}, which has no plug-in for this CPU")
        return Availability(builds=True, runs=True, reason=about)

    def problems(self, config: BuildConfig) -> Sequence[str]:
        if "bfloat16" not in config.target.openvino.dtypes or BFLOAT16 in _capabilities():
            return []
        return [
            f"target.openvino.dtypes: bfloat16, but {_cpu()} has no instructions for it (OpenVINO names "
            f"{', '.join(_capabilities())}); build it on the processor that will run it, and the other dtypes here"
        ]

    def limits_here(self) -> TargetLimits:
        return self.limits if BFLOAT16 in _capabilities() else replace(self.limits, quantized_beside="float32")

    def build(self, job: EngineJob, variant: Variant, destination: Path, config: BuildConfig) -> None:
        from mod_export.graph.nodes import graph_from_file

        graph = job.root / job.graph.path
        onnx_graph = graph_from_file(graph).graph
        group = _group(job.graph, in_blocks=any(node.op_type == "MatMulNBits" for node in onnx_graph.all_nodes()))
        try:
            model = _core().read_model(str(graph))
            compiled = partial(_compiled, graph, variant.dtype, 1, group)
            form = fastest_form(model, compiled) if job.graph.role == "decode" else Form()
            write_in(model, form)
            products, blob = products_of(model), compiled(form).export_model().getvalue()
        except RuntimeError as error:
            raise EngineError(f"{destination.name}: OpenVINO cannot compile {graph.name}: {_message(error)}") from error
        if wrong := wrong_on_this_processor(tuple(products), variant.dtype, 1):
            raise EngineError(f"{destination.name}: {wrong}")
        header = {
            "openvino": package_version("openvino"),
            "cpu": _cpu(),
            "features": sorted(cpu_features()),
            "graph": job.graph.path,
            "group": group,
            **asdict(form),
            "products": [asdict(product) for product in products],
            "inputs": [value.name for value in onnx_graph.inputs],
            "outputs": [value.name for value in onnx_graph.outputs],
        }
        head = json.dumps(header).encode()
        destination.write_bytes(head + b" " * (-(len(head) + 1) % ALIGNMENT) + b"\n" + blob)

    def made_here(self, root: Path, engine: Engine) -> bool:
        try:
            with (root / engine.path).open("rb") as file:
                header = json.loads(file.readline())
        except (OSError, ValueError):  # Damaged, which loading it says.
            return True
        made_on = (header["openvino"], header["cpu"], header.get("features"))
        return made_on == (package_version("openvino"), _cpu(), sorted(cpu_features()))

    def _load(
        self, root: Path, engine: Engine, config: BuildConfig, threads: int, weights: OptionalArrays
    ) -> OpenVinoRunner:
        assert engine.weights is not None
        try:
            header, blob = _mapped(root / engine.path)
        except (OSError, ValueError) as error:
            raise EngineError(f"{engine.path}: no engine of OpenVINO, or damaged ({error}); build again") from error
        form = Form(**{field.name: header[field.name] for field in fields(Form) if field.name in header})
        try:
            if weights is not None:  # A probe compiles the graph again, because an engine reads weights from its file.
                model = _compiled(root / header["graph"], engine.dtype, threads, header["group"], form, weights)
            else:
                options = _options(engine.dtype, threads, header["group"])
                where = str((root / engine.weights).resolve())
                model = _core().import_model(blob, CPU, {**options, "WEIGHTS_PATH": where})
        except RuntimeError as error:
            raise _refused(engine, header, error) from error
        # Virtual machines give processors of several generations one name. Engines from before this check name neither
        # instruction sets nor products.
        if (header["cpu"], header.get("features")) != (_cpu(), sorted(cpu_features())):
            products = tuple(ProductShape(**about) for about in header.get("products", ()))
            if wrong := wrong_on_this_processor(products, engine.dtype, threads):
                raise TargetError(f"{engine.path}: {wrong}")
        where, kept = f"{self.name} {engine.path}", blob if weights is None else None
        return OpenVinoRunner(model, header["inputs"], header["outputs"], where, threads, kept)


def _mapped(path: Path) -> tuple[dict[str, Any], openvino.Tensor]:
    """Returns the header of an engine and OpenVINO's blob. The blob is mapped: it holds all weights of some engines, of
    which OpenVINO makes a copy that its kernels can read, and the system can take the pages of a file back.

    Raises:
        ValueError: the file has no header.
    """
    import openvino

    with path.open("rb") as file:
        head = file.readline()
        header = json.loads(head)
        # A tensor takes no memory that cannot be written. Nothing is written, and if it were, not to the file.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return header, openvino.Tensor(np.frombuffer(mapped, np.uint8)[len(head) :], shared_memory=True)


@cache
def wrong_on_this_processor(products: tuple[ProductShape, ...], dtype: DType, threads: int) -> str:
    """Says which bfloat16 products OpenVINO computes wrongly on this processor; empty if it computes all correctly."""
    about, instead = f"OpenVINO {package_version('openvino')}", "use float32, or another release of OpenVINO"
    try:
        wrong = wrong_products(_core(), products, _options(dtype, threads, GROUP))
    except RuntimeError as error:
        return f"{about} cannot multiply by bfloat16 weights on {_cpu()}: {_message(error)}; {instead}"
    return f"{about} computes wrong bfloat16 products on {_cpu()}: {', '.join(wrong)}; {instead}" if wrong else ""


def _refused(engine: Engine, made: Mapping[str, Any], error: RuntimeError) -> EngineError | TargetError:
    if "built for a different runtime" not in str(error):
        return EngineError(f"{engine.path}: OpenVINO cannot load it: {_message(error)}; build again")
    return TargetError(
        f"{engine.path}: compiled by OpenVINO {made['openvino']} for the instruction sets of {made['cpu']}, and this "
        f"is OpenVINO {package_version('openvino')} on {_cpu()}; build again here"
    )


def _capabilities() -> list[str]:
    return list(_core().get_property(CPU, "OPTIMIZATION_CAPABILITIES"))


def _cpu() -> str:
    return str(_core().get_property(CPU, "FULL_DEVICE_NAME"))


def _group(graph: Graph, *, in_blocks: bool) -> int:
    """Returns DYNAMIC_QUANTIZATION_GROUP_SIZE for a graph, which may have weights in blocks; 0 rounds nothing."""
    if not in_blocks:
        return GROUP
    # Rounding does not make a decode step of one text faster: it waits for its 8-bit weights either way.
    if graph.role == "decode" and graph.dtype == "int8" and graph.bucket.batch == 1:
        return 0
    return SMALL_GROUP if graph.dtype == "int8" else GROUP_OF_BLOCKS


def _options(dtype: DType, threads: int, group: int) -> dict[str, Any]:
    """Returns the options for compiling and loading. With 0 threads OpenVINO chooses the number. Only values that are
    multiplied by integer weights are rounded.
    """
    options: dict[str, Any] = {
        # `dynamic` keeps the types of the graph.
        "INFERENCE_PRECISION_HINT": "f32" if dtype == "float32" else "dynamic",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
        "CACHE_MODE": "OPTIMIZE_SIZE",
        "NUM_STREAMS": 1,
    }
    return {**options, "INFERENCE_NUM_THREADS": threads} if threads else options


def _compiled(
    graph: Path, dtype: DType, threads: int, group: int, form: Form, weights: OptionalArrays = None
) -> openvino.CompiledModel:
    """Compiles a graph for this processor, its products in a form. `weights` replace the weights of the same names.

    Raises:
        EngineError: the graph has no weight of this name.
    """
    model = _core().read_model(str(graph))
    constants = list(_constants(model))
    for name, array in (weights or {}).items():
        nodes = [node for node in constants if node.get_friendly_name() == name]
        if not nodes:
            raise EngineError(f"{graph.name}: has no weight {name}, so it cannot be replaced")
        for node in nodes:
            _replace(node, array)
    if dtype == "bfloat16":
        # Constants that stay float32 are not in the file that is read at loading, so the engine itself stores them.
        for node in constants:
            if node.get_element_type().get_type_name() in WIDE and WEIGHTLESS in (about := node.get_rt_info()):
                del about[WEIGHTLESS]
    write_in(model, form)
    return _core().compile_model(model, CPU, _options(dtype, threads, group))


def _constants(model: openvino.Model) -> Iterator[openvino.Node]:
    """Yields the constants of a model, including those in the branches of conditions."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Constant":
            yield node
        elif node.get_type_name() == "If":
            for branch in range(2):
                yield from _constants(node.get_function(branch))


def _replace(node: openvino.Node, array: np.ndarray) -> None:
    import openvino

    kind = node.get_element_type()
    replacement = openvino.opset13.constant(array, openvino.Type.f32).output(0)
    if kind != openvino.Type.f32:
        replacement = openvino.opset13.convert(replacement, kind.get_type_name()).output(0)
    for reader in node.output(0).get_target_inputs():
        reader.replace_source_output(replacement)
