"""Runs our TensorRT code against the real Python bindings of one TensorRT version, with stand-ins for the hardware.

    python vendor_process.py <task> '<json>'

The bindings are NVIDIA's own, imported from PYTHONPATH, so every class, attribute, flag and enumeration is the real
one. The libraries behind them are empty (test_trt_api.py compiles them), so they can create no object: builder, parser,
engine and context are stand-ins that refuse every attribute which the real class does not have.
"""

import ctypes
import inspect
import json
import re
import sys
from pathlib import Path
from typing import ClassVar
from unittest.mock import create_autospec

import numpy as np
import tensorrt_bindings as trt

sys.modules["tensorrt"] = trt  # The package `tensorrt` is only a name for its bindings.


def strict(cls, **attributes):
    """A stand-in with exactly the attributes of the real class."""
    stand_in = create_autospec(cls, instance=True, spec_set=True)
    for name, value in attributes.items():
        setattr(stand_in, name, value)
    return stand_in


def surface(job):
    """Maps every requested name to the ranges of arguments that a call may have, or to None if it does not exist."""
    ranges = {}
    for owner, names in job["api"].items():
        holder = getattr(trt, owner, None) if owner else trt
        ranges[owner] = {name: _arguments(holder, owner, name) if hasattr(holder, name) else None for name in names}
    return ranges


def _arguments(holder, owner, name):
    what = getattr(holder, name)
    if inspect.isfunction(what):
        return [[len(inspect.signature(what).parameters)] * 2]
    if isinstance(what, type):
        what, name = what.__init__, "__init__"
    signatures = re.findall(rf"^(?:\d+\. )?{name}\(self(?:: [\w.]+)?(.*)\) -> ", what.__doc__ or "", re.MULTILINE)
    ranges = []
    for parameters in signatures:
        listed = [part for part in re.sub(r"\[.*?\]|<.*?>", "", parameters).split(", ") if part]
        ranges.append([sum("=" not in part for part in listed), len(listed)])
    return ranges


def probe(job):
    from mod_export.engines import trt_worker

    return trt_worker.probe({"library": "tensorrt"})


def build(job):
    """Runs `trt_worker.build` through Polygraphy; returns what it did to builder and configuration."""
    from mod_export.engines import trt_worker

    network = strict(trt.INetworkDefinition, num_inputs=0, num_outputs=0, num_layers=0)
    network.__getitem__.side_effect = IndexError
    config = strict(trt.IBuilderConfig, DLA_core=-1, num_optimization_profiles=1)
    config.get_memory_pool_limit.return_value = config.get_tactic_sources.return_value = 0
    if hasattr(config, "int8_calibrator"):
        config.int8_calibrator = None
    builder = strict(trt.Builder)
    builder.create_network.return_value = network
    builder.create_builder_config.return_value = config
    builder.build_serialized_network.return_value = job["plan"].encode() or None
    parser = strict(trt.OnnxParser, num_errors=0)
    parser.parse_from_file.return_value = job["parses"]
    trt.Builder = lambda logger: builder
    trt.OnnxParser = lambda network, logger: parser
    result = trt_worker.build({**job, "library": "tensorrt", "arch": None})
    pools = [call.args for call in config.set_memory_pool_limit.call_args_list]
    return {
        "result": result["error"],
        "network_flags": [call.kwargs["flags"] for call in builder.create_network.call_args_list],
        "strongly_typed": 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED),
        "parsed": [call.args[0] for call in parser.parse_from_file.call_args_list],
        "cleared": sorted({call.args[0].name for call in config.clear_flag.call_args_list}),
        "set": sorted({call.args[0].name for call in config.set_flag.call_args_list}),
        "pools": [[pool.name, size] for pool, size in pools],
        "level": config.builder_optimization_level if result["error"] == "" else None,
    }


