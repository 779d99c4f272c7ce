"""Asks the controller of a cluster on this host."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from pd_engine.errors import FailedPrecondition, Unavailable, from_code
from pd_ops.client import ready_state
from pd_ops.cluster.control_messages import QUESTIONS, Request
from pd_ops.cluster.control_server import is_own_peer, socket_path

MAX_REPLY_BYTES = 16 * 1024 * 1024
ANSWER_TIMEOUT_S = 15.0


async def ask_controller(
    cluster: str, request: Request, on_progress: Callable[[str], None] = lambda sentence: None
) -> dict[str, Any]:
    """The result of a request. Cancelling it leaves: the step that is under way is finished, no other is begun.

    Raises:
        NotFound, Unavailable: the cluster does not run, is not ready, or stops; its controller does not answer what it
            could answer at once.
        PdRelayError: the controller answered with it.
    """
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S if isinstance(request, QUESTIONS) else None):
            return await _ask(cluster, request, on_progress)
    except TimeoutError:
        raise Unavailable(
            f"the controller of the cluster {cluster!r} did not answer in {ANSWER_TIMEOUT_S:g} s: it hangs, or this "
            f"host is too busy"
        ) from None


async def _ask(cluster: str, request: Request, on_progress: Callable[[str], None]) -> dict[str, Any]:
    address = ready_state(cluster).control_address
    try:
        reader, writer = await asyncio.open_unix_connection(socket_path(address), limit=MAX_REPLY_BYTES)
    except OSError as error:
        raise Unavailable(f"the cluster {cluster!r} does not listen: {error.strerror or error}") from None
    try:
        if not is_own_peer(writer.get_extra_info("socket")):
            raise FailedPrecondition(f"somebody else's process answers for the cluster {cluster!r}")
        writer.write(request.model_dump_json().encode() + b"\n")
        async for line in reader:
            reply = json.loads(line)
            if "progress" in reply:
                on_progress(reply["progress"])
            elif "error" in reply:
                raise from_code(reply["error"]["code"], reply["error"]["message"])
            else:
                result: dict[str, Any] = reply["result"]
                return result
    except ConnectionError:
        pass
    finally:
        writer.close()
    raise Unavailable(f"the cluster {cluster!r} has ended before it answered")
