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
from kv_transfer.transports.crowd import MAX_A_TOKEN, first_to_go

IDLE_S = 90.0  # without a request; pullers take no stream that has been idle for half of that
REQUEST_S = 10.0  # from a request's first byte to its last
REPLY_S = 10.0  # from a request to the end of its reply, if its token has ended
MAX_STREAMS = 256
MAX_REFUSALS = 8  # in a row


class Phase(Enum):
    IDLE = "idle"            # no byte of the next request is there
    ASKING = "asking"        # some of them are
    ANSWERING = "answering"


class Stream:
    """One puller's socket and what it is used for. Its thread says so, the event loop's looks at it.

    Attributes:
        sock: blocking.
        token: the last one that was shown and had not ended: of the handshake, or of a request.
        num_refusals: answered in a row because of their tokens.
        is_cut: its thread is about to end.
    """

    def __init__(self, sock: socket.socket, token: str, clock: Callable[[], float]) -> None:
        self.sock = sock
        self.token = token
        self.num_refusals = 0
        self.is_cut = False
        self._clock = clock
        self._phase = (Phase.IDLE, clock())  # one assignment, as two threads see it

    def enter(self, phase: Phase) -> None:
        self._phase = (phase, self._clock())

    def may_read(self, token: str, blocks: Iterable[int], authorize: Authorize) -> bool:
        """Whether a request with that token may be answered."""
        allowed = authorize(token)
        if allowed is not None:
            self.token = token
        is_allowed = allowed is not None and allowed.issuperset(blocks)
        self.num_refusals = 0 if is_allowed else self.num_refusals + 1
        return is_allowed

    @property
    def is_tiresome(self) -> bool:
        """Whether it asks and asks for what it may not have."""
        return self.num_refusals >= MAX_REFUSALS

    @property
    def phase(self) -> tuple[Phase, float]:
        """And since when, in seconds."""
        return self._phase

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


def crowded_out(new: Stream, others: Iterable[Stream], authorize: Authorize) -> Stream | None:
    """Who has to go for `new`; itself if nobody else can; None: nobody.

    Of too many with the same token, that which has been idle for longest. Of too many in all, one whose token has ended
    and that is not being answered, preferably of a token that many have; if there is none, that which has been idle for
    longest, or one of a token that too many have come to show.
    """
    phases = {stream: stream.phase for stream in others if not stream.is_cut}
    since = sorted(phases, key=lambda stream: phases[stream][1])
    idle = [stream for stream in since if phases[stream][0] is Phase.IDLE]
    same = [stream for stream in phases if stream.token == new.token]
    if len(same) >= MAX_A_TOKEN:
        return next((stream for stream in idle if stream in same), new)
    if len(phases) < MAX_STREAMS:
        return None
    asking = [stream for stream in since if phases[stream][0] is Phase.ASKING]
    unanswered = {stream: stream.token for stream in (*idle, *asking)}
    if unanswered and authorize((first := first_to_go(unanswered, authorize)).token) is None:
        return first
    if idle:
        return idle[0]
    first = first_to_go({stream: stream.token for stream in since}, authorize)
    return first if sum(stream.token == first.token for stream in phases) > MAX_A_TOKEN else new
