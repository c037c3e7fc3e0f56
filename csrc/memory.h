// Memory that grows and is never shrunk: 64-byte aligned, zero at first, on huge pages where the system gives them. Weights
// are streamed at memory speed, and the hardware prefetcher stops at the end of a page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

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

// A part of a larger buffer that many share, for memory that is too small to fill huge pages alone: the matrices of a small
// model. Zero at first; the buffer goes when its last part does.
class Part {
 public:
  Part() = default;
  explicit Part(size_t bytes);

  size_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  std::shared_ptr<Buffer> whole_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace pellucid
