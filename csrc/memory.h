// Memory that grows and is never shrunk: 64-byte aligned, zero at first, on huge pages where the system gives them. Weights
// are streamed at memory speed, and the hardware prefetcher stops at the end of a page.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>

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

// Has the system hand out a region's pages in the background, at the lowest priority: a fresh huge page takes milliseconds
// of clearing on some virtual machines, which a step should not wait for. What is written meanwhile stays.
//
// The region holds `count` arrays of `bytes` that are used from their beginnings on, so their first pages come first.
// Where the host of a virtual machine has to find the page first, a core does nothing else meanwhile, whatever the priorities
// inside: so whoever runs a step calls slow_down(), and for a moment a page is followed by a rest of nine times its time.
class Populating {
 public:
  Populating(void* start, size_t count, size_t bytes);
  ~Populating();  // stops, within the time of a page
  Populating(const Populating&) = delete;
  Populating& operator=(const Populating&) = delete;
  void slow_down();
  bool done() const { return done_.load(std::memory_order_acquire); }

 private:
  void rest(std::chrono::steady_clock::duration worked) const;

  std::atomic<bool> stopping_{false}, done_{false};
  std::atomic<std::chrono::steady_clock::time_point> slow_until_{};
  std::thread thread_;
};

}  // namespace pellucid
