#include "ptx.cuh"
// Pairs of bf16 in a register, scales and codes (reference: ops/reference/codes.py).
// POW2 (or float32 scales) and E5M2 (or E4M3) are defines.
struct Copy { u8* codes; float* scale; i64 width; i64 pitch; };  // pitch: distance of scales, ops/hopper/copies.py
constexpr int TILE = 128;
constexpr u32 SIGNS = 0x80008000u, INFINITE = 0x7F80u;

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ float2 values2(u32 codes) { return E5M2 ? e5m2_values(codes) : e4m3_values(codes); }
__device__ __forceinline__ u32 codes4(float a, float b, float c, float d) { return codes2(a, b) | codes2(c, d) << 16; }

// Encode and decode scale of a block from the bits of its amax, a bf16 that is not NaN.
__device__ __forceinline__ void scales(u32 amax, float& encode, float& decode) {
    const u32 bits = amax << 16;
    const bool plain = amax == 0 || amax == INFINITE;
#if POW2
    // Adding what the largest code's mantissa lacks carries into the exponent exactly when amax has a larger mantissa.
    constexpr int ONE = 127 << 23, TOP = 254 << 23, LIMIT = (E5M2 ? 15 : 8) << 23;
    const int above = (int)((bits + (0x7FFFFFu - 0x600000u)) & 0x7F800000u);
    const int e = plain ? ONE : TOP + min(LIMIT - above, 0);
    encode = __int_as_float(e);
    decode = __int_as_float(e < TOP ? TOP - e : 0x00400000);  // 2**-127 is a subnormal
#else
    encode = plain ? 1.f : fminf(__fdiv_rn(E5M2 ? 57344.f : 448.f, __uint_as_float(bits)), 3.3895313892515355e38f);
    decode = __fdiv_rn(1.f, encode);
#endif
}
__device__ __forceinline__ u32 without_nan(u32 pair) {  // magnitudes, NaN as 0
    const u32 a = pair & 0x7FFFu, b = (pair >> 16) & 0x7FFFu;
    return (a > INFINITE ? 0u : a) | ((b > INFINITE ? 0u : b) << 16);
}
__device__ __forceinline__ int not_finite(u32 pair) {
    return ((pair & 0x7FFFu) >= INFINITE) + (((pair >> 16) & 0x7FFFu) >= INFINITE);
}
__device__ __forceinline__ u32 top(u32 pair) { return max(pair & 0xFFFFu, pair >> 16); }
// 32 random bits from a word: ops/reference/stochastic.py.
__device__ __forceinline__ u32 mix(u32 x) {
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}
