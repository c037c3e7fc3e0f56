// From what the scheduler decided to the rows of a step. One idea: what is known of the running sequences stands in matrices
// of the caller's, a line per sequence, so a step is told which tokens to compute and no more; it reads the rest there and
// writes the drawn tokens back.
#pragma once

#include <vector>

#include "decoder.h"

namespace pellucid {

// How a sequence is sampled (kernels.h, SampleRow), and the seed of its random numbers.
struct SampleRule {
  float temperature, top_p, min_p;
  int32_t top_k;
  uint64_t seed;
};

struct SequenceLines {
  int32_t* tokens;  // [lines][token_stride]
  int64_t token_stride;
  const int32_t* tables;  // [lines][table_stride], block ids
  int64_t table_stride;
  int64_t* known;             // [lines] tokens
  const int64_t* num_blocks;  // [lines]
  const SampleRule* rules;    // [lines]
  int64_t block_size;
};

// Tokens [start, end) of the sequence on a line; if `samples`, the token at `end` is drawn.
struct Chunk {
  int64_t line, start, end;
  bool samples;
};

// What exists: token ids, positions and cache slots below these.
struct Bounds {
  int64_t vocabulary, positions, slots;
};

class StepRows {
 public:
  // Fills the rows of these chunks. Returns the first chunk that cannot be computed, because tokens or blocks of it are not
  // known or do not exist, or -1.
  int64_t fill(const std::vector<Chunk>& chunks, const SequenceLines& lines, const Bounds& bounds);
  // Computes them and writes each drawn token behind its chunk. Returns the tokens in the order of the chunks that sample.
  const std::vector<int64_t>& step(Decoder& decoder, const std::vector<Chunk>& chunks, const SequenceLines& lines);

 private:
  std::vector<int32_t> tokens_, positions_, sampled_;
  std::vector<int64_t> slots_, drawn_;
  std::vector<SampleRow> rules_;
  std::vector<Sequence> sequences_;
};

// The random number in [0, 1) of the token at `position`; runtime/sampler.py has the same in NumPy and says whose it is.
double uniform_at(uint64_t seed, int64_t position);

}  // namespace pellucid
