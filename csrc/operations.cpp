#include "operations.h"

#include <algorithm>

namespace pellucid {

const Kernels& kernels_for(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::amx: return kernels_amx();
    case Isa::avx512: return kernels_avx512();
    case Isa::avx2: return kernels_avx2();
    case Isa::portable: break;
  }
#endif
  (void)isa;
  return kernels_portable();
}

Preparation preparation_for(const Kernels& kernels, Format format, int64_t rows, bool deterministic, bool sliced) {
  if (format == Format::bf16) return Preparation::bf16;
  if (format == Format::int8) return Preparation::row8;
  if (!kernels.has_tiles) return Preparation::group8;
  if (deterministic) return Preparation::quad16;
  if (rows >= kSliceRows && sliced) return Preparation::slice8;
  return rows >= kTileRows ? Preparation::quad16 : Preparation::group8;
}

void PanelRoom::reserve(int64_t rows, int64_t widest_k) {
  widest_k_ = round_up(widest_k, 64);
  row_bytes_ = std::max(panel_bytes(Preparation::bf16, widest_k_), panel_bytes(Preparation::slice8, widest_k_));
  const int64_t whole = round_up(rows, 2 * kBlock);
  data_.reserve(static_cast<size_t>(whole * row_bytes_));
  const auto scales = static_cast<size_t>(whole * panel_scales(Preparation::group8, widest_k_));
  scale_.reserve(scales * sizeof(float));
  sum_.reserve(2 * scales * sizeof(int32_t));
}

Panel PanelRoom::panel(Preparation preparation, int64_t rows, int64_t k_padded, int64_t first_row) const {
  const int64_t skipped = first_row * (widest_k_ / kGroup - panel_scales(preparation, k_padded));
  return {preparation,
          rows,
          k_padded,
          data_.as<uint8_t>() + first_row * (row_bytes_ - panel_bytes(preparation, k_padded)),
          scale_.as<float>() + skipped,
          sum_.as<int32_t>() + skipped * sums_per_scale(preparation)};
}

void prepare_phase(Team& team, const Kernels& kernels, const RowPlan& plan, const PrepareArgs& args) {
  const Range rows = plan.rows_of(team);
  if (rows.begin < rows.end) kernels.prepare(args, rows, team.scratch);
}

void matmul_phase(Team& team, const Kernels& kernels, const RowPlan& plan, const MatmulArgs& args) {
  const int64_t num_pairs = args.weight.n_padded / (2 * kBlock);
  const Range rows = plan.own_rows() ? plan.rows_of(team) : Range{0, args.panel.rows};
  const Range pairs = plan.own_rows() ? Range{0, num_pairs} : share_of(num_pairs, team);
  if (rows.begin < rows.end && pairs.begin < pairs.end) kernels.matmul(args, rows, pairs, team.scratch);
}

void rope_phase(Team& team, const Kernels& kernels, const RowPlan& plan, const RopeArgs& args) {
  const Range rows = plan.rows_of(team);
  if (rows.begin < rows.end) kernels.rope(args, rows);
}

