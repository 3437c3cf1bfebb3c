"""Runs a command on two machines at the same time. Needs Linux and root.

    python -m spec_tools.two_machines --rate 100e6 --delay 1e-3 -- tutorials/train_gpt.py --strategy HYBRID_SHARD

The command is a script with its arguments, for ``torchrun --nnodes 2 --nproc-per-node 2``. With ``--shell NUMBER``, it
opens a shell on a machine instead, and the other machine is reached by its address. At the end it prints how many
bytes each machine has sent.
"""

from __future__ import annotations

import argparse
import os
import sys

from spec_tools.two_machines.link import ADDRESSES
from spec_tools.two_machines.machines import NotAllowedError, TwoMachines


def main() -> int:
    """Runs the command. Returns the largest exit status."""
    parser = argparse.ArgumentParser(prog="python -m spec_tools.two_machines")
    parser.add_argument("--rate", type=float, default=1e9, help="bits per second of the link (default: 1e9)")
    parser.add_argument("--delay", type=float, default=1e-4, help="seconds of the link (default: 1e-4)")
    parser.add_argument("--max-restarts", type=int, default=0, help="as for torchrun")
    parser.add_argument("--shell", type=int, choices=[0, 1], help="open a shell on this machine instead")
    parser.add_argument("command", nargs="*", help="a script and its arguments")
    options = parser.parse_args()
    try:
        with TwoMachines(options.rate, options.delay) as machines:
            if options.shell is not None:
                print(
                    f"machine {options.shell}: the addresses of the machines are {' and '.join(ADDRESSES)}", flush=True
                )
                jobs = [machines.start(options.shell, [os.environ.get("SHELL", "sh")])]
            else:
                jobs = machines.torchrun([f"--max-restarts={options.max_restarts}", *options.command])
            status = max(job.wait() for job in jobs)
            for number, sent in enumerate(machines.link.sent_bytes()):
                print(f"machine {number} has sent {sent:,} bytes over the link")
            return status
    except NotAllowedError as reason:
        print(f"this computer does not allow two machines: {reason}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
