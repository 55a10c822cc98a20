"""A model repository for Triton Inference Server, written from a finished build folder, and what runs inside of it."""
