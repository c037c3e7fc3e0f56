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

struct alignas(64) TileScratch {
  uint16_t q[kItemRows * kMaxHeadDim];          // [row tile][head_dim / 32][16][32]
  float scores[32][kSplit];
  uint16_t probabilities[32 * kSplit];          // chunk: [row tile][kSplit / 32][16][32]; decode: [kSplit / 16][16][16]
  uint16_t values[kSplit * kMaxHeadDim];        // [kSplit / 32][head_dim / 16][16 pairs][16][2]
  float split_sums[32 * kMaxHeadDim];           // [32][head_dim]
  float sums[kItemRows * kMaxHeadDim];          // [query][head_dim]
  SplitSums so_far[kItemRows];
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
    const uint16_t* from = a.q + (q.row * a.num_heads + q.head) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d += 32) __builtin_memcpy(to + d * kBlock, from + d, 64);
  }
}

inline void prefetch_tokens(const AttentionArgs& a, const AttentionItem& item, const uint16_t* cache, int64_t token,
                            int64_t end) {
  if (token >= end) return;
  const uint16_t* p = tokens_at(a, item, cache, token);
  for (int64_t i = 0; i < kTokens * a.head_dim; i += 32) prefetch(p + i);
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

constexpr int64_t kTokensAhead = 8 * kTokens;

void decode_scores(const AttentionArgs& a, const AttentionItem& item, int64_t begin, int64_t padded, TileScratch* s) {
  constexpr int64_t stride = kSplit * 4;
  for (int64_t t = 0; t < padded; t += kTokens) {
    prefetch_tokens(a, item, a.key_cache, begin + t + kTokensAhead, begin + padded);
    prefetch_tokens(a, item, a.value_cache, begin + t, begin + (padded < kTokensAhead ? padded : kTokensAhead));
    const uint16_t* keys = tokens_at(a, item, a.key_cache, begin + t);
    _tile_zero(0);
    for (int64_t d = 0; d < a.head_dim; d += 32) {
      _tile_loadd(4, s->q + d * kBlock, 64);
      _tile_loadd(6, keys + d * kTokens, 64);
      _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, s->scores[0] + t, stride);
  }
}

// Up to four blocks of 16 dimensions from `dim` on.
void decode_values(const AttentionArgs& a, const AttentionItem& item, int64_t begin, int64_t padded, int64_t dim,
                   TileScratch* s) {
  const int64_t blocks = clamp((a.head_dim - dim) / 16, 0, 4);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t t = 0; t < padded; t += kTokens) {
    if (dim == 0) prefetch_tokens(a, item, a.value_cache, begin + t + kTokensAhead, begin + padded);
    const uint16_t* values = tokens_at(a, item, a.value_cache, begin + t) + dim * kTokens;
    _tile_loadd(5, s->probabilities + t * kBlock, 32);
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

void decode_attend(const AttentionArgs& a, const AttentionItem& item, TileScratch* s) {
  const int64_t count = item.query_end - item.query_begin;
  gather_queries(a, item, s);
  configure_decode(static_cast<int>(count));
  const int64_t last = query_at(a, item, item.query_end - 1).visible;
  for (int64_t split = item.split_begin; split < item.split_end; ++split) {
    const int64_t begin = split * kSplit;
    const int64_t padded = round_up(clamp(last - begin, 0, kSplit), kTokens);
    decode_scores(a, item, begin, padded, s);
    SplitSums sums[kBlock];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t valid = clamp(query_at(a, item, item.query_begin + i).visible - begin, 0, kSplit);
      uint16_t* out = s->probabilities + i * 16;
      const auto offset_of = [](int64_t v) { return v * 256; };
      if (valid > 0) sums[i] = softmax_row(s->scores[i], valid, padded, a.scale * kLog2E, out, offset_of);
      else for (int64_t v = 0; v < padded / 16; ++v) store_bf16(out + offset_of(v), zeros());
    }
    for (int64_t dim = 0; dim < a.head_dim; dim += 64) decode_values(a, item, begin, padded, dim, s);
    for (int64_t i = 0; i < count; ++i) {
      if (begin >= query_at(a, item, item.query_begin + i).visible) continue;
      take_split(a, item, item.query_begin + i, split, s->split_sums + i * a.head_dim, sums[i],
                 s->sums + i * a.head_dim, &s->so_far[i]);
    }
  }
}

// --- chunks: row tiles in pairs ----------------------------------------------------------------------------------------

// Joins the half tiles of 16 tokens into tiles of 32, zero where the split ends in between.
void join_values(const AttentionArgs& a, const AttentionItem& item, int64_t begin, int64_t tokens, TileScratch* s) {
  for (int64_t t = 0; t < round_up(tokens, 32); t += kTokens) {
    uint16_t* to = s->values + t / 32 * 32 * a.head_dim + t % 32 * 16;
    const uint16_t* from = t < tokens ? tokens_at(a, item, a.value_cache, begin + t) : nullptr;
    for (int64_t d = 0; d < a.head_dim / 16; ++d) {
      if (from) __builtin_memcpy(to + d * 512, from + d * 256, 512);
      else __builtin_memset(to + d * 512, 0, 512);
    }
  }
}

void chunk_scores(const AttentionArgs& a, const AttentionItem& item, int64_t begin, int64_t tokens, const uint16_t* q,
                  TileScratch* s) {
  constexpr int64_t stride = kSplit * 4;
  const uint16_t* lower = q + kBlock * a.head_dim;
  for (int64_t t = 0; t < tokens; t += 2 * kTokens) {
    const uint16_t* left = tokens_at(a, item, a.key_cache, begin + t);
    const uint16_t* right = t + kTokens < tokens ? tokens_at(a, item, a.key_cache, begin + t + kTokens) : left;
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
    _tile_stored(0, s->scores[0] + t, stride);
    _tile_stored(1, s->scores[0] + t + 16, stride);
    _tile_stored(2, s->scores[16] + t, stride);
    _tile_stored(3, s->scores[16] + t + 16, stride);
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
  const int64_t query = item.query_begin + first;
  const int64_t tokens = clamp(query_at(a, item, query + count - 1).visible - begin, 0, kSplit);
  if (tokens == 0) return;
  const int64_t padded = round_up(tokens, 32);
  chunk_scores(a, item, begin, tokens, s->q + first * a.head_dim, s);
  SplitSums sums[32];
  for (int64_t i = 0; i < 32; ++i) {
    uint16_t* out = s->probabilities + i / kBlock * kBlock * kSplit + i % kBlock * 32;
    const auto offset_of = [](int64_t v) { return v / 2 * 512 + v % 2 * 16; };
    const int64_t valid = i < count ? clamp(query_at(a, item, query + i).visible - begin, 0, kSplit) : 0;
    if (valid > 0) sums[i] = softmax_row(s->scores[i], valid, padded, a.scale * kLog2E, out, offset_of);
    else for (int64_t v = 0; v < padded / 16; ++v) store_bf16(out + offset_of(v), zeros());
  }
  chunk_values(a, tokens, s);
  for (int64_t i = 0; i < count; ++i) {
    if (begin >= query_at(a, item, query + i).visible) continue;
    take_split(a, item, query + i, split, s->split_sums + i * a.head_dim, sums[i], s->sums + (first + i) * a.head_dim,
               &s->so_far[first + i]);
  }
}

void chunk_attend(const AttentionArgs& a, const AttentionItem& item, TileScratch* s) {
  const int64_t count = item.query_end - item.query_begin;
  gather_queries(a, item, s);
  if (count % 32 != 0 && count % 32 <= 16)  // the lower tile of the last pair
    __builtin_memset(s->q + round_up(count, 16) * a.head_dim, 0, static_cast<size_t>(16 * a.head_dim) * 2);
  configure(16, 16);
  const int64_t last = query_at(a, item, item.query_end - 1).visible;
  for (int64_t split = item.split_begin; split < item.split_end; ++split) {
    join_values(a, item, split * kSplit, clamp(last - split * kSplit, 0, kSplit), s);
    for (int64_t first = 0; first < count; first += 32) chunk_split(a, item, split, first, s);
  }
}

void tile_attend(const AttentionArgs& a, const AttentionItem& item, std::byte* scratch) {
  auto* s = reinterpret_cast<TileScratch*>(scratch);
  const int64_t count = item.query_end - item.query_begin;
  if (count <= kBlock && !a.deterministic) decode_attend(a, item, s);
  else chunk_attend(a, item, s);
  _tile_release();
  if (item.partial) return;
  for (int64_t i = 0; i < count; ++i)
    write_result(a, query_at(a, item, item.query_begin + i), s->sums + i * a.head_dim, s->so_far[i]);
}

}  // namespace
}  // namespace pellucid
