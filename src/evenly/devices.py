"""What a user may call a device, and which devices replicas can be on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

Device: TypeAlias = "int | str | torch.device"


def resolve_devices(device_ids: Sequence[Device] | None, output_device: Device | None) -> list[torch.device]:
    """The devices of the replicas; empty when there is no accelerator and none was named.

    Raises:
        ValueError: A device does not exist, is named in a way nobody understands, or cannot be combined with others.
    """
    if isinstance(device_ids, (str, int, torch.device)):
        message = f"device_ids must be a list of devices, got {device_ids!r}; for replicas on the CPU: ['cpu'] * n"
        raise ValueError(message)  # noqa: TRY004 - as for the other kinds of wrong device_ids
    if device_ids is None:
        count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
        device_ids = list(range(count))
    elif not device_ids:
        message = "device_ids is empty: name at least one device, or leave it out for all accelerators"
        raise ValueError(message)
    devices = [_resolve(device, f"device_ids[{i}]") for i, device in enumerate(device_ids)]
    kinds = {device.type for device in devices}
    if len(kinds) > 1:
        message = f"device_ids mixes kinds of devices ({', '.join(sorted(kinds))}): replicas must be alike"
        raise ValueError(message)
    if kinds - {"cpu"}:
        message = (
            f"device_ids names {devices[0]}: replicas run on the CPU today "
            f"(device_ids=['cpu'] * n); use torch.nn.parallel.DistributedDataParallel for several accelerators"
        )
        raise ValueError(message)
    if output_device is not None and devices and _resolve(output_device, "output_device") != devices[0]:
        message = f"output_device is {output_device!r}, but outputs appear on the first device, {devices[0]}"
        raise ValueError(message)
    return devices


def _resolve(device: Device, path: str) -> torch.device:
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):  # pyright: ignore[reportUnnecessaryIsInstance] - users do not ask pyright
        message = f"{path} is {device!r}: a device is an index (0), a name ('cuda:0', 'cpu') or a torch.device"
        raise ValueError(message)  # noqa: TRY004 - as for the other kinds of wrong device_ids
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    available = torch.accelerator.device_count() if accelerator else 0
    if isinstance(device, int):
        if accelerator is None or not 0 <= device < available:
            raise ValueError(_missing(device, path, accelerator, available))
        return torch.device(accelerator.type, device)
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        message = f"{path} is {device!r}, which is no device: {str(error).splitlines()[0]}"
        raise ValueError(message) from None
    if resolved.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or resolved.type != accelerator.type or (resolved.index or 0) >= available:
        raise ValueError(_missing(device, path, accelerator, available))
    return resolved


def _missing(device: Device, path: str, accelerator: torch.device | None, available: int) -> str:
    if accelerator is None:
        found = "this machine has no accelerator"
    elif available == 1:
        found = f"this machine has 1 accelerator, {accelerator.type}:0"
    else:
        found = f"this machine has {available} accelerators, {accelerator.type}:0 to {accelerator.type}:{available - 1}"
    return f"{path} is {device!r}, but {found}; for replicas on the CPU say device_ids=['cpu'] * n"
