"""`python -m pipespec.cluster.join_relay SOCKET HOST MODULE ARGS...`: runs a module on a host that
has joined, as `ssh` runs a program on another one.

Standard input, output and errors are the program's, and so is the exit code; it is 255, as ssh's,
if there is no connection to the host. This process imports little, as one is started per program.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
from contextlib import suppress

# As in `join_link`, whose imports take a tenth of a second.
INPUT, END_INPUT, OUTPUT, ERRORS, EXITED = range(5)
HEAD = struct.Struct("!BI")
CHUNK_BYTES = 2**16
NO_CONNECTION = 255
# A program that signal N ended has exit code KILLED + N, as shells say it.
KILLED = 128


def main(argv: list[str]) -> int:
    """Connect standard input and output with the program; its exit code."""
    path, host, module, *args = argv
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(path)
            asked = {"host": host, "module": module, "args": args}
            server.sendall(json.dumps(asked).encode() + b"\n")
            answers = server.makefile("rb")
            answer = json.loads(answers.readline() or b'{"refused": "the cluster has ended"}')
        except OSError as error:
            answer = {"refused": f"the launcher does not answer ({error.strerror})"}
        if "refused" in answer:
            print(answer["refused"], file=sys.stderr)
            return NO_CONNECTION
        threading.Thread(target=_send_input, args=(server,), daemon=True).start()
        with suppress(OSError):
            while head := answers.read(HEAD.size):
                kind, length = HEAD.unpack(head)
                payload = answers.read(length)
                if kind == EXITED:
                    code = int(payload)
                    return code if code >= 0 else KILLED - code
                _write_all(1 if kind == OUTPUT else 2, payload)
    print("the connection was lost", file=sys.stderr)
    return NO_CONNECTION


def _send_input(server: socket.socket) -> None:
    with suppress(OSError):
        while chunk := os.read(0, CHUNK_BYTES):
            server.sendall(HEAD.pack(INPUT, len(chunk)) + chunk)
        server.sendall(HEAD.pack(END_INPUT, 0))


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
