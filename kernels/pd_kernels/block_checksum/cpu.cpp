// Multilinear checksums (block_checksum/reference.py): stretches of KEYS words, Σ_j RATIO^j · Σ_i word_i · key_i mod 2^64.

namespace pd {

inline uint64_t spread(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

inline uint64_t word_at(const unsigned char* bytes, long num_bytes) {
    uint32_t word = 0;
    std::memcpy(&word, bytes, num_bytes);
    return word;
}

struct ChecksumKeys {
    static constexpr long COUNT = 1024, STRETCH_BYTES = 4 * COUNT;
    static constexpr uint64_t RATIO = 0x27D4EB2F165667C5u, LENGTH_KEY = 0xC2B2AE3D27D4EB4Fu;

    ChecksumKeys() {
        for (long i = 0; i < COUNT; i++) {
            const uint64_t key = spread((uint64_t)(i + 1) * 0x9E3779B97F4A7C15u) | 1;
            low[i] = (uint32_t)key;
            high[i] = (uint32_t)(key >> 32);
        }
    }

    static const ChecksumKeys& instance() {
        static const ChecksumKeys keys;
        return keys;
    }

    uint64_t at(long i) const { return low[i] | (uint64_t)high[i] << 32; }

    alignas(64) uint32_t low[COUNT], high[COUNT];  // halves of the keys
};

// Where bytes go that are weighed: nowhere, or to another place, past the caches if that is aligned.
struct Nowhere {
    void put_some(const unsigned char*, long, long) const {}
#if defined(__AVX2__)
    void put(long, __m256i) const {}
#endif
};

template <bool ALIGNED>
struct Copied {
    unsigned char* to;

    void put_some(const unsigned char* bytes, long at, long count) const { std::memcpy(to + at, bytes + at, count); }
#if defined(__AVX2__)
    void put(long at, __m256i bytes) const {
        if (ALIGNED) _mm256_stream_si256((__m256i*)(to + at), bytes);
        else _mm256_storeu_si256((__m256i*)(to + at), bytes);
    }
#endif
};

// Σ word_i · key_i over the bytes first .. first + num_bytes - 1, at most one stretch; zeros fill up the last word.
// A product mod 2^64 is word · low(key) + (word · high(key) << 32). Of the second only 32 bits count: eight words at a
// time; of the first 64: words of even and of odd places apart, which need no widening.
template <class Target>
uint64_t weigh(const unsigned char* bytes, long first, long num_bytes, const ChecksumKeys& keys, Target target) {
    uint64_t total = 0;
    long at = 0;
#if defined(__AVX2__)
    constexpr int UNROLLED = 4, STEP = 32 * UNROLLED;
    __m256i even[UNROLLED], odd[UNROLLED], high[UNROLLED];
    for (int j = 0; j < UNROLLED; j++) even[j] = odd[j] = high[j] = _mm256_setzero_si256();
    for (; at + STEP <= num_bytes; at += STEP)
        for (int j = 0; j < UNROLLED; j++) {
            const __m256i words = _mm256_loadu_si256((const __m256i*)(bytes + first + at + 32 * j));
            target.put(first + at + 32 * j, words);
            const __m256i low_keys = _mm256_load_si256((const __m256i*)(keys.low + at / 4 + 8 * j));
            const __m256i high_keys = _mm256_load_si256((const __m256i*)(keys.high + at / 4 + 8 * j));
            even[j] = _mm256_add_epi64(even[j], _mm256_mul_epu32(words, low_keys));
            odd[j] = _mm256_add_epi64(
                odd[j], _mm256_mul_epu32(_mm256_srli_epi64(words, 32), _mm256_srli_epi64(low_keys, 32)));
            high[j] = _mm256_add_epi32(high[j], _mm256_mullo_epi32(words, high_keys));
        }
    for (int j = 0; j < UNROLLED; j++) {
        const __m256i of_odd = _mm256_slli_epi64(_mm256_srli_epi64(high[j], 32), 32);
        const __m256i shifted = _mm256_add_epi64(_mm256_slli_epi64(high[j], 32), of_odd);
        alignas(32) uint64_t lanes[4];
        _mm256_store_si256((__m256i*)lanes, _mm256_add_epi64(_mm256_add_epi64(even[j], odd[j]), shifted));
        for (uint64_t lane : lanes) total += lane;
    }
#endif
    target.put_some(bytes, first + at, num_bytes - at);
    for (; at + 4 <= num_bytes; at += 4) total += word_at(bytes + first + at, 4) * keys.at(at / 4);
    if (at < num_bytes) total += word_at(bytes + first + at, num_bytes - at) * keys.at(at / 4);
    return total;
}

template <class Target>
uint64_t checksum(const unsigned char* bytes, long num_bytes, Target target) {
    const ChecksumKeys& keys = ChecksumKeys::instance();
    uint64_t total = num_bytes * ChecksumKeys::LENGTH_KEY, factor = 1;
    for (long first = 0; first < num_bytes; first += ChecksumKeys::STRETCH_BYTES, factor *= ChecksumKeys::RATIO)
        total += factor * weigh(bytes, first, std::min(ChecksumKeys::STRETCH_BYTES, num_bytes - first), keys, target);
    return spread(total);
}

// Of the ranges of a buffer, each of num_bytes[i] bytes from offsets[i] on.
PD_EXPORT void pd_checksums(const unsigned char* buffer, long count, const int64_t* offsets, const int64_t* num_bytes,
                             uint64_t* out) {
    for (long i = 0; i < count; i++) out[i] = checksum(buffer + offsets[i], num_bytes[i], Nowhere{});
}

}  // namespace pd
