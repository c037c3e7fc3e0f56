// Sixteen lanes, whatever the processor. One idea: every kernel that is not a tile kernel is written once over vectors of
// sixteen floats or integers, and this header says how many registers that takes: one (AVX-512), two (AVX2) or four.
//
// The header is compiled once per level with that level's flags, so everything in it lives in an unnamed namespace: a
// function with external linkage could be merged by the linker with the copy compiled for a newer processor.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pellucid {
namespace {

#if defined(__AVX512F__)
constexpr int kParts = 1;
#elif defined(__AVX2__)
constexpr int kParts = 2;
#else
constexpr int kParts = 4;
#endif
constexpr int kPartBytes = 64 / kParts;
constexpr float kLog2E = 1.44269504f;

typedef float FloatPart __attribute__((vector_size(kPartBytes)));
typedef int32_t IntPart __attribute__((vector_size(kPartBytes)));
typedef uint32_t WordPart __attribute__((vector_size(kPartBytes)));
typedef uint16_t HalfPart __attribute__((vector_size(kPartBytes / 2)));

#define PELLUCID_EACH_PART _Pragma("GCC unroll 4") for (int part = 0; part < kParts; ++part)

struct Floats {
  FloatPart p[kParts];
};
struct Ints {
  IntPart p[kParts];
};

inline Floats load(const float* from) {
  Floats r;
  __builtin_memcpy(&r, from, 64);
  return r;
}
inline void store(float* to, Floats v) { __builtin_memcpy(to, &v, 64); }
inline Ints load_ints(const void* from) {
  Ints r;
  __builtin_memcpy(&r, from, 64);
  return r;
}
inline void store_ints(void* to, Ints v) { __builtin_memcpy(to, &v, 64); }

inline Floats splat(float x) {
  Floats r;
  PELLUCID_EACH_PART r.p[part] = x - FloatPart{};
  return r;
}
inline Ints splat_int(int32_t x) {
  Ints r;
  PELLUCID_EACH_PART r.p[part] = x - IntPart{};
  return r;
}
inline Floats zeros() { return splat(0.0f); }

#define PELLUCID_BINARY(type, name, expression)                     \
  inline type name(type a, type b) {                                \
    type r;                                                         \
    PELLUCID_EACH_PART r.p[part] = expression;                      \
    return r;                                                       \
  }
PELLUCID_BINARY(Floats, operator+, a.p[part] + b.p[part])
PELLUCID_BINARY(Floats, operator-, a.p[part] - b.p[part])
PELLUCID_BINARY(Floats, operator*, a.p[part] * b.p[part])
PELLUCID_BINARY(Floats, operator/, a.p[part] / b.p[part])
PELLUCID_BINARY(Floats, larger, a.p[part] > b.p[part] ? a.p[part] : b.p[part])
PELLUCID_BINARY(Floats, smaller, a.p[part] < b.p[part] ? a.p[part] : b.p[part])
// Integers wrap around, as unsigned ones may.
PELLUCID_BINARY(Ints, operator+, (IntPart)((WordPart)a.p[part] + (WordPart)b.p[part]))
PELLUCID_BINARY(Ints, operator-, (IntPart)((WordPart)a.p[part] - (WordPart)b.p[part]))
PELLUCID_BINARY(Ints, operator&, a.p[part] & b.p[part])
PELLUCID_BINARY(Ints, operator|, a.p[part] | b.p[part])
#undef PELLUCID_BINARY

// a * b + c; the compiler contracts it (-ffp-contract=fast) where the level has fused multiply-add.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  Floats r;
  PELLUCID_EACH_PART r.p[part] = a.p[part] * b.p[part] + c.p[part];
  return r;
}

template <int kBits>
inline Ints shift_right(Ints v) {  // logical
  Ints r;
  PELLUCID_EACH_PART r.p[part] = (IntPart)((WordPart)v.p[part] >> kBits);
  return r;
}
template <int kBits>
inline Ints shift_left(Ints v) {
  Ints r;
  PELLUCID_EACH_PART r.p[part] = (IntPart)((WordPart)v.p[part] << kBits);
  return r;
}

// By `bits` to the left, or by as many as it is below zero to the right; to be called with what the compiler knows.
inline Ints shift_left(Ints v, int bits) {
  Ints r;
  PELLUCID_EACH_PART r.p[part] = (IntPart)(bits < 0 ? (WordPart)v.p[part] >> -bits : (WordPart)v.p[part] << bits);
  return r;
}

inline Floats as_floats(Ints v) {
  Floats r;
  PELLUCID_EACH_PART r.p[part] = (FloatPart)v.p[part];
  return r;
}
inline Ints as_ints(Floats v) {
  Ints r;
  PELLUCID_EACH_PART r.p[part] = (IntPart)v.p[part];
  return r;
}
inline Floats to_floats(Ints v) {
  Floats r;
  PELLUCID_EACH_PART r.p[part] = __builtin_convertvector(v.p[part], FloatPart);
  return r;
}
// Nearest integer, ties to even, for |v| < 2^22: adding 1.5 * 2^23 leaves the integer in the low mantissa bits.
inline Ints round_to_ints(Floats v) { return as_ints(v + splat(12582912.0f)) - splat_int(0x4b400000); }

