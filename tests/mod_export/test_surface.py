"""The surface: what importing costs, what is public, and that no error is without its exit code."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import mod_export
from mod_export import errors

HEAVY = ("torch", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "polygraphy", "tensorrt", "tensorrt_rtx", "numpy")


NOT_NUMPY = (*HEAVY[:-1], "tokenizers", "mod_models")


@pytest.mark.parametrize(
    ("modules", "absent"),
    [(("cli", "errors"), HEAVY), (("runtime.deployment", "runtime.generate.generator"), NOT_NUMPY)],
    ids=["cli", "runtime"],
)
def test_importing_loads_nothing_heavy(modules: tuple[str, ...], absent: tuple[str, ...]) -> None:
    imports = "; ".join(f"import mod_export.{module}" for module in modules)
    code = f"{imports}; import sys; print(*(name for name in {absent} if name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_public_names() -> None:
    assert mod_export.__all__ == ["Deployment", "Generator", "__version__", "load", "load_generator", "mark_selection"]
    assert all(getattr(mod_export, name) for name in mod_export.__all__)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'mod_export' has no attribute 'nonsense'"):
        _ = mod_export.nonsense


def test_every_error_has_an_exit_code_and_stands_in_the_tree() -> None:
    classes = [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, errors.ModExportError)]
    assert {one.__name__ for one in classes} == set(errors.__all__)
    for one in classes:
        assert one.exit_code in (2, 3)
        assert one.__name__ in str(errors.__doc__)
