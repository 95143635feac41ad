"""`python -m pipespec`."""

import sys

from pipespec.cli import main

if __name__ == "__main__":
    sys.exit(main())
