#include "codes.cuh"
// Logits into log-probabilities of targets and, in place, their gradients (reference: `softmax_gradient_` of
// ops/reference/loss.py).
//
// A block stays for many rows and holds each of them on the multiprocessor between the pass that sums and the pass that
// writes: most of it in shared memory, some in registers, what is left in the L2 cache. A thread copies what it reads
// itself, and asks for a piece of the next row as soon as the same piece of this one is written, so that memory is busy
// in both passes.
//
// Defines: VOCAB (of a row), THREADS, ROOM (vectors that a thread keeps in shared memory at most), HOLD (and in registers);
// POW2, E5M2 (codes.cuh; without effect).
constexpr int VECTOR = VOCAB % 8 ? 1 : 8;  // logits of a vector; rows that are not aligned are read one by one
constexpr int SLOTS = (VOCAB + VECTOR * THREADS - 1) / (VECTOR * THREADS);
constexpr int STAGED = VECTOR == 1 ? 0 : SLOTS < ROOM ? SLOTS : ROOM;
constexpr int HELD = SLOTS - STAGED < HOLD ? SLOTS - STAGED : HOLD, AGAIN = STAGED + HELD;  // the first that is read again
constexpr int WARPS = THREADS / 32;
constexpr float LOG2E = 1.4426950408889634f, LOWEST = -2e38f;  // finite: rows may begin with infinities

struct Raw { u32 v[VECTOR == 1 ? 1 : 4]; };

__device__ __forceinline__ Raw load(const u16* at) {  // not from the read-only cache: it is written to
#if VOCAB % 8
    return {{*at}};
#else
    const uint4 q = *reinterpret_cast<const uint4*>(at);
    return {{q.x, q.y, q.z, q.w}};
#endif
}
__device__ __forceinline__ float value(const Raw& raw, int k) { return k % 2 ? high(raw.v[k / 2]) : low(raw.v[k / 2]); }

// f(slot) for each staged vector, when it has arrived.
template <int SLOT, typename F>
__device__ __forceinline__ void each_staged(const F& f) {
    if constexpr (SLOT < STAGED) {
        wait_copies<STAGED - 1 - SLOT>();
        f(SLOT);
        each_staged<SLOT + 1>(f);
    }
}

// Sums relative to their largest terms, of all lanes.
__device__ __forceinline__ void combine(float& largest, float& total) {
    float top = largest;
#pragma unroll
    for (int step = 16; step; step >>= 1) top = max(top, __shfl_xor_sync(~0u, top, step));
    total *= power2((largest - top) * LOG2E);
#pragma unroll
    for (int step = 16; step; step >>= 1) total += __shfl_xor_sync(~0u, total, step);
    largest = top;
}

