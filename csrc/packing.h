// From a file's weights to packed ones, once, at load. GGUF's 4-bit and 8-bit rows are regrouped byte by byte and never
// become floats; float rows are rounded or quantised.
#pragma once

#include "kernels.h"
#include "memory.h"

namespace pellucid {

// GGUF tensor types by their numbers in the file format.
enum class GgufType : int32_t { q4_0 = 2, q4_1 = 3, q8_0 = 8, q4_k = 12 };

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
  void put_nibbles(uint8_t* group, int64_t column, const uint8_t* sixteen_bytes, float scale, float minimum);
  void put_bytes(uint8_t* group, int64_t column, const int8_t* values, float scale);
  void pack_float_row(const float* row, int64_t index, Placement to);
  void make_room_for(float magnitude);

  Part data_;
  Part column_scale_;
  Weight view_{};
  float largest_ = 0.0f;
};

Format format_of(GgufType type);
int64_t gguf_row_bytes(GgufType type, int64_t k);

}  // namespace pellucid
