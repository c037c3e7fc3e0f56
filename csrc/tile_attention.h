// Paged attention on AMX tiles: scores and weighted values are products of bfloat16 tiles, the softmax between them is
// AVX-512. Up to 16 queries (a decode: the heads of one group) read the cache where it lies; more queries (a chunk) first
// join the values of 32 tokens into whole tiles, once per item and split. The multiplier sums a whole tile in another order
// than two halves, so the two differ in the last bits, and a deterministic decode takes the way of a chunk.
#pragma once

#include "attention.h"
#include "tiles.h"

namespace pellucid {
namespace {

constexpr int64_t kMaxHeadDim = 256;
// Scores of a row lie this many floats apart: a power of two would put all rows of a tile into the same cache sets.
constexpr int64_t kScoreStride = kSplit + 16;

struct alignas(64) TileScratch {
  uint16_t q[kItemRows * kMaxHeadDim];    // [row tile][head_dim / 32][16][32]
  float scores[32 * kScoreStride];
  uint16_t probabilities[32 * kSplit];    // chunk: [row tile][kSplit / 32][16][32]; decode: [kSplit / 16][16][16]
  uint16_t values[kSplit * kMaxHeadDim];  // [kSplit / 32][head_dim / 16][16 pairs][16][2]
  float split_sums[32 * kMaxHeadDim];     // [32][head_dim]
  float sums[kItemRows * kMaxHeadDim];    // [query][head_dim]
  SplitSums so_far[kItemRows];
  int64_t visible[kItemRows];  // tokens that each query sees
  SplitTokens tokens;
};

void gather_queries(const AttentionArgs& a, const AttentionItem& item, TileScratch* s) {
  const int64_t count = item.query_end - item.query_begin;
  for (int64_t i = 0; i < round_up(count, kBlock); ++i) {
    uint16_t* to = s->q + i / kBlock * kBlock * a.head_dim + i % kBlock * 32;
    if (i >= count) {
      for (int64_t d = 0; d < a.head_dim; d += 32) __builtin_memset(to + d * kBlock, 0, 64);
      continue;
    }
    const Query q = query_at(a, item, item.query_begin + i);
    s->visible[i] = q.visible;
    const uint16_t* from = a.q + (q.row * a.num_heads + q.head) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d += 32) __builtin_memcpy(to + d * kBlock, from + d, 64);
  }
}

// Scores of query `i` of the item to probabilities, from row `row` of the scores; zero where it sees nothing of the split.
template <int64_t kRun, int64_t kSecond>
SplitSums probabilities_of(const AttentionArgs& a, int64_t i, int64_t row, int64_t begin, int64_t padded, uint16_t* out,
                           TileScratch* s) {
  const int64_t valid = clamp(s->visible[i] - begin, 0, kSplit);
  if (valid > 0)
    return softmax_row<kRun, kSecond>(s->scores + row * kScoreStride, valid, padded, a.scale * kLog2E, out);
  no_probabilities<kRun, kSecond>(padded, out);
  return {kMasked, 0.0f};
}

// --- decode: at most 16 queries ----------------------------------------------------------------------------------------

// Tiles 0-3 sums, 4 queries, 5 probabilities (16 tokens wide), 6 keys, 7 values (8 pairs high).
void configure_decode(int queries) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = tile == 5 ? 32 : 64;
    config.rows[tile] = static_cast<uint8_t>(tile == 6 ? 16 : tile == 7 ? 8 : queries);
  }
  load_config(config);
}

// Keys and values that a decode reads come from memory, each once. They are asked for this many pieces of 16 tokens ahead,
// and the first of the next item while this one is computed.
constexpr int64_t kPiecesAhead = 8;

inline void prefetch_piece(const uint16_t* p, int64_t head_dim) {
  for (int64_t i = 0; i < kTokens * head_dim; i += 32) prefetch(p + i);
}

// The start of the next item, one piece at a time.
class NextPieces {
 public:
  NextPieces(const AttentionArgs& a, const AttentionItem* next) : head_dim_(a.head_dim) {
    if (!next || next->query_end - next->query_begin > kBlock) return;
    const int64_t begin = next->split_begin * kSplit;
    count_ = clamp((next->sequence->context - begin + kTokens - 1) / kTokens, 0, 2 * kPiecesAhead);
    find_tokens(a, *next, begin, count_ * kTokens, &tokens_);
  }
  void prefetch_one() {
    if (done_ >= count_) return;
    prefetch_piece(tokens_.keys[done_], head_dim_);
    prefetch_piece(tokens_.values[done_], head_dim_);
    ++done_;
  }

