"""Random programs: a model, a batch and what a user might do with the output, as lines of Python.

Hypothesis draws the lines; each is tried on the bare module while it is drawn, so that shapes are known and most
lines make sense. What is run over the bare module and over replicas, and what a failure prints, is the same text.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

import standalone
from operations import IN_PLACE, LOSSES, OPERATIONS, ROW_WISE

Draw = Callable[[st.SearchStrategy[Any]], Any]

_LARGEST = 600


@dataclass(frozen=True)
class Program:
    """A program as text, and how its model is wrapped."""

    text: str
    options: str
    tolerance: float

    def namespace(self) -> dict[str, Any]:
        """The definitions of the program, executed."""
        found = {**vars(standalone), "__name__": "program"}
        exec(self.text, found)
        return found

    def run(self, **options: Any) -> None:
        """Compare bare and evenly."""
        found = self.namespace()
        given = eval(f"dict({self.options})", found)  # noqa: S307 - our own text
        standalone.check(found["Model"], found["program"], tolerance=self.tolerance, **{**given, **options})

    def script(self) -> str:
        """The program as a script of its own."""
        around = Path(standalone.__file__).read_text(encoding="utf-8")
        return f"{around}\n\n{self.text}\n\ncheck(Model, program, tolerance={self.tolerance}, {self.options})\n"

    def __repr__(self) -> str:
        return f"a program:\n{self.text}\n# check(Model, program, tolerance={self.tolerance}, {self.options})"


@st.composite
def programs(draw: Draw) -> Program:
    """Programs and how they are wrapped."""
    replicas = draw(st.sampled_from([2, 2, 3, 1, 4]))
    options = f'device_ids=["cpu"] * {replicas}'
    if draw(st.integers(0, 3)) == 3:
        options += f", split={[draw(st.integers(1, 4)) for _ in range(replicas)]}"
    writer = Writer(draw)
    writer.write()
    return Program(writer.text(), options, writer.tolerance())


class Writer:
    """Writes a program, line by line, and runs every line on the bare module to know what it gives."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.lines: list[str] = []
        self.env: dict[str, Any] = {**vars(standalone), "__name__": "program", "replicate": _same, "samples": _same}
        self.names: list[str] = []
        self.seeds = 0
        self.model = ""
        self.mode = ""
        self.changes = False

    # ------------------------------------------------------------------ the text

    def text(self) -> str:
        """Model and program."""
        body = [*self.lines, f"return dict({', '.join(f'{name}={name}' for name in self.names)})"]
        if self.mode:
            body = [f"with torch.{self.mode}:", *(f"    {line}" for line in body)]
        head = "def program(model, replicate, samples):"
        return f"{self.model}\n\n{head}\n{textwrap.indent(chr(10).join(body), '    ')}\n"

    def tolerance(self) -> float:
        """By the coarsest dtype that occurs in the text."""
        text = self.text()
        if "bfloat16" in text:
            return 5e-2
        return 1e-4 if any(word in text for word in ("float32", "complex64", "float()")) else 1e-9

    # ------------------------------------------------------------------ drawing

    def number(self, low: int, high: int) -> int:
        """An integer of a range, the low ones first when a failure is made smaller."""
        return self.draw(st.integers(low, high))

    def pick(self, items: Sequence[Any]) -> Any:
        """One of several things."""
        return self.draw(st.sampled_from(items))

    def seed(self) -> int:
        """A seed of its own for each tensor."""
        self.seeds += 1
        return self.seeds

    def attempt(self, line: str) -> Exception | None:
        """Run a line; what went wrong."""
        try:
            exec(line, self.env)
        except Exception as error:
            return error
        return None

    def line(self, line: str, name: str | None = None) -> bool:
        """Write a line, if it makes sense."""
        if self.attempt(line) is not None:
            return False
        value = self.env[name] if name else None
        if name != "out" and isinstance(value, Tensor) and value.numel() > _LARGEST:
            return False
        self.lines.append(line)
        if name:
            self.names.append(name)
        return True

    # ------------------------------------------------------------------ the parts of a program

    def write(self) -> None:
        """Write all of it."""
        self.mode = self.pick(["", "", "", "", "no_grad()", "inference_mode()"])
        self.dtype = self.pick(["torch.float64"] * 6 + ["torch.float32", "torch.complex128"])
        guard = eval(f"torch.{self.mode or 'enable_grad()'}")  # noqa: S307
        with guard:
            self.rows, self.features = self.number(0, 17), self.number(1, 4)
            arguments, extras = self.arguments()
            self.write_model(extras)
            exec(self.model, self.env)
            torch.manual_seed(0)
            self.env["model"] = self.env["Model"]()
            call, shape = f"model({arguments})", self.env["x"].shape
            if not self.line(f"out = {call}", "out"):
                self.line(f"failed = raises(lambda: {call})", "failed")
                return
            for path in _tensors("out", self.env["out"]):
                self.line(f"v{len(self.names)} = {path}", f"v{len(self.names)}")
            self.line(f"y = values({self.shape()}, {self.seed()}, {self.dtype})", "y")
            for _ in range(self.number(0, 7)):
                self.step()
            if self.number(0, 5) == 5 and self.env["x"].shape == shape:
                self.line(f"again = {call}", "again")
            if not self.mode:
                self.backward()

    def shape(self) -> tuple[int, ...]:
        """A shape with the rows of the batch."""
        return self.pick([(self.rows, self.features), (self.rows, 2, self.features), (self.rows, 2, 2, self.features)])

    def arguments(self) -> tuple[str, list[str]]:
        """Write lines that make the arguments; how they are passed, and where tensors and others are in `extra`."""
        n, f, seed = self.rows, self.features, self.seed()
        x = self.pick(
            [
                f"values({self.shape()}, {seed}, {self.dtype})",
                f"values({(f, n)}, {seed}, {self.dtype}).T",
                f"values({(n, 2 * f)}, {seed}, {self.dtype})[:, ::2]",
                f"values({(n, 1)}, {seed}, {self.dtype}).expand({n}, {f})",
                f"values({(n, 2, 2, f)}, {seed}, {self.dtype}).contiguous(memory_format=torch.channels_last)",
            ]
        )
        kind = self.pick(["", "", ".requires_grad_()", ".requires_grad_() * 2"])
        if kind.endswith("2"):
            self.line(f"leaf = {x}.requires_grad_()", "leaf")
            x, kind = "leaf", " * 2"
        self.line(f"x = {x}{kind}", "x")
        if not self.number(0, 1):
            return "x", []
        self.line(f"extra = {self.structure(2)}")
        return "x, extra=extra", _tensors("extra", self.env["extra"], everything=True)

    def structure(self, depth: int) -> str:
        """The text of a nested argument."""
        if not depth or not self.number(0, 2):
            return self.argument()
        kind = self.pick(["dict", "Pair", "Box", "tuple", "list"])
        one, other = self.structure(depth - 1), self.structure(depth - 1)
        if kind in ("tuple", "list") and self.rows in (2, 3):
            kind = "dict"  # as many items as rows would be one for each row
        return {
            "dict": f"{{'a': {one}, 'b': {other}}}",
            "Pair": f"Pair({one}, {other})" if self.rows != 2 else f"Box({one}, {other})",
            "Box": f"Box({one}, {other})",
            "tuple": f"({one}, {other}, None)",
            "list": f"[{one}, {other}]",
        }[kind]

    def argument(self) -> str:
        """The text of a leaf of an argument."""
        n, seed = self.rows, self.seed()
        options = [
            "None",
            "7",
            "'word'",
            f"values({(n,)}, {seed}, torch.int64)",
            f"values({(n, 2)}, {seed}, torch.bool)",
            f"values({(n, 3)}, {seed}, torch.float32)",
            f"values({(n, 2)}, {seed}, torch.complex64)",
            f"values({(n, 2)}, {seed}).requires_grad_()",
            f"values({(n, 0)}, {seed})",
            f"replicate(values({(self.number(0, 4), 2)}, {seed}))",
            f"values((), {seed})",
            f"samples([str(i) for i in range({n})])",
            f"samples([values((i, 2), i) for i in range({n})])",
            "replicate('word')",
        ]
        if n > 1:
            options.append(f"values((1, 2), {seed})")
        if n > 0:
            options.append(
                f"nn.utils.rnn.pack_padded_sequence(values({(n, 3, 2)}, {seed}), "
                f"torch.tensor({[1 + i % 3 for i in range(n)]}), batch_first=True, enforce_sorted=False)"
            )
        return self.pick(options)

    def write_model(self, extras: list[str]) -> None:
        """The class of the model: some steps that treat rows alike, and an output with a structure."""
        # Without grad a view of a leaf that was changed says that it has one; inference mode counts no changes.
        choice = ROW_WISE[:-1] if self.mode else ROW_WISE
        steps = [self.pick(choice) for _ in range(self.number(1, 4))]
        made = self.output(2, extras)
        body = "\n".join(f"        {step}" for step in ["h = x", *steps, f"return {made}"])
        self.model = (
            "class Model(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            f"        self.linear = nn.Linear({self.features}, {self.features}, dtype={self.dtype})\n"
            f"        self.scale = nn.Parameter(values(({self.features},), 99, {self.dtype}))\n"
            f"        self.unused = nn.Linear(1, 1, dtype={self.dtype})\n\n"
            f"    def forward(self, x, extra=None):\n{body}\n"
        )

    def output(self, depth: int, extras: list[str]) -> str:
        """The text of an output."""
        if depth and self.number(0, 2) == 2:
            one, other = self.output(depth - 1, extras), self.output(depth - 1, extras)
            return self.pick(
                [
                    f"{{'a': {one}, 'b': {other}}}",
                    f"({one}, {other})",
                    f"[{one}, None, {other}]",
                    f"Pair({one}, {other})",
                    f"Box({one}, {other})",
                ]
            )
        return self.pick([*OUTPUTS, *extras] if depth < 2 else [*OUTPUTS[:6], "[row * 2 for row in h]"])

    def tensors(self) -> list[str]:
        """Names of tensors."""
        return [name for name in self.names if isinstance(self.env[name], Tensor)]

    def step(self) -> None:
        """Do something with what there is."""
        names = self.tensors()
        a, b = self.pick(names), self.pick(names)
        change = self.number(0, 3) == 3
        template = self.pick(IN_PLACE if change else OPERATIONS)
        dims = max(1, self.env[a].dim())
        line = template.format(
            a=a,
            b=b,
            d=self.number(-dims, dims - 1) if "{d}" in template else 0,
            e=self.number(0, dims - 1) if "{e}" in template else 0,
            i=self.number(0, 8) if "{i}" in template else 0,
            j=self.number(-3, 8) if "{j}" in template else 0,
        )
        error = self.attempt(line)
        name = f"v{len(self.names)}"
        if error is not None:
            if self.number(0, 9) == 9:
                self.line(f"{name} = raises(lambda: {line})", name)
        elif change:
            self.lines.append(line)
            self.changes = True
        else:
            self.line(f"{name} = {line}", name)

    def backward(self) -> None:
        """A loss, and gradients."""
        able = [name for name in self.tensors() if self.env[name].requires_grad and self.env[name].numel()]
        if not able:
            return
        first = [name for name in able if name.startswith("v")] or able
        template = self.pick(LOSSES)
        a = self.pick(first)
        if self.env[a].is_complex():
            template = template.replace("{a}", "torch.view_as_real({a}.resolve_conj())")
        if not self.line(f"loss = {template.format(a=a, b=self.pick(first))}", "loss"):
            return
        leaves = [name for name in able if self.attempt(f"{name}.is_leaf") is None and self.env[name].is_leaf]
        inputs = "".join(f"{name}, " for name in leaves)
        ways = [
            ["loss.backward()"],
            ["loss.backward()"],
            ["loss.backward(retain_graph=True)", "(loss * 3).backward()"],
            [f"gradients = torch.autograd.grad(loss, [{inputs}*model.parameters()], allow_unused=True)"],
            [
                f"leaves = [{inputs}*model.parameters()]",
                "first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)",
                "sum(g.abs().square().sum() for g in first if g is not None and g.requires_grad).backward()",
            ],
        ]
        # What has been changed in place may have no second derivative here.
        for line in self.pick(ways[:-1] if self.changes else ways):
            if self.attempt(line) is None:
                self.lines.append(line)
                if " = " in line and not line.startswith("leaves"):
                    self.names.append(line.split(" = ")[0])
            else:
                return
        for leaf in leaves:
            self.line(f"{leaf}_grad = {leaf}.grad", f"{leaf}_grad")


