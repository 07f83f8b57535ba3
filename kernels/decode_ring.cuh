// Instructions of decode attention, and the ring through which its warps are fed.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#define DEV __device__ __forceinline__

constexpr float NOTHING = -1e30f;  // the maximum of no scores; finite, so that differences are numbers
constexpr int TILE_TOKENS = 8, PAGE_TILES = 8;

template <int D>
struct Format {
  static constexpr int PART = D > 128 ? 32 : 64;  // tokens of an INT2 part
  static constexpr int BLOB = PART * (D / 2 + 8);  // its bytes
  static constexpr int PAGE_PARTS = 64 / PART;
  static constexpr int HALVES = D > 128 ? 2 : 1;  // slots of a tile
  static constexpr int TILE = 32 * D;             // bytes of a tile: keys, then values
  static constexpr int SLOT = BLOB > TILE / HALVES ? BLOB : TILE / HALVES;
  static constexpr int OS = D + 8;  // floats of a head's row in the merge: padded, free of bank conflicts
};

DEV uint32_t smem_u32(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
DEV void mbar_init(uint32_t bar, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(n) : "memory"); }
DEV void mbar_expect(uint32_t bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEV void mbar_arrive(uint32_t bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
template <int THREADS> DEV void consumer_sync() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
DEV void mbar_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred p;\nW:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @p bra D;\n bra W;\nD:\n}" ::"r"(bar), "r"(parity)
      : "memory");
}
DEV void bulk_load(uint32_t dst, const void* src, int bytes, uint32_t bar) {  // read once: evict first
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "l"(0x12F0000000000000ull)
      : "memory");
}
DEV int load_now(const int* p) {  // where it stands, so that its latency is hidden
  int v;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
DEV void mma_u8s8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV void mma_u8u8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV void mma_bf16_k16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV void mma_f16_k16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV void mma_bf16_k8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}
DEV uint32_t transpose8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
DEV uint4 lds128(uint32_t addr) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(addr));
  return v;
}
DEV float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV float lg2(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(x);
}
DEV uint32_t pack_f16(float low, float high) {
  const __half2 x = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(x);
}
DEV float bf_lo(uint32_t w) { return __uint_as_float(w << 16); }
DEV float bf_hi(uint32_t w) { return __uint_as_float(w & 0xffff0000u); }

// A consumer warp's view of the ring: the rows in order, in each its slot.
template <int D, int NW, int ST>
struct Ring {
  uint32_t slot0, full0, empty0;  // shared addresses; the first has the lane's 16 bytes added
  int row, parity, lane;
  uint32_t at, empty;             // of the slot last taken: its address, and what to tell when it has been read

  DEV void take() {
    mbar_wait(full0 + row * (8 * NW), parity);
    at = slot0 + row * (NW * Format<D>::SLOT), empty = empty0 + row * 8;
    if (++row == ST) row = 0, parity ^= 1;
  }
  // Bulk copies are another proxy: without the fence the next copy into the slot may overtake reads of it, seen as rare
  // wrong rows where a ring of two rows goes round quickly.
  DEV void give(uint32_t bar) const {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane == 0) mbar_arrive(bar);
  }
  DEV void give() const { give(empty); }
};

// What a warp works on: the query of its heads, and its place in the merge.
struct Share {
  const __nv_bfloat16* q;  // [heads][D], shared memory
  int heads;               // of q that are there; may be fewer than the warp could do, or none
  float* o;                // [heads][OS], not normalised
  float2* ml;              // [heads] maximum and sum, base-2 exponents
  float scale_log2;
};
