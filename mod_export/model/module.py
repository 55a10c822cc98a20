"""A model from a PyTorch module: captured at each shape, and compared with the module."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.export import ExportedProgram
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from mod_export.errors import CaptureError, UsageError
from mod_export.folder.programs import PROGRAM
from mod_export.graph.capture import lines_of_helpers, prove_static, without_dumps
from mod_export.graph.not_static import NotCompiledError, StateError, refusal, refuse_dynamic, state_that_changes
from mod_export.graph.weights import digests_of_tensors
from mod_export.model.fixed_sizes import with_fixed_sizes
from mod_export.model.functional_programs import functional_program
from mod_export.model.model import Model
from mod_export.model.module_state import as_it_was, attributes_kept, attributes_read
from mod_export.model.plain_programs import plain_program
from mod_export.model.programs import ProgramModel
from mod_export.model.pt2_models import sample_tensors
from mod_export.types import Bucket

INSTALLED = ("<frozen ", sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Where lines of a traceback are that are not the user's."""
ROUNDINGS = 8
"""By which a captured program may differ from its module, of the largest number that is returned."""
SAMPLES = 4
"""Inputs of each bucket that are asked for, seeds 0 to 3."""
Given: TypeAlias = "torch.Tensor | Sequence[Any] | Mapping[str, Any]"
"""The arguments of `forward`: the only one, the positional ones, or all of them by name."""
Inputs: TypeAlias = "Given | Callable[..., Given]"
"""`inputs(batch, seq)` or `inputs(batch, seq, seed)`, or what that returns where there is one bucket."""
Call = tuple[tuple[Any, ...], dict[str, Any]]


def model_from_module(module: nn.Module, inputs: Inputs, buckets: Sequence[Bucket], name: str) -> Model:
    """Captures a module on the CPU. The module is as before when this returns, and shares its weights with the model.

    `inputs` is called several times with torch's generator at another seed, so that it may just draw; with a third
    parameter it is given the seed. What it returns for a bucket has the same shapes every time.

    Args:
        module: it is captured in eval mode, and need not be in it.
        inputs: see `Inputs`.
        buckets: rows, and tokens of a row, as `inputs` understands them.
        name: of the model, in messages and reports.

    Raises:
        UsageError: this is no module on the CPU, or the inputs are none of it.
        CaptureError: the module is not one static graph, or does what no engine can do.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"{name}: got {type(module).__name__}; expected a torch.nn.Module")
    if isinstance(module, OptimizedModule):  # What torch.compile returns.
        module = module._orig_mod
    devices = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} - {"cpu"}
    if devices:
        raise UsageError(f"{name}: is on {', '.join(sorted(devices))}; give it on the CPU: module.to('cpu')")
    if not buckets:
        raise UsageError(f"{name}: no bucket; name at least one shape, (batch, seq)")
    if not callable(inputs) and len(buckets) > 1:
        raise UsageError(
            f"{name}: inputs of one shape for {len(buckets)} buckets; give a function inputs(batch, seq) instead"
        )
    plain, samples = {}, {}
    with as_it_was(module), _plain_outputs(module), torch.no_grad():
        for bucket in buckets:
            where = f"{name} at {bucket.name}"
            calls = _calls(module, inputs, bucket, where)
            _run_once(module, calls[0], where)
            exported = _captured(module, calls, where)
            program = functional_program(exported, where, [sample_tensors(exported, *call) for call in calls])
            _compare_runs(program, module, calls, where)
            plain[bucket] = plain_program(program, where)
            samples[bucket] = _different([sample_tensors(program, *call) for call in calls])
    loaded = ProgramModel(plain, samples)
    digests = digests_of_tensors(loaded.weights, "float32")
    text = "\n".join(
        [*(f"{key} {digest}" for key, digest in digests.items()), *map(str, loaded.spec["programs"].items())]
    )
    return Model(
        name=name,
        architecture=PROGRAM,
        loaded=loaded,
        checkpoint_sha256=hashlib.sha256(text.encode()).hexdigest(),
    )


def _different(samples: Sequence[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Without those that were there before."""
    found: list[list[torch.Tensor]] = []
    for sample in samples:
        if not any(all(map(torch.equal, sample, other)) for other in found):
            found.append(sample)
    return found


