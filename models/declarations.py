"""What a spec can declare about layers, routing and experts, as plain data with the published forms as defaults.

A spec is read before anything is built, so this module and the ones that check it import no torch.
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
"""Combine rules whose weight is for the MLP alone."""
SELECTIONS = ("topk", "threshold", "predictor", "random", "exit")
CAUSAL_SELECTIONS = ("threshold", "predictor")
"""Selections in which whether a token is selected depends on nothing after it."""
PARTS = ("block", "attention", "mlp", "separate")
POSITIONS = ("original", "compact")
CHOICES = ("token", "expert")
ATTENTION_BIASES: dict[str, str] = {"none": "", "qkv": "qkv", "all": "qkvo"}
"""Name -> which of the projections q, k, v and o have a bias."""
QK_NORMS = ("none", "head")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
ROPE_SCALINGS = ("linear", "llama3")


def tokens_of(capacity: float, seq: int) -> int:
    """k, the tokens that a routed block selects out of `seq`: the share `capacity` of them, cut off, and at least 1.

    The product is a float64 one, as in published code: 0.29 of 100 tokens are 28, not 29.
    """
    return max(1, int(capacity * seq))


CAPACITY_RULES: dict[str, Callable[[float, int], int]] = {
    "floor": lambda capacity, seq: int(capacity * seq),
    "floor_min1": tokens_of,
    "strict_floor": lambda capacity, seq: max(1, int(capacity * seq) - 1),
    "ceil": lambda capacity, seq: math.ceil(capacity * seq),
    "absolute": lambda capacity, seq: min(int(capacity), seq),
}
"""How many tokens k a routed layer takes out of S: name -> (capacity, S) -> k, at most S."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Rotary angles that were stretched after training, so that a model reads longer texts.

    With f the angle of a pair for each position, theta ** (-2 * pair / d_head), and w = 2 pi / f its wavelength:

    Attributes:
        kind: `linear`, f / factor for every pair; `llama3`, f where w < original_positions / high_freq_factor,
            f / factor where w > original_positions / low_freq_factor, and between the two a mixture,
            (1 - s) * f / factor + s * f with s = (original_positions / w - low) / (high - low), as Llama 3.1 has it.
        factor: how many times longer.
        low_freq_factor: for `llama3`.
        high_freq_factor: for `llama3`.
        original_positions: for `llama3`, tokens of the longest row before.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryNth:
    """Layers offset, offset + every, offset + 2 * every, ... without the first `skip_first` and last `skip_last`."""

    every: int = 2
    offset: int = 1
    skip_first: int = 0
    skip_last: int = 0

    def of(self, n_layers: int) -> tuple[int, ...]:
        """The layers that are meant, ascending."""
        chosen = range(self.offset, n_layers, self.every)
        return tuple(layer for layer in chosen if self.skip_first <= layer < n_layers - self.skip_last)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSpec:
    """What a routed block does; the defaults are the paper's (arXiv 2404.02258, section 3).

    Attributes:
        layers: which blocks route, a pattern or an explicit ascending list.
        parts: what of a block is routed: the whole `block`; its `attention` or its `mlp` alone, the other one running
            on every token; or both with a router each, `separate`.
        router: `linear` (D -> 1), `linear_bias`, `mlp` (D -> router_hidden -> 1 with SiLU), `norm_mlp` (the same with
            an RMSNorm before the SiLU), or `noise`, Gaussian noise instead of a score, which selects and weighs: the
            paper's control, stochastic routing.
        router_input: `raw` residual stream, or `normed` by the norm of the routed part.
        router_hidden: width of the hidden layer of the `mlp` and `norm_mlp` routers.
        gate: from the router's score l to the weight g: `identity` l; `sigmoid`; `scaled_sigmoid` a * sigmoid(l);
            `sigmoid_affine` a * sigmoid(l) + b; `tanh_affine` a * tanh(l) + b; `softmax_selected` softmax over the k
            chosen scores; `ones`.
        gate_scale: a, for the three gates that have one.
        gate_shift: b, for the two gates that have one.
        combine: with x a selected token, A its attention delta, M its MLP delta (on x + A), Block = x + A + M:
            `paper` x + g (A + M); `replace` g * Block; `double_residual` x + g * Block; `replace_ungated` Block;
            `ffn_gated` x + A + g M; `double_residual_ffn_gated` x + (x + A + g M). Where a part alone is routed, the
            delta of the other one is left out. A token that is not selected stays x.
        selection: `topk`, the k largest scores of the row's real tokens, ties to the earlier token (expert choice);
            `threshold`, a token whose score is above 0, the first k of a row (token choice: later ones overflow);
            `predictor`, the same of the auxiliary predictor's output, and top-k while it is trained; `random`, the k
            largest of Gaussian noise, weighed by the router: a control in which only the choice is not learned;
            `exit`, top-k among the tokens that are left; a token that is not selected skips all later blocks as well.
        always_first: how many tokens at the start of each row run whatever their score is; they have slots first.
        noise_seed: of the noise of the router `noise` and of the selection `random`.
        capacity_rule: name in CAPACITY_RULES.
        capacity: share of the tokens in (0, 1], or a number of tokens for `absolute`; a tuple is a per-layer
            schedule with one entry for each routed layer.
        positions: RoPE positions inside a routed block: `original` in the sequence, or `compact` 0..k-1.
        predictor_hidden: width of the auxiliary causal predictor (paper, section 3.5); 0 when there is none.
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
        """Whether noise selects tokens or weighs them."""
        return self.router == "noise" or self.selection == "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts instead of the MLP; with no-op experts an integrated MoDE (arXiv 2404.02258, 4.3).

    Attributes:
        layers: which blocks have experts.
        n_experts: experts, each a gated MLP of width d_ff with the spec's activation, without biases.
        choice: `token`, each token goes to its `top_k` most probable experts, first come first served into an expert's
            slots, and what does not fit is dropped (Fedus et al., arXiv 2101.03961); `expert`, each expert takes the
            tokens that it is most probable for (Zhou et al., arXiv 2202.09368).
        top_k: experts of a token, for `token` choice; their weights are made to sum to 1 when there are several.
        capacity_factor: slots of an expert, as a share of top_k * T / n_experts, the fair share of T tokens.
        fixed_places: slots of an expert instead of that share, one number for each layer with experts; as with the
            capacity rule `absolute` they do not grow with the row, and are T at most. Empty: the share.
        noop_experts: experts that do nothing, beside the real ones: a token that chooses one is skipped.
    """

    layers: EveryNth | tuple[int, ...] = EveryNth(every=1, offset=0)
    n_experts: int = 8
    choice: str = "token"
    top_k: int = 1
    capacity_factor: float = 1.25
    fixed_places: tuple[int, ...] = ()
    noop_experts: int = 0

    def slots(self, tokens: int) -> int:
        """How many of `tokens` each expert takes by its share, from 1 to all."""
        share = self.capacity_factor * self.top_k * tokens / self.n_experts
        return min(tokens, max(1, math.ceil(share)))
