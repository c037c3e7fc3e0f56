// What the kernels work on, and the table of kernels that each instruction level fills. One idea: a weight is packed once,
// at load, into one layout that every level can read, so only the code depends on the processor and never the data.
//
// Columns are output features (N), K is the input. Columns are packed in blocks of 16, and N is padded to a multiple of 32
// (a pair of blocks), K to a multiple of 64, with zeros.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pellucid {

constexpr int64_t kBlock = 16;      // columns of a block; rows of a tile
constexpr int64_t kGroup = 32;      // inputs that share a scale in the grouped formats
constexpr int64_t kStepBytes = 64;  // one row of a tile: 64 int8 or 32 bfloat16 values

// Slices of the inputs that share a scale in products of many rows: three int8 tiles deep (csrc/slices.h).
constexpr int64_t kSliceInputs = 192;
constexpr int64_t kSliceBytes = 3 * 1024;
constexpr int64_t num_slices(int64_t k_padded) { return (k_padded + kSliceInputs - 1) / kSliceInputs; }

// How weights lie in memory. Inside a block, in order of k:
//   bf16     tiles of 32 inputs: [16 pairs][16 columns][2] bfloat16
//   int8     tiles of 64 inputs: [16 quads][16 columns][4] bytes, value + 128; one scale per column
//   q8       groups of 32: [8 quads][16 columns][4] bytes, value + 128; then 16 float16 scales
//   q4       groups of 32: [4][16 columns][4] bytes, low nibbles are quads 0..3, high nibbles quads 4..7; 16 float16 scales;
//            value = scale * (nibble - 8)
//   q4_min   the same and 16 float16 minima; value = scale * nibble + minimum
//   q5_min   after the nibbles [16 columns][4] bytes, whose bit j is the fifth one of quad j; then as q4_min
//   q6       after the nibbles twice [16 columns][4] bytes, of quads 0..3 and 4..7, whose bits 2j and 2j + 1 are the upper
//            ones of the j-th; then 16 float16 scales of inputs 0..15 and 16 of inputs 16..31; value = scale * (bits - 32)
enum class Format : int32_t { bf16, int8, q8, q4, q4_min, q5_min, q6 };

// Of a group, in front of its constants.
constexpr int64_t group_value_bytes(Format format) {
  return format == Format::q8 ? 512 : format == Format::q6 ? 384 : format == Format::q5_min ? 320 : 256;
}
constexpr int64_t group_bytes(Format format) {
  return group_value_bytes(format) + (format == Format::q8 || format == Format::q4 ? 32 : 64);
}
constexpr int64_t block_bytes(Format format, int64_t k_padded) {
  return format == Format::bf16   ? k_padded * kBlock * 2
         : format == Format::int8 ? k_padded * kBlock
                                  : k_padded / kGroup * group_bytes(format);
}
constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Half-open.
struct Range {
  int64_t begin, end;
};

struct Weight {
  Format format;
  int64_t n, k;                // as the model sees it
  int64_t n_padded, k_padded;  // as packed
  const uint8_t* data;
  const float* column_scale;   // int8: one per column, else null
  float unit;                  // grouped formats: a power of 16; no value reaches 1.99 units

  const uint8_t* block(int64_t index) const { return data + index * block_bytes(format, k_padded); }
};

// How activations are prepared for a product.
//   bf16    rows in tiles [row block][k step][16 rows][32] of bfloat16
//   quad16  the same, but of every four inputs the two in the middle change places: the order in which grouped weights unpack
//   row8    rows in tiles [row block][k step][16 rows][64] of int8, one scale per row
//   group8  [row][k] int8, one scale per row and group of 32
//   slice8  rows in tiles [row block][slice][16 rows][64] of int8, one scale per row and slice, up to an even number of blocks
enum class Preparation : int32_t { bf16, quad16, row8, group8, slice8 };

struct Panel {
  Preparation preparation;
  int64_t rows, k_padded;
  uint8_t* data;   // panel_bytes()
  float* scale;    // row8: [rows]; group8: [rows][k / 32]; slice8: [row block][slice][16 rows]
  int32_t* sum;    // of the quantised values; row8: [rows]; group8: [rows][k / 32][2], of a group's first half and of all
};

// Of one row.
constexpr int64_t panel_bytes(Preparation preparation, int64_t k_padded) {
  return preparation == Preparation::slice8                                          ? num_slices(k_padded) * kSliceBytes / kBlock
         : preparation == Preparation::bf16 || preparation == Preparation::quad16 ? 2 * k_padded
                                                                                     : k_padded;
}
constexpr int64_t panel_scales(Preparation preparation, int64_t k_padded) {
  return preparation == Preparation::slice8 ? num_slices(k_padded) : preparation == Preparation::group8 ? k_padded / kGroup : 1;
}
constexpr int64_t sums_per_scale(Preparation preparation) { return preparation == Preparation::group8 ? 2 : 1; }

enum class Dtype : int32_t { f32, bf16 };

struct PrepareArgs {
  const void* x;  // [rows][ld] of `dtype`
  Dtype dtype;
  int64_t ld, k;
  const float* norm_weight;  // null: no RMSNorm
  float epsilon;
  Panel panel;
};

