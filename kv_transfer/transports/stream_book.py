"""Which streams of admitted pullers a source keeps: how many, and for how long. Time is passed in.

A puller keeps a stream for the handoffs to come, so a stream may outlive its token while nothing is asked on it, but
not for long, and it goes first when there are too many. What has been begun has to end: a request soon after its first
byte, and a reply, however slowly it is read, with the right to read it.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable
from enum import Enum

from kv_transfer.transport import Authorize

IDLE_S = 90.0  # without a request; pullers take no stream that has been idle for half of that
REQUEST_S = 10.0  # from a request's first byte to its last
REPLY_S = 10.0  # from a request to the end of its reply, if its token has ended
MAX_STREAMS = 256
MAX_STREAMS_A_TOKEN = 16


class Phase(Enum):
    IDLE = "idle"            # no byte of the next request is there
    ASKING = "asking"        # some of them are
    ANSWERING = "answering"


class Stream:
    """One puller's socket and what it is used for. Its thread says so, the event loop's looks at it.

    Attributes:
        sock: blocking.
        token: that the puller has shown last.
        is_cut: its thread is about to end.
    """

    def __init__(self, sock: socket.socket, token: str, clock: Callable[[], float]) -> None:
        self.sock = sock
        self.token = token
        self.is_cut = False
        self._clock = clock
        self._phase = (Phase.IDLE, clock())  # one assignment, as two threads see it

    def enter(self, phase: Phase) -> None:
        self._phase = (phase, self._clock())

    @property
    def idle_since_s(self) -> float | None:
        """None: it is not."""
        phase, since_s = self._phase
        return since_s if phase is Phase.IDLE else None

    def is_overdue(self, now_s: float, authorize: Authorize) -> bool:
        """Whether it has lasted too long."""
        phase, since_s = self._phase
        match phase:
            case Phase.IDLE:
                return now_s > since_s + IDLE_S
            case Phase.ASKING:
                return now_s > since_s + REQUEST_S
            case Phase.ANSWERING:
                return now_s > since_s + REPLY_S and authorize(self.token) is None

    def cut(self) -> None:
        """Ends it, from another thread than its own, which closes it; what the puller has not taken is dropped."""
        self.is_cut = True
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # already closed by one of the two sides
            return


def crowded_out(new: Stream, others: Iterable[Stream]) -> Stream | None:
    """Who has to go for `new`: of those with the same token, or of all, if they are too many, the one that has been
    idle for longest; `new` itself if none is idle; None: nobody."""
    everyone = [stream for stream in others if not stream.is_cut]
    same = [stream for stream in everyone if stream.token == new.token]
    for crowd, limit in ((same, MAX_STREAMS_A_TOKEN), (everyone, MAX_STREAMS)):
        if len(crowd) >= limit:
            idle = [(since_s, stream) for stream in crowd if (since_s := stream.idle_since_s) is not None]
            return min(idle, key=lambda item: item[0])[1] if idle else new
    return None
