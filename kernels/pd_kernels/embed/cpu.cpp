// Rows of the embedding table.

namespace pd {

// Returns -1, or the first row whose id is not in the table.
PD_EXPORT long pd_embed(const int64_t* ids, long num_rows, const char* table, long vocab_size, long row_bytes,
                         char* out) {
    for (long t = 0; t < num_rows; t++) {
        if (ids[t] < 0 || ids[t] >= vocab_size) return t;
        std::memcpy(out + t * row_bytes, table + ids[t] * row_bytes, row_bytes);
    }
    return -1;
}

}  // namespace pd
