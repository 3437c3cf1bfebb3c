"""``python -m spec_tests.gpu``: another name of ``python -m spec_tools.gpu``, the GPU kit."""

import sys

from spec_tools.gpu.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
