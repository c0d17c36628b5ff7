// Attention of a prefill chunk, bf16: the inner loops, for CPUs with AVX512_BF16 (dot products of pairs of bf16
// values).
//
// Raw pointers only, and no inline functions of the standard library: see kernel.h. K and V are packed once per chunk
// and layer, so that one 64-byte load holds what 16 lanes need of a pair of values; all query heads of a KV head share
// that.
#pragma once

#include <cstdint>

#include "attention/kernel.h"

namespace pdd::attention {

constexpr int kKeyGroup = 16;    // keys of a packed group: the lanes of a vector
constexpr int kKeyBlock = 128;   // keys scored at a time: K and V of them are 32 KB at head_dim 64
constexpr int kQueryBlock = 64;  // queries of one task

// One chunk: queries at positions [start, start + qo_len), each of which sees the keys up to its own position.
struct Chunk {
    const uint16_t* q;  // [qo_len][num_heads][head_dim], rows q_stride values apart
    int64_t q_stride;
    const void* layer;     // the pages of the layer
    const int32_t* table;  // page numbers in token order
    int32_t start, qo_len;
    int32_t window;  // tokens that a query sees, its own included; 0: all
    uint16_t* out;   // [qo_len][num_heads][head_dim]
};

// Values of K (or V) of one KV head, packed, in uint32: keys rounded up to a group, times head_dim / 2.
constexpr int64_t packed_words(int kv_len, int head_dim) {
    return static_cast<int64_t>((kv_len + kKeyGroup - 1) / kKeyGroup) * kKeyGroup * (head_dim / 2);
}

// Floats of scratch per thread, 64-byte aligned, for attend_chunk.
constexpr int64_t chunk_scratch(int head_dim) {
    return static_cast<int64_t>(kQueryBlock) * head_dim + 2 * kQueryBlock + 2 * 8 * 128;
}

// Packs the keys of the blocks that any query sees, up to start + qo_len, of `kv_head`: K as [group][pair of
// dims][key], V as [pair of keys][dim], each entry two bf16 values. What a last group lacks is zero. head_dim: a
// multiple of 32.
void pack_chunk_bf16(const Geometry&, const Chunk&, int kv_head, uint32_t* keys, uint32_t* values);

// Queries [first, first + kQueryBlock) of query head `head`, over the packed keys and values of its KV head.
void attend_chunk_bf16(const Geometry&, const Chunk&, int head, int first, const uint32_t* keys, const uint32_t* values,
                       float* scratch);

}  // namespace pdd::attention
