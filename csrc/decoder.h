// A whole step of a decoder-only transformer (the Llama family) as one job of the team. One idea: at one row a layer takes
// a tenth of a millisecond, so nothing may cross into Python inside it; the model still reads top to bottom in step().
//
// The residual stream and every product's result are float32; activations are rounded only where a product or the cache
// asks for it. Weights and caches belong to the caller and must outlive the decoder.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "operations.h"

namespace pellucid {

struct DecoderShape {
  int64_t hidden, num_heads, num_kv_heads, head_dim, intermediate, block_size;
  CacheFormat cache_format;
  float epsilon;
  bool deterministic;
};

struct DecoderLayer {
  const float* attention_norm;
  std::vector<Weight> qkv;  // sections of whole pairs of blocks; several have groups, each in its format
  const float* qkv_bias;  // or null, as the next two
  const float* q_norm;
  const float* k_norm;
  Weight output;
  const float* mlp_norm;
  Weight gate_up;  // blocks alternate gate, up
  Weight down;
  std::byte* key_cache;
  std::byte* value_cache;
};

// One step's input; rows of all sequences one after another.
struct StepBatch {
  int64_t num_rows;
  const int32_t* tokens;     // [num_rows]
  const int32_t* positions;  // [num_rows]
  const int64_t* slots;      // [num_rows]
  std::vector<Sequence> sequences;
  int64_t num_sampled;
  const int32_t* sampled;  // rows whose logits are wanted
  float* logits;           // [num_sampled][vocabulary], or null for room of the decoder's own
  const SampleRow* rules = nullptr;  // [num_sampled], or null: nothing is drawn
  int64_t* drawn = nullptr;          // [num_sampled] tokens
};

// Where the time of the last step went, as rank 0 saw it.
enum Phase : int { kEmbed, kPrepare, kQkv, kRope, kAttention, kOutput, kGateUp, kDown, kHead, kSample, kNumPhases };
constexpr std::array<const char*, kNumPhases> kPhaseNames = {"embed",  "prepare", "qkv",  "rope", "attention",
                                                             "output", "gate_up", "down", "head", "sample"};

class Decoder {
 public:
  Decoder(ThreadPool& pool, const Kernels& kernels, DecoderShape shape, Weight embedding, Weight head,
          const float* final_norm, const float* cos_table, const float* sin_table);

  void add_layer(const DecoderLayer& layer) { layers_.push_back(layer); }
  void step(const StepBatch& batch);
  const std::array<double, kNumPhases>& phase_seconds() const { return phase_seconds_; }
  double stolen_seconds() const { return pool_.stolen_seconds(); }

 private:
  // y = store(norm(x) . W^T + bias); norm and bias may be null. The sections of W stand one below the other.
  struct Linear {
    std::span<const Weight> sections;
    const float* x;
    const float* norm;
    const float* bias;
    Store store;
    float* y;
    int64_t ld;
    Phase phase;
  };
  void reserve(int64_t rows, int64_t sampled);
  void embed(Team& team, const RowPlan& plan, const StepBatch& batch);
  void attention_block(Team& team, const RowPlan& plan, const DecoderLayer& layer, const StepBatch& batch,
                       const AttentionSchedule& schedule);
  void mlp_block(Team& team, const RowPlan& plan, const DecoderLayer& layer, int64_t rows);
  void logits(Team& team, const StepBatch& batch, float* out);
  void sample(Team& team, const StepBatch& batch, const float* scores);
  void linear(Team& team, const RowPlan& plan, const Linear& map, int64_t rows);
  void note(const Team& team, Phase phase);

  ThreadPool& pool_;
  const Kernels& kernels_;
  DecoderShape shape_;
  Weight embedding_, head_;
  const float* final_norm_;
  const float* cos_table_;
  const float* sin_table_;
  std::vector<DecoderLayer> layers_;
  PanelRoom panels_;
  Buffer hidden_, qkv_, q_, attended_, gated_, sampled_hidden_, logits_;
  std::array<double, kNumPhases> phase_seconds_{};
  int64_t phase_began_ = 0;
};

}  // namespace pellucid
