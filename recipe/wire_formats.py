"""The number formats in which gradients may be sent: one table, from which lists, choices and
checks derive. What sends each is the engine's: ddp_train/buckets.py and horovod_train/engine.py."""

from dataclasses import dataclass
from typing import Literal

WireFormat = Literal["fp32", "fp16"]


@dataclass(frozen=True)
class NumberFormat:
    """What there is to know of a number format on the wire."""

    dtype: str  # torch's name
    bytes: int  # of an element
    exact_integers: int  # it holds each whole number up to here


WIRE_FORMATS: dict[WireFormat, NumberFormat] = {
    "fp32": NumberFormat("float32", 4, 2**24),
    "fp16": NumberFormat("float16", 2, 2**11),
}
