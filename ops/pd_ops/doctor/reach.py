"""Whether this host reaches others, on a port that all of them listen on meanwhile; and what their clocks say.

    python -m pd_ops.doctor.reach PORT SECONDS HOST...     started on all of these hosts at once

Prints {HOST: {"offset_s", "round_trip_s"} or {"error"}} as its last line: `offset_s` is how far the other host's clock
is ahead. Standard library only: it has to start quickly.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

NUM_QUESTIONS = 5  # the one that took least tells the offset
CONNECT_S, RETRY_S = 2.0, 0.1
TIME = struct.Struct(">d")


class Listener:
    """Tells whoever connects the time, as often as it is asked.

    Attributes:
        num_served: connections that have come and gone.
    """

    def __init__(self, port: int) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=256)
        self.port: int = self._socket.getsockname()[1]
        self.num_served = 0
        self._turn = threading.Condition()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._tell, args=(connection,), daemon=True).start()

    def _tell(self, connection: socket.socket) -> None:
        with connection:
            try:
                while connection.recv(1):
                    connection.sendall(TIME.pack(time.time()))
            except OSError:
                return
        with self._turn:
            self.num_served += 1
            self._turn.notify_all()

    def wait_served(self, count: int, deadline_s: float) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self.num_served >= count, max(0.0, deadline_s - time.monotonic()))


def ask(host: str, port: int, deadline_s: float) -> dict[str, Any]:
    """Until it answers or the time is over: it may begin to listen later."""
    while True:
        try:
            return _ask_once(host, port)
        except OSError as error:
            if time.monotonic() > deadline_s:
                return {"error": error.strerror or str(error) or type(error).__name__}
        time.sleep(RETRY_S)


def _ask_once(host: str, port: int) -> dict[str, float]:
    answers = []
    with socket.create_connection((host, port), CONNECT_S) as connection:
        for _ in range(NUM_QUESTIONS):
            asked_s, began_s = time.time(), time.monotonic()
            connection.sendall(b"?")
            data = connection.recv(TIME.size, socket.MSG_WAITALL)
            round_trip_s = time.monotonic() - began_s
            if len(data) != TIME.size:
                raise ConnectionError("it closed the connection")
            answers.append((round_trip_s, TIME.unpack(data)[0] - asked_s - round_trip_s / 2))
    round_trip_s, offset_s = min(answers)
    return {"offset_s": offset_s, "round_trip_s": round_trip_s}


def main() -> None:
    port, seconds, *hosts = sys.argv[1:]
    deadline_s = time.monotonic() + float(seconds)
    listener = Listener(int(port))
    with ThreadPoolExecutor(max_workers=len(hosts)) as threads:
        answers = list(threads.map(lambda host: ask(host, int(port), deadline_s), hosts))
    listener.wait_served(len(hosts), deadline_s)
    print(json.dumps(dict(zip(hosts, answers, strict=True))))


if __name__ == "__main__":
    main()
