// Matrix products on AMX tiles. One idea: the row count of a tile is the number of rows there are, so the same loop serves
// one row, where memory is the limit, and five hundred, where the multiplier is.
//
// bfloat16 and int8 weights are stored as tiles. Grouped weights become bfloat16 while they are read, 32 columns at a time,
// in this thread's scratch, where all rows then use them. (Int8 tiles would be twice as fast, but they need one scale per
// row of activations: that cost 4 % of perplexity on a 135M model, bfloat16 0.1 %.)
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

// --- grouped weights to bfloat16 tiles ---------------------------------------------------------------------------------

// A field of `kBits` bits that begins at bit `kFrom` of each lane, as the float 1 + field / 2^kBits: exact, and cheaper than
// a conversion.
template <int kBits, int kFrom>
inline __m512 field_above_one(__m512i v) {
  constexpr int kTo = 23 - kBits;
  constexpr int kMask = ((1 << kBits) - 1) << kTo;
  const __m512i moved = kTo >= kFrom ? _mm512_slli_epi32(v, kTo >= kFrom ? kTo - kFrom : 0)
                                     : _mm512_srli_epi32(v, kTo < kFrom ? kFrom - kTo : 0);
  const __m512i one = _mm512_set1_epi32(0x3f800000);
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(moved, _mm512_set1_epi32(kMask), one, 0xea));  // (a & b) | c
}

// Two rows of inputs, columns in lanes, rounded to a row of pairs.
inline void store_pair(uint8_t* out, __m512 first, __m512 second) {
  const __m512i half = _mm512_set1_epi32(0x8000);  // ties away from zero: as good as even, one instruction less
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(first), half), 16);
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(second), half);
  _mm512_store_si512(out, _mm512_mask_blend_epi16(0xaaaaaaaa, low, high));
}

// Quads `quad` (of 8, or the low nibbles) to two rows of pairs; `slope` and `offset` undo the field's form.
template <int kBits, int kFrom>
inline void unpack_quad(__m512i v, __m512 slope, __m512 offset, uint8_t* out) {
  constexpr int kNext = 8;
  const auto value = [&](__m512 field) { return _mm512_fmadd_ps(field, slope, offset); };
  store_pair(out, value(field_above_one<kBits, kFrom>(v)), value(field_above_one<kBits, kFrom + kNext>(v)));
  store_pair(out + 64, value(field_above_one<kBits, kFrom + 2 * kNext>(v)),
             value(field_above_one<kBits, kFrom + 3 * kNext>(v)));
}

template <bool kMinimum>
void unpack_q4(const uint8_t* p, uint8_t* out) {
  const auto* constants = reinterpret_cast<const uint16_t*>(p + 256);
  const __m512 scale = (__m512)load_f16(constants).p[0];
  const __m512 slope = _mm512_mul_ps(scale, _mm512_set1_ps(16.0f));
  const __m512 offset = kMinimum ? _mm512_sub_ps((__m512)load_f16(constants + kBlock).p[0], slope)
                                 : _mm512_mul_ps(scale, _mm512_set1_ps(-8.0f - 16.0f));
  for (int quad = 0; quad < 4; ++quad) {
    const __m512i v = _mm512_loadu_si512(p + quad * 64);
    unpack_quad<4, 0>(v, slope, offset, out + quad * 128);
    unpack_quad<4, 4>(v, slope, offset, out + (quad + 4) * 128);
  }
}

void unpack_q8(const uint8_t* p, uint8_t* out) {
  const __m512 scale = (__m512)load_f16(reinterpret_cast<const uint16_t*>(p + 512)).p[0];
  const __m512 slope = _mm512_mul_ps(scale, _mm512_set1_ps(256.0f));
  const __m512 offset = _mm512_mul_ps(scale, _mm512_set1_ps(-128.0f - 256.0f));
  for (int quad = 0; quad < 8; ++quad)
    unpack_quad<8, 0>(_mm512_loadu_si512(p + quad * 64), slope, offset, out + quad * 128);
}

// One group of 32 inputs of a block as a tile.
inline void unpack_group(Format format, const uint8_t* p, uint8_t* out) {
  for (int64_t line = 0; line < group_bytes(format); line += 64) prefetch(p + kPrefetchBytes + line);
  if (format == Format::q8) unpack_q8(p, out);
  else if (format == Format::q4) unpack_q4<false>(p, out);
  else unpack_q4<true>(p, out);
}

// A pair of blocks of columns made ready while the pair before it is multiplied: the tiles leave the vector registers idle,
// and memory. Grouped weights become tiles in this thread's scratch; stored tiles are only asked for.
class Columns {
 public:
  // Room for two pairs of unpacked blocks, which take turns.
  Columns(const Weight& w, std::byte* scratch)
      : w_(w), stored_(w.format == Format::bf16 || w.format == Format::int8), room_(reinterpret_cast<uint8_t*>(scratch)),
        bytes_(stored_ ? block_bytes(w.format, w.k_padded) : w.k_padded * kBlock * 2),
        pieces_(stored_ ? 2 * bytes_ / kPiece : 2 * w.k_padded / kGroup) {}

