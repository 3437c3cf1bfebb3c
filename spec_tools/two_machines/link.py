"""The link between two machines, as a process that forwards packets with a limited rate and a delay.

A *network namespace* has its own network interfaces, addresses and ports, so two of them are two machines as far as
sockets are concerned. Each gets a TUN device: an interface whose other end is a file. This process reads packets
from one file, and writes them to the other file when they are due::

    machine 0                        this process                        machine 1
    link0 10.77.0.1  --- packets --> [ queue, due times ] --- packets --> link0 10.77.0.2
                     <-- packets --- [ queue, due times ] <-- packets ---

1. *Rate.* A packet of n bytes occupies its direction for 8 n / rate seconds, after the packet before it.
2. *Delay.* The packet arrives after the delay.
3. *Backlog.* If a direction is occupied for more than `BACKLOG` seconds in advance, no more packets are read. The
   sender's kernel then keeps them, and TCP waits, as with a full queue of a network card.
4. *Cut.* All packets are dropped without an error, as if a switch has lost power. Interfaces and addresses stay.
5. *Size.* The kernel passes TCP segments of up to 64 KiB, because the file accepts them (`TUN_F_TSO4`). So there are
   few packets, and their headers count little.

``tc qdisc add dev ... netem rate ... delay ...`` does the same in the kernel, but many kernels do not have netem.

Worked example, 100 Mbit/s and 1 ms: a packet of 62 500 bytes that is sent at t = 0 has left at 5 ms, and arrives at
6 ms.

The namespaces have no names, and the devices are not persistent. They disappear with the last process that uses
them. This process ends when its standard input is closed, because the process that has started it has ended. It then
kills all processes in the two namespaces. So nothing is left, even if a test is killed.

    python -m spec_tools.two_machines.link SOCKET RATE DELAY

It prints one line of JSON when the link is up: its own process number and the descriptors of the namespaces. It
answers requests on the Unix socket ``SOCKET``: ``cut``, ``restore``, ``set RATE DELAY`` and ``bytes``.

Spec: MACHINES-01, MACHINES-02.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

INTERFACE = "link0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
BACKLOG = 0.005  # seconds
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
# From <linux/if_tun.h>.
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TUN, _NO_PACKET_INFO, _WITH_OFFLOADS = 0x0001, 0x1000, 0x4000
_CHECKSUMS, _LARGE_SEGMENTS = 0x01, 0x02
_LARGEST = 1 << 17  # bytes
_AT_ONCE = 16  # packets that are read before the other direction

_libc = ctypes.CDLL(None, use_errno=True)


def enter_new_machine() -> int:
    """Moves this process to a new network namespace; returns a descriptor of it.

    Raises:
        OSError: the process does not have the permission.
    """
    if _libc.unshare(_NEW_NETWORK):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot create a network namespace: {os.strerror(number)}")
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def enter(namespace: int) -> None:
    """Moves this process to a network namespace."""
    if _libc.setns(namespace, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def new_device(address: str) -> int:
    """Creates the interface of the current machine; returns the descriptor at its other end."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", INTERFACE.encode(), _TUN | _NO_PACKET_INFO | _WITH_OFFLOADS)
    fcntl.ioctl(device, _TUNSETIFF, request)
    fcntl.ioctl(device, _TUNSETOFFLOAD, _CHECKSUMS | _LARGE_SEGMENTS)
    settings = {
        # Without IPv6, the kernel sends no packets by itself.
        f"ipv6/conf/{INTERFACE}/disable_ipv6": 1,
        # After an outage, TCP tries again at least once a second. Older kernels wait up to two minutes.
        "ipv4/tcp_rto_max_ms": 1000,
        # It tries for as long as with the usual settings, about 15 minutes.
        "ipv4/tcp_retries2": 250,
    }
    for name, value in settings.items():
        # Kernels without the setting have no such file.
        with suppress(FileNotFoundError):
            (Path("/proc/sys/net") / name).write_text(str(value))
    for command in (
        f"ip address add {address}/24 dev {INTERFACE}",
        f"ip link set {INTERFACE} txqueuelen 32 up",
        "ip link set lo up",
    ):
        subprocess.run(command.split(), check=True)
    return device


