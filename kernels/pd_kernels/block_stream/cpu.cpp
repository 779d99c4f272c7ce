// Pieces through a stream socket that blocks: from where they lie, and to where they belong.

#include <cerrno>
#include <climits>
#include <sys/socket.h>
#include <sys/uio.h>

namespace pd {

// The pieces' bytes one after another; `piece` and `at` say where the next byte of the stream is.
struct PieceStream {
    unsigned char* memory;
    long count;
    const int64_t *offsets, *num_bytes;
    long piece = 0;
    int64_t at = 0;

    void skip_empty() {
        while (piece < count && at == num_bytes[piece]) {
            piece++;
            at = 0;
        }
    }

    void advance(int64_t moved) {
        while (moved > 0) {
            const int64_t some = std::min(moved, num_bytes[piece] - at);
            at += some;
            moved -= some;
            skip_empty();
        }
    }

    // Where the next bytes lie, at most `most` of them; how many vectors that takes.
    int vectors(struct iovec* out, int most_vectors, int64_t most) const {
        int filled = 0;
        int64_t first = at;
        for (long i = piece; i < count && filled < most_vectors && most > 0; i++, first = 0) {
            const int64_t some = std::min(num_bytes[i] - first, most);
            if (some == 0) continue;
            out[filled++] = {memory + offsets[i] + first, (size_t)some};
            most -= some;
        }
        return filled;
    }
};

constexpr long STREAM_ENDED = -1;  // the peer has hung up, or nobody waits any more

// All bytes of all pieces by calls of recvmsg or sendmsg. 0, STREAM_ENDED, or the errno of what failed.
template <class Move>
long move_all(PieceStream stream, int64_t most, const volatile uint8_t* stop, Move move) {
    constexpr int VECTORS = 512;  // the kernel's limit is 1,024
    struct iovec vectors[VECTORS];
    stream.skip_empty();
    while (stream.piece < stream.count) {
        struct msghdr message = {};
        message.msg_iov = vectors;
        message.msg_iovlen = stream.vectors(vectors, VECTORS, most);
        if (stop && *stop) return STREAM_ENDED;
        const ssize_t moved = move(&message);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) return moved == 0 ? STREAM_ENDED : errno;
        stream.advance(moved);
    }
    return 0;
}

PD_EXPORT long pd_send_pieces(int fd, unsigned char* source, long count, const int64_t* offsets,
                              const int64_t* num_bytes) {
    return move_all({source, count, offsets, num_bytes}, INT64_MAX, nullptr,
                    [=](struct msghdr* message) { return sendmsg(fd, message, MSG_NOSIGNAL); });
}

PD_EXPORT long pd_receive_pieces(int fd, unsigned char* destination, long count, const int64_t* offsets,
                                 const int64_t* num_bytes, const volatile uint8_t* stop) {
    constexpr int64_t RUN_BYTES = 1 << 20;  // between two looks at whether to stop
    return move_all({destination, count, offsets, num_bytes}, RUN_BYTES, stop,
                    [=](struct msghdr* message) { return recvmsg(fd, message, 0); });
}

// The same with checksums of what is written. The kernel's copy goes to a buffer that stays in a core's cache; from
// there bytes are weighed and written past the caches, a stretch of keys at a time.
PD_EXPORT long pd_receive_and_checksum_pieces(int fd, unsigned char* destination, long count, const int64_t* offsets,
                                              const int64_t* num_bytes, const volatile uint8_t* stop,
                                              uint64_t* checksums) {
    constexpr int64_t BUFFER_BYTES = 1 << 18, STRETCH_BYTES = ChecksumKeys::STRETCH_BYTES;
    Scratch scratch;
    unsigned char* buffer = scratch.take<unsigned char>(BUFFER_BYTES);
    int64_t missing = 0, held = 0;
    for (long i = 0; i < count; i++) missing += num_bytes[i];
    const ChecksumKeys& keys = ChecksumKeys::instance();
    long piece = 0;
    int64_t at = 0;
    uint64_t total = 0, factor = 1;
    for (;;) {
        int64_t taken = 0;
        while (piece < count) {
            const int64_t some = std::min(num_bytes[piece] - at, STRETCH_BYTES);
            if (held - taken < some) break;
            if (at == 0) total = num_bytes[piece] * ChecksumKeys::LENGTH_KEY, factor = 1;
            unsigned char* to = destination + offsets[piece] + at;
            total += factor * ((uintptr_t)to % 32 == 0 ? weigh(buffer + taken, 0, some, keys, Copied<true>{to})
                                                       : weigh(buffer + taken, 0, some, keys, Copied<false>{to}));
            factor *= ChecksumKeys::RATIO;
            taken += some;
            at += some;
            if (at == num_bytes[piece]) {
                checksums[piece++] = spread(total);
                at = 0;
            }
        }
        finish_copies();
        if (piece == count) return 0;
        held -= taken;
        std::memmove(buffer, buffer + taken, held);
        ssize_t received;
        do received = recv(fd, buffer + held, std::min(BUFFER_BYTES - held, missing), 0);
        while (received < 0 && errno == EINTR);
        if (received < 0) return errno;
        if (received == 0 || *stop) return STREAM_ENDED;
        held += received;
        missing -= received;
    }
}

}  // namespace pd
