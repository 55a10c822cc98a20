from __future__ import annotations

import ast
import pickle
import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke
from pydantic import BaseModel

from mod_export import config as config_module
from mod_export.config import GenerationOptions, ParityGate, config_from_toml, toml_from_config
from mod_export.errors import ConfigError
from mod_export.types import DTYPES, Bucket

CONFIGS = sorted(path.name for path in files("mod_export_configs").iterdir() if path.name.endswith(".toml"))
PACKAGE = Path(__file__).parents[2] / "mod_export"
GATES = tuple(ParityGate.model_fields)


def problems_of(tmp_path: Path, text: str) -> list[str]:
    """Problems of a configuration, without the path at the start of each."""
    path = tmp_path / "wrong.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        config_from_toml(path)
    assert all(problem.startswith(f"{path}: ") for problem in caught.value.problems)
    return [problem.removeprefix(f"{path}: ") for problem in caught.value.problems]


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_configuration_loads(name: str) -> None:
    path = Path(str(files("mod_export_configs").joinpath(name)))
    assert tomllib.loads(path.read_text(encoding="utf-8")).get("targets", []) == list(config_from_toml(path).targets)


def test_what_a_file_leaves_out_is_as_in_default_toml(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text("[parity.float16]\nmax_abs = 0.5\n", encoding="utf-8")
    default = config_from_toml(None)
    gate = default.parity.float16.model_copy(update={"max_abs": 0.5})
    parity = default.parity.model_copy(update={"float16": gate})
    assert config_from_toml(path) == default.model_copy(update={"parity": parity})


def test_every_problem_is_reported_at_once_with_the_nearest_name(tmp_path: Path) -> None:
    found = problems_of(
        tmp_path,
        """
        bucket = [[1, 64]]
        seed = true
        zzzz = 1
        [latency]
        sample = 3
        threads = "2"
        [target.ort_cuda]
        device = 0
        [target.ort-cpu]
        dtype = ["float32"]
        [parity.float64]
        max_abs = 1.0
        """,
    )
    assert sorted(found) == [
        "bucket: unknown key, did you mean 'buckets'?",
        "latency.sample: unknown key, did you mean 'samples'?",
        'latency.threads: input should be a valid integer, got "2"',
        "parity.float64: unknown key, did you mean 'float16'?",
        "seed: input should be a valid integer, got true",
        "target.ort-cpu.dtype: unknown key, did you mean 'dtypes'?",
        "target.ort_cuda: unknown key, did you mean 'ort-cuda'?",
        "zzzz: unknown key; known: buckets, outputs, targets, seed, max_memory, target, parity, latency, cost, "
        "generation",
    ]


AT_LEAST = "input should be greater than or equal to"
WRONG = {
    "latency = 5": "latency: expected a table, got 5",
    "buckets = 3": "buckets: expected an array, got 3",
    "buckets = [[1]]": "buckets.0.1: missing",
    "buckets = [[1, 2, 3]]": "buckets.0: expected fewer items, got [1, 2, 3]",
    "seed = 2147483648": "seed: input should be less than 2147483648, got 2147483648",
    "[parity]\nsuffixes = 1001": "parity.suffixes: input should be less than or equal to 1000, got 1001",
    "[generation]\nbuild = 'no'": "generation.build: input should be 'auto', 'always' or 'never', got \"no\"",
    f"latency = '{'x' * 99}'": f'latency: expected a table, got "{"x" * 59}...',
    "[parity.int4]\nnoise = 1.0": "parity.int4.noise: is called 'rounding_error' now; rename it",
    "[parity.int4]\nnoise_rms = 1.0": "parity.int4.noise_rms: is called 'rounding_error_rms' now; rename it",
    "[generation]\nplaces = 'all'": "generation.places: is called 'slots' now; rename it",
    "[parity.float16]\nmax_kll = 1.0": "parity.float16.max_kll: unknown key, did you mean 'max_kl'?",
    **{
        f"[{section}]\n{key} = {value}": f"{section}.{key}: expected one item or more, each once, got {value}"
        for section, key, value in (
            ("target.ort-cpu", "dtypes", "[]"),
            ("target.tensorrt-rtx", "architectures", '["sm89", "sm89"]'),
            ("generation", "batches", "[2, 2]"),
        )
    },
    **{
        f"[{section}]\n{key} = {value}": f"{section}.{key}.0: input should be {expected}, got {value[1:-1]}"
        for section, key, value, expected in (
            ("target.ort-cpu", "dtypes", '["float16"]', "'float32', 'int8' or 'int4'"),
            ("generation", "targets", '["ort-cuda"]', "'ort-cpu', 'openvino', 'tensorrt' or 'tensorrt-rtx'"),
            ("generation", "prompts", "[0]", "greater than or equal to 1"),
        )
    },
    **{
        f"[{section}]\n{key} = {value}": f"{section}.{key}: {AT_LEAST} {least}, got {value}"
        for section, key, value, least in (
            ("latency", "samples", 4, 5),
            ("generation", "window", -1, 0),
            ("parity", "text_batches", 0, 1),
            ("parity", "suffixes", 0, 1),
            ("parity.float32", "rounding_error", -1.0, 0),
            ("parity.bfloat16", "max_perplexity_ratio", 0.99, 1),
        )
    },
}


@pytest.mark.parametrize("text", WRONG)
def test_values_out_of_range(tmp_path: Path, text: str) -> None:
    assert problems_of(tmp_path, text) == [WRONG[text]]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_gate_is_a_finite_number(tmp_path: Path, value: str) -> None:
    gates = "\n".join(f"{key} = {value}" for key in GATES)
    problems = problems_of(tmp_path, f"[latency]\nmin_speedup = {value}\n[parity.float32]\n{gates}\n")
    expected = {f"parity.float32.{key}" for key in GATES} | {"latency.min_speedup"}
    assert {problem.partition(": input should be a finite number")[0] for problem in problems} == expected
    assert len(problems) == len(expected)


def test_gates_of_shorter_floats_are_no_tighter() -> None:
    """`rounding_error` and `rounding_error_rms` are multiples of each dtype's own unit, so they are not compared."""
    parity = config_from_toml(None).parity
    exact = parity.float32
    for gate in map(parity.gate, DTYPES):
        for name in ("max_abs", "near_tie", "max_kl", "max_perplexity_ratio"):
            assert getattr(gate, name) >= getattr(exact, name)
        assert gate.next_token_agreement <= exact.next_token_agreement
        assert gate.rounding_error_rms <= gate.rounding_error


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (tmp_path / "absent.toml", r"absent\.toml: no such configuration file"),
        (tmp_path, r"cannot be read \(.*Is a directory"),
        (tmp_path / "binary.toml", r"binary\.toml: cannot be read \('utf-8' codec"),
    ):
        with pytest.raises(ConfigError, match=message):
            config_from_toml(path)
    (problem,) = problems_of(tmp_path, "buckets = [[1,\n")
    assert problem.startswith("not valid TOML: ")


