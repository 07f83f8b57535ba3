// A decode step's queries into the cache's space, and its outputs back: rows times a (d, d) matrix a KV head, in f32.
//   y[t][h] = x[t][h] . M[h / group] (+ row[h / group]),   x, y: bf16 [tokens][heads][d]
// A step has few rows and every KV head its own matrix, so what it costs is the way of the matrices from memory: a block
// takes R rows and a few columns of one KV head, so that many blocks read at once, and its threads share out the sum in
// slices, which are added in order.
#include <cuda_bf16.h>

template <int R>
__device__ __forceinline__ void transform(const __nv_bfloat16* x, const float* m, const float* row, __nv_bfloat16* y, int tokens,
                                          int heads, int group, int d, int columns) {
  extern __shared__ float shared[];
  float* const xs = shared;            // [R][d]
  float* const sums = shared + R * d;  // [slices][R][columns]
  const int kv = blockIdx.x, first = blockIdx.y * R, rows = min(R, tokens * group - first), c0 = blockIdx.z * columns;
  const int slices = blockDim.x / columns, slice = threadIdx.x / columns, c = threadIdx.x % columns;
  const auto place = [&](int r) { return ((size_t)((first + r) / group) * heads + kv * group + (first + r) % group) * d; };
  for (int i = threadIdx.x; i < R * d; i += blockDim.x) xs[i] = i / d < rows ? __bfloat162float(x[place(i / d) + i % d]) : 0.f;
  __syncthreads();
  float sum[R];
#pragma unroll
  for (int r = 0; r < R; r++) sum[r] = 0.f;
  const float* column = m + (size_t)kv * d * d + c0 + c;
#pragma unroll 16
  for (int k = slice; k < d; k += slices) {
    const float w = __ldg(column + k * d);
#pragma unroll
    for (int r = 0; r < R; r++) sum[r] = fmaf(xs[r * d + k], w, sum[r]);
  }
#pragma unroll
  for (int r = 0; r < R; r++) sums[(slice * R + r) * columns + c] = sum[r];
  __syncthreads();
  for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) {
    const int at = c0 + i % columns;
    float v = row ? row[kv * d + at] : 0.f;
    for (int s = 0; s < slices; s++) v += sums[s * R * columns + i];
    y[place(i / columns) + at] = __float2bfloat16_rn(v);
  }
}

// At most 512 threads, a multiple of `columns`, which divides d; shared memory: 4 R (d + threads) bytes.
extern "C" __global__ void __launch_bounds__(512) transform_4(const __nv_bfloat16* x, const float* m, const float* row,
                                                              __nv_bfloat16* y, int tokens, int heads, int group, int d,
                                                              int columns) {
  transform<4>(x, m, row, y, tokens, heads, group, d, columns);
}
extern "C" __global__ void __launch_bounds__(512) transform_8(const __nv_bfloat16* x, const float* m, const float* row,
                                                              __nv_bfloat16* y, int tokens, int heads, int group, int d,
                                                              int columns) {
  transform<8>(x, m, row, y, tokens, heads, group, d, columns);
}
