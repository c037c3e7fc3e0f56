#include "memory.h"

#include <sys/mman.h>

#include <new>

namespace pellucid {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

Buffer::~Buffer() {
  if (data_) munmap(data_, bytes_);
}

void Buffer::reserve(size_t bytes) {
  if (bytes <= bytes_) return;
  if (data_) munmap(data_, bytes_);
  data_ = nullptr;
  const size_t unit = bytes < kHugePage ? size_t{4096} : kHugePage;
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

}  // namespace pellucid
