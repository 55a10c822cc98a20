"""Stage generation: prefill and decode graphs, what runs them, and the evidence that they write what the model writes.

Graphs of a prompt bucket read a text at once and leave a cache; those of a decode bucket read one token of each row.
All of them have the weights of the other graphs, in the same files.
"""

from __future__ import annotations

from mod_export.plan import GenerationPlan
from mod_export.stages.context import Context
from mod_export.stages.generation.engines import build_decoding, keep_tokenizer
from mod_export.stages.generation.evidence import judge_decoding
from mod_export.stages.generation.speed import measure_decoding
from mod_export.workspace import Step

__all__ = ["generation"]


def generation(context: Context) -> list[Step]:
    """Everything about writing text; for a model that does not, what its ids stand for."""
    plan, steps = context.plan.generation, keep_tokenizer(context)
    if not isinstance(plan, GenerationPlan):
        return steps
    return [*steps, *build_decoding(context, plan), *judge_decoding(context, plan), *measure_decoding(context, plan)]
