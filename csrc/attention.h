// What both versions of paged attention, on vectors and on tiles, share. One idea: the softmax of a query is computed
// in splits of kSplit tokens, each with its own maximum, and the splits are merged in order; so a query's result is the
// same whether one thread walks its context or several share it, alone or in a batch.
//
// The cache must hold finite numbers wherever a block table points: probabilities of tokens beyond the context are zero,
// and zero times not-a-number is not zero. The owner of the cache clears it once.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace pellucid {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kMasked = -1e30f;  // finite: infinity minus infinity would appear in the exponential

// Where one query stands: which row of the batch, which head, and how many tokens it sees.
struct Query {
  int64_t row, head, visible;
};
inline Query query_at(const AttentionArgs& a, const AttentionItem& item, int64_t query) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  const Sequence& s = *item.sequence;
  const int64_t row = query / group;
  return {s.row_begin + row, item.kv_head * group + query % group, s.context - s.num_rows + row + 1};
}

// The 16 tokens from `token` on: keys or values of the item's head.
inline const uint16_t* tokens_at(const AttentionArgs& a, const AttentionItem& item, const uint16_t* cache, int64_t token) {
  const int64_t block = item.sequence->block_table[token / a.block_size];
  return cache + ((block * a.num_kv_heads + item.kv_head) * a.block_size + token % a.block_size) * a.head_dim;
}

inline int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

struct SplitSums {
  float maximum, total;  // of scores in powers of two; of the exponentials
};

// Turns `valid` scores into exponentials relative to their maximum, as bfloat16, zero up to `padded` (a multiple of 16).
// Probability 16 * i + lane goes to out + offset_of(i) + lane.
template <class Offset>
SplitSums softmax_row(float* scores, int64_t valid, int64_t padded, float scale, uint16_t* out, Offset offset_of) {
  const int64_t vectors = (valid + 15) / 16;
  for (int64_t i = valid; i < vectors * 16; ++i) scores[i] = kMasked;
  Floats top = load(scores);
  for (int64_t i = 1; i < vectors; ++i) top = larger(top, load(scores + i * 16));
  const float maximum = largest_of(top) * scale;
  const Floats slope = splat(scale), shift = splat(-maximum);
  Floats total = zeros();
  for (int64_t i = 0; i < vectors; ++i) {
    const Floats p = exp2_of_nonpositive(multiply_add(load(scores + i * 16), slope, shift));
    total = total + p;
    store_bf16(out + offset_of(i), p);
  }
  for (int64_t i = vectors; i < padded / 16; ++i) store_bf16(out + offset_of(i), zeros());
  return {maximum, sum_of(total)};
}

// Folds one split into what the splits before it gave: sums[head_dim], maximum, total.
void absorb(float* sums, SplitSums* so_far, const float* more, SplitSums split, int64_t dim) {
  const float top = so_far->maximum > split.maximum ? so_far->maximum : split.maximum;
  float lane[16];
  store(lane, exp2_of_nonpositive(splat(so_far->maximum - top)));
  const Floats keep = splat(lane[0]);
  const float keep_total = so_far->total * lane[0];
  store(lane, exp2_of_nonpositive(splat(split.maximum - top)));
  const Floats add = splat(lane[0]);
  for (int64_t i = 0; i < dim; i += 16) store(sums + i, load(sums + i) * keep + load(more + i) * add);
  *so_far = {top, keep_total + split.total * lane[0]};
}

void write_result(const AttentionArgs& a, const Query& q, const float* sums, SplitSums all) {
  const Floats inverse = splat(1.0f / all.total);
  float* to = a.out + q.row * a.ld + q.head * a.head_dim;
  for (int64_t i = 0; i < a.head_dim; i += 16) store(to + i, load(sums + i) * inverse);
}

inline float* partial_of(const AttentionArgs& a, const AttentionItem& item, int64_t query, int64_t split) {
  return item.partial + (query * item.num_splits + split) * (a.head_dim + 2);
}

// Takes the result of one split of one query: kept aside when others compute the other splits, else folded in.
void take_split(const AttentionArgs& a, const AttentionItem& item, int64_t query, int64_t split, const float* more,
                SplitSums sums, float* so_far, SplitSums* so_far_sums) {
  if (item.partial) {
    float* to = partial_of(a, item, query, split);
    __builtin_memcpy(to, more, static_cast<size_t>(a.head_dim) * 4);
    to[a.head_dim] = sums.maximum;
    to[a.head_dim + 1] = sums.total;
  } else if (split == item.split_begin) {
    __builtin_memcpy(so_far, more, static_cast<size_t>(a.head_dim) * 4);
    *so_far_sums = sums;
  } else {
    absorb(so_far, so_far_sums, more, sums, a.head_dim);
  }
}

void merge(const AttentionArgs& a, const AttentionItem& item, int64_t query_begin, int64_t query_end) {
  for (int64_t query = query_begin; query < query_end; ++query) {
    const Query q = query_at(a, item, query);
    float* sums = partial_of(a, item, query, 0);
    SplitSums all{sums[a.head_dim], sums[a.head_dim + 1]};
    for (int64_t split = 1; split * kSplit < q.visible; ++split) {
      const float* more = partial_of(a, item, query, split);
      absorb(sums, &all, more, {more[a.head_dim], more[a.head_dim + 1]}, a.head_dim);
    }
    write_result(a, q, sums, all);
  }
}

}  // namespace
}  // namespace pellucid
