"""Runs a finished build folder without PyTorch: logits of whole rows (`deployment`), and text (`generator`)."""
