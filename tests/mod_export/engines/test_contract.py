"""The contract that every entry of ENGINES must keep."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import metadata
from itertools import product

import pytest

from mod_export.config import TargetOptions, config_from_toml
from mod_export.engines import ENGINES, protocol
from mod_export.engines.protocol import EngineBuilder
from mod_export.environment import package_version
from mod_export.errors import ModExportError
from mod_export.types import DTYPES, Availability, Bucket, Engine

CONFIG = config_from_toml(None)
EXTRAS_OF_THIS_PACKAGE = metadata("mod-export").get_all("Provides-Extra") or []
each_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


def test_the_table_is_by_name_and_every_target_has_options() -> None:
    assert list(ENGINES) == [engine.name for engine in ENGINES.values()]
    assert set(ENGINES) == {field.alias for field in TargetOptions.model_fields.values()}


@each_engine
def test_what_it_says_of_itself(engine: EngineBuilder) -> None:
    assert engine.suffix.startswith(".")
    assert type(engine).__doc__
    availability = engine.availability()
    assert availability.reason
    assert "\n" not in availability.reason
    assert engine.availability() == availability
    assert engine.versions() == {name: package_version(name) or "" for name in engine.packages}
    assert engine.packages
    assert list(engine.problems(CONFIG)) == []


@each_engine
def test_variants_are_what_the_configuration_asks_for(engine: EngineBuilder) -> None:
    options = CONFIG.target.model_dump(by_alias=True)[engine.name]
    variants = [(variant.dtype, variant.arch) for variant in engine.variants(CONFIG)]
    assert variants == list(product(options["dtypes"], options.get("architectures", (None,))))
    assert {dtype for dtype, _ in variants} <= set(DTYPES)


@each_engine
def test_each_package_that_is_not_installed_is_named(engine: EngineBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    for absent in engine.packages:
        # Installed packages are the environment of an engine, so the test replaces them.
        monkeypatch.setattr(protocol, "package_version", lambda name, absent=absent: None if name == absent else "1")
        availability = engine.availability()
        assert (availability.builds, availability.runs) == (False, False)
        assert availability.reason == f"{absent} is not installed; install mod-export[{engine.extra}]"
        assert engine.extra in EXTRAS_OF_THIS_PACKAGE


@each_engine
def test_what_cannot_work_on_a_mac_says_so(engine: EngineBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not `install mod-export[tensorrt]`: that extra installs nothing there."""
    before = engine.availability()
    monkeypatch.setattr(sys, "platform", "darwin")
    if engine.nvidia:
        reason = "needs NVIDIA's libraries, which do not exist for macOS; use a machine with Linux"
        assert engine.availability() == Availability(builds=False, runs=False, reason=reason)
        return
    assert engine.availability() == before
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(protocol, "package_version", lambda name: None)
    name = engine.packages[0]
    assert engine.availability().reason == f"needs {name}, which is not published for Macs with an Intel processor"


@each_engine
def test_loading_what_is_not_there_is_an_error_of_ours(
    engine: EngineBuilder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    absent = Engine(
        target=engine.name,
        model="mod",
        bucket=Bucket(1, 8),
        dtype="float32",
        path=f"engines/absent{engine.suffix}",
        weights="graphs/weights-float32.data",
    )
    with pytest.raises(ModExportError):
        engine.load(tmp_path_factory.mktemp("empty"), absent, CONFIG, 1)