@contextmanager
def _plain_outputs(module: nn.Module) -> Iterator[None]:
    """Inside, a dataclass that the module returns is a dictionary of what it holds: torch.export takes no classes."""
    hook = module.register_forward_hook(lambda _module, _inputs, output: _without_dataclasses(output))
    try:
        yield
    finally:
        hook.remove()


def _without_dataclasses(value: Any) -> Any:
    if type(value) in pytree.SUPPORTED_NODES and not isinstance(value, (tuple, list, dict)):
        return value  # Known to torch, such as the outputs of transformers.
    if dataclasses.is_dataclass(value):
        return {one.name: _without_dataclasses(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if type(value) in (tuple, list):
        return type(value)([_without_dataclasses(one) for one in value])
    return {key: _without_dataclasses(one) for key, one in value.items()} if type(value) is dict else value


def _calls(module: nn.Module, inputs: Inputs, bucket: Bucket, where: str) -> list[Call]:
    """The arguments of several runs, at least two, all of one shape."""
    found: list[Call] = []
    for seed in range(SAMPLES):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            given = _asked(inputs, bucket, seed, where) if callable(inputs) else inputs
        found.append(_call(module, given, where))
    shapes = [[tuple(one.shape) for one in _tensors(call)] for call in found]
    different = [shape for shape in shapes if shape != shapes[0]]
    if different:
        raise UsageError(f"{where}: inputs have the shapes {shapes[0]} and then {different[0]}; a bucket has one shape")
    if not shapes[0]:
        raise UsageError(f"{where}: inputs hold no tensor")
    return found


def _asked(inputs: Callable[..., Given], bucket: Bucket, seed: int, where: str) -> Given:
    arguments = (bucket.batch, bucket.seq, seed) if _takes_seed(inputs) else (bucket.batch, bucket.seq)
    try:
        return inputs(*arguments)
    except Exception as error:  # Whatever the user's code raises is told to the user.
        raise UsageError(f"{where}: inputs{arguments} raised {own_line(error)}") from error


def _takes_seed(inputs: Callable[..., Given]) -> bool:
    try:
        inspect.signature(inputs).bind(1, 1, 0)
    except (TypeError, ValueError):
        return False
    return True


def _call(module: nn.Module, given: Any, where: str) -> Call:
    """The arguments of `forward`, by name where they have one, because that is what inputs are then called."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(given, Mapping):
        kwargs = dict(given)
    elif isinstance(given, (tuple, list)):
        args = tuple(given)
    elif isinstance(given, torch.Tensor):
        args = (given,)
    else:
        raise UsageError(f"{where}: inputs are {type(given).__name__}; expected a tensor, a tuple or a dict of tensors")
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"{where}: inputs do not fit forward{signature}: {error}") from error
    if all(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in signature.parameters.values()):
        args, kwargs = (), dict(bound.arguments)
    # Copies: a tensor that is given twice would be taken for one input.
    copied: Call = pytree.tree_map_only(torch.Tensor, lambda one: one.detach().cpu().clone(), (args, kwargs))
    return copied


def _tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


class _Called(nn.Module):
    """A module as a function of the tensors among its arguments."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        self.module = module
        leaves, self._tree = pytree.tree_flatten(call)
        self._given = [isinstance(one, torch.Tensor) for one in leaves]
        self._others = [None if isinstance(one, torch.Tensor) else one for one in leaves]

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        leaves = [next(given) if is_given else one for is_given, one in zip(self._given, self._others, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        return self.module(*args, **kwargs)


def _eager(module: nn.Module, call: Call) -> Any:
    """What the module gives without torch.compile, which rounds otherwise, also where it was compiled before."""
    args, kwargs = call
    with torch.compiler.set_stance("force_eager"):
        return module(*args, **kwargs)


def _run_once(module: nn.Module, call: Call, where: str) -> None:
    """Because a module that fails by itself is told so in its own words, which capture does not give."""
    try:
        found = _eager(module, call)
    except Exception as error:  # As above.
        raise UsageError(f"{where}: the module itself fails on these inputs: {own_line(error)}") from error
    for place, one in pytree.tree_leaves_with_path(found):
        if not isinstance(one, (torch.Tensor, bool, int, float, complex, str, type(None))):
            name = pytree.keystr(place)
            at = f" at {name}" if name else ""
            raise UsageError(
                f"{where}: forward returns an object of the class {type(one).__qualname__}{at}, and a graph returns "
                "tensors only; leave it out of what forward returns (in transformers, a cache: give use_cache=False)"
            )


def own_line(error: BaseException) -> str:
    """An error in the user's code, in one line, with the line of that code that it comes from."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {first}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not one.filename.startswith(INSTALLED)]
    if own and not isinstance(error, SyntaxError):
        text += f" ({Path(own[-1].filename).name}, line {own[-1].lineno}: {own[-1].line})"
    return text


def _captured(module: nn.Module, calls: Sequence[Call], where: str) -> ExportedProgram:
    """The program that torch.export makes of it. torch.compile looks at it before, because it sees more: what the next
    call finds changed, and where a number depends on the data. What it cannot capture, torch.export may.
    """
    called, examples = _Called(module, calls[0]).eval(), [_tensors(call) for call in calls[:2]]
    refused: CaptureError | None = None
    try:
        with attributes_kept(module):
            prove_static(called, examples, where)
    except NotCompiledError:
        if read := attributes_read(module, lambda: _tensors(_eager(module, calls[0]))):
            raise state_that_changes(where, read) from None
    except StateError:
        if attributes_read(module, lambda: _tensors(_eager(module, calls[0]))) != ():
            raise
    except CaptureError as error:
        # Unless torch.export has the values that a size depends on, such as those of a mask that is a buffer.
        refused = error
    args, kwargs = calls[0]
    try:
        with attributes_kept(module), without_dumps(), lines_of_helpers(), warnings.catch_warnings():
            # They are put back, and what a later call would read of them is looked for.
            warnings.filterwarnings(
                "ignore", message="The tensor attribute.* assigned during export", category=UserWarning
            )
            program = torch.export.export(module, args, kwargs, strict=False)
    except Exception as error:  # Of any type: it runs the model's own code.
        raise refused or refusal(error, called, examples[0], where) from error
    program = with_fixed_sizes(program, where)
    try:
        refuse_dynamic(program.graph, where)
    except CaptureError as error:
        raise refused or error from error
    return program


def _compare_runs(program: ExportedProgram, module: nn.Module, calls: Sequence[Call], where: str) -> None:
    """Runs both on every sample, in the dtypes that they have. They may differ by a few roundings: a program has no
    tensors that share memory, and kernels go by the layout of what they are given.
    """
    runs = program.module()
    for args, kwargs in calls:
        expected, found = _tensors(_eager(module, (args, kwargs))), _tensors(runs(*args, **kwargs))
        if all(map(_is_same, expected, found)):
            continue
        # A module may name the kernel of its attention (`sdpa_kernel`), which rounds otherwise and is in no program.
        with sdpa_kernel(SDPBackend.MATH):
            if all(map(_is_same, expected, _tensors(runs(*args, **kwargs)))):
                continue
        if not all(map(_is_same, expected, _tensors(_eager(module, (args, kwargs))))):
            raise CaptureError(f"{where}: the module returns something else each time it gets the same inputs")
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            _compare(one, other, f"{where}: output {number}")


def _is_same(expected: torch.Tensor, found: torch.Tensor) -> bool:
    return torch.equal(expected, found) or bool(((expected == found) | (expected.isnan() & found.isnan())).all())


def _compare(expected: torch.Tensor, found: torch.Tensor, where: str) -> None:
    size = (expected.double() - found.double()).abs()
    size = size.masked_fill((expected == found) | (expected.isnan() & found.isnan()), 0.0).nan_to_num(float("inf"))
    largest = size.max().item() if size.numel() else 0.0
    allowed = 0.0
    if expected.is_floating_point():
        allowed = ROUNDINGS * torch.finfo(expected.dtype).eps * expected.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    if largest > allowed:
        raise CaptureError(
            f"{where} of the captured program differs from that of the module by {largest:.3g}. Either the module "
            "reads values that capture takes for constants, or it asks whether it is captured "
            "(torch.compiler.is_compiling, is_exporting) and computes something else then"
        )
