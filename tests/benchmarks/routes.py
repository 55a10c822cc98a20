"""The ways from a PyTorch model to something that runs on a CPU: ours, and what a user would do instead.

Every route gives a function that runs one batch and returns the logits. `ours` is what `mod-export build` makes for
ort-cpu. The rivals are PyTorch's own exporter on ONNX Runtime, OpenVINO on that same file, and torch.compile. They get
the model as a user would write it: `torch.topk` selects (the exporter has no translation of a stable sort), everything
else is the same code.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from captures import captured_module

from mod_export.benchmark.cost import cost_row
from mod_export.engines.ort import OrtCpu
from mod_export.engines.ort_attention import fastest_block, time_blocks
from mod_export.engines.ort_c import ort_c
from mod_export.engines.ort_shared import shared_runner
from mod_export.export.onnx_export import onnx_from_captured
from mod_export.export.passes import PORTABLE, run_passes
from mod_export.export.weights import WeightsFile, bind_weights, forms_of, state_of, write_weights
from mod_export.results.cost import CostRow
from mod_export.stages.passes import attention_shapes
from mod_export.types import PRIMARY, QUANTIZED, TOKEN_INPUTS, Bucket, DType, Outputs, primary_output
from mod_models import transformer
from mod_models.checkpoint import Checkpoint

Run = Callable[[Mapping[str, np.ndarray]], np.ndarray]
Route = Callable[["Case", str, Path, int], Run]


@dataclass(frozen=True)
class Case:
    """One model, dense or routed, at one shape."""

    checkpoint: Checkpoint
    bucket: Bucket
    outputs: Outputs = "logits"

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        shape = (self.bucket.batch, self.bucket.seq)
        ids_BS = rng.integers(0, self.checkpoint.spec.vocab_size, shape, dtype=np.int64)
        return {"input_ids": ids_BS, "lengths": np.full(self.bucket.batch, self.bucket.seq, np.int64)}


def _portable(case: Case) -> ir.Model:
    skeleton = case.checkpoint.skeleton(case.outputs).to("meta")
    model = onnx_from_captured(
        captured_module(skeleton, case.bucket, "bench"), state_of(skeleton), TOKEN_INPUTS, [PRIMARY[case.outputs]]
    )
    run_passes(model, PORTABLE, "float32")
    return model


def cost_of(case: Case, kind: Any) -> CostRow:
    """FLOPs of the portable graph, and those that nobody can do without."""
    return cost_row(_portable(case), kind, case.bucket)


def ours(case: Case, name: str, folder: Path, threads: int, dtype: DType = "float32") -> Run:
    """What `mod-export build` makes for ort-cpu, its blocks of attention chosen by measurement, run as it is served."""
    model = _portable(case)
    shapes = attention_shapes(model)
    blocks = {shape.tokens: fastest_block(shape, time_blocks(shape, threads)) for shape in shapes}
    dialect = replace(OrtCpu.dialect, query_blocks=tuple((T, b) for T, b in sorted(blocks.items()) if b < T))
    run_passes(model, dialect, dtype)
    weights = folder / f"{name}.{dtype}.data"
    forms = forms_of(model.graph.initializers) if dtype in QUANTIZED else {}
    write_weights(weights, state_of(case.checkpoint.module()), dtype, forms)
    bind_weights(model, [WeightsFile.open(weights)], folder)
    path = folder / f"{name}.{dtype}.onnx"
    path.write_bytes(ir.to_proto(model).SerializeToString())
    api = ort_c()
    assert api is not None, "the wheel of ONNX Runtime brings its C library along"
    runner = shared_runner(api, path, weights, name, threads)
    primary = primary_output(runner.outputs)
    return lambda feeds: runner.run({key: feeds[key] for key in runner.inputs}, [primary])[primary]


def plain_onnx(case: Case, name: str, folder: Path, threads: int) -> Run:
    """torch.onnx.export at opset 23 with its own optimiser, on ONNX Runtime as it comes."""
    return _ort(_plain_file(case, name, folder), threads)


def openvino(case: Case, name: str, folder: Path, threads: int) -> Run:
    """OpenVINO's CPU plug-in on the plain export, in float32, set for latency."""
    import openvino as ov

    options = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    compiled = ov.Core().compile_model(_plain_file(case, name, folder), "CPU", options)
    names = [port.get_any_name() for port in compiled.inputs]
    primary = next(port for port in compiled.outputs if "logits" in port.get_names())
    request = compiled.create_infer_request()

    def run(feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        request.infer({key: value for key, value in feeds.items() if key in names}, share_inputs=True)
        found: np.ndarray = request.get_tensor(primary).data
        return found

    return run


def compiled_torch(case: Case, name: str, folder: Path, threads: int) -> Run:
    """torch.compile of the eager model, everything else as it comes."""
    torch.set_num_threads(threads)
    with _topk_selects():
        module = torch.compile(case.checkpoint.module(case.outputs), dynamic=False)
        _torch_run(module, case.feeds)

    return lambda feeds: _torch_run(module, feeds)


def _torch_run(module: Callable[..., Any], feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = module(*(torch.from_numpy(array) for array in feeds.values()))[0].numpy()
    return found


OURS, OURS_INT8 = "mod-export", "mod-export, int8"
ROUTES: dict[str, Route] = {
    OURS: ours,
    OURS_INT8: partial(ours, dtype="int8"),
    "torch.onnx.export, ONNX Runtime": plain_onnx,
    "torch.onnx.export, OpenVINO": openvino,
    "torch.compile": compiled_torch,
}


def _ort(path: Path, threads: int) -> Run:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]
    primary = session.get_outputs()[0].name

    def run(feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        found: np.ndarray = session.run([primary], {key: value for key, value in feeds.items() if key in names})[0]
        return found

    return run


def _plain_file(case: Case, name: str, folder: Path) -> Path:
    path = folder / f"{name}.plain.onnx"
    if path.exists():
        return path
    with _topk_selects(), _quiet(), torch.no_grad():
        torch.onnx.export(
            case.checkpoint.module(case.outputs),
            tuple(torch.from_numpy(array) for array in case.feeds.values()),
            path,
            dynamo=True,
            opset_version=23,
            external_data=True,
            input_names=["input_ids", "lengths"],
            output_names=["logits"],
        )
    return path


@contextlib.contextmanager
def _topk_selects() -> Iterator[None]:
    """The selection as public implementations have it."""

    def select(score_BS: torch.Tensor, real_BS: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        masked_BS = torch.where(real_BS, score_BS, float("-inf"))
        index_BK = torch.sort(torch.topk(masked_BS, k, dim=-1).indices, dim=-1).values
        return index_BK, torch.gather(real_BS, 1, index_BK)

    kept = transformer.select_topk
    transformer.select_topk = select  # type: ignore[attr-defined]  # It is imported there, not defined.
    try:
        yield
    finally:
        transformer.select_topk = kept  # type: ignore[attr-defined]  # As above.


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
