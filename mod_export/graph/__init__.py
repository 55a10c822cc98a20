"""Capture, ONNX export, and the graph rewrites that each target needs."""
