"""Texts that follow a grammar, in every kind of vocabulary and in real rows."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizer_folders import FAMILIES, opened, write_folder
from writing import WINDOW, prompts_of_lengths

from mod_export.errors import GrammarError
from mod_export.runtime import compiling
from mod_export.runtime import grammar as grammar_module
from mod_export.runtime.compiling import GrammarNotCompiledError, GrammarVocabulary
from mod_export.runtime.generator import Generator
from mod_export.runtime.grammar import KEPT, Grammars
from mod_export.runtime.logits import Sampling, draw
from mod_export.runtime.request import GenerationDefaults, RequestReader
from mod_export.runtime.rows import Completion
from mod_export.runtime.texts import Bytes, ExactReader, Vocabulary

pytestmark = pytest.mark.filterwarnings("ignore::mod_export.errors.UnverifiedWarning")
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": -9, "maximum": 99}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    },
    "words": {
        "type": "array",
        "items": {"enum": ["a .", " ,b", "d\u00e9j\u00e0", "\u6771"]},
        "minItems": 1,
        "maxItems": 2,
    },
    "text": {"type": "string", "maxLength": 5},
    "either": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-c]{2,4}$"}]},
    "nested": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 1}}},
}
SEEDS = 20


def vocabulary(name: str, folder: Path) -> tuple[Vocabulary, int]:
    if name == "bytes":
        return Bytes(), 256
    found = opened(write_folder(folder, name))
    return found, found.size + 3  # Models often have a few more rows than their tokenizer has tokens.


def walk(grammars: Grammars, words: Vocabulary, size: int, schema: Any, seed: int, stop_ids: Sequence[int]) -> str:
    """A text of random logits."""
    rng = np.random.default_rng(seed)
    progress, reader, text = grammars.begin(schema, stop_ids), ExactReader(words), ""
    for _ in range(400):
        logits_V = rng.normal(size=size).astype(np.float32) * 3
        allowed_V = progress.restrict(logits_V)
        assert allowed_V is not None, progress.failure
        assert allowed_V.dtype == np.float32
        token = draw(allowed_V, Sampling(temperature=1.0), rng)
        if token in stop_ids:
            assert progress.is_complete
            break
        assert words.is_shown(token)
        text += reader.feed(token)
        progress.feed(token)
        if progress.is_over:
            break
    else:
        pytest.fail(f"no end: {text}")
    return text + reader.close()


@pytest.mark.parametrize("family", ["bytes", *FAMILIES])
def test_random_texts_of_every_vocabulary_are_valid(family: str, tmp_path: Path) -> None:
    words, size = vocabulary(family, tmp_path / family)
    grammars = Grammars(words, size)
    stop_ids = [] if words.end is None else [words.end]
    for name, schema in SCHEMAS.items():
        found = set()
        for seed in range(SEEDS):
            text = walk(grammars, words, size, schema, seed, stop_ids)
            jsonschema.validate(json.loads(text), schema)
            found.add(text)
        assert len(found) > 1, name


def completions_of(generator: Generator, schema: Any, seeds: Sequence[int], tokens: int = 40) -> list[Completion]:
    return [
        generator.generate("x", tokens, temperature=1.0, seed=seed, grammar=schema)[0] for seed in seeds
    ]  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_of_an_engine_are_valid(generator: Generator, name: str) -> None:
    ended = 0
    for done in completions_of(generator, SCHEMAS[name], range(SEEDS)):
        assert done.finish in ("stop", "length")
        if done.finish == "stop":
            jsonschema.validate(json.loads(done.text), SCHEMAS[name])
            assert (done.stop, done.text.encode()) == (None, bytes(done.ids))
            ended += 1
    assert ended > SEEDS * 0.8


def test_a_batch_writes_what_each_text_alone_writes(generator: Generator) -> None:
    """Rows with a grammar and without one, in the rows of one engine."""
    prompts = prompts_of_lengths([3, 5, 2, 4, 6])
    schemas = [None, SCHEMAS["object"], SCHEMAS["text"], None, SCHEMAS["either"]]
    bucket = generator.bucket_for(3, WINDOW)

    def texts(rows: Sequence[int]) -> list[Any]:
        return [
            generator.texts([prompts[row]], 24, temperature=0.9, seed=row, grammar=schemas[row])[0] for row in rows
        ]  # fmt: skip

    def written(batch: list[Any]) -> list[tuple[list[int], str, str]]:
        with generator.open_rows(bucket) as rows:
            waiting = list(batch)
            while waiting or rows.busy:
                while waiting and len(rows.busy) < rows.size:
                    rows.begin(waiting.pop(0))
                list(rows.read_part() if rows.has_unread_prompts else rows.step())
        return [(text.completion.ids, text.completion.text, text.completion.finish) for text in batch]

    together = written(texts(range(5)))
    assert together == [written(texts([row]))[0] for row in range(5)]
    jsonschema.validate(json.loads(together[1][1]), SCHEMAS["object"])
    assert {finish for _, _, finish in together} == {"stop", "length"}


def test_a_text_without_grammar_is_what_it_was(generator: Generator) -> None:
    (plain,) = generator.generate("def", 20, temperature=0.8, seed=4, logprobs=2)
    (same,) = generator.generate("def", 20, temperature=0.8, seed=4, logprobs=2, logit_bias={}, grammar=None)
    assert (plain.ids, plain.text, plain.logprobs) == (same.ids, same.text, same.logprobs)


def test_a_limit_of_tokens_cuts_the_text(generator: Generator) -> None:
    (cut,) = generator.generate("x", 4, grammar=SCHEMAS["object"])
    assert (cut.finish, len(cut.ids), cut.text[0]) == ("length", 4, "{")


def test_stop_tokens_end_a_text_only_where_it_is_complete(generator: Generator) -> None:
    """A digit may always follow, and the end token is by far the most probable one."""
    options: dict[str, Any] = {"stop": [0], "logit_bias": {0: 100}, "grammar": {"type": "integer"}}
    (done,) = generator.generate("x", 30, **options)
    assert (done.finish, done.stop, len(done.ids)) == ("stop", 0, len(str(int(done.text))))
    # The first token cannot be the end, and after it the end wins.
    assert 1 <= len(done.ids) <= 2
    (free,) = generator.generate("x", 30, grammar={"type": "integer"})
    assert free.finish == "length"
    assert int(free.text) is not None


def test_stop_strings_cut_it(generator: Generator) -> None:
    (cut,) = generator.generate("x", 30, grammar=SCHEMAS["object"], stop=['ok"'])
    assert (cut.finish, cut.stop) == ("stop", 'ok"')
    assert cut.text.endswith('"')


def test_held_back_characters_are_shown_at_its_end(generator: Generator) -> None:
    with generator.stream("x", 10, grammar='start: "abc"', stop=["bcd"]) as stream:
        pieces = [piece.text for piece in stream]
    assert (pieces, stream.completions[0].finish) == (["a", "", "", "bc"], "stop")
    (empty,) = generator.generate("x", 10, grammar='start: ""')
    assert (empty.ids, empty.finish, empty.failure) == ([], "stop", "")


def test_a_text_that_cannot_go_on_fails_alone(generator: Generator) -> None:
    """The end token is one that the grammar needs."""
    with generator.stream(["x", "y"], 6, grammar='start: "ab"', stop=[ord("b")]) as stream:
        list(stream)
    for done in stream.completions:
        assert (done.finish, done.text) == ("failed", "a")
        assert done.failure == (
            "the text cannot follow the grammar any further: the model has no token for what must follow"
        )


def test_too_many_choices_fail_with_the_reason_of_llguidance(generator: Generator) -> None:
    schema = {"properties": {f"p{i}": {"pattern": "^a{1,50}b+$"} for i in range(1000)}, "type": "object"}
    (done,) = generator.generate("x", 6, grammar=schema)
    assert done.finish == "failed"
    assert "Current row has 4007 items; max is 2000" in done.failure


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ({"type": "foo"}, "no grammar can be made of it: Invalid type: foo$"),
        ({"not": {"type": "string"}}, r'no grammar can be made of it: Unimplemented keys: \["not"\]$'),
        ({"not": {"type": "string"}, "x-guidance": {"lenient": True}}, r"Unimplemented keys"),
        ({"pattern": "(?=a)b", "type": "string"}, "error: look-around, including .* is not supported$"),
        ({"minItems": 5, "maxItems": 2, "type": "array"}, r"Unsatisfiable schema: minItems \(5\) is greater than"),
        ({"$ref": "http://example.org/x"}, "Default retriever does not fetch resources$"),
        ("start: nothing", "no grammar can be made of it: unknown name: nothing$|no grammar can be made of it: "),
        ({"const": "a\u0007b"}, r"^const: demands the control character U\+0007, which no text of a grammar has; only"),
        ({"items": {"enum": [1, {"a": ["\x7f"]}]}}, r"^enum: demands the control character U\+007F"),
        ({"type": "string", "pattern": "^a\x1bb$"}, r"^pattern: demands the control character U\+001B"),
        ({"type": "string", "pattern": r"^a\x1bb$"}, r"^pattern: demands the control character U\+001B"),
        ({"type": "string", "pattern": r"^(b|\u{0})$"}, r"^pattern: demands the control character U\+0000"),
        ({"type": "string", "pattern": r"^\[\v$"}, r"^pattern: demands the control character U\+000B"),
        (
            {"type": "string", "pattern": r"^[a\x00-\x1f]$"},
            r"pattern: the class .* has control characters, of which only",
        ),
        (
            {"type": "string", "pattern": r"^\p{Cc}$"},
            "pattern: a class of control characters is not supported; leave it",
        ),
        ({"patternProperties": {"\0": {}}}, r"^patternProperties: demands the control character U\+0000"),
        ({"properties": {"const": {"pattern": "\0"}}}, "^pattern: demands"),
        (
            {"type": "object", "minProperties": 2},
            "^minProperties: 2 with names that are not listed is not supported, bec",
        ),
        ({"patternProperties": {"^[ab]$": {}}, "minProperties": 3, "required": ["a"]}, "^minProperties: 3 with names"),
        ({"pattern": "a" * 16385}, "^pattern: has 16385 characters, at most 16384 are read; simplify it$"),
        ({"enum": [b"bytes"]}, r"the JSON schema cannot be read \(Object of type bytes is not JSON serializable\)"),
    ],
    ids=str,
)
def test_grammars_that_are_refused(generator: Generator, grammar: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as refused:
        generator.texts("x", grammar=grammar)
    assert "\n" not in str(refused.value)


def follows(schema: Any, text: str) -> bool:
    progress = Grammars(Bytes(), 256).begin(schema, [])
    for token in text.encode():
        progress.feed(token)
    return progress.is_complete


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"properties": {"a\u0007b": {"const": 1}}, "required": ["a\u0007b"], "type": "object"}, {"a\u0007b": 1}),
        ({"const": {"a\u0007b": "\b\t\n\f\r"}}, {"a\u0007b": "\b\t\n\f\r"}),
        ({"properties": {"const": {"const": 2}}, "required": ["const"], "type": "object"}, {"const": 2}),
        ({"description": "\x1b", "type": "integer"}, 7),
        (
            {"properties": {"a": {"const": 1}}, "required": ["a"], "minProperties": 2, "type": "object"},
            {"a": 1, "b": 2},
        ),
        ({"type": "string", "pattern": r"^[\x00-\x7f]+$"}, 'a"\\\n'),
        ({"type": "string", "pattern": r"^\x41[\]\t][^]]\[$"}, "A\tb["),
    ],
    ids=str,
)
def test_what_is_near_to_them_is_read_rightly(schema: Any, value: Any) -> None:
    assert follows(schema, json.dumps(value, separators=(",", ":")))


@pytest.mark.parametrize("pattern", ['[^"]', r"[^\"\\]", r"[^ -~]", '[^a-z"\n]'])
def test_quotes_do_not_match_a_class_without_them(pattern: str) -> None:
    """llguidance alone would let them."""
    schema = {"type": "string", "pattern": f"^a{pattern}b$"}
    assert follows(schema, '"a\u6771b"')
    for character in '"', *(["\\"] if "\\\\" in pattern or "~" in pattern else []):
        assert not re.fullmatch(pattern, character)
        assert not follows(schema, json.dumps(f"a{character}b"))


def test_a_schema_that_is_nested_without_end(generator: Generator) -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(GrammarError, match=r"the JSON schema cannot be read .Circular reference detected.; leave out"):
        generator.texts("x", grammar=schema)


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ('{"a":1, "b": "x"}', True),
        ('{"a": 1,"b\\n\\"\\\\": null}', True),
        ('{"a":1,"a":"x"}', False),
        ('{"a":1,"\\u0061":"x"}', False),
        ('{"a":1,"\\/":"x"}', False),
        ('{"a":1\n}', False),
        ('{"a":1,  "b":2}', False),
    ],
)
def test_a_key_has_one_spelling_and_the_text_one_line(text: str, follows: bool) -> None:
    """So no second value of a key escapes its schema: parsers take the last one."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    progress = Grammars(Bytes(), 256).begin(schema, [])
    for token in text.encode():
        progress.feed(token)
    assert progress.is_over == progress.is_complete == follows


