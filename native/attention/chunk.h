// Attention of prefill chunks over paged KV, bf16, on a few threads. For CPUs with AVX512_BF16.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/chunk_kernel.h"
#include "attention/pool.h"

namespace pdd::attention {

// Owner: one thread.
class ChunkAttention {
  public:
    // Whether this CPU has what the kernel needs. Another takes no other geometry: see the constructor.
    static bool supported();

    // Throws std::invalid_argument for a geometry that the kernel does not take: bf16, a head_dim that is a multiple
    // of 32.
    ChunkAttention(const Geometry& geometry, int num_pages, int num_threads);

    // One chunk of one layer: queries at positions [start, start + qo_len) over the pages that `table` names, of which
    // start + qo_len tokens are there, the chunk's own included. q: rows of [num_heads][head_dim], `q_stride` values
    // apart. window: tokens that a query sees, its own included; 0: all. Throws std::out_of_range for a page that the
    // region does not have, or too few of them.
    void run(const void* layer, const int64_t* table, int num_table, int start, int qo_len, const void* q,
             int64_t q_stride, void* out, int window);

  private:
    static void pack_task(void* context, int task, int thread);
    static void attend_task(void* context, int task, int thread);

    Geometry geometry_;
    int num_pages_;
    Chunk chunk_{};
    std::vector<int32_t> table_;
    std::vector<uint32_t> keys_, values_;  // [kv head][packed_words]; kept from call to call
    std::vector<float> scratch_;
    float* scratch_base_;  // first element of scratch_ on a 64-byte border
    Pool pool_;
};

}  // namespace pdd::attention
