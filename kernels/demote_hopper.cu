// sm_90a
// Demotion of rows on Hopper's tensor cores, for head_dim D of 64 or 128, one group, pages arranged as Mma, and ranks up
// to 16; demote.cu is its plain twin. Keys and values in one launch.
//
//   rows [token][head][D] bf16 -> x' = x A + bias by wgmma, x from registers and A in shared memory, f32 sums
//   t = k-th largest |x'| of a row, by sorting networks on bf16 pairs, which are two rows at once: no branches
//   code = round(3 sat(x' a + b)), a = 1 / (3 scale), b = zero / 3: no clamp, no conversion
// Feedback takes blocks of 16 channels: one lane a row, in order, then the rest of the row by mma.
//
// Rows of a wgmma are tokens. Nearest: a warp takes 32 tokens in two passes of 16 (16 warps, at most 128 registers);
// feedback: 32 at once, since a lane owns a row (8 warps). A block keeps one head's matrix in shared memory as 8 x 8 core
// matrices; tokens come by cp.async, the next pass's during this one's work. Codes are packed where they are made:
//   keys, nearest: column (n-tile n, c = 2q + b) of A is channel q D/4 + 2n + b, so that a thread's sums are the
//                  channels of its own words of the page. Else column 8n + c is channel 8n + c.
//   values, nearest: a thread's codes of one token and one channel mod 8 form a word; movmatrix turns tokens into channels.
#include "warp.cuh"

struct Args {
  const bf16 *k, *v;
  const uint4* matrix;       // [2][kv_heads][D/8 k][D/8 n][8 n][8 k] bf16, columns as above
  const float* bias;         // [2][kv_heads][D columns]
  const uint2* pushes;       // [2][kv_heads][D/16 blocks][D/8 n][32 lanes]: -F as bf16 fragments
  const float* pushes_near;  // [2][kv_heads][D/16 blocks][16][16]: the diagonal blocks of F
  const int* ranks;          // [2][kv_heads]
  const int* pages;          // [tokens / 64]
  uint8_t* pool;             // [pages][kv_heads][32 D + 512]
  int k_stride, v_stride, tokens, kv_heads, first_unit, units;  // units: sides x heads of this launch
};

// ---------------------------------------------------------------------------------------------------- k-th largest
template <int N> struct Network {  // Batcher's odd-even merge sort
  int a[N * 8], b[N * 8], n;
  constexpr Network() : a(), b(), n(0) {
    for (int p = 1; p < N; p *= 2)
      for (int k = p; k >= 1; k /= 2)
        for (int j = k % p; j <= N - 1 - k; j += 2 * k)
          for (int i = 0; i < (k < N - j - k ? k : N - j - k); i++)
            if ((i + j) / (2 * p) == (i + j + k) / (2 * p)) a[n] = i + j, b[n] = i + j + k, n++;
  }
};
DEV bf16x2 pair_of(uint32_t x) { return reinterpret_cast<bf16x2&>(x); }
DEV void order(bf16x2& a, bf16x2& b) {
  const bf16x2 larger = __hmax2(a, b);
  b = __hmin2(a, b), a = larger;
}
template <int N> DEV void sort_descending(bf16x2* a) {
  constexpr Network<N> network;
#pragma unroll
  for (int i = 0; i < network.n; i++) order(a[network.a[i]], a[network.b[i]]);
}
// a, b descending -> the N largest of both, descending, in a.
template <int N> DEV void merge_descending(bf16x2* a, const bf16x2* b) {
#pragma unroll
  for (int i = 0; i < N; i++) a[i] = __hmax2(a[i], b[N - 1 - i]);
#pragma unroll
  for (int s = N / 2; s >= 1; s /= 2)
#pragma unroll
    for (int i = 0; i < N; i++)
      if ((i & s) == 0) order(a[i], a[i + s]);
}
// The K-th largest of both: a[i] and b[K - 1 - i] are K of them or more at least as large as the larger of the two.
template <int K> DEV bf16x2 kth_of(const bf16x2* a, const bf16x2* b) {
  bf16x2 t = __hmax2(a[0], b[K - 1]);
#pragma unroll
  for (int i = 1; i < K; i++) t = __hmin2(t, __hmax2(a[i], b[K - 1 - i]));
  return t;
}
template <int KMAX> DEV bf16x2 kth_of(const bf16x2* a, const bf16x2* b, int k) {
  switch (k) {
    case 1: return kth_of<1>(a, b);
    case 2: return kth_of<2>(a, b);
    case 3: return kth_of<3>(a, b);
    case 4: return kth_of<4>(a, b);
    case 5: return kth_of<5>(a, b);
    case 6: return kth_of<6>(a, b);
    case 7: return kth_of<7>(a, b);
    case 8: return kth_of<8>(a, b);
  }
  if constexpr (KMAX > 8) switch (k) {
    case 9: return kth_of<9>(a, b);
    case 10: return kth_of<10>(a, b);
    case 11: return kth_of<11>(a, b);
    case 12: return kth_of<12>(a, b);
    case 13: return kth_of<13>(a, b);
    case 14: return kth_of<14>(a, b);
    case 15: return kth_of<15>(a, b);
  }
  return kth_of<KMAX>(a, b);
}

