// Attention over the paged latent cache: decode, verify and prefill rows in one call.
//
// The context of a row is cut into tiles of 64 keys at fixed absolute positions, reduced in order with an online
// softmax. For one row and head ("pair") and the visible keys [lo, hi) of a tile:
//
//     s_k = (Σ_e q_e key_e, in order of e, by fma) · scale
//     m'  = max(m, max s),  a = exp(m - m'),  p_k = exp(s_k - m'), 0 where not visible
//     l   = l · a + sum(((p_0..15 + p_16..31) + p_32..47) + p_48..63)
//     o   = fma(o, a, Σ_k p_k value_k, in order of k, by fma from zero)
//
// and at the end o / l. A pair without visible keys in a tile is not touched by it. Pairs that share a context are
// processed together for the sake of the cache; none of the above depends on which. Slots in FP8 are decoded to the
// queries' storage type, a tile at a time; from there on nothing differs.

namespace pd {

constexpr int TILE = 64;
constexpr int TILE_BLOCKS = TILE / LANES;
constexpr int MAX_PAIRS = 96;  // results of one chunk stay in L2

// Where the rows of a step stand (pd_kernels.ops.Rows) and the cache that they read.
template <class T>
struct Paged {
    const uint8_t* cache;  // [num_blocks, block_size] slots of `width` numbers
    bool fp8;
    int latent_width, width;
    long num_blocks, block_size;
    const int32_t *positions, *sequences, *tables;
    long num_sequences, table_width;
    int first_position;

    Fp8Slot fp8_slot() const { return {latent_width, width - latent_width}; }
    const uint8_t* slot(long sequence, long position) const {
        const long block = tables[sequence * table_width + position / block_size];
        const long slot_bytes = fp8 ? fp8_slot().num_bytes() : (long)(width * sizeof(T));
        return cache + (block * block_size + position % block_size) * slot_bytes;
    }
    // Every block that row t may see is in its table and in the cache.
    bool valid(long t) const {
        if (sequences[t] < 0 || sequences[t] >= num_sequences || positions[t] < 0) return false;
        const long last = positions[t] / block_size;
        if (last >= table_width) return false;
        for (long b = first_position / block_size; b <= last; b++) {
            const long block = tables[sequences[t] * table_width + b];
            if (block < 0 || block >= num_blocks) return false;
        }
        return true;
    }
};

// The running softmax of some pairs over one context.
struct Running {
    int count;         // pairs
    long value_width;  // padded to whole lanes
    float *maximum, *total, *values, *scores, *decay;
    int32_t* end;      // visible keys of the present tile: [begin, end)
    int begin;

