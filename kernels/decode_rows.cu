// Decode attention over pages whose tokens lie one after the other (`Arrangement::Rows`): any head_dim that is a multiple
// of 8 up to 256, any group of channels, any GPU.  The plain twin of int2_decode.cu; f32 throughout.
//
// A token's row is read by D/8 lanes of a sub-warp, 8 channels each; every sub-warp keeps its own running softmax over the
// tokens that it meets.  Sub-warps merge in shared memory, blocks in `decode_rows_merge`.
#include <cuda_bf16.h>
#include <stdint.h>

#define DEV __device__ __forceinline__

constexpr int PAGE = 64, THREADS = 256, AT_ONCE = 4;  // AT_ONCE: tokens whose loads are in flight together
constexpr float NOTHING = -1e30f;                     // the maximum of no scores; finite, so that differences are numbers

struct Rows {
  const __nv_bfloat16* q;     // [B][HQ][D]
  const uint8_t* int2;        // [pages][HK][64 * (D/2 + 8 * D/group)]
  const uint8_t* bf16;        // [pages][HK][64 * 4 * D]
  const int *history, *history_pages, *windows, *window_tokens;
  float* part_o;              // [B][HQ][splits][D] not normalised
  float2* part_ml;            // [B][HQ][splits] maximum and sum, base-2 exponents
  int HQ, HK, D, group, max_history, max_windows, splits;
  float scale_log2;           // softmax scale * log2(e)
};

DEV void unpack(uint4 w, float (&x)[8]) {
  const uint32_t v[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; i++) x[2 * i] = __uint_as_float(v[i] << 16), x[2 * i + 1] = __uint_as_float(v[i] & 0xffff0000u);
}
DEV float2 scale_zero(uint32_t w) { return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u)); }

// Eight channels from c0 of one row of codes; `params`: the row's (scale, zero) pairs.
DEV void decode(uint32_t codes, const uint32_t* params, int c0, int group, float (&x)[8]) {
  if (group % 8 == 0) {
    const float2 s = scale_zero(__ldg(params + c0 / group));
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = ((float)(codes >> (2 * i) & 3) - s.y) * s.x;
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float2 s = scale_zero(__ldg(params + (c0 + i) / group));
      x[i] = ((float)(codes >> (2 * i) & 3) - s.y) * s.x;
    }
  }
}

// grid (splits, HK * head blocks, B).  G: query heads that a block does; more of one KV head take several blocks.
template <int G>
DEV void attend(const Rows& a) {
  extern __shared__ float shared[];  // q [G][D]; then the sub-warps' (m, l) [subs][G] and o [subs][D], one head at a time
  const int b = blockIdx.z, split = blockIdx.x, D = a.D, sharing = a.HQ / a.HK, head_blocks = (sharing + G - 1) / G;
  const int kvh = blockIdx.y / head_blocks, head0 = blockIdx.y % head_blocks * G, heads = min(G, sharing - head0);
  const size_t first_row = (size_t)b * a.HQ + kvh * sharing + head0;
  const int tid = threadIdx.x, chunks = D / 8;
  int width = 1;
  while (width < chunks) width *= 2;  // lanes of a sub-warp
  const int subs = THREADS / width, sub = tid / width, lane = tid % width, c0 = min(lane, chunks - 1) * 8;
  const bool mine = lane < chunks;
  for (int i = tid; i < G * D; i += THREADS)
    shared[i] = i < heads * D ? __bfloat162float(a.q[first_row * D + i]) * a.scale_log2 : 0.f;
  __syncthreads();

  float m[G], l[G], o[G][8];
#pragma unroll
  for (int h = 0; h < G; h++) {
    m[h] = NOTHING, l[h] = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) o[h][i] = 0.f;
  }
  const int groups = D / a.group, row_bytes = D / 4;
  const size_t int2_bytes = (size_t)PAGE * (D / 2 + 8 * groups), bf16_bytes = (size_t)PAGE * 4 * D;
  const int window_tokens = a.window_tokens[b], window_pages = (window_tokens + PAGE - 1) / PAGE;
  const int pages = window_pages + a.history_pages[b];
  const int begin = (int)((long long)pages * split / a.splits) * PAGE, end = (int)((long long)pages * (split + 1) / a.splits) * PAGE;
