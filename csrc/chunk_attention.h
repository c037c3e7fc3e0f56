// Attention of a chunk on AMX tiles. One idea: tiles and vectors work at the same time. A unit is 16 queries against 64
// tokens; while the vector registers turn the scores of one unit into probabilities, the tiles multiply the next unit's
// queries and keys and the last one's probabilities and values. What three units touch fits in the first-level cache.
//
// Within a split a row's exponentials are taken relative to a reference: the maximum of its first 64 scores. Only a score
// far above it moves the reference, so sums are hardly ever rescaled; the row alone decides, whatever it shares a unit with.
#pragma once

#include "attention.h"
#include "tile_softmax.h"
#include "tiles.h"

namespace pellucid {
namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kUnitQueries = 16;  // a row tile
constexpr int64_t kUnitTokens = 64;   // two runs
constexpr int64_t kUnitRuns = kUnitTokens / kRun;
// Scores of a row lie this many floats apart: a power of two would put all rows of a tile into the same cache sets.
constexpr int64_t kUnitStride = kUnitTokens + 16;
constexpr int64_t kTogether = 2;      // row tiles that take turns while the same keys and values are at hand

// Ends an item that no others share: `sums` [query][head_dim].
void write_results(const AttentionArgs& a, const AttentionItem& item, const float* sums, const SplitSums* all) {
  if (item.partial) return;
  for (int64_t i = 0; i < item.query_end - item.query_begin; ++i)
    write_result(a, query_at(a, item, item.query_begin + i), sums + i * a.head_dim, all[i]);
}

struct Unit {
  int64_t first;  // of its queries, in the item
  int64_t begin;  // of its tokens, in the split
  bool whole;     // every query sees all of them
};

// Where the sums in a tile belong, while memory does not have them.
struct Pending {
  float* to = nullptr;
  int64_t stride = 0;
};

struct alignas(64) ChunkScratch {
  float scores[2][kUnitQueries * kUnitStride];
  uint16_t probabilities[2][kUnitQueries * kUnitTokens];  // [run][16][32]
  uint16_t q[kItemRows * kMaxHeadDim];                    // [row tile][head_dim / 32][16][32]
  uint16_t values[kSplit * kMaxHeadDim];                  // [run][head_dim / 16][16 pairs][16][2]
  float split_sums[kItemRows * kMaxHeadDim];              // [query][head_dim], as the next ones
  float totals[kItemRows * 16];
  float sums[kItemRows * kMaxHeadDim];
  float shifts[kItemRows];  // that make the references of Exponentials
  SplitSums so_far[kItemRows];
  int64_t visible[kItemRows];  // tokens that each query sees
  SplitTokens tokens;
  Unit units[kItemRows / kUnitQueries * (kSplit / kUnitTokens)];
};

// Queries as tiles, zero up to a multiple of `multiple`, and how far each sees.
void gather_queries(const AttentionArgs& a, const AttentionItem& item, int64_t multiple, uint16_t* to_q, int64_t* visible) {
  const int64_t count = item.query_end - item.query_begin;
  for (int64_t i = 0; i < round_up(count, multiple); ++i) {
    uint16_t* to = to_q + i / kBlock * kBlock * a.head_dim + i % kBlock * 32;
    visible[i] = 0;
    if (i >= count) {
      for (int64_t d = 0; d < a.head_dim; d += 32) __builtin_memset(to + d * kBlock, 0, 64);
      continue;
    }
    const Query q = query_at(a, item, item.query_begin + i);
    visible[i] = q.visible;
    const uint16_t* from = a.q + (q.row * a.num_heads + q.head) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d += 32) __builtin_memcpy(to + d * kBlock, from + d, 64);
  }
}

