// Decode attention over paged KV: many rows of one query token each, on a few threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/kernel.h"
#include "attention/pool.h"

namespace pdd::attention {

// Owner: one thread. plan() once per step, then run() once per layer.
class DecodeAttention {
  public:
    // instruction_set: as instruction_set() names them; "" for the best of this CPU.
    // Throws std::invalid_argument for a geometry that the kernel does not take, or a set that the CPU lacks.
    DecodeAttention(const Geometry& geometry, int num_pages, int num_threads, const std::string& instruction_set);

    // Copies the rows' tables ([num_rows][width] page numbers; row i uses as many as kv_lens[i] tokens need).
    // Throws std::out_of_range when a page is not in the region: nothing is read through such a table.
    void plan(const int64_t* tables, const int64_t* kv_lens, int num_rows, int width);

    // q: rows of [num_heads][head_dim], `q_stride` values apart. out: [num_rows][num_heads][value_dim]. window: each
    // row attends to its last `window` tokens; 0: to all.
    void run(const void* layer, const void* q, int64_t q_stride, void* out, int window);

    // "x86-64-v4", "x86-64-v3" or "base".
    const char* instruction_set() const { return instruction_set_; }

  private:
    static void attend_task(void* context, int task, int thread);

    Geometry geometry_;
    int num_pages_, num_rows_ = 0, width_ = 0, scratch_stride_;
    int parts_;  // tasks of one KV head of a row: its query heads, kMaxGroup at a time
    Attend attend_;
    const char* instruction_set_;
    std::vector<int32_t> tables_, kv_lens_;
    std::vector<float> scratch_;
    float* scratch_base_;  // first element of scratch_ on a 64-byte border
    const void* layer_ = nullptr;
    const char* q_ = nullptr;
    char* out_ = nullptr;
    int64_t q_stride_bytes_ = 0;
    int window_ = 0;
    Pool pool_;
};

}  // namespace pdd::attention
