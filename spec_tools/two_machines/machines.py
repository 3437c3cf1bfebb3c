"""Two machines, the commands that run on them, and the state of the link between them.

    with TwoMachines(rate=100e6, delay=0.001) as machines:
        process = machines.start(0, ["python", "train.py"])
        machines.link.cut()

Spec: MACHINES-01, MACHINES-02.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_tools.two_machines.link import ADDRESSES, INTERFACE

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 30.0  # seconds to create the machines, and for an answer of the link
SOCKET = "TWO_MACHINES_LINK"  # the environment variable with the path of the link's socket


class NotAllowedError(Exception):
    """This computer does not allow two machines; the message has the reason."""


class LinkControl:
    """Changes the link. Each process on either machine can do it, because a Unix socket needs no network.

    Args:
        path: of the link's socket; `SOCKET` has it in the environment of commands on the machines.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def cut(self) -> None:
        """Drops all packets, until `restore` is called."""
        self._request("cut")

    def restore(self) -> None:
        """Ends a cut."""
        self._request("restore")

    def set(self, rate: float, delay: float) -> None:
        """Sets the rate, in bits per second, and the delay, in seconds. Both are for each direction."""
        self._request(f"set {rate} {delay}")

    def sent_bytes(self) -> list[int]:
        """The bytes that each machine has sent over the link, counted by its kernel."""
        return list(self._request("bytes"))

    def _request(self, text: str) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(LIMIT)
            connection.connect(self._path)
            connection.sendall(text.encode())
            return json.loads(connection.recv(4096))


class TwoMachines:
    """Two machines. At the end of the ``with`` block, the machines and all processes on them have ended.

    Args:
        rate: of the link, in bits per second.
        delay: of the link in one direction, in seconds.

    Raises:
        NotAllowedError: in ``__enter__``, if this computer does not allow network namespaces.
    """

    def __init__(self, rate: float, delay: float) -> None:
        self._rate, self._delay = rate, delay
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> TwoMachines:
        self._folder = tempfile.TemporaryDirectory(prefix="two-machines-")
        path = str(Path(self._folder.name) / "link")
        command = [sys.executable, "-m", "spec_tools.two_machines.link", path, str(self._rate), str(self._delay)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        is_ready, _, _ = select.select([self._process.stdout], [], [], LIMIT)
        line = self._process.stdout.readline() if is_ready else ""
        created = json.loads(line or '{"problem": "the link does not start"}')
        if "problem" in created:
            self.__exit__()
            raise NotAllowedError(created["problem"])
        self._namespaces = [f"/proc/{created['process']}/fd/{number}" for number in created["machines"]]
        self.link = LinkControl(path)
        self._environment = {SOCKET: path, "GLOO_SOCKET_IFNAME": INTERFACE, "TP_SOCKET_IFNAME": INTERFACE}
        return self

    def __exit__(self, *_: object) -> None:
        # The link ends when its input is closed, and kills the processes on the machines.
        self._process.communicate(timeout=LIMIT)
        for process in self._started:
            process.wait(LIMIT)
        self._folder.cleanup()

    def start(self, number: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Starts a command on machine 0 or 1; ``options`` are those of `subprocess.Popen`."""
        environment = {**os.environ, **self._environment, **options.pop("env", {})}
        # With its own process numbers, a machine cannot check whether a process of the other one has ended.
        enter = ["nsenter", f"--net={self._namespaces[number]}"]
        enter += ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        process = subprocess.Popen([*enter, *command], env=environment, text=True, **options)
        self._started.append(process)
        return process

    def torchrun(
        self, arguments: Sequence[str], logs: Path | None = None, **options: Any
    ) -> list[subprocess.Popen[str]]:
        """Starts ``torchrun`` on both machines, with two ranks on each. Machine 0 hosts the rendezvous.

        Args:
            arguments: further arguments of torchrun, the script, and its arguments.
            logs: if given, the ranks write their standard error to files in the folders ``logs/0`` and ``logs/1``.
            options: those of `subprocess.Popen`.
        """
        rendezvous = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29400"]
        processes = []
        for number, address in enumerate(ADDRESSES):
            # torchrun compares the endpoint with the name of the computer, which is the same on both machines.
            own = [f"--rdzv-conf=is_host={int(number == 0)}", f"--local-addr={address}"]
            own += [f"--log-dir={logs / str(number)}", "--redirects=2"] if logs else []
            processes.append(self.start(number, torchrun(*rendezvous, *own, *arguments), **options))
        return processes


def torchrun(*arguments: str) -> list[str]:
    """The command for ``torchrun`` with two ranks on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *arguments]
