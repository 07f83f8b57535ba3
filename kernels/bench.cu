// What `oscar bench` needs besides the kernels it times: a cold L2, and pages of random numbers.
#include <cuda_bf16.h>
#include <stdint.h>

__device__ uint32_t hash(uint32_t x) {  // lowbias32
  x ^= x >> 16, x *= 0x7feb352dU;
  x ^= x >> 15, x *= 0x846ca68bU;
  return x ^ x >> 16;
}

// Reads n vectors of 16 bytes: evicts everything else from L2, and leaves lines that need no writing back. It also keeps
// the device busy while the host queues what is timed.
extern "C" __global__ void read_through(const uint4* data, size_t n, uint32_t* sink) {
  uint32_t x = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    const uint4 v = __ldcg(data + i);
    x ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (x == 0x9e3779b9U) *sink = x;
}

// n words of random bits.
extern "C" __global__ void random_bits(uint32_t* data, size_t n, uint32_t seed) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
    data[i] = hash((uint32_t)i ^ hash(seed + (uint32_t)(i >> 32)));
}

// In each of `parts` parts of `words` words, the words from `first` on become a bf16 scale (low) and zero (high).
extern "C" __global__ void random_scales(uint32_t* data, size_t parts, uint32_t words, uint32_t first) {
  const uint32_t each = words - first;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < parts * each; i += (size_t)gridDim.x * blockDim.x) {
    uint32_t* at = data + i / each * words + first + i % each;
    const float u = (*at & 0xffff) / 65536.f, v = (*at >> 16) / 65536.f;
    const __nv_bfloat162 x = __floats2bfloat162_rn(0.3f + 0.4f * u, 0.9f + 1.2f * v);
    *at = *reinterpret_cast<const uint32_t*>(&x);
  }
}

// 2n bf16 numbers, nearly normal of deviation `scale`: sums of four uniform ones.
extern "C" __global__ void random_numbers(uint32_t* data, size_t n, uint32_t seed, float scale) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    float x[2];
    for (int k = 0; k < 2; k++) {
      const uint32_t r = hash((uint32_t)i * 2 + k ^ hash(seed));
      x[k] = ((r & 255) + (r >> 8 & 255) + (r >> 16 & 255) + (r >> 24) - 510.f) * (scale / 147.8f);
    }
    const __nv_bfloat162 y = __floats2bfloat162_rn(x[0], x[1]);
    data[i] = *reinterpret_cast<const uint32_t*>(&y);
  }
}
