"""Loads a build folder and writes text with it. A server needs mod-export with its base dependencies and one engine
library (`pip install "mod-export[ort]"`). It needs neither PyTorch nor the checkpoint.

    import mod_export
    with mod_export.load_generator("build/demo") as generator:
        for piece in generator.stream(["def main("], max_new_tokens=64):
            print(piece.text, end="", flush=True)

A conversation is a list of messages, which the model's own chat template turns into a prompt:

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    (answer,) = generator.generate(messages)
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And of Spain?"}]
    (answer,) = generator.generate(messages)
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from mod_export.engines import ENGINES
from mod_export.engines.protocol import Runner
from mod_export.environment import free_bytes
from mod_export.errors import BuildFolderError, EngineError, TooLongError, UsageError
from mod_export.folder.files import verify_files
from mod_export.folder.manifest import GenerationFacts, Manifest, open_folder, way_out
from mod_export.folder.signature import check_signature
from mod_export.runtime.decoder import Decoder
from mod_export.runtime.decoding_engines import DecodingEngines
from mod_export.runtime.deployment import served_engines, threads_to_use, warn_unverified
from mod_export.runtime.prefix_cache import PrefixCache
from mod_export.runtime.prompts import Prompts
from mod_export.runtime.request import GENERATION_CONFIG, Prompt, RequestReader, defaults_of
from mod_export.runtime.rows import Completion, Prefix, RowText
from mod_export.runtime.stream import Stream
from mod_export.runtime.text_rows import TextRows
from mod_export.runtime.texts import vocabulary_of
from mod_export.types import FLOAT_BYTES, Bucket, Engine, ModelKind, Unavailable, graph_of, having


def load_generator(
    root: str | Path,
    target: str | None = None,
    dtype: str | None = None,
    model: ModelKind = "mod",
    threads: int | None = None,
    prefix_cache_bytes: int = 0,
    trusted_keys: Sequence[str | Path] | None = None,
) -> Generator:
    """Opens a build folder for writing text. Takes the arguments of `load`, and `prefix_cache_bytes`, the memory of a
    `PrefixCache`. It keeps what texts have read, for later texts with the same beginning; 0 keeps nothing.

    Raises:
        BuildFolderError: the folder is not a complete build folder, a file is damaged, the folder is not signed by the
            owner of one of `trusted_keys`, or its engines can only read a prompt as a whole.
        UsageError: the folder's model cannot generate (the message says why and what to do), or the folder has no
            engines that write its text.
        TargetError: no engine for generation runs here, or the engines missed their gates.
    """
    folder = Path(root)
    check_signature(folder, trusted_keys)
    manifest = open_folder(folder, verify=False)
    if isinstance(manifest.generation, Unavailable):
        raise UsageError(
            f"{folder}: cannot generate: {manifest.generation}\nprompts can be scored, as the checkpoint's spec routes "
            "them: mod-export generate --selection topk-prefill"
        )
    if any("positions" not in graph.inputs for graph in having(manifest.graphs, role="prefill")):
        raise BuildFolderError(
            f"{folder}: its engines read prompts whole, as engines did before mod-export 0.2.0 was released; "
            f"{way_out(manifest.command)}"
        )
    chosen = served_engines(folder, manifest, model, target, dtype, texts=True)
    warn_unverified(folder, manifest)
    verify_files(folder, manifest.entries(sorted({path for engine in chosen for path in engine.files})))
    return Generator(folder, manifest, chosen, threads_to_use(threads), prefix_cache_bytes)


def tokens_read(prompt: int, new: int) -> int:
    """Returns the number of tokens that a row must hold: all but the last new token, which is never read."""
    return prompt + max(0, new - 1)


class Generator:
    """The prefill and decode buckets of one model, target and dtype.

    It writes one text, or one batch of texts, at a time; open another generator to write two at once. Engines share
    the memory of the weights.

    Attributes:
        vocabulary: converts between text and ids; None if ids do not represent text.
        defaults: stop tokens and sampling from the model's generation_config.json.
        target: target of the engines.
        dtype: dtype of the engines.
        threads: threads of a CPU engine inside one operator; 0 leaves the choice to the library.
        window: maximum number of tokens of a text, prompt and answer together.
        prefixes: what earlier texts have read; None if nothing is kept.
        grammars: compiles the grammars of requests.
    """

    def __init__(
        self, root: Path, manifest: Manifest, engines: Sequence[Engine], threads: int, prefix_cache_bytes: int = 0
    ) -> None:
        """`engines` are prefill and decode engines, which are opened on first use.

        Raises:
            BuildFolderError: a file of the tokenizer has changed since the build.
            UsageError: the tokenizer needs a package that is not installed, or `prefix_cache_bytes` is negative.
        """
        if prefix_cache_bytes < 0:
            raise UsageError(f"prefix_cache_bytes: expected at least 0, got {prefix_cache_bytes}")
        # With fair slots a text depends on the texts beside it, so no other text can reuse what it has read.
        cached = prefix_cache_bytes > 0 and manifest.config.generation.slots == "all"
        self.prefixes = PrefixCache(prefix_cache_bytes) if cached else None
        assert isinstance(manifest.generation, GenerationFacts)
        first = engines[0]
        self.vocabulary = vocabulary_of(root, manifest)
        if GENERATION_CONFIG in manifest.files:
            verify_files(root, manifest.entries([GENERATION_CONFIG]))
        self.defaults = defaults_of(root, self.vocabulary.end if self.vocabulary else None)
        self.target, self.dtype, self.threads = first.target, first.dtype, threads
        self._root, self._config, self._model = root, manifest.config, first.model
        vocab_size = manifest.models[first.model].vocab_size
        assert vocab_size is not None, "only a model of token ids writes text"
        self._requests = RequestReader(self.vocabulary, vocab_size, self.defaults)
        self.grammars = self._requests.grammars
        # kv_bytes are counted for float32. With int8 and int4 weights, the target decides what the cache is.
        limits, graph = ENGINES[first.target].limits, graph_of(first, manifest.graphs)
        cached_dtype = (graph.limits(limits) if graph else limits).floats(first.dtype)
        self._kv_bytes = {
            length: size * FLOAT_BYTES[cached_dtype] // FLOAT_BYTES["float32"]
            for length, size in manifest.generation.kv_bytes[first.model].items()
        }
        self._sites = manifest.generation.sites[first.model]
        self._decode = {engine.bucket: engine for engine in having(engines, role="decode")}
        # Capacities are counted for the window of the build, but a text cannot be longer than the longest cache.
        self.window = max(bucket.seq for bucket in self._decode)
        self._engines = DecodingEngines(engines, self._load, manifest.config)
        # The same path may hold other weights after another build.
        contents = hashlib.sha256("".join(manifest.files[path].sha256 for path in first.files).encode())
        self._identity = f"{first.path} of {root.resolve()} ({contents.hexdigest()[:12]})"
        self._opened = contextlib.ExitStack()
        self._opened.callback(self.grammars.close)
        # A closed generator may stay in memory until Python looks for cycles, but not what it has kept.
        if self.vocabulary is not None:
            self._opened.callback(self.vocabulary.close)
        if self.prefixes is not None:
            self._opened.callback(self.prefixes.clear)
        self._decoders: dict[Bucket, Decoder] = {}
        self._prompts: Prompts | None = None
        self._writing = threading.Lock()
        self._closed = False

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The decode buckets, smallest first: how many texts can be written at once, and of how many tokens."""
        return tuple(sorted(self._decode))

    def cache_bytes(self, bucket: Bucket) -> int:
        """Returns the bytes that keys and values take in a decode bucket, however long its texts are."""
        return bucket.batch * self._kv_bytes[bucket.seq]

    def bucket_for(self, texts: int, tokens: int) -> Bucket:
        """Returns the bucket for a request. It has the shortest cache that fits the texts. Of such buckets it is the
        one with the fewest rows that still hold all texts at once, or else the one with the most rows.

        Raises:
            TooLongError: the texts are longer than the longest cache.
        """
        if tokens > self.window:
            raise TooLongError(
                f"a text of {tokens} tokens, prompt and answer together, is longer than the window of {self.window}; "
                "ask for fewer new tokens, build a longer window (generation.window), or let the text roll "
                "(rolling=True, --roll), which goes on from its second half"
            )
        shortest = min(bucket.seq for bucket in self.buckets if bucket.seq >= tokens)
        rows = [bucket for bucket in self.buckets if bucket.seq == shortest]
        return min((bucket for bucket in rows if bucket.batch >= texts), default=max(rows))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], max_new_tokens: int = 128, **options: Any
    ) -> list[Completion]:
        """Writes texts and returns them when all are complete; see `stream` for the arguments."""
        with self.stream(prompts, max_new_tokens, **options) as stream:
            for _ in stream:
                pass
        return stream.completions

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 128,
        *,
        prefix: Prefix | None = None,
        rolling: bool = False,
        **options: Any,
    ) -> Stream:
        """Writes texts piece by piece.

        Args:
            prompts: one prompt, or several of any lengths; each is a text, token ids, or a list of messages.
            max_new_tokens: limit of new tokens for each text; it may be 0 only with `prompt_logprobs`.
            prefix: a result of `prefix`, which every prompt continues.
            rolling: whether a text that fills the window continues as if its second half were the whole text, instead
                of being refused.
            options: the following arguments.

        Keyword Args:
            temperature (float | None): 0 always chooses the most probable token; see `Sampling`. None uses `defaults`,
                which is 0 unless the model's generation_config.json sets `do_sample`.
            top_k (int | None): samples among this many most probable tokens; 0 means all. None uses `defaults`, which
                holds the value of generation_config.json, or else means all.
            top_p (float | None): samples among the most probable tokens whose probabilities sum to this. None as for
                `top_k`.
            seed (int): text i of a request draws its own random numbers, seeded with (seed, i). -1 stands for a random
                seed.
            stop (Sequence[str | int]): strings that end a text and are not part of it, or token ids.
            ignore_eos (bool): whether a text continues after the model's end tokens (`defaults.stop_ids`).
            add_special_tokens (bool): whether the tokenizer adds its special tokens, such as `<s>`, to a text. Prompts
                that continue a prefix never get them, and the template of a conversation writes its own.
            template (Mapping[str, Any] | None): more variables for the chat template, as plain data, such as
                {"enable_thinking": False}.
            logprobs (int | None): how many of the most probable tokens are recorded with each new token; None records
                nothing.
            prompt_logprobs (bool): whether log probabilities of the prompt are recorded; its tokens are then read one
                by one.
            logit_bias (Mapping[int, float] | None): token id -> number from -100 to 100, which is added to the logit of
                the token.
            grammar (Mapping[str, Any] | str | None): a JSON schema that the texts follow, or a grammar in llguidance's
                form of Lark. A text ends when nothing more may follow; the model's end tokens may end it where it is
                complete. Needs the extra `structured`.

        Raises:
            GrammarError: no text can follow the grammar.
            GrammarNotCompiledError: the grammar could not be compiled now; too many wait, or no process can be started.
            UsageError: an argument is out of range, a prompt cannot be read by this model, or a text is too long.
        """
        texts = self.texts(prompts, max_new_tokens, prefix=prefix, rolling=rolling, **options)
        tokens = tokens_read(max(len(text.completion.prompt_ids) for text in texts), max_new_tokens)
        bucket = self.bucket_for(len(texts), min(tokens, self.window) if rolling else tokens)
        return Stream(texts, lambda: self.open_rows(bucket, rolling=rolling), bucket)

    def ids(
        self, prompts: Prompt | Sequence[Prompt], template: Mapping[str, Any] | None = None, *, special: bool = True
    ) -> list[list[int]]:
        """Returns the token ids of each prompt, as `stream` reads them.

        Raises:
            UsageError: a prompt cannot be read by this model.
        """
        return self._requests.ids(prompts, template or {}, special=special)

    def texts(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 128,
        *,
        prefix: Prefix | None = None,
        rolling: bool = False,
        **options: Any,
    ) -> list[RowText]:
        """Prepares the texts of a request without starting them, for callers that run them in `open_rows`.

        Raises:
            UsageError: as for `stream`.
        """
        if prefix is not None and prefix.engines != self._identity:
            raise UsageError(
                f"prefix: was read by {prefix.engines}, and this generator is {self._identity}; read it again here"
            )
        texts = self._requests.texts(prompts, max_new_tokens, prefix=prefix, **options)
        longest = max(len(text.completion.prompt_ids) for text in texts)
        if rolling and longest > self.window:
            raise UsageError(
                f"a prompt of {longest} tokens does not fit the window of {self.window}, even if texts roll; give "
                f"its last {self.window} tokens, or build a longer window (generation.window)"
            )
        if not rolling:
            self.bucket_for(1, tokens_read(longest, max_new_tokens))
        return texts

    @contextlib.contextmanager
    def open_rows(self, *buckets: Bucket, rolling: bool = False) -> Iterator[TextRows]:
        """Gives one caller exclusive use of the rows of decode buckets, all of the same length.

        Raises:
            UsageError: this generator is in use, or there is not enough memory for the caches.
        """
        with self._exclusive(*buckets) as decoders:
            yield TextRows(decoders, self._reads(), self._sites, rolling=rolling, prefixes=self.prefixes)

    def prefix(self, prompt: Prompt, *, add_special_tokens: bool = True) -> Prefix:
        """Reads the common beginning of several texts once.

        Raises:
            UsageError: the prompt is empty, or fills the window.
        """
        (ids,) = self.ids([prompt], special=add_special_tokens)
        if not ids or len(ids) >= self.window:
            raise UsageError(f"a prefix has 1 to {self.window - 1} tokens, got {len(ids)}")
        with self._exclusive():
            return Prefix(tuple(ids), self._reads().read(ids), self._identity)

    def _reads(self) -> Prompts:
        if self._prompts is None:
            opened = self._engines.prompts(self._model, self.target, self.dtype)
            self._prompts = self._opened.enter_context(opened)
        return self._prompts

    @contextlib.contextmanager
    def _exclusive(self, *buckets: Bucket) -> Iterator[list[Decoder]]:
        """Gives one caller exclusive use of the decoders of these buckets; opens them if needed.

        Raises:
            UsageError: this generator is in use, or there is not enough memory for the caches.
        """
        if not self._writing.acquire(blocking=False):
            raise UsageError("this generator is writing another text; finish or close that stream, or open another one")
        try:
            for bucket in buckets:
                if bucket not in self._decoders:
                    self._check_room(bucket)
                    opened = self._engines.decoder(self._decode[bucket])
                    self._decoders[bucket] = self._opened.enter_context(opened)
            yield [self._decoders[bucket] for bucket in buckets]
        except EngineError:
            for bucket in self._decoders.keys() & set(buckets):
                self._decoders[bucket].wipe()
            if self._prompts is not None:
                self._prompts.wipe()
            if self.prefixes is not None:
                self.prefixes.clear()
            raise
        finally:
            self._writing.release()

    def _check_room(self, bucket: Bucket) -> None:
        needed, free = self.cache_bytes(bucket), free_bytes()
        if needed > free:
            raise UsageError(
                f"the cache of {bucket.batch} texts of {bucket.seq} tokens takes {needed / 2**20:,.0f} MiB, "
                f"{free / 2**20:,.0f} MiB are free; ask for shorter texts, or fewer at once"
            )

    def _load(self, engine: Engine) -> Runner:
        if self._closed:
            raise UsageError("this generator is closed; open another one with load_generator")
        return ENGINES[engine.target].load(self._root, engine, self._config, self.threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed = True
        self._decoders.clear()
        self._prompts = None
        self._opened.close()
