// Draws a token from a row of scores without sorting it. One idea: what the filters keep is everything from some weight on,
// so only that weight has to be found: digit by digit over the bits of the largest weights, never by order.
//
// A weight is e^(score / temperature - largest), float32, so the largest is exactly 1. Filters keep whole groups of equal
// weights, and the draw goes through tokens in the order of their ids: nothing depends on how ties are broken.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace pellucid {
namespace {

constexpr int64_t kSumRun = 256;    // weights are summed in runs, so that the draw need not add them up one by one
constexpr int kDigitBits = 10;      // weights lie in [0, 1]: three digits hold their 30 bits
constexpr float kLikely = 0x1p-20f;  // the filters' edges are first looked for among weights of at least this

struct SampleScratch {
  float weights[kMaxVocabulary];
  float likely[kMaxVocabulary];
  double runs[kMaxVocabulary / kSumRun];
  double digits[1 << kDigitBits];
};

inline Ints at_least(Floats v, Floats floor) {
  Ints r;
  PELLUCID_EACH_PART r.p[part] = (IntPart)(v.p[part] >= floor.p[part]);
  return r;
}

// e^v for v <= 0 to about an ulp (a Taylor polynomial of degree 7 on half a binade); 0 below the smallest normal number.
inline Floats weight_of(Floats v) {
  const Floats clamped = larger(v, splat(-87.3f));
  const Ints whole = round_to_ints(clamped * splat(kLog2E));
  const Floats n = to_floats(whole);
  Floats g = multiply_add(n, splat(-0.693145752f), clamped);
  g = multiply_add(n, splat(-1.42860677e-6f), g);
  Floats r = splat(1.0f / 5040);
  r = multiply_add(r, g, splat(1.0f / 720));
  r = multiply_add(r, g, splat(1.0f / 120));
  r = multiply_add(r, g, splat(1.0f / 24));
  r = multiply_add(r, g, splat(1.0f / 6));
  r = multiply_add(r, g, splat(0.5f));
  r = multiply_add(r, g, splat(1.0f));
  r = multiply_add(r, g, splat(1.0f));
  const Ints bits = as_ints(r * as_floats(shift_left<23>(whole + splat_int(127))));
  return as_floats(bits & at_least(v, splat(-87.3f)));
}

// The largest score; not a number if any score is none.
float largest_score(const float* x, int64_t count) {
  Floats top = splat(x[0]);
  Ints odd = splat_int(0);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const Floats v = load(x + i);
    top = larger(v, top);
    PELLUCID_EACH_PART odd.p[part] |= (IntPart)(v.p[part] != v.p[part]);
  }
  float best = largest_of(top);
  int32_t lanes[16];
  store_ints(lanes, odd);
  for (int lane = 0; lane < 16; ++lane)
    if (lanes[lane]) return __builtin_nanf("");
  for (; i < count; ++i) {
    if (x[i] != x[i]) return x[i];
    best = best > x[i] ? best : x[i];
  }
  return best;
}

// The first not-a-number, else the first of the largest, as torch.argmax. `largest` is largest_score().
int64_t greedy_choice(const float* x, int64_t count, float largest) {
  const bool odd = largest != largest;
  const auto wanted = [&](float score) { return odd ? score != score : score == largest; };
  for (int64_t i = 0; i < count; i += 64) {
    if (!odd && i + 64 <= count) {
      const Floats top = larger(larger(load(x + i), load(x + i + 16)), larger(load(x + i + 32), load(x + i + 48)));
      if (largest_of(top) < largest) continue;
    }
    for (int64_t k = i; k < count && k < i + 64; ++k)
      if (wanted(x[k])) return k;
  }
  return 0;
}

// Sixteen scores from i on; those behind the end are minus infinity.
inline Floats scores_at(const float* x, int64_t i, int64_t count) {
  if (i + 16 <= count) return load(x + i);
  float lane[16];
  for (int k = 0; k < 16; ++k) lane[k] = i + k < count ? x[i + k] : -__builtin_inff();
  return load(lane);
}

// Weights of all tokens, padded with zeros to whole runs.
void weigh(const float* x, int64_t count, float temperature, float largest, float* weights) {
  const Floats scale = splat(temperature), top = splat(largest);
  const int64_t padded = round_up(count, kSumRun);
  for (int64_t i = 0; i < padded; i += 16)
    store(weights + i, i < count ? weight_of(scores_at(x, i, count) / scale - top) : zeros());
}

// The sum of every run's weights from `floor` on, and of all.
double sum_runs(const float* weights, int64_t count, float floor, double* runs) {
  const Floats least = splat(floor);
  double total = 0.0;
  for (int64_t run = 0; run * kSumRun < count; ++run) {
    Floats sum = zeros();
    for (int64_t i = run * kSumRun; i < (run + 1) * kSumRun; i += 16) {
      const Floats w = load(weights + i);
      sum = sum + as_floats(as_ints(w) & at_least(w, least));
    }
    runs[run] = static_cast<double>(sum_of(sum));
    total += runs[run];
  }
  return total;
}

