// Matrix products on AMX tiles. One idea: the row count of a tile is the number of rows there are, so the same loop serves
// one row, where memory is the limit, and five hundred, where the multiplier is.
//
// bfloat16 and int8 weights are stored as tiles. Grouped weights become bfloat16 in this thread's scratch while they are read:
// for few rows just before their product (Ring), for many 32 columns at a time (Columns). Where rounding to 8 bits is allowed,
// many rows of grouped weights go another way (slices.h).
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

// Prefetch distance of weights that are unpacked: 4 KiB is 10 % slower, because the tiles are faster than the dot products.
constexpr int64_t kUnpackAheadBytes = 8192;

struct alignas(64) Sums {
  int32_t v[4][16][16];  // top left, top right, bottom left, bottom right; floats for bf16
};

// --- grouped weights to bfloat16 tiles ---------------------------------------------------------------------------------

// Weights are reckoned in float16, 32 at a time, and in units of which they are less than two. Then a float16 becomes a
// bfloat16 by moving its bits: the exponent's bias grows by 112, and for exponents up to 15 that is setting three bits.
// Rounding is towards zero, so kUnbiased lifts the values by half a step; below 2^-14 units they lose their last bits.
constexpr float kUnbiased = 1.0f + 1.0f / 512;

inline void store_weights(uint8_t* out, __m512h values) {
  const __m512i moved = _mm512_srai_epi16(_mm512_castph_si512(values), 3);
  const __m512i kept = _mm512_set1_epi16(static_cast<short>(0x87ff)), bias = _mm512_set1_epi16(0x3800);
  _mm512_store_si512(out, _mm512_ternarylogic_epi32(moved, kept, bias, 0xea));  // (a & b) | c
}

// Sixteen constants in units, each twice: a column has two inputs in a row of a tile.
inline __m512h constants_twice(const uint16_t* constants, float per_unit) {
  const __m512 value = _mm512_mul_ps((__m512)load_f16(constants).p[0], _mm512_set1_ps(per_unit));
  const __m512i half = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  return _mm512_castsi512_ph(_mm512_or_si512(half, _mm512_slli_epi32(half, 16)));
}

// -8 to 7 in float16, twice: the index of VPERMW has five bits, of which a nibble sets four.
inline __m512h centred_nibbles(__m512i index) {
  alignas(64) static constexpr _Float16 kTable[32] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7,
                                                      -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  return _mm512_castsi512_ph(_mm512_permutexvar_epi16(index, _mm512_load_si512(kTable)));
}

// A word holds the nibbles of two inputs that lie two apart, so the rows' inputs stand in the order 0, 2, 1, 3.
template <bool kMinimum>
inline void unpack_q4(const uint8_t* p, float per_unit, uint8_t* out) {
  const auto* constants = reinterpret_cast<const uint16_t*>(p + 256);
  const __m512h scale = constants_twice(constants, per_unit);
  __m512h middle = _mm512_setzero_ph();
  if constexpr (kMinimum)
    middle = _mm512_fmadd_ph(scale, _mm512_set1_ph(8), constants_twice(constants + kBlock, per_unit));
  const auto put = [&](uint8_t* to, __m512i index) {
    store_weights(to, _mm512_fmadd_ph(centred_nibbles(index), scale, middle));
  };
#pragma GCC unroll 4
  for (int quad = 0; quad < 4; ++quad) {
    const __m512i v = _mm512_loadu_si512(p + quad * 64);
    put(out + quad * 128, v);
    put(out + quad * 128 + 64, _mm512_srli_epi16(v, 8));
    put(out + (quad + 4) * 128, _mm512_srli_epi16(v, 4));
    put(out + (quad + 4) * 128 + 64, _mm512_srli_epi16(v, 12));
  }
}

