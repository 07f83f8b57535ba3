// sm_90a
// Decode attention over a cache of BF16 window pages and INT2 history pages (`Arrangement::Mma`, src/kv/page.rs).
//
// One query token a sequence, GQA of up to 16 query heads a KV head.  In INT2 pages K and V are 2-bit codes with one bf16
// scale and zero per (token, KV head, side):  value = (code - zero) * scale.  72 bytes a token a KV head at d = 128.
//
// ---- INT2 parts (64 tokens; 32 at d = 256) ------------------------------------------------------------------------
// Nothing is dequantized.  With q as two signed 8-bit digits (16-bit fixed point) and p as two unsigned ones,
//   score_th = s_t * gamma_h * ( c_t . Q_h  -  z_t * sum(Q_h) )                 c_t . Q_h on mma.m16n8k32 u8 x s8
//   out_h    = ( sum_t U_th c_t  -  sum_t U_th z_t ) / l_h,  U = round(p * s)     sum U c   on mma.m16n8k32 u8 x u8
// and a masked word is already four u8 operands.  The four 2-bit slots of a byte belong to four tokens (keys) or four
// channels (values), that is to four accumulator rows, so a slot's factor 4^p is taken out of its row afterwards.  Rows
// may even be mixed: with masks 0x03, 0x0f, 0x3f and none, row p holds the sum of slots 0..p, and row p minus row p-1
// is slot p, exactly, in int32: three ANDs for sixteen codes.  The 8 columns of an MMA hold 4 heads x 2 digits (high,
// low), so that a thread's accumulator pair is (high, low) of one head: thread (g, qd) = (lane / 4, lane % 4) owns head qd
// of each n-tile.
//
// ---- BF16 tiles (8 tokens) ----------------------------------------------------------------------------------------
// Keys on m16n8k16: rows 8..15 take a token's next 4 channels, and columns 2h, 2h+1 the matching channels of q of head h,
// so the score is c0 + c3 and no row is padding.  Values on m16n8k8 with p as a (high, low) pair of bf16 in columns 2h,
// 2h+1: the same ownership as above, and 16 bits of p.
//
// Requires: scales are positive normal numbers (the codec keeps them >= 1e-8).  Spare slots of a sequence's last tile may
// hold anything.  Sequences without tokens are left out: their outputs stay as they are.
// Precision: q to 2^-16..2^-15 of the head's largest |q|, p*s to 2^-14..2^-16 of the warp's largest with error carry,
// everything between exact or f32.  Beyond |score| of about 200 the output's relative error passes 5e-3.
//
// ---- work split ---------------------------------------------------------------------------------------------------
// An item is (sequence, KV head): its tiles, then its parts.  All items form one line, cut into equal runs, one a block
// (stream-K; the number of blocks is chosen so that cuts fall on item boundaries where that is cheaper).  In a block one
// producer warp fills a ring of ST rows of NW slots with cp.async.bulk; each slot (a part, a tile, or at d = 256 the keys
// or the values of a tile) is taken by W consumer warps, which have 4*NT heads each; the producer also brings the query,
// runs ahead across items, and no block barrier is in the loop.  At the end of an item the consumers merge in shared
// memory; an item cut over several blocks is merged by the last block to arrive.
// The plan (Blk, Seg) depends on lengths and page tables only: `int2_decode_plan` makes it once a step, for every layer.
#include <cuda_bf16.h>
#include <stdint.h>

#define DEV __device__ __forceinline__

// ------------------------------------------------------------------------------------------------ work descriptors
struct Seg {            // a run over one item, for one block                                              48 bytes
  int b, kvh;           // sequence (< 0: nothing), KV head
  int tb, te, pb, pe;   // tiles [tb, te) of its windows, parts [pb, pe) of its history
  int tokens, part;     // tokens in its windows; this run's partial
  int part0, npart, pad0, pad1;  // the item's first partial, how many it has (1: write out directly)
};
struct Blk {            // what a block needs first, in one load                                          192 bytes
  Seg first;
  int rest, rest_end, pad0, pad1;  // further runs: segs[rest, rest_end)
  int ids[32];                     // of the first slots of `first`, tiles or, where it has none, parts
};

struct Args {
  const __nv_bfloat16* q;   // [B][HQ][D]
  const uint8_t* int2;      // [pages][HK][parts][BLOB]
  const uint8_t* bf16;      // [pages][HK][8][TILE]
  const int* history;       // [B][max_history] page ids
  const int* windows;       // [B][max_windows] page ids
  const Blk* blks;          // [grid]
  const Seg* segs;
  float* part_o;            // [parts][4*NT*W][D]  sum p v, not normalised
  float2* part_ml;          // [parts][4*NT*W]     (m, l), base-2 exponents
  int* counter;             // [parts] zero before the first launch; left zero
  __nv_bfloat16* out;       // [B][HQ][D]
  float* out_f32;           // [B][HQ][D] or null
  float* lse;               // [B][HQ] natural log
  int HQ, HK, max_history, max_windows;
  float scale_log2;         // softmax scale * log2(e)
};

// ------------------------------------------------------------------------------------------------ PTX wrappers
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
DEV float bf_lo(uint32_t w) { return __uint_as_float(w << 16); }
DEV float bf_hi(uint32_t w) { return __uint_as_float(w & 0xffff0000u); }

// ------------------------------------------------------------------------------------------------ the kernel
constexpr float NOTHING = -1e30f;  // the maximum of no scores; finite, so that differences are numbers
constexpr int TILE_TOKENS = 8, PAGE_TILES = 8;

