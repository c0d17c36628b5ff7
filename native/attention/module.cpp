// The Python module pdd.model._attention: addresses in, nothing else. Lets the GIL go while it computes; never sees
// torch.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cmath>

#include "attention/chunk.h"
#include "attention/decode.h"

namespace nb = nanobind;
using namespace nb::literals;
using pdd::attention::ChunkAttention;
using pdd::attention::DecodeAttention;
using pdd::attention::Geometry;

namespace {

// value_dim 0: as wide as keys. scale 0: the usual one.
Geometry geometry_of(int num_heads, int num_kv_heads, int head_dim, int page_size, bool bf16, int tiles = 2,
                     int value_dim = 0, float scale = 0) {
    const float usual = 1.0f / std::sqrt(static_cast<float>(head_dim));
    return {num_heads, num_kv_heads, head_dim, value_dim != 0 ? value_dim : head_dim,
            page_size, tiles,        bf16,     scale != 0 ? scale : usual};
}

}  // namespace

NB_MODULE(_attention, m) {
    m.doc() = "Attention over paged KV, on addresses.";
    nb::class_<DecodeAttention>(m, "DecodeAttention")
        .def(
            "__init__",
            [](DecodeAttention* self, int num_heads, int num_kv_heads, int head_dim, int page_size, int num_pages,
               bool bf16, int threads, int tiles, int value_dim, float scale, const std::string& instruction_set) {
                const Geometry geometry =
                    geometry_of(num_heads, num_kv_heads, head_dim, page_size, bf16, tiles, value_dim, scale);
                new (self) DecodeAttention(geometry, num_pages, threads, instruction_set);
            },
            nb::kw_only(), "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "page_size"_a, "num_pages"_a, "bf16"_a,
            "threads"_a, "tiles"_a = 2, "value_dim"_a = 0, "scale"_a = 0.0f, "instruction_set"_a = "")
        .def(
            "plan",
            [](DecodeAttention& self, uintptr_t tables, uintptr_t kv_lens, int num_rows, int width) {
                self.plan(reinterpret_cast<const int64_t*>(tables), reinterpret_cast<const int64_t*>(kv_lens), num_rows,
                          width);
            },
            "tables"_a, "kv_lens"_a, "num_rows"_a, "width"_a)
        .def(
            "run",
            [](DecodeAttention& self, uintptr_t layer, uintptr_t q, int64_t q_stride, uintptr_t out, int window) {
                const nb::gil_scoped_release unlocked;
                self.run(reinterpret_cast<const void*>(layer), reinterpret_cast<const void*>(q), q_stride,
                         reinterpret_cast<void*>(out), window);
            },
            "layer"_a, "q"_a, "q_stride"_a, "out"_a, "window"_a = 0)
        .def_prop_ro("instruction_set", &DecodeAttention::instruction_set);
    nb::class_<ChunkAttention>(m, "ChunkAttention")
        .def_static("supported", &ChunkAttention::supported)
        .def(
            "__init__",
            [](ChunkAttention* self, int num_heads, int num_kv_heads, int head_dim, int page_size, int num_pages,
               int threads) {
                const Geometry geometry = geometry_of(num_heads, num_kv_heads, head_dim, page_size, true);
                new (self) ChunkAttention(geometry, num_pages, threads);
            },
            nb::kw_only(), "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "page_size"_a, "num_pages"_a, "threads"_a)
        .def(
            "run",
            [](ChunkAttention& self, uintptr_t layer, uintptr_t table, int num_table, int start, int qo_len,
               uintptr_t q, int64_t q_stride, uintptr_t out, int window) {
                const nb::gil_scoped_release unlocked;
                self.run(reinterpret_cast<const void*>(layer), reinterpret_cast<const int64_t*>(table), num_table,
                         start, qo_len, reinterpret_cast<const void*>(q), q_stride, reinterpret_cast<void*>(out),
                         window);
            },
            "layer"_a, "table"_a, "num_table"_a, "start"_a, "qo_len"_a, "q"_a, "q_stride"_a, "out"_a, "window"_a = 0);
}
