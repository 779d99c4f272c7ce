// Both halves of kv_b_proj, a head at a time: queries into the latent space, and values out of it.

namespace pd {

template <class T>
inline Weight<T> head_weight(const void* weight, int head, int K, int N) {
    Weight<T> w{(const typename Product<T>::Unit*)weight, K, N};
    w.units += head * w.num_blocks() * w.block_stride();
    return w;
}

// q [T, H, N + R] -> out [T, H, C + R] = [q_nope W_uk | rope(q_rope)], rounded once. `w_uk` holds C x N a head.
// Returns -1, or the first row whose position is out of range.
PD_EXPORT long pd_mla_queries(int dtype, const void* q, long q_stride, int num_rows, int num_heads, int nope_width,
                               int rope_width, int latent_width, const void* w_uk, const float* rope,
                               long num_positions, const int32_t* positions, void* out) {
    for (int t = 0; t < num_rows; t++)
        if (positions[t] < 0 || positions[t] >= num_positions) return t;
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long head_width = nope_width + rope_width, width = latent_width + rope_width;
        Pool::instance().run(num_heads, [&](long h) {
            Scratch scratch;
            const T* from = (const T*)q + h * head_width;
            T* to = (T*)out + h * width;
            const long out_stride = num_heads * width;
            const auto w = head_weight<T>(w_uk, (int)h, nope_width, latent_width);
            const auto rows = prepare_rows<T>(scratch, from, q_stride, num_rows, nope_width);
            multiply_blocks<T>(num_rows, rows, w, 0, w.num_blocks(),
                               strided_result(scratch, to, out_stride, num_rows, latent_width));
            for (int t = 0; t < num_rows; t++)
                rotate(from + t * q_stride + nope_width, rope + (long)positions[t] * rope_width, rope_width,
                       to + t * out_stride + latent_width);
        });
    });
    return -1;
}

// o [T, H, C] -> out [T, H · V]: o_h W_uv_h^T, rounded once. `w_uv` holds V x C a head.
PD_EXPORT void pd_absorb_values(int dtype, const void* o, int num_rows, int num_heads, int latent_width,
                                 int value_width, const void* w_uv, void* out) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        Pool::instance().run(num_heads, [&](long h) {
            Scratch scratch;
            const auto w = head_weight<T>(w_uv, (int)h, latent_width, value_width);
            const auto rows =
                prepare_rows<T>(scratch, (const T*)o + h * latent_width, (long)num_heads * latent_width, num_rows,
                                latent_width);
            T* to = (T*)out + h * value_width;
            multiply_blocks<T>(num_rows, rows, w, 0, w.num_blocks(),
                               strided_result(scratch, to, (long)num_heads * value_width, num_rows, value_width));
        });
    });
}

}  // namespace pd