template <int D>
struct Format {
  static constexpr int PART = D > 128 ? 32 : 64;          // tokens of an INT2 part
  static constexpr int BLOB = PART * (D / 2 + 8);          // its bytes
  static constexpr int PAGE_PARTS = 64 / PART;
  static constexpr int HALVES = D > 128 ? 2 : 1;           // slots of a tile
  static constexpr int TILE = 32 * D;                      // bytes of a tile: keys, then values
  static constexpr int SLOT = BLOB > TILE / HALVES ? BLOB : TILE / HALVES;
};

template <int D, int NT, int W, int NW>
struct Shared {
  // OS: padded row, free of bank conflicts.  OB: where memory allows, the merge of one run does not hold up the next one.
  static constexpr int NH = 4 * NT * W, OS = D + 8, OB = NH > 4 ? 1 : 2;
  float o[OB][NW * W][4 * NT][OS];           // merge of the warps
  float2 ml[OB][NW * W][4 * NT];
  __align__(16) __nv_bfloat16 q[2][NH * D];  // query of the current and the next run
  Seg seg[2];
  uint64_t qfull[2], qempty[2], full[8][NW], empty[8];
  int last;
};

// D head_dim, NT n-tiles of 4 query heads a warp, W warps a slot, NW slots a row, ST rows of the ring, TG tokens of a part
// whose softmax is done at once.  Quarter SMs share out registers and issue slots: 16384 / (32 * warps of a quarter).
template <int D, int NT, int W, int NW, int ST, int TG>
DEV void decode(const Args& a) {
  using F = Format<D>;
  using S = Shared<D, NT, W, NW>;
  constexpr int P = F::PART, BLOB = F::BLOB, SLOT = F::SLOT, TILE = F::TILE, HALVES = F::HALVES;
  constexpr int KS = D / 32, MT = D / 16, MG = D / 64, NU = P / 32, NUG = TG / 32, NK = TG / 8, NH = S::NH, KB = P * D / 4;
  constexpr int NC = NW * W;  // consumer warps
  constexpr float LIM = 65000.f, TARGET = 14.f, MAGIC = 12582912.f;  // U < 2^16; a new maximum is set to 2^14
  static_assert(D % 64 == 0 && TG % 32 == 0 && P % TG == 0 && ST <= 8 && NW <= 32, "");
  static_assert(ST * NW * SLOT + sizeof(S) <= 227 * 1024, "too much shared memory");
  extern __shared__ __align__(128) uint8_t smem[];  // ring [ST][NW][SLOT], then S
  S& sh = *(S*)(smem + ST * NW * SLOT);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, qd = lane & 3;
  const int nheads = a.HQ / a.HK;
  const Blk& blk = a.blks[blockIdx.x];
  const int4 seg_a = __ldg((const int4*)&blk), seg_b = __ldg((const int4*)&blk + 1), seg_c = __ldg((const int4*)&blk + 2);
  const int2 rest = __ldg((const int2*)&blk.rest);
  const int first_ids = __ldg(&blk.ids[lane]);
  if (tid == 0) {
#pragma unroll
    for (int s = 0; s < ST; s++) mbar_init(smem_u32(&sh.empty[s]), NC);
#pragma unroll
    for (int s = 0; s < 2; s++) mbar_init(smem_u32(&sh.qfull[s]), 1), mbar_init(smem_u32(&sh.qempty[s]), NC);
    for (int s = 0; s < ST * NW; s++) mbar_init(smem_u32(&sh.full[0][s]), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (seg_a.x < 0) return;

  if (warp == NC) {  // ================================ producer warp: lane k brings slot k of a row
    Seg s{seg_a.x, seg_a.y, seg_a.z, seg_a.w, seg_b.x, seg_b.y, seg_b.z, seg_b.w, seg_c.x, seg_c.y, 0, 0};
    constexpr int RB = 32 / NW * NW;  // ids are read RB at a time, one batch ahead
    const uint32_t ring = smem_u32(smem) + lane * SLOT;
    int row = 0, parity = 1, next = rest.x, run = 0;
    bool first = true;
#pragma unroll 1
    while (true) {
      const int qs = run & 1, nt = s.te - s.tb, np = s.pe - s.pb;
      mbar_wait(smem_u32(&sh.qempty[qs]), ((run >> 1) & 1) ^ 1);
      if (lane == 0) {
        sh.seg[qs] = s;
        mbar_expect(smem_u32(&sh.qfull[qs]), nheads * D * 2);
        bulk_load(smem_u32(sh.q[qs]), a.q + ((size_t)s.b * a.HQ + s.kvh * nheads) * D, nheads * D * 2, smem_u32(&sh.qfull[qs]));
      }
      const int* windows = a.windows + (size_t)s.b * a.max_windows;
      const int* history = a.history + (size_t)s.b * a.max_history;
      auto tile_id = [&](int i) {
        const int t = s.tb + i;
        return i < nt ? load_now(windows + t / PAGE_TILES) * PAGE_TILES + t % PAGE_TILES : 0;
      };
      auto part_id = [&](int i) {
        const int p = s.pb + i;
        return i < np ? load_now(history + p / F::PAGE_PARTS) * F::PAGE_PARTS + p % F::PAGE_PARTS : 0;
      };
      const int tiles = first && nt ? first_ids : tile_id(lane), parts = first && !nt ? first_ids : part_id(lane);
      first = false;
      auto stream = [&](int n, int cur, auto id, const uint8_t* base, int page_slots, int bytes, int copies, int copy_bytes) {
        int nxt = id(RB + lane);
#pragma unroll 1
        for (int i = 0, j = 0; i < n; i += NW, j += NW) {
          if (j == RB) cur = nxt, j = 0, nxt = id(i + RB + lane);
          const int at = __shfl_sync(~0u, cur, j + lane), k = min(NW, n - i);
          const uint8_t* src = base + (((size_t)(at / page_slots) * a.HK + s.kvh) * page_slots + at % page_slots) * bytes;
#pragma unroll
          for (int c = 0; c < copies; c++) {
            mbar_wait(smem_u32(&sh.empty[row]), parity);
            if (lane < k) {
              const uint32_t bar = smem_u32(&sh.full[row][lane]);
              mbar_expect(bar, copy_bytes);
              bulk_load(ring + row * NW * SLOT, src + c * copy_bytes, copy_bytes, bar);
            } else if (lane < NW) mbar_arrive(smem_u32(&sh.full[row][lane]));
            if (++row == ST) row = 0, parity ^= 1;
          }
        }
      };
      if (nt) stream(nt, tiles, tile_id, a.bf16, PAGE_TILES, TILE, HALVES, TILE / HALVES);
      if (np) stream(np, parts, part_id, a.int2, F::PAGE_PARTS, BLOB, 1, BLOB);
      run++;
      if (next >= rest.y) break;
      s = a.segs[next++];
    }
    return;
  }

  // ================================================== consumer warps
  const int slot = warp % NW, head0 = warp / NW * 4 * NT;
  // Shared addresses of this lane; kept in registers (asm hides that they could be computed again).
  uint32_t ring = smem_u32(smem) + slot * SLOT + lane * 16, bar_full = smem_u32(&sh.full[0][slot]), bar_empty = smem_u32(&sh.empty[0]);
  uint32_t par_off = 2 * KB + g * 16 - lane * 16;
  asm volatile("" : "+r"(ring), "+r"(bar_full), "+r"(bar_empty), "+r"(par_off));
  int row = 0, parity = 0;
  uint32_t st, empty;
  auto take = [&]() {  // waits for the next row's slot: its address in `st`, what to tell when it is read in `empty`
    mbar_wait(bar_full + row * (8 * NW), parity);
    st = ring + row * (NW * SLOT), empty = bar_empty + row * 8;
    if (++row == ST) row = 0, parity ^= 1;
  };
  auto give = [&](uint32_t bar) {
    __syncwarp();
    if (lane == 0) mbar_arrive(bar);
  };
  const int runs = 1 + rest.y - rest.x;
#pragma unroll 1
  for (int run = 0; run < runs; run++) {
    const int qs = run & 1, ob = run & (S::OB - 1);
    mbar_wait(smem_u32(&sh.qfull[qs]), (run >> 1) & 1);
    const Seg seg = sh.seg[qs];
    float* const mine = &sh.o[ob][warp][qd][g];  // [4 * nt * OS + 16 * mt + 8 * r]

    if (seg.te > seg.tb) {  // ---------------------- BF16 tiles
      // B fragments: lane (n = g, qd) holds column n = (head g/2, part g%2), channels qd*D/4 + 8i + 4*part + {0..3}.
      uint32_t qb[NT][KS][2];
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        const int h = head0 + 4 * nt + (g >> 1);
#pragma unroll
        for (int i = 0; i < KS; i++) {
          const uint2 x = h < nheads ? *(const uint2*)(sh.q[qs] + h * D + qd * (D / 4) + 8 * i + 4 * (g & 1)) : make_uint2(0, 0);
          qb[nt][i][0] = x.x, qb[nt][i][1] = x.y;
        }
      }
      float o[NT][MT][4];  // (channel 16mt+g, p high), (.., p low), (channel 16mt+8+g, p high), (.., p low) of head 4nt+qd
      float m[NT], l[NT];
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        m[nt] = NOTHING, l[nt] = 0.f;
#pragma unroll
        for (int mt = 0; mt < MT; mt++) o[nt][mt][0] = o[nt][mt][1] = o[nt][mt][2] = o[nt][mt][3] = 0.f;
      }
#pragma unroll 1
      for (int tile = seg.tb + slot; tile - slot < seg.te; tile += NW) {
        take();
        if (tile >= seg.te) {
          give(empty);
          if (HALVES == 2) take(), give(empty);
          continue;
        }
        float s[NT][4];
#pragma unroll
        for (int nt = 0; nt < NT; nt++) s[nt][0] = s[nt][1] = s[nt][2] = s[nt][3] = 0.f;
#pragma unroll
        for (int i = 0; i < KS; i++) {
          const uint4 w = lds128(st + i * 512);
#pragma unroll
          for (int nt = 0; nt < NT; nt++) mma_bf16_k16(s[nt], w.x, w.z, w.y, w.w, qb[nt][i][0], qb[nt][i][1]);
        }
        uint32_t values = st + 16 * D;
        if (HALVES == 2) give(empty), take(), values = st;
        const int valid = seg.tokens - tile * TILE_TOKENS;
        const uint32_t mask = (2 * qd < valid ? 0xffffu : 0u) | (2 * qd + 1 < valid ? 0xffff0000u : 0u);
        float x[NT];  // of token g
        bool high = false;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
          x[nt] = g < valid ? (s[nt][0] + s[nt][3]) * a.scale_log2 : -INFINITY;
          high |= x[nt] > m[nt] + 20.f;
        }
        if (__any_sync(~0u, high)) {  // rare: a new maximum; up to 2^20 above the old one f32 has room
#pragma unroll
          for (int nt = 0; nt < NT; nt++) {
            float y = fmaxf(m[nt], x[nt]);
            y = fmaxf(y, __shfl_xor_sync(~0u, y, 4));
            y = fmaxf(y, __shfl_xor_sync(~0u, y, 8));
            y = fmaxf(y, __shfl_xor_sync(~0u, y, 16));
            const float f = ex2(m[nt] - y);
            m[nt] = y, l[nt] *= f;
#pragma unroll
            for (int mt = 0; mt < MT; mt++) o[nt][mt][0] *= f, o[nt][mt][1] *= f, o[nt][mt][2] *= f, o[nt][mt][3] *= f;
          }
        }
        uint32_t pb[NT];
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
          const float p = ex2(x[nt] - m[nt]), hi = bf_hi(__float_as_uint(p));
          l[nt] += p;
          const __nv_bfloat162 digits = __floats2bfloat162_rn(hi, p - hi);
          pb[nt] = transpose8x8(reinterpret_cast<const uint32_t&>(digits));
        }
#pragma unroll
        for (int v = 0; v < MT / 2; v++) {
          const uint4 w = lds128(values + v * 512);
          if (v == MT / 2 - 1) give(empty);
#pragma unroll
          for (int nt = 0; nt < NT; nt++) {
            mma_bf16_k8(o[nt][2 * v], w.x & mask, w.y & mask, pb[nt]);
            mma_bf16_k8(o[nt][2 * v + 1], w.z & mask, w.w & mask, pb[nt]);
          }
        }
      }
      // Into this warp's place of the merge, where the parts' share is added to it by the same threads.
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
#pragma unroll
        for (int s = 4; s < 32; s *= 2) l[nt] += __shfl_xor_sync(~0u, l[nt], s);
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
          mine[4 * nt * S::OS + 16 * mt] = o[nt][mt][0] + o[nt][mt][1];
          mine[4 * nt * S::OS + 16 * mt + 8] = o[nt][mt][2] + o[nt][mt][3];
        }
        if (g == 0) sh.ml[ob][warp][4 * nt + qd] = make_float2(m[nt], l[nt]);
      }
      if (seg.pe == seg.pb) give(smem_u32(&sh.qempty[qs]));
      __syncwarp();
    }

    if (seg.pe > seg.pb) {  // ---------------------- INT2 parts
      // Query digits as B fragments: lane (n = g, qd) holds column n = (head g/2, digit g%2), channels qd*D/4 + 8i + {0..7}.
      // x*al + 1.5*2^23 holds Q = round(x*al) in its low mantissa bits; adding 128 first makes byte 1 the rounded high digit.
      uint32_t qb[NT][KS][2];
      // Slot p carries 4^p:  score (base 2) = s * 2^(-e-2p) * (dot_p - z * 4^p sum), the power folded into the unpacking of s.
      // With many heads the powers of p stay with s and z, which costs two instructions a token and saves registers.
      constexpr int POWERS = NT > 2 ? 1 : 4;
      float sumq[NT][POWERS];  // of head 4*nt + qd
      int sexp[NT][POWERS];
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        const int h = head0 + 4 * nt + (g >> 1);
        uint32_t v[4 * KS];
        __nv_bfloat162 am = __float2bfloat162_rn(0.f);
#pragma unroll
        for (int i = 0; i < KS; i++) {
          const uint4 x = h < nheads ? *(const uint4*)(sh.q[qs] + h * D + qd * (D / 4) + 8 * i) : make_uint4(0, 0, 0, 0);
          v[4 * i] = x.x, v[4 * i + 1] = x.y, v[4 * i + 2] = x.z, v[4 * i + 3] = x.w;
        }
#pragma unroll
        for (int k = 0; k < 4 * KS; k++) am = __hmax2(am, __habs2(reinterpret_cast<__nv_bfloat162&>(v[k])));
        float amax = fmaxf(__low2float(am), __high2float(am));
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
        // al = scale * 2^e, e as large as |Q| <= 32512 allows
        const int e = min(max((__float_as_int(32512.f / (a.scale_log2 * amax)) >> 23) - 127, -30), 60);
        const float al = a.scale_log2 * __int_as_float((e + 127) << 23), magic = MAGIC + ((g & 1) ? 0.f : 128.f);
        const uint32_t sel = (g & 1) ? 0x40 : 0x51;
        float sum = 0.f;
#pragma unroll
        for (int k = 0; k < 2 * KS; k++) {  // 4 channels each: words 2k, 2k+1
          const float y0 = fmaf(bf_lo(v[2 * k]), al, magic), y1 = fmaf(bf_hi(v[2 * k]), al, magic);
          const float y2 = fmaf(bf_lo(v[2 * k + 1]), al, magic), y3 = fmaf(bf_hi(v[2 * k + 1]), al, magic);
          sum += ((y0 - magic) + (y1 - magic)) + ((y2 - magic) + (y3 - magic));
          qb[nt][k >> 1][k & 1] = __byte_perm(__byte_perm(__float_as_uint(y0), __float_as_uint(y1), sel),
                                              __byte_perm(__float_as_uint(y2), __float_as_uint(y3), sel), 0x5410);
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float sq = __shfl_sync(~0u, sum, qd * 8);
        const int es = __shfl_sync(~0u, e, qd * 8);
#pragma unroll
        for (int p = 0; p < POWERS; p++) sumq[nt][p] = sq * (1 << (2 * p)), sexp[nt][p] = -(es + 2 * p) * (1 << 23);
      }
      give(smem_u32(&sh.qempty[qs]));

      int oacc[NT][MT][4];  // (channel 16mt+g, high), (.., low), (channel 16mt+8+g, high), (.., low) of head 4nt+qd
      float m[NT], l[NT], pz[NT], rr[NT][4];  // rr: rounding errors carried from token to token, four chains
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        m[nt] = l[nt] = pz[nt] = rr[nt][0] = rr[nt][1] = rr[nt][2] = rr[nt][3] = 0.f;
#pragma unroll
        for (int mt = 0; mt < MT; mt++) oacc[nt][mt][0] = oacc[nt][mt][1] = oacc[nt][mt][2] = oacc[nt][mt][3] = 0;
      }
      bool fresh = true;  // the reference m is not set yet
      int left = -1;      // parts until the accumulators are looked after; below 0: now

