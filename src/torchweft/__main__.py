"""``python -m torchweft``, the command line of `weft.cli`."""

import sys

from torchweft.cli import main

if __name__ == "__main__":
    sys.exit(main())
