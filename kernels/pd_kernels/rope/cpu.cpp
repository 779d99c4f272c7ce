// Rotary embedding of interleaved pairs: (a cos - b sin, b cos + a sin), each product and the sum rounded, then the
// result rounded to its type.

namespace pd {

// `angles`: width / 2 cosines, then as many sines.
template <class From, class To>
inline void rotate(const From* x, const float* angles, int width, To* y) {
    const int half = width / 2;
    const float *cos = angles, *sin = angles + half;
    int i = 0;
    if constexpr (std::is_same<From, bf16>::value && std::is_same<To, bf16>::value)
        for (; i + LANES <= half; i += LANES) {
            V a, b;
            load_pairs(x + 2 * i, a, b);
            const V c = load(cos + i), s = load(sin + i);
            store_pairs(y + 2 * i, a * c - b * s, b * c + a * s);
        }
    for (; i < half; i++) {
        const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
        round_to(y + 2 * i, a * cos[i] - b * sin[i]);
        round_to(y + 2 * i + 1, b * cos[i] + a * sin[i]);
    }
}

}  // namespace pd