#pragma unroll 1
      for (int part = seg.pb + slot; part - slot < seg.pe; part += NW) {
        take();
        if (part >= seg.pe) {
          give(empty);
          continue;
        }
        // TG tokens at a time
#pragma unroll 1
        for (int u0 = 0; u0 < NU; u0 += NUG) {
          const uint32_t codes = NU == NUG ? st : st + u0 * (MG * 512), params = NU == NUG ? st + par_off : st + par_off + u0 * 256;
          // scores of 32 tokens: tile 0 has slots 0 | 0+1 in rows g | g+8, tile 1 has slots 0+1+2 | 0+1+2+3
          float x[NT][NK], sv[NK], zv[NK];  // this thread's tokens 8k + g
#pragma unroll
          for (int u = 0; u < NUG; u++) {
            int acc[NT][2][4];
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
              for (int k = 0; k < 8; k++) acc[nt][k >> 2][k & 3] = 0;
#pragma unroll
            for (int v = 0; v < MG; v++) {
              const uint4 w4 = lds128(codes + (u * MG + v) * 512);
#pragma unroll
              for (int e = 0; e < 2; e++) {  // k-step of 32 channels: words 4v + 2e, 4v + 2e + 1
                const uint32_t w0 = e ? w4.z : w4.x, w1 = e ? w4.w : w4.y;
#pragma unroll
                for (int nt = 0; nt < NT; nt++) {
                  const uint32_t b0 = qb[nt][2 * v + e][0], b1 = qb[nt][2 * v + e][1];
                  mma_u8s8(acc[nt][0], w0 & 0x03030303, w0 & 0x0f0f0f0f, w1 & 0x03030303, w1 & 0x0f0f0f0f, b0, b1);
                  mma_u8s8(acc[nt][1], w0 & 0x3f3f3f3f, w0, w1 & 0x3f3f3f3f, w1, b0, b1);
                }
              }
            }
            uint32_t sz[4];
#pragma unroll
            for (int t = 0; t < 2; t++) {
              const uint4 w = lds128(params + (2 * u + t) * 128);
              sz[2 * t] = w.x, sz[2 * t + 1] = w.y;
              sv[4 * u + 2 * t] = bf_lo(w.z), sv[4 * u + 2 * t + 1] = bf_lo(w.w), zv[4 * u + 2 * t] = bf_hi(w.z), zv[4 * u + 2 * t + 1] = bf_hi(w.w);
            }
            int wide_s[4];
            float wide_z[4];
            if (POWERS == 1)
#pragma unroll
              for (int p = 0; p < 4; p++) wide_s[p] = sz[p] * 65536 - 2 * p * (1 << 23), wide_z[p] = bf_hi(sz[p]) * (1 << (2 * p));
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
              int below = 0;
#pragma unroll
              for (int p = 0; p < 4; p++) {
                const int upto = acc[nt][p >> 1][2 * (p & 1)] * 256 + acc[nt][p >> 1][2 * (p & 1) + 1];
                // bf16 scale (normal) times a power of two
                const float s = __int_as_float(POWERS == 1 ? wide_s[p] + sexp[nt][0] : sz[p] * 65536 + sexp[nt][p % POWERS]);
                const float z = POWERS == 1 ? wide_z[p] : bf_hi(sz[p]);
                x[nt][4 * u + p] = fmaf(s, fmaf(-z, sumq[nt][p % POWERS], (float)(upto - below)), -m[nt]);
                below = upto;
              }
            }
          }
          // p = 2^x; U = round(p*s) with the rounding error carried along: mass is kept however small single weights are.
          // v + 1.5*2^23 leaves the integer in the low mantissa bits; bytes (1, 0) are the digits.
          float pr[NT][NK], u[NT][NK];
          uint32_t pb[NT][NUG][2];
          auto weights = [&]() {
            float mx[4];
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
#pragma unroll
              for (int k = 0; k < NK; k++) pr[nt][k] = ex2(x[nt][k]);
#pragma unroll
              for (int t = 0; t < NK / 2; t++) {
                uint32_t dg[2];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                  const int k = 2 * t + r, c = k & 3;
                  const float v = fmaf(pr[nt][k], sv[k], rr[nt][c]), y = v + MAGIC;
                  u[nt][k] = y - MAGIC;
                  rr[nt][c] = v - u[nt][k];
                  mx[c] = nt || k > 3 ? fmaxf(mx[c], v) : v;
                  dg[r] = __float_as_uint(y);
                }
                // columns 2h, 2h+1 of an 8x8 b16 matrix: the high digits of tokens g, g+8; their low digits
                pb[nt][t >> 1][t & 1] = __byte_perm(dg[0], dg[1], 0x4051);
              }
            }
            return fmaxf(fmaxf(mx[0], mx[1]), fmaxf(mx[2], mx[3]));
          };
          const float mx = weights();
          if (__builtin_expect(__any_sync(~0u, mx > LIM) || left < 0, 0)) {
            // Rare: the first part, a new maximum of p*s (the reference moves so that it becomes 2^TARGET), or the sums may
            // have grown past half of int32: 256 parts add at most 255 * 255 * 64 * 256 < 2^30.
            int sums = 0;
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
              for (int mt = 0; mt < MT; mt++) sums |= oacc[nt][mt][0] | oacc[nt][mt][1] | oacc[nt][mt][2] | oacc[nt][mt][3];
            const bool full = __any_sync(~0u, sums >= 1 << 30);
            if (left < 0) left = 256;
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
              float y = -INFINITY;
#pragma unroll
              for (int k = 0; k < NK; k++) x[nt][k] += m[nt], y = fmaxf(y, x[nt][k] + lg2(fmaxf(sv[k], 1e-30f)));
              y = fmaxf(y, __shfl_xor_sync(~0u, y, 4));
              y = fmaxf(y, __shfl_xor_sync(~0u, y, 8));
              y = fmaxf(y, __shfl_xor_sync(~0u, y, 16));
              // m moves by a whole number of octaves, so that the integer accumulators are rescaled by shifts
              const float up = y - m[nt] > 15.9f ? ceilf(y - m[nt] - TARGET) : full ? 1.f : 0.f;
              if (fresh) m[nt] = y - TARGET;
              else if (up > 0.f) {
                const float f = ex2(-up);
                m[nt] += up, l[nt] *= f, pz[nt] *= f;
#pragma unroll 1
                for (int more = (int)fminf(up, 64.f); more > 0; more -= 16) {
                  const int n = min(more, 16);
#pragma unroll
                  for (int mt = 0; mt < MT; mt++)
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                      int &hi = oacc[nt][mt][2 * r], &lo = oacc[nt][mt][2 * r + 1];
                      lo = ((uint32_t)lo + (hi & ((1 << n) - 1)) * 256u) >> n;
                      hi = (uint32_t)hi >> n;
                    }
                }
              }
