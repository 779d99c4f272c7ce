// Pieces from one buffer to another.

namespace pd {

PD_EXPORT void pd_copy_pieces(const char* source, char* destination, long count, const int64_t* source_offsets,
                               const int64_t* destination_offsets, const int64_t* num_bytes) {
    for (long i = 0; i < count; i++)
        std::memcpy(destination + destination_offsets[i], source + source_offsets[i], num_bytes[i]);
}

}  // namespace pd
