"""Builds a Mixture-of-Depths model from a dense model; at capacity 1 both compute the same, bit for bit.

Routers that are fitted (`fit.py`) have a gate of 1. Routers that learn start so small that their gate, 1 + tanh(l),
rounds to exactly 1. Their scores still differ, because small floating-point numbers keep their relative precision. So
top-k starts from an arbitrary choice. With routers of zeros it would start from the first k tokens.

Related work: training routers alone is the first stage of Router-Tuning (arXiv 2410.13184) and SkipGPT (2506.04179).
MoDification (2410.14268) reports that top-k needs many tokens to convert a trained model. For models of 7 B and more,
2406.15786 found that a trained model needs attention least.

Calibration sets each predictor to its router's score minus a threshold, so that it selects as many tokens of a text as
top-k does. A predictor learns from top-k's choices by gradient (Raposo et al., arXiv 2404.02258, section 3.5), which
takes some thousands of steps. A short run, such as a retrofit, ends before that. But top-k selects almost the same
tokens as one threshold for all rows, and a predictor can compute the router's score exactly: silu(a) - silu(-a) = a.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from mod_models.checkpoint import Checkpoint
from mod_models.declarations import CAUSAL_SELECTIONS, KEYS_VALUES, PARTS, EveryNth, RoutingSpec
from mod_models.routing import Decisions, LinearRouter, MlpRouter
from mod_models.selection import always_first
from mod_models.spec import ModelSpec, Site, layer_of
from mod_models.train import TrainError
from mod_models.transformer import RoutedBlock, Transformer

SELECTIONS = CAUSAL_SELECTIONS
"""Values of `RoutingSpec.selection` with which the result can write text."""
RETROFIT_ADAPTERS = ("none", "linear", "gated")
"""Values of `--adapter`: what skipped tokens run instead. `gated` begins as some neurons of the block's own MLP."""
NEURONS = 16
"""The number of neurons that are kept is rounded to a multiple of this, because products run on tiles."""
ADAPTER_SHARE = 0.25
"""Share of an MLP's neurons that a gated adapter has, unless `--adapter-share` says another one."""
FITTED, LEARNED = "fitted", "learned"
RETROFIT_ROUTERS = (FITTED, LEARNED)
"""Values of `--routers`: fitted to the dense model before training (`train.fit`), with a gate of 1, so that only the
router loss has a gradient in them; or learned by gradient from an arbitrary choice, through a gate 1 + tanh(l).
"""
UNSEEN = 2.0**-26
"""Bound of |score| at the start: 1 + tanh(l) is 1 in float32, and in every narrower dtype, if |l| < 2 ** -25."""
WILLING = 1.0
"""Output of every predictor for every token at the start, because at capacity 1 top-k selects all tokens."""
SPREAD = 4.0
"""Standard deviation of a calibrated predictor's logits. Larger logits would leave the predictor loss no gradient."""
LEAST_HIDDEN = 2
"""Hidden units that calibration uses, one for each sign."""
LAYERS = (
    "deepest:N, every:N, numbers and ranges such as 3,5,8-11, or FILE:N for the N layers that a probe found cheapest"
)


def layers_of(text: str, n_layers: int, parts: str) -> tuple[int, ...]:
    """Parses the layers that `--route` names, in ascending order.

    Args:
        text: see LAYERS. FILE is the output of `python -m mod_models.probe --out FILE`.
        n_layers: number of layers of the dense model.
        parts: the routed part, whose ranking by the probe is used.

    Raises:
        TrainError: the text has no such form, names layers that do not exist, or the file is no such ranking.
    """
    form, _, count = text.rpartition(":")
    if not form:
        return _numbered(text, n_layers)
    number = int(count) if count.isdecimal() else 0
    if not 1 <= number <= n_layers:
        raise TrainError(f"--route {text}: expected a number from 1 to {n_layers} after the colon, got {count!r}")
    if form == "deepest":
        return tuple(range(n_layers - number, n_layers))
    if form == "every":
        # The routed layer is the last of its group, as in the paper.
        return EveryNth(every=number, offset=number - 1).of(n_layers)
    return tuple(sorted(_ranked(Path(form), parts, n_layers)[:number]))


