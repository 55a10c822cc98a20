"""What is refused, before the first token or at the one that goes wrong, and with which message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build_folders import file_entry, rewrite_manifest
from writing import engine_path, prompts_of_lengths

from mod_export.environment import limited
from mod_export.errors import BuildFolderError, EngineError, TargetError, UsageError
from mod_export.folder.manifest import open_folder
from mod_export.graph.weights import WeightsFile
from mod_export.runtime.deployment import served_engines
from mod_export.runtime.generator import Generator, load_generator


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "expected at least one prompt"),
        ("", {}, "prompt 0 is empty; expected at least one token"),
        ([[1], []], {}, "prompt 1 is empty; expected at least one token"),
        ([[256]], {}, "prompt 0: expected text, or token ids from 0 to 255, got 256"),
        ([[1], [5, -1]], {}, "prompt 1: expected text, or token ids from 0 to 255, got -1"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens: expected a whole number of at least 1, got 0"),
        ([[1]], {"max_new_tokens": True}, "max_new_tokens: expected a whole number of at least 1, got True"),
        ([[1]], {"max_new_tokens": 1.5}, "max_new_tokens: expected a whole number of at least 1, got 1.5"),
        (
            [[1]],
            {"max_new_tokens": 49},
            "a text of 49 tokens, prompt and answer together, is longer than the window of 48; ask for fewer new "
            "tokens, build a longer window (generation.window), or let the text roll (rolling=True, --roll), which "
            "goes on from its second half",
        ),
        (
            [[1] * 49],
            {"rolling": True},
            "a prompt of 49 tokens does not fit the window of 48, even if texts roll; give its last 48 tokens, or ",
        ),
        ([[1]], {"temperature": -1.0}, "temperature: got -1.0, expected a finite number of at least 0; "),
        ([[1]], {"top_k": -1}, "top_k: got -1, expected a whole number of at least 0; "),
        ([[1]], {"top_p": -0.5}, "top_p: got -0.5, expected a number from 0 to 1; 1 draws from all tokens"),
        ([[1]], {"seed": -2}, "seed: got -2, expected a whole number of at least 0; -1 draws a seed"),
        ([[1]], {"stop": [""]}, "stop: got '', expected a string of at least one character; leave it out"),
        ([[1]], {"stop": "ab"}, "stop: got the string 'ab', expected a list of strings and ids; write ['ab']"),
        *(([[1]], {"stop": [token]}, "stop: expected strings and ids from 0 to 255, got ") for token in (256, -1, 1.5)),
        (None, {}, "expected a prompt or a list of prompts, got NoneType"),
        ([[1.5]], {}, "prompt 0: expected text, or token ids from 0 to 255, got 1.5"),
        ([[1], [True]], {}, "prompt 1: expected text, or token ids from 0 to 255, got True"),
    ],
)  # fmt: skip
def test_refused_before_the_first_token(
    generator: Generator, prompts: Any, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        generator.stream(prompts, **{"max_new_tokens": 2, **options})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("length", [0, 48])
def test_prefixes_that_leave_no_room(generator: Generator, length: int) -> None:
    with pytest.raises(UsageError, match=f"^a prefix has 1 to 47 tokens, got {length}$"):
        generator.prefix([1] * length)


def test_ids_that_stand_for_no_text(written_copy: Path) -> None:
    rewrite_manifest(written_copy, lambda manifest: manifest.update(tokenizer=None))
    with load_generator(written_copy) as generator:
        assert generator.vocabulary is None
        (found,) = generator.generate([[1, 2]], 4)
        assert (len(found.ids), found.text) == (4, "")
        with pytest.raises(UsageError, match="ids stand for no text; give prompts as ids, or build with a tokenizer"):
            generator.generate("text", 4)
        with pytest.raises(UsageError, match="stop: this model's ids stand for no text; give ids to stop at"):
            generator.generate([[1]], 4, stop=["x"])
        assert generator.generate([[1, 2]], 4, stop=[found.ids[1]])[0].finish == "stop"


def test_no_memory_for_the_cache(written: Path) -> None:
    with load_generator(written) as generator:
        stream = generator.stream([[1]] * 3, 2)
        with limited(1), pytest.raises(UsageError, match=r"the cache of 3 texts of 48 tokens takes 0 MiB, 0 MiB are"):
            next(stream)
        assert generator.generate([[1]] * 3, 2)


def test_engines_that_are_damaged_or_missed_their_gates_are_refused(written_copy: Path) -> None:
    path = engine_path(written_copy, "mod-decode-b3s48-float32")
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(BuildFolderError, match="mod-decode-b3s48-float32"):
        load_generator(written_copy)
    refused = {"engines/ort-cpu/mod-decode-b1s48-float32.onnx": ["text: logits differ"]}
    rewrite_manifest(written_copy, lambda manifest: manifest.update(refused=refused))
    with pytest.raises(TargetError, match=r"missed their gates and are not served \(text: logits differ\)"):
        load_generator(written_copy)
    load_generator(written_copy, model="dense")


def test_what_a_folder_does_not_hold(written: Path) -> None:
    """Other refusals are those of `load`."""
    with pytest.raises(TargetError, match="holds no float16 engine that writes text for ort-cpu"):
        load_generator(written, dtype="float16")


def test_a_target_that_keeps_no_cache_here(written_copy: Path) -> None:
    """The target runs on this machine, but its runners keep no buffers."""

    def change(manifest: dict[str, Any]) -> None:
        for engine in manifest["engines"]:
            engine["target"] = "inductor"

    rewrite_manifest(written_copy, change)
    message = r"no engine that writes text runs here: inductor: its cache is kept on the device by the server"
    with pytest.raises(TargetError, match=message):
        load_generator(written_copy)


def test_folders_that_cannot_generate(built: Path) -> None:
    """The model selects with the whole text; the message offers training as the way out, and scoring as possible."""
    with pytest.raises(UsageError) as caught:
        load_generator(built)
    message = str(caught.value)
    assert message.startswith(f"{built}: cannot generate: routing.selection=topk: whether a token is among the k best")
    assert "train the predictor beside it" in message
    assert "mod-export generate --selection topk-prefill" in message


def poisoned(folder: Path, name: str, row: int) -> None:
    """Writes NaN into a row of a weight, and updates its hash."""
    (path,) = (folder / "graphs").glob("weights-float32.data")
    _, shape, offset, length = WeightsFile.open(path).entries[name]
    data = bytearray(path.read_bytes())
    width = length // shape[0]
    start = offset + row * width
    data[start : start + width] = np.full(width // 4, np.nan, np.float32).tobytes()
    path.write_bytes(data)
    relative = str(path.relative_to(folder))
    rewrite_manifest(folder, lambda manifest: manifest["files"][relative].update(file_entry(path)))


def test_logits_that_are_not_finite_stop_with_token_and_position(written_copy: Path, generator: Generator) -> None:
    """The embedding of a token that the text reaches is damaged."""
    prompts = prompts_of_lengths([2, 6], seed=4)
    ids = generator.generate(prompts, 20)[1].ids
    at = next(i for i, token in enumerate(ids) if token not in ids[:i] and i > 3)
    poisoned(written_copy, "embedding.weight", ids[at])
    message = (
        rf"the logits of token {at + 2} of prompt 0 are not finite, at position {6 + at + 1} of the text: the weights "
        "or the engine are damaged; mod-export validate says where"
    )
    with load_generator(written_copy) as damaged:
        stream = damaged.stream([prompts[1]], 20)
        with pytest.raises(EngineError, match=message):
            list(stream)
        assert stream.completions[0].ids == ids[: at + 1]
        # The generator is free again, and texts without that token continue.
        assert damaged.generate([prompts[1]], at)[0].ids == ids[:at]
        with pytest.raises(EngineError, match="the logits of token 1 of prompt 0 are not finite, at position 2"):
            damaged.generate([[ids[at], 1]], 3)


def test_an_engine_that_is_no_step(written: Path) -> None:
    with load_generator(written) as generator:
        engine = next(engine for engine in generator._engines.engines if engine.role == "prefill")
        with (
            pytest.raises(EngineError, match="expected input_ids, positions, slots and logits; build again"),
            generator._engines.decoder(engine),
        ):
            pass


def test_an_engine_that_reads_no_parts(written: Path) -> None:
    with load_generator(written) as generator:
        engine = next(engine for engine in generator._engines.engines if engine.role == "decode")
        message = "decode-.*: the engine that reads 48 tokens does not continue texts on the cache of the others; build"
        with pytest.raises(EngineError, match=message), generator._engines.prompts_of([engine]):
            pass


def test_a_part_that_does_not_fit(written: Path) -> None:
    with load_generator(written) as generator:
        prompts = generator._reads()
        with pytest.raises(EngineError, match=r"^48 and 1 tokens: a row of this cache holds 48 tokens$"):
            prompts.read(range(49))
        # What fits can still be read.
        assert prompts.read(range(48)).length == 48


def test_a_prefix_belongs_to_the_engines_that_read_it(written: Path, generator: Generator) -> None:
    with load_generator(written, model="dense") as dense:
        prefix = dense.prefix([1, 2, 3])
    with pytest.raises(UsageError, match=r"^prefix: was read by engines/ort-cpu/dense-prefill-.*; read it again here"):
        generator.generate([[4]], 2, prefix=prefix)


def test_a_prefix_belongs_to_the_weights_that_read_it(written: Path) -> None:
    """Another build into the same folder leaves the paths as they are."""
    manifest = open_folder(written, verify=False)
    engines = served_engines(written, manifest, "mod", None, None, texts=True)
    weights = engines[0].files[-1]
    entry = manifest.files[weights].model_copy(update={"sha256": "0" * 64})
    rebuilt = manifest.model_copy(update={"files": {**manifest.files, weights: entry}})
    with Generator(written, manifest, engines, 1, 0) as before, Generator(written, rebuilt, engines, 1, 0) as after:
        prefix = before.prefix([1, 2, 3])
        with pytest.raises(UsageError, match=r"^prefix: was read by .*; read it again here"):
            after.generate([[4]], 2, prefix=prefix)