#pragma unroll 1
  for (int first = begin; first < end; first += subs * AT_ONCE) {
    // All lanes of a warp stay together for the shuffles, also where its sub-warps have run out of tokens.
    const int token = first + sub * AT_ONCE, page = token / PAGE, t0 = token % PAGE;
    const bool any = token < end, window = page < window_pages;
    float k[AT_ONCE][8], v[AT_ONCE][8];
    bool valid[AT_ONCE];
#pragma unroll
    for (int t = 0; t < AT_ONCE; t++) valid[t] = any && (!window || token + t < window_tokens);
    if (any && window) {
      const uint8_t* base = a.bf16 + ((size_t)a.windows[(size_t)b * a.max_windows + page] * a.HK + kvh) * bf16_bytes;
#pragma unroll
      for (int t = 0; t < AT_ONCE; t++) {
        unpack(__ldg((const uint4*)(base + 2 * ((size_t)(t0 + t) * D + c0))), k[t]);
        unpack(__ldg((const uint4*)(base + 2 * ((size_t)(PAGE + t0 + t) * D + c0))), v[t]);
      }
    } else if (any) {
      const int id = a.history[(size_t)b * a.max_history + page - window_pages];
      const uint8_t* base = a.int2 + ((size_t)id * a.HK + kvh) * int2_bytes;
      const uint32_t* params = (const uint32_t*)(base + PAGE * D / 2);
      uint32_t kc[AT_ONCE], vc[AT_ONCE];
#pragma unroll
      for (int t = 0; t < AT_ONCE; t++) {
        kc[t] = __ldg((const unsigned short*)(base + (t0 + t) * row_bytes + c0 / 4));
        vc[t] = __ldg((const unsigned short*)(base + (PAGE + t0 + t) * row_bytes + c0 / 4));
      }
#pragma unroll
      for (int t = 0; t < AT_ONCE; t++) {
        decode(kc[t], params + 2 * (t0 + t) * groups, c0, a.group, k[t]);
        decode(vc[t], params + (2 * (t0 + t) + 1) * groups, c0, a.group, v[t]);
      }
    }
#pragma unroll
    for (int t = 0; t < AT_ONCE; t++)
#pragma unroll
      for (int i = 0; i < 8; i++) {  // spare slots may hold NaN
        if (!valid[t] || !mine) k[t][i] = 0.f;
        if (!valid[t]) v[t][i] = 0.f;
      }
#pragma unroll
    for (int h = 0; h < G; h++) {
      float qh[8], s[AT_ONCE], top = m[h];
      *(float4*)&qh[0] = *(const float4*)&shared[h * D + c0], *(float4*)&qh[4] = *(const float4*)&shared[h * D + c0 + 4];
#pragma unroll
      for (int t = 0; t < AT_ONCE; t++) {
        s[t] = 0.f;
#pragma unroll
        for (int i = 0; i < 8; i++) s[t] = fmaf(qh[i], k[t][i], s[t]);
        for (int w = width / 2; w; w /= 2) s[t] += __shfl_xor_sync(~0u, s[t], w);
        if (valid[t]) top = fmaxf(top, s[t]);
      }
      const float f = exp2f(m[h] - top);
      m[h] = top, l[h] *= f;
#pragma unroll
      for (int i = 0; i < 8; i++) o[h][i] *= f;
#pragma unroll
      for (int t = 0; t < AT_ONCE; t++) {
        const float p = valid[t] ? exp2f(s[t] - top) : 0.f;
        l[h] += p;
#pragma unroll
        for (int i = 0; i < 8; i++) o[h][i] = fmaf(p, v[t][i], o[h][i]);
      }
    }
  }

  float *ml = shared + G * D, *os = ml + 2 * subs;
#pragma unroll
  for (int h = 0; h < G; h++) {
    if (h >= heads) break;
    __syncthreads();
    if (lane == 0) ml[2 * sub] = m[h], ml[2 * sub + 1] = l[h];
    if (mine)
#pragma unroll
      for (int i = 0; i < 8; i++) os[sub * D + c0 + i] = o[h][i];
    __syncthreads();
    if (tid < D) {
      float M = NOTHING, L = 0.f, O = 0.f;
      for (int s = 0; s < subs; s++) M = fmaxf(M, ml[2 * s]);
      for (int s = 0; s < subs; s++) {
        const float f = exp2f(ml[2 * s] - M);
        L = fmaf(ml[2 * s + 1], f, L), O = fmaf(os[s * D + tid], f, O);
      }
      const size_t part = (first_row + h) * a.splits + split;
      a.part_o[part * D + tid] = O;
      if (tid == 0) a.part_ml[part] = make_float2(M, L);
    }
  }
}

#define KERNEL(G)                                                                                                             \
  extern "C" __global__ void __launch_bounds__(THREADS) decode_rows_g##G(                                                     \
      const __nv_bfloat16* q, const uint8_t* int2, const uint8_t* bf16, const int* history, const int* history_pages,         \
      const int* windows, const int* window_tokens, float* part_o, float2* part_ml, int HQ, int HK, int D, int group,         \
      int max_history, int max_windows, int splits, float scale_log2) {                                                       \
    attend<G>(Rows{q, int2, bf16, history, history_pages, windows, window_tokens, part_o, part_ml, HQ, HK, D, group,          \
                   max_history, max_windows, splits, scale_log2});                                                            \
  }
KERNEL(1) KERNEL(2) KERNEL(4) KERNEL(8) KERNEL(16)

// grid (HQ, B), D threads.  Outputs of a sequence without tokens stay as they are.
extern "C" __global__ void decode_rows_merge(const float* part_o, const float2* part_ml, __nv_bfloat16* out, float* out_f32,
                                             float* lse, int HQ, int D, int splits) {
  const size_t row = (size_t)blockIdx.y * HQ + blockIdx.x;
  const int c = threadIdx.x;
  float M = NOTHING, L = 0.f, O = 0.f;
  for (int s = 0; s < splits; s++) M = fmaxf(M, part_ml[row * splits + s].x);
  for (int s = 0; s < splits; s++) {
    const float2 ml = part_ml[row * splits + s];
    const float f = exp2f(ml.x - M);
    L = fmaf(ml.y, f, L), O = fmaf(part_o[(row * splits + s) * D + c], f, O);
  }
  if (L == 0.f) return;
  out[row * D + c] = __float2bfloat16(O / L);
  if (out_f32) out_f32[row * D + c] = O / L;
  if (c == 0) lse[row] = (M + log2f(L)) * 0.6931471805599453f;
}
