#include "thread_pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <new>

namespace pellucid {
namespace {

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t now_nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// On-processor time of the calling thread.
int64_t worked_nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec * 1000000000 + t.tv_nsec;
}

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void pin_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof set, &set);  // refused in some sandboxes: then the scheduler places the thread
}

// A thread that lost its core to another process would be waited for until it is scheduled again; yielding after a
// while gives it ours if it is queued here.
template <class Done>
void spin_until(Done done) {
  for (int spins = 0; !done(); ++spins) {
    pause_briefly();
    if (spins >= 20000) {
      sched_yield();
      spins = 0;
    }
  }
}

}  // namespace

void Team::barrier() { pool->barrier(); }
int64_t Team::ticket() { return pool->tickets_.fetch_add(1, std::memory_order_relaxed); }
void Team::reset_tickets() { pool->tickets_.store(0, std::memory_order_relaxed); }

ThreadPool::ThreadPool(std::vector<int> cores, double spin_seconds)
    : cores_(std::move(cores)),
      spin_nanoseconds_(static_cast<int64_t>(spin_seconds * 1e9)),
      stolen_nanoseconds_(cores_.size()) {
  for (size_t i = 0; i < cores_.size(); ++i) {
    void* memory = mmap(nullptr, kScratchBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    madvise(memory, kScratchBytes, MADV_HUGEPAGE);
    scratch_.push_back(static_cast<std::byte*>(memory));
  }
  for (int rank = 1; rank < size(); ++rank) threads_.emplace_back([this, rank] { work(rank); });
}

ThreadPool::~ThreadPool() {
  stopping_.store(true, std::memory_order_release);
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&epoch_);
  for (auto& thread : threads_) thread.join();
  for (std::byte* memory : scratch_) munmap(memory, kScratchBytes);
}

void ThreadPool::run_erased(Entry entry, void* context, bool pin_caller) {
  std::lock_guard<std::mutex> one_job(callers_);
  cpu_set_t before;
  const bool pinned = pin_caller && sched_getaffinity(0, sizeof before, &before) == 0;
  if (pinned) pin_to(cores_[0]);

  entry_ = entry;
  context_ = context;
  tickets_.store(0, std::memory_order_relaxed);
  running_.store(size() - 1, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake_all(&epoch_);

  Team team{this, 0, size(), scratch_[0]};
  take_part(team);
  spin_until([this] { return running_.load(std::memory_order_acquire) == 0; });
  if (pinned) sched_setaffinity(0, sizeof before, &before);
}

void ThreadPool::work(int rank) {
  pin_to(cores_[rank]);
  for (uint32_t seen = 0;; ++seen) {
    wait_for_job(seen);
    if (stopping_.load(std::memory_order_acquire)) return;
    Team team{this, rank, size(), scratch_[rank]};
    take_part(team);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

void ThreadPool::take_part(Team& team) {
  const int64_t began = now_nanoseconds(), worked = worked_nanoseconds();
  entry_(context_, team);
  stolen_nanoseconds_[static_cast<size_t>(team.rank)] = now_nanoseconds() - began - (worked_nanoseconds() - worked);
}

double ThreadPool::stolen_seconds() const {
  const int64_t most = *std::max_element(stolen_nanoseconds_.begin(), stolen_nanoseconds_.end());
  return 1e-9 * static_cast<double>(std::max<int64_t>(0, most));
}

void ThreadPool::wait_for_job(uint32_t seen) {
  const int64_t deadline = now_nanoseconds() + spin_nanoseconds_;
  while (epoch_.load(std::memory_order_acquire) == seen) {
    for (int i = 0; i < 64 && epoch_.load(std::memory_order_relaxed) == seen; ++i) pause_briefly();
    if (now_nanoseconds() < deadline) continue;
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    futex_wait(&epoch_, seen);  // returns at once if a job came in between
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

void ThreadPool::barrier() {
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size() - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
  } else {
    spin_until([&] { return phase_.load(std::memory_order_acquire) != phase; });
  }
}

}  // namespace pellucid
