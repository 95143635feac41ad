"""`python -m pipespec.cluster.installed_version`: prints the version of pipespec that is installed,
once all that a worker imports has been imported."""

from __future__ import annotations

from importlib import import_module

from pipespec.system.versions import own_version

WORKER_MODULE = "pipespec.cluster.worker"


def main() -> None:
    """Print it."""
    import_module(WORKER_MODULE)
    print(own_version())


if __name__ == "__main__":
    main()
