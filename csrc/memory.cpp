#include "memory.h"

#include <sys/mman.h>

#include <mutex>
#include <new>

namespace pellucid {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSmall = size_t{64} << 10;  // from here on a whole huge page is worth it
constexpr size_t kShared = size_t{32} << 20;  // what parts are cut from; what is not touched takes no memory

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

}  // namespace pellucid
