// The Python module pellucid.kernels._native. One idea: addresses cross as integers. Passing a tensor costs microseconds,
// an integer a tenth of one; pellucid/kernels/cpu.py owns the tensors, checks their shapes and keeps them alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <stdexcept>

#include "decoder.h"
#include "isa.h"
#include "memory.h"
#include "operations.h"
#include "packing.h"
#include "probe.h"
#include "step_rows.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace pellucid;

namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

Isa checked_isa(const std::string& name) {
  Isa isa;
  if (name == "auto") return best_isa();
  if (!parse_isa(name, &isa)) throw std::invalid_argument("unknown instruction level " + name);
  if (isa > best_isa() || !isa_compiled(isa))
    throw std::invalid_argument("this machine cannot run " + name + "; the best here is " + isa_name(best_isa()));
  return isa;
}

Dtype dtype_of(bool is_bf16) { return is_bf16 ? Dtype::bf16 : Dtype::f32; }
CacheFormat cache_format_of(bool int8) { return int8 ? CacheFormat::int8 : CacheFormat::bf16; }

// The team, the level's kernels and room for one operation at a time.
class Cpu {
 public:
  Cpu(const std::string& isa, std::vector<int> cores, double spin_seconds, bool deterministic)
      : isa_(checked_isa(isa)),
        kernels_(kernels_for(isa_)),
        deterministic_(deterministic),
        pool_(std::move(cores), spin_seconds) {}

  ThreadPool& pool() { return pool_; }
  const Kernels& kernels() const { return kernels_; }
  std::string isa() const { return isa_name(isa_); }
  bool deterministic() const { return deterministic_; }
  int num_threads() const { return pool_.size(); }

  void linear(const PackedWeight& packed, uintptr_t x, bool x_bf16, int64_t rows, uintptr_t y, bool y_bf16,
              uintptr_t bias, bool gated) {
    const Weight weight = packed.view();
    panels_.reserve(rows, weight.k);
    const Preparation preparation =
        preparation_for(kernels_, weight.format, rows, deterministic_, can_be_sliced(weight.format));
    const Panel panel = panels_.panel(preparation, rows, weight.k_padded);
    const PrepareArgs prepare{at<void>(x), dtype_of(x_bf16), weight.k, weight.k, nullptr, 0.0f, panel};
    const Store store = gated ? Store::silu_mul : y_bf16 ? Store::bf16 : Store::f32;
    const MatmulArgs matmul{weight, panel, at<float>(bias), store, at<void>(y), gated ? weight.n / 2 : weight.n};
    const RowPlan plan(rows, pool_.size());
    pool_.run([&](Team& team) {
      prepare_phase(team, kernels_, plan, prepare);
      plan.barrier(team);
      matmul_phase(team, kernels_, plan, matmul);
    });
  }

  void rms_norm(uintptr_t x, bool bf16, int64_t rows, int64_t k, uintptr_t weight, float epsilon, uintptr_t y) {
    const int64_t bytes = k * (bf16 ? 2 : 4);
    pool_.run([&](Team& team) {
      const Range share = share_of(rows, team);
      for (int64_t row = share.begin; row < share.end; ++row)
        kernels_.rms_norm(at<char>(x) + row * bytes, dtype_of(bf16), at<float>(weight), epsilon, k,
                          at<char>(y) + row * bytes);
    });
  }

  void silu_mul(uintptr_t gate_up, bool bf16, int64_t rows, int64_t width, uintptr_t y) {
    const int64_t bytes = width * (bf16 ? 2 : 4);
    pool_.run([&](Team& team) {
      const Range share = share_of(rows, team);
      for (int64_t row = share.begin; row < share.end; ++row) {
        const char* gate = at<char>(gate_up) + 2 * row * bytes;
        kernels_.silu_mul(gate, gate + bytes, dtype_of(bf16), width, at<char>(y) + row * bytes);
      }
    });
  }

  void rope(uintptr_t qkv, int64_t rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, uintptr_t q_norm,
            uintptr_t k_norm, float epsilon, uintptr_t cosines, uintptr_t sines, uintptr_t positions, uintptr_t slots,
            uintptr_t q_out, uintptr_t key_cache, uintptr_t value_cache, bool int8_cache, int64_t block_size) {
    const RopeArgs args{at<float>(qkv),   (num_heads + 2 * num_kv_heads) * head_dim,
                        num_heads,        num_kv_heads,
                        head_dim,         at<float>(q_norm),
                        at<float>(k_norm), epsilon,
                        at<float>(cosines), at<float>(sines),
                        at<int32_t>(positions), at<int64_t>(slots),
                        at<uint16_t>(q_out), at<std::byte>(key_cache),
                        at<std::byte>(value_cache), cache_format_of(int8_cache), block_size};
    const RowPlan plan(rows, pool_.size());
    pool_.run([&](Team& team) { rope_phase(team, kernels_, plan, args); });
  }

