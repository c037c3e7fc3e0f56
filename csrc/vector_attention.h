// Paged attention without tiles: up to four queries of a head's group share every key and value that is loaded.
//
// Over int8 keys and values no element is ever scaled: a key's scale multiplies its score, a value's scale its
// probability, and what is left per element is a product of bytes, summed exactly in integers. For that, a query and the
// scaled probabilities become 16-bit numbers, which a pair of bytes holds (Sixteens).
#pragma once

#include "attention.h"
#include "rows.h"

namespace pellucid {
namespace {

constexpr int kQueries = 4;  // queries that share each loaded key and value

// Up to kSplit numbers as unit * (256 * high + low), bytes in fours as dot4 takes them. The other factor's bytes have 128
// added to them, for which `high_shift` and `low_shift` make up.
struct Sixteens {
  int32_t high[kSplit / 4], low[kSplit / 4];
  int32_t high_shift, low_shift;
  float unit;
};

struct VectorScratch {
  float q[kQueries][kMaxHead];
  Sixteens q_bytes[kQueries], weights[kQueries];  // int8: queries, and probabilities times scales
  float scores[kQueries][kSplit];
  uint16_t probabilities[kQueries][kSplit];
  SplitTokens tokens;
  float split_sums[kQueries][kMaxHead];
  float sums[kQueries][kMaxHead];
};

// `count` is a multiple of 16. Numbers too small to matter beside any other query or value become zeros.
void to_sixteens(const float* x, int64_t count, Sixteens* out) {
  constexpr float kMost = 127 * 256 + 127, kLeast = 1e-30f;
  const float top = largest_magnitude(x, count);
  const Floats inverse = splat(top > kLeast ? kMost / top : 0.0f);
  Ints high_sum = splat_int(0), low_sum = splat_int(0);
  for (int64_t i = 0; i < count; i += 16) {
    const Ints number = round_to_ints(load(x + i) * inverse);
    const Ints high = shift_right<8>(number + splat_int(0x8080)) - splat_int(0x80);  // to nearest, so that low is a byte
    const Ints low = number - shift_left<8>(high);
    store_bytes(reinterpret_cast<int8_t*>(out->high) + i, high);
    store_bytes(reinterpret_cast<int8_t*>(out->low) + i, low);
    high_sum = high_sum + high;
    low_sum = low_sum + low;
  }
  out->high_shift = -128 * sum_of_ints(high_sum);
  out->low_shift = -128 * sum_of_ints(low_sum);
  out->unit = top / kMost;
}

template <int kCount>
void score_halves(const uint16_t* keys, int64_t dim, int64_t at, VectorScratch* s) {
  Floats score[kCount];
  for (int r = 0; r < kCount; ++r) score[r] = zeros();
  for (int64_t pair = 0; pair < dim / 2; ++pair) {
    const Ints words = load_ints(keys + pair * 32);
    const Floats first = first_of_pairs(words), second = second_of_pairs(words);
    for (int r = 0; r < kCount; ++r) {
      score[r] = multiply_add(first, splat(s->q[r][2 * pair]), score[r]);
      score[r] = multiply_add(second, splat(s->q[r][2 * pair + 1]), score[r]);
    }
  }
  for (int r = 0; r < kCount; ++r) store(s->scores[r] + at, score[r]);
}

// Dot products of numbers with bytes, in words of four. Two registers of words at a time hide the latency of dot4 and share
// what is loaded of the numbers; where a register is two (AVX2) or four, there are not enough for that.
constexpr int kColumns = kParts == 1 ? 2 : 1;

template <int kCount>
struct Dots {
  explicit Dots(const Sixteens* x) {
    for (int r = 0; r < kCount; ++r)
      for (int c = 0; c < kColumns; ++c) {
        high[r][c] = splat_int(x[r].high_shift);
        low[r][c] = splat_int(x[r].low_shift);
      }
  }
  // Numbers in fours from `first` on, times as many lines of words in each column.
  void add(const Sixteens* x, int64_t first, int64_t fours, const std::byte* const (&columns)[kColumns]) {
    for (int64_t i = 0; i < fours; ++i)
#pragma GCC unroll 2
      for (int c = 0; c < kColumns; ++c) {
        const Ints words = load_ints(columns[c] + i * 64);
        for (int r = 0; r < kCount; ++r) {
          high[r][c] = dot4(high[r][c], words, x[r].high[first + i]);
          low[r][c] = dot4(low[r][c], words, x[r].low[first + i]);
        }
      }
  }
  Floats sum(int r, int c) const { return multiply_add(to_floats(high[r][c]), splat(256.0f), to_floats(low[r][c])); }

