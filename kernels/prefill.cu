// Attention of a chunk's n queries over a sequence's cache and, causally, over the chunk itself. All of it is encoded.
//
// A block has 128 rows (token-major: row = token * G + head of the group) of one KV head and walks over tiles of 64
// tokens: INT2 pages, BF16 pages, the chunk's own rows. While one tile is worked on, the next one's bytes come by
// cp.async; INT2 pages (and BF16 pages arranged as Mma, of which there are few) are made rows of bf16 in shared memory
// first. Scores and outputs are bf16 products with f32 sums, softmax is online in f32.
//
// Rounding a key to bf16 would cost a score 2^-9 of sum |q k|, more than all else together. Where a token has one scale
// and zero, its codes are multiplied instead, less 3/2, which is exact: score = scale (q . (c - 3/2) + (3/2 - zero) sum q). Where there are few rows, blockIdx.z shares out the tiles, and
// `merge` puts the parts together.
#include "page.cuh"
#include "warp.cuh"

constexpr int ROWS = 128, THREADS = 256;

// What a kernel knows of the cache: one layer's pages, the step's tables, and which sequence.
struct Cache {
  const uint8_t *int2, *bf16;
  const int* history_table;  // [sequences][max_history]: INT2 pages
  const int* history_pages;  // [sequences]
  const int* window_table;   // [sequences][max_windows]: BF16 pages
  const int* window_tokens;  // [sequences]
  int sequence, max_history, max_windows;
};

