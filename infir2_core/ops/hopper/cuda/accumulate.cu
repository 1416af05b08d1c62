// Adds to a bf16 gradient in float32 and rounds the sum stochastically, eight elements a thread (reference: `round_bf16` of
// ops/reference/stochastic.py). Define: WIDE (float32 addend, else bf16).
#include "codes.cuh"
extern "C" __global__ void __launch_bounds__(256) infir2_accumulate(u16* sum, const void* addend, i64 count, i64 key) {
    const i64 at = ((i64)blockIdx.x * 256 + threadIdx.x) * 8;
    if (at >= count) return;
    const uint4 q = *reinterpret_cast<const uint4*>(sum + at);
    const u32 in[4] = {q.x, q.y, q.z, q.w};
    float x[8];
    if (WIDE) {
        const float4* more = reinterpret_cast<const float4*>(reinterpret_cast<const float*>(addend) + at);
        const float4 a = more[0], b = more[1];
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else {
        const uint4 m = *reinterpret_cast<const uint4*>(reinterpret_cast<const u16*>(addend) + at);
        x[0] = low(m.x), x[1] = high(m.x), x[2] = low(m.y), x[3] = high(m.y);
        x[4] = low(m.z), x[5] = high(m.z), x[6] = low(m.w), x[7] = high(m.w);
    }
    u32 out[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        u32 half[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float total = __fadd_rn(h ? high(in[k]) : low(in[k]), x[2 * k + h]);
            const u32 raw = __float_as_uint(total), noise = mix((u32)(at + 2 * k + h) ^ (u32)key) >> 16;
            half[h] = (raw & 0x7F800000u) == 0x7F800000u ? raw : raw + noise;
        }
        out[k] = half[0] >> 16 | (half[1] & 0xFFFF0000u);
    }
    *reinterpret_cast<uint4*>(sum + at) = make_uint4(out[0], out[1], out[2], out[3]);
}
