"""Public implementations of Mixture-of-Depths, written again from facts about them without copying code, as references
for converted models. Each has the tensor names of the published code and computes the same row by row; `save` writes
the same files. Shapes: T tokens of one row, D width, H heads, E head width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from hugging_face import made
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, KV_HEADS, VOCABULARY, LAYERS, EPS = 48, 4, 2, 96, 4, 1e-5


def enlivened(model: nn.Module, seed: int) -> nn.Module:
    """Sets large weights, so that each affects the logits, and routers that run some tokens and skip others."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
    return model.eval()


class ByRow(nn.Module):
    """A model defined by what it does with one row, T ids -> (T, V)."""

    def row(self, ids_T: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, ids_BS: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.stack([self.row(ids_T) for ids_T in ids_BS])


class OfTransformers(ByRow):
    """A model of transformers that runs layer by layer."""

    def __init__(self, family: str, seed: int, **changes: Any) -> None:
        super().__init__()
        self.whole = made(family, seed, **changes)

    def block(self, layer: nn.Module, x_TD: Tensor, position_T: Tensor) -> Tensor:
        angles = self.whole.model.rotary_emb(x_TD[None], position_T[None])
        out = layer(x_TD[None], attention_mask=None, position_embeddings=angles, position_ids=position_T[None])
        return (out[0] if isinstance(out, tuple) else out)[0]

    def head(self, x_TD: Tensor) -> Tensor:
        return self.whole.lm_head(self.whole.model.norm(x_TD))

    def save(self, folder: Path, **changes: Any) -> None:
        folder.mkdir()
        fields = json.loads(self.whole.config.to_json_string(use_diff=False)) | changes
        (folder / "config.json").write_text(json.dumps(fields))
        save_file(
            {name: tensor.clone() for name, tensor in self.whole.state_dict().items()}, folder / "model.safetensors"
        )


class Wrapped(nn.Module):
    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__()
        self.router = nn.ModuleDict({"weight_predictor": nn.Linear(width, 1)})
        self.block = block


class Astramind(OfTransformers):
    """Odd layers wrapped; w > the k-th largest (>= for k = 1) runs at its own position; w * Block(x) replaces it."""

    capacity = 0.125

    def __init__(self, family: str, seed: int) -> None:
        super().__init__(family, seed)
        layers = self.whole.model.layers
        for number in range(1, len(layers), 2):
            layers[number] = Wrapped(layers[number], self.whole.config.hidden_size)
            enlivened(layers[number].router, seed)

    def row(self, ids_T: Tensor) -> Tensor:
        x_TD, position_T = self.whole.model.embed_tokens(ids_T), torch.arange(len(ids_T))
        for layer in self.whole.model.layers:
            if not isinstance(layer, Wrapped):
                x_TD = self.block(layer, x_TD, position_T)
                continue
            weight_T = layer.router["weight_predictor"](x_TD)[:, 0]
            k = max(1, int(self.capacity * len(ids_T)))
            least = weight_T.topk(k).values[-1]
            runs_T = weight_T > least if k > 1 else weight_T >= least
            done = self.block(layer.block, x_TD[runs_T], position_T[runs_T]) * weight_T[runs_T][:, None]
            x_TD = x_TD.clone()
            x_TD[runs_T] = done
        return self.head(x_TD)

    def save(self, folder: Path, **changes: Any) -> None:
        name = type(self.whole).__name__.replace("ForCausalLM", "MoDForCausalLM")
        super().save(folder, **{"architectures": [name], **changes})


class Dlo(OfTransformers):
    """sigmoid(l) > 0.5 runs; attention is added; the MLP's weight is 0.5 * factor + (sigmoid(l) - 0.5) * gap."""

    def __init__(self, seed: int, rescales: bool = True) -> None:
        super().__init__("Llama", seed)
        self.fields = {
            "is_dlo": [False, True, True], "dlo_capacity": 0.7, "dlo_loss_type": "cos", "scale_factor": 1.5,
            "scale_gap": 0.9, "rescale_hidden_states": rescales, "model_type": "llama_dlo", "gate_init_method": "zero",
            "architectures": ["LlamaDLOForCausalLM"], "dlo_loss_coefficient": 0.1,
        }  # fmt: skip
        width = self.whole.config.hidden_size
        self.whole.model.routers = nn.ModuleList(
            enlivened(nn.Linear(width, 1, bias=False), seed + number) if routed else None
            for number, routed in enumerate(self.fields["is_dlo"])
        )

    def row(self, ids_T: Tensor) -> Tensor:
        x_TD, position_T = self.whole.model.embed_tokens(ids_T), torch.arange(len(ids_T))
        for layer, router in zip(self.whole.model.layers, self.whole.model.routers, strict=True):
            if router is None:
                x_TD = self.block(layer, x_TD, position_T)
                continue
            score_T = router(x_TD)[:, 0].sigmoid()
            runs_T = score_T > 0.5
            chosen = x_TD[runs_T]
            mlp, layer.mlp = layer.mlp, Zero()
            after = self.block(layer, chosen, position_T[runs_T])  # Only attention runs.
            layer.mlp = mlp
            scale_T = 0.5 * self.fields["scale_factor"] + (score_T[runs_T] - 0.5) * self.fields["scale_gap"]
            if not self.fields["rescale_hidden_states"]:
                scale_T = torch.ones_like(scale_T)
            x_TD = x_TD.clone()
            x_TD[runs_T] = after + mlp(layer.post_attention_layernorm(after)) * scale_T[:, None]
        return self.head(x_TD)

    def save(self, folder: Path, **changes: Any) -> None:
        super().save(folder, **{**self.fields, **changes})


class Zero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float = EPS) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


