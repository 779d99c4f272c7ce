// y = x W^T: the one product that all ops are made of.
//
// A weight of N outputs and K inputs is packed in blocks of sixteen outputs: [N/16][steps][16] units, where a unit is
// one float, or a pair of bfloat16 (inputs 2k and 2k + 1). N is padded to a multiple of 16 and K to a whole unit with
// zeros. Each output is one lane's running sum over k = 0, 1, 2, ... from zero, by fma: the order depends neither on
// the number of rows nor on how outputs are tiled. (With native bf16 products a step adds the pair as the
// instruction does: 2k + 1 first.)
//
// An e4m3 weight takes part as float32 numbers code · scale, rounded once, and rows are float32 whatever they were: its
// sums are bit for bit those of a float32 weight. A block of it is [⌈K/128⌉] groups of one scale a lane, times 2^120,
// and 32 units a lane of four codes; K is padded with zeros to whole groups.
#pragma once

#include <type_traits>

#include "fp8.h"
#include "pool.h"
#include "scratch.h"
#include "storage.h"

namespace pd {

constexpr int MAX_ROWS = VECTORS_IN_FLIGHT < 6 ? VECTORS_IN_FLIGHT : 6;  // rows of a tile
constexpr int MAX_BLOCKS = 4;                                            // blocks of outputs of a tile
constexpr int ROWS_A_CHUNK = 8 * 6;  // rows that stay in cache while all blocks pass by

// How a storage type takes part in a product. `X` is the element of a prepared row.
template <class T>
struct Product;

template <>
struct Product<float> {
    using X = float;
    using Unit = float;
    static constexpr int X_A_STEP = 1;
    static constexpr long UNITS_A_STEP = LANES;
    static int steps(int K) { return K; }
    static void prepare(const float* row, int K, X* out) { std::memcpy(out, row, K * sizeof(float)); }

    template <int M, int N>
    static inline void step(const X* const (&x)[M], const Unit* w, long block, long k, V (&sums)[M][N]) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const V weights = load(w + n * block + k * LANES);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) add_product(x[m] + k, weights, sums[m][n]);
        }
    }
};

#if defined(__AVX512BF16__)

template <>
struct Product<bf16> {
    using X = uint32_t;  // a pair
    using Unit = uint32_t;
    static constexpr int X_A_STEP = 1;
    static constexpr long UNITS_A_STEP = LANES;
    static int steps(int K) { return (K + 1) / 2; }
    static void prepare(const bf16* row, int K, X* out) {
        out[steps(K) - 1] = 0;
        std::memcpy(out, row, K * sizeof(bf16));
    }

    template <int M, int N>
    static inline void step(const X* const (&x)[M], const Unit* w, long block, long k, V (&sums)[M][N]) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const __m512bh weights = (__m512bh)_mm512_loadu_si512(w + n * block + k * LANES);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++)
                sums[m][n].a = _mm512_dpbf16_ps(sums[m][n].a, (__m512bh)_mm512_set1_epi32((int)x[m][k]), weights);
        }
    }
};

#else

template <>
struct Product<bf16> {
    using X = float;
    using Unit = uint32_t;
    static constexpr int X_A_STEP = 2;
    static constexpr long UNITS_A_STEP = LANES;
    static int steps(int K) { return (K + 1) / 2; }
    static void prepare(const bf16* row, int K, X* out) {
        out[2 * steps(K) - 1] = 0.0f;
        for_lanes(K, [&](int i, int n) { store_upto(out + i, load_upto(row + i, n), n); });
    }

    template <int M, int N>
    static inline void step(const X* const (&x)[M], const Unit* w, long block, long k, V (&sums)[M][N]) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const U pairs = load_u(w + n * block + k * LANES);
            const V first = even(pairs);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) add_product(x[m] + 2 * k, first, sums[m][n]);
            const V second = odd(pairs);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) add_product(x[m] + 2 * k + 1, second, sums[m][n]);
        }
    }
};

#endif

template <>
struct Product<e4m3> {
    using X = float;
    using Unit = uint32_t;
    static constexpr int CODES_A_UNIT = 4;
    static constexpr int UNITS_A_GROUP = FP8_GROUP / CODES_A_UNIT;
    static constexpr int X_A_STEP = FP8_GROUP;
    static constexpr long UNITS_A_STEP = (1 + UNITS_A_GROUP) * LANES;
    static int steps(int K) { return (K + FP8_GROUP - 1) / FP8_GROUP; }

    template <class T>
    static void prepare(const T* row, int K, X* out) {
        std::memset(out + K, 0, ((long)steps(K) * FP8_GROUP - K) * sizeof(X));
        for_lanes(K, [&](int i, int n) { store_upto(out + i, load_upto(row + i, n), n); });
    }

