#include "isa.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pellucid {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512", "amx"};

#if defined(__x86_64__)

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  if (!__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d)) return {};
  return r;
}

bool bit(unsigned word, int index) { return (word >> index) & 1u; }

// The register states that the operating system saves (XCR0). Written as bytes: the intrinsic would need -mxsave.
uint64_t saved_states() {
  uint32_t low, high;
  asm volatile(".byte 0x0f, 0x01, 0xd0" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

// Linux hands out the 8 KiB of tile state only to processes that ask: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA).
bool tiles_granted() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

Isa detect() {
  const Registers one = cpuid(1, 0), seven = cpuid(7, 0), seven_one = cpuid(7, 1);
  if (!bit(one.c, 27)) return Isa::portable;  // OSXSAVE
  const uint64_t saved = saved_states();
  const bool saves_ymm = (saved & 0x6) == 0x6;
  const bool saves_zmm = (saved & 0xe6) == 0xe6;
  const bool saves_tiles = (saved & 0x60000) == 0x60000;

  if (!(saves_ymm && bit(one.c, 12) && bit(one.c, 29) && bit(seven.b, 5))) return Isa::portable;
  const bool avx512 = bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) && bit(seven.b, 31) && bit(seven.c, 11);
  if (!(saves_zmm && avx512)) return Isa::avx2;
  // And the byte permutations of AVX512-VBMI, which every processor with tiles has.
  // And float16 arithmetic.
  const bool amx = bit(seven.c, 1) && bit(seven.d, 22) && bit(seven.d, 23) && bit(seven.d, 24) && bit(seven.d, 25) && bit(seven_one.a, 5);
  if (!(saves_tiles && amx && tiles_granted())) return Isa::avx512;
  return Isa::amx;
}

#else

Isa detect() { return Isa::portable; }

#endif

}  // namespace

Isa best_isa() {
  static const Isa isa = detect();
  return isa;
}

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

bool parse_isa(const std::string& name, Isa* isa) {
  for (int i = 0; i < 4; ++i) {
    if (name == kNames[i]) {
      *isa = static_cast<Isa>(i);
      return true;
    }
  }
  return false;
}

bool isa_compiled(Isa isa) {
#if defined(__x86_64__)
  (void)isa;
  return true;
#else
  return isa == Isa::portable;
#endif
}

}  // namespace pellucid
