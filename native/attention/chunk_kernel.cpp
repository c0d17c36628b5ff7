// See chunk_kernel.h.
//
// Flash attention: for a block of queries, 128 keys at a time are scored, turned into weights relative to the largest
// score so far, and their values added up. Eight queries are done together: each 64-byte load of K or V serves eight
// products.
#include "attention/chunk_kernel.h"

#include <immintrin.h>

#include "attention/vectors.h"

namespace pdd::attention {
namespace {

constexpr int kRows = 8;  // queries done together
constexpr float kNever = -1e30f;

PDD_INLINE __m512 load16(const float* p) {
    return _mm512_loadu_ps(p);
}

struct Block {
    const uint32_t* q[kRows];  // pairs of dims; rows beyond the last repeat it
    int first_key, num_keys;   // num_keys: a multiple of kKeyGroup
};

// scores[r][i] = scale * q[r] . K[first_key + i]
PDD_INLINE void score_block(const Block& block, const uint32_t* keys, int dim, float scale, float* scores) {
    const int pairs = dim / 2;
    for (int at = 0; at < block.num_keys; at += 2 * kKeyGroup) {
        const bool two = at + kKeyGroup < block.num_keys;
        const uint32_t* left = keys + static_cast<int64_t>(block.first_key + at) * pairs;
        const uint32_t* right = two ? left + kKeyGroup * pairs : left;
        __m512 a[kRows], b[kRows];
        for (int r = 0; r < kRows; ++r) a[r] = b[r] = _mm512_setzero_ps();
        for (int pair = 0; pair < pairs; ++pair, left += kKeyGroup, right += kKeyGroup) {
            const auto k0 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(left));
            const auto k1 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(right));
            for (int r = 0; r < kRows; ++r) {
                const auto q = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(block.q[r][pair])));
                a[r] = _mm512_dpbf16_ps(a[r], q, k0);
                b[r] = _mm512_dpbf16_ps(b[r], q, k1);
            }
        }
        const __m512 by = _mm512_set1_ps(scale);
        for (int r = 0; r < kRows; ++r) {
            _mm512_store_ps(scores + r * kKeyBlock + at, _mm512_mul_ps(a[r], by));
            if (two) _mm512_store_ps(scores + r * kKeyBlock + at + kKeyGroup, _mm512_mul_ps(b[r], by));
        }
    }
}

// Hides the keys before `first` and after `last` (counted from the block's first).
PDD_INLINE void hide_outside(float* scores, int num_keys, int first, int last) {
    for (int i = 0; i < first && i < num_keys; ++i) scores[i] = kNever;
    for (int i = last < 0 ? 0 : last + 1; i < num_keys; ++i) scores[i] = kNever;
}

// The earliest key that a query at `position` sees.
PDD_INLINE int earliest(const Chunk& chunk, int position) {
    return chunk.window > 0 && chunk.window <= position ? position - chunk.window + 1 : 0;
}

// Scores to weights, as pairs of bf16; returns by how much what was summed before must shrink.
PDD_INLINE float weigh(float* scores, int num_keys, float* largest, float* total, uint32_t* weights) {
    __m512 most = _mm512_set1_ps(*largest);
    for (int i = 0; i < num_keys; i += kKeyGroup) most = _mm512_max_ps(most, load16(scores + i));
    const float now = _mm512_reduce_max_ps(most);
    const float shrink = exp_nonpositive(splat(*largest - now))[0];
    Floats sums{};
    for (int i = 0; i < num_keys; i += kKeyGroup) {
        const Floats e = exp_nonpositive(load(scores + i) - now);
        sums += e;
        const __m256bh rounded = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(e));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + i / 2), reinterpret_cast<__m256i>(rounded));
    }
    *largest = now;
    *total = *total * shrink + sum(sums);
    return shrink;
}

// out[r] = out[r] * shrink[r] + weights[r] . V
PDD_INLINE void add_values(const uint32_t* values, const uint32_t* weights, int num_keys, int dim, const float* shrink,
                           float* out) {
    for (int d = 0; d < dim; d += 2 * kKeyGroup) {
        __m512 a[kRows], b[kRows];
        for (int r = 0; r < kRows; ++r) {
            const __m512 by = _mm512_set1_ps(shrink[r]);
            a[r] = _mm512_mul_ps(load16(out + r * dim + d), by);
            b[r] = _mm512_mul_ps(load16(out + r * dim + d + kKeyGroup), by);
        }
        const uint32_t* v = values + d;
        for (int pair = 0; pair < num_keys / 2; ++pair, v += dim) {
            const auto v0 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(v));
            const auto v1 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(v + kKeyGroup));
            for (int r = 0; r < kRows; ++r) {
                const auto w = reinterpret_cast<__m512bh>(
                    _mm512_set1_epi32(static_cast<int>(weights[r * (kKeyBlock / 2) + pair])));
                a[r] = _mm512_dpbf16_ps(a[r], w, v0);
                b[r] = _mm512_dpbf16_ps(b[r], w, v1);
            }
        }
        for (int r = 0; r < kRows; ++r) {
            _mm512_storeu_ps(out + r * dim + d, a[r]);
            _mm512_storeu_ps(out + r * dim + d + kKeyGroup, b[r]);
        }
    }
}

}  // namespace