def _numbered(text: str, n_layers: int) -> tuple[int, ...]:
    layers: set[int] = set()
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", item.strip())
        if match is None:
            raise TrainError(f"--route {text}: expected {LAYERS}")
        layers |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    if not layers or max(layers) >= n_layers:
        raise TrainError(f"--route {text}: expected layers from 0 to {n_layers - 1}")
    return tuple(sorted(layers))


def _ranked(path: Path, parts: str, n_layers: int) -> list[int]:
    """The layers as the probe ranks them, the cheapest first."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        costs = {int(row["layer"]): float(row["cost"]) for row in rows if row["part"] == parts}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise TrainError(f"--route {path}: not what python -m mod_models.probe --out writes ({error})") from error
    if not costs and parts == "separate":
        raise TrainError(f"--route {path}: a probe ranks one part at a time; name the layers, or give --parts")
    if set(costs) != set(range(n_layers)):
        raise TrainError(f"--route {path}: has no cost of --parts {parts} for each of the {n_layers} layers")
    return sorted(costs, key=lambda layer: costs[layer])


def routed_spec(
    dense: ModelSpec,
    layers: tuple[int, ...],
    capacity: float,
    parts: str,
    selection: str,
    *,
    skipped_keys: str = "absent",
    adapter: str = "none",
    adapter_share: float = ADAPTER_SHARE,
    routers: str = LEARNED,
    calibrated: bool = False,
) -> ModelSpec:
    """Adds routing of these layers and parts to the spec of a dense model.

    Args:
        dense: spec of the dense model.
        layers: the layers that are to route.
        capacity: share of the tokens that they run.
        parts: the part of these layers that routes.
        selection: how tokens are selected once the model is trained.
        skipped_keys: whether routed attention sees the keys and values of skipped tokens.
        adapter: what skipped tokens run instead, one of RETROFIT_ADAPTERS.
        adapter_share: how many neurons a gated adapter has, as a share of those of the MLP.
        routers: one of RETROFIT_ROUTERS, which decides the gate.
        calibrated: whether `calibrate` sets the predictors, which uses LEAST_HIDDEN of their hidden units. More would
            cost time in every step of text.

    Raises:
        TrainError: the model already routes or has experts, the selection cannot write text, the part is unknown, or
            the part or the MLP has no such keys or adapters.
        SpecError: the capacity is out of range.
    """
    if dense.routing is not None or dense.experts is not None:
        reason = "routes already" if dense.routing is not None else "has experts"
        raise TrainError(
            f"--route: expected a dense model, and the one of --init {reason}; leave --route out to train it"
        )
    if selection not in SELECTIONS or parts not in PARTS:
        raise TrainError(f"--selection, --parts: expected one of {SELECTIONS} and {PARTS}, got {selection} and {parts}")
    if skipped_keys not in KEYS_VALUES or adapter not in RETROFIT_ADAPTERS or routers not in RETROFIT_ROUTERS:
        allowed = f"{KEYS_VALUES}, {RETROFIT_ADAPTERS} and {RETROFIT_ROUTERS}"
        values = f"{skipped_keys}, {adapter} and {routers}"
        raise TrainError(f"--skipped-keys, --adapter, --routers: expected one of {allowed}, got {values}")
    if skipped_keys == "kept" and parts == "mlp":
        raise TrainError(
            "--skipped-keys kept: with --parts mlp every token runs attention, and all keys are there; leave it out"
        )
    if adapter != "none" and parts not in ("block", "mlp"):
        raise TrainError(
            f"--adapter {adapter}: skipped tokens run it instead of the MLP; expected --parts block or mlp, got {parts}"
        )
    kept = kept_neurons(dense.d_ff, adapter_share) if adapter == "gated" else 0
    if adapter == "gated" and dense.mlp_bias:
        raise TrainError(
            "--adapter gated: has no biases, but the MLPs of --init have some; use --adapter linear, or none"
        )
    if adapter == "gated" and (adapter_share <= 0 or kept == dense.d_ff):
        raise TrainError(
            f"--adapter-share: expected a share of the MLP's {dense.d_ff:,} neurons, above 0 and less than all, got "
            f"{adapter_share:g}, which is {kept:,} neurons"
        )
    routing = RoutingSpec(
        layers=layers,
        parts=parts,
        capacity=capacity,
        router="linear_bias" if selection == "threshold" else "linear",
        router_input="normed",
        gate="ones" if routers == FITTED else "tanh_affine",
        gate_scale=1.0,
        gate_shift=0.0 if routers == FITTED else 1.0,
        combine="paper",
        skipped_keys_values=skipped_keys,
        skipped_result="identity" if adapter == "none" else "adapter",
        adapter="linear" if adapter == "none" else adapter,
        adapter_hidden=kept,
        selection=selection,
        predictor_hidden=_width_of_predictors(dense, calibrated=calibrated) if selection == "predictor" else 0,
    )
    return dataclasses.replace(dense, routing=routing)


def _width_of_predictors(spec: ModelSpec, *, calibrated: bool) -> int:
    return LEAST_HIDDEN if calibrated else max(1, spec.d_model // 4)


def kept_neurons(d_ff: int, share: float) -> int:
    """Rounds a share of an MLP's neurons to a number of them: a multiple of NEURONS, but never more than `d_ff`."""
    return d_ff if share >= 1 else min(d_ff, max(NEURONS, round(d_ff * share / NEURONS) * NEURONS))


