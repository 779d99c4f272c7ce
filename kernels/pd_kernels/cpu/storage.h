// Storage dtypes: how sixteen numbers are read from memory into float32 lanes, and rounded back.
#pragma once

#include "lanes.h"

namespace pd {

struct bf16 { uint16_t bits; };

enum DType : int { BF16 = 0, F32 = 1 };

inline V load(const bf16* from) { return load_bf16(&from->bits); }
inline void store(bf16* to, V x) { store_upper(&to->bits, round_to_bf16(x)); }

inline V load_n(const bf16* from, int n) {
    bf16 lanes[LANES] = {};
    std::memcpy(lanes, from, n * sizeof(bf16));
    return load(lanes);
}
inline void store_n(bf16* to, V x, int n) {
    bf16 lanes[LANES];
    store(lanes, x);
    std::memcpy(to, lanes, n * sizeof(bf16));
}

// f(i, n) for each run of up to sixteen elements: n is LANES but in the last one.
template <class F>
inline void for_lanes(int count, F&& f) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) f(i, LANES);
    if (i < count) f(i, count - i);
}
template <class T>
inline V load_upto(const T* from, int n) { return n == LANES ? load(from) : load_n(from, n); }
template <class T>
inline void store_upto(T* to, V x, int n) {
    if (n == LANES) store(to, x);
    else store_n(to, x, n);
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}
inline void round_to(float* to, float x) { *to = x; }
inline void round_to(bf16* to, float x) { store_n(to, set(x), 1); }

// Thirty-two consecutive numbers as two V: pairs split into even and odd ones (bf16), or first and second half
// (float). `store_pairs` is the inverse, rounding.
inline void load_pairs(const bf16* from, V& first, V& second) {
    const U pairs = load_u((const uint32_t*)from);
    first = even(pairs);
    second = odd(pairs);
}
inline void load_pairs(const float* from, V& first, V& second) {
    first = load(from);
    second = load(from + LANES);
}
inline void store_pairs(bf16* to, V first, V second) { store_u((uint32_t*)to, pair(first, second)); }
inline void store_pairs(float* to, V first, V second) {
    store(to, first);
    store(to + LANES, second);
}

// Sixteen consecutive numbers in the order of lanes that costs least (lanes.h), for sums that are put back in order
// only at their end.
inline V load_shuffled(const bf16* from) { return load_shuffled(&from->bits); }
inline V load_shuffled(const float* from) { return load(from); }
inline void store_shuffled(bf16* to, V x) { store_upper_shuffled(&to->bits, round_to_bf16(x)); }
inline void store_shuffled(float* to, V x) { store(to, x); }

// Calls `body` with a null pointer of the storage type that a dtype code names.
template <class Body>
inline auto with_dtype(int dtype, Body&& body) {
    return dtype == BF16 ? body((bf16*)nullptr) : body((float*)nullptr);
}

}  // namespace pd