#pragma unroll
              for (int c = 0; c < 4; c++) rr[nt][c] = 0.f;  // the first attempt spoilt them; they are below one unit
#pragma unroll
              for (int k = 0; k < NK; k++) x[nt][k] -= m[nt];
            }
            fresh = false;
            weights();
          }
#pragma unroll
          for (int nt = 0; nt < NT; nt++) {
            float ls[4];
#pragma unroll
            for (int k = 0; k < NK; k++) ls[k & 3] = k > 3 ? ls[k & 3] + pr[nt][k] : pr[nt][k], pz[nt] = fmaf(u[nt][k], zv[k], pz[nt]);
            l[nt] += (ls[0] + ls[1]) + (ls[2] + ls[3]);
#pragma unroll
            for (int t = 0; t < NK / 2; t++) pb[nt][t >> 1][t & 1] = transpose8x8(pb[nt][t >> 1][t & 1]);
          }
          // out^T[channel][head, digit] += V^T[channel][token] * U[token][head, digit]
#pragma unroll
          for (int uu = 0; uu < NUG; uu++)
#pragma unroll
            for (int mg = 0; mg < MG; mg++) {
              const uint4 w = lds128(codes + KB + (uu * MG + mg) * 512);
              if (uu == NUG - 1 && mg == MG - 1 && (NU == NUG || u0 == NU - NUG)) give(empty);  // all of it is in registers
#pragma unroll
              for (int pos = 0; pos < 4; pos++) {
                const uint32_t mask = ((1u << (2 * pos + 2)) - 1) * 0x01010101u;  // slots 0..pos
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
                  mma_u8u8(oacc[nt][mg * 4 + pos], w.x & mask, w.y & mask, w.z & mask, w.w & mask, pb[nt][uu][0], pb[nt][uu][1]);
              }
            }
        }
        left--;
      }

      const bool tiles = seg.te > seg.tb;
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
#pragma unroll
        for (int s = 4; s < 32; s *= 2) l[nt] += __shfl_xor_sync(~0u, l[nt], s), pz[nt] += __shfl_xor_sync(~0u, pz[nt], s);
        float2& ml = sh.ml[ob][warp][4 * nt + qd];
        const float2 w = tiles ? ml : make_float2(NOTHING, 0.f);
        if (fresh) m[nt] = NOTHING;
        const float M = fmaxf(m[nt], w.x), fw = ex2(w.x - M), fp = ex2(m[nt] - M);
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
          const float f = fp / (1 << (2 * (mt & 3)));
          int v[4];  // slot mt & 3 alone
