// Expert(x) = down(silu(gate x) · up x), for the routed experts with the shared one and for the dense MLP.
//
// Routed rows are gathered by expert, so that each expert's weights pass once. A row's result is
// (((w_0 E_0) + w_1 E_1) + ...) + Shared(x), by fma in rank order, rounded once at the end.

namespace pd {

// down(round(silu(gate x) · up x)) of `num_rows` prepared rows, float32, row m to out[m]. Activations are rounded to T,
// the weights are stored as P.
template <class T, class P>
void expert(int num_rows, const typename Product<P>::X* const* x, const Weight<P>& gate_up, const Weight<P>& down,
            float* const* out) {
    using X = typename Product<P>::X;
    Scratch scratch;
    const int inner = gate_up.N / 2;
    const long padded = (long)gate_up.num_blocks() * LANES;
    float* both = scratch.take<float>(num_rows * padded);
    multiply<P>(num_rows, x, gate_up, strided_result(scratch, both, padded, num_rows, (int)padded));
    const long width = prepared_width<P>(inner);
    T* product = scratch.take<T>(inner + LANES);
    X* prepared = scratch.take<X>(num_rows * width);
    const X** rows = scratch.take<const X*>(num_rows);
    for (int m = 0; m < num_rows; m++) {
        const float *gate = both + m * padded, *up = gate + inner;
        for_lanes(inner, [&](int i, int n) {
            store_upto(product + i, silu(load_upto(gate + i, n)) * load_upto(up + i, n), n);
        });
        Product<P>::prepare(product, inner, prepared + m * width);
        rows[m] = prepared + m * width;
    }
    multiply<P>(num_rows, rows, down, {(void* const*)out, F32, down.N});
}

// `weight_dtype` of all weights here: FP8, or that of x.
PD_EXPORT void pd_swiglu(int dtype, const void* x, long x_stride, int num_rows, int width, int inner,
                          int weight_dtype, const void* gate_up, const void* down, void* y) {
    with_types(dtype, weight_dtype, [&](auto* type, auto* stored) {
        using T = std::remove_pointer_t<decltype(type)>;
        using P = std::remove_pointer_t<decltype(stored)>;
        using Unit = typename Product<P>::Unit;
        Scratch scratch;
        const auto rows = prepare_rows<P>(scratch, (const T*)x, x_stride, num_rows, width);
        float* sums = scratch.take<float>((long)num_rows * width);
        float** out = scratch.take<float*>(num_rows);
        for (int m = 0; m < num_rows; m++) out[m] = sums + (long)m * width;
        expert<T, P>(num_rows, rows, {(const Unit*)gate_up, width, 2 * inner}, {(const Unit*)down, inner, width}, out);
        for_lanes(num_rows * width, [&](int i, int n) { store_upto((T*)y + i, load_upto(sums + i, n), n); });
    });
}

// The rows (token · K + rank) of each expert: rows of expert e are order[first[e]] .. order[first[e + 1] - 1].
inline void sort_by_expert(const int32_t* experts, long count, int num_experts, int32_t* first, int32_t* order) {
    std::memset(first, 0, (num_experts + 2) * sizeof(int32_t));
    for (long i = 0; i < count; i++) first[experts[i] + 2]++;
    for (int e = 0; e < num_experts; e++) first[e + 2] += first[e + 1];
    for (long i = 0; i < count; i++) order[first[experts[i] + 1]++] = (int32_t)i;
}

// `gate_up` and `down` hold num_experts packed weights each; the shared expert's may be null (shared_inner 0).
// Returns -1, or the first entry of `experts` that is out of range.
PD_EXPORT long pd_moe_experts(int dtype, const void* x, long x_stride, int num_rows, int width, int inner,
                               int num_experts, int weight_dtype, const void* gate_up, const void* down,
                               int shared_inner, const void* shared_gate_up, const void* shared_down,
                               const float* weights, const int32_t* experts, int num_ranks, void* y) {
    const long count = (long)num_rows * num_ranks;
    for (long i = 0; i < count; i++)
        if (experts[i] < 0 || experts[i] >= num_experts) return i;
    with_types(dtype, weight_dtype, [&](auto* type, auto* stored) {
        using T = std::remove_pointer_t<decltype(type)>;
        using P = std::remove_pointer_t<decltype(stored)>;
        using X = typename Product<P>::X;
        using Unit = typename Product<P>::Unit;
        Scratch scratch;
        const auto rows = prepare_rows<P>(scratch, (const T*)x, x_stride, num_rows, width);
        const long stride = (width + LANES - 1) / LANES * LANES;
        float* results = scratch.take<float>((count + num_rows) * stride);  // routed by (token, rank), then shared
        float* shared = results + count * stride;
        int32_t* first = scratch.take<int32_t>(num_experts + 2);
        int32_t* order = scratch.take<int32_t>(count);
        const X** gathered = scratch.take<const X*>(num_rows);
        float** out = scratch.take<float*>(num_rows);
        sort_by_expert(experts, count, num_experts, first, order);
        for (int e = 0; e < num_experts; e++) {
            const int begin = first[e], n = first[e + 1] - begin;
            for (int i = 0; i < n; i++) {
                gathered[i] = rows[order[begin + i] / num_ranks];
                out[i] = results + order[begin + i] * stride;
            }
            if (n)
                expert<T, P>(n, gathered, head_weight<P>(gate_up, e, width, 2 * inner),
                             head_weight<P>(down, e, inner, width), out);
        }
        if (shared_inner) {
            for (int m = 0; m < num_rows; m++) out[m] = shared + m * stride;
            expert<T, P>(num_rows, rows, {(const Unit*)shared_gate_up, width, 2 * shared_inner},
                         {(const Unit*)shared_down, shared_inner, width}, out);
        }
        for (int t = 0; t < num_rows; t++)
            for_lanes(width, [&](int i, int n) {
                const float* routed = results + (long)t * num_ranks * stride + i;
                V total = set(weights[(long)t * num_ranks]) * load_upto(routed, n);
                for (int k = 1; k < num_ranks; k++)
                    total = fma(set(weights[(long)t * num_ranks + k]), load_upto(routed + k * stride, n), total);
                if (shared_inner) total = total + load_upto(shared + t * stride + i, n);
                store_upto((T*)y + (long)t * width + i, total, n);
            });
    });
    return -1;
}

}  // namespace pd
