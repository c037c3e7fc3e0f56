// Attention of a chunk on AMX tiles. One idea: everything that 32 queries and 64 tokens need lies in the first-level cache,
// and the tiles never wait for their own stores. The scores of a unit (32 queries against 64 tokens) and the weighted values
// of the unit before are one stretch of work for the tiles; then the vector registers turn the scores into probabilities.
//
// A row's exponentials are taken relative to a reference: the maximum of its first 64 scores. Only a score far above it
// moves the reference, so sums are hardly ever rescaled; the row alone decides, whatever it shares a unit with.
#pragma once

#include "attention.h"
#include "tile_softmax.h"
#include "tiles.h"

namespace pellucid {
namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kRowTile = 16;
constexpr int64_t kUnitQueries = 2 * kRowTile;
constexpr int64_t kUnitTokens = 64;
constexpr int64_t kResultsAhead = 4;  // queries
constexpr int64_t kUnitRuns = kUnitTokens / kRun, kUnitTiles = kUnitTokens / kTokens;

// Ends an item that no others share: `sums` [query][head_dim].
void write_results(const AttentionArgs& a, const AttentionItem& item, const float* sums, const SplitSums* all) {
  if (item.partial) return;
  for (int64_t i = 0; i < item.query_end - item.query_begin; ++i)
    write_result(a, query_at(a, item, item.query_begin + i), sums + i * a.head_dim, all[i]);
}

// A load waits for an older store whose address agrees with its own in the last 12 bits, wherever both lie: 1 ns a line. So
// scores, which are read while probabilities are stored, lie in the even kilobytes and probabilities in the odd ones.
struct alignas(2048) Slot {
  float scores[kRowTile * kTokens];         // of 16 tokens
  uint16_t probabilities[kRowTile * kRun];  // of a run
};
constexpr int64_t kSlotFloats = sizeof(Slot) / sizeof(float), kSlotHalves = sizeof(Slot) / sizeof(uint16_t);

struct SumTile {
  float rows[kRowTile][16];
};

struct alignas(4096) ChunkScratch {
  Slot slots[2 * kUnitTiles];             // [row tile][16 tokens], the first of a row tile with its runs too
  uint16_t q[kItemRows * kMaxHeadDim];    // [row tile][head_dim / 32][16][32]
  uint16_t values[kSplit * kMaxHeadDim];  // [run][head_dim / 16][16 pairs][16][2]
  uint16_t keys[kSplit * kMaxHeadDim];    // int8: pieces of them as bfloat16
  uint16_t ones[kRun * 16];
  SumTile tiles[kItemRows / kRowTile * (kMaxHeadDim / 16 + 1)];  // [row tile][16 dimensions, at last the total]
  float row[kMaxHeadDim];                                        // the sums of one query
  float shifts[kItemRows];                                       // that make the references of Exponentials
  float sums[kItemRows * kMaxHeadDim];                           // deterministic: [query][head_dim], of the splits before
  SplitSums so_far[kItemRows];
  int64_t visible[kItemRows];  // tokens that each query sees
  SplitTokens tokens, tokens_ahead;
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
// Zero from the end of the split to the end of a run. A tile is read whole before it is written: see Slot about loads that
// wait for stores.
void join_values(const AttentionArgs& a, int64_t tokens, const SplitTokens& at, uint16_t* out) {
  for (int64_t t = 0; t < tokens; t += kRun) {
    const uint16_t* first = halves(at.values[t / kTokens]);
    const uint16_t* second = t + kTokens < tokens ? halves(at.values[t / kTokens + 1]) : nullptr;
    for (int64_t d = 0; d < a.head_dim; d += 16, first += 256, out += 512) {
      __m512i pairs[16];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        pairs[i / 2 * 4 + i % 2] = _mm512_loadu_si512(first + i * 32);
        pairs[i / 2 * 4 + i % 2 + 2] = second ? _mm512_loadu_si512(second + d * 16 + i * 32) : _mm512_setzero_si512();
      }
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) _mm512_store_si512(out + i * 32, pairs[i]);
    }
  }
}

// Words of four bytes, 128 added, times the scale of each place, as two rows of bfloat16 pairs.
inline void unpack_words(const std::byte* from, const Floats (&scales)[4], uint16_t* out) {
  const Ints words = load_ints(from), byte = splat_int(0xff), half = splat_int(0x8000);
  const Ints bytes[4] = {words & byte, shift_right<8>(words) & byte, shift_right<16>(words) & byte, shift_right<24>(words)};
  Ints rounded[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) rounded[i] = as_ints((to_floats(bytes[i]) - splat(128.0f)) * scales[i]) + half;
  const Ints upper = splat_int(static_cast<int32_t>(0xffff0000));
  store_ints(out, shift_right<16>(rounded[0]) | (rounded[1] & upper));
  store_ints(out + 32, shift_right<16>(rounded[2]) | (rounded[3] & upper));
}