class Adapted(OfTransformers):
    """A model of transformers in which attention sees the keys and values of all tokens, whether they run or not."""

    def attention(self, layer: nn.Module, n_TD: Tensor) -> Tensor:
        angles = self.whole.model.rotary_emb(n_TD[None], torch.arange(len(n_TD))[None])
        return layer.self_attn(n_TD[None], position_embeddings=angles, attention_mask=None)[0][0]

    def layer(self, layer: nn.Module, x_TD: Tensor) -> Tensor:
        """One layer whose tokens all run."""
        h_TD = x_TD + self.attention(layer, layer.input_layernorm(x_TD))
        return h_TD + layer.mlp(layer.post_attention_layernorm(h_TD))

    def routed(self, layer: nn.Module, x_TD: Tensor) -> Tensor:
        raise NotImplementedError

    def row(self, ids_T: Tensor) -> Tensor:
        x_TD = self.whole.model.embed_tokens(ids_T)
        for layer in self.whole.model.layers:
            routes = any("router" in name for name, _ in layer.named_children())
            x_TD = self.routed(layer, x_TD) if routes else self.layer(layer, x_TD)
        return self.head(x_TD)


class FlexiDepth(Adapted):
    """Upper layers: w > 0.5 runs and weighs the MLP by w; others get 1 - w of an adapter, on x without attention."""

    def __init__(self, family: str, seed: int) -> None:
        super().__init__(family, seed)
        config = self.whole.config
        D, H, F_ = config.hidden_size, 12, 20
        for number, layer in enumerate(self.whole.model.layers[1:]):
            layer.router = nn.ModuleDict(
                {"router_enc": nn.Linear(D, H, bias=False), "router_norm": RmsNorm(H, config.rms_norm_eps),
                 "router_dec": nn.Linear(H, D, bias=False), "router_head": nn.Linear(D, 1, bias=False)}
            )  # fmt: skip
            layer.router_proj = nn.ModuleDict(
                {"gate_proj": nn.Linear(D, F_, bias=False), "down_proj": nn.Linear(D, F_, bias=False),
                 "up_proj": nn.Linear(F_, D, bias=False)}
            )  # fmt: skip
            enlivened(layer.router, seed + number)
            enlivened(layer.router_proj, seed + number)

    def routed(self, layer: nn.Module, x_TD: Tensor) -> Tensor:
        n_TD, router, adapter = layer.input_layernorm(x_TD), layer.router, layer.router_proj
        inner = router["router_norm"](router["router_enc"](n_TD)).tanh()
        weight_T1 = router["router_head"](router["router_dec"](inner)).sigmoid()
        runs_T1 = (weight_T1 > 0.5).float()
        h_TD = x_TD + runs_T1 * self.attention(layer, n_TD)
        z_TD = layer.post_attention_layernorm(h_TD)
        small = adapter["up_proj"](layer.mlp.act_fn(adapter["gate_proj"](z_TD)) * adapter["down_proj"](z_TD))
        return h_TD + runs_T1 * weight_T1 * layer.mlp(z_TD) + (1 - runs_T1) * (1 - weight_T1) * small

    def save(self, folder: Path, **changes: Any) -> None:
        family = self.whole.config.model_type
        own = {
            "model_type": f"dd{family}", "architectures": [f"DD{family.capitalize()}ForCausalLM"],
            "router_reduction_factor": 4, "proj_reduction_factor": 4, "routing_layers": [1, 2],
            "auto_map": {"AutoModelForCausalLM": "modeling_ddllama.DDLlamaForCausalLM"},
        }  # fmt: skip
        super().save(folder, **{**own, **changes})


