// One query row's attention over one KV head's pages: the inner loops, compiled once per instruction set.
//
// Raw pointers only. kernel.cpp must not use inline functions of the standard library: it is compiled with several -m
// flags, and the linker keeps one copy of each inline function, which might be one that this CPU cannot run.
#pragma once

#include <cstdint>

namespace pdd::attention {

// Of all rows. Pages of a layer: [page][kv head][tile][slot][dim].
struct Geometry {
    int num_heads;     // query heads
    int num_kv_heads;  // divides num_heads
    int head_dim;      // a multiple of 16
    int value_dim;     // of the output, a multiple of 16: head_dim, or with one tile less
    int page_size;     // tokens
    int tiles;         // of a KV head: 2, K and V; or 1, whose rows are keys and begin with their values
    bool bf16;         // else float32; of queries, pages and output alike
    float scale;       // of the scores
};

struct Row {
    const void* q;          // [num_heads][head_dim]
    const void* layer;      // the pages of the layer
    const int32_t* table;   // page numbers in token order
    int32_t begin, kv_len;  // attend to tokens [begin, kv_len); at least one
    void* out;              // [num_heads][value_dim]
};

constexpr int kMaxGroup = 4;  // query heads done together
constexpr int kChunk = 256;   // tokens whose scores are held at a time

// Softmax(q . K * scale) . V for `count` query heads, from `head` on, that share a KV head. count: 1 .. kMaxGroup.
// scratch: kMaxGroup * (2 * head_dim + kChunk) floats.
using Attend = void (*)(const Geometry&, const Row&, int head, int count, float* scratch);

void attend_base(const Geometry&, const Row&, int head, int count, float* scratch);
void attend_v3(const Geometry&, const Row&, int head, int count, float* scratch);  // x86-64-v3: AVX2, FMA
void attend_v4(const Geometry&, const Row&, int head, int count, float* scratch);  // x86-64-v4: AVX-512

}  // namespace pdd::attention