// v: this thread's N numbers of rows g (low halves) and g + 8 (high); the other three of its quad have the others.
// k <= KMAX. Destroys v.
template <int KMAX, int N>
DEV void row_statistics(bf16x2 (&v)[N], int k, bf16x2& t, bf16x2& least, bf16x2& largest) {
  least = largest = v[0];
#pragma unroll
  for (int i = 1; i < N; i++) least = __hmin2(least, v[i]), largest = __hmax2(largest, v[i]);
#pragma unroll
  for (int s = 1; s < 4; s *= 2) {
    least = __hmin2(least, pair_of(__shfl_xor_sync(~0u, bits(least), s)));
    largest = __hmax2(largest, pair_of(__shfl_xor_sync(~0u, bits(largest), s)));
  }
#pragma unroll
  for (int i = 0; i < N; i++) v[i] = __habs2(v[i]);
#pragma unroll
  for (int i = 0; i < N; i += KMAX) sort_descending<KMAX>(v + i);
#pragma unroll
  for (int w = N / KMAX / 2; w >= 1; w /= 2)
#pragma unroll
    for (int i = 0; i < w; i++) merge_descending<KMAX>(v + i * KMAX, v + (i + w) * KMAX);
  bf16x2 other[KMAX];
#pragma unroll
  for (int i = 0; i < KMAX; i++) other[i] = pair_of(__shfl_xor_sync(~0u, bits(v[i]), 1));
  merge_descending<KMAX>(v, other);
#pragma unroll
  for (int i = 0; i < KMAX; i++) other[i] = pair_of(__shfl_xor_sync(~0u, bits(v[i]), 2));
  t = kth_of<KMAX>(v, other, k);
}

// Scale and zero, low and high half; and what rounding needs: code = 3 sat(x a + b), rounded.
DEV uint32_t fit_range(float t, float least, float largest, float& a, float& b) {
  least = fmaxf(least, -t), largest = fminf(largest, t);
  const bf16 scale = __float2bfloat16_rn(fmaxf((largest - least) * (1.f / 3.f), 1e-8f));
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__bfloat162float(scale)));
  const bf16 zero = __float2bfloat16_rn(-least * inverse);
  a = inverse * (1.f / 3.f), b = __bfloat162float(zero) * (1.f / 3.f);
  return (uint32_t)__bfloat16_as_ushort(scale) | (uint32_t)__bfloat16_as_ushort(zero) << 16;
}
constexpr float MAGIC = 12582912.f;  // 1.5 * 2^23: what is added to it stands rounded in the low bits
constexpr uint32_t MAGIC_BITS = 0x4B400000u;
DEV uint32_t code_bits(float x, float a, float b) { return __float_as_uint(fmaf(__saturatef(fmaf(x, a, b)), 3.f, MAGIC)); }

// ------------------------------------------------------------------------------------------------------------ x A
#define SUMS4(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define SUMS32(c, n) SUMS4(c, n), SUMS4(c, n + 1), SUMS4(c, n + 2), SUMS4(c, n + 3), SUMS4(c, n + 4), SUMS4(c, n + 5), SUMS4(c, n + 6), SUMS4(c, n + 7)
DEV void wgmma(float (&c)[16][4], const uint32_t (&x)[4], uint64_t matrix) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
      "{%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
      : SUMS32(c, 0), SUMS32(c, 8) : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(matrix));
}
DEV void wgmma(float (&c)[8][4], const uint32_t (&x)[4], uint64_t matrix) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "{%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
      : SUMS32(c, 0) : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(matrix));
}

