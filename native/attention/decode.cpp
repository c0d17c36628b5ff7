#include "attention/decode.h"

#include <stdexcept>
#include <string>

namespace pdd::attention {
namespace {

constexpr int kLanes = 16;  // floats of a 64-byte vector

struct Choice {
    Attend attend;
    const char* name;
};

// The best kernel for this CPU, or the named one.
Choice choose(const std::string& wanted) {
    std::vector<Choice> usable{{attend_base, "base"}};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        usable.push_back({attend_v3, "x86-64-v3"});
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd"))
        usable.push_back({attend_v4, "x86-64-v4"});
#endif
    if (wanted.empty()) return usable.back();
    for (const Choice& choice : usable)
        if (wanted == choice.name) return choice;
    throw std::invalid_argument("this CPU cannot run the " + wanted + " kernel");
}

}  // namespace

DecodeAttention::DecodeAttention(const Geometry& geometry, int num_pages, int num_threads,
                                 const std::string& instruction_set)
    : geometry_(geometry), num_pages_(num_pages), pool_(num_threads) {
    if (geometry.num_kv_heads < 1 || geometry.num_heads % geometry.num_kv_heads || geometry.head_dim < kLanes ||
        geometry.head_dim % kLanes || geometry.value_dim < kLanes || geometry.value_dim % kLanes ||
        geometry.value_dim > geometry.head_dim || geometry.tiles < 1 || geometry.tiles > 2 ||
        (geometry.tiles == 2 && geometry.value_dim != geometry.head_dim) || geometry.page_size < 1 || num_pages < 1 ||
        num_threads < 1)
        throw std::invalid_argument(
            "decode attention needs whole groups of heads, a head_dim that is a multiple of 16, and values as wide as "
            "keys, or, with one tile, a multiple of 16 that is no wider");
    parts_ = (geometry.num_heads / geometry.num_kv_heads + kMaxGroup - 1) / kMaxGroup;
    const auto [attend, name] = choose(instruction_set);
    attend_ = attend;
    instruction_set_ = name;
    scratch_stride_ = kMaxGroup * (2 * geometry.head_dim + kChunk);  // a multiple of 16, as head_dim is
    scratch_.resize(static_cast<size_t>(scratch_stride_) * num_threads + kLanes);
    const auto address = reinterpret_cast<uintptr_t>(scratch_.data());
    scratch_base_ = reinterpret_cast<float*>((address + 63) / 64 * 64);
}

void DecodeAttention::plan(const int64_t* tables, const int64_t* kv_lens, int num_rows, int width) {
    num_rows_ = 0;  // a plan that is refused leaves nothing to run
    tables_.assign(static_cast<size_t>(num_rows) * width, 0);
    kv_lens_.resize(num_rows);
    for (int row = 0; row < num_rows; ++row) {
        const int64_t pages = (kv_lens[row] + geometry_.page_size - 1) / geometry_.page_size;
        if (kv_lens[row] < 1 || pages > width)
            throw std::out_of_range("row " + std::to_string(row) + " of " + std::to_string(kv_lens[row]) +
                                    " tokens does not fit a table of " + std::to_string(width) + " pages");
        kv_lens_[row] = static_cast<int32_t>(kv_lens[row]);
        for (int64_t i = 0; i < pages; ++i) {
            const int64_t page = tables[static_cast<int64_t>(row) * width + i];
            if (page < 0 || page >= num_pages_)
                throw std::out_of_range("row " + std::to_string(row) + " names page " + std::to_string(page) + " of " +
                                        std::to_string(num_pages_));
            tables_[static_cast<int64_t>(row) * width + i] = static_cast<int32_t>(page);
        }
    }
    num_rows_ = num_rows;
    width_ = width;
}

void DecodeAttention::run(const void* layer, const void* q, int64_t q_stride, void* out, int window) {
    layer_ = layer;
    window_ = window;
    q_ = static_cast<const char*>(q);
    out_ = static_cast<char*>(out);
    q_stride_bytes_ = q_stride * (geometry_.bf16 ? 2 : 4);
    pool_.run(num_rows_ * geometry_.num_kv_heads * parts_, attend_task, this);
}

void DecodeAttention::attend_task(void* context, int task, int thread) {
    auto& self = *static_cast<DecodeAttention*>(context);
    const Geometry& geometry = self.geometry_;
    const int part = task % self.parts_, kv_head = task / self.parts_ % geometry.num_kv_heads;
    const int row = task / self.parts_ / geometry.num_kv_heads, group = geometry.num_heads / geometry.num_kv_heads;
    const int first = part * kMaxGroup, count = group - first < kMaxGroup ? group - first : kMaxGroup;
    const int64_t out_stride = static_cast<int64_t>(geometry.num_heads) * geometry.value_dim * (geometry.bf16 ? 2 : 4);
    const int32_t kv_len = self.kv_lens_[row];
    const int32_t begin = self.window_ > 0 && self.window_ < kv_len ? kv_len - self.window_ : 0;
    const Row view{self.q_ + row * self.q_stride_bytes_,
                   self.layer_,
                   self.tables_.data() + static_cast<int64_t>(row) * self.width_,
                   begin,
                   kv_len,
                   self.out_ + row * out_stride};
    self.attend_(geometry, view, kv_head * group + first, count,
                 self.scratch_base_ + static_cast<int64_t>(thread) * self.scratch_stride_);
}

}  // namespace pdd::attention
