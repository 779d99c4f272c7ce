// y = x W^T, rounded once; y in the dtype of x, or float32.

namespace pd {

template <class P, class T, class Out>
void linear(const T* x, long x_stride, int num_rows, const Weight<P>& w, Out* y) {
    Scratch scratch;
    const auto rows = prepare_rows<P>(scratch, x, x_stride, num_rows, w.K);
    multiply<P>(num_rows, rows, w, strided_result(scratch, y, w.N, num_rows, w.N));
}

// `weight_dtype`: FP8, or that of x.
PD_EXPORT void pd_linear(int dtype, const void* x, long x_stride, int num_rows, int weight_dtype, const void* weight,
                          int K, int N, void* y, int out_dtype) {
    with_types(dtype, weight_dtype, [&](auto* type, auto* stored) {
        using P = std::remove_pointer_t<decltype(stored)>;
        const Weight<P> w{(const typename Product<P>::Unit*)weight, K, N};
        with_dtype(out_dtype, [&](auto* out) {
            linear<P>((decltype(type))x, x_stride, num_rows, w, (decltype(out))y);
        });
    });
}

}  // namespace pd
