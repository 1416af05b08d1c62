#include "codes.cuh"
// Quantisation in 128 x 128 blocks: a tile lies in the registers of 256 threads as bf16, 16 lanes a row, 16 rows at a time.
//
// Both copies of a square block have the same codes and scale, so that the column copy is a transposition of the row copy.
// Defines: ROW, COL (copies wanted), POW2, E5M2.
constexpr int CODE_PITCH = 132;    // bytes of a staged row: a column of words meets all banks
constexpr int COLUMN_PITCH = 144;  // bytes of a staged column: sixteen at a time, whole banks
constexpr int STAGED = TILE * COLUMN_PITCH;

// Writes a tile of codes, staged by rows, as columns: a thread turns 4 columns x 16 rows, which are staged again so that
// a column leaves as 128 contiguous bytes.
__device__ __forceinline__ void turn(u8* staged, i64 r0, i64 c0, const Copy& col) {
    const int word = threadIdx.x % 32, part = threadIdx.x / 32;
    u32 in[16];
    uint4 turned[4];
#pragma unroll
    for (int i = 0; i < 16; ++i)
        in[i] = *reinterpret_cast<const u32*>(staged + (part * 16 + i) * CODE_PITCH + word * 4);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        u32 out[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const u32 ab = __byte_perm(in[4 * q], in[4 * q + 1], 0x0040 + k * 0x11);
            const u32 cd = __byte_perm(in[4 * q + 2], in[4 * q + 3], 0x0040 + k * 0x11);
            out[q] = __byte_perm(ab, cd, 0x5410);
        }
        turned[k] = make_uint4(out[0], out[1], out[2], out[3]);
    }
    __syncthreads();  // all have read
#pragma unroll
    for (int k = 0; k < 4; ++k)
        *reinterpret_cast<uint4*>(staged + (k * 32 + word) * COLUMN_PITCH + part * 16) = turned[k];
    __syncthreads();
#pragma unroll
    for (int round = 0; round < 4; ++round) {
        const int column = round * 32 + threadIdx.x / 8, piece = threadIdx.x % 8 * 16;
        const int slot = column % 4 * 32 + column / 4;
        *reinterpret_cast<uint4*>(col.codes + (c0 + column) * col.width + r0 + piece) =
            *reinterpret_cast<const uint4*>(staged + slot * COLUMN_PITCH + piece);
    }
}

// Copies of the tile at (r0, c0): y[i] holds eight values of row i * 16 + threadIdx.x / 16. `staged` is for COL.
__device__ __forceinline__ void emit_square(
    const uint4* y, i64 r0, i64 c0, const Copy& row, const Copy& col, u32* partial, u8* staged, i64* counter) {
    const int lane = threadIdx.x % 16, first = threadIdx.x / 16;
    u32 m = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        m = larger(m, larger(larger(y[i].x & ~SIGNS, y[i].y & ~SIGNS), larger(y[i].z & ~SIGNS, y[i].w & ~SIGNS)));
    if (top(m) >= INFINITE) {
        int bad = 0;
        m = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 v[4] = {y[i].x, y[i].y, y[i].z, y[i].w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                m = larger(m, without_nan(v[k]));
                bad += not_finite(v[k]);
            }
        }
        if (bad) atomicAdd(reinterpret_cast<u64*>(counter), (u64)bad);
    }
#pragma unroll
    for (int step = 16; step; step >>= 1) m = larger(m, __shfl_xor_sync(~0u, m, step));
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = m;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) m = larger(m, partial[i]);
    float e, d;
    scales(top(m), e, d);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        uint2 codes;
        codes.x = codes4(low(y[i].x) * e, high(y[i].x) * e, low(y[i].y) * e, high(y[i].y) * e);
        codes.y = codes4(low(y[i].z) * e, high(y[i].z) * e, low(y[i].w) * e, high(y[i].w) * e);
        if (ROW) *reinterpret_cast<uint2*>(row.codes + (r0 + i * 16 + first) * row.width + c0 + lane * 8) = codes;
        if (COL) {
            u32* at = reinterpret_cast<u32*>(staged + (i * 16 + first) * CODE_PITCH + lane * 8);
            at[0] = codes.x;
            at[1] = codes.y;
        }
    }
    if (ROW && threadIdx.x == 0) row.scale[r0 / TILE * row.pitch + c0 / TILE] = d;
    if (COL && threadIdx.x == 0) col.scale[c0 / TILE * col.pitch + r0 / TILE] = d;
    if (COL) {
        __syncthreads();
        turn(staged, r0, c0, col);
    }
}
