"""Parity of a runner with eager float32 PyTorch: measured by `compare.py`, judged by the table CHECKS."""