inline void unpack_q8(const uint8_t* p, float per_unit, uint8_t* out) {
  const __m512h scale = constants_twice(reinterpret_cast<const uint16_t*>(p + 512), per_unit);
  const __m512h zero_point = _mm512_mul_ph(scale, _mm512_set1_ph(-128));
  const auto put = [&](uint8_t* to, __m512i bytes) {
    store_weights(to, _mm512_fmadd_ph(_mm512_cvtepu16_ph(bytes), scale, zero_point));
  };
#pragma GCC unroll 8
  for (int quad = 0; quad < 8; ++quad) {
    const __m512i v = _mm512_loadu_si512(p + quad * 64);
    put(out + quad * 128, _mm512_and_si512(v, _mm512_set1_epi16(0x00ff)));
    put(out + quad * 128 + 64, _mm512_srli_epi16(v, 8));
  }
}

inline __m512i shifted_left(__m512i v, int bits) {
  typedef uint16_t Words __attribute__((vector_size(64)));
  return bits < 0 ? (__m512i)((Words)v >> -bits) : (__m512i)((Words)v << bits);
}

// Five and six bits: the upper ones join the nibbles in the low byte of a word.
template <Format kFormat>
inline void unpack_upper(const uint8_t* p, float per_unit, uint8_t* out) {
  constexpr bool kHalves = kFormat == Format::q6;
  constexpr int kBits = kHalves ? 2 : 1;
  const auto* constants = reinterpret_cast<const uint16_t*>(p + group_value_bytes(kFormat));
  const __m512h scale = constants_twice(constants, per_unit), second = constants_twice(constants + kBlock, per_unit);
  const __m512h scales[2] = {scale, kHalves ? second : scale};
  const __m512h zeros[2] = {kHalves ? _mm512_mul_ph(scales[0], _mm512_set1_ph(-32)) : second,
                            kHalves ? _mm512_mul_ph(scales[1], _mm512_set1_ph(-32)) : second};
  const __m512i nibble = _mm512_set1_epi16(0x000f), above = _mm512_set1_epi16(kHalves ? 0x0030 : 0x0010);
  const __m512i upper[2] = {_mm512_loadu_si512(p + 256), _mm512_loadu_si512(p + (kHalves ? 320 : 256))};
#pragma GCC unroll 8
  for (int quad = 0; quad < 8; ++quad) {
    const int half = quad / 4;
    const __m512i v = _mm512_loadu_si512(p + quad % 4 * 64);
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      const __m512i low = _mm512_and_si512(shifted_left(v, -4 * half - 8 * odd), nibble);
      const __m512i high = shifted_left(upper[half], 4 - (kHalves ? quad % 4 : quad) * kBits - 8 * odd);
      const __m512i bits = _mm512_ternarylogic_epi32(high, above, low, 0xea);  // (a & b) | c
      store_weights(out + quad * 128 + odd * 64, _mm512_fmadd_ph(_mm512_cvtepu16_ph(bits), scales[half], zeros[half]));
    }
  }
}

// One group of 32 inputs of a block as a tile, and the prefetch of one further on.
inline void unpack_group(Format format, const uint8_t* p, float per_unit, uint8_t* out) {
  for (int64_t line = 0; line < group_bytes(format); line += 64) prefetch(p + kUnpackAheadBytes + line);
  if (format == Format::q8) unpack_q8(p, per_unit, out);
  else if (format == Format::q4) unpack_q4<false>(p, per_unit, out);
  else if (format == Format::q4_min) unpack_q4<true>(p, per_unit, out);
  else if (format == Format::q5_min) unpack_upper<Format::q5_min>(p, per_unit, out);
  else unpack_upper<Format::q6>(p, per_unit, out);
}

// Grouped weights for few rows: groups become tiles a few steps before they are multiplied, in a ring that never leaves the
// first-level cache. (A whole pair of blocks would: writing it and reading it again from the second level takes longer than
// unpacking.) Goes through the blocks one by one, or through the left and right ones of each pair together.
template <int kBlocks>
class Ring {
 public:
  Ring(const Weight& w, Range pairs, std::byte* scratch)
      : format_(w.format), per_unit_(kUnbiased / w.unit), block_bytes_(block_bytes(w.format, w.k_padded)),
        room_(reinterpret_cast<uint8_t*>(scratch)), from_(w.block(2 * pairs.begin)), block_end_(from_ + block_bytes_),
        end_(w.block(2 * pairs.end)) {
    for (int i = 0; i < kAhead; ++i) make_step();
  }
  const uint8_t* left(int64_t) const { return room_ + used_ % kSlots * kBlocks * 1024; }
  const uint8_t* right(int64_t step) const { return left(step) + 1024; }
  void advance() {
    ++used_;
    if (from_ < end_) make_step();
  }

