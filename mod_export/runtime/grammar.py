"""Grammars that a text follows: before each token, all tokens are excluded after which the text cannot be completed.

The package llguidance compiles a grammar and finds the tokens. It is given the bytes of every token, so it works with
any vocabulary. Tokens that a grammar forces are chosen like others, among all ways to divide the characters into
tokens, because the most probable way is the one that the model was trained with.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mod_export.errors import GrammarError
from mod_export.runtime.texts import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

SPACE = " ?"
"""White space between the parts of JSON (regular expression). Weak models would fill the window with more of it."""
ESCAPES = 'nrbtf\\"'
"""Letters after a backslash in JSON strings. With `u`, a text could write a key of the schema in a second way, as
`"\\u0061"` for `"a"`, whose value would not follow the schema.
"""
OPTIONS = {"whitespace_pattern": SPACE, "json_allowed_escapes": ESCAPES}
KEPT = 16
"""How many compiled grammars are kept."""
COMPILE_S = 10.0
"""How many seconds a grammar may take to compile. The limits of llguidance end what this does not."""
MOST_STATES = 20_000
"""Limit of the states of a lexer, each of 1 to 2 kB (llguidance's own limit is 250,000)."""

Grammar = Mapping[str, Any] | str
"""A JSON schema, or a grammar in llguidance's form of Lark."""


def schema_rule(schema: Mapping[str, Any]) -> str:
    """Returns the part of a Lark grammar that stands for the JSON texts of a schema.

    Raises:
        GrammarError: the schema is not plain data, or nested too deeply.
    """
    try:
        # Options in the schema itself could turn off the checks of its keywords.
        return "%json " + json.dumps({**schema, "x-guidance": OPTIONS})
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema cannot be read ({error}); leave out what is no plain data") from error


class Grammars:
    """Compiles grammars for one vocabulary, one at a time, and keeps the last few. Any thread may use it."""

    def __init__(self, vocabulary: Vocabulary | None, vocab_size: int) -> None:
        self._vocabulary, self._vocab_size = vocabulary, vocab_size
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._compiler = ThreadPoolExecutor(1, "mod-export grammar")

    def begin(self, grammar: Grammar, stop_ids: Collection[int]) -> GrammarProgress:
        """Returns the beginning of a text that follows a grammar and may end with one of `stop_ids`.

        Raises:
            GrammarError: the grammar is invalid, unsupported or too large, the package is not installed, or the ids of
                the model do not represent text.
        """
        text = f"start: {schema_rule(grammar)}" if isinstance(grammar, Mapping) else grammar
        text = text if "%llguidance" in text else f'%llguidance {{"no_forcing": true}}\n{text}'
        with self._lock:
            matcher = self._found(text)
            if matcher is None:
                tokens = self._tokens  # Reads the vocabulary, which may take seconds, once and without the time limit.
        if matcher is None:
            compiling = self._compiler.submit(self._compile, text, tokens)
            try:
                matcher = compiling.result(timeout=COMPILE_S)
            except TimeoutError as error:
                compiling.cancel()
                raise GrammarError(f"the grammar took longer than {COMPILE_S:g} s to compile; simplify it") from error
        with self._lock:
            return GrammarProgress(matcher.deep_copy(), stop_ids)

    def _found(self, text: str) -> LLMatcher | None:
        if text in self._compiled:
            self._compiled.move_to_end(text)
        return self._compiled.get(text)

    def _compile(self, text: str, tokens: LLTokenizer) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:
            if (found := self._found(text)) is not None:  # Another request asked for it meanwhile.
                return found
        limits = LLParserLimits(max_lexer_states=MOST_STATES, verbose_errors=False)
        matcher = LLMatcher(tokens, text, log_level=0, limits=limits)  # Releases the GIL.
        if matcher.is_error():
            raise GrammarError(f"no grammar can be made of it: {_sentence(matcher.get_error())}")
        with self._lock:
            self._compiled[text] = matcher
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return matcher

    @cached_property
    def _tokens(self) -> LLTokenizer:
        if self._vocabulary is None:
            raise GrammarError("this model's ids stand for no text, so no grammar applies; leave it out")
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise GrammarError("needs the package llguidance; pip install 'mod-export[structured]'") from error
        return LLTokenizer(_Tokens(self._vocabulary, self._vocab_size))  # type: ignore[arg-type]  # The same attributes.


class _Tokens:
    """The vocabulary as llguidance reads it. Tokens without text are never allowed.

    The last token is none of the model's. It stands for the end of a text, which llguidance needs exactly one of.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        self._vocabulary = vocabulary
        self.tokens = [(vocabulary.token_bytes(token) or b"") for token in range(size)]
        hidden = [token for token in range(size) if self.tokens[token] and not vocabulary.is_shown(token)]
        self.tokens.append(b"<end>")
        self.eos_token_id = size
        self.special_token_ids = [*hidden, size]

    def __call__(self, text: str | bytes) -> list[int]:
        """Returns the tokens of a text that the grammar forces."""
        return self._vocabulary.ids(text if isinstance(text, str) else text.decode(errors="replace"), special=False)


class GrammarProgress:
    """The state of one text that follows a grammar."""

    def __init__(self, matcher: LLMatcher, stop_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._stop_ids = sorted(stop_ids)

    @property
    def is_complete(self) -> bool:
        """Whether the text follows the whole grammar, and could end here."""
        return bool(self._matcher.is_accepting())

    @property
    def is_over(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        return self.is_complete and bool(self._matcher.is_stopped())

    @property
    def failure(self) -> str:
        """Why the text cannot go on although it is not complete."""
        reason = _sentence(self._matcher.get_error()) or "the model has no token for what must follow"
        return f"the text cannot follow the grammar any further: {reason}"

    def restrict(self, logits_V: np.ndarray) -> np.ndarray | None:
        """Returns a copy of the logits with -inf for all tokens that must not follow; None if no token may follow."""
        if self._matcher.is_error():
            return None
        allowed_V = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed_V = allowed_V[: len(logits_V)].view(np.bool_)
        for token in self._stop_ids:
            if token < len(logits_V):
                allowed_V[token] = self.is_complete
        return np.where(allowed_V, logits_V, -np.inf) if allowed_V.any() else None

    def feed(self, token: int) -> None:
        """Adds a token to the text."""
        self._matcher.consume_token(token)


def _sentence(error: str) -> str:
    """Returns a message of llguidance without the grammar that it quotes, on one line."""
    quoted = re.split(r"\n +\d+ \| |\n?<state>", error)[0]
    return " ".join(re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", quoted).split())
