"""The next-token loss in chunks has the values and the gradients of the plain formula."""

import pytest
import torch
from torch.nn import functional

from mod_models.train import losses
from mod_models.train.losses import Teacher, next_token_loss

N, D, V = 13, 6, 11


def plain(hidden, head, target, teacher, distill):
    logits = functional.linear(hidden, head)
    cross_entropy = functional.cross_entropy(logits, target)
    if teacher is None:
        return cross_entropy, cross_entropy, torch.zeros(())
    taught = functional.log_softmax(functional.linear(teacher.hidden_ND, teacher.head_VD), -1)
    divergence = functional.kl_div(functional.log_softmax(logits, -1), taught, log_target=True, reduction="batchmean")
    return cross_entropy + distill * divergence, cross_entropy, divergence


def some(dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    hidden, head, other, other_head = (
        torch.randn(*size, generator=generator, dtype=dtype) for size in ((N, D), (V, D), (N, D + 1), (V, D + 1))
    )
    target = torch.randint(0, V, (N,), generator=generator)
    return hidden.requires_grad_(), head.requires_grad_(), target, Teacher(other, other_head)


@pytest.mark.parametrize("chunk", [1, 4 * V, 5 * V + 1, 10**9])
@pytest.mark.parametrize("taught", [True, False])
def test_numbers_and_gradients(monkeypatch: pytest.MonkeyPatch, chunk: int, taught: bool) -> None:
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk)
    hidden, head, target, other = some()
    teacher = other if taught else None
    expected, found = plain(hidden, head, target, teacher, 0.7), next_token_loss(hidden, head, target, teacher, 0.7)
    for one, two in zip(expected, found, strict=True):
        torch.testing.assert_close(two.detach(), one.detach().to(two.dtype))
    wanted = torch.autograd.grad(3 * expected[0], [hidden, head])
    for one, two in zip(wanted, torch.autograd.grad(3 * found.objective, [hidden, head]), strict=True):
        torch.testing.assert_close(two, one)


@pytest.mark.parametrize("frozen", [0, 1])
def test_no_gradient_of_what_is_frozen(frozen: int) -> None:
    inputs = list(some(torch.float32)[:3])
    inputs[frozen] = inputs[frozen].detach()
    next_token_loss(*inputs).objective.backward()
    assert inputs[frozen].grad is None
    assert inputs[1 - frozen].grad is not None


def test_without_gradients_none_is_computed() -> None:
    hidden, head, target, teacher = some(torch.float32)
    with torch.no_grad():
        found = next_token_loss(hidden, head, target, teacher, 1.0)
    assert not found.objective.requires_grad
    assert float(found.objective) == pytest.approx(float(found.cross_entropy) + float(found.divergence))


def test_16_bit_products_with_a_float32_loss() -> None:
    hidden, head, target, _ = some(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = next_token_loss(hidden, head, target)
    exact = plain(hidden, head, target, None, 0.0)[0]
    assert found.objective.dtype == torch.float32
    assert float(found.objective.detach()) == pytest.approx(float(exact.detach()), rel=0.02)
    assert float(found.objective.detach()) != float(exact.detach())
    found.objective.backward()
    assert hidden.grad.dtype == head.grad.dtype == torch.float32


def test_large_logits_are_finite() -> None:
    hidden = torch.full((2, 1), 1e4, requires_grad=True)
    found = next_token_loss(hidden, torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 1]))
    assert float(found.objective.detach()) == 1e4
    found.objective.backward()
    assert bool(hidden.grad.isfinite().all())
