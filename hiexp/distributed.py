"""torchrun start-up and the few host-side collectives a step needs; one process without torchrun is the plain case.

Sharded tensors talk through their own collectives (fsdp.py, `model.full_parameters`); here go Python values only,
over gloo and in host memory, so that none of them waits for a GPU.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hiexp.config import ConfigError


@dataclass(frozen=True)
class Context:
    """This process among its peers. `Context()` is the only process there is, on the CPU.

    Every method is a collective: all ranks call it, in the same order. Each first waits for all ranks, so that one
    that stalls or died is named together with the `phase` it is missing from (RuntimeError after `timeout_s`).
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout_s: float = 1800.0
    control: Any = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, count: int, ranks_per_engine: int = 1) -> tuple[int, int]:
        """(first, end) of this rank's part of `count` things; ranks that hold one engine together take the same."""
        index, parts = self.rank // ranks_per_engine, self.world_size // ranks_per_engine
        return count * index // parts, count * (index + 1) // parts

    def leads(self, ranks_per_engine: int) -> bool:
        """Whether this rank speaks for those that hold an engine together."""
        return self.rank % ranks_per_engine == 0

    def barrier(self, phase: str) -> None:
        """Wait for all ranks. The gloo barrier lets rank 0 name who is missing; the others then name rank 0."""
        if self.world_size == 1:
            return
        try:
            dist.monitored_barrier(self.control, timedelta(seconds=self.timeout_s), wait_all_ranks=True)
        except RuntimeError as error:
            reason = _one_line(error).split(" Original exception")[0]
            message = f"rank {self.rank} lost the others in phase {phase!r} (limit {self.timeout_s:g} s): {reason}"
            raise RuntimeError(message) from error

    def sum(self, values: list[float], phase: str = "sum") -> list[float]:
        """Element-wise over the ranks, in float64; a NaN of any rank survives."""
        return self._reduce(values, dist.ReduceOp.SUM, phase)

    def max(self, values: list[float], phase: str = "max") -> list[float]:
        """Element-wise over the ranks, in float64. A NaN may get lost: use `sum` to look for one."""
        return self._reduce(values, dist.ReduceOp.MAX, phase)

    def gather(self, value: Any, phase: str = "gather") -> list[Any]:
        """The values of all ranks in rank order, on every rank (pickled between our own processes)."""
        if self.world_size == 1:
            return [value]
        self.barrier(phase)
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, self.control)
        return values

    def on_main(self, call: Callable[[], Any], phase: str = "main") -> Any:
        """What `call` returns on rank 0, where alone it runs. A ConfigError there ends the others too, silently."""
        error = None
        try:
            result = call() if self.is_main else None
        except ConfigError as caught:
            error, result = caught, None
        failed, result = self.broadcast((error is not None, result), phase)
        if error:
            raise error
        if failed:
            raise SystemExit(2)
        return result

    def broadcast(self, value: Any, phase: str = "broadcast") -> Any:
        """Rank 0's value, on every rank."""
        if self.world_size == 1:
            return value
        self.barrier(phase)
        values = [value]
        dist.broadcast_object_list(values, 0, self.control)
        return values[0]

    def _reduce(self, values: list[float], operation: Any, phase: str) -> list[float]:
        if self.world_size == 1:
            return list(values)
        self.barrier(phase)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation, self.control)
        return tensor.tolist()


def init(timeout_s: float = 1800.0) -> Context:
    """The Context that torchrun's environment describes; a single-process one without that environment.

    `timeout_s` bounds every wait for another rank, this one included; it must exceed the longest difference
    between the fastest and the slowest rank of a step. ConfigError if the ranks do not meet, or outnumber the GPUs.
    """
    if "RANK" not in os.environ:
        return Context(device=_device(0), timeout_s=timeout_s)
    rank, world_size, local_rank = (_environment(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = _device(local_rank)
    try:
        dist.init_process_group(
            _backend(device),
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        raise ConfigError(
            f"rank {rank} of {world_size} cannot meet the others at {where} within {timeout_s:g} s; "
            f"start all of them with one torchrun command ({_one_line(error)})"
        ) from error
    return Context(rank, world_size, local_rank, device, timeout_s, control)


def close(ctx: Context) -> None:
    """Leave the process group, if there is one. An inference engine must be shut down before."""
    if dist.is_initialized():
        dist.destroy_process_group()


def ensure_group(ctx: Context) -> None:
    """A process group of one rank where there is none: sharding in a single process needs it, and no rendezvous."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[reportPrivateImportUsage]
        dist.init_process_group(_backend(ctx.device), store=store, rank=0, world_size=1)


def _backend(device: torch.device) -> str:
    """Gloo beside NCCL: offloaded parameters and gradients live in host memory."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(f"LOCAL_RANK={local_rank} but this machine has {count} GPUs; set --nproc-per-node={count}")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).encode("ascii", "ignore").decode().split())[:200]


def _environment(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise ConfigError(f"{name}={value!r} in the environment is not a number; start the processes with torchrun")
    return int(value)
