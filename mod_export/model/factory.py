"""Makes a model with a function in the user's code, named as in `uvicorn module:app`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from mod_export.errors import UsageError
from mod_export.model.model import Model
from mod_export.model.module import model_from_module, own_line
from mod_export.types import Bucket

EXPECTED = "expected `module, inputs` or `module, inputs, baseline`"


def model_from_factory(
    target: str, buckets: Sequence[Bucket], capacity: float | None = None
) -> tuple[Model, Model | None]:
    """Imports the code that `target` names, and captures the model that its function returns.

    The function returns `module, inputs` or `module, inputs, baseline`: the module and its inputs as
    `model_from_module` takes them, and a dense module with the same inputs. A function that returns no baseline but has
    a parameter `capacity` is called again with `capacity=1.0`: a model that runs every token in every block is its own
    dense baseline.

    Args:
        target: a file as in `my_model.py:make_model`, or a module as in `package.module:make_model`, which is also
            searched for in the working directory.
        buckets: shapes to capture the modules at.
        capacity: the function's argument `capacity`; None calls it without arguments.

    Returns:
        The model, named after the file or module, and its dense baseline or None.

    Raises:
        UsageError: there is no such function, its code raised an error, or it returned something else.
        CaptureError: one of the modules is not one static graph.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"{target}: expected FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION")
    factory = _function(_imported(place, target), name, target)
    takes_capacity = "capacity" in inspect.signature(factory).parameters
    if capacity is not None and not takes_capacity:
        raise UsageError(f"{target}: capacity {capacity:g}: {name} has no parameter `capacity`")
    module, inputs, *rest = _called(factory, target, **({} if capacity is None else {"capacity": capacity}))
    stem = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    model = model_from_module(module, inputs, buckets, stem)
    dense = rest[0] if rest else None
    if dense is None and takes_capacity:
        dense = _called(factory, target, capacity=1.0)[0]
    if dense is None:
        return model, None
    return model, model_from_module(dense, inputs, buckets, f"{stem}-dense")


def _imported(place: str, target: str) -> ModuleType:
    if not place.endswith(".py"):
        _first_in_path(Path.cwd())
        imported: ModuleType = _run(lambda: importlib.import_module(place), target, "cannot be imported")
        return imported
    path = Path(place).resolve()
    if not path.is_file():
        raise UsageError(f"{place}: no such file")
    # The file can import modules from its own folder, as it can when Python runs it.
    _first_in_path(path.parent)
    name = path.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
        name = f"{name}_of_{path.parent.name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module in sys.modules.
    sys.modules[name] = module
    loader = spec.loader
    _run(lambda: loader.exec_module(module), target, "cannot be imported")
    return module


def _first_in_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _function(module: ModuleType, name: str, target: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if function is None:
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(name, callables)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; it has {', '.join(callables) or 'no function'}"
        raise UsageError(f"{target}: no {name} there{hint}")
    if not callable(function):
        raise UsageError(
            f"{target}: is {type(function).__name__}; expected a function that returns a module and its inputs"
        )
    return function  # type: ignore[no-any-return]  # Callable, as was just asked.


def _called(factory: Callable[..., Any], target: str, **arguments: float) -> tuple[Any, ...]:
    call = f"{target.rpartition(':')[2]}({', '.join(f'{name}={value}' for name, value in arguments.items())})"
    result = _run(lambda: factory(**arguments), target, f"{call} raised")
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], nn.Module):
        returned = (
            f"({', '.join(type(x).__name__ for x in result)})" if isinstance(result, tuple) else type(result).__name__
        )
        raise UsageError(f"{target}: {call} returned {returned}; {EXPECTED}")
    return result


def _run(run: Callable[[], Any], target: str, what: str) -> Any:
    """Runs the user's code. An error becomes a UsageError that shows the line that raised it."""
    try:
        return run()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{target}: {what}: {own_line(error)}") from error
