"""Who may fetch: both ends of a fresh connection prove that they know the cluster secret, which never travels.

    source  -> puller   magic, nonce_s                                                     (8 + 32 bytes)
    puller  -> source   nonce_p, epoch, token, HMAC-SHA256(secret, "puller" ...)            (32 + 32 + 32 + 32 bytes)
    source  -> puller   verdict, HMAC-SHA256(secret, "source" ...)                          (1 + 32 bytes)

Both codes cover both nonces, so neither can be replayed. The epoch is the source's life that the puller was told of;
the token must be of a live handoff. A source that has no place for one more handshake hangs up before the verdict, and
the puller comes again. A stranger costs one small task, for `HANDSHAKE_S` at the most.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import random
import secrets
import socket
from enum import IntEnum

from kv_transfer.journey import is_hex_id
from kv_transfer.transport import Authorize
from pd_engine.errors import DeadlineExceeded, Gone, Unauthenticated, Unavailable

HANDSHAKE_S = 2.0
MAGIC = b"pdrelay1"
NONCE_BYTES = 32
ID_BYTES = 32
CODE_BYTES = 32
QUEUE_PERIOD_S = 0.002  # between two looks at a queue that was full
COME_AGAIN_S = 0.02     # after a source has hung up; on average, and longer each time
MAX_COME_AGAIN_S = 0.1


class Verdict(IntEnum):
    WELCOME = 0
    UNAUTHENTICATED = 1
    GONE = 2


async def admit(sock: socket.socket, *, secret: str, epoch: str, authorize: Authorize) -> str | None:
    """The source's half, on a non-blocking socket: the token that the puller has shown. None: refused; the caller
    closes the socket."""
    loop = asyncio.get_running_loop()
    nonce_s = secrets.token_bytes(NONCE_BYTES)
    await loop.sock_sendall(sock, MAGIC + nonce_s)
    answer = await receive(sock, NONCE_BYTES + 2 * ID_BYTES + CODE_BYTES)
    nonce_p, claim = answer[:NONCE_BYTES], answer[NONCE_BYTES : NONCE_BYTES + 2 * ID_BYTES]
    if not hmac.compare_digest(_code(secret, b"puller", nonce_s, nonce_p, claim), answer[-CODE_BYTES:]):
        verdict = Verdict.UNAUTHENTICATED
    else:
        verdict = _judge(claim, epoch, authorize)
    code = bytes(CODE_BYTES)
    if verdict is not Verdict.UNAUTHENTICATED:
        code = _code(secret, b"source", nonce_s, nonce_p, claim + bytes([verdict]))
    await loop.sock_sendall(sock, bytes([verdict]) + code)
    return claim[ID_BYTES:].decode() if verdict is Verdict.WELCOME else None


async def greet(sock: socket.socket, *, secret: str, epoch: str, token: str) -> None:
    """The puller's half, on a connected non-blocking socket.

    Raises:
        Unauthenticated: either side does not know the secret.
        Gone: another epoch lives there, or the token is not (any more) valid.
        Unavailable: the peer hung up.
    """
    loop = asyncio.get_running_loop()
    hello = await receive(sock, len(MAGIC) + NONCE_BYTES)
    if hello[: len(MAGIC)] != MAGIC:
        raise Unauthenticated("the peer is not a pd-relay source")
    nonce_s, nonce_p = hello[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
    claim = epoch.encode() + token.encode()
    assert len(claim) == 2 * ID_BYTES, (epoch, token)
    await loop.sock_sendall(sock, nonce_p + claim + _code(secret, b"puller", nonce_s, nonce_p, claim))
    reply = await receive(sock, 1 + CODE_BYTES)
    if reply[0] == Verdict.UNAUTHENTICATED:
        raise Unauthenticated("the source does not accept this worker's cluster secret")
    code = _code(secret, b"source", nonce_s, nonce_p, claim + reply[:1])
    if not hmac.compare_digest(code, reply[1:]):
        raise Unauthenticated("the source does not know the cluster secret")
    if reply[0] != Verdict.WELCOME:
        raise Gone


async def receive(sock: socket.socket, num_bytes: int) -> bytes:
    """Exactly so many bytes.

    Raises:
        Unavailable: the peer hung up before.
    """
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < num_bytes:
        try:
            more = await loop.sock_recv(sock, num_bytes - len(data))
        except OSError as error:
            raise Unavailable(f"the peer is gone: {error.strerror}") from None
        if not more:
            raise Unavailable("the peer hung up")
        data += more
    return data


async def connect(
    address: str | tuple[str, int], *, secret: str, epoch: str, token: str, timeout_s: float
) -> socket.socket:
    """A non-blocking socket to a source that has admitted us; a text is the name of an abstract unix socket.

    Raises:
        Unauthenticated, Gone: see `greet`.
        Unavailable: nobody is there, or whoever is has hung up on us all the time.
        DeadlineExceeded: it took longer than `timeout_s`.
    """
    pause_s, was_hung_up_on = COME_AGAIN_S, False
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                sock = await reach(address)
                try:
                    await greet(sock, secret=secret, epoch=epoch, token=token)
                    return sock
                except (Unavailable, OSError):
                    sock.close()
                    was_hung_up_on = True
                except BaseException:
                    sock.close()
                    raise
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
                pause_s = min(pause_s * 1.5, MAX_COME_AGAIN_S)
    except TimeoutError:
        if was_hung_up_on:
            raise Unavailable(f"the source has not admitted us within {timeout_s} s, and hung up meanwhile") from None
        raise DeadlineExceeded(f"the source did not answer within {timeout_s} s") from None
    except OSError as error:
        raise Unavailable(f"the source cannot be reached: {error.strerror}") from None


async def reach(address: str | tuple[str, int]) -> socket.socket:
    """A connected non-blocking socket.

    Raises:
        OSError: nobody is there.
    """
    is_unix = isinstance(address, str)
    family = socket.AF_UNIX if is_unix else (socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if isinstance(address, str):
            await _queue_up(sock, "\0" + address)
        else:
            await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def _queue_up(sock: socket.socket, path: str) -> None:
    """With a unix socket, connecting is done at once or, before a full queue, not begun: event loops take the latter
    for under way, and then for done."""
    while True:
        try:
            sock.connect(path)
            return
        except BlockingIOError:
            await asyncio.sleep(QUEUE_PERIOD_S)


def _judge(claim: bytes, epoch: str, authorize: Authorize) -> Verdict:
    text = claim.decode("ascii", errors="replace")
    claimed_epoch, token = text[:ID_BYTES], text[ID_BYTES:]
    if claimed_epoch != epoch or not is_hex_id(token) or authorize(token) is None:
        return Verdict.GONE
    return Verdict.WELCOME


def _code(secret: str, side: bytes, nonce_s: bytes, nonce_p: bytes, rest: bytes) -> bytes:
    return hmac.new(secret.encode(), side + nonce_s + nonce_p + rest, hashlib.sha256).digest()
