// INT2 parts for many query heads of a KV head: scores on wgmma, values on f16 MMA.
//
// Scores are those of decode_digits.cuh: exact sums of 2-bit codes times two signed digits of q.  Here the digits are
// columns in shared memory that a warpgroup's four warps share, each with a part of its own in its 16 rows.  No warp keeps
// the query, and the scores of 32 tokens are summed while the weights of the 32 before are made.
//
// Values: a code masked out of the low byte of a 16-bit half is an f16 number, subnormal, of value code * 4^p * 2^-24, and
// p * s is rounded to f16's 11 bits.  Bytes are spread to halves by two PRMT a word, and slots are mixed as in
// decode_digits.cuh: eight instructions for sixteen codes.
//
// Thread (g, qd) owns heads 2qd, 2qd+1 of each n-tile of eight; of twelve, in the second n-tile head 8+qd, in column 2qd.
#pragma once
#include "decode_ring.cuh"

// Rows g and g+8 of columns 8j + 2qd, 2qd+1 of d: 64 rows, 16 a warp, times N columns of 32 channels in shared memory.
template <int N>
DEV void wgmma_u8s8(int (&d)[N / 2], const uint32_t (&a)[4], uint64_t columns, int add) {
#define D4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns), "r"(add)
  if constexpr (N == 16)
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.s32.u8.s8 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9,%10,%11}, %12, p;}"
        : D4(0), D4(4) : OPERANDS);
  else if constexpr (N == 24)
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %17, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n24k32.s32.u8.s8 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11},"
        "{%12,%13,%14,%15}, %16, p;}"
        : D4(0), D4(4), D4(8) : OPERANDS);
  else
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.s32.u8.s8 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},"
        "{%16,%17,%18,%19}, %20, p;}"
        : D4(0), D4(4), D4(8), D4(12) : OPERANDS);
#undef D4
#undef OPERANDS
}
DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEV void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
DEV float zero_now() {  // a zero that is made where it stands
  float x;
  asm volatile("mov.f32 %0, 0f00000000;" : "=f"(x));
  return x;
}

// The query of HEADS heads as columns: eight columns by 16 channels lie together (a core matrix), along the channels, then
// along the columns.  Columns 8c + 2qd and + 1 are the high and the low digit of the head that is a thread's cth.
template <int D, int HEADS>
struct Columns {
  __align__(128) uint8_t digits[2 * HEADS * D];
  float sum[HEADS], unit[HEADS];  // of a head's digits, and what one is worth
};

