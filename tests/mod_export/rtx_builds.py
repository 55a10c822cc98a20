"""Builds TensorRT-RTX plans here for a named GPU."""

import importlib.util
from pathlib import Path

import pytest

from mod_export.config import config_from_toml
from mod_export.engines.protocol import EngineJob
from mod_export.engines.trt import TensorRTRTX
from mod_export.types import Bucket, DType, Variant

RTX = TensorRTRTX()
CONFIG = config_from_toml(None)
BUCKET = Bucket(2, 16)

needs_rtx = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx is not installed")


def build(job: EngineJob, dtype: DType, destination: Path, arch: str = "sm89") -> None:
    RTX.build(job, Variant(dtype=dtype, arch=arch), destination, CONFIG)
