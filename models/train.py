"""Trains a byte-level Mixture-of-Depths model on the standard library's source: `python -m mod_models.train`.

No download: the corpus is on every machine (`corpus.py`). Beside the model it trains the paper's auxiliary predictor
(arXiv 2404.02258, section 3.5): a small network on stop-gradient inputs learns, causally, which tokens top-k takes.
Every batch is a function of (seed, step), so a resumed run sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mod_models.checkpoint import Checkpoint, save_checkpoint
from mod_models.corpus import batch_at, read_split
from mod_models.spec import ModelSpec, RoutingSpec
from mod_models.transformer import RoutedBlock, Transformer

__all__ = ["DEFAULT_SPEC", "TrainConfig", "evaluate", "train"]

DEFAULT_SPEC = ModelSpec(
    vocab_size=256,
    d_model=192,
    n_layers=8,
    n_heads=6,
    n_kv_heads=2,
    d_head=32,
    d_ff=512,
    max_positions=2048,
    routing=RoutingSpec(predictor_hidden=48),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run; `batch` rows of `seq` + 1 bytes a step, warm-up and cosine to a tenth of the peak rate."""

    steps: int = 3000
    batch: int = 8
    seq: int = 512
    learning_rate: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    eval_every: int = 250
    eval_batches: int = 16


def losses(model: Transformer, bytes_BS1: Tensor) -> tuple[Tensor, Tensor, list[float]]:
    """Next-byte cross entropy (nats), the predictors' binary cross entropy, and each predictor's accuracy."""
    ids_BS, target_BS = bytes_BS1[:, :-1], bytes_BS1[:, 1:]
    lengths_B = torch.full((len(ids_BS),), ids_BS.shape[1])
    inputs = _record_routed_inputs(model)
    with inputs:
        logits_BSV, decided = model.trace(ids_BS, lengths_B)
    next_byte = F.cross_entropy(logits_BSV.flatten(0, 1), target_BS.flatten())
    predictor_loss = torch.zeros(())
    accuracy = []
    for layer, routing in decided.items():
        block = model.layers[layer]
        if not isinstance(block, RoutedBlock) or block.predictor is None:
            continue
        chosen_BS = torch.zeros_like(routing.score_BS).scatter(1, routing.index_BK, 1.0)
        logit_BS = block.predictor(inputs.seen[layer].detach())
        predictor_loss = predictor_loss + F.binary_cross_entropy_with_logits(logit_BS, chosen_BS)
        accuracy.append(((logit_BS > 0) == (chosen_BS > 0)).float().mean().item())
    return next_byte, predictor_loss, accuracy


class _record_routed_inputs:
    """Keeps what each routed block was given, for the predictors, without a second path through the model."""

    def __init__(self, model: Transformer) -> None:
        self.seen: dict[int, Tensor] = {}
        self._blocks = {i: block for i, block in enumerate(model.layers) if isinstance(block, RoutedBlock)}

    def __enter__(self) -> _record_routed_inputs:
        self._handles = [
            block.router.register_forward_pre_hook(lambda module, args, i=i: self.seen.__setitem__(i, args[0]))
            for i, block in self._blocks.items()
        ]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()


@torch.no_grad()
def evaluate(model: Transformer, config: TrainConfig) -> dict[str, object]:
    """Held-out bits per byte and predictor accuracy for each routed layer, on windows that no training step saw."""
    model.eval()
    text_N = read_split("held_out")
    nats, accuracies = [], []
    for i in range(config.eval_batches):
        next_byte, _, accuracy = losses(model, batch_at(text_N, config.batch, config.seq + 1, seed=10_000_000 + i))
        nats.append(next_byte.item())
        accuracies.append(accuracy)
    model.train()
    per_layer = [round(sum(column) / len(column), 4) for column in zip(*accuracies, strict=True)]
    return {
        "bits_per_byte": round(sum(nats) / len(nats) / math.log(2), 4),
        "predictor_accuracy": dict(zip(map(str, model.spec.routed_layers), per_layer, strict=False)),
    }


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then cosine down to a tenth of the peak."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(spec: ModelSpec, config: TrainConfig, folder: Path, *, stop_after: int | None = None) -> Iterator[str]:
    """Trains, resuming from `folder` when it holds a state of the same run; yields a line of progress at a time.

    Args:
        spec: the model.
        config: the run.
        folder: gets state.pt (to resume), model.pt (float16 weights) and log.jsonl.
        stop_after: leave after this many steps, as an interruption would.

    Raises:
        ValueError: `folder` holds the state of a different run.
    """
    model = Transformer(spec)
    model.init_weights(torch.Generator().manual_seed(config.seed))
    optimizer = torch.optim.AdamW(_parameter_groups(model, config), lr=config.learning_rate, betas=(0.9, 0.95))
    identity = json.loads(json.dumps({"spec": spec.to_dict(), "config": asdict(config)}))
    folder.mkdir(parents=True, exist_ok=True)
    state, step = folder / "state.pt", 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        if saved["identity"] != identity:
            raise ValueError(f"{state}: belongs to a run with other settings; name another folder with --out")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
        yield f"resumed at step {step}"

    text_N = read_split("train")
    begin, first = time.perf_counter(), step
    while step < config.steps and (stop_after is None or step < stop_after):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, config)
        next_byte, predictor, _ = losses(model, batch_at(text_N, config.batch, config.seq + 1, _batch_seed(config, step)))
        (next_byte + predictor).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 25 == 0 or step == config.steps:
            rate = (step - first) / (time.perf_counter() - begin)
            yield (
                f"step {step}/{config.steps}  loss {next_byte.item() / math.log(2):.3f} bits/byte  "
                f"{rate * config.batch * config.seq:,.0f} bytes/s  {(config.steps - step) / rate / 60:.0f} min left"
            )
        if step % config.eval_every == 0 or step == config.steps or step == stop_after:
            held_out = evaluate(model, config)
            with (folder / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps({"step": step, "train_bits": next_byte.item() / math.log(2), **held_out}) + "\n")
            _save(folder, model, optimizer, step, identity)
            yield f"step {step}/{config.steps}  held out: {held_out}"


def _batch_seed(config: TrainConfig, step: int) -> int:
    return config.seed * 1_000_003 + step


def _parameter_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, object]]:
    # Norms and biases are not decayed: they are scales and offsets, not directions.
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def _save(folder: Path, model: Transformer, optimizer: torch.optim.Optimizer, step: int, identity: object) -> None:
    weights = {name: tensor.detach().half() for name, tensor in model.state_dict().items()}
    save_checkpoint(folder / "model.pt", Checkpoint(spec=model.spec, weights=weights))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "identity": identity}
    temporary = folder / ".state.pt"
    torch.save(state, temporary)
    temporary.replace(folder / "state.pt")


def main() -> None:
    """Command line: every field of TrainConfig is an option."""
    parser = argparse.ArgumentParser(prog="python -m mod_models.train", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, default=Path("build/train"), help="folder for model.pt and the state")
    parser.add_argument("--spec", type=Path, help="JSON file with the model's spec; default: the shipped model's")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves PyTorch's choice")
    for name, value in asdict(TrainConfig()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default {value}")
    options = vars(parser.parse_args())
    folder, spec_file, threads = options.pop("out"), options.pop("spec"), options.pop("threads")
    if threads:
        torch.set_num_threads(threads)
    spec = ModelSpec.from_dict(json.loads(spec_file.read_text())) if spec_file else DEFAULT_SPEC
    for line in train(spec, TrainConfig(**options), folder):
        print(line, flush=True)


if __name__ == "__main__":
    main()