 private:
  static constexpr int64_t kAhead = 4 / kBlocks, kSlots = 8 / kBlocks;

  void make_step() {
    uint8_t* to = room_ + made_++ % kSlots * kBlocks * 1024;
    for (int i = 0; i < kBlocks; ++i) unpack_group(format_, from_ + i * block_bytes_, per_unit_, to + i * 1024);
    from_ += group_bytes(format_);
    if (from_ < block_end_) return;
    from_ += (kBlocks - 1) * block_bytes_;  // past the right block
    block_end_ = from_ + block_bytes_;
  }

  const Format format_;
  const float per_unit_;
  const int64_t block_bytes_;
  uint8_t* const room_;
  const uint8_t* from_;
  const uint8_t* block_end_;
  const uint8_t* const end_;
  int64_t made_ = 0, used_ = 0;
};

// A pair of blocks of columns made ready while the pair before it is multiplied: the tiles leave the vector registers idle,
// and memory. Grouped weights become tiles in this thread's scratch; stored tiles are only asked for.
class Columns {
 public:
  // Room for two pairs of unpacked blocks, which take turns.
  Columns(const Weight& w, std::byte* scratch)
      : w_(w), stored_(w.format == Format::bf16 || w.format == Format::int8),
        per_unit_(kUnbiased / w.unit), room_(reinterpret_cast<uint8_t*>(scratch)),
        bytes_(stored_ ? block_bytes(w.format, w.k_padded) : w.k_padded * kBlock * 2),
        pieces_(stored_ ? 2 * bytes_ / kPiece : 2 * w.k_padded / kGroup) {}

  // The next pair, `steps` calls of advance() before it is taken.
  void ask(int64_t pair, int64_t steps) {
    from_ = w_.block(2 * pair);
    done_ = credit_ = 0;
    steps_ = steps;
  }
  void take() {
    while (done_ < pieces_) make_piece();
    left_ = stored_ ? from_ : room_ + turn_ * 2 * bytes_;
    turn_ = 1 - turn_;
    done_ = pieces_;
  }
  void advance() {
    for (credit_ += pieces_; credit_ >= steps_ && done_ < pieces_; credit_ -= steps_) make_piece();
  }
  const uint8_t* left(int64_t step) const { return left_ + step * 1024; }
  const uint8_t* right(int64_t step) const { return left(step) + bytes_; }

 private:
  static constexpr int64_t kPiece = 256;  // bytes of stored tiles asked for at once

  void make_piece() {
    const int64_t i = done_++;
    if (stored_) {
      for (int64_t line = 0; line < kPiece; line += 64) __builtin_prefetch(from_ + i * kPiece + line, 0, 2);
      return;
    }
    unpack_group(w_.format, from_ + i * group_bytes(w_.format), per_unit_, room_ + turn_ * 2 * bytes_ + i * 1024);
  }

  const Weight& w_;
  const bool stored_;
  const float per_unit_;
  uint8_t* const room_;
  const int64_t bytes_, pieces_;
  const uint8_t* from_ = nullptr;
  const uint8_t* left_ = nullptr;
  int64_t steps_ = 1, done_ = 0, credit_ = 0, turn_ = 0;
};

// --- products --------------------------------------------------------------------------------------------------------------

#define PELLUCID_MULTIPLY(sum, x, w)            \
  if constexpr (kInt8) _tile_dpbsud(sum, x, w); \
  else _tile_dpbf16ps(sum, x, w)

// So many rows do not stay in the first-level cache until the next columns, so they are kept from driving out the present ones.
constexpr int64_t kPassingRows = 4 * kBlock + 1;