    // Input 4 · unit + code of a group, for sixteen outputs.
    static inline V weight(const Unit* group, int unit, int code) {
        const U codes = load_u(group + (1 + unit) * LANES);
        return small_e4m3(codes << (24 - 8 * code)) * load((const float*)group);
    }

    template <int M, int N>
    static inline void step(const X* const (&x)[M], const Unit* w, long block, long k, V (&sums)[M][N]) {
        for (int unit = 0; unit < UNITS_A_GROUP; unit++)
#pragma GCC unroll 8
            for (int n = 0; n < N; n++)
#pragma GCC unroll 4
                for (int code = 0; code < CODES_A_UNIT; code++) {
                    const V weights = weight(w + n * block + k * UNITS_A_STEP, unit, code);
                    const long input = k * FP8_GROUP + unit * CODES_A_UNIT + code;
#pragma GCC unroll 8
                    for (int m = 0; m < M; m++) add_product(x[m] + input, weights, sums[m][n]);
                }
    }
};

// Elements of a prepared row, padded so that rows start on cache lines.
template <class T>
inline long prepared_width(int K) {
    return (Product<T>::steps(K) * Product<T>::X_A_STEP + LANES - 1) / LANES * LANES;
}

// A packed weight.
template <class T>
struct Weight {
    const typename Product<T>::Unit* units;
    int K, N;

    int num_blocks() const { return (N + LANES - 1) / LANES; }
    long block_stride() const { return Product<T>::steps(K) * Product<T>::UNITS_A_STEP; }
};

// Where a product goes: row m of the result starts at rows[m], `width` numbers of the type that `dtype` names.
struct Result {
    void* const* rows;
    int dtype, width;
    int first_block = 0;  // that block 0 is written as

    Result from(int block) const { return {rows, dtype, width, first_block + block}; }

    void put(int row, int block, V lanes) const {
        block += first_block;
        const int left = width - block * LANES, n = left < LANES ? left : LANES;
        if (dtype == BF16) store_upto((bf16*)rows[row] + block * LANES, lanes, n);
        else store_upto((float*)rows[row] + block * LANES, lanes, n);
    }
};

// Rows m0 .. m0 + M - 1 times blocks block .. block + N - 1.
template <class T, int M, int N>
__attribute__((noinline)) void multiply_tile(const typename Product<T>::X* const* rows, const Weight<T>& w, int m0,
                                             int block, const Result& result) {
    const typename Product<T>::X* x[M];
    for (int m = 0; m < M; m++) x[m] = rows[m0 + m];
    V sums[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sums[m][n] = zero();
    const long stride = w.block_stride();
    const typename Product<T>::Unit* units = w.units + block * stride;
    const long steps = Product<T>::steps(w.K);
    for (long k = 0; k < steps; k++) Product<T>::template step<M, N>(x, units, stride, k, sums);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) result.put(m0 + m, block + n, sums[m][n]);
}

constexpr int blocks_of_tile(int rows) {
    const int fit = VECTORS_IN_FLIGHT / rows;
    return fit < 1 ? 1 : fit > MAX_BLOCKS ? MAX_BLOCKS : fit;
}

// M rows from m0 times blocks [begin, end).
template <class T, int M>
void multiply_strip(const typename Product<T>::X* const* rows, const Weight<T>& w, int m0, int begin, int end,
                    const Result& result) {
    if constexpr (M > 0 && M <= MAX_ROWS) {
        constexpr int N = blocks_of_tile(M);
        int block = begin;
        for (; block + N <= end; block += N) multiply_tile<T, M, N>(rows, w, m0, block, result);
        if constexpr (N > 2)
            for (; block + 2 <= end; block += 2) multiply_tile<T, M, 2>(rows, w, m0, block, result);
        if constexpr (N > 1)
            for (; block < end; block++) multiply_tile<T, M, 1>(rows, w, m0, block, result);
    }
}

// All rows times blocks [begin, end), as they are packed.
template <class T>
void multiply_packed(int num_rows, const typename Product<T>::X* const* rows, const Weight<T>& w, int begin, int end,
                     const Result& result) {
    constexpr int N = blocks_of_tile(MAX_ROWS);
    const int whole = num_rows / MAX_ROWS * MAX_ROWS;
    for (int m0 = 0; m0 < whole; m0 += ROWS_A_CHUNK) {
        const int m1 = m0 + ROWS_A_CHUNK < whole ? m0 + ROWS_A_CHUNK : whole;
        for (int block = begin; block < end; block += N) {
            const int stop = block + N < end ? block + N : end;
            for (int m = m0; m < m1; m += MAX_ROWS) multiply_strip<T, MAX_ROWS>(rows, w, m, block, stop, result);
        }
    }
    switch (num_rows - whole) {
        case 1: return multiply_strip<T, 1>(rows, w, whole, begin, end, result);
        case 2: return multiply_strip<T, 2>(rows, w, whole, begin, end, result);
        case 3: return multiply_strip<T, 3>(rows, w, whole, begin, end, result);
        case 4: return multiply_strip<T, 4>(rows, w, whole, begin, end, result);
        case 5: return multiply_strip<T, 5>(rows, w, whole, begin, end, result);
    }
}

