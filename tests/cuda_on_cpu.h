// Enough of CUDA to run one block after another on a CPU: threads are fibers, which change places wherever threads of a
// warp or a block wait for each other. Replaces cuda/ptx.cuh; Python puts the kernel between this and `run`.
#include <ucontext.h>
#include <cmath>
#include <cstring>
#include <deque>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Index { int x; };
static Index threadIdx, blockIdx, gridDim;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

template <typename To, typename From> To bits(From from) { To to; std::memcpy(&to, &from, sizeof(To)); return to; }
inline float __uint_as_float(u32 x) { return bits<float>(x); }
inline float __int_as_float(int x) { return bits<float>(x); }
inline u32 __float_as_uint(float x) { return bits<u32>(x); }
inline int __float_as_int(float x) { return bits<int>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float power2(float x) { return std::exp2(x); }
inline void to_l2(const void*) {}
template <typename T> T __ldg(const T* at) { return *at; }
template <typename T> T min(T a, T b) { return a < b ? a : b; }
template <typename T> T max(T a, T b) { return a < b ? b : a; }
inline u64 atomicAdd(u64* at, u64 value) { u64 before = *at; *at += value; return before; }
inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
    u64 all = (u64)y << 32 | x;
    u32 out = 0;
    for (int i = 0; i < 4; ++i) out |= (u32)(all >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return out;
}

// Conversions as the hardware makes them: round to nearest even, saturate, one NaN without sign.
inline u16 bf16(float x) {
    u32 u = bits<u32>(x);
    return x != x ? 0x7FFF : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}
inline u32 pack(float a, float b) { return bf16(a) | (u32)bf16(b) << 16; }
inline u32 larger(u32 a, u32 b) { return max(a & 0xFFFFu, b & 0xFFFFu) | max(a >> 16, b >> 16) << 16; }
inline u32 code(float x) {
#if E5M2
    constexpr int MANTISSA = 2, LOWEST = -14, BIAS = 15;
    constexpr float LIMIT = 57344.f;
    constexpr u32 LARGEST = 0x7B;
#else
    constexpr int MANTISSA = 3, LOWEST = -6, BIAS = 7;
    constexpr float LIMIT = 448.f;
    constexpr u32 LARGEST = 0x7E;
#endif
    if (x != x) return 0x7F;
    const u32 sign = bits<u32>(x) >> 24 & 0x80;
    const float y = std::fabs(x);
    if (y >= LIMIT) return sign | LARGEST;
    const int exponent = max(y == 0 ? LOWEST : std::ilogb(y), LOWEST);
    const int units = (int)std::nearbyint(std::ldexp(y, MANTISSA - exponent));  // a carry runs on into the exponent
    return sign | (u32)(units + (exponent - LOWEST) * (1 << MANTISSA));
}
inline u32 codes2(float a, float b) { return code(a) | code(b) << 8; }
inline float value(u32 code, int mantissa, int bias) {
    const int exponent = (code & 0x7F) >> mantissa, fraction = code & ((1 << mantissa) - 1);
    const float y = exponent ? std::ldexp((float)(fraction + (1 << mantissa)), exponent - bias - mantissa)
                             : std::ldexp((float)fraction, 1 - bias - mantissa);
    return code & 0x80 ? -y : y;
}
inline float e4m3(u32 c) { return (c & 0x7F) == 0x7F ? NAN : value(c, 3, 7); }
inline float e5m2(u32 c) { return (c & 0x7F) > 0x7C ? NAN : (c & 0x7F) == 0x7C ? (c & 0x80 ? -INFINITY : INFINITY) : value(c, 2, 15); }
inline float2 e4m3_values(u32 codes) { return {e4m3(codes & 0xFF), e4m3(codes >> 8 & 0xFF)}; }
inline float2 e5m2_values(u32 codes) { return {e5m2(codes & 0xFF), e5m2(codes >> 8 & 0xFF)}; }

// Fibers. A warp is driven until all its threads wait for the block; then the next warp is; then the block goes on.
enum Waits { NOBODY, WARP, BLOCK, DONE };
struct Copy16 { void* to; const void* from; bool closed; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    Waits waits;
    int barrier, threads;  // of BLOCK: 0 and all threads, or a number and how many
    std::deque<Copy16> copies;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static u32 exchanged[2][32];
static int exchanges[1024];
inline void wait_for(Waits what) {
    Fiber& me = fibers[threadIdx.x];
    me.waits = what;
    swapcontext(&me.context, &scheduler);
}
inline void barrier(int number, int threads) {
    fibers[threadIdx.x].barrier = number;
    fibers[threadIdx.x].threads = threads;
    wait_for(BLOCK);
}
inline void __syncthreads() { barrier(0, 0); }
// Copies in the background are made as late as the thread allows, so that whoever reads before waiting reads what was there.
inline void copy16(void* to, const void* from) { fibers[threadIdx.x].copies.push_back({to, from, false}); }
inline void close_copies() { fibers[threadIdx.x].copies.push_back({nullptr, nullptr, true}); }
template <int LEFT> void wait_copies() {
    std::deque<Copy16>& copies = fibers[threadIdx.x].copies;
    int groups = 0;
    for (const Copy16& c : copies) groups += c.closed;
    for (; groups > LEFT; copies.pop_front()) {
        if (copies.front().closed) --groups;
        else std::memcpy(copies.front().to, copies.front().from, 16);
    }
}
inline u32 exchange(u32 value, int from) {  // two buffers in turn: nobody overwrites what another has yet to read
    u32* buffer = exchanged[exchanges[threadIdx.x]++ & 1];
    buffer[threadIdx.x % 32] = value;
    wait_for(WARP);
    return buffer[from];
}
inline u32 __shfl_xor_sync(u32, u32 value, int step) { return exchange(value, (threadIdx.x ^ step) % 32); }
inline float __shfl_xor_sync(u32, float value, int step) {
    return bits<float>(exchange(bits<u32>(value), (threadIdx.x ^ step) % 32));
}
inline bool __any_sync(u32, bool value) {
    u32* buffer = exchanged[exchanges[threadIdx.x]++ & 1];
    buffer[threadIdx.x % 32] = value;
    wait_for(WARP);
    for (int i = 0; i < 32; ++i) if (buffer[i]) return true;
    return false;
}
