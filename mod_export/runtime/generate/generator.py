"""Loads a build folder and writes text with it. A server needs mod-export with its base dependencies and one engine
library (`pip install "mod-export[ort]"`), neither PyTorch nor the checkpoint.

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
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from mod_export.build_folder.files import verify_files
from mod_export.build_folder.manifest import GenerationFacts, Manifest, open_folder
from mod_export.engines import ENGINES
from mod_export.engines.protocol import Runner
from mod_export.environment import free_bytes
from mod_export.errors import EngineError, UsageError
from mod_export.runtime.deployment import served_engines, threads_to_use, warn_unverified
from mod_export.runtime.generate.decoder import Decoder, DecodingEngines, Prompts
from mod_export.runtime.generate.defaults import GENERATION_CONFIG, defaults_of
from mod_export.runtime.generate.logits import rng_of
from mod_export.runtime.generate.stream import Completion, Prefix, Stream, Text
from mod_export.runtime.generate.texts import StopText, vocabulary_of
from mod_export.types import FLOAT_BYTES, Bucket, Engine, ModelKind

Message = Mapping[str, Any]
"""`role` and `content` of one turn of a conversation."""
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or the messages of a conversation that the model answers."""


def load_generator(
    root: str | Path,
    target: str | None = None,
    dtype: str | None = None,
    model: ModelKind = "mod",
    threads: int | None = None,
) -> Generator:
    """Opens a build folder for writing text.

    The arguments are those of `load`.

    Raises:
        BuildFolderError: not a complete build folder, or a damaged file.
        UsageError: the folder's model cannot generate, with the reason and what to do, or was not built for it.
        TargetError: no engine for generation runs here, or its engines missed their gates.
    """
    folder = Path(root)
    manifest = open_folder(folder, verify=False)
    if isinstance(manifest.generation, str):
        raise UsageError(
            f"{folder}: cannot generate: {manifest.generation}\nprompts can be scored, as the checkpoint's spec routes "
            "them: mod-export generate --selection topk-prefill"
        )
    chosen = served_engines(folder, manifest, model, target, dtype, texts=True)
    warn_unverified(folder, manifest)
    verify_files(folder, manifest.entries(sorted({path for engine in chosen for path in engine.files})))
    return Generator(folder, manifest, chosen, threads_to_use(threads))


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_conversation(value: object) -> bool:
    """Whether these are the messages of one."""
    return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(one, Mapping) for one in value)


