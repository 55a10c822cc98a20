"""Whether engines and graphs compute what eager float32 PyTorch computes: inputs, comparison, and the table CHECKS."""
