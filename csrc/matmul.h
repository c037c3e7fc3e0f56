// Matrix products without tiles: y = x . W^T for a pair of column blocks (32 columns) at a time.
//
// Grouped and int8 weights meet quantised activations through dot4 (VNNI where the level has it); bfloat16 weights are
// widened to floats. Every row is computed by the same sequence of operations whatever the number of rows.
#pragma once

#include "kernels.h"
#include "simd.h"
#include "rows.h"

namespace pellucid {
namespace {

constexpr int kPair = 32;       // columns computed together
constexpr int kRowsAtOnce = 8;  // rows whose sums fit in registers beside the weights

// Products of up to 16 rows with one pair of blocks, before bias and storing.
struct Product {
  float v[kBlock][kPair];
};

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
constexpr int64_t kPrefetchBytes = 2048;  // ahead of the stream of weights; none is 10-20 % slower, 4 KiB 10 % at one row

// The bits above the nibbles of one of eight quads, in their places: 16, and for q6 32.
template <Format kFormat>
inline Ints upper_bits(const uint8_t* p, int quad) {
  if constexpr (kFormat == Format::q5_min) return shift_left(load_ints(p + 256), 4 - quad) & splat_int(0x10101010);
  else return shift_left(load_ints(p + 256 + quad / 4 * 64), 4 - quad % 4 * 2) & splat_int(0x30303030);
}

// Products of a group's stored bytes, all of them or (q6) those of its two halves apart, with `rows` rows.
template <Format kFormat>
inline void group_dot(const uint8_t* p, const int8_t* x, int64_t x_stride, int rows, Ints* sum, Ints* upper_half) {
  if constexpr (kFormat == Format::q8) {
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) {
      const Ints w = load_ints(p + quad * 64);
      for (int r = 0; r < rows; ++r) {
        int32_t four;
        __builtin_memcpy(&four, x + r * x_stride + quad * 4, 4);
        sum[r] = dot4(sum[r], w, four);
      }
    }
  } else {
    const Ints nibbles = splat_int(0x0f0f0f0f);
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; ++quad) {
      const Ints both = load_ints(p + quad * 64);
      Ints low = both & nibbles, high = shift_right<4>(both) & nibbles;
      if constexpr (kFormat == Format::q5_min || kFormat == Format::q6) {
        low = low | upper_bits<kFormat>(p, quad);
        high = high | upper_bits<kFormat>(p, quad + 4);
      }
      for (int r = 0; r < rows; ++r) {
        int32_t first, second;
        __builtin_memcpy(&first, x + r * x_stride + quad * 4, 4);
        __builtin_memcpy(&second, x + r * x_stride + 16 + quad * 4, 4);
        sum[r] = dot4(sum[r], low, first);
        Ints& of_second = kFormat == Format::q6 ? upper_half[r] : sum[r];
        of_second = dot4(of_second, high, second);
      }
    }
  }
}

