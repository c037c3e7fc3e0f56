// Compiled once per instruction level, each time with that level's flags and PELLUCID_LEVEL set to its name.
// Nothing here but the one table has external linkage, and no standard library template is instantiated: the linker must
// never serve another level's copy of a function to a processor that cannot run it.
#include "kernels.h"

#include "attention.h"
#include "matmul.h"
#include "rows.h"
#include "sampling.h"
#include "simd.h"
#if defined(__AMX_TILE__)
#include "slices.h"
#include "tile_attention.h"
#include "tiles.h"
#endif
#include "vector_attention.h"

#define PELLUCID_JOIN_(a, b) a##b
#define PELLUCID_JOIN(a, b) PELLUCID_JOIN_(a, b)
#define PELLUCID_QUOTE_(a) #a
#define PELLUCID_QUOTE(a) PELLUCID_QUOTE_(a)

namespace pellucid {
namespace {

void matmul(const MatmulArgs& a, Range rows, Range pairs, std::byte* scratch) {
#if defined(__AMX_TILE__)
  if (a.panel.preparation == Preparation::slice8) return sliced_matmul(a, rows, pairs, scratch);
  if (a.panel.preparation == Preparation::row8) return tile_matmul<true>(a, rows, pairs, scratch);
  if (a.panel.preparation != Preparation::group8) return tile_matmul<false>(a, rows, pairs, scratch);
#endif
  (void)scratch;
  vector_matmul(a, rows, pairs);
}

void attend(const AttentionArgs& a, const AttentionItem& item, const AttentionItem* next, std::byte* scratch) {
#if defined(__AMX_TILE__)
  tile_attend(a, item, next, scratch);
#else
  if (a.cache_format == CacheFormat::int8) vector_attend<true>(a, item, next, scratch);
  else vector_attend<false>(a, item, next, scratch);
#endif
}

#if defined(__AMX_TILE__)
constexpr bool kHasTiles = true;
static_assert(sizeof(ChunkScratch) <= (size_t{8} << 20) && sizeof(DecodeScratch) <= sizeof(ChunkScratch));
#else
constexpr bool kHasTiles = false;
#endif

static_assert(sizeof(VectorScratch) <= (size_t{8} << 20));
static_assert(sizeof(SampleScratch) <= (size_t{8} << 20));

constexpr Kernels kTable = {PELLUCID_QUOTE(PELLUCID_LEVEL), kHasTiles, prepare,  matmul,  rope, attend, merge,
                            dequantize_row,                 rms_norm,  silu_mul, sample};

}  // namespace

const Kernels& PELLUCID_JOIN(kernels_, PELLUCID_LEVEL)() { return kTable; }

}  // namespace pellucid
