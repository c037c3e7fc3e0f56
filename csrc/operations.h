// The operations that a model is made of, as phases of one job: every thread of the team calls them together and takes its
// share. One idea: a phase never waits; whoever composes phases puts a barrier wherever one reads what another wrote.
#pragma once

#include <vector>

#include "isa.h"
#include "kernels.h"
#include "memory.h"
#include "thread_pool.h"

namespace pellucid {

const Kernels& kernels_for(Isa isa);

// This thread's share of [0, count).
inline Range share_of(int64_t count, const Team& team) {
  return {count * team.rank / team.size, count * (team.rank + 1) / team.size};
}

// How the rows of a batch are divided. Few rows: a product's columns are shared, so each weight is read by one thread, and
// whatever works on rows alone is shared by rows, with barriers in between. Many rows: every thread keeps its own rows
// through all products, so activations stay in its cache and no barrier is needed but around attention.
class RowPlan {
 public:
  RowPlan(int64_t rows, int num_threads) : rows_(rows), own_rows_(rows >= kOwnRows * num_threads) {}

  bool own_rows() const { return own_rows_; }
  Range rows_of(const Team& team) const {
    if (!own_rows_) return share_of(rows_, team);
    const Range tiles = share_of((rows_ + kBlock - 1) / kBlock, team);
    return {tiles.begin * kBlock, tiles.end * kBlock < rows_ ? tiles.end * kBlock : rows_};
  }
  // Ends a phase on rows, or a product: the others' results are needed only where the work is not by own rows.
  void barrier(Team& team) const {
    if (!own_rows_) team.barrier();
  }

 private:
  // Below this many rows per thread, unpacking the weights once per thread costs more than it saves.
  static constexpr int64_t kOwnRows = 64;
  int64_t rows_;
  bool own_rows_;
};

// From how many rows on grouped weights become tiles instead of being multiplied group by group: where both took equally
// long on a Sapphire Rapids core.
constexpr int64_t kTileRows = 9;
// And from how many on they become int8 ones. Fewer rows wait for the weights, and bfloat16 loses less.
constexpr int64_t kSliceRows = 65;

// Which weights slices.h makes int8 tiles of.
constexpr bool can_be_sliced(Format format) {
  return format == Format::q8 || format == Format::q4 || format == Format::q4_min;
}

// `sliced`: the weight can be, and its product bears activations of 8 bits per row and slice.
Preparation preparation_for(const Kernels& kernels, Format format, int64_t rows, bool deterministic, bool sliced);

// Room for one prepared panel; products one after another share it.
class PanelRoom {
 public:
  // Before the team works: room for panels of up to so many rows and inputs.
  void reserve(int64_t rows, int64_t widest_k);

  // A panel in that room. A thread that owns the rows from `first_row` on runs ahead of the others: its rows then lie where
  // no panel of another width has another thread's rows.
  Panel panel(Preparation preparation, int64_t rows, int64_t k_padded, int64_t first_row = 0) const;

 private:
  int64_t widest_k_ = 0, row_bytes_ = 0;
  Buffer data_, scale_, sum_;
};

void prepare_phase(Team& team, const Kernels& kernels, const RowPlan& plan, const PrepareArgs& args);
void matmul_phase(Team& team, const Kernels& kernels, const RowPlan& plan, const MatmulArgs& args);
void rope_phase(Team& team, const Kernels& kernels, const RowPlan& plan, const RopeArgs& args);

struct AttentionShape {
  int64_t num_heads, num_kv_heads, head_dim;
  bool deterministic;
};

// The items of one attention call, made once per step: every layer has the same shape.
class AttentionSchedule {
 public:
  AttentionSchedule(const std::vector<Sequence>& sequences, const AttentionShape& shape, int num_threads);
  AttentionSchedule(std::vector<Sequence>&&, const AttentionShape&, int) = delete;  // items point at sequences

  // All items, by ticket; the caller resets the tickets before. Then, after a barrier, the shared contexts are merged.
  void attend_phase(Team& team, const Kernels& kernels, const AttentionArgs& args) const;
  void merge_phase(Team& team, const Kernels& kernels, const AttentionArgs& args) const;
  bool has_merges() const { return !merges_.empty(); }

 private:
  void add_decode(const Sequence* sequence, int64_t queries, int64_t shares);
  void add_chunk(const Sequence* sequence, int64_t queries, bool deterministic, int num_threads);
  // All heads, in items of so many queries and tokens; partial results of so many tokens each are merged.
  void add_items(const Sequence* sequence, int64_t queries, int64_t item_rows, int64_t item_tokens, int64_t part_tokens);

  static constexpr int64_t kItemsPerThread = 4;  // so many, and no thread waits long for another
  static constexpr int64_t kChunkItems = 6;      // that a chunk of few rows is cut into, over all heads
  static constexpr int64_t kCut = 64;            // parts of a chunk's context begin at multiples of so many tokens
  static constexpr int64_t kMergeQueries = 64;

  int64_t group_, kv_heads_, head_dim_;
  int64_t partial_floats_ = 0;
  std::vector<AttentionItem> items_;
  std::vector<AttentionItem> merges_;
  Buffer partials_;
};

}  // namespace pellucid
