// Where a page's parts lie. src/kv/page.rs is the definition; side 0 is keys, 1 values.
#pragma once
#include <stdint.h>

constexpr int PAGE_TOKENS = 64;

struct PageLayout {
  int d, group, mma;

  __device__ __forceinline__ size_t int2_bytes() const { return PAGE_TOKENS * (d / 2 + 8 * (d / group)); }
  __device__ __forceinline__ size_t bf16_bytes() const { return PAGE_TOKENS * 4 * d; }

  // Of an INT2 page arranged as Mma: tokens of a part, and where the part of a token starts.
  __device__ __forceinline__ int part_tokens() const { return d > 128 ? 32 : 64; }
  __device__ __forceinline__ int part_start(int token) const {
    return token / part_tokens() * part_tokens() * (d / 2 + 8);
  }

  // Of an INT2 page: the byte of a group's bf16 scale; its bf16 zero follows.
  __device__ __forceinline__ int scale(int side, int token, int at) const {
    if (!mma) return PAGE_TOKENS * d / 2 + ((2 * token + side) * (d / group) + at) * 4;
    const int t = token % part_tokens();
    return part_start(token) + part_tokens() * d / 2 + (t / 16 * 8 + t % 8) * 16 + side * 8 + t % 16 / 8 * 4;
  }

  // Of a BF16 page: the byte of a number.
  __device__ __forceinline__ int number(int side, int token, int channel) const {
    if (!mma) return 2 * ((token + side * PAGE_TOKENS) * d + channel);
    const int tile = token / 8 * 32 * d, t = token % 8;
    if (side == 0) {
      const int lane = 4 * t + channel / (d / 4), at = channel % (d / 4);
      return tile + at / 8 * 512 + lane * 16 + at % 8 * 2;
    }
    const int lane = 4 * (channel % 8) + t / 2, word = channel / 8;
    return tile + 16 * d + word / 4 * 512 + lane * 16 + word % 4 * 4 + t % 2 * 2;
  }
};
