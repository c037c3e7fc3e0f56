#include "decoder.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace pellucid {
namespace {

int64_t now_nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000 + t.tv_nsec;
}

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
  reserve(batch.num_rows, batch.num_sampled);
  const AttentionSchedule schedule(batch.sequences, shape_.num_heads, shape_.num_kv_heads, shape_.head_dim, pool_.size());
  phase_seconds_.fill(0.0);
  phase_began_ = now_nanoseconds();
  pool_.run(
      [&](Team& team) {
        embed(team, batch);
        for (const DecoderLayer& layer : layers_) {
          attention_block(team, layer, batch, schedule);
          mlp_block(team, layer, batch.num_rows);
        }
        if (batch.num_sampled > 0) logits(team, batch);
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
  // The panel of the widest product, so that it never moves while the team works.
  const int64_t widest = round_up(std::max({shape_.hidden, heads, shape_.intermediate}), 64);
  panels_.panel(Preparation::bf16, rows, widest);
  panels_.panel(Preparation::group8, rows, widest);
}

void Decoder::embed(Team& team, const StepBatch& batch) {
  const Share share = share_of(batch.num_rows, team.rank, team.size);
  for (int64_t row = share.begin; row < share.end; ++row)
    kernels_.dequantize_row(embedding_, batch.tokens[row], hidden_.as<float>() + row * shape_.hidden);
  close_phase(team, kEmbed);
}

// hidden += Output(Attention(Rope(Qkv(RmsNorm(hidden)))))
void Decoder::attention_block(Team& team, const DecoderLayer& layer, const StepBatch& batch,
                              const AttentionSchedule& schedule) {
  const int64_t rows = batch.num_rows;
  const int64_t heads = shape_.num_heads * shape_.head_dim;
  const int64_t qkv_width = heads + 2 * shape_.num_kv_heads * shape_.head_dim;
  linear(team, layer.qkv, hidden_.as<float>(), rows, layer.attention_norm, layer.qkv_bias, Store::f32, qkv_.as<float>(),
         qkv_width, kQkv);

  const RopeArgs rope{qkv_.as<float>(), qkv_width, shape_.num_heads, shape_.num_kv_heads, shape_.head_dim, layer.q_norm,
                      layer.k_norm, shape_.epsilon, cos_table_, sin_table_, batch.positions, batch.slots,
                      q_.as<uint16_t>(), layer.key_cache, layer.value_cache, shape_.block_size};
  rope_phase(team, kernels_, rope, rows);
  if (team.rank == 0) team.reset_tickets();
  close_phase(team, kRope);

  const AttentionArgs attention{q_.as<uint16_t>(), layer.key_cache, layer.value_cache, shape_.num_heads,
                                shape_.num_kv_heads, shape_.head_dim, shape_.block_size,
                                1.0f / std::sqrt(static_cast<float>(shape_.head_dim)), attended_.as<float>(), heads,
                                shape_.deterministic};
  schedule.attend_phase(team, kernels_, attention);
  if (schedule.has_merges()) {
    team.barrier();
    schedule.merge_phase(team, kernels_, attention);
  }
  close_phase(team, kAttention);

  linear(team, layer.output, attended_.as<float>(), rows, nullptr, nullptr, Store::add, hidden_.as<float>(), shape_.hidden,
         kOutput);
}

// hidden += Down(silu(Gate(x)) * Up(x)) where x = RmsNorm(hidden)
void Decoder::mlp_block(Team& team, const DecoderLayer& layer, int64_t rows) {
  linear(team, layer.gate_up, hidden_.as<float>(), rows, layer.mlp_norm, nullptr, Store::silu_mul, gated_.as<float>(),
         shape_.intermediate, kGateUp);
  linear(team, layer.down, gated_.as<float>(), rows, nullptr, nullptr, Store::add, hidden_.as<float>(), shape_.hidden,
         kDown);
}

void Decoder::logits(Team& team, const StepBatch& batch) {
  const Share share = share_of(batch.num_sampled, team.rank, team.size);
  for (int64_t i = share.begin; i < share.end; ++i)
    std::memcpy(sampled_hidden_.as<float>() + i * shape_.hidden, hidden_.as<float>() + batch.sampled[i] * shape_.hidden,
                static_cast<size_t>(shape_.hidden) * sizeof(float));
  team.barrier();
  linear(team, head_, sampled_hidden_.as<float>(), batch.num_sampled, final_norm_, nullptr, Store::f32, batch.logits,
         head_.n, kHead);
}

// y = store(norm(x) . W^T + bias)
void Decoder::linear(Team& team, const Weight& weight, const float* x, int64_t rows, const float* norm, const float* bias,
                     Store store, float* y, int64_t ld, Phase phase) {
  const Panel panel = panels_.panel(preparation_for(kernels_, weight.format, rows, shape_.deterministic), rows,
                                    weight.k_padded);
  prepare_phase(team, kernels_, {x, Dtype::f32, weight.k, weight.k, norm, shape_.epsilon, panel});
  close_phase(team, kPrepare);
  matmul_phase(team, kernels_, {weight, panel, bias, store, y, ld});
  close_phase(team, phase);
}

void Decoder::close_phase(Team& team, Phase phase) {
  team.barrier();
  if (team.rank != 0) return;
  const int64_t now = now_nanoseconds();
  phase_seconds_[phase] += static_cast<double>(now - phase_began_) * 1e-9;
  phase_began_ = now;
}

}  // namespace pellucid
