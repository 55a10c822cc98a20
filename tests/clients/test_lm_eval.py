"""lm-eval gives the same figures over the endpoint, and in `make retrofit-tasks`, as over transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_programs import PROGRAMS, Run, results_in
from serving import Server
from tokenizer_folders import TEXTS

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore::mod_export.errors.UnverifiedWarning")]
QUESTIONS = 12
ROOT = Path(__file__).parents[2]
TASKS = {
    "choices": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}", "num_fewshot": 2, "fewshot_split": "test",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "likelihood": {
        "output_type": "loglikelihood", "doc_to_text": "{{question}}", "doc_to_target": " {{choices[label]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "beginnings": {
        "output_type": "multiple_choice", "doc_to_text": "", "doc_to_choice": "{{choices}}", "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "writing": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}, {"metric": "chrf"}],
    },
}  # fmt: skip
REFUSED = {
    "whole": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "surprise": {**TASKS["likelihood"], "metric_list": [{"metric": "perplexity"}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of three kinds on questions that are cut out of a few texts."""
    folder = tmp_path_factory.mktemp("tasks")
    words = " ".join(TEXTS).split()
    rng = np.random.default_rng(5)
    with (folder / "questions.jsonl").open("w") as file:
        for _ in range(QUESTIONS):
            at = rng.integers(0, len(words) - 8)
            question: dict[str, Any] = {"question": " ".join(words[at : at + 6])}
            question["choices"] = [str(word) for word in rng.choice(words, 4)]
            question["label"] = int(rng.integers(4))
            file.write(json.dumps(question) + "\n")
    for name, task in {**TASKS, **REFUSED}.items():
        whole = {
            "task": name, "dataset_path": "json", "test_split": "test", **task,
            "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}},
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML.
    return folder


@pytest.fixture(scope="module")
def theirs(run: Run, model: Path, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The figures of transformers."""
    folder = tmp_path_factory.mktemp("theirs")
    run(
        "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--device", "cpu",
        "--output_path", folder, "--include_path", tasks, "--tasks", ",".join(TASKS), "--log_samples",
    )  # fmt: skip
    return results_in(folder)


def test_the_figures_are_those_of_transformers(
    run: Run, model: Path, server: Server, tasks: Path, theirs: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    arguments = f"model=llama,base_url={server.url}/v1/completions,tokenizer={model},num_concurrent=3,max_length=256"
    run(
        "lm_eval", "run", "--model", "local-completions", "--model_args", arguments, "--output_path", tmp_path,
        "--include_path", tasks, "--tasks", ",".join(TASKS), "--log_samples",
    )  # fmt: skip
    ours = results_in(tmp_path)
    assert ours.keys() == theirs.keys() == TASKS.keys()
    compared = 0
    for task, figures in theirs.items():
        for name, value in figures.items():
            if isinstance(value, float):
                assert ours[task][name] == pytest.approx(value, rel=1e-4), (task, name)
                compared += 1
    assert compared >= 8
    assert len(set(ours["choices"].values())) > 2


Ask = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def ask(model: Path, tasks: Path, tmp_path: Path) -> Ask:
    """Runs `make retrofit-tasks` for a dense model before any retrofit."""
    converted, about = tmp_path / "dense", tmp_path / "retrofit" / "about.json"
    subprocess.run([sys.executable, "-m", "mod_export", "convert", str(model), str(converted), "-q"], check=True)
    about.parent.mkdir()
    about.write_text('{"window": 256}')

    def call(*options: str) -> subprocess.CompletedProcess[str]:
        command = [
            str(PROGRAMS / "python"), "-m", "benchmarks.retrofit.tasks", "--model", str(converted), "--docs",
            str(tmp_path), "--results", str(tmp_path), "--include-path", str(tasks), "--float32", *options,
        ]  # fmt: skip
        places = {"PYTHONPATH": f"{ROOT}:{ROOT / 'build/types'}", "PATH": "/usr/bin:/bin", "HOME": "/tmp"}
        return subprocess.run(
            command, env={**places, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=900, check=False
        )

    return call


def test_a_retrofit_answers_as_transformers_does(ask: Ask, theirs: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    for names in ("choices,likelihood", "beginnings"):  # The second call keeps the answers of the first.
        done = ask("--tasks", names)
        assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads((tmp_path / "retrofit/answers/as_given.json").read_text())
    assert list(answers) == ["choices", "likelihood", "beginnings"]
    for task, answer in answers.items():
        assert answer["questions"] == QUESTIONS
        assert answer["standard_error"] == pytest.approx(theirs[task]["acc_stderr,none"])
        for name, value in answer["figures"].items():
            assert value == pytest.approx(theirs[task][f"{name},none"], rel=1e-4), (task, name)
    assert answers["likelihood"]["figures"].keys() == {"acc", "perplexity"}


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("writing", "tasks that write text are asked over mod-export serve; see docs/text.md"),
        ("whole", "tasks that score whole documents are not asked; make retrofit measures perplexity"),
        ("surprise", "--tasks surprise: lm-eval gives perplexity and no accuracy"),
    ],
)
def test_tasks_that_a_retrofit_is_not_asked(task: str, reason: str, ask: Ask) -> None:
    done = ask("--tasks", task)
    assert done.returncode == 1
    assert reason in done.stderr