  void attention(uintptr_t q, uintptr_t key_cache, uintptr_t value_cache, bool int8_cache, int64_t num_heads,
                 int64_t num_kv_heads, int64_t head_dim, int64_t block_size, float scale, uintptr_t sequences,
                 int64_t num_sequences, uintptr_t block_tables, int64_t table_stride, uintptr_t out) {
    const std::vector<Sequence> chunks = sequences_from(sequences, num_sequences, block_tables, table_stride);
    const AttentionSchedule schedule(chunks, {num_heads, num_kv_heads, head_dim, deterministic_}, pool_.size());
    const AttentionArgs args{at<uint16_t>(q), at<std::byte>(key_cache), at<std::byte>(value_cache),
                             cache_format_of(int8_cache), num_heads, num_kv_heads, head_dim, block_size, scale,
                             at<float>(out), num_heads * head_dim, deterministic_};
    pool_.run([&](Team& team) {
      schedule.attend_phase(team, kernels_, args);
      team.barrier();
      schedule.merge_phase(team, kernels_, args);
    });
  }

  // sequences: [n][3] int64, rows [row_begin, +num_rows) attend `context` tokens.
  static std::vector<Sequence> sequences_from(uintptr_t sequences, int64_t count, uintptr_t block_tables, int64_t stride) {
    std::vector<Sequence> result;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t* s = at<int64_t>(sequences) + i * 3;
      result.push_back({s[0], s[1], s[2], at<int32_t>(block_tables) + i * stride});
    }
    return result;
  }

  void dequantize_rows(const PackedWeight& packed, uintptr_t indices, int64_t count, uintptr_t out) {
    const Weight weight = packed.view();
    pool_.run([&](Team& team) {
      const Range share = share_of(count, team);
      for (int64_t i = share.begin; i < share.end; ++i)
        kernels_.dequantize_row(weight, at<int64_t>(indices)[i], at<float>(out) + i * weight.k);
    });
  }

  // rules: [rows]; out: the token of each row.
  void sample(uintptr_t logits, int64_t rows, int64_t count, uintptr_t rules, uintptr_t out) {
    if (count > kMaxVocabulary) throw std::invalid_argument("the vocabulary is too large to be sampled from");
    const auto sample_rows = [&](Range share, std::byte* scratch) {
      for (int64_t row = share.begin; row < share.end; ++row)
        at<int64_t>(out)[row] = kernels_.sample(at<SampleRow>(rules)[row], at<float>(logits) + row * count, count, scratch);
    };
    if (rows == 1) {  // not worth waking the others
      scratch_.reserve(ThreadPool::kScratchBytes);
      return sample_rows({0, 1}, scratch_.as<std::byte>());
    }
    pool_.run([&](Team& team) { sample_rows(share_of(rows, team), team.scratch); });
  }

  // Copies `count` pieces of `bytes`; pairs: [count][2] int64, from and to, in pieces.
  void copy_blocks(uintptr_t from, uintptr_t to, uintptr_t pairs, int64_t count, int64_t bytes) {
    pool_.run([&](Team& team) {
      const Range share = share_of(count, team);
      for (int64_t i = share.begin; i < share.end; ++i) {
        const int64_t* pair = at<int64_t>(pairs) + 2 * i;
        std::memcpy(at<char>(to) + pair[1] * bytes, at<char>(from) + pair[0] * bytes, static_cast<size_t>(bytes));
      }
    });
  }

  double probe(const std::string& what, int64_t bytes, double seconds) {
    double best = 0.0;
    pool_.run([&](Team& team) { probe_phase(team, isa_, what, bytes, seconds, &best); }, true);
    return best;
  }

 private:
  Isa isa_;
  const Kernels& kernels_;
  bool deterministic_;
  ThreadPool pool_;
  PanelRoom panels_;
  Buffer scratch_;
};

Weight view_of(const PackedWeight* packed) { return packed->view(); }

std::vector<Weight> views_of(const std::vector<const PackedWeight*>& sections) {
  std::vector<Weight> views;
  for (const PackedWeight* packed : sections) views.push_back(packed->view());
  return views;
}

