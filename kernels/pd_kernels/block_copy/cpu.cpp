// Pieces from one buffer to another.

namespace pd {

PD_EXPORT void pd_copy_pieces(const char* source, char* destination, long count, const int64_t* source_offsets,
                               const int64_t* destination_offsets, const int64_t* num_bytes) {
    for (long i = 0; i < count; i++)
        std::memcpy(destination + destination_offsets[i], source + source_offsets[i], num_bytes[i]);
}

// The same in one pass with the checksums of what is copied: each byte is read once, and what the checksum is of is
// what was written.
PD_EXPORT void pd_copy_and_checksum_pieces(const unsigned char* source, unsigned char* destination, long count,
                                            const int64_t* source_offsets, const int64_t* destination_offsets,
                                            const int64_t* num_bytes, uint64_t* checksums) {
    for (long i = 0; i < count; i++) {
        const unsigned char* from = source + source_offsets[i];
        unsigned char* to = destination + destination_offsets[i];
        checksums[i] = (uintptr_t)to % 32 == 0 ? checksum(from, num_bytes[i], Copied<true>{to})
                                               : checksum(from, num_bytes[i], Copied<false>{to});
    }
#if defined(__AVX2__)
    _mm_sfence();  // what went past the caches is there before anybody is told
#endif
}

}  // namespace pd
