#include "memory.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <new>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // older headers; the kernel decides
#endif

namespace pellucid {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSmall = size_t{64} << 10;  // from here on a whole huge page is worth it
constexpr size_t kShared = size_t{32} << 20;  // what parts are cut from; what is not touched takes no memory

using Clock = std::chrono::steady_clock;
constexpr Clock::duration kMoment = std::chrono::milliseconds(200);  // longer than most steps

}  // namespace

Buffer::~Buffer() {
  if (data_) munmap(data_, bytes_);
}

void Buffer::reserve(size_t bytes) {
  if (bytes <= bytes_) return;
  if (data_) munmap(data_, bytes_);
  data_ = nullptr;
  const size_t unit = bytes < kSmall ? size_t{4096} : kHugePage;
  bytes_ = (bytes + unit - 1) / unit * unit;
  // Map one huge page more than needed and give back the ends, so that the data starts on a huge page.
  const size_t slack = unit == kHugePage ? kHugePage : 0;
  void* mapped = mmap(nullptr, bytes_ + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    bytes_ = 0;
    throw std::bad_alloc();
  }
  const auto start = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t aligned = (start + slack) / unit * unit;
  if (aligned > start) munmap(mapped, aligned - start);
  const uintptr_t end = start + bytes_ + slack;
  if (end > aligned + bytes_) munmap(reinterpret_cast<void*>(aligned + bytes_), end - aligned - bytes_);
  data_ = reinterpret_cast<void*>(aligned);
  if (slack) madvise(data_, bytes_, MADV_HUGEPAGE);
}

Part::Part(size_t bytes) : bytes_((bytes + 63) / 64 * 64) {
  static std::mutex guard;
  static std::weak_ptr<Buffer> latest;  // its parts keep it alive
  static size_t used;
  const std::lock_guard<std::mutex> one_at_a_time(guard);
  if (bytes_ >= kShared / 2) {
    whole_ = std::make_shared<Buffer>(bytes_);
    data_ = whole_->as<void>();
    return;
  }
  whole_ = latest.lock();
  if (!whole_ || used + bytes_ > kShared) {
    whole_ = std::make_shared<Buffer>(kShared);
    latest = whole_;
    used = 0;
  }
  data_ = whole_->as<char>() + used;
  used += bytes_;
}

Populating::Populating(void* start, size_t count, size_t bytes) {
  thread_ = std::thread([=, this] {
    setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 19);
    char* const first = static_cast<char*>(start);
    for (size_t offset = 0; offset < bytes; offset += kHugePage)
      for (size_t i = 0; i < count && !stopping_.load(std::memory_order_relaxed); ++i) {
        // Whole pages of 4 KiB: those at an array's ends may be its neighbour's too, which does no harm.
        const auto begin = reinterpret_cast<uintptr_t>(first + i * bytes + offset) & ~uintptr_t{4095};
        const auto end = reinterpret_cast<uintptr_t>(first + i * bytes + std::min(offset + kHugePage, bytes));
        // Refused before Linux 5.14: then pages are handed out when they are first used.
        const auto began = Clock::now();
        if (madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE) != 0) return;
        rest(Clock::now() - began);
      }
    done_.store(true, std::memory_order_release);
  });
}

void Populating::slow_down() { slow_until_.store(Clock::now() + kMoment, std::memory_order_relaxed); }

void Populating::rest(Clock::duration worked) const {
  const auto enough = Clock::now() + std::min<Clock::duration>(9 * worked, kMoment);
  while (!stopping_.load(std::memory_order_relaxed) && Clock::now() < enough &&
         Clock::now() < slow_until_.load(std::memory_order_relaxed))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

Populating::~Populating() {
  stopping_.store(true, std::memory_order_relaxed);
  thread_.join();
}

}  // namespace pellucid
