// Kernels that work on one row at a time: normalise, quantise, rotate, gate.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace pellucid {
namespace {

constexpr int64_t kMaxHead = 512;  // dimensions

inline Floats load_as_floats(const void* x, Dtype dtype, int64_t i) {
  return dtype == Dtype::f32 ? load(static_cast<const float*>(x) + i)
                             : load_bf16(static_cast<const uint16_t*>(x) + i);
}
inline float element_as_float(const void* x, Dtype dtype, int64_t i) {
  return dtype == Dtype::f32 ? static_cast<const float*>(x)[i] : bf16_to_float(static_cast<const uint16_t*>(x)[i]);
}

// Copies a row into floats, zero up to k_padded.
void widen_row(const void* x, Dtype dtype, int64_t k, int64_t k_padded, float* out) {
  int64_t i = 0;
  for (; i + 16 <= k; i += 16) store(out + i, load_as_floats(x, dtype, i));
  for (; i < k; ++i) out[i] = element_as_float(x, dtype, i);
  for (; i < k_padded; ++i) out[i] = 0.0f;
}

// x / sqrt(mean(x^2) + epsilon) * weight, in place, over the first k of a zero-padded row (Zhang and Sennrich, 2019).
void normalize_row(float* x, const float* weight, float epsilon, int64_t k) {
  Floats squares[2] = {zeros(), zeros()};
  for (int64_t i = 0; i < k; i += 32) {
    squares[0] = multiply_add(load(x + i), load(x + i), squares[0]);
    if (i + 16 < k) squares[1] = multiply_add(load(x + i + 16), load(x + i + 16), squares[1]);
  }
  const float mean = sum_of(squares[0] + squares[1]) / static_cast<float>(k);
  const Floats factor = splat(1.0f / __builtin_sqrtf(mean + epsilon));
  int64_t i = 0;
  for (; i + 16 <= k; i += 16) store(x + i, load(x + i) * factor * load(weight + i));
  const float last = 1.0f / __builtin_sqrtf(mean + epsilon);
  for (; i < k; ++i) x[i] = x[i] * last * weight[i];
}

inline float largest_magnitude(const float* x, int64_t count) {
  Floats top = zeros();
  for (int64_t i = 0; i < count; i += 16) top = larger(top, absolute(load(x + i)));
  return largest_of(top);
}

// The low byte of each.
inline void store_bytes(int8_t* to, Ints v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)v.p[0]));
#else
  int32_t lane[16];
  store_ints(lane, v);
  for (int i = 0; i < 16; ++i) to[i] = static_cast<int8_t>(lane[i]);
#endif
}

// Sixteen floats times `inverse`, rounded to signed bytes.
inline Ints quantize16(const float* x, Floats inverse, int8_t* to) {
  const Ints q = round_to_ints(load(x) * inverse);
  store_bytes(to, q);
  return q;
}

inline int32_t sum_of_ints(Ints v) {
  int32_t lane[16], total = 0;
  store_ints(lane, v);
  for (int32_t x : lane) total += x;
  return total;
}

void quantize_groups(const float* x, int64_t row, const Panel& panel) {
  const int64_t groups = panel.k_padded / kGroup;
  int8_t* to = reinterpret_cast<int8_t*>(panel.data) + row * panel.k_padded;
  for (int64_t g = 0; g < groups; ++g) {
    const float top = largest_magnitude(x + g * kGroup, kGroup);
    const Floats inverse = splat(top > 0 ? 127.0f / top : 0.0f);
    const Ints low = quantize16(x + g * kGroup, inverse, to + g * kGroup);
    const Ints high = quantize16(x + g * kGroup + 16, inverse, to + g * kGroup + 16);
    panel.scale[row * groups + g] = top / 127.0f;
    int32_t* sums = panel.sum + 2 * (row * groups + g);
    sums[0] = sum_of_ints(low);
    sums[1] = sum_of_ints(low + high);
  }
}

inline uint8_t* tile_row(const Panel& panel, int64_t row, int64_t step, int64_t steps) {
  return panel.data + (((row / kBlock) * steps + step) * kBlock + row % kBlock) * kStepBytes;
}

void quantize_row(const float* x, int64_t row, const Panel& panel) {
  const float top = largest_magnitude(x, panel.k_padded);
  const Floats inverse = splat(top > 0 ? 127.0f / top : 0.0f);
  const int64_t steps = panel.k_padded / 64;
  Ints total = splat_int(0);
  for (int64_t step = 0; step < steps; ++step) {
    int8_t* to = reinterpret_cast<int8_t*>(tile_row(panel, row, step, steps));
    for (int i = 0; i < 64; i += 16) total = total + quantize16(x + step * 64 + i, inverse, to + i);
  }
  panel.scale[row] = top / 127.0f;
  panel.sum[row] = sum_of_ints(total);
}

