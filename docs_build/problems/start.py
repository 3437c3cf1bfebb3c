"""Starts a program of the chapter "What goes wrong" on a rank, with the store of its parent process.

``start.py PROGRAM PORT``. A forked rank does not run the exit hooks of Python, so this script calls that of minifsdp,
which writes the exit record for the other ranks.
"""

import os
import runpy
import sys

from minifsdp.watchdog import process

if __name__ == "__main__":
    program, port = sys.argv[1:]
    # With this variable, torch connects all ranks to the store, and rank 0 does not create it.
    os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    try:
        runpy.run_path(program, run_name="__main__")
    except Exception as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        process.at_exit()
        sys.exit(1)
    process.at_exit()
