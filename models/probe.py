"""Measures what skipping layers of a dense model costs (`python -m mod_models.probe`): a ranking for `train --route`.

For one layer at a time, a random share of the tokens skips the layer, only its attention or only its MLP, as in a
routed model before training. No other token sees a skipped one in that layer. The cost is the rise of the held-out
loss. The stream before each layer is computed once, so for each part a probe of all layers costs about half as many
forward passes as there are layers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mod_models.checkpoint import Checkpoint, CheckpointError, ForeignArchitectureError, load_checkpoint, written_beside
from mod_models.declarations import RoutingSpec
from mod_models.routing import Decisions
from mod_models.selection import Tokens, noise_of_tokens, noise_table
from mod_models.train import TrainError
from mod_models.train.corpus import batch_at, read_corpus, tokenizer_beside
from mod_models.train.losses import next_token_loss
from mod_models.transformer import RoutedBlock, Transformer

PARTS = ("block", "attention", "mlp")
PROBE_SEED = 11_000_000
"""Seed of the windows of text. Evaluations in training draw other windows, because the text by which layers were chosen
must not be used to judge them.
"""


class Cost(NamedTuple):
    """Cost of skipping a part of a layer, in nats per token."""

    layer: int
    part: str
    cost: float


def costs_of(
    checkpoint: Checkpoint, batches: Iterable[Tensor], parts: Sequence[str] = PARTS, skip: float = 0.5
) -> Iterator[tuple[float, list[Cost]]]:
    """Yields after every batch (loss of the dense model, costs of all layers), means over the batches so far.

    Args:
        checkpoint: a dense model.
        batches: int64 (B, S + 1) token ids, without padding, all of one shape.
        parts: some of PARTS.
        skip: share of the tokens that skip, above 0 and up to 1.

    Raises:
        TrainError: the model already routes or has experts, or `skip` is out of range.
    """
    spec = checkpoint.spec
    if spec.routing is not None or spec.experts is not None:
        raise TrainError(f"expected a dense model, this one {'routes' if spec.routing else 'has experts'}")
    if not 0 < skip <= 1:
        raise TrainError(f"--skip: expected a share above 0 and up to 1, got {skip:g}")
    model = checkpoint.module()
    blocks = {(layer, part): _skipping(model, layer, part, skip) for layer in range(spec.n_layers) for part in parts}
    dense, sums = 0.0, dict.fromkeys(blocks, 0.0)
    for count, ids_BS1 in enumerate(batches, 1):
        loss, before = _dense_loss(model, ids_BS1)
        dense += loss
        noise = partial(noise_of_tokens, noise_table(0), ids_BS1[:, :-1])
        for (layer, part), (block, k_of) in blocks.items():
            with torch.no_grad():
                tokens = before[layer]
                x_BSD = block(tokens, Decisions(), k_of(tokens.seq), noise)
                for later in list(model.layers)[layer + 1 :]:
                    x_BSD = later(tokens._replace(x_BTD=x_BSD), Decisions())
                sums[layer, part] += _loss(model, x_BSD, ids_BS1) - loss
        yield dense / count, [Cost(*site, total / count) for site, total in sums.items()]


def _skipping(model: Transformer, layer: int, part: str, skip: float) -> tuple[RoutedBlock, Callable[[int], int]]:
    """Returns the layer as a block that a random share of the tokens runs, and a function from S to their number."""
    routing = RoutingSpec(
        layers=(layer,),
        parts=part,
        router="noise",
        gate="ones",
        combine="replace_ungated",
        capacity_rule="floor",
        # A capacity must be above 0; this one rounds down to no token in any row.
        capacity=max(1 - skip, 1e-9),
    )
    spec = replace(model.spec, routing=routing)
    with torch.device("meta"):
        block = RoutedBlock(spec, layer, routing)
    block.load_state_dict(model.layers[layer].state_dict(), assign=True)
    return block.eval().requires_grad_(False), lambda seq: spec.k_of_layer(seq)[layer]


@torch.no_grad()
def _dense_loss(model: Transformer, ids_BS1: Tensor) -> tuple[float, list[Tokens]]:
    """Returns the loss of these rows, and the input of each layer."""
    before: list[Tokens] = []
    ids_BS = ids_BS1[:, :-1]
    hooks = [layer.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0])) for layer in model.layers]
    try:
        x_BSD = model.stream(ids_BS, torch.full((len(ids_BS),), ids_BS.shape[1]), Decisions())
    finally:
        for hook in hooks:
            hook.remove()
    return _loss(model, x_BSD, ids_BS1), before


def _loss(model: Transformer, x_BSD: Tensor, ids_BS1: Tensor) -> float:
    hidden_ND = model.norm(x_BSD).flatten(0, 1)
    return float(next_token_loss(hidden_ND, model.head_weight, ids_BS1[:, 1:].flatten()).cross_entropy)


def _table(dense: float, costs: Sequence[Cost], skip: float) -> str:
    parts = list(dict.fromkeys(cost.part for cost in costs))
    cost_of = {(cost.layer, cost.part): cost.cost for cost in costs}
    layers = sorted({cost.layer for cost in costs})
    lines = [f"held-out loss {dense:.4f} nats a token; what it rises by if {skip:.0%} of the tokens skip:", ""]
    lines += [f"{'layer':>5}" + "".join(f"{part:>12}" for part in parts)]
    lines += [f"{layer:>5}" + "".join(f"{cost_of[layer, part]:>+12.4f}" for part in parts) for layer in layers]
    for part in parts:
        ranked = sorted(layers, key=lambda layer, part=part: cost_of[layer, part])  # type: ignore[misc]
        lines += ["", f"{part}, cheapest first: {', '.join(map(str, ranked))}"]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mod_models.probe",
        description="Measures what it costs a dense model if tokens skip one of its layers, on held-out text.",
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="PATH", help="a dense checkpoint: a folder, or model.pt")
    add("--data", type=Path, metavar="PATH", help="as in training; of this, the held-out text is used")
    add("--tokenizer", type=Path, metavar="FILE", help="as in training; without it the one in the checkpoint's folder")
    add("--parts", nargs="+", choices=PARTS, default=PARTS, help="what of a layer is skipped (all three)")
    add("--skip", type=float, default=0.5, metavar="SHARE", help="share of the tokens that skip it (%(default)s)")
    add("--batches", type=int, default=4, metavar="N", help="how many batches of rows (%(default)s)")
    add("--batch", type=int, default=2, metavar="N", help="rows of a batch (%(default)s)")
    add("--seq", type=int, default=512, metavar="N", help="tokens of a row (%(default)s)")
    add("--out", type=Path, metavar="FILE", help="JSON with the costs, for train --route FILE:N")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads; 0 leaves PyTorch's choice")
    return parser


def _probe(options: argparse.Namespace) -> dict[str, Any]:
    checkpoint = load_checkpoint(options.checkpoint)
    corpus = read_corpus(options.data, options.tokenizer or tokenizer_beside(options.checkpoint))
    spec, text_N = checkpoint.spec, corpus.held_out.id_N
    if spec.vocab_size < corpus.vocab_size:
        raise TrainError(f"the tokens of {corpus.name} need a vocabulary of {corpus.vocab_size}, got {spec.vocab_size}")
    longest = min(spec.max_positions, len(text_N) - 2)
    if not 1 <= options.seq <= longest or min(options.batches, options.batch) < 1:
        raise TrainError(f"--seq, --batch, --batches: expected 1 at least, and rows of {longest} tokens at most")
    windows = (batch_at(text_N, options.batch, options.seq + 1, PROBE_SEED + i) for i in range(options.batches))
    dense, costs = 0.0, list[Cost]()
    for number, so_far in enumerate(costs_of(checkpoint, windows, options.parts, options.skip), 1):
        dense, costs = so_far
        print(f"batch {number}/{options.batches}", file=sys.stderr)
    print(_table(dense, costs, options.skip))
    return {
        "checkpoint": str(options.checkpoint),
        "data": corpus.fingerprint,
        "tokens": options.batches * options.batch * options.seq,
        "skip": options.skip,
        "loss": dense,
        "rows": [cost._asdict() for cost in costs],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code; 2 if the model cannot be probed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.threads > 0:
        torch.set_num_threads(options.threads)
    try:
        result = _probe(options)
        if options.out is not None:
            with written_beside(options.out) as temporary:
                temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except ForeignArchitectureError as error:
        parser.error(f"{options.checkpoint}: holds the architecture {error}, which is none of this package")
    except (TrainError, CheckpointError, OSError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
