// Vectors of 16 floats for the kernels, on GCC's and Clang's vector types. Each kernel is compiled with -m flags of its
// own, so everything here has internal linkage and is inlined always: no copy for one CPU may be linked into code for
// another.
#pragma once

#include <cstdint>

namespace pdd::attention {
namespace {

#define PDD_INLINE inline __attribute__((always_inline))

constexpr int kLanes = 16;

// GCC and Clang lower these to whatever registers the target has.
typedef float Floats __attribute__((vector_size(64)));
typedef float UnalignedFloats __attribute__((vector_size(64), aligned(4)));
typedef float Floats8 __attribute__((vector_size(32)));
typedef float Floats4 __attribute__((vector_size(16)));
typedef float UnalignedFloats4 __attribute__((vector_size(16), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t UnalignedHalves __attribute__((vector_size(32), aligned(2)));
typedef uint16_t Halves __attribute__((vector_size(32)));

PDD_INLINE Floats splat(float x) {
    return Floats{} + x;
}

PDD_INLINE Floats load(const float* p) {
    return *reinterpret_cast<const UnalignedFloats*>(p);
}

PDD_INLINE Floats load(const uint16_t* p) {  // bf16 is the upper half of a float32
    const Halves halves = *reinterpret_cast<const UnalignedHalves*>(p);
    return reinterpret_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
}

PDD_INLINE void store(float* p, Floats x) {
    *reinterpret_cast<UnalignedFloats*>(p) = x;
}

PDD_INLINE void store(uint16_t* p, Floats x) {  // to nearest even; NaN does not occur in a softmax of finite scores
    const Words bits = reinterpret_cast<Words>(x);
    const Words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    *reinterpret_cast<UnalignedHalves*>(p) = __builtin_convertvector(rounded, Halves);
}

PDD_INLINE Floats4 fold(Floats x) {  // lanes that are equal modulo 4, added up
    const Floats8 a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                      __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
}

PDD_INLINE float sum(Floats x) {
    const Floats4 a = fold(x);
    return (a[0] + a[2]) + (a[1] + a[3]);
}

// Four sums at a third of the price of one each.
PDD_INLINE Floats4 sums(const Floats* x) {
    const Floats4 a = fold(x[0]), b = fold(x[1]), c = fold(x[2]), d = fold(x[3]);
    const Floats4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const Floats4 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
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

}  // namespace
}  // namespace pdd::attention
