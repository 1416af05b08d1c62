#include "codes.cuh"
// One-pass quantisation in 1 x 128 blocks: one 128 x 128 tile a block of threads, staged in shared memory as bf16.
//
// Phase one goes through the tile by rows: 16 lanes hold a row, 8 elements each. Row maxima are shuffles, row codes
// leave as 128 contiguous bytes, the bf16 values go to shared memory. Phase two goes through it by columns: a thread
// holds two columns and DEEP rows in registers, the maxima of a column meet in shared memory, codes are staged
// transposed and leave as 128 contiguous bytes again. Every input is read once, every value is computed once.
//
// Defines: SOURCE, ROW, COL (copies wanted), PLAIN (the bf16 values too), PRODUCT (column copy of the SwiGLU product),
// KEPT (row copy of gate and up: made by SWIGLU, read by SWIGLU_BACKWARD in place of x), SQUARE (COL in 128 x 128 blocks: a
// tile has one scale), AHEAD (rows whose loads are issued together), THREADS, BLOCKS (of a multiprocessor), POW2, E5M2.
#define LOADED 0           // x
#define NORMED 1           // x * rstd * weight
#define SWIGLU 2           // silu(gate) * up, x = gate, up beside each other
#define SWIGLU_BACKWARD 3  // gradients of gate and up, and the product rebuilt
constexpr int UNROLL = AHEAD;
constexpr int OUTPUTS = SOURCE == SWIGLU_BACKWARD ? 2 : 1;
constexpr int AT_ONCE = THREADS / 16;  // rows of a round of phase one
constexpr int ROUNDS = TILE / AT_ONCE;
constexpr int GROUPS = THREADS / 64;  // threads that share two columns in phase two
constexpr int DEEP = TILE / GROUPS;   // their rows
constexpr int PITCH = 136;       // bf16 of a staged row: 272 bytes, so that a column meets all banks
constexpr int CODE_PITCH = 144;  // bytes of a staged column of codes

struct Eight { u32 v[4]; };

__device__ __forceinline__ Eight load8(const u16* at) {
    const uint4 q = __ldg(reinterpret_cast<const uint4*>(at));
    return {{q.x, q.y, q.z, q.w}};
}
__device__ __forceinline__ void store8(u16* at, const Eight& y) {
    *reinterpret_cast<uint4*>(at) = make_uint4(y.v[0], y.v[1], y.v[2], y.v[3]);
}

struct Weights { float x[8]; };

__device__ __forceinline__ Weights norm_weights(const float4& a, const float4& b) {  // rounded to bf16
    const u32 pair[4] = {pack(a.x, a.y), pack(a.z, a.w), pack(b.x, b.y), pack(b.z, b.w)};
    Weights out;
#pragma unroll
    for (int k = 0; k < 4; ++k) out.x[2 * k] = low(pair[k]), out.x[2 * k + 1] = high(pair[k]);
    return out;
}
__device__ __forceinline__ Eight normed(const Eight& x, float rstd, const Weights& weight) {
    Eight y;
#pragma unroll
    for (int k = 0; k < 4; ++k)
        y.v[k] = pack(low(x.v[k]) * rstd * weight.x[2 * k], high(x.v[k]) * rstd * weight.x[2 * k + 1]);
    return y;
}

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
__device__ __forceinline__ void add(i64* counter, int count) {
    atomicAdd(reinterpret_cast<u64*>(counter), (u64)count);
}

// Row copy of the eight values that this lane holds of row r from column c on; 16 lanes share the row.
__device__ __forceinline__ void emit_row(const Eight& y, i64 r, i64 c, int lane, const Copy& out, i64* counter) {
    u32 m = larger(larger(y.v[0] & ~SIGNS, y.v[1] & ~SIGNS), larger(y.v[2] & ~SIGNS, y.v[3] & ~SIGNS));
#pragma unroll
    for (int step = 8; step; step >>= 1) m = larger(m, __shfl_xor_sync(~0u, m, step));
    if (__any_sync(~0u, top(m) >= INFINITE)) {  // rare: look again, without NaN, and count
        m = larger(larger(without_nan(y.v[0]), without_nan(y.v[1])), larger(without_nan(y.v[2]), without_nan(y.v[3])));
        for (int step = 8; step; step >>= 1) m = larger(m, __shfl_xor_sync(~0u, m, step));
        const int bad = not_finite(y.v[0]) + not_finite(y.v[1]) + not_finite(y.v[2]) + not_finite(y.v[3]);
        if (bad) add(counter, bad);
    }
    float e, d;
    scales(top(m), e, d);
    uint2 codes;
    codes.x = codes4(low(y.v[0]) * e, high(y.v[0]) * e, low(y.v[1]) * e, high(y.v[1]) * e);
    codes.y = codes4(low(y.v[2]) * e, high(y.v[2]) * e, low(y.v[3]) * e, high(y.v[3]) * e);
    *reinterpret_cast<uint2*>(out.codes + r * out.width + c + lane * 8) = codes;
    if (lane == 0) out.scale[(c / TILE) * out.pitch + r] = d;
}

