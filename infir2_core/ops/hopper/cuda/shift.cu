#include "square.cuh"
// The column copy of a matrix from the codes of its row copy in 1 x 128 blocks (reference: ops/reference/quantize.py,
// `shifted`): all codes of a 128 x 128 tile take the scale of its coarsest row, so that each is divided by a power of two.
//
// A lane whose codes are all zero says nothing about the scale. Defines: SQUARE (one scale for the tile, or the same one for
// each of its columns), POW2, E5M2.
__device__ __forceinline__ u32 divided(u32 codes, float factor) {  // four codes
    const float2 a = values2(codes & 0xFFFFu), b = values2(codes >> 16);
    return codes4(a.x * factor, a.y * factor, b.x * factor, b.y * factor);
}

extern "C" __global__ void __launch_bounds__(256, 4) infir2_shift(i64 width, Copy row, Copy col) {
    __shared__ __align__(16) u8 staged[STAGED];
    __shared__ u32 partial[8];
    const i64 across = width / TILE, r0 = blockIdx.x / across * TILE, c0 = blockIdx.x % across * TILE;
    const int lane = threadIdx.x % 8, first = threadIdx.x / 8;  // 8 lanes a row, 32 rows at a time
    uint4 in[4];
    float own[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        in[i] = __ldg(reinterpret_cast<const uint4*>(row.codes + (r0 + i * 32 + first) * row.width + c0 + lane * 16));
        own[i] = __ldg(row.scale + c0 / TILE * row.pitch + r0 + i * 32 + first);
    }
    u32 coarsest = 0;  // bits of positive numbers order as integers do
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if ((in[i].x | in[i].y | in[i].z | in[i].w) & 0x7F7F7F7Fu) coarsest = max(coarsest, __float_as_uint(own[i]));
#pragma unroll
    for (int step = 16; step; step >>= 1) coarsest = max(coarsest, __shfl_xor_sync(~0u, coarsest, step));
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = coarsest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) coarsest = max(coarsest, partial[i]);
    const float scale = coarsest ? __uint_as_float(coarsest) : 1.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float factor = fminf(__fdiv_rn(own[i], scale), 1.f);  // rows of zeros may have a larger scale
        if (factor != 1.f) {
            in[i].x = divided(in[i].x, factor);
            in[i].y = divided(in[i].y, factor);
            in[i].z = divided(in[i].z, factor);
            in[i].w = divided(in[i].w, factor);
        }
        u32* at = reinterpret_cast<u32*>(staged + (i * 32 + first) * CODE_PITCH + lane * 16);
        at[0] = in[i].x;
        at[1] = in[i].y;
        at[2] = in[i].z;
        at[3] = in[i].w;
    }
    if (SQUARE) {
        if (threadIdx.x == 0) col.scale[c0 / TILE * col.pitch + r0 / TILE] = scale;
    } else if (threadIdx.x < TILE) {
        col.scale[r0 / TILE * col.pitch + c0 + threadIdx.x] = scale;
    }
    __syncthreads();
    turn(staged, r0, c0, col);
}