    Running(Scratch& scratch, int pairs, long width)
        : count(pairs), value_width((width + LANES - 1) / LANES * LANES) {
        maximum = scratch.take<float>(pairs);
        total = scratch.take<float>(pairs);
        decay = scratch.take<float>(pairs);
        values = scratch.take<float>(pairs * value_width);
        scores = scratch.take<float>((long)pairs * TILE);
        end = scratch.take<int32_t>(pairs);
        for (int i = 0; i < pairs; i++) {
            maximum[i] = -INFINITY;
            total[i] = 0.0f;
        }
        std::memset(values, 0, pairs * value_width * sizeof(float));
    }
};

// Keys of a tile as a packed weight: block b holds keys 16 b .. 16 b + 15, one a lane.
template <class T>
void pack_keys(const T* const* keys, int num_blocks, int width, typename Product<T>::Unit* out) {
    using Unit = typename Product<T>::Unit;
    const int steps = Product<T>::steps(width), whole = width * (int)sizeof(T) / (int)sizeof(Unit);
    for (int block = 0; block < num_blocks; block++) {
        Unit* to = out + (long)block * steps * LANES;
        const T* const* from = keys + block * LANES;
        int k = 0;
#if defined(__AVX2__)
        for (; k + 8 <= whole; k += 8)
            for (int half = 0; half < 2; half++) {
                __m256 r[8], s[8];
                for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps((const float*)from[8 * half + i] + k);
                for (int i = 0; i < 4; i++) {
                    s[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
                    s[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
                }
                for (int i = 0; i < 2; i++) {
                    r[4 * i] = _mm256_shuffle_ps(s[4 * i], s[4 * i + 2], 0x44);
                    r[4 * i + 1] = _mm256_shuffle_ps(s[4 * i], s[4 * i + 2], 0xEE);
                    r[4 * i + 2] = _mm256_shuffle_ps(s[4 * i + 1], s[4 * i + 3], 0x44);
                    r[4 * i + 3] = _mm256_shuffle_ps(s[4 * i + 1], s[4 * i + 3], 0xEE);
                }
                for (int i = 0; i < 4; i++) {
                    float* row = (float*)(to + (long)(k + i) * LANES + 8 * half);
                    _mm256_storeu_ps(row, _mm256_permute2f128_ps(r[i], r[4 + i], 0x20));
                    _mm256_storeu_ps(row + 4 * LANES, _mm256_permute2f128_ps(r[i], r[4 + i], 0x31));
                }
            }
#endif
        for (; k < steps; k++)
            for (int lane = 0; lane < LANES; lane++) {
                Unit unit = 0;
                std::memcpy(&unit, (const Unit*)from[lane] + k, k < whole ? sizeof(Unit) : sizeof(T));
                to[(long)k * LANES + lane] = unit;
            }
    }
}

// From scaled scores of one pair to p, in place; updates its maximum and total, and says how much the past decays.
inline void soften(Running& r, int pair, float scale) {
    float* s = r.scores + (long)pair * TILE;
    for (int k = 0; k < r.begin; k++) s[k] = -INFINITY;
    for (int k = r.end[pair]; k < TILE; k++) s[k] = -INFINITY;
    V v[TILE_BLOCKS], best = set(-INFINITY);
    for (int b = 0; b < TILE_BLOCKS; b++) {
        v[b] = load(s + b * LANES) * set(scale);
        best = max(v[b], best);
    }
    const float before = r.maximum[pair], after = std::fmax(before, largest(best));
    V sums = zero();
    for (int b = 0; b < TILE_BLOCKS; b++) {
        store(s + b * LANES, exp(v[b] - set(after)));
    }
    for (int k = 0; k < r.begin; k++) s[k] = 0.0f;
    for (int k = r.end[pair]; k < TILE; k++) s[k] = 0.0f;
    for (int b = 0; b < TILE_BLOCKS; b++) sums = b == 0 ? load(s) : sums + load(s + b * LANES);
    r.maximum[pair] = after;
    r.decay[pair] = exp(before - after);
    r.total[pair] = r.total[pair] * r.decay[pair] + sum(sums);
}

// Adds keys [k, end) of a tile to the sum of one pair in sixteen columns, then the sum to the pair's values.
template <class T>
inline void close_sum(Running& r, int pair, const T* const* rows, long column, int k, V total) {
    if (r.end[pair] <= r.begin) return;
    for (; k < r.end[pair]; k++) add_product(r.scores + (long)pair * TILE + k, load_shuffled(rows[k] + column), total);
    float* o = r.values + pair * r.value_width + column;
    store(o, fma(load(o), set(r.decay[pair]), total));
}

// M pairs times N x 16 columns of the values of a tile.
template <class T, int M, int N>
__attribute__((noinline)) void add_values_tile(Running& r, int pair0, const T* const* rows, long column) {
    V sums[M][N];
    const float* p = r.scores + (long)pair0 * TILE;
    int shared = TILE;  // keys that all pairs see
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sums[m][n] = zero();
        shared = r.end[pair0 + m] < shared ? r.end[pair0 + m] : shared;
    }
    for (int k = r.begin; k < shared; k++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const V value = load_shuffled(rows[k] + column + n * LANES);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) add_product(p + m * TILE + k, value, sums[m][n]);
        }
    const int next = shared > r.begin ? shared : r.begin;
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) close_sum(r, pair0 + m, rows, column + n * LANES, next, sums[m][n]);
}

template <class T, int M>
void add_values_group(Running& r, int pair0, const T* const* rows) {
    if constexpr (M <= MAX_ROWS) {
        constexpr int N = blocks_of_tile(M);
        long column = 0;
        for (; column + N * LANES <= r.value_width; column += N * LANES)
            add_values_tile<T, M, N>(r, pair0, rows, column);
        if constexpr (N > 1)
            for (; column < r.value_width; column += LANES) add_values_tile<T, M, 1>(r, pair0, rows, column);
    }
}

