"""`python -m tests.helpers.echo CODE`: writes its standard input to its output, and a line of
errors; ends with that exit code."""

import os
import sys

while chunk := os.read(0, 2**16):
    while chunk:
        chunk = chunk[os.write(1, chunk) :]
print("echoed", file=sys.stderr)
sys.exit(int(sys.argv[1]))
