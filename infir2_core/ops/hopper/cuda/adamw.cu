#include "square.cuh"
// AdamW on a matrix, a 128 x 128 tile a block of 256 threads: every stored form is read once and written once, and the
// new weight leaves quantised and rounded as well (reference: ops/reference/adam.py, moments.py, stochastic.py).
//
// Every line of the update is one float32 operation, rounded once, so that the reference is met bit for bit.
// Defines: WIDE_GRAD (float32 gradient, else bf16), SPLIT (weight bf16 and a remainder, else float32), M, V (0 float32,
// 1 bf16, 2 E4M3 codes), ROOT (V in codes of the root), COPY (the weight in bf16 too), AHEAD (rows whose loads are issued
// together), BLOCKS (of a multiprocessor), ROW (copy of the new weight in codes), COL (0), POW2, E5M2.
struct Form { void* data; float* scale; i64 salt; };

constexpr int UNROLL = AHEAD;

struct Values { float x[8]; };

__device__ __forceinline__ Values load_wide(const float* at) {
    const float4 a = *reinterpret_cast<const float4*>(at), b = *reinterpret_cast<const float4*>(at + 4);
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}
__device__ __forceinline__ void store_wide(float* at, const Values& v) {
    *reinterpret_cast<float4*>(at) = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
    *reinterpret_cast<float4*>(at + 4) = make_float4(v.x[4], v.x[5], v.x[6], v.x[7]);
}
__device__ __forceinline__ Values load_bf16(const u16* at) {
    const uint4 q = *reinterpret_cast<const uint4*>(at);
    return {{low(q.x), high(q.x), low(q.y), high(q.y), low(q.z), high(q.z), low(q.w), high(q.w)}};
}
__device__ __forceinline__ uint4 packed(const Values& v) {
    return make_uint4(pack(v.x[0], v.x[1]), pack(v.x[2], v.x[3]), pack(v.x[4], v.x[5]), pack(v.x[6], v.x[7]));
}
__device__ __forceinline__ Values load_moment(const Form& form, int kind, bool root, i64 at) {
    if (kind == 0) return load_wide(reinterpret_cast<const float*>(form.data) + at);
    if (kind == 1) return load_bf16(reinterpret_cast<const u16*>(form.data) + at);
    const uint2 q = *reinterpret_cast<const uint2*>(reinterpret_cast<const u8*>(form.data) + at);
    const float scale = form.scale[at / TILE];
    Values out;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const float2 pair = e4m3_values((k < 2 ? q.x : q.y) >> 16 * (k % 2));
        const float r[2] = {__fmul_rn(pair.x, scale), __fmul_rn(pair.y, scale)};
#pragma unroll
        for (int h = 0; h < 2; ++h) out.x[2 * k + h] = root ? __fmul_rn(r[h], r[h]) : r[h];
    }
    return out;
}
// `roots` are those of v, needed with `root`.
__device__ __forceinline__ void store_moment(
    const Form& form, int kind, bool root, i64 at, const Values& v, const Values& roots, u32 word) {
    if (kind == 0) return store_wide(reinterpret_cast<float*>(form.data) + at, v);
    if (kind == 1) {
        *reinterpret_cast<uint4*>(reinterpret_cast<u16*>(form.data) + at) = packed(v);
        return;
    }
    float r[8], amax = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        r[k] = root ? roots.x[k] : v.x[k];
        amax = max(amax, __uint_as_float(__float_as_uint(r[k]) & 0x7FFFFFFFu));
    }
#pragma unroll
    for (int step = 8; step; step >>= 1) amax = max(amax, __shfl_xor_sync(~0u, amax, step));
    const float scale = amax > 0 ? max(__fdiv_rn(amax, 448.f), 1.17549435e-38f) : 1.f;
    const float inverse = __fdiv_rn(1.f, scale);
    u32 codes[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        const u32 bits = __float_as_uint(r[k]);
        const float s = __fmul_rn(__uint_as_float(bits & 0x7FFFFFFFu), inverse);
        const int e = max((int)(__float_as_uint(s) >> 23) - 127, -6);
        const float q = __fmul_rn(s, __uint_as_float((u32)(130 - e) << 23)), n = floorf(q);
        const float f = __fsub_rn(q, n), twice = 2.f * n;
        const float u = (mix((u32)(at + k) ^ word) >> 8) * 5.9604644775390625e-8f;
        const bool up = root ? __fmul_rn(u, twice + 1.f) < __fmul_rn(f, __fadd_rn(twice, f)) : u < f;
        int code = min(8 * (e + 6) + (int)n + up, 126);
        if (root && v.x[k] > 0) code = max(code, 1);
        codes[k / 4] |= (code | (bits >> 24 & 0x80)) << 8 * (k % 4);
    }
    *reinterpret_cast<uint2*>(reinterpret_cast<u8*>(form.data) + at) = uint2{codes[0], codes[1]};
    if (threadIdx.x % 16 == 0) form.scale[at / TILE] = scale;
}