// Adds a tile's values for all pairs. `rows`: one value row a key, readable up to the padded value width.
template <class T>
void add_values(Running& r, const T* const* rows) {
    for (int pair = 0; pair < r.count;) {
        const int left = r.count - pair, group = left < MAX_ROWS ? left : MAX_ROWS;
        switch (group) {
            case 1: add_values_group<T, 1>(r, pair, rows); break;
            case 2: add_values_group<T, 2>(r, pair, rows); break;
            case 3: add_values_group<T, 3>(r, pair, rows); break;
            case 4: add_values_group<T, 4>(r, pair, rows); break;
            case 5: add_values_group<T, 5>(r, pair, rows); break;
            case 6: add_values_group<T, 6>(r, pair, rows); break;
        }
        pair += group;
    }
}

// Sets the visible keys of each pair in a tile; `heads` pairs a row. Returns the end for the row that sees most.
inline int set_visible(Running& r, long tile, const int32_t* positions, int heads, int first_position) {
    const long start = tile * TILE;
    r.begin = first_position > start ? (int)(first_position - start) : 0;
    int most = 0;
    for (int pair = 0; pair < r.count; pair++) {
        const long end = (long)positions[pair / heads] + 1 - start;
        r.end[pair] = (int)(end < r.begin ? r.begin : end > TILE ? TILE : end);
        most = r.end[pair] > most ? r.end[pair] : most;
    }
    return most;
}

// o / l of one pair; zeros if it saw nothing.
template <class T>
void finish(const Running& r, int pair, int width, T* out) {
    const V inverse = set(r.total[pair] == 0.0f ? 0.0f : 1.0f / r.total[pair]);
    const float* o = r.values + pair * r.value_width;
    for_lanes(width, [&](int i, int n) {
        T lanes[LANES];
        store_shuffled(n == LANES ? out + i : lanes, load(o + i) * inverse);
        if (n < LANES) std::memcpy((void*)(out + i), lanes, n * sizeof(T));
    });
}

// The latents of a tile: rows in the cache, or decoded ones. Keeps the memory for those.
template <class T>
struct TileRows {
    const Paged<T>& paged;
    T *zeros, *decoded;
    const T* rows[TILE];

    TileRows(Scratch& scratch, const Paged<T>& of)
        : paged(of), zeros(scratch.take<T>(of.width + LANES)),
          decoded(of.fp8 ? scratch.take<T>((long)TILE * of.width) : nullptr) {
        std::memset((void*)zeros, 0, (of.width + LANES) * sizeof(T));
    }

    // Zeros stand for slots that nobody sees; `most` slots from the start of the tile are seen.
    void read(long sequence, long tile, int begin, int most) {
        for (int k = 0; k < TILE; k++) {
            rows[k] = zeros;
            if (k < begin || k >= most) continue;
            const uint8_t* slot = paged.slot(sequence, tile * TILE + k);
            rows[k] = paged.fp8 ? decoded + (long)k * paged.width : (const T*)slot;
            if (paged.fp8) decode_latent(paged.fp8_slot(), slot, decoded + (long)k * paged.width);
        }
    }
};

