// Products of many rows with grouped weights, on int8 tiles. One idea: int8 tiles do twice the work of bfloat16 ones on half
// the bytes, but one scale for a whole row of activations loses its small values beside the large ones; so the inputs are
// cut into slices of 192, each with its own scale per row and per column, and the sums of a slice are scaled and added while
// the tiles multiply the next one.
//
// - A slice is three tiles deep, so that three tiles of rows, three of columns and two of sums fill the eight registers.
//   Sums are made one after another and stored one sum later: a store right behind its products would wait for them.
// - Rows are loaded as what passes once: the columns of three slices then stay in the first-level cache.
// - Every row is computed by the same sequence of operations whatever the number of rows.
#pragma once

#include <immintrin.h>

#include "kernels.h"
#include "matmul.h"
#include "simd.h"
#include "tile_config.h"
#include "tiles.h"

namespace pellucid {
namespace {

// --- grouped weights to int8 tiles -------------------------------------------------------------------------------------

// The largest magnitude that a group's 16 columns can hold.
template <Format kFormat>
inline __m512 group_magnitude(const uint8_t* p) {
  const auto* constants = reinterpret_cast<const uint16_t*>(p + (kFormat == Format::q8 ? 512 : 256));
  const __m512 scale = (__m512)load_f16(constants).p[0];
  if constexpr (kFormat == Format::q8) return _mm512_abs_ps(_mm512_mul_ps(scale, _mm512_set1_ps(127)));
  if constexpr (kFormat == Format::q4) return _mm512_abs_ps(_mm512_mul_ps(scale, _mm512_set1_ps(8)));
  const __m512 minimum = (__m512)load_f16(constants + kBlock).p[0];
  const __m512 maximum = _mm512_fmadd_ps(scale, _mm512_set1_ps(15), minimum);
  return _mm512_max_ps(_mm512_abs_ps(minimum), _mm512_abs_ps(maximum));
}

// Sixteen values rounded to 16 bits, each twice: a column's four bytes are reckoned as two words.
inline __m512i words_twice(__m512 values) {
  const __m512i v = _mm512_cvtps_epi32(values);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, v, _mm512_slli_epi32(v, 16));
}

// The upper bytes of the words: values in 256ths, half a unit added, so this rounds.
inline void store_upper_bytes(uint8_t* out, __m512i even, __m512i odd) {
  _mm512_store_si512(out, _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, _mm512_srli_epi16(even, 8), odd));
}

// One group of 32 inputs as half of an int8 tile, in units of `per_unit` / 256.
template <Format kFormat>
inline void requantize_group(const uint8_t* p, __m512 per_unit, uint8_t* out) {
  const auto* constants = reinterpret_cast<const uint16_t*>(p + (kFormat == Format::q8 ? 512 : 256));
  const __m512 half = _mm512_set1_ps(128);
  const __m512 scale = _mm512_mul_ps((__m512)load_f16(constants).p[0], per_unit);
  if constexpr (kFormat == Format::q8) {
    // Bytes are value + 128. The value stands in the upper byte of a word; the factor, at most one, has 15 bits.
    const __m512i factor = words_twice(_mm512_min_ps(_mm512_mul_ps(scale, half), _mm512_set1_ps(32767)));
    const __m512i rounding = _mm512_set1_epi16(128), upper = _mm512_set1_epi16(static_cast<short>(0xff00));
    const auto scaled = [&](__m512i words) { return _mm512_add_epi16(_mm512_mulhrs_epi16(words, factor), rounding); };
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) {
      const __m512i v = _mm512_xor_si512(_mm512_loadu_si512(p + quad * 64), _mm512_set1_epi8(-128));
      store_upper_bytes(out + quad * 64, scaled(_mm512_slli_epi16(v, 8)), scaled(_mm512_and_si512(v, upper)));
    }
    return;
  }
  const __m512 minimum = kFormat == Format::q4 ? _mm512_mul_ps(scale, _mm512_set1_ps(-8))
                                               : _mm512_mul_ps((__m512)load_f16(constants + kBlock).p[0], per_unit);
  const __m512i factor = words_twice(scale), offset = words_twice(_mm512_add_ps(minimum, half));
  const __m512i nibble = _mm512_set1_epi16(15);
  const auto scaled = [&](__m512i words) { return _mm512_add_epi16(_mm512_mullo_epi16(words, factor), offset); };