// Column copy of a staged tile whose first element is (r0, c0), in one block or 128. `partial` holds GROUPS x 64 pairs of
// maxima.
template <bool ONE_BLOCK>
__device__ __forceinline__ void emit_col(
    u16* tile, u32* partial, i64 r0, i64 c0, const Copy& out, i64* counter, bool count) {
    const int pair = threadIdx.x % 64, group = threadIdx.x / 64;
    const u32* words = reinterpret_cast<const u32*>(tile) + group * DEEP * (PITCH / 2) + pair;
    u32 y[DEEP], m = 0;
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
        y[i] = words[i * (PITCH / 2)];
        m = larger(m, y[i] & ~SIGNS);
    }
    if (top(m) >= INFINITE) {
        int bad = 0;
        m = 0;
#pragma unroll
        for (int i = 0; i < DEEP; ++i) {
            m = larger(m, without_nan(y[i]));
            bad += not_finite(y[i]);
        }
        if (count && bad) add(counter, bad);
    }
    if (ONE_BLOCK) {
#pragma unroll
        for (int step = 16; step; step >>= 1) m = larger(m, __shfl_xor_sync(~0u, m, step));
    }
    partial[ONE_BLOCK ? threadIdx.x / 32 : group * 64 + pair] = m;
    __syncthreads();  // all maxima are there, and the tile has been read: codes may take its place
#pragma unroll
    for (int k = 0; k < (ONE_BLOCK ? THREADS / 32 : GROUPS); ++k) m = larger(m, partial[ONE_BLOCK ? k : k * 64 + pair]);
    float e0, d0, e1, d1;
    if (ONE_BLOCK) m = top(m) * 0x10001u;
    scales(m & 0xFFFFu, e0, d0);
    scales(m >> 16, e1, d1);
    if (ONE_BLOCK && threadIdx.x == 0)
        out.scale[(c0 / TILE) * out.pitch + r0 / TILE] = d0;
    else if (!ONE_BLOCK && group == 0)
        *reinterpret_cast<float2*>(out.scale + (r0 / TILE) * out.pitch + c0 + 2 * pair) = make_float2(d0, d1);
    u32 even[DEEP / 4], odd[DEEP / 4];
#pragma unroll
    for (int q = 0; q < DEEP / 4; ++q) {
        const u32 *v = y + 4 * q;
        even[q] = codes4(low(v[0]) * e0, low(v[1]) * e0, low(v[2]) * e0, low(v[3]) * e0);
        odd[q] = codes4(high(v[0]) * e1, high(v[1]) * e1, high(v[2]) * e1, high(v[3]) * e1);
    }
    // Even columns lie before odd ones, so that the threads of a warp write to different banks.
    u8* staged = reinterpret_cast<u8*>(tile);
    uint4* first = reinterpret_cast<uint4*>(staged + pair * CODE_PITCH + DEEP * group);
    uint4* second = reinterpret_cast<uint4*>(staged + (64 + pair) * CODE_PITCH + DEEP * group);
#pragma unroll
    for (int q = 0; q < DEEP / 16; ++q) {
        first[q] = make_uint4(even[4 * q], even[4 * q + 1], even[4 * q + 2], even[4 * q + 3]);
        second[q] = make_uint4(odd[4 * q], odd[4 * q + 1], odd[4 * q + 2], odd[4 * q + 3]);
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < TILE * 8 / THREADS; ++round) {  // eight lanes a column
        const int column = round * (THREADS / 8) + threadIdx.x / 8, piece = threadIdx.x % 8 * 16;
        const int slot = column % 2 * 64 + column / 2;
        *reinterpret_cast<uint4*>(out.codes + (c0 + column) * out.width + r0 + piece) =
            *reinterpret_cast<const uint4*>(staged + slot * CODE_PITCH + piece);
    }
}

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
#pragma unroll UNROLL
    for (int i = 0; i < ROUNDS; ++i) {
        const int tile_row = i * AT_ONCE + first;
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
        if (ROW) emit_row(y, r, c0, lane, row, counter);
        if (COL) store8(staged, y);
    }
    if (COL || PRODUCT) __syncthreads();
    if (COL) emit_col<SQUARE>(tiles, partial[0], r0, c0, col, counter, !ROW);
    if (COL && OUTPUTS == 2) emit_col<SQUARE>(tiles + TILE * PITCH, partial[1], r0, width + c0, col, counter, !ROW);
    if (PRODUCT) emit_col<false>(tiles + COL * OUTPUTS * TILE * PITCH, partial[2], r0, c0, product, counter, false);
}
