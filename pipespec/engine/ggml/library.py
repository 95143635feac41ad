"""Finds, checks and binds the shared libraries of ggml.

ggml promises no stable ABI, so a library is used only if its version is one of those that were
tested and, in a process of its own, its products of each type agree with NumPy's. Only public
functions are called, and no field of a structure of ggml's is read.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from pipespec.system.result_cache import cached_call

log = logging.getLogger(__name__)

# A folder with the libraries, tried before all others.
PATH_VARIABLE = "PIPESPEC_GGML"
# The first version that is used, and the first that is not.
VERSIONS = ((0, 20), (0, 26))
# The numbers of ggml's types, by their names in GGUF files.
TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "IQ4_XS": 23,
    "BF16": 30,
    "MXFP4": 39,
}
I32, I64 = 26, 27
# Addresses of tensors are multiples of this.
ALIGNMENT = 64
# Seconds for the self-test in its process.
TEST_S = 60
_MAX_THREADS = 512  # GGML_MAX_N_THREADS
# Held while ggml is looked for: each thread of a process would test it, all at once.
_looking = threading.Lock()


class _InitParams(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


class _PoolParams(ctypes.Structure):
    _fields_ = (
        ("cpumask", ctypes.c_bool * _MAX_THREADS),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


_LogFunction = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_WARNING = 3  # of ggml's levels

_CTYPES = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "l": ctypes.c_int64,
    "z": ctypes.c_size_t,
    "f": ctypes.c_float,
    "b": ctypes.c_bool,
    "s": ctypes.c_char_p,
    "I": _InitParams,
    "L": _LogFunction,
    "P": _PoolParams,
    "Q": ctypes.POINTER(_PoolParams),
}
# The functions that are used, without the prefix `ggml_`, by their arguments and what is returned.
_BASE = {
    ":s": "version",
    "Lp:": "log_set",
    "I:p": "init",
    "p:": "free reset set_input set_output backend_free backend_buffer_free gallocr_free",
    ":z": "tensor_overhead",
    "zb:z": "graph_overhead_custom",
    "pil:p": "new_tensor_1d",
    "pill:p": "new_tensor_2d",
    "pilll:p": "new_tensor_3d",
    "pzb:p": "new_graph_custom",
    "pp:": "build_forward_expand",
    "p:z": "nbytes",
    "il:z": "row_size",
    "ppp:p": "add mul mul_mat swiglu_split get_rows",
    "pppp:p": "mul_mat_id set_rows",
    "ppf:p": "rms_norm",
    "ppppiiiffffff:p": "rope_ext",
    "ppll:p": "reshape_2d",
    "pplll:p": "reshape_3d",
    "pplllzzz:p": "view_3d",
    "ppiiii:p": "permute",
    "pppppfff:p": "flash_attn_ext",
    "ipplllp:z": "quantize_chunk",
    "i:P": "threadpool_params_default",
    "pp:i": "backend_graph_compute",
    "pz:p": "backend_cpu_buffer_from_ptr backend_buft_alloc_buffer backend_reg_dev_get",
    ":p": "backend_cpu_buffer_type",
    "ppp:i": "backend_tensor_alloc",
    "ppzz:": "backend_tensor_set",
    "p:s": "backend_buft_name",
    "pp:z": "backend_buft_get_alloc_size",
    "p:p": "backend_buffer_get_base gallocr_new",
    "ps:p": "backend_reg_get_proc_address",
    "pp:b": "backend_dev_supports_op gallocr_alloc_graph",
    "pi:z": "gallocr_get_buffer_size",
}
_CPU = {
    "Q:p": "threadpool_new",
    "p:": "threadpool_free",
    ":p": "backend_cpu_init backend_cpu_reg",
    "pi:": "backend_cpu_set_n_threads",
    "pp:": "backend_cpu_set_threadpool",
    "pb:": "backend_cpu_set_use_ref",
}


@_LogFunction
def _logged(level: int, text: bytes, _: int) -> None:
    if level >= _WARNING:
        log.warning("ggml: %s", text.decode(errors="replace").strip())


class Library:
    """The functions of ggml, as attributes without the prefix `ggml_`."""

    version: Callable[[], bytes]

    def __init__(self, folder: Path):
        """Raises OSError or AttributeError if it cannot be loaded or lacks a function."""
        self.folder = folder
        for file, functions in (("ggml-base", _BASE), ("ggml-cpu", _CPU)):
            library = ctypes.CDLL(str(_file(folder, file)))
            for signature, names in functions.items():
                arguments, _, result = signature.partition(":")
                for name in names.split():
                    function = getattr(library, f"ggml_{name}")
                    function.argtypes = [_CTYPES[each] for each in arguments]
                    function.restype = _CTYPES[result] if result else None
                    setattr(self, name, function)
        self.log_set(_logged, None)

    def __getattr__(self, name: str) -> Any:  # set in __init__
        raise AttributeError(name)

    def context(self, tensors: int, graph: int = 0) -> int:
        """A context for so many tensors and a graph of so many operations; `free` it."""
        found: int = self.init(_InitParams(self.context_bytes(tensors, graph), None, True))
        return found

    def context_bytes(self, tensors: int, graph: int = 0) -> int:
        size: int = tensors * self.tensor_overhead() + 1024
        return size + (self.graph_overhead_custom(graph, False) if graph else 0)

    @cached_property
    def device(self) -> int:
        """The CPU, as a device."""
        found: int = self.backend_reg_dev_get(self.backend_cpu_reg(), 0)
        return found

    @cached_property
    def layouts(self) -> list[int]:
        """The types of memory that hold weights: those that lay them out anew for products of
        several rows, then that which leaves them as they are."""
        name = b"ggml_backend_dev_get_extra_bufts"
        found = []
        if address := self.backend_reg_get_proc_address(self.backend_cpu_reg(), name):
            listed = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)
            types = takewhile(bool, listed(self.device))
            found = [each for each in types if self.backend_buft_name(each) == b"CPU_REPACK"]
        return [*found, self.backend_cpu_buffer_type()]

    def pool(self, threads: int, poll: int) -> int:
        """A pool of so many threads, which poll for work at a level of 0 to 100 before they
        sleep."""
        params = self.threadpool_params_default(threads)
        params.poll = poll
        found: int = self.threadpool_new(ctypes.byref(params))
        return found


def _file(folder: Path, name: str) -> Path:
    for ending in (".so", ".dylib"):
        for file in (folder / f"lib{name}{ending}", *sorted(folder.glob(f"lib{name}{ending}.*"))):
            if file.exists():
                return file
    raise OSError(f"{folder} has no lib{name}")


def _folders() -> Iterator[Path]:
    """Where ggml may be, in the order in which it is looked for."""
    if given := os.environ.get(PATH_VARIABLE):
        yield Path(given)
        return
    if (found := ctypes.util.find_library("ggml-base")) is not None:
        for folder in ("/usr/local/lib", "/usr/lib", f"/usr/lib/{os.uname().machine}-linux-gnu"):
            if (Path(folder) / found).exists():
                yield Path(folder)
    for package, folders in (("llama_cpp", ("lib",)), ("libggml", ("lib64", "lib"))):
        for place in sys.path:  # for `find_spec` a libggml.so in this folder would be the package
            if (Path(place) / package).is_dir():
                yield from (Path(place) / package / folder for folder in folders)


@dataclass(frozen=True)
class Found:
    """The result of looking for ggml.

    Attributes:
        folder: of the libraries; None: none is used.
        why_not: why, in one sentence.
    """

    folder: str | None
    why_not: str = ""


def load() -> Library | None:
    """The library of this machine, or None; `why_not` says why."""
    with _looking:
        folder = _found().folder
        return None if folder is None else _library(folder)


def why_not() -> str:
    """Why `load` returns None, in one sentence; empty if it does not."""
    with _looking:
        return _found().why_not


@cache
def _library(folder: str) -> Library:
    return Library(Path(folder))


class _NotTested(Exception):
    """The self-test did not end by itself, which says nothing about the library."""


@cache
def _found() -> Found:
    refused = []
    for folder in _folders():
        try:
            files = [_file(folder, name) for name in ("ggml-base", "ggml-cpu")]
        except OSError:
            continue
        depends = {
            "files": [(str(file), file.stat().st_size, file.stat().st_mtime) for file in files],
            "checks": [
                Path(__file__).with_name(name).read_text(encoding="utf-8")
                for name in ("library.py", "self_test.py")
            ],
            "processor": sorted(cpu_flags()),
        }
        try:
            checked = cached_call("ggml", Found, depends, _check, folder)
        except _NotTested as error:  # so another process tests it again
            checked = Found(None, _failed(folder, error))
        if checked.folder is not None:
            return checked
        refused.append(checked.why_not)
    advice = "pip install libggml-python makes products on a CPU several times faster"
    return Found(None, refused[0] if refused else f"ggml is not installed; {advice}.")


def cpu_flags() -> frozenset[str]:
    """The flags of this processor; none where /proc/cpuinfo has none."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def _failed(folder: Path, why: object) -> str:
    return f"The ggml in {folder} is not used, as its self-test failed: {why}."


def _check(folder: Path) -> Found:
    """Whether the library in a folder is used. Raises _NotTested."""
    try:
        library = Library(folder)
    except (OSError, AttributeError) as error:
        return Found(None, f"The ggml in {folder} is not used, as it cannot be loaded ({error}).")
    version = library.version().decode(errors="replace")
    numbers = tuple(int(each) for each in re.findall(r"\d+", version)[:2])
    lowest, beyond = VERSIONS
    if not lowest <= numbers < beyond:
        return Found(
            None,
            f"The ggml in {folder} is not used, as its version {version} was not tested; "
            f"{'.'.join(map(str, lowest))} up to below {'.'.join(map(str, beyond))} were.",
        )
    # A library that does not fit, or was built for another processor, may end its process.
    command = [sys.executable, "-m", "pipespec.engine.ggml.self_test", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TEST_S, check=False)
    except subprocess.TimeoutExpired:
        raise _NotTested(f"it took more than {TEST_S} s") from None
    if done.returncode == -signal.SIGKILL:
        raise _NotTested("its process was killed")
    if done.returncode:
        said = done.stdout.strip().splitlines()
        why = said[-1] if said else f"its process ended with {done.returncode}"
        return Found(None, _failed(folder, why))
    return Found(str(folder))