  Ints high[kCount][kColumns], low[kCount][kColumns];
};

// Scores of kColumns pieces from the token `at` on. What lies beyond the last is scored as the last: nobody reads it.
template <int kCount>
void score_bytes(int64_t dim, int64_t at, int64_t padded, VectorScratch* s) {
  const std::byte* keys[kColumns];
  for (int c = 0; c < kColumns; ++c) {
    const int64_t token = at + c * kTokens;
    keys[c] = s->tokens.keys[(token < padded ? token : at) / kTokens];
  }
  Dots<kCount> dots(s->q_bytes);
  dots.add(s->q_bytes, 0, dim / 4, keys);
  for (int c = 0; c < kColumns; ++c)
    for (int r = 0; r < kCount; ++r)
      store(s->scores[r] + at + c * kTokens, dots.sum(r, c) * (scales_of(keys[c], dim) * splat(s->q_bytes[r].unit)));
}

template <int kCount>
void weigh_halves(int64_t padded, int64_t dim, VectorScratch* s) {
  for (int r = 0; r < kCount; ++r) __builtin_memset(s->split_sums[r], 0, static_cast<size_t>(dim) * 4);
  for (int64_t at = 0; at < padded; at += kTokens) {
    const uint16_t* values = halves(s->tokens.values[at / kTokens]);
    for (int64_t d = 0; d < dim; d += 16, values += 256) {
      Floats sum[kCount];
      for (int r = 0; r < kCount; ++r) sum[r] = load(s->split_sums[r] + d);
      for (int pair = 0; pair < 8; ++pair) {
        const Ints words = load_ints(values + pair * 32);
        const Floats first = first_of_pairs(words), second = second_of_pairs(words);
        for (int r = 0; r < kCount; ++r) {
          sum[r] = multiply_add(first, splat(bf16_to_float(s->probabilities[r][at + 2 * pair])), sum[r]);
          sum[r] = multiply_add(second, splat(bf16_to_float(s->probabilities[r][at + 2 * pair + 1])), sum[r]);
        }
      }
      for (int r = 0; r < kCount; ++r) store(s->split_sums[r] + d, sum[r]);
    }
  }
}

template <int kCount>
void weigh_bytes(int64_t padded, int64_t dim, VectorScratch* s) {
  for (int r = 0; r < kCount; ++r) {  // the scores are no longer needed
    for (int64_t at = 0; at < padded; at += kTokens)
      store(s->scores[r] + at,
            load_bf16(s->probabilities[r] + at) * scales_of(s->tokens.values[at / kTokens], dim));
    to_sixteens(s->scores[r], padded, &s->weights[r]);
  }
  for (int64_t d = 0; d < dim; d += kColumns * 16) {
    Dots<kCount> dots(s->weights);
    for (int64_t at = 0; at < padded; at += kTokens) {
      const std::byte* values[kColumns];
      for (int c = 0; c < kColumns; ++c) values[c] = s->tokens.values[at / kTokens] + (d + c * 16) * kTokens;
      dots.add(s->weights, at / 4, 4, values);
    }
    for (int c = 0; c < kColumns; ++c)
      for (int r = 0; r < kCount; ++r)
        store(s->split_sums[r] + d + c * 16, dots.sum(r, c) * splat(s->weights[r].unit));
  }
}

// Queries [query, query + kCount) over the item's splits. They are of one row or of rows one after another.
template <int kCount, bool kInt8>
void attend_queries(const AttentionArgs& a, const AttentionItem& item, int64_t query, PiecesAhead* ahead, VectorScratch* s) {
  Query q[kCount];
  SplitSums so_far[kCount];
  for (int r = 0; r < kCount; ++r) {
    q[r] = query_at(a, item, query + r);
    const uint16_t* from = a.q + (q[r].row * a.num_heads + q[r].head) * a.head_dim;
    for (int64_t i = 0; i < a.head_dim; i += 16) store(s->q[r] + i, load_bf16(from + i));
    if constexpr (kInt8) to_sixteens(s->q[r], a.head_dim, &s->q_bytes[r]);
  }
  for (int64_t begin = item.begin; begin < item.end; begin += kSplit) {
    const int64_t most = clamp(q[kCount - 1].visible - begin, 0, split_tokens(item, begin));
    const int64_t padded = round_up(most, kTokens);
    find_tokens(a, item, begin, padded, &s->tokens);
    for (int64_t t = 0; t < padded; t += kTokens) {
      if (ahead) ahead->prefetch_one(s->tokens, t / kTokens, padded / kTokens);
      if constexpr (!kInt8) score_halves<kCount>(halves(s->tokens.keys[t / kTokens]), a.head_dim, t, s);
      else if (t / kTokens % kColumns == 0) score_bytes<kCount>(a.head_dim, t, padded, s);
    }
    SplitSums sums[kCount];
    for (int r = 0; r < kCount; ++r) {
      const int64_t valid = clamp(q[r].visible - begin, 0, most);
      sums[r] = {kMasked, 0.0f};
      if (valid > 0) {
        sums[r] = softmax_row<32, 16>(s->scores[r], valid, padded, a.scale * kLog2E, s->probabilities[r]);
      } else {
        no_probabilities<32, 16>(padded, s->probabilities[r]);
      }
    }
    if constexpr (kInt8) weigh_bytes<kCount>(padded, a.head_dim, s);
    else weigh_halves<kCount>(padded, a.head_dim, s);
    for (int r = 0; r < kCount; ++r)
      if (begin < q[r].visible)
        take_split(a, item, query + r, begin, s->split_sums[r], sums[r], s->sums[r], &so_far[r]);
  }
  if (item.partial) return;
  for (int r = 0; r < kCount; ++r) write_result(a, q[r], s->sums[r], so_far[r]);
}

template <bool kInt8>
void vector_attend(const AttentionArgs& a, const AttentionItem& item, const AttentionItem* next, std::byte* scratch) {
  auto* s = reinterpret_cast<VectorScratch*>(scratch);
  PiecesAhead first_pass(a, next);
  for (int64_t query = item.query_begin; query < item.query_end; query += kQueries) {
    PiecesAhead* ahead = query == item.query_begin ? &first_pass : nullptr;  // what comes later is in the caches
    switch (item.query_end - query) {
      case 1: attend_queries<1, kInt8>(a, item, query, ahead, s); break;
      case 2: attend_queries<2, kInt8>(a, item, query, ahead, s); break;
      case 3: attend_queries<3, kInt8>(a, item, query, ahead, s); break;
      default: attend_queries<kQueries, kInt8>(a, item, query, ahead, s); break;
    }
  }
}

}  // namespace
}  // namespace pellucid
