"""From nothing to a first loss, as a user's script: `python startup.py REPLICAS`, 0 for the bare model."""

from __future__ import annotations

import sys


def main() -> None:
    """Print the loss of one batch."""
    replicas = int(sys.argv[1])
    if replicas:
        from evenly import DataParallel
    import torch
    from torch import nn

    model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    if replicas:
        model = DataParallel(model, device_ids=["cpu"] * replicas)
    loss = nn.functional.cross_entropy(model(torch.randn(64, 64)), torch.randint(10, (64,)))
    print(loss.item(), flush=True)


if __name__ == "__main__":
    main()