// As attend_digits.  The block's CONSUMERS warps call it together, those of a warpgroup with the same `columns`.
template <int D, int HEADS, int NW, int ST, int CONSUMERS>
DEV void attend_wide(Ring<D, NW, ST>& ring, const Share& s, Columns<D, HEADS>& columns, int slot, int from, int to, uint32_t q_read, bool merge) {
  constexpr int NT = (HEADS + 7) / 8, P = Format<D>::PART, KS = D / 32, MT = D / 16, MG = D / 64, NU = P / 32;
  constexpr int N = 2 * HEADS, KB = P * D / 4, OS = Format<D>::OS;
  constexpr float LIM = 60000.f, TARGET = 10.f, MAGIC = 12582912.f;  // p*s in f16; a new maximum is set to 2^10
  // f32 sums of MMA are cut off, not rounded: parts whose sums stay in registers.
  constexpr int CHUNK = 128 * NW;
  // Before the values are multiplied or after, as measured.
  constexpr bool WAIT_EARLY = HEADS != 12;
  static_assert(NW % 4 == 0 && (HEADS == 8 || HEADS == 12 || HEADS == 16), "");
  const int lane = ring.lane, g = lane >> 2, qd = lane & 3;
  uint32_t par_off = 2 * KB + g * 16 - lane * 16;
  asm volatile("" : "+r"(par_off));  // kept in a register: it could be computed again
  // Of an n-tile, how many heads a thread has, and which.
  const auto heads = [](int nt) { return HEADS == 12 && nt ? 1 : 2; };
  const auto head = [&](int nt, int j) { return HEADS == 12 && nt ? 8 + qd : 8 * nt + 2 * qd + j; };

  // A lane's item is 8 channels of a head.
  constexpr int LANES = D / 8, ITEMS = HEADS * LANES;
#pragma unroll
  for (int item = 32 * slot + lane; item < ITEMS; item += 32 * NW) {
    const int h = item / LANES, k = item % LANES;
    const uint4 x = h < s.heads ? *(const uint4*)(s.q + 8 * item) : make_uint4(0, 0, 0, 0);
    uint32_t v[4] = {x.x, x.y, x.z, x.w};
    float y[8], amax = 0.f, sum = 0.f;
#pragma unroll
    for (int j = 0; j < 4; j++) amax = fmaxf(amax, fmaxf(fabsf(bf_lo(v[j])), fabsf(bf_hi(v[j]))));
#pragma unroll
    for (int t = 1; t < LANES; t *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, t));
    // al = scale * 2^e, e as large as |Q| <= 32512 allows.  x*al + 1.5*2^23 holds Q = round(x*al) in its low mantissa bits;
    // adding 128 makes byte 1 the rounded high digit.
    const int e = min(max((__float_as_int(32512.f / (s.scale_log2 * amax)) >> 23) - 127, -30), 60);
    const float al = s.scale_log2 * __int_as_float((e + 127) << 23);
#pragma unroll
    for (int j = 0; j < 4; j++) y[2 * j] = fmaf(bf_lo(v[j]), al, MAGIC), y[2 * j + 1] = fmaf(bf_hi(v[j]), al, MAGIC);
    // Channels of a word's bytes: k-step i, words qd*D/4 + 8i + {0..3} and {4..7}, k = 4qd.. and 16 + 4qd..
    const int q = k / KS, i = k % KS;
    const int c = HEADS == 12 && h >= 8 ? 2 : 2 * (h / 8) + h % 2, row = 2 * (HEADS == 12 && h >= 8 ? h - 8 : h % 8 / 2);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        sum += y[4 * half + j] - MAGIC;
        low[j] = __float_as_uint(y[4 * half + j]), high[j] = low[j] + 128;
      }
      uint8_t* to = columns.digits + (c * (D / 16) + 2 * i + half) * 128 + row * 16 + 4 * q;
      *(uint32_t*)to = __byte_perm(__byte_perm(high[0], high[1], 0x51), __byte_perm(high[2], high[3], 0x51), 0x5410);
      *(uint32_t*)(to + 16) = __byte_perm(__byte_perm(low[0], low[1], 0x40), __byte_perm(low[2], low[3], 0x40), 0x5410);
    }
#pragma unroll
    for (int t = 1; t < LANES; t *= 2) sum += __shfl_xor_sync(~0u, sum, t);
    if (k == 0) columns.sum[h] = sum, columns.unit[h] = __int_as_float((127 - e) << 23);
  }
  ring.give(q_read);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads through another proxy
  consumer_sync<32 * CONSUMERS>();
  float sumq[NT][2], unit[NT][2][4];  // unit: for slot p, which carries 4^p
#pragma unroll
  for (int nt = 0; nt < NT; nt++)
#pragma unroll
    for (int j = 0; j < heads(nt); j++) {
      sumq[nt][j] = columns.sum[head(nt, j)];
#pragma unroll
      for (int p = 0; p < 4; p++) unit[nt][j][p] = columns.unit[head(nt, j)] / (1 << (2 * p));
    }
  // Where wgmma finds them, in units of 16 bytes: start, and strides along channels and columns.
  const uint64_t digits = (smem_u32(columns.digits) >> 4 & 0x3fff) | (uint64_t)(128 >> 4) << 16 | (uint64_t)(8 * D >> 4) << 32;

