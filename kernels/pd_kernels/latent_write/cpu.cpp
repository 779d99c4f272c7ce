// One latent a row, into its slot: [norm of the compressed part | rotated shared key].

namespace pd {

// Returns -1, or the first row whose slot or position is out of range; rows before it are written.
PD_EXPORT long pd_latent_write(int dtype, const void* kv, long kv_stride, long num_rows, int latent_width,
                                int rope_width, const float* norm_weight, float eps, const float* rope,
                                long num_positions, const int32_t* positions, const int64_t* slots, void* cache,
                                long num_slots) {
    return with_dtype(dtype, [&](auto* type) -> long {
        using T = std::remove_pointer_t<decltype(type)>;
        const long width = latent_width + rope_width;
        for (long t = 0; t < num_rows; t++) {
            if (slots[t] < 0 || slots[t] >= num_slots || positions[t] < 0 || positions[t] >= num_positions) return t;
            const T* from = (const T*)kv + t * kv_stride;
            T* to = (T*)cache + slots[t] * width;
            norm_row(from, norm_weight, latent_width, eps, to);
            rotate(from + latent_width, rope + (long)positions[t] * rope_width, rope_width, to + latent_width);
        }
        return -1;
    });
}

}  // namespace pd
