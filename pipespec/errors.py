"""Every error a user can meet, and how it is told.

    PipespecError
     ├── ConfigError        a setting is wrong (also a ValueError); exit code 2
     │    ├── ModelError    the checkpoint cannot be used
     │    │    └── NotProven    what is multiplied in four bits comes out wrong
     │    └── PromptError   the prompt cannot be used
     ├── ControllerError    Redis refused, failed or disagreed
     │    ├── Unreachable   no answer from Redis; exit code 2 before start
     │    ├── StaleEpoch    the caller belongs to an earlier epoch
     │    └── GraphError    a task or an edge that cannot be
     ├── GrammarError       a text cannot be held to its grammar any further
     ├── RankFailed         a rank ended before its work did
     ├── HostFailed         a host cannot be reached, or cannot do what it is asked to
     └── OutOfSlots         a stage's KV pool is full

A message is one sentence that names the value, the limit and the remedy.
A class that is raised without a message uses its docstring.
Programmer errors are asserts.
"""

import os
import sys


def tell(line: str) -> None:
    """A line on standard error, as far as that can be written: no command fails for want of it."""
    if sys.stderr is None:
        return
    try:
        print(line, file=sys.stderr, flush=True)
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


class NotProven(ModelError):
    """Products of four bits are not right on a device."""

    def __init__(self, fault: str):
        super().__init__(f"{fault}; set model.keep_quantized=no")
        self.fault = fault


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


class GrammarError(PipespecError):
    """A text cannot be held to its grammar any further."""


class RankFailed(PipespecError):
    """A rank of the cluster ended before its work did."""


class HostFailed(PipespecError):
    """A host of the cluster cannot be used."""


class OutOfSlots(PipespecError):
    """The KV pool of a stage has no free slot left."""