// Blocks [begin, end) of an e4m3 weight as float32 ones: units [block][inputs, padded][16].
inline void decode_blocks(const Weight<e4m3>& w, int begin, int end, float* out) {
    const int groups = Product<e4m3>::steps(w.K);
    for (int block = begin; block < end; block++)
        for (int k = 0; k < groups; k++) {
            const uint32_t* group = w.units + block * w.block_stride() + k * Product<e4m3>::UNITS_A_STEP;
            for (int unit = 0; unit < Product<e4m3>::UNITS_A_GROUP; unit++)
                for (int code = 0; code < Product<e4m3>::CODES_A_UNIT; code++, out += LANES)
                    store(out, Product<e4m3>::weight(group, unit, code));
        }
}

// All rows times blocks [begin, end).
template <class T>
void multiply_blocks(int num_rows, const typename Product<T>::X* const* rows, const Weight<T>& w, int begin, int end,
                     const Result& result) {
    if constexpr (std::is_same<T, e4m3>::value)
        if (num_rows > 2 * MAX_ROWS) {  // decoded once, and not once a tile of rows
            constexpr int N = blocks_of_tile(MAX_ROWS);
            const int padded = Product<T>::steps(w.K) * FP8_GROUP;
            Scratch scratch;
            float* decoded = scratch.take<float>((long)N * padded * LANES);
            for (int block = begin; block < end; block += N) {
                const int stop = block + N < end ? block + N : end;
                decode_blocks(w, block, stop, decoded);
                const Weight<float> part{decoded, padded, (stop - block) * LANES};
                multiply_packed<float>(num_rows, rows, part, 0, stop - block, result.from(block));
            }
            return;
        }
    multiply_packed<T>(num_rows, rows, w, begin, end, result);
}

// The same for all blocks, shared among the threads.
template <class T>
void multiply(int num_rows, const typename Product<T>::X* const* rows, const Weight<T>& w, const Result& result) {
    Pool& pool = Pool::instance();
    const int blocks = w.num_blocks();
    const int parts = pool.size() * MAX_BLOCKS > blocks ? (blocks + MAX_BLOCKS - 1) / MAX_BLOCKS : pool.size();
    pool.run(parts, [&](long part) {
        const int begin = (int)(blocks * part / parts), end = (int)(blocks * (part + 1) / parts);
        multiply_blocks<T>(num_rows, rows, w, begin, end, result);
    });
}

// One row of each of G weights of one shape, side by side: result row g is rows[g] times weight g. Long products with
// few outputs keep the processor busy only together.
template <class T, int G>
__attribute__((noinline)) void multiply_side_by_side(const typename Product<T>::X* const* rows, const Weight<T>& first,
                                                     long weight_stride, const Result& result) {
    const long steps = Product<T>::steps(first.K), stride = first.block_stride();
    for (int block = 0; block < first.num_blocks(); block++) {
        V sums[G][1][1];
        const typename Product<T>::X* x[G][1];
        const typename Product<T>::Unit* units[G];
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) {
            sums[g][0][0] = zero();
            x[g][0] = rows[g];
            units[g] = first.units + g * weight_stride + block * stride;
        }
        for (long k = 0; k < steps; k++)
#pragma GCC unroll 8
            for (int g = 0; g < G; g++) Product<T>::template step<1, 1>(x[g], units[g], stride, k, sums[g]);
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) result.put(g, block, sums[g][0][0]);
    }
}

// Rows of x, `stride` elements apart, made ready for products with a weight of P: an array of pointers.
template <class P, class T>
const typename Product<P>::X** prepare_rows(Scratch& scratch, const T* x, long stride, int num_rows, int K) {
    using X = typename Product<P>::X;
    const X** rows = scratch.take<const X*>(num_rows);
    if constexpr (std::is_same<T, X>::value && std::is_same<P, T>::value) {
        for (int m = 0; m < num_rows; m++) rows[m] = x + m * stride;
        return rows;
    }
    const long width = prepared_width<P>(K);
    X* prepared = scratch.take<X>(num_rows * width);
    for (int m = 0; m < num_rows; m++) {
        Product<P>::prepare(x + m * stride, K, prepared + m * width);
        rows[m] = prepared + m * width;
    }
    return rows;
}

// A result whose rows of `Out` stand `stride` elements apart.
template <class Out>
Result strided_result(Scratch& scratch, Out* first, long stride, int num_rows, int width) {
    void** rows = scratch.take<void*>(num_rows);
    for (int m = 0; m < num_rows; m++) rows[m] = first + m * stride;
    return {rows, std::is_same<Out, bf16>::value ? BF16 : F32, width};
}

}  // namespace pd
