// Matrix products on AMX tiles. One idea: the row count of a tile is the number of rows there are, so the same loop serves
// one row, where memory is the limit, and five hundred, where the multiplier is.
//
// bfloat16 and int8 weights are stored as tiles. 4-bit and grouped 8-bit weights are requantised to int8 with one scale per
// column while they are read, 32 columns at a time, into this thread's scratch, where all rows then use them.
#pragma once

#include <immintrin.h>

#include "kernels.h"
#include "matmul.h"
#include "simd.h"
#include "tile_config.h"

namespace pellucid {
namespace {

// Rows whose packed activations stay in the second-level cache; twice as much halves the rate.
constexpr int64_t kPanelBytes = 768 << 10;

struct alignas(64) Sums {
  int32_t v[4][16][16];  // top left, top right, bottom left, bottom right; floats for bf16
};

#define PELLUCID_MULTIPLY(sum, x, w)            \
  if constexpr (kInt8) _tile_dpbsud(sum, x, w); \
  else _tile_dpbf16ps(sum, x, w)

// Two row tiles against two column tiles: each loaded tile is used twice.
template <bool kInt8>
void multiply_2x2(const uint8_t* top, const uint8_t* bottom, const uint8_t* left, const uint8_t* right, int64_t steps,
                  Sums* out) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(6, left + step * 1024, 64);
    _tile_loadd(4, top + step * 1024, 64);
    PELLUCID_MULTIPLY(0, 4, 6);
    _tile_loadd(5, bottom + step * 1024, 64);
    PELLUCID_MULTIPLY(2, 5, 6);
    _tile_loadd(7, right + step * 1024, 64);
    PELLUCID_MULTIPLY(1, 4, 7);
    PELLUCID_MULTIPLY(3, 5, 7);
  }
  _tile_stored(0, out->v[0], 64);
  _tile_stored(1, out->v[1], 64);
  _tile_stored(2, out->v[2], 64);
  _tile_stored(3, out->v[3], 64);
}

template <bool kInt8>
void multiply_1x2(const uint8_t* top, const uint8_t* left, const uint8_t* right, int64_t steps, Sums* out) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t step = 0; step < steps; ++step) {
    for (int line = 0; line < 1024; line += 64) {
      prefetch(left + step * 1024 + kPrefetchBytes + line);
      prefetch(right + step * 1024 + kPrefetchBytes + line);
    }
    _tile_loadd(4, top + step * 1024, 64);
    _tile_loadd(6, left + step * 1024, 64);
    PELLUCID_MULTIPLY(0, 4, 6);
    _tile_loadd(7, right + step * 1024, 64);
    PELLUCID_MULTIPLY(1, 4, 7);
  }
  _tile_stored(0, out->v[0], 64);
  _tile_stored(1, out->v[1], 64);
}
#undef PELLUCID_MULTIPLY

// Two row tiles of one pair of blocks, multiplied but not yet stored.
struct Unstored {
  int64_t row = 0, rows = 0, pair = 0;
};

template <bool kInt8>
inline void finish_columns(const MatmulArgs& a, const Sums& sums, int64_t r, const Unstored& at, Floats* left,
                           Floats* right) {
  const int first = r < kBlock ? 0 : 2;
  const Ints raw_left = load_ints(sums.v[first][r % kBlock]), raw_right = load_ints(sums.v[first + 1][r % kBlock]);
  if constexpr (kInt8) {
    const Ints shift = splat_int(128 * a.panel.sum[at.row + r]);
    const Floats scale = splat(a.panel.scale[at.row + r]);
    const float* columns = a.weight.column_scale + at.pair * kPair;
    *left = to_floats(raw_left - shift) * scale * load(columns);
    *right = to_floats(raw_right - shift) * scale * load(columns + kBlock);
  } else {
    *left = as_floats(raw_left);
    *right = as_floats(raw_right);
  }
}

// The common case, in registers: all 32 columns exist and there is no bias.
template <bool kInt8, Store kStore>
void store_whole(const MatmulArgs& a, const Sums& sums, const Unstored& at) {
  for (int64_t r = 0; r < at.rows; ++r) {
    Floats left, right;
    finish_columns<kInt8>(a, sums, r, at, &left, &right);
    if constexpr (kStore == Store::silu_mul) {
      store(static_cast<float*>(a.y) + (at.row + r) * a.ld + at.pair * kBlock, silu(left) * right);
    } else if constexpr (kStore == Store::bf16) {
      uint16_t* y = static_cast<uint16_t*>(a.y) + (at.row + r) * a.ld + at.pair * kPair;
      store_bf16(y, left);
      store_bf16(y + kBlock, right);
    } else {
      float* y = static_cast<float*>(a.y) + (at.row + r) * a.ld + at.pair * kPair;
      store(y, kStore == Store::add ? load(y) + left : left);
      store(y + kBlock, kStore == Store::add ? load(y + kBlock) + right : right);
    }
  }
}

