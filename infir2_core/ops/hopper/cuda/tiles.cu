#include "tiles.cuh"
// One-pass quantisation in 1 x 128 blocks: one 128 x 128 tile a block of threads, staged in shared memory as bf16.
//
// Phase one goes through the tile by rows: 16 lanes hold a row, 8 elements each. Row maxima are shuffles, row codes
// leave as 128 contiguous bytes, the bf16 values go to shared memory. Phase two goes through it by columns: a thread
// holds two columns and DEEP rows in registers, the maxima of a column meet in shared memory, codes are staged
// transposed and leave as 128 contiguous bytes again. Every input is read once, every value is computed once.
//
// Defines: SOURCE, ROW, COL (copies wanted), PLAIN (the bf16 values too), PRODUCT (column copy of the SwiGLU product),
// KEPT (row copy of gate and up: made by SWIGLU, read by SWIGLU_BACKWARD in place of x), SQUARE (COL in 128 x 128 blocks: a
// tile has one scale), AHEAD (rows whose loads are issued together), THREADS, BLOCKS (of a multiprocessor), GROUPED (all rows
// of a thread share one reduction, and a scale is computed by one lane and not by 16; LOADED and NORMED with ROW; 2: the
// values wait in shared memory and not in registers, with COL), POW2, E5M2.
#define SWIGLU 2           // silu(gate) * up, x = gate, up beside each other
#define SWIGLU_BACKWARD 3  // gradients of gate and up, and the product rebuilt
constexpr int OUTPUTS = SOURCE == SWIGLU_BACKWARD ? 2 : 1;
constexpr int UNROLL = AHEAD;

__device__ __forceinline__ Eight load_codes(const Copy& from, i64 r, i64 c) {  // bf16 values of eight codes
    const uint2 q = __ldg(reinterpret_cast<const uint2*>(from.codes + r * from.width + c));
    const float d = __ldg(from.scale + c / TILE * from.pitch + r);
    Eight out;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const float2 pair = values2((k < 2 ? q.x : q.y) >> 16 * (k % 2));
        out.v[k] = pack(pair.x * d, pair.y * d);
    }
    return out;
}
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

// x: the source, or gate and up [R, 2 width]; g: rstd (float) or the product's gradient; w: the norm's weight (float).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) infir2_tiles(
    const u16* x, const void* g, const float* w, u16* plain, u16* plain_product, i64 width, Copy row, Copy col,
    Copy product, Copy kept, i64* counter, i64* kept_counter) {
    extern __shared__ __align__(16) u16 tiles[];  // COL * OUTPUTS + PRODUCT tiles of 128 x PITCH
    __shared__ u32 partial[3][THREADS];
    const int across = (int)(width / TILE), tile = (int)blockIdx.x;  // a 64-bit division costs a twelfth of the kernel
    const i64 r0 = tile / across * (i64)TILE, c0 = tile % across * (i64)TILE;
    const int lane = threadIdx.x % 16, first = threadIdx.x / 16;  // 16 lanes a row
    const i64 c = c0 + lane * 8;
#if SOURCE == NORMED
    const float4* at = reinterpret_cast<const float4*>(w + c);
    const Weights weight = norm_weights(__ldg(at), __ldg(at + 1));
#endif
    const int spread = GROUPED ? 1 : AT_ONCE, top_row = GROUPED ? first * ROUNDS : first;  // a group's rows are neighbours
    Eight rows[GROUPED == 1 ? ROUNDS : 1];
#pragma unroll UNROLL
    for (int i = 0; i < ROUNDS; ++i) {
        const int tile_row = i * spread + top_row;
        const i64 r = r0 + tile_row;
        u16* staged = tiles + tile_row * PITCH + lane * 8;
        Eight y;
#if SOURCE == LOADED || SOURCE == NORMED
        y = load8(x + r * width + c);
#if SOURCE == NORMED
        y = normed(y, __ldg(reinterpret_cast<const float*>(g) + r), weight);
#endif
#else
#if KEPT && SOURCE == SWIGLU_BACKWARD
        const Eight gate = load_codes(kept, r, c), up = load_codes(kept, r, width + c);
#else
        const Eight gate = load8(x + r * 2 * width + c), up = load8(x + r * 2 * width + width + c);
#endif
#if SOURCE == SWIGLU
        if (KEPT) {
            emit_row(gate, r, c0, lane, kept, kept_counter);
            emit_row(up, r, width + c0, lane, kept, kept_counter);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float a = low(gate.v[k]), b = high(gate.v[k]);
            y.v[k] = pack(a * sigmoid(a) * low(up.v[k]), b * sigmoid(b) * high(up.v[k]));
        }
#else
        const Eight grad = load8(reinterpret_cast<const u16*>(g) + r * width + c);
        Eight z, p;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float for_gate[2], for_up[2], made[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float a = h ? high(gate.v[k]) : low(gate.v[k]), u = h ? high(up.v[k]) : low(up.v[k]);
                const float d = h ? high(grad.v[k]) : low(grad.v[k]), s = sigmoid(a), silu = a * s;
                for_gate[h] = d * u * (s + silu * (1.f - s));
                for_up[h] = d * silu;
                made[h] = silu * u;  // as in the forward, bit for bit
            }
            y.v[k] = pack(for_gate[0], for_gate[1]);
            z.v[k] = pack(for_up[0], for_up[1]);
            p.v[k] = pack(made[0], made[1]);
        }
        if (PRODUCT) store8(staged + COL * OUTPUTS * TILE * PITCH, p);
        if (plain_product) store8(plain_product + r * width + c, p);
        if (PLAIN) store8(plain + r * 2 * width + width + c, z);
        if (ROW) emit_row(z, r, width + c0, lane, row, counter);
        if (COL) store8(staged + TILE * PITCH, z);
#endif
#endif
        if (PLAIN) store8(plain + r * OUTPUTS * width + c, y);
        if (ROW && !GROUPED) emit_row(y, r, c0, lane, row, counter);
        if (GROUPED == 1) rows[GROUPED == 1 ? i : 0] = y;
        if (COL) store8(staged, y);
    }
    if (GROUPED) emit_rows(rows, tiles + top_row * PITCH + lane * 8, r0 + top_row, c0, lane, row, counter);
    if (COL || PRODUCT) __syncthreads();
    if (COL) emit_col<SQUARE>(tiles, partial[0], r0, c0, col, counter, !ROW);
    if (COL && OUTPUTS == 2) emit_col<SQUARE>(tiles + TILE * PITCH, partial[1], r0, width + c0, col, counter, !ROW);
    if (PRODUCT) emit_col<false>(tiles + COL * OUTPUTS * TILE * PITCH, partial[2], r0, c0, product, counter, false);
}
