"""Writes a model repository for Triton Inference Server from a finished build folder, and runs models inside Triton."""