def test_overrides_replace_fields_and_their_problems_have_no_path() -> None:
    assert config_from_toml(None, {"targets": ("ort-cpu",)}).targets == ("ort-cpu",)
    with pytest.raises(ConfigError) as caught:
        config_from_toml(None, {"seed": -1})
    assert caught.value.problems == ("seed: input should be greater than or equal to 0, got -1",)


def test_buckets() -> None:
    """They are sorted and unique, and chosen automatically if none are named. Every one that is too long is named."""
    lengths = {2048: [128, 512], 512: [128, 512], 300: [128, 256], 128: [128], 100: [64]}
    for positions, picked in lengths.items():
        assert config_from_toml(None).bucket_list(positions) == tuple(Bucket(1, seq) for seq in picked)
    config = config_from_toml(None, {"buckets": ((2, 257), (1, 128), (2, 257), (1, 256))})
    assert config.bucket_list(257) == (Bucket(1, 128), Bucket(1, 256), Bucket(2, 257))
    with pytest.raises(ConfigError) as caught:
        config.bucket_list(128)
    assert set(caught.value.problems) == {
        f"buckets: {name} is longer than the model's 128 positions; shorten it or drop it"
        for name in ("2 x 257", "1 x 256")
    }


@pytest.mark.parametrize(
    ("fields", "positions", "window", "prompts", "caches"),
    [
        ({}, 4096, 1024, (32, 128), (1024,)),
        ({}, 100, 100, (32, 100), (100,)),
        ({}, 20, 20, (20,), (20,)),
        ({"window": 2000}, 4096, 2000, (32, 128), (2000,)),
        ({"window": 99, "prompts": (50, 7, 50), "caches": (90, 9)}, 4096, 99, (7, 50), (9, 90)),
    ],
)
def test_lengths_of_texts(
    fields: dict[str, Any], positions: int, window: int, prompts: tuple[int, ...], caches: tuple[int, ...]
) -> None:
    options = GenerationOptions(**fields)
    assert options.window_of(positions) == window
    assert options.prompt_lengths(window) == prompts
    assert options.cache_lengths(window) == caches
    assert options.cache_of_prompts(window) == (caches[-1], prompts[-1])