enum class Store : int32_t {
  f32,       // y = product
  bf16,      // y = product, rounded
  add,       // y += product, f32: the residual stream
  silu_mul,  // blocks alternate gate, up; y[column] = silu(gate) * up, f32, half as many columns
};

struct MatmulArgs {
  Weight weight;
  Panel panel;
  const float* bias;  // [n] or null
  Store store;
  void* y;  // [rows][ld]
  int64_t ld;
};

// The cache of one layer: [block][kv head] then, for every 16 tokens of the block, a piece of
//   bf16  keys    [head_dim / 32][16 pairs of dimensions][16 tokens][2]: tiles for query x key
//         values  [head_dim / 16][8 pairs of tokens][16 dimensions][2]: half tiles for probability x value
//   int8  keys    [head_dim / 4][16 tokens][4 dimensions] bytes, value + 128; then 16 float scales, one per token
//         values  [head_dim / 16][4][16 dimensions][4 tokens] bytes, value + 128; then 16 float scales, one per token
// so no kernel ever transposes. head_dim is a multiple of 32 and block_size a multiple of 16.
enum class CacheFormat : int32_t { bf16, int8 };
constexpr int64_t kTokens = 16;
constexpr int64_t piece_bytes(CacheFormat format, int64_t head_dim) {
  return kTokens * (format == CacheFormat::bf16 ? 2 * head_dim : head_dim + 4);
}

struct RopeArgs {
  const float* qkv;   // [rows][ld]: query heads, key heads, value heads
  int64_t ld;
  int64_t num_heads, num_kv_heads, head_dim;
  const float* q_norm;  // [head_dim] or null: RMSNorm of each head before the rotation
  const float* k_norm;
  float epsilon;
  const float* cos_table;  // [positions][head_dim / 2]
  const float* sin_table;
  const int32_t* positions;  // [rows]
  const int64_t* slots;      // [rows]
  uint16_t* q_out;           // [rows][num_heads][head_dim] bfloat16
  std::byte* key_cache;
  std::byte* value_cache;
  CacheFormat cache_format;
  int64_t block_size;
};

struct Sequence {       // one chunk of one sequence in a step
  int64_t row_begin;    // its rows in the flat batch
  int64_t num_rows;
  int64_t context;      // tokens attended by its last row, that row's own included
  const int32_t* block_table;
};

struct AttentionArgs {
  const uint16_t* q;  // [rows][num_heads][head_dim]
  const std::byte* key_cache;
  const std::byte* value_cache;
  CacheFormat cache_format;
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  float scale;
  float* out;  // [rows][num_heads * head_dim]
  int64_t ld;
  bool deterministic;  // one path for decodes and chunks: the tiles sum 16 tokens in another order than 32
};

// Attention of some query rows of one kv head over the context or a part of it, in splits of kSplit tokens. Parts are merged
// in order, and where they begin depends on the plan but not on the number of threads: nor does the result of a row. If
// `deterministic`, it does not depend on the batch either: then every split has its own softmax, merged in order.
constexpr int64_t kSplit = 512;
constexpr int64_t kItemRows = 384;  // most query rows (row x head of the group) in one item

struct AttentionItem {
  const Sequence* sequence;
  int64_t kv_head;
  int64_t query_begin, query_end;  // in flattened rows: (row of the sequence) * group + head of the group
  int64_t begin, end;              // tokens of the context
  float* partial;  // null: write the result. Otherwise [query][part][head_dim + 2]: sums, maximum, total per part
  int64_t num_parts, part_tokens;  // of the whole context, if `partial`; a part is cut into splits from its beginning
};

// How one row is sampled: the filters apply in the order temperature, top-k, top-p, min-p, and are off at 0, 1 and 0.
struct SampleRow {
  float temperature;  // 0: the first of the largest scores
  float top_p, min_p;
  int32_t top_k;
  double uniform;  // in [0, 1)
};
constexpr int64_t kMaxVocabulary = int64_t{1} << 19;

struct Kernels {
  const char* name;
  bool has_tiles;  // quad16 panels may meet grouped weights
  void (*prepare)(const PrepareArgs&, Range rows, std::byte* scratch);
  void (*matmul)(const MatmulArgs&, Range rows, Range pairs, std::byte* scratch);  // rows from a multiple of 16 on
  void (*rope)(const RopeArgs&, Range rows);
  // `next` is what this thread will attend afterwards, or null: its keys and values can be asked for early.
  void (*attend)(const AttentionArgs&, const AttentionItem&, const AttentionItem* next, std::byte* scratch);
  void (*merge)(const AttentionArgs&, const AttentionItem&, int64_t query_begin, int64_t query_end);
  void (*dequantize_row)(const Weight&, int64_t row, float* out);
  void (*rms_norm)(const void* x, Dtype dtype, const float* weight, float epsilon, int64_t k, void* y);
  void (*silu_mul)(const void* gate, const void* up, Dtype dtype, int64_t count, void* y);
  int64_t (*sample)(const SampleRow&, const float* scores, int64_t count, std::byte* scratch);  // at most kMaxVocabulary
};

const Kernels& kernels_portable();
#if defined(__x86_64__)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
const Kernels& kernels_amx();
#endif

}  // namespace pellucid
