"""Mixture-of-Depths transformers in plain PyTorch, imported as `mod_models`. Knows nothing of export."""
