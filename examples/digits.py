"""Handwritten digits: a small conv net, trained on several devices by changing one line.

python examples/digits.py                      # two replicas on the CPU
python examples/digits.py --devices cpu:1      # the bare model, for comparison
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import click
import torch
from rich.console import Console
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from common import Bare, devices_option, replica_table, training_progress
from evenly import DataParallel, checkpoint

console = Console(soft_wrap=True)


class DigitNet(nn.Module):
    """Images `(N, 1, 8, 8)` in, one logit for each of ten digits out: `(N, 10)`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            self.block(1, 64),
            self.block(64, 128),
            nn.MaxPool2d(2),
            self.block(128, 256),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(256, 10),
        )

    @staticmethod
    def block(channels_in: int, channels_out: int) -> nn.Sequential:
        """Convolve, normalise, rectify; height and width stay."""
        return nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.layers(images)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Load 1,797 images, always the same 360 of them held out."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, held_out = order[360:], order[:360]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


@torch.no_grad()
def count_correct(model: nn.Module, data: TensorDataset, device: str) -> int:
    """Count the images that the model recognises."""
    model.eval()
    correct = 0
    for x, y in DataLoader(data, batch_size=120):
        correct += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
    return correct


def check_checkpoint(path: Path, correct: int) -> None:
    """Load the checkpoint into the bare model, in a process of its own, and count again."""
    command = [sys.executable, __file__, "--evaluate", "--checkpoint", str(path)]
    recognised = int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    if recognised != correct:
        raise click.ClickException(f"{path}: the bare model recognises {recognised} images, not {correct}.")
    console.print(f"{path}, loaded into the bare model in a fresh process: {recognised} images recognised again.")


@click.command(context_settings={"show_default": True})
@click.option("--epochs", default=12, type=click.IntRange(1), help="Passes over the training images.")
@click.option("--batch-size", default=128, type=click.IntRange(2), help="Images in a step, over all replicas.")
@click.option("--lr", default=3e-3, type=click.FloatRange(0, min_open=True), help="Highest learning rate.")
@click.option("--seed", default=0, help="For the weights and the order of the images.")
@devices_option
@click.option(
    "--checkpoint", "path", default="runs/digits.pt", type=click.Path(path_type=Path), help="File to save to."
)
@click.option("--evaluate", is_flag=True, help="Do not train: count what the bare model in --checkpoint recognises.")
def main(epochs: int, batch_size: int, lr: float, seed: int, devices: list[str], path: Path, evaluate: bool) -> None:
    """Train a small conv net to read handwritten digits."""
    train_data, held_out = load_data()
    if evaluate:
        model = DigitNet()
        model.load_state_dict(checkpoint.load(path)["model"])
        print(count_correct(model, held_out, "cpu"))
        return

    torch.manual_seed(seed)
    device = devices[0]
    model = DigitNet().to(device)
    if len(devices) > 1:
        model = DataParallel(model, device_ids=devices)  # <-- the only line that changes

    loader = DataLoader(train_data, batch_size, shuffle=True)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, epochs * len(loader))

    rows, seconds = 0, 0.0
    with training_progress("samples") as progress:
        bar = progress.add_task("", total=epochs * len(loader), loss=0.0, speed=0.0)
        for epoch in range(1, epochs + 1):
            progress.update(bar, description=f"epoch {epoch:>2}/{epochs}")
            model.train()
            for x, y in loader:
                started = time.perf_counter()
                optimizer.zero_grad()
                out = model(x.to(device))
                loss = criterion(out, y.to(device))
                loss.backward()
                optimizer.step()
                scheduler.step()
                loss_value = loss.item()  # waits for the device, so the clock below is honest
                rows, seconds = rows + len(x), seconds + time.perf_counter() - started
                progress.update(bar, advance=1, loss=loss_value, speed=rows / seconds)
            correct = count_correct(model, held_out, device)
            progress.print(f"epoch {epoch:>2}: {correct / len(held_out):.1%} of held-out images recognised")

    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save(path, {"model": model.state_dict()})
    console.print(replica_table(model.report() if len(devices) > 1 else [Bare(device, rows, seconds)]))
    check_checkpoint(path, correct)


if __name__ == "__main__":
    main()