  // The next pair, `steps` calls of advance() before it is needed.
  void begin(int64_t pair, int64_t steps) {
    finish();
    turn_ = 1 - turn_;
    from_ = w_.block(2 * pair);
    done_ = credit_ = 0;
    steps_ = steps;
  }
  void advance() {
    for (credit_ += pieces_; credit_ >= steps_ && done_ < pieces_; credit_ -= steps_) make_piece();
  }
  void finish() {
    while (from_ && done_ < pieces_) make_piece();
  }
  const uint8_t* left() const { return stored_ ? from_ : room_ + turn_ * 2 * bytes_; }
  const uint8_t* right() const { return left() + bytes_; }

 private:
  static constexpr int64_t kPiece = 256;  // bytes of stored tiles asked for at once

  void make_piece() {
    const int64_t i = done_++;
    if (stored_) {
      for (int64_t line = 0; line < kPiece; line += 64) __builtin_prefetch(from_ + i * kPiece + line, 0, 2);
      return;
    }
    unpack_group(w_.format, from_ + i * group_bytes(w_.format), room_ + turn_ * 2 * bytes_ + i * 1024);
  }

  const Weight& w_;
  const bool stored_;
  uint8_t* const room_;
  const int64_t bytes_, pieces_;
  const uint8_t* from_ = nullptr;
  int64_t steps_ = 1, done_ = 0, credit_ = 0, turn_ = 0;
};

// --- products --------------------------------------------------------------------------------------------------------------

#define PELLUCID_MULTIPLY(sum, x, w)            \
  if constexpr (kInt8) _tile_dpbsud(sum, x, w); \
  else _tile_dpbf16ps(sum, x, w)

// Two row tiles against two column tiles: each loaded tile is used twice.
template <bool kInt8>
void multiply_2x2(const uint8_t* top, const uint8_t* bottom, const uint8_t* left, const uint8_t* right, int64_t steps,
                  Columns* next, Sums* out) {
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
    next->advance();
  }
  _tile_stored(0, out->v[0], 64);
  _tile_stored(1, out->v[1], 64);
  _tile_stored(2, out->v[2], 64);
  _tile_stored(3, out->v[3], 64);
}

template <bool kInt8>
void multiply_1x2(const uint8_t* top, const uint8_t* left, const uint8_t* right, int64_t steps, Columns* next,
                  Sums* out) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(4, top + step * 1024, 64);
    _tile_loadd(6, left + step * 1024, 64);
    PELLUCID_MULTIPLY(0, 4, 6);
    _tile_loadd(7, right + step * 1024, 64);
    PELLUCID_MULTIPLY(1, 4, 7);
    next->advance();
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

  // One pair of blocks, of which `next` is the following one.
  void multiply(Range rows, int64_t pair, const uint8_t* left, const uint8_t* right, Columns* next) {
    for (int64_t row = rows.begin; row < rows.end; row += 2 * kBlock) {
      const int64_t count = rows.end - row < 2 * kBlock ? rows.end - row : 2 * kBlock;
      const uint8_t* top = a_.panel.data + row * steps_ * kStepBytes;
      const uint8_t* bottom = top + kBlock * steps_ * kStepBytes;
      if (count > kBlock) multiply_2x2<kInt8>(top, bottom, left, right, steps_, next, &sums_[turn_]);
      else multiply_1x2<kInt8>(top, left, right, steps_, next, &sums_[turn_]);
      turn_ = 1 - turn_;
      store_sums<kInt8>(a_, sums_[turn_], unstored_);
      unstored_ = {row, count, pair};
    }
  }
  // Steps that one pair takes.
  int64_t steps(Range rows) const { return (rows.end - rows.begin + 2 * kBlock - 1) / (2 * kBlock) * steps_; }
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

template <bool kInt8>
void tile_matmul(const MatmulArgs& a, Range rows, Range pairs, std::byte* scratch) {
  const int64_t whole = kPanelBytes / (a.panel.k_padded * (kInt8 ? 1 : 2)) / 32 * 32;
  const int64_t panel_rows = whole < 32 ? 32 : whole;
  TileRows<kInt8> tiles(a);
  for (int64_t row = rows.begin; row < rows.end; row += panel_rows) {
    const Range panel = {row, row + panel_rows < rows.end ? row + panel_rows : rows.end};
    const int64_t count = panel.end - panel.begin;
    // Only the last tiles can be short; a panel with whole tiles before them multiplies some unused rows there.
    configure(count < kBlock ? static_cast<int>(count) : 16,
              count > kBlock && count < 2 * kBlock ? static_cast<int>(count - kBlock) : 16);
    Columns columns(a.weight, scratch);
    columns.begin(pairs.begin, 1);
    for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
      columns.finish();
      const uint8_t *left = columns.left(), *right = columns.right();
      if (pair + 1 < pairs.end) columns.begin(pair + 1, tiles.steps(panel));
      tiles.multiply(panel, pair, left, right, &columns);
    }
    tiles.flush();
  }
  _tile_release();
}

}  // namespace
}  // namespace pellucid