// Joins the half tiles of 16 tokens into tiles of 32 in the order of Exponentials: two rows of pairs from each in turn.
// Zero from the end of the split to the end of a unit.
void join_values(const AttentionArgs& a, int64_t tokens, const SplitTokens& at, uint16_t* out) {
  for (int64_t t = 0; t < round_up(tokens, kUnitTokens); t += kTokens) {
    uint16_t* to = out + t / kRun * kRun * a.head_dim + t % kRun / kTokens * 64;
    const uint16_t* from = at.values[t / kTokens];
    for (int64_t d = 0; d < a.head_dim / 16; ++d, to += 512, from += 256)
      for (int64_t pair = 0; pair < 8; pair += 2) {
        if (t < tokens) __builtin_memcpy(to + pair * 64, from + pair * 32, 128);
        else __builtin_memset(to + pair * 64, 0, 128);
      }
  }
}

// All queries of one item against one split. kDim: the head dimension, or 0 for any.
template <int64_t kDim>
class ChunkSplit {
 public:
  ChunkSplit(const AttentionArgs& a, const AttentionItem& item, int64_t split, ChunkScratch* s)
      : a_(a), item_(item), split_(split), begin_(split * kSplit), count_(item.query_end - item.query_begin), s_(s),
        slope_(a.scale * kLog2E * kSteps), exponentials_(slope_) {
    tokens_ = clamp(s->visible[count_ - 1] - begin_, 0, kSplit);
    find_tokens(a, item, begin_, tokens_, &s->tokens);
    join_values(a, tokens_, s->tokens, s->values);
    list_units();
  }

  void attend() {
    compute_scores(0);
    store_all();
    for (int64_t u = 0; u < num_units_; ++u) {
      const bool next = u + 1 < num_units_, previous = u > 0;
      if (next) score_tokens<0>(u + 1);
      soften(u, 0, 2);
      if (next) score_tokens<1>(u + 1);
      soften(u, 2, 4);
      if (next) score_tokens<2>(u + 1);
      soften(u, 4, 6);
      if (next) score_tokens<3>(u + 1);
      soften(u, 6, 8);
      for (int64_t i = 0, row = 8; i < dim() / 16; i += 2) {
        // Both even: rows are turned in pairs, and none may be turned twice.
        const int64_t end = 8 + ((8 * i + 16) * 16 / dim() & ~int64_t{1}), half = row + (end - row + 2) / 4 * 2;
        if (previous) i % 4 ? value_dims<2>(u - 1, i) : value_dims<0>(u - 1, i);
        soften(u, row, half);
        if (previous) i % 4 ? value_dims<3>(u - 1, i + 1) : value_dims<1>(u - 1, i + 1);
        soften(u, half, end);
        row = end;
      }
      if (!previous || too_high_) store_all();
      if (too_high_) raise_references(u);
    }
    for (int64_t i = 0; i < dim() / 16; i += 2) {
      i % 4 ? value_dims<2>(num_units_ - 1, i) : value_dims<0>(num_units_ - 1, i);
      i % 4 ? value_dims<3>(num_units_ - 1, i + 1) : value_dims<1>(num_units_ - 1, i + 1);
    }
    store_all();
    take_sums();
  }

 private:
  void list_units() {
    for (int64_t group = 0; group < count_; group += kTogether * kUnitQueries)
      for (int64_t begin = 0; begin < tokens_; begin += kUnitTokens)
        for (int64_t first = group; first < group + kTogether * kUnitQueries && first < count_; first += kUnitQueries) {
          const int64_t last = first + kUnitQueries < count_ ? first + kUnitQueries : count_;
          if (s_->visible[last - 1] <= begin_ + begin) continue;
          const bool whole = last - first == kUnitQueries && s_->visible[first] - begin_ - begin >= kUnitTokens;
          s_->units[num_units_++] = {first, begin, whole};
        }
  }

  int64_t dim() const { return kDim ? kDim : a_.head_dim; }

  void compute_scores(int64_t u) {
    score_tokens<0>(u);
    score_tokens<1>(u);
    score_tokens<2>(u);
    score_tokens<3>(u);
  }