def test_toml_reads_back_to_an_equal_value(tmp_path: Path) -> None:
    """Some values need quotes, and some numbers need all digits."""
    config = config_from_toml(
        None, {"targets": ('a "b"', "\\", ""), "buckets": ((1, 7), (64, 4096)), "seed": 2**31 - 1}
    )
    gate = config.parity.int8.model_copy(update={"max_abs": 0.1 + 0.2, "max_kl": 1e-300})
    config = config.model_copy(update={"parity": config.parity.model_copy(update={"int8": gate})})
    (tmp_path / "again.toml").write_text(toml_from_config(config), encoding="utf-8")
    assert config_from_toml(tmp_path / "again.toml") == config


def test_problems_are_the_same_in_another_process() -> None:
    found = pickle.loads(pickle.dumps(ConfigError(["a: wrong", "b: too"])))
    assert (found.problems, str(found)) == (("a: wrong", "b: too"), "a: wrong\nb: too")


def test_what_was_set_is_told_from_the_default(tmp_path: Path) -> None:
    for text, expected in (("", set()), ("[latency]\nmin_speedup = 1.0\n", {"min_speedup"})):
        (tmp_path / "c.toml").write_text(text, encoding="utf-8")
        found = config_from_toml(tmp_path / "c.toml")
        assert found == config_from_toml(None)
        assert found.latency.min_speedup == 1.0
        assert found.latency.model_fields_set == expected


def test_no_gate_has_a_default_in_code() -> None:
    required = {
        f"{section.__name__}.{name}"
        for section in filter(_is_section, vars(config_module).values())
        for name, field in section.model_fields.items()
        if field.is_required()
    }
    gates = {f"ParityGate.{name}" for name in GATES} | {f"ParityOptions.{dtype}" for dtype in DTYPES}
    assert required == gates | {"LatencyOptions.min_speedup", "BuildConfig.parity", "BuildConfig.latency"}


def _is_section(item: object) -> bool:
    return isinstance(item, type) and issubclass(item, BaseModel) and item.__module__ == "mod_export.config"


def test_no_tolerance_stands_in_code() -> None:
    trees = [ast.parse(path.read_text()) for path in (PACKAGE / "judge").glob("*.py")]
    assert trees
    numbers = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    # Two is the base of floats.
    assert {number for number in numbers if isinstance(number, float)} <= {0.0, 1.0, 2.0}


def test_every_option_is_documented() -> None:
    shown = invoke("config", "explain").stdout
    page = (PACKAGE.parent / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == shown, "docs/configuration.md is out of date: make docs"
    undocumented = re.findall(r"^\* `(\S+) = .*`: ?$", shown, re.MULTILINE)
    assert undocumented == []
    assert len(re.findall(r"^\* `", shown, re.MULTILINE)) > 50
