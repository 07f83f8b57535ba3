// sm_90a
// Decode attention over a cache of BF16 window pages and INT2 history pages (`Arrangement::Mma`, src/kv/page.rs).
//
// One query token a sequence, GQA of up to 16 query heads a KV head.  In INT2 pages K and V are 2-bit codes with one bf16
// scale and zero per (token, KV head, side):  value = (code - zero) * scale.  72 bytes a token a KV head at d = 128.
//
// INT2 parts (64 tokens; 32 at d = 256) are read by decode_digits.cuh (few heads a warp) or decode_wide.cuh, BF16
// tiles (8 tokens) by decode_tiles.cuh; this file has what feeds them, merges their results, and divides the work.
//
// Requires: scales are positive normal numbers (the codec keeps them >= 1e-8).  Spare slots of a sequence's last tile may
// hold anything.  Sequences without tokens are left out: their outputs stay as they are.
// ---- work split ---------------------------------------------------------------------------------------------------
// An item is (sequence, KV head): its tiles, then its parts.  All items form one line, cut into equal runs, one a block
// (stream-K; the number of blocks is chosen so that cuts fall on item boundaries where that is cheaper).  In a block one
// producer warp fills a ring of ST rows of NW slots with cp.async.bulk; each slot (a part, a tile, or at d = 256 the keys
// or the values of a tile) is taken by W consumer warps, which have NH heads each; the producer also brings the query,
// runs ahead across items, and no block barrier is in the loop.  At the end of an item the consumers merge in shared
// memory; an item cut over several blocks is merged by the last block to arrive.
// The plan (Blk, Seg) depends on lengths and page tables only: `int2_decode_plan` makes it once a step, for every layer.
#include "decode_digits.cuh"
#include "decode_tiles.cuh"
#include "decode_wide.cuh"

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
  float* part_o;            // [parts][heads][D]   sum p v, not normalised
  float2* part_ml;          // [parts][heads]      (m, l), base-2 exponents
  int* counter;             // [parts] zero before the first launch; left zero
  __nv_bfloat16* out;       // [B][HQ][D]
  float* out_f32;           // [B][HQ][D] or null
  float* lse;               // [B][HQ] natural log
  int HQ, HK, max_history, max_windows;
  float scale_log2;         // softmax scale * log2(e)
};

// ------------------------------------------------------------------------------------------------ the kernel
template <int D, int HEADS, int N> struct Queries { Columns<D, HEADS> of[N]; };
template <int D, int HEADS> struct Queries<D, HEADS, 0> {};

template <int D, int NH, int W, int NW, bool WIDE>
struct Shared {  // NH: heads of a warp
  static constexpr int ROWS = WIDE ? (NH + 7) / 8 * 8 : NH;  // those of whole n-tiles
  // OB: where memory allows, the merge of one run does not hold up the next one.
  static constexpr int OB = NH * W > 4 ? 1 : 2;
  float o[OB][NW * W][ROWS][Format<D>::OS];  // merge of the warps
  float2 ml[OB][NW * W][ROWS];
  __align__(16) __nv_bfloat16 q[2][NH * W * D];  // query of the current and the next run
  Queries<D, NH, WIDE ? W : 0> columns;          // of the current one
  Seg seg[2];
  uint64_t qfull[2], qempty[2], full[8][NW], empty[8];
  int last;
};

// D head_dim, NH query heads of a warp, W warps a slot, NW slots a row, ST rows of the ring; WIDE: attend_wide, where it is
// otherwise attend_digits.  A quarter SM shares out 512 registers a lane among its warps: 40 to a fourth of the producers,
// the rest to 2 consumer warps (8 in all) or 3 (12).
template <int D, int NH, int W, int NW, int ST, bool WIDE>
DEV void decode(const Args& a) {
  using F = Format<D>;
  constexpr int NC = NW * W;  // consumer warps
  using S = Shared<D, NH, W, NW, WIDE>;
  constexpr int BLOB = F::BLOB, SLOT = F::SLOT, TILE = F::TILE, HALVES = F::HALVES;
  static_assert(D % 64 == 0 && ST <= 8 && (NC == 8 || NC == 12), "");
  static_assert(ST * NW * SLOT + sizeof(S) <= 227 * 1024, "too much shared memory");
  extern __shared__ __align__(128) uint8_t smem[];  // ring [ST][NW][SLOT], then S
  S& sh = *(S*)(smem + ST * NW * SLOT);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
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

  if (warp >= NC) {  // ================================ producer warp: lane k brings slot k of a row
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp > NC) return;  // four warps hand over their registers, one has work
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
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(NC == 8 ? 232 : 152));
  const int slot = warp % NW, head0 = warp / NW * NH;
  Ring<D, NW, ST> ring{smem_u32(smem) + slot * SLOT + lane * 16, smem_u32(&sh.full[0][slot]), smem_u32(&sh.empty[0]), 0, 0, lane, 0, 0};
  asm volatile("" : "+r"(ring.slot0), "+r"(ring.full0), "+r"(ring.empty0));  // kept in registers, not computed again
  const int runs = 1 + rest.y - rest.x;
