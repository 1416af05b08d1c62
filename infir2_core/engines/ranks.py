"""The processes of one run and the few collectives they need: sums, maxima and barriers.

With one rank every method is local and nothing is initialised. With several, torch.distributed runs over NCCL on GPUs
and gloo elsewhere; RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT say who is who, as torchrun and Slurm
set them.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = datetime.timedelta(minutes=10)  # a rank that died must not leave the others waiting for ever
SAVE_TIMEOUT = datetime.timedelta(hours=3)  # while rank 0 writes a large checkpoint to a slow disk


@dataclass
class Ranks:
    """This process (`rank` of `world`) and its device."""

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    # Two gloo groups: collectives of the loop and barriers of the saving thread must not be paired with each other.
    host_group: Any = None
    save_group: Any = None

    @staticmethod
    def join(world: int, device: str) -> Ranks:
        """Joins the process group of a run with `world` ranks; with one rank there is none."""
        if world == 1:
            return Ranks(device="cuda:0" if device == "cuda" else device)
        rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        if device == "cuda":
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=world, timeout=TIMEOUT)
        groups = [dist.new_group(backend="gloo", timeout=limit) for limit in (TIMEOUT, SAVE_TIMEOUT)]
        return Ranks(rank, world, f"cuda:{local}" if device == "cuda" else device, *groups)

    def leave(self) -> None:
        """Ends the process group."""
        if self.world > 1:
            dist.destroy_process_group()

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Adds each tensor over all ranks, in place."""
        if self.world > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def largest(self, tensors: Iterable[Tensor]) -> None:
        """Takes the elementwise maximum over all ranks, in place."""
        if self.world > 1:
            for tensor in tensors:
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; every rank gets the same answer at the same step."""
        if self.world == 1:
            return flag
        value = torch.tensor([int(flag)])
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.host_group)
        return bool(value.item())

    def first(self, text: str, empty: str) -> str:
        """Of one text a rank, the first that is not `empty`, the same on every rank."""
        if self.world == 1:
            return text
        texts: list[Any] = [None] * self.world
        dist.all_gather_object(texts, text, group=self.host_group)
        return next((t for t in texts if t != empty), empty)

    def barrier(self) -> None:
        """Waits for all ranks, on the host. For the training loop's thread."""
        if self.world > 1:
            dist.barrier(group=self.host_group)

    def save_barrier(self) -> None:
        """Waits for the saving threads of all ranks."""
        if self.world > 1:
            dist.barrier(group=self.save_group)
