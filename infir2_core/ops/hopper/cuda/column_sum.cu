#include "ptx.cuh"
// Sums over the rows of a float32 matrix, 32 columns a block of 512 threads, in an order that depends on the shape alone.
extern "C" __global__ void __launch_bounds__(512) infir2_column_sum(const float* x, float* out, i64 rows, i64 width) {
    __shared__ float sums[16][32];
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32;
    const i64 column = (i64)blockIdx.x * 32 + lane;
    float sum = 0;
    if (column < width) {
#pragma unroll 8
        for (i64 row = first; row < rows; row += 16) sum += __ldg(x + row * width + column);
    }
    sums[first][lane] = sum;
    __syncthreads();
    if (first || column >= width) return;
#pragma unroll
    for (int k = 1; k < 16; ++k) sum += sums[k][lane];
    out[column] = sum;
}
