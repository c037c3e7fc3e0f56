// Exponentials as bfloat16 straight from scores, for attention on tiles: a probability is rounded to 8 significant bits
// anyway, so its power of two is looked up and not computed. One idea: in steps of 1/128 the number x is a 16-bit integer
// whose upper bits are the exponent of 2^x and whose lower 7 bits choose the mantissa from a table of 128 bytes.
//
// Each result is within 0.7 % of the true power (0.27 % from rounding x, 0.39 % from rounding the result), without bias to
// speak of; numerators and the total that divides them use the very same values.
#pragma once

#include <immintrin.h>

#include "simd.h"

namespace pellucid {
namespace {

constexpr float kSteps = 128.0f;    // per power of two
constexpr int16_t kBits = 127 * 128;  // the bits of 1.0 in bfloat16, 2^0 in steps
// A row's reference gives 2^-kBelow, so that bit 14 says that a score lies 2^(kBelow + 1) above it.
constexpr int kBelow = 15;
constexpr int64_t kRun = 32;  // scores turned together: one row of a tile of probabilities

// round(128 * (2^(i / 128) - 1)), the mantissas.
alignas(64) constexpr uint8_t kMantissas[128] = {
    0, 1, 1, 2, 3, 4, 4, 5, 6, 6, 7, 8, 9, 9, 10, 11,
    12, 12, 13, 14, 15, 15, 16, 17, 18, 19, 19, 20, 21, 22, 23, 23,
    24, 25, 26, 27, 28, 28, 29, 30, 31, 32, 33, 34, 34, 35, 36, 37,
    38, 39, 40, 41, 42, 43, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52,
    53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68,
    69, 70, 72, 73, 74, 75, 76, 77, 78, 79, 80, 82, 83, 84, 85, 86,
    87, 88, 90, 91, 92, 93, 94, 96, 97, 98, 99, 100, 102, 103, 104, 105,
    107, 108, 109, 111, 112, 113, 115, 116, 117, 118, 120, 121, 123, 124, 125, 127,
};

// The order of a run's tokens in a row of probabilities: 0-3, 16-19, 4-7, 20-23, ... (what packing two registers lane by
// lane gives). Values are joined in the same order.
class Exponentials {
 public:
  // Scores times `slope` are in steps.
  explicit Exponentials(float slope)
      : slope_(_mm512_set1_ps(slope)),
        low_(_mm512_load_si512(kMantissas)),
        high_(_mm512_load_si512(kMantissas + 64)),
        exponents_(_mm512_set1_epi16(static_cast<int16_t>(0xff80))),
        limit_(_mm512_set1_epi16(static_cast<int16_t>(0xc000))) {}

  // Where scores and probabilities lie, counted in their own elements. A run's first 16 scores are at `scores`, the others
  // kTile further, the next run's 2 * kTile further; the next row's 16 further. Probabilities: kRun a row, kOut a run.
  //
  // 2^(score - reference - kBelow) of kRuns runs of kRows rows as bfloat16, zero where that is below the normal numbers, and
  // their bits joined, for too_high(). Independent runs keep the processor busy only if their instructions alternate in the
  // program: its scheduler holds about two runs.
  template <int kRows, int kRuns, int64_t kTile, int64_t kOut>
  __m512i turn(const float* scores, const float* shifts, uint16_t* out) const {
    constexpr int kCount = kRows * kRuns;
    __m512i low[kCount], high[kCount], bits[kCount];
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      const float* from = scores + i % kRuns * 2 * kTile + i / kRuns * 16;
      const __m512 shift = _mm512_set1_ps(shifts[i / kRuns]);
      low[i] = steps(from, shift);
      high[i] = steps(from + kTile, shift);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) bits[i] = _mm512_packus_epi32(low[i], high[i]);  // below zero: zero
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i)
      low[i] = _mm512_permutex2var_epi8(low_, bits[i], high_);  // mantissas; the other bits mean nothing
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i)
      _mm512_store_si512(out + i % kRuns * kOut + i / kRuns * kRun,
                         _mm512_ternarylogic_epi32(bits[i], exponents_, low[i], 0xe2));  // b ? a : c
    __m512i seen = bits[0];
#pragma GCC unroll 4
    for (int i = 1; i < kCount; ++i) seen = _mm512_or_si512(seen, bits[i]);
    return seen;
  }

  // The shift of a row for the reference `top`, in steps.
  static float shift_for(float top) { return static_cast<float>(kBits) - kBelow * kSteps - top; }
  static float top_of(float shift) { return shift_for(shift); }
  // Whether a score was so far above the reference that the row needs a new one; what turn() gave is then meaningless.
  bool too_high(__m512i seen) const { return _mm512_test_epi16_mask(seen, limit_) != 0; }

 private:
  __m512i steps(const float* scores, __m512 shift) const {
    return _mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_load_ps(scores), slope_, shift));
  }

  __m512 slope_;
  // Here and not in the code, where each use would cost an instruction of the busiest port.
  __m512i low_, high_, exponents_, limit_;
};

}  // namespace
}  // namespace pellucid
