"""The two machines and the link between them, without training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spec_tools.two_machines.link import ADDRESSES, INTERFACE
from spec_tools.two_machines.machines import LIMIT, ROOT, NotAllowedError, TwoMachines

# Bits per second, and seconds.
RATE, DELAY, NUM_BYTES = 50e6, 0.02, 2_000_000
RECEIVE = f"""
import socket
server = socket.create_server(("{ADDRESSES[1]}", 5000))
print("ready", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 16):
    continue
connection.sendall(b"!")
"""
# Prints the seconds for a connection, and for all bytes.
SEND = f"""
import socket, time
begun = time.monotonic()
connection = socket.create_connection(("{ADDRESSES[1]}", 5000))
connected = time.monotonic()
connection.sendall(bytes({NUM_BYTES}))
connection.shutdown(socket.SHUT_WR)
assert connection.recv(1) == b"!"
print(connected - begun, time.monotonic() - connected)
"""
START = f"""
import signal
# A shell starts background processes with SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
from spec_tools.two_machines.machines import TwoMachines
with TwoMachines({RATE}, {DELAY}) as machines:
    sleeps = machines.start(1, ["sleep", "1000"])
    print(machines._process.pid, flush=True)
    sleeps.wait()
"""


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


@pytest.fixture
def machines():
    try:
        with TwoMachines(RATE, DELAY) as created:
            yield created
    except NotAllowedError as reason:
        pytest.skip(f"needs network namespaces: {reason}")


@pytest.mark.spec("MACHINES-01")
def test_link_has_a_delay_and_a_rate_and_counts_bytes(machines: TwoMachines) -> None:
    with machines.start(1, python(RECEIVE), stdout=subprocess.PIPE) as receives:
        assert receives.stdout is not None
        assert receives.stdout.readline() == "ready\n"
        with machines.start(0, python(SEND), stdout=subprocess.PIPE) as sends:
            connected, sent = map(float, sends.communicate(timeout=LIMIT)[0].split())
        assert receives.wait(LIMIT) == 0
    assert connected >= 2 * DELAY
    assert sent >= 8 * NUM_BYTES / RATE + 2 * DELAY
    from_first, from_second = machines.link.sent_bytes()
    assert NUM_BYTES < from_first < 1.03 * NUM_BYTES
    assert 0 < from_second < 0.03 * NUM_BYTES


@pytest.mark.spec("MACHINES-01")
def test_no_packet_passes_a_cut_link(machines: TwoMachines) -> None:
    connect = python(f"import socket; socket.create_connection(('{ADDRESSES[1]}', 5000), timeout=1)")
    with machines.start(1, python(RECEIVE), stdout=subprocess.PIPE) as receives:
        assert receives.stdout is not None
        receives.stdout.readline()
        machines.link.cut()
        with machines.start(0, connect, stderr=subprocess.PIPE) as cut_off:
            assert "TimeoutError: timed out" in cut_off.communicate(timeout=LIMIT)[1]
        machines.link.restore()
        assert machines.start(0, connect).wait(LIMIT) == 0
        receives.kill()


@pytest.mark.spec("MACHINES-02")
@pytest.mark.parametrize("is_killed", [False, True], ids=["at the end", "after kill -9"])
def test_nothing_is_left(is_killed: bool, machines: TwoMachines) -> None:
    # The other machines of the fixture exist at the same time. They have the same addresses, and do not interfere.
    with subprocess.Popen(python(START), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as starts:
        assert starts.stdout is not None
        link = starts.stdout.readline().strip()
        found = networks(link)
        assert len(found) == 2
        until = time.monotonic() + LIMIT
        while not (running := [pid for pid in all_processes() if network_of(pid) in found]):
            assert time.monotonic() < until
        os.kill(starts.pid, signal.SIGKILL if is_killed else signal.SIGINT)
        try:
            assert starts.wait(LIMIT) != 0
        finally:
            starts.kill()
    while any(is_running(pid) for pid in [link, *running]):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not [pid for pid in all_processes() if network_of(pid) in found]
    assert INTERFACE not in Path("/proc/net/dev").read_text()


def all_processes() -> list[str]:
    return [path.name for path in Path("/proc").glob("[0-9]*")]


def network_of(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def networks(link: str) -> list[str]:
    """The networks of the machines of a link; their descriptors are open in its process."""
    own = network_of(link)
    opened = [os.readlink(path) for path in Path(f"/proc/{link}/fd").iterdir()]
    return [name for name in opened if name.startswith("net:") and name != own]


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.spec("MACHINES-02")
def test_missing_permission_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(NotAllowedError, match=r"'ip'|network namespace"), TwoMachines(RATE, DELAY):
        pass
