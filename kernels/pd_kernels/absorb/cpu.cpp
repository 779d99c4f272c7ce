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

// One head for all rows.
template <class T>
void absorb_head(const T* o, int num_rows, int num_heads, const Weight<T>& w, T* out) {
    Scratch scratch;
    const auto rows = prepare_rows<T>(scratch, o, (long)num_heads * w.K, num_rows, w.K);
    multiply_blocks<T>(num_rows, rows, w, 0, w.num_blocks(),
                       strided_result(scratch, out, (long)num_heads * w.N, num_rows, w.N));
}

constexpr int HEADS_TOGETHER = 4;

// Four heads from `head` of one row.
template <class T>
void absorb_heads(const T* o, const Weight<T>& first, T* out) {
    Scratch scratch;
    const auto rows = prepare_rows<T>(scratch, o, first.K, HEADS_TOGETHER, first.K);
    multiply_side_by_side<T, HEADS_TOGETHER>(rows, first, first.num_blocks() * first.block_stride(),
                                             strided_result(scratch, out, first.N, HEADS_TOGETHER, first.N));
}

// o [T, H, C] -> out [T, H · V]: o_h W_uv_h^T, rounded once. `w_uv` holds V x C a head.
PD_EXPORT void pd_absorb_values(int dtype, const void* o, int num_rows, int num_heads, int latent_width,
                                int value_width, const void* w_uv, void* out) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const bool together = num_rows <= 2 && num_heads % HEADS_TOGETHER == 0;
        const int step = together ? HEADS_TOGETHER : 1;
        Pool::instance().run(num_heads / step, [&](long task) {
            const int head = (int)task * step;
            const auto w = head_weight<T>(w_uv, head, latent_width, value_width);
            const T* from = (const T*)o + (long)head * latent_width;
            T* to = (T*)out + (long)head * value_width;
            if (together)
                for (int t = 0; t < num_rows; t++)
                    absorb_heads<T>(from + (long)t * num_heads * latent_width, w, to + (long)t * num_heads * value_width);
            else absorb_head<T>(from, num_rows, num_heads, w, to);
        });
    });
}

}  // namespace pd
