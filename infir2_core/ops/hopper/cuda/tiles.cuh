#include "codes.cuh"
// Copies of 128 x 128 tiles in 1 x 128 blocks, for the kernels that make the tiles (tiles.cu, stream.cu).
//
// Defines: THREADS, GROUPED, POW2, E5M2, as in tiles.cu.
#define LOADED 0  // x
#define NORMED 1  // x * rstd * weight
constexpr int AT_ONCE = THREADS / 16;  // rows of a round of phase one
constexpr int ROUNDS = TILE / AT_ONCE;
constexpr int GROUPS = THREADS / 64;   // threads that share two columns in phase two
constexpr int DEEP = TILE / GROUPS;    // their rows
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
__device__ __forceinline__ Eight staged8(const u16* at) {
    const uint4 q = *reinterpret_cast<const uint4*>(at);
    return {{q.x, q.y, q.z, q.w}};
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

// Maxima of `magnitude` of the eight values that a lane holds of each of ROUNDS rows, over the 16 lanes that share them.
template <typename Magnitude>
__device__ __forceinline__ void row_maxima(
    const Eight* y, const u16* staged, u32 (&word)[ROUNDS / 2], const Magnitude& magnitude) {
#pragma unroll
    for (int j = 0; j < ROUNDS / 2; ++j) {
        u32 m[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Eight v = GROUPED == 2 ? staged8(staged + (2 * j + h) * PITCH) : y[GROUPED == 2 ? 0 : 2 * j + h];
            m[h] = larger(larger(magnitude(v.v[0]), magnitude(v.v[1])), larger(magnitude(v.v[2]), magnitude(v.v[3])));
        }
        word[j] = larger(__byte_perm(m[0], m[1], 0x5410), __byte_perm(m[0], m[1], 0x7632));
    }
#pragma unroll
    for (int step = 8; step; step >>= 1) {
#pragma unroll
        for (int j = 0; j < ROUNDS / 2; ++j) word[j] = larger(word[j], __shfl_xor_sync(~0u, word[j], step));
    }
}

// Row copies of ROUNDS rows from r on, of which the 16 lanes that share them hold eight values each from column c on, in y or
// in `staged` rows. Maxima of two rows are a word, so that shuffles move two at once.
__device__ __forceinline__ void emit_rows(
    const Eight* y, const u16* staged, i64 r, i64 c, int lane, const Copy& out, i64* counter) {
    constexpr int WORDS = ROUNDS / 2;
    u32 word[WORDS], all;
    row_maxima(y, staged, word, [](u32 pair) { return pair & ~SIGNS; });
    all = word[0];
#pragma unroll
    for (int j = 1; j < WORDS; ++j) all = larger(all, word[j]);
    if (__any_sync(~0u, top(all) >= INFINITE)) {  // rare: look again, without NaN, and count
        row_maxima(y, staged, word, [](u32 pair) { return without_nan(pair); });
        int bad = 0;
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const Eight v = GROUPED == 2 ? staged8(staged + i * PITCH) : y[GROUPED == 2 ? 0 : i];
            bad += not_finite(v.v[0]) + not_finite(v.v[1]) + not_finite(v.v[2]) + not_finite(v.v[3]);
        }
        if (bad) add(counter, bad);
    }
    // A tree of choices; a chain of comparisons becomes an array in local memory.
#pragma unroll
    for (int step = 1; step < WORDS; step *= 2) {
#pragma unroll
        for (int j = 0; j < WORDS; j += 2 * step) word[j] = lane & 2 * step ? word[j + step] : word[j];
    }
    float encode, decode;
    scales(lane % 2 ? word[0] >> 16 : word[0] & 0xFFFFu, encode, decode);
    if (lane < ROUNDS) out.scale[(c / TILE) * out.pitch + r + lane] = decode;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const Eight v = GROUPED == 2 ? staged8(staged + i * PITCH) : y[GROUPED == 2 ? 0 : i];
        const float e = __shfl_sync(~0u, encode, threadIdx.x % 32 / 16 * 16 + i);
        uint2 codes;
        codes.x = codes4(low(v.v[0]) * e, high(v.v[0]) * e, low(v.v[1]) * e, high(v.v[1]) * e);
        codes.y = codes4(low(v.v[2]) * e, high(v.v[2]) * e, low(v.v[3]) * e, high(v.v[3]) * e);
        *reinterpret_cast<uint2*>(out.codes + (r + i) * out.width + c + lane * 8) = codes;
    }
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