// Adds the infinities and NaNs that this tile of the weight has in bf16.
__device__ __forceinline__ void count_again(const void* weight, i64 width, i64* counter) {
    const i64 across = width / TILE, r0 = blockIdx.x / across * TILE, c0 = blockIdx.x % across * TILE;
    int bad = 0;
    for (int i = threadIdx.x; i < TILE * TILE / 8; i += 256) {
        const i64 at = (r0 + i / 16) * width + c0 + i % 16 * 8;
        const uint4 q = SPLIT ? *reinterpret_cast<const uint4*>(reinterpret_cast<const u16*>(weight) + at)
                              : packed(load_wide(reinterpret_cast<const float*>(weight) + at));
        bad += not_finite(q.x) + not_finite(q.y) + not_finite(q.z) + not_finite(q.w);
    }
    if (bad) atomicAdd(reinterpret_cast<u64*>(counter), (u64)bad);
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS) infir2_adamw(
    void* weight, u16* remainder, const void* grad, Form first, Form second, u16* copy, i64 width, Copy row, i64* counter,
    const float* scalars, const i64* updates, double beta1, double left1, double beta2, double left2,
    double eps, double keep) {
    __shared__ u32 partial[8];
    __shared__ uint4 mine[8][256];  // each thread's new weights: in registers they would spill
    if (scalars[3] != 0) {  // skipped: weight, state and copies stay, and what is not finite in them is counted again
        if (ROW) count_again(weight, width, counter);
        return;
    }
    const float size = scalars[0], unbias = scalars[1], factor = scalars[2];
    const u32 number = (u32)*updates, m_word = mix(number ^ (u32)first.salt), v_word = mix(number ^ (u32)second.salt);
    const i64 across = width / TILE, r0 = blockIdx.x / across * TILE, c0 = blockIdx.x % across * TILE;
    const int lane = threadIdx.x % 16, top_row = threadIdx.x / 16;
    uint4 y[8];
#pragma unroll UNROLL
    for (int i = 0; i < 8; ++i) {
        const i64 at = (r0 + i * 16 + top_row) * width + c0 + lane * 8;
        const Values g = WIDE_GRAD ? load_wide(reinterpret_cast<const float*>(grad) + at)
                                   : load_bf16(reinterpret_cast<const u16*>(grad) + at);
        Values m = load_moment(first, M, false, at), v = load_moment(second, V, ROOT, at), p, roots;
        if (SPLIT) {
            const uint4 upper = *reinterpret_cast<const uint4*>(reinterpret_cast<const u16*>(weight) + at);
            const uint4 lower = *reinterpret_cast<const uint4*>(remainder + at);
            const u32 up[4] = {upper.x, upper.y, upper.z, upper.w}, lo[4] = {lower.x, lower.y, lower.z, lower.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                p.x[2 * k] = __uint_as_float((up[k] << 16) + (u32)(int)(short)(lo[k] & 0xFFFFu));
                p.x[2 * k + 1] = __uint_as_float((up[k] & 0xFFFF0000u) + (u32)((int)lo[k] >> 16));
            }
        } else {
            p = load_wide(reinterpret_cast<const float*>(weight) + at);
        }
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const float d = __fmul_rn(g.x[k], factor);
            m.x[k] = __fadd_rn(__fmul_rn(m.x[k], (float)beta1), __fmul_rn(d, (float)left1));
            v.x[k] = __fadd_rn(__fmul_rn(v.x[k], (float)beta2), __fmul_rn(__fmul_rn(d, d), (float)left2));
            roots.x[k] = __fsqrt_rn(v.x[k]);
            const float denominator = __fadd_rn(__fmul_rn(roots.x[k], unbias), (float)eps);
            const float update = __fmul_rn(__fdiv_rn(m.x[k], denominator), size);
            p.x[k] = __fsub_rn(__fmul_rn(p.x[k], (float)keep), update);
        }
        store_moment(first, M, false, at, m, m, m_word);
        store_moment(second, V, ROOT, at, v, roots, v_word);
        uint4 made;
        if (SPLIT) {
            u32 up[4], lo[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const u32 a = __float_as_uint(p.x[2 * k]), b = __float_as_uint(p.x[2 * k + 1]);
                up[k] = (a + 0x8000u) >> 16 | ((b + 0x8000u) & 0xFFFF0000u);
                lo[k] = (a & 0xFFFFu) | b << 16;
            }
            made = make_uint4(up[0], up[1], up[2], up[3]);
            *reinterpret_cast<uint4*>(reinterpret_cast<u16*>(weight) + at) = made;
            *reinterpret_cast<uint4*>(remainder + at) = make_uint4(lo[0], lo[1], lo[2], lo[3]);
        } else {
            store_wide(reinterpret_cast<float*>(weight) + at, p);
            made = packed(p);
        }
        if (COPY) *reinterpret_cast<uint4*>(copy + at) = made;
        if (ROW) mine[i][threadIdx.x] = made;
    }
    if (!ROW) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = mine[i][threadIdx.x];
    emit_square(y, r0, c0, row, Copy{}, partial, nullptr, counter);
}
