"""What a replica has done."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ReplicaReport:
    """What one replica has done so far, over all models on the same devices.

    Attributes:
        replica: Its number; 0 is the driver.
        device: Its device.
        rows: Rows of all batches that it has computed.
        seconds: Time spent in forward and backward.
        memory_bytes: Memory of its process; pages that several processes share are counted in proportion.
    """

    replica: int
    device: torch.device
    rows: int
    seconds: float
    memory_bytes: int
