"""Rivals of this project's engines for whole rows: ONNX Runtime, OpenVINO and torch.compile, each with the files that
its own tools make.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rivals.cases import KINDS, Case, checkpoints
from mod_models import transformer

Run = Callable[[Mapping[str, np.ndarray]], np.ndarray]
INT4_GROUP = {"matmul_nbits": 32, "nncf": 64}
"""Weights that share a scale: for ONNX Runtime, the size with the fastest kernels; for NNCF, whose default is 128, the
largest size that divides every width here."""
OPENVINO_GROUP = {"int8": 128, "int4": INT4_GROUP["nncf"]}
"""Activations of a token that OpenVINO quantizes with one scale: the fastest sizes. Its default is 32."""
CALIBRATION_ROWS = 4


def write_plain(case: Case, folder: Path) -> None:
    """Exports both models with torch.onnx.export at opset 23 and its own optimiser."""
    for kind, checkpoint in checkpoints(folder).items():
        with topk_selects(), quiet(), torch.no_grad():
            torch.onnx.export(
                checkpoint.module(),
                tuple(torch.from_numpy(array) for array in case.feeds.values()),
                folder / f"{kind}.plain.onnx",
                dynamo=True,
                opset_version=23,
                external_data=True,
                input_names=["input_ids", "lengths"],
                output_names=["logits"],
            )


def write_dynamic_int8(case: Case, folder: Path) -> None:
    """Uses onnxruntime.quantization.quantize_dynamic: weights by channel, activations by tensor."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    for kind in KINDS:
        quantize_dynamic(
            folder / f"{kind}.plain.onnx",
            folder / f"{kind}.dynamic-int8.onnx",
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=True,
        )


def write_nbits_int4(case: Case, folder: Path) -> None:
    """Uses onnxruntime.quantization.matmul_nbits_quantizer. Int8 activations (accuracy_level 4) are faster."""
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    for kind in KINDS:
        model = onnx.load(folder / f"{kind}.plain.onnx")
        quantizer = MatMulNBitsQuantizer(
            model, block_size=INT4_GROUP["matmul_nbits"], is_symmetric=True, accuracy_level=4
        )
        quantizer.process()
        quantizer.model.save_model_to_file(str(folder / f"{kind}.nbits-int4.onnx"), use_external_data_format=True)


def write_compressed(precision: str, case: Case, folder: Path) -> None:
    """Uses nncf.compress_weights. Activations are quantized at run time (DYNAMIC_QUANTIZATION_GROUP_SIZE)."""
    import nncf
    import openvino as ov

    modes: dict[str, dict[str, Any]] = {
        "int8": {"mode": nncf.CompressWeightsMode.INT8_ASYM},
        "int4": {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": INT4_GROUP["nncf"], "ratio": 1.0},
    }
    for kind in KINDS:
        model = ov.Core().read_model(folder / f"{kind}.plain.onnx")
        ov.save_model(
            nncf.compress_weights(model, **modes[precision]),
            folder / f"{kind}.{precision}-weights.xml",
            compress_to_fp16=False,
        )


def write_quantized(case: Case, folder: Path) -> None:
    """Uses nncf.quantize for weights and activations. The scales come from random rows like the measured ones."""
    import nncf
    import openvino as ov

    rng = np.random.default_rng(1)
    shape = (CALIBRATION_ROWS, case.batch, case.seq)
    rows = rng.integers(0, case.vocab, shape, dtype=np.int64)
    for kind in KINDS:
        model = ov.Core().read_model(folder / f"{kind}.plain.onnx")
        names = [port.get_any_name() for port in model.inputs]
        feeds = [{"input_ids": ids_BS, "lengths": case.feeds["lengths"]} for ids_BS in rows]
        data = nncf.Dataset([{name: row_feeds[name] for name in names} for row_feeds in feeds])
        quantized = nncf.quantize(
            model,
            data,
            subset_size=CALIBRATION_ROWS,
            preset=nncf.QuantizationPreset.MIXED,
            model_type=nncf.ModelType.TRANSFORMER,
        )
        ov.save_model(quantized, folder / f"{kind}.int8.xml", compress_to_fp16=False)


def onnx_runtime(path: Path, threads: int) -> Run:
    """Opens a graph with ONNX Runtime. Thread settings aside, it uses the defaults."""
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
        logits: np.ndarray = session.run([primary], {key: value for key, value in feeds.items() if key in names})[0]
        return logits

    return run


def openvino(precision: str, path: Path, threads: int, group: int | None = None) -> Run:
    """Opens a graph with OpenVINO's CPU plug-in, set for latency, with a precision hint. With compressed weights,
    `group` activations of a token share a scale.

    Raises:
        RuntimeError: the processor has no instructions for bfloat16, so the hint would change nothing.
    """
    import openvino as ov

    options = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": precision,
    }
    if group is not None:
        options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = group
    core = ov.Core()
    if precision == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise RuntimeError("OpenVINO names no BF16 among the capabilities of this processor")
    compiled = core.compile_model(path, "CPU", options)
    names = [port.get_any_name() for port in compiled.inputs]
    primary = next(port for port in compiled.outputs if "logits" in port.get_names())
    request = compiled.create_infer_request()

    def run(feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        request.infer({key: value for key, value in feeds.items() if key in names}, share_inputs=True)
        logits: np.ndarray = request.get_tensor(primary).data
        return logits

    return run


def compiled_torch(dtype: str, folder: Path, kind: str, threads: int) -> Run:
    """Compiles the eager model with torch.compile and frozen weights, so that Inductor may pack them."""
    from torch._inductor import config as inductor

    inductor.freezing = True
    torch.set_num_threads(threads)
    module = checkpoints(folder)[kind].module().to(getattr(torch, dtype))
    compiled = torch.compile(module, dynamic=False)

    def run(feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        with torch.no_grad(), topk_selects():
            logits: np.ndarray = compiled(*(torch.from_numpy(array) for array in feeds.values()))[0].float().numpy()
        return logits

    return run


@contextlib.contextmanager
def topk_selects() -> Iterator[None]:
    """Replaces the selection by that of public implementations, within the `with` block."""

    def select(score_BS: torch.Tensor, real_BS: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        masked_BS = torch.where(real_BS, score_BS, float("-inf"))
        index_BK = torch.sort(torch.topk(masked_BS, k, dim=-1).indices, dim=-1).values
        return index_BK, torch.gather(real_BS, 1, index_BK)

    original = transformer.select_topk
    transformer.select_topk = select  # type: ignore[attr-defined]  # It is imported there, not defined.
    try:
        yield
    finally:
        transformer.select_topk = original  # type: ignore[attr-defined]  # As above.


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides warnings and log lines of the tools."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Returns the versions of those packages that are installed."""
    installed = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed
