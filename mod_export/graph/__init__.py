"""Capture, ONNX export, and the rewrites that each target needs."""
