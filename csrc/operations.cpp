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

AttentionSchedule::AttentionSchedule(const std::vector<Sequence>& sequences, const AttentionShape& shape, int num_threads)
    : group_(shape.num_heads / shape.num_kv_heads), kv_heads_(shape.num_kv_heads), head_dim_(shape.head_dim) {
  int64_t decodes = 0, chunk_items = 0;
  for (const Sequence& s : sequences) {
    const int64_t queries = s.num_rows * group_;
    if (queries <= kBlock) ++decodes;
    else chunk_items += kv_heads_ * ((queries + kItemRows - 1) / kItemRows);
  }
  // A context is shared by threads only when there are few sequences.
  const int64_t shares = decodes == 0 ? 1 : std::max<int64_t>(1, 8 * num_threads / (decodes * kv_heads_));
  const bool plenty = chunk_items >= kItemsPerThread * num_threads;
  for (const Sequence& s : sequences) {
    const int64_t queries = s.num_rows * group_;
    if (queries <= kBlock) add_decode(&s, queries, shares);
    else add_chunk(&s, queries, shape.deterministic, plenty ? 1 : num_threads);
  }
  // The longest first, so that the last ones to finish are short. Stable: the order is a function of the plan alone.
  std::stable_sort(items_.begin(), items_.end(), [](const AttentionItem& a, const AttentionItem& b) {
    const auto cost = [](const AttentionItem& i) { return (i.query_end - i.query_begin) * (i.end - i.begin); };
    return cost(a) > cost(b);
  });
  partials_.reserve(static_cast<size_t>(partial_floats_) * sizeof(float));
  for (auto* list : {&items_, &merges_})
    for (AttentionItem& item : *list)
      if (item.partial) item.partial = partials_.as<float>() + (reinterpret_cast<intptr_t>(item.partial) - 1);
}

void AttentionSchedule::add_decode(const Sequence* sequence, int64_t queries, int64_t shares) {
  const int64_t splits = (sequence->context + kSplit - 1) / kSplit, item_splits = (splits + shares - 1) / shares;
  add_items(sequence, queries, queries, item_splits * kSplit, kSplit);
}

// Every item of a chunk reads its keys and values again, so they are as large as keeps `num_threads` threads equally busy.
// Few rows of few heads make items by cutting the context instead; where, the number of threads must not decide. A
// deterministic chunk is not cut: every row would be merged from all its splits.
void AttentionSchedule::add_chunk(const Sequence* sequence, int64_t queries, bool deterministic, int num_threads) {
  const int64_t splits = (sequence->context + kSplit - 1) / kSplit;
  const bool cut = queries <= kItemRows / 2 && !deterministic;
  const int64_t parts = cut ? std::clamp<int64_t>(kChunkItems / kv_heads_, 1, splits) : 1;
  const int64_t tokens = round_up((sequence->context + parts - 1) / parts, kCut);
  const auto rows_of = [&](int64_t blocks) { return round_up((queries + blocks - 1) / blocks, 2 * kBlock); };
  const auto even = [&](int64_t items) { return items % num_threads == 0 || items >= kItemsPerThread * num_threads; };
  int64_t blocks = (queries + kItemRows - 1) / kItemRows;
  while (!even(kv_heads_ * parts * blocks) && rows_of(blocks) > 2 * kBlock) ++blocks;
  add_items(sequence, queries, rows_of(blocks), tokens, tokens);
}

void AttentionSchedule::add_items(const Sequence* sequence, int64_t queries, int64_t item_rows, int64_t item_tokens,
                                  int64_t part_tokens) {
  const bool shared = item_tokens < sequence->context;
  const int64_t parts = shared ? (sequence->context + part_tokens - 1) / part_tokens : 0;
  for (int64_t head = 0; head < kv_heads_; ++head) {
    // The room is not there yet: `partial` holds an offset, and one more so that it is not null.
    auto* partial = shared ? reinterpret_cast<float*>(static_cast<intptr_t>(partial_floats_ + 1)) : nullptr;
    partial_floats_ += queries * parts * (head_dim_ + 2);
    const auto add = [&](std::vector<AttentionItem>& list, int64_t first, int64_t last, Range tokens) {
      list.push_back({sequence, head, first, last, tokens.begin, tokens.end, partial, parts, part_tokens});
    };
    for (int64_t first = 0; first < queries; first += item_rows) {
      const int64_t last = std::min(first + item_rows, queries);
      const int64_t seen = sequence->context - sequence->num_rows + (last - 1) / group_ + 1;
      for (int64_t token = 0; token < seen; token += item_tokens)
        add(items_, first, last, {token, std::min(token + item_tokens, seen)});
    }
    for (int64_t first = 0; shared && first < queries; first += kMergeQueries)
      add(merges_, first, std::min(first + kMergeQueries, queries), {0, 0});
  }
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