inline float sum_of(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v.p[0]);
#else
  float lane[16];
  store(lane, v);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
#endif
}
inline float largest_of(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v.p[0]);
#else
  float lane[16];
  store(lane, v);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
  return lane[0];
#endif
}
inline float first_of(Floats v) { return v.p[0][0]; }
inline Floats absolute(Floats v) { return as_floats(as_ints(v) & splat_int(0x7fffffff)); }

// Of every four lanes the two in the middle change places.
inline Floats swap_middles(Floats v) {
#if defined(__AVX512F__)
  v.p[0] = (FloatPart)_mm512_shuffle_ps((__m512)v.p[0], (__m512)v.p[0], _MM_SHUFFLE(3, 1, 2, 0));
#else
  float lane[16];
  store(lane, v);
  for (int i = 0; i < 16; i += 4) {
    const float second = lane[i + 1];
    lane[i + 1] = lane[i + 2];
    lane[i + 2] = second;
  }
  v = load(lane);
#endif
  return v;
}

// --- bfloat16: the upper half of a float -----------------------------------------------------------------------------

// A word holds two bfloat16 values; the first is in the low half.
inline Floats first_of_pairs(Ints words) { return as_floats(shift_left<16>(words)); }
inline Floats second_of_pairs(Ints words) { return as_floats(words & splat_int(static_cast<int32_t>(0xffff0000))); }

inline Floats load_bf16(const uint16_t* from) {
  struct {
    HalfPart p[kParts];
  } half;
  __builtin_memcpy(&half, from, 32);
  Ints r;
  PELLUCID_EACH_PART r.p[part] = __builtin_convertvector(half.p[part], IntPart);
  return first_of_pairs(r);
}

// Round to nearest even, in the upper half of each word. Not-a-numbers may become infinities.
inline Ints rounded_to_bf16(Floats v) {
  const Ints bits = as_ints(v);
  return bits + splat_int(0x7fff) + (shift_right<16>(bits) & splat_int(1));
}
inline void store_bf16(uint16_t* to, Floats v) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)v.p[0]));
#else
  struct {
    HalfPart p[kParts];
  } half;
  const Ints words = shift_right<16>(rounded_to_bf16(v));
  PELLUCID_EACH_PART half.p[part] = __builtin_convertvector(words.p[part], HalfPart);
  __builtin_memcpy(to, &half, 32);
#endif
}
inline void store_bf16_pair(uint16_t* to, Floats first, Floats second) {
#if defined(__AVX512BF16__)
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second.p[0], (__m512)first.p[0]);
  __builtin_memcpy(to, &both, 64);
#else
  store_bf16(to, first);
  store_bf16(to + 16, second);
#endif
}
inline float bf16_to_float(uint16_t h) {
  const uint32_t bits = uint32_t{h} << 16;
  float r;
  __builtin_memcpy(&r, &bits, 4);
  return r;
}
inline uint16_t float_to_bf16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// --- float16, as GGUF scales are stored ------------------------------------------------------------------------------

inline Floats load_f16(const uint16_t* from) {
  Floats r;
#if defined(__AVX512F__)
  r.p[0] = (FloatPart)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  PELLUCID_EACH_PART r.p[part] =
      (FloatPart)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + part));
#else
  // Sign, exponent and mantissa move to their places; multiplying by 2^112 mends the exponent bias, subnormals included.
  struct {
    HalfPart p[kParts];
  } half;
  __builtin_memcpy(&half, from, 32);
  Ints h;
  PELLUCID_EACH_PART h.p[part] = __builtin_convertvector(half.p[part], IntPart);
  const Floats magnitude = as_floats(shift_left<13>(h & splat_int(0x7fff))) * splat(0x1p112f);
  r = as_floats(as_ints(magnitude) | shift_left<16>(h & splat_int(0x8000)));
#endif
  return r;
}

// --- dot products of four bytes --------------------------------------------------------------------------------------

