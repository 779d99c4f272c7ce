// The same attention with keys and values expanded a head from the latents, in float32: for each tile of a sequence
// k_nope = c W_uk^T and v = c W_uv^T (sums in order of c), then head by head as in the absorbed form.

namespace pd {

template <class T>
struct Expanded {
    int num_heads, nope_width, rope_width, latent_width, value_width;
    Weight<T> w_uk, w_uv;  // H · N and H · V outputs
    const float* rope;
};

// One tile expanded: keys packed a head [H][4 blocks][N + R][16], values [H][TILE][padded V].
struct ExpandedTile {
    float *keys, *values;
    long head_keys, head_values, padded_value_width;
};

template <class T>
void expand(const Expanded<T>& e, const T* const* rows, int most, const ExpandedTile& tile) {
    using X = typename Product<T>::X;
    Scratch scratch;
    const X** latents = scratch.take<const X*>(most);
    for (int k = 0; k < most; k++) latents[k] = prepare_rows<T>(scratch, rows[k], 0, 1, e.latent_width)[0];
    const int head_width = e.nope_width + e.rope_width;
    float* expanded = scratch.take<float>((long)most * e.w_uk.num_blocks() * LANES);
    const long stride = (long)e.w_uk.num_blocks() * LANES;
    multiply<T>(most, latents, e.w_uk, strided_result(scratch, expanded, stride, most, (int)stride));
    std::memset(tile.keys, 0, e.num_heads * tile.head_keys * sizeof(float));
    for (int h = 0; h < e.num_heads; h++)
        for (int k = 0; k < most; k++) {
            float* to = tile.keys + h * tile.head_keys + (long)(k / LANES) * head_width * LANES + k % LANES;
            const float* nope = expanded + k * stride + (long)h * e.nope_width;
            for (int i = 0; i < e.nope_width; i++) to[(long)i * LANES] = nope[i];
            const T* rope = rows[k] + e.latent_width;
            for (int i = 0; i < e.rope_width; i++) to[(long)(e.nope_width + i) * LANES] = to_float(rope[i]);
        }
    const long value_stride = (long)e.w_uv.num_blocks() * LANES;
    float* values = scratch.take<float>(most * value_stride);
    multiply<T>(most, latents, e.w_uv, strided_result(scratch, values, value_stride, most, (int)value_stride));
    for (int h = 0; h < e.num_heads; h++)
        for (int k = 0; k < most; k++) {
            float* to = tile.values + h * tile.head_values + k * tile.padded_value_width;
            std::memset(to, 0, tile.padded_value_width * sizeof(float));
            std::memcpy(to, values + k * value_stride + (long)h * e.value_width, e.value_width * sizeof(float));
        }
}

// All rows of a step that belong to one sequence and stand together: q [T, H, N + R] to out [T, H, V].
template <class T>
void attend_expanded(const Paged<T>& paged, const Expanded<T>& e, const T* q, long q_stride, RowRun run, float scale,
                     T* out) {
    Scratch scratch;
    const int head_width = e.nope_width + e.rope_width, num_heads = e.num_heads;
    float* queries = scratch.take<float>((long)num_heads * run.count * head_width);  // a head, then rows
    const float** rows_of_queries = scratch.take<const float*>((long)num_heads * run.count);
    std::vector<Running> running;
    for (int h = 0; h < num_heads; h++) {
        running.emplace_back(scratch, run.count, e.value_width);
        for (int t = 0; t < run.count; t++) {
            float* to = queries + ((long)h * run.count + t) * head_width;
            const T* from = q + (run.row + t) * q_stride + (long)h * head_width;
            for (int i = 0; i < e.nope_width; i++) to[i] = to_float(from[i]);
            rotate(from + e.nope_width, e.rope + (long)paged.positions[run.row + t] * e.rope_width, e.rope_width,
                   to + e.nope_width);
            rows_of_queries[(long)h * run.count + t] = to;
        }
    }
    ExpandedTile tile;
    tile.padded_value_width = running[0].value_width;
    tile.head_keys = (long)TILE * head_width;
    tile.head_values = TILE * tile.padded_value_width;
    tile.keys = scratch.take<float>(num_heads * tile.head_keys);
    tile.values = scratch.take<float>(num_heads * tile.head_values);
    TileRows<T> latents(scratch, paged);
    const int32_t* positions = paged.positions + run.row;
    int last = 0;
    for (int t = 0; t < run.count; t++) last = positions[t] > last ? positions[t] : last;
    for (long j = paged.first_position / TILE; j <= last / TILE; j++) {
        int most = 0;
        for (auto& head : running) most = set_visible(head, j, positions, 1, paged.first_position);
        if (most <= running[0].begin) continue;
        latents.read(paged.sequences[run.row], j, running[0].begin, most);
        expand(e, latents.rows, most, tile);
        Pool::instance().run(num_heads, [&](long h) {
            Running& r = running[h];
            const Weight<float> keys{tile.keys + h * tile.head_keys, head_width, TILE};
            Scratch scores;
            multiply_blocks<float>(r.count, rows_of_queries + h * run.count, keys, 0, (most + LANES - 1) / LANES,
                                   strided_result(scores, r.scores, TILE, r.count, TILE));
            for (int t = 0; t < r.count; t++)
                if (r.end[t] > r.begin) soften(r, t, scale);
            const float* values[TILE];
            for (int k = 0; k < TILE; k++) values[k] = tile.values + h * tile.head_values + k * r.value_width;
            add_values(r, values);
        });
    }
    for (int h = 0; h < num_heads; h++)
        for (int t = 0; t < run.count; t++) {
            const Running& r = running[h];
            const V inverse = set(r.total[t] == 0.0f ? 0.0f : 1.0f / r.total[t]);
            T* to = out + ((run.row + t) * num_heads + h) * e.value_width;
            for_lanes(e.value_width, [&](int i, int n) {
                store_upto(to + i, load(r.values + t * r.value_width + i) * inverse, n);
            });
        }
}

// `w_uk` and `w_uv`: packed weights of H · N and H · V outputs, C inputs. Returns as pd_mla_attention.
PD_EXPORT long pd_mla_attention_expanded(
    int dtype, const void* q, long q_stride, long num_rows, int num_heads, int nope_width, int rope_width,
    int latent_width, int value_width, const void* w_uk, const void* w_uv, const float* rope, long num_positions,
    int cache_dtype, const void* cache, long num_blocks, long block_size, const int32_t* positions, const int32_t* sequences,
    const int32_t* tables, long num_sequences, long table_width, float scale, int first_position, void* out) {
    return with_dtype(dtype, [&](auto* type) -> long {
        using T = std::remove_pointer_t<decltype(type)>;
        using Unit = typename Product<T>::Unit;
        const Paged<T> paged{(const uint8_t*)cache, cache_dtype == FP8, latent_width, latent_width + rope_width,
                             num_blocks, block_size, positions, sequences, tables, num_sequences, table_width,
                             first_position};
        const long invalid = first_invalid(paged, num_rows);
        if (invalid >= 0) return invalid;
        for (long t = 0; t < num_rows; t++)
            if (positions[t] >= num_positions) return t;
        const Expanded<T> e{num_heads, nope_width, rope_width, latent_width, value_width,
                            {(const Unit*)w_uk, latent_width, num_heads * nope_width},
                            {(const Unit*)w_uv, latent_width, num_heads * value_width}, rope};
        Scratch scratch;
        RowRun* runs = scratch.take<RowRun>(num_rows);
        const int count = cut_runs(sequences, num_rows, 1 << 10, runs);
        for (int i = 0; i < count; i++) attend_expanded(paged, e, (const T*)q, q_stride, runs[i], scale, (T*)out);
        return -1;
    });
}

}  // namespace pd
