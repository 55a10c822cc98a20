"""The table of targets. A new engine is one file beside this one and one line here."""

from __future__ import annotations

from mod_export.engine.inductor import Inductor
from mod_export.engine.ort import OrtCpu, OrtCuda
from mod_export.engine.trt import TensorRT, TensorRTRTX
from mod_export.protocols import EngineBuilder

__all__ = ["ENGINES"]

ENGINES: dict[str, EngineBuilder] = {
    engine.name: engine for engine in (OrtCpu(), OrtCuda(), Inductor(), TensorRT(), TensorRTRTX())
}