template <int kTile, bool kPassing>
inline void load_rows(const uint8_t* from) {
  if constexpr (kPassing) load_tile_once<kTile>(from);
  else load_tile<kTile>(from, 64);
}

// Two row tiles against two column tiles: each loaded tile is used twice. `columns` is a Ring or Columns.
template <bool kInt8, bool kPassing, class Source>
void multiply_2x2(const uint8_t* top, const uint8_t* bottom, int64_t steps, Source& columns, Sums* out) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(6, columns.left(step), 64);
    load_rows<4, kPassing>(top + step * 1024);
    PELLUCID_MULTIPLY(0, 4, 6);
    load_rows<5, kPassing>(bottom + step * 1024);
    PELLUCID_MULTIPLY(2, 5, 6);
    _tile_loadd(7, columns.right(step), 64);
    PELLUCID_MULTIPLY(1, 4, 7);
    PELLUCID_MULTIPLY(3, 5, 7);
    columns.advance();
  }
  _tile_stored(0, out->v[0], 64);
  _tile_stored(1, out->v[1], 64);
  _tile_stored(2, out->v[2], 64);
  _tile_stored(3, out->v[3], 64);
}

template <bool kInt8, class Source>
void multiply_1x2(const uint8_t* top, int64_t steps, Source& columns, Sums* out) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(4, top + step * 1024, 64);
    _tile_loadd(6, columns.left(step), 64);
    PELLUCID_MULTIPLY(0, 4, 6);
    _tile_loadd(7, columns.right(step), 64);
    PELLUCID_MULTIPLY(1, 4, 7);
    columns.advance();
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
    const Floats unit = splat(a.weight.unit);
    *left = as_floats(raw_left) * unit;
    *right = as_floats(raw_right) * unit;
  }
}

// The common case, in registers: all 32 columns exist and there is no bias.
template <Store kStore>
struct StoreWhole {
  const MatmulArgs& a;
  void operator()(int64_t row, int64_t pair, Floats left, Floats right) const {
    if constexpr (kStore == Store::silu_mul) {
      store(static_cast<float*>(a.y) + row * a.ld + pair * kBlock, silu(left) * right);
    } else if constexpr (kStore == Store::bf16) {
      uint16_t* y = static_cast<uint16_t*>(a.y) + row * a.ld + pair * kPair;
      store_bf16(y, left);
      store_bf16(y + kBlock, right);
    } else {
      float* y = static_cast<float*>(a.y) + row * a.ld + pair * kPair;
      store(y, kStore == Store::add ? load(y) + left : left);
      store(y + kBlock, kStore == Store::add ? load(y + kBlock) + right : right);
    }
  }
};

struct StoreAny {
  const MatmulArgs& a;
  void operator()(int64_t row, int64_t pair, Floats left, Floats right) const {
    Product product;
    store(product.v[0], left);
    store(product.v[0] + kBlock, right);
    store_product(a, product, row, 1, pair);
  }
};

template <bool kInt8, class Finish>
void store_rows(const MatmulArgs& a, const Sums& sums, const Unstored& at, const Finish& finish) {
  for (int64_t r = 0; r < at.rows; ++r) {
    Floats left, right;
    finish_columns<kInt8>(a, sums, r, at, &left, &right);
    finish(at.row + r, at.pair, left, right);
  }
}

template <bool kInt8>
void store_sums(const MatmulArgs& a, const Sums& sums, const Unstored& at) {
  if (at.rows == 0) return;
  if (!a.bias && (at.pair + 1) * kPair <= a.weight.n) {
    switch (a.store) {
      case Store::f32: return store_rows<kInt8>(a, sums, at, StoreWhole<Store::f32>{a});
      case Store::bf16: return store_rows<kInt8>(a, sums, at, StoreWhole<Store::bf16>{a});
      case Store::add: return store_rows<kInt8>(a, sums, at, StoreWhole<Store::add>{a});
      case Store::silu_mul: return store_rows<kInt8>(a, sums, at, StoreWhole<Store::silu_mul>{a});
    }
  }
  store_rows<kInt8>(a, sums, at, StoreAny{a});
}

