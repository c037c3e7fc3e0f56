#include "decoder.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace pellucid {
namespace {

int64_t now_nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000 + t.tv_nsec;
}

std::span<const Weight> one(const Weight& weight) { return {&weight, 1}; }

}  // namespace

Decoder::Decoder(ThreadPool& pool, const Kernels& kernels, DecoderShape shape, Weight embedding, Weight head,
                 const float* final_norm, const float* cos_table, const float* sin_table)
    : pool_(pool),
      kernels_(kernels),
      shape_(shape),
      embedding_(embedding),
      head_(head),
      final_norm_(final_norm),
      cos_table_(cos_table),
      sin_table_(sin_table) {}

void Decoder::step(const StepBatch& batch) {
  if (batch.rules && head_.n > kMaxVocabulary) throw std::invalid_argument("the vocabulary is too large to be sampled from");
  reserve(batch.num_rows, batch.num_sampled);
  if (!batch.logits) logits_.reserve(static_cast<size_t>(batch.num_sampled * head_.n) * sizeof(float));
  float* scores = batch.logits ? batch.logits : logits_.as<float>();
  const AttentionSchedule schedule(
      batch.sequences, {shape_.num_heads, shape_.num_kv_heads, shape_.head_dim, shape_.deterministic}, pool_.size());
  const RowPlan plan(batch.num_rows, pool_.size());
  phase_seconds_.fill(0.0);
  phase_began_ = now_nanoseconds();
  pool_.run(
      [&](Team& team) {
        embed(team, plan, batch);
        for (const DecoderLayer& layer : layers_) {
          attention_block(team, plan, layer, batch, schedule);
          mlp_block(team, plan, layer, batch.num_rows);
        }
        team.barrier();
        if (batch.num_sampled > 0) logits(team, batch, scores);
        if (batch.rules) sample(team, batch, scores);
      },
      /*pin_caller=*/true);
}

void Decoder::reserve(int64_t rows, int64_t sampled) {
  const auto floats = [](int64_t count) { return static_cast<size_t>(count) * sizeof(float); };
  const int64_t heads = shape_.num_heads * shape_.head_dim;
  hidden_.reserve(floats(rows * shape_.hidden));
  qkv_.reserve(floats(rows * (heads + 2 * shape_.num_kv_heads * shape_.head_dim)));
  q_.reserve(floats(rows * heads) / 2);
  attended_.reserve(floats(rows * heads));
  gated_.reserve(floats(rows * shape_.intermediate));
  sampled_hidden_.reserve(floats(sampled * shape_.hidden));
  panels_.reserve(std::max(rows, sampled), std::max({shape_.hidden, heads, shape_.intermediate}));
}

void Decoder::embed(Team& team, const RowPlan& plan, const StepBatch& batch) {
  const Range rows = plan.rows_of(team);
  for (int64_t row = rows.begin; row < rows.end; ++row)
    kernels_.dequantize_row(embedding_, batch.tokens[row], hidden_.as<float>() + row * shape_.hidden);
  plan.barrier(team);
  note(team, kEmbed);
}

// hidden += Output(Attention(Rope(Qkv(RmsNorm(hidden)))))
void Decoder::attention_block(Team& team, const RowPlan& plan, const DecoderLayer& layer, const StepBatch& batch,
                              const AttentionSchedule& schedule) {
  const int64_t heads = shape_.num_heads * shape_.head_dim;
  const int64_t qkv_width = heads + 2 * shape_.num_kv_heads * shape_.head_dim;
  linear(team, plan,
         {layer.qkv, hidden_.as<float>(), layer.attention_norm, layer.qkv_bias, Store::f32, qkv_.as<float>(), qkv_width, kQkv},
         batch.num_rows);

  const RopeArgs rope{qkv_.as<float>(), qkv_width, shape_.num_heads, shape_.num_kv_heads, shape_.head_dim, layer.q_norm,
                      layer.k_norm, shape_.epsilon, cos_table_, sin_table_, batch.positions, batch.slots,
                      q_.as<uint16_t>(), layer.key_cache, layer.value_cache, shape_.cache_format, shape_.block_size};
  rope_phase(team, kernels_, plan, rope);
  if (team.rank == 0) team.reset_tickets();
  team.barrier();
  note(team, kRope);

  const AttentionArgs attention{q_.as<uint16_t>(), layer.key_cache, layer.value_cache, shape_.cache_format,
                                shape_.num_heads, shape_.num_kv_heads, shape_.head_dim, shape_.block_size,
                                1.0f / std::sqrt(static_cast<float>(shape_.head_dim)), attended_.as<float>(), heads,
                                shape_.deterministic};
  schedule.attend_phase(team, kernels_, attention);
  team.barrier();
  if (schedule.has_merges()) {
    schedule.merge_phase(team, kernels_, attention);
    team.barrier();
  }
  note(team, kAttention);

  linear(team, plan,
         {one(layer.output), attended_.as<float>(), nullptr, nullptr, Store::add, hidden_.as<float>(), shape_.hidden, kOutput},
         batch.num_rows);
}

