// The probe's inner loops, compiled per level.
#pragma once

#include <cstdint>

namespace pellucid {

struct ProbeLoops {
  uint64_t (*read)(const uint8_t* data, int64_t bytes);  // touches every cache line with loads as wide as the level has
  int64_t (*multiply_f32)(int64_t rounds);               // returns operations done
  int64_t (*multiply_int8)(int64_t rounds);
  int64_t (*multiply_bf16)(int64_t rounds);
};

const ProbeLoops& probe_portable();
#if defined(__x86_64__)
const ProbeLoops& probe_avx2();
const ProbeLoops& probe_avx512();
const ProbeLoops& probe_amx();
#endif

}  // namespace pellucid