template <bool kInt8>
void store_sums(const MatmulArgs& a, const Sums& sums, const Unstored& at) {
  if (at.rows == 0) return;
  if (!a.bias && (at.pair + 1) * kPair <= a.weight.n) {
    switch (a.store) {
      case Store::f32: return store_whole<kInt8, Store::f32>(a, sums, at);
      case Store::bf16: return store_whole<kInt8, Store::bf16>(a, sums, at);
      case Store::add: return store_whole<kInt8, Store::add>(a, sums, at);
      case Store::silu_mul: return store_whole<kInt8, Store::silu_mul>(a, sums, at);
    }
  }
  Product product;
  for (int64_t r = 0; r < at.rows; ++r) {
    Floats left, right;
    finish_columns<kInt8>(a, sums, r, at, &left, &right);
    store(product.v[0], left);
    store(product.v[0] + kBlock, right);
    store_product(a, product, at.row + r, 1, at.pair);
  }
}

// Storing lags one pair of tiles behind multiplying, so that the vector units store while the tiles multiply.
template <bool kInt8>
class TileRows {
 public:
  explicit TileRows(const MatmulArgs& a) : a_(a), steps_(a.panel.k_padded / (kInt8 ? 64 : 32)) {}

  void multiply(Range rows, int64_t pair, const uint8_t* left, const uint8_t* right) {
    for (int64_t row = rows.begin; row < rows.end; row += 2 * kBlock) {
      const int64_t count = rows.end - row < 2 * kBlock ? rows.end - row : 2 * kBlock;
      const uint8_t* top = a_.panel.data + row * steps_ * kStepBytes;
      if (count > kBlock)
        multiply_2x2<kInt8>(top, top + kBlock * steps_ * kStepBytes, left, right, steps_, &sums_[turn_]);
      else
        multiply_1x2<kInt8>(top, left, right, steps_, &sums_[turn_]);
      turn_ = 1 - turn_;
      store_sums<kInt8>(a_, sums_[turn_], unstored_);
      unstored_ = {row, count, pair};
    }
  }
  void flush() {
    store_sums<kInt8>(a_, sums_[1 - turn_], unstored_);
    unstored_ = {};
  }

 private:
  const MatmulArgs& a_;
  int64_t steps_;
  Sums sums_[2];
  int turn_ = 0;
  Unstored unstored_;
};

// --- requantising to one scale per column ------------------------------------------------------------------------------

inline __m512i both_halves(__m512i sixteen_bits) {  // 16-bit constants of 16 columns, twice in each 32-bit lane
  return _mm512_or_si512(sixteen_bits, _mm512_slli_epi32(sixteen_bits, 16));
}
// Constants of the columns in 1/256 of the new step: value + 128 = (nibble * slope + offset) >> 8.
inline __m512i in_steps(__m512 x, __m512 inverse, float offset) {
  const __m512 scaled = _mm512_fmadd_ps(_mm512_mul_ps(x, inverse), _mm512_set1_ps(256.0f), _mm512_set1_ps(offset));
  return both_halves(_mm512_and_si512(_mm512_cvtps_epi32(scaled), _mm512_set1_epi32(0xffff)));
}
constexpr float kHalfStepAnd128 = 128.0f * 256.0f + 128.0f;

// Sums in 1/256 of a step, even and odd bytes apart, to bytes.
inline __m512i bytes_of(__m512i even, __m512i odd) {
  const __m512i high = _mm512_set1_epi16(static_cast<int16_t>(0xff00));
  return _mm512_ternarylogic_epi32(high, odd, _mm512_srli_epi16(even, 8), 0xca);  // high ? odd : even >> 8
}

template <bool kMinimum>
void requantize_q4(const uint8_t* p, __m512 inverse, uint8_t* out) {
  const auto* constants = reinterpret_cast<const uint16_t*>(p + 256);
  const __m512 scale = (__m512)load_f16(constants).p[0];
  const __m512 minimum =
      kMinimum ? (__m512)load_f16(constants + kBlock).p[0] : _mm512_mul_ps(scale, _mm512_set1_ps(-8.0f));
  const __m512i slope = in_steps(scale, inverse, 0.0f);
  const __m512i offset = in_steps(minimum, inverse, kHalfStepAnd128);
  const __m512i nibble = _mm512_set1_epi16(0x000f);
  const auto value = [&](__m512i n) { return _mm512_add_epi16(_mm512_mullo_epi16(n, slope), offset); };
  for (int quad = 0; quad < 4; ++quad) {
    const __m512i v = _mm512_loadu_si512(p + quad * 64);
    const __m512i even_low = value(_mm512_and_si512(v, nibble));
    const __m512i even_high = value(_mm512_and_si512(_mm512_srli_epi16(v, 4), nibble));
    const __m512i odd_low = value(_mm512_and_si512(_mm512_srli_epi16(v, 8), nibble));
    const __m512i odd_high = value(_mm512_srli_epi16(v, 12));
    _mm512_store_si512(out + quad * 64, bytes_of(even_low, odd_low));
    _mm512_store_si512(out + (quad + 4) * 64, bytes_of(even_high, odd_high));
  }
}

