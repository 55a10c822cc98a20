"""Models that write text in the benchmark: dense weights, the files that every program reads them from, the
Mixture-of-Depths model made from them, and the prompts.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.rivals.cases import SIZES, VOCABULARY
from benchmarks.rivals.dense_files import write_gguf, write_hugging_face
from mod_models.checkpoint import Checkpoint, load_checkpoint, random_checkpoint, save_checkpoint
from mod_models.generation_spec import for_generation
from mod_models.spec import ModelSpec
from mod_models.train.retrofit import calibrate, layers_of, retrofitted, routed_spec
from mod_models.transformer import Transformer

ROOT = Path(__file__).parents[2]
ROUTE = "every:2"
CALIBRATION_ROWS = 4


@dataclass(frozen=True)
class TextCase:
    """A model and a request.

    Attributes:
        name: name of the model in files and tables.
        model: folder of a dense checkpoint with its tokenizer; empty for initial weights of the size `name`.
        text: file that prompts are taken from; empty for pages of this project. Without a tokenizer, ids are random.
        vocab: vocabulary of a model with initial weights.
        capacity: capacity of the routed half of the Mixture-of-Depths model's blocks.
        prompt: tokens of each prompt.
        new: tokens written after the prompt.
        window: window of this project's engines, which determines the slots of the routed layers.
        judged: tokens on which the next token is compared.
        anchored: whether our dense model in float32 is measured beside every precision.
    """

    name: str
    model: str = ""
    text: str = ""
    vocab: int = VOCABULARY
    capacity: float = 0.25
    prompt: int = 512
    new: int = 64
    window: int = 1024
    judged: int = 512
    anchored: bool = True

    @property
    def cache(self) -> int:
        """Tokens that a cache must hold: those of a request, or of the text on which next tokens are compared."""
        return max(self.prompt + self.new, self.judged)

    @property
    def tokenizer(self) -> Path | None:
        return Path(self.model) if self.model else None


def dense_checkpoint(case: TextCase) -> Checkpoint:
    """Returns the dense model: the given checkpoint, or initial weights with as many positions as the window needs."""
    if case.model:
        return load_checkpoint(Path(case.model))
    sizes = SIZES[case.name]
    return random_checkpoint(ModelSpec(vocab_size=case.vocab, max_positions=max(case.window, 128), **sizes), 0)


def ids_of(case: TextCase, vocab: int, count: int) -> np.ndarray:
    """Returns the first `count` ids of the text, int64; random ids if the case has no tokenizer.

    Raises:
        ValueError: the text is too short.
    """
    if not case.model:
        return np.random.default_rng(0).integers(0, vocab, count, dtype=np.int64)
    paths = [Path(case.text)] if case.text else sorted((ROOT / "docs").glob("*.md"))
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in paths)
    tokenizer = Tokenizer.from_file(str(Path(case.model) / "tokenizer.json"))
    ids = np.array(tokenizer.encode(text[: 8 * count], add_special_tokens=False).ids[:count], dtype=np.int64)
    if len(ids) < count:
        raise ValueError(f"{case.text or 'docs'}: holds {len(ids)} tokens of the {count} that are needed")
    return ids


def write_models(case: TextCase, folder: Path) -> None:
    """Writes the MoD checkpoint, the Hugging Face folder, the GGUF files, the ids, and the eager models' logits."""
    dense = dense_checkpoint(case)
    ids = ids_of(case, dense.spec.vocab_size, CALIBRATION_ROWS * case.window)
    spec = routed_spec(dense.spec, layers_of(ROUTE, dense.spec.n_layers, "block"), case.capacity, "block", "predictor")
    routed = retrofitted(dense, spec, 0)
    module = routed.module()
    calibrate(module, torch.from_numpy(ids).view(CALIBRATION_ROWS, 1, case.window))
    routed = Checkpoint(spec=spec, weights={name: tensor.clone() for name, tensor in module.state_dict().items()})
    save_checkpoint(folder / "mod.pt", routed)
    np.save(folder / "ids.npy", ids)
    write_hugging_face(dense, folder / "hf", case.tokenizer)
    write_gguf(dense, folder / "float32.gguf")
    write_gguf(dense, folder / "float16.gguf", np.float16)
    (folder / "case.json").write_text(json.dumps(asdict(case)), encoding="utf-8")
    ids_1S = torch.from_numpy(ids[None, : case.judged])
    for kind, checkpoint in (("mod", routed), ("dense", routed.dense())):
        eager = Transformer(for_generation(checkpoint.spec, case.window)).sharing(checkpoint.module()).eval()
        with torch.no_grad():
            (logits_1SV,) = eager(ids_1S, torch.tensor([case.judged]))
        np.save(folder / f"{kind}.logits.npy", logits_1SV[0].numpy())


@cache
def judged_ids(folder: Path) -> np.ndarray:
    """Returns the ids on which the next token is compared, int64."""
    case = TextCase(**json.loads((folder / "case.json").read_text(encoding="utf-8")))
    ids: np.ndarray = np.load(folder / "ids.npy")[: case.judged]
    return ids


def prompts_of(case: TextCase, folder: Path, batch: int, turn: int) -> np.ndarray:
    """Returns prompts, int32 (batch, prompt). Each turn has other ones, so that no program can reuse earlier work."""
    ids = np.load(folder / "ids.npy")
    starts = (turn * 97 + 131 * np.arange(batch)) % (len(ids) - case.prompt)
    return np.stack([ids[start : start + case.prompt] for start in starts]).astype(np.int32)
