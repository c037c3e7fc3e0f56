#include "probe.h"

#include <chrono>
#include <cstring>
#include <stdexcept>

#include "memory.h"
#include "probe_loops.h"

namespace pellucid {
namespace {

const ProbeLoops& loops_for(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::amx: return probe_amx();
    case Isa::avx512: return probe_avx512();
    case Isa::avx2: return probe_avx2();
    case Isa::portable: break;
  }
#endif
  (void)isa;
  return probe_portable();
}

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Every thread does `work`, which returns the amount it did; one repetition lasts from barrier to barrier. All threads leave
// after the same number of repetitions, because rank 0 alone decides.
template <class Work>
void repeat(Team& team, double seconds, std::atomic<int64_t>* amount, std::atomic<bool>* more, double* best, Work work) {
  const double deadline = now_seconds() + seconds;
  do {
    team.barrier();
    if (team.rank == 0) amount->store(0);
    // Before the barrier: a thread that is held up behind it would else start its clock when others have done their share.
    const double began = now_seconds();
    team.barrier();
    amount->fetch_add(work());
    team.barrier();
    if (team.rank == 0) {
      const double rate = static_cast<double>(amount->load()) / (now_seconds() - began);
      *best = rate > *best ? rate : *best;
      more->store(now_seconds() < deadline);
    }
    team.barrier();
  } while (more->load());
}

}  // namespace

void probe_phase(Team& team, Isa isa, const std::string& what, int64_t bytes, double seconds, double* best) {
  static std::atomic<int64_t> amount;
  static std::atomic<bool> more;
  const ProbeLoops& loops = loops_for(isa);
  const auto run = [&](auto work) { repeat(team, seconds, &amount, &more, best, work); };
  if (what == "read" || what == "copy") {
    const int64_t share = bytes / team.size / 256 * 256;
    Buffer from(static_cast<size_t>(share) + 8192), to(what == "copy" ? static_cast<size_t>(share) : 1);
    std::memset(from.as<void>(), 1, from.bytes());
    std::memset(to.as<void>(), 1, to.bytes());
    if (what == "read") {
      run([&] {
        volatile uint64_t keep = loops.read(from.as<uint8_t>(), share);
        (void)keep;
        return share;
      });
    } else {
      run([&] {
        std::memcpy(to.as<void>(), from.as<void>(), static_cast<size_t>(share));
        return share;
      });
    }
    team.barrier();
  } else if (what == "int8") {
    if (loops.multiply_int8) run([&] { return loops.multiply_int8(20000); });
  } else if (what == "bf16") {
    if (loops.multiply_bf16) run([&] { return loops.multiply_bf16(20000); });
  } else if (what == "f32") {
    run([&] { return loops.multiply_f32(20000); });
  } else if (what == "barrier") {
    run([&]() -> int64_t {
      for (int i = 0; i < 1000; ++i) team.barrier();
      return team.rank == 0 ? 1000 : 0;
    });
  }
}

}  // namespace pellucid