#pragma unroll
          for (int k = 0; k < 4; k++) v[k] = oacc[nt][mt][k] - ((mt & 3) ? oacc[nt][mt - ((mt & 3) ? 1 : 0)][k] : 0);
#pragma unroll
          for (int r = 0; r < 2; r++) {
            float& o = mine[4 * nt * S::OS + 16 * mt + 8 * r];
            const float x = fmaf(fmaf((float)v[2 * r], 256.f, (float)v[2 * r + 1]), f, -pz[nt] * fp);
            o = tiles ? fmaf(o, fw, x) : x;
          }
        }
        __syncwarp();
        if (g == 0) ml = make_float2(M, fmaf(w.y, fw, l[nt] * fp));
      }
    }

    // ---- end of the run: merge the warps
    consumer_sync<NC * 32>();
    auto emit = [&](int h, int ch, float2 o, float M, float L) {
      const size_t at = (size_t)seg.b * a.HQ + seg.kvh * nheads + h;
      const float i = 1.f / L;
      *(__nv_bfloat162*)(a.out + at * D + ch) = __floats2bfloat162_rn(o.x * i, o.y * i);
      if (a.out_f32) *(float2*)(a.out_f32 + at * D + ch) = make_float2(o.x * i, o.y * i);
      if (ch == 0) a.lse[at] = (M + lg2(L)) * 0.6931471805599453f;
    };
