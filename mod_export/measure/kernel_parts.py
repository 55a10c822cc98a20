"""Which part of the model a kernel belongs to, by what its engine calls it.

Runtimes rename what they fuse, so a kernel is looked for in this order: a node of its name; the weights that it is
known to read; the longest name of a node that its own is made from; an operator that can belong to one part only; the
words of the name that a compiler made from the operators it fused. A generated kernel often holds several parts. It
counts as a whole for the first of routing, norms, embedding and elementwise that it has anything of.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from mod_export.artifacts import Kernel, Profile
from mod_export.measure.node_parts import part_of_operator
from mod_export.measure.products import part_of_weight

__all__ = ["ms_by_part", "part_of_kernel"]

GENERATED = "cpp_fused_"
WORDS: Mapping[str, frozenset[str]] = {
    "attention": frozenset({"attention", "bmm", "softmax"}),
    "routing": frozenset(
        {"cumsum", "gather", "index", "lt", "nonzero", "scatter", "sort", "topk", "where"},
    ),
    "norms": frozenset({"norm", "rsqrt"}),
    "embedding": frozenset({"embedding"}),
}


def ms_by_part(profile: Profile, part_of_node: Mapping[str, str]) -> dict[str, float]:
    """Milliseconds of each part that any kernel belongs to; `part_of_node` gives the part of the nodes of the graph."""
    found: dict[str, float] = defaultdict(float)
    for kernel in profile.kernels:
        found[part_of_kernel(kernel, part_of_node)] += kernel.ms
    return dict(found)


def part_of_kernel(kernel: Kernel, part_of_node: Mapping[str, str]) -> str:
    """The part of one kernel; `other` where nothing tells."""
    if kernel.name in part_of_node:
        return part_of_node[kernel.name]
    # A generated kernel reads the weights of norms and tables, which say little about what it is.
    if kernel.weights and not kernel.name.startswith(GENERATED):
        return part_of_weight(kernel.weights)
    origin = next((name for name in _origins(kernel.name) if name in part_of_node), None)
    if origin is not None:
        return part_of_node[origin]
    return part_of_operator(kernel.operator) or _part_of_words(kernel.name)


def _origins(name: str) -> Iterable[str]:
    """Names of nodes that a fused node may be made from, longest first: `a/b/Fusion/` from a/b, `fused a` from a."""
    words = name.removeprefix("fused ").strip("/").split("/")
    return ("/".join(words[:length]) for length in range(len(words), 0, -1))


def _part_of_words(name: str) -> str:
    words = set(re.split(r"[^a-z]+", name))
    by_word = next((part for part, known in WORDS.items() if words & known), None)
    return by_word or ("elementwise" if name.startswith(GENERATED) else "other")
