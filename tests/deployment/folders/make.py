"""Builds the folder that the tests keep of this release, with the command line, and packs it beside this file."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

import mod_export
from mod_models.checkpoint import Checkpoint, random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec, RoutingSpec

HERE = Path(__file__).parent
PROMPT = "def main():"
NEW_TOKENS = 8
SPEC = ModelSpec(
    vocab_size=256, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, d_head=8, d_ff=32, max_positions=64,
    routing=RoutingSpec(layers=(1,), capacity=0.5, selection="threshold"),
)  # fmt: skip
CONFIG = """
buckets = [[1, 16]]
targets = ["ort-cpu"]
[latency]
samples = 5
max_samples = 8
warmup = 1
bootstrap = 100
min_speedup = 0.0
[cost]
profile_runs = 0
[generation]
window = 32
prompts = [8]
batches = [1]
compared_texts = 2
compared_tokens = 8
measured_tokens = 5
"""


def checkpoint() -> Checkpoint:
    """Weights so large that the next token is never a matter of rounding."""
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, tensor in random_checkpoint(SPEC, 0).weights.items():
        noise = torch.randn(tensor.shape, generator=generator)
        weights[name] = 1 + 0.3 * noise if name.endswith("norm.weight") else 2 * noise / tensor.shape[-1] ** 0.5
    return Checkpoint(spec=SPEC, weights=weights)


def packed(folder: Path, archive: Path) -> None:
    """Packs a folder without the owner and the times of its files."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return None if entry.name.endswith(".lock") else entry

    with (
        archive.open("wb") as file,
        gzip.GzipFile("", "wb", 9, file, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        tar.add(folder, folder.name, filter=plain)


def expected(folder: Path) -> dict[str, object]:
    """Returns what the folder's engines compute, and by how much the first choice of each token leads."""
    ids = np.frombuffer(PROMPT.encode(), dtype=np.uint8).astype(np.int64)[None]
    with mod_export.load(folder) as deployment:
        logits_V = deployment.run(ids)[0, -1]
    with mod_export.load_generator(folder) as generator:
        (written,) = generator.generate([PROMPT], NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=2)
    leads = [one.top[0][1] - one.top[1][1] for one in written.logprobs]
    assert min(leads) > 0.02, f"the second choice is too close: {leads}"
    return {
        "prompt": PROMPT,
        "logits": [round(float(logit), 4) for logit in logits_V],
        "ids": written.ids,
        "ran": {str(site): tokens for site, tokens in written.ran.items()},
    }


def main() -> None:
    release = version("mod-export")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_checkpoint(folder / "kept.pt", checkpoint())
        (folder / "kept.toml").write_text(CONFIG, encoding="utf-8")
        command = [sys.executable, "-m", "mod_export", "build", "kept.pt", "-c", "kept.toml", "-o", release, "-q"]
        subprocess.run(command, cwd=folder, check=True)
        results = json.dumps(expected(folder / release), indent=1) + "\n"
        packed(folder / release, HERE / f"{release}.tar.gz")
    (HERE / f"{release}.json").write_text(results, encoding="utf-8")


if __name__ == "__main__":
    main()