template <int D> struct Sizes {
  static constexpr int TILES = D / 8, STEPS = D / 16, ROW = 2 * D + 16, CODE_ROW = D / 4 + 4;
  static constexpr int MATRIX = 2 * D * D, BIAS = 4 * D, PAGE = 32 * D + 512;
  static constexpr int NEAR = STEPS * 1024, PUSHES = STEPS * TILES * 256;
};

// c += x A for 16 tokens a warp, 64 a warpgroup: x at the warp's rows, the matrix unswizzled.
template <int D> DEV void encode(float (&c)[D / 8][4], const uint8_t* x, uint32_t matrix, int lane) {
  using S = Sizes<D>;
  uint32_t a[S::STEPS][4];
#pragma unroll
  for (int k = 0; k < S::STEPS; k++) load_tiles(a[k], x + (lane & 15) * S::ROW + (lane >> 4) * 16 + k * 32);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  // From one n/8 to the next 128 bytes, from one k/8 to the next 16 D.
  const uint64_t descriptor = (uint64_t)(128 >> 4) << 32 | (uint64_t)(16 * D >> 4) << 16 | matrix >> 4;
#pragma unroll
  for (int k = 0; k < S::STEPS; k++) wgmma(c, a[k], descriptor + k * (32 * D >> 4));
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

DEV void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
DEV void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEV void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// What a block and its warps work on: tiles of 32 tokens of one head and side.
template <int D, int WARPS> struct Work {
  using S = Sizes<D>;
  const Args& a;
  int side, head, tid, warp, lane, tile, tiles, step, lead, stride;
  const bf16* x;

  DEV Work(const Args& a) : a(a) {
    const int unit = a.first_unit + blockIdx.x % a.units;
    side = unit / a.kv_heads, head = unit % a.kv_heads;
    tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    tile = blockIdx.x / a.units * WARPS + warp, tiles = a.tokens / 32, step = gridDim.x / a.units * WARPS;
    lead = warp % 4;
    x = (side ? a.v : a.k) + head * D, stride = side ? a.v_stride : a.k_stride;
  }
  // The four warps of a group go on together, as long as the first of them has work.
  DEV bool more() const { return tile - lead < tiles; }
  template <int TOKENS> DEV void fetch(int first, uint8_t* to) const {
    constexpr int AT_ONCE = 256 / D;  // rows
    const int row = lane / (D / 8), at = lane % (D / 8);
    const bf16* from = x + (size_t)(first + row) * stride + at * 8;
    to += row * S::ROW + at * 16;
#pragma unroll
    for (int i = 0; i < TOKENS / AT_ONCE; i++, from += AT_ONCE * stride) copy16(to + i * AT_ONCE * S::ROW, from);
    end_copies();
  }
  DEV void copy(void* to, const void* from, int bytes) const {
    for (int i = tid * 16; i < bytes; i += WARPS * 512) copy16((uint8_t*)to + i, (const uint8_t*)from + i);
  }
  DEV uint8_t* page(int number) const { return a.pool + ((size_t)number * a.kv_heads + head) * S::PAGE; }
};

template <int D, int KMAX> DEV void nearest(const Args& a) {
  using S = Sizes<D>;
  constexpr int WARPS = 16, TILE = 16 * S::ROW;
  extern __shared__ __align__(128) uint8_t memory[];
  Work<D, WARPS> work(a);
  const int unit = work.side * a.kv_heads + work.head, lane = work.lane, g = lane / 4, q = lane % 4, k = a.ranks[unit];
  float* bias = (float*)(memory + S::MATRIX);
  uint8_t* rows = memory + S::MATRIX + S::BIAS + work.warp * 2 * TILE;
  work.copy(memory, a.matrix + (size_t)unit * (S::MATRIX / 16), S::MATRIX);
  work.copy(bias, a.bias + unit * D, S::BIAS);
  work.template fetch<16>(min(work.tile, work.tiles - 1) * 32, rows);
  wait_for_copies<0>();
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();

  uint32_t w[D / 16];
#pragma unroll 1
  for (; work.more(); work.tile += work.step) {
    const bool in = work.tile < work.tiles;
    const int half = work.tile % 2, number = a.pages[in ? work.tile / 2 : 0];
#pragma unroll
    for (int second = 0; second < 2; second++) {
      float c[S::TILES][4];
#pragma unroll
      for (int n = 0; n < S::TILES; n++) {
        const float2 b = *(const float2*)(bias + 8 * n + 2 * q);
        c[n][0] = c[n][2] = b.x, c[n][1] = c[n][3] = b.y;
      }
      const int next = work.tile + (second ? work.step : 0);
      if (next < work.tiles) {
        work.template fetch<16>(next * 32 + (1 - second) * 16, rows + (1 - second) * TILE);
        wait_for_copies<1>();
      } else {
        wait_for_copies<0>();
      }
      __syncwarp();
      encode<D>(c, rows + second * TILE, shared_address(memory), lane);
      __syncwarp();

      bf16x2 v[2 * S::TILES], t, least, largest;
#pragma unroll
      for (int n = 0; n < S::TILES; n++)
        v[2 * n] = __floats2bfloat162_rn(c[n][0], c[n][2]), v[2 * n + 1] = __floats2bfloat162_rn(c[n][1], c[n][3]);
      row_statistics<KMAX>(v, k, t, least, largest);
      uint8_t* page = work.page(number);
      float sa[2], sb[2];  // of rows g, g + 8
      const uint32_t low = fit_range(__low2float(t), __low2float(least), __low2float(largest), sa[0], sb[0]);
      const uint32_t high = fit_range(__high2float(t), __high2float(least), __high2float(largest), sa[1], sb[1]);
      if (q == 0 && in)
        *(uint2*)(page + 32 * D + (2 * half + second) * 128 + g * 16 + work.side * 8) = make_uint2(low, high);

      if (work.side == 0) {  // slots 2 second and 2 second + 1 of every byte
#pragma unroll
        for (int i = 0; i < D / 16; i++) {  // word i: channels q D/4 + 4i + j, that is n-tile 2i + j/2, column j%2
          uint32_t byte[4];
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const int n = 2 * i + j / 2, b = j % 2;
            byte[j] = code_bits(c[n][b], sa[0], sb[0]) + code_bits(c[n][2 + b], sa[1], sb[1]) * 4;
          }
          const uint32_t x = byte[0] + byte[1] * 256 + byte[2] * 65536 + byte[3] * 16777216 - MAGIC_BITS * 5 * 0x01010101u;
          w[i] = second ? w[i] + x * 16 : x;
        }
        if (second && in)
#pragma unroll
          for (int i = 0; i < D / 64; i++)
            *(uint4*)(page + (half * (D / 64) + i) * 512 + lane * 16) = make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]);
      } else {  // words 2 second and 2 second + 1 of every four
        uint32_t turned[2][D / 64];  // rows g, g + 8: bytes (token 2q: c = g, g + 8; token 2q + 1: c = g, g + 8) of channel c mod 16
#pragma unroll
        for (int r = 0; r < 2; r++) {
          uint32_t word[2];  // column 2q + b: n = 8m + 2p + h at bits 8 (2m + h) + 2p
#pragma unroll
          for (int b = 0; b < 2; b++) {
            uint32_t byte[D / 32];
#pragma unroll
            for (int i = 0; i < D / 32; i++) {
              const int n = 8 * (i / 2) + i % 2;
              byte[i] = code_bits(c[n][2 * r + b], sa[r], sb[r]) + code_bits(c[n + 2][2 * r + b], sa[r], sb[r]) * 4 +
                        code_bits(c[n + 4][2 * r + b], sa[r], sb[r]) * 16 + code_bits(c[n + 6][2 * r + b], sa[r], sb[r]) * 64;
            }
            if constexpr (D == 128)
              word[b] = byte[0] + byte[1] * 256 + byte[2] * 65536 + byte[3] * 16777216 - MAGIC_BITS * 85 * 0x01010101u;
            else
              word[b] = byte[0] + byte[1] * 256 - MAGIC_BITS * 85 * 0x0101u;
          }
#pragma unroll
          for (int m = 0; m < D / 64; m++)
            asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned[r][m]) : "r"(__byte_perm(word[0], word[1], m ? 0x7632 : 0x5410)));
        }
