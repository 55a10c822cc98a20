"""A trained model in a GGUF file compared with transformers: converted from the file, and from folders that
transformers saved.

    make real MODEL=SmolLM2-135M-Instruct.Q4_1.gguf TEXT=english.txt

Nothing is downloaded. The measurements are printed, and docs/models.md quotes them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mod_models.checkpoint import Checkpoint, load_checkpoint
from mod_models.generate import Session
from mod_models.generation_spec import for_generation
from mod_models.transformer import Transformer

pytestmark = pytest.mark.real
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees Celsius, which is",
)
TEXTS = (
    "Hello world", " leading and trailing ", "two  spaces   three", "naïve café",
    "你好,世界 😀 \U0001f469\u200d\U0001f467",
    "tabs\t\tand\n\n\nlines\r\n", "<|im_start|>user\nhi<|im_end|>\n", "a<|endoftext|>b", "12345.678, 3,000 and 2024",
    "don't WE'LL I'm", "x" * 60, "if (a <= b) { return -1; }", "\u0645\u0631\u062d\u0628\u0627 ½ \u2167",
    "e\u0301 \u00e9",
    "\u00a0\u3000\u200b", "a\x00b", "#" * 30, "[[link]](https://example.org/a?b=c&d=%20)",
)  # fmt: skip
NUMBERS = (
    "def f():\n    return 5\n\nx = f(\n    1,\n", "The table below lists the values.\n\n    1  apple\n    2  pear\n",
    "primes = [\n    2, 3, 5, 7,\n    11, 13, 17,\n]\n", "Population:  5000\nArea:  300\n",
    "    if (i == 0)\n        return 0;\n    else\n        3\n", "1.  First, open the door.  2.  Second, close it.",
    "int a[3] = {\n        10,\n        20,\n        30\n};\n", "\n\n1. One\n\n2. Two\n\n3. Three\n",
)  # fmt: skip
WINDOW, WINDOWS = 512, 24


class Original(NamedTuple):
    """The model as transformers reads it from the GGUF file."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@pytest.fixture(scope="session")
def file(request: pytest.FixtureRequest) -> Path:
    return Path(request.config.getoption("--real-model")).resolve()


@pytest.fixture(scope="session")
def english(request: pytest.FixtureRequest) -> str:
    """Held-out text: the given file, or else the pages of this project."""
    named = request.config.getoption("--real-text")
    paths = [Path(named)] if named else sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    return "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


