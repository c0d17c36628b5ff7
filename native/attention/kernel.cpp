// See kernel.h. PDD_ATTEND names the function that this compilation defines.
//
// Scores are made a chunk of tokens at a time, so that K and V are each read once and scratch memory does not grow with the
// context (online softmax). Up to four query heads that share a KV head are done together: a K or V value is loaded and
// widened once for all of them. Sums are float32 whatever the pages hold.
#include "attention/kernel.h"

namespace pdd::attention {
namespace {

#define PDD_INLINE inline __attribute__((always_inline))

constexpr int kLanes = 16;

// GCC and Clang lower these to whatever registers the target has.
typedef float Floats __attribute__((vector_size(64)));
typedef float UnalignedFloats __attribute__((vector_size(64), aligned(4)));
typedef float Floats8 __attribute__((vector_size(32)));
typedef float Floats4 __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t UnalignedHalves __attribute__((vector_size(32), aligned(2)));
typedef uint16_t Halves __attribute__((vector_size(32)));

PDD_INLINE Floats splat(float x) { return Floats{} + x; }

PDD_INLINE Floats load(const float* p) { return *reinterpret_cast<const UnalignedFloats*>(p); }

PDD_INLINE Floats load(const uint16_t* p) {  // bf16 is the upper half of a float32
    const Halves halves = *reinterpret_cast<const UnalignedHalves*>(p);
    return reinterpret_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
}

PDD_INLINE void store(float* p, Floats x) { *reinterpret_cast<UnalignedFloats*>(p) = x; }

PDD_INLINE void store(uint16_t* p, Floats x) {  // to nearest even; NaN does not occur in a softmax of finite scores
    const Words bits = reinterpret_cast<Words>(x);
    const Words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    *reinterpret_cast<UnalignedHalves*>(p) = __builtin_convertvector(rounded, Halves);
}

PDD_INLINE float sum(Floats x) {
    const Floats8 a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                      __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    const Floats4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

// e^x for x <= 0, within 2 units in the last place; 0 below -87.
PDD_INLINE Floats exp_nonpositive(Floats x) {
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Floats n = (x * 1.44269504f + magic) - magic;
    const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
    Floats y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    const Floats result = y * reinterpret_cast<Floats>(exponent);
    return x < splat(-87.0f) ? Floats{} : result;
}

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

// scores[g][i] = q[g] . K[first + i] for i < count
template <class T, int G>
PDD_INLINE void score(const Tiles<T>& keys, const float* q, int first, int count, float* scores) {
    const int dim = keys.head_dim;
    for (int i = 0; i < count;) {
        int length;
        const T* k = keys.run(first + i, count - i, &length);
        for (const int end = i + length; i < end; ++i, k += dim) {
            Floats dots[G] = {};
            for (int d = 0; d < dim; d += kLanes) {
                const Floats values = load(k + d);
                for (int g = 0; g < G; ++g) dots[g] += load(q + g * dim + d) * values;
            }
            for (int g = 0; g < G; ++g) scores[g * kChunk + i] = sum(dots[g]);
        }
    }
}

// Turns count scores into e^(score - largest) and returns their sum. What lies beyond count in the last vector is not used.
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
PDD_INLINE void accumulate_columns(const T* v, int length, int dim, const float* weights, float* out) {
    Floats sums[G][W];
    for (int g = 0; g < G; ++g)
        for (int w = 0; w < W; ++w) sums[g][w] = load(out + g * dim + w * kLanes);
    for (int i = 0; i < length; ++i, v += dim) {
        Floats values[W];
        for (int w = 0; w < W; ++w) values[w] = load(v + w * kLanes);
        for (int g = 0; g < G; ++g)
            for (int w = 0; w < W; ++w) sums[g][w] += weights[g * kChunk + i] * values[w];
    }
    for (int g = 0; g < G; ++g)
        for (int w = 0; w < W; ++w) store(out + g * dim + w * kLanes, sums[g][w]);
}

template <class T, int G>
PDD_INLINE void accumulate(const Tiles<T>& values, const float* weights, int first, int count, float* out) {
    const int dim = values.head_dim;
    for (int i = 0; i < count;) {
        int length;
        const T* v = values.run(first + i, count - i, &length);
        int d = 0;
        for (; d + 2 * kLanes <= dim; d += 2 * kLanes)
            accumulate_columns<T, G, 2>(v + d, length, dim, weights + i, out + d);
        if (d < dim) accumulate_columns<T, G, 1>(v + d, length, dim, weights + i, out + d);
        i += length;
    }
}

// Query heads [head, head + G) over the KV head whose tiles are given.
template <class T, int G>
void attend_group(const Geometry& geometry, const Row& row, const Tiles<T>& keys, int head, float* scratch) {
    const int dim = geometry.head_dim;
    float* q = scratch;
    float* out = q + G * dim;
    float* scores = out + G * dim;
    const T* source = static_cast<const T*>(row.q) + static_cast<int64_t>(head) * dim;
    for (int i = 0; i < G * dim; i += kLanes) {
        store(q + i, load(source + i) * geometry.scale);
        store(out + i, Floats{});
    }
    for (int i = 0; i < G * kChunk; i += kLanes) store(scores + i, Floats{});
    Tiles<T> values = keys;
    values.base += static_cast<int64_t>(geometry.page_size) * dim;
    float largest[G], total[G];
    for (int g = 0; g < G; ++g) largest[g] = -3e38f, total[g] = 0;
    for (int first = 0; first < row.kv_len; first += kChunk) {
        const int count = row.kv_len - first < kChunk ? row.kv_len - first : kChunk;
        score<T, G>(keys, q, first, count, scores);
        for (int g = 0; g < G; ++g) {
            float most = largest[g];
            for (int i = 0; i < count; ++i) most = scores[g * kChunk + i] > most ? scores[g * kChunk + i] : most;
            if (first > 0 && most > largest[g]) {  // what is summed so far was relative to a smaller maximum
                const float shrink = exp_nonpositive(splat(largest[g] - most))[0];
                total[g] *= shrink;
                for (int d = 0; d < dim; d += kLanes) store(out + g * dim + d, load(out + g * dim + d) * shrink);
            }
            largest[g] = most;
            total[g] += exponentiate(scores + g * kChunk, count, most);
        }
        accumulate<T, G>(values, scores, first, count, out);
    }
    T* target = static_cast<T*>(row.out) + static_cast<int64_t>(head) * dim;
    for (int g = 0; g < G; ++g)
        for (int d = 0; d < dim; d += kLanes) store(target + g * dim + d, load(out + g * dim + d) * (1.0f / total[g]));
}

template <class T>
PDD_INLINE void attend(const Geometry& geometry, const Row& row, int kv_head, float* scratch) {
    const int64_t tile = static_cast<int64_t>(geometry.page_size) * geometry.head_dim;
    const Tiles<T> keys{static_cast<const T*>(row.layer) + kv_head * 2 * tile, geometry.num_kv_heads * 2 * tile,
                        geometry.head_dim, geometry.page_size, row.table};
    const int group = geometry.num_heads / geometry.num_kv_heads;
    int head = kv_head * group;
    const int end = head + group;
    for (; head + kMaxGroup <= end; head += kMaxGroup) attend_group<T, kMaxGroup>(geometry, row, keys, head, scratch);
    switch (end - head) {
        case 1: attend_group<T, 1>(geometry, row, keys, head, scratch); break;
        case 2: attend_group<T, 2>(geometry, row, keys, head, scratch); break;
        case 3: attend_group<T, 3>(geometry, row, keys, head, scratch); break;
        default: break;
    }
}

}  // namespace

void PDD_ATTEND(const Geometry& geometry, const Row& row, int kv_head, float* scratch) {
    if (geometry.bf16)
        attend<uint16_t>(geometry, row, kv_head, scratch);
    else
        attend<float>(geometry, row, kv_head, scratch);
}

}  // namespace pdd::attention
