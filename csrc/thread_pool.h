// One persistent team of threads for every kernel. One idea: a job is run by all threads at once (SPMD), and inside it
// they meet at barriers that cost a fraction of a microsecond.
//
// - The caller of run() is rank 0; ranks 1.. are threads of the pool, each pinned to its core.
// - Between jobs the threads spin for `spin_seconds` and then sleep on a futex: inside a step they are always awake,
//   and an idle engine costs nothing.
// - One job at a time: concurrent callers wait for each other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace pellucid {

class ThreadPool;

// What one thread knows about the job it is in.
struct Team {
  ThreadPool* pool;
  int rank;
  int size;
  std::byte* scratch;  // kScratchBytes, this thread's own, 64-byte aligned

  void barrier();
  // Counts 0, 1, 2, ... over the whole team; the counter starts at 0 after every barrier that `reset_tickets` precedes.
  int64_t ticket();
  void reset_tickets();  // by one rank only, between two barriers
};

class ThreadPool {
 public:
  static constexpr size_t kScratchBytes = size_t{8} << 20;

  // `cores[i]` is the core of rank i; the caller is put on cores[0] only for jobs that ask for it.
  ThreadPool(std::vector<int> cores, double spin_seconds);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(cores_.size()); }

  // How long the last job's threads were kept from their cores by others, of the one that lost most: wall time less
  // processor time. They never sleep inside a job, and those that are not held up wait for the one that is.
  double stolen_seconds() const;

  // Runs `job(team)` once on every thread and returns when all are done. `pin_caller` keeps the calling thread on
  // cores[0] meanwhile: worth two system calls for a whole step, not for one small kernel.
  template <class Job>
  void run(Job&& job, bool pin_caller = false) {
    run_erased([](void* context, Team& team) { (*static_cast<std::remove_reference_t<Job>*>(context))(team); }, &job,
               pin_caller);
  }

 private:
  friend struct Team;
  using Entry = void (*)(void*, Team&);

  void run_erased(Entry entry, void* context, bool pin_caller);
  void work(int rank);
  void take_part(Team& team);
  void wait_for_job(uint32_t seen);
  void barrier();

  std::vector<int> cores_;
  int64_t spin_nanoseconds_;
  std::vector<std::byte*> scratch_;
  std::vector<int64_t> stolen_nanoseconds_;  // by rank
  std::vector<std::thread> threads_;
  std::mutex callers_;
  Entry entry_ = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int64_t> tickets_{0};
};

}  // namespace pellucid