template <Format kFormat, int kRows>
void grouped_block(const uint8_t* p, const Panel& panel, int64_t row, float* out) {
  constexpr bool kHalves = kFormat == Format::q6, kMinimum = kFormat != Format::q8 && !kHalves;
  const int64_t groups = panel.k_padded / kGroup;
  const int8_t* x = reinterpret_cast<const int8_t*>(panel.data) + row * panel.k_padded;
  const float* scales = panel.scale + row * groups;
  const int32_t* sums = panel.sum + 2 * row * groups;
  Floats y[kRows];
  for (int r = 0; r < kRows; ++r) y[r] = zeros();
  for (int64_t g = 0; g < groups; ++g, p += group_bytes(kFormat)) {
    for (int64_t line = 0; line < group_bytes(kFormat); line += 64) prefetch(p + kPrefetchBytes + line);
    // The bytes are unsigned operands of dot4: the 128 or 32 that was added to each is taken off the sum.
    Ints sum[kRows], upper_half[kRows];
    for (int r = 0; r < kRows; ++r) {
      const int32_t first_half = sums[2 * (r * groups + g)], all = sums[2 * (r * groups + g) + 1];
      sum[r] = splat_int(kHalves ? -32 * first_half : kMinimum ? 0 : -128 * all);
      upper_half[r] = splat_int(kHalves ? -32 * (all - first_half) : 0);
    }
    group_dot<kFormat>(p, x + g * kGroup, panel.k_padded, kRows, sum, upper_half);
    const auto* constants = reinterpret_cast<const uint16_t*>(p + group_value_bytes(kFormat));
    const Floats scale = load_f16(constants);
    // The minimum, or the second half's scale. q4 is q4_min with the minimum -8 * scale.
    Floats second = zeros();
    if constexpr (kFormat == Format::q4) second = scale * splat(-8.0f);
    else if constexpr (kFormat != Format::q8) second = load_f16(constants + kBlock);
    for (int r = 0; r < kRows; ++r) {
      const float s = scales[r * groups + g];
      y[r] = multiply_add(to_floats(sum[r]) * splat(s), scale, y[r]);
      if constexpr (kMinimum)
        y[r] = multiply_add(splat(s * static_cast<float>(sums[2 * (r * groups + g) + 1])), second, y[r]);
      if constexpr (kHalves) y[r] = multiply_add(to_floats(upper_half[r]) * splat(s), second, y[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) store(out + r * kPair, y[r]);
}

template <Format kFormat, int kRows>
void int8_block(const uint8_t* p, const Panel& panel, int64_t row, float* out) {
  static_assert(kFormat == Format::int8);
  const int64_t steps = panel.k_padded / 64;
  Ints sum[kRows];
  for (int r = 0; r < kRows; ++r) sum[r] = splat_int(-128 * panel.sum[row + r]);
  for (int64_t step = 0; step < steps; ++step, p += 1024) {
    const uint8_t* x = panel.data + ((row / kBlock * steps + step) * kBlock + row % kBlock) * kStepBytes;
    for (int64_t line = 0; line < 1024; line += 64) prefetch(p + kPrefetchBytes + line);
    for (int quad = 0; quad < 16; ++quad) {
      const Ints w = load_ints(p + quad * 64);
      for (int r = 0; r < kRows; ++r) {
        int32_t four;
        __builtin_memcpy(&four, x + r * kStepBytes + quad * 4, 4);
        sum[r] = dot4(sum[r], w, four);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) store(out + r * kPair, to_floats(sum[r]) * splat(panel.scale[row + r]));
}

template <Format kFormat, int kRows>
void bf16_block(const uint8_t* p, const Panel& panel, int64_t row, float* out) {
  static_assert(kFormat == Format::bf16);
  const int64_t steps = panel.k_padded / 32;
  Floats y[kRows];
  for (int r = 0; r < kRows; ++r) y[r] = zeros();
  for (int64_t step = 0; step < steps; ++step, p += 1024) {
    const auto* x = reinterpret_cast<const uint16_t*>(
        panel.data + ((row / kBlock * steps + step) * kBlock + row % kBlock) * kStepBytes);
    for (int64_t line = 0; line < 1024; line += 64) prefetch(p + kPrefetchBytes + line);
    for (int pair = 0; pair < 16; ++pair) {
      const Ints w = load_ints(p + pair * 64);
      const Floats first = first_of_pairs(w), second = second_of_pairs(w);
      for (int r = 0; r < kRows; ++r) {
        y[r] = multiply_add(first, splat(bf16_to_float(x[r * 32 + pair * 2])), y[r]);
        y[r] = multiply_add(second, splat(bf16_to_float(x[r * 32 + pair * 2 + 1])), y[r]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) store(out + r * kPair, y[r]);
}

template <Format kFormat, int kRows>
void block_product(const uint8_t* p, const Panel& panel, int64_t row, float* out) {
  if constexpr (kFormat == Format::bf16) bf16_block<kFormat, kRows>(p, panel, row, out);
  else if constexpr (kFormat == Format::int8) int8_block<kFormat, kRows>(p, panel, row, out);
  else grouped_block<kFormat, kRows>(p, panel, row, out);
}

// `rows` <= kRowsAtOnce rows from `row` on, which share a row block of 16.
template <Format kFormat>
void block_product_of(int rows, const uint8_t* p, const Panel& panel, int64_t row, float* out) {
  switch (rows) {
    case 1: return block_product<kFormat, 1>(p, panel, row, out);
    case 2: return block_product<kFormat, 2>(p, panel, row, out);
    case 3: return block_product<kFormat, 3>(p, panel, row, out);
    case 4: return block_product<kFormat, 4>(p, panel, row, out);
    case 5: return block_product<kFormat, 5>(p, panel, row, out);
    case 6: return block_product<kFormat, 6>(p, panel, row, out);
    case 7: return block_product<kFormat, 7>(p, panel, row, out);
    default: return block_product<kFormat, 8>(p, panel, row, out);
  }
}

// --- storing -----------------------------------------------------------------------------------------------------------

void store_columns(const MatmulArgs& a, const float* v, int64_t row, int64_t column) {
  const int64_t count = a.weight.n - column;
  const int64_t at = row * a.ld + column;
  float lane[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) lane[i] = v[i];
  if (count >= kBlock) {
    if (a.bias) store(lane, load(lane) + load(a.bias + column));
    if (a.store == Store::f32) return store(static_cast<float*>(a.y) + at, load(lane));
    if (a.store == Store::bf16) return store_bf16(static_cast<uint16_t*>(a.y) + at, load(lane));
    float* y = static_cast<float*>(a.y) + at;
    return store(y, load(y) + load(lane));
  }
  for (int64_t i = 0; i < count; ++i) {
    const float value = lane[i] + (a.bias ? a.bias[column + i] : 0.0f);
    if (a.store == Store::f32) static_cast<float*>(a.y)[at + i] = value;
    else if (a.store == Store::bf16) static_cast<uint16_t*>(a.y)[at + i] = float_to_bf16(value);
    else static_cast<float*>(a.y)[at + i] += value;
  }
}

// silu_mul: the pair is a gate block and its up block; packing has made both whole blocks.
void store_gated(const MatmulArgs& a, const float* v, int64_t row, int64_t pair) {
  Floats gate = load(v), up = load(v + kBlock);
  if (a.bias) {
    gate = gate + load(a.bias + pair * kPair);
    up = up + load(a.bias + pair * kPair + kBlock);
  }
  store(static_cast<float*>(a.y) + row * a.ld + pair * kBlock, silu(gate) * up);
}

void store_product(const MatmulArgs& a, const Product& product, int64_t row, int64_t rows, int64_t pair) {
  for (int64_t r = 0; r < rows; ++r) {
    if (a.store == Store::silu_mul) {
      store_gated(a, product.v[r], row + r, pair);
      continue;
    }
    for (int64_t column = pair * kPair; column < (pair + 1) * kPair && column < a.weight.n; column += kBlock)
      store_columns(a, product.v[r] + column % kPair, row + r, column);
  }
}

template <Format kFormat>
void vector_matmul_of(const MatmulArgs& a, Range all_rows, Range pairs) {
  Product product;
  for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
    const uint8_t* blocks[2] = {a.weight.block(2 * pair), a.weight.block(2 * pair + 1)};
    for (int64_t row = all_rows.begin; row < all_rows.end; row += kRowsAtOnce) {
      const int64_t left = all_rows.end - row;
      const int rows = static_cast<int>(left < kRowsAtOnce ? left : kRowsAtOnce);
      for (int half = 0; half < 2; ++half)
        block_product_of<kFormat>(rows, blocks[half], a.panel, row, product.v[0] + half * kBlock);
      if constexpr (kFormat == Format::int8) {
        for (int r = 0; r < rows; ++r)
          for (int i = 0; i < kPair; ++i) product.v[r][i] *= a.weight.column_scale[pair * kPair + i];
      }
      store_product(a, product, row, rows, pair);
    }
  }
}

void vector_matmul(const MatmulArgs& a, Range rows, Range pairs) {
  switch (a.weight.format) {
    case Format::bf16: return vector_matmul_of<Format::bf16>(a, rows, pairs);
    case Format::int8: return vector_matmul_of<Format::int8>(a, rows, pairs);
    case Format::q8: return vector_matmul_of<Format::q8>(a, rows, pairs);
    case Format::q4: return vector_matmul_of<Format::q4>(a, rows, pairs);
    case Format::q4_min: return vector_matmul_of<Format::q4_min>(a, rows, pairs);
    case Format::q5_min: return vector_matmul_of<Format::q5_min>(a, rows, pairs);
    case Format::q6: return vector_matmul_of<Format::q6>(a, rows, pairs);
  }
}

// --- one row of a weight as floats: the embedding ----------------------------------------------------------------------

inline float f16_to_float(const uint16_t* constants, int64_t index) {
  float lane[16];
  store(lane, load_f16(constants));
  return lane[index];
}

float grouped_value(Format format, const uint8_t* group, int64_t column, int64_t input) {
  const auto* constants = reinterpret_cast<const uint16_t*>(group + group_value_bytes(format));
  const int64_t quad = input / 4, place = column * 4 + input % 4;
  const float scale = f16_to_float(constants, column);
  if (format == Format::q8) return (static_cast<int>(group[quad * 64 + place]) - 128) * scale;
  const uint8_t both = group[quad % 4 * 64 + place];
  const int nibble = quad < 4 ? both & 15 : both >> 4;
  if (format == Format::q4) return (nibble - 8) * scale;
  const float second = f16_to_float(constants + kBlock, column);
  if (format == Format::q4_min) return nibble * scale + second;
  if (format == Format::q5_min) return (nibble | (group[256 + place] >> quad & 1) << 4) * scale + second;
  const int bits = nibble | (group[256 + quad / 4 * 64 + place] >> quad % 4 * 2 & 3) << 4;
  return (bits - 32) * (quad < 4 ? scale : second);
}

void dequantize_row(const Weight& w, int64_t row, float* out) {
  const uint8_t* p = w.block(row / kBlock);
  const int64_t column = row % kBlock;
  for (int64_t k = 0; k < w.k; ++k) {
    if (w.format == Format::bf16) {
      uint16_t h;
      __builtin_memcpy(&h, p + ((k / 2) * kBlock + column) * 4 + k % 2 * 2, 2);
      out[k] = bf16_to_float(h);
    } else if (w.format == Format::int8) {
      out[k] = (static_cast<int>(p[((k / 4) * kBlock + column) * 4 + k % 4]) - 128) * w.column_scale[row];
    } else {
      out[k] = grouped_value(w.format, p + k / kGroup * group_bytes(w.format), column, k % kGroup);
    }
  }
}

}  // namespace
}  // namespace pellucid