#pragma unroll 1
    for (int k = 2 * tid; k < nheads * D; k += NC * 64) {
      const int h = k / D, ch = k % D, from = h / (4 * NT) * NW, hl = h % (4 * NT);
      float M = NOTHING, L = 0.f;
      float2 o = {0.f, 0.f}, ml[NW];
#pragma unroll
      for (int w = 0; w < NW; w++) ml[w] = sh.ml[ob][from + w][hl], M = fmaxf(M, ml[w].x);
#pragma unroll
      for (int w = 0; w < NW; w++) {
        const float f = ex2(ml[w].x - M);
        const float2 v = *(const float2*)&sh.o[ob][from + w][hl][ch];
        L = fmaf(ml[w].y, f, L), o.x = fmaf(v.x, f, o.x), o.y = fmaf(v.y, f, o.y);
      }
      if (seg.npart == 1) emit(h, ch, o, M, L);
      else {
        __stcg((float2*)(a.part_o + (size_t)seg.part * NH * D + k), o);
        if (ch == 0) __stcg(a.part_ml + (size_t)seg.part * NH + h, make_float2(M, L));
      }
    }
    if (seg.npart > 1) {  // the last block of the item merges
      consumer_sync<NC * 32>();
      if (tid == 0) {     // the barrier orders the block's stores before this release
        int old;
        asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(old) : "l"(a.counter + seg.part0) : "memory");
        if (old == seg.npart - 1) a.counter[seg.part0] = 0;
        sh.last = old == seg.npart - 1;
      }
      consumer_sync<NC * 32>();
      if (sh.last) {
#pragma unroll 1
        for (int k = 2 * tid; k < nheads * D; k += NC * 64) {
          const int h = k / D, ch = k % D;
          const float2* ml = a.part_ml + (size_t)seg.part0 * NH + h;
          const float* po = a.part_o + (size_t)seg.part0 * NH * D + k;
          float M = NOTHING, L = 0.f;
          float2 o = {0.f, 0.f};
#pragma unroll 1
          for (int w0 = 0; w0 < seg.npart; w0 += 16) {  // sixteen partials' loads in flight together
            float2 x[16], y[16];
            float mx = M;
#pragma unroll
            for (int w = 0; w < 16; w++) {
              const bool in = w0 + w < seg.npart;
              x[w] = in ? __ldcg(&ml[(w0 + w) * NH]) : make_float2(NOTHING, 0.f);
              y[w] = in ? __ldcg((const float2*)(po + (size_t)(w0 + w) * NH * D)) : make_float2(0.f, 0.f);
            }
#pragma unroll
            for (int w = 0; w < 16; w++) mx = fmaxf(mx, x[w].x);
            const float f0 = ex2(M - mx);
            M = mx, L *= f0, o.x *= f0, o.y *= f0;
#pragma unroll
            for (int w = 0; w < 16; w++) {
              const float f = ex2(x[w].x - M);
              L = fmaf(x[w].y, f, L), o.x = fmaf(y[w].x, f, o.x), o.y = fmaf(y[w].y, f, o.y);
            }
          }
          emit(h, ch, o, M, L);
        }
      }
    }
    if (S::OB == 1) consumer_sync<NC * 32>();
  }
}