 private:
  int64_t head_dim_, count_ = 0, done_ = 0;
  SplitTokens tokens_;
};

void decode_scores(const AttentionArgs& a, int64_t padded, NextPieces* next, TileScratch* s) {
  const int64_t pieces = padded / kTokens;
  for (int64_t i = 0; i < pieces; ++i) {
    if (i + kPiecesAhead < pieces) {
      prefetch_piece(s->tokens.keys[i + kPiecesAhead], a.head_dim);
      prefetch_piece(s->tokens.values[i + kPiecesAhead], a.head_dim);
    } else {
      next->prefetch_one();
    }
    _tile_zero(0);
    for (int64_t d = 0; d < a.head_dim; d += 32) {
      _tile_loadd(4, s->q + d * kBlock, 64);
      _tile_loadd(6, s->tokens.keys[i] + d * kTokens, 64);
      _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, s->scores + i * kTokens, kScoreStride * 4);
  }
}

// Up to four blocks of 16 dimensions from `dim` on.
void decode_values(const AttentionArgs& a, int64_t padded, int64_t dim, TileScratch* s) {
  const int64_t blocks = clamp((a.head_dim - dim) / 16, 0, 4);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < padded / kTokens; ++i) {
    const uint16_t* values = s->tokens.values[i] + dim * kTokens;
    _tile_loadd(5, s->probabilities + i * kTokens * kBlock, 32);
    _tile_loadd(7, values, 64);
    _tile_dpbf16ps(0, 5, 7);
    _tile_loadd(7, values + 256, 64);
    _tile_dpbf16ps(1, 5, 7);
    if (blocks < 4) continue;
    _tile_loadd(7, values + 512, 64);
    _tile_dpbf16ps(2, 5, 7);
    _tile_loadd(7, values + 768, 64);
    _tile_dpbf16ps(3, 5, 7);
  }
  const int64_t stride = a.head_dim * 4;
  _tile_stored(0, s->split_sums + dim, stride);
  _tile_stored(1, s->split_sums + dim + 16, stride);
  if (blocks < 4) return;
  _tile_stored(2, s->split_sums + dim + 32, stride);
  _tile_stored(3, s->split_sums + dim + 48, stride);
}

void decode_attend(const AttentionArgs& a, const AttentionItem& item, const AttentionItem* next_item, TileScratch* s) {
  const int64_t count = item.query_end - item.query_begin;
  NextPieces next(a, next_item);
  gather_queries(a, item, s);
  configure_decode(static_cast<int>(count));
  for (int64_t split = item.split_begin; split < item.split_end; ++split) {
    const int64_t begin = split * kSplit;
    const int64_t padded = round_up(clamp(s->visible[count - 1] - begin, 0, kSplit), kTokens);
    find_tokens(a, item, begin, padded, &s->tokens);
    decode_scores(a, padded, &next, s);
    SplitSums sums[kBlock];
    for (int64_t i = 0; i < count; ++i)
      sums[i] = probabilities_of<512, 256>(a, i, i, begin, padded, s->probabilities + i * 16, s);
    for (int64_t dim = 0; dim < a.head_dim; dim += 64) decode_values(a, padded, dim, s);
    for (int64_t i = 0; i < count; ++i) {
      if (begin >= s->visible[i]) continue;
      take_split(a, item, item.query_begin + i, split, s->split_sums + i * a.head_dim, sums[i],
                 s->sums + i * a.head_dim, &s->so_far[i]);
    }
  }
}

// --- chunks: row tiles in pairs ----------------------------------------------------------------------------------------

// Joins the half tiles of 16 tokens into tiles of 32, zero where the split ends in between.
void join_values(const AttentionArgs& a, int64_t tokens, TileScratch* s) {
  for (int64_t t = 0; t < round_up(tokens, 32); t += kTokens) {
    uint16_t* to = s->values + t / 32 * 32 * a.head_dim + t % 32 * 16;
    const uint16_t* from = s->tokens.values[t / kTokens];
    for (int64_t d = 0; d < a.head_dim / 16; ++d) {
      if (t < tokens) __builtin_memcpy(to + d * 512, from + d * 256, 512);
      else __builtin_memset(to + d * 512, 0, 512);
    }
  }
}

