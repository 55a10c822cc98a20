"""Declarations of a spec about layers, routing and experts: plain data whose defaults are the published forms.

A spec is read before anything is built, so this module and the modules that check a spec do not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

LEARNED_ROUTERS = ("linear", "linear_bias", "mlp", "norm_mlp")
MLP_ROUTERS = ("mlp", "norm_mlp")
"""Routers with a hidden layer, `router_hidden` wide."""
ROUTERS = (*LEARNED_ROUTERS, "noise")
ROUTER_INPUTS = ("raw", "normed")
GATES = ("identity", "sigmoid", "scaled_sigmoid", "sigmoid_affine", "tanh_affine", "softmax_selected", "ones")
COMBINES = ("paper", "replace", "double_residual", "replace_ungated", "ffn_gated", "double_residual_ffn_gated")
FFN_GATED = ("ffn_gated", "double_residual_ffn_gated")
"""Combine rules that weigh only the MLP."""
SELECTIONS = ("topk", "threshold", "predictor", "random", "exit")
CAUSAL_SELECTIONS = ("threshold", "predictor")
"""Selections that decide about a token without looking at later tokens."""
PARTS = ("block", "attention", "mlp", "separate")
POSITIONS = ("original", "compact")
CHOICES = ("token", "expert")
ATTENTION_BIASES: dict[str, str] = {"none": "", "qkv": "qkv", "all": "qkvo"}
"""Name -> which of the projections q, k, v and o have a bias."""
QK_NORMS = ("none", "head")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
ROPE_SCALINGS = ("linear", "llama3")


def tokens_of(capacity: float, seq: int) -> int:
    """Returns k, the number of tokens that a routed block selects: floor(`capacity` * `seq`), but at least 1.

    The product is computed in float64, as in published code: 0.29 of 100 tokens are 28, not 29.
    """
    return max(1, int(capacity * seq))


CAPACITY_RULES: dict[str, Callable[[float, int], int]] = {
    "floor": lambda capacity, seq: int(capacity * seq),
    "floor_min1": tokens_of,
    "strict_floor": lambda capacity, seq: max(1, int(capacity * seq) - 1),
    "ceil": lambda capacity, seq: math.ceil(capacity * seq),
    "absolute": lambda capacity, seq: min(int(capacity), seq),
}
"""Name -> (capacity, S) -> k, the number of tokens that a routed layer selects out of S; k is at most S."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary angles after training, so that a model reads longer texts.

    The angle of a pair per position is f = theta ** (-2 * pair / d_head), and its wavelength is w = 2 pi / f.

    Attributes:
        kind: `linear`, f / factor for every pair; `llama3`, f if w < original_positions / high_freq_factor,
            f / factor if w > original_positions / low_freq_factor, and between these limits the mixture
            (1 - s) * f / factor + s * f with s = (original_positions / w - low) / (high - low), as in Llama 3.1.
        factor: how many times longer the texts become.
        low_freq_factor: `low` above, only for `llama3`.
        high_freq_factor: `high` above, only for `llama3`.
        original_positions: tokens of the longest row before scaling, only for `llama3`.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryNth:
    """Layers offset, offset + every, ..., except the model's first `skip_first` and last `skip_last` layers."""

    every: int = 2
    offset: int = 1
    skip_first: int = 0
    skip_last: int = 0

    def of(self, n_layers: int) -> tuple[int, ...]:
        """The layers of this pattern, ascending."""
        chosen = range(self.offset, n_layers, self.every)
        return tuple(layer for layer in chosen if self.skip_first <= layer < n_layers - self.skip_last)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSpec:
    """Routing of blocks; the defaults are the paper's (arXiv 2404.02258, section 3).

    Attributes:
        layers: the routed blocks, as a pattern or an explicit ascending list.
        parts: the routed part of a block: the whole `block`; only its `attention` or only its `mlp`, while the other
            part runs on every token; or `separate`, both parts with one router each.
        router: `linear` (D -> 1), `linear_bias`, `mlp` (D -> router_hidden -> 1 with SiLU), `norm_mlp` (`mlp` with an
            RMSNorm before the SiLU), or `noise`, Gaussian noise instead of a score for selection and gate (the paper's
            control, stochastic routing).
        router_input: `raw` residual stream, or `normed` by the norm of the routed part.
        router_hidden: width of the hidden layer of the `mlp` and `norm_mlp` routers.
        gate: the weight g as a function of the router's score l: `identity` l; `sigmoid`; `scaled_sigmoid`
            a * sigmoid(l); `sigmoid_affine` a * sigmoid(l) + b; `tanh_affine` a * tanh(l) + b; `softmax_selected`
            softmax over the scores of the selected tokens; `ones` 1.
        gate_scale: a, for the three gates that use it.
        gate_shift: b, for the two gates that use it.
        combine: the new value of a selected token x, with attention delta A, MLP delta M (on x + A), and
            Block = x + A + M: `paper` x + g (A + M); `replace` g * Block; `double_residual` x + g * Block;
            `replace_ungated` Block; `ffn_gated` x + A + g M; `double_residual_ffn_gated` x + (x + A + g M). If only one
            part is routed, the delta of the other part is left out. A skipped token stays x.
        selection: `topk`, the k largest scores of the row's real tokens, ties to the earlier token (expert choice);
            `threshold`, the first k tokens of a row whose score is above 0 (token choice: later ones overflow);
            `predictor`, like `threshold` with the auxiliary predictor's output, but top-k during training; `random`,
            the k largest of Gaussian noise, gated by the router (a control in which only the choice is not learned);
            `exit`, top-k among the remaining tokens; a token that is not selected also skips all later blocks.
        always_first: how many tokens at the start of each row always run; they get slots before other tokens.
        noise_seed: seed of the noise for the router `noise` and the selection `random`.
        capacity_rule: name in CAPACITY_RULES.
        capacity: share of the tokens in (0, 1], or a number of tokens for `absolute`; a tuple has one entry for each
            routed layer.
        positions: RoPE positions inside a routed block: `original` in the sequence, or `compact` 0..k-1.
        predictor_hidden: width of the auxiliary causal predictor (paper, section 3.5); 0 for no predictor.
    """

    layers: EveryNth | tuple[int, ...] = EveryNth()
    parts: str = "block"
    router: str = "linear"
    router_input: str = "raw"
    router_hidden: int = 0
    gate: str = "identity"
    gate_scale: float = 1.0
    gate_shift: float = 0.0
    combine: str = "paper"
    selection: str = "topk"
    always_first: int = 0
    noise_seed: int = 0
    capacity_rule: str = "floor_min1"
    capacity: float | tuple[float, ...] = 0.125
    positions: str = "original"
    predictor_hidden: int = 0

    @property
    def draws(self) -> bool:
        """Whether noise selects or gates tokens."""
        return self.router == "noise" or self.selection == "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts instead of the MLP; with no-op experts an integrated MoDE (arXiv 2404.02258, 4.3).

    Attributes:
        layers: the blocks that have experts.
        n_experts: number of experts, each a gated MLP of width d_ff with the spec's activation, without biases.
        choice: `token`, each token goes to its `top_k` most probable experts; the slots of an expert fill in the order
            of the row, and later tokens are dropped (Fedus et al., arXiv 2101.03961); `expert`, each expert takes the
            tokens for which its probability is largest (Zhou et al., arXiv 2202.09368).
        top_k: number of experts of a token, for `token` choice; if above 1, their weights are normalized to sum to 1.
        capacity_factor: slots of an expert, as a multiple of top_k * T / n_experts, the fair share of T tokens.
        fixed_places: slots of an expert instead of that share, one number for each layer with experts. Like the
            capacity rule `absolute`, they do not grow with the row, and are at most T. Empty for the share.
        noop_experts: number of additional experts that do nothing; a token that chooses one is skipped.
    """

    layers: EveryNth | tuple[int, ...] = EveryNth(every=1, offset=0)
    n_experts: int = 8
    choice: str = "token"
    top_k: int = 1
    capacity_factor: float = 1.25
    fixed_places: tuple[int, ...] = ()
    noop_experts: int = 0

    def slots(self, tokens: int) -> int:
        """Slots of each expert for this number of tokens by `capacity_factor`, from 1 to `tokens`."""
        share = self.capacity_factor * self.top_k * tokens / self.n_experts
        return min(tokens, max(1, math.ceil(share)))
