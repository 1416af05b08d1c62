#include "ptx.cuh"
#include "async.cuh"
#include "schedule.cuh"
// out (+)= a . b^T for codes in 1 x 128 blocks along K with a float32 scale each: the wgrad GEMM of blockwise recipes.
//
// One warp keeps the copy engine STAGES K blocks ahead; two warpgroups multiply, ROWS x COLS / 2 each. Tensor cores sum the
// 128 products of a K block, then every number takes two ordinary instructions to be scaled and added in float32. That
// takes nearly as long as the product, so a warpgroup works on halves: its upper rows are scaled while the lower ones are
// multiplied. Halves of rows and not of columns: a thread then needs half as many scales from shared memory, whose
// bandwidth is near its limit; while tensor cores read it, it answers late, so that scales are fetched a K block ahead.
//
// Defines: STAGES, A_E5M2, B_E5M2 (or E4M3).
constexpr int GROUPS = 2, ROWS = 128, COLS = 192;  // of a block's tile
constexpr int DEEP = 128;              // K of a block of codes, in bytes
constexpr int HELD = COLS / 4;         // numbers of 64 x COLS / 2 that a thread holds
constexpr int A_BYTES = ROWS * DEEP, B_BYTES = COLS * DEEP;
// Registers of a thread that multiplies and of the others: together no more than at the start. A function that is called
// (division of 64 bits is one) would use more than SPARE, which is an illegal instruction.
constexpr int REGISTERS = 240, SPARE = 24;
constexpr int CHUNK = 32, STAGED = 64 * CHUNK * 4;  // columns of a stored box, bytes of one

#define TEN(t) "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)

__device__ __forceinline__ void multiply(float (&d)[HELD], u64 a, u64 b, int onto) {
    asm volatile(
        "{\n.reg .pred onto;\nsetp.ne.b32 onto, %50, 0;\nwgmma.mma_async.sync.aligned.m64n96k32.f32"
#if A_E5M2
        ".e5m2"
#else
        ".e4m3"
#endif
#if B_E5M2
        ".e5m2"
#else
        ".e4m3"
#endif
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " TEN(1) TEN(2) TEN(3) "%40, %41, %42, %43, %44, %45, %46, %47}, "
        "%48, %49, onto, 1, 1;\n}"
        : D16(0), D16(16), D16(32)
        : "l"(a), "l"(b), "r"(onto));
}
__device__ __forceinline__ void settle(float (&d)[HELD]) {  // no product in flight may be moved over here
#pragma unroll
    for (int i = 0; i < HELD; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// Queues the product of a K block; a, b: where the codes lie, in units of 16 bytes.
__device__ __forceinline__ void queue(float (&d)[HELD], u32 a, u32 b) {
    settle(d);
    begin_products();
#pragma unroll
    for (int i = 0; i < DEEP / 32; ++i) multiply(d, described(a + 2 * i), described(b + 2 * i), i);
    end_products();
}
// Scales of this thread's four rows and of its columns.
struct Scales { float rows[4]; float2 cols[HELD / 4]; };

__device__ __forceinline__ void load(Scales& to, const float* rows, const float* cols) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to.rows[i] = rows[i % 2 * 8 + i / 2 * 64];
#pragma unroll
    for (int i = 0; i < HELD / 4; ++i) to.cols[i] = *reinterpret_cast<const float2*>(cols + 8 * i);
}
// Their products, for the rows of the upper half (0) or the lower one.
__device__ __forceinline__ void products(float (&p)[HELD], const Scales& s, int half) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) p[i] = s.rows[2 * half + i % 4 / 2] * (i % 2 ? s.cols[i / 4].y : s.cols[i / 4].x);
}
__device__ __forceinline__ void add_scaled(float* sum, float (&d)[HELD], const float (&p)[HELD]) {
    settle(d);
#pragma unroll
    for (int i = 0; i < HELD; ++i) sum[i] += p[i] * d[i];
}