def retrofitted(dense: Checkpoint, spec: ModelSpec, seed: int) -> Checkpoint:
    """Adds new routers and predictors to a dense model and shares its weights. `spec` is from `routed_spec`.

    Adapters begin with outgoing weights of zeros, with which a skipped token stays as it is; a gated one has the first
    neurons of the MLP. `train.fit.fitted` gives them a better start.
    """
    with torch.device("meta"):
        model = Transformer(dataclasses.replace(spec, max_positions=1))
    generator = torch.Generator().manual_seed(seed)
    weights = dict(dense.weights)
    for layer in spec.routed_layers:
        block = model.layers[layer]
        for name, module in block.named_children():
            prefix = f"layers.{layer}.{name}."
            if name in ("router", "mlp_router"):
                second = spec.routing is not None and spec.routing.parts == "mlp"
                norm = "mlp_norm" if name == "mlp_router" or second else "attention_norm"
                weights |= _router(module.state_dict(), prefix, weights[f"layers.{layer}.{norm}.weight"], generator)
            elif isinstance(module, MlpRouter):
                weights |= _predictor(module.state_dict(), prefix, generator)
            elif name == "adapter":
                for key, shape in module.state_dict().items():
                    # With zeros in front of them too, outgoing weights of zeros would never get a gradient.
                    of_mlp = weights[f"layers.{layer}.mlp.{key}"][: len(shape)].clone()
                    weights[prefix + key] = torch.zeros(shape.shape) if key == "down_proj.weight" else of_mlp
    return Checkpoint(spec=spec, weights=weights)


def with_predictors(model: Checkpoint, seed: int, *, calibrated: bool = False) -> Checkpoint:
    """Adds predictors to a model that selects by top-k, so that it can write text once they are trained. `calibrated`
    is as in `routed_spec`.

    Raises:
        TrainError: the model does not select by top-k, or has predictors.
    """
    routing = model.spec.routing
    if routing is None or routing.selection != "topk" or routing.predictor_hidden:
        what = "routes nothing" if routing is None else f"selects by {routing.selection}"
        what = "has predictors" if routing is not None and routing.predictor_hidden else what
        raise TrainError(
            f"--selection predictor: without --route it adds predictors to a model that selects by top-k, and the one "
            f"of --init {what}; leave it out"
        )
    width = _width_of_predictors(model.spec, calibrated=calibrated)
    spec = dataclasses.replace(
        model.spec, routing=dataclasses.replace(routing, selection="predictor", predictor_hidden=width)
    )
    with torch.device("meta"):
        skeleton = Transformer(dataclasses.replace(spec, max_positions=1))
    generator = torch.Generator().manual_seed(seed)
    weights = dict(model.weights)
    for layer in spec.routed_layers:
        for name in ("predictor", "mlp_predictor"):
            predictor = getattr(skeleton.layers[layer], name)
            if predictor is not None:
                weights |= _predictor(predictor.state_dict(), f"layers.{layer}.{name}.", generator)
    return Checkpoint(spec=spec, weights=weights)


