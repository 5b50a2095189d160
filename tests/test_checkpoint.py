"""What `evenly.checkpoint` promises: clean keys, and files that are whole or not there."""

import argparse
import os
import pickle
import signal
import stat
import subprocess
import sys
import textwrap
from collections import OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from evenly.checkpoint import clean_keys, load, save


def net() -> nn.Module:
    return nn.Sequential(OrderedDict(fc=nn.Linear(3, 4), bn=nn.BatchNorm1d(4), head=nn.Linear(4, 2)))


class OwnModule(nn.Module):
    """A model that has a submodule called "module" of its own, beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)


class OnlyModule(nn.Module):
    """A model that holds nothing but a submodule called "module"."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


class SameNameTwice(nn.Module):
    """A model whose parameter and whose submodule's parameter differ by "module." only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.module = nn.Linear(2, 2, bias=False)


WRAPPED = {
    "data parallel": nn.DataParallel,
    "compiled": torch.compile,
    "compiled in data parallel": lambda m: nn.DataParallel(torch.compile(m)),
    "data parallel, compiled": lambda m: torch.compile(nn.DataParallel(m)),
    "twice data parallel": lambda m: nn.DataParallel(nn.DataParallel(m)),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("knows_target", [True, False])
@pytest.mark.parametrize("build", [net, OwnModule])
def test_a_wrapped_models_checkpoint_fits_the_bare_model(build, wrap, knows_target) -> None:
    source, bare = build(), build()
    wrapped = wrap(source).state_dict()
    cleaned = clean_keys(wrapped, expected=bare.state_dict().keys() if knows_target else None)
    assert list(cleaned) == list(bare.state_dict())
    assert cleaned._metadata == bare.state_dict()._metadata
    bare.load_state_dict(cleaned)
    for name, value in source.state_dict().items():
        assert torch.equal(bare.state_dict()[name], value)


def test_prefixes_go_anywhere_in_a_key() -> None:
    assert list(clean_keys({"module._orig_mod.encoder.module.weight": 1})) == ["encoder.weight"]
    inner = nn.Sequential(nn.DataParallel(net()), nn.Linear(2, 2))
    bare = nn.Sequential(net(), nn.Linear(2, 2))
    for expected in (None, bare.state_dict().keys()):
        cleaned = clean_keys(nn.DataParallel(inner).state_dict(), expected=expected)
        assert list(cleaned) == list(bare.state_dict())
        assert cleaned._metadata == bare.state_dict()._metadata


@pytest.mark.parametrize("build", [OwnModule, OnlyModule, SameNameTwice])
def test_a_submodule_called_module_survives_where_it_is_expected(build) -> None:
    bare = build()
    for wrapped in (bare, nn.DataParallel(bare), torch.compile(nn.DataParallel(bare))):
        cleaned = clean_keys(wrapped.state_dict(), expected=bare.state_dict().keys())
        assert list(cleaned) == list(bare.state_dict())
        assert cleaned._metadata == bare.state_dict()._metadata


def test_a_submodule_called_module_survives_beside_others() -> None:
    state = OwnModule().state_dict()
    assert list(clean_keys(state)) == list(state)


def test_a_parameter_called_module_survives() -> None:
    assert list(clean_keys({"module": 1})) == ["module"]
    assert list(clean_keys({"module.module": 1}, expected=["module"])) == ["module"]


def test_a_clean_checkpoint_fits_a_compiled_model() -> None:
    target = nn.DataParallel(torch.compile(net()))
    assert list(clean_keys(net().state_dict(), expected=target.state_dict().keys())) == list(target.state_dict())


def test_an_averaged_models_weights_fit_the_bare_model() -> None:
    averaged = torch.optim.swa_utils.AveragedModel(nn.DataParallel(net()))
    cleaned = clean_keys(averaged.state_dict(), expected=net().state_dict().keys())
    assert sorted(cleaned) == sorted(["n_averaged", *net().state_dict()])


def test_an_old_key_is_cleaned_although_it_is_not_expected() -> None:
    expected = ["encoder.module.weight", "head.weight"]
    state = dict.fromkeys(["module.encoder.module.gamma", "module.head.module.gamma", "module.head.weight"])
    assert list(clean_keys(state, expected=expected)) == ["encoder.module.gamma", "head.gamma", "head.weight"]


def test_only_some_keys_have_a_prefix() -> None:
    state = dict.fromkeys(["module.scale", "head.weight", "_orig_mod.module.body.weight"])
    expected = ["scale", "head.weight", "body.weight"]
    assert list(clean_keys(state, expected=expected)) == expected


@pytest.mark.parametrize("expected", [None, ["fc.weight"]])
def test_two_keys_that_become_one_are_refused(expected) -> None:
    state = {"fc._orig_mod.weight": 1, "fc.weight": 2}
    with pytest.raises(ValueError, match=r"'fc\._orig_mod\.weight' and 'fc\.weight' both become 'fc\.weight'"):
        clean_keys(state, expected=expected)


def test_what_is_no_state_dict_is_refused() -> None:
    with pytest.raises(TypeError, match="keys of a module's state dict are strings, and 0 is of type int"):
        clean_keys({0: torch.zeros(1)})
    with pytest.raises(TypeError, match="type list"):
        clean_keys([("a", 1)])


def test_the_given_state_dict_is_not_changed() -> None:
    state = nn.DataParallel(net()).state_dict()
    keys, metadata = list(state), dict(state._metadata)
    cleaned = clean_keys(state, expected=net().state_dict().keys())
    cleaned._metadata["bn"]["version"] = 99
    assert list(state) == keys
    assert state._metadata == metadata
    assert state._metadata["module.bn"]["version"] != 99


def test_no_keys_at_all() -> None:
    assert clean_keys({}) == clean_keys({}, expected=["a"]) == {}
    assert clean_keys(nn.DataParallel(nn.ReLU()).state_dict(), expected=[])._metadata == {"": {"version": 1}}


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "history": [0.5, (1, None, True)],
        "rng": torch.get_rng_state(),
        "seen": {1, 2},
        "sparse": torch.eye(3).to_sparse(),
        "shape": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "big": 2**200,
    }
    save(tmp_path / "a.pt", state)
    for loaded in (load(tmp_path / "a.pt"), torch.load(tmp_path / "a.pt")):
        assert set(loaded) == set(state)
        assert loaded["epoch"] == 3
        assert loaded["history"] == state["history"]
        assert loaded["big"] == state["big"]
        assert torch.equal(loaded["rng"], state["rng"])
        assert torch.equal(loaded["conjugate"], state["conjugate"])
        assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))
        assert loaded["model"]._metadata == model.state_dict()._metadata
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    assert list(tmp_path.iterdir()) == [tmp_path / "a.pt"]


def test_a_view_is_saved_without_what_it_is_a_view_of(tmp_path: Path) -> None:
    matrix = torch.randn(1000, 1000)
    column = torch.randn(1000, 1000)[:, 500]
    state = {
        "row": matrix[3],
        "column": column,
        "nested": [{"rows": nn.Parameter(matrix[10:12])}],
        "transposed": matrix[20:22].T,
        "empty": matrix[5:5],
        "wide": matrix[0, :1].expand(10**9),
        "buffer": torch.zeros(10**6, dtype=torch.int64)[7],
    }
    save(tmp_path / "a.pt", state)
    assert (tmp_path / "a.pt").stat().st_size < 50_000
    loaded = load(tmp_path / "a.pt")
    assert torch.equal(loaded["row"], matrix[3])
    assert torch.equal(loaded["column"], column)
    assert type(loaded["nested"][0]["rows"]) is nn.Parameter
    assert loaded["nested"][0]["rows"].requires_grad
    assert torch.equal(loaded["nested"][0]["rows"], matrix[10:12])
    assert torch.equal(loaded["transposed"], matrix[20:22].T)
    assert loaded["transposed"].stride() == (1, 1000)
    assert loaded["empty"].shape == (0, 1000)
    assert loaded["wide"].shape == (10**9,)
    assert loaded["wide"][-1] == matrix[0, 0]
    assert loaded["buffer"].shape == ()


def test_saving_leaves_the_saved_as_it_was(tmp_path: Path) -> None:
    matrix = torch.randn(10, 10)
    row = nn.Parameter(matrix[3])
    state = {"row": row}
    save(tmp_path / "a.pt", state)
    assert state["row"] is row
    assert row.data_ptr() == matrix[3].data_ptr()


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    arena = torch.randn(1000)
    embedding, decoder = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    embedding.weight = nn.Parameter(arena[100:116].view(4, 4))
    decoder.weight = embedding.weight
    model = nn.Sequential(embedding, decoder)
    column = torch.randn(50, 50)[:, 3]
    save(
        tmp_path / "a.pt",
        {
            "model": model.state_dict(),
            "part": arena[114:118],
            "columns": [column, column.view(5, 10), column[:]],
        },
    )
    loaded = load(tmp_path / "a.pt")
    loaded["model"]["0.weight"].fill_(7)
    assert torch.equal(loaded["model"]["1.weight"], torch.full((4, 4), 7.0))
    assert torch.equal(loaded["part"], torch.cat([torch.full((2,), 7.0), arena[116:118]]))
    loaded["columns"][0].fill_(8)
    assert torch.equal(loaded["columns"][1], torch.full((5, 10), 8.0))
    assert torch.equal(loaded["columns"][2], torch.full((50,), 8.0))


def test_neighbours_in_one_storage_are_saved_apart_even_with_two_dtypes(tmp_path: Path) -> None:
    arena = torch.zeros(64, dtype=torch.uint8)
    floats, halves = arena[:16].view(torch.float32), arena[32:40].view(torch.float16)
    floats.fill_(1.5)
    halves.fill_(2.5)
    save(tmp_path / "a.pt", [floats, halves])
    one, two = load(tmp_path / "a.pt")
    assert one.tolist() == [1.5] * 4
    assert two.tolist() == [2.5] * 4
    assert one.untyped_storage().nbytes() == 16


class Unpicklable:
    """A value whose pickling fails in the middle of a save."""

    def __reduce__(self) -> str:
        message = "no room"
        raise RuntimeError(message)


def test_a_failing_save_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path / "a.pt", {"epoch": 1})
    with pytest.raises(RuntimeError, match="no room"):
        save(tmp_path / "a.pt", {"weight": torch.zeros(1000), "bad": Unpicklable()})
    assert load(tmp_path / "a.pt") == {"epoch": 1}
    assert list(tmp_path.iterdir()) == [tmp_path / "a.pt"]


def test_a_failing_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch) -> None:
    save(tmp_path / "a.pt", {"epoch": 1})

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for broken in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, broken, full)
            with pytest.raises(OSError, match="No space left"):
                save(tmp_path / "a.pt", {"epoch": 2})
        assert load(tmp_path / "a.pt") == {"epoch": 1}
        assert list(tmp_path.iterdir()) == [tmp_path / "a.pt"]


@pytest.mark.parametrize("has_unnamed_files", [True, False])
def test_a_process_killed_while_it_saves_leaves_the_old_file(tmp_path: Path, has_unnamed_files: bool) -> None:
    save(tmp_path / "a.pt", {"epoch": 1})
    script = """
        import os, signal, sys, torch
        from evenly import checkpoint
        if sys.argv[2] == "False":
            os.O_TMPFILE = os.O_WRONLY  # fails on a directory, as on a file system that lacks it
        # Everything is written, and the old file is still in its place.
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
        checkpoint.save(sys.argv[1], {"weight": torch.zeros(10**6)})
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "a.pt"), str(has_unnamed_files)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert load(tmp_path / "a.pt") == {"epoch": 1}
    # Only a file with a name can stay behind.
    left = [path for path in tmp_path.iterdir() if path.name != "a.pt"]
    assert not (left and has_unnamed_files)
    save(tmp_path / "a.pt", {"epoch": 2})
    assert load(tmp_path / "a.pt") == {"epoch": 2}