// 16 bytes without waiting, zeros past the first `bytes`.
DEV void copy16(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
DEV void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The four levels of a token and group, as bf16.
DEV uint2 levels(const uint8_t* range) {
  const uint32_t r = *(const uint32_t*)range;
  const float scale = low_of(r), zero = high_of(r);
  return make_uint2(pack(-zero * scale, (1.f - zero) * scale), pack((2.f - zero) * scale, (3.f - zero) * scale));
}
// Four codes, one a byte, become two pairs of levels: every code selects two of the eight bytes.
DEV uint2 pick(uint2 levels, uint32_t codes) {
  const uint32_t s = codes * 0x22 + 0x10101010;
  return make_uint2(__byte_perm(levels.x, levels.y, s), __byte_perm(levels.x, levels.y, s >> 16));
}
// Codes less 3/2.
DEV uint2 centred_codes() { return make_uint2(0xbf00bfc0, 0x3fc03f00); }
// Four codes in eight bits, one a byte.
DEV uint32_t spread(uint32_t x) { return (x | x << 6 | x << 12 | x << 18) & 0x03030303; }

// Tiles are [64 tokens][D + 8]; channels from d on stay zero.
template <int D> struct Tile {
  static constexpr int ROW = D + 8;
  bf16* to;

  DEV void put(int token, int channel, uint4 eight) const { *(uint4*)(to + token * ROW + channel) = eight; }
  DEV void put(int token, int channel, uint32_t half) const { *(uint16_t*)(to + token * ROW + channel) = (uint16_t)half; }

  // centred: codes less 3/2, without scale and zero.
  DEV void int2_rows(const uint8_t* page, PageLayout l, int side, bool centred) const {
    const int token = threadIdx.x / 4;
    for (int channel = threadIdx.x % 4 * 8; channel < l.d; channel += 32) {
      const uint8_t* at = page + (token + side * PAGE_TOKENS) * (l.d / 4) + channel / 4;
      const uint32_t codes = *(const uint16_t*)at;
      uint2 low, high;
      if (l.group % 8 == 0) {
        const uint2 four = centred ? centred_codes() : levels(page + l.scale(side, token, channel / l.group));
        low = pick(four, spread(codes & 0xff)), high = pick(four, spread(codes >> 8));
      } else {
        uint32_t out[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float x[2];
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const uint32_t range = *(const uint32_t*)(page + l.scale(side, token, (channel + 2 * i + j) / l.group));
            x[j] = ((float)(codes >> (4 * i + 2 * j) & 3) - high_of(range)) * low_of(range);
          }
          out[i] = pack(x[0], x[1]);
        }
        low = make_uint2(out[0], out[1]), high = make_uint2(out[2], out[3]);
      }
      put(token, channel, make_uint4(low.x, low.y, high.x, high.y));
    }
  }

  // Eight bytes at a time: half of what a lane of the decoder multiplies at once.
  DEV void int2_mma(const uint8_t* page, PageLayout l, int side, bool centred) const {
    for (int i = threadIdx.x; i < 2 * D; i += THREADS) {
      const int half = i % 2, lane = i / 2 % 32, g = lane / 4, q = lane % 4;
      const int first = i / 64 / (D / 64) * 32, at = i / 64 % (D / 64);  // of 32 tokens, 64 channels
      const uint8_t* codes = page + l.part_start(first) + side * l.part_tokens() * (D / 4) +
                             (first % l.part_tokens() / 32 * (D / 64) + at) * 512 + lane * 16 + half * 8;
      const uint2 w = *(const uint2*)codes;
#pragma unroll
      for (int p = 0; p < 4; p++) {
        if (side == 0) {
          const int token = first + 8 * p + g;
          const uint2 four = centred ? centred_codes() : levels(page + l.scale(side, token, 0));
          const uint2 low = pick(four, w.x >> 2 * p & 0x03030303), high = pick(four, w.y >> 2 * p & 0x03030303);
          put(token, q * (D / 4) + 16 * at + 8 * half, make_uint4(low.x, low.y, high.x, high.y));
        } else {
          const int token = first + 16 * half + p % 2 * 8 + 2 * q + p / 2;
          const uint2 four = levels(page + l.scale(side, token, 0));
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const uint2 x = pick(four, spread((r ? w.y : w.x) >> 8 * p & 0xff));
            const int channel = 64 * at + 8 * r + g;
            put(token, channel, x.x), put(token, channel + 16, x.x >> 16);
            put(token, channel + 32, x.y), put(token, channel + 48, x.y >> 16);
          }
        }
      }
    }
  }

  // Tokens past `valid` become zeros: their memory may hold anything.
  DEV void bf16_mma(const uint8_t* page, int side, int valid) const {
    for (int i = threadIdx.x; i < 8 * D; i += THREADS) {
      const int tile = i / D, at = i % D / 32, lane = i % 32;
      const uint4 x = *(const uint4*)(page + tile * 32 * D + side * 16 * D + at * 512 + lane * 16);
      if (side == 0) {
        const int token = 8 * tile + lane / 4;
        put(token, lane % 4 * (D / 4) + 8 * at, token < valid ? x : make_uint4(0, 0, 0, 0));
      } else {
        const int token = 8 * tile + lane % 4 * 2, channel = 32 * at + lane / 4;
        const uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          put(token, channel + 8 * j, token < valid ? w[j] : 0u);
          put(token + 1, channel + 8 * j, token + 1 < valid ? w[j] >> 16 : 0u);
        }
      }
    }
  }

  // Without waiting: rows from `valid` on become zeros.
  DEV void rows(const bf16* x, size_t stride, int d, int valid) const {
    const int token = threadIdx.x / 4;
    const bf16* from = x + (token < valid ? token : 0) * stride;
    for (int channel = threadIdx.x % 4 * 8; channel < d; channel += 32)
      copy16(to + token * ROW + channel, from + channel, token < valid ? 16 : 0);
  }

  DEV void int2_page(const uint8_t* page, PageLayout l, int side, bool centred) const {
    if constexpr (D == 64 || D == 128 || D == 256)
      if (l.mma) return int2_mma(page, l, side, centred);
    int2_rows(page, l, side, centred);
  }
};

// What a share of the tiles gives for a row: outputs before division, their weight, and the exponent it is relative to.
struct Parts {
  float* out;     // [shares][kv_heads][padded rows][d]
  float2* scale;  // [shares][kv_heads][padded rows]: exponent (of 2), weight
};

