// exp, log and their friends, operation for operation those of elementary/reference.py: additions and
// multiplications are rounded apart, so every instruction set and the reference give the same bits.
#pragma once

#include "lanes.h"

namespace pd {

constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;

inline V exp(V x) {
    constexpr float P[] = {0.5f, 0.16666576266288757f, 0.04166655242443085f, 0.00836323294788599f,
                           0.0013926250394433737f};
    x = min(set(88.0f), max(set(-87.0f), x));  // the argument stays if it is NaN
    const V n = nearest(x * set(1.44269504f));
    V r = x - n * set(LN2_HIGH);
    r = r - n * set(LN2_LOW);
    V p = set(P[4]);
    for (int i = 3; i >= 0; i--) p = p * r + set(P[i]);
    p = (p * (r * r) + r) + set(1.0f);
    const V two_to_n = as_float((to_int(n) + set_u(127)) << 23);
    return p * two_to_n;
}

inline float exp(float x) {
    float lanes[LANES];
    store(lanes, exp(set(x)));
    return lanes[0];
}

inline V negative(V x) { return as_float(as_bits(x) ^ set_u(0x80000000u)); }
inline V sigmoid(V x) { return set(1.0f) / (exp(negative(x)) + set(1.0f)); }
inline V silu(V x) { return x / (exp(negative(x)) + set(1.0f)); }

// ln x for positive normal x.
inline V log(V x) {
    constexpr float P[] = {0.3333333432674408f,  -0.24999944865703583f, 0.19999948143959045f,
                           -0.16673316061496735f, 0.1429186761379242f,  -0.12288721650838852f,
                           0.1091565489768982f,  -0.12422200292348862f, 0.11330617219209671f};
    const U bits = as_bits(x);
    const U exponent = shift_signed(bits - set_u(0x3F2AAAABu), 23);
    const V f = as_float(bits - (exponent << 23)) - set(1.0f);
    const V e = from_int(exponent);
    V p = set(P[8]);
    for (int i = 7; i >= 0; i--) p = p * f + set(P[i]);
    const V f2 = f * f;
    V y = (p * f) * f2 + e * set(LN2_LOW);
    y = y - set(0.5f) * f2;
    return (f + y) + e * set(LN2_HIGH);
}

}  // namespace pd