@pytest.mark.parametrize("has_unnamed_files", [True, False])
def test_permissions_are_those_of_any_file(tmp_path: Path, monkeypatch, has_unnamed_files: bool) -> None:
    if not has_unnamed_files:
        monkeypatch.setattr(os, "O_TMPFILE", os.O_WRONLY)
    path = tmp_path / "a.pt"
    old = os.umask(0o027)
    try:
        save(path, 1)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    save(path, 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    assert load(path) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_symbolic_link_stays_and_its_file_is_replaced(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "latest.pt").symlink_to("runs/7.pt")
    save(tmp_path / "latest.pt", 1)
    save(tmp_path / "latest.pt", 2)
    assert (tmp_path / "latest.pt").is_symlink()
    assert load(tmp_path / "runs/7.pt") == 2
    monkeypatch.chdir(tmp_path / "runs")
    save("here.pt", 3)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["7.pt", "here.pt"]


def test_only_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="only a regular file"):
        save(tmp_path / "pipe", 1)
    with pytest.raises(IsADirectoryError):
        save(tmp_path, 1)
    with pytest.raises(FileNotFoundError):
        save(tmp_path / "missing" / "a.pt", 1)


tagged = nn.Parameter(torch.zeros(2))
tagged.path = Path("x")

UNREADABLE = {
    "numpy scalar": (
        {"best": [1, np.float64(0.5)]},
        r"state\['best'\]\[1\] is of type numpy\.float64.*value\.item",
    ),
    "arguments": (
        {"args": argparse.Namespace(lr=1)},
        r"state\['args'\] is of type argparse\.Namespace.*vars\(value\)",
    ),
    "path": ({"at": ({"dir": Path("/")},)}, r"state\['at'\]\[0\]\['dir'\] is of type pathlib.*str\(value\)"),
    "lambda": ({"a": {"schedule": lambda x: x}}, r"state\['a'\]\['schedule'\] is of type function"),
    "mapping": (
        {"log": defaultdict(list)},
        r"state\['log'\] is of type collections\.defaultdict.*dict\(value\)",
    ),
    "module": (
        {"model": nn.Linear(1, 1)},
        r"state\['model'\] is of type torch.*Linear.*value\.state_dict\(\)",
    ),
    "key": ({Path("x"): 1}, r"the key .*Path\('x'\)\) is of type pathlib"),
    "attribute of a parameter": ({"w": tagged}, r"state\['w'\]\.path is of type pathlib"),
    "empty bytes": ({"raw": b""}, r"state\['raw'\] is of type bytes"),
    "huge number": ({"n": 2**5000}, r"state\['n'\] is of type int"),
}


