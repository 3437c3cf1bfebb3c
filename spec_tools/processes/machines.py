"""Two machines on one computer: two network namespaces, and a link between them with a limited rate.

    python -m spec_tools.processes.machines 100e6 tutorials/train_gpt.py --strategy HYBRID_SHARD

It runs a script on both machines with ``torchrun --nnodes 2 --nproc-per-node 2``, here with 100 Mbit/s, and prints how
many bytes each machine has sent. It needs Linux and root.

A *network namespace* has its own network interfaces, addresses and ports, so two of them are two machines as far as
sockets are concerned. A pair of connected interfaces is the link. Each machine also has its own process numbers. Its
first process is ``cat``, which reads from this process. When this process ends, ``cat`` ends, and then the kernel ends
all processes of the machine and removes its interfaces. So nothing is left, even if a test is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from spec_tools.processes.ranks import ROOT

INTERFACE = "link0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
HARDWARE, NOWHERE = ("02:00:00:00:00:01", "02:00:00:00:00:02"), "02:00:00:00:00:03"
LIMIT = 30.0  # seconds


class NotAllowedError(Exception):
    """This computer does not allow two machines; the message has the reason."""


class TwoMachines:
    """Two machines. At the end of the ``with`` block, the machines and all processes on them have ended.

    Args:
        rate: of the link in each direction, in bits per second.

    Raises:
        NotAllowedError: in ``__enter__``, if this computer does not allow network namespaces.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._machines: list[subprocess.Popen[str]] = []

    def __enter__(self) -> TwoMachines:
        pipe = subprocess.PIPE
        command = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "sh", "-c", "echo ready; exec cat"]
        try:
            for _ in ADDRESSES:
                machine = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
                self._machines.append(machine)
                assert machine.stdout is not None
                if not machine.stdout.readline():
                    raise NotAllowedError(machine.communicate()[1])
            first, second = HARDWARE
            peer = f"peer name {INTERFACE} address {second} netns {self._machines[1].pid}"
            self._configure(0, f"ip link add {INTERFACE} address {first} type veth {peer}")
            for number in range(2):
                self._configure(number, f"ip address add {ADDRESSES[number]}/24 dev {INTERFACE}")
                self._configure(number, f"ip link set {INTERFACE} up")
                self._configure(number, "ip link set lo up")
                shaped = f"tbf rate {self._rate:.0f}bit burst 128kb latency 100ms"
                self._configure(number, f"tc qdisc add dev {INTERFACE} root {shaped}")
            self.restore()
        except (NotAllowedError, OSError) as error:
            self.__exit__()
            raise NotAllowedError(str(error)) from error
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self._machines:
            machine.communicate()

    def _configure(self, number: int, command: str) -> None:
        enter = ["nsenter", f"--net=/proc/{self._machines[number].pid}/ns/net"]
        done = subprocess.run([*enter, *command.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotAllowedError(f"{command}: {done.stderr}")

    def cut(self) -> None:
        """Loses all packets without an error, as if a switch has lost power, until `restore` is called."""
        self._send_to([NOWHERE, NOWHERE])

    def restore(self) -> None:
        """Ends a cut."""
        self._send_to(HARDWARE)

    def _send_to(self, hardware: Sequence[str]) -> None:
        """Sets the hardware address to which each machine sends its packets. The other machine ignores a wrong one."""
        for number in range(2):
            other = f"{ADDRESSES[1 - number]} lladdr {hardware[1 - number]}"
            self._configure(number, f"ip neighbour replace {other} dev {INTERFACE} nud permanent")

    def start(self, number: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Starts a command on machine 0 or 1; ``options`` are those of `subprocess.Popen`."""
        # `unshare` itself is in the new namespaces, and its children are in the namespace of process numbers.
        of_machine = f"/proc/{self._machines[number].pid}/ns"
        enter = ["nsenter", f"--net={of_machine}/net", f"--mount={of_machine}/mnt"]
        enter += [f"--pid={of_machine}/pid_for_children", f"--wd={ROOT}"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "TP_SOCKET_IFNAME": INTERFACE}
        environment["MINIFSDP_LEDGER_DIR"] = "off"
        return subprocess.Popen([*enter, *command], env=environment, text=True, **options)

    def torchrun(self, *arguments: str, **options: Any) -> list[subprocess.Popen[str]]:
        """Starts ``torchrun`` on both machines, with two ranks on each. Machine 0 hosts the rendezvous."""
        rendezvous = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29400"]
        processes = []
        for number, address in enumerate(ADDRESSES):
            # torchrun compares the endpoint with the name of the computer, which is the same on both machines.
            own = [f"--rdzv-conf=is_host={int(number == 0)}", f"--local-addr={address}"]
            processes.append(self.start(number, torchrun(*rendezvous, *own, *arguments), **options))
        return processes

    def sent_bytes(self) -> list[int]:
        """The bytes that each machine has sent over the link, counted by its kernel."""
        return [sent_bytes(f"/proc/{machine.pid}/net/dev") for machine in self._machines]


def torchrun(*arguments: str) -> list[str]:
    """The command for ``torchrun`` with two ranks on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *arguments]


def sent_bytes(file: str = "/proc/self/net/dev") -> int:
    """The bytes that the machine of this process has sent over the link; 0 if it has no link."""
    with open(file) as lines:
        counts = [line.split() for line in lines]
    return sum(int(count[9]) for count in counts if count[0] == f"{INTERFACE}:")


def main(rate: str, *command: str) -> int:
    try:
        with TwoMachines(float(rate)) as machines:
            status = max(job.wait() for job in machines.torchrun(*command))
            for number, sent in enumerate(machines.sent_bytes()):
                print(f"machine {number} has sent {sent:,} bytes over the link")
            return status
    except NotAllowedError as reason:
        print(f"this computer does not allow two machines: {reason}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
