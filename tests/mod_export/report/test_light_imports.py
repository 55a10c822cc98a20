"""A server without PyTorch and ONNX tools can still judge and report."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import mod_export.measure.latency, mod_export.measure.verdict, mod_export.report
heavy = {"torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "openvino", "tensorrt", "tensorrt_rtx"}
heavy &= sys.modules.keys()
sys.exit(f"imported {sorted(heavy)}" if heavy else 0)
"""


def test_measuring_and_reporting_import_no_vendor_and_no_builder() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
