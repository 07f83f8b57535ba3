// What a warp does with bf16 matrices. Lane = 4 g + q throughout, as in the fragments of mma.m16n8k16.
#pragma once
#include <cuda_bf16.h>
#include <stdint.h>

#define DEV __device__ __forceinline__
typedef __nv_bfloat16 bf16;
typedef __nv_bfloat162 bf16x2;

DEV uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
DEV uint32_t bits(bf16x2 x) { return reinterpret_cast<uint32_t&>(x); }
DEV uint32_t pack(float low, float high) { return bits(__floats2bfloat162_rn(low, high)); }
DEV float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
DEV float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// c (16 x 8, f32) += a (16 x 16) b (16 x 8).  a: rows g, g + 8, g, g + 8 of columns 2q, 2q, 2q + 8, 2q + 8.
// b: rows 2q and 2q + 8 of column g.  c: columns 2q, 2q + 1 of row g, then of row g + 8.
DEV void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four 8 x 8 tiles; lanes 8i .. 8i + 7 point at the rows of tile i.
DEV void load_tiles(uint32_t (&a)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(shared_address(row)) : "memory");
}
DEV void load_tiles_transposed(uint32_t (&a)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(shared_address(row)) : "memory");
}

DEV uint4 load16(const void* p) { return __ldg((const uint4*)p); }

// 16 rows times a matrix, K columns of x at most 32 STEPS.  Sums run over channels in any order, so a lane takes 8
// consecutive ones of each 32 where a fragment has two pairs 8 apart: 16-byte loads and no shared memory.
template <int STEPS> struct RowTimesMatrix {
  uint4 low[STEPS], high[STEPS];  // rows g and g + 8

  // A row pointer may be null: zeros.
  DEV void load(const bf16* row_low, const bf16* row_high, int d, int q) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      const int at = 32 * s + 8 * q;
      const uint4 none = make_uint4(0, 0, 0, 0);
      low[s] = row_low && at < d ? load16(row_low + at) : none;
      high[s] = row_high && at < d ? load16(row_high + at) : none;
    }
  }

  // matrix: [d out][d in].  Columns 8n .. 8n + 7 of the product, from c on.
  DEV void columns(float (&c)[4], const bf16* matrix, int n, int d, int g, int q) const {
    const bf16* column = matrix + (size_t)(8 * n + g) * d + 8 * q;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      const uint4 b = 32 * s + 8 * q < d ? load16(column + 32 * s) : make_uint4(0, 0, 0, 0);
      mma(c, low[s].x, high[s].x, low[s].y, high[s].y, b.x, b.y);
      mma(c, low[s].z, high[s].z, low[s].w, high[s].w, b.z, b.w);
    }
  }
};
