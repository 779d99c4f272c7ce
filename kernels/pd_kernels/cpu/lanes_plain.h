// The lanes in portable C++ (GCC and Clang vector extensions): any CPU, also the check on the other versions.
#pragma once

namespace pd {

constexpr const char *ISA_NAME = "plain", *ARITHMETIC = "plain";
constexpr int VECTORS_IN_FLIGHT = 2;

typedef float F4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

struct V { F4 q[4]; };
struct U { U4 q[4]; };

#define PD_FOR_QUARTERS(R, expression) \
    R r;                               \
    for (int i = 0; i < 4; i++) r.q[i] = (expression); \
    return r

inline V set(float x) { PD_FOR_QUARTERS(V, (F4{x, x, x, x})); }
inline V zero() { return set(0.0f); }
inline V load(const float* p) { V r; std::memcpy(&r, p, sizeof r); return r; }
inline void store(float* p, V x) { std::memcpy(p, &x, sizeof x); }

inline V operator+(V x, V y) { PD_FOR_QUARTERS(V, x.q[i] + y.q[i]); }
inline V operator-(V x, V y) { PD_FOR_QUARTERS(V, x.q[i] - y.q[i]); }
inline V operator*(V x, V y) { PD_FOR_QUARTERS(V, x.q[i] * y.q[i]); }
inline V operator/(V x, V y) { PD_FOR_QUARTERS(V, x.q[i] / y.q[i]); }
inline V fma(V x, V y, V z) { PD_FOR_QUARTERS(V, x.q[i] * y.q[i] + z.q[i]); }  // -ffp-contract=off: two roundings
inline void add_product(const float* x, V w, V& sum) { sum = fma(set(*x), w, sum); }

inline U set_u(uint32_t x) { PD_FOR_QUARTERS(U, (U4{x, x, x, x})); }
inline U load_u(const uint32_t* p) { U r; std::memcpy(&r, p, sizeof r); return r; }
inline void store_u(uint32_t* p, U x) { std::memcpy(p, &x, sizeof x); }
inline U operator+(U x, U y) { PD_FOR_QUARTERS(U, x.q[i] + y.q[i]); }
inline U operator-(U x, U y) { PD_FOR_QUARTERS(U, x.q[i] - y.q[i]); }
inline U operator&(U x, U y) { PD_FOR_QUARTERS(U, x.q[i] & y.q[i]); }
inline U operator|(U x, U y) { PD_FOR_QUARTERS(U, x.q[i] | y.q[i]); }
inline U operator^(U x, U y) { PD_FOR_QUARTERS(U, x.q[i] ^ y.q[i]); }
inline U operator<<(U x, int n) { PD_FOR_QUARTERS(U, x.q[i] << n); }
inline U operator>>(U x, int n) { PD_FOR_QUARTERS(U, x.q[i] >> n); }
inline U shift_signed(U x, int n) { PD_FOR_QUARTERS(U, (U4)((I4)x.q[i] >> n)); }

inline U as_bits(V x) { PD_FOR_QUARTERS(U, (U4)x.q[i]); }
inline V as_float(U x) { PD_FOR_QUARTERS(V, (F4)x.q[i]); }
inline V from_int(U x) { PD_FOR_QUARTERS(V, __builtin_convertvector((I4)x.q[i], F4)); }

inline U choose(U mask, U yes, U no) { return (mask & yes) | (no & (mask ^ set_u(~0u))); }
inline V max(V x, V y) {
    U greater;
    for (int i = 0; i < 4; i++) greater.q[i] = (U4)(x.q[i] > y.q[i]);
    return as_float(choose(greater, as_bits(x), as_bits(y)));
}
inline V min(V x, V y) {
    U less;
    for (int i = 0; i < 4; i++) less.q[i] = (U4)(x.q[i] < y.q[i]);
    return as_float(choose(less, as_bits(x), as_bits(y)));
}
// Exact for |x| < 2^22, which is all that is asked of it; NaN and larger values pass through the additions.
inline V nearest(V x) { const V magic = set(12582912.0f); return (x + magic) - magic; }
// Signed, for integral x of small size; anything for NaN.
inline U to_int(V x) {
    const V magic = set(12582912.0f);
    return as_bits(x + magic) - as_bits(magic);
}

inline U select_nan(V x, U yes, U no) {
    U ordered;
    for (int i = 0; i < 4; i++) ordered.q[i] = (U4)(x.q[i] == x.q[i]);
    return choose(ordered, no, yes);
}
inline bool any_greater(V x, V y) {
    const float *a = (const float*)&x, *b = (const float*)&y;
    bool any = false;
    for (int i = 0; i < 16; i++) any |= a[i] > b[i];
    return any;
}

inline U load_octets(const uint8_t* p) {
    uint32_t words[16];
    for (int i = 0; i < 16; i++) words[i] = p[i];
    return load_u(words);
}
inline V load_bf16(const uint16_t* p) {
    V r;
    for (int i = 0; i < 4; i++) r.q[i] = (F4)(U4{p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]} << 16);
    return r;
}
inline void store_upper(uint16_t* p, U x) {
    uint32_t words[16];
    store_u(words, x);
    for (int i = 0; i < 16; i++) p[i] = (uint16_t)(words[i] >> 16);
}

inline V load_shuffled(const uint16_t* p) { return load_bf16(p); }
inline void store_upper_shuffled(uint16_t* p, U x) { store_upper(p, x); }

inline void multiply_wide(U x, uint32_t factor, U& high, U& low) {
    uint32_t in[16], hi[16], lo[16];
    store_u(in, x);
    for (int i = 0; i < 16; i++) {
        const uint64_t product = (uint64_t)in[i] * factor;
        hi[i] = (uint32_t)(product >> 32);
        lo[i] = (uint32_t)product;
    }
    high = load_u(hi);
    low = load_u(lo);
}

#undef PD_FOR_QUARTERS

}  // namespace pd
