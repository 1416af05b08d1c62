"""Moves tensors between files a strip of rows at a time, on a few threads, so that memory stays small.

A strip is read, worked on and written by one thread; the threads' arithmetic runs beside each other and beside the
disk. `work` decides what is done: copying, casting, checking.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import InputError

T = TypeVar("T")
STRIP = 1 << 18  # elements of a strip that a CPU computes with: its temporaries stay in the cache
WORKERS = min(8, os.cpu_count() or 1)
# Elements of one that is only looked at or copied: large, for fewer turns of the interpreter, but a machine of many
# cores holds no more in memory than one of two.
PASSING = (1 << 21) // max(2, WORKERS)
DEVICE_STRIP = 1 << 26  # on a GPU: large enough to fill it

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class Strip:
    """Rows [first, first + count) of an item; `nbytes` of input for the progress bar."""

    first: int
    count: int
    nbytes: int


def strips(rows: int, row_elements: int, row_bytes: int, multiple: int = 1, elements: int = PASSING) -> Iterator[Strip]:
    """Cuts `rows` into strips of about `elements` elements whose borders are multiples of `multiple` rows; rows without
    elements make none."""
    if not row_elements:
        return
    step = max(1, elements // max(1, row_elements * multiple)) * multiple
    for first in range(0, rows, step):
        count = min(step, rows - first)
        yield Strip(first, count, count * row_bytes)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_parallel(work: Callable[[T], int], items: Iterable[T], done: Callable[[int], None]) -> None:
    """Calls `work` on every item, a few at a time; `done` gets what each call returned, in this thread.

    The first exception ends everything and is raised here.
    """
    with _one_thread_each(), ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        pending: set[Future[int]] = set()
        try:
            for item in items:
                pending.add(pool.submit(work, item))
                if len(pending) >= 4 * WORKERS:
                    finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in finished:
                        done(future.result())
            for future in pending:
                done(future.result())
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def check_finite(values: Tensor, name: str, where: str, first: int = 0) -> None:
    """Refuses NaN and infinities.

    Args:
        values: rows of a tensor in any float dtype; FP8 codes count too.
        name, where: shown in the error.
        first: the row of the tensor that `values` begins with.

    Raises:
        InputError: naming the tensor and a row.
    """
    if values.numel() and not _finite(values):
        rows = values.float().reshape(values.shape[0] if values.dim() else 1, -1)
        row = int((~torch.isfinite(rows)).any(1).nonzero()[0]) + first
        kind = "NaN" if bool(torch.isnan(rows).any()) else "infinite values"
        raise InputError(f"tensor '{name}' has {kind}, in row {row}", where, "use a checkpoint from before it diverged")


def rounded(rows: Tensor, dtype: torch.dtype, name: str, where: str) -> Tensor:
    """Finite `rows` of tensor `name` in `dtype`; InputError when that makes one of them infinite."""
    if rows.dtype == dtype:
        return rows.contiguous()
    made = rows.to(dtype)
    if not bool(torch.isfinite(made).all()):
        largest = float(rows.abs().max())
        what = f"'{name}' has the value {largest:g}, which {str(dtype).removeprefix('torch.')} cannot hold"
        hint = "use a checkpoint from before it diverged" if dtype is torch.bfloat16 else "--dtype bfloat16, or float32"
        raise InputError(what, where, hint)
    return made.contiguous()


def _finite(values: Tensor) -> bool:
    if values.dtype == torch.float8_e4m3fn:  # no infinity; NaN is all ones but for the sign
        return not bool((values.view(torch.uint8) & 0x7F).max() == 0x7F)
    if values.dtype in (torch.bfloat16, torch.float16):  # the exponent's bits, compared as integers: quick on a CPU
        top = 0x7F80 if values.dtype == torch.bfloat16 else 0x7C00
        return not bool((values.view(torch.int16) & 0x7FFF).max() >= top)
    return bool(torch.isfinite(values).all())