#pragma unroll 1
  for (int run = 0; run < runs; run++) {
    const int qs = run & 1, ob = run & (S::OB - 1);
    const uint32_t q_read = smem_u32(&sh.qempty[qs]);
    mbar_wait(smem_u32(&sh.qfull[qs]), (run >> 1) & 1);
    const Seg seg = sh.seg[qs];
    const Share share{sh.q[qs] + head0 * D, nheads - head0, sh.o[ob][warp][0], sh.ml[ob][warp], a.scale_log2};
    const bool tiles = seg.te > seg.tb;
    if (tiles) attend_tiles<D, WIDE ? 8 : 4, WIDE ? (NH + 7) / 8 : NH / 4, NW, ST>(ring, share, slot, seg.tb, seg.te, seg.tokens);
    if (seg.pe == seg.pb) ring.give(q_read);
    else if constexpr (WIDE) attend_wide<D, NH, NW, ST, NC>(ring, share, sh.columns.of[warp / NW], slot, seg.pb, seg.pe, q_read, tiles);
    else attend_digits<D, NH / 4, NW, ST>(ring, share, slot, seg.pb, seg.pe, q_read, tiles);

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
      const int h = k / D, ch = k % D, from = h / NH * NW, hl = h % NH;
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
        __stcg((float2*)(a.part_o + (size_t)seg.part * NH * W * D + k), o);
        if (ch == 0) __stcg(a.part_ml + (size_t)seg.part * NH * W + h, make_float2(M, L));
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
          const float2* ml = a.part_ml + (size_t)seg.part0 * NH * W + h;
          const float* po = a.part_o + (size_t)seg.part0 * NH * W * D + k;
          float M = NOTHING, L = 0.f;
          float2 o = {0.f, 0.f};
#pragma unroll 1
          for (int w0 = 0; w0 < seg.npart; w0 += 16) {  // sixteen partials' loads in flight together
            float2 x[16], y[16];
            float mx = M;
#pragma unroll
            for (int w = 0; w < 16; w++) {
              const bool in = w0 + w < seg.npart;
              x[w] = in ? __ldcg(&ml[(w0 + w) * NH * W]) : make_float2(NOTHING, 0.f);
              y[w] = in ? __ldcg((const float2*)(po + (size_t)(w0 + w) * NH * W * D)) : make_float2(0.f, 0.f);
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

// Named by head_dim and most query heads a KV head; `VARIANTS` in src/kv/cuda/decode.rs is the same list.
#define KERNEL(NAME, D, NH, W, NW, ST, WIDE)                                                                                  \
  extern "C" __global__ void __launch_bounds__(NW* W * 32 + 128, 1) int2_decode_##NAME(                                       \
      const __nv_bfloat16* q, const uint8_t* int2, const uint8_t* bf16, const int* history, const int* windows,               \
      const Blk* blks, const Seg* segs, float* part_o, float2* part_ml, int* counter, __nv_bfloat16* out, float* out_f32,     \
      float* lse, int HQ, int HK, int max_history, int max_windows, float scale_log2) {                                       \
    decode<D, NH, W, NW, ST, WIDE>(Args{q, int2, bf16, history, windows, blks, segs, part_o, part_ml, counter, out, out_f32,  \
                                    lse, HQ, HK, max_history, max_windows, scale_log2});                                      \
  }
KERNEL(d64_h4, 64, 4, 1, 8, 6, false)
KERNEL(d64_h8, 64, 8, 1, 12, 5, false)
KERNEL(d64_h16, 64, 16, 1, 8, 6, true)
KERNEL(d128_h4, 128, 4, 1, 8, 4, false)
KERNEL(d128_h8, 128, 8, 1, 8, 4, false)
KERNEL(d128_h12, 128, 12, 1, 8, 4, true)
KERNEL(d128_h16, 128, 16, 1, 8, 4, true)
KERNEL(d256_h4, 256, 4, 1, 8, 4, false)
KERNEL(d256_h8, 256, 4, 2, 6, 4, false)
KERNEL(d256_h16, 256, 8, 2, 4, 6, true)

// ------------------------------------------------------------------------------------------------ the plan
// The line: sequences with tokens in order, in each its KV heads, in each its units, `tile` of them a tile and `part` a part:
// they stand for time.
struct Line {
  const int *b, *tiles, *n;  // of a sequence: which; units of an item's tiles; of an item
  const uint32_t* start;     // units before it
  int count, HK, tile, part;
  uint32_t total;
};
struct Run { int s, h, off; };  // where a run begins: sequence of the line, KV head, unit of the item

// total * i / g, without 64 bits
DEV uint32_t bound(const Line& L, int i, int g) { return L.total / g * i + L.total % g * i / g; }
// Which block of g has unit x, were cuts not moved.
DEV int block_of(const Line& L, uint32_t x, int g) {
  int i = min((int)((float)x * g / L.total), g - 1);
  while (i > 0 && bound(L, i, g) > x) i--;
  while (i + 1 < g && bound(L, i + 1, g) <= x) i++;
  return i;
}
// Where block i of g begins.  Cuts fall between tiles and between parts.
DEV Run locate(const Line& L, int i, int g) {
  const uint32_t x = bound(L, i, g);
  int s = 0;
  for (int step = 1 << (31 - __clz(L.count)); step; step >>= 1)
    if (s + step < L.count && L.start[s + step] <= x) s += step;
  const uint32_t in = x - L.start[s];
  Run r{s, (int)(in / L.n[s]), (int)(in % L.n[s])};
  r.off -= r.off < L.tiles[s] ? r.off % L.tile : (r.off - L.tiles[s]) % L.part;
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

// Blocks of 1024 threads, which all choose alike and then write their share; shared memory: 16 bytes a sequence.  A partial is
// numbered block + item: no two are alike, and those of an item are consecutive.  `tile`, `part`: units of each; where
// arithmetic binds, a tile takes less time than a part.  `row`: slots of a ring's row; no run is much shorter, none is empty.
extern "C" __global__ void __launch_bounds__(1024, 1) int2_decode_plan(
    const int* history_pages, const int* window_tokens, const int* history, const int* windows, Blk* blks, Seg* segs, int B,
    int HK, int max_history, int max_windows, int grid, int page_parts, int tile, int part, int row) {
  extern __shared__ int plan_smem[];
  int *lb = plan_smem, *tiles = lb + B, *n = tiles + B;
  uint32_t* start = (uint32_t*)(n + B);
  __shared__ int worst[32], count_total[2];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  if (tid < 32) worst[tid] = 0;
  // Read by all, brought into order by one warp (in place: a sequence only moves down).
  for (int b = tid; b < B; b += 1024) {
    tiles[b] = (window_tokens[b] + TILE_TOKENS - 1) / TILE_TOKENS * tile;
    n[b] = tiles[b] + history_pages[b] * page_parts * part;
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
  const Line L{lb, tiles, n, start, count_total[0], HK, tile, part, (uint32_t)count_total[1]};
  const int most = (int)min((uint32_t)grid, max(L.total / (row * max(tile, part)), 1u)), choices = min(most / 16 + 1, 32);
  // A few percent fewer blocks are used where that leaves fewer pieces.  A run costs about what 24 parts do (query, merge),
  // and a cut item 8 more.
  if (L.total)
    for (int k = tid; k < choices * most; k += 1024) {
      const int c = k / most, i = k % most, g = most - c;
      if (i >= g) continue;
      int cost = 0;
      walk(L, i, g, [&](const Run& r, int to) { cost += to - r.off + (24 + (to - r.off < L.n[r.s] ? 8 : 0)) * part; });
      atomicMax(&worst[c], cost);
    }
  __syncthreads();
  int g = most;
  for (int c = 1, best = worst[0]; c < choices; c++)
    if (worst[c] < best) best = worst[c], g = most - c;
  if (!L.total) g = 0;

  for (int i = blockIdx.x * 32 + warp; i < grid; i += gridDim.x * 32) {
    Blk& blk = blks[i];
    if (i >= g) {
      if (lane == 0) blk.first.b = -1, blk.rest = blk.rest_end = 0;
      continue;
    }
    int runs = 0, rest = 0;
    walk(L, i, g, [&](const Run& r, int to) {
      const int b = L.b[r.s], t = L.tiles[r.s], item = r.s * HK + r.h;
      const uint32_t x0 = L.start[r.s] + r.h * L.n[r.s], x1 = x0 + L.n[r.s];
      const int part0 = block_of(L, x0 + (t ? tile : part) - 1, g), last = block_of(L, x1 - 1, g);
      const Seg seg{b, r.h, min(r.off, t) / tile, min(to, t) / tile, max(r.off - t, 0) / part, max(to - t, 0) / part,
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
