"""Held-out bits per byte, which compares models of any vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mod_models.train import TrainConfig
from mod_models.train.corpus import Corpus, TokenizedText, batch_at, read_corpus
from mod_models.train.losses import Losses, LossModule
from mod_models.train.parallel import Workers
from mod_models.transformer import Transformer

EVAL_SEED = 10_000_000
NATS_PER_BIT = math.log(2)
LARGEST_EXPONENT = 700.0
PREDICTOR_ACCURACY = "predictor_accuracy/"


def rows_at(text: TokenizedText, config: TrainConfig, seed: int, workers: Workers) -> tuple[Tensor, int]:
    """Draws this process's rows of the batch that the seed determines.

    Returns:
        Token ids int64 (B, S + 1) on the process's device, and the total text bytes of the last S tokens of the rows.
    """
    ids_BS1 = workers.rows(batch_at(text.id_N, config.batch, config.seq + 1, seed))
    if text.size_N is None:
        return ids_BS1, len(ids_BS1) * config.seq
    size_BS1 = workers.rows(batch_at(text.size_N, config.batch, config.seq + 1, seed))
    return ids_BS1, int(size_BS1[:, 1:].sum())


def parts(ids_BS1: Tensor, config: TrainConfig) -> tuple[Tensor, ...]:
    """Splits rows into portions of `micro_batch` rows, each of which is computed at once. If that is 0, there is one
    portion.
    """
    return torch.split(ids_BS1, config.micro_batch or len(ids_BS1))


@torch.no_grad()
def held_out(
    step: Callable[[Tensor], Losses], text: TokenizedText, config: TrainConfig, workers: Workers
) -> dict[str, float]:
    """Averages the losses over `eval_batches` batches of held-out text; all processes have to call it.

    Returns:
        `bits_per_byte`, the summed next-token loss in bits over the bytes of the predicted tokens; `next_token_loss`,
        in nats per token; and every metric of `losses` by its name.
    """
    metrics: dict[str, float] = {}
    nats = n_bytes = 0.0
    for i in range(config.eval_batches):
        ids_BS1, size = rows_at(text, config, EVAL_SEED + i, workers)
        n_bytes += size
        for part_BS1 in parts(ids_BS1, config):
            losses_of_part = step(part_BS1)
            nats += losses_of_part.next_token.item() * len(part_BS1) * config.seq
            share = len(part_BS1) / len(ids_BS1) / config.eval_batches
            for name, value in losses_of_part.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value * share
    nats, n_bytes = workers.sums([nats, n_bytes])
    means = workers.means(list(metrics.values()))
    per_token = nats / (config.eval_batches * config.batch * config.seq)
    losses = {"bits_per_byte": nats / n_bytes / NATS_PER_BIT, "next_token_loss": per_token}
    return {**losses, **dict(zip(metrics, means, strict=True))}


def evaluate(model: Transformer, config: TrainConfig, corpus: Corpus | None = None) -> dict[str, object]:
    """Measures held-out bits per byte, and predictor accuracy at each routing site, on text outside the training split.

    Args:
        model: float32, on the device that computes; its training mode is restored.
        config: `batch`, `seq` and `eval_batches` give the amount of text; `precision` is that of the computation.
        corpus: provides the held-out text; None for the standard library as bytes.

    Returns:
        `bits_per_byte`, `perplexity` (of a token) and `predictor_accuracy` (site as text -> share), rounded to four
        decimals.
    """
    training = model.training
    model.eval()
    workers = Workers(device=next(model.parameters()).device)
    text = (corpus or read_corpus()).held_out
    # Nothing is kept for a backward pass, so nothing is recomputed, which would wrap the layers of the caller's model.
    metrics = held_out(LossModule(model, replace(config, recompute="none")), text, config, workers)
    model.train(training)
    return summary(metrics)


def summary(metrics: dict[str, float]) -> dict[str, object]:
    """The results of `held_out` for a line of progress, in the form that `evaluate` returns."""
    accuracy = {
        name.removeprefix(PREDICTOR_ACCURACY): round(value, 4)
        for name, value in metrics.items()
        if name.startswith(PREDICTOR_ACCURACY)
    }
    perplexity = math.exp(min(metrics["next_token_loss"], LARGEST_EXPONENT))
    return {
        "bits_per_byte": round(metrics["bits_per_byte"], 4),
        "perplexity": round(perplexity, 4),
        "predictor_accuracy": accuracy,
    }