void pack_chunk_bf16(const Geometry& geometry, const Chunk& chunk, int kv_head, uint32_t* keys, uint32_t* values) {
    const int dim = geometry.head_dim, pairs = dim / 2, kv_len = chunk.start + chunk.qo_len;
    const int64_t tile = static_cast<int64_t>(geometry.page_size) * dim;
    const auto* base = static_cast<const uint16_t*>(chunk.layer) + kv_head * 2 * tile;
    const auto row = [&](int key) {
        return base + chunk.table[key / geometry.page_size] * (geometry.num_kv_heads * 2 * tile) +
               static_cast<int64_t>(key % geometry.page_size) * dim;
    };
    const int begin = earliest(chunk, chunk.start) / kKeyBlock * kKeyBlock;
    keys += static_cast<int64_t>(begin) * pairs, values += static_cast<int64_t>(begin) * pairs;
    for (int first = begin; first < kv_len;
         first += kKeyGroup, keys += kKeyGroup * pairs, values += kKeyGroup * pairs) {
        for (int i = 0; i < kKeyGroup; ++i) {
            const auto* k = first + i < kv_len ? reinterpret_cast<const uint32_t*>(row(first + i)) : nullptr;
            for (int pair = 0; pair < pairs; ++pair) keys[pair * kKeyGroup + i] = k != nullptr ? k[pair] : 0;
        }
        for (int i = 0; i < kKeyGroup; i += 2) {
            const uint16_t* even = first + i < kv_len ? row(first + i) + tile : nullptr;
            const uint16_t* odd = first + i + 1 < kv_len ? row(first + i + 1) + tile : nullptr;
            uint32_t* target = values + i / 2 * dim;
            for (int d = 0; d < dim; ++d)
                target[d] =
                    (even != nullptr ? even[d] : 0u) | (odd != nullptr ? static_cast<uint32_t>(odd[d]) << 16 : 0u);
        }
    }
}

void attend_chunk_bf16(const Geometry& geometry, const Chunk& chunk, int head, int first, const uint32_t* keys,
                       const uint32_t* values, float* scratch) {
    const int dim = geometry.head_dim, pairs = dim / 2;
    const int num = chunk.qo_len - first < kQueryBlock ? chunk.qo_len - first : kQueryBlock;
    float* out = scratch;  // [kQueryBlock][dim]
    float* largest = out + kQueryBlock * dim;
    float* total = largest + kQueryBlock;
    float* scores = total + kQueryBlock;                                      // [kRows][kKeyBlock]
    auto* weights = reinterpret_cast<uint32_t*>(scores + kRows * kKeyBlock);  // [kRows][kKeyBlock / 2]
    for (int i = 0; i < kQueryBlock * dim; i += kLanes) store(out + i, Floats{});
    for (int r = 0; r < kQueryBlock; ++r) largest[r] = -3e38f, total[r] = 0;
    const int seen = chunk.start + first + num;  // keys that the last query sees
    const int begin = earliest(chunk, chunk.start + first) / kKeyBlock * kKeyBlock;
    for (int first_key = begin; first_key < seen; first_key += kKeyBlock) {
        const int left = (seen - first_key + kKeyGroup - 1) / kKeyGroup * kKeyGroup;
        for (int r0 = 0; r0 < num; r0 += kRows) {
            const int position = chunk.start + first + r0;  // of the first of these queries
            const int oldest = earliest(chunk, position);
            if (first_key >= position + kRows || first_key + kKeyBlock <= oldest)
                continue;  // none of them sees the block
            Block block{{}, first_key, left < kKeyBlock ? left : kKeyBlock};
            for (int r = 0; r < kRows; ++r) {
                const int index = first + (r0 + r < num ? r0 + r : num - 1);
                block.q[r] = reinterpret_cast<const uint32_t*>(chunk.q + index * chunk.q_stride + head * dim);
            }
            score_block(block, keys, dim, geometry.scale, scores);
            float shrink[kRows];
            for (int r = 0; r < kRows; ++r) {
                // A row that sees nothing of its first block weighs it all alike; what it sees later shrinks that to 0.
                hide_outside(scores + r * kKeyBlock, block.num_keys, earliest(chunk, position + r) - first_key,
                             position + r - first_key);
                shrink[r] = weigh(scores + r * kKeyBlock, block.num_keys, largest + r0 + r, total + r0 + r,
                                  weights + r * (kKeyBlock / 2));
            }
            add_values(values + static_cast<int64_t>(first_key) * pairs, weights, block.num_keys, dim, shrink,
                       out + r0 * dim);
        }
    }
    for (int r = 0; r < num; ++r) {
        uint16_t* target = chunk.out + (static_cast<int64_t>(first + r) * geometry.num_heads + head) * dim;
        const float by = 1.0f / total[r];
        for (int d = 0; d < dim; d += kLanes) store(target + d, load(out + r * dim + d) * by);
    }
}

}  // namespace pdd::attention
