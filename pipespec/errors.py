"""All errors that a user may see.

    PipespecError
     ├── ConfigError        a setting is wrong (also a ValueError); exit code 2
     │    ├── ModelError    the checkpoint cannot be used
     │    └── PromptError   the prompt cannot be used
     ├── ControllerError    Redis refused, failed or disagreed
     │    ├── Unreachable   no answer from Redis; exit code 2 before start
     │    │    └── WritesRefused    it reads, but writes nothing now
     │    ├── StaleEpoch    the caller belongs to an earlier epoch
     │    ├── GraphError    a task or an edge is not valid
     │    ├── LogFull       the request log takes no further request now
     │    └── UnknownRequest    the request log does not have it
     ├── GrammarError       the text cannot follow its grammar any further
     ├── NonFiniteLogits    the target's logits are not finite
     ├── RankFailed         a rank ended before its work did
     ├── HostFailed         a host cannot be reached, or cannot run its part
     └── OutOfSlots         a stage's KV pool is full

A message is one sentence that names the value, the limit and the remedy.
A class that is raised without a message uses its docstring.
Programmer errors are asserts.
"""

import os
import sys


def print_error(line: str) -> None:
    """Print a line to standard error; if that cannot be written, do nothing."""
    try:
        # With its end in one piece: lines of several threads stay apart.
        print(f"{line}\n", end="", file=sys.stderr, flush=True)
    except OSError:
        # Python writes what is still buffered when it ends; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class PipespecError(Exception):
    """Something went wrong in pipespec."""

    exit_code = 1

    def __init__(self, message: str | None = None):
        super().__init__(message if message is not None else (self.__doc__ or ""))


class ConfigError(PipespecError, ValueError):
    """The configuration is not valid."""

    exit_code = 2


class ModelError(ConfigError):
    """The model cannot be used."""


class PromptError(ConfigError):
    """The prompt cannot be used."""


class ControllerError(PipespecError):
    """The controller (Redis) failed."""


class Unreachable(ControllerError):
    """Redis does not answer."""

    exit_code = 2


class StaleEpoch(ControllerError):
    """This process belongs to an earlier epoch of the cluster."""


class GraphError(ControllerError):
    """The controller refused a task or an edge."""


class LogFull(ControllerError):
    """The request log takes no further request now."""


class WritesRefused(Unreachable):
    """Redis reads, but writes nothing now."""


class UnknownRequest(ControllerError):
    """The request log does not have the request."""


class GrammarError(PipespecError):
    """A text cannot follow its grammar any further."""


class NonFiniteLogits(PipespecError):
    """The model's logits are not finite: weights are damaged, or values overflow model.dtype; fetch
    the checkpoint again, or set model.dtype=float32."""

    def __init__(self) -> None:
        super().__init__(" ".join((self.__doc__ or "").split()))


class RankFailed(PipespecError):
    """A rank of the cluster ended before its work did."""


class HostFailed(PipespecError):
    """A host of the cluster cannot be used."""


class OutOfSlots(PipespecError):
    """The KV pool of a stage has no free slot left."""


def interrupt_cause(error: BaseException) -> KeyboardInterrupt | None:
    """The signal that caused an error, if one did: a library that is interrupted while it cleans up
    may raise another error in place of KeyboardInterrupt, which may then be taken for a fault of
    what it was given."""
    visited: set[int] = set()
    to_visit: list[BaseException | None] = [error]
    while to_visit:
        cause = to_visit.pop()
        if isinstance(cause, KeyboardInterrupt):
            return cause
        if cause is not None and id(cause) not in visited:
            visited.add(id(cause))
            to_visit += [cause.__context__, cause.__cause__]
    return None


def is_of_extras(error: ImportError) -> bool:
    """Whether a module of `pipespec.extras` is missing, without which the core runs."""
    missing = isinstance(error, ModuleNotFoundError)
    return missing and f"{error.name}.".startswith("pipespec.extras.")
