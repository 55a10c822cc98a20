"""Commands that write files, and what must be true of the files after a mishap and at the end.

Each work runs in a folder of its own. A mishap may leave anything that is not yet under its final name; what has its
final name must be whole. The next run of the same command goes on, and in the end there is what an undisturbed run
leaves.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.floors.environments import CONFIG as TINY_CONFIG
from mod_export.errors import BuildFolderError
from mod_export.folder.manifest import open_folder
from mod_export.model.checkpoint import model_from_checkpoint
from mod_export.rows.report import report_from_json
from mod_export.serve.server import ServerOptions, serve_folder
from mod_export.serve.service import ServiceOptions
from mod_models.checkpoint import load_checkpoint, random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec, RoutingSpec

SPEC = ModelSpec(
    vocab_size=256, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, d_head=8, d_ff=64, max_positions=64,
    routing=RoutingSpec(capacity=0.375, predictor_hidden=8, layers=(0, 2)),
)  # fmt: skip
# Without engines that write text, which would take most of the time.
CONFIG = TINY_CONFIG.partition("[generation]")[0] + '[generation]\nbuild = "never"\n'
STEPS = 40
TRAINING = ["--steps", str(STEPS), "--batch", "2", "--seq", "16", "--warmup", "3", "--eval-every", "4"]
TRAINING += ["--eval-batches", "1", "--log-every", "2", "--threads", "1"]
SERVED, TEXTS = "served", "texts.json"
PROMPTS = ("def f(", "a", "import os\n", "def f(x", "    return", "1 + 1")


class DamagedError(Exception):
    """Something under its final name is not whole, a command failed badly, or its end is not that of other runs."""


class Work(ABC):
    """A command that writes into the folder `out`.

    Attributes:
        writes: whether the command itself writes files, so that disks and renames can fail it.
    """

    writes = True

    def __init__(self, inputs: Path) -> None:
        """Makes what the command reads, in `inputs`."""
        self.inputs = inputs

    @abstractmethod
    def arguments(self, out: Path) -> list[str]:
        """Returns the program (`mod-export`, `train` or `serve-and-ask`) and its arguments."""

    @abstractmethod
    def check(self, out: Path) -> None:
        """Checks what a mishap left.

        Raises:
            DamagedError: something is not whole.
        """

    @abstractmethod
    def result(self, out: Path) -> Mapping[str, str]:
        """Returns what must be equal at the end: name -> hash or value."""

    def done(self, out: Path) -> bool:
        """Returns whether a disturbed command has nothing left to do, because it refuses what is there already."""
        return False

    def prepare(self, out: Path) -> None:  # noqa: B027  # Most works begin with nothing.
        """Makes what is there before the first run."""


class Build(Work):
    """`mod-export build` of a model."""

    def __init__(self, inputs: Path) -> None:
        super().__init__(inputs)
        save_checkpoint(inputs / "model.pt", random_checkpoint(SPEC, 0))
        (inputs / "build.toml").write_text(CONFIG, encoding="utf-8")

    def arguments(self, out: Path) -> list[str]:
        return [
            "mod-export",
            "build",
            str(self.inputs / "model.pt"),
            "-c",
            str(self.inputs / "build.toml"),
            "-o",
            str(out),
        ]

    def check(self, out: Path) -> None:
        """A folder opens with every hash right, or it is an unfinished build that says so."""
        if not out.exists():
            return
        try:
            open_folder(out)
        except BuildFolderError as error:
            if "was not finished" not in str(error) and "no manifest.json" not in str(error):
                raise DamagedError(str(error)) from error

    def result(self, out: Path) -> Mapping[str, str]:
        open_folder(out)
        verdict = report_from_json((out / "report.json").read_text(encoding="utf-8")).verdict.status
        return {"verdict": verdict, **hashes(out, "graphs", "engines")}


class Validate(Build):
    """`mod-export validate` of a finished folder, in which it writes nothing."""

    writes = False

    def __init__(self, inputs: Path) -> None:
        super().__init__(inputs)
        command = [sys.executable, "-m", "mod_export", *super().arguments(inputs / "built")[1:]]
        subprocess.run(command, check=True, capture_output=True)
        self._expected = hashes(inputs / "built", ".")

    def prepare(self, out: Path) -> None:
        shutil.copytree(self.inputs / "built", out)

    def arguments(self, out: Path) -> list[str]:
        return ["mod-export", "validate", str(out)]

    def check(self, out: Path) -> None:
        """The folder is as it was."""
        if hashes(out, ".") != self._expected:
            raise DamagedError(f"{out}: a file has changed")


class Convert(Work):
    """`mod-export convert` of a folder of transformers."""

    def __init__(self, inputs: Path) -> None:
        super().__init__(inputs)
        torch.manual_seed(0)
        disable_progress_bar()
        config = LlamaConfig(
            vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=128,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(inputs / "llama")

    def arguments(self, out: Path) -> list[str]:
        return ["mod-export", "convert", str(self.inputs / "llama"), str(out)]

    def check(self, out: Path) -> None:
        """There is a whole model, or none."""
        if out.exists():
            try:
                model_from_checkpoint(out)
            except Exception as error:  # However the reader fails: the model is not whole.
                raise DamagedError(f"{out}: {error}") from error

    def done(self, out: Path) -> bool:
        return out.exists()

    def result(self, out: Path) -> Mapping[str, str]:
        return hashes(out, ".")


class Train(Work):
    """Training, which goes on from its last evaluation."""

    def __init__(self, inputs: Path) -> None:
        super().__init__(inputs)
        (inputs / "spec.json").write_text(json.dumps(SPEC.to_dict()), encoding="utf-8")
        (inputs / "text.txt").write_text("def main(argument):\n    return argument + 1\n" * 2000, encoding="utf-8")

    def arguments(self, out: Path) -> list[str]:
        files = ["--spec", str(self.inputs / "spec.json"), "--data", str(self.inputs / "text.txt")]
        return ["train", "--out", str(out), *files, *TRAINING]

    def check(self, out: Path) -> None:
        """The model and the state of the run can be read, or are not there."""
        try:
            if (out / "model.pt").exists():
                load_checkpoint(out / "model.pt")
            if (out / "state.pt").exists():
                torch.load(out / "state.pt", weights_only=True)
        except Exception as error:  # However torch fails: the file is not whole.
            raise DamagedError(f"{out}: {error}") from error

    def result(self, out: Path) -> Mapping[str, str]:
        weights = load_checkpoint(out / "model.pt").weights
        found = {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in weights.items()}
        return {**found, "steps": str(torch.load(out / "state.pt", weights_only=True)["step"])}


class Serve(Work):
    """`mod-export serve` of a folder that writes text, which a client asks for texts before it ends the server."""

    writes = False

    def __init__(self, inputs: Path) -> None:
        super().__init__(inputs)
        save_checkpoint(inputs / "model.pt", random_checkpoint(SPEC, 0))
        (inputs / "build.toml").write_text(TINY_CONFIG, encoding="utf-8")
        command = ["build", inputs / "model.pt", "-c", inputs / "build.toml", "-o", inputs / "built", "-q"]
        subprocess.run([sys.executable, "-m", "mod_export", *command], check=True, capture_output=True)
        self._expected = hashes(inputs / "built", ".")

    def prepare(self, out: Path) -> None:
        shutil.copytree(self.inputs / "built", out / SERVED)

    def arguments(self, out: Path) -> list[str]:
        return ["serve-and-ask", str(out)]

    def check(self, out: Path) -> None:
        """The folder is as it was."""
        if hashes(out / SERVED, ".") != self._expected:
            raise DamagedError(f"{out / SERVED}: a file has changed")

    def result(self, out: Path) -> Mapping[str, str]:
        return {**hashes(out, SERVED), "texts": (out / TEXTS).read_text(encoding="utf-8")}


def serve_and_ask(out: Path) -> int:
    """Serves a folder to a client in the same process, which asks for texts, writes them down and ends the server."""

    def ask(address: str) -> None:
        texts = []
        for prompt in PROMPTS:
            body = json.dumps({"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}).encode()
            with urllib.request.urlopen(f"{address}/v1/completions", body, timeout=60) as answer:
                texts.append(json.load(answer)["choices"])
        (out / TEXTS).write_text(json.dumps(texts), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGTERM)

    def say(text: str) -> None:
        address = re.search(r"http://[0-9.]+:[0-9]+", text)
        assert address is not None
        threading.Thread(target=ask, args=[address[0]], daemon=True).start()

    return serve_folder(out / SERVED, ServiceOptions(threads=1), ServerOptions(port=0), say)


WORKS: Mapping[str, type[Work]] = {
    "build": Build, "validate": Validate, "convert": Convert, "train": Train, "serve": Serve,
}  # fmt: skip


def hashes(root: Path, *folders: str) -> dict[str, str]:
    """File -> SHA-256, for all files in these folders but those of unfinished writes."""
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*") if path.is_file())
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if not path.name.startswith(".")
    }
