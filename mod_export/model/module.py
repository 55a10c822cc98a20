"""Makes a model from a PyTorch module: captures it at each shape, and compares the program with the module."""

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
from mod_export.graph.refusals import NotCompiledError, StateError, refusal, refuse_dynamic, state_that_changes
from mod_export.graph.weights import digests_of_tensors
from mod_export.model.fixed_sizes import with_fixed_sizes
from mod_export.model.functional_programs import functional_program
from mod_export.model.model import Origin
from mod_export.model.module_state import as_it_was, attributes_kept, attributes_read, same_values
from mod_export.model.plain_programs import plain_program
from mod_export.model.programs import ProgramModel
from mod_export.model.pt2_models import sample_tensors
from mod_export.types import Bucket

INSTALLED = ("<frozen ", sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Prefixes of file names in a traceback that are not the user's code."""
ROUNDINGS = 8
"""A captured program may differ from its module by this many roundings of the largest number that is returned."""
SAMPLES = 4
"""Number of inputs that are requested for each bucket, with seeds 0 to 3."""
Given: TypeAlias = "torch.Tensor | Sequence[Any] | Mapping[str, Any]"
"""Arguments of `forward`: its only argument, its positional arguments, or all arguments by name."""
Inputs: TypeAlias = "Given | Callable[..., Given]"
"""A function `inputs(batch, seq)` or `inputs(batch, seq, seed)`, or its result if there is only one bucket."""
Call = tuple[tuple[Any, ...], dict[str, Any]]
BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def model_from_module(module: nn.Module, inputs: Inputs, buckets: Sequence[Bucket], name: str) -> ProgramModel:
    """Captures a module on the CPU. Afterwards the module is unchanged, and it shares its weights with the model.

    `inputs` is called several times, each time with another seed in torch's generator, so it may simply draw random
    numbers. A function whose third parameter has no default, or is called `seed`, gets the seed. The shapes of one
    bucket must be the same in every call.

    Args:
        module: the module; it is captured in eval mode but need not be in that mode.
        inputs: see `Inputs`.
        buckets: shapes to capture the module at; `inputs` gets batch and sequence of each.
        name: name of the model in messages and reports.

    Raises:
        UsageError: the module is not on the CPU, or the inputs do not fit it.
        CaptureError: the module is not one static graph, or does something that no engine can do.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"{name}: got {type(module).__name__}; expected a torch.nn.Module")
    if isinstance(module, OptimizedModule):  # The result of torch.compile.
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
            samples[bucket] = _different([sample_tensors(program, *call) for call in calls])
            plain[bucket] = plain_program(program, where, samples[bucket])
    model = ProgramModel(plain, samples)
    digests = digests_of_tensors(model.weights, "float32")
    text = "\n".join(
        [*(f"{key} {digest}" for key, digest in digests.items()), *map(str, model.spec["programs"].items())]
    )
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    model.origin = Origin(name=name, architecture=PROGRAM, checkpoint_sha256=sha256)
    return model


def _different(samples: Sequence[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Returns the samples without duplicates."""
    distinct: list[list[torch.Tensor]] = []
    for sample in samples:
        if not any(all(map(same_values, sample, earlier)) for earlier in distinct):
            distinct.append(sample)
    return distinct


@contextmanager
def _plain_outputs(module: nn.Module) -> Iterator[None]:
    """Within this context, the module returns dataclasses as dictionaries, because torch.export accepts no classes."""
    hook = module.register_forward_hook(lambda _module, _inputs, output: _without_dataclasses(output))
    try:
        yield
    finally:
        hook.remove()


def _without_dataclasses(value: Any) -> Any:
    if type(value) in pytree.SUPPORTED_NODES and not isinstance(value, (tuple, list, dict)):
        return value  # torch knows this type, such as the outputs of transformers.
    if dataclasses.is_dataclass(value):
        return {item.name: _without_dataclasses(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if type(value) in (tuple, list):
        return type(value)([_without_dataclasses(item) for item in value])
    return {key: _without_dataclasses(item) for key, item in value.items()} if type(value) is dict else value


def _calls(module: nn.Module, inputs: Inputs, bucket: Bucket, where: str) -> list[Call]:
    """Returns the arguments of SAMPLES runs, all of the same shapes."""
    calls: list[Call] = []
    for seed in range(SAMPLES):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            arguments = _asked(inputs, bucket, seed, where) if callable(inputs) else inputs
        calls.append(_call(module, arguments, where))
    shapes = [[tuple(tensor.shape) for tensor in _tensors(call)] for call in calls]
    different = [shape for shape in shapes if shape != shapes[0]]
    if different:
        raise UsageError(f"{where}: inputs have the shapes {shapes[0]} and then {different[0]}; a bucket has one shape")
    if not shapes[0]:
        raise UsageError(f"{where}: inputs hold no tensor")
    return calls


def _asked(inputs: Callable[..., Given], bucket: Bucket, seed: int, where: str) -> Given:
    arguments = (bucket.batch, bucket.seq, seed) if _takes_seed(inputs) else (bucket.batch, bucket.seq)
    try:
        return inputs(*arguments)
    except Exception as error:  # Any type of error: this runs the user's code.
        raise UsageError(f"{where}: inputs{arguments} raised {own_line(error)}") from error


def _takes_seed(inputs: Callable[..., Given]) -> bool:
    """Whether the third argument of the function is a seed. A parameter that has a default and another name means
    something else, such as a device. `*sizes` takes further numbers of a shape, and no seed.
    """
    try:
        parameters = list(inspect.signature(inputs).parameters.values())
    except (TypeError, ValueError):
        return False
    third = [parameter for parameter in parameters if parameter.kind in BY_PLACE][2:3]
    return any(parameter.name == "seed" or parameter.default is parameter.empty for parameter in third)


def _call(module: nn.Module, inputs: Any, where: str) -> Call:
    """Returns the arguments of `forward`, by name if all of them have one, because inputs are named after them."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        kwargs = dict(inputs)
    elif isinstance(inputs, (tuple, list)):
        args = tuple(inputs)
    elif isinstance(inputs, torch.Tensor):
        args = (inputs,)
    else:
        raise UsageError(
            f"{where}: inputs are {type(inputs).__name__}; expected a tensor, a tuple or a dict of tensors"
        )
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"{where}: inputs do not fit forward{signature}: {error}") from error
    if all(x.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for x in signature.parameters.values()):
        args, kwargs = (), dict(bound.arguments)
    # Copies: torch.export would treat a tensor that is given twice as one input.
    copied: Call = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().cpu().clone(), (args, kwargs))
    return copied


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _Called(nn.Module):
    """Wraps a module as a function of the tensors among its arguments."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        self.module = module
        leaves, self._tree = pytree.tree_flatten(call)
        self._given = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self._others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def forward(self, *tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        leaves = [next(rest) if is_given else value for is_given, value in zip(self._given, self._others, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        return self.module(*args, **kwargs)


def _eager(module: nn.Module, call: Call) -> Any:
    """Runs the module without torch.compile, which rounds differently, even if it was compiled before."""
    args, kwargs = call
    with torch.compiler.set_stance("force_eager"):
        return module(*args, **kwargs)


def _run_once(module: nn.Module, call: Call, where: str) -> None:
    """Runs the module before capture, so that the message has the module's own error. Checks what `forward` returns."""
    try:
        result = _eager(module, call)
    except Exception as error:  # Any type of error: this runs the user's code.
        raise UsageError(f"{where}: the module itself fails on these inputs: {own_line(error)}") from error
    for path, leaf in pytree.tree_leaves_with_path(result):
        if not isinstance(leaf, (torch.Tensor, bool, int, float, complex, str, type(None))):
            name = pytree.keystr(path)
            at = f" at {name}" if name else ""
            raise UsageError(
                f"{where}: forward returns an object of the class {type(leaf).__qualname__}{at}, and a graph returns "
                "tensors only; leave it out of what forward returns (in transformers, a cache: give use_cache=False)"
            )


def own_line(error: BaseException) -> str:
    """Returns an error in the user's code as one line, with the line of code that raised it."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {first}"
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith(INSTALLED)]
    if user_frames and not isinstance(error, SyntaxError):
        text += f" ({Path(user_frames[-1].filename).name}, line {user_frames[-1].lineno}: {user_frames[-1].line})"
    return text


def _captured(module: nn.Module, calls: Sequence[Call], where: str) -> ExportedProgram:
    """Returns the program that torch.export captures. torch.compile checks the module first, because it sees more:
    state that differs in the next call, and where a number depends on the data. torch.export may still capture a module
    that torch.compile cannot.
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
        # Raised only if torch.export fails too: torch.export knows buffers, such as a mask that a size depends on.
        refused = error
    args, kwargs = calls[0]
    try:
        with attributes_kept(module), without_dumps(), lines_of_helpers(), warnings.catch_warnings():
            # Attributes are put back, and `attributes_read` checks whether a later call would read them.
            warnings.filterwarnings(
                "ignore", message="The tensor attribute.* assigned during export", category=UserWarning
            )
            # strict=False takes half the time for a step without conditions, and twice as long for one with them. It
            # copies lists and dictionaries into every module, so attributes are put back by identity.
            program = torch.export.export(module, args, kwargs, strict=False)
    except Exception as error:  # Any type of error: this runs the model's own code.
        raise refused or refusal(error, called, examples[0], where) from error
    program = with_fixed_sizes(program, where)
    try:
        refuse_dynamic(program.graph, where)
    except CaptureError as error:
        raise refused or error from error
    return program


def _compare_runs(program: ExportedProgram, module: nn.Module, calls: Sequence[Call], where: str) -> None:
    """Compares program and module on every sample, in their own dtypes. A few roundings of difference are allowed,
    because tensors of a program share no memory, and kernels depend on the memory layout of their inputs.
    """
    runs = program.module()
    for args, kwargs in calls:
        expected, actual = _tensors(_eager(module, (args, kwargs))), _tensors(runs(*args, **kwargs))
        if all(map(same_values, expected, actual)):
            continue
        # A module may choose an attention kernel (`sdpa_kernel`), which rounds differently and is not captured.
        with sdpa_kernel(SDPBackend.MATH):
            if all(map(same_values, expected, _tensors(runs(*args, **kwargs)))):
                continue
        if not all(map(same_values, expected, _tensors(_eager(module, (args, kwargs))))):
            raise CaptureError(f"{where}: the module returns something else each time it gets the same inputs")
        for number, (reference, value) in enumerate(zip(expected, actual, strict=True)):
            _compare(reference, value, f"{where}: output {number}")


def _compare(expected: torch.Tensor, actual: torch.Tensor, where: str) -> None:
    size = (expected.double() - actual.double()).abs()
    size = size.masked_fill((expected == actual) | (expected.isnan() & actual.isnan()), 0.0).nan_to_num(float("inf"))
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
