"""``python -m weft``, the command line of `weft.cli`."""

import sys

from weft.cli import main

if __name__ == "__main__":
    sys.exit(main())
