// Memory that grows and is never shrunk: 64-byte aligned, zero at first, on huge pages where the system gives them. Weights
// are streamed at memory speed, and the hardware prefetcher stops at the end of a page.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pellucid {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes) { reserve(bytes); }
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
    other.data_ = nullptr;
    other.bytes_ = 0;
  }

  // At least `bytes`; what was there is lost when it grows.
  void reserve(size_t bytes);
  size_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace pellucid
