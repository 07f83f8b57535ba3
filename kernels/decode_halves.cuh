// INT2 parts on f16 MMA, eight query heads an n-tile: more instructions to spread the codes, fewer for each head's softmax,
// so it is for many heads.
//
// The scheme of decode_digits.cuh with other operands.  A code masked out of the low byte of a 16-bit half is an f16
// number, subnormal, of value code * 4^p * 2^-24; q times a power of two is exact in f16 (29 octaves below the largest of
// the warp's heads), and so is a score but for f32 sums; p * s is rounded to f16's 11 bits.  Bytes are spread to halves by
// two PRMT a word, and slots are mixed as there: eight instructions for sixteen codes.
// Thread (g, qd) owns heads 2qd, 2qd+1 of each n-tile.
#pragma once
#include "decode_ring.cuh"

// As attend_digits.
template <int D, int NT, int NW, int ST, int TG>
DEV void attend_halves(Ring<D, NW, ST>& ring, const Share& s, int slot, int from, int to, uint32_t q_read, bool merge) {
  constexpr int P = Format<D>::PART, MT = D / 16, MG = D / 64, NU = P / 32, NUG = TG / 32, NK = TG / 8;
  constexpr int KB = P * D / 4, OS = Format<D>::OS;
  constexpr float LIM = 60000.f, TARGET = 10.f;  // p*s in f16; a new maximum is set to 2^10
  // f32 sums of MMA are cut off, not rounded: parts whose sums stay in registers.
  constexpr int CHUNK = 128 * NW;
  const int lane = ring.lane, g = lane >> 2, qd = lane & 3;
  uint32_t par_off = 2 * KB + g * 16 - lane * 16;
  asm volatile("" : "+r"(par_off));  // kept in a register: it could be computed again

  // B fragments: lane (n = g, qd) holds head n, channels qd*D/4 + 4w + {0, 2} and {1, 3}.
  uint32_t qb[NT][MT][2];
  float sumq[NT][2], amax = 0.f;
#pragma unroll
  for (int nt = 0; nt < NT; nt++)
#pragma unroll
    for (int w = 0; w < MT; w++) {
      const __nv_bfloat16* q = s.q + (8 * nt + g) * D + qd * (D / 4) + 4 * w;
      const uint2 x = 8 * nt + g < s.heads ? *(const uint2*)q : make_uint2(0, 0);
      qb[nt][w][0] = x.x, qb[nt][w][1] = x.y;
      amax = fmaxf(amax, fmaxf(fmaxf(fabsf(bf_lo(x.x)), fabsf(bf_hi(x.x))), fmaxf(fabsf(bf_lo(x.y)), fabsf(bf_hi(x.y)))));
    }
#pragma unroll
  for (int t = 1; t < 32; t *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, t));
  const int e = min(max(141 - (__float_as_int(amax) >> 23), -100), 100);  // the largest |q| * 2^e is of [2^14, 2^15)
  const float al = __int_as_float((e + 127) << 23), gamma = s.scale_log2 * __int_as_float((24 - e + 127) << 23);
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < MT; w++) {
      const float y0 = bf_lo(qb[nt][w][0]) * al, y1 = bf_hi(qb[nt][w][0]) * al;
      const float y2 = bf_lo(qb[nt][w][1]) * al, y3 = bf_hi(qb[nt][w][1]) * al;
      sum += (y0 + y1) + (y2 + y3);
      qb[nt][w][0] = pack_f16(y0, y2), qb[nt][w][1] = pack_f16(y1, y3);
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
#pragma unroll
    for (int j = 0; j < 2; j++) sumq[nt][j] = __shfl_sync(~0u, sum, 8 * qd + 4 * j) * (1.f / (1 << 24));
  }
  ring.give(q_read);

#pragma unroll 1
  for (int chunk = from; chunk < to; chunk += CHUNK) {
    const int end = min(chunk + CHUNK, to);
    float o[NT][MT][4];  // channel 16mt+g of heads 2qd, 2qd+1; channel 16mt+8+g of the same
    float m[NT][2], l[NT][2], pz[NT][2];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
#pragma unroll
      for (int j = 0; j < 2; j++) m[nt][j] = l[nt][j] = pz[nt][j] = 0.f;
#pragma unroll
      for (int mt = 0; mt < MT; mt++) o[nt][mt][0] = o[nt][mt][1] = o[nt][mt][2] = o[nt][mt][3] = 0.f;
    }
    bool fresh = true;  // the reference m is not set yet