def _router(shapes: dict[str, Tensor], prefix: str, norm_D: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Draws a random direction. |l| <= |w| |x|, and a normed |x| is at most sqrt(D) * the norm's largest weight."""
    weights = {}
    for name, shape in shapes.items():
        if name.endswith("bias"):
            # The bias is above every |w . x|, so that a threshold selects every token at first.
            weights[prefix + name] = torch.full(shape.shape, UNSEEN / 2)
            continue
        w_1D = torch.randn(shape.shape, generator=generator)
        longest = shape.shape[-1] ** 0.5 * norm_D.float().abs().max().clamp(min=1e-6)
        weights[prefix + name] = w_1D / w_1D.norm() / longest * (UNSEEN / 4)
    return weights


def _predictor(shapes: dict[str, Tensor], prefix: str, generator: torch.Generator) -> dict[str, Tensor]:
    weights = {}
    for name, shape in shapes.items():
        if name == "projection.bias":
            weights[prefix + name] = torch.full(shape.shape, WILLING)
        elif name == "hidden.weight":
            weights[prefix + name] = torch.randn(shape.shape, generator=generator) / shape.shape[-1] ** 0.5
        else:
            weights[prefix + name] = torch.zeros(shape.shape)
    return weights


@torch.no_grad()
def calibrate(model: Transformer, rows: Iterable[Tensor]) -> None:
    """Sets the weights of every predictor from its router and from text. Routers do not change.

    Args:
        model: has linear routers, and predictors of at least two hidden units; its training mode is restored.
        rows: int64 (B, S) token ids, without padding.
    """
    training = model.training
    # In training mode top-k selects. Routers then score the same residual streams as during training.
    model.train()
    score_by_site: dict[Site, list[Tensor]] = {}
    selected_share: dict[Site, float] = {}
    for ids_BS in rows:
        decisions = Decisions()
        model.hidden(ids_BS, torch.full((len(ids_BS),), ids_BS.shape[1], device=ids_BS.device), decisions)
        for site, seen in decisions.seen.items():
            # Tokens that always run take their slots whatever the predictor says, and leave the others fewer. A router
            # may only select from those of the router before: as many in every row, because top-k chose them.
            free_BT = seen.live_BT & (always_first(seen.l_BT, seen.index_BT, seen.always_first) != torch.inf)
            score_by_site.setdefault(site, []).append(seen.l_BT[free_BT].float())
            candidates, free = int(seen.live_BT[0].sum()), int(free_BT[0].sum())
            selected_share[site] = max(0, seen.k - (candidates - free)) / free if free else 1.0
    model.train(training)
    for site, scores in score_by_site.items():
        score_N = torch.cat(scores)
        block = model.layers[layer_of(site)]
        assert isinstance(block, RoutedBlock)
        second = isinstance(site, str) and site.endswith(".mlp")
        router, predictor = (block.mlp_router, block.mlp_predictor) if second else (block.router, block.predictor)
        assert isinstance(router, LinearRouter)
        assert isinstance(predictor, MlpRouter)
        _set(predictor, router, score_N, selected_share[site])


def quantile(score_N: Tensor, share: float) -> Tensor:
    """Returns the value below which this share of the scores lies, linear between two scores.

    `torch.quantile` does the same, and refuses more than 2**24 numbers.
    """
    ordered_N, rank = score_N.sort().values, share * (len(score_N) - 1)
    below = int(rank)
    return torch.lerp(ordered_N[below], ordered_N[min(below + 1, len(score_N) - 1)], rank - below)


def _set(predictor: MlpRouter, router: LinearRouter, score_N: Tensor, passed: float) -> None:
    """Makes the first two hidden units compute steepness * (score - threshold); the output ignores the others."""
    if passed in (0, 1):
        nn.init.zeros_(predictor.projection.weight)
        nn.init.constant_(predictor.projection.bias, 1.0 if passed else -1.0)
        return
    threshold = quantile(score_N, 1 - passed)
    steepness = SPREAD / score_N.std().clamp(min=torch.finfo(torch.float32).tiny)
    bias = 0.0 if router.projection.bias is None else router.projection.bias[0]
    for unit, sign in enumerate((1.0, -1.0)):
        predictor.hidden.weight[unit] = sign * steepness * router.projection.weight[0]
        predictor.hidden.bias[unit] = sign * steepness * (bias - threshold)
    nn.init.zeros_(predictor.projection.weight)
    nn.init.zeros_(predictor.projection.bias)
    predictor.projection.weight[0, 0], predictor.projection.weight[0, 1] = 1.0, -1.0