// Storing lags one pair of tiles behind multiplying, so that the vector units store while the tiles multiply.
template <bool kInt8>
class TileRows {
 public:
  explicit TileRows(const MatmulArgs& a) : a_(a), steps_(a.panel.k_padded / (kInt8 ? 64 : 32)) {}

  template <class Source>
  void multiply(Range rows, int64_t pair, Source& columns) {
    for (int64_t row = rows.begin; row < rows.end; row += 2 * kBlock) {
      const int64_t count = rows.end - row < 2 * kBlock ? rows.end - row : 2 * kBlock;
      const uint8_t* top = a_.panel.data + row * steps_ * kStepBytes;
      const uint8_t* bottom = top + kBlock * steps_ * kStepBytes;
      const bool passing = rows.end - rows.begin >= kPassingRows;
      if (count <= kBlock) multiply_1x2<kInt8>(top, steps_, columns, &sums_[turn_]);
      else if (passing) multiply_2x2<kInt8, true>(top, bottom, steps_, columns, &sums_[turn_]);
      else multiply_2x2<kInt8, false>(top, bottom, steps_, columns, &sums_[turn_]);
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

// Three or four row tiles against one block of columns at a time, so that each tile of a Ring is loaded once.
template <int kRowTiles>
void multiply_columns(const MatmulArgs& a, Range rows, Range pairs, std::byte* scratch) {
  const int64_t steps = a.panel.k_padded / 32;
  const uint8_t* x = a.panel.data + rows.begin * steps * kStepBytes;
  Ring<1> columns(a.weight, pairs, scratch);
  Sums sums[2][2];  // [turn][pair of row tiles]
  const auto store_pair = [&](int64_t pair) {
    const int64_t split = rows.begin + 2 * kBlock;
    store_sums<false>(a, sums[pair % 2][0], {rows.begin, 2 * kBlock, pair});
    store_sums<false>(a, sums[pair % 2][1], {split, rows.end - split, pair});
  };
  for (int64_t block = 2 * pairs.begin; block < 2 * pairs.end; ++block) {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    for (int64_t step = 0; step < steps; ++step) {
      load_tile<6>(columns.left(step), 64);
      load_tile<4>(x + step * 1024, 64);
      multiply_bf16<0, 4, 6>();
      load_tile<5>(x + (steps + step) * 1024, 64);
      multiply_bf16<1, 5, 6>();
      load_tile<4>(x + (2 * steps + step) * 1024, 64);
      multiply_bf16<2, 4, 6>();
      if constexpr (kRowTiles == 4) {
        load_tile<5>(x + (3 * steps + step) * 1024, 64);
        multiply_bf16<3, 5, 6>();
      }
      columns.advance();
    }
    Sums(&to)[2] = sums[block / 2 % 2];
    store_tile<0>(to[0].v[block % 2], 64);
    store_tile<1>(to[0].v[2 + block % 2], 64);
    store_tile<2>(to[1].v[block % 2], 64);
    if constexpr (kRowTiles == 4) store_tile<3>(to[1].v[2 + block % 2], 64);
    if (block % 2 == 0 && block / 2 > pairs.begin) store_pair(block / 2 - 1);
  }
  store_pair(pairs.end - 1);
}

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
    const bool grouped = a.panel.preparation == Preparation::quad16;
    if (grouped && count > 2 * kBlock && count <= 4 * kBlock) {
      if (count > 3 * kBlock) multiply_columns<4>(a, panel, pairs, scratch);
      else multiply_columns<3>(a, panel, pairs, scratch);
    } else if (grouped && count <= 2 * kBlock) {
      Ring<2> columns(a.weight, pairs, scratch);
      for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) tiles.multiply(panel, pair, columns);
    } else {
      Columns columns(a.weight, scratch);
      columns.ask(pairs.begin, 1);
      for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
        columns.take();
        if (pair + 1 < pairs.end) columns.ask(pair + 1, tiles.steps(panel));
        tiles.multiply(panel, pair, columns);
      }
    }
    tiles.flush();
  }
  _tile_release();
}

}  // namespace
}  // namespace pellucid
