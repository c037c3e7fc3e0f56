// What both versions of paged attention, on vectors and on tiles, share. One idea: the softmax of a query is computed
// in splits of kSplit tokens, each with its own maximum, and the splits are merged in order; so a query's result is the
// same whether one thread walks its context or several share it.
//
// The cache must hold finite numbers wherever a block table points: probabilities of tokens beyond the context are zero,
// and zero times not-a-number is not zero. The owner of the cache clears it once.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace pellucid {
namespace {

constexpr float kMasked = -1e30f;  // finite: infinity minus infinity would appear in the exponential

// Where one query stands: which row of the batch, which head, and how many tokens it sees.
struct Query {
  int64_t row, head, visible;
};
inline Query query_at(const AttentionArgs& a, const AttentionItem& item, int64_t query) {
  // In 32 bits: a division of 64 takes as long as the copy of a query.
  const auto group = static_cast<uint32_t>(a.num_heads) / static_cast<uint32_t>(a.num_kv_heads);
  const uint32_t row = static_cast<uint32_t>(query) / group, head = static_cast<uint32_t>(query) % group;
  const Sequence& s = *item.sequence;
  return {s.row_begin + row, item.kv_head * group + head, s.context - s.num_rows + row + 1};
}

inline int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// How many tokens the item's split from `begin` on has.
inline int64_t split_tokens(const AttentionItem& item, int64_t begin) { return clamp(item.end - begin, 0, kSplit); }

struct SplitSums {
  float maximum, total;  // of scores in powers of two; of the exponentials
};

// Pieces of the item's head, wherever their block lies; one division per block instead of one per use.
struct SplitTokens {
  const std::byte* keys[kSplit / kTokens];
  const std::byte* values[kSplit / kTokens];
};
inline const uint16_t* halves(const std::byte* piece) { return reinterpret_cast<const uint16_t*>(piece); }
inline Floats scales_of(const std::byte* piece, int64_t dim) {
  return load(reinterpret_cast<const float*>(piece + kTokens * dim));
}
inline void find_tokens(const AttentionArgs& a, const AttentionItem& item, int64_t begin, int64_t tokens, SplitTokens* out) {
  const int64_t piece = piece_bytes(a.cache_format, a.head_dim), pieces = a.block_size / kTokens;
  const int32_t* table = item.sequence->block_table + begin / a.block_size;
  int64_t inside = begin % a.block_size / kTokens;
  for (int64_t i = 0; i * kTokens < tokens; ++i) {
    const int64_t at = ((*table * a.num_kv_heads + item.kv_head) * pieces + inside) * piece;
    out->keys[i] = a.key_cache + at;
    out->values[i] = a.value_cache + at;
    if (++inside == pieces) {
      inside = 0;
      ++table;
    }
  }
}

// Keys and values that a decode reads come from memory, each once. They are asked for this many pieces ahead, and the first
// of the next item while this one is computed.
constexpr int64_t kPiecesAhead = 8;

class PiecesAhead {
 public:
  PiecesAhead(const AttentionArgs& a, const AttentionItem* next) : bytes_(piece_bytes(a.cache_format, a.head_dim)) {
    if (!next || next->query_end - next->query_begin > kBlock) return;
    count_ = clamp((next->end - next->begin + kTokens - 1) / kTokens, 0, 2 * kPiecesAhead);
    find_tokens(a, *next, next->begin, count_ * kTokens, &tokens_);
  }
  // To be called at the i-th of the pieces of the split at hand.
  void prefetch_one(const SplitTokens& tokens, int64_t i, int64_t pieces) {
    if (i + kPiecesAhead < pieces) prefetch_piece(tokens, i + kPiecesAhead);
    else if (done_ < count_) prefetch_piece(tokens_, done_++);
  }

 private:
  void prefetch_piece(const SplitTokens& tokens, int64_t i) const {
    for (int64_t line = 0; line < bytes_; line += 64) __builtin_prefetch(tokens.keys[i] + line, 0, 3);
    for (int64_t line = 0; line < bytes_; line += 64) __builtin_prefetch(tokens.values[i] + line, 0, 3);
  }

