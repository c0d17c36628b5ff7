// Attention of decode rows over KV pages in place: no gather, each K and V byte is read once per step and layer.
//
// The layer's pages lie as [page][kv head][K, V][slot][dim] (pdd/kv/layout.py). One query token per row. Work is cut by (row, kv
// head); the query heads of a kv head share each K and V load. Scores are fp32, softmax in two passes, results rounded once.
// Pure arithmetic on raw pointers: no torch, no Python, no allocation beyond a per-thread scratch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pdd::attention {

enum class Element { f32, bf16 };

struct DecodeArgs {
    Element element;
    const void* q;             // [rows][q_stride elements]: num_heads * dim used
    std::int64_t q_stride;     // elements between rows of q
    void* out;                 // [rows][num_heads * dim], dense
    const void* pages;         // the layer's first page
    const std::int64_t* table; // [rows][table_stride] page numbers
    std::int64_t table_stride;
    const std::int64_t* kv_len; // [rows], tokens to attend to, >= 1
    std::int64_t rows;
    std::int64_t num_heads;
    std::int64_t num_kv_heads; // divides num_heads
    std::int64_t page_size;
    std::int64_t dim; // a multiple of 16
    float scale;      // of q . k
};

// Items [begin, end) of rows * num_kv_heads. `scores` holds (num_heads / num_kv_heads) * max kv_len floats, `acc` holds
// (num_heads / num_kv_heads) * dim * 2 floats.
void decode_items(const DecodeArgs& args, std::int64_t begin, std::int64_t end, float* scores, float* acc);

} // namespace pdd::attention