// Named by head_dim and query heads a KV head; src/kv/cuda/decode.rs has the same list.
#define KERNEL(NAME, D, NT, W, NW, ST, TG)                                                                                    \
  extern "C" __global__ void __launch_bounds__(NW* W * 32 + 32, 1) int2_decode_##NAME(                                        \
      const __nv_bfloat16* q, const uint8_t* int2, const uint8_t* bf16, const int* history, const int* windows,               \
      const Blk* blks, const Seg* segs, float* part_o, float2* part_ml, int* counter, __nv_bfloat16* out, float* out_f32,     \
      float* lse, int HQ, int HK, int max_history, int max_windows, float scale_log2) {                                       \
    decode<D, NT, W, NW, ST, TG>(Args{q, int2, bf16, history, windows, blks, segs, part_o, part_ml, counter, out, out_f32,    \
                                      lse, HQ, HK, max_history, max_windows, scale_log2});                                    \
  }
KERNEL(d64_h4, 64, 1, 1, 8, 6, 64)
KERNEL(d64_h8, 64, 2, 1, 11, 5, 32)
KERNEL(d64_h12, 64, 3, 1, 11, 3, 32)
KERNEL(d64_h16, 64, 2, 2, 7, 5, 32)
KERNEL(d128_h4, 128, 1, 1, 8, 4, 64)
KERNEL(d128_h8, 128, 2, 1, 11, 3, 32)
KERNEL(d128_h12, 128, 3, 1, 7, 4, 32)
KERNEL(d128_h16, 128, 2, 2, 5, 4, 32)
KERNEL(d256_h4, 256, 1, 1, 7, 4, 32)
KERNEL(d256_h8, 256, 1, 2, 5, 4, 32)
KERNEL(d256_h16, 256, 1, 4, 2, 8, 32)

// ------------------------------------------------------------------------------------------------ the plan
// The line: sequences with tokens in order, in each its KV heads, in each its units: `halves` units a tile, one a part.
struct Line {
  const int *b, *tiles, *n;  // of a sequence: which; units of an item's tiles; of an item
  const uint32_t* start;     // units before it
  int count, HK, halves;
  uint32_t total;
};
struct Run { int s, h, off; };  // where a run begins: sequence of the line, KV head, unit of the item

