"""What was measured of models, devices and links, as plain values that JSON can hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

Number = int | float


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

    `rows` is the width of it, `dtype` the type of plain weights. `members` maps a worker to what
    was measured of its device.
    """

    rows: int
    dtype: str
    target: ModelSizes
    draft: ModelSizes | None
    members: Mapping[str, DeviceFigures]
    links: Sequence[LinkFigures]