#pragma unroll
        for (int m = 0; m < D / 64; m++)
#pragma unroll
          for (int h = 0; h < 2; h++) {  // bytes: rows g and g + 8 of token 2q, then of token 2q + 1
            const uint32_t x = __byte_perm(turned[0][m], turned[1][m], h ? 0x7351 : 0x6240);
            if (second) w[4 * m + 2 + h] = x;
            else w[4 * m + h] = x;
          }
        if (second && in)
#pragma unroll
          for (int m = 0; m < D / 64; m++)
            *(uint4*)(page + 16 * D + (half * (D / 64) + m) * 512 + lane * 16) = make_uint4(w[4 * m], w[4 * m + 1], w[4 * m + 2], w[4 * m + 3]);
      }
    }
  }
}

constexpr int ERROR_ROW = 48, MOVED_ROW = 20;  // bytes, floats: padded against bank conflicts
template <int D> struct Scratch {              // a warp's
  float moved[32 * MOVED_ROW];                 // 16 channels after what earlier errors did to them
  uint32_t codes[32 * Sizes<D>::CODE_ROW];
  uint8_t errors[32 * ERROR_ROW];
  float2 rounding[32], range[32];
};

template <int D, int KMAX> DEV void feedback(const Args& a) {
  using S = Sizes<D>;
  constexpr int WARPS = 8, TILE = 32 * S::ROW;
  extern __shared__ __align__(128) uint8_t memory[];
  Work<D, WARPS> work(a);
  const int unit = work.side * a.kv_heads + work.head, lane = work.lane, g = lane / 4, q = lane % 4, k = a.ranks[unit];
  float* bias = (float*)(memory + S::MATRIX);
  uint8_t* rows = memory + S::MATRIX + S::BIAS + work.warp * TILE;
  float* near = (float*)(memory + S::MATRIX + S::BIAS + WARPS * TILE);
  const uint2* pushes = (const uint2*)((uint8_t*)near + S::NEAR);
  Scratch<D>& s = ((Scratch<D>*)((uint8_t*)pushes + S::PUSHES))[work.warp];
  work.copy(memory, a.matrix + (size_t)unit * (S::MATRIX / 16), S::MATRIX);
  work.copy(bias, a.bias + unit * D, S::BIAS);
  work.copy(near, a.pushes_near + (size_t)unit * (S::NEAR / 4), S::NEAR);
  work.copy((void*)pushes, a.pushes + (size_t)unit * (S::PUSHES / 8), S::PUSHES);
  work.template fetch<32>(min(work.tile, work.tiles - 1) * 32, rows);
  wait_for_copies<0>();
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();

#pragma unroll 1
  for (; work.more(); work.tile += work.step) {
    wait_for_copies<0>();
    __syncwarp();
    const bool in = work.tile < work.tiles;
    const int half = work.tile % 2;
    uint8_t* page = work.page(a.pages[in ? work.tile / 2 : 0]);

    float c[2][S::TILES][4];
#pragma unroll
    for (int n = 0; n < S::TILES; n++) {
      const float2 b = *(const float2*)(bias + 8 * n + 2 * q);
#pragma unroll
      for (int m = 0; m < 2; m++) c[m][n][0] = c[m][n][2] = b.x, c[m][n][1] = c[m][n][3] = b.y;
    }
#pragma unroll
    for (int m = 0; m < 2; m++) encode<D>(c[m], rows + m * 16 * S::ROW, shared_address(memory), lane);
    __syncwarp();
    if (work.tile + work.step < work.tiles) work.template fetch<32>((work.tile + work.step) * 32, rows);

#pragma unroll
    for (int m = 0; m < 2; m++) {
      bf16x2 v[2 * S::TILES], t, least, largest;
#pragma unroll
      for (int n = 0; n < S::TILES; n++)
        v[2 * n] = __floats2bfloat162_rn(c[m][n][0], c[m][n][2]), v[2 * n + 1] = __floats2bfloat162_rn(c[m][n][1], c[m][n][3]);
      row_statistics<KMAX>(v, k, t, least, largest);
      float ra[2], rb[2];
      uint32_t range[2];
      range[0] = fit_range(__low2float(t), __low2float(least), __low2float(largest), ra[0], rb[0]);
      range[1] = fit_range(__high2float(t), __high2float(least), __high2float(largest), ra[1], rb[1]);
      if (q == 0) {
        if (in) *(uint2*)(page + 32 * D + (2 * half + m) * 128 + g * 16 + work.side * 8) = make_uint2(range[0], range[1]);
#pragma unroll
        for (int r = 0; r < 2; r++) {
          s.rounding[16 * m + 8 * r + g] = make_float2(ra[r], rb[r]);
          s.range[16 * m + 8 * r + g] = make_float2(low_of(range[r]), -high_of(range[r]) * low_of(range[r]));
        }
      }
    }

    uint32_t packed[4];
#pragma unroll
    for (int block = 0; block < S::STEPS; block++) {  // 16 channels: to one lane a row, in order, back as errors
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
          float* to = s.moved + (16 * m + g) * MOVED_ROW + 8 * n + 2 * q;
          *(float2*)to = make_float2(c[m][2 * block + n][0], c[m][2 * block + n][1]);
          *(float2*)(to + 8 * MOVED_ROW) = make_float2(c[m][2 * block + n][2], c[m][2 * block + n][3]);
        }
      __syncwarp();
      const float2 rounding = s.rounding[lane], range = s.range[lane];
      float y[16], e[16];
#pragma unroll
      for (int i = 0; i < 4; i++) *(float4*)(y + 4 * i) = *(const float4*)(s.moved + lane * MOVED_ROW + 4 * i);
      uint32_t codes[4];
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const uint32_t code = code_bits(y[i], rounding.x, rounding.y);
        e[i] = y[i] - fmaf(__uint_as_float(code) - MAGIC, range.x, range.y);
        codes[i / 4] = i % 4 ? codes[i / 4] + ((code & 3) << 8 * (i % 4)) : code & 3;
        const float* f = near + (block * 16 + i) * 16;
#pragma unroll
        for (int j = (i + 1) / 4; j < 4; j++) {
          const float4 four = *(const float4*)(f + 4 * j);
          const float fs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int l = 0; l < 4; l++)
            if (4 * j + l > i) y[4 * j + l] = fmaf(-e[i], fs[l], y[4 * j + l]);
        }
      }
      if (work.side == 0) {
        *(uint4*)(s.codes + lane * S::CODE_ROW + 4 * block) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
      } else {  // bytes of a token's channels 64m + c, + 16, + 32, + 48
#pragma unroll
        for (int i = 0; i < 4; i++) packed[i] = block % 4 ? packed[i] + (codes[i] << 2 * (block % 4)) : codes[i];
        if (block % 4 == 3)
          *(uint4*)(s.codes + lane * S::CODE_ROW + block / 4 * 4) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
      }
      if (block + 1 < S::STEPS) {
        uint32_t ep[8];
#pragma unroll
        for (int i = 0; i < 8; i++) ep[i] = pack(e[2 * i], e[2 * i + 1]);
        *(uint4*)(s.errors + lane * ERROR_ROW) = make_uint4(ep[0], ep[1], ep[2], ep[3]);
        *(uint4*)(s.errors + lane * ERROR_ROW + 16) = make_uint4(ep[4], ep[5], ep[6], ep[7]);
        __syncwarp();
        uint32_t ea[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++) load_tiles(ea[m], s.errors + (16 * m + (lane & 15)) * ERROR_ROW + (lane >> 4) * 16);
#pragma unroll
        for (int n = 2 * block + 2; n < S::TILES; n++) {
          const uint2 f = pushes[(block * S::TILES + n) * 32 + lane];
#pragma unroll
          for (int m = 0; m < 2; m++) mma(c[m][n], ea[m][0], ea[m][1], ea[m][2], ea[m][3], f.x, f.y);
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < D / 64; i++) {
      uint32_t w[4] = {0, 0, 0, 0};
      if (work.side == 0) {
#pragma unroll
        for (int p = 0; p < 4; p++) {
          const uint4 x = *(const uint4*)(s.codes + (8 * p + g) * S::CODE_ROW + q * (D / 16) + 4 * i);
          w[0] += x.x << 2 * p, w[1] += x.y << 2 * p, w[2] += x.z << 2 * p, w[3] += x.w << 2 * p;
        }
      } else {
#pragma unroll
        for (int j = 0; j < 16; j++) {
          const int token = j / 8 * 16 + j % 2 * 8 + 2 * q + j % 4 / 2;
          const uint32_t x = ((const uint8_t*)(s.codes + token * S::CODE_ROW + 4 * i))[j / 4 % 2 * 8 + g];
          w[j / 4] |= x << 8 * (j % 4);
        }
      }
      if (in) *(uint4*)(page + work.side * 16 * D + (half * (D / 64) + i) * 512 + lane * 16) = make_uint4(w[0], w[1], w[2], w[3]);
    }
    __syncwarp();
  }
}

// Grid (a multiple of the launch's units). The last number is the largest rank.
#define KERNELS(D, KMAX)                                                                                                        \
  extern "C" __global__ void __launch_bounds__(512, 1) nearest_##D##_##KMAX(const __grid_constant__ Args a) { nearest<D, KMAX>(a); } \
  extern "C" __global__ void __launch_bounds__(256, 1) feedback_##D##_##KMAX(const __grid_constant__ Args a) { feedback<D, KMAX>(a); }
KERNELS(64, 8)
KERNELS(64, 16)
KERNELS(128, 8)
KERNELS(128, 16)