class SkipGptRouter(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden_layer, self.weight_predictor = nn.Linear(width, width // 4), nn.Linear(width // 4, 2)

    def forward(self, x_TD: Tensor) -> Tensor:
        """1 where class 0 is the more probable one, else 0, (T, 1)."""
        return (self.weight_predictor(self.hidden_layer(x_TD).relu()).argmax(-1) == 0).float()[:, None]


class SkipGptLayer(nn.Module):
    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__()
        self.router_attention, self.router_mlp, self.block = SkipGptRouter(width), SkipGptRouter(width), block


class SkipGpt(Adapted):
    """Every layer has two routers, which read what the layer gets; one mask for attention and one for the MLP."""

    def __init__(self, seed: int) -> None:
        super().__init__("Llama", seed)
        for number, layer in enumerate(self.whole.model.layers):
            wrapped = SkipGptLayer(layer, self.whole.config.hidden_size)
            for offset, router in enumerate((wrapped.router_attention, wrapped.router_mlp)):
                enlivened(router, seed + 10 * number + 100 * offset)
                # Streams are small, and ReLU's output is above 0 on average; otherwise all tokens would choose alike.
                router.hidden_layer.weight.data *= 20
                router.weight_predictor.weight.data -= router.weight_predictor.weight.data.mean(1, keepdim=True)
            self.whole.model.layers[number] = wrapped

    def routed(self, layer: nn.Module, x_TD: Tensor) -> Tensor:
        block = layer.block
        h_TD = x_TD + layer.router_attention(x_TD) * self.attention(block, block.input_layernorm(x_TD))
        return h_TD + layer.router_mlp(x_TD) * block.mlp(block.post_attention_layernorm(h_TD))

    def save(self, folder: Path, file: str = "model.pth", **changes: Any) -> None:
        super().save(folder, **changes)
        (folder / "model.safetensors").unlink()
        torch.save(self.whole.state_dict(), folder / file)


class MindSkip(Adapted):
    """sigmoid(l) >= threshold of the normed stream decides about attention, the block or the MLP of two layers."""

    def __init__(self, family: str, seed: int, granularity: str, threshold: float = 0.5) -> None:
        super().__init__(family, seed)
        self.fields = {
            "is_mod": [True, False, True], "granularity": granularity, "threshold": threshold, "mod_capacity": 0.6,
            "gradient_scale": 0.1, "router_layers": 2,
        }  # fmt: skip
        for number in (0, 2):
            router = nn.Linear(self.whole.config.hidden_size, 1, bias=False)
            self.whole.model.layers[number].router = enlivened(router, seed + number + 1)

    def routed(self, layer: nn.Module, x_TD: Tensor) -> Tensor:
        n_TD, part = layer.input_layernorm(x_TD), self.fields["granularity"].split("_")[0]
        runs_T1 = (layer.router(n_TD).sigmoid() >= self.fields["threshold"]).float()
        attention_TD = self.attention(layer, n_TD)
        h_TD = x_TD + (runs_T1 if part == "attn" else 1) * attention_TD
        mlp_TD = layer.mlp(layer.post_attention_layernorm(h_TD))
        out_TD = h_TD + (runs_T1 if part == "mlp" else 1) * mlp_TD
        return x_TD + runs_T1 * (out_TD - x_TD) if part == "block" else out_TD

    def save(self, folder: Path, **changes: Any) -> None:
        super().save(folder, **{**self.fields, **changes})


class PModLayer(nn.Module):
    def __init__(self, layer: nn.Module, width: int, bias: bool) -> None:
        super().__init__()
        self.decoder_layer, self.router = layer, nn.ModuleDict({"router": nn.Linear(width, 1, bias=bias)})


class PMod(Adapted):
    """Layers wrapped beside routers of image tokens, which do nothing to text; a projector, and a vision tower."""

    def __init__(self, seed: int, bias: bool = True) -> None:
        super().__init__("Llama", seed)
        model, width = self.whole.model, self.whole.config.hidden_size
        for number in (1, 2):
            model.layers[number] = PModLayer(model.layers[number], width, bias)
        model.mm_projector = nn.Sequential(nn.Linear(20, width), nn.GELU(), nn.Linear(width, width))
        model.vision_tower = nn.ModuleDict({"vision_tower": nn.Linear(12, 20)})
        model.image_newline = nn.Parameter(torch.ones(width))

    def routed(self, layer: nn.Module, x_TD: Tensor) -> Tensor:
        return self.layer(layer.decoder_layer, x_TD)

    def save(self, folder: Path, **changes: Any) -> None:
        own = {
            "model_type": "pmod_llava_llama", "architectures": ["PmodLlavaLlamaForCausalLM"],
            "mod_target_layers": "shiftedcos_decay_0.85_0.15", "mod_router_factor": 0.5, "mod_bias_enabled": True,
            "mod_weight_norm": "tanh_0.2_1", "mm_vision_tower": "openai/clip", "mm_hidden_size": 20,
            "use_mm_proj": True, "image_aspect_ratio": "anyres", "image_grid_pinpoints": [[336, 672]],
            "max_num_patches": 5, "tokenizer_padding_side": "right", "tokenizer_model_max_length": 4096,
            "tune_mm_mlp_adapter": False, "freeze_mm_mlp_adapter": False, "unfreeze_mm_vision_tower": True,
        }  # fmt: skip
        super().save(folder, **{**own, **changes})


def turned(x_THE: Tensor) -> Tensor:
    """Takes neighbouring numbers as complex, and rotates them by the token's number times 10000 ** (-2 i / E)."""
    T, _, E = x_THE.shape
    angle = torch.arange(T)[:, None].float() * 10000.0 ** (-torch.arange(0, E, 2).float() / E)
    pairs = torch.view_as_complex(x_THE.reshape(T, -1, E // 2, 2)) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.view_as_real(pairs).flatten(2)


def attended(q_TF: Tensor, k_TF: Tensor, v_TF: Tensor, kv_heads: int, seen_T: Tensor | None = None) -> Tensor:
    """Causal attention of a row, which hides keys that are not in `seen_T`. Heads are concatenated in and out."""
    T, E = len(q_TF), q_TF.shape[1] // HEADS
    q, k, v = (x.view(T, -1, E) for x in (q_TF, k_TF, v_TF))
    q, k = turned(q), turned(k)
    k, v = (x.repeat_interleave(HEADS // kv_heads, 1) for x in (k, v))
    score = torch.einsum("qhe,khe->hqk", q, k) / math.sqrt(E)
    score = score + torch.full((T, T), -torch.inf).triu(1)
    if seen_T is not None:
        score = score + torch.where(seen_T, 0.0, -torch.inf)
    return torch.einsum("hqk,khe->qhe", score.softmax(-1).nan_to_num(), v).flatten(1)


class OharaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("key", "query", "value")})
        self.attn["proj"] = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ff = nn.ModuleDict({"up": nn.Linear(WIDTH, 80, bias=False), "gate": nn.Linear(WIDTH, 80, bias=False)})
        self.ff["down"] = nn.Linear(80, WIDTH, bias=False)
        self.norm1, self.norm2 = RmsNorm(WIDTH), RmsNorm(WIDTH)

    def forward(self, x_TD: Tensor) -> Tensor:
        n = self.norm1(x_TD)
        # Its keys act as queries, and its queries as keys.
        asks, answers, value = self.attn["key"](n), self.attn["query"](n), self.attn["value"](n)
        h = x_TD + self.attn["proj"](attended(asks, answers, value, HEADS))
        n = self.norm2(h)
        return h + self.ff["down"](F.silu(self.ff["gate"](n)) * self.ff["up"](n))


class OharaRouted(nn.Module):
    def __init__(self, capacity: float) -> None:
        super().__init__()
        self.capacity = capacity
        self.transformer_decoder_block = OharaBlock()
        self.router = nn.Linear(WIDTH, 1, bias=False)
        self.aux_router = nn.Sequential(nn.Linear(WIDTH, WIDTH // 2), nn.SiLU(), nn.Linear(WIDTH // 2, 1))

    def forward(self, x_TD: Tensor) -> Tensor:
        value, index = self.router(x_TD)[:, 0].topk(int(len(x_TD) * self.capacity))
        weight = value.softmax(0)
        out = x_TD.clone()
        order = index.argsort()
        out[index[order]] += weight[order, None] * self.transformer_decoder_block(x_TD[index[order]])
        return out


class Ohara(ByRow):
    """Even layers are routed; the softmax over k scores weighs a whole block, which is added; positions 0 to k - 1."""

    def __init__(self, seed: int, capacity: float = 0.3) -> None:
        super().__init__()
        self.fields: dict[str, Any] = {
            "vocab_size": VOCABULARY, "seq_len": 64, "d_model": WIDTH, "hidden_dim": 80, "num_heads": HEADS,
            "num_kv_heads": 0, "num_layers": LAYERS, "dropout": 0.2, "multiple_of": 4, "bias": False,
            "capacity_factor": capacity, "ffn": "swiglu", "mixture_of_expert": False, "moe_num_experts": 4,
            "moe_num_experts_per_tok": 2, "mixture_of_depth": True, "weight_tying": True, "window_size": 128,
            "model_type": {"mixture_of_depth": True, "name": "mixture of depth"},
        }  # fmt: skip
        self.model = nn.Module()
        self.model.token_emb = nn.Embedding(VOCABULARY, WIDTH)
        self.model.layers = nn.ModuleList(
            OharaRouted(capacity) if number % 2 == 0 else OharaBlock() for number in range(LAYERS)
        )
        self.model.norm = RmsNorm(WIDTH)
        self.model.vocab_proj = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.model.token_emb.weight = self.model.vocab_proj.weight
        self.model.register_buffer("mask", torch.full((1, 1, 64, 64), -torch.inf).triu(1))
        enlivened(self, seed)

    def row(self, ids_T: Tensor) -> Tensor:
        x_TD = self.model.token_emb(ids_T)
        for layer in self.model.layers:
            x_TD = layer(x_TD)
        return self.model.vocab_proj(self.model.norm(x_TD))

    def save(self, folder: Path, kept: Iterable[str] = ("model.vocab_proj.weight",), **changes: Any) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.fields | changes))
        shared = {"model.vocab_proj.weight", "model.token_emb.weight"} - set(kept)
        save_file(
            {name: tensor.clone() for name, tensor in self.state_dict().items() if name not in shared},
            folder / "model.safetensors",
        )


class MetaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = WIDTH * KV_HEADS // HEADS
        self.attention = nn.ModuleDict(
            {name: nn.Linear(WIDTH, rows, bias=False) for name, rows in
             {"wq": WIDTH, "wk": inner, "wv": inner, "wo": WIDTH}.items()}
        )  # fmt: skip
        # 2 / 3 of 4 * 48 is 128, and the next multiple of 24 is 144.
        self.feed_forward = nn.ModuleDict(
            {"w1": nn.Linear(WIDTH, 144, bias=False), "w3": nn.Linear(WIDTH, 144, bias=False)}
        )
        self.feed_forward["w2"] = nn.Linear(144, WIDTH, bias=False)
        self.attention_norm, self.ffn_norm = RmsNorm(WIDTH), RmsNorm(WIDTH)

    def attends(self, x_TD: Tensor, seen_T: Tensor | None = None) -> Tensor:
        n = self.attention_norm(x_TD)
        q, k, v = (self.attention[name](n) for name in ("wq", "wk", "wv"))
        return self.attention["wo"](attended(q, k, v, KV_HEADS, seen_T))

    def feeds(self, x_TD: Tensor) -> Tensor:
        n, mlp = self.ffn_norm(x_TD), self.feed_forward
        return mlp["w2"](F.silu(mlp["w1"](n)) * mlp["w3"](n))


class Meta(ByRow):
    """The parts of Meta's own Llama 2 code around the blocks."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        self.fields = {
            "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "vocab_size": -1,
            "multiple_of": 24, "norm_eps": EPS, **fields,
        }  # fmt: skip
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(MetaBlock() for _ in range(LAYERS))
        self.norm, self.output = RmsNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def written(self, folder: Path, changes: dict[str, Any]) -> None:
        folder.mkdir()
        fields = {name: value for name, value in (self.fields | changes).items() if value is not ...}
        (folder / "params.json").write_text(json.dumps(fields))


class Sramshetty(Meta):
    """One router for odd layers; sigmoid(l) weighs the MLP, x + A + g M is added to x; positions 0 to k - 1."""

    tokens = 11

    def __init__(self, seed: int, auxiliary: bool = False) -> None:
        super().__init__(
            {"routing": 1, "aux_routing": int(auxiliary), "capacity": self.tokens, "router_skip_blocks": 2,
             "aux_loss": 0}
        )  # fmt: skip
        self.router = nn.Linear(WIDTH, 1, bias=False)
        enlivened(self, seed)
        for layer in self.layers:
            layer.router = self.router
            if auxiliary:
                layer.aux_router = nn.Sequential(
                    nn.Linear(WIDTH, 24, bias=False), nn.SiLU(), nn.Linear(24, 1, bias=False)
                )

    def row(self, ids_T: Tensor) -> Tensor:
        x_TD = self.tok_embeddings(ids_T)
        for number, layer in enumerate(self.layers):
            if number % 2 == 0:
                h = x_TD + layer.attends(x_TD)
                x_TD = h + layer.feeds(h)
                continue
            score_T = self.router(x_TD)[:, 0].sigmoid()
            index = score_T.topk(min(len(ids_T), self.tokens)).indices.sort().values
            h = x_TD[index] + layer.attends(x_TD[index])
            x_TD = x_TD.index_add(0, index, h + score_T[index, None] * layer.feeds(h))
        return self.output(self.norm(x_TD))

    def save(self, folder: Path, **changes: Any) -> None:
        self.written(folder, changes)
        torch.save(self.state_dict(), folder / "checkpoint_epoch-0.pth")


class DllmRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_1, self.norm, self.linear_2 = nn.Linear(WIDTH, 20), RmsNorm(20), nn.Linear(20, 2)

    def forward(self, x_TD: Tensor) -> Tensor:
        p = self.linear_2(F.silu(self.norm(self.linear_1(x_TD)))).softmax(-1)
        return torch.where(p < 0.5, 0.0, 1.0)[:, 1]


class DLlm(Meta):
    """From layer 2 on, all tokens are computed; tokens of class 0 are hidden from the others, then restored."""

    def __init__(self, seed: int) -> None:
        super().__init__(
            {"lora_rank": 3, "dynamic_active_target": 0.6, "dynamic_start_layer": 2, "dynamic_router_hdim": 20,
             "dynamic_reserve_initials": 2}
        )  # fmt: skip
        for layer in self.layers[2:]:
            layer.router = DllmRouter()
        enlivened(self, seed)
        for layer in self.layers[2:]:
            # SiLU's output is above 0 on average; without this, most tokens would choose one class.
            layer.router.linear_2.weight.data -= layer.router.linear_2.weight.data.mean(1, keepdim=True)
        self.seed = seed

    def row(self, ids_T: Tensor) -> Tensor:
        x_TD = self.tok_embeddings(ids_T)
        for number, layer in enumerate(self.layers):
            runs_T = torch.ones(len(ids_T)) if number < 2 else layer.router(x_TD)
            runs_T[:2] = 1
            h = x_TD + layer.attends(x_TD, runs_T.bool())
            out = h + layer.feeds(h)
            x_TD = out * runs_T[:, None] + x_TD * (1 - runs_T[:, None])
        return self.output(self.norm(x_TD))

    def save(self, folder: Path, lora: bool = True, **changes: Any) -> None:
        """Writes Llama without LoRA to one file, and what was trained, routers and LoRA, to another."""
        self.written(folder, changes)
        state = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        trained: dict[str, Any] = {name: state.pop(name) for name in list(state) if "router" in name}
        generator = torch.Generator().manual_seed(self.seed)
        for number in range(LAYERS if lora else 0):
            for letter in "qkv":
                weight = state[f"layers.{number}.attention.w{letter}.weight"]
                A, B = (torch.randn(shape, generator=generator) * 0.2 for shape in ((3, WIDTH), (len(weight), 3)))
                trained[f"layers.{number}.attention.lora_{letter}.linear_A.weight"] = A
                trained[f"layers.{number}.attention.lora_{letter}.linear_B.weight"] = B
                weight -= B @ A
        torch.save(state | {"rope.freqs": torch.ones(6)}, folder / "consolidated.00.pth")
        torch.save({"epoch": 3, "model": trained, "optimizer": None}, folder / "checkpoint-3.pth")
