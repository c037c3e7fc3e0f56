#include "packing.h"

#include <cmath>
#include <cstring>
#include <vector>

namespace pellucid {
namespace {

// The compiler's own conversions take 100 ns for numbers below 2^-14, which scales of K types often are.
uint16_t to_f16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;  // not a number
  } else if (magnitude < 0x38800000) {
    const float shifted = std::fabs(x) + 0.5f;  // whose last bit is 2^-24, as that of the smallest float16
    std::memcpy(&half, &shifted, 4);
    half -= 0x3f000000;
  } else {
    half = (magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13;
    half = half < 0x7c00 + (112 << 10) ? half - (112 << 10) : 0x7c00;
  }
  return static_cast<uint16_t>(sign | half);
}

float from_f16(const uint8_t* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, 2);
  const uint32_t sign = uint32_t{half} >> 15 << 31, magnitude = half & 0x7fff;
  if (magnitude < 0x400) return (sign ? -0x1p-24f : 0x1p-24f) * static_cast<float>(magnitude);
  const uint32_t word = sign | (magnitude + (magnitude < 0x7c00 ? 112 << 10 : 224 << 10)) << 13;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
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

// The 6-bit scale and minimum of group `j` of eight in the 12 bytes of a Q4_K or Q5_K block.
void six_bit_constants(const uint8_t* packed, int64_t j, int* scale, int* minimum) {
  if (j < 4) {
    *scale = packed[j] & 63;
    *minimum = packed[j + 4] & 63;
  } else {
    *scale = (packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4);
    *minimum = (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4);
  }
}

// Of each of 32 bytes the bits of `mask` from `shift` on, eight bytes at a time.
void copy_bits(const uint8_t* bytes, int64_t shift, uint8_t mask, uint8_t* to) {
  for (int i = 0; i < kGroup; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, bytes + i, 8);
    eight = eight >> shift & mask * uint64_t{0x0101010101010101};
    std::memcpy(to + i, &eight, 8);
  }
}

// Half of the nibbles of 32 bytes, as the K types keep a group, to the order of Q4_0.
void regroup_nibbles(const uint8_t* bytes, bool high, uint8_t* sixteen_bytes) {
  uint8_t nibbles[kGroup];
  copy_bits(bytes, high ? 4 : 0, 15, nibbles);
  for (int i = 0; i < 16; ++i) sixteen_bytes[i] = static_cast<uint8_t>(nibbles[i] | nibbles[i + 16] << 4);
}

// Q4_0, Q4_1, Q5_0, Q5_1: a float16 scale, perhaps a minimum, perhaps 32 fifth bits, nibbles.
void read_plain(GgufType type, const uint8_t* row, int64_t g, BitGroup* to) {
  const bool five = type == GgufType::q5_0 || type == GgufType::q5_1;
  const bool stored_minimum = type == GgufType::q4_1 || type == GgufType::q5_1;
  const uint8_t* p = row + g * (18 + 2 * stored_minimum + 4 * five);
  to->first = from_f16(p);
  to->second = stored_minimum ? from_f16(p + 2) : (five ? -16.0f : -8.0f) * to->first;
  p += stored_minimum ? 4 : 2;
  uint32_t fifth;
  std::memcpy(&fifth, p, 4);
  for (int i = 0; five && i < kGroup; ++i) to->upper[i] = fifth >> i & 1;
  std::memcpy(to->nibbles, p + 4 * five, 16);
}

// Q4_K, Q5_K: blocks of 256 with two float16, eight 6-bit scales and minima, perhaps 256 fifth bits, nibbles.
void read_k_with_minima(GgufType type, const uint8_t* row, int64_t g, BitGroup* to) {
  const bool five = type == GgufType::q5_k;
  const uint8_t* p = row + g / 8 * (144 + 32 * five);
  const int64_t j = g % 8;
  int scale, minimum;
  six_bit_constants(p + 4, j, &scale, &minimum);
  to->first = rounded_to_f16(from_f16(p) * static_cast<float>(scale));
  to->second = rounded_to_f16(-from_f16(p + 2) * static_cast<float>(minimum));
  if (five) copy_bits(p + 16, j, 1, to->upper);
  regroup_nibbles(p + 16 + 32 * five + j / 2 * 32, j % 2 != 0, to->nibbles);
}

// Q6_K: blocks of 256 with nibbles, upper bits two by two, sixteen 8-bit scales and a float16 that multiplies them.
void read_q6_k(const uint8_t* row, int64_t g, BitGroup* to) {
  const uint8_t* p = row + g / 8 * 210;
  const int64_t half = g % 8 / 4, j = g % 4;  // of the 128 weights whose bits share bytes, a quarter
  copy_bits(p + 128 + 32 * half, 2 * j, 3, to->upper);
  regroup_nibbles(p + 64 * half + j % 2 * 32, j >= 2, to->nibbles);
  const auto* scales = reinterpret_cast<const int8_t*>(p + 192) + g % 8 * 2;
  to->first = rounded_to_f16(from_f16(p + 208) * static_cast<float>(scales[0]));
  to->second = rounded_to_f16(from_f16(p + 208) * static_cast<float>(scales[1]));
}

