// Demotion to INT2 pages, plain: any head_dim, group and arrangement; from BF16 pages, or from rows that are encoded here.
//
// As in src/quant/codec.rs: t = k-th largest |x'| of a row; low, high = extremes of a group clamped to [-t, t];
// scale = (high - low) / 3, zero = -low / scale, both bf16; code = clamp(floor(x' / scale + zero + 1/2), 0, 3).
// With feedback F, channels are rounded in order, and an error e_i moves every later channel j by -e_i F_ij.
//
// A warp takes 32 tokens of one head and side, a lane one of them where channels have an order. x' lies in shared
// memory as bf16. Feedback takes 16 channels at a time: what all earlier errors do to them by mma (errors and F as
// bf16), then one after the other in f32; the errors take the place of the x' they came from.
#include "page.cuh"
#include "warp.cuh"

constexpr int TOKENS = 32;      // a warp's
constexpr int MOVED_ROW = 20;   // floats of a row of 16, padded against bank conflicts

// A warp's shared memory. The host knows the sizes: src/kv/cuda/demote.rs.
struct Scratch {
  bf16* x;           // [32][x_row]: x', then minus the errors
  float* moved;      // [32][MOVED_ROW]: 16 channels after what earlier errors did to them
  uint8_t* codes;    // [32][code_row]
  uint32_t* ranges;  // [32][range_row]: scale, zero << 16
  int x_row, code_row, range_row;

  // Rows of 16-byte units, an odd number of them, so that 8 lanes reading 8 rows meet no bank conflict.
  DEV Scratch(uint8_t* memory, int warp, PageLayout l) {
    x_row = ((l.d + 8) / 8 | 1) * 8;
    code_row = ((l.d + 15) / 16 | 1) * 16;
    range_row = l.d / l.group | 1;
    memory += warp * TOKENS * (2 * x_row + 4 * MOVED_ROW + code_row + 4 * range_row);
    x = (bf16*)memory;
    moved = (float*)(x + TOKENS * x_row);
    codes = (uint8_t*)(moved + TOKENS * MOVED_ROW);
    ranges = (uint32_t*)(codes + TOKENS * code_row);
  }
};

DEV float clipped(float x, float t) { return fmaxf(fminf(x, t), -t); }

// The k-th largest magnitude of a row, bit by bit from the highest: magnitudes are ordered as their bits are.
DEV float threshold(const bf16* row, int d, int k) {
  uint32_t t = 0;
#pragma unroll 1
  for (uint32_t bit = 0x4000; bit; bit >>= 1) {
    const uint32_t candidate = t | bit, both = candidate * 0x10001u;
    const bf16x2 bound = reinterpret_cast<const bf16x2&>(both);
    bf16x2 count = __float2bfloat162_rn(0.f);  // a half counts 128 at most, and bf16 is exact up to 256
    for (int i = 0; i < d; i += 8) {
      const uint4 eight = *(const uint4*)(row + i);
      const uint32_t w[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int j = 0; j < 4; j++) count = __hadd2(count, __hge2(__habs2(reinterpret_cast<const bf16x2&>(w[j])), bound));
    }
    if (__low2float(count) + __high2float(count) >= k) t = candidate;
  }
  return __uint_as_float(t << 16);
}

DEV void fit_ranges(const bf16* row, uint32_t* ranges, int d, int group, float t) {
  float low = INFINITY, high = -INFINITY;
  int left = group;
  for (int i = 0; i < d; i += 8) {
    const uint4 eight = *(const uint4*)(row + i);
    const uint32_t w[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float x = j % 2 ? high_of(w[j / 2]) : low_of(w[j / 2]);
      low = fminf(low, x), high = fmaxf(high, x);
      if (--left) continue;
      low = clipped(low, t), high = clipped(high, t);
      const bf16 scale = __float2bfloat16_rn(fmaxf(__fdiv_rn(high - low, 3.f), 1e-8f));
      const bf16 zero = __float2bfloat16_rn(__fdiv_rn(-low, __bfloat162float(scale)));
      *ranges++ = __bfloat16_as_ushort(scale) | (uint32_t)__bfloat16_as_ushort(zero) << 16;
      low = INFINITY, high = -INFINITY, left = group;
    }
  }
}

DEV float code_of(float x_over_scale, float zero) {
  return floorf(fminf(fmaxf(__fadd_rn(__fadd_rn(x_over_scale, zero), 0.5f), 0.f), 3.f));
}

// Ranges of a row's channels in order.
struct Ranges {
  const uint32_t* next;
  int group, left;
  float scale, zero, inverse;

