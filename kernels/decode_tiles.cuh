// BF16 tiles of 8 tokens: a warp's share of attention over them.
//
// Four heads an n-tile: rows 8..15 of the keys' MMA take a token's next 4 channels, and columns 2h, 2h+1 the matching
// channels of q of head h, so that the score is c0 + c3 and no row is padding; values' MMA (k8) has p as a (high, low)
// pair of bf16 in columns 2h, 2h+1.  Eight heads an n-tile: a column a head; the low parts of p are k = 8..15.
#pragma once
#include "decode_ring.cuh"

// Tiles [from, to) of `tokens` tokens, every NWth from `from` + slot on.  Spare slots of the last tile may hold anything.
template <int D, int HT, int NT, int NW, int ST>
DEV void attend_tiles(Ring<D, NW, ST>& ring, const Share& s, int slot, int from, int to, int tokens) {
  constexpr int KS = D / 32, MT = D / 16, J = HT / 4, OS = Format<D>::OS;  // J: heads of a thread in each n-tile
  constexpr bool HALVED = Format<D>::HALVES == 2;
  const int lane = ring.lane, g = lane >> 2, qd = lane & 3;
  // B fragments: lane (n = g, qd) holds column n, channels qd*D/4 + 8i + {0..7}, or the half of them that is its column's.
  uint32_t qb[NT][KS][2 * J];
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
    const int h = HT * nt + (J == 1 ? g >> 1 : g);
#pragma unroll
    for (int i = 0; i < KS; i++) {
      const __nv_bfloat16* q = s.q + h * D + qd * (D / 4) + 8 * i;
      const uint4 x = h < s.heads ? *(const uint4*)q : make_uint4(0, 0, 0, 0);
      if constexpr (J == 1) qb[nt][i][0] = g & 1 ? x.z : x.x, qb[nt][i][1] = g & 1 ? x.w : x.y;
      else qb[nt][i][0] = x.x, qb[nt][i][1] = x.y, qb[nt][i][2] = x.z, qb[nt][i][3] = x.w;
    }
  }
  // J = 1: (channel 16mt+g, p high), (.., p low), (channel 16mt+8+g, p high), (.., p low) of head 4nt+qd
  // J = 2: channel 16mt+g of heads 8nt+2qd, +1, channel 16mt+8+g of the same
  float o[NT][MT][4];
  float m[NT][J], l[NT][J];
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
#pragma unroll
    for (int j = 0; j < J; j++) m[nt][j] = NOTHING, l[nt][j] = 0.f;
#pragma unroll
    for (int mt = 0; mt < MT; mt++) o[nt][mt][0] = o[nt][mt][1] = o[nt][mt][2] = o[nt][mt][3] = 0.f;
  }
#pragma unroll 1
  for (int tile = from + slot; tile - slot < to; tile += NW) {
    ring.take();
    if (tile >= to) {
      ring.give();
      if (HALVED) ring.take(), ring.give();
      continue;
    }
    float c[NT][4];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) c[nt][0] = c[nt][1] = c[nt][2] = c[nt][3] = 0.f;
#pragma unroll
    for (int i = 0; i < KS; i++) {
      const uint4 w = lds128(ring.at + i * 512);
#pragma unroll
      for (int nt = 0; nt < NT; nt++)
        if constexpr (J == 1) mma_bf16_k16(c[nt], w.x, w.z, w.y, w.w, qb[nt][i][0], qb[nt][i][1]);
        else {
          mma_bf16_k16(c[nt], w.x, 0, w.y, 0, qb[nt][i][0], qb[nt][i][1]);
          mma_bf16_k16(c[nt], w.z, 0, w.w, 0, qb[nt][i][2], qb[nt][i][3]);
        }
    }
    uint32_t values = ring.at + 16 * D;
    if (HALVED) ring.give(), ring.take(), values = ring.at;
    const int valid = tokens - tile * TILE_TOKENS;
    const uint32_t mask = (2 * qd < valid ? 0xffffu : 0u) | (2 * qd + 1 < valid ? 0xffff0000u : 0u);
    float x[NT][J];  // of token g
    bool high = false;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
      for (int j = 0; j < J; j++) {
        x[nt][j] = g < valid ? (J == 1 ? c[nt][0] + c[nt][3] : c[nt][j]) * s.scale_log2 : -INFINITY;
        high |= x[nt][j] > m[nt][j] + 20.f;
      }
    if (__any_sync(~0u, high)) {  // rare: a new maximum; up to 2^20 above the old one f32 has room
#pragma unroll
      for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int j = 0; j < J; j++) {
          float y = fmaxf(m[nt][j], x[nt][j]);
          y = fmaxf(y, __shfl_xor_sync(~0u, y, 4));
          y = fmaxf(y, __shfl_xor_sync(~0u, y, 8));
          y = fmaxf(y, __shfl_xor_sync(~0u, y, 16));
          const float f = ex2(m[nt][j] - y);
          m[nt][j] = y, l[nt][j] *= f;
#pragma unroll
          for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int k = 0; k < 4; k++)
              if (J == 1 || (k & 1) == j) o[nt][mt][k] *= f;
        }
    }
    uint32_t pb[NT][J];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      float hi[J], lo[J];
#pragma unroll
      for (int j = 0; j < J; j++) {
        const float p = ex2(x[nt][j] - m[nt][j]);
        hi[j] = bf_hi(__float_as_uint(p)), lo[j] = p - hi[j], l[nt][j] += p;
      }
      if constexpr (J == 1) pb[nt][0] = transpose8x8(pack_bf16(hi[0], lo[0]));
      else pb[nt][0] = transpose8x8(pack_bf16(hi[0], hi[1])), pb[nt][1] = transpose8x8(pack_bf16(lo[0], lo[1]));
    }
#pragma unroll
    for (int v = 0; v < MT / 2; v++) {
      uint4 w = lds128(values + v * 512);
      if (v == MT / 2 - 1) ring.give();
      w.x &= mask, w.y &= mask, w.z &= mask, w.w &= mask;
#pragma unroll
      for (int nt = 0; nt < NT; nt++)
        if constexpr (J == 1) {
          mma_bf16_k8(o[nt][2 * v], w.x, w.y, pb[nt][0]);
          mma_bf16_k8(o[nt][2 * v + 1], w.z, w.w, pb[nt][0]);
        } else {
          mma_bf16_k16(o[nt][2 * v], w.x, w.y, w.x, w.y, pb[nt][0], pb[nt][1]);
          mma_bf16_k16(o[nt][2 * v + 1], w.z, w.w, w.z, w.w, pb[nt][0], pb[nt][1]);
        }
    }
  }
#pragma unroll
  for (int nt = 0; nt < NT; nt++)
#pragma unroll
    for (int j = 0; j < J; j++) {
      const int h = HT * nt + J * qd + j;
#pragma unroll
      for (int t = 4; t < 32; t *= 2) l[nt][j] += __shfl_xor_sync(~0u, l[nt][j], t);
#pragma unroll
      for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int r = 0; r < 2; r++)
          s.o[h * OS + 16 * mt + 8 * r + g] = J == 1 ? o[nt][mt][2 * r] + o[nt][mt][2 * r + 1] : o[nt][mt][2 * r + j];
      if (g == 0) s.ml[h] = make_float2(m[nt][j], l[nt][j]);
    }
  __syncwarp();
}
