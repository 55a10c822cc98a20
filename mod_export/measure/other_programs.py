"""Opens a model with other programs than this project's engines, each set for the latency of one request.

The functions run in the process that is timed. `threads` is the number of CPU threads; with 0 the program chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mod_export.types import ROUTED, primary_output

if TYPE_CHECKING:
    import torch

Run = Callable[[Mapping[str, np.ndarray]], np.ndarray]
"""Runs the model on inputs by name, and returns its first output. Inputs that the model does not read are ignored."""


def open_onnxruntime(path: Path, threads: int) -> Run:
    """Opens a graph with ONNX Runtime, which keeps its defaults except for threads and logging."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Idle threads that spin would take the cores from the program whose turn it is.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_inputs()]
    primary = primary_output([port.name for port in session.get_outputs()])
    return lambda feeds: np.asarray(session.run([primary], {name: feeds[name] for name in names})[0])


def open_openvino(path: Path, threads: int, precision: str, group: int | None = None) -> Run:
    """Opens a graph with OpenVINO's CPU plug-in and a precision hint. With compressed weights, `group` activations of a
    token share a scale.

    Raises:
        RuntimeError: the processor has no instructions for bfloat16, so the hint would change nothing.
    """
    import openvino

    core = openvino.Core()
    if precision == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise RuntimeError("OpenVINO names no BF16 among the capabilities of this processor")
    options: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": precision}
    if threads:
        options["INFERENCE_NUM_THREADS"] = threads
    if group is not None:
        options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = group
    compiled = core.compile_model(path, "CPU", options)
    # A port can have several names.
    inputs = [port.get_names() for port in compiled.inputs]
    primary = next(port for port in compiled.outputs if not any(name.startswith(ROUTED) for name in port.get_names()))
    request = compiled.create_infer_request()

    def run(feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        read = {name: feeds[name] for names in inputs for name in names if name in feeds}
        request.infer(read, share_inputs=True)
        return np.asarray(request.get_tensor(primary).data)

    return run


def compile_module(module: torch.nn.Module, inputs: Sequence[str], threads: int) -> Run:
    """Compiles a module with torch.compile and frozen weights, so that Inductor may pack them. `inputs` are the names
    of its arguments, in order.
    """
    import torch
    from torch._inductor import config as inductor

    inductor.freezing = True
    if threads:
        torch.set_num_threads(threads)
    compiled = torch.compile(module, dynamic=False)

    def run(feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(compiled(*(torch.from_numpy(feeds[name]) for name in inputs))[0].float().numpy())

    return run
