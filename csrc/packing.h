// From a file's weights to packed ones, once, at load. GGUF's rows of 4, 5, 6 and 8 bits are regrouped and never become
// floats; float rows are rounded or quantised.
#pragma once

#include "kernels.h"
#include "memory.h"

namespace pellucid {

// GGUF tensor types by their numbers in the file format.
enum class GgufType : int32_t { q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8, q4_k = 12, q5_k = 13, q6_k = 14 };

// 32 weights of a row as nibbles (byte i holds those of values i and i + 16, as in Q4_0), what is above them, and the two
// constants of their packed format: scale and minimum, or (q6) the scales of both halves.
struct BitGroup {
  uint8_t nibbles[16];
  uint8_t upper[kGroup];
  float first, second;
};

// Where the rows of one source go: row r of the source becomes column (r % 16) of block first_block + (r / 16) * stride.
// stride 1 puts sources one after another (query, key, value); stride 2 interleaves two of them (gate, up).
struct Placement {
  int64_t first_block;
  int64_t stride;
};

class PackedWeight {
 public:
  PackedWeight(Format format, int64_t n, int64_t k);

  void pack_gguf(GgufType type, const uint8_t* rows, int64_t num_rows, Placement to);
  void pack_floats(const void* rows, Dtype dtype, int64_t num_rows, Placement to);

  Weight view() const { return view_; }
  int64_t bytes() const { return static_cast<int64_t>(data_.bytes() + column_scale_.bytes()); }

 private:
  uint8_t* group_at(int64_t row, int64_t group, Placement to) const;
  void put_bits(uint8_t* group, int64_t column, const BitGroup& from);
  void put_bytes(uint8_t* group, int64_t column, const int8_t* values, float scale);
  void pack_float_row(const float* row, int64_t index, Placement to);
  void make_room_for(float magnitude);

  Part data_;
  Part column_scale_;
  Weight view_{};
  float largest_ = 0.0f;
};

}  // namespace pellucid
