"""Asks the models of `make retrofit` the questions of lm-eval: `make retrofit-tasks`.

    python -m benchmarks.retrofit.tasks [--tasks NAME,NAME] [--include-path DIR] [--limit N] [--only PATTERN] ...

It runs in the environment of lm-eval, which pins other versions of libraries than the project. A model answers as it
writes text: predictors decide, and a text has the slots of the window. The answers are kept beside the samples;
`python -m benchmarks.retrofit.render docs` shows them in docs/training.md.

Shape legend: B texts of a batch, S tokens of the longest, T tokens of a continuation, D model width, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from benchmarks.retrofit.ways import ABOUT, ANSWERS, AS_GIVEN, SAMPLES
from mod_models.checkpoint import Checkpoint, load_checkpoint
from mod_models.generation_spec import for_generation
from mod_models.routing import Decisions
from mod_models.train.corpus import end_of_text, load_tokenizer, tokenizer_beside
from mod_models.transformer import Transformer

BATCH = 32
"""Texts that are computed at once, all padded to the longest."""
Request = tuple[tuple[str, str], list[int], list[int]]


class Answering(TemplateLM):  # type: ignore[misc]  # lm-eval has no types.
    """A model as lm-eval asks it: the log-likelihood of a continuation, in nats, given the text before it."""

    def __init__(self, checkpoint: Checkpoint, tokenizer: Path, window: int, precision: torch.dtype) -> None:
        super().__init__()
        spec = checkpoint.spec
        spec = spec if spec.routing is None else for_generation(spec, window)
        self.network = Transformer(spec).sharing(checkpoint.module()).eval()
        self.tokenizer_json, self.vocabulary = tokenizer, load_tokenizer(tokenizer)
        self.window, self.precision = window, precision

    @property
    def eot_token_id(self) -> int:
        """The token that separates texts."""
        return end_of_text(self.vocabulary) or 0

    @property
    def prefix_token_id(self) -> int:
        """The token after which a text begins that has nothing before it: BOS if tokenizer_config.json names one, as
        with lm-eval's own models.
        """
        path = self.tokenizer_json.with_name("tokenizer_config.json")
        bos = json.loads(path.read_text(encoding="utf-8")).get("bos_token") if path.exists() else None
        # Old files have the token as a dictionary.
        id_ = self.vocabulary.token_to_id(bos["content"] if isinstance(bos, dict) else bos) if bos else None
        return self.eot_token_id if id_ is None else int(id_)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Returns the tokens of a text, with special ones only if they are asked for."""
        return list(self.vocabulary.encode(string, add_special_tokens=bool(add_special_tokens)).ids)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: Sequence[Request], **_: object) -> list[tuple[float, bool]]:
        rows = [(context + continuation, len(context)) for _, context, continuation in requests]
        # Texts of about the same length share a batch, so little of it is padding.
        order = sorted(range(len(rows)), key=lambda number: len(rows[number][0]))
        answers: dict[int, tuple[float, bool]] = {}
        for begin in range(0, len(order), BATCH):
            numbers = order[begin : begin + BATCH]
            of_batch = self._answers([rows[number] for number in numbers])
            answers |= dict(zip(numbers, of_batch, strict=True))
        return [answers[number] for number in range(len(rows))]

    def _answers(self, rows: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each continuation, and whether each of its tokens is the most probable one.

        Each row is the tokens of a text, and the position at which its continuation begins.
        """
        # The last token of a text is predicted, and not read. A text that is too long loses its beginning.
        kept = [(ids[-self.window - 1 :], max(1, start - max(0, len(ids) - self.window - 1))) for ids, start in rows]
        lengths_B = torch.tensor([len(ids) - 1 for ids, _ in kept])
        ids_BS = torch.zeros(len(kept), int(lengths_B.max()), dtype=torch.int64)
        for row, (ids, _) in enumerate(kept):
            ids_BS[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        with torch.autocast("cpu", dtype=self.precision, enabled=self.precision != torch.float32):
            hidden_BSD = self.network.hidden(ids_BS, lengths_B, Decisions())
            answers = []
            for row, (ids, start) in enumerate(kept):
                log_p_TV = self.network.logits(hidden_BSD[row, start - 1 : len(ids) - 1]).float().log_softmax(-1)
                target_T = torch.tensor(ids[start:])
                nats = float(log_p_TV.gather(1, target_T[:, None]).sum())
                answers.append((nats, bool((log_p_TV.argmax(-1) == target_T).all())))
        return answers

    def loglikelihood_rolling(self, requests: Sequence[object], disable_tqdm: bool = False) -> list[float]:
        """Refuses, because `make retrofit` measures perplexity."""
        raise NotImplementedError("tasks that score whole documents are not asked; make retrofit measures perplexity")

    def generate_until(self, requests: Sequence[object], disable_tqdm: bool = False) -> list[str]:
        """Refuses, because a server of the built model writes faster."""
        raise NotImplementedError("tasks that write text are asked over mod-export serve; see docs/text.md")


def answered(model: Answering, tasks: Sequence[str], include: Path | None, limit: int | None) -> dict[str, Any]:
    """Returns the figures of each task or group of tasks, such as `acc` (accuracy), the standard error of the accuracy,
    and the number of questions.

    Raises:
        ValueError: lm-eval has no accuracy of a task.
    """
    manager = TaskManager(include_path=None if include is None else str(include))
    found = lm_eval.simple_evaluate(
        model=model, tasks=list(tasks), task_manager=manager, limit=limit, bootstrap_iters=100, log_samples=False
    )

    def questions(name: str) -> int:
        members = found.get("group_subtasks", {}).get(name)
        return sum(map(questions, members)) if members else int(found["n-samples"][name]["effective"])

    answers = {}
    for name in tasks:
        numbers = found.get("groups", {}).get(name) or found["results"][name]
        # lm-eval writes the filter of the answers behind the name of a figure.
        numbers = {key.removesuffix(",none"): value for key, value in numbers.items() if isinstance(value, float)}
        figures = {key: value for key, value in numbers.items() if not key.endswith("_stderr")}
        if "acc" not in figures:
            raise ValueError(f"--tasks {name}: lm-eval gives {', '.join(figures)} and no accuracy")
        answers[name] = {
            "figures": figures,
            "standard_error": numbers["acc_stderr"],
            "questions": questions(name),
        }
    return answers


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, default=Path("build/smollm2"), help="the dense checkpoint of make retrofit (%(default)s)")
    add("--results", type=Path, default=Path("build/retrofit"))
    add("--docs", type=Path, default=Path("docs"))
    add("--tasks", default="piqa,blimp", help="names of tasks or groups of tasks (%(default)s)")
    add("--include-path", type=Path, help="folder of more tasks, such as ones that read files of this machine")
    add("--limit", type=int, help="questions of each task (default: all)")
    add("--only", default="*", metavar="PATTERN", help="names of samples, such as 'mlp-*-245760' (%(default)s)")
    add("--float32", action="store_true", help="compute in float32 in place of bfloat16")
    given = parser.parse_args(arguments)
    tokenizer = tokenizer_beside(given.model)
    if tokenizer is None:
        parser.error(f"{given.model}: has no tokenizer.json beside it, and the questions are texts")
    samples = given.docs / SAMPLES
    about = json.loads((samples / ABOUT).read_text(encoding="utf-8"))
    names = [AS_GIVEN, *(path.stem for path in sorted(samples.glob("*-*.json")))]
    (samples / ANSWERS).mkdir(exist_ok=True)
    precision = torch.float32 if given.float32 else torch.bfloat16
    for name in (name for name in names if fnmatch(name, given.only)):
        path = given.model if name == AS_GIVEN else given.results / name / "model.pt"
        if not path.exists():
            print(f"{name}: its weights are not here", flush=True)
            continue
        model = Answering(load_checkpoint(path), tokenizer, about["window"], precision)
        answers = answered(model, given.tasks.split(","), given.include_path, given.limit)
        kept = samples / ANSWERS / f"{name}.json"
        before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        kept.write_text(json.dumps({**before, **answers}, indent=1) + "\n", encoding="utf-8")
        shown = (f"{task} {of['figures']['acc']:.3f}" for task, of in answers.items())
        print(f"{name}: {', '.join(shown)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
