// See kernel.h. PDD_ATTEND names the function that this compilation defines.
//
// Scores are made a chunk of tokens at a time, so that K and V are each read once and scratch memory does not grow with
// the context (online softmax). Up to four query heads that share a KV head are done together: a K or V value is loaded
// and widened once for all of them. Sums are float32 whatever the pages hold.
#include "attention/kernel.h"

#include "attention/vectors.h"

namespace pdd::attention {
namespace {

// K (or V) tiles of one head: where the row of a token is.
template <class T>
struct Tiles {
    const T* base;  // K tile of this head in page 0
    int64_t page_stride;
    int head_dim, page_size;
    const int32_t* table;

    PDD_INLINE const T* run(int token, int limit, int* length) const {
        const int slot = token % page_size;
        *length = page_size - slot < limit ? page_size - slot : limit;
        return base + table[token / page_size] * page_stride + static_cast<int64_t>(slot) * head_dim;
    }
};

// Asks for the cache lines of `count` values.
template <class T>
PDD_INLINE void prefetch(const T* p, int count) {
    constexpr int kLine = 64 / sizeof(T);
    for (int i = 0; i < count; i += kLine) __builtin_prefetch(p + i);
}

// Dot products of G queries with R rows of K, to scores[g][0 .. R - 1].
template <class T, int G, int R>
PDD_INLINE void score_rows(const T* k, const float* q, int dim, float* scores) {
    Floats dots[G][R] = {};
    for (int d = 0; d < dim; d += kLanes) {
        Floats values[R];
        for (int r = 0; r < R; ++r) values[r] = load(k + r * dim + d);
        for (int g = 0; g < G; ++g) {
            const Floats query = load(q + g * dim + d);
            for (int r = 0; r < R; ++r) dots[g][r] += query * values[r];
        }
    }
    for (int g = 0; g < G; ++g) {
        if constexpr (R == 4)
            *reinterpret_cast<UnalignedFloats4*>(scores + g * kChunk) = sums(dots[g]);
        else
            for (int r = 0; r < R; ++r) scores[g * kChunk + r] = sum(dots[g][r]);
    }
}

// scores[g][i] = q[g] . K[first + i] for i < count. Pages are scattered, so the hardware does not foresee the next one:
// each row asks for the same row of the next page's K, and for its own V, which is read next. limit: tokens there are.
// Measured on cold pages (2026-11-30, 8 rows of 512 tokens, bf16, contended core): 597 us a layer without, 397 us with.
template <class T, int G>
PDD_INLINE void score(const Tiles<T>& keys, const float* q, int first, int count, int limit, float* scores) {
    const int dim = keys.head_dim, tile = keys.page_size * dim;
    for (int i = 0; i < count;) {
        int length, ignored;
        const T* k = keys.run(first + i, count - i, &length);
        const T* next = first + i + length < limit ? keys.run(first + i + length, 1, &ignored) : k;
        for (const int end = i + length; i < end;) {
            if (end - i >= 4) {
                prefetch(next, 4 * dim);
                prefetch(k + tile, 4 * dim);
                score_rows<T, G, 4>(k, q, dim, scores + i);
                i += 4, k += 4 * dim, next += 4 * dim;
            } else {
                score_rows<T, G, 1>(k, q, dim, scores + i);
                i += 1, k += dim;
            }
        }
    }
}

// Turns count scores into e^(score - largest) and returns their sum. What is beyond count in the last vector is unused.
PDD_INLINE float exponentiate(float* scores, int count, float largest) {
    Floats total{};
    for (int i = 0; i < count; i += kLanes) {
        const Floats weights = exp_nonpositive(load(scores + i) - largest);
        store(scores + i, weights);
        if (i + kLanes <= count) total += weights;
    }
    float result = sum(total);
    for (int i = count / kLanes * kLanes; i < count; ++i) result += scores[i];
    return result;
}

// out[g] += sum over i of weights[g][i] * V[first + i]
template <class T, int G, int W>
PDD_INLINE void accumulate_columns(const T* v, int length, int stride, int dim, const float* weights, float* out) {
    Floats sums[G][W];
    for (int g = 0; g < G; ++g)
        for (int w = 0; w < W; ++w) sums[g][w] = load(out + g * dim + w * kLanes);
    for (int i = 0; i < length; ++i, v += stride) {
        Floats values[W];
        for (int w = 0; w < W; ++w) values[w] = load(v + w * kLanes);
        for (int g = 0; g < G; ++g)
            for (int w = 0; w < W; ++w) sums[g][w] += weights[g * kChunk + i] * values[w];
    }
    for (int g = 0; g < G; ++g)
        for (int w = 0; w < W; ++w) store(out + g * dim + w * kLanes, sums[g][w]);
}

template <class T, int G>
PDD_INLINE void accumulate(const Tiles<T>& values, const float* weights, int first, int count, int dim, float* out) {
    const int stride = values.head_dim;
    for (int i = 0; i < count;) {
        int length;
        const T* v = values.run(first + i, count - i, &length);
        int d = 0;
        for (; d + 2 * kLanes <= dim; d += 2 * kLanes)
            accumulate_columns<T, G, 2>(v + d, length, stride, dim, weights + i, out + d);
        if (d < dim) accumulate_columns<T, G, 1>(v + d, length, stride, dim, weights + i, out + d);
        i += length;
    }
}

// Query heads [head, head + G) over the KV head whose tiles are given.
template <class T, int G>
void attend_group(const Geometry& geometry, const Row& row, const Tiles<T>& keys, int head, float* scratch) {
    const int dim = geometry.head_dim, value_dim = geometry.value_dim;
    float* q = scratch;
    float* out = q + G * dim;  // [G][value_dim]
    float* scores = out + G * dim;
    const T* source = static_cast<const T*>(row.q) + static_cast<int64_t>(head) * dim;
    for (int i = 0; i < G * dim; i += kLanes) {
        store(q + i, load(source + i) * geometry.scale);
        store(out + i, Floats{});
    }
    for (int i = 0; i < G * kChunk; i += kLanes) store(scores + i, Floats{});
    Tiles<T> values = keys;
    if (geometry.tiles == 2) values.base += static_cast<int64_t>(geometry.page_size) * dim;
    float largest[G], total[G];
    for (int g = 0; g < G; ++g) largest[g] = -3e38f, total[g] = 0;
    for (int first = row.begin; first < row.kv_len; first += kChunk) {
        const int count = row.kv_len - first < kChunk ? row.kv_len - first : kChunk;
        score<T, G>(keys, q, first, count, row.kv_len, scores);
        for (int g = 0; g < G; ++g) {
            float most = largest[g];
            for (int i = 0; i < count; ++i) most = scores[g * kChunk + i] > most ? scores[g * kChunk + i] : most;
            if (first > row.begin && most > largest[g]) {  // what is summed so far was relative to a smaller maximum
                const float shrink = exp_nonpositive(splat(largest[g] - most))[0];
                total[g] *= shrink;
                float* sums = out + g * value_dim;
                for (int d = 0; d < value_dim; d += kLanes) store(sums + d, load(sums + d) * shrink);
            }
            largest[g] = most;
            total[g] += exponentiate(scores + g * kChunk, count, most);
        }
        accumulate<T, G>(values, scores, first, count, value_dim, out);
    }
    T* target = static_cast<T*>(row.out) + static_cast<int64_t>(head) * value_dim;
    for (int g = 0; g < G; ++g)
        for (int d = 0; d < value_dim; d += kLanes)
            store(target + g * value_dim + d, load(out + g * value_dim + d) * (1.0f / total[g]));
}

template <class T>
PDD_INLINE void attend(const Geometry& geometry, const Row& row, int head, int count, float* scratch) {
    const int64_t head_stride = static_cast<int64_t>(geometry.tiles) * geometry.page_size * geometry.head_dim;
    const int kv_head = head / (geometry.num_heads / geometry.num_kv_heads);
    const Tiles<T> keys{static_cast<const T*>(row.layer) + kv_head * head_stride, geometry.num_kv_heads * head_stride,
                        geometry.head_dim, geometry.page_size, row.table};
    switch (count) {
        case 1:
            attend_group<T, 1>(geometry, row, keys, head, scratch);
            break;
        case 2:
            attend_group<T, 2>(geometry, row, keys, head, scratch);
            break;
        case 3:
            attend_group<T, 3>(geometry, row, keys, head, scratch);
            break;
        default:
            attend_group<T, kMaxGroup>(geometry, row, keys, head, scratch);
            break;
    }
}

}  // namespace

void PDD_ATTEND(const Geometry& geometry, const Row& row, int head, int count, float* scratch) {
    if (geometry.bf16)
        attend<uint16_t>(geometry, row, head, count, scratch);
    else
        attend<float>(geometry, row, head, count, scratch);
}

}  // namespace pdd::attention