class Generator:
    """The prefill and decode buckets of one model, target and dtype.

    One text, or one batch of texts, is written at a time; open another generator to write two at once. Engines share
    the memory of the weights.

    Attributes:
        vocabulary: converts between text and ids; None if ids do not represent text.
        defaults: what the model's generation_config.json says: stop tokens and sampling.
        target: of the engines.
        dtype: likewise.
        threads: of a CPU engine inside one operator; 0 is the library's own choice.
        window: the longest text in tokens, prompt and answer together.
    """

    def __init__(self, root: Path, manifest: Manifest, engines: Sequence[Engine], threads: int) -> None:
        """`engines` are of prefill and decode buckets. They are opened when they are first needed.

        Raises:
            BuildFolderError: a file of the tokenizer has changed since the build.
            UsageError: it needs a package that is not installed.
        """
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
        self._vocab_size = vocab_size
        self._kv_bytes = {
            # Beside weights in whole numbers it is float32.
            length: size * FLOAT_BYTES.get(first.dtype, FLOAT_BYTES["float32"]) // FLOAT_BYTES["float32"]
            for length, size in manifest.generation.kv_bytes[first.model].items()
        }
        self._sites = manifest.generation.sites[first.model]
        self._decode = {engine.bucket: engine for engine in engines if engine.role == "decode"}
        # Capacities are counted for the window of the build, and a text ends where the longest cache does.
        self.window = max(bucket.seq for bucket in self._decode)
        self._engines = DecodingEngines(engines, self._load, manifest.config)
        self._identity = f"{first.path} of {root.resolve()}"
        self._opened = contextlib.ExitStack()
        self._decoders: dict[Bucket, Decoder] = {}
        self._prompts: Prompts | None = None
        self._writing = threading.Lock()
        self._closed = False

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What can be written at once: (texts, tokens of a text), smallest first."""
        return tuple(sorted(self._decode))

    def cache_bytes(self, bucket: Bucket) -> int:
        """Bytes of the keys and values that the tokens of a decode bucket can have, however long its texts are."""
        return bucket.batch * self._kv_bytes[bucket.seq]

    def bucket_for(self, texts: int, tokens: int) -> Bucket:
        """The bucket that a request is written in: the shortest cache that holds its texts; of those buckets, the one
        with the fewest rows that hold all texts at once, or else the one with the most rows.

        Raises:
            UsageError: the texts are longer than every cache.
        """
        if tokens > self.window:
            raise UsageError(
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
        """Writes whole texts; see `stream` for the arguments."""
        with self.stream(prompts, max_new_tokens, **options) as stream:
            for _ in stream:
                pass
        return stream.completions

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 128,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Sequence[str | int] = (),
        ignore_eos: bool = False,
        add_special_tokens: bool = True,
        template: Mapping[str, Any] | None = None,
        prefix: Prefix | None = None,
        rolling: bool = False,
    ) -> Stream:
        """Writes texts piece by piece.

        Args:
            prompts: one prompt, or several of any lengths; each text, token ids, or a list of messages.
            max_new_tokens: of each text.
            temperature: 0 always chooses the most probable token; see `Sampling`. None: that of `defaults`, which is 0
                unless the model's generation_config.json says `do_sample`.
            top_k: sample among this many most probable tokens; 0 is all. None: that of `defaults`, which is that of
                generation_config.json, else all.
            top_p: sample among the most probable tokens that have this probability together. None: likewise.
            seed: text i of a request has its own random numbers, from (seed, i).
            stop: strings that end a text, and are not part of it; or token ids.
            ignore_eos: whether a text goes on after the tokens at which the model ends its texts (`defaults.stop_ids`).
            add_special_tokens: whether a text begins and ends as the tokenizer says, such as with `<s>`; not one that
                continues a prefix. The template of a conversation says so itself.
            template: further variables of the chat template, of plain data, such as {"enable_thinking": False}.
            prefix: a result of `prefix`, which every prompt continues.
            rolling: a text that fills the window continues as if its second half were the whole text, instead of
                being refused.

        Raises:
            UsageError: an argument is out of range, a prompt cannot be read by this model, or a text is too long.
        """
        found = self._prompt_list(prompts, template or {}, special=add_special_tokens, continued=prefix is not None)
        if not _is_whole(max_new_tokens) or max_new_tokens < 1:
            raise UsageError(f"max_new_tokens: expected a whole number of at least 1, got {max_new_tokens!r}")
        bucket = self._bucket(found, prefix, max_new_tokens, rolling)
        sampling = self.defaults.sampling_of(temperature, top_k, top_p)
        stop_ids = self._stop_ids(stop) | (frozenset() if ignore_eos else self.defaults.stop_ids)
        texts = [
            Text(
                row=row,
                ids=ids,
                prefix=prefix,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                rng=rng_of(seed, row),
                stop_ids=stop_ids,
                reader=self.vocabulary.reader() if self.vocabulary else None,
                stops=StopText([one for one in stop if isinstance(one, str)]),
            )
            for row, ids in enumerate(found)
        ]
        return Stream(texts, self._reads(), lambda: self._exclusive(bucket), self._sites, bucket, rolling=rolling)

    def prefix(self, prompt: Prompt, *, add_special_tokens: bool = True) -> Prefix:
        """Reads the common beginning of several texts once. The prompts after it are read token by token, so this
        saves time if the beginning is long and what follows is short.

        Raises:
            UsageError: the prompt is empty, or fills the window.
        """
        (ids,) = self._prompt_list([prompt], {}, special=add_special_tokens)
        if not ids or len(ids) >= self.window:
            raise UsageError(f"a prefix has 1 to {self.window - 1} tokens, got {len(ids)}")
        prompts = self._reads()
        kept = prompts.read(ids[: prompts.longest])
        if len(ids) > prompts.longest:
            with self._exclusive(self.bucket_for(1, len(ids))) as decoder:
                kept = decoder.read_on(kept, ids[prompts.longest :])
        return Prefix(tuple(ids), kept, self._identity)

    def _prompt_list(
        self,
        prompts: Prompt | Sequence[Prompt],
        template: Mapping[str, Any],
        *,
        special: bool = True,
        continued: bool = False,
    ) -> list[list[int]]:
        if not isinstance(prompts, str | Sequence | np.ndarray):
            raise UsageError(f"expected a prompt or a list of prompts, got {type(prompts).__name__}")
        if not isinstance(prompts, str) and len(prompts) == 0:
            raise UsageError("expected at least one prompt")
        # A single prompt, text, ids or messages, need not be in a list.
        one = isinstance(prompts, str) or all(map(_is_whole, prompts)) or _is_conversation(prompts)
        several = cast("Sequence[Prompt]", [prompts] if one else prompts)
        if continued and any(map(_is_conversation, several)):
            raise UsageError("a conversation is a whole text, which cannot continue a prefix; leave the prefix out")
        special = special and not continued
        return [self._ids(row, prompt, template, special=special) for row, prompt in enumerate(several)]

    def _ids(self, row: int, prompt: Prompt, template: Mapping[str, Any], *, special: bool) -> list[int]:
        if isinstance(prompt, str) or _is_conversation(prompt):
            if self.vocabulary is None:
                raise UsageError("this model's ids stand for no text; give prompts as ids, or build with a tokenizer")
            if isinstance(prompt, str):
                ids = self.vocabulary.ids(prompt, special)
            else:
                # The template writes every special token itself.
                told = self.vocabulary.chat_template.render(cast("Sequence[Message]", prompt), template)
                ids = self.vocabulary.ids(told, special=False)
        else:
            given: Any = prompt
            ids = list(given) if isinstance(given, Sequence | np.ndarray) else [given]
        wrong = [one for one in ids if not self._is_id(one)]
        if wrong:
            raise UsageError(
                f"prompt {row}: expected text, or token ids from 0 to {self._vocab_size - 1}, got {wrong[0]!r}"
            )
        return [int(one) for one in ids]

    def _is_id(self, value: Any) -> bool:
        return _is_whole(value) and 0 <= value < self._vocab_size

    def _bucket(
        self, prompts: Sequence[Sequence[int]], prefix: Prefix | None, max_new_tokens: int, rolling: bool
    ) -> Bucket:
        """The bucket of a request; refuses prompts that are empty or too long, and a prefix of other engines."""
        if prefix is not None and prefix.engines != self._identity:
            raise UsageError(
                f"prefix: was read by {prefix.engines}, and this generator is {self._identity}; read it again here"
            )
        lengths = [(len(prefix.ids) if prefix else 0) + len(ids) for ids in prompts]
        if 0 in lengths:
            raise UsageError(f"prompt {lengths.index(0)} is empty; expected at least one token")
        longest = max(lengths)
        if rolling and longest > self.window:
            raise UsageError(
                f"a prompt of {longest} tokens does not fit the window of {self.window}, also where texts roll; give "
                f"its last {self.window} tokens, or build a longer window (generation.window)"
            )
        needed = longest + max_new_tokens - 1  # The last token that is written is never read.
        return self.bucket_for(len(prompts), min(needed, self.window) if rolling else needed)

    def _stop_ids(self, stop: Sequence[str | int]) -> frozenset[int]:
        """The ids among the stops, and those of special tokens, which no text shows."""
        if isinstance(stop, str):
            raise UsageError(f"stop: got the string {stop!r}, expected a list of strings and ids; write [{stop!r}]")
        odd = [one for one in stop if not isinstance(one, str) and not self._is_id(one)]
        if odd:
            raise UsageError(f"stop: expected strings and ids from 0 to {self._vocab_size - 1}, got {odd[0]!r}")
        if self.vocabulary is None and any(isinstance(one, str) for one in stop):
            raise UsageError("stop: this model's ids stand for no text; give ids to stop at")
        ids = [self.vocabulary.special_id(one) if isinstance(one, str) and self.vocabulary else one for one in stop]
        return frozenset(one for one in ids if one is not None and not isinstance(one, str))

    def _reads(self) -> Prompts:
        if self._prompts is None:
            opened = self._engines.prompts(self._model, self.target, self.dtype)
            self._prompts = self._opened.enter_context(opened)
        return self._prompts

    @contextlib.contextmanager
    def _exclusive(self, bucket: Bucket) -> Iterator[Decoder]:
        """The decoder of a bucket, for one caller at a time.

        Raises:
            UsageError: it is in use, or there is no memory for its cache.
        """
        if not self._writing.acquire(blocking=False):
            raise UsageError("this generator is writing another text; finish or close that stream, or open another one")
        try:
            if bucket not in self._decoders:
                self._check_room(bucket)
                opened = self._engines.decoder(self._decode[bucket])
                self._decoders[bucket] = self._opened.enter_context(opened)
            yield self._decoders[bucket]
        except EngineError:
            if bucket in self._decoders:
                self._decoders[bucket].wipe()
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
