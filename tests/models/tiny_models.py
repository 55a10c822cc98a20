"""Models small enough to run by the hundred, with weights large enough that every declaration affects the logits."""

import dataclasses
import functools

import torch

from mod_models.checkpoint import Checkpoint, random_checkpoint
from mod_models.spec import ModelSpec, RoutingSpec


def make_spec(**changes: object) -> ModelSpec:
    routing_names = {field.name for field in dataclasses.fields(RoutingSpec)}
    routing = RoutingSpec(
        **{
            "layers": (0, 2), "router_hidden": 3, "gate_scale": 0.7, "gate_shift": 0.4, "capacity": 0.375,
            "capacity_rule": "floor", **{name: value for name, value in changes.items() if name in routing_names},
        }
    )  # fmt: skip
    sizes = {
        "vocab_size": 16, "d_model": 8, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "d_head": 4, "d_ff": 12,
        "max_positions": 16, "routing": routing,
    }  # fmt: skip
    return ModelSpec(**{**sizes, **{name: value for name, value in changes.items() if name not in routing_names}})


def lively_checkpoint(spec: ModelSpec, seed: int = 0) -> Checkpoint:
    """A checkpoint whose weights are so large that every declaration affects the logits; initial weights hide most."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in _shapes(spec).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.3 * noise
        elif name == "embedding.weight" or name.endswith("bias"):
            weights[name] = noise
        else:
            weights[name] = noise / shape[-1] ** 0.5
    return Checkpoint(spec=spec, weights=weights)


@functools.cache
def _shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """Shapes of all weights. Making a module takes far longer than drawing its weights."""
    return {name: tensor.shape for name, tensor in random_checkpoint(spec, 0).weights.items()}


def distinct_ids(spec: ModelSpec, batch: int, seq: int) -> torch.Tensor:
    """No id occurs twice in a row: equal tokens have equal scores, and other tests cover ties."""
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randperm(spec.vocab_size, generator=generator)[:seq] for _ in range(batch)])
