"""One model of the corpus: a class of a package, how it is made small, where its blocks are, how they are routed."""

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
"""The bucket of most entries, and the width of their stream. No other dimension of a small model is 32."""
NOISE = 0.02
"""Standard deviation that is added to every weight: biases of zeros and scales of ones would hide that one was lost."""
Inputs: TypeAlias = "dict[str, Any] | tuple[Any, ...]"
"""What forward takes, by name or in order: tensors, tuples of them, and numbers that are constants."""


@dataclass(frozen=True)
class Entry:
    """A model class.

    Attributes:
        package: of PyPI.
        of: name of the class.
        make: returns it, small and with initial weights.
        inputs: (rows, tokens) -> what its forward takes, drawn from torch's generator.
        blocks: pattern of the names of its blocks, of which every other one is routed. Of a manner that routes parts of
            a block, names of the parts below it follow, behind a colon: `model.layers.*:self_attn,mlp`. Several such
            patterns stand with spaces between them. One without a star is the name of a block that is routed.
        manner: the router.
        variant: what distinguishes it from another entry of the same class.
        tokens: that the blocks see in one row.
        width: of the stream.
        dim: the dimension of the tokens in what a block takes.
        hidden: name of the block's argument, where it is given by name.
        handed_on: (place in the tuple that a block returns, place of the argument behind the stream that it hands
            there to the next block, which sees all tokens again: the position bias of T5.
        refused: part of the sentence that is said of a class that is no static graph; empty of one that must pass.
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
        """The routed model in eval mode, the same every time."""
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
        """Of every other block, or of its parts that are routed."""
        found = []
        for blocks in self.blocks.split():
            pattern, _, parts = blocks.partition(":")
            depth = pattern.count(".")
            named = [name for name, _ in model.named_modules() if name.count(".") == depth]
            names = fnmatch.filter(named, pattern)[1::2] if "*" in pattern else [pattern]
            found += [f"{name}.{part}" if part else name for name in names for part in parts.split(",")]
        return found


def routed_calls(model: nn.Module, inputs: Inputs) -> list[tuple[int, int]]:
    """Of one run: for every call of a router, how many tokens it selected from and how many the block was given.

    A block that a model calls several times counts as often.
    """
    found: list[tuple[int, int]] = []
    streams: list[int] = []
    hooks = []
    for router in [module for module in model.modules() if isinstance(module, Routed)]:

        def at_router(_module: nn.Module, args: tuple[Any, ...], dim: int = router.dim) -> None:
            streams.append(args[0].shape[dim])

        def at_block(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], router: Routed = router
        ) -> None:
            given = args[0] if args else kwargs[router.hidden]
            found.append((streams.pop(), given.shape[router.block_dim]))

        hooks.append(router.router.register_forward_pre_hook(at_router))
        hooks.append(router.computes.register_forward_pre_hook(at_block, with_kwargs=True))
    eager(model, inputs)
    for hook in hooks:
        hook.remove()
    return found


def eager(model: nn.Module, inputs: Inputs) -> list[np.ndarray]:
    """Every tensor that the module returns."""
    with torch.no_grad():
        outputs = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return [leaf.numpy() for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
