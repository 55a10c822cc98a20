"""The table of targets. A new engine is one file beside this one and one line here."""

from __future__ import annotations

from mod_export.engines.inductor import Inductor
from mod_export.engines.inductor_cuda import InductorCuda
from mod_export.engines.openvino import OpenVino
from mod_export.engines.ort import OrtCpu, OrtCuda
from mod_export.engines.protocol import EngineBuilder
from mod_export.engines.trt import TensorRT, TensorRTRTX

__all__ = ["ENGINES"]

ENGINES: dict[str, EngineBuilder] = {
    engine.name: engine
    for engine in (OrtCpu(), OpenVino(), OrtCuda(), Inductor(), InductorCuda(), TensorRT(), TensorRTRTX())
}