// The last slice may be short: the rest of its tiles is zero.
void quantize_slices(const float* x, int64_t row, const Panel& panel) {
  const int64_t slices = num_slices(panel.k_padded), block = row / kBlock * slices;
  for (int64_t slice = 0; slice < slices; ++slice) {
    const float* from = x + slice * kSliceInputs;
    const int64_t left = panel.k_padded - slice * kSliceInputs, count = left < kSliceInputs ? left : kSliceInputs;
    const float top = largest_magnitude(from, count);
    const Floats inverse = splat(top > 0 ? 127.0f / top : 0.0f);
    uint8_t* to = panel.data + (block + slice) * kSliceBytes + row % kBlock * kStepBytes;
    for (int64_t i = 0; i < count; i += 16)
      quantize16(from + i, inverse, reinterpret_cast<int8_t*>(to + i / 64 * 1024 + i % 64));
    for (int64_t i = count; i < kSliceInputs; i += 64) __builtin_memset(to + i / 64 * 1024, 0, 64);
    panel.scale[(block + slice) * kBlock + row % kBlock] = top / 127.0f;
  }
}

template <bool kQuads>
void round_row(const float* x, int64_t row, const Panel& panel) {
  const int64_t steps = panel.k_padded / 32;
  for (int64_t step = 0; step < steps; ++step) {
    uint16_t* to = reinterpret_cast<uint16_t*>(tile_row(panel, row, step, steps));
    for (int64_t i = 0; i < 32; i += 16) {
      const Floats v = load(x + step * 32 + i);
      store_bf16(to + i, kQuads ? swap_middles(v) : v);
    }
  }
}

void prepare(const PrepareArgs& a, Range rows, std::byte* scratch) {
  float* x = reinterpret_cast<float*>(scratch);
  const int64_t element_bytes = a.dtype == Dtype::f32 ? 4 : 2;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    widen_row(static_cast<const std::byte*>(a.x) + row * a.ld * element_bytes, a.dtype, a.k, a.panel.k_padded, x);
    if (a.norm_weight) normalize_row(x, a.norm_weight, a.epsilon, a.k);
    switch (a.panel.preparation) {
      case Preparation::bf16: round_row<false>(x, row, a.panel); break;
      case Preparation::quad16: round_row<true>(x, row, a.panel); break;
      case Preparation::row8: quantize_row(x, row, a.panel); break;
      case Preparation::group8: quantize_groups(x, row, a.panel); break;
      case Preparation::slice8: quantize_slices(x, row, a.panel); break;
    }
  }
}

void rms_norm(const void* x, Dtype dtype, const float* weight, float epsilon, int64_t k, void* y) {
  Floats squares = zeros();
  int64_t i = 0;
  float total = 0.0f;
  for (; i + 16 <= k; i += 16) {
    const Floats v = load_as_floats(x, dtype, i);
    squares = multiply_add(v, v, squares);
  }
  for (; i < k; ++i) total += element_as_float(x, dtype, i) * element_as_float(x, dtype, i);
  total += sum_of(squares);
  const float factor = 1.0f / __builtin_sqrtf(total / static_cast<float>(k) + epsilon);
  for (i = 0; i < k; ++i) {
    const float v = element_as_float(x, dtype, i) * factor * weight[i];
    if (dtype == Dtype::f32) static_cast<float*>(y)[i] = v;
    else static_cast<uint16_t*>(y)[i] = float_to_bf16(v);
  }
}

inline Floats silu(Floats v) { return v * reciprocal(splat(1.0f) + exponential(zeros() - v)); }

void silu_mul(const void* gate, const void* up, Dtype dtype, int64_t count, void* y) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const Floats v = silu(load_as_floats(gate, dtype, i)) * load_as_floats(up, dtype, i);
    if (dtype == Dtype::f32) store(static_cast<float*>(y) + i, v);
    else store_bf16(static_cast<uint16_t*>(y) + i, v);
  }
  for (; i < count; ++i) {
    const Floats v = silu(splat(element_as_float(gate, dtype, i))) * splat(element_as_float(up, dtype, i));
    float lane[16];
    store(lane, v);
    if (dtype == Dtype::f32) static_cast<float*>(y)[i] = lane[0];
    else static_cast<uint16_t*>(y)[i] = float_to_bf16(lane[0]);
  }
}

// --- rotary embedding and the write to the cache -----------------------------------------------------------------------

// The halves of a head are the two coordinates of each rotated plane (the Hugging Face order of weights).
void rotate_head(const float* x, const float* norm, float epsilon, const float* cosines, const float* sines, int64_t dim,
                 float* out) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < dim; i += 16) store(out + i, load(x + i));
  if (norm) normalize_row(out, norm, epsilon, dim);
  for (int64_t i = 0; i < half; i += 16) {
    const Floats a = load(out + i), b = load(out + half + i), c = load(cosines + i), s = load(sines + i);
    store(out + i, a * c - b * s);
    store(out + half + i, b * c + a * s);
  }
}

// Where the piece of a slot's 16 tokens begins in either half of the cache; the slot is its token `slot % kTokens`.
inline int64_t piece_of(const RopeArgs& a, int64_t slot, int64_t head) {
  const int64_t block = slot / a.block_size, inside = slot % a.block_size / kTokens;
  return ((block * a.num_kv_heads + head) * (a.block_size / kTokens) + inside) * piece_bytes(a.cache_format, a.head_dim);
}

