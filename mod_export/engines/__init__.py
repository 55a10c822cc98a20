"""The table of targets. docs/architecture.md says what else a new engine needs: options, packages, an extra."""

from __future__ import annotations

import os

from mod_export.engines.inductor import Inductor
from mod_export.engines.inductor_cuda import InductorCuda
from mod_export.engines.openvino import OpenVino
from mod_export.engines.ort import OrtCpu, OrtCuda
from mod_export.engines.protocol import EngineBuilder
from mod_export.engines.trt import TensorRT, TensorRTRTX

__all__ = ["ENGINES"]

# Since release 1.29 ONNX Runtime sends telemetry to its vendor, on Linux too, and keeps a device number in the user's
# folder, unless this is set before it is loaded (microsoft/onnxruntime#27379). Users who want telemetry set it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

ENGINES: dict[str, EngineBuilder] = {
    engine.name: engine
    for engine in (OrtCpu(), OpenVino(), OrtCuda(), Inductor(), InductorCuda(), TensorRT(), TensorRTRTX())
}
