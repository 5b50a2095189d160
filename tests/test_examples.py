"""The examples as a user runs them: as scripts, over replicas and bare."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch

from evenly import checkpoint

EXAMPLES = Path(__file__).parents[1] / "examples"

SMALL_GPT = (
    *("--layers", "2", "--heads", "2", "--width", "32", "--context", "16", "--batch-size", "7"),
    *("--steps", "6", "--warm-up", "2", "--evaluate-every", "3", "--sample", "20"),
)


def run_example(script, *options):
    """Run an example in a process of its own, and return what it prints."""
    command = [sys.executable, str(EXAMPLES / script), *map(str, options)]
    # One thread in each: sums do not depend on how many cores the machine has.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def table_of_replicas(output):
    """Return `(replica, device, rows)` for each line of the table of replicas."""
    lines = re.findall(r"│ +(\d+) │ (\S+) +│ +([\d,]+) │ +[\d.]+ │ +[\d,]+ MiB │", output)
    return [(int(replica), device, int(rows.replace(",", ""))) for replica, device, rows in lines]


def held_out_losses(output):
    return [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", output)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_digits_are_learnt_and_the_checkpoint_fits_the_bare_model(tmp_path, replicas):
    file = tmp_path / "digits.pt"
    output = run_example("digits.py", "--devices", f"cpu:{replicas}", "--epochs", 6, "--checkpoint", file)

    accuracies = [float(percent) for percent in re.findall(r"epoch +\d+: ([\d.]+)%", output)]
    assert len(accuracies) == 6
    assert accuracies[-1] >= 97
    table = table_of_replicas(output)
    assert [(replica, device) for replica, device, _ in table] == [(r, "cpu") for r in range(replicas)]
    assert all(rows > 0 for _, _, rows in table)
    recognised = int(re.search(r"in a fresh process: (\d+) images", output)[1])
    assert f"{recognised / 360:.1%}" == f"{accuracies[-1]}%"
    assert set(checkpoint.load(file)) == {"model"}


@pytest.mark.parametrize("replicas", [1, 2])
def test_chargpt_resumes_bit_for_bit(tmp_path, replicas):
    options = (*SMALL_GPT, "--dropout", 0.1, "--devices", f"cpu:{replicas}")
    through = run_example("chargpt.py", *options, "--checkpoint", tmp_path / "through.pt")
    run_example("chargpt.py", *options, "--checkpoint", tmp_path / "halves.pt", "--until", 3)
    resumed = run_example(
        *("chargpt.py", "--devices", f"cpu:{replicas}", "--checkpoint", tmp_path / "halves.pt", "--resume")
    )

    assert held_out_losses(resumed) == held_out_losses(through)[1:]
    assert_bitwise_equal(checkpoint.load(tmp_path / "halves.pt"), checkpoint.load(tmp_path / "through.pt"))


def test_chargpt_on_replicas_agrees_with_bare(tmp_path):
    options = (*SMALL_GPT, "--dtype", "float32", "--lr", 1e-2)
    bare = run_example("chargpt.py", *options, "--devices", "cpu:1", "--checkpoint", tmp_path / "bare.pt")
    evenly = run_example("chargpt.py", *options, "--devices", "cpu:2", "--checkpoint", tmp_path / "evenly.pt")

    assert held_out_losses(evenly) == pytest.approx(held_out_losses(bare), abs=1e-3)
    assert held_out_losses(bare)[1] < held_out_losses(bare)[0]
    assert [replica for replica, _, _ in table_of_replicas(evenly)] == [0, 1]


def assert_bitwise_equal(actual, expected):
    """Compare nested containers of tensors and numbers without any tolerance."""
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_bitwise_equal(actual[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_bitwise_equal(one, other)
    else:
        assert actual == expected


@pytest.fixture
def devices(monkeypatch):
    """The `--devices` option, on a machine with two GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return runpy.run_path(str(EXAMPLES / "common.py"))["Devices"]()


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("cpu", ["cpu"]),
        ("cpu:1", ["cpu"]),
        ("cpu:3", ["cpu", "cpu", "cpu"]),
        ("cuda:1", ["cuda:1"]),
        ("cuda:0,1", ["cuda:0", "cuda:1"]),
    ],
)
def test_devices_are_one_per_replica(devices, word, expected):
    assert devices.convert(word, None, None) == expected


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("cpu:0", "no replica"),
        ("cuda:0,2", "names GPU 2; this machine has 2 of them"),
        ("cuda:", "neither like cpu:2"),
        ("gpu:0", "neither like cpu:2"),
        ("", "neither like cpu:2"),
    ],
)
def test_devices_that_are_not_there_are_refused(devices, word, complaint):
    with pytest.raises(click.BadParameter, match=complaint):
        devices.convert(word, None, None)


def test_gpus_on_a_machine_without_any_are_refused_with_the_remedy(devices, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(click.BadParameter, match="this machine has none; replicas on the CPU: cpu:2"):
        devices.convert("cuda:0,1", None, None)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--width", "10", "--heads", "3"], "--width 10 is no multiple of --heads 3"),
        (["--resume", "--checkpoint", "nowhere.pt"], "there is no checkpoint nowhere.pt"),
        (["--resume", "--warm-up", "3"], "leave out --warm-up"),
    ],
)
def test_chargpt_refuses_options_that_contradict(options, complaint, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    main = runpy.run_path(str(EXAMPLES / "chargpt.py"))["main"]
    with pytest.raises(click.UsageError, match=complaint):
        main(options, standalone_mode=False)