void bind_weight(nb::module_& m) {
  nb::enum_<Format>(m, "Format")
      .value("bf16", Format::bf16)
      .value("int8", Format::int8)
      .value("q8", Format::q8)
      .value("q4", Format::q4)
      .value("q4_min", Format::q4_min)
      .value("q5_min", Format::q5_min)
      .value("q6", Format::q6);
  nb::class_<PackedWeight>(m, "PackedWeight")
      .def(nb::init<Format, int64_t, int64_t>(), "format"_a, "n"_a, "k"_a)
      .def(
          "pack_gguf",
          [](PackedWeight& w, int type, uintptr_t rows, int64_t num_rows, int64_t first_block, int64_t stride) {
            w.pack_gguf(static_cast<GgufType>(type), at<uint8_t>(rows), num_rows, {first_block, stride});
          },
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "pack_floats",
          [](PackedWeight& w, uintptr_t rows, bool bf16, int64_t num_rows, int64_t first_block, int64_t stride) {
            w.pack_floats(at<void>(rows), dtype_of(bf16), num_rows, {first_block, stride});
          },
          nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("bytes", &PackedWeight::bytes)
      .def_prop_ro("format", [](const PackedWeight& w) { return w.view().format; })
      .def_prop_ro("n", [](const PackedWeight& w) { return w.view().n; })
      .def_prop_ro("k", [](const PackedWeight& w) { return w.view().k; });
}

void bind_cpu(nb::module_& m) {
  using release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Cpu>(m, "Cpu")
      .def(nb::init<const std::string&, std::vector<int>, double, bool>(), "isa"_a, "cores"_a, "spin_seconds"_a,
           "deterministic"_a)
      .def_prop_ro("isa", &Cpu::isa)
      .def_prop_ro("num_threads", &Cpu::num_threads)
      .def_prop_ro("deterministic", &Cpu::deterministic)
      .def("linear", &Cpu::linear, release())
      .def("rms_norm", &Cpu::rms_norm, release())
      .def("silu_mul", &Cpu::silu_mul, release())
      .def("rope", &Cpu::rope, release())
      .def("attention", &Cpu::attention, release())
      .def("dequantize_rows", &Cpu::dequantize_rows, release())
      .def("sample", &Cpu::sample, release())
      .def("copy_blocks", &Cpu::copy_blocks, release())
      .def("probe", &Cpu::probe, release());
}

void bind_memory(nb::module_& m) {
  nb::class_<Populating>(m, "Populating")
      .def(
          "__init__",
          [](Populating* self, nb::object /*owner*/, uintptr_t start, size_t count, size_t bytes) {
            new (self) Populating(at<void>(start), count, bytes);
          },
          nb::keep_alive<1, 2>(), "owner"_a, "start"_a, "count"_a, "bytes"_a)
      .def("slow_down", &Populating::slow_down)
      .def_prop_ro("done", &Populating::done);
}

// The plan's chunks, (sequence id, start, end, samples) each, with the line of each sequence in place of its id. Stops before
// one whose sequence has no line.
std::vector<Chunk> chunks_from(const nb::tuple& chunks, const nb::dict& line_of) {
  std::vector<Chunk> result;
  const auto integer = [](PyObject* chunk, Py_ssize_t i) { return PyLong_AsLongLong(PyTuple_GetItem(chunk, i)); };
  for (const nb::handle chunk : chunks) {
    PyObject* line = PyDict_GetItem(line_of.ptr(), PyTuple_GetItem(chunk.ptr(), 0));
    if (!line) break;
    result.push_back({PyLong_AsLongLong(line), integer(chunk.ptr(), 1), integer(chunk.ptr(), 2), integer(chunk.ptr(), 3) != 0});
  }
  return result;
}

// The drawn tokens beside the chunks: (token,) or ().
nb::tuple tokens_of(const std::vector<Chunk>& chunks, const std::vector<int64_t>& drawn) {
  size_t next = 0;
  nb::list result;
  for (const Chunk& chunk : chunks) result.append(chunk.samples ? nb::make_tuple(drawn[next++]) : nb::make_tuple());
  return nb::tuple(result);
}

void bind_step_rows(nb::module_& m) {
  nb::class_<SequenceLines>(m, "SequenceLines")
      .def(
          "__init__",
          [](SequenceLines* self, uintptr_t tokens, int64_t token_stride, uintptr_t tables, int64_t table_stride,
             uintptr_t known, uintptr_t num_blocks, uintptr_t rules, int64_t block_size) {
            new (self) SequenceLines{at<int32_t>(tokens), token_stride,       at<int32_t>(tables),   table_stride,
                                     at<int64_t>(known),  at<int64_t>(num_blocks), at<SampleRule>(rules), block_size};
          });
  nb::class_<StepRows>(m, "StepRows")
      .def(nb::init<>())
      // The tokens, or the index of the first chunk that cannot be computed.
      .def("step", [](StepRows& rows, Decoder& decoder, const nb::tuple& plan, const nb::dict& line_of,
                      const SequenceLines& lines, const std::tuple<int64_t, int64_t, int64_t>& bounds) -> nb::object {
        const std::vector<Chunk> chunks = chunks_from(plan, line_of);
        const std::vector<int64_t>* drawn = nullptr;
        int64_t bad;
        {
          nb::gil_scoped_release release;
          bad = rows.fill(chunks, lines, {std::get<0>(bounds), std::get<1>(bounds), std::get<2>(bounds)});
          if (bad < 0 && chunks.size() < plan.size()) bad = static_cast<int64_t>(chunks.size());
          if (bad < 0) drawn = &rows.step(decoder, chunks, lines);
        }
        if (bad >= 0) return nb::int_(bad);
        return tokens_of(chunks, *drawn);
      });
  m.def("uniform_at", &uniform_at);
}

void bind_decoder(nb::module_& m) {
  nb::class_<Decoder>(m, "Decoder")
      .def(
          "__init__",
          [](Decoder* self, Cpu& cpu, const std::vector<int64_t>& sizes, float epsilon, const PackedWeight* embedding,
             const PackedWeight* head, uintptr_t final_norm, uintptr_t cosines, uintptr_t sines, bool int8_cache) {
            if (sizes.size() != 6) throw std::invalid_argument("sizes holds six numbers");
            const DecoderShape shape{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5],
                                     cache_format_of(int8_cache), epsilon, cpu.deterministic()};
            new (self) Decoder(cpu.pool(), cpu.kernels(), shape, view_of(embedding), view_of(head), at<float>(final_norm),
                               at<float>(cosines), at<float>(sines));
          },
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>())
      .def(
          "add_layer",
          [](Decoder& d, uintptr_t attention_norm, const std::vector<const PackedWeight*>& qkv, uintptr_t qkv_bias,
             uintptr_t q_norm, uintptr_t k_norm, const PackedWeight* output, uintptr_t mlp_norm,
             const PackedWeight* gate_up, const PackedWeight* down, uintptr_t key_cache, uintptr_t value_cache) {
            d.add_layer({at<float>(attention_norm), views_of(qkv), at<float>(qkv_bias), at<float>(q_norm),
                         at<float>(k_norm), view_of(output), at<float>(mlp_norm), view_of(gate_up), view_of(down),
                         at<std::byte>(key_cache), at<std::byte>(value_cache)});
          },
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>())
      .def(
          "step",
          [](Decoder& d, int64_t num_rows, uintptr_t tokens, uintptr_t positions, uintptr_t slots, uintptr_t sequences,
             int64_t num_sequences, uintptr_t block_tables, int64_t table_stride, int64_t num_sampled, uintptr_t sampled,
             uintptr_t logits) {
            d.step({num_rows, at<int32_t>(tokens), at<int32_t>(positions), at<int64_t>(slots),
                    Cpu::sequences_from(sequences, num_sequences, block_tables, table_stride), num_sampled,
                    at<int32_t>(sampled), at<float>(logits)});
          },
          nb::call_guard<nb::gil_scoped_release>())
      .def("stolen_seconds", &Decoder::stolen_seconds)
      .def_prop_ro("sample_seconds", [](const Decoder& d) { return d.phase_seconds()[kSample]; })
      .def("phase_seconds", [](const Decoder& d) {
        nb::dict result;
        for (int i = 0; i < kNumPhases; ++i)
          result[kPhaseNames[static_cast<size_t>(i)]] = d.phase_seconds()[static_cast<size_t>(i)];
        return result;
      });
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Native CPU kernels; see pellucid.kernels.cpu for the face that checks its arguments.";
  nb::set_leak_warnings(false);  // an engine's weights live until its process ends, and nobody collects them then
  m.def("best_isa", [] { return isa_name(best_isa()); });
  bind_weight(m);
  bind_cpu(m);
  bind_memory(m);
  bind_decoder(m);
  bind_step_rows(m);
}