// Keys of bytes become bfloat16 in `out`, where they are found from then on.
void unpack_keys(const AttentionArgs& a, int64_t tokens, SplitTokens* at, uint16_t* out) {
  for (int64_t piece = 0; piece * kTokens < tokens; ++piece, out += kTokens * a.head_dim) {
    const std::byte* keys = at->keys[piece];
    const Floats scale = scales_of(keys, a.head_dim), scales[4] = {scale, scale, scale, scale};
    for (int64_t d = 0; d < a.head_dim; d += 4) unpack_words(keys + d * kTokens, scales, out + d * kTokens);
    at->keys[piece] = reinterpret_cast<const std::byte*>(out);
  }
}

// join_values for values of bytes: the pairs of four tokens follow one another.
void unpack_values(const AttentionArgs& a, int64_t tokens, const SplitTokens& at, uint16_t* out) {
  for (int64_t piece = 0; piece * kTokens < round_up(tokens, kRun); ++piece) {
    uint16_t* to = out + piece / 2 * kRun * a.head_dim + piece % 2 * 64;
    const std::byte* values = piece * kTokens < tokens ? at.values[piece] : nullptr;
    for (int64_t quad = 0; quad < 4; ++quad) {
      Floats scales[4];
      for (int64_t i = 0; values && i < 4; ++i)
        scales[i] = splat(reinterpret_cast<const float*>(values + kTokens * a.head_dim)[quad * 4 + i]);
      for (int64_t d = 0; d < a.head_dim; d += 16) {
        uint16_t* rows = to + d * kRun + quad * 128;
        if (values) unpack_words(values + d * kTokens + quad * 64, scales, rows);
        else __builtin_memset(rows, 0, 128);
      }
    }
  }
}

// Keys and values lie in memory and are read for one item or a few: those of the next split are asked for while this one is
// computed, some lines at a time.
class Ahead {
 public:
  // The tokens of the split from `begin` on, spread over `calls` calls of some(). `tokens` is room for where they lie.
  Ahead(const AttentionArgs& a, const AttentionItem& item, int64_t begin, int64_t calls, SplitTokens* tokens)
      : tokens_(tokens), lines_(piece_bytes(a.cache_format, a.head_dim) / 64) {
    const int64_t count = split_tokens(item, begin);
    find_tokens(a, item, begin, count, tokens);
    pieces_ = (count + kTokens - 1) / kTokens;
    step_ = (pieces_ * lines_ + calls - 1) / calls;
  }
  Ahead() = default;

  void some() {
    if (piece_ >= pieces_) return;
    const std::byte *keys = tokens_->keys[piece_] + line_ * 64, *values = tokens_->values[piece_] + line_ * 64;
    for (int64_t i = 0; i < step_; ++i) {
      __builtin_prefetch(keys + i * 64, 0, 2);
      __builtin_prefetch(values + i * 64, 0, 2);
    }
    line_ += step_;
    if (line_ < lines_) return;
    line_ = 0;
    ++piece_;
  }

 private:
  const SplitTokens* tokens_ = nullptr;
  int64_t lines_ = 0, pieces_ = 0, step_ = 0, piece_ = 0, line_ = 0;
};

// Up to 32 queries against up to 64 tokens.
struct Unit {
  int64_t first, count;  // its queries, in the item
  int64_t begin, runs;   // its tokens, in the split
  bool whole;            // every query sees 64 of them
  bool starts;           // its sums begin here
};

// All queries of one item against its part of the context. kDim: the head dimension, or 0 for any.
template <int64_t kDim>
class ChunkItem {
 public:
  ChunkItem(const AttentionArgs& a, const AttentionItem& item, const AttentionItem* next, ChunkScratch* s)
      : a_(a), item_(item), next_(next), count_(item.query_end - item.query_begin), s_(s), slope_(a.scale * kLog2E * kSteps),
        exponentials_(slope_) {
    gather_queries(a, item, kRowTile, s->q, s->visible);
    for (uint16_t& one : s->ones) one = static_cast<uint16_t>(kBits);
  }