#pragma GCC unroll 4
  for (int quad = 0; quad < 4; ++quad) {
    const __m512i v = _mm512_loadu_si512(p + quad * 64);
    store_upper_bytes(out + quad * 64, scaled(_mm512_and_si512(v, nibble)),
                      scaled(_mm512_and_si512(_mm512_srli_epi16(v, 8), nibble)));
    store_upper_bytes(out + (quad + 4) * 64, scaled(_mm512_and_si512(_mm512_srli_epi16(v, 4), nibble)),
                      scaled(_mm512_srli_epi16(v, 12)));
  }
}

// A pair of blocks of columns as int8 slices, made while the pair before it is multiplied.
template <Format kFormat>
class SlicedColumns {
 public:
  static constexpr int64_t kGroups = kSliceInputs / kGroup;

  // Room for two pairs, which take turns.
  SlicedColumns(const Weight& w, uint8_t* tiles, float* scales)
      : w_(w), slices_(num_slices(w.k_padded)), groups_(w.k_padded / kGroup), tiles_(tiles), scales_(scales) {}

  // The next pair, `steps` calls of advance() before it is taken.
  void ask(int64_t pair, int64_t steps) {
    pair_ = pair;
    steps_ = steps;
    done_ = credit_ = 0;
  }
  void take() {
    while (done_ < 2 * groups_) make_group();
    taken_ = turn_;
    turn_ = 1 - turn_;
  }
  void advance() {
    for (credit_ += 2 * groups_; credit_ >= steps_ && done_ < 2 * groups_; credit_ -= steps_) make_group();
  }
  const uint8_t* left(int64_t slice) const { return tiles_ + (taken_ * slices_ + slice) * 2 * kSliceBytes; }
  const uint8_t* right(int64_t slice) const { return left(slice) + kSliceBytes; }
  const float* scales(int64_t slice) const { return scales_ + (taken_ * slices_ + slice) * kPair; }

 private:
  // Slice by slice, in it the left block and then the right one.
  void make_group() {
    const int64_t slice = done_ / (2 * kGroups), first = slice * kGroups;
    const int64_t count = groups_ - first < kGroups ? groups_ - first : kGroups;
    const int64_t at = done_ - 2 * first, block = at / count, group = at % count;
    const uint8_t* p = w_.block(2 * pair_ + block) + first * group_bytes(kFormat);
    const int64_t to = turn_ * slices_ + slice;
    if (group == 0) per_unit_ = choose_scale(p, count, scales_ + to * kPair + block * kBlock);
    p += group * group_bytes(kFormat);
    for (int64_t line = 0; line < group_bytes(kFormat); line += 64) prefetch(p + kUnpackAheadBytes + line);
    requantize_group<kFormat>(p, per_unit_, tiles_ + (to * 2 + block) * kSliceBytes + group * 512);
    ++done_;
  }
  __m512 choose_scale(const uint8_t* p, int64_t count, float* scale) {
    __m512 top = _mm512_set1_ps(1e-30f);
    for (int64_t g = 0; g < count; ++g) top = _mm512_max_ps(top, group_magnitude<kFormat>(p + g * group_bytes(kFormat)));
    _mm512_store_ps(scale, _mm512_mul_ps(top, _mm512_set1_ps(1.0f / 127)));
    return _mm512_div_ps(_mm512_set1_ps(127.0f * 256.0f), top);
  }

  const Weight& w_;
  const int64_t slices_, groups_;
  uint8_t* const tiles_;
  float* const scales_;
  __m512 per_unit_{};
  int64_t pair_ = 0, steps_ = 1, done_ = 0, credit_ = 0, turn_ = 0, taken_ = 0;
};

// --- sums of slices ------------------------------------------------------------------------------------------------------

// A slice of two row tiles and two blocks of columns whose sums are stored but not yet scaled.
struct Unscaled {
  const uint8_t* sums;      // four tiles of int32: top left, top right, bottom left, bottom right
  const float* rows;        // scales of the top rows; those of the bottom ones lie `bottom` floats on
  int64_t bottom;
  const float* columns;     // 32 scales
  float* total;             // [32][32], over the slices before
  Unstored at;
};

// What a slice is to the total of its row.
enum class Slice { first, inner, last, only };

template <Slice kSlice, class Finish>
inline void scale_rows(const Unscaled& u, int from, int to, const Finish& finish) {
  const Floats left_scale = load(u.columns), right_scale = load(u.columns + kBlock);
#pragma GCC unroll 3
  for (int r = from; r < to; ++r) {
    const uint8_t* sums = u.sums + r / kBlock * 2048 + r % kBlock * 64;
    const Floats scale = splat(u.rows[r / kBlock * u.bottom + r % kBlock]);
    Floats left = to_floats(load_ints(sums)) * left_scale, right = to_floats(load_ints(sums + 1024)) * right_scale;
    float* total = u.total + r * kPair;
    if constexpr (kSlice == Slice::first || kSlice == Slice::only) {
      left = left * scale;
      right = right * scale;
    } else {
      left = multiply_add(left, scale, load(total));
      right = multiply_add(right, scale, load(total + kBlock));
    }
    if constexpr (kSlice == Slice::first || kSlice == Slice::inner) {
      store(total, left);
      store(total + kBlock, right);
    } else if (r < u.at.rows) {
      finish(u.at.row + r, u.at.pair, left, right);
    }
  }
}

