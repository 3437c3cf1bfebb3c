"""``python -m minifsdp.learn``: ten functions of the package as exercises. See the page "Exercises".

The exercises are graded by the tests of the specification, so they need the repository. This module starts their
command, ``spec_tools/learn``.

*In torch:* nothing comparable.

Spec: LEARN-01.
"""

import os
import subprocess
import sys
from pathlib import Path

from minifsdp.engine.messages import message

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Runs the command in the current folder. Returns its exit status."""
    if not (ROOT / "spec_tools" / "learn").is_dir():
        print(message("learn-needs-repository"), file=sys.stderr)
        return 2
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, "-m", "spec_tools.learn", *sys.argv[1:]], env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main())
