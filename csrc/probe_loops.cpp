// Compiled once per instruction level, like kernels.cpp and under the same rule about linkage.
#include "probe_loops.h"

#include "simd.h"
#if defined(__AMX_TILE__)
#include "tile_config.h"
#endif

#define PELLUCID_JOIN_(a, b) a##b
#define PELLUCID_JOIN(a, b) PELLUCID_JOIN_(a, b)

namespace pellucid {
namespace {

uint64_t read_all(const uint8_t* data, int64_t bytes) {
  Ints sum[4] = {splat_int(0), splat_int(0), splat_int(0), splat_int(0)};
  for (int64_t i = 0; i < bytes; i += 256) {
    __builtin_prefetch(data + i + 4096, 0, 3);
    __builtin_prefetch(data + i + 4160, 0, 3);
    __builtin_prefetch(data + i + 4224, 0, 3);
    __builtin_prefetch(data + i + 4288, 0, 3);
    for (int j = 0; j < 4; ++j) sum[j] = sum[j] + load_ints(data + i + 64 * j);
  }
  int32_t lane[16];
  store_ints(lane, (sum[0] + sum[1]) + (sum[2] + sum[3]));
  uint64_t total = 0;
  for (int32_t x : lane) total += static_cast<uint32_t>(x);
  return total;
}

int64_t multiply_f32(int64_t rounds) {
  constexpr int kSums = kParts == 1 ? 16 : kParts == 2 ? 6 : 3;
  Floats sum[kSums];
  for (int j = 0; j < kSums; ++j) sum[j] = splat(static_cast<float>(j));
  const Floats a = splat(0.999f), b = splat(0.001f);
  for (int64_t i = 0; i < rounds; ++i) {
    for (int j = 0; j < kSums; ++j) sum[j] = multiply_add(sum[j], a, b);
    asm volatile("" ::: "memory");
  }
  float keep = 0;
  for (int j = 0; j < kSums; ++j) keep += sum_of(sum[j]);
  asm volatile("" ::"r"(&keep) : "memory");
  return rounds * kSums * 16 * 2;
}

#if defined(__AMX_TILE__)
template <bool kInt8>
int64_t multiply_tiles(int64_t rounds) {
  configure(16, 16);
  for (int64_t i = 0; i < rounds; ++i) {
    if constexpr (kInt8) {
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_release();
  return rounds * 4 * 16 * 16 * (kInt8 ? 64 : 32) * 2;
}
constexpr ProbeLoops kLoops = {read_all, multiply_f32, multiply_tiles<true>, multiply_tiles<false>};
#else
constexpr ProbeLoops kLoops = {read_all, multiply_f32, nullptr, nullptr};
#endif

}  // namespace

const ProbeLoops& PELLUCID_JOIN(probe_, PELLUCID_LEVEL)() { return kLoops; }

}  // namespace pellucid
