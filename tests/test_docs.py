"""What the documentation shows is what happens: every block of code in it runs, and prints what is printed there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from parity import wrap

ROOT = Path(__file__).parents[1]

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n*^```text\n(?P<shown>.*?)^```$)?", re.MULTILINE | re.DOTALL)


class MyModel(nn.Module):
    """The reader's own model, in the README."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x)


class Net(MyModel):
    """Another one, with arguments that are not all rows."""

    def forward(self, x, mask, names, state=None):
        logits = self.layer(x) + mask.mean()
        return {"logits": logits, "acc": (logits.argmax(1) == 0).float().mean(), "names": names}


def readers_own():
    """What a reader of the README has already."""
    net = Net()
    return {
        "torch": torch,
        "MyModel": MyModel,
        "net": net,
        "loader": [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(2)],
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "x": torch.randn(8, 3),
        "mask": torch.ones(5, 5),
        "names": list("abcdefgh"),
    }


def run(code, namespace, file):
    """Run a block as Python would, and return what it prints, an uncaught exception's last line included."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, file, "exec"), namespace)
        except Exception as error:
            printed.write(f"{type(error).__name__}: {error}")
    return printed.getvalue()


def folded(text):
    """A text without its line breaks: what is long is folded in the documentation."""
    return " ".join(text.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs_and_prints_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrap(MyModel())  # the replicas outlive each model
    torch.manual_seed(0)
    namespace = {"__name__": "documentation", **(readers_own() if page.name == "README.md" else {})}
    text = page.read_text()
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 1
        printed = run("\n" * line + block["code"], namespace, str(page))
        assert folded(printed) == folded(block["shown"] or ""), f"{page.name}:{line}"


def test_all_code_is_seen():
    assert sum(page.read_text().count("```python") for page in PAGES) == sum(
        len(BLOCK.findall(page.read_text())) for page in PAGES
    )


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
