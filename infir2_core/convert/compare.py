"""Two models tensor by tensor, bit for bit, whatever formats they lie in.

Where dtypes differ, the wider one is rounded to the narrower one and it is said: an export in bf16 of float32 masters
counts as equal when it is the rounding of them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .streams import Strip, in_parallel
from .weights import Weights, rows_as, spans


def compare(a: Weights, b: Weights, watch: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """Compares every tensor of `a` and `b` by Hugging Face name.

    Returns:
        `equal`; `tensors` compared; `different`: tensor -> number of elements that differ; `only_a`, `only_b`;
        `shapes` that differ; `dtypes` of pairs that were rounded; `first`: tensor, position and both values of the
        difference that comes before all others, or None.
    """
    common = [name for name in a.tensors if name in b.tensors]
    shapes = {n: [list(a.tensors[n][1]), list(b.tensors[n][1])] for n in common if a.tensors[n][1] != b.tensors[n][1]}
    same = [name for name in common if name not in shapes]
    different: dict[str, int] = {}
    places: dict[str, tuple[int, list[int], float, float]] = {}
    total = sum(math.prod(a.tensors[name][1]) * a.tensors[name][0].itemsize for name in same)
    done, lock = 0, threading.Lock()

    def work(item: tuple[str, Strip]) -> int:
        name, strip = item
        span = (name, strip.first, strip.count)
        left, right = narrowed(rows_as(a, *span, b.tensors[name][0]), rows_as(b, *span, a.tensors[name][0]))
        unequal = _bits(left) != _bits(right)
        if bool(unequal.any()):
            place = [int(i) for i in unequal.nonzero()[0]]
            found = (strip.first, [place[0] + strip.first, *place[1:]], float(left[*place]), float(right[*place]))
            with lock:
                different[name] = different.get(name, 0) + int(unequal.sum())
                places[name] = min(places.get(name, found), found)
        return strip.nbytes

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        watch(done, total)

    in_parallel(work, spans(a.tensors, same), count)
    first = next((name for name in same if name in different), None)
    only_a, only_b = [n for n in a.tensors if n not in b.tensors], [n for n in b.tensors if n not in a.tensors]
    dtypes = sorted({f"{a.tensors[n][0]} / {b.tensors[n][0]}".replace("torch.", "") for n in same if _differ(a, b, n)})
    return {
        "equal": not (different or shapes or only_a or only_b),
        "tensors": len(same),
        "different": {name: different[name] for name in same if name in different},
        "only_a": only_a,
        "only_b": only_b,
        "shapes": shapes,
        "dtypes": dtypes,
        "first": None
        if first is None
        else dict(zip(("tensor", "at", "a", "b"), (first, *places[first][1:]), strict=True)),
    }


def _differ(a: Weights, b: Weights, name: str) -> bool:
    return a.tensors[name][0] != b.tensors[name][0]


def narrowed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the dtype that has fewer bits; fp16 and bf16, of which neither holds the other, in float32."""
    if a.dtype == b.dtype:
        return a, b
    if a.dtype.itemsize == b.dtype.itemsize:
        return a.float(), b.float()
    dtype = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    return a.to(dtype), b.to(dtype)


def _bits(x: Tensor) -> Tensor:
    """Integers that are equal when the values are the same bits (0.0 and -0.0 differ, NaN equals itself)."""
    return x.contiguous().view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)
