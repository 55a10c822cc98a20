"""Grammars that a text follows: before each token, all tokens after which the text cannot be completed are excluded.

The package llguidance compiles a grammar and finds the tokens. It is given the bytes of every token, so it works with
any vocabulary. Tokens that a grammar forces are chosen like others, among all ways to divide the characters into
tokens, because the most probable way is the one that the model was trained with.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mod_export.errors import GrammarError
from mod_export.runtime.compiling import (
    RETRY_S,
    GrammarNotCompiledError,
    GrammarVocabulary,
    check,
    compiled,
    compiling_process,
    sentence_of,
)
from mod_export.runtime.schemas import checked
from mod_export.runtime.texts import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

SPACE = " ?"
"""White space between the parts of JSON (regular expression). If more were allowed, weak models would fill the window
with it.
"""
ESCAPES = 'nrbtf\\"'
"""Characters that may follow a backslash in JSON strings. With `u`, a text could write a key of the schema in a second
way, such as `"\\u0061"` for `"a"`, and the value of that key would not follow the schema.
"""
OPTIONS = {"whitespace_pattern": SPACE, "json_allowed_escapes": ESCAPES}
KEPT = 16
"""How many compiled grammars are kept."""
MOST_WAITING, WAIT_S = 64, 30.0
"""How many grammars may wait to be compiled, and for how many seconds."""
CLOSE_S = 2.0
"""How many seconds a compilation has to end when it is not needed any more."""

Grammar = Mapping[str, Any] | str
"""A JSON schema, or a grammar in llguidance's form of Lark."""


def schema_rule(schema: Mapping[str, Any]) -> str:
    """Returns the part of a Lark grammar that stands for the JSON texts of a schema.

    Raises:
        GrammarError: the schema is not plain data, nested too deeply, or would be read as something else.
    """
    try:
        json.dumps(schema)  # Comes first, because it refuses a schema that contains itself.
        # Options in the schema itself could turn off the checks of its keywords.
        return "%json " + json.dumps({**checked(schema), "x-guidance": OPTIONS})
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema cannot be read ({error}); leave out what is no plain data") from error


def lark_of(grammar: Grammar) -> str:
    """Returns a grammar in the form that is compiled. For a large schema this takes long; the result is returned as it
    is.

    Raises:
        GrammarError: as for `schema_rule`.
    """
    text = f"start: {schema_rule(grammar)}" if isinstance(grammar, Mapping) else grammar
    return text if "%llguidance" in text else f'%llguidance {{"no_forcing": true}}\n{text}'


class Grammars:
    """Compiles grammars for one vocabulary, one at a time, and keeps the last few. Any thread may use it."""

    def __init__(self, vocabulary: Vocabulary | None, vocab_size: int) -> None:
        self._vocabulary, self._vocab_size = vocabulary, vocab_size
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._waiting: OrderedDict[str, tuple[Future[LLMatcher], float]] = OrderedDict()
        self._process = compiling_process()
        self._thread: threading.Thread | None = None

    def begin(self, grammar: Grammar, stop_ids: Collection[int]) -> GrammarProgress:
        """Returns the beginning of a text that follows a grammar and may end with one of `stop_ids`.

        Raises:
            GrammarError: the grammar is invalid, unsupported or too large, the package is not installed, or the ids of
                the model do not represent text.
            GrammarNotCompiledError: too many grammars are being compiled, or none can be compiled here.
        """
        matcher = self.compiled(grammar).result()
        with self._lock:
            return GrammarProgress(matcher.deep_copy(), stop_ids)

    def compiled(self, grammar: Grammar) -> Future[LLMatcher]:
        """Returns a future of the grammar, which another thread compiles if it is not known: at once if the grammar is
        a result of `lark_of`. This call or the future raises what `begin` raises.
        """
        text = lark_of(grammar)
        with self._lock:
            if text in self._compiled:
                self._compiled.move_to_end(text)
                known: Future[LLMatcher] = Future()
                known.set_result(self._compiled[text])
                return known
            if text in self._waiting:
                return self._waiting[text][0]
            if len(self._waiting) >= MOST_WAITING:
                raise GrammarNotCompiledError(
                    f"{MOST_WAITING} other grammars wait to be compiled; try again in {RETRY_S} s"
                )
            future: Future[LLMatcher] = Future()
            self._waiting[text] = (future, time.monotonic())
            if self._thread is None:
                # A thread of a pool would keep the process from ending.
                self._thread = threading.Thread(target=self._work, name="mod-export grammar", daemon=True)
                self._thread.start()
            return future

    def close(self) -> None:
        """Ends a compilation, and refuses those that wait."""
        self._process.close()
        if (thread := self._thread) is not None:
            thread.join(CLOSE_S)

    def _work(self) -> None:
        """Compiles the grammars that wait, and ends when none is left."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                text, (future, since) = next(iter(self._waiting.items()))
            matcher: LLMatcher | None = None
            problem: BaseException | None = None
            try:
                if time.monotonic() - since > WAIT_S:
                    waited = f"the grammar waited longer than {WAIT_S:g} s for others; try again in {RETRY_S} s"
                    problem = GrammarNotCompiledError(waited)
                else:
                    matcher = self._compile(text)
            except BaseException as error:  # Panics of llguidance are no Exception. Waiting threads must get any error.
                problem = error
            with self._lock:
                del self._waiting[text]
                if matcher is not None:
                    self._compiled[text] = matcher
                    if len(self._compiled) > KEPT:
                        self._compiled.popitem(last=False)
            if matcher is not None:
                future.set_result(matcher)
            else:
                future.set_exception(problem)

    def _compile(self, text: str) -> LLMatcher:
        tokens, tokenizer = self._tokens  # Reads the vocabulary once. The limit does not include these seconds.
        check(self._process, tokens, text)
        return compiled(tokenizer, text)

    @cached_property
    def _tokens(self) -> tuple[GrammarVocabulary, LLTokenizer]:
        vocabulary, size = self._vocabulary, self._vocab_size
        if vocabulary is None:
            raise GrammarError("this model's ids stand for no text, so no grammar applies; leave it out")
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise GrammarError("needs the package llguidance; pip install 'mod-export[structured]'") from error

        def ids(text: str | bytes) -> list[int]:
            return vocabulary.ids(text if isinstance(text, str) else text.decode(errors="replace"), special=False)

        texts = [(vocabulary.token_bytes(token) or b"") for token in range(size)]
        tokens = GrammarVocabulary(
            texts, [token for token in range(size) if texts[token] and not vocabulary.is_shown(token)], ids
        )
        return tokens, LLTokenizer(tokens)  # type: ignore[arg-type]  # The same attributes.


class GrammarProgress:
    """The state of one text that follows a grammar."""

    def __init__(self, matcher: LLMatcher, stop_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._stop_ids = sorted(stop_ids)

    def copy(self) -> GrammarProgress:
        """Returns the state of another text that has come equally far."""
        return GrammarProgress(self._matcher.deep_copy(), self._stop_ids)

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
        reason = sentence_of(self._matcher.get_error()) or "the model has no token for what must follow"
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
