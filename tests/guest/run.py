"""NFS for real: `nox -s guest`. Boots a server and, as another host, a client, and prints a table.

    python tests/guest/run.py [--cache DIR] [--tree DIR] [WORD ...]

As root, on Debian, with the packages that the session installs. Nothing of this machine is mounted,
exported or changed. Emulation is slow: importing torch takes a guest one to three minutes.
"""

from __future__ import annotations

import argparse
import random
import shutil
import socket
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import boot

_TESTS = Path(__file__).parents[1]
_BOOT = 300.0  # seconds until a guest is up
_IMPORT = 600.0  # until it has imported torch


def _port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Lab:
    """The server, and one client after the other."""

    def __init__(self, kernel: boot.Kernel, share: Path, words: list[str], tree: str) -> None:
        self._kernel, self._share, self._port = kernel, share, _port()
        path = ":".join(filter(None, (tree, str(_TESTS / "faults"), str(_TESTS))))
        self._python = f"PYTHONPATH={path} {boot.command(sys.executable, '-u')}"
        setup = (boot.HERE / "server.sh").read_text()
        cases = boot.command(boot.HERE / "cases.py", *words)
        script = f"{setup}\n{self._python} {cases}"
        self.server = self._guest("server", script, "10.0.2.1", "3G")
        self._all = not words
        self._clients = 0
        self._client: boot.Guest | None = None

    def _guest(self, name: str, script: str, address: str, memory: str) -> boot.Guest:
        return boot.Guest(
            self._kernel, self._share, name, script,
            address=address, port=self._port, memory=memory,
        )  # fmt: skip

    def _start_client(self) -> None:
        self._clients += 1
        script = f"{(boot.HERE / 'client.sh').read_text()}\n{self._python} {boot.HERE / 'peer.py'}"
        self._client = self._guest(f"client-{self._clients}", script, "10.0.2.2", "2G")

    def _kill_client(self, asked: Path, dice: random.Random) -> None:
        """Cut the client's power in its saves, and tell the server what it had said by then."""
        assert self._client is not None
        saving = self._share / "saving"
        if boot.wait_for(saving, self._client, _IMPORT):
            time.sleep(dice.uniform(0, 3))
        self._client.kill()
        answer = asked.with_suffix(".answer")
        saving.rename(answer) if saving.exists() else answer.write_text("0 0")
        self._start_client()

    def run(self, seconds: float) -> bool:
        """Do what the cases ask for until they end; whether they all passed."""
        end, dice = time.monotonic() + seconds, random.Random(52)
        if not boot.wait_for(self._share / "server-is-up", self.server, _BOOT):
            self.server.kill()
            return False
        if self._all:
            self._start_client()
        while self.server.is_alive() and time.monotonic() < end:
            waiting = [
                asked
                for asked in self._share.glob("*.ask")
                if not asked.with_suffix(".answer").exists()
            ]
            if waiting and self._client is None:
                self._start_client()
            for asked in waiting:
                if asked.name.startswith("die-"):
                    self._kill_client(asked, dice)
            time.sleep(0.1)
        if self._client is not None:
            self._client.kill()
        return self.server.wait(max(1.0, end - time.monotonic()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cache", type=Path, default=Path("/var/tmp/fastserial-guest"))
    parser.add_argument("--tree", default="", help="import fastserial from this folder")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("words", nargs="*", help="names of cases")
    arguments = parser.parse_args()
    kernel = boot.Kernel(arguments.cache)
    share = Path(tempfile.mkdtemp(prefix="guest-", dir=arguments.cache))
    try:
        passed = Lab(kernel, share, arguments.words, arguments.tree).run(arguments.seconds)
        table = share / "table.md"
        print((share / "server.log").read_text(errors="replace")[-20_000:])
        print(f"\nLinux {kernel.version}, {date.today()}\n")
        print("| What | Where | Outcomes |\n|---|---|---|")
        print(table.read_text() if table.exists() else "nothing ran")
    finally:
        shutil.rmtree(share, ignore_errors=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
