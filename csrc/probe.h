// How fast this machine can possibly go: the denominators of every efficiency that the kernels report.
#pragma once

#include <cstdint>
#include <string>

#include "isa.h"
#include "thread_pool.h"

namespace pellucid {

// Measures for about `seconds` on the whole team and puts the best rate seen into *best (rank 0):
//   read           bytes per second, reading `bytes` in all
//   copy           bytes per second copied, `bytes` in all
//   int8, bf16     operations per second of the tiles (a multiply and an add are two); 0 without tiles
//   f32            operations per second of vector fused multiply-adds
//   barrier        barriers per second
// Throws std::invalid_argument for another word.
void probe_phase(Team& team, Isa isa, const std::string& what, int64_t bytes, double seconds, double* best);

}  // namespace pellucid
