#include "step_rows.h"

namespace pellucid {
namespace {

uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

double uniform_at(uint64_t seed, int64_t position) {
  return static_cast<double>(mixed(mixed(seed) + static_cast<uint64_t>(position)) >> 11) * 0x1p-53;
}

int64_t StepRows::fill(const std::vector<Chunk>& chunks, const SequenceLines& lines, const Bounds& bounds) {
  tokens_.clear();
  positions_.clear();
  slots_.clear();
  sampled_.clear();
  rules_.clear();
  sequences_.clear();
  for (size_t i = 0; i < chunks.size(); ++i) {
    const auto [line, start, end, samples] = chunks[i];
    const int32_t* table = lines.tables + line * lines.table_stride;
    const bool known = 0 <= start && start < end && end <= lines.known[line] && end <= bounds.positions &&
                       end <= lines.num_blocks[line] * lines.block_size && end < lines.token_stride;
    if (!known) return static_cast<int64_t>(i);
    sequences_.push_back({static_cast<int64_t>(tokens_.size()), end - start, end, table});
    for (int64_t position = start; position < end; ++position) {
      const int32_t token = lines.tokens[line * lines.token_stride + position];
      const int64_t slot = table[position / lines.block_size] * lines.block_size + position % lines.block_size;
      if (token < 0 || token >= bounds.vocabulary || slot < 0 || slot >= bounds.slots) return static_cast<int64_t>(i);
      tokens_.push_back(token);
      positions_.push_back(static_cast<int32_t>(position));
      slots_.push_back(slot);
    }
    if (!samples) continue;
    const SampleRule& rule = lines.rules[line];
    sampled_.push_back(static_cast<int32_t>(tokens_.size()) - 1);
    rules_.push_back({rule.temperature, rule.top_p, rule.min_p, rule.top_k, uniform_at(rule.seed, end)});
  }
  return -1;
}

const std::vector<int64_t>& StepRows::step(Decoder& decoder, const std::vector<Chunk>& chunks, const SequenceLines& lines) {
  drawn_.resize(sampled_.size());
  decoder.step({static_cast<int64_t>(tokens_.size()), tokens_.data(), positions_.data(), slots_.data(), sequences_,
                static_cast<int64_t>(sampled_.size()), sampled_.data(), nullptr, rules_.data(), drawn_.data()});
  size_t next = 0;
  for (const auto& [line, start, end, samples] : chunks) {
    if (!samples) continue;
    lines.tokens[line * lines.token_stride + end] = static_cast<int32_t>(drawn_[next++]);
    lines.known[line] = end + 1;
  }
  return drawn_;
}

}  // namespace pellucid
