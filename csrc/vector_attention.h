// Paged attention without tiles: up to four queries of a head's group share every key and value that is loaded.
#pragma once

#include "attention.h"

namespace pellucid {
namespace {

constexpr int kQueries = 4;  // queries that share each loaded key and value

struct VectorScratch {
  float q[kQueries][512];
  float scores[kQueries][kSplit];
  uint16_t probabilities[kQueries][kSplit];
  SplitTokens tokens;
  float split_sums[kQueries][512];
  float sums[kQueries][512];
};

template <int kCount>
void score_tokens(const uint16_t* keys, int64_t dim, const VectorScratch& s, int64_t at, VectorScratch* out) {
  Floats score[kCount];
  for (int r = 0; r < kCount; ++r) score[r] = zeros();
  for (int64_t pair = 0; pair < dim / 2; ++pair) {
    const Ints words = load_ints(keys + pair * 32);
    const Floats first = first_of_pairs(words), second = second_of_pairs(words);
    for (int r = 0; r < kCount; ++r) {
      score[r] = multiply_add(first, splat(s.q[r][2 * pair]), score[r]);
      score[r] = multiply_add(second, splat(s.q[r][2 * pair + 1]), score[r]);
    }
  }
  for (int r = 0; r < kCount; ++r) store(out->scores[r] + at, score[r]);
}

template <int kCount>
void weigh_values(const uint16_t* values, int64_t dim, int64_t at, VectorScratch* s) {
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

// Queries [query, query + kCount) over the item's splits. They are of one row or of rows one after another.
template <int kCount>
void attend_queries(const AttentionArgs& a, const AttentionItem& item, int64_t query, VectorScratch* s) {
  Query q[kCount];
  SplitSums so_far[kCount];
  for (int r = 0; r < kCount; ++r) {
    q[r] = query_at(a, item, query + r);
    const uint16_t* from = a.q + (q[r].row * a.num_heads + q[r].head) * a.head_dim;
    for (int64_t i = 0; i < a.head_dim; i += 16) store(s->q[r] + i, load_bf16(from + i));
  }
  for (int64_t split = item.split_begin; split < item.split_end; ++split) {
    const int64_t begin = split * kSplit;
    const int64_t most = clamp(q[kCount - 1].visible - begin, 0, kSplit);
    const int64_t padded = round_up(most, kTokens);
    find_tokens(a, item, begin, padded, &s->tokens);
    for (int64_t t = 0; t < padded; t += kTokens) score_tokens<kCount>(s->tokens.keys[t / kTokens], a.head_dim, *s, t, s);
    SplitSums sums[kCount];
    for (int r = 0; r < kCount; ++r) {
      const int64_t valid = clamp(q[r].visible - begin, 0, kSplit);
      sums[r] = {kMasked, 0.0f};
      if (valid > 0) {
        sums[r] = softmax_row<32, 16>(s->scores[r], valid, padded, a.scale * kLog2E, s->probabilities[r]);
      } else {
        no_probabilities<32, 16>(padded, s->probabilities[r]);
      }
      __builtin_memset(s->split_sums[r], 0, static_cast<size_t>(a.head_dim) * 4);
    }
    for (int64_t t = 0; t < padded; t += kTokens) weigh_values<kCount>(s->tokens.values[t / kTokens], a.head_dim, t, s);
    for (int r = 0; r < kCount; ++r)
      if (begin < q[r].visible)
        take_split(a, item, query + r, split, s->split_sums[r], sums[r], s->sums[r], &so_far[r]);
  }
  if (item.partial) return;
  for (int r = 0; r < kCount; ++r) write_result(a, q[r], s->sums[r], so_far[r]);
}

void vector_attend(const AttentionArgs& a, const AttentionItem& item, std::byte* scratch) {
  auto* s = reinterpret_cast<VectorScratch*>(scratch);
  for (int64_t query = item.query_begin; query < item.query_end; query += kQueries) {
    switch (item.query_end - query) {
      case 1: attend_queries<1>(a, item, query, s); break;
      case 2: attend_queries<2>(a, item, query, s); break;
      case 3: attend_queries<3>(a, item, query, s); break;
      default: attend_queries<kQueries>(a, item, query, s); break;
    }
  }
}

}  // namespace
}  // namespace pellucid
