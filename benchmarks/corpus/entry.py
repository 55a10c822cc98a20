"""One model of the corpus: the class, how to make it small, where its blocks are, and how they are routed."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.corpus.routers import Routed

ROWS, TOKENS, WIDTH = 2, 32, 64
"""Bucket of most entries, and the width of their residual stream. No other dimension of a small model is 32."""
NOISE = 0.02
"""Standard deviation of the noise added to every weight. Without noise, a lost bias of zeros would change nothing."""
Inputs: TypeAlias = "dict[str, Any] | tuple[Any, ...]"
"""Arguments of forward, by name or in order: tensors, tuples of tensors, and constant numbers."""


@dataclass(frozen=True)
class Entry:
    """A model class.

    Attributes:
        package: name of the package on PyPI.
        of: name of the class.
        make: returns a small model of the class with initial weights.
        inputs: (rows, tokens) -> arguments of forward, drawn from torch's generator.
        blocks: patterns of module names, separated by spaces. Every other block that matches a pattern is routed. A
            manner that routes parts of a block lists their names after a colon: `model.layers.*:self_attn,mlp`. A
            pattern without a star is the name of one routed block.
        manner: class of the router.
        variant: distinguishes the entry from others of the same class.
        tokens: number of tokens that the blocks see in one row.
        width: width of the residual stream.
        dim: dimension of the tokens in the block's input.
        hidden: name of the block's input, for models that pass it by keyword.
        handed_on: pairs (place in the tuple that the block returns, place among its other positional arguments). The
            router returns that argument, which has all tokens, at that place: the position bias of T5.
        refused: part of the message for a class that is no static graph; empty for a class that must pass.
    """

    package: str
    of: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], Inputs]
    blocks: str
    manner: type[Routed]
    variant: str = ""
    tokens: int = TOKENS
    width: int = WIDTH
    dim: int = 1
    hidden: str = "hidden_states"
    handed_on: tuple[tuple[int, int], ...] = ()
    refused: str = ""

    @property
    def name(self) -> str:
        return f"{self.package}.{self.of}" + (f":{self.variant.replace(' ', '-')}" if self.variant else "")

    def build(self) -> nn.Module:
        """Returns the routed model in eval mode, with the same weights every time."""
        torch.manual_seed(0)
        model = self.make().eval()
        for name in self.routed_names(model):
            parent, _, last = name.rpartition(".")
            owner = model.get_submodule(parent)
            router = self.manner(getattr(owner, last), self.width, self.dim, self.hidden, self.handed_on)
            setattr(owner, last, router.eval())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter), alpha=NOISE)
        return model

    def routed_names(self, model: nn.Module) -> list[str]:
        """Names of the modules that are routed: every other block, or parts of it."""
        routed = []
        for blocks in self.blocks.split():
            pattern, _, parts = blocks.partition(":")
            depth = pattern.count(".")
            named = [name for name, _ in model.named_modules() if name.count(".") == depth]
            names = fnmatch.filter(named, pattern)[1::2] if "*" in pattern else [pattern]
            routed += [f"{name}.{part}" if part else name for name in names for part in parts.split(",")]
        return routed


def routed_calls(model: nn.Module, inputs: Inputs) -> list[tuple[int, int]]:
    """Runs the model once, and returns for every call of a router (tokens that it selected from, tokens of its block).

    A block that the model calls several times is in the list as often.
    """
    calls: list[tuple[int, int]] = []
    streams: list[int] = []
    hooks = []
    for router in [module for module in model.modules() if isinstance(module, Routed)]:

        def at_router(_module: nn.Module, args: tuple[Any, ...], dim: int = router.dim) -> None:
            streams.append(args[0].shape[dim])

        def at_block(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], router: Routed = router
        ) -> None:
            block_input = args[0] if args else kwargs[router.hidden]
            calls.append((streams.pop(), block_input.shape[router.block_dim]))

        hooks.append(router.router.register_forward_pre_hook(at_router))
        hooks.append(router.computes.register_forward_pre_hook(at_block, with_kwargs=True))
    eager(model, inputs)
    for hook in hooks:
        hook.remove()
    return calls


def eager(model: nn.Module, inputs: Inputs) -> list[np.ndarray]:
    """Every tensor that the module returns."""
    with torch.no_grad():
        outputs = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return [leaf.numpy() for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
