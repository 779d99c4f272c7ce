// Pieces from one buffer to another.

namespace pd {

// A copy that leaves the caches to others: nobody reads these bytes soon, and the lines that they are written to need
// not be fetched first.
inline void copy_past_caches(const unsigned char* from, unsigned char* to, long num_bytes) {
    long at = 0;
#if defined(__AVX2__)
    constexpr long LEAST = 512;
    if (num_bytes >= LEAST) {
        const long head = (64 - (uintptr_t)to % 64) % 64;
        std::memcpy(to, from, head);
        for (at = head; at + 64 <= num_bytes; at += 64) {
            const __m256i first = _mm256_loadu_si256((const __m256i*)(from + at));
            const __m256i second = _mm256_loadu_si256((const __m256i*)(from + at + 32));
            _mm256_stream_si256((__m256i*)(to + at), first);
            _mm256_stream_si256((__m256i*)(to + at + 32), second);
        }
    }
#endif
    std::memcpy(to + at, from + at, num_bytes - at);
}

// What went past the caches is there before anybody is told.
inline void finish_copies() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

PD_EXPORT void pd_copy_pieces(const unsigned char* source, unsigned char* destination, long count,
                              const int64_t* source_offsets, const int64_t* destination_offsets,
                              const int64_t* num_bytes) {
    for (long i = 0; i < count; i++)
        copy_past_caches(source + source_offsets[i], destination + destination_offsets[i], num_bytes[i]);
    finish_copies();
}

// The same with the C library's memcpy: what copies are measured by.
PD_EXPORT void pd_memcpy_pieces(const unsigned char* source, unsigned char* destination, long count,
                                const int64_t* source_offsets, const int64_t* destination_offsets,
                                const int64_t* num_bytes) {
    for (long i = 0; i < count; i++)
        std::memcpy(destination + destination_offsets[i], source + source_offsets[i], num_bytes[i]);
}

// Where the bytes of a piece go that lies in memory nobody has read lately. What follows is fetched ahead, over the ends
// of pages and into the next piece: there the processor's own prefetching stops, and weighing leaves it little room.
template <bool ALIGNED>
struct CopiedAhead : Copied<ALIGNED> {
    static constexpr long AHEAD_BYTES = 2048;
    const unsigned char *from, *next;
    long num_bytes;

    CopiedAhead(unsigned char* to, const unsigned char* from, const unsigned char* next, long num_bytes)
        : Copied<ALIGNED>{to}, from(from), next(next), num_bytes(num_bytes) {}
#if defined(__AVX2__)
    void put(long at, __m256i bytes) const {
        if (at % 64 == 0) {
            const long ahead = at + AHEAD_BYTES;
            _mm_prefetch((const char*)(ahead < num_bytes ? from + ahead : next + (ahead - num_bytes)), _MM_HINT_T0);
        }
        Copied<ALIGNED>::put(at, bytes);
    }
#endif
};

// Copies and weighs a piece: each byte is read once, and what the checksum is of is what was written.
inline uint64_t copy_and_checksum(const unsigned char* from, unsigned char* to, const unsigned char* next,
                                  long num_bytes) {
    return (uintptr_t)to % 32 == 0 ? checksum(from, num_bytes, CopiedAhead<true>{to, from, next, num_bytes})
                                   : checksum(from, num_bytes, CopiedAhead<false>{to, from, next, num_bytes});
}

PD_EXPORT void pd_copy_and_checksum_pieces(const unsigned char* source, unsigned char* destination, long count,
                                           const int64_t* source_offsets, const int64_t* destination_offsets,
                                           const int64_t* num_bytes, uint64_t* checksums) {
    for (long i = 0; i < count; i++) {
        const unsigned char* next = source + source_offsets[i + 1 < count ? i + 1 : i];
        checksums[i] = copy_and_checksum(source + source_offsets[i], destination + destination_offsets[i], next,
                                         num_bytes[i]);
    }
    finish_copies();
}

}  // namespace pd
