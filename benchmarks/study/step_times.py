"""Times a training step (without the optimizer) and a forward pass of every model, in turns, on one thread."""

from __future__ import annotations

import random
import time

import torch

from benchmarks.study.models import BATCH, SEQ, STUDIED
from mod_models.train.losses import losses
from mod_models.transformer import Transformer


def step_times(rounds: int = 7) -> dict[str, dict[str, list[float]]]:
    """Returns name -> {`step`, `forward`} -> seconds of each round after a warm-up. Each round has a new order."""
    torch.set_num_threads(1)
    models = {}
    for studied in STUDIED:
        model = Transformer(studied.spec)
        model.init_weights(torch.Generator().manual_seed(0))
        models[studied.name] = model
    ids_BS1 = torch.randint(0, 256, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    seconds: dict[str, dict[str, list[float]]] = {name: {"step": [], "forward": []} for name in models}
    rng = random.Random(0)
    for _ in range(rounds + 1):
        for name in rng.sample(list(models), len(models)):
            model = models[name]
            begin = time.perf_counter()
            losses(model, ids_BS1).total.backward()
            model.zero_grad()
            seconds[name]["step"].append(time.perf_counter() - begin)
            begin = time.perf_counter()
            with torch.no_grad():
                model(ids_BS1[:, 1:], torch.full((BATCH,), SEQ))
            seconds[name]["forward"].append(time.perf_counter() - begin)
    return {name: {kind: values[1:] for kind, values in times.items()} for name, times in seconds.items()}
