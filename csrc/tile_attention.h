// Paged attention on AMX tiles: scores and weighted values are products of bfloat16 tiles, the softmax between them is
// AVX-512. Up to 16 queries (a decode: the heads of one group) read the cache where it lies; more queries (a chunk,
// chunk_attention.h) first join the values of 32 tokens into whole tiles, once per item and split. The two round
// differently, so a deterministic decode takes the way of a chunk. A decode over bytes is the vectors' (vector_attention.h):
// it does not need tiles to be as fast as memory.
#pragma once

#include "attention.h"
#include "chunk_attention.h"
#include "tiles.h"
#include "vector_attention.h"

namespace pellucid {
namespace {

// Scores of a row lie this many floats apart: a power of two would put all rows of a tile into the same cache sets.
constexpr int64_t kScoreStride = kSplit + 16;

struct alignas(64) DecodeScratch {
  uint16_t q[kBlock * kMaxHeadDim];      // [head_dim / 32][16][32]
  float scores[kBlock * kScoreStride];
  uint16_t probabilities[kBlock * kSplit];  // [kSplit / 16][16][16]
  float split_sums[kBlock * kMaxHeadDim];   // [query][head_dim]
  float sums[kBlock * kMaxHeadDim];
  SplitSums so_far[kBlock];
  int64_t visible[kBlock];  // tokens that each query sees
  SplitTokens tokens;
};

// Scores of query `i` of the item to probabilities, from row `row` of the scores; zero where it sees nothing of the split.
template <int64_t kRun, int64_t kSecond>
SplitSums probabilities_of(const AttentionArgs& a, int64_t i, int64_t row, int64_t begin, int64_t padded, uint16_t* out,
                           DecodeScratch* s) {
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

void decode_scores(const AttentionArgs& a, int64_t padded, PiecesAhead* ahead, DecodeScratch* s) {
  const int64_t pieces = padded / kTokens;
  for (int64_t i = 0; i < pieces; ++i) {
    ahead->prefetch_one(s->tokens, i, pieces);
    _tile_zero(0);
    for (int64_t d = 0; d < a.head_dim; d += 32) {
      _tile_loadd(4, s->q + d * kBlock, 64);
      _tile_loadd(6, halves(s->tokens.keys[i]) + d * kTokens, 64);
      _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, s->scores + i * kTokens, kScoreStride * 4);
  }
}

// Up to four blocks of 16 dimensions from `dim` on.
void decode_values(const AttentionArgs& a, int64_t padded, int64_t dim, DecodeScratch* s) {
  const int64_t blocks = clamp((a.head_dim - dim) / 16, 0, 4);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < padded / kTokens; ++i) {
    const uint16_t* values = halves(s->tokens.values[i]) + dim * kTokens;
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

void decode_attend(const AttentionArgs& a, const AttentionItem& item, const AttentionItem* next, DecodeScratch* s) {
  const int64_t count = item.query_end - item.query_begin;
  PiecesAhead ahead(a, next);
  gather_queries(a, item, 1, s->q, s->visible);
  configure_decode(static_cast<int>(count));
  for (int64_t begin = item.begin; begin < item.end; begin += kSplit) {
    const int64_t padded = round_up(clamp(s->visible[count - 1] - begin, 0, split_tokens(item, begin)), kTokens);
    find_tokens(a, item, begin, padded, &s->tokens);
    decode_scores(a, padded, &ahead, s);
    SplitSums sums[kBlock];
    for (int64_t i = 0; i < count; ++i)
      sums[i] = probabilities_of<512, 256>(a, i, i, begin, padded, s->probabilities + i * 16, s);
    for (int64_t dim = 0; dim < a.head_dim; dim += 64) decode_values(a, padded, dim, s);
    for (int64_t i = 0; i < count; ++i) {
      if (begin >= s->visible[i]) continue;
      take_split(a, item, item.query_begin + i, begin, s->split_sums + i * a.head_dim, sums[i],
                 s->sums + i * a.head_dim, &s->so_far[i]);
    }
  }
  write_results(a, item, s->sums, s->so_far);
}

void tile_attend(const AttentionArgs& a, const AttentionItem& item, const AttentionItem* next, std::byte* scratch) {
  // The whole chunk decides, not how many of its queries this item has: else the number of threads would.
  const bool decode = item.sequence->num_rows * (a.num_heads / a.num_kv_heads) <= kBlock && !a.deterministic;
  if (decode && a.cache_format == CacheFormat::int8) return vector_attend<true>(a, item, next, scratch);
  if (decode) decode_attend(a, item, next, reinterpret_cast<DecodeScratch*>(scratch));
  else chunk_attend(a, item, next, reinterpret_cast<ChunkScratch*>(scratch));
  _tile_release();
}

}  // namespace
}  // namespace pellucid
