"""What every command uses: the argument parser, and printing to the terminal."""