OUTPUTS = [
    "h", "h * 2", "h.sum(-1)", "h.unsqueeze(1).expand(-1, 3, *h.shape[1:])", "h.transpose(0, -1)", "h.unsqueeze(0)",
    "h.detach()", "h.abs() > 0.1", "h.abs().argmax(-1)", "h.to(torch.complex64)", "h[..., :1]", "x", "h.mean()",
    "(h * h).sum()", "None", "3", "'text'", "self.linear.weight * 2", "self.scale", "h.abs().long()",
    "h.chunk(2, -1)[0]", "h.flatten()", "h.to(torch.float32).abs() if not h.is_complex() else h",
    "h.reshape(-1, h.shape[-1])",
]  # fmt: skip


def _same(value: Any) -> Any:
    return value


def _tensors(path: str, value: Any, *, everything: bool = False) -> list[str]:
    """Expressions for the tensors in a nested value (and for the rest, too)."""
    if isinstance(value, Tensor):
        return [path]
    if isinstance(value, PackedSequence):
        return [path] if everything else [f"{path}.data"]
    if isinstance(value, dict):
        return [found for key in value for found in _tensors(f"{path}[{key!r}]", value[key], everything=everything)]
    if isinstance(value, standalone.Box):
        return [
            found
            for key in ("left", "right")
            for found in _tensors(f"{path}.{key}", getattr(value, key), everything=everything)
        ]
    if isinstance(value, (list, tuple)) and not (everything and isinstance(value, list)):
        return [
            found
            for place in range(len(value))
            for found in _tensors(f"{path}[{place}]", value[place], everything=everything)
        ]
    return [path] if everything else []
