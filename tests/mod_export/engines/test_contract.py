"""What every entry of ENGINES must keep, whoever adds it."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from mod_export.config import TargetOptions, config_from_toml
from mod_export.engines import ENGINES
from mod_export.engines.protocol import EngineBuilder
from mod_export.errors import ModExportError
from mod_export.types import DTYPES, Availability, Bucket, Dialect, Engine, Variant

CONFIG = config_from_toml(None)
METHODS: tuple[Callable[..., object], ...] = (
    EngineBuilder.availability,
    EngineBuilder.variants,
    EngineBuilder.versions,
    EngineBuilder.check,
    EngineBuilder.build,
    EngineBuilder.load,
)
each_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


def test_the_table_is_by_name_and_every_target_has_options() -> None:
    assert list(ENGINES) == [engine.name for engine in ENGINES.values()]
    assert set(ENGINES) == {field.alias for field in TargetOptions.model_fields.values()}


@each_engine
def test_attributes(engine: EngineBuilder) -> None:
    assert isinstance(engine.dialect, Dialect)
    assert isinstance(engine.from_onnx, bool)
    assert isinstance(engine.binds, bool)
    assert isinstance(engine.embeds_weights, bool)
    assert engine.suffix.startswith(".")
    assert type(engine).__doc__


@each_engine
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_methods_are_those_of_the_protocol(engine: EngineBuilder, method: Callable[..., object]) -> None:
    own = getattr(type(engine), method.__name__)
    assert list(inspect.signature(own).parameters) == list(inspect.signature(method).parameters)


@each_engine
def test_availability_always_has_a_reason_and_builds_nothing(engine: EngineBuilder) -> None:
    found = engine.availability()
    assert isinstance(found, Availability)
    assert found.reason
    assert "\n" not in found.reason
    assert engine.availability() == found


@each_engine
def test_variants_are_what_the_configuration_asks_for(engine: EngineBuilder) -> None:
    variants = list(engine.variants(CONFIG))
    assert variants
    assert len(set(variants)) == len(variants)
    options = CONFIG.target.model_dump(by_alias=True)[engine.name]
    assert {variant.dtype for variant in variants} == set(options["dtypes"]) <= set(DTYPES)
    for variant in variants:
        assert isinstance(variant, Variant)
        assert variant.arch in options.get("architectures", (None,))


@each_engine
def test_versions_are_plain_text(engine: EngineBuilder) -> None:
    versions = engine.versions()
    assert versions
    assert all(isinstance(name, str) and isinstance(version, str) for name, version in versions.items())


@each_engine
def test_a_usual_bucket_has_no_problem(engine: EngineBuilder) -> None:
    assert list(engine.check(CONFIG, "mod", Bucket(1, 512))) == []


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
