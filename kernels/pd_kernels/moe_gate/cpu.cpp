// The noaux_tc router: scores by `multiply`, then one row at a time.

namespace pd {

struct GateConfig {
    int num_experts, num_groups, num_groups_kept, num_chosen, normalize;
    float scale;
};

// Marks the `count` best of `scores` that are not `out` yet, in order; ties go to the lowest index. Returns nothing
// but `chosen`.
inline void choose_best(const float* scores, bool* out, int size, int count, int32_t* chosen) {
    for (int k = 0; k < count; k++) {
        int best = -1;
        for (int i = 0; i < size; i++)
            if (!out[i] && (best < 0 || scores[i] > scores[best])) best = i;
        chosen[k] = best;
        out[best] = true;
    }
}

// scores: sigmoid of the logits; choice: scores + bias. `flags` has room for num_experts + num_groups.
inline void gate_row(const float* scores, const float* choice, const GateConfig& c, bool* flags, float* group_scores,
                     int32_t* kept, float* weights, int32_t* experts) {
    const int size = c.num_experts / c.num_groups;
    bool *expert_out = flags, *group_out = flags + c.num_experts;
    for (int g = 0; g < c.num_groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int i = g * size; i < (g + 1) * size; i++)
            if (choice[i] > first) { second = first; first = choice[i]; }
            else if (choice[i] > second) second = choice[i];
        group_scores[g] = size > 1 ? first + second : first;
        group_out[g] = false;
    }
    choose_best(group_scores, group_out, c.num_groups, c.num_groups_kept, kept);
    for (int e = 0; e < c.num_experts; e++) expert_out[e] = !group_out[e / size];
    choose_best(choice, expert_out, c.num_experts, c.num_chosen, experts);
    float total = 0.0f;
    for (int k = 0; k < c.num_chosen; k++) {
        weights[k] = scores[experts[k]];
        total = k == 0 ? weights[0] : total + weights[k];
    }
    for (int k = 0; k < c.num_chosen; k++)
        weights[k] = (c.normalize ? weights[k] / (total + 1e-20f) : weights[k]) * c.scale;
}

PD_EXPORT void pd_moe_gate(int dtype, const void* x, long x_stride, int num_rows, int width, const void* weight,
                            const float* bias, int num_experts, int num_groups, int num_groups_kept, int num_chosen,
                            int normalize, float scale, float* weights, int32_t* experts) {
    const GateConfig config{num_experts, num_groups, num_groups_kept, num_chosen, normalize, scale};
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        Scratch scratch;
        const Weight<T> w{(const typename Product<T>::Unit*)weight, width, num_experts};
        const long padded = w.num_blocks() * LANES;
        float* scores = scratch.take<float>(num_rows * padded);
        const auto rows = prepare_rows<T>(scratch, (const T*)x, x_stride, num_rows, width);
        multiply<T>(num_rows, rows, w, strided_result(scratch, scores, padded, num_rows, (int)padded));
        float* choice = scratch.take<float>(padded);
        float* group_scores = scratch.take<float>(num_groups);
        int32_t* kept = scratch.take<int32_t>(num_groups);
        bool* flags = scratch.take<bool>(num_experts + num_groups);
        for (int t = 0; t < num_rows; t++) {
            float* s = scores + t * padded;
            for_lanes(num_experts, [&](int i, int n) {
                const V score = sigmoid(load(s + i));
                store(s + i, score);
                store(choice + i, score + load_upto(bias + i, n));
            });
            gate_row(s, choice, config, flags, group_scores, kept, weights + (long)t * num_chosen,
                     experts + (long)t * num_chosen);
        }
    });
}

}  // namespace pd
