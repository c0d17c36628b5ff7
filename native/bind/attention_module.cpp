// Binds native/attention for the rank process. Takes addresses: torch tensors give theirs, and nothing here knows torch.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/paged_decode.h"
#include "attention/team.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdd::attention {
namespace {

// Decode attention of one rank; the geometry and the threads are fixed. Used by one thread.
class PagedDecode {
public:
    PagedDecode(const std::string& dtype, std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t page_size,
                std::int64_t dim, float scale, int threads)
        : num_heads_(num_heads), num_kv_heads_(num_kv_heads), page_size_(page_size), dim_(dim), scale_(scale),
          team_(std::max(threads, 1)) {
        if (dtype != "float32" && dtype != "bfloat16") throw std::invalid_argument("dtype " + dtype + " is not float32 or bfloat16");
        if (num_kv_heads < 1 || num_heads % num_kv_heads != 0) throw std::invalid_argument("num_kv_heads does not divide num_heads");
        if (page_size < 1 || dim < 1) throw std::invalid_argument("page_size and dim must be positive");
        element_ = dtype == "float32" ? Element::f32 : Element::bf16;
        scratch_.resize(static_cast<std::size_t>(team_.size()));
    }

    void run(std::uintptr_t q, std::int64_t q_stride, std::uintptr_t out, std::uintptr_t pages, std::uintptr_t table,
             std::int64_t table_stride, std::uintptr_t kv_len, std::int64_t rows) {
        const DecodeArgs args{.element = element_,
                              .q = reinterpret_cast<const void*>(q),
                              .q_stride = q_stride,
                              .out = reinterpret_cast<void*>(out),
                              .pages = reinterpret_cast<const void*>(pages),
                              .table = reinterpret_cast<const std::int64_t*>(table),
                              .table_stride = table_stride,
                              .kv_len = reinterpret_cast<const std::int64_t*>(kv_len),
                              .rows = rows,
                              .num_heads = num_heads_,
                              .num_kv_heads = num_kv_heads_,
                              .page_size = page_size_,
                              .dim = dim_,
                              .scale = scale_};
        const std::int64_t longest = rows > 0 ? *std::max_element(args.kv_len, args.kv_len + rows) : 0;
        const std::int64_t group = num_heads_ / num_kv_heads_, items = rows * num_kv_heads_;
        const auto size = static_cast<std::size_t>(group * longest + 2 * group * dim_);
        // One item at a time: rows differ in length, and a fixed cut would leave one thread with the long ones.
        std::atomic<std::int64_t> next{0};
        const std::function<void(int)> body = [&](int member) {
            auto& scratch = scratch_[static_cast<std::size_t>(member)];
            if (scratch.size() < size) scratch.resize(size);
            for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;)
                decode_items(args, i, i + 1, scratch.data() + 2 * group * dim_, scratch.data());
        };
        if (team_.size() == 1) body(0);
        else team_.run(body);
    }

private:
    Element element_{};
    std::int64_t num_heads_, num_kv_heads_, page_size_, dim_;
    float scale_;
    Team team_;
    std::vector<std::vector<float>> scratch_; // per member
};

} // namespace
} // namespace pdd::attention

NB_MODULE(_attention, m) {
    using pdd::attention::PagedDecode;
    nb::class_<PagedDecode>(m, "PagedDecode")
        .def(nb::init<const std::string&, std::int64_t, std::int64_t, std::int64_t, std::int64_t, float, int>(), "dtype"_a,
             nb::kw_only(), "num_heads"_a, "num_kv_heads"_a, "page_size"_a, "dim"_a, "scale"_a, "threads"_a)
        .def("run", &PagedDecode::run, "q"_a, "q_stride"_a, "out"_a, "pages"_a, "table"_a, "table_stride"_a, "kv_len"_a, "rows"_a,
             nb::call_guard<nb::gil_scoped_release>());
}