template <int D>
DEV void attend(const bf16* q, const bf16* k, const bf16* v, bf16* out, Parts parts, Cache cache, PageLayout layout, int n,
                int kv_heads, int group, int buffers, int staged, float scale) {
  constexpr int ROW = D + 8, TILE = PAGE_TOKENS * ROW;
  extern __shared__ __align__(16) bf16 memory[];
  bf16* queries = memory;               // [ROWS][ROW]
  bf16* tiles_at = queries + ROWS * ROW;  // [buffers](keys, values)
  float2* ranges = (float2*)(tiles_at + buffers * 2 * TILE);  // [64] of a tile's keys: scale, (3/2 - zero) scale
  uint8_t* stages = (uint8_t*)(ranges + PAGE_TOKENS);         // [2] INT2 pages, if staged
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, lane_g = lane / 4, lane_q = lane % 4, d = layout.d;
  const int head = blockIdx.y;
  const int first_row = (gridDim.x - 1 - blockIdx.x) * ROWS, rows = n * group;  // the longest first
  const float exponent = scale * 1.44269504f;

  for (int i = tid; i < (ROWS * ROW + buffers * 2 * TILE) / 8; i += THREADS) ((uint4*)memory)[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  // The queries of a group are next to each other.
  const bf16* first_query = q + (size_t)head * group * d;
  for (int r = tid / 2; r < ROWS && first_row + r < rows; r += THREADS / 2) {
    const int row = first_row + r;
    const bf16* from = first_query + ((size_t)(row / group) * kv_heads * group + row % group) * d;
    for (int channel = tid % 2 * 8; channel < d; channel += 16) copy16(queries + r * ROW + channel, from + channel, 16);
  }

  float o[D / 8][4], largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < D / 8; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
  const int row = first_row + warp * 16 + lane_g;
  const int history = cache.history_pages ? cache.history_pages[cache.sequence] : 0;
  const int windows = cache.window_tokens ? cache.window_tokens[cache.sequence] : 0;
  const int own = history + (windows + PAGE_TOKENS - 1) / PAGE_TOKENS;  // the first tile of the chunk's own rows
  const int chunk_tokens = min((first_row + ROWS - 1) / group, n - 1) + 1;  // which the last row sees
  const int tiles = own + (chunk_tokens + PAGE_TOKENS - 1) / PAGE_TOKENS;
  const int first_tile = tiles * blockIdx.z / gridDim.z, end_tile = tiles * (blockIdx.z + 1) / gridDim.z;

  // The page of a tile, in the units of its pool; looked up a tile before its bytes are asked for.
  auto page_of = [&](int tile) {
    if (tile < min(history, end_tile)) return cache.history_table[(size_t)cache.sequence * cache.max_history + tile];
    if (tile < min(own, end_tile)) return cache.window_table[(size_t)cache.sequence * cache.max_windows + tile - history];
    return 0;
  };
  auto int2_page = [&](int page) { return cache.int2 + ((size_t)page * kv_heads + head) * layout.int2_bytes(); };
  auto bf16_page = [&](int page) { return cache.bf16 + ((size_t)page * kv_heads + head) * layout.bf16_bytes(); };
  auto keys_of = [&](int tile) { return Tile<D>{tiles_at + (tile & buffers - 1) * 2 * TILE}; };
  auto values_of = [&](int tile) { return Tile<D>{tiles_at + ((tile & buffers - 1) * 2 + 1) * TILE}; };
  auto ask = [&](int tile, int page) {
    if (tile >= end_tile) return;
    if (tile >= own) {
      const int first = (tile - own) * PAGE_TOKENS;
      const size_t offset = ((size_t)first * kv_heads + head) * d, stride = (size_t)kv_heads * d;
      keys_of(tile).rows(k + offset, stride, d, n - first);
      values_of(tile).rows(v + offset, stride, d, n - first);
    } else if (tile >= history) {
      if (layout.mma) return;
      const bf16* x = (const bf16*)bf16_page(page);
      const int valid = windows - (tile - history) * PAGE_TOKENS;
      keys_of(tile).rows(x, d, d, valid);
      values_of(tile).rows(x + PAGE_TOKENS * d, d, d, valid);
    } else if (staged) {
      const int bytes = layout.int2_bytes();
      for (int i = tid * 16; i < bytes; i += THREADS * 16) copy16(stages + tile % 2 * bytes + i, int2_page(page) + i, 16);
    }
  };
  int page = page_of(first_tile), next_page = page_of(first_tile + 1);
  if (buffers == 2) ask(first_tile, page);

  const bool one_range = layout.group == d;
  float query_sum[2] = {0.f, 0.f};
  wait_for_copies();
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2; r++) {
    for (int c = 2 * lane_q; c < D; c += 8) {
      const uint32_t pair = *(const uint32_t*)(queries + (warp * 16 + lane_g + 8 * r) * ROW + c);
      query_sum[r] += low_of(pair) + high_of(pair);
    }
    query_sum[r] += __shfl_xor_sync(~0u, query_sum[r], 1);
    query_sum[r] += __shfl_xor_sync(~0u, query_sum[r], 2);
  }

  for (int at = first_tile; at < end_tile; at++) {
    const Tile<D> keys = keys_of(at), values = values_of(at);
    int limit[2] = {PAGE_TOKENS, PAGE_TOKENS};  // tokens of the tile that a row sees
    const int this_page = page;
    page = next_page, next_page = page_of(at + 2);
    if (buffers == 1) {
      __syncthreads();
      ask(at, this_page);
    }
    wait_for_copies();
    __syncthreads();
    if (buffers == 2) ask(at + 1, page);
    if (at < history) {
      const uint8_t* bytes = staged ? stages + at % 2 * layout.int2_bytes() : int2_page(this_page);
      keys.int2_page(bytes, layout, 0, one_range);
      values.int2_page(bytes, layout, 1, false);
      if (one_range && tid < PAGE_TOKENS) {
        const uint32_t range = *(const uint32_t*)(bytes + layout.scale(0, tid, 0));
        ranges[tid] = make_float2(low_of(range), (1.5f - high_of(range)) * low_of(range));
      }
      __syncthreads();
    } else if (at < own) {
      limit[0] = limit[1] = min(windows - (at - history) * PAGE_TOKENS, PAGE_TOKENS);
      if constexpr (D == 64 || D == 128 || D == 256)
        if (layout.mma) {
          keys.bf16_mma(bf16_page(this_page), 0, limit[0]);
          values.bf16_mma(bf16_page(this_page), 1, limit[0]);
          __syncthreads();
        }
    } else {
#pragma unroll
      for (int r = 0; r < 2; r++)
        limit[r] = min(min((row + 8 * r) / group, n - 1) + 1 - (at - own) * PAGE_TOKENS, PAGE_TOKENS);
    }

    float s[8][4];
#pragma unroll
    for (int i = 0; i < 8; i++) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.f;
#pragma unroll
    for (int c = 0; c < D; c += 16) {
      uint32_t a[4];
      load_tiles(a, queries + (warp * 16 + lane % 16) * ROW + c + lane / 16 * 8);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        uint32_t b[4];
        load_tiles(b, keys.to + (16 * i + lane / 16 * 8 + lane % 8) * ROW + c + lane / 8 % 2 * 8);
        mma(s[2 * i], a[0], a[1], a[2], a[3], b[0], b[1]);
        mma(s[2 * i + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
    if (one_range && at < history) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float4 r = *(const float4*)(ranges + 8 * i + 2 * lane_q);  // of two tokens
        s[i][0] = fmaf(s[i][0], r.x, query_sum[0] * r.y), s[i][1] = fmaf(s[i][1], r.z, query_sum[0] * r.w);
        s[i][2] = fmaf(s[i][2], r.x, query_sum[1] * r.y), s[i][3] = fmaf(s[i][3], r.z, query_sum[1] * r.w);
      }
    }
    if (limit[0] < PAGE_TOKENS || limit[1] < PAGE_TOKENS) {
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (8 * i + 2 * lane_q + j % 2 >= limit[j / 2]) s[i][j] = -INFINITY;
    }
    float shift[2], before[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float m = largest[r];
#pragma unroll
      for (int i = 0; i < 8; i++) m = fmaxf(m, fmaxf(s[i][2 * r], s[i][2 * r + 1]));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      // A row that has seen nothing yet must not subtract infinities.
      shift[r] = m == -INFINITY ? 0.f : m * exponent;
      before[r] = exp2f(largest[r] * exponent - shift[r]);
      largest[r] = m, sum[r] *= before[r];
    }
    if (__any_sync(~0u, before[0] != 1.f || before[1] != 1.f)) {
#pragma unroll
      for (int i = 0; i < D / 8; i++)
        o[i][0] *= before[0], o[i][1] *= before[0], o[i][2] *= before[1], o[i][3] *= before[1];
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        s[i][j] = exp2f(fmaf(s[i][j], exponent, -shift[j / 2]));
        sum[j / 2] += s[i][j];
      }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t a[4] = {pack(s[2 * i][0], s[2 * i][1]), pack(s[2 * i][2], s[2 * i][3]),
                             pack(s[2 * i + 1][0], s[2 * i + 1][1]), pack(s[2 * i + 1][2], s[2 * i + 1][3])};
#pragma unroll
      for (int c = 0; c < D; c += 16) {
        uint32_t b[4];
        load_tiles_transposed(b, values.to + (16 * i + lane / 8 % 2 * 8 + lane % 8) * ROW + c + lane / 16 * 8);
        mma(o[c / 8], a[0], a[1], a[2], a[3], b[0], b[1]);
        mma(o[c / 8 + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
  }

#pragma unroll
  for (int r = 0; r < 2; r++) {
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    const int at = row + 8 * r;
    if (at >= rows) continue;
    if (gridDim.z > 1) {
      const size_t part = ((size_t)blockIdx.z * kv_heads + head) * gridDim.x * ROWS + at;
      if (lane_q == 0) parts.scale[part] = make_float2(largest[r] * exponent, sum[r]);
#pragma unroll
      for (int i = 0; i < D / 8; i++)
        if (8 * i < d) *(float2*)(parts.out + part * d + 8 * i + 2 * lane_q) = make_float2(o[i][2 * r], o[i][2 * r + 1]);
      continue;
    }
    bf16* to = out + (((size_t)(at / group) * kv_heads + head) * group + at % group) * d;
    const float inverse = 1.f / sum[r];
#pragma unroll
    for (int i = 0; i < D / 8; i++)
      if (8 * i < d) *(uint32_t*)(to + 8 * i + 2 * lane_q) = pack(o[i][2 * r] * inverse, o[i][2 * r + 1] * inverse);
  }
}

// Grid (ceil(n * group / 128), kv_heads, shares) of 256. q, out: (n, kv_heads * group, d); k, v: (n, kv_heads, d), the
// chunk's own; buffers: 2, or 1 where shared memory is small; staged: whether it takes two INT2 pages besides; scale: of
// scores. D is d, or the next larger for which there is a kernel.
#define PREFILL(D)                                                                                                     \
  extern "C" __global__ void __launch_bounds__(THREADS, D <= 128 ? 2 : 1)                                             \
  prefill_##D(const bf16* q, const bf16* k, const bf16* v, bf16* out, float* part_out, float2* part_scale,            \
              const uint8_t* int2, const uint8_t* bf16_pages,                                                          \
              const int* history_table, const int* history_pages, const int* window_table, const int* window_tokens,  \
              int sequence, int max_history, int max_windows, PageLayout layout, int n, int kv_heads, int group,      \
              int buffers, int staged, float scale) {                                                                                           \
    attend<D>(q, k, v, out, Parts{part_out, part_scale},                                                               \
              Cache{int2, bf16_pages, history_table, history_pages, window_table, window_tokens, sequence,            \
                    max_history, max_windows},                                                                         \
              layout, n, kv_heads, group, buffers, staged, scale);                                                                      \
  }
PREFILL(64)
PREFILL(80)
PREFILL(96)
PREFILL(112)
PREFILL(128)
PREFILL(192)
PREFILL(256)

// Grid (ceil(rows / 8), kv_heads) of 256: a warp a row. padded_rows: 128 ceil(rows / 128).
extern "C" __global__ void __launch_bounds__(256)
merge(const float* part_out, const float2* part_scale, bf16* out, int shares, int padded_rows, int rows, int kv_heads,
      int group, int d) {
  const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
  if (row >= rows) return;
  const size_t step = (size_t)kv_heads * padded_rows, first = (size_t)head * padded_rows + row;
  float largest = -INFINITY, weight = 0.f;
  for (int i = 0; i < shares; i++) largest = fmaxf(largest, part_scale[first + i * step].x);
  for (int i = 0; i < shares; i++) {
    const float2 s = part_scale[first + i * step];
    weight += s.y * exp2f(s.x - largest);
  }
  bf16* to = out + (((size_t)(row / group) * kv_heads + head) * group + row % group) * d;
  for (int channel = 2 * lane; channel < d; channel += 64) {
    float2 sum = make_float2(0.f, 0.f);
    for (int i = 0; i < shares; i++) {
      const float scale = exp2f(part_scale[first + i * step].x - largest);
      const float2 part = *(const float2*)(part_out + (first + i * step) * d + channel);
      sum.x += scale * part.x, sum.y += scale * part.y;
    }
    *(uint32_t*)(to + channel) = pack(sum.x / weight, sum.y / weight);
  }
}
