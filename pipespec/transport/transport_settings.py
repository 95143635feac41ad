"""The settings of the transport."""

from __future__ import annotations

from dataclasses import dataclass

from pipespec.settings import check_settings, setting

AUTO, GLOO = "auto", "gloo"
BACKENDS = (AUTO, GLOO)
YES, NO = "yes", "no"
SEALS = (AUTO, YES, NO)


@dataclass(frozen=True)
class TransportConfig:
    """What carries batches between ranks, and whether they are encrypted."""

    backend: str = setting(
        "auto",
        "auto is gloo between ranks, by way of CPU memory, and NCCL among the GPUs of one stage; "
        "gloo is gloo for both.",
        choices=BACKENDS,
    )
    seal: str = setting(
        AUTO,
        "Whether batches are encrypted and authenticated; auto does so between hosts.",
        choices=SEALS,
    )

    def __post_init__(self) -> None:
        check_settings("transport", self)
