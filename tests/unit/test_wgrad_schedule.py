"""How cuda/wgrad.cu shares out its work, by its source compiled for the CPU, and what it keeps in shared memory."""

from __future__ import annotations

import ctypes
import itertools
import re
from collections import defaultdict
from functools import cache
from typing import NamedTuple

import cuda_on_cpu
import pytest

from infir2_core.ops.hopper import cuda, wgrad

compiles = pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="no g++ to compile the schedule")
LEAST = 8
# Each piece, and the worker up to which its own one follows the others as wgrad.cu does; the corners of a grid's tiles.
CALLS = """
extern "C" int pieces(int tiles, int depth, int workers, int room, int* works, int* out) {
    const Schedule schedule = {tiles, depth, workers};
    int count = 0;
    for (int worker = 0; worker < workers; ++worker) {
        works[worker] = schedule.work(worker);
        for (int done = 0; done < works[worker]; ++count) {
            const Piece p = schedule.piece(worker, done);
            if (count == room || p.to <= p.from) return -1;
            int other = worker + 1;
            for (int reached = p.from ? depth : p.to; reached < depth && other <= workers; ++other)
                reached = schedule.reached(p, other);
            const int row[] = {worker, p.tile, p.from, p.to, other};
            for (int i = 0; i < 5; ++i) *out++ = row[i];
            done += p.to - p.from;
        }
    }
    return count;
}
extern "C" void corners(int down, int across, int* out) {
    for (int tile = 0; tile < down * across; ++tile) {
        const Corner at = corner<128, 192>(tile, down, across);
        *out++ = at.row, *out++ = at.col;
    }
}
"""


class Piece(NamedTuple):
    """K blocks [start, stop) of a tile; following: the first worker after those that its own one waits for."""

    worker: int
    tile: int
    start: int
    stop: int
    following: int


@cache
def library() -> ctypes.CDLL:
    text = cuda.source("schedule.cuh")
    header = """
        #define __device__
        #define __forceinline__ inline
        inline int min(int a, int b) { return a < b ? a : b; }
        inline int max(int a, int b) { return a < b ? b : a; }
    """
    return cuda_on_cpu.compiled(header + text + CALLS, ("-ftrapv",))


def shared_out(tiles: int, depth: int, workers: int) -> tuple[list[Piece], list[int]]:
    """All pieces, in the order in which workers compute them, and the work that each worker was told."""
    room = tiles + workers
    works, out = (ctypes.c_int * workers)(), (ctypes.c_int * (5 * room))()
    count = library().pieces(tiles, depth, workers, room, works, out)
    assert count >= 0, "an empty piece, or more pieces than cuts can make"
    return [Piece(*out[5 * i : 5 * i + 5]) for i in range(count)], list(works)


def check(tiles: int, depth: int, workers: int) -> None:
    pieces, works = shared_out(tiles, depth, workers)
    of_tile, of_worker = defaultdict[int, list[Piece]](list), defaultdict[int, list[Piece]](list)
    for piece in pieces:
        of_tile[piece.tile].append(piece)
        of_worker[piece.worker].append(piece)
    assert sorted(of_tile) == list(range(tiles))
    for parts in of_tile.values():  # each K block once
        parts.sort(key=lambda p: p.start)
        assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])] and parts[-1].stop == depth
        # The tile's owner follows exactly the workers that have the rest, in the order of K; nobody else does.
        assert [p.worker for p in parts[1:]] == list(range(parts[0].worker + 1, parts[0].following))
    shared = tiles // workers * workers  # the first tile that is not one worker's
    for worker, parts in of_worker.items():
        assert works[worker] == sum(p.stop - p.start for p in parts)
        within = [p for p in parts if p.start]
        assert within in ([], [p for p in parts if p.tile >= shared][:1]), "one place for what is handed over"
    assert sum(works) == tiles * depth
    ranges = [work - tiles // workers * depth for work in works]
    whole = tiles % workers  # a worker a tile, or ranges of LEAST and more, whichever are more workers
    sharing = max(whole, min(workers, sum(ranges) // LEAST))
    assert [r > 0 for r in ranges] == [worker < sharing for worker in range(workers)]
    if sharing:
        assert max(ranges) - min(ranges[:sharing]) <= 1 and max(ranges) <= depth


DEPTHS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 64, 127, 128, 1000, 32768]


@compiles
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 66, 132])
def test_every_block_is_computed_once_and_added_to_its_tile(workers: int) -> None:
    counts = {1, 2, 3, 4, 7, 13, 36, 56, 60, 64, 65, 66, 67, 70, 96, 131, 132, 133, 197, 198, 199, 264, 700}
    counts |= {workers - 1, workers, workers + 1, 2 * workers, 3 * workers - 1} - {0}
    for tiles, depth in itertools.product(sorted(counts), DEPTHS):
        check(tiles, depth, workers)


@compiles
@pytest.mark.parametrize("workers", [66, 132])
def test_four_million_tokens_do_not_overflow(workers: int) -> None:
    """A sum or product beyond 32 bits ends the process."""
    for tiles in (1, workers - 1, workers + 1, 10 * workers - 1, 27_000):
        check(tiles, 32768, workers)


def test_the_constants_are_those_of_the_kernel() -> None:
    text = cuda.source("wgrad.cu")
    for line in ("GROUPS = 2, ROWS = 128, COLS = 192;", "CHUNK = 32,", f"LEAST = {LEAST};"):
        assert re.search(rf"constexpr int {line}", text), line
    assert (wgrad.GROUPS, wgrad.ROWS, wgrad.COLS, wgrad.CHUNK) == (2, 128, 192, 32)


@compiles
def test_the_corners_are_those_of_a_grid() -> None:
    for down, across in itertools.product((1, 2, 3, 6, 35), (1, 2, 7, 8, 9, 16, 17, 47, 94)):
        out = (ctypes.c_int * (2 * down * across))()
        library().corners(down, across, out)
        made = list(zip(out[::2], out[1::2], strict=True))
        grid = itertools.product(range(down), range(across))
        assert sorted(made) == [(row * wgrad.ROWS, col * wgrad.COLS) for row, col in grid]


def test_shared_memory_holds_the_stages_and_no_more() -> None:
    held = (wgrad.ROWS + wgrad.COLS) * 128 + 4 * (wgrad.ROWS + wgrad.COLS) + 2 * 8  # codes, scales, barriers
    beside = 1023 + wgrad.GROUPS * 64 * wgrad.CHUNK * 4
    assert wgrad.STAGES >= 4
    assert wgrad.STAGES * held + beside <= wgrad.BESIDE + wgrad.STAGES * wgrad.STAGE <= cuda.SHARED_BYTES < 227 * 1024
    assert (wgrad.STAGES + 1) * held + beside > 227 * 1024
