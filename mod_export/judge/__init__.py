"""Judges whether engines and graphs compute what eager float32 PyTorch does: inputs, comparison, the table CHECKS."""