// hidden += Down(silu(Gate(x)) * Up(x)) where x = RmsNorm(hidden)
void Decoder::mlp_block(Team& team, const RowPlan& plan, const DecoderLayer& layer, int64_t rows) {
  linear(team, plan,
         {one(layer.gate_up), hidden_.as<float>(), layer.mlp_norm, nullptr, Store::silu_mul, gated_.as<float>(),
          shape_.intermediate, kGateUp},
         rows);
  linear(team, plan,
         {one(layer.down), gated_.as<float>(), nullptr, nullptr, Store::add, hidden_.as<float>(), shape_.hidden, kDown}, rows);
}

void Decoder::logits(Team& team, const StepBatch& batch, float* out) {
  const Range share = share_of(batch.num_sampled, team);
  for (int64_t i = share.begin; i < share.end; ++i)
    std::memcpy(sampled_hidden_.as<float>() + i * shape_.hidden, hidden_.as<float>() + batch.sampled[i] * shape_.hidden,
                static_cast<size_t>(shape_.hidden) * sizeof(float));
  team.barrier();
  const RowPlan plan(batch.num_sampled, team.size);
  linear(team, plan, {one(head_), sampled_hidden_.as<float>(), final_norm_, nullptr, Store::f32, out, head_.n, kHead},
         batch.num_sampled);
}

void Decoder::sample(Team& team, const StepBatch& batch, const float* scores) {
  team.barrier();
  const Range share = share_of(batch.num_sampled, team);
  for (int64_t row = share.begin; row < share.end; ++row)
    batch.drawn[row] = kernels_.sample(batch.rules[row], scores + row * head_.n, head_.n, team.scratch);
  team.barrier();
  note(team, kSample);
}

void Decoder::linear(Team& team, const RowPlan& plan, const Linear& map, int64_t rows) {
  const Weight& weight = map.sections.front();  // the others meet the same panel
  // Errors of queries and keys move the attention, those of the head are errors of the scores: both cost more than they save.
  const bool sliced = map.phase != kQkv && map.phase != kHead && can_be_sliced(weight.format);
  const Preparation preparation = preparation_for(kernels_, weight.format, rows, shape_.deterministic, sliced);
  const Panel panel = panels_.panel(preparation, rows, weight.k_padded, plan.own_rows() ? plan.rows_of(team).begin : 0);
  prepare_phase(team, kernels_, plan, {map.x, Dtype::f32, weight.k, weight.k, map.norm, shape_.epsilon, panel});
  plan.barrier(team);
  note(team, kPrepare);
  int64_t column = 0;
  for (const Weight& section : map.sections) {
    const float* bias = map.bias ? map.bias + column : nullptr;
    matmul_phase(team, kernels_, plan, {section, panel, bias, map.store, map.y + column, map.ld});
    column += section.n;
  }
  plan.barrier(team);
  note(team, map.phase);
}

void Decoder::note(const Team& team, Phase phase) {
  if (team.rank != 0) return;
  const int64_t now = now_nanoseconds();
  phase_seconds_[phase] += static_cast<double>(now - phase_began_) * 1e-9;
  phase_began_ = now;
}

}  // namespace pellucid