#pragma unroll 1
    for (int part = chunk + slot; part - slot < end; part += NW) {
      ring.take();
      if (part >= end) {
        ring.give();
        continue;
      }
#pragma unroll 1
      for (int u0 = 0; u0 < NU; u0 += NUG) {  // TG tokens at a time
        const uint32_t codes = ring.at + (NU == NUG ? 0 : u0 * (MG * 512)), params = ring.at + par_off + (NU == NUG ? 0 : u0 * 256);
        // of 32 tokens: tile 0 has slots 0 | 0+1 in rows g | g+8, tile 1 has slots 0+1+2 | 0+1+2+3
        float c[NUG][NT][2][4];
#pragma unroll
        for (int u = 0; u < NUG; u++)
#pragma unroll
          for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int k = 0; k < 8; k++) c[u][nt][k >> 2][k & 3] = 0.f;
#pragma unroll
        for (int v = 0; v < MG; v++) {
          uint4 w4[NUG];
#pragma unroll
          for (int u = 0; u < NUG; u++) w4[u] = lds128(codes + (u * MG + v) * 512);
#pragma unroll
          for (int k = 0; k < 4; k++)  // k-step of 16 channels: one word, its even bytes and its odd ones
#pragma unroll
            for (int u = 0; u < NUG; u++) {
              const uint32_t word = k == 0 ? w4[u].x : k == 1 ? w4[u].y : k == 2 ? w4[u].z : w4[u].w;
              const uint32_t even = __byte_perm(word, 0, 0x4240), odd = __byte_perm(word, 0, 0x4341);
#pragma unroll
              for (int nt = 0; nt < NT; nt++) {
                const uint32_t b0 = qb[nt][4 * v + k][0], b1 = qb[nt][4 * v + k][1];
                mma_f16_k16(c[u][nt][0], even & 0x00030003, even & 0x000f000f, odd & 0x00030003, odd & 0x000f000f, b0, b1);
                mma_f16_k16(c[u][nt][1], even & 0x003f003f, even, odd & 0x003f003f, odd, b0, b1);
              }
            }
        }
        float x[NT][NK][2], sv[NK], zv[NK];  // this thread's tokens 8k + g
#pragma unroll
        for (int t = 0; t < NK / 2; t++) {
          const uint4 w = lds128(params + t * 128);
          sv[2 * t] = bf_lo(w.z), sv[2 * t + 1] = bf_lo(w.w), zv[2 * t] = bf_hi(w.z), zv[2 * t + 1] = bf_hi(w.w);
          const uint32_t sz[2] = {w.x, w.y};
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const int p = 2 * (t & 1) + r;
            const float scale = bf_lo(sz[r]) * (gamma / (1 << (2 * p))), zero = bf_hi(sz[r]) * (1 << (2 * p));
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
              for (int j = 0; j < 2; j++) {
                const auto& rows = c[t >> 1][nt];
                const float dot = rows[p >> 1][2 * (p & 1) + j] - (p ? rows[(p - (p > 0)) >> 1][2 * ((p + 1) & 1) + j] : 0.f);
                x[nt][2 * t + r][j] = fmaf(scale, fmaf(-zero, sumq[nt][j], dot), -m[nt][j]);
              }
          }
        }
        float sum_p[NT][2], sum_z[NT][2];
        uint32_t pb[NT][NK];
        // Whether p*s passes what f16 holds: it then is infinite.
        auto weights = [&]() {
          __half2 most = __float2half2_rn(0.f);
#pragma unroll
          for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int k = 0; k < NK; k++) {
              float u[2];
#pragma unroll
              for (int j = 0; j < 2; j++) {
                const float pr = ex2(x[nt][k][j]);
                u[j] = pr * sv[k];
                sum_p[nt][j] = k ? sum_p[nt][j] + pr : pr;
                sum_z[nt][j] = k ? fmaf(u[j], zv[k], sum_z[nt][j]) : u[j] * zv[k];
              }
              pb[nt][k] = pack_f16(u[0], u[1]);
              most = __hmax2(most, reinterpret_cast<__half2&>(pb[nt][k]));
            }
          return fmaxf(__low2float(most), __high2float(most)) > LIM;
        };
        const bool high = weights();
        if (__builtin_expect(__any_sync(~0u, high) || fresh, 0)) {
          // Rare: the first part, or a new maximum of p*s: the reference moves so that it becomes 2^TARGET.
#pragma unroll
          for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
              float y = -INFINITY;
#pragma unroll
              for (int k = 0; k < NK; k++) x[nt][k][j] += m[nt][j], y = fmaxf(y, x[nt][k][j] + lg2(fmaxf(sv[k], 1e-30f)));
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
              for (int k = 0; k < NK; k++) x[nt][k][j] -= m[nt][j];
            }
          fresh = false;
          weights();
        }
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
#pragma unroll
          for (int j = 0; j < 2; j++) l[nt][j] += sum_p[nt][j], pz[nt][j] += sum_z[nt][j];
#pragma unroll
          for (int k = 0; k < NK; k++) pb[nt][k] = transpose8x8(pb[nt][k]);
        }
#pragma unroll
        for (int u = 0; u < NUG; u++)
#pragma unroll
          for (int mg = 0; mg < MG; mg++) {
            const uint4 w = lds128(codes + KB + (u * MG + mg) * 512);
            if (u == NUG - 1 && mg == MG - 1 && (NU == NUG || u0 == NU - NUG)) ring.give();  // all of it is in registers
            const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int t = 0; t < 2; t++) {  // 16 tokens: words of channels g and 8+g, even bytes of tokens 2qd, 2qd+1
              const uint32_t e0 = __byte_perm(words[2 * t], 0, 0x4240), e1 = __byte_perm(words[2 * t + 1], 0, 0x4240);
              const uint32_t o0 = __byte_perm(words[2 * t], 0, 0x4341), o1 = __byte_perm(words[2 * t + 1], 0, 0x4341);
#pragma unroll
              for (int pos = 0; pos < 4; pos++) {
                const uint32_t mask = ((1u << (2 * pos + 2)) - 1) * 0x00010001u;  // slots 0..pos
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
                  mma_f16_k16(o[nt][mg * 4 + pos], e0 & mask, e1 & mask, o0 & mask, o1 & mask, pb[nt][4 * u + 2 * t], pb[nt][4 * u + 2 * t + 1]);
              }
            }
          }
      }
    }
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
#pragma unroll
        for (int t = 4; t < 32; t *= 2) {
          l[nt][j] += __shfl_xor_sync(~0u, l[nt][j], t);
          pz[nt][j] += __shfl_xor_sync(~0u, pz[nt][j], t);
        }
        const int h = 8 * nt + 2 * qd + j;
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
