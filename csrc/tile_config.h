// The shape of the eight AMX tile registers, set per thread before their first use in a kernel.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pellucid {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

inline void load_config(const TileConfig& config) {
  // GCC 12 believes that ldtilecfg reads one pointer's worth of the structure and may drop the other stores.
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// Tiles 0-3 are sums, 4-5 rows of x, 6-7 columns of W. `top` and `bottom` are the rows of the two row tiles.
inline void configure(int top, int bottom) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    const bool lower = tile == 2 || tile == 3 || tile == 5;
    config.rows[tile] = static_cast<uint8_t>(tile >= 6 ? 16 : lower ? bottom : top);
  }
  load_config(config);
}

// The tile instructions with the register as a template argument (the intrinsics take literals only), and with what they
// do to memory told to the compiler.
template <int kTile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(from), "r"(stride) : "memory");
}
// The same for what passes once: it does not push the rest out of the first-level cache.
template <int kTile>
inline void load_tile_once(const void* from, int64_t stride = 64) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(from), "r"(stride) : "memory");
}
template <int kTile>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(to), "r"(stride) : "memory");
}
template <int kSum, int kRows, int kColumns>
inline void multiply_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kColumns));
}
template <int kSum, int kRows, int kColumns>
inline void multiply_int8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kColumns));
}

}  // namespace
}  // namespace pellucid
