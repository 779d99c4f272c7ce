// One latent a row, into its slot: [norm of the compressed part | rotated shared key], rounded once to the slot's form.

namespace pd {

template <class T>
inline void write_slot(const T* kv, const Fp8Slot& layout, const float* norm_weight, float eps, const float* angles,
                       T* slot) {
    norm_row(kv, norm_weight, layout.latent_width, eps, slot);
    rotate(kv + layout.latent_width, angles, layout.rope_width, slot + layout.latent_width);
}

template <class T>
inline void write_fp8_slot(const T* kv, const Fp8Slot& layout, const float* norm_weight, float eps,
                           const float* angles, uint8_t* slot) {
    Scratch scratch;
    float* c = scratch.take<float>(layout.latent_width);
    norm_row(kv, norm_weight, layout.latent_width, eps, c);
    encode_latent(layout, c, slot);
    rotate(kv + layout.latent_width, angles, layout.rope_width, layout.rope(slot));
}

// `cache_dtype`: FP8, or that of kv. Returns -1, or the first row whose slot or position is out of range; rows before
// it are written.
PD_EXPORT long pd_latent_write(int dtype, const void* kv, long kv_stride, long num_rows, int latent_width,
                                int rope_width, const float* norm_weight, float eps, const float* rope,
                                long num_positions, const int32_t* positions, const int64_t* slots, int cache_dtype,
                                void* cache, long num_slots) {
    return with_dtype(dtype, [&](auto* type) -> long {
        using T = std::remove_pointer_t<decltype(type)>;
        const Fp8Slot layout{latent_width, rope_width};
        for (long t = 0; t < num_rows; t++) {
            if (slots[t] < 0 || slots[t] >= num_slots || positions[t] < 0 || positions[t] >= num_positions) return t;
            const T* from = (const T*)kv + t * kv_stride;
            const float* angles = rope + (long)positions[t] * rope_width;
            if (cache_dtype == FP8)
                write_fp8_slot(from, layout, norm_weight, eps, angles, (uint8_t*)cache + slots[t] * layout.num_bytes());
            else
                write_slot(from, layout, norm_weight, eps, angles,
                           (T*)cache + slots[t] * (latent_width + rope_width));
        }
        return -1;
    });
}

}  // namespace pd
