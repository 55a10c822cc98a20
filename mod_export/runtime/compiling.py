"""Compiles grammars with the package llguidance, first in a process of its own.

A small grammar can take hours and all memory, and nothing can stop a compilation from inside its process. So another
process does the same work before this one does, within limits of time and memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mod_export.errors import GrammarError, ModExportError
from mod_export.runtime.limited_process import (
    ClosedError,
    DiedError,
    LimitedProcess,
    NotStartedError,
    TooLargeError,
    TooSlowError,
    answer_questions,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILE_S = 10.0
"""How many seconds a grammar may take to compile."""
MOST_BYTES = 1 << 30
"""How much memory a grammar may take to compile."""
MOST_STATES = 20_000
"""Limit of the states of a lexer, each of 1 to 2 kB (llguidance's own limit is 250,000)."""
MOST_SYMBOLS = 65_525
"""Limit of llguidance for the symbols of a grammar. With more, one of its assertions fails."""
RETRY_S = 5


class GrammarNotCompiledError(ModExportError):
    """A grammar was not compiled, for a reason that is not in the grammar.

    Attributes:
        retry_after_s: whole seconds until it may be compiled.
    """

    def __init__(self, message: str, retry_after_s: int = RETRY_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GrammarVocabulary:
    """The vocabulary as llguidance reads it. Tokens without text are never allowed.

    The last token does not belong to the model. It stands for the end of a text, because llguidance needs exactly one
    such token.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], hidden: Sequence[int], ids: Callable[[str | bytes], list[int]] | None = None
    ) -> None:
        """`hidden` are the tokens that texts do not show. `ids` divides a text into tokens; None takes the longest."""
        self.tokens, self.hidden = [*tokens, b"<end>"], list(hidden)
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*self.hidden, self.eos_token_id]
        self._ids = ids

    def __call__(self, text: str | bytes) -> list[int]:
        """Returns the tokens of a text that the grammar forces."""
        if self._ids is not None:
            return self._ids(text)
        return self._longest(text if isinstance(text, bytes) else text.encode())

    def _longest(self, text: bytes) -> list[int]:
        known = {token: number for number, token in enumerate(self.tokens[:-1]) if token and number not in self.hidden}
        longest, ids, begin = max(map(len, known), default=1), [], 0
        while begin < len(text):
            pieces = (text[begin : begin + length] for length in range(longest, 0, -1))
            piece = next((piece for piece in pieces if piece in known), None)
            ids += [] if piece is None else [known[piece]]
            begin += 1 if piece is None else len(piece)
        return ids


def compiled(tokens: LLTokenizer, text: str) -> LLMatcher:
    """Does everything that llguidance does for a new grammar, up to finding the tokens that a text may begin with.

    Raises:
        GrammarError: llguidance refuses the grammar.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MOST_STATES, verbose_errors=False)
    matcher = LLMatcher(tokens, text, log_level=0, limits=limits)  # Releases the GIL.
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(f"no grammar can be made of it: {sentence_of(matcher.get_error())}")
    return matcher


def sentence_of(error: str) -> str:
    """Returns a message of llguidance without the grammar that it quotes, and without a backtrace, on one line."""
    if error.startswith("panic: "):
        first = error.removeprefix("panic: ").splitlines()[0]
        too_many = f"it has more than {MOST_SYMBOLS:,} symbols; simplify it"
        return too_many if "symbols.len()" in first else f"llguidance fails on it ({first})"
    quoted = re.split(r"\n +\d+ \| |\n?<state>|\n?<backtrace>", error)[0]
    return " ".join(re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", quoted).split())


def compiling_process() -> LimitedProcess:
    """Returns the process that compiles grammars of one vocabulary."""
    return LimitedProcess(__name__)


def check(process: LimitedProcess, tokens: GrammarVocabulary, text: str) -> None:
    """Compiles a grammar in the process, whose vocabulary is always the same.

    Raises:
        GrammarError: llguidance refuses the grammar, or it takes too much time or memory.
        GrammarNotCompiledError: no process can be started, or this one was closed.
    """

    def vocabulary() -> dict[str, Any]:
        return {"tokens": [token.decode("latin-1") for token in tokens.tokens[:-1]], "hidden": tokens.hidden}

    try:
        refusal = process.ask(text, vocabulary, COMPILE_S, MOST_BYTES)
    except ClosedError as error:
        raise GrammarNotCompiledError("the grammar is not compiled: this server, or generator, is closing") from error
    except NotStartedError as error:
        raise GrammarNotCompiledError(f"the grammar is not compiled: the process that would do it {error}") from error
    except TooSlowError as error:
        raise GrammarError(f"the grammar took longer than {COMPILE_S:g} s to compile; simplify it") from error
    except TooLargeError as error:
        size = f"{MOST_BYTES / 2**30:g} GiB"
        raise GrammarError(f"the grammar took more than {size} of memory to compile; simplify it") from error
    except DiedError as error:
        raise GrammarError(f"llguidance fails on the grammar ({error}); simplify it") from error
    if refusal:
        raise GrammarError(refusal)


def _prepare(vocabulary: dict[str, Any]) -> Callable[[str], str]:
    """Runs in the other process. Returns a function that answers a grammar with an empty text, or with the reason why
    the grammar is refused.
    """
    from llguidance import LLTokenizer

    wrapped = GrammarVocabulary([token.encode("latin-1") for token in vocabulary["tokens"]], vocabulary["hidden"])
    tokens = LLTokenizer(wrapped)  # type: ignore[arg-type]  # The same attributes.

    def refusal_of(text: str) -> str:
        try:
            compiled(tokens, text)
        except GrammarError as error:
            return str(error)
        return ""

    return refusal_of


if __name__ == "__main__":
    answer_questions(_prepare)