def sent_bytes(namespace: int) -> int:
    """The bytes that a machine has sent over the link, counted by its kernel."""
    enter(namespace)
    return bytes_of_interface()[1]


def bytes_of_interface() -> tuple[int, int]:
    """The bytes that the link's interface of the current machine has received and sent, counted by the kernel."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[0]), int(numbers.split()[8])
    raise OSError(f"this machine has no interface {INTERFACE}")


class Link:
    """Forwards packets between two devices.

    Args:
        devices: the descriptors of both devices.
        rate: bits per second in each direction.
        delay: seconds in each direction.
    """

    def __init__(self, devices: list[int], rate: float, delay: float) -> None:
        self._devices, self.rate, self.delay = devices, rate, delay
        self._queues: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())
        self._free_at = [0.0, 0.0]
        self.is_cut = False

    def ready_to_read(self) -> list[int]:
        """The devices from which packets can be read now."""
        now = time.monotonic()
        return [
            device
            for device, free_at in zip(self._devices, self._free_at, strict=True)
            if self.is_cut or free_at - now < BACKLOG
        ]

    def seconds_until_due(self) -> float:
        """Seconds until something must be done without a new packet."""
        due = [queue[0][0] for queue in self._queues if queue]
        due += [free_at - BACKLOG for free_at in self._free_at if free_at - time.monotonic() >= BACKLOG]
        return max(0.0, min(due, default=time.monotonic() + 1.0) - time.monotonic())

    def read(self, device: int) -> None:
        """Reads packets of a device into its queue."""
        direction = self._devices.index(device)
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(device, _LARGEST)
            except BlockingIOError:
                return
            if self.is_cut:
                continue
            now = time.monotonic()
            left = max(now, self._free_at[direction]) + 8 * len(packet) / self.rate
            self._free_at[direction] = left
            self._queues[direction].append((left + self.delay, packet))
            if left - now >= BACKLOG:
                return

    def deliver(self) -> None:
        """Writes the packets that are due to the other device."""
        for queue, device in zip(self._queues, reversed(self._devices), strict=True):
            while queue and (self.is_cut or queue[0][0] <= time.monotonic()):
                _, packet = queue.popleft()
                if not self.is_cut:
                    with suppress(OSError):
                        os.write(device, packet)


def kill_all_in(namespaces: list[int]) -> None:
    """Kills all processes in network namespaces that this process has created."""
    machines = {os.fstat(namespace).st_ino for namespace in namespaces}
    # A second round for processes that were created during the first one.
    for _ in range(2):
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (folder / "ns/net").stat().st_ino in machines and int(folder.name) != os.getpid():
                    os.kill(int(folder.name), signal.SIGKILL)


def answer(request: list[str], link: Link, machines: list[int]) -> object:
    """Executes a request, and returns its result."""
    match request:
        case ["cut"]:
            link.is_cut = True
        case ["restore"]:
            link.is_cut = False
        case ["set", rate, delay]:
            link.rate, link.delay = float(rate), float(delay)
        case ["bytes"]:
            return [sent_bytes(machine) for machine in machines]
    return None


def main(path: str, rate: str, delay: str) -> None:
    devices, machines = [], []
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    for address in ADDRESSES:
        machines.append(enter_new_machine())
        devices.append(new_device(address))
    enter(home)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    link = Link(devices, float(rate), float(delay))
    print(json.dumps({"process": os.getpid(), "machines": machines}), flush=True)
    while True:
        ready, _, _ = select.select([0, listener, *link.ready_to_read()], [], [], link.seconds_until_due())
        for one in ready:
            if one == 0:
                # Closed: nothing is ever written to it.
                kill_all_in(machines)
                return
            if one is listener:
                with listener.accept()[0] as connection:
                    result = answer(connection.recv(4096).decode().split(), link, machines)
                    enter(home)
                    connection.sendall(json.dumps(result).encode())
            else:
                link.read(one)
        link.deliver()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OSError, subprocess.CalledProcessError) as error:
        print(json.dumps({"problem": str(error)}), flush=True)
