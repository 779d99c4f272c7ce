// Multilinear checksums (block_checksum/reference.py): Σ word_i · key_i mod 2^64, in any order.

namespace pd {

inline uint64_t spread(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

inline uint32_t word_at(const unsigned char* bytes) {
    uint32_t word;
    std::memcpy(&word, bytes, sizeof word);
    return word;
}

// Σ over whole words. A product mod 2^64 is word · low(key) + (word · high(key) << 32): two sums of 32 x 32 bits.
inline uint64_t weigh(const unsigned char* bytes, const uint64_t* keys, long num_words) {
    uint64_t total = 0;
    long i = 0;
#if defined(__AVX2__)
    __m256i low[4], high[4];
    for (int j = 0; j < 4; j++) low[j] = high[j] = _mm256_setzero_si256();
    for (; i + 16 <= num_words; i += 16)
        for (int j = 0; j < 4; j++) {
            const __m256i words = _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i*)(bytes + 4 * i + 16 * j)));
            const __m256i key = _mm256_loadu_si256((const __m256i*)(keys + i + 4 * j));
            low[j] = _mm256_add_epi64(low[j], _mm256_mul_epu32(words, key));
            high[j] = _mm256_add_epi64(high[j], _mm256_mul_epu32(words, _mm256_srli_epi64(key, 32)));
        }
    for (int j = 0; j < 4; j++) {
        alignas(32) uint64_t lanes[4];
        _mm256_store_si256((__m256i*)lanes, _mm256_add_epi64(low[j], _mm256_slli_epi64(high[j], 32)));
        for (uint64_t lane : lanes) total += lane;
    }
#endif
    for (; i < num_words; i++) total += word_at(bytes + 4 * i) * keys[i];
    return total;
}

// `keys` holds one key for each word of the longest piece, a partial last word included.
PD_EXPORT void pd_checksums(const unsigned char* const* pieces, const int64_t* num_bytes, long count,
                             const uint64_t* keys, uint64_t* out) {
    constexpr uint64_t LENGTH_KEY = 0xC2B2AE3D27D4EB4Fu;
    Pool::instance().run(count, [&](long i) {
        const long words = num_bytes[i] / 4, rest = num_bytes[i] % 4;
        uint64_t total = weigh(pieces[i], keys, words);
        if (rest) {
            uint32_t tail = 0;
            std::memcpy(&tail, pieces[i] + 4 * words, rest);
            total += tail * keys[words];
        }
        out[i] = spread(total + (uint64_t)num_bytes[i] * LENGTH_KEY);
    });
}

}  // namespace pd