  // Four tiles of sums take turns, and each is stored two steps after its own: a tile that is being stored cannot be
  // summed in.
  template <int kSum>
  void store_later(float* to, int64_t stride) {
    store_now<(kSum + 2) % 4>();
    pending_[kSum] = {to, stride};
  }
  template <int kSum>
  void store_now() {
    if (pending_[kSum].to) store_tile<kSum>(pending_[kSum].to, pending_[kSum].stride);
    pending_[kSum].to = nullptr;
  }
  void store_all() {
    store_now<0>();
    store_now<1>();
    store_now<2>();
    store_now<3>();
  }

  // A unit's scores of its i-th 16 tokens, in sum i.
  template <int i>
  void score_tokens(int64_t u) {
    const Unit& unit = s_->units[u];
    const uint16_t* q = s_->q + unit.first * dim();
    const int64_t tile = unit.begin / kTokens + i;
    const uint16_t* keys = s_->tokens.keys[tile * kTokens < tokens_ ? tile : 0];  // else masked
    store_now<i>();
    zero_tile<i>();
    for (int64_t d = 0; d < dim(); d += 64) {
      if (kDim != 64 || i == 0) load_tile<4>(q + d * kBlock, 64);
      load_tile<6>(keys + d * kTokens, 64);
      multiply_bf16<i, 4, 6>();
      if (d + 32 == dim()) break;
      if (kDim != 64 || i == 0) load_tile<5>(q + (d + 32) * kBlock, 64);
      load_tile<7>(keys + (d + 32) * kTokens, 64);
      multiply_bf16<i, 5, 7>();
    }
    store_later<i>(s_->scores[u % 2] + i * kTokens, kUnitStride * 4);
  }

  // A unit's weighted values in the i-th 16 dimensions, added to those before.
  template <int kSum>
  void value_dims(int64_t u, int64_t i) {
    const Unit& unit = s_->units[u];
    float* sums = s_->split_sums + unit.first * dim() + i * 16;
    store_now<kSum>();
    if (unit.begin == 0) zero_tile<kSum>();
    else load_tile<kSum>(sums, dim() * 4);
    const uint16_t* values = s_->values + unit.begin * dim() + i * 512;
    const uint16_t* p = s_->probabilities[u % 2];
    if (i == 0) load_tile<4>(p, 64);
    load_tile<6>(values, 64);
    multiply_bf16<kSum, 4, 6>();
    if (i == 0) load_tile<5>(p + kRun * kBlock, 64);
    load_tile<7>(values + kRun * dim(), 64);
    multiply_bf16<kSum, 5, 7>();
    store_later<kSum>(sums, dim() * 4);
  }

  // Scores of rows [row, end), an even number, to probabilities.
  void soften(int64_t u, int64_t row, int64_t end) {
    const Unit& unit = s_->units[u];
    if (!unit.whole) mask(unit, row, end);
    if (unit.begin == 0) start(unit, row, end);
    for (; row < end; row += 2) exponentiate<2>(u, row);
  }

  // Rows with a score too far above their reference keep their totals and are noted.
  template <int kRows>
  void exponentiate(int64_t u, int64_t row) {
    const int64_t query = s_->units[u].first + row;
    const float* scores = s_->scores[u % 2] + row * kUnitStride;
    uint16_t* out = s_->probabilities[u % 2] + row * kRun;
    Exponentials::Run runs[2 * kRows];
    __m512 totals[2 * kRows];
    __m512i seen[2 * kRows];
    for (int r = 0; r < kRows; ++r) {
      const __m512 shift = _mm512_set1_ps(s_->shifts[query + r]);
      runs[2 * r] = {scores + r * kUnitStride, shift, out + r * kRun};
      runs[2 * r + 1] = {scores + r * kUnitStride + kRun, shift, out + (kBlock + r) * kRun};
      totals[2 * r] = (__m512)load(s_->totals + (query + r) * 16).p[0];
      totals[2 * r + 1] = _mm512_setzero_ps();
    }
    exponentials_.turn<2 * kRows>(runs, totals, seen);
    __m512i all = _mm512_or_si512(seen[0], seen[1]);
    if (kRows == 2) all = _mm512_or_si512(all, _mm512_or_si512(seen[2], seen[3]));
    const bool some_too_high = exponentials_.too_high(all);
    for (int r = 0; r < kRows; ++r) {
      if (some_too_high && exponentials_.too_high(_mm512_or_si512(seen[2 * r], seen[2 * r + 1])))
        too_high_ |= uint32_t{1} << (row + r);
      else
        _mm512_store_ps(s_->totals + (query + r) * 16, _mm512_add_ps(totals[2 * r], totals[2 * r + 1]));
    }
  }

