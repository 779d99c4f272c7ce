"""A host of the lab, as its first process: namespaces of its own (network, mounts, processes), and a door for commands.

Standard library only. The door stands for sshd: a connection carries one command, which runs in a shell of this host.

    client: the command's length (4 bytes), the command, then its standard input until it closes that direction
    host:   frames of a channel (1: output, 2: errors, 3: exit code), a length (4 bytes) and bytes; 3 is the last

    python -I -S lab_host.py ADDRESS HOME TMP KEPT...

HOME and TMP are directories that become this host's; KEPT are paths below /tmp that it shall see nevertheless.
"""

from __future__ import annotations

import os
import selectors
import socket
import socketserver
import struct
import subprocess
import sys
import threading

PORT = 2222
FRAME = struct.Struct(">BI")
LENGTH = struct.Struct(">I")
OUTPUT, ERRORS, EXIT = 1, 2, 3


class Door(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        command = receive(self.request, *LENGTH.unpack(receive(self.request, LENGTH.size)))
        process = subprocess.Popen(
            ["bash", "-c", os.fsdecode(command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )
        threading.Thread(target=self._feed, args=(process,), daemon=True).start()
        self._relay(process)
        self._send(EXIT, str(process.wait()).encode())

    def _feed(self, process: subprocess.Popen[bytes]) -> None:
        """What the client sends, until it closes that direction or is gone, or nobody reads it."""
        assert process.stdin is not None
        try:
            with process.stdin as pipe:
                while data := self.request.recv(65536):
                    pipe.write(data)
                    pipe.flush()
        except OSError:
            return

    def _relay(self, process: subprocess.Popen[bytes]) -> None:
        """Until the shell has ended and what it wrote is sent: what it left in the background may hold the pipes."""
        with selectors.DefaultSelector() as pipes:
            for channel, pipe in ((OUTPUT, process.stdout), (ERRORS, process.stderr)):
                assert pipe is not None
                pipes.register(pipe, selectors.EVENT_READ, channel)
            while pipes.get_map():
                has_ended = process.poll() is not None
                ready = pipes.select(0 if has_ended else 0.02)
                if has_ended and not ready:
                    return
                for key, _ in ready:
                    if data := os.read(key.fd, 65536):
                        self._send(key.data, data)
                    else:
                        pipes.unregister(key.fileobj)

    def _send(self, channel: int, data: bytes) -> None:
        self.request.sendall(FRAME.pack(channel, len(data)) + data)


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64


def main() -> None:
    address, home, tmp, *kept = sys.argv[1:]
    mount("--make-rprivate", "/")
    for path in kept:
        inside = tmp + path.removeprefix("/tmp")
        os.makedirs(inside, exist_ok=True)
        mount("--bind", path, inside)
    mount("--rbind", tmp, "/tmp")
    mount("-t", "tmpfs", "-o", "size=1g", "tmpfs", "/dev/shm")
    mount("-t", "proc", "proc", "/proc")
    os.environ["HOME"] = home
    os.chdir(home)
    if os.fork() == 0:
        with Server((address, PORT), Door) as server:
            server.serve_forever()
    while True:  # the first process of a host is the parent of all that lost theirs
        os.wait()


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    main()