#pragma unroll 1
  for (int chunk = from; chunk < to; chunk += CHUNK) {
    const int end = min(chunk + CHUNK, to);
    float o[NT][MT][4];  // channel 16mt+g of heads 2qd, 2qd+1; channel 16mt+8+g of the same
    float m[NT][2], l[NT][2], pz[NT][2];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
#pragma unroll
      for (int j = 0; j < heads(nt); j++) m[nt][j] = l[nt][j] = pz[nt][j] = 0.f;
#pragma unroll
      for (int mt = 0; mt < MT; mt++) o[nt][mt][0] = o[nt][mt][1] = o[nt][mt][2] = o[nt][mt][3] = 0.f;
    }
    bool fresh = true;  // the reference m is not set yet
    int c[2][HEADS];    // of 32 tokens: tile 0 has slots 0 | 1 in rows g | g+8, tile 1 has slots 2 | 3
    // Begins the scores of 32 tokens.
    const auto begin = [&](uint32_t codes) {
      uint4 w4[MG];
#pragma unroll
      for (int v = 0; v < MG; v++) w4[v] = lds128(codes + v * 512);
      uint32_t a[2][KS][4];
#pragma unroll
      for (int t = 0; t < 2; t++)
#pragma unroll
        for (int i = 0; i < KS; i++) {  // k-step of 32 channels
          const uint32_t w0 = i & 1 ? w4[i / 2].z : w4[i / 2].x, w1 = i & 1 ? w4[i / 2].w : w4[i / 2].y;
          const uint32_t low = 0x03030303u << (4 * t), high = low << 2;
          a[t][i][0] = w0 & low, a[t][i][1] = w0 & high, a[t][i][2] = w1 & low, a[t][i][3] = w1 & high;
        }
      wgmma_fence();
#pragma unroll
      for (int t = 0; t < 2; t++)
#pragma unroll
        for (int i = 0; i < KS; i++) wgmma_u8s8<N>(c[t], a[t][i], digits + i * 16, i > 0);
      wgmma_commit();
    };
    ring.take();
    begin(ring.at);
    wgmma_wait();
    uint32_t codes = ring.at, read = ring.empty;
#pragma unroll 1
    for (int part = chunk + slot; part - slot < end; part += NW) {
#pragma unroll
      for (int u = 0; u < NU; u++) {
        uint4 w[2];
        float x[NT][4][2], sum_p[NT][2], sum_z[NT][2];  // this thread's tokens 8k + g
        uint32_t pb[NT][4];
#pragma unroll
        for (int t = 0; t < 2; t++) w[t] = lds128(codes + par_off + (2 * u + t) * 128);
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const uint32_t sz = k & 1 ? w[k / 2].y : w[k / 2].x;
          const float scale = bf_lo(sz), zero = bf_hi(sz) * (1 << (2 * k));
#pragma unroll
          for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int j = 0; j < heads(nt); j++) {
              const int at = 4 * (2 * nt + j) + 2 * (k & 1), dot = c[k / 2][at] * 256 + c[k / 2][at + 1];
              x[nt][k][j] = fmaf(scale * unit[nt][j][k], fmaf(-zero, sumq[nt][j], (float)dot), -m[nt][j]);
            }
        }
        // The next scores are on their way meanwhile; after the last part, those of some part again.
        if (u + 1 == NU && part - slot + NW < end) ring.take();
        begin(u + 1 < NU ? codes + (u + 1) * (MG * 512) : ring.at);
        const auto sv = [&](int k) { return bf_lo(k & 1 ? w[k / 2].w : w[k / 2].z); };
        const auto zv = [&](int k) { return bf_hi(k & 1 ? w[k / 2].w : w[k / 2].z); };
        // Whether p*s passes what f16 holds: it then is infinite.
        auto weights = [&]() {
          __half2 most = __float2half2_rn(0.f);
#pragma unroll
          for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
              float y[2] = {0.f, 0.f};
#pragma unroll
              for (int j = 0; j < heads(nt); j++) {
                const float pr = ex2(x[nt][k][j]);
                y[j] = pr * sv(k);
                sum_p[nt][j] = k ? sum_p[nt][j] + pr : pr;
                sum_z[nt][j] = k ? fmaf(y[j], zv(k), sum_z[nt][j]) : y[j] * zv(k);
              }
              pb[nt][k] = pack_f16(y[0], y[1]);
              most = __hmax2(most, reinterpret_cast<__half2&>(pb[nt][k]));
            }
          return fmaxf(__low2float(most), __high2float(most)) > LIM;
        };
        const bool valid = part < end, high = weights();
        if (__builtin_expect(__any_sync(~0u, valid && (high || fresh)), 0)) {
          // Rare: the first part, or a new maximum of p*s: the reference moves so that it becomes 2^TARGET.
#pragma unroll
          for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int j = 0; j < heads(nt); j++) {
              float y = -INFINITY;
#pragma unroll
              for (int k = 0; k < 4; k++) x[nt][k][j] += m[nt][j], y = fmaxf(y, x[nt][k][j] + lg2(fmaxf(sv(k), 1e-30f)));
              y = fmaxf(y, __shfl_xor_sync(~0u, y, 4));
              y = fmaxf(y, __shfl_xor_sync(~0u, y, 8));
              y = fmaxf(y, __shfl_xor_sync(~0u, y, 16));
              if (fresh) m[nt][j] = y - TARGET;
              else if (y - m[nt][j] > 15.f) {
                const float f = ex2(m[nt][j] - (y - TARGET));
                m[nt][j] = y - TARGET, l[nt][j] *= f, pz[nt][j] *= f;
#pragma unroll
                for (int mt = 0; mt < MT; mt++) o[nt][mt][j] *= f, o[nt][mt][2 + j] *= f;
              }
#pragma unroll
              for (int k = 0; k < 4; k++) x[nt][k][j] -= m[nt][j];
            }
          fresh = false;
          weights();
        }
        if (WAIT_EARLY) wgmma_wait();
        if (__builtin_expect(!valid, 0))  // a branch: selects would take their time in every part