// Bytes of a key or value, 128 added, and what one of them is worth: the 127th part of the largest.
float quantize_head(const float* x, int64_t dim, uint8_t* out) {
  constexpr float kLeast = 1e-30f;  // smaller ones become zeros
  const float top = largest_magnitude(x, dim);
  const Floats inverse = splat(top > kLeast ? 127.0f / top : 0.0f);
  for (int64_t i = 0; i < dim; i += 16)
    store_bytes(reinterpret_cast<int8_t*>(out) + i, round_to_ints(load(x + i) * inverse) + splat_int(128));
  return top / 127.0f;
}

inline void round_head(const float* x, int64_t dim, uint16_t* out) {
  for (int64_t i = 0; i < dim; i += 16) store_bf16(out + i, load(x + i));
}

void write_key(const RopeArgs& a, const float* key, std::byte* piece, int64_t token) {
  if (a.cache_format == CacheFormat::int8) {
    uint8_t bytes[kMaxHead];
    const float scale = quantize_head(key, a.head_dim, bytes);
    for (int64_t i = 0; i < a.head_dim; i += 4) __builtin_memcpy(piece + i * kTokens + token * 4, bytes + i, 4);
    __builtin_memcpy(piece + a.head_dim * kTokens + token * 4, &scale, 4);
    return;
  }
  uint16_t halves[kMaxHead];
  round_head(key, a.head_dim, halves);
  for (int64_t i = 0; i < a.head_dim; i += 2) __builtin_memcpy(piece + i * kTokens * 2 + token * 4, halves + i, 4);
}

void write_value(const RopeArgs& a, const float* value, std::byte* piece, int64_t token) {
  if (a.cache_format == CacheFormat::int8) {
    uint8_t bytes[kMaxHead];
    const float scale = quantize_head(value, a.head_dim, bytes);
    auto* to = reinterpret_cast<uint8_t*>(piece);
    for (int64_t i = 0; i < a.head_dim; ++i) to[(i / 16 * 4 + token / 4) * 64 + i % 16 * 4 + token % 4] = bytes[i];
    __builtin_memcpy(piece + a.head_dim * kTokens + token * 4, &scale, 4);
    return;
  }
  uint16_t halves[kMaxHead];
  round_head(value, a.head_dim, halves);
  auto* to = reinterpret_cast<uint16_t*>(piece) + token / 2 * 32 + token % 2;
  for (int64_t i = 0; i < a.head_dim; i += 16, to += 256)
#pragma GCC unroll 16
    for (int64_t j = 0; j < 16; ++j) to[j * 2] = halves[i + j];
}

// Asks for the lines that a row's keys and values go to: the writes would wait for each. A key is in all of its piece, a
// value in every fourth line of int8, in every eighth of bf16. `before` is the row before, whose lines are there.
void prefetch_slot(const RopeArgs& a, int64_t slot, int64_t before) {
  const bool int8 = a.cache_format == CacheFormat::int8, same_piece = slot / kTokens == before / kTokens;
  const int64_t bytes = piece_bytes(a.cache_format, a.head_dim), line_tokens = int8 ? 4 : 2;
  if (same_piece && slot / line_tokens == before / line_tokens) return;
  const int64_t first = slot % kTokens / line_tokens * 64;
  for (int64_t head = 0; head < a.num_kv_heads; ++head) {
    const int64_t at = piece_of(a, slot, head);
    for (int64_t line = 0; line < bytes && !same_piece; line += 64) __builtin_prefetch(a.key_cache + at + line, 1, 3);
    for (int64_t line = first; line < bytes; line += int8 ? 256 : 512) __builtin_prefetch(a.value_cache + at + line, 1, 3);
  }
}

void rope(const RopeArgs& a, Range rows) {
  float head[kMaxHead];
  const int64_t half = a.head_dim / 2;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    if (row + 1 < rows.end) prefetch_slot(a, a.slots[row + 1], a.slots[row]);
    const int64_t slot = a.slots[row];
    const float* x = a.qkv + row * a.ld;
    const float* cosines = a.cos_table + a.positions[row] * half;
    const float* sines = a.sin_table + a.positions[row] * half;
    for (int64_t h = 0; h < a.num_heads; ++h, x += a.head_dim) {
      rotate_head(x, a.q_norm, a.epsilon, cosines, sines, a.head_dim, head);
      uint16_t* to = a.q_out + (row * a.num_heads + h) * a.head_dim;
      round_head(head, a.head_dim, to);
    }
    for (int64_t h = 0; h < a.num_kv_heads; ++h, x += a.head_dim) {
      rotate_head(x, a.k_norm, a.epsilon, cosines, sines, a.head_dim, head);
      write_key(a, head, a.key_cache + piece_of(a, slot, h), slot % kTokens);
    }
    for (int64_t h = 0; h < a.num_kv_heads; ++h, x += a.head_dim)
      write_value(a, x, a.value_cache + piece_of(a, slot, h), slot % kTokens);
  }
}

}  // namespace
}  // namespace pellucid
