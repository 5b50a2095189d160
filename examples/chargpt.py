"""A small GPT that learns to write Python, character by character, from the standard library's own sources.

    python examples/chargpt.py                      # two replicas on the CPU
    python examples/chargpt.py --devices cpu:1      # the bare model, for comparison
    python examples/chargpt.py --resume             # go on from the last checkpoint

The loop is that of nanoGPT: gradient accumulation, clipping, warm-up and cosine decay, autocast, evaluation
now and then, sampling at the end.
"""

from __future__ import annotations

import math
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from click.core import ParameterSource
from rich.console import Console
from torch import nn

from common import Bare, devices_option, replica_table, training_progress
from evenly import DataParallel, checkpoint

# Printable ASCII and the line end: the same on every machine, so a checkpoint always fits.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
V = len(ALPHABET)

console = Console(soft_wrap=True)


@dataclass(frozen=True)
class Settings:
    """What a run consists of; saved with it, so that `--resume` goes on with the same run."""

    layers: int
    heads: int
    width: int
    context: int
    dropout: float
    batch_size: int
    accumulate: int
    steps: int
    warm_up: int
    lr: float
    weight_decay: float
    clip: float
    dtype: str
    seed: int
    evaluate_every: int


class Block(nn.Module):
    """Causal self-attention and a small MLP, each normalised before and added to its input."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        C = settings.width
        self.heads, self.dropout = settings.heads, settings.dropout
        self.attention_norm = nn.LayerNorm(C)
        self.query_key_value = nn.Linear(C, 3 * C)
        self.projection = nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Let each position look at itself and at those before: `(B, T, C)` to `(B, T, C)`."""
        B, T, C = x.shape
        q, k, v = self.query_key_value(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(B, T, C))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what attention and MLP make of `x`: `(B, T, C)` to `(B, T, C)`."""
        x = x + F.dropout(self.attend(self.attention_norm(x)), self.dropout, self.training)
        return x + F.dropout(self.mlp(x), self.dropout, self.training)


class CharGPT(nn.Module):
    """Characters `(B, T)` in, logits of the next character `(B, T, V)` out."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.context = settings.context
        self.characters = nn.Embedding(V, settings.width)
        self.positions = nn.Embedding(settings.context, settings.width)
        self.blocks = nn.Sequential(*(Block(settings) for _ in range(settings.layers)))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, V, bias=False)
        self.head.weight = self.characters.weight  # tied: one matrix reads and writes characters
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # As in GPT-2: what is added to the residual stream is scaled by the number of additions.
                residual = name.endswith(("projection.weight", "mlp.3.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * settings.layers) if residual else 0.02)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        positions = torch.arange(characters.shape[1], device=characters.device)
        return self.head(self.norm(self.blocks(self.characters(characters) + self.positions(positions))))

    @torch.no_grad()
    def generate(self, characters: torch.Tensor, count: int, temperature: float = 0.8) -> torch.Tensor:
        """Append `count` characters, drawn one by one: `(B, T)` to `(B, T + count)`."""
        for _ in range(count):
            logits = self(characters[:, -self.context :])[:, -1]
            drawn = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1)
            characters = torch.cat([characters, drawn], dim=1)
        return characters


def encode(text: str) -> torch.Tensor:
    """Turn characters into numbers below `V`; what the alphabet lacks is left out."""
    known = {character: number for number, character in enumerate(ALPHABET)}
    return torch.tensor([known[character] for character in text.expandtabs(4) if character in known])


def decode(characters: torch.Tensor) -> str:
    """Turn numbers back into text."""
    return "".join(ALPHABET[index] for index in characters.tolist())


def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Read the standard library; every tenth file is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(encoding="utf-8", errors="ignore") for file in files]
    held_out = texts[::10]
    del texts[::10]
    if not texts:
        raise click.ClickException(f"No sources of the standard library in {sysconfig.get_path('stdlib')}.")
    return encode("".join(texts)), encode("".join(held_out))