  void attend() {
    for (begin_ = item_.begin; begin_ < item_.end; begin_ += kSplit) {
      open();
      for (int64_t first = 0; first < count_; first += kUnitQueries) {
        const int64_t count = clamp(count_ - first, 0, kUnitQueries);
        if (count > kRowTile) attend_rows<2>(first, count);
        else attend_rows<1>(first, count);
      }
      if (a_.deterministic) take_split_sums();
    }
    if (a_.deterministic) write_results(a_, item_, s_->sums, s_->so_far);
    else write_all();
  }

 private:
  int64_t dim() const { return kDim ? kDim : a_.head_dim; }

  // Finds the split from begin_ on.
  void open() {
    starts_ = a_.deterministic || begin_ == item_.begin;
    tokens_ = clamp(s_->visible[count_ - 1] - begin_, 0, split_tokens(item_, begin_));
    find_tokens(a_, item_, begin_, tokens_, &s_->tokens);
    if (a_.cache_format == CacheFormat::int8) {
      unpack_keys(a_, tokens_, &s_->tokens, s_->keys);
      unpack_values(a_, tokens_, s_->tokens, s_->values);
    } else {
      join_values(a_, tokens_, s_->tokens, s_->values);
    }
    const int64_t calls = ((count_ + 1) / 2 + (count_ + 31) / 32 * 8) * ((tokens_ + kUnitTokens - 1) / kUnitTokens);
    if (begin_ + kSplit < item_.end) ahead_ = Ahead(a_, item_, begin_ + kSplit, calls, &s_->tokens_ahead);
    else if (next_) ahead_ = Ahead(a_, *next_, next_->begin, calls, &s_->tokens_ahead);
    else ahead_ = Ahead();
  }

  template <int kTiles>
  void attend_rows(int64_t first, int64_t count) {
    const int64_t all_see = s_->visible[first] - begin_, seen = clamp(s_->visible[first + count - 1] - begin_, 0, tokens_);
    if (seen == 0) return;
    Unit before = {};
    for (int64_t begin = 0; begin < seen; begin += kUnitTokens) {
      const int64_t runs = (clamp(seen - begin, 0, kUnitTokens) + kRun - 1) / kRun;
      const Unit unit = {first, count, begin, runs, all_see - begin >= kUnitTokens, starts_ && begin == 0};
      score<kTiles, 0>(unit, 0);
      if (runs > 1) score<kTiles, kTiles == 1 ? 2 : 0>(unit, 1);
      if (begin > 0) weigh_all<kTiles>(before);
      store_all();
      soften(unit);
      before = unit;
    }
    weigh_all<kTiles>(before);
    store_all();
  }