  int64_t bytes_, count_ = 0, done_ = 0;
  SplitTokens tokens_;
};

template <int64_t kRun, int64_t kSecond>
void no_probabilities(int64_t padded, uint16_t* out) {
  for (int64_t i = 0; i < (padded + 31) / 32; ++i, out += kRun) {
    store_bf16(out, zeros());
    store_bf16(out + kSecond, zeros());
  }
}

// Turns `valid` scores into exponentials relative to their maximum, as bfloat16, zero up to `padded`. Probabilities are
// written 32 at a time: the first 16 of run i to out + i * kRun, the other 16 to kSecond beyond. Room for scores and
// probabilities reaches to the next multiple of 32.
template <int64_t kRun, int64_t kSecond>
SplitSums softmax_row(float* scores, int64_t valid, int64_t padded, float scale, uint16_t* out) {
  const int64_t runs = (valid + 31) / 32;
  for (int64_t i = valid; i < runs * 32; ++i) scores[i] = kMasked;
  Floats top[4] = {load(scores), load(scores + 16), load(scores), load(scores + 16)};
  for (int64_t i = 1; i < runs; ++i) {
    Floats* pair = top + i % 2 * 2;
    pair[0] = larger(pair[0], load(scores + i * 32));
    pair[1] = larger(pair[1], load(scores + i * 32 + 16));
  }
  const float maximum = largest_of(larger(larger(top[0], top[1]), larger(top[2], top[3]))) * scale;
  const Floats slope = splat(scale), shift = splat(-maximum);
  Floats totals[2] = {zeros(), zeros()};
  for (int64_t i = 0; i < runs; ++i, scores += 32, out += kRun) {
    const Floats first = exp2_of_nonpositive(multiply_add(load(scores), slope, shift));
    const Floats second = exp2_of_nonpositive(multiply_add(load(scores + 16), slope, shift));
    totals[0] = totals[0] + first;
    totals[1] = totals[1] + second;
    if constexpr (kSecond == 16) {
      store_bf16_pair(out, first, second);
    } else {
      store_bf16(out, first);
      store_bf16(out + kSecond, second);
    }
  }
  no_probabilities<kRun, kSecond>(padded - runs * 32, out);
  return {maximum, sum_of(totals[0] + totals[1])};
}

// Folds one split into what the splits before it gave: sums[head_dim], maximum, total.
void absorb(float* sums, SplitSums* so_far, const float* more, SplitSums split, int64_t dim) {
  const float top = so_far->maximum > split.maximum ? so_far->maximum : split.maximum;
  const Floats keep = exp2_of_nonpositive(splat(so_far->maximum - top));
  const Floats add = exp2_of_nonpositive(splat(split.maximum - top));
  for (int64_t i = 0; i < dim; i += 16) store(sums + i, load(sums + i) * keep + load(more + i) * add);
  *so_far = {top, so_far->total * first_of(keep) + split.total * first_of(add)};
}

inline float* result_of(const AttentionArgs& a, const Query& q) { return a.out + q.row * a.ld + q.head * a.head_dim; }

void write_result(const AttentionArgs& a, const Query& q, const float* sums, SplitSums all) {
  const Floats inverse = splat(1.0f / all.total);
  float* to = result_of(a, q);
  for (int64_t i = 0; i < a.head_dim; i += 16) store(to + i, load(sums + i) * inverse);
}

inline float* partial_of(const AttentionArgs& a, const AttentionItem& item, int64_t query, int64_t part) {
  return item.partial + (query * item.num_parts + part) * (a.head_dim + 2);
}

// Keeps what one part of the context gave a query, until all of them are merged.
void keep_part(const AttentionArgs& a, const AttentionItem& item, int64_t query, int64_t part, const float* sums,
               SplitSums all) {
  float* to = partial_of(a, item, query, part);
  __builtin_memcpy(to, sums, static_cast<size_t>(a.head_dim) * 4);
  to[a.head_dim] = all.maximum;
  to[a.head_dim + 1] = all.total;
}

// Takes the result of one query in the split from `begin` on: folded into those before it in the same part.
void take_split(const AttentionArgs& a, const AttentionItem& item, int64_t query, int64_t begin, const float* more,
                SplitSums sums, float* so_far, SplitSums* so_far_sums) {
  if (begin == item.begin || (item.partial && begin % item.part_tokens == 0)) {
    __builtin_memcpy(so_far, more, static_cast<size_t>(a.head_dim) * 4);
    *so_far_sums = sums;
  } else {
    absorb(so_far, so_far_sums, more, sums, a.head_dim);
  }
  if (item.partial) keep_part(a, item, query, begin / item.part_tokens, so_far, *so_far_sums);
}

void merge(const AttentionArgs& a, const AttentionItem& item, int64_t query_begin, int64_t query_end) {
  for (int64_t query = query_begin; query < query_end; ++query) {
    const Query q = query_at(a, item, query);
    float* sums = partial_of(a, item, query, 0);
    SplitSums all{sums[a.head_dim], sums[a.head_dim + 1]};
    for (int64_t part = 1; part * item.part_tokens < q.visible; ++part) {
      const float* more = partial_of(a, item, query, part);
      absorb(sums, &all, more, {more[a.head_dim], more[a.head_dim + 1]}, a.head_dim);
    }
    write_result(a, q, sums, all);
  }
}

}  // namespace
}  // namespace pellucid
