// What has no CUDA C++ form without headers: conversions, packed maxima, powers of two, copies to shared memory in the
// background, barriers of some warps. Tests replace this file on a CPU.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

__device__ __forceinline__ u32 pack(float a, float b) {  // a in the low half; round to nearest even
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(b), "f"(a));
    return out;
}
__device__ __forceinline__ u32 larger(u32 a, u32 b) {  // magnitudes of bf16, as bits, order as integers do
    u32 out;
    asm("max.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
__device__ __forceinline__ u32 codes2(float a, float b) {
    u16 out;
#if E5M2
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(out) : "f"(b), "f"(a));
#else
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(b), "f"(a));
#endif
    return out;
}
__device__ __forceinline__ float2 halves(u32 pair) {  // of two float16
    float a, b;
    asm("{ .reg .f16 x, y; mov.b32 {x, y}, %2; cvt.f32.f16 %0, x; cvt.f32.f16 %1, y; }" : "=f"(a), "=f"(b) : "r"(pair));
    return make_float2(a, b);
}
__device__ __forceinline__ float2 e4m3_values(u32 codes) {  // of the two lower bytes
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((u16)codes));
    return halves(pair);
}
__device__ __forceinline__ float2 e5m2_values(u32 codes) {
    u32 pair;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"((u16)codes));
    return halves(pair);
}
__device__ __forceinline__ float power2(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
__device__ __forceinline__ void to_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
// 16 bytes of global to shared memory, in the background; what a thread has asked for since it last closed is one group.
__device__ __forceinline__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_copies() {  // until this thread's groups have arrived, all but the LEFT youngest
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void barrier(int number, int threads) {  // number 1 to 15; whole warps
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