  // A sum is stored when its tile is needed again: a tile that is stored right after its last product stalls the others.
  template <int kSum>
  void store_now() {
    if (pending_[kSum]) store_tile<kSum>(pending_[kSum], 64);
    pending_[kSum] = nullptr;
  }
  void store_all() {
    store_now<0>();
    store_now<1>();
    store_now<2>();
    store_now<3>();
  }
  // The sum begins at what `from` has, or at zero, and will be stored in `to`.
  template <int kSum>
  void begin_sum(const void* from, void* to) {
    store_now<kSum>();
    if (from) load_tile<kSum>(from, 64);
    else zero_tile<kSum>();
    pending_[kSum] = to;
  }
  // Keys and values are too many to stay in the first-level cache and would push out the rest.
  template <int kTile>
  static void load_passing(const void* from) {
    asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(from), "r"(int64_t{64}) : "memory");
  }

  // A unit's scores of one run, in sums kBase and kBase + 1 (the first row tile), 2 and 3 (the second).
  template <int kTiles, int kBase>
  void score(const Unit& unit, int64_t run) {
    const uint16_t* q = s_->q + unit.first * dim();
    const int64_t piece = (unit.begin + run * kRun) / kTokens;
    const uint16_t* first = halves(s_->tokens.keys[piece]);
    const uint16_t* second = halves(s_->tokens.keys[(piece + 1) * kTokens < tokens_ ? piece + 1 : piece]);  // else masked
    Slot* to = s_->slots + 2 * run;
    for (int64_t d = 0; d < dim(); d += 32) {
      load_tile<4>(q + d * kBlock, 64);
      if (kTiles == 2) load_tile<5>(q + (dim() + d) * kBlock, 64);
      load_passing<6>(first + d * kTokens);
      load_passing<7>(second + d * kTokens);
      ahead_.some();
      if (d == 0) begin_sum<kBase>(nullptr, to[0].scores);
      multiply_bf16<kBase, 4, 6>();
      if (d == 0) begin_sum<kBase + 1>(nullptr, to[1].scores);
      multiply_bf16<kBase + 1, 4, 7>();
      if (kTiles == 1) continue;
      if (d == 0) begin_sum<2>(nullptr, to[kUnitTiles].scores);
      multiply_bf16<2, 5, 6>();
      if (d == 0) begin_sum<3>(nullptr, to[kUnitTiles + 1].scores);
      multiply_bf16<3, 5, 7>();
    }
  }

  template <int kTiles>
  void weigh_all(const Unit& unit) {
    for (int64_t i = 0; i < dim() / 16; i += 2)
      if (kTiles == 2 || i % 4 == 0) weigh<kTiles, 0>(unit, i);
      else weigh<kTiles, 2>(unit, i);
    add_up<kTiles>(unit);
  }

  SumTile* sum_tile(int64_t query, int64_t i) const { return s_->tiles + query / kRowTile * (dim() / 16 + 1) + i; }
  template <int kSum>
  void continue_sum(const Unit& unit, SumTile* sum) {
    begin_sum<kSum>(unit.starts ? nullptr : sum, sum);
  }

  // Adds a unit's weighted values in the i-th and next 16 dimensions.
  template <int kTiles, int kBase>
  void weigh(const Unit& unit, int64_t i) {
    SumTile* top = sum_tile(unit.first, i);
    SumTile* bottom = sum_tile(unit.first + kRowTile, i);
    const uint16_t* values = s_->values + unit.begin * dim() + i * 512;
    for (int64_t run = 0; run < unit.runs; ++run, values += kRun * dim()) {
      load_tile<4>(s_->slots[run].probabilities, 64);
      if (kTiles == 2) load_tile<5>(s_->slots[kUnitTiles + run].probabilities, 64);
      load_tile<6>(values, 64);
      load_tile<7>(values + 512, 64);
      ahead_.some();
      if (run == 0) continue_sum<kBase>(unit, top);
      multiply_bf16<kBase, 4, 6>();
      if (run == 0) continue_sum<kBase + 1>(unit, top + 1);
      multiply_bf16<kBase + 1, 4, 7>();
      if (kTiles == 1) continue;
      if (run == 0) continue_sum<2>(unit, bottom);
      multiply_bf16<2, 5, 6>();
      if (run == 0) continue_sum<3>(unit, bottom + 1);
      multiply_bf16<3, 5, 7>();
    }
  }

  // The total of the probabilities is what they weigh ones to: cheaper than adding them up in vector registers.
  template <int kTiles>
  void add_up(const Unit& unit) {
    load_tile<6>(s_->ones, 64);
    continue_sum<0>(unit, sum_tile(unit.first, dim() / 16));
    if (kTiles == 2) continue_sum<2>(unit, sum_tile(unit.first + kRowTile, dim() / 16));
    for (int64_t run = 0; run < unit.runs; ++run) {
      load_tile<4>(s_->slots[run].probabilities, 64);
      multiply_bf16<0, 4, 6>();
      if (kTiles == 1) continue;
      load_tile<5>(s_->slots[kUnitTiles + run].probabilities, 64);
      multiply_bf16<2, 5, 6>();
    }
  }

  float* scores_of(int64_t row) { return s_->slots[row / kRowTile * kUnitTiles].scores + row % kRowTile * kTokens; }
  uint16_t* probabilities_of(int64_t row) {
    return s_->slots[row / kRowTile * kUnitTiles].probabilities + row % kRowTile * kRun;
  }

  // A unit's scores to probabilities.
  void soften(const Unit& unit) {
    if (!unit.whole)
      for (int64_t row = 0; row < unit.count; ++row) mask(unit, row);
    if (unit.starts)
      for (int64_t row = 0; row < unit.count; ++row) s_->shifts[unit.first + row] = shift_of(unit, row);
    int64_t row = 0;
    if (unit.runs == kUnitRuns) {
      const Exponentials exponentials = exponentials_;  // in registers
      const float* shifts = s_->shifts + unit.first;
      for (; row + 1 < unit.count; row += 2) {
        ahead_.some();
        const __m512i seen = exponentials.turn<2, kUnitRuns, kSlotFloats, kSlotHalves>(scores_of(row), shifts + row,
                                                                                       probabilities_of(row));
        if (__builtin_expect(!exponentials.too_high(seen), 1)) continue;
        soften_row(unit, row);
        soften_row(unit, row + 1);
      }
    }
    for (; row < unit.count; ++row) soften_row(unit, row);
  }

  __attribute__((noinline)) void soften_row(const Unit& unit, int64_t row) {
    if (!exponentials_.too_high(exponentiate(unit, row))) return;
    const float before = s_->shifts[unit.first + row], after = shift_of(unit, row);
    s_->shifts[unit.first + row] = after;
    const Floats keep = exp2_of_nonpositive(splat((after - before) / kSteps));
    for (int64_t i = 0; i <= dim() / 16; ++i) {
      float* sums = sum_tile(unit.first + row, i)->rows[row % kRowTile];
      store(sums, load(sums) * keep);
    }
    exponentiate(unit, row);
  }

  __m512i exponentiate(const Unit& unit, int64_t row) {
    const float* shift = s_->shifts + unit.first + row;
    const auto turn = [&](int64_t run) {
      return exponentials_.turn<1, 1, kSlotFloats, kSlotHalves>(scores_of(row) + run * 2 * kSlotFloats, shift,
                                                                probabilities_of(row) + run * kSlotHalves);
    };
    const __m512i seen = turn(0);
    return unit.runs == 1 ? seen : _mm512_or_si512(seen, turn(1));
  }

  // Scores of tokens that a query does not see become as low as a float allows.
  void mask(const Unit& unit, int64_t row) {
    const int64_t seen = clamp(s_->visible[unit.first + row] - begin_ - unit.begin, 0, kUnitTokens);
    for (int64_t i = seen / kTokens; i < 2 * unit.runs; ++i) {
      const auto unseen = static_cast<__mmask16>(0xffff << clamp(seen - i * kTokens, 0, kTokens));
      _mm512_mask_store_ps(scores_of(row) + i * kSlotFloats, unseen, _mm512_set1_ps(kMasked));
    }
  }

  // That makes the largest score of the row in this unit its reference.
  float shift_of(const Unit& unit, int64_t row) {
    const float* scores = scores_of(row);
    Floats top = larger(load(scores), load(scores + kSlotFloats));
    if (unit.runs > 1) top = larger(top, larger(load(scores + 2 * kSlotFloats), load(scores + 3 * kSlotFloats)));
    return Exponentials::shift_for(largest_of(top) * slope_);
  }

  // What the sums of a query are now, its weighted values in s_->row.
  SplitSums sums_of(int64_t query) {
    for (int64_t i = 0; i < dim() / 16; ++i)
      store(s_->row + i * 16, load(sum_tile(query, i)->rows[query % kRowTile]));
    return {Exponentials::top_of(s_->shifts[query]) / kSteps + kBelow,
            sum_tile(query, dim() / 16)->rows[query % kRowTile][0]};
  }

  void take_split_sums() {
    for (int64_t i = 0; i < count_; ++i) {
      if (s_->visible[i] <= begin_) continue;
      const SplitSums sums = sums_of(i);
      take_split(a_, item_, item_.query_begin + i, begin_, s_->row, sums, s_->sums + i * dim(), &s_->so_far[i]);
    }
  }

  // Whoever reads results may be another thread, and writing waits until it gives their lines back.
  void prefetch_result(int64_t i) const {
    const int64_t query = item_.query_begin + i;
    const float* to = item_.partial ? partial_of(a_, item_, query, item_.begin / item_.part_tokens)
                                    : result_of(a_, query_at(a_, item_, query));
    for (int64_t d = 0; d < dim(); d += 16) __builtin_prefetch(to + d, 1, 3);
  }

  void write_all() {
    for (int64_t i = 0; i < count_; ++i) {
      if (s_->visible[i] <= item_.begin) continue;
      if (i + kResultsAhead < count_) prefetch_result(i + kResultsAhead);
      const SplitSums sums = sums_of(i);
      if (item_.partial) keep_part(a_, item_, item_.query_begin + i, item_.begin / item_.part_tokens, s_->row, sums);
      else write_result(a_, query_at(a_, item_, item_.query_begin + i), s_->row, sums);
    }
  }

  const AttentionArgs& a_;
  const AttentionItem& item_;
  const AttentionItem* next_;
  const int64_t count_;
  ChunkScratch* s_;
  const float slope_;
  const Exponentials exponentials_;
  int64_t begin_ = 0, tokens_ = 0;  // of the split at hand
  bool starts_ = false;
  void* pending_[4] = {};
  Ahead ahead_;
};

void chunk_attend(const AttentionArgs& a, const AttentionItem& item, const AttentionItem* next, ChunkScratch* s) {
  configure(16, 16);
  if (a.head_dim == 64) ChunkItem<64>(a, item, next, s).attend();
  else ChunkItem<0>(a, item, next, s).attend();
}

}  // namespace
}  // namespace pellucid
