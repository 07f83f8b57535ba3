// INT2 parts on int8 MMA, four query heads an n-tile: exact sums of integers.
//
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
// Precision: q to 2^-16..2^-15 of the head's largest |q|, p*s to 2^-14..2^-16 of the warp's largest with error carry,
// everything between exact or f32.
#pragma once
#include "decode_ring.cuh"

// Parts [from, to), every NWth from `from` + slot on; `q_read`: the barrier to tell when the query has been read.  `merge`:
// the warp's place in the merge already holds something, which this is added to.
template <int D, int NT, int NW, int ST>
DEV void attend_digits(Ring<D, NW, ST>& ring, const Share& s, int slot, int from, int to, uint32_t q_read, bool merge) {
  constexpr int P = Format<D>::PART, KS = D / 32, MT = D / 16, MG = D / 64, NU = P / 32, NK = P / 8;
  constexpr int KB = P * D / 4, OS = Format<D>::OS;
  constexpr float LIM = 65000.f, TARGET = 14.f, MAGIC = 12582912.f;  // U < 2^16; a new maximum is set to 2^14
  const int lane = ring.lane, g = lane >> 2, qd = lane & 3;
  uint32_t par_off = 2 * KB + g * 16 - lane * 16;
  asm volatile("" : "+r"(par_off));  // kept in a register: it could be computed again
  // Query digits as B fragments: lane (n = g, qd) holds column n = (head g/2, digit g%2), channels qd*D/4 + 8i + {0..7}.
  // x*al + 1.5*2^23 holds Q = round(x*al) in its low mantissa bits; adding 128 first makes byte 1 the rounded high digit.
  uint32_t qb[NT][KS][2];
  // Slot p carries 4^p:  score (base 2) = s * 2^(-e-2p) * (dot_p - z * 4^p sum), the power folded into the unpacking of s.
  float sumq[NT][4];  // of head 4*nt + qd
  int sexp[NT][4];
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
    const int h = 4 * nt + (g >> 1);
    uint32_t v[4 * KS];
    __nv_bfloat162 am = __float2bfloat162_rn(0.f);
#pragma unroll
    for (int i = 0; i < KS; i++) {
      const uint4 x = h < s.heads ? *(const uint4*)(s.q + h * D + qd * (D / 4) + 8 * i) : make_uint4(0, 0, 0, 0);
      v[4 * i] = x.x, v[4 * i + 1] = x.y, v[4 * i + 2] = x.z, v[4 * i + 3] = x.w;
    }
#pragma unroll
    for (int k = 0; k < 4 * KS; k++) am = __hmax2(am, __habs2(reinterpret_cast<__nv_bfloat162&>(v[k])));
    float amax = fmaxf(__low2float(am), __high2float(am));
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
    // al = scale * 2^e, e as large as |Q| <= 32512 allows
    const int e = min(max((__float_as_int(32512.f / (s.scale_log2 * amax)) >> 23) - 127, -30), 60);
    const float al = s.scale_log2 * __int_as_float((e + 127) << 23), magic = MAGIC + ((g & 1) ? 0.f : 128.f);
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
    for (int p = 0; p < 4; p++) sumq[nt][p] = sq * (1 << (2 * p)), sexp[nt][p] = -(es + 2 * p) * (1 << 23);
  }
  ring.give(q_read);

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
  for (int part = from + slot; part - slot < to; part += NW) {
    ring.take();
    if (part >= to) {
      ring.give();
      continue;
    }
    const uint32_t codes = ring.at, params = ring.at + par_off;
    // scores of 32 tokens: tile 0 has slots 0 | 0+1 in rows g | g+8, tile 1 has slots 0+1+2 | 0+1+2+3
    float x[NT][NK], sv[NK], zv[NK];  // this thread's tokens 8k + g
#pragma unroll
    for (int u = 0; u < NU; u++) {
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
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        int below = 0;
#pragma unroll
        for (int p = 0; p < 4; p++) {
          const int upto = acc[nt][p >> 1][2 * (p & 1)] * 256 + acc[nt][p >> 1][2 * (p & 1) + 1];
          // bf16 scale (normal) times a power of two
          const float scale = __int_as_float(sz[p] * 65536 + sexp[nt][p]);
          x[nt][4 * u + p] = fmaf(scale, fmaf(-bf_hi(sz[p]), sumq[nt][p], (float)(upto - below)), -m[nt]);
          below = upto;
        }
      }
    }
    // p = 2^x; U = round(p*s) with the rounding error carried along: mass is kept however small single weights are.
    // v + 1.5*2^23 leaves the integer in the low mantissa bits; bytes (1, 0) are the digits.
    float pr[NT][NK], u[NT][NK];
    uint32_t pb[NT][NU][2];
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
    for (int uu = 0; uu < NU; uu++)
#pragma unroll
      for (int mg = 0; mg < MG; mg++) {
        const uint4 w = lds128(codes + KB + (uu * MG + mg) * 512);
        if (uu == NU - 1 && mg == MG - 1) ring.give();  // all of it is in registers
#pragma unroll
        for (int pos = 0; pos < 4; pos++) {
          const uint32_t mask = ((1u << (2 * pos + 2)) - 1) * 0x01010101u;  // slots 0..pos
#pragma unroll
          for (int nt = 0; nt < NT; nt++)
            mma_u8u8(oacc[nt][mg * 4 + pos], w.x & mask, w.y & mask, w.z & mask, w.w & mask, pb[nt][uu][0], pb[nt][uu][1]);
        }
      }
    left--;
  }

#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
#pragma unroll
    for (int t = 4; t < 32; t *= 2) l[nt] += __shfl_xor_sync(~0u, l[nt], t), pz[nt] += __shfl_xor_sync(~0u, pz[nt], t);
    float2& ml = s.ml[4 * nt + qd];
    const float2 w = merge ? ml : make_float2(NOTHING, 0.f);
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
        float& o = s.o[(4 * nt + qd) * OS + 16 * mt + 8 * r + g];
        const float x = fmaf(fmaf((float)v[2 * r], 256.f, (float)v[2 * r + 1]), f, -pz[nt] * fp);
        o = merge ? fmaf(o, fw, x) : x;
      }
    }
    __syncwarp();
    if (g == 0) ml = make_float2(M, fmaf(w.y, fw, l[nt] * fp));
  }
}
