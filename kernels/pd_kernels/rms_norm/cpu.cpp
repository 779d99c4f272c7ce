// RMSNorm. Sum of squares: lane i sums elements i, i + 16, ... by fma; then `sum` of the lanes.

namespace pd {

// y = w · x / sqrt(mean(x²) + eps), rounded to the type of y; w is float32.
template <class T, class Y>
inline void norm_row(const T* x, const float* weight, int width, float eps, Y* y) {
    V squares = zero();
    for_lanes(width, [&](int i, int n) {
        const V v = load_upto(x + i, n);
        squares = fma(v, v, squares);
    });
    const V scale = set(1.0f / std::sqrt(sum(squares) / (float)width + eps));
    for_lanes(width, [&](int i, int n) {
        store_upto(y + i, load_upto(x + i, n) * scale * load_upto(weight + i, n), n);
    });
}

PD_EXPORT void pd_rms_norm(int dtype, const void* x, long x_stride, long num_rows, int width, const float* weight,
                            float eps, void* y, long y_stride) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for (long t = 0; t < num_rows; t++)
            norm_row((const T*)x + t * x_stride, weight, width, eps, (T*)y + t * y_stride);
    });
}

// sum = residual + x, rounded; y = norm of the rounded sum. All rows contiguous.
PD_EXPORT void pd_add_rms_norm(int dtype, const void* x, const void* residual, long num_rows, int width,
                                const float* weight, float eps, void* y, void* total) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for (long t = 0; t < num_rows; t++) {
            const T *a = (const T*)x + t * width, *b = (const T*)residual + t * width;
            T* out = (T*)total + t * width;
            for_lanes(width, [&](int i, int n) {
                store_upto(out + i, load_upto(b + i, n) + load_upto(a + i, n), n);
            });
            norm_row(out, weight, width, eps, (T*)y + t * width);
        }
    });
}

}  // namespace pd
