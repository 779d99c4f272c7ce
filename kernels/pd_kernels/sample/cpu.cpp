// Choosing tokens: operation for operation the steps of sample/reference.py, so that the token is the same.

#include <algorithm>

namespace pd {

constexpr float MIN_TEMPERATURE = 1e-5f;
constexpr int SUM_LANES = 8;
constexpr int CHUNK = 4 * LANES;         // vocabulary entries that one call of `philox` serves
constexpr float MAX_NOISE = 16.7f;       // -log(-log u) for the largest u below 1 is 16.64

// Philox4x32-10 (Salmon et al. 2011) of sixteen counters (block + lane, c1, c2, 0): four words a lane.
inline void philox(uint32_t block, uint32_t c1, uint32_t c2, uint32_t k0, uint32_t k1, U (&words)[4]) {
    static const uint32_t iota[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    U w0 = set_u(block) + load_u(iota), w1 = set_u(c1), w2 = set_u(c2), w3 = set_u(0);
    for (int round = 0; round < 10; round++) {
        U high0, low0, high1, low1;
        multiply_wide(w0, 0xD2511F53u, high0, low0);
        multiply_wide(w2, 0xCD9E8D57u, high1, low1);
        w0 = high1 ^ w1 ^ set_u(k0);
        w2 = high0 ^ w3 ^ set_u(k1);
        w1 = low1;
        w3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    words[0] = w0;
    words[1] = w1;
    words[2] = w2;
    words[3] = w3;
}

inline V gumbel(U words) {
    const V uniform = (from_int(words >> 9) + set(0.5f)) * set(1.0f / 8388608.0f);
    return negative(log(negative(log(uniform))));
}

// Noise of the vocabulary entries 64 chunk .. 64 chunk + 63 at one position of the stream.
inline void noise_chunk(uint64_t seed, int64_t position, uint32_t chunk, float* noise) {
    U words[4];
    philox(chunk * LANES, (uint32_t)position, (uint32_t)((uint64_t)position >> 32), (uint32_t)seed,
           (uint32_t)(seed >> 32), words);
    float lanes[LANES];
    for (int w = 0; w < 4; w++) {
        store(lanes, gumbel(words[w]));
        for (int i = 0; i < LANES; i++) noise[4 * i + w] = lanes[i];
    }
}

inline int first_largest(const float* x, int count) {
    int best = 0;
    for (int i = 1; i < count; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

// Sum of doubles: lane i sums x[i], x[i + 8], ...; then the lanes in order.
inline double sum_lanes(const float* x, int count) {
    double lanes[SUM_LANES] = {};
    int i = 0;
    for (; i + SUM_LANES <= count; i += SUM_LANES)
        for (int j = 0; j < SUM_LANES; j++) lanes[j] += x[i + j];
    for (int j = 0; i + j < count; j++) lanes[j] += x[i + j];
    double total = lanes[0];
    for (int j = 1; j < SUM_LANES; j++) total += lanes[j];
    return total;
}

struct Ranked { float z; int index; };
inline bool ranks_after(Ranked a, Ranked b) { return a.z < b.z || (a.z == b.z && a.index > b.index); }
inline bool ranks_before(Ranked a, Ranked b) { return ranks_after(b, a); }

constexpr float NEAR_BEST = 8.0f;  // most of what top-p keeps is less than this below the best entry

// Marks in rank order while the sum of the marked entries' p is below `limit`; at least one. Returns the sum.
inline double mark_while_below(Ranked* heap, int size, const float* p, double before, double limit, bool* kept) {
    std::make_heap(heap, heap + size, ranks_after);
    while (size > 0 && (before == 0.0 || before < limit)) {
        std::pop_heap(heap, heap + size, ranks_after);
        const int index = heap[--size].index;
        kept[index] = true;
        before += p[index];
    }
    return before;
}

// The entries of z that min-p leaves (all if it is 0), in order of index; returns their number.
inline int take_likely(const float* z, int count, float min_p, Ranked* entries) {
    if (min_p <= 0.0f) {
        for (int i = 0; i < count; i++) entries[i] = {z[i], i};
        return count;
    }
    float threshold[LANES];
    store(threshold, log(set(min_p)));
    const float best = z[first_largest(z, count)];
    int size = 0;
    for (int i = 0; i < count; i++)
        if (z[i] - best >= threshold[0] || z[i] == best) entries[size++] = {z[i], i};
    return size;
}

// Marks in `kept` the entries of z that min-p, then top-k and then top-p leave.
inline void keep_best(const float* z, int count, int top_k, float top_p, float min_p, bool* kept) {
    Scratch scratch;
    Ranked* entries = scratch.take<Ranked>(count);
    int size = take_likely(z, count, min_p, entries);
    if (top_k > 0 && top_k < size) {
        std::nth_element(entries, entries + top_k - 1, entries + size, ranks_before);
        size = top_k;
    }
    std::memset(kept, 0, count);
    for (int i = 0; i < size; i++) kept[entries[i].index] = true;
    if (top_p >= 1.0f) return;
    float* p = scratch.take<float>(count);
    std::memset(p, 0, count * sizeof(float));
    const float best = std::min_element(entries, entries + size, ranks_before)->z;
    for (int i = 0; i < size; i++) p[entries[i].index] = z[entries[i].index] - best;
    for_lanes(count, [&](int i, int n) { store_upto(p + i, exp(load_upto(p + i, n)), n); });
    if (size < count)
        for (int i = 0; i < count; i++)
            if (!kept[i]) p[i] = 0.0f;
    std::memset(kept, 0, count);
    const double limit = (double)top_p * sum_lanes(p, count);
    Ranked* rest = std::partition(entries, entries + size, [&](Ranked e) { return e.z > best - NEAR_BEST; });
    const double sum = mark_while_below(entries, (int)(rest - entries), p, 0.0, limit, kept);
    if (sum == 0.0 || sum < limit) mark_while_below(rest, (int)(entries + size - rest), p, sum, limit, kept);
}

// First index of the largest z + noise among the entries that stay (all if `kept` is null). Noise is not computed
// where even the largest possible one could not win.
inline int noisy_largest(const float* z, int count, const bool* kept, uint64_t seed, int64_t position) {
    Scratch scratch;
    const int num_chunks = (count + CHUNK - 1) / CHUNK;
    float* chunk_largest = scratch.take<float>(num_chunks);
    for (int c = 0; c < num_chunks; c++) {
        V most = set(-INFINITY);
        for_lanes(count - c * CHUNK < CHUNK ? count - c * CHUNK : CHUNK, [&](int i, int n) {
            const V v = n == LANES ? load(z + c * CHUNK + i) : load_n(z + c * CHUNK + i, n, -INFINITY);
            most = max(v, most);
        });
        chunk_largest[c] = largest(most);
    }
    // A first bound: the noisy value of the largest entry.
    float noise[CHUNK];
    const int first = first_largest(chunk_largest, num_chunks) * CHUNK;
    int top = first;
    for (int i = first; i < count && i < first + CHUNK; i++)
        if (z[i] > z[top]) top = i;
    noise_chunk(seed, position, (uint32_t)(first / CHUNK), noise);
    const float bound = z[top] + noise[top - first];
    int best = -1;
    float best_value = -INFINITY;
    for (int c = 0; c < num_chunks; c++) {
        const float most = chunk_largest[c] + MAX_NOISE;
        if (most < bound || most < best_value) continue;
        noise_chunk(seed, position, (uint32_t)c, noise);
        for (int i = c * CHUNK; i < count && i < (c + 1) * CHUNK; i++) {
            if (kept && !kept[i]) continue;
            const float value = z[i] + noise[i - c * CHUNK];
            if (best < 0 || value > best_value) {
                best = i;
                best_value = value;
            }
        }
    }
    return best;
}

inline int sample_row(const float* logits, int count, float temperature, int top_k, float top_p, float min_p,
                      uint64_t seed, int64_t position) {
    Scratch scratch;
    const bool greedy = temperature < MIN_TEMPERATURE;
    float* z = scratch.take<float>(count + LANES);
    for_lanes(count, [&](int i, int n) {
        V v = load_upto(logits + i, n);
        v = as_float(select_nan(v, as_bits(set(-INFINITY)), as_bits(v)));
        store_upto(z + i, greedy ? v : v / set(temperature), n);
    });
    if (greedy) return first_largest(z, count);
    bool* kept = nullptr;
    if ((top_k > 0 && top_k < count) || top_p < 1.0f || min_p > 0.0f) {
        kept = scratch.take<bool>(count);
        keep_best(z, count, top_k, top_p, min_p, kept);
        for (int i = 0; i < count; i++)
            if (!kept[i]) z[i] = -INFINITY;
    }
    return noisy_largest(z, count, kept, seed, position);
}

PD_EXPORT void pd_sample(const float* logits, long num_rows, int vocab_size, const float* temperature,
                          const int32_t* top_k, const float* top_p, const float* min_p, const uint64_t* seed,
                          const int64_t* position, int32_t* tokens) {
    Pool::instance().run(num_rows, [&](long t) {
        tokens[t] = sample_row(logits + t * vocab_size, vocab_size, temperature[t], top_k[t], top_p[t], min_p[t],
                               seed[t], position[t]);
    });
}

PD_EXPORT void pd_logprobs(const float* logits, long num_rows, int vocab_size, float* out) {
    Pool::instance().run(num_rows, [&](long t) {
        Scratch scratch;
        const float* row = logits + t * vocab_size;
        float* p = scratch.take<float>(vocab_size + LANES);
        float best = row[0];
        for (int i = 1; i < vocab_size; i++) best = row[i] > best ? row[i] : best;
        for_lanes(vocab_size, [&](int i, int n) { store_upto(p + i, exp(load_upto(row + i, n) - set(best)), n); });
        const double shift = (double)best + std::log(sum_lanes(p, vocab_size));
        for (int i = 0; i < vocab_size; i++) out[t * vocab_size + i] = (float)((double)row[i] - shift);
    });
}

}  // namespace pd
