"""Who is asked for an FP8 GEMM, by a table of rates; and the bytes that a kernel is launched with."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from infir2_core.errors import InputError
from infir2_core.ops.hopper import gemm
from infir2_core.ops.hopper.cuda import packed

EVERYONE = (gemm.CUBLASLT, gemm.DEEPGEMM, gemm.OWN)


def entry(kind: str, side: int, **tflops: int) -> dict[str, Any]:
    return {"kind": kind, "m": side, "n": side, "k": side, "tflops": tflops}


def forget() -> None:
    for cached in (gemm.table, gemm.fastest):
        cached.cache_clear()


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A table: our kernel is the fastest of the large `1d` product, DeepGEMM of the large `2d` one."""
    path = tmp_path / "table.json"
    shapes = [entry("1d", 4096, cublaslt=2, deepgemm=1, infir2=3), entry("1d", 128, infir2=1)]
    shapes += [entry("2d", 4096, cublaslt=1, deepgemm=2), entry("2d", 128, cublaslt=2, deepgemm=1)]
    path.write_text(json.dumps({"shapes": shapes}))
    monkeypatch.setenv("INFIR2_GEMM_TABLE", str(path))
    forget()
    yield path
    forget()


@pytest.mark.usefixtures("written")
def test_the_nearest_shape_of_the_table_decides() -> None:
    both = (gemm.CUBLASLT, gemm.DEEPGEMM)
    assert gemm.fastest("2d", 8192, 2048, 1536, both) == gemm.DEEPGEMM
    assert gemm.fastest("2d", 256, 128, 256, both) == gemm.CUBLASLT
    assert gemm.fastest("1d", 8192, 2048, 1536, EVERYONE) == gemm.OWN
    assert gemm.fastest("1d", 8192, 2048, 1536, both) == gemm.CUBLASLT
    assert gemm.fastest("1d", 8192, 2048, 1536, (gemm.DEEPGEMM, gemm.OWN)) == gemm.OWN


def test_only_those_who_can_are_named(written: Path) -> None:
    """cuBLASLt, which always can, where the table has no rate of any of them."""
    for count in (1, 2, 3):
        for among in combinations(EVERYONE, count):
            for kind, side in (("1d", 4096), ("1d", 128), ("2d", 4096), ("2d", 128)):
                assert gemm.fastest(kind, side, side, side, among) in {*among, gemm.CUBLASLT}
    assert gemm.fastest("1d", 128, 128, 128, (gemm.CUBLASLT, gemm.DEEPGEMM)) == gemm.CUBLASLT
    assert gemm.fastest("2d", 4096, 4096, 4096, (gemm.OWN,)) == gemm.CUBLASLT
    written.write_text(json.dumps({"shapes": [entry("2d", 128, cublaslt=1, deepgemm=2)]}))
    forget()
    assert gemm.fastest("1d", 128, 128, 128, EVERYONE) == gemm.CUBLASLT


@pytest.mark.parametrize("wrong", [entry("1d", 128), entry("1d", 128, cutlass=3), entry("3d", 128, infir2=1)])
def test_what_is_no_table(wrong: dict[str, Any], written: Path) -> None:
    written.write_text(json.dumps({"shapes": [wrong]}))
    forget()
    with pytest.raises(InputError, match="GEMM"):
        gemm.table()


def test_arguments_of_a_kernel_as_bytes() -> None:
    """Bytes, such as a tensor map, stay as they are, alone and in a struct."""
    image, tensor = bytes(range(128)), torch.zeros(3)
    assert packed(image) == image and packed(b"") == b""
    address = struct.pack("<Q", tensor.data_ptr())
    assert packed((image, tensor, None, (7, 0.5))) == image + address + bytes(8) + struct.pack("<qd", 7, 0.5)
    assert packed(-1) == b"\xff" * 8 and packed(tensor) == address
