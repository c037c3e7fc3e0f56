#include "packing.h"

#include <cmath>
#include <cstring>
#include <vector>

namespace pellucid {
namespace {

uint16_t to_f16(float x) {
  const _Float16 half = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

float from_f16(const uint8_t* bytes) {
  _Float16 half;
  std::memcpy(&half, bytes, 2);
  return static_cast<float>(half);
}

float rounded_to_f16(float x) {
  const uint16_t bits = to_f16(x);
  return from_f16(reinterpret_cast<const uint8_t*>(&bits));
}

float from_bf16(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The 6-bit scale and minimum of group `j` of eight in a Q4_K block's 12 bytes.
void q4_k_constants(const uint8_t* packed, int j, int* scale, int* minimum) {
  if (j < 4) {
    *scale = packed[j] & 63;
    *minimum = packed[j + 4] & 63;
  } else {
    *scale = (packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4);
    *minimum = (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4);
  }
}

// Half of the nibbles of 32 bytes, as GGUF's Q4_K keeps a group, to the order of Q4_0: byte i holds values i and i + 16.
void regroup_q4_k(const uint8_t* bytes, bool high, uint8_t* sixteen_bytes) {
  for (int i = 0; i < 16; ++i) {
    const int first = high ? bytes[i] >> 4 : bytes[i] & 15;
    const int second = high ? bytes[i + 16] >> 4 : bytes[i + 16] & 15;
    sixteen_bytes[i] = static_cast<uint8_t>(first | second << 4);
  }
}

}  // namespace

Format format_of(GgufType type) {
  switch (type) {
    case GgufType::q4_0: return Format::q4;
    case GgufType::q8_0: return Format::q8;
    default: return Format::q4_min;
  }
}

int64_t gguf_row_bytes(GgufType type, int64_t k) {
  switch (type) {
    case GgufType::q4_0: return k / 32 * 18;
    case GgufType::q4_1: return k / 32 * 20;
    case GgufType::q8_0: return k / 32 * 34;
    default: return k / 256 * 144;
  }
}

PackedWeight::PackedWeight(Format format, int64_t n, int64_t k) {
  const int64_t n_padded = round_up(n, 2 * kBlock), k_padded = round_up(k, 64);
  data_ = Part(static_cast<size_t>(n_padded / kBlock * block_bytes(format, k_padded)));
  if (format == Format::int8) column_scale_ = Part(static_cast<size_t>(n_padded) * 4);
  if (format == Format::int8) std::memset(data_.as<void>(), 128, data_.bytes());  // bytes are value + 128
  view_ = {format, n, k, n_padded, k_padded, data_.as<uint8_t>(), column_scale_.as<float>(), 1.0f};
}

// The unit is the smallest power of 16 that the largest value allows: matrices of about one size share it.
void PackedWeight::make_room_for(float magnitude) {
  if (!(magnitude > largest_) || !std::isfinite(magnitude)) return;
  largest_ = magnitude;
  view_.unit = std::exp2(4.0f * std::floor((std::log2(magnitude) + 3.0f) / 4.0f));
}

uint8_t* PackedWeight::group_at(int64_t row, int64_t group, Placement to) const {
  const int64_t block = to.first_block + row / kBlock * to.stride;
  return data_.as<uint8_t>() + block * block_bytes(view_.format, view_.k_padded) + group * group_bytes(view_.format);
}

void PackedWeight::put_nibbles(uint8_t* group, int64_t column, const uint8_t* sixteen_bytes, float scale, float minimum) {
  for (int quad = 0; quad < 4; ++quad) std::memcpy(group + (quad * kBlock + column) * 4, sixteen_bytes + quad * 4, 4);
  make_room_for(std::fmax(std::fabs(minimum), std::fabs(minimum + 15.0f * scale)));
  auto* constants = reinterpret_cast<uint16_t*>(group + 256);
  constants[column] = to_f16(scale);
  if (view_.format == Format::q4_min) constants[kBlock + column] = to_f16(minimum);
}

void PackedWeight::put_bytes(uint8_t* group, int64_t column, const int8_t* values, float scale) {
  make_room_for(128.0f * std::fabs(scale));
  for (int i = 0; i < kGroup; ++i)
    group[(i / 4 * kBlock + column) * 4 + i % 4] = static_cast<uint8_t>(values[i] + 128);
  reinterpret_cast<uint16_t*>(group + 512)[column] = to_f16(scale);
}

void PackedWeight::pack_gguf(GgufType type, const uint8_t* rows, int64_t num_rows, Placement to) {
  const int64_t groups = view_.k / kGroup;
  uint8_t nibbles[16];
  for (int64_t row = 0; row < num_rows; ++row, rows += gguf_row_bytes(type, view_.k)) {
    for (int64_t g = 0; g < groups; ++g) {
      uint8_t* group = group_at(row, g, to);
      if (type == GgufType::q8_0) {
        const uint8_t* p = rows + g * 34;
        const auto* values = reinterpret_cast<const int8_t*>(p + 2);
        put_bytes(group, row % kBlock, values, from_f16(p));
        continue;
      }
      float scale, minimum;
      if (type == GgufType::q4_k) {
        const uint8_t* p = rows + g / 8 * 144;
        int six_bit_scale, six_bit_minimum;
        q4_k_constants(p + 4, static_cast<int>(g % 8), &six_bit_scale, &six_bit_minimum);
        scale = rounded_to_f16(from_f16(p) * static_cast<float>(six_bit_scale));
        minimum = rounded_to_f16(-from_f16(p + 2) * static_cast<float>(six_bit_minimum));
        regroup_q4_k(p + 16 + g % 8 / 2 * 32, g % 2 != 0, nibbles);
      } else {
        const bool stored_minimum = type == GgufType::q4_1;
        const uint8_t* p = rows + g * (stored_minimum ? 20 : 18);
        scale = from_f16(p);
        minimum = stored_minimum ? from_f16(p + 2) : -8.0f * scale;
        std::memcpy(nibbles, p + (stored_minimum ? 4 : 2), 16);
      }
      put_nibbles(group, row % kBlock, nibbles, scale, minimum);
    }
  }
}

// Each group's constants are chosen after their own rounding to float16, so that the values fit what is stored.
void PackedWeight::pack_float_row(const float* row, int64_t index, Placement to) {
  const int64_t column = index % kBlock;
  const int64_t groups = view_.k_padded / kGroup;
  for (int64_t g = 0; g < groups; ++g) {
    const float* x = row + g * kGroup;
    float low = x[0], high = x[0];
    for (int i = 1; i < kGroup; ++i) {
      low = std::fmin(low, x[i]);
      high = std::fmax(high, x[i]);
    }
    uint8_t* group = group_at(index, g, to);
    if (view_.format == Format::q8) {
      const float scale = rounded_to_f16(std::fmax(-low, high) / 127.0f);
      int8_t values[kGroup];
      for (int i = 0; i < kGroup; ++i) {
        const float q = scale > 0 ? std::nearbyint(x[i] / scale) : 0.0f;
        values[i] = static_cast<int8_t>(std::fmin(std::fmax(q, -127.0f), 127.0f));
      }
      put_bytes(group, column, values, scale);
      continue;
    }
    const bool centred = view_.format == Format::q4;
    const float scale = rounded_to_f16(centred ? std::fmax(-low / 8.0f, high / 7.0f) : (high - low) / 15.0f);
    const float minimum = centred ? -8.0f * scale : rounded_to_f16(low);
    uint8_t nibbles[16] = {};
    for (int i = 0; i < kGroup; ++i) {
      const float q = scale > 0 ? std::nearbyint((x[i] - minimum) / scale) : centred ? 8.0f : 0.0f;
      const auto nibble = static_cast<uint8_t>(std::fmin(std::fmax(q, 0.0f), 15.0f));
      nibbles[i % 16] = static_cast<uint8_t>(nibbles[i % 16] | nibble << (i < 16 ? 0 : 4));
    }
    put_nibbles(group, column, nibbles, scale, minimum);
  }
}

void PackedWeight::pack_floats(const void* rows, Dtype dtype, int64_t num_rows, Placement to) {
  std::vector<float> x(static_cast<size_t>(view_.k_padded), 0.0f);
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t k = 0; k < view_.k; ++k) {
      const int64_t at = row * view_.k + k;
      x[static_cast<size_t>(k)] = dtype == Dtype::f32 ? static_cast<const float*>(rows)[at]
                                                      : from_bf16(static_cast<const uint16_t*>(rows)[at]);
    }
    const int64_t column = row % kBlock;
    uint8_t* block = data_.as<uint8_t>() +
                     (to.first_block + row / kBlock * to.stride) * block_bytes(view_.format, view_.k_padded);
    if (view_.format == Format::bf16) {
      for (int64_t k = 0; k < view_.k; ++k) {
        const uint16_t h = to_bf16(x[static_cast<size_t>(k)]);
        std::memcpy(block + ((k / 2) * kBlock + column) * 4 + k % 2 * 2, &h, 2);
      }
    } else if (view_.format == Format::int8) {
      float top = 0;
      for (float v : x) top = std::fmax(top, std::fabs(v));
      const float inverse = top > 0 ? 127.0f / top : 0.0f;
      for (int64_t k = 0; k < view_.k; ++k)
        block[((k / 4) * kBlock + column) * 4 + k % 4] =
            static_cast<uint8_t>(static_cast<int>(std::nearbyint(x[static_cast<size_t>(k)] * inverse)) + 128);
      column_scale_.as<float>()[(to.first_block + row / kBlock * to.stride) * kBlock + column] = top / 127.0f;
    } else {
      pack_float_row(x.data(), row, to);
    }
  }
}

}  // namespace pellucid
