#include "square.cuh"
// The column copy of a matrix quantised in 128 x 128 blocks from its row copy: the same codes and scales, turned.
extern "C" __global__ void __launch_bounds__(256) infir2_transpose(i64 width, Copy row, Copy col) {
    __shared__ __align__(16) u8 staged[STAGED];
    const i64 across = width / TILE, r0 = blockIdx.x / across * TILE, c0 = blockIdx.x % across * TILE;
    const int lane = threadIdx.x % 8, first = threadIdx.x / 8;  // 8 lanes a row, 32 rows at a time
    uint4 in[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        in[i] = __ldg(reinterpret_cast<const uint4*>(row.codes + (r0 + i * 32 + first) * row.width + c0 + lane * 16));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32* at = reinterpret_cast<u32*>(staged + (i * 32 + first) * CODE_PITCH + lane * 16);
        at[0] = in[i].x;
        at[1] = in[i].y;
        at[2] = in[i].z;
        at[3] = in[i].w;
    }
    if (threadIdx.x == 0) col.scale[c0 / TILE * col.pitch + r0 / TILE] = row.scale[r0 / TILE * row.pitch + c0 / TILE];
    __syncthreads();
    turn(staged, r0, c0, col);
}
