"""lm-eval gives the same figures over the endpoint as over transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_programs import Run, results_in
from serving import Server
from tokenizer_folders import TEXTS

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore::mod_export.errors.UnverifiedWarning")]
QUESTIONS = 12
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
    "writing": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}, {"metric": "chrf"}],
    },
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
    for name, task in TASKS.items():
        whole = {
            "task": name, "dataset_path": "json", "test_split": "test", **task,
            "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}},
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML.
    return folder


def test_the_figures_are_those_of_transformers(
    run: Run, model: Path, server: Server, tasks: Path, tmp_path: Path
) -> None:
    common = ("--include_path", tasks, "--tasks", ",".join(TASKS), "--log_samples")
    run(
        "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--device", "cpu",
        "--output_path", tmp_path / "theirs", *common,
    )  # fmt: skip
    arguments = f"model=llama,base_url={server.url}/v1/completions,tokenizer={model},num_concurrent=3,max_length=256"
    run(
        "lm_eval", "run", "--model", "local-completions", "--model_args", arguments, "--output_path",
        tmp_path / "ours", *common,
    )  # fmt: skip
    theirs, ours = results_in(tmp_path / "theirs"), results_in(tmp_path / "ours")
    assert ours.keys() == theirs.keys() == TASKS.keys()
    compared = 0
    for task, figures in theirs.items():
        for name, value in figures.items():
            if isinstance(value, float):
                assert ours[task][name] == pytest.approx(value, rel=1e-4), (task, name)
                compared += 1
    assert compared >= 8
    assert len(set(ours["choices"].values())) > 2
