// Which instructions this process may use. One idea: a level is usable only if the processor has it, the operating
// system saves its registers, and (for the tiles) the kernel has granted them to this process.
#pragma once

#include <string>

namespace pellucid {

// Ordered: each level may use everything that the levels before it may.
//   avx2    AVX2, FMA, F16C
//   avx512  AVX-512 F, BW, DQ, VL and VNNI
//   amx     AVX-512 BF16, AMX tiles with int8 and bfloat16
enum class Isa { portable, avx2, avx512, amx };

Isa best_isa();                              // asks the operating system for the tiles on first use
const char* isa_name(Isa isa);
bool parse_isa(const std::string& name, Isa* isa);
bool isa_compiled(Isa isa);                  // false where this binary was built for another processor family

}  // namespace pellucid
