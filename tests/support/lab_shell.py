"""What ssh is elsewhere: runs a command on a host of the lab, through its door (`lab_host.py`).

    python -I -S lab_shell.py ADDRESS COMMAND
"""

from __future__ import annotations

import os
import socket
import sys
import threading

sys.path.insert(0, os.path.dirname(__file__))

from lab_host import ERRORS, EXIT, FRAME, LENGTH, PORT, receive

CONNECT_TIMEOUT_S = 4.0
UNREACHABLE = 255


def main() -> int:
    address, command = sys.argv[1], os.fsencode(sys.argv[2])
    try:
        connection = socket.create_connection((address, PORT), CONNECT_TIMEOUT_S)
    except OSError as error:
        print(f"{address}: {error}", file=sys.stderr)
        return UNREACHABLE
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
    connection.sendall(LENGTH.pack(len(command)) + command)
    threading.Thread(target=send_input, args=(connection,), daemon=True).start()
    try:
        while True:
            channel, length = FRAME.unpack(receive(connection, FRAME.size))
            data = receive(connection, length)
            if channel == EXIT:
                return int(data) % 256
            os.write(2 if channel == ERRORS else 1, data)
    except OSError as error:
        print(f"{address}: {error}", file=sys.stderr)
        return UNREACHABLE


def send_input(connection: socket.socket) -> None:
    try:
        while data := os.read(0, 65536):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        return


if __name__ == "__main__":
    os._exit(main())