extern "C" __global__ void __launch_bounds__(THREADS) infir2_softmax_gradient(
    u16* logits, const i64* targets, const float* weights, float* logprobs, i64 rows) {
    extern __shared__ __align__(16) u16 staged[];  // STAGED x THREADS vectors
    __shared__ float tops[2][WARPS], sums[2][WARPS];
    const int mine = threadIdx.x * VECTOR;
    const auto inside = [&](int slot) {
        return (slot + 1) * THREADS * VECTOR <= VOCAB || mine + slot * THREADS * VECTOR < VOCAB;
    };
    const auto fetch = [&](i64 row, int slot) {
        if (row < rows && inside(slot))
            copy16(staged + mine + slot * THREADS * VECTOR, logits + row * VOCAB + mine + slot * THREADS * VECTOR);
        close_copies();
    };
    Raw held[HELD + 1];
    const auto hold = [&](i64 row) {
        if (row >= rows) return;
        const u16* at = logits + row * VOCAB + mine;
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (inside(STAGED + i)) held[i] = load(at + (STAGED + i) * THREADS * VECTOR);
#pragma unroll 4
        for (int slot = AGAIN; slot < SLOTS; ++slot)  // by lines of 128 bytes
            if (threadIdx.x % (64 / VECTOR) == 0 && inside(slot)) to_l2(at + slot * THREADS * VECTOR);
    };
    hold(blockIdx.x);
#pragma unroll
    for (int slot = 0; slot < STAGED; ++slot) fetch(blockIdx.x, slot);
    int turn = 0;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
        u16* here = logits + row * VOCAB + mine;
        const float weight = __ldg(weights + row);
        const i64 named = __ldg(targets + row);
        const bool there = named >= 0 && named < VOCAB;
        const int target = there ? (int)named : 0;
        // Who overwrites the target's logit reads it first.
        const bool owner = there && target / VECTOR % THREADS == threadIdx.x;
        const float chosen = owner ? __uint_as_float((u32)logits[row * VOCAB + target] << 16) : 0.f;
        float largest = LOWEST, total = 0;
        const auto take = [&](const Raw& raw) {
            float top = largest, sum = 0;
#pragma unroll
            for (int k = 0; k < VECTOR; k += 2)
                top = max(top, VECTOR == 1 ? value(raw, 0) : max(value(raw, k), value(raw, k + 1)));
            const float base = top * LOG2E;
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) sum += power2(value(raw, k) * LOG2E - base);
            // Not largest * LOG2E - base: fused into one operation, that is 1e31 and not 0 while both are LOWEST.
            total = total * power2((largest - top) * LOG2E) + sum;
            largest = top;
        };
        each_staged<0>([&](int slot) {
            if (inside(slot)) take(load(staged + mine + slot * THREADS * VECTOR));
        });
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (inside(STAGED + i)) take(held[i]);
        // Last here and first below: what is read again was read a moment ago.
#pragma unroll 4
        for (int slot = AGAIN; slot < SLOTS; ++slot)
            if (inside(slot)) take(load(here + slot * THREADS * VECTOR));
        combine(largest, total);
        if (threadIdx.x % 32 == 0) tops[turn][threadIdx.x / 32] = largest, sums[turn][threadIdx.x / 32] = total;
        __syncthreads();  // two buffers in turn: one barrier a row
        const bool one = threadIdx.x % 32 < WARPS;
        largest = one ? tops[turn][threadIdx.x % WARPS] : LOWEST;
        total = one ? sums[turn][threadIdx.x % WARPS] : 0.f;
        combine(largest, total);
        const float norm = largest + logf(total), base = norm * LOG2E;
        const auto give = [&](const Raw& raw, int slot) {
            float p[VECTOR];
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) p[k] = power2(value(raw, k) * LOG2E - base);
            u16* to = here + slot * THREADS * VECTOR;
#if VOCAB % 8
            *to = (u16)pack(p[0] * weight, 0.f);
#else
            *reinterpret_cast<uint4*>(to) = make_uint4(
                pack(p[0] * weight, p[1] * weight), pack(p[2] * weight, p[3] * weight),
                pack(p[4] * weight, p[5] * weight), pack(p[6] * weight, p[7] * weight));
#endif
        };
#pragma unroll 4
        for (int slot = AGAIN; slot < SLOTS; ++slot)
            if (inside(slot)) give(load(here + slot * THREADS * VECTOR), slot);
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (inside(STAGED + i)) give(held[i], STAGED + i);
        hold(row + gridDim.x);
#pragma unroll
        for (int slot = 0; slot < STAGED; ++slot) {
            if (inside(slot)) give(load(staged + mine + slot * THREADS * VECTOR), slot);
            fetch(row + gridDim.x, slot);
        }
        if (!there && threadIdx.x == 0) logprobs[row] = __int_as_float(0x7FC00000);  // told by a loss that is not a number
        if (owner) {
            logprobs[row] = chosen - norm;
            logits[row * VOCAB + target] = (u16)pack((power2(chosen * LOG2E - base) - 1.f) * weight, 0.f);
        }
    }
}