#pragma unroll
          for (int nt = 0; nt < NT; nt++) {
#pragma unroll
            for (int j = 0; j < heads(nt); j++) sum_p[nt][j] = sum_z[nt][j] = zero_now();
#pragma unroll
            for (int k = 0; k < 4; k++) pb[nt][k] = __float_as_uint(zero_now());
          }
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
#pragma unroll
          for (int j = 0; j < heads(nt); j++) l[nt][j] += sum_p[nt][j], pz[nt][j] += sum_z[nt][j];
#pragma unroll
          for (int k = 0; k < 4; k++) pb[nt][k] = transpose8x8(pb[nt][k]);
        }
#pragma unroll
        for (int mg = 0; mg < MG; mg++) {
          const uint4 v = lds128(codes + KB + (u * MG + mg) * 512);
          const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int t = 0; t < 2; t++) {  // 16 tokens: words of channels g and 8+g, even bytes of tokens 2qd, 2qd+1
            const uint32_t e0 = __byte_perm(words[2 * t], 0, 0x4240), e1 = __byte_perm(words[2 * t + 1], 0, 0x4240);
            const uint32_t o0 = __byte_perm(words[2 * t], 0, 0x4341), o1 = __byte_perm(words[2 * t + 1], 0, 0x4341);
#pragma unroll
            for (int pos = 3; pos >= 0; pos--) {
              const uint32_t mask = ((1u << (2 * pos + 2)) - 1) * 0x00010001u;  // slots 0..pos
#pragma unroll
              for (int nt = 0; nt < NT; nt++)
                if (pos == 3) mma_f16_k16(o[nt][mg * 4 + pos], e0, e1, o0, o1, pb[nt][2 * t], pb[nt][2 * t + 1]);
                else mma_f16_k16(o[nt][mg * 4 + pos], e0 & mask, e1 & mask, o0 & mask, o1 & mask, pb[nt][2 * t], pb[nt][2 * t + 1]);
            }
          }
        }
        if (!WAIT_EARLY) wgmma_wait();
      }
      ring.give(read);
      codes = ring.at, read = ring.empty;
    }
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
      for (int j = 0; j < heads(nt); j++) {
#pragma unroll
        for (int t = 4; t < 32; t *= 2) {
          l[nt][j] += __shfl_xor_sync(~0u, l[nt][j], t);
          pz[nt][j] += __shfl_xor_sync(~0u, pz[nt][j], t);
        }
        const int h = head(nt, j);
        const float2 w = merge ? s.ml[h] : make_float2(NOTHING, 0.f);
        if (fresh) m[nt][j] = NOTHING;
        const float M = fmaxf(m[nt][j], w.x), fw = ex2(w.x - M), fp = ex2(m[nt][j] - M);
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
          for (int r = 0; r < 2; r++) {
            float& to = s.o[h * OS + 16 * mt + 8 * r + g];
            const float slot_alone = o[nt][mt][2 * r + j] - ((mt & 3) ? o[nt][mt - ((mt & 3) ? 1 : 0)][2 * r + j] : 0.f);
            const float sum = fmaf(slot_alone, fp * ((1 << 24) >> (2 * (mt & 3))), -pz[nt][j] * fp);
            to = merge ? fmaf(to, fw, sum) : sum;
          }
        __syncwarp();
        if (g == 0) s.ml[h] = make_float2(M, fmaf(w.y, fw, l[nt][j] * fp));
      }
    __syncwarp();
    merge = true;
  }
}