def test_ids_that_stand_for_no_text() -> None:
    with pytest.raises(GrammarError, match="this model's ids stand for no text, so no grammar applies; leave it out"):
        Grammars(None, 256).begin({}, [])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match=r"needs the package llguidance; pip install 'mod-export\[structured\]'"):
        Grammars(Bytes(), 256).begin({}, [])


def test_compiling_has_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {
        "properties": {f"p{i}": {"type": "string"} for i in range(3000)},
        "required": [f"p{i}" for i in range(3000)],
    }
    monkeypatch.setattr(compiling, "COMPILE_S", 0.001)
    with pytest.raises(GrammarError, match=r"the grammar took longer than 0\.001 s to compile; simplify it"):
        Grammars(Bytes(), 256).begin(schema, [])


def endless(number: int = 0) -> dict[str, Any]:
    """A small schema of which llguidance makes a lexer of many gigabytes."""
    words = (f".*{chr(97 + i % 26)}.{{9}}{chr(97 + (i + 1) % 26)}x{i}n{number}" for i in range(48))
    return {"allOf": [{"type": "string", "pattern": word} for word in words]}


def test_a_small_schema_that_takes_for_ever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that compiles is killed, and another one compiles the next grammar."""
    grammars = Grammars(Bytes(), 256)
    grammars.begin({"type": "integer"}, [])
    first = grammars._process._process
    assert first is not None
    monkeypatch.setattr(compiling, "COMPILE_S", 0.5)
    with pytest.raises(GrammarError, match=r"^the grammar took longer than 0\.5 s to compile; simplify it$"):
        grammars.begin(endless(), [])
    assert first.returncode == -signal.SIGKILL
    monkeypatch.undo()
    grammars.begin({"type": "integer", "minimum": 3}, [])
    second = grammars._process._process
    assert second is not None
    grammars.begin({"type": "integer", "minimum": 4}, [])
    assert grammars._process._process is second is not first


def test_a_small_schema_that_takes_all_memory_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MOST_BYTES", 1 << 26)
    with pytest.raises(
        GrammarError, match=r"^the grammar took more than 0\.0625 GiB of memory to compile; simplify it$"
    ):
        Grammars(Bytes(), 256).begin(endless(), [])


def test_too_many_symbols_are_told_without_a_backtrace() -> None:
    schema = {"enum": [{f"a{i}": [i] * 30} for i in range(4000)]}
    message = "^no grammar can be made of it: it has more than 65,525 symbols; simplify it$"
    with pytest.raises(GrammarError, match=message):
        Grammars(Bytes(), 256).begin(schema, [])


def test_waiting_has_limits_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "MOST_WAITING", 2)
    monkeypatch.setattr(grammar_module, "WAIT_S", 0.1)
    monkeypatch.setattr(compiling, "COMPILE_S", 1.0)
    grammars = Grammars(Bytes(), 256)
    slow, waiting = grammars.compiled(endless(1)), grammars.compiled(endless(2))
    assert grammars.compiled(endless(2)) is waiting
    with pytest.raises(GrammarNotCompiledError, match=r"^2 other grammars wait to be compiled; try again in 5 s$"):
        grammars.compiled(endless(3))
    with pytest.raises(GrammarError, match="took longer than 1 s"):
        slow.result()
    with pytest.raises(
        GrammarNotCompiledError, match=r"^the grammar waited longer than 0\.1 s for others; try again in 5 s$"
    ):
        waiting.result()
    grammars.begin({"type": "integer"}, [])


def test_closing_ends_a_compilation() -> None:
    grammars = Grammars(Bytes(), 256)
    grammars.begin({"type": "integer"}, [])
    slow, waiting = grammars.compiled(endless(1)), grammars.compiled({"type": "null"})
    grammars.close()
    for future in (slow, waiting):
        with pytest.raises(GrammarNotCompiledError, match="is not compiled: this server, or generator, is closing"):
            future.result(timeout=0)
    assert grammars._thread is None


@pytest.mark.parametrize(
    ("program", "message"),
    [("/nowhere/python", r"cannot be started \(.*/nowhere/python"), ("/bin/false", r"did not start \(exit status 1\)")],
)
def test_no_process_for_grammars(monkeypatch: pytest.MonkeyPatch, program: str, message: str) -> None:
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(
        GrammarNotCompiledError, match=f"the grammar is not compiled: the process that would do it {message}"
    ):
        Grammars(Bytes(), 256).begin({}, [])


def test_a_compilation_does_not_keep_a_program_from_ending(tmp_path: Path) -> None:
    """A program without a check of its name, as scripts are: it is not run again for the process that compiles."""
    script = tmp_path / "script.py"
    script.write_text(
        "from mod_export.runtime import compiling\n"
        "from mod_export.runtime.grammar import Grammars\n"
        "from mod_export.runtime.texts import Bytes\n"
        "compiling.COMPILE_S = 600\n"
        "grammars = Grammars(Bytes(), 256)\n"
        "grammars.begin({'type': 'integer'}, [])\n"
        f"grammars.compiled({endless()})\n"
        "print('end', grammars._process._process.pid)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    word, process = done.stdout.split()
    assert word == "end"
    with pytest.raises(ProcessLookupError):
        os.kill(int(process), 0)


def test_a_grammar_may_force_texts() -> None:
    """Then llguidance asks for the tokens of a text, also in the process, which has no tokenizer."""
    progress = Grammars(Bytes(), 256).begin('%llguidance {}\nstart: "abc" /[0-9]/', [])
    for token in b"abc7":
        allowed_V = progress.restrict(np.zeros(256))
        assert allowed_V is not None
        assert np.isfinite(allowed_V[token])
        progress.feed(token)
    assert progress.is_over
    assert GrammarVocabulary([b"a", b"ab", b"c", b""], [2])("abxa") == [1, 0]


def test_the_last_grammars_are_kept() -> None:
    grammars = Grammars(Bytes(), 256)
    for length in range(KEPT + 4):
        grammars.begin({"maxLength": length}, [])
    assert len(grammars._compiled) == KEPT
    first = next(iter(grammars._compiled.values()))
    grammars.begin({"maxLength": 4}, [])
    assert next(reversed(grammars._compiled.values())) is first


def test_special_tokens_are_shown_on_request(tmp_path: Path) -> None:
    """They stand where they were written, also between words."""
    words = opened(write_folder(tmp_path, "mistral"))
    defaults = GenerationDefaults(frozenset(), 0.0, 0, 1.0)
    reader = RequestReader(words, words.size, defaults)
    ids = words.ids("fox[INST]dog fox[/INST]", special=False)
    for shown, expected in (
        ((), "foxdog fox"),
        (("[INST]", "nothing"), "fox[INST]dog fox"),
        (("[INST]", "[/INST]"), "fox[INST]dog fox[/INST]"),
    ):
        # What follows a prompt keeps the space of its first word.
        for answers, space in ((True, ""), (False, " ")):
            (text,) = reader.texts([ids], shown=shown, answers=answers)
            assert text.reader is not None
            assert "".join(map(text.reader.feed, ids)) + text.reader.close() == space + expected
    # So does what follows a mark.
    ids = words.ids("[INST] fox[/INST] dog", special=False)
    (text,) = reader.texts([words.ids("fox")], shown=("[INST]", "[/INST]"), answers=True)
    assert text.reader is not None
    assert "".join(map(text.reader.feed, ids)) + text.reader.close() == "[INST] fox[/INST] dog"
    bytes_only = RequestReader(None, 256, defaults)
    assert bytes_only.texts([[1]], shown=("[INST]",))[0].reader is None
