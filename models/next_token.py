"""Next-token loss for a large vocabulary, which never holds the logits of all tokens at once.

512 tokens with a vocabulary of 49,152 have 100 MB of logits, and a plain cross entropy keeps several copies of them for
its backward pass. Here the head runs on one chunk of tokens at a time. The gradients of the hidden states and of the
head are computed together with the loss (as in Liger, Hsu et al., arXiv 2410.10989).

Shape legend: N tokens of a batch, C tokens of a chunk, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

CHUNK_ELEMENTS = 2**24
"""Number of logits in memory at once, 64 MiB in float32."""


class Teacher(NamedTuple):
    """The model to distil from: its hidden states (N, D) and its head (V, D), without gradients."""

    hidden_ND: Tensor
    head_VD: Tensor


class NextToken(NamedTuple):
    """The losses of N tokens, float32 scalars.

    Attributes:
        objective: `cross_entropy + distill * divergence`, with a gradient.
        cross_entropy: mean cross entropy of the next tokens in nats, without a gradient.
        divergence: KL(teacher || model), mean in nats, without a gradient; 0 without a teacher.
    """

    objective: Tensor
    cross_entropy: Tensor
    divergence: Tensor


def next_token_loss(
    hidden_ND: Tensor, head_VD: Tensor, target_N: Tensor, teacher: Teacher | None = None, distill: float = 0.0
) -> NextToken:
    """Computes the cross entropy of the targets, int64 (N,), and the divergence from the teacher if there is one.

    Under autocast, products with the head run in the autocast dtype; softmax and sums are at least float32.
    """
    learning = torch.is_grad_enabled()
    outputs = _InChunks.apply(hidden_ND, head_VD, target_N, teacher, distill, learning)  # type: ignore[no-untyped-call]
    return NextToken(*outputs)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_VD: Tensor, target_N: Tensor, teacher: Teacher | None, distill: float,
        learning: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        exact = torch.promote_types(hidden_ND.dtype, torch.float32)
        wanted = [needed and learning for needed in ctx.needs_input_grad[:2]]
        d_hidden_ND = torch.empty_like(hidden_ND) if wanted[0] else None
        d_head_VD = torch.zeros_like(head_VD) if wanted[1] else None
        nats = torch.zeros(2, dtype=exact, device=hidden_ND.device)
        step, tokens = max(1, CHUNK_ELEMENTS // len(head_VD)), len(hidden_ND)
        for begin in range(0, tokens, step):
            part = slice(begin, begin + step)
            log_p_CV = torch.log_softmax(functional.linear(hidden_ND[part], head_VD).to(exact), -1)
            target_C1 = target_N[part, None]
            nats[0] -= log_p_CV.gather(1, target_C1).sum()
            p_teacher_CV = None
            if teacher is not None:
                log_t_CV = torch.log_softmax(functional.linear(teacher.hidden_ND[part], teacher.head_VD).to(exact), -1)
                p_teacher_CV = log_t_CV.exp()
                nats[1] += (p_teacher_CV * log_t_CV.sub_(log_p_CV)).sum()
            if any(wanted):
                # Gradients of the means: cross entropy p - onehot(target), divergence p - p_teacher.
                d_logits_CV = log_p_CV.exp_().mul_(1 + distill if p_teacher_CV is not None else 1)
                d_logits_CV.scatter_add_(1, target_C1, torch.full_like(target_C1, -1, dtype=exact))
                if p_teacher_CV is not None:
                    d_logits_CV.sub_(p_teacher_CV, alpha=distill)
                d_logits_CV /= tokens
                if d_hidden_ND is not None:
                    d_hidden_ND[part] = torch.matmul(d_logits_CV, head_VD)
                if d_head_VD is not None:
                    d_head_VD += torch.matmul(d_logits_CV.T, hidden_ND[part])
        cross_entropy, divergence = nats / max(1, tokens)
        ctx.save_for_backward(*(gradient for gradient in (d_hidden_ND, d_head_VD) if gradient is not None))
        ctx.wanted = wanted
        ctx.mark_non_differentiable(cross_entropy, divergence)
        return cross_entropy + distill * divergence, cross_entropy, divergence

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        gradients = [saved.pop(0) * given[0] if wanted else None for wanted in ctx.wanted]
        return (*gradients, None, None, None, None)
