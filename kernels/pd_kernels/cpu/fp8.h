// FP8: e4m3 numbers (a sign, four bits of exponent with bias 7, three of mantissa; 0x7F and 0xFF are NaN, there are no
// infinities), and cache slots that are made of them (latent_fp8/reference.py has their layout).
#pragma once

#include "storage.h"

namespace pd {

struct e4m3 { uint8_t bits; };

constexpr int FP8 = 2;            // the code of this storage beside BF16 and F32
constexpr int FP8_GROUP = 128;    // numbers that share a scale
constexpr float E4M3_MAX = 448.0f;
constexpr float MIN_AMAX = 1e-4f;  // of a group
constexpr float FLOAT32_MAX = 3.4028234663852886e38f;
constexpr float SMALL = 0x1p-120f, BIG = 0x1p120f;

// The numbers in the highest octet of each lane, times SMALL: exact, but NaN comes out as ±480 · SMALL.
inline V small_e4m3(U codes) { return as_float(shift_signed(codes, 4) & set_u(0x87F00000u)); }

inline V magnitude(V x) { return as_float(as_bits(x) & set_u(0x7FFFFFFFu)); }

inline V load_small(const e4m3* from) { return small_e4m3(load_octets(&from->bits) << 24); }

// Sixteen consecutive numbers.
inline V load(const e4m3* from) {
    const V x = load_small(from) * set(BIG);
    const V beyond = (max(magnitude(x), set(E4M3_MAX)) - set(E4M3_MAX)) * set(0x1p127f);  // infinite for 480, else 0
    return x * (set(1.0f) + (beyond - beyond));
}

// Rounds to nearest, ties to even, saturating; NaN stays NaN. Below 2^-6 numbers are 2^-9 apart, from there on three
// bits of mantissa are kept: each part of the code is zero where the other one counts.
inline void store(e4m3* to, V x) {
    const V size = min(magnitude(x), set(E4M3_MAX)), edge = set(0x1p-6f), aligned = set(0x1p14f);
    const U high = as_bits(max(size, edge)), odd = (high >> 20) & set_u(1);
    const U kept = ((high + set_u(0x7FFFF) + odd) >> 20) - set_u((120 << 3) + 8);
    const U low = as_bits(min(size, edge) + aligned) - as_bits(aligned);
    const U sign = (as_bits(x) >> 24) & set_u(0x80);
    uint32_t words[LANES];
    store_u(words, select_nan(x, set_u(0x7F), kept + low) | sign);
    for (int i = 0; i < LANES; i++) to[i].bits = (uint8_t)words[i];
}

// A cache slot: C numbers, a scale for each 128 of them, R numbers of the rope key in bf16.
struct Fp8Slot {
    int latent_width, rope_width;

    long num_bytes() const { return rope_start() + 2L * rope_width; }
    long scale_start(int group) const { return latent_width + 4L * group; }
    long rope_start() const { return scale_start(latent_width / FP8_GROUP); }
    bf16* rope(uint8_t* slot) const { return (bf16*)(slot + rope_start()); }
};

// The smallest power of two that brings a largest magnitude within e4m3's range.
inline float power_of_two_scale(float amax) {
    const float ratio = std::fmin(std::fmax(amax, MIN_AMAX), FLOAT32_MAX) / E4M3_MAX;
    uint32_t bits;
    std::memcpy(&bits, &ratio, sizeof bits);
    bits = (bits + 0x7FFFFF) & ~0x7FFFFFu;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return scale;
}

// The compressed part of a latent into its slot.
inline void encode_latent(const Fp8Slot& layout, const float* c, uint8_t* slot) {
    for (int group = 0; group < layout.latent_width / FP8_GROUP; group++) {
        const float* from = c + group * FP8_GROUP;
        V best = zero();
        for (int i = 0; i < FP8_GROUP; i += LANES) best = max(magnitude(load(from + i)), best);  // NaN is passed over
        const float scale = power_of_two_scale(largest(best));
        for (int i = 0; i < FP8_GROUP; i += LANES)
            store((e4m3*)slot + group * FP8_GROUP + i, load(from + i) / set(scale));
        std::memcpy(slot + layout.scale_start(group), &scale, sizeof scale);
    }
}

inline void store_rounded(bf16* to, V x) { store(to, x); }
inline void store_rounded(float* to, V x) { store(to, as_float(round_to_bf16(x))); }
// The same of bf16 numbers that are not NaN.
inline void store_exact(bf16* to, V x) { store_upper(&to->bits, as_bits(x)); }
inline void store_exact(float* to, V x) { store(to, x); }

// A power of two that e4m3 numbers can be multiplied with exactly, and times BIG.
inline bool is_exact_scale(float scale) {
    uint32_t bits;
    std::memcpy(&bits, &scale, sizeof bits);
    return (bits & 0x7FFFFF) == 0 && scale >= 0x1p-64f && scale <= 0x1p7f;
}

// A group of numbers times its scale, as bf16 numbers: exact with the scales that are written here, else rounded.
template <class T>
inline void decode_group(const e4m3* from, float scale, T* out) {
    if (is_exact_scale(scale)) {
        V best = zero();
        for (int i = 0; i < FP8_GROUP; i += LANES) {
            const V small = load_small(from + i);
            best = max(magnitude(small), best);
            store_exact(out + i, small * set(scale * BIG));
        }
        if (!any_greater(best, set(E4M3_MAX * SMALL))) return;  // no NaN
    }
    for (int i = 0; i < FP8_GROUP; i += LANES) store_rounded(out + i, load(from + i) * set(scale));
}

// A slot as the bf16 latent that it stands for, in the storage type of the activations.
template <class T>
inline void decode_latent(const Fp8Slot& layout, const uint8_t* slot, T* out) {
    for (int group = 0; group < layout.latent_width / FP8_GROUP; group++) {
        float scale;
        std::memcpy(&scale, slot + layout.scale_start(group), sizeof scale);
        decode_group((const e4m3*)slot + group * FP8_GROUP, scale, out + group * FP8_GROUP);
    }
    const bf16* rope = (const bf16*)(slot + layout.rope_start());
    T* to = out + layout.latent_width;
    for_lanes(layout.rope_width, [&](int i, int n) { store_upto(to + i, load_upto(rope + i, n), n); });
}

// Calls `body` with null pointers of the activations' storage type and of the weight's: e4m3, or the same.
template <class Body>
inline auto with_types(int dtype, int weight_dtype, Body&& body) {
    return with_dtype(dtype, [&](auto* type) {
        return weight_dtype == FP8 ? body(type, (e4m3*)nullptr) : body(type, type);
    });
}

}  // namespace pd
