#include "square.cuh"
// Copies of a bf16 matrix in 128 x 128 blocks, a tile a block of threads.
extern "C" __global__ void __launch_bounds__(256, 3) infir2_square(
    const u16* x, i64 width, Copy row, Copy col, i64* counter) {
    __shared__ u32 partial[8];
    __shared__ __align__(16) u8 staged[COL ? STAGED : 16];
    const i64 across = width / TILE, r0 = blockIdx.x / across * TILE, c0 = blockIdx.x % across * TILE;
    const int lane = threadIdx.x % 16, first = threadIdx.x / 16;
    uint4 y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        y[i] = __ldg(reinterpret_cast<const uint4*>(x + (r0 + i * 16 + first) * width + c0 + lane * 8));
    emit_square(y, r0, c0, row, col, partial, staged, counter);
}
