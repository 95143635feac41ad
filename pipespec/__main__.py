"""The process of `pipespec` and `python -m pipespec`."""

import signal
import sys


def run() -> int:
    """Run the command line; the process's exit code. Ctrl-C ends the process without a traceback at
    any moment: before and after the command, where there is nothing to clean up, by the signal
    itself."""
    # Ignored by nohup, or another's handler: then it is left alone.
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours:
        from pipespec.cli.main import main

        return main()

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pipespec.cli.main import main

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return main()
    except KeyboardInterrupt:  # in the moments around the command, which sees to its own
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(run())
