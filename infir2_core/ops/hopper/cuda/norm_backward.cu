#include "codes.cuh"
// Gradients of an RMSNorm for its input and its weight (reference: `norm_backward` of ops/reference/elementwise.py).
//
// A block stays for many rows. Its warps form teams, each of which takes a row at a time; a thread owns the same columns
// in every row, so that the weight's gradient is summed in registers. The rows that follow travel to shared memory
// meanwhile: each thread copies what it will read itself, so that arriving rows need no barrier. Each block leaves one row
// of sums, which column_sum.cu adds up; both orders are fixed.
//
// Defines: WIDTH (of a row, a multiple of 8), ADD (a residual gradient), WARPS (of a team), TEAMS (of a block), STAGES (rows
// of a team in shared memory), HOLD (gradient, input and weight stay in registers between the two passes over a row, else
// they are read from shared memory again), BLOCKS (of a multiprocessor); POW2, E5M2 (codes.cuh; without effect).
constexpr int MEMBERS = 32 * WARPS, THREADS = MEMBERS * TEAMS;
constexpr int STEP = 8 * MEMBERS;  // columns that a team takes at once
constexpr int VECTORS = (WIDTH + STEP - 1) / STEP, HELD = HOLD ? VECTORS : 1;
constexpr int TENSORS = 2 + ADD, ROW = TENSORS * WIDTH;

struct Values { float x[8]; };

__device__ __forceinline__ Values values(const uint4& q) {
    return {{low(q.x), high(q.x), low(q.y), high(q.y), low(q.z), high(q.z), low(q.w), high(q.w)}};
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) infir2_norm_backward(
    const u16* grad, const u16* x, const float* rstd, const float* weight, const u16* residual, u16* out,
    float* partial, i64 rows) {
    extern __shared__ __align__(16) u16 staged[];  // TEAMS x STAGES x TENSORS rows, then the weight
    __shared__ float sums[2][TEAMS * WARPS];
    u16* scale = staged + TEAMS * STAGES * ROW;
    const int team = threadIdx.x / MEMBERS, column = threadIdx.x % MEMBERS * 8;
    u16* mine = staged + team * STAGES * ROW + column;
    const i64 stride = (i64)gridDim.x * TEAMS;
    i64 row = (i64)gridDim.x * team + blockIdx.x;
    const auto inside = [&](int v) { return v * STEP + STEP <= WIDTH || column + v * STEP < WIDTH; };
    const auto fetch = [&](i64 from, int stage) {
        const i64 at = from * WIDTH + column;
        if (from < rows) {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                if (!inside(v)) continue;
                u16* to = mine + stage * ROW + v * STEP;
                copy16(to, grad + at + v * STEP);
                copy16(to + WIDTH, x + at + v * STEP);
                if (ADD) copy16(to + 2 * WIDTH, residual + at + v * STEP);
            }
        }
        close_copies();  // without a row too: copies are waited for by their number
    };
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) fetch(row + stage * stride, stage);
    for (int i = threadIdx.x; i < WIDTH; i += THREADS) scale[i] = (u16)pack(__ldg(weight + i), 0.f);
    __syncthreads();
    uint4 held_g[HELD], held_x[HELD], held_w[HELD];
    float total[VECTORS][8];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (HOLD && inside(v)) held_w[HOLD ? v : 0] = *reinterpret_cast<const uint4*>(scale + column + v * STEP);
#pragma unroll
        for (int k = 0; k < 8; ++k) total[v][k] = 0;
    }
    float next = row < rows ? __ldg(rstd + row) : 0.f;
    for (int stage = 0, turn = 0; row < rows; row += stride, turn ^= 1) {
        const float inverse = next;
        next = row + stride < rows ? __ldg(rstd + row + stride) : 0.f;
        wait_copies<STAGES - 1>();
        const u16* here = mine + stage * ROW;
        float sum = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (!inside(v)) continue;
            const uint4 raw_g = *reinterpret_cast<const uint4*>(here + v * STEP);
            const uint4 raw_x = *reinterpret_cast<const uint4*>(here + WIDTH + v * STEP);
            if (HOLD) held_g[HOLD ? v : 0] = raw_g, held_x[HOLD ? v : 0] = raw_x;
            const Values g = values(raw_g), in = values(raw_x);
            const Values w =
                values(HOLD ? held_w[HOLD ? v : 0] : *reinterpret_cast<const uint4*>(scale + column + v * STEP));
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                const float normed = in.x[k] * inverse;
                total[v][k] += g.x[k] * normed;
                sum += g.x[k] * w.x[k] * normed;
            }
        }
#pragma unroll
        for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
        if (WARPS > 1) {  // two buffers in turn: one barrier a row
            if (threadIdx.x % 32 == 0) sums[turn][threadIdx.x / 32] = sum;
            barrier(team + 1, MEMBERS);
            sum = 0;
#pragma unroll
            for (int k = 0; k < WARPS; ++k) sum += sums[turn][team * WARPS + k];
        }
        const float projection = sum / WIDTH;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (!inside(v)) continue;
            const uint4* again = reinterpret_cast<const uint4*>(here + v * STEP);
            const Values g = values(HOLD ? held_g[HOLD ? v : 0] : again[0]);
            const Values in = values(HOLD ? held_x[HOLD ? v : 0] : again[WIDTH / 8]);
            const Values w =
                values(HOLD ? held_w[HOLD ? v : 0] : *reinterpret_cast<const uint4*>(scale + column + v * STEP));
            u32 made[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                float dx[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int i = 2 * k + h;
                    dx[h] = (g.x[i] * w.x[i] - in.x[i] * inverse * projection) * inverse;
                }
                made[k] = pack(dx[0], dx[1]);
            }
            if (ADD) {
                const Values more = values(again[2 * WIDTH / 8]);
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    made[k] = pack(low(made[k]) + more.x[2 * k], high(made[k]) + more.x[2 * k + 1]);
            }
            *reinterpret_cast<uint4*>(out + row * WIDTH + column + v * STEP) =
                make_uint4(made[0], made[1], made[2], made[3]);
        }
        fetch(row + STAGES * stride, stage);  // where this row was
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
    __syncthreads();  // no row is needed any more: sums take their place
    float* all = reinterpret_cast<float*>(staged);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (!inside(v)) continue;
#pragma unroll
        for (int k = 0; k < 8; k += 4)
            *reinterpret_cast<float4*>(all + team * WIDTH + column + v * STEP + k) =
                make_float4(total[v][k], total[v][k + 1], total[v][k + 2], total[v][k + 3]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < WIDTH; i += THREADS) {
        float sum = all[i];
#pragma unroll
        for (int k = 1; k < TEAMS; ++k) sum += all[k * WIDTH + i];
        partial[(i64)blockIdx.x * WIDTH + i] = sum;
    }
}
