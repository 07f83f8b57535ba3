// Writing in 16 bits: rows are encoded, x' = x A + bias, rounded to bf16, and put where they belong.
#include "page.cuh"
#include "warp.cuh"

// A block has 16 rows of one head and side; its warps and blockIdx.z share out the columns, eight at a time.
// put(row, channel, pair) takes what channels 2i and 2i + 1 of a row become.
template <int STEPS, class Put>
DEV void encode_rows(const bf16* x, size_t stride, const bf16* matrix, const float* bias, int n, int d, Put put) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, low = blockIdx.x * 16 + g, high = low + 8;
  const int first = blockIdx.z * 4 + threadIdx.x / 32, step = gridDim.z * 4;
  const bf16* x_low = low < n ? x + low * stride : nullptr;
  const bf16* x_high = high < n ? x + high * stride : nullptr;
  if (!matrix) {
    for (int i = 8 * first + 2 * q; i < d; i += 8 * step) {
      if (x_low) put(low, i, *(const uint32_t*)(x_low + i));
      if (x_high) put(high, i, *(const uint32_t*)(x_high + i));
    }
    return;
  }
  RowTimesMatrix<STEPS> rows;
  rows.load(x_low, x_high, d, q);
  for (int i = first; i < d / 8; i += step) {
    const int channel = 8 * i + 2 * q;
    const float2 b = *(const float2*)(bias + channel);
    float c[4] = {b.x, b.y, b.x, b.y};
    rows.columns(c, matrix, i, d, g, q);
    if (x_low) put(low, channel, pack(c[0], c[1]));
    if (x_high) put(high, channel, pack(c[2], c[3]));
  }
}

template <class Put>
DEV void encode_rows(const bf16* x, size_t stride, const bf16* matrix, const float* bias, int n, int d, Put put) {
  if (d <= 128) encode_rows<4>(x, stride, matrix, bias, n, d, put);
  else encode_rows<8>(x, stride, matrix, bias, n, d, put);
}

// Grid (ceil(n / 16), 2 kv_heads, column shares) of 128.  k, v: row i, head h at i stride + h d.
// encode (null: none): [2][kv_heads][d out][d in]; bias: [2][kv_heads][d]; places: page * 64 + slot of every row,
// negative for rows to pass over; pages: one layer's.
extern "C" __global__ void __launch_bounds__(128)
append(const bf16* k, const bf16* v, size_t k_stride, size_t v_stride, const bf16* encode, const float* bias,
       const int* places, uint8_t* pages, PageLayout layout, int n, int kv_heads) {
  const int side = blockIdx.y / kv_heads, head = blockIdx.y % kv_heads, d = layout.d;
  const bf16* matrix = encode ? encode + (size_t)blockIdx.y * d * d : nullptr;
  encode_rows((side ? v : k) + head * d, side ? v_stride : k_stride, matrix, bias + blockIdx.y * d, n, d,
              [&](int row, int channel, uint32_t pair) {
                const int place = places[row], slot = place % PAGE_TOKENS;
                if (place < 0) return;
                uint8_t* page = pages + ((size_t)(place / PAGE_TOKENS) * kv_heads + head) * layout.bf16_bytes();
                uint8_t* at = page + layout.number(side, slot, channel);
                if (side && layout.mma) {
                  *(uint16_t*)at = (uint16_t)pair;
                  *(uint16_t*)(page + layout.number(side, slot, channel + 1)) = (uint16_t)(pair >> 16);
                } else {
                  *(uint32_t*)at = pair;
                }
              });
}

// The same, into k_out and v_out (n, kv_heads, d).
extern "C" __global__ void __launch_bounds__(128)
encode(const bf16* k, const bf16* v, size_t k_stride, size_t v_stride, const bf16* encode, const float* bias,
       bf16* k_out, bf16* v_out, int n, int kv_heads, int d) {
  const int side = blockIdx.y / kv_heads, head = blockIdx.y % kv_heads;
  const bf16* matrix = encode ? encode + (size_t)blockIdx.y * d * d : nullptr;
  bf16* out = (side ? v_out : k_out) + head * d;
  encode_rows((side ? v : k) + head * d, side ? v_stride : k_stride, matrix, bias + blockIdx.y * d, n, d,
              [&](int row, int channel, uint32_t pair) {
                *(uint32_t*)(out + (size_t)row * kv_heads * d + channel) = pair;
              });
}

// Grid (layers, kv_heads): tokens 0 .. tokens - 1 of page `from`, and perhaps a few more, to page `to`.
extern "C" __global__ void copy_page(uint8_t* pool, int pages, int from, int to, int tokens, PageLayout layout) {
  const size_t bytes = layout.bf16_bytes(), kv_heads = gridDim.y;
  uint8_t* layer = pool + (size_t)blockIdx.x * pages * kv_heads * bytes;
  const uint4* source = (const uint4*)(layer + ((size_t)from * kv_heads + blockIdx.y) * bytes);
  uint4* target = (uint4*)(layer + ((size_t)to * kv_heads + blockIdx.y) * bytes);
  // Keys and values of eight tokens lie together in one arrangement; in the other, all keys precede all values.
  const int tiles = (tokens + 7) / 8, side = PAGE_TOKENS * layout.d / 8;
  const int count = layout.mma ? tiles * 2 * layout.d : tiles * layout.d;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    target[i] = source[i];
    if (!layout.mma) target[side + i] = source[side + i];
  }
}
