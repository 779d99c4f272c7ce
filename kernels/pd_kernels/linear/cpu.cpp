// y = x W^T, rounded once; y in the dtype of x, or float32.

namespace pd {

template <class T, class Out>
void linear(const T* x, long x_stride, int num_rows, const Weight<T>& w, Out* y) {
    Scratch scratch;
    const auto rows = prepare_rows<T>(scratch, x, x_stride, num_rows, w.K);
    multiply<T>(num_rows, rows, w, strided_result(scratch, y, w.N, num_rows, w.N));
}

PD_EXPORT void pd_linear(int dtype, const void* x, long x_stride, int num_rows, const void* weight, int K, int N,
                          void* y, int out_dtype) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const Weight<T> w{(const typename Product<T>::Unit*)weight, K, N};
        with_dtype(out_dtype, [&](auto* out) { linear<T>((const T*)x, x_stride, num_rows, w, (decltype(out))y); });
    });
}

}  // namespace pd
