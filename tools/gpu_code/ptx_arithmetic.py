"""What PTX instructions compute: one numpy function for each, over the registers of all threads.

After the PTX ISA, chapter 9. Only what Triton's code for our kernels needs is there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tools.gpu_code.ptx_memory import PtxFault

TYPES: dict[str, type[np.generic]] = {
    **{f"{kind}8": np.uint8 for kind in "bu"},
    **{f"{kind}16": np.uint16 for kind in "bu"},
    **{f"{kind}32": np.uint32 for kind in "bu"},
    **{f"{kind}64": np.uint64 for kind in "bu"},
    "s16": np.int16,
    "s32": np.int32,
    "s64": np.int64,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "pred": np.bool_,
}
_WIDER = {"s32": np.int64, "u32": np.uint64, "s16": np.int32, "u16": np.uint32}
_ROUNDING = {"rn", "rz", "ftz", "approx", "full", "lo", "sat"}


def bf16_bits(value: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16, to the nearest, ties to even; as uint32."""
    bits = value.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint32(0x7FFF), rounded)


def bf16_value(bits: np.ndarray) -> np.ndarray:
    """bfloat16 -> float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f16_bits(value: np.ndarray) -> np.ndarray:
    """float32 -> float16, as uint32."""
    return value.astype(np.float16).view(np.uint16).astype(np.uint32)


def f16_value(bits: np.ndarray) -> np.ndarray:
    """float16 -> float32."""
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def _shifted(a: np.ndarray, b: np.ndarray, left: bool) -> np.ndarray:
    bits = a.dtype.itemsize * 8
    far, by = b >= bits, np.minimum(b, bits - 1).astype(a.dtype)
    if left:
        return np.where(far, a.dtype.type(0), a << by)
    if a.dtype.kind == "i":  # the sign fills
        return a >> by
    return np.where(far, a.dtype.type(0), a >> by)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, a.dtype.type(1), b)
    whole = np.abs(a) // np.abs(safe)
    return np.where((a < 0) != (safe < 0), -whole, whole) if a.dtype.kind == "i" else whole


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b + c).astype(a.dtype)


def _field(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    bits = a.astype(np.int64) if a.dtype.kind == "i" else a.astype(np.uint64).view(np.int64)
    length = length.astype(np.int64)
    cut = (bits >> start.astype(np.int64)) & ((np.int64(1) << length) - 1)
    if a.dtype.kind == "i":
        cut = cut - (((cut >> (length - 1)) & 1) << length)
    return cut.astype(a.dtype)


def _permuted(a: np.ndarray, b: np.ndarray, choice: np.ndarray) -> np.ndarray:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros_like(a)
    for i in range(4):
        nibble = choice >> np.uint32(4 * i) & np.uint32(0xF)
        byte = (both >> (nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint32)
        byte &= np.uint32(0xFF)
        signed = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        byte = np.where(nibble & np.uint32(8), signed, byte)
        out |= byte << np.uint32(8 * i)
    return out


_PLAIN: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "div": _quotient,
    "fma": _fused,
    "bfe": _field,
    "prmt": _permuted,
    "rem": lambda a, b: a - _quotient(a, b) * b,
    "mad": lambda a, b, c: a * b + c,
    # NaN loses against a number.
    "max": np.fmax,
    "min": np.fmin,
    "ex2": np.exp2,
    "lg2": np.log2,
    "sqrt": np.sqrt,
    "rcp": lambda a: a.dtype.type(1) / a,
    "shl": lambda a, b: _shifted(a, b, True),
    "shr": lambda a, b: _shifted(a, b, False),
}
# How operands are read where it is not as the instruction's own type says.
_OTHER_TYPES = {"shl": ("", "u32"), "shr": ("", "u32"), "bfe": ("", "u32", "u32")}
_COMPARED: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def computed_by(parts: tuple[str, ...]) -> tuple[Callable[..., np.ndarray], tuple[str, ...]] | None:
    """The function of an instruction, and the types of its operands; None: it is none of these."""
    base, kind, extra = parts[0], parts[-1], parts[1:-1]
    if base == "cvt" and kind == "bf16":
        return bf16_value, ("u16",)
    if kind not in TYPES:
        return None
    if base == "setp":
        return _comparison(extra, kind)
    if base == "selp":
        return lambda a, b, chosen: np.where(chosen, a, b), (kind, kind, "pred")
    if base == "cvt":
        return _conversion(extra, kind)
    if base not in _PLAIN:
        return None
    function = _PLAIN[base]
    if "wide" in extra:
        wider = _WIDER[kind]
        third = {"s32": "s64", "u32": "u64"}.get(kind, kind)
        return lambda *each: function(*(x.astype(wider) for x in each)), (kind, kind, third)
    if unknown := set(extra) - _ROUNDING:
        raise PtxFault(f"the emulator does not know {unknown} of {'.'.join(parts)}")
    others = _OTHER_TYPES.get(base, ())
    return function, tuple(each or kind for each in others) or (kind,) * 3


def _comparison(
    extra: tuple[str, ...], kind: str
) -> tuple[Callable[..., np.ndarray], tuple[str, ...]]:
    extra = tuple(each for each in extra if each != "ftz")
    if len(extra) != 1:
        raise PtxFault(f"the emulator does not know setp.{'.'.join(extra)}")
    name = extra[0]
    floats = TYPES[kind] in (np.float16, np.float32, np.float64)
    unordered = floats and name.endswith("u")
    compare = _COMPARED.get(name.removesuffix("u") if unordered else name)

    def compared(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        nan = np.isnan(a) | np.isnan(b) if floats else np.zeros(len(a), bool)
        if compare is None:
            return nan if name == "nan" else ~nan
        return compare(a, b) | nan if unordered else compare(a, b) & ~nan

    if compare is None and name not in ("nan", "num"):
        raise PtxFault(f"the emulator does not know setp.{name}.{kind}")
    return compared, (kind, kind)


def _conversion(
    extra: tuple[str, ...], source: str
) -> tuple[Callable[..., np.ndarray], tuple[str, ...]]:
    target = extra[-1]
    if target in ("bf16x2", "f16x2"):
        bits = bf16_bits if target == "bf16x2" else f16_bits
        return lambda high, low: bits(high) << np.uint32(16) | bits(low), (source, source)
    if target in ("bf16", "f16") and source == "f32":
        bits = bf16_bits if target == "bf16" else f16_bits
        return lambda a: bits(a).astype(np.uint16), (source,)
    if target not in TYPES or set(extra[:-1]) - {"rn"}:
        raise PtxFault(f"the emulator does not know cvt.{'.'.join(extra)}.{source}")
    kind = TYPES[target]
    return lambda a: a.astype(kind), (source,)
