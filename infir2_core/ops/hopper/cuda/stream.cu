#include "tiles.cuh"
// Both copies of a matrix or of its norm, as tiles.cu makes them, by blocks that stay: while a tile is worked on, the next
// one travels to shared memory. A thread copies what it reads itself, so that an arriving tile needs no barrier.
//
// Defines: SOURCE (LOADED or NORMED), PLAIN, SQUARE, THREADS, BLOCKS, GROUPED (1 or 2), POW2, E5M2, as in tiles.cu.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) infir2_stream(
    const u16* x, const float* rstd, const float* w, u16* plain, i64 width, i64 count, Copy row, Copy col, i64* counter) {
    extern __shared__ __align__(16) u16 tiles[];  // 128 x PITCH in work, 128 x 128 to come
    __shared__ u32 partial[THREADS];
    const int across = (int)(width / TILE), lane = threadIdx.x % 16, top_row = threadIdx.x / 16 * ROUNDS;
    u16 *mine = tiles + top_row * PITCH + lane * 8, *next = tiles + TILE * PITCH + top_row * TILE + lane * 8;
    float4 next_rstd[ROUNDS / 4], next_w[2];
    const auto fetch = [&](int tile) {
        if (tile < count) {
            const i64 r = tile / across * (i64)TILE + top_row, c = tile % across * (i64)TILE + lane * 8;
#pragma unroll
            for (int i = 0; i < ROUNDS; ++i) copy16(next + i * TILE, x + (r + i) * width + c);
            if (SOURCE == NORMED) {
#pragma unroll
                for (int i = 0; i < ROUNDS / 4; ++i) next_rstd[i] = __ldg(reinterpret_cast<const float4*>(rstd + r) + i);
#pragma unroll
                for (int i = 0; i < 2; ++i) next_w[i] = __ldg(reinterpret_cast<const float4*>(w + c) + i);
            }
        }
        close_copies();
    };
    fetch((int)blockIdx.x);
    for (int tile = (int)blockIdx.x; tile < count; tile += (int)gridDim.x) {
        const i64 r0 = tile / across * (i64)TILE, c0 = tile % across * (i64)TILE;
        Eight rows[GROUPED == 1 ? ROUNDS : 1];
        const Weights weight = SOURCE == NORMED ? norm_weights(next_w[0], next_w[1]) : Weights{};
        wait_copies<0>();
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            Eight y = staged8(next + i * TILE);
            if (SOURCE == NORMED) {
                const float4 four = next_rstd[i / 4];
                y = normed(y, i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w, weight);
            }
            if (PLAIN) store8(plain + (r0 + top_row + i) * width + c0 + lane * 8, y);
            if (GROUPED == 1) rows[GROUPED == 1 ? i : 0] = y;
            store8(mine + i * PITCH, y);
        }
        fetch(tile + (int)gridDim.x);
        emit_rows(rows, mine, r0 + top_row, c0, lane, row, counter);
        __syncthreads();
        emit_col<SQUARE>(tiles, partial, r0, c0, col, counter, false);
        __syncthreads();  // the codes have left
    }
}