// The work of one of the twelve products of a slice; together they go through the 32 rows of the slice before.
struct NoWork {
  void operator()(int) const {}
};
template <Slice kSlice, class Finish>
struct ScaleWork {
  const Unscaled& unscaled;
  const Finish& finish;
  void operator()(int product) const { scale_rows<kSlice>(unscaled, product * 8 / 3, (product + 1) * 8 / 3, finish); }
};

struct SliceTiles {
  const uint8_t *top, *bottom, *left, *right;
  uint8_t* sums;          // as in Unscaled
  uint8_t* last_sum;      // where the last sum of the slice before goes, or null
};

// Twelve products. The sums go through the four tiles in the order top left, top right, bottom right, bottom left, so that
// each needs only three new tiles of operands. The last one stays in its register.
template <class Work>
void multiply_slice(const SliceTiles& t, const Work& work) {
  load_tile_once<2>(t.top), load_tile<5>(t.left, 64), zero_tile<0>(), multiply_int8<0, 2, 5>(), work(0);
  load_tile_once<3>(t.top + 1024), load_tile<6>(t.left + 1024, 64), multiply_int8<0, 3, 6>(), work(1);
  load_tile_once<4>(t.top + 2048), load_tile<7>(t.left + 2048, 64), multiply_int8<0, 4, 7>(), work(2);
  if (t.last_sum) store_tile<1>(t.last_sum, 64);
  load_tile<5>(t.right, 64), zero_tile<1>(), multiply_int8<1, 2, 5>(), work(3);
  load_tile<6>(t.right + 1024, 64), multiply_int8<1, 3, 6>(), work(4);
  load_tile<7>(t.right + 2048, 64), multiply_int8<1, 4, 7>(), work(5);
  store_tile<0>(t.sums, 64);
  load_tile_once<2>(t.bottom), zero_tile<0>(), multiply_int8<0, 2, 5>(), work(6);
  load_tile_once<3>(t.bottom + 1024), multiply_int8<0, 3, 6>(), work(7);
  load_tile_once<4>(t.bottom + 2048), multiply_int8<0, 4, 7>(), work(8);
  store_tile<1>(t.sums + 1024, 64);
  load_tile<5>(t.left, 64), zero_tile<1>(), multiply_int8<1, 2, 5>(), work(9);
  load_tile<6>(t.left + 1024, 64), multiply_int8<1, 3, 6>(), work(10);
  load_tile<7>(t.left + 2048, 64), multiply_int8<1, 4, 7>(), work(11);
  store_tile<0>(t.sums + 3072, 64);
}

// --- the product ---------------------------------------------------------------------------------------------------------

// Slices whose columns stay in the first-level cache while all rows pass; the totals of rows then wait in the second.
constexpr int64_t kSlicesAtOnce = 3;
constexpr int64_t kMostSlicedRows = 512;

template <Format kFormat, class Finish>
class SlicedProduct {
 public:
  SlicedProduct(const MatmulArgs& a, std::byte* scratch, const Finish& finish)
      : a_(a), finish_(finish), slices_(num_slices(a.panel.k_padded)), room_(reinterpret_cast<uint8_t*>(scratch)),
        totals_(reinterpret_cast<float*>(room_ + kSumsBytes)),
        scales_(totals_ + kMostSlicedRows * kPair),
        tiles_(reinterpret_cast<uint8_t*>(scales_ + 2 * slices_ * kPair)),
        columns_(a.weight, tiles_, scales_) {}