  // Scores of tokens that a query does not see become as low as a float allows.
  void mask(const Unit& unit, int64_t row, int64_t end) {
    for (; row < end; ++row) {
      float* scores = s_->scores[(&unit - s_->units) % 2] + row * kUnitStride;
      for (int64_t i = clamp(s_->visible[unit.first + row] - begin_ - unit.begin, 0, kUnitTokens); i < kUnitTokens; ++i)
        scores[i] = kMasked;
    }
  }

  // The first scores of a row in the split give its reference.
  void start(const Unit& unit, int64_t row, int64_t end) {
    for (; row < end; ++row) {
      const int64_t query = unit.first + row;
      s_->shifts[query] =
          Exponentials::shift_for(largest(s_->scores[(&unit - s_->units) % 2] + row * kUnitStride) * slope_);
      store(s_->totals + query * 16, zeros());
    }
  }

  void raise_references(int64_t u) {
    const Unit& unit = s_->units[u];
    for (uint32_t rows = too_high_; rows != 0; rows &= rows - 1) {
      const int64_t row = __builtin_ctz(rows), query = unit.first + row;
      const float* scores = s_->scores[u % 2] + row * kUnitStride;
      const float before = s_->shifts[query];
      s_->shifts[query] = Exponentials::shift_for(largest(scores) * slope_);
      const Floats keep = exp2_of_nonpositive(splat((s_->shifts[query] - before) / kSteps));
      float* sums = s_->split_sums + query * dim();
      for (int64_t i = 0; i < dim(); i += 16) store(sums + i, load(sums + i) * keep);
      store(s_->totals + query * 16, load(s_->totals + query * 16) * keep);
      exponentiate<1>(u, row);
    }
    too_high_ = 0;
  }

  static float largest(const float* scores) {
    return largest_of(larger(larger(load(scores), load(scores + 16)), larger(load(scores + 32), load(scores + 48))));
  }

  void take_sums() {
    for (int64_t i = 0; i < count_; ++i) {
      if (begin_ >= s_->visible[i]) continue;
      const SplitSums sums = {Exponentials::top_of(s_->shifts[i]) / kSteps + kBelow, sum_of(load(s_->totals + i * 16))};
      take_split(a_, item_, item_.query_begin + i, split_, s_->split_sums + i * dim(), sums,
                 s_->sums + i * dim(), &s_->so_far[i]);
    }
  }

  const AttentionArgs& a_;
  const AttentionItem& item_;
  const int64_t split_, begin_, count_;
  ChunkScratch* s_;
  const float slope_;
  const Exponentials exponentials_;
  int64_t tokens_, num_units_ = 0;
  uint32_t too_high_ = 0;  // rows of the unit at hand
  Pending pending_[4];
  uint32_t turn_ = 0;
};

void chunk_attend(const AttentionArgs& a, const AttentionItem& item, ChunkScratch* s) {
  gather_queries(a, item, kUnitQueries, s->q, s->visible);
  configure(16, 16);
  for (int64_t split = item.split_begin; split < item.split_end; ++split) {
    if (a.head_dim == 64) ChunkSplit<64>(a, item, split, s).attend();
    else ChunkSplit<0>(a, item, split, s).attend();
  }
  write_results(a, item, s->sums, s->so_far);
}

}  // namespace
}  // namespace pellucid