int64_t gguf_row_bytes(GgufType type, int64_t k) {
  switch (type) {
    case GgufType::q4_0: return k / 32 * 18;
    case GgufType::q4_1: return k / 32 * 20;
    case GgufType::q5_0: return k / 32 * 22;
    case GgufType::q5_1: return k / 32 * 24;
    case GgufType::q8_0: return k / 32 * 34;
    case GgufType::q4_k: return k / 256 * 144;
    case GgufType::q5_k: return k / 256 * 176;
    case GgufType::q6_k: return k / 256 * 210;
  }
  return 0;
}

}  // namespace

PackedWeight::PackedWeight(Format format, int64_t n, int64_t k) {
  const int64_t n_padded = round_up(n, 2 * kBlock), k_padded = round_up(k, 64);
  data_ = Part(static_cast<size_t>(n_padded / kBlock * block_bytes(format, k_padded)));
  if (format == Format::int8) column_scale_ = Part(static_cast<size_t>(n_padded) * 4);
  if (format == Format::int8) std::memset(data_.as<void>(), 128, data_.bytes());  // bytes are value + 128
  view_ = {format, n, k, n_padded, k_padded, data_.as<uint8_t>(), column_scale_.as<float>(), 1.0f};
}

// The unit is the smallest power of 16 that the largest value allows: matrices of about one size share it. Reckoned in float16
// and lifted by half a step (csrc/tiles.h) the value may come out a two-hundredth larger, and two units would be lost.
void PackedWeight::make_room_for(float magnitude) {
  if (!(magnitude > largest_) || !std::isfinite(magnitude)) return;
  largest_ = magnitude;
  view_.unit = std::exp2(4.0f * std::floor((std::log2(1.01f * magnitude) + 3.0f) / 4.0f));
}

uint8_t* PackedWeight::group_at(int64_t row, int64_t group, Placement to) const {
  const int64_t block = to.first_block + row / kBlock * to.stride;
  return data_.as<uint8_t>() + block * block_bytes(view_.format, view_.k_padded) + group * group_bytes(view_.format);
}

void PackedWeight::put_bits(uint8_t* group, int64_t column, const BitGroup& from) {
  const Format format = view_.format;
  for (int quad = 0; quad < 4; ++quad) std::memcpy(group + (quad * kBlock + column) * 4, from.nibbles + quad * 4, 4);
  if (format == Format::q5_min || format == Format::q6) {
    const int bits = format == Format::q6 ? 2 : 1, quads = 8 / bits;  // whose upper bits share a byte
    uint32_t four[8], shared = 0;
    std::memcpy(four, from.upper, kGroup);
    for (int quad = 0; quad < 8; ++quad) {
      shared |= four[quad] << quad % quads * bits;
      if (quad % quads != quads - 1) continue;
      std::memcpy(group + 256 + quad / quads * 64 + column * 4, &shared, 4);
      shared = 0;
    }
  }
  auto* constants = reinterpret_cast<uint16_t*>(group + group_value_bytes(format));
  constants[column] = to_f16(from.first);
  if (format != Format::q4) constants[kBlock + column] = to_f16(from.second);
  if (format == Format::q6) return make_room_for(32.0f * std::fmax(std::fabs(from.first), std::fabs(from.second)));
  const float steps = format == Format::q5_min ? 31.0f : 15.0f;
  make_room_for(std::fmax(std::fabs(from.second), std::fabs(from.second + steps * from.first)));
}

void PackedWeight::put_bytes(uint8_t* group, int64_t column, const int8_t* values, float scale) {
  make_room_for(128.0f * std::fabs(scale));
  for (int i = 0; i < kGroup; ++i)
    group[(i / 4 * kBlock + column) * 4 + i % 4] = static_cast<uint8_t>(values[i] + 128);
  reinterpret_cast<uint16_t*>(group + 512)[column] = to_f16(scale);
}

void PackedWeight::pack_gguf(GgufType type, const uint8_t* rows, int64_t num_rows, Placement to) {
  const int64_t groups = view_.k / kGroup;
  BitGroup bits;
  for (int64_t row = 0; row < num_rows; ++row, rows += gguf_row_bytes(type, view_.k)) {
    for (int64_t g = 0; g < groups; ++g) {
      uint8_t* group = group_at(row, g, to);
      if (type == GgufType::q8_0) {
        const uint8_t* p = rows + g * 34;
        put_bytes(group, row % kBlock, reinterpret_cast<const int8_t*>(p + 2), from_f16(p));
        continue;
      }
      if (type == GgufType::q6_k) read_q6_k(rows, g, &bits);
      else if (type == GgufType::q4_k || type == GgufType::q5_k) read_k_with_minima(type, rows, g, &bits);
      else read_plain(type, rows, g, &bits);
      put_bits(group, row % kBlock, bits);
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
    BitGroup bits{{}, {}, scale, minimum};
    for (int i = 0; i < kGroup; ++i) {
      const float q = scale > 0 ? std::nearbyint((x[i] - minimum) / scale) : centred ? 8.0f : 0.0f;
      const auto nibble = static_cast<uint8_t>(std::fmin(std::fmax(q, 0.0f), 15.0f));
      bits.nibbles[i % 16] = static_cast<uint8_t>(bits.nibbles[i % 16] | nibble << (i < 16 ? 0 : 4));
    }
    put_bits(group, column, bits);
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