// a [m, K] and b [n, K] codes; sa, sb scales, one K block after another; out float32 [m, n]. partial: a tile of float4 a
// block, in the order in which threads hold it; flags: GROUPS a block, 0 before and after. add: onto what is in out.
extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1) infir2_wgrad(
    const __grid_constant__ Map a, const __grid_constant__ Map b, const __grid_constant__ Map out, const float* sa,
    const float* sb, float4* partial, u32* flags, i64 m64, i64 n64, i64 depth, i64 add) {
    extern __shared__ __align__(16) u8 raw[];
    u8* base = raw + (-shared_address(raw) & 1023);  // swizzled rows repeat every 1,024 bytes
    u8 *codes_b = base + STAGES * A_BYTES, *staged = codes_b + STAGES * B_BYTES;
    float* scales = reinterpret_cast<float*>(staged + GROUPS * STAGED);
    const u32 full = shared_address(scales + STAGES * (ROWS + COLS)), empty = full + 8 * STAGES;
    const int m = (int)m64, n = (int)n64, worker = blockIdx.x;
    const int down = (m + ROWS - 1) / ROWS, across = (n + COLS - 1) / COLS;
    const Schedule schedule = {down * across, (int)depth, (int)gridDim.x};
    const int work = of_warp(schedule.work(worker)), group = of_warp((int)threadIdx.x / 128);

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            begin_barrier(full + 8 * s, 1);
            begin_barrier(empty + 8 * s, GROUPS * 4);
        }
        publish_barriers();
    }
    __syncthreads();

    if (group == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(SPARE));
        if (threadIdx.x == 128 * GROUPS) {
            int stage = 0;
            u32 parity = 1;
            for (int done = 0; done < work;) {
                const Piece p = schedule.piece(worker, done);
                const Corner at = corner<ROWS, COLS>(p.tile, down, across);
                const int rows = min(ROWS, m - at.row), cols = min(COLS, n - at.col);
#pragma unroll 1
                for (int k = p.from; k < p.to; ++k) {
                    const u32 ready = full + 8 * stage;
                    float* to = scales + stage * (ROWS + COLS);
                    wait_for(empty + 8 * stage, parity);
                    expect(ready, A_BYTES + B_BYTES + 4 * (rows + cols));
                    load_box(shared_address(base + stage * A_BYTES), a, k * DEEP, at.row, ready);
                    load_box(shared_address(codes_b + stage * B_BYTES), b, k * DEEP, at.col, ready);
                    load_bytes(shared_address(to), sa + (i64)k * m + at.row, 4 * rows, ready);
                    load_bytes(shared_address(to + ROWS), sb + (i64)k * n + at.col, 4 * cols, ready);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
                done += p.to - p.from;
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
        const int thread = threadIdx.x % 128, lane = threadIdx.x % 32, line = thread / 32 * 16 + lane / 4;
        const int together = 1 + group;  // a named barrier
        u8* box = staged + group * STAGED;
        int stage = 0;
        u32 parity = 0;
        const u32 name_a = of_warp(named(shared_address(base)));
        const u32 name_b = of_warp(named(shared_address(codes_b + group * COLS / 2 * DEEP)));
        const float *of_rows = scales + line, *of_cols = scales + ROWS + group * COLS / 2 + lane % 4 * 2;
        float first[HELD], second[HELD], sum[2 * HELD];
        Scales s;
        for (int done = 0; done < work;) {
            const Piece p = schedule.piece(worker, done);
#pragma unroll
            for (int i = 0; i < 2 * HELD; ++i) sum[i] = 0.f;
            wait_for(full + 8 * stage, parity);
            load(s, of_rows + stage * (ROWS + COLS), of_cols + stage * (ROWS + COLS));
#pragma unroll 1
            for (const int end = of_warp(done + p.to - p.from); done < end;) {
                const u32 at_a = name_a + stage * (A_BYTES / 16), at_b = name_b + stage * (B_BYTES / 16);
                const u32 used = empty + 8 * stage;
                float p1[HELD], p2[HELD];
                queue(first, at_a, at_b);
                queue(second, at_a + 64 * DEEP / 16, at_b);
                if (++stage == STAGES) stage = 0, parity ^= 1;
                products(p1, s, 0);
                if (++done < end) wait_for(full + 8 * stage, parity);
                wait_for_products<1>();
                add_scaled(sum, first, p1);
                products(p2, s, 1);
                if (done < end)  // while tensor cores read it, shared memory answers late: scales are fetched ahead
                    load(s, of_rows + stage * (ROWS + COLS), of_cols + stage * (ROWS + COLS));
                wait_for_products<0>();
                __syncwarp();
                if (lane == 0) arrive_at(used);
                add_scaled(sum + HELD, second, p2);
            }
            const i64 slot = (i64)blockIdx.x * GROUPS + group;
            if (p.from) {  // the worker before has the beginning, or the one before that
                float4* to = partial + slot * (HELD / 2) * 128 + thread;
#pragma unroll
                for (int i = 0; i < HELD / 2; ++i)
                    __stcg(to + i * 128, make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
                __threadfence();
                barrier(together, 128);
                if (thread == 0) raise_flag(flags + slot);
                continue;
            }
            for (int other = worker + 1, reached = p.to; reached < schedule.depth; ++other) {
                const i64 theirs = slot + (i64)(other - worker) * GROUPS;
                reached = schedule.reached(p, other);
                if (thread == 0) wait_for_flag(flags + theirs);
                barrier(together, 128);
                const float4* from = partial + theirs * (HELD / 2) * 128 + thread;
#pragma unroll
                for (int i = 0; i < HELD / 2; ++i) {
                    const float4 v = __ldcg(from + i * 128);
                    sum[4 * i] += v.x, sum[4 * i + 1] += v.y, sum[4 * i + 2] += v.z, sum[4 * i + 3] += v.w;
                }
                if (thread == 0) flags[theirs] = 0;
            }
            const Corner at = corner<ROWS, COLS>(p.tile, down, across);
            const int left = at.col + group * COLS / 2;
#pragma unroll
            for (int part = 0; part < 2 * HELD / 16; ++part) {  // boxes of 64 x CHUNK
                const int row = at.row + part / 3 * 64, col = left + part % 3 * CHUNK;
                if (row < m && col < n) {
                    if (thread == 0) wait_until_stores_are_read();
                    barrier(together, 128);
#pragma unroll
                    for (int i = 0; i < CHUNK / 8; ++i) {  // 16-byte units of a row are swizzled by the row's number
                        const int unit = (2 * i + lane % 4 / 2) ^ (line & 7), j = 4 * (part * CHUNK / 8 + i);
                        u8* to = box + line * 128 + unit * 16 + lane % 2 * 8;
                        *reinterpret_cast<float2*>(to) = make_float2(sum[j], sum[j + 1]);
                        *reinterpret_cast<float2*>(to + 1024) = make_float2(sum[j + 2], sum[j + 3]);
                    }
                    show_to_copies();
                    barrier(together, 128);
                    if (thread == 0) {
                        if (add) add_box(shared_address(box), out, col, row);
                        else store_box(shared_address(box), out, col, row);
                        end_store();
                    }
                }
            }
        }
        if (thread == 0) wait_for_stores();
    }
}