class Device:
    """An engine that doubles its ids, on a CUDA runtime whose device memory is host memory."""

    SHAPES: ClassVar = {"input_ids": (2, 3), "lengths": (2,), "logits": (2, 3), "routed_0": (2, 3)}

    def __init__(self, starts=True, context=True, aliased=None):
        self.addresses = {}
        self.starts = starts
        names = list(self.SHAPES)
        self.engine = strict(trt.ICudaEngine, num_io_tensors=len(names))
        self.engine.get_tensor_name.side_effect = names.__getitem__
        self.engine.get_tensor_shape.side_effect = lambda name: trt.Dims(self.SHAPES[name])
        self.engine.get_tensor_dtype.side_effect = lambda n: trt.DataType.FLOAT if n == "logits" else trt.DataType.INT64
        self.engine.get_tensor_mode.side_effect = lambda n: (
            trt.TensorIOMode.INPUT if n in ("input_ids", "lengths") else trt.TensorIOMode.OUTPUT
        )
        if hasattr(trt.ICudaEngine, "get_aliased_input_tensor"):
            self.engine.get_aliased_input_tensor.side_effect = (aliased or {}).get
        self.context = strict(trt.IExecutionContext)
        self.context.set_tensor_address.side_effect = lambda name, address: (
            self.addresses.update({name: address}) or True
        )
        self.context.execute_async_v3.side_effect = self._execute
        self.engine.create_execution_context.return_value = self.context if context else None

    def _execute(self, stream):
        assert stream
        ids, lengths, logits, routed = (self._memory(name) for name in self.SHAPES)
        logits[:] = 2 * ids + lengths[0]
        routed[:] = ids
        return self.starts

    def _memory(self, name):
        kind = ctypes.c_float if name == "logits" else ctypes.c_int64
        size = int(np.prod(self.SHAPES[name]))
        return np.ctypeslib.as_array(ctypes.cast(self.addresses[name], ctypes.POINTER(kind)), (size,))


class StrictRuntime:
    """A `trt.Runtime` with only what an engine's loader may use; nothing can be set, above all not host code."""

    made: ClassVar = []
    __slots__ = ()

    def __init__(self, logger):
        assert isinstance(logger, trt.ILogger)
        self.made.append(logger)

    def deserialize_cuda_engine(self, data):
        self.made[-1].log(trt.Logger.ERROR, "said by the library")
        self.made[-1].log(trt.Logger.INFO, "chatter")
        return None if data == b"broken" else Device().engine


def run(job):
    """Loads an engine, runs it, and returns its results, or the error of the requested fault."""
    from mod_export.engines.trt import TensorRTRunner, runner_from_engine

    fault = job.get("fault")
    path = Path(job["path"])
    path.write_bytes(b"broken" if fault == "broken" else b"plan")
    if fault != "no_runtime":
        trt.Runtime = StrictRuntime

    def made(**device):
        return TensorRTRunner(trt, Device(**device).engine, "here", "p")

    faults = {
        "broken": lambda: runner_from_engine("tensorrt", path, "here", "p"),
        "no_runtime": lambda: runner_from_engine("tensorrt", path, "here", "p"),
        "no_context": lambda: made(context=False),
        "not_started": lambda: made(starts=False).run(_feeds(0)),
    }
    if fault:
        return _error(faults[fault])
    if "aliased" in job:
        device = Device(aliased=job["aliased"])
        with TensorRTRunner(trt, device.engine, "here", "p") as runner:
            routed = runner.run(_feeds(0), ["routed_0"])["routed_0"].tolist()
        return {"addresses": device.addresses, "routed": routed}
    try:
        with runner_from_engine("tensorrt", path, "here", "TensorRT on sm89") as runner:
            first = runner.run(_feeds(0))
            second = runner.run(_feeds(10), ["logits"])
            transposed = runner.run(
                {"input_ids": np.arange(6).reshape(3, 2).T, "lengths": np.array([5, 6])}, ["routed_0"]
            )
            error = _error(lambda: runner.run({**_feeds(0), "lengths": np.zeros(2, np.int32)}))
            about = [runner.inputs, runner.outputs, runner.providers, runner.threads]
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return {
        "first": {name: [str(array.dtype), array.tolist()] for name, array in first.items()},
        "second": {name: array.tolist() for name, array in second.items()},
        "transposed": transposed["routed_0"].tolist(),
        "error": error,
        "about": about,
    }


def _feeds(first):
    return {"input_ids": np.arange(first, first + 6).reshape(2, 3), "lengths": np.array([5, 6])}


def _error(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


TASKS = {"surface": surface, "probe": probe, "build": build, "run": run}

if __name__ == "__main__":
    task, argument = sys.argv[1:]
    sys.stdout.write("RESULT" + json.dumps(TASKS[task](json.loads(argument))))
