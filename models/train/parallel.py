"""Training with several processes, started by `torchrun`: DDP, or FSDP2 for models that do not fit on one device.

Every process computes the losses of its slice of a step's rows, and gradients are averaged. So the processes take the
step that one process would take with all rows, up to the rounding of sums. gloo connects CPUs, NCCL connects GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from mod_models.train import TrainError
from mod_models.train.losses import LossModule
from mod_models.transformer import RoutedBlock

PARALLEL = ("ddp", "fsdp")


@dataclass(frozen=True, slots=True)
class Workers:
    """The processes of a run, seen from one of them; by default only this process, on the CPU.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        device: the device on which this process computes.
        parallel: `ddp`, every process holds the model; `fsdp`, each process holds a share of every parameter, of its
            gradient and of the optimizer's state.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    parallel: str = "ddp"

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return self.rank == 0

    def rows(self, all_B1: Tensor) -> Tensor:
        """Returns this process's slice of all rows (B, ...), on its device; B must be a multiple of `size`."""
        share = len(all_B1) // self.size
        return all_B1[self.rank * share : (self.rank + 1) * share].to(self.device)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Sums each value over the processes, in float64."""
        if self.size == 1:
            return list(values)
        sum_N = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sum_N)
        return [float(value) for value in sum_N.tolist()]

    def means(self, values: Sequence[float]) -> list[float]:
        """Averages each value over the processes."""
        return [value / self.size for value in self.sums(values)]

    def agree(self, value: object) -> bool:
        """Whether every process passes the same plain value."""
        if self.size == 1:
            return True
        values: list[object] = [None] * self.size
        dist.all_gather_object(values, value)
        return all(answer == value for answer in values)

    def wrap(self, step: LossModule) -> nn.Module:
        """Returns the module to call in training, with the same forward pass and reduced gradients. FSDP replaces the
        parameters, so the optimizer must be made after this call.
        """
        step.to(self.device)
        if self.parallel == "fsdp":
            return _shard(step, self)
        if self.size == 1:
            return step
        # Parameters without a gradient are common here: an untrained predictor, a layer that selects no token, an
        # expert that no token of this process chose. PyTorch warns once if all parameters have gradients.
        devices = None if self.device.type == "cpu" else [self.device]
        return DistributedDataParallel(step, device_ids=devices, find_unused_parameters=True)


def _shard(step: LossModule, workers: Workers) -> nn.Module:
    mesh = init_device_mesh(workers.device.type, (workers.size,))
    for block in step.teacher.layers if step.teacher is not None else ():
        fully_shard(block, mesh=mesh)
    for block in step.model.layers:
        if isinstance(block, RoutedBlock):
            for predictor in (block.predictor, block.mlp_predictor):
                if predictor is not None:
                    # The losses call it after FSDP has freed the block's parameters, so it gathers its own.
                    fully_shard(predictor, mesh=mesh)
            fully_shard(block, mesh=mesh)
            # FSDP gathers parameters before `forward`; the selection `exit` calls `narrowed` instead.
            register_fsdp_forward_method(block, "narrowed")
        else:
            fully_shard(block, mesh=mesh)
    fully_shard(step, mesh=mesh)
    return step


def accumulate(module: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Context for one of several backward passes of a step. DDP reduces gradients in the last one. FSDP reduces in each
    one, because it would hold unreduced gradients whole.
    """
    if isinstance(module, DistributedDataParallel) and not last:
        return module.no_sync()
    return nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """Returns the whole tensor on the CPU, gathered if it is sharded. All processes have to call this."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


@torch.no_grad()
def fill(tensor: Tensor, value: Tensor) -> None:
    """Copies a whole CPU tensor, which every process has, into `tensor` or, if sharded, into this process's shard."""
    if isinstance(tensor, DTensor):
        moved = value.to(tensor.device)
        part = distribute_tensor(moved, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.to_local().copy_(part.to_local())
    else:
        tensor.copy_(value)


@contextmanager
def launched(parallel: str = "ddp", device: str = "auto") -> Iterator[Workers]:
    """Joins the processes of `torchrun` until the block ends. Without torchrun, this process is alone.

    Args:
        parallel: one of PARALLEL.
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one.

    Raises:
        TrainError: FSDP without torchrun, CUDA without a GPU, or more processes on a machine than it has GPUs.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise TrainError("--device cuda: PyTorch finds no GPU here")
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        if parallel == "fsdp":
            raise TrainError(
                "--parallel fsdp: start the processes with torchrun --nproc-per-node N -m mod_models.train"
            )
        yield Workers(device=torch.device(kind))
        return
    chosen = torch.device(kind)
    if kind == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise TrainError(
                f"--nproc-per-node: {torch.cuda.device_count()} GPUs here, and no more processes than that"
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", device_id=chosen if kind == "cuda" else None)
    try:
        yield Workers(dist.get_rank(), dist.get_world_size(), chosen, parallel)
    finally:
        dist.destroy_process_group()
