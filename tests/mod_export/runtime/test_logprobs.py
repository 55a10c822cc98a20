"""Log probabilities of new tokens and of prompts equal the eager model's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from writing import WINDOW, prompts_of_lengths

from mod_export.errors import TooLongError, UsageError
from mod_export.model.model import GeneratingModel
from mod_export.runtime.generator import Generator
from mod_export.runtime.logits import log_softmax, logprob_of

PRECISE = 2e-4


def eager_logprobs(writer: GeneratingModel, ids: list[int]) -> np.ndarray:
    """Log probabilities of the token after each position, float64 (S, V)."""
    ids_1S = torch.tensor([ids])
    with torch.no_grad():
        logits_1SV, *_ = writer.whole_rows.module()(ids_1S, torch.tensor([len(ids)]))
    return log_softmax(logits_1SV[0].numpy())


def test_of_new_tokens(generator: Generator, writer: GeneratingModel) -> None:
    (prompt,) = prompts_of_lengths([5])
    (found,) = generator.generate([prompt], 12, logprobs=3)
    expected_SV = eager_logprobs(writer, [*prompt, *found.ids])[len(prompt) - 1 : -1]
    assert [token.token for token in found.logprobs] == found.ids
    for token, expected_V in zip(found.logprobs, expected_SV, strict=True):
        assert token.logprob == pytest.approx(expected_V[token.token], abs=PRECISE)
        assert [value for _, value in token.top] == pytest.approx(np.sort(expected_V)[:-4:-1], abs=PRECISE)
        assert token.top[0] == (token.token, token.logprob)  # The text is greedy.
    assert generator.generate([prompt], 3)[0].logprobs == []


@pytest.mark.parametrize("length", [1, 9, WINDOW])
def test_of_a_prompt_alone(generator: Generator, writer: GeneratingModel, length: int) -> None:
    """Every token but the first has one, with any prefill engines; nothing is written."""
    (prompt,) = prompts_of_lengths([length], seed=length)
    (found,) = generator.generate([prompt], 0, prompt_logprobs=True)
    assert (found.ids, found.finish, found.first_token_s) == ([], "length", None)
    expected_SV = eager_logprobs(writer, prompt)
    assert [token.token for token in found.prompt_logprobs] == prompt[1:]
    for token, expected_V in zip(found.prompt_logprobs, expected_SV[:-1], strict=True):
        assert token.logprob == pytest.approx(expected_V[token.token], abs=PRECISE)


def test_a_prompt_that_is_too_long_to_be_scored(generator: Generator) -> None:
    """Every token of the prompt is read; when a text is written, its last token is not."""
    with pytest.raises(TooLongError, match=f"a text of {WINDOW + 1} tokens"):
        generator.generate([[1] * (WINDOW + 1)], 0, prompt_logprobs=True)
    assert generator.generate([[1] * WINDOW], 1)[0].ids


def test_a_scored_prompt_is_continued_as_another_one_is(generator: Generator) -> None:
    prompts = prompts_of_lengths([3, 12, 7, 16])
    scored = generator.generate(prompts, 9, prompt_logprobs=True, logprobs=1)
    assert [text.ids for text in scored] == [text.ids for text in generator.generate(prompts, 9)]
    assert [len(text.prompt_logprobs) for text in scored] == [2, 11, 6, 15]


def test_temperature_and_cuts_change_no_logprob(generator: Generator) -> None:
    (prompt,) = prompts_of_lengths([5])
    (found,) = generator.generate([prompt], 1, temperature=5.0, top_k=2, logprobs=4, seed=1)
    (greedy,) = generator.generate([prompt], 1, logprobs=4)
    assert found.logprobs[0].top == greedy.logprobs[0].top


def test_equal_logits_come_in_the_order_of_their_ids() -> None:
    found = logprob_of(np.array([1.0, 3.0, 3.0, 0.0, 3.0], np.float32), 0, 2)
    assert [token for token, _ in found.top] == [1, 2]
    assert logprob_of(np.zeros(3, np.float32), 1, 9).top == tuple((token, -np.log(3)) for token in range(3))
    assert logprob_of(np.zeros(3, np.float32), 1, 0).top == ()


@pytest.mark.parametrize("wrong", [-1, 257, True, 1.0, "2"])
def test_logprobs_out_of_range(generator: Generator, wrong: object) -> None:
    with pytest.raises(UsageError, match="logprobs: expected a whole number from 0 to 256, got "):
        generator.generate([[1]], 1, logprobs=wrong)


def test_a_prefix_cannot_be_scored(generator: Generator) -> None:
    with pytest.raises(UsageError, match="prompt_logprobs: a prefix has been read already; give the whole text as"):
        generator.generate([[1]], 1, prompt_logprobs=True, prefix=generator.prefix([1, 2]))
    with pytest.raises(UsageError, match="max_new_tokens: expected a whole number of at least 0, got -1"):
        generator.generate([[1]], -1, prompt_logprobs=True)