@pytest.fixture(scope="session")
def original(file: Path) -> Original:
    torch.set_num_threads(os.cpu_count() or 1)
    options: dict[str, Any] = {"gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
    model.generation_config.eos_token_id = None  # 64 tokens of every prompt are compared.
    return Original(model.eval(), transformers.AutoTokenizer.from_pretrained(file.parent, **options))


@pytest.fixture(scope="session")
def folders(file: Path, original: Original, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that `convert` makes from the file, from a folder, and from a folder of shards."""
    root = tmp_path_factory.mktemp("real")
    sources = {"file": file, "folder": root / "folder", "shards": root / "shards"}
    original.model.hf_quantizer = None  # The model holds dequantized floats, but could not be saved with the quantizer.
    for name, limit in (("folder", "5GB"), ("shards", "150MB")):
        original.model.save_pretrained(sources[name], max_shard_size=limit)
        original.tokenizer.save_pretrained(sources[name])
    assert len([*sources["shards"].glob("*.safetensors")]) > 2
    for name, source in sources.items():
        begin = time.perf_counter()
        words = ["convert", str(source), str(root / f"from-{name}"), "-q"]
        code = ("import resource; from mod_export.cli import main\ntry:\n    main()\nfinally:\n"
                "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")  # fmt: skip
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        peak = int(done.stdout.splitlines()[-1]) / 1024
        sys.stderr.write(f"\nconverted from {name}: {time.perf_counter() - begin:.1f} s, peak {peak:.0f} MiB\n")
    return {name: root / f"from-{name}" for name in sources}


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    def said(line: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{line}\n")

    return said


def ours(folder: Path) -> tuple[Checkpoint, Tokenizer]:
    return load_checkpoint(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("name", ["file", "folder", "shards"])
def test_logits(
    name: str, original: Original, folders: dict[str, Path], english: str, tell: Callable[..., None]
) -> None:
    checkpoint, tokenizer = ours(folders[name])
    module, ids = checkpoint.module(), tokenizer.encode(english).ids
    differences, largest = [], 0.0
    for at in range(5):
        ids_1S = torch.tensor([ids[at * 1000 : at * 1000 + 70]])
        with torch.no_grad():
            expected_1SV = original.model(ids_1S).logits
            (found_1SV,) = module(ids_1S, torch.tensor([ids_1S.shape[1]]))
        differences.append(float((found_1SV - expected_1SV).abs().max()))
        largest = max(largest, float(expected_1SV.abs().max()))
    tell(f"logits from {name}: {min(differences):.1e} to {max(differences):.1e} of up to {largest:.1f}")
    assert max(differences) < 5e-6 * largest


def test_the_same_weights_from_everywhere(folders: dict[str, Path]) -> None:
    expected = load_checkpoint(folders["file"])
    for name in ("folder", "shards"):
        found = load_checkpoint(folders[name])
        # The file has 1e-05 in float32, which transformers writes into config.json in float64.
        assert replace(found.spec, norm_eps=expected.spec.norm_eps) == expected.spec
        assert torch.tensor(found.spec.norm_eps) == torch.tensor(expected.spec.norm_eps)
        assert all(torch.equal(found.weights[key], tensor) for key, tensor in expected.weights.items())


def test_64_tokens(original: Original, folders: dict[str, Path], tell: Callable[..., None]) -> None:
    """Writes greedily, token by token with the cache."""
    checkpoint, tokenizer = ours(folders["file"])
    model, equal = Transformer(for_generation(checkpoint.spec, 128)).sharing(checkpoint.module()), 0
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        assert ids == original.tokenizer(prompt, add_special_tokens=False).input_ids
        # Its end-of-turn token is also its padding, which transformers would hide without a mask.
        ids_1S = torch.tensor([ids])
        (expected,) = original.model.generate(
            ids_1S, attention_mask=torch.ones_like(ids_1S), max_new_tokens=64, do_sample=False
        ).tolist()
        session = Session(model, 128)
        next_1V = session.read(ids_1S, torch.tensor([len(ids)]))
        written: list[int] = []
        for _ in range(64):
            written.append(int(next_1V.argmax()))
            next_1V = session.write(torch.tensor(written[-1:]))
        equal += written == expected[len(ids) :]
        tell(f"{prompt!r} -> {tokenizer.decode(written)[:60]!r}")
    tell(f"64 greedy tokens: {equal} of {len(PROMPTS)} texts equal")
    assert equal == len(PROMPTS)


def test_the_ids_of_texts(
    original: Original, folders: dict[str, Path], english: str, tell: Callable[..., None]
) -> None:
    """They equal those of transformers, except that for `smollm` it does not part digits from spaces before them."""
    texts = [*TEXTS, *(english[at : at + 2000] for at in range(0, min(len(english), 400_000), 2000))]
    tokenizer = ours(folders["file"])[1]
    vocabulary = Tokenizer.from_str(original.tokenizer.backend_tokenizer.to_str())
    found = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    as_it_is = [original.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    vocabulary.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    parted = [vocabulary.encode(text, add_special_tokens=False).ids for text in texts]
    same = sum(one == other for one, other in zip(found, as_it_is, strict=True))
    tell(f"ids of {len(texts)} texts: {same} as transformers has them, "
         f"{sum(one == other for one, other in zip(found, parted, strict=True))} with digits parted first")  # fmt: skip
    assert found == parted
    assert [tokenizer.decode(ids, skip_special_tokens=False) for ids in found] == texts
    unequal = [text for text, one, other in zip(texts, found, as_it_is, strict=True) if one != other]
    assert all(any(character.isnumeric() for character in text) for text in unequal)


def test_perplexity(original: Original, folders: dict[str, Path], english: str, tell: Callable[..., None]) -> None:
    checkpoint, tokenizer = ours(folders["file"])
    module, ids = checkpoint.module(), torch.tensor(tokenizer.encode(english, add_special_tokens=False).ids)
    windows_NS = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    windows_NS = windows_NS[:: max(1, len(windows_NS) // WINDOWS)][:WINDOWS]
    sums = torch.zeros(2, dtype=torch.float64)
    for row_S in windows_NS:
        row_1S = row_S[None]
        with torch.no_grad():
            both = original.model(row_1S).logits, module(row_1S, torch.tensor([WINDOW]))[0]
        sums += torch.tensor([float(functional.cross_entropy(one[0, :-1], row_S[1:])) for one in both])
    theirs, converted = (sums / len(windows_NS)).exp().tolist()
    tell(f"perplexity of {len(windows_NS)} windows of {WINDOW}: {converted:.6f}, transformers {theirs:.6f}")
    assert abs(converted / theirs - 1) < 1e-5


def test_spaces_before_digits_are_read_as_the_model_learned_them(
    original: Original, folders: dict[str, Path], tell: Callable[..., None]
) -> None:
    """Where the two tokenizers differ, the model finds the text more probable as it is tokenized here."""
    tokenizer, nats = ours(folders["file"])[1], torch.zeros(2)
    for text in NUMBERS:
        both = (tokenizer.encode(text, add_special_tokens=False).ids,
                original.tokenizer(text, add_special_tokens=False).input_ids)  # fmt: skip
        assert both[0] != both[1]
        for which, ids in enumerate(both):
            ids_S = torch.tensor([0, *ids])  # The text follows the end of another one.
            with torch.no_grad():
                logits_SV = original.model(ids_S[None]).logits[0]
            nats[which] += functional.cross_entropy(logits_SV[:-1], ids_S[1:], reduction="sum")
    tell(f"numbers after spaces: {nats[0]:.1f} nats as they are read here, {nats[1]:.1f} as transformers reads them")
    assert nats[0] < nats[1]