@pytest.mark.parametrize(("state", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_could_not_be_read_back_is_refused_by_its_place(tmp_path: Path, state, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        save(tmp_path / "a.pt", {"weights": torch.zeros(3), **state})
    assert list(tmp_path.iterdir()) == []


def test_a_type_that_the_user_allows_is_saved(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([argparse.Namespace]):
        save(tmp_path / "a.pt", {"args": argparse.Namespace(lr=1)})
        assert load(tmp_path / "a.pt")["args"].lr == 1


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checkpoint here.*b\.pt"):
        load(tmp_path / "b.pt")


@pytest.mark.parametrize("content", [b"", b"hello", b"cmodel\nname\n", b"\x80garbage", pickle.dumps([1, 2.5])])
def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.pt is not a checkpoint"):
        load(tmp_path / "a.pt")


def test_half_a_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    save(tmp_path / "a.pt", torch.zeros(1000))
    content = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"a\.pt is not a checkpoint of torch\.save, or only a part"):
        load(tmp_path / "a.pt")


def test_a_checkpoint_that_would_run_code_names_the_type_and_the_remedy(tmp_path: Path) -> None:
    torch.save({"args": argparse.Namespace(lr=1)}, tmp_path / "a.pt")
    with pytest.raises(pickle.UnpicklingError, match=r"argparse\.Namespace.*safe_globals\(\[argparse\.Namespace\]\)"):
        load(tmp_path / "a.pt")


def test_checkpoints_of_the_old_format_load(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(load(tmp_path / "a.pt")["w"], torch.ones(2))