  // Rows from a multiple of 16 on. An odd row tile at the end is multiplied beside whatever follows it in the panel, maybe
  // another thread's rows, and what comes of that is not stored.
  void multiply(Range rows, Range pairs) {
    const int64_t row_pairs = (rows.end - rows.begin + 2 * kBlock - 1) / (2 * kBlock);
    columns_.ask(pairs.begin, 1);
    for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
      columns_.take();
      if (pair + 1 < pairs.end) columns_.ask(pair + 1, row_pairs * slices_);
      for (int64_t first = 0; first < slices_; first += kSlicesAtOnce) {
        const int64_t end = first + kSlicesAtOnce < slices_ ? first + kSlicesAtOnce : slices_;
        for (int64_t row = rows.begin; row < rows.end; row += 2 * kBlock)
          for (int64_t slice = first; slice < end; ++slice) {
            multiply_one(rows, row, pair, slice);
            if (pair + 1 < pairs.end) columns_.advance();  // after it: the slice before is still being scaled
          }
      }
    }
    flush();
  }

 private:
  static constexpr int64_t kSumsBytes = 2 * 4096;

  void multiply_one(Range rows, int64_t row, int64_t pair, int64_t slice) {
    const int64_t block = row / kBlock * slices_ + slice;
    const uint8_t* top = a_.panel.data + block * kSliceBytes;
    uint8_t* sums = room_ + turn_ * 4096;
    const SliceTiles tiles{top, top + slices_ * kSliceBytes, columns_.left(slice), columns_.right(slice), sums, last_sum_};
    with_work([&](const auto& work) { multiply_slice(tiles, work); });
    last_sum_ = sums + 2048;
    const int64_t left = rows.end - row;
    float* total = totals_ + (slices_ > kSlicesAtOnce ? (row - rows.begin) * kPair : 0);
    unscaled_ = {sums, a_.panel.scale + block * kBlock, slices_ * kBlock, columns_.scales(slice), total,
                 {row, left < 2 * kBlock ? left : 2 * kBlock, pair}};
    kind_ = slices_ == 1 ? Slice::only : slice == 0 ? Slice::first : slice + 1 == slices_ ? Slice::last : Slice::inner;
    turn_ = 1 - turn_;
  }

  template <class Function>
  void with_work(const Function& function) {
    if (!last_sum_) return function(NoWork{});
    switch (kind_) {
      case Slice::first: return function(ScaleWork<Slice::first, Finish>{unscaled_, finish_});
      case Slice::inner: return function(ScaleWork<Slice::inner, Finish>{unscaled_, finish_});
      case Slice::last: return function(ScaleWork<Slice::last, Finish>{unscaled_, finish_});
      case Slice::only: return function(ScaleWork<Slice::only, Finish>{unscaled_, finish_});
    }
  }
  void flush() {
    if (last_sum_) store_tile<1>(last_sum_, 64);
    with_work([&](const auto& work) {
      for (int product = 0; product < 12; ++product) work(product);
    });
    last_sum_ = nullptr;
  }

  const MatmulArgs& a_;
  const Finish& finish_;
  const int64_t slices_;
  uint8_t* const room_;
  float* const totals_;
  float* const scales_;
  uint8_t* const tiles_;
  SlicedColumns<kFormat> columns_;
  Unscaled unscaled_{};
  Slice kind_ = Slice::only;
  uint8_t* last_sum_ = nullptr;
  int turn_ = 0;
};

template <Format kFormat, class Finish>
void sliced_matmul_to(const MatmulArgs& a, Range rows, Range pairs, std::byte* scratch, const Finish& finish) {
  const int64_t whole = kPanelBytes / (num_slices(a.panel.k_padded) * kSliceBytes / kBlock) / 32 * 32;
  const int64_t panel_rows = whole < 32 ? 32 : whole > kMostSlicedRows ? kMostSlicedRows : whole;
  configure(16, 16);
  SlicedProduct<kFormat, Finish> product(a, scratch, finish);
  for (int64_t row = rows.begin; row < rows.end; row += panel_rows)
    product.multiply({row, row + panel_rows < rows.end ? row + panel_rows : rows.end}, pairs);
  _tile_release();
}

template <Format kFormat>
void sliced_matmul_of(const MatmulArgs& a, Range rows, Range pairs, std::byte* scratch) {
  const auto to = [&](const auto& finish) { sliced_matmul_to<kFormat>(a, rows, pairs, scratch, finish); };
  if (a.bias || pairs.end * kPair > a.weight.n) return to(StoreAny{a});
  switch (a.store) {
    case Store::f32: return to(StoreWhole<Store::f32>{a});
    case Store::bf16: return to(StoreWhole<Store::bf16>{a});
    case Store::add: return to(StoreWhole<Store::add>{a});
    case Store::silu_mul: return to(StoreWhole<Store::silu_mul>{a});
  }
}

void sliced_matmul(const MatmulArgs& a, Range rows, Range pairs, std::byte* scratch) {
  if (a.weight.format == Format::q8) return sliced_matmul_of<Format::q8>(a, rows, pairs, scratch);
  if (a.weight.format == Format::q4) return sliced_matmul_of<Format::q4>(a, rows, pairs, scratch);
  return sliced_matmul_of<Format::q4_min>(a, rows, pairs, scratch);
}

}  // namespace
}  // namespace pellucid