  DEV Ranges(const uint32_t* first, int group) : next(first), group(group), left(0) {}
  DEV void step() {
    if (left == 0) scale = low_of(*next), zero = high_of(*next), inverse = __fdiv_rn(1.f, scale), next++, left = group;
    left--;
  }
};

DEV void round_nearest(const Scratch& s, int lane, int d, int group, float t) {
  Ranges range(s.ranges + lane * s.range_row, group);
  for (int i = 0; i < d; i += 8) {
    const uint4 eight = *(const uint4*)(s.x + lane * s.x_row + i);
    const uint32_t w[4] = {eight.x, eight.y, eight.z, eight.w};
    uint32_t codes[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; j++) {
      range.step();
      const float x = clipped(j % 2 ? high_of(w[j / 2]) : low_of(w[j / 2]), t);
      codes[j / 4] |= (uint32_t)code_of(__fdiv_rn(x, range.scale), range.zero) << 8 * (j % 4);
    }
    *(uint2*)(s.codes + lane * s.code_row + i) = make_uint2(codes[0], codes[1]);
  }
}

// feedback: [d j][d i], F_ij.
DEV void round_with_feedback(const Scratch& s, int lane, int d, int group, const bf16* feedback) {
  const int g = lane / 4, q = lane % 4;
  Ranges range(s.ranges + lane * s.range_row, group);
#pragma unroll 1
  for (int block = 0; block < d; block += 16) {
    const bool whole = block + 8 < d;  // else it has 8 channels
    float c[2][2][4];                  // 32 rows x 16 channels
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const bf16* x = s.x + (16 * m + g) * s.x_row + block + 8 * n + 2 * q;
        const uint32_t low = *(const uint32_t*)x, high = *(const uint32_t*)(x + 8 * s.x_row);
        c[m][n][0] = low_of(low), c[m][n][1] = high_of(low), c[m][n][2] = low_of(high), c[m][n][3] = high_of(high);
      }
#pragma unroll 2
    for (int before = 0; before < block; before += 16) {
      uint32_t e[2][4];
#pragma unroll
      for (int m = 0; m < 2; m++) load_tiles(e[m], s.x + (16 * m + lane % 16) * s.x_row + before + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < 2; n++) {
        if (n && !whole) continue;
        const bf16* f = feedback + (size_t)(block + 8 * n + g) * d + before + 2 * q;
        const uint32_t b0 = __ldg((const uint32_t*)f), b1 = __ldg((const uint32_t*)(f + 8));
#pragma unroll
        for (int m = 0; m < 2; m++) mma(c[m][n], e[m][0], e[m][1], e[m][2], e[m][3], b0, b1);
      }
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float* row = s.moved + (16 * m + g) * MOVED_ROW + 8 * n + 2 * q;
        *(float2*)row = make_float2(c[m][n][0], c[m][n][1]);
        *(float2*)(row + 8 * MOVED_ROW) = make_float2(c[m][n][2], c[m][n][3]);
      }
    __syncwarp();
    float y[16], minus_error[16];
    uint32_t codes[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 4; i++) *(float4*)(y + 4 * i) = *(const float4*)(s.moved + lane * MOVED_ROW + 4 * i);
#pragma unroll
    for (int j = 0; j < 16; j++) {
      minus_error[j] = 0.f;
      if (j >= 8 && !whole) continue;
      const bf16* row = feedback + (size_t)(block + j) * d + block;
      const uint4 lower = load16(row), upper = j > 8 ? load16(row + 8) : make_uint4(0, 0, 0, 0);
      const uint32_t f[8] = {lower.x, lower.y, lower.z, lower.w, upper.x, upper.y, upper.z, upper.w};
#pragma unroll
      for (int i = 0; i < j; i++) y[j] = fmaf(minus_error[i], i % 2 ? high_of(f[i / 2]) : low_of(f[i / 2]), y[j]);
      range.step();
      const float code = code_of(y[j] * range.inverse, range.zero);
      minus_error[j] = (code - range.zero) * range.scale - y[j];
      codes[j / 4] |= (uint32_t)code << 8 * (j % 4);
    }
    *(uint4*)(s.codes + lane * s.code_row + block) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    uint32_t e[8];
#pragma unroll
    for (int i = 0; i < 8; i++) e[i] = pack(minus_error[2 * i], minus_error[2 * i + 1]);
    bf16* errors = s.x + lane * s.x_row + block;
    *(uint4*)errors = make_uint4(e[0], e[1], e[2], e[3]);
    *(uint4*)(errors + 8) = make_uint4(e[4], e[5], e[6], e[7]);
    __syncwarp();
  }
}