void chunk_scores(const AttentionArgs& a, int64_t tokens, const uint16_t* q, TileScratch* s) {
  constexpr int64_t stride = kScoreStride * 4;
  const uint16_t* lower = q + kBlock * a.head_dim;
  for (int64_t t = 0; t < tokens; t += 2 * kTokens) {
    const uint16_t* left = s->tokens.keys[t / kTokens];
    const uint16_t* right = t + kTokens < tokens ? s->tokens.keys[t / kTokens + 1] : left;
    if (t + 2 * kTokens < tokens) prefetch_piece(s->tokens.keys[t / kTokens + 2], a.head_dim);
    if (t + 3 * kTokens < tokens) prefetch_piece(s->tokens.keys[t / kTokens + 3], a.head_dim);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < a.head_dim; d += 32) {
      _tile_loadd(6, left + d * kTokens, 64);
      _tile_loadd(4, q + d * kBlock, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, lower + d * kBlock, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(7, right + d * kTokens, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, s->scores + t, stride);
    _tile_stored(1, s->scores + t + 16, stride);
    _tile_stored(2, s->scores + 16 * kScoreStride + t, stride);
    _tile_stored(3, s->scores + 16 * kScoreStride + t + 16, stride);
  }
}

void chunk_values(const AttentionArgs& a, int64_t tokens, TileScratch* s) {
  const int64_t stride = a.head_dim * 4;
  const uint16_t* lower = s->probabilities + kBlock * kSplit;
  for (int64_t d = 0; d < a.head_dim; d += 32) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t t = 0; t < tokens; t += 32) {
      const uint16_t* values = s->values + t * a.head_dim + d * 32;
      _tile_loadd(6, values, 64);
      _tile_loadd(4, s->probabilities + t * kBlock, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, lower + t * kBlock, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(7, values + 512, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, s->split_sums + d, stride);
    _tile_stored(1, s->split_sums + d + 16, stride);
    _tile_stored(2, s->split_sums + 16 * a.head_dim + d, stride);
    _tile_stored(3, s->split_sums + 16 * a.head_dim + d + 16, stride);
  }
}

// 32 queries from `first` (relative to the item) against one split.
void chunk_split(const AttentionArgs& a, const AttentionItem& item, int64_t split, int64_t first, TileScratch* s) {
  const int64_t begin = split * kSplit;
  const int64_t count = clamp(item.query_end - item.query_begin - first, 0, 32);
  const int64_t tokens = clamp(s->visible[first + count - 1] - begin, 0, kSplit);
  if (tokens == 0) return;
  const int64_t padded = round_up(tokens, 32);
  chunk_scores(a, tokens, s->q + first * a.head_dim, s);
  SplitSums sums[32];
  for (int64_t i = 0; i < 32; ++i) {
    uint16_t* out = s->probabilities + i / kBlock * kBlock * kSplit + i % kBlock * 32;
    if (i < count) sums[i] = probabilities_of<512, 16>(a, first + i, i, begin, padded, out, s);
    else no_probabilities<512, 16>(padded, out);
  }
  chunk_values(a, tokens, s);
  for (int64_t i = 0; i < count; ++i) {
    if (begin >= s->visible[first + i]) continue;
    take_split(a, item, item.query_begin + first + i, split, s->split_sums + i * a.head_dim, sums[i],
               s->sums + (first + i) * a.head_dim, &s->so_far[first + i]);
  }
}

void chunk_attend(const AttentionArgs& a, const AttentionItem& item, TileScratch* s) {
  const int64_t count = item.query_end - item.query_begin;
  gather_queries(a, item, s);
  if (count % 32 != 0 && count % 32 <= 16)  // the lower tile of the last pair
    __builtin_memset(s->q + round_up(count, 16) * a.head_dim, 0, static_cast<size_t>(16 * a.head_dim) * 2);
  configure(16, 16);
  for (int64_t split = item.split_begin; split < item.split_end; ++split) {
    const int64_t tokens = clamp(s->visible[count - 1] - split * kSplit, 0, kSplit);
    find_tokens(a, item, split * kSplit, tokens, &s->tokens);
    join_values(a, tokens, s);
    for (int64_t first = 0; first < count; first += 32) chunk_split(a, item, split, first, s);
  }
}

void tile_attend(const AttentionArgs& a, const AttentionItem& item, const AttentionItem* next, std::byte* scratch) {
  auto* s = reinterpret_cast<TileScratch*>(scratch);
  const int64_t count = item.query_end - item.query_begin;
  if (count <= kBlock && !a.deterministic) decode_attend(a, item, next, s);
  else chunk_attend(a, item, s);
  _tile_release();
  if (item.partial) return;
  for (int64_t i = 0; i < count; ++i)
    write_result(a, query_at(a, item, item.query_begin + i), s->sums + i * a.head_dim, s->so_far[i]);
}

}  // namespace
}  // namespace pellucid