// Where block i of g begins.  Cuts fall between tiles.
DEV Run locate(const Line& L, int i, int g) {
  const uint32_t x = (uint32_t)((uint64_t)L.total * i / g);
  int s = 0;
  for (int step = 1 << (31 - __clz(L.count)); step; step >>= 1)
    if (s + step < L.count && L.start[s + step] <= x) s += step;
  const uint32_t in = x - L.start[s];
  Run r{s, (int)(in / L.n[s]), (int)(in % L.n[s])};
  if (r.off < L.tiles[s]) r.off -= r.off % L.halves;
  return r;
}
// Calls f(run over one item, its end) for all that block i of g does.
template <class Fn>
DEV void walk(const Line& L, int i, int g, Fn f) {
  Run r = locate(L, i, g);
  const auto at = [&](const Run& x) { return L.start[x.s] + x.h * L.n[x.s] + x.off; };
  const uint32_t end = i + 1 == g ? L.total : at(locate(L, i + 1, g));
  for (int left = (int)(end - at(r)); left > 0;) {
    const int to = min(r.off + left, L.n[r.s]);
    f(r, to);
    left -= to - r.off;
    r.off = 0;
    if (++r.h == L.HK) r.h = 0, r.s++;
  }
}

// One block of 1024 threads; shared memory: 16 bytes a sequence.  A partial is numbered block + item: no two are
// alike, and those of an item are consecutive.  `row`: slots of a ring's row; no run is shorter, so none is empty.
extern "C" __global__ void __launch_bounds__(1024, 1) int2_decode_plan(
    const int* history_pages, const int* window_tokens, const int* history, const int* windows, Blk* blks, Seg* segs, int B,
    int HK, int max_history, int max_windows, int grid, int page_parts, int halves, int row) {
  extern __shared__ int plan_smem[];
  int *lb = plan_smem, *tiles = lb + B, *n = tiles + B;
  uint32_t* start = (uint32_t*)(n + B);
  __shared__ int worst[32], count_total[2];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  if (tid < 32) worst[tid] = 0;
  // Read by all, brought into order by one warp (in place: a sequence only moves down).
  for (int b = tid; b < B; b += 1024) {
    tiles[b] = (window_tokens[b] + TILE_TOKENS - 1) / TILE_TOKENS * halves;
    n[b] = tiles[b] + history_pages[b] * page_parts;
  }
  __syncthreads();
  if (warp == 0) {
    int count = 0;
    uint32_t total = 0;
    for (int b0 = 0; b0 < B; b0 += 32) {
      const int b = b0 + lane, units = b < B ? n[b] : 0, t = b < B ? tiles[b] : 0;
      const uint32_t some = __ballot_sync(~0u, units > 0), span = (uint32_t)units * HK;
      uint32_t sum = span;
#pragma unroll
      for (int s = 1; s < 32; s *= 2) {
        const uint32_t below = __shfl_up_sync(~0u, sum, s);
        if (lane >= s) sum += below;
      }
      if (units > 0) {
        const int s = count + __popc(some & ((1u << lane) - 1));
        lb[s] = b, tiles[s] = t, n[s] = units, start[s] = total + sum - span;
      }
      count += __popc(some);
      total += __shfl_sync(~0u, sum, 31);
      __syncwarp();
    }
    if (lane == 0) count_total[0] = count, count_total[1] = (int)total;
  }
  __syncthreads();
  const Line L{lb, tiles, n, start, count_total[0], HK, halves, (uint32_t)count_total[1]};
  const int most = (int)min((uint32_t)grid, max(L.total / row, 1u)), choices = min(most / 16 + 1, 32);
  // A few percent fewer blocks are used where that leaves fewer pieces.  A run costs about what 24 slots do (query, merge),
  // and a cut item 8 more.
  if (L.total)
    for (int k = tid; k < choices * most; k += 1024) {
      const int c = k / most, i = k % most, g = most - c;
      if (i >= g) continue;
      int cost = 0;
      walk(L, i, g, [&](const Run& r, int to) { cost += to - r.off + 24 + (to - r.off < L.n[r.s] ? 8 : 0); });
      atomicMax(&worst[c], cost);
    }
  __syncthreads();
  int g = most;
  for (int c = 1, best = worst[0]; c < choices; c++)
    if (worst[c] < best) best = worst[c], g = most - c;
  if (!L.total) g = 0;

  const auto block_of = [&](uint32_t x) { return (int)(((uint64_t)(x + 1) * g - 1) / L.total); };  // that has unit x, uncut
  for (int i = warp; i < grid; i += 32) {
    Blk& blk = blks[i];
    if (i >= g) {
      if (lane == 0) blk.first.b = -1, blk.rest = blk.rest_end = 0;
      continue;
    }
    int runs = 0, rest = 0;
    walk(L, i, g, [&](const Run& r, int to) {
      const int b = L.b[r.s], t = L.tiles[r.s], item = r.s * HK + r.h;
      const uint32_t x0 = L.start[r.s] + r.h * L.n[r.s], x1 = x0 + L.n[r.s];
      const int part0 = block_of(x0 + (t ? halves - 1 : 0)), last = block_of(x1 - 1);
      const Seg seg{b, r.h, min(r.off, t) / halves, min(to, t) / halves, max(r.off - t, 0), max(to - t, 0),
                    window_tokens[b], i + item, part0 + item, last - part0 + 1, 0, 0};
      if (runs++ == 0) {
        rest = i + item + 1;
        if (lane == 0) blk.first = seg;
        int id = 0;
        if (seg.te > seg.tb) {
          const int tile = seg.tb + lane;
          if (tile < seg.te) id = windows[(size_t)b * max_windows + tile / PAGE_TILES] * PAGE_TILES + tile % PAGE_TILES;
        } else {
          const int part = seg.pb + lane;
          if (part < seg.pe) id = history[(size_t)b * max_history + part / page_parts] * page_parts + part % page_parts;
        }
        blk.ids[lane] = id;
      } else if (lane == 0) segs[i + item] = seg;
    });
    if (lane == 0) blk.rest = rest, blk.rest_end = rest + runs - 1;
  }
}