// Copies the weights from `floor` on; their number.
int64_t collect(const float* weights, int64_t count, float floor, float* to) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += 64) {
    const int64_t end = i + 64 < count ? i + 64 : count;
    Floats top = load(weights + i);  // the padding to whole runs can be read
    for (int64_t k = 16; k < 64; k += 16) top = larger(top, load(weights + i + k));
    if (largest_of(top) < floor) continue;
    for (int64_t k = i; k < end; ++k) {
      to[found] = weights[k];
      found += weights[k] >= floor;
    }
  }
  return found;
}

// The weight at which `budget` is used up when values are taken from the largest down, each costing 1 or, for `by_mass`,
// itself; equal ones count as one step. 0 where there are too few.
float edge_of(const float* values, int64_t count, bool by_mass, double budget, double* digits) {
  double before = 0.0;
  uint32_t prefix = 0;
  for (int shift = 2 * kDigitBits; shift >= 0; shift -= kDigitBits) {
    for (int d = 0; d < 1 << kDigitBits; ++d) digits[d] = 0.0;
    for (int64_t i = 0; i < count; ++i) {
      uint32_t bits;
      __builtin_memcpy(&bits, values + i, 4);
      if (bits >> (shift + kDigitBits) == prefix)
        digits[bits >> shift & ((1 << kDigitBits) - 1)] += by_mass ? static_cast<double>(values[i]) : 1.0;
    }
    int chosen = 0;
    bool reached = false;
    for (int d = (1 << kDigitBits) - 1; d >= 0 && !reached; --d) {
      if (digits[d] == 0.0) continue;
      chosen = d;
      reached = before + digits[d] >= budget;
      if (!reached) before += digits[d];
    }
    if (!reached && shift == 2 * kDigitBits) return 0.0f;
    prefix = prefix << kDigitBits | static_cast<uint32_t>(chosen);
  }
  float edge;
  __builtin_memcpy(&edge, &prefix, 4);
  return edge;
}

double sum_from(const float* values, int64_t count, float floor) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) sum += values[i] >= floor ? static_cast<double>(values[i]) : 0.0;
  return sum;
}

// The smallest weight that passes every filter.
float smallest_kept(const SampleRow& row, int64_t count, SampleScratch* s) {
  float floor = row.min_p;
  const bool top_k = row.top_k > 0 && row.top_k < count, top_p = row.top_p < 1.0f;
  if (!top_k && !top_p) return floor;
  int64_t found = collect(s->weights, count, kLikely, s->likely);
  double mass = sum_runs(s->weights, count, 0.0f, s->runs);
  const auto reaches = [&] { return top_k ? found >= row.top_k : sum_from(s->likely, found, 0.0f) >= row.top_p * mass; };
  if (!reaches()) found = collect(s->weights, count, 0.0f, s->likely);
  if (top_k) {
    const float edge = edge_of(s->likely, found, false, row.top_k, s->digits);
    floor = floor > edge ? floor : edge;
    mass = sum_from(s->likely, found, edge);
  }
  if (top_p) {
    const float edge = edge_of(s->likely, found, true, static_cast<double>(row.top_p) * mass, s->digits);
    floor = floor > edge ? floor : edge;
  }
  return floor;
}

// The token at which the cumulative weight of those kept passes `uniform` of their sum.
int64_t draw(int64_t count, float floor, double uniform, SampleScratch* s) {
  const double total = sum_runs(s->weights, count, floor, s->runs);
  const double target = uniform * total;
  double before = 0.0;
  int64_t chosen = 0;
  for (int64_t run = 0; run * kSumRun < count; ++run) {
    if (s->runs[run] == 0.0) continue;
    chosen = run;
    if (before + s->runs[run] > target) break;
    before += s->runs[run];
  }
  int64_t token = chosen * kSumRun;
  for (int64_t i = chosen * kSumRun; i < count && i < (chosen + 1) * kSumRun; ++i) {
    if (s->weights[i] < floor || s->weights[i] == 0.0f) continue;
    token = i;
    before += static_cast<double>(s->weights[i]);
    if (before > target) break;
  }
  return token;
}

int64_t sample(const SampleRow& row, const float* x, int64_t count, std::byte* scratch) {
  const float top = largest_score(x, count), largest = top / row.temperature;
  const bool exists = largest - largest == 0.0f;  // no distribution where it is infinite or not a number
  if (row.temperature == 0.0f || !exists) return greedy_choice(x, count, top);
  auto* s = reinterpret_cast<SampleScratch*>(scratch);
  weigh(x, count, row.temperature, largest, s->weights);
  return draw(count, smallest_kept(row, count, s), row.uniform, s);
}

}  // namespace
}  // namespace pellucid