// Consecutive rows of one sequence, for heads [head, head + heads): absorbed queries q [T, H, E] to out [T, H, C].
template <class T>
void attend_absorbed(const Paged<T>& paged, const T* q, long row0, int num_rows, int num_heads, int head, int heads,
                     int latent_width, float scale, T* out) {
    Scratch scratch;
    const int width = paged.width;
    Running running(scratch, num_rows * heads, latent_width);
    const auto queries = scratch.take<const typename Product<T>::X*>(running.count);
    for (int t = 0; t < num_rows; t++) {
        const auto prepared =
            prepare_rows<T>(scratch, q + ((row0 + t) * num_heads + head) * width, width, heads, width);
        std::memcpy(queries + t * heads, prepared, heads * sizeof(prepared[0]));
    }
    TileRows<T> latents(scratch, paged);
    const T** rows = latents.rows;
    T* copies = nullptr;  // of value rows whose padded width might reach beyond the cache
    if (running.value_width > width) copies = scratch.take<T>(TILE * running.value_width);
    auto* packed = scratch.take<typename Product<T>::Unit>((long)TILE * Product<T>::steps(width));
    const Result scores = strided_result(scratch, running.scores, TILE, running.count, TILE);
    const int32_t* positions = paged.positions + row0;
    int last = 0;
    for (int t = 0; t < num_rows; t++) last = positions[t] > last ? positions[t] : last;
    for (long tile = paged.first_position / TILE; tile <= last / TILE; tile++) {
        const int most = set_visible(running, tile, positions, heads, paged.first_position);
        if (most <= running.begin) continue;
        latents.read(paged.sequences[row0], tile, running.begin, most);
        const int blocks = (most + LANES - 1) / LANES;
        pack_keys(rows, blocks, width, packed);
        const Weight<T> keys{packed, width, TILE};
        multiply_blocks<T>(running.count, queries, keys, 0, blocks, scores);
        for (int pair = 0; pair < running.count; pair++)
            if (running.end[pair] > running.begin) soften(running, pair, scale);
        if (copies)
            for (int k = 0; k < most; k++) {
                std::memcpy((void*)(copies + k * running.value_width), rows[k], width * sizeof(T));
                rows[k] = copies + k * running.value_width;
            }
        add_values(running, rows);
    }
    for (int pair = 0; pair < running.count; pair++)
        finish(running, pair, latent_width,
               out + ((row0 + pair / heads) * num_heads + head + pair % heads) * latent_width);
}

// One task of a call: rows [row, row + count) of one sequence.
struct RowRun { long row; int count; };

// Cuts rows into runs of one sequence each, of at most `most` rows.
inline int cut_runs(const int32_t* sequences, long num_rows, int most, RowRun* runs) {
    int count = 0;
    for (long t = 0; t < num_rows; t++) {
        RowRun* run = count ? runs + count - 1 : nullptr;
        if (run && sequences[t] == sequences[run->row] && run->count < most) run->count++;
        else runs[count++] = {t, 1};
    }
    return count;
}

template <class T>
long first_invalid(const Paged<T>& paged, long num_rows) {
    for (long t = 0; t < num_rows; t++)
        if (!paged.valid(t)) return t;
    return -1;
}

// `cache_dtype`: FP8, or that of q. Returns -1, or the first row whose sequence, position or blocks are out of range;
// then nothing is computed.
PD_EXPORT long pd_mla_attention(int dtype, const void* q, long num_rows, int num_heads, int width, int latent_width,
                                 int cache_dtype, const void* cache, long num_blocks, long block_size,
                                 const int32_t* positions, const int32_t* sequences, const int32_t* tables,
                                 long num_sequences, long table_width, float scale, int first_position, void* out) {
    return with_dtype(dtype, [&](auto* type) -> long {
        using T = std::remove_pointer_t<decltype(type)>;
        const Paged<T> paged{(const uint8_t*)cache, cache_dtype == FP8, latent_width, width, num_blocks, block_size,
                             positions, sequences, tables, num_sequences, table_width, first_position};
        const long invalid = first_invalid(paged, num_rows);
        if (invalid >= 0) return invalid;
        Scratch scratch;
        RowRun* runs = scratch.take<RowRun>(num_rows);
        const int count = cut_runs(sequences, num_rows, MAX_PAIRS / num_heads > 1 ? MAX_PAIRS / num_heads : 1, runs);
        // With few runs the heads are shared out too.
        Pool& pool = Pool::instance();
        int parts = count >= pool.size() ? 1 : pool.size();
        if (parts > num_heads) parts = num_heads;
        pool.run((long)count * parts, [&](long task) {
            const RowRun run = runs[task / parts];
            const int part = (int)(task % parts), head = num_heads * part / parts;
            attend_absorbed(paged, (const T*)q, run.row, run.count, num_heads, head,
                            num_heads * (part + 1) / parts - head, latent_width, scale, (T*)out);
        });
        return -1;
    });
}

}  // namespace pd
