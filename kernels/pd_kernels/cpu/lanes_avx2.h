// The lanes as two AVX2 registers.
#pragma once

#include <immintrin.h>

namespace pd {

constexpr const char *ISA_NAME = "avx2", *ARITHMETIC = "fma";
constexpr int VECTORS_IN_FLIGHT = 6;  // accumulators that fit the register file beside their operands

struct V { __m256 a, b; };
struct U { __m256i a, b; };

inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V set(float x) { const __m256 v = _mm256_set1_ps(x); return {v, v}; }
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }

inline V operator+(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V operator-(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V operator*(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V operator/(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
// sum = fma(*x in all lanes, w, sum). Written out so that a tile's sums stay in registers: left to itself, GCC keeps
// several broadcasts alive, spills a sum, and the tile runs at half its speed.
inline void add_product(const float* x, V w, V& sum) {
    __m256 broadcast;
    asm("vbroadcastss %3, %2\n\tvfmadd231ps %4, %2, %0\n\tvfmadd231ps %5, %2, %1"
        : "+x"(sum.a), "+x"(sum.b), "=&x"(broadcast)
        : "m"(*x), "x"(w.a), "x"(w.b));
}
// The larger (smaller) one; the second if either is NaN.
inline V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline V nearest(V x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}

inline U set_u(uint32_t x) { const __m256i v = _mm256_set1_epi32((int)x); return {v, v}; }
inline U load_u(const uint32_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
inline void store_u(uint32_t* p, U x) {
    _mm256_storeu_si256((__m256i*)p, x.a);
    _mm256_storeu_si256((__m256i*)(p + 8), x.b);
}
inline U operator+(U x, U y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline U operator-(U x, U y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline U operator&(U x, U y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline U operator|(U x, U y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline U operator^(U x, U y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
inline U operator<<(U x, int n) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
inline U operator>>(U x, int n) { return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)}; }
inline U shift_signed(U x, int n) { return {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)}; }

inline U as_bits(V x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline V as_float(U x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline U to_int(V x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }    // signed, nearest
inline V from_int(U x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }  // signed

// `yes` where x is NaN, else `no`.
inline U select_nan(V x, U yes, U no) {
    const __m256i a = _mm256_castps_si256(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q));
    const __m256i b = _mm256_castps_si256(_mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q));
    return {_mm256_blendv_epi8(no.a, yes.a, a), _mm256_blendv_epi8(no.b, yes.b, b)};
}
// Whether x > y in any lane.
inline bool any_greater(V x, V y) {
    const __m256 a = _mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), b = _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ);
    return _mm256_movemask_ps(_mm256_or_ps(a, b)) != 0;
}

// Sixteen octets, one a lane.
inline U load_octets(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
inline V load_bf16(const uint16_t* p) {
    const __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    const __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}
// Sixteen bfloat16 in the order that costs least: even ones in the first register, odd ones in the second.
inline V load_shuffled(const uint16_t* p) {
    const __m256i pairs = _mm256_loadu_si256((const __m256i*)p);
    const __m256i upper = _mm256_set1_epi32((int)0xFFFF0000u);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), _mm256_castsi256_ps(_mm256_and_si256(pairs, upper))};
}
// The upper halves of lanes in that order, back in theirs.
inline void store_upper_shuffled(uint16_t* p, U x) {
    _mm256_storeu_si256((__m256i*)p, _mm256_or_si256(_mm256_srli_epi32(x.a, 16), x.b));
}
// The upper halves of the lanes, in order.
inline void store_upper(uint16_t* p, U x) {
    const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(x.a, 16), _mm256_srli_epi32(x.b, 16));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xD8));
}

// High and low words of the 64-bit products of each lane with `factor`.
inline void multiply_wide(U x, uint32_t factor, U& high, U& low) {
    const __m256i f = _mm256_set1_epi32((int)factor);
    const auto half = [&](__m256i v, __m256i& hi, __m256i& lo) {
        const __m256i e = _mm256_mul_epu32(v, f), o = _mm256_mul_epu32(_mm256_srli_epi64(v, 32), f);
        lo = _mm256_blend_epi32(e, _mm256_slli_epi64(o, 32), 0xAA);
        hi = _mm256_blend_epi32(_mm256_srli_epi64(e, 32), o, 0xAA);
    };
    half(x.a, high.a, low.a);
    half(x.b, high.b, low.b);
}

}  // namespace pd