AttentionSchedule::AttentionSchedule(const std::vector<Sequence>& sequences, const AttentionShape& shape, int num_threads) {
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  int64_t decodes = 0, chunk_queries = 0, partial_floats = 0;
  for (const Sequence& s : sequences) {
    decodes += s.num_rows * group <= kBlock;
    chunk_queries += s.num_rows * shape.num_heads;
  }
  // Enough items that no thread waits long for another; a context is shared only when there are few sequences.
  const int64_t shares = decodes == 0 ? 1 : std::max<int64_t>(1, 8 * num_threads / (decodes * shape.num_kv_heads));
  // Large items read keys and values less often, small ones keep every thread busy to the end.
  int64_t item_rows = kItemRows;
  while (item_rows > kItemRows / 8 && chunk_queries < 6 * num_threads * item_rows) item_rows /= 2;
  for (const Sequence& s : sequences) {
    const int64_t queries = s.num_rows * group, splits = (s.context + kSplit - 1) / kSplit;
    const bool decode = queries <= kBlock;
    // A chunk that makes few items is cut along its context too, so that every key and value is read for as many rows as an
    // item takes. Where, the number of threads must not decide. A deterministic chunk is not: every row would be merged from
    // all its splits.
    const int64_t blocks = (queries + kItemRows - 1) / kItemRows;
    const int64_t pieces = decode ? shares : shape.deterministic ? 1 : kChunkItems / (shape.num_kv_heads * blocks);
    const int64_t item_splits = pieces <= 1 ? splits : (splits + pieces - 1) / pieces;
    const int64_t part_splits = decode ? 1 : item_splits, parts = (splits + part_splits - 1) / part_splits;
    for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
      if (item_splits == splits) {
        add_chunk(&s, head, queries, item_rows);
      } else {
        add_shared(&s, head, queries, item_splits, {partial_floats, parts, part_splits});
        partial_floats += queries * parts * (shape.head_dim + 2);
      }
    }
  }
  // The longest first, so that the last ones to finish are short. Stable: the order is a function of the plan alone.
  std::stable_sort(items_.begin(), items_.end(), [](const AttentionItem& a, const AttentionItem& b) {
    const auto cost = [](const AttentionItem& i) { return (i.query_end - i.query_begin) * (i.split_end - i.split_begin); };
    return cost(a) > cost(b);
  });
  partials_.reserve(static_cast<size_t>(partial_floats) * sizeof(float));
  // Until here `partial` held an offset, because the room was not there yet.
  for (auto* list : {&items_, &merges_})
    for (AttentionItem& item : *list)
      if (item.partial) item.partial = partials_.as<float>() + (reinterpret_cast<intptr_t>(item.partial) - 1);
}

namespace {

// How many splits of its context the query sees.
int64_t visible_splits(const Sequence& sequence, int64_t queries, int64_t query) {
  const int64_t group = queries / sequence.num_rows;
  return (sequence.context - sequence.num_rows + query / group + kSplit) / kSplit;
}

}  // namespace

void AttentionSchedule::add_chunk(const Sequence* sequence, int64_t kv_head, int64_t queries, int64_t item_rows) {
  for (int64_t end = queries; end > 0; end -= std::min(end, item_rows)) {
    const int64_t begin = std::max<int64_t>(0, end - item_rows);
    items_.push_back({sequence, kv_head, begin, end, 0, visible_splits(*sequence, queries, end - 1), nullptr, 0, 0});
  }
}

void AttentionSchedule::add_shared(const Sequence* sequence, int64_t kv_head, int64_t queries, int64_t item_splits,
                                   const Parts& parts) {
  auto* partial = reinterpret_cast<float*>(static_cast<intptr_t>(parts.at + 1));
  const auto add = [&](std::vector<AttentionItem>& list, int64_t begin, int64_t end, Range splits) {
    list.push_back({sequence, kv_head, begin, end, splits.begin, splits.end, partial, parts.count, parts.splits});
  };
  const int64_t blocks = (queries + kItemRows - 1) / kItemRows;
  const int64_t rows = round_up((queries + blocks - 1) / blocks, 2 * kBlock);  // whole pairs of row tiles
  for (int64_t begin = 0; begin < queries; begin += rows) {
    const int64_t end = std::min(begin + rows, queries), splits = visible_splits(*sequence, queries, end - 1);
    for (int64_t split = 0; split < splits; split += item_splits)
      add(items_, begin, end, {split, std::min(split + item_splits, splits)});
  }
  for (int64_t begin = 0; begin < queries; begin += kMergeQueries)
    add(merges_, begin, std::min(begin + kMergeQueries, queries), {0, 0});
}

void AttentionSchedule::attend_phase(Team& team, const Kernels& kernels, const AttentionArgs& args) const {
  const auto count = static_cast<int64_t>(items_.size());
  const auto item = [&](int64_t i) { return i < count ? &items_[static_cast<size_t>(i)] : nullptr; };
  for (int64_t i = team.ticket(); i < count;) {
    const int64_t next = team.ticket();
    kernels.attend(args, *item(i), item(next), team.scratch);
    i = next;
  }
}

void AttentionSchedule::merge_phase(Team& team, const Kernels& kernels, const AttentionArgs& args) const {
  const Range share = share_of(static_cast<int64_t>(merges_.size()), team);
  for (int64_t i = share.begin; i < share.end; ++i) {
    const AttentionItem& item = merges_[static_cast<size_t>(i)];
    kernels.merge(args, item, item.query_begin, item.query_end);
  }
}

}  // namespace pellucid