// Per lane: sum + w0*x0 + w1*x1 + w2*x2 + w3*x3, exactly; w unsigned bytes, x signed bytes, the same four x in all lanes.
inline Ints dot4(Ints sum, Ints w, int32_t x) {
#if defined(__AVX512VNNI__)
  sum.p[0] = (IntPart)_mm512_dpbusd_epi32((__m512i)sum.p[0], (__m512i)w.p[0], _mm512_set1_epi32(x));
#elif defined(__AVX2__)
  // Bytes 0 and 2 against 16-bit multipliers, then bytes 1 and 3: no intermediate can saturate.
  const int32_t even = (static_cast<int8_t>(x) & 0xffff) | (static_cast<int32_t>(static_cast<int8_t>(x >> 16)) << 16);
  const int32_t odd = (static_cast<int8_t>(x >> 8) & 0xffff) | (static_cast<int32_t>(static_cast<int8_t>(x >> 24)) << 16);
  PELLUCID_EACH_PART {
    const __m256i v = (__m256i)w.p[part];
    const __m256i a = _mm256_madd_epi16(_mm256_and_si256(v, _mm256_set1_epi16(0x00ff)), _mm256_set1_epi32(even));
    const __m256i b = _mm256_madd_epi16(_mm256_srli_epi16(v, 8), _mm256_set1_epi32(odd));
    sum.p[part] += (IntPart)_mm256_add_epi32(a, b);
  }
#else
  PELLUCID_EACH_PART {
    const WordPart v = (WordPart)w.p[part];
    sum.p[part] += (IntPart)(v & 0xff) * static_cast<int8_t>(x) + (IntPart)((v >> 8) & 0xff) * static_cast<int8_t>(x >> 8) +
                   (IntPart)((v >> 16) & 0xff) * static_cast<int8_t>(x >> 16) +
                   (IntPart)(v >> 24) * static_cast<int8_t>(x >> 24);
  }
#endif
  return sum;
}

// --- exponential -----------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr float kFloor3 = 0.07802452f, kFloor2 = 0.22606717f, kFloor1 = 0.69583353f, kFloor0 = 0.99992522f;
#endif

// 2^v for v <= 0, relative error below 1.1e-4 (a minimax cubic); exactly 0 below -126.
inline Floats exp2_of_nonpositive(Floats v) {
#if defined(__AVX512F__)
  const __m512 x = (__m512)v.p[0];
  // scalef takes the floor of its second operand itself, so the fraction is reckoned from the floor too, in [0, 1).
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fmadd_ps(_mm512_set1_ps(kFloor3), f, _mm512_set1_ps(kFloor2));
  r = _mm512_fmadd_ps(r, f, _mm512_set1_ps(kFloor1));
  r = _mm512_fmadd_ps(r, f, _mm512_set1_ps(kFloor0));
  Floats result;
  result.p[0] = (FloatPart)_mm512_scalef_ps(r, x);
  return result;
#else
  const Floats clamped = larger(v, splat(-126.0f));
  const Ints whole = round_to_ints(clamped);
  const Floats f = clamped - to_floats(whole);
  Floats r = multiply_add(splat(0.05517167f), f, splat(0.24261113f));
  r = multiply_add(r, f, splat(0.69326099f));
  r = multiply_add(r, f, splat(0.99992807f));
  const Floats scaled = r * as_floats(shift_left<23>(whole + splat_int(127)));
  Ints alive;
  PELLUCID_EACH_PART alive.p[part] = (IntPart)(v.p[part] > -126.0f);
  return as_floats(as_ints(scaled) & alive);
#endif
}

// e^v, relative error below 4e-6, no larger than e^88. AVX-512: a minimax quartic of 2^f on [0, 1); elsewhere a Taylor
// polynomial of degree 5 on half a binade, zero never but e^-87 at least.
inline Floats exponential(Floats v) {
#if defined(__AVX512F__)
  const __m512 x = (__m512)(smaller(v, splat(88.0f)) * splat(kLog2E)).p[0];
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fmadd_ps(_mm512_set1_ps(0.01353412f), f, _mm512_set1_ps(0.05201148f));
  r = _mm512_fmadd_ps(r, f, _mm512_set1_ps(0.24144280f));
  r = _mm512_fmadd_ps(r, f, _mm512_set1_ps(0.69300381f));
  r = _mm512_fmadd_ps(r, f, _mm512_set1_ps(1.00000260f));
  Floats result;
  result.p[0] = (FloatPart)_mm512_scalef_ps(r, x);
  return result;
#else
  const Floats clamped = larger(smaller(v, splat(88.0f)), splat(-87.0f));
  const Floats x = clamped * splat(kLog2E);
  const Ints whole = round_to_ints(x);
  const Floats g = multiply_add(to_floats(whole), splat(-0.69314718f), clamped);
  Floats r = splat(1.0f / 120);
  r = multiply_add(r, g, splat(1.0f / 24));
  r = multiply_add(r, g, splat(1.0f / 6));
  r = multiply_add(r, g, splat(0.5f));
  r = multiply_add(r, g, splat(1.0f));
  r = multiply_add(r, g, splat(1.0f));
  return r * as_floats(shift_left<23>(whole + splat_int(127)));
#endif
}

// 1 / v for normal v, relative error below 2^-22.
inline Floats reciprocal(Floats v) {
#if defined(__AVX512F__)
  const __m512 x = (__m512)v.p[0];
  const __m512 guess = _mm512_rcp14_ps(x);
  const __m512 miss = _mm512_fnmadd_ps(x, guess, _mm512_set1_ps(1.0f));
  Floats r;
  r.p[0] = (FloatPart)_mm512_fmadd_ps(guess, miss, guess);
  return r;
#else
  return splat(1.0f) / v;
#endif
}

}  // namespace
}  // namespace pellucid
