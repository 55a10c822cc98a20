"""A tiny routed model, and one finished build folder of it that every worker shares."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from build_folders import Silent, few_searched_rows, once
from command_line import FAST_TOML, FEW_SAMPLES
from headless_chromium import BROWSER, NAMES, Chromium
from writing import WRITING_TOML, writing_checkpoint

from mod_export.config import BuildConfig, config_from_toml
from mod_export.environment import describe_machine
from mod_export.measure import roofline
from mod_export.model.checkpoint import model_from_checkpoint
from mod_export.model.model import Model
from mod_export.model.request import Request
from mod_export.pipeline import roles
from mod_export.pipeline.build import Build
from mod_export.pipeline.stages import build
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec, RoutingSpec

TINY = ModelSpec(
    vocab_size=256,
    d_model=32,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    d_head=8,
    d_ff=64,
    max_positions=256,
    routing=RoutingSpec(),
)
SMALL = replace(TINY, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, d_ff=32, max_positions=64)
CONFIG_TOML = f"""
buckets = [[1, 64], [2, 32]]
targets = ["ort-cpu"]
{FEW_SAMPLES}"""


@pytest.fixture(scope="session")
def tiny_spec() -> ModelSpec:
    """Four layers, the second and the fourth routed."""
    return TINY


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder that all workers of this run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _own_cache(shared_folder: Path) -> Iterator[None]:
    """Keeps the roofline that builds measure out of the user's cache, and lets all workers of this run share it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared_folder / "cache"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _undisturbed() -> Iterator[None]:
    """Lets builds reuse times that they took beside other tests. Otherwise what is reused would depend on the load."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Build, "was_quiet", lambda build, result: True)
        patch.setattr(roles, "is_undisturbed", lambda rows, options, seed: True)
        yield


@pytest.fixture(scope="session")
def config_file(shared_folder: Path) -> Path:
    """A configuration with two buckets, ONNX Runtime on the CPU only, few samples, and no gate on speed."""
    path = shared_folder / "tiny.toml"
    path.write_text(CONFIG_TOML, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def config(config_file: Path) -> BuildConfig:
    return config_from_toml(config_file)


@pytest.fixture(scope="session")
def _roofline(shared_folder: Path) -> None:
    """Measures the roofline once, although other tests run; otherwise every build would measure it again."""

    def make() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(roofline, "MOST_OTHERS", math.inf)
            patch.setattr(roofline, "STEADY", math.inf)
            roofline.cached_roofline(describe_machine(), "float32", 1)

    once(shared_folder / "cache", make)


@pytest.fixture(scope="session")
def checkpoint(shared_folder: Path) -> Path:
    """A checkpoint of TINY with initial weights."""
    path = shared_folder / "checkpoints" / "tiny.pt"
    once(path.parent, lambda: save_checkpoint(path, random_checkpoint(TINY, 0)))
    return path


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Model:
    return model_from_checkpoint(checkpoint)


@pytest.fixture(scope="module")
def searching_few_rows() -> Iterator[None]:
    """Makes the builds and validations of a module cheaper."""
    with few_searched_rows():
        yield


@pytest.fixture(scope="session")
def built(shared_folder: Path, _roofline: None, checkpoint: Path, config: BuildConfig) -> Path:
    """A finished build folder, read-only; tests that change it use `built_copy`."""
    root = shared_folder / "tiny" / "built"

    def make() -> None:
        with few_searched_rows():
            build(Request.checkpoint(checkpoint).models, config, root, Silent(), "mod-export build tiny.pt")

    once(root.parent, make)
    return root


@pytest.fixture
def built_copy(built: Path, tmp_path: Path) -> Path:
    """A copy of the finished build folder, at another path."""
    return Path(shutil.copytree(built, tmp_path / "moved"))


@pytest.fixture(scope="session")
def small_folder(shared_folder: Path, _roofline: None) -> Path:
    """Folder with the checkpoint `small.pt`, its configuration `small.toml`, and its read-only build. The model has two
    layers, the second routed, and one bucket, for tests that run whole commands.
    """
    folder = shared_folder / "small"

    def make() -> None:
        save_checkpoint(folder / "small.pt", random_checkpoint(SMALL, 0))
        (folder / "small.toml").write_text(FAST_TOML, encoding="utf-8")
        config, models = config_from_toml(folder / "small.toml"), Request.checkpoint(folder / "small.pt").models
        with few_searched_rows():
            build(models, config, folder / "build", Silent(), "mod-export build small.pt")

    return once(folder, make)


@pytest.fixture(scope="session")
def small(small_folder: Path) -> Path:
    """Build folder of `small_folder`."""
    return small_folder / "build"


@pytest.fixture
def small_copy(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "moved"))


@pytest.fixture(scope="session")
def writing_folder(shared_folder: Path) -> Path:
    """Folder with the checkpoint `writing.pt`, its configuration `writing.toml`, and its read-only build."""
    folder = shared_folder / "writing"

    def make() -> None:
        save_checkpoint(folder / "writing.pt", writing_checkpoint())
        (folder / "writing.toml").write_text(WRITING_TOML, encoding="utf-8")
        config, models = config_from_toml(folder / "writing.toml"), Request.checkpoint(folder / "writing.pt").models
        with few_searched_rows():
            report = build(models, config, folder / "build", Silent(), "mod-export build")
        assert report.verdict.status == "pass", report.verdict.reasons

    return once(folder, make)


@pytest.fixture(scope="session")
def written(writing_folder: Path) -> Path:
    """A finished build folder that writes text, read-only; tests that change it use `written_copy`."""
    return writing_folder / "build"


@pytest.fixture
def written_copy(written: Path, tmp_path: Path) -> Path:
    # A test that runs in parallel may be replacing a file, in a temporary folder that must not be copied.
    return Path(shutil.copytree(written, tmp_path / "written", ignore=shutil.ignore_patterns(".partial-*")))


@pytest.fixture(scope="session")
def writing_model(writing_folder: Path) -> Model:
    return model_from_checkpoint(writing_folder / "writing.pt")


@pytest.fixture(scope="session")
def writing_config(writing_folder: Path) -> BuildConfig:
    return config_from_toml(writing_folder / "writing.toml")


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    path = tmp_path / "fast.toml"
    path.write_text(FAST_TOML, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """One browser for all pages; tests that need it are skipped if there is none."""
    if BROWSER is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is installed")
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        try:
            browser.attach()
        except (AssertionError, BrokenPipeError) as error:
            pytest.skip(f"{BROWSER} cannot be driven here: {str(error).splitlines()[:1]}")
        yield browser
