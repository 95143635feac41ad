"""An SSH server for every host of the test bed, in Python, with keys of its own.

    python -m tools.rig.sshd FOLDER ADDRESS [PORT]

It runs commands as OpenSSH's does for a session without a terminal: by a shell, with pipes that end
with the connection. It prints its port once it listens.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncssh

CLIENT_CONFIG = "ssh_config"  # what PIPESPEC_SSH_CONFIG names, in the folder of the keys
MODULE = "tools.rig.sshd"
PORT = 22
ROOT = Path(__file__).parents[2]


def make_keys(folder: Path, addresses: Sequence[str]) -> None:
    """Writes a key of the hosts, a key of the user, and a configuration that knows both."""
    for name in ("host_key", "key"):
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(folder / name)
        key.write_public_key(folder / f"{name}.pub")
        (folder / name).chmod(0o600)
    host_key = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"{','.join(addresses)} {host_key}")
    (folder / CLIENT_CONFIG).write_text(
        "Host *\n"
        f"UserKnownHostsFile {folder}/known_hosts\n"
        "GlobalKnownHostsFile /dev/null\n"
        "IdentityAgent none\n"
    )


def start(
    popen: Callable[..., subprocess.Popen[Any]], folder: Path, address: str, port: int = PORT
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a server with `popen`, which runs it inside a host; it, and its port, once it
    listens."""
    daemon = popen(
        [sys.executable, "-m", MODULE, str(folder), address, str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    )
    assert daemon.stdout is not None
    line = daemon.stdout.readline()
    if not line:
        raise RuntimeError(f"the SSH server at {address} ended with {daemon.wait()}")
    return daemon, int(line)


def call(*argv: str) -> None:
    """Run a program. Raises RuntimeError with its output if it fails."""
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


class _Server(asyncssh.SSHServer):
    """Lets in the user that runs it, by their key, and on to other hosts."""

    user_key: asyncssh.SSHKey

    def begin_auth(self, username: str) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return username == getpass.getuser() and key.public_data == self.user_key.public_data

    def public_key_auth_supported(self) -> bool:
        return True

    def connection_requested(self, *_: object) -> bool:
        return True


async def _run(process: asyncssh.SSHServerProcess[bytes]) -> None:
    """Run a command by a shell until it has ended, or its connection has."""
    here, there = (process.get_extra_info(name) for name in ("sockname", "peername"))
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *("/bin/sh", "-c", process.command or "true"),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        start_new_session=True,
        env={**os.environ, "SSH_CONNECTION": f"{there[0]} {there[1]} {here[0]} {here[1]}"},
    )
    assert child.stdin and child.stdout and child.stderr
    ended = asyncio.gather(
        child.wait(), _copy(child.stdout, process.stdout), _copy(child.stderr, process.stderr)
    )
    stdin = child.stdin
    feeding = asyncio.create_task(_copy(process.stdin, stdin))
    feeding.add_done_callback(lambda _: stdin.close())
    code = (await ended)[0]
    with suppress(OSError, asyncssh.Error):
        process.exit(code if code >= 0 else 255)


async def _copy(source: Any, target: Any) -> None:
    with suppress(OSError, asyncssh.Error):
        while chunk := await source.read(2**16):
            target.write(chunk)
            await target.drain()


async def main(folder: Path, address: str, port: int) -> None:
    """Serve until this process is killed."""
    _Server.user_key = asyncssh.read_public_key(folder / "key.pub")
    server = await asyncssh.listen(
        address,
        port,
        server_factory=_Server,
        server_host_keys=[folder / "host_key"],
        process_factory=_run,
        encoding=None,
        config=[],
        allow_scp=False,
    )
    print(server.get_port(), flush=True)
    os.close(1)
    os.open(os.devnull, os.O_WRONLY)
    await server.wait_closed()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
