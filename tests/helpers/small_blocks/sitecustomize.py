"""Small blocks in the processes of tests, whose checkpoints are small."""

from pipespec.engine.checkpoint.parts import parts_file

parts_file.BLOCK_BYTES = 2**15
