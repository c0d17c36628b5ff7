#include "attention/chunk.h"

#include <stdexcept>
#include <string>

namespace pdd::attention {

bool ChunkAttention::supported() {
#if defined(PDD_CHUNK_KERNEL)
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
#else
    return false;
#endif
}

ChunkAttention::ChunkAttention(const Geometry& geometry, int num_pages, int num_threads)
    : geometry_(geometry), num_pages_(num_pages), pool_(num_threads) {
    if (!supported()) throw std::invalid_argument("this CPU has no AVX512_BF16");
    if (!geometry.bf16 || geometry.num_kv_heads < 1 || geometry.num_heads % geometry.num_kv_heads ||
        geometry.head_dim < 32 || geometry.head_dim % 32 || geometry.page_size < 1 || num_pages < 1 || num_threads < 1)
        throw std::invalid_argument(
            "chunk attention needs bf16, whole groups of heads and a head_dim that is a multiple of 32");
    const int64_t stride = chunk_scratch(geometry.head_dim);
    scratch_.resize(stride * num_threads + 16);
    const auto address = reinterpret_cast<uintptr_t>(scratch_.data());
    scratch_base_ = reinterpret_cast<float*>((address + 63) / 64 * 64);
}

void ChunkAttention::run(const void* layer, const int64_t* table, int num_table, int start, int qo_len, const void* q,
                         int64_t q_stride, void* out, int window) {
    const int kv_len = start + qo_len;
    const int num_needed = (kv_len + geometry_.page_size - 1) / geometry_.page_size;
    if (start < 0 || qo_len < 1 || num_needed > num_table)
        throw std::out_of_range("a chunk of tokens [" + std::to_string(start) + ", " + std::to_string(kv_len) +
                                ") does not fit " + std::to_string(num_table) + " pages");
    table_.resize(num_needed);
    for (int i = 0; i < num_needed; ++i) {
        if (table[i] < 0 || table[i] >= num_pages_)
            throw std::out_of_range("a chunk names page " + std::to_string(table[i]) + " of " +
                                    std::to_string(num_pages_));
        table_[i] = static_cast<int32_t>(table[i]);
    }
    const auto words = static_cast<size_t>(packed_words(kv_len, geometry_.head_dim)) * geometry_.num_kv_heads;
    if (keys_.size() < words) keys_.resize(words), values_.resize(words);
    chunk_ = {static_cast<const uint16_t*>(q), q_stride, layer, table_.data(), start, qo_len, window,
              static_cast<uint16_t*>(out)};
    pool_.run(geometry_.num_kv_heads, pack_task, this);
    const int blocks = (qo_len + kQueryBlock - 1) / kQueryBlock;
    pool_.run(blocks * geometry_.num_heads, attend_task, this);
}

void ChunkAttention::pack_task(void* context, int task, int) {
    auto& self = *static_cast<ChunkAttention*>(context);
    const int64_t at = task * packed_words(self.chunk_.start + self.chunk_.qo_len, self.geometry_.head_dim);
    pack_chunk_bf16(self.geometry_, self.chunk_, task, self.keys_.data() + at, self.values_.data() + at);
}

void ChunkAttention::attend_task(void* context, int task, int thread) {
    auto& self = *static_cast<ChunkAttention*>(context);
    const Geometry& geometry = self.geometry_;
    const int head = task % geometry.num_heads, kv_head = head / (geometry.num_heads / geometry.num_kv_heads);
    const int blocks = (self.chunk_.qo_len + kQueryBlock - 1) / kQueryBlock;
    const int block =
        blocks - 1 - task / geometry.num_heads;  // the last ones see most keys: first, so that threads end together
    const int64_t at = kv_head * packed_words(self.chunk_.start + self.chunk_.qo_len, geometry.head_dim);
    attend_chunk_bf16(geometry, self.chunk_, head, block * kQueryBlock, self.keys_.data() + at,
                      self.values_.data() + at, self.scratch_base_ + thread * chunk_scratch(geometry.head_dim));
}

}  // namespace pdd::attention
