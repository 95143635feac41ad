"""What was measured of models, devices and links, as plain values that JSON can hold."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NotRequired, Self, TypedDict

from pipespec.engine.precision import KV_PLAIN
from pipespec.errors import ConfigError
from pipespec.system.validation import Unreadable, from_fields, read_json

Number = int | float
# No figure comes near: bytes, milliseconds, Gbit/s.
LARGEST_FIGURE = 2**62


class ModelSizes(TypedDict):
    """Of a model's weights in memory; of each layer also whether it holds K and V, the bytes of a
    running state and of a node of it, and its kind (`layer_kinds`); and whether several devices can
    compute the model together."""

    dtype: str
    layer_bytes: Sequence[int]
    has_kv: Sequence[bool]
    state_bytes: Sequence[int]
    node_bytes: Sequence[int]
    kinds: Sequence[int]
    divisible: bool
    embedding_bytes: int
    head_bytes: int
    tied: bool
    hidden_size: int
    context: int


class StageFigures(TypedDict):
    """Of a device that computes layers of the target; `layer_ms` is the mean of all, and `kind_ms`
    has one of each kind if there are several."""

    layer_ms: Number
    kind_ms: NotRequired[Sequence[Number]]
    head_ms: Number
    embedding_ms: Number
    kv_slot_bytes: Number


class DraftFigures(TypedDict):
    """Of a device that computes the draft."""

    round_ms: Number
    weight_bytes: Number
    kv_slot_bytes: Number


class DeviceFigures(TypedDict):
    """A device with its measured times (`cluster.diagnostics.measure_devices`).

    None: the device had no room for that model.
    """

    model: str
    memory_bytes: Number
    stage: NotRequired[StageFigures | None]
    draft: NotRequired[DraftFigures | None]
    # Of what those compute that compute together, of whom it is the first.
    sum_ms: NotRequired[Number]


class HostFigures(TypedDict):
    """What `pipespec.cluster.diagnostics.measure_devices` answers on one host."""

    target: ModelSizes
    draft: ModelSizes | None
    devices: Sequence[DeviceFigures]


class LinkFigures(TypedDict):
    """From one host to another."""

    source: str
    to: str
    rtt_ms: Number
    gbit_s: Number


@dataclass(frozen=True)
class Figures:
    """What was measured, as plain values that JSON can hold.

    `rows` and `length` are the width and the text length of it, `dtype` the type of plain
    weights and `quantization` what becomes of those of target and draft. `members` maps a worker to
    what was measured of its device.
    """

    rows: int
    length: int
    dtype: str
    quantization: Sequence[str | None]
    target: ModelSizes
    draft: ModelSizes | None
    members: Mapping[str, DeviceFigures]
    links: Sequence[LinkFigures]
    keep_quantized: str = "auto"
    kv_dtype: str = KV_PLAIN

    @classmethod
    def read(cls, file: str) -> Self:
        """From what `pipespec plan HOSTS.yaml --json` printed. Raises ConfigError."""
        try:
            values = read_json(file, pipe=True)
            found = from_fields(cls, values.get("figures") if isinstance(values, dict) else None)
            for number in _numbers(asdict(found)):
                if not 0 <= number < LARGEST_FIGURE:
                    raise Unreadable(f"it holds {number:g}, which cannot be a measurement")
            kinds = found.target["kinds"]
            stages = [stage for each in found.members.values() if (stage := each.get("stage"))]
            of_kinds = [times for stage in stages if (times := stage.get("kind_ms"))]
            if (
                len(found.quantization) != 2
                or len(kinds) != len(found.target["layer_bytes"])
                or any(len(each) <= max(kinds, default=-1) for each in of_kinds)
                or not all(link["gbit_s"] for link in found.links)
            ):
                raise Unreadable("it lacks a figure")
        except Unreadable as error:
            raise ConfigError(
                f"The figures {file!r} cannot be read ({error}); measure again with `pipespec "
                "plan --json`."
            ) from error
        return found


def _numbers(value: Any) -> Iterator[Number]:
    if isinstance(value, Number):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item)
