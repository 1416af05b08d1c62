"""The wgrad GEMM of 1x128 by 1x128 blocks (reference: ops/reference/matmul.py; kernel: cuda/wgrad.cu).

Both operands have their tokens last and a scale for each row and 128 tokens, so that every float32 partial sum takes
two instructions, where 128x128 blocks take one. The libraries leave tensor cores waiting for them.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from ..reference.quantize import QTensor
from .copies import TILE
from .cuda import MULTIPROCESSORS, SHARED_BYTES, encode_map, launch

# Constants of cuda/wgrad.cu.
GROUPS, ROWS, COLS, CHUNK = 2, 128, 192, 32
STAGE = (ROWS + COLS) * (TILE + 4) + 16  # bytes of a K block: codes, scales, two barriers
BESIDE = 1024 + GROUPS * 64 * CHUNK * 4  # what aligning costs, and what is stored from shared memory
STAGES = (SHARED_BYTES - BESIDE) // STAGE


def matmul_tiles(a: QTensor, b: QTensor, total: Tensor | None = None) -> Tensor:
    """a . b^T in float32.

    Args:
        a: codes [M, K] in 1x128 blocks, laid out by ops/hopper/copies.py; M and N divisible by 16, K by 128.
        b: codes [N, K], likewise; not both E5M2.
        total: float32 [M, N], contiguous, its address divisible by 16: the product is added to it, and it is returned.
    """
    (m, depth), n, device = a.data.shape, b.data.shape[0], a.data.device
    out = torch.empty(m, n, dtype=torch.float32, device=device) if total is None else total
    partial, flags = _workspace(device, torch.cuda.current_stream(device).cuda_stream)
    maps = (
        _map(a.data.data_ptr(), m, depth, 1, TILE, ROWS),
        _map(b.data.data_ptr(), n, depth, 1, TILE, COLS),
        _map(out.data_ptr(), m, n, 4, CHUNK, 64),
    )
    formats = {f"{name}_E5M2": int(q.spec.format == "e5m2") for name, q in (("A", a), ("B", b))}
    defines = tuple(sorted((formats | {"STAGES": STAGES, "E5M2": 0}).items()))
    arguments = (*maps, a.scale, b.scale, partial, flags, m, n, depth // TILE, int(total is not None))
    shared = BESIDE + STAGES * STAGE
    launch("wgrad.cu", defines, MULTIPROCESSORS, 128 * (GROUPS + 1), shared, arguments, device)
    return out


@lru_cache(maxsize=4096)
def _map(address: int, rows: int, cols: int, itemsize: int, box_cols: int, box_rows: int) -> bytes:
    return encode_map(address, rows, cols, itemsize, box_cols, box_rows)


@cache
def _workspace(device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """Where blocks hand over parts of a tile, and flags that are 0 between launches; for one stream at a time."""
    partial = torch.empty(MULTIPROCESSORS * ROWS * COLS, dtype=torch.float32, device=device)
    return partial, torch.zeros(MULTIPROCESSORS * GROUPS, dtype=torch.int32, device=device)