// Four codes, one a byte, as one byte.
DEV uint32_t squeezed(uint32_t x) { return (x | x >> 6 | x >> 12 | x >> 18) & 0xff; }

// Codes, scales and zeros of tokens first .. first + 31 to their places.
DEV void store(const Scratch& s, int lane, PageLayout l, int side, int first, uint8_t* page) {
  const int g = lane / 4, q = lane % 4, d = l.d;
  for (int i = 0; i < d / l.group; i++)
    *(uint32_t*)(page + l.scale(side, first + lane, i)) = s.ranges[lane * s.range_row + i];
  if (!l.mma) {
    const int units = d / 8;
    for (int i = lane; i < TOKENS * units; i += 32) {
      const int token = i / units, at = i % units;
      const uint2 eight = *(const uint2*)(s.codes + token * s.code_row + 8 * at);
      uint8_t* row = page + (first + token + side * PAGE_TOKENS) * (d / 4);
      *(uint16_t*)(row + 2 * at) = (uint16_t)(squeezed(eight.x) | squeezed(eight.y) << 8);
    }
    return;
  }
  // 512 bytes at a time, 16 a lane; a token group of 32 takes d / 64 of them.
  uint8_t* to = page + l.part_start(first) + side * l.part_tokens() * (d / 4) +
                first % l.part_tokens() / 32 * (d / 64) * 512 + lane * 16;
  for (int at = 0; at < d / 64; at++, to += 512) {
    uint32_t w[4] = {0, 0, 0, 0};
    if (side == 0) {
#pragma unroll
      for (int p = 0; p < 4; p++) {
        const uint4 x = *(const uint4*)(s.codes + (8 * p + g) * s.code_row + q * (d / 4) + 16 * at);
        w[0] |= x.x << 2 * p, w[1] |= x.y << 2 * p, w[2] |= x.z << 2 * p, w[3] |= x.w << 2 * p;
      }
    } else {
#pragma unroll
      for (int word = 0; word < 4; word++)
#pragma unroll
        for (int byte = 0; byte < 4; byte++)
#pragma unroll
          for (int p = 0; p < 4; p++) {
            const int token = word / 2 * 16 + byte % 2 * 8 + 2 * q + byte / 2;
            const int channel = 64 * at + 16 * p + word % 2 * 8 + g;
            w[word] |= (uint32_t)s.codes[token * s.code_row + channel] << (8 * byte + 2 * p);
          }
    }
    *(uint4*)to = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

// x' of s.x, of which the zeros behind it are written here, to the page.
DEV void quantize(const Scratch& s, int lane, PageLayout l, int side, int first, int k, const bf16* feedback, uint8_t* page) {
  *(uint4*)(s.x + lane * s.x_row + l.d) = make_uint4(0, 0, 0, 0);
  __syncwarp();
  const bf16* row = s.x + lane * s.x_row;
  const float t = k > 1 ? threshold(row, l.d, k) : INFINITY;
  fit_ranges(row, s.ranges + lane * s.range_row, l.d, l.group, t);
  if (feedback) round_with_feedback(s, lane, l.d, l.group, feedback);
  else round_nearest(s, lane, l.d, l.group, t);
  __syncwarp();
  store(s, lane, l, side, first, page);
}

// 32 tokens from `first` of a BF16 page.
DEV void load_page(const Scratch& s, int lane, PageLayout l, int side, int first, const uint8_t* page) {
  const int d = l.d;
  if (!l.mma) {
    for (int i = lane; i < TOKENS * d / 8; i += 32) {
      const int token = i / (d / 8), channel = i % (d / 8) * 8;
      *(uint4*)(s.x + token * s.x_row + channel) = *(const uint4*)(page + l.number(side, first + token, channel));
    }
    return;
  }
  // 512 bytes at a time: 8 tokens and a quarter of ... keys: 8 channels of each quarter; values: 32 channels.
  for (int tile = 0; tile < 4; tile++)
    for (int at = 0; at < d / 32; at++) {
      const uint4 x = *(const uint4*)(page + (first / 8 + tile) * 32 * d + side * 16 * d + at * 512 + lane * 16);
      bf16* rows = s.x + tile * 8 * s.x_row;
      if (side == 0) {
        *(uint4*)(rows + lane / 4 * s.x_row + lane % 4 * (d / 4) + 8 * at) = x;
      } else {
        const uint32_t w[4] = {x.x, x.y, x.z, x.w};
        uint16_t* to = (uint16_t*)rows + 2 * (lane % 4) * s.x_row + 32 * at + lane / 4;
#pragma unroll
        for (int i = 0; i < 4; i++) to[8 * i] = (uint16_t)w[i], to[8 * i + s.x_row] = (uint16_t)(w[i] >> 16);
      }
    }
}

// Grid (pairs, 2 kv_heads, layers) of 64. moves: [pairs](BF16 page, INT2 page), negative to pass over.
// feedback_k, feedback_v (null: nearest): [layers][kv_heads][d j][d i]; ranks: [layers][2][kv_heads].
extern "C" __global__ void __launch_bounds__(64)
demote_pages(const uint8_t* bf16_pool, uint8_t* int2_pool, const int2* moves, const bf16* feedback_k, const bf16* feedback_v,
             const int* ranks, PageLayout layout, int bf16_pages, int int2_pages, int kv_heads) {
  extern __shared__ __align__(16) uint8_t memory[];
  const int2 move = moves[blockIdx.x];
  if (move.x < 0 || move.y < 0) return;
  const int side = blockIdx.y / kv_heads, head = blockIdx.y % kv_heads, layer = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Scratch s(memory, warp, layout);
  load_page(s, lane, layout, side, warp * TOKENS,
            bf16_pool + (((size_t)layer * bf16_pages + move.x) * kv_heads + head) * layout.bf16_bytes());
  const bf16* feedback = side ? feedback_v : feedback_k;
  if (feedback) feedback += ((size_t)layer * kv_heads + head) * layout.d * layout.d;
  quantize(s, lane, layout, side, warp * TOKENS, ranks[layer * 2 * kv_heads + blockIdx.y], feedback,
           int2_pool + (((size_t)layer * int2_pages + move.y) * kv_heads + head) * layout.int2_bytes());
}

template <int STEPS>
DEV void encode(const Scratch& s, int lane, const bf16* x, size_t stride, const bf16* matrix, const float* bias, int d) {
  const int g = lane / 4, q = lane % 4;
#pragma unroll 1
  for (int m = 0; m < TOKENS; m += 16) {
    RowTimesMatrix<STEPS> rows;
    rows.load(x + (m + g) * stride, x + (m + 8 + g) * stride, d, q);
    for (int n = 0; n < d / 8; n++) {
      const float2 b = *(const float2*)(bias + 8 * n + 2 * q);
      float c[4] = {b.x, b.y, b.x, b.y};
      rows.columns(c, matrix, n, d, g, q);
      bf16* to = s.x + (m + g) * s.x_row + 8 * n + 2 * q;
      *(uint32_t*)to = pack(c[0], c[1]);
      *(uint32_t*)(to + 8 * s.x_row) = pack(c[2], c[3]);
    }
  }
}

// Grid (tokens / 64, 2 kv_heads) of 64, one layer's. k, v, encode, bias: as `append` has them; ranks: [2][kv_heads].
extern "C" __global__ void __launch_bounds__(64)
demote_rows(const bf16* k, const bf16* v, size_t k_stride, size_t v_stride, const bf16* encode_matrix, const float* bias,
            const bf16* feedback_k, const bf16* feedback_v, const int* ranks, const int* pages, uint8_t* pool,
            PageLayout layout, int kv_heads) {
  extern __shared__ __align__(16) uint8_t memory[];
  const int side = blockIdx.y / kv_heads, head = blockIdx.y % kv_heads, d = layout.d;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Scratch s(memory, warp, layout);
  const size_t stride = side ? v_stride : k_stride;
  const bf16* x = (side ? v : k) + (size_t)(blockIdx.x * PAGE_TOKENS + warp * TOKENS) * stride + head * d;
  if (encode_matrix) {
    const bf16* matrix = encode_matrix + (size_t)blockIdx.y * d * d;
    if (d <= 128) encode<4>(s, lane, x, stride, matrix, bias + blockIdx.y * d, d);
    else encode<8>(s, lane, x, stride, matrix, bias + blockIdx.y * d, d);
  } else {
    for (int i = lane; i < TOKENS * d / 8; i += 32) {
      const int token = i / (d / 8), channel = i % (d / 8) * 8;
      *(uint4*)(s.x + token * s.x_row + channel) = load16(x + token * stride + channel);
    }
  }
  const bf16* feedback = side ? feedback_v : feedback_k;
  if (feedback) feedback += (size_t)head * d * d;
  quantize(s, lane, layout, side, warp * TOKENS, ranks[blockIdx.y], feedback,
           pool + ((size_t)pages[blockIdx.x] * kv_heads + head) * layout.int2_bytes());
}
