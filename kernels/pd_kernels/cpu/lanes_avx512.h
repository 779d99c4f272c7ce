// The lanes as one AVX-512 register.
#pragma once

#include <immintrin.h>

namespace pd {

#if defined(__AVX512BF16__)
constexpr const char *ISA_NAME = "avx512bf16", *ARITHMETIC = "native-bf16";
#else
constexpr const char *ISA_NAME = "avx512", *ARITHMETIC = "fma";
#endif
constexpr int VECTORS_IN_FLIGHT = 24;

struct V { __m512 a; };
struct U { __m512i a; };

inline V zero() { return {_mm512_setzero_ps()}; }
inline V set(float x) { return {_mm512_set1_ps(x)}; }
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, V x) { _mm512_storeu_ps(p, x.a); }

inline V operator+(V x, V y) { return {_mm512_add_ps(x.a, y.a)}; }
inline V operator-(V x, V y) { return {_mm512_sub_ps(x.a, y.a)}; }
inline V operator*(V x, V y) { return {_mm512_mul_ps(x.a, y.a)}; }
inline V operator/(V x, V y) { return {_mm512_div_ps(x.a, y.a)}; }
inline V fma(V x, V y, V z) { return {_mm512_fmadd_ps(x.a, y.a, z.a)}; }
inline void add_product(const float* x, V w, V& sum) { sum = fma(set(*x), w, sum); }
inline V max(V x, V y) { return {_mm512_max_ps(x.a, y.a)}; }
inline V min(V x, V y) { return {_mm512_min_ps(x.a, y.a)}; }
inline V nearest(V x) { return {_mm512_roundscale_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

inline U set_u(uint32_t x) { return {_mm512_set1_epi32((int)x)}; }
inline U load_u(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_u(uint32_t* p, U x) { _mm512_storeu_si512(p, x.a); }
inline U operator+(U x, U y) { return {_mm512_add_epi32(x.a, y.a)}; }
inline U operator-(U x, U y) { return {_mm512_sub_epi32(x.a, y.a)}; }
inline U operator&(U x, U y) { return {_mm512_and_si512(x.a, y.a)}; }
inline U operator|(U x, U y) { return {_mm512_or_si512(x.a, y.a)}; }
inline U operator^(U x, U y) { return {_mm512_xor_si512(x.a, y.a)}; }
inline U operator<<(U x, int n) { return {_mm512_slli_epi32(x.a, n)}; }
inline U operator>>(U x, int n) { return {_mm512_srli_epi32(x.a, n)}; }
inline U shift_signed(U x, int n) { return {_mm512_srai_epi32(x.a, n)}; }

inline U as_bits(V x) { return {_mm512_castps_si512(x.a)}; }
inline V as_float(U x) { return {_mm512_castsi512_ps(x.a)}; }
inline U to_int(V x) { return {_mm512_cvtps_epi32(x.a)}; }
inline V from_int(U x) { return {_mm512_cvtepi32_ps(x.a)}; }

inline U select_nan(V x, U yes, U no) {
    return {_mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x.a, x.a, _CMP_UNORD_Q), no.a, yes.a)};
}
inline bool any_greater(V x, V y) { return _mm512_cmp_ps_mask(x.a, y.a, _CMP_GT_OQ) != 0; }

inline U load_octets(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
inline V load_bf16(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline void store_upper(uint16_t* p, U x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(x.a, 16)));
}

inline V load_shuffled(const uint16_t* p) { return load_bf16(p); }
inline void store_upper_shuffled(uint16_t* p, U x) { store_upper(p, x); }

inline void multiply_wide(U x, uint32_t factor, U& high, U& low) {
    const __m512i f = _mm512_set1_epi32((int)factor);
    const __m512i e = _mm512_mul_epu32(x.a, f), o = _mm512_mul_epu32(_mm512_srli_epi64(x.a, 32), f);
    low.a = _mm512_mask_blend_epi32(0xAAAA, e, _mm512_slli_epi64(o, 32));
    high.a = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(e, 32), o);
}

}  // namespace pd