void requantize_q8(const uint8_t* p, __m512 inverse, uint8_t* out) {
  const __m512 scale = (__m512)load_f16(reinterpret_cast<const uint16_t*>(p + 512)).p[0];
  // Ratio of the steps in 1/32768, at most 1.
  const __m512 ratio = _mm512_min_ps(_mm512_mul_ps(_mm512_mul_ps(scale, inverse), _mm512_set1_ps(32768.0f)),
                                     _mm512_set1_ps(32767.0f));
  const __m512i slope = both_halves(_mm512_and_si512(_mm512_cvtps_epi32(ratio), _mm512_set1_epi32(0xffff)));
  const __m512i offset = _mm512_set1_epi16(static_cast<int16_t>(0x8080));  // + 128 and half a step
  const __m512i signs = _mm512_set1_epi8(static_cast<char>(0x80));
  const __m512i high = _mm512_set1_epi16(static_cast<int16_t>(0xff00));
  for (int quad = 0; quad < 8; ++quad) {
    const __m512i v = _mm512_xor_si512(_mm512_loadu_si512(p + quad * 64), signs);
    const __m512i even = _mm512_add_epi16(_mm512_mulhrs_epi16(_mm512_slli_epi16(v, 8), slope), offset);
    const __m512i odd = _mm512_add_epi16(_mm512_mulhrs_epi16(_mm512_and_si512(v, high), slope), offset);
    _mm512_store_si512(out + quad * 64, bytes_of(even, odd));
  }
}

void requantize_block(const Weight& w, int64_t block, uint8_t* out) {
  const __m512 column_scale = _mm512_loadu_ps(w.column_scale + block * kBlock);
  const __mmask16 used = _mm512_cmp_ps_mask(column_scale, _mm512_setzero_ps(), _CMP_GT_OQ);
  const __m512 inverse = _mm512_maskz_div_ps(used, _mm512_set1_ps(1.0f), column_scale);
  const uint8_t* p = w.block(block);
  const int64_t bytes = group_bytes(w.format);
  for (int64_t group = 0; group < w.k_padded / kGroup; ++group, p += bytes, out += 512) {
    for (int64_t line = 0; line < bytes; line += 64) prefetch(p + kPrefetchBytes + line);
    if (w.format == Format::q8) requantize_q8(p, inverse, out);
    else if (w.format == Format::q4) requantize_q4<false>(p, inverse, out);
    else requantize_q4<true>(p, inverse, out);
  }
}

template <bool kInt8>
void tile_matmul(const MatmulArgs& a, Range rows, Range pairs, std::byte* scratch) {
  const bool stored_as_tiles = a.weight.format == Format::bf16 || a.weight.format == Format::int8;
  const int64_t whole = kPanelBytes / (a.panel.k_padded * (kInt8 ? 1 : 2)) / 32 * 32;
  const int64_t panel_rows = whole < 32 ? 32 : whole;
  TileRows<kInt8> tiles(a);
  for (int64_t row = rows.begin; row < rows.end; row += panel_rows) {
    const Range panel = {row, row + panel_rows < rows.end ? row + panel_rows : rows.end};
    const int64_t count = panel.end - panel.begin;
    // Only the last tiles can be short; a panel with whole tiles before them multiplies some unused rows there.
    configure(count < kBlock ? static_cast<int>(count) : 16,
              count > kBlock && count < 2 * kBlock ? static_cast<int>(count - kBlock) : 16);
    for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
      const uint8_t* left = a.weight.block(2 * pair);
      const uint8_t* right = a.weight.block(2 * pair + 1);
      if (!stored_as_tiles) {
        auto* bytes = reinterpret_cast<uint8_t*>(scratch);
        requantize_block(a.weight, 2 * pair, bytes);
        requantize_block(a.weight, 2 * pair + 1, bytes + a.weight.k_padded * kBlock);
        left = bytes;
        right = bytes + a.weight.k_padded * kBlock;
      }
      tiles.multiply(panel, pair, left, right);
    }
    tiles.flush();
  }
  _tile_release();
}

}  // namespace
}  // namespace pellucid
