"""Rivals of this project's engines for whole rows: ONNX Runtime, OpenVINO and torch.compile, each with the files that
its own tools make.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rivals.cases import KINDS, Case, checkpoints
from mod_export.measure.other_programs import Run, compile_module
from mod_export.types import TOKEN_INPUTS
from mod_models import transformer

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
        model = _read_for_nncf(folder / f"{kind}.plain.onnx")
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
        model = _read_for_nncf(folder / f"{kind}.plain.onnx")
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


def _read_for_nncf(path: Path) -> Any:
    """Reads an ONNX file for nncf. After another call in this process, nncf 3.4 with OpenVINO 2026.4.1 may fail with
    "Could not find a node Gather_1661 in NNCFGraph"; collecting garbage before each call prevents that.
    """
    import openvino as ov

    gc.collect()
    return ov.Core().read_model(path)


def compiled_torch(dtype: str, folder: Path, kind: str, threads: int) -> Run:
    """Compiles the eager model with torch.compile, in this dtype and with the selection of public implementations."""
    run = compile_module(checkpoints(folder)[kind].module().to(getattr(torch, dtype)), TOKEN_INPUTS, threads)

    def run_with_topk(feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        with topk_selects():
            return run(feeds)

    return run_with_topk


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