def draw_batch(data: torch.Tensor, settings: Settings, order: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw pieces of text `(B, T)`, and the same pieces one character later `(B, T)`."""
    starts = torch.randint(len(data) - settings.context, (settings.batch_size, 1), generator=order)
    window = starts + torch.arange(settings.context + 1)
    pieces = data[window]
    return pieces[:, :-1], pieces[:, 1:]


def learning_rate(step: int, settings: Settings) -> float:
    """Rise linearly over `warm_up` steps, then fall along a cosine to a tenth."""
    if step < settings.warm_up:
        return settings.lr * (step + 1) / settings.warm_up
    done = (step - settings.warm_up) / max(1, settings.steps - settings.warm_up)
    return settings.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW that decays matrices, and neither biases nor norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)


class Run:
    """A training run: the model and all that decides how it goes on."""

    def __init__(self, settings: Settings, devices: list[str]) -> None:
        self.settings, self.devices, self.device = settings, devices, torch.device(devices[0])
        torch.manual_seed(settings.seed)
        self.model: nn.Module = CharGPT(settings).to(self.device)
        if len(devices) > 1:
            self.model = DataParallel(self.model, device_ids=devices)  # <-- the only line that changes
        self.optimizer = make_optimizer(self.model, settings)
        self.order = torch.Generator().manual_seed(settings.seed)
        self.step = 0
        self.rows, self.seconds = 0, 0.0

    def save(self, path: Path) -> None:
        """Save everything that a bit-for-bit continuation needs."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "settings": asdict(self.settings),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "order": self.order.get_state(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all(),
        }
        checkpoint.save(path, state)

    @classmethod
    def resume(cls, path: Path, devices: list[str]) -> Run:
        """Continue the run that was saved, on whatever devices there are now."""
        state = checkpoint.load(path)
        run = cls(Settings(**state["settings"]), devices)
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.step = state["step"]
        run.order.set_state(state["order"])
        torch.set_rng_state(state["random"])
        for index, cuda_state in enumerate(state["random_cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(cuda_state, index)
        return run

    def autocast(self) -> torch.autocast:
        """Compute in the run's precision where that is safe."""
        dtype = getattr(torch, self.settings.dtype)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not torch.float32)

    def loss(self, data: torch.Tensor, order: torch.Generator) -> torch.Tensor:
        """Mean cross entropy over one batch, 0-dim."""
        x, y = (side.to(self.device) for side in draw_batch(data, self.settings, order))
        with self.autocast():
            logits = self.model(x)  # split over the devices, and it stays there
            return F.cross_entropy(logits.view(-1, V), y.reshape(-1))

    def train_step(self, data: torch.Tensor) -> float:
        """Train on `accumulate` batches; return their mean loss."""
        started = time.perf_counter()
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.settings)
        total = 0.0
        self.optimizer.zero_grad()
        for _ in range(self.settings.accumulate):
            loss = self.loss(data, self.order) / self.settings.accumulate
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.step += 1
        self.rows += self.settings.accumulate * self.settings.batch_size
        self.seconds += time.perf_counter() - started
        return total

    @torch.no_grad()
    def evaluate(self, data: torch.Tensor, batches: int = 16) -> float:
        """Mean loss over the same few batches of held-out text each time."""
        self.model.eval()
        order = torch.Generator().manual_seed(0)
        return sum(self.loss(data, order).item() for _ in range(batches)) / batches

    def train(self, path: Path, until: int) -> None:
        """Train up to step `until`, with an evaluation and a checkpoint now and then."""
        data, held_out = load_data()
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        console.print(f"{parameters:,} parameters, {len(data):,} characters, {len(held_out):,} held out")
        with training_progress("characters") as progress:
            bar = progress.add_task("training", total=until, completed=self.step, loss=math.nan, speed=0.0)
            while self.step < until:
                loss = self.train_step(data)
                speed = self.rows * self.settings.context / self.seconds
                progress.update(bar, completed=self.step, loss=loss, speed=speed)
                if self.step % self.settings.evaluate_every == 0 or self.step == until:
                    progress.print(f"step {self.step:>4}: held-out loss {self.evaluate(held_out):.4f}")
                    self.save(path)

    def sample(self, count: int) -> str:
        """Let the model write `count` characters."""
        self.model.eval()
        start = encode("\ndef ").unsqueeze(0).to(self.device)
        with self.autocast():
            return decode(self.model.generate(start, count)[0])


@click.command(context_settings={"show_default": True})
@click.option("--layers", default=4, type=click.IntRange(1))
@click.option("--heads", default=4, type=click.IntRange(1))
@click.option("--width", default=128, type=click.IntRange(1), help="Channels; a multiple of --heads.")
@click.option("--context", default=64, type=click.IntRange(1), help="Characters that the model looks back on.")
@click.option("--dropout", default=0.0, type=click.FloatRange(0, 1, max_open=True))
@click.option("--batch-size", default=16, type=click.IntRange(1), help="Pieces of text, over all replicas.")
@click.option("--accumulate", default=2, type=click.IntRange(1), help="Batches in a step.")
@click.option("--steps", default=600, type=click.IntRange(1))
@click.option("--warm-up", default=50, type=click.IntRange(0), help="Steps until the highest learning rate.")
@click.option("--lr", default=3e-3, type=click.FloatRange(0, min_open=True), help="Highest learning rate.")
@click.option("--weight-decay", default=0.1, type=click.FloatRange(0))
@click.option("--clip", default=1.0, type=click.FloatRange(0, min_open=True), help="Largest norm of the gradient.")
@click.option("--dtype", default="bfloat16", type=click.Choice(["bfloat16", "float32"]), help="For autocast.")
@click.option("--seed", default=0, help="For weights, dropout and the order of the text.")
@click.option("--evaluate-every", default=100, type=click.IntRange(1), help="Steps from one checkpoint to the next.")
@devices_option
@click.option(
    "--checkpoint",
    "path",
    default="runs/chargpt.pt",
    type=click.Path(path_type=Path),
    help="File to save to.",
)
@click.option("--resume", is_flag=True, help="Go on with the run in --checkpoint, with its settings.")
@click.option("--until", type=click.IntRange(1), help="Stop at this step; --resume goes on from there.")
@click.option("--sample", "sample_length", default=300, type=click.IntRange(0), help="Characters to write at the end.")
@click.pass_context
def main(
    ctx: click.Context,
    devices: list[str],
    path: Path,
    resume: bool,
    until: int | None,
    sample_length: int,
    **settings: Any,
) -> None:
    """Train a small GPT on the sources of Python's standard library."""
    given = [name for name in settings if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if resume and given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        raise click.UsageError(f"--resume goes on with the settings of the saved run: leave out {options}.")
    if resume and not path.exists():
        raise click.UsageError(f"--resume: there is no checkpoint {path}.")
    if settings["width"] % settings["heads"]:
        raise click.UsageError(f"--width {settings['width']} is no multiple of --heads {settings['heads']}.")
    run = Run.resume(path, devices) if resume else Run(Settings(**settings), devices)
    run.train(path, until or run.settings.steps)
    if sample_length:
        console.print(run.sample(sample_length), markup=False, highlight=False)
    console.print(replica_table(run.model.report() if len(devices) > 1 else [Bare(devices[0], run.rows, run.seconds)]))


if __name__ == "__main__":
    main()
