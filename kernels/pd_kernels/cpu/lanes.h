// Sixteen lanes of float32 (V) or uint32 (U): the only vector that the ops know. One file an instruction set gives
// the same operations; arithmetic on lanes is IEEE and rounded once an operation, so a lane's bits depend neither on
// the other lanes nor on how many registers hold them. ARITHMETIC names what differs between instruction sets: "fma"
// rounds a product and sum once, "plain" twice, "native-bf16" (matmul.h) as the instruction does. Equal names, equal
// bits.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include "lanes_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "lanes_avx2.h"
#else
#include "lanes_plain.h"
#endif

namespace pd {

constexpr int LANES = 16;

// The first n lanes from memory, `rest` behind them.
inline V load_n(const float* from, int n, float rest = 0.0f) {
    alignas(64) float lanes[LANES];
    store(lanes, set(rest));
    std::memcpy(lanes, from, n * sizeof(float));
    return load(lanes);
}

inline void store_n(float* to, V x, int n) {
    alignas(64) float lanes[LANES];
    store(lanes, x);
    std::memcpy(to, lanes, n * sizeof(float));
}

// Rounds to bfloat16, nearest even, into the upper half of each lane; NaN stays NaN.
inline U round_to_bf16(V x) {
    const U bits = as_bits(x);
    const U odd = (bits >> 16) & set_u(1);
    const U rounded = (bits + set_u(0x7FFF) + odd) & set_u(0xFFFF0000u);
    return select_nan(x, set_u(0x7FC00000u), rounded);
}

// bfloat16 pairs: element 2i in the low half of lane i, element 2i + 1 in the high half.
inline V even(U pairs) { return as_float(pairs << 16); }
inline V odd(U pairs) { return as_float(pairs & set_u(0xFFFF0000u)); }
inline U pair(V even_lanes, V odd_lanes) { return (round_to_bf16(even_lanes) >> 16) | round_to_bf16(odd_lanes); }

// Sum of all lanes: lane i + lane i + 8, then + 4, + 2, + 1.
inline float sum(V x) {
    alignas(64) float a[LANES];
    store(a, x);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) a[i] += a[i + width];
    return a[0];
}

inline float largest(V x) {
    alignas(64) float a[LANES];
    store(a, x);
    float best = a[0];
    for (int i = 1; i < LANES; i++) best = a[i] > best ? a[i] : best;
    return best;
}

}  // namespace pd
