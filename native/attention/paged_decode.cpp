#include "attention/paged_decode.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

// One source, compiled for each level of the machine's vector unit; the loader picks at start-up.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define PDD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PDD_CLONES
#endif

namespace pdd::attention {
namespace {

using Bf16 = std::uint16_t;

inline float widen(float x) { return x; }
inline float widen(Bf16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16); }

inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, Bf16& to) {
    const auto bits = std::bit_cast<std::uint32_t>(x); // round to nearest even; attention output is finite
    to = static_cast<Bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename T>
inline __attribute__((always_inline)) void one_item(const DecodeArgs& a, std::int64_t row, std::int64_t kv_head, float* scores,
                                                    float* acc) {
    const std::int64_t group = a.num_heads / a.num_kv_heads, dim = a.dim, slots = a.page_size, len = a.kv_len[row];
    const std::int64_t head_elements = 2 * slots * dim, page_elements = a.num_kv_heads * head_elements;
    const T* base = static_cast<const T*>(a.pages) + kv_head * head_elements;
    const std::int64_t* table = a.table + row * a.table_stride;
    const T* q = static_cast<const T*>(a.q) + row * a.q_stride + kv_head * group * dim;
    float* wide_q = acc + group * dim; // the queries, scaled, in fp32
    for (std::int64_t i = 0; i < group * dim; ++i) wide_q[i] = widen(q[i]) * a.scale;

    for (std::int64_t first = 0; first < len; first += slots) {
        const T* k = base + table[first / slots] * page_elements;
        const std::int64_t n = std::min(slots, len - first);
        for (std::int64_t t = 0; t < n; ++t, k += dim) {
            for (std::int64_t g = 0; g < group; ++g) {
                const float* query = wide_q + g * dim;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (std::int64_t i = 0; i < dim; ++i) sum += query[i] * widen(k[i]);
                scores[g * len + first + t] = sum;
            }
        }
    }
    std::fill_n(acc, group * dim, 0.0F);
    for (std::int64_t g = 0; g < group; ++g) {
        float* s = scores + g * len;
        float most = s[0], total = 0;
#pragma omp simd reduction(max : most)
        for (std::int64_t t = 0; t < len; ++t) most = std::max(most, s[t]);
        for (std::int64_t t = 0; t < len; ++t) {
            s[t] = std::exp(s[t] - most);
            total += s[t];
        }
        const float inverse = 1.0F / total;
#pragma omp simd
        for (std::int64_t t = 0; t < len; ++t) s[t] *= inverse;
    }
    for (std::int64_t first = 0; first < len; first += slots) {
        const T* v = base + table[first / slots] * page_elements + slots * dim;
        const std::int64_t n = std::min(slots, len - first);
        for (std::int64_t t = 0; t < n; ++t, v += dim) {
            for (std::int64_t g = 0; g < group; ++g) {
                const float weight = scores[g * len + first + t];
                float* sum = acc + g * dim;
#pragma omp simd
                for (std::int64_t i = 0; i < dim; ++i) sum[i] += weight * widen(v[i]);
            }
        }
    }
    T* out = static_cast<T*>(a.out) + (row * a.num_heads + kv_head * group) * dim;
    for (std::int64_t i = 0; i < group * dim; ++i) narrow(acc[i], out[i]);
}

PDD_CLONES void items_f32(const DecodeArgs& a, std::int64_t begin, std::int64_t end, float* scores, float* acc) {
    for (std::int64_t i = begin; i < end; ++i) one_item<float>(a, i / a.num_kv_heads, i % a.num_kv_heads, scores, acc);
}

PDD_CLONES void items_bf16(const DecodeArgs& a, std::int64_t begin, std::int64_t end, float* scores, float* acc) {
    for (std::int64_t i = begin; i < end; ++i) one_item<Bf16>(a, i / a.num_kv_heads, i % a.num_kv_heads, scores, acc);
}

} // namespace

void decode_items(const DecodeArgs& args, std::int64_t begin, std::int64_t end, float* scores, float* acc) {
    (args.element == Element::f32 ? items_f32 : items_bf16)(args, begin, end, scores, acc);
}

} // namespace pdd::attention
