"""`python -m pipespec`."""

import sys

from pipespec.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
