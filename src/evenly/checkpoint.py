"""Checkpoints: clean state dicts, both ways, and files that are whole or not there."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import re
import secrets
import stat
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch

from evenly.names import clean_names, matching_names
from evenly.storages import compact_pickling

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator

    from torch.serialization import MAP_LOCATION

ZIP_MAGIC = b"PK\x03\x04"
# Files of torch.save from before it wrote zip archives have this pickled number near their start.
OLD_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"


def clean_keys(state_dict: Mapping[str, Any], *, expected: Collection[str] | None = None) -> OrderedDict[str, Any]:
    """Takes the parts that wrappers put into keys (``module.``, ``_orig_mod.``) out of a state dict.

    They go from any place and any nesting: ``module._orig_mod.encoder.module.weight`` becomes
    ``encoder.weight``. A submodule of the user's that happens to be called ``module`` stays:

    - With ``expected``, a key that is expected as it is stays; otherwise it becomes the expected key that
      differs from it by such parts only. What is in no way expected is cleaned where the target has no such
      submodule. Parts in front of *every* key go first, if more keys are expected without them.
    - Without, ``_orig_mod`` always goes, and ``module`` where nothing lies beside it, as a wrapper has one
      child only. Give ``expected`` where the model holds nothing but a submodule called ``module``.

    Args:
        state_dict: From ``state_dict()`` of a module, wrapped or not. It isn't changed.
        expected: The keys of the module that is going to be loaded: ``module.state_dict().keys()``.

    Returns:
        The same values in the same order under clean keys. The version numbers of modules (``_metadata``)
        come along.

    Raises:
        TypeError: If a key is not a string, or ``state_dict`` not a mapping.
        ValueError: If two keys become one.
    """
    rename = key_cleaner(state_dict, expected=expected)
    cleaned: OrderedDict[str, Any] = OrderedDict((rename(key), value) for key, value in state_dict.items())
    metadata: Mapping[str, dict[str, Any]] | None = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        versions: OrderedDict[str, dict[str, Any]] = OrderedDict()
        # A wrapper and what it wraps fall together. The one inside counts, and comes after the wrapper.
        for path in metadata:
            # Copies, because torch writes into them while it loads.
            versions[rename(path)] = dict(metadata[path])
        cast("Any", cleaned)._metadata = versions
    return cleaned


def key_cleaner(state_dict: Mapping[str, Any], *, expected: Collection[str] | None = None) -> Callable[[str], str]:
    """Finds how `clean_keys` renames keys and paths of modules.

    Args:
        state_dict: As for `clean_keys`; only the keys matter.
        expected: As for `clean_keys`.

    Returns:
        What takes a key, or the path of a module, to its clean name.

    Raises:
        TypeError: If a key is not a string, or ``state_dict`` not a mapping.
        ValueError: If two keys become one.
    """
    # The annotation is a promise that callers with a loaded file in hand cannot make.
    given: Any = state_dict
    if not isinstance(given, Mapping):
        message = f"a state dict is a mapping from names to tensors, and this is {_the(given)}"
        raise TypeError(message)
    keys = list(state_dict)
    for key in cast("list[object]", keys):
        if not isinstance(key, str):
            message = (
                f"the keys of a module's state dict are strings, and {key!r} is {_the(key)}. "
                "Give the part of the checkpoint that came from module.state_dict()."
            )
            raise TypeError(message)
    rename = clean_names(keys) if expected is None else matching_names(keys, expected)
    origin: dict[str, str] = {}
    for key in keys:
        first = origin.setdefault(rename(key), key)
        if first != key:
            message = (
                f"the keys {first!r} and {key!r} both become {rename(key)!r}, as both name the same "
                "value but for wrappers' prefixes. Remove one of them."
            )
            raise ValueError(message)
    return rename


def save(path: str | os.PathLike[str], state: object) -> None:
    """Writes a checkpoint that is either whole or not there.

    It is written beside the old one, put onto the disk, read back with ``weights_only=True``, and takes the
    old one's place in one step. Whatever fails or is killed before that leaves the old file as it was. A
    new file gets the permissions that any new file gets; a replaced one keeps its own; where ``path`` is a
    symbolic link, the file that it points to is replaced.

    Every tensor is written with its own bytes only, even if it is a small view of a large one. Tensors that
    share bytes (tied weights) share them in the file.

    Args:
        path: Where to. The directory must exist.
        state: Whatever ``torch.save`` takes and ``torch.load(..., weights_only=True)`` gives back: tensors,
            numbers, strings, None, in dicts, lists, tuples and sets; state dicts of modules and optimizers.

    Raises:
        TypeError: If some value couldn't be loaded again. The message says where it is and what to do.
        OSError: If the file can't be written.
    """
    target = Path(os.path.realpath(path))
    with _replacing(target) as file:
        try:
            torch.save(state, file, pickle_module=compact_pickling(state))
        except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError) as error:
            _name_culprit(state, error)
            raise
        file.flush()
        try:
            _read_back(file)
        except pickle.UnpicklingError as error:
            _name_culprit(state, error)
            raise


def load(path: str | os.PathLike[str], map_location: MAP_LOCATION = "cpu") -> Any:
    """Reads a checkpoint, and nothing that could run code.

    Args:
        path: A file from `save` or from ``torch.save``.
        map_location: Where tensors go, as in ``torch.load``. By default the CPU, whichever device they came
            from.

    Returns:
        What was saved.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it isn't a checkpoint, or not a whole one.
        pickle.UnpicklingError: If it holds objects of types that aren't plain data. The message names them.
    """
    try:
        with Path(path).open("rb") as file:
            start = file.read(32)
    except FileNotFoundError as error:
        missing = os.fspath(path)
        raise FileNotFoundError(errno.ENOENT, "there is no checkpoint here", missing) from error
    if not start.startswith(ZIP_MAGIC) and OLD_MAGIC not in start:
        found = f"it starts with {start!r}" if start else "it is empty"
        message = f"{os.fspath(path)} is not a checkpoint: {found}"
        raise ValueError(message)
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        types = _types_it_needs(error)
        if types is None:
            raise ValueError(_broken(path, error)) from error
        message = (
            f"{os.fspath(path)} holds {types}, which is not plain data: reading it runs code. If you trust "
            f"the file, use `with torch.serialization.safe_globals([{types}]):` around this "
            "call, or torch.load(path, weights_only=False)."
        )
        raise pickle.UnpicklingError(message) from error
    except EOFError as error:
        raise ValueError(_broken(path, error)) from error
    except RuntimeError as error:
        # Other errors, as of a device that isn't there, speak for themselves.
        if "PytorchStreamReader" not in str(error):
            raise
        raise ValueError(_broken(path, error)) from error


def _broken(path: str | os.PathLike[str], error: Exception) -> str:
    return f"{os.fspath(path)} is not a checkpoint of torch.save, or only a part of one ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    # torch puts advice that doesn't apply here in front of what happened.
    text = str(error).rpartition("WeightsUnpickler error:")[2]
    return text.strip().split("\n", 1)[0] or type(error).__name__


def _types_it_needs(error: Exception) -> str | None:
    found = re.search(r"GLOBAL (\S+) was not an allowed|load unsupported GLOBAL (\S+)", str(error))
    return None if found is None else found[1] or found[2]


@contextlib.contextmanager
def _replacing(target: Path) -> Generator[BinaryIO, None, None]:
    """Gives a file to write to, which takes the place of ``target`` if all goes well."""
    mode = _mode_to_keep(target)
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    temporary = f".evenly-{secrets.token_hex(8)}.tmp"
    try:
        handle, has_name = _create(directory, temporary)
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            if mode is not None:
                os.fchmod(handle, mode)
            os.fsync(handle)
            if not has_name:
                # With a directory's handle Python uses `linkat`, which follows the link in /proc.
                os.link(_name_of(handle), temporary, dst_dir_fd=directory)
            os.replace(temporary, target.name, src_dir_fd=directory, dst_dir_fd=directory)
        # Without this, a power cut may bring back the old name.
        os.fsync(directory)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
        raise
    finally:
        os.close(directory)


def _mode_to_keep(target: Path) -> int | None:
    try:
        status = target.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "a checkpoint is a file, and this is a directory", str(target))
    if not stat.S_ISREG(status.st_mode):
        # Replacing /dev/null by a file would be a surprise.
        raise OSError(errno.EINVAL, "only a regular file can be replaced by a checkpoint", str(target))
    return stat.S_IMODE(status.st_mode)


def _create(directory: int, temporary: str) -> tuple[int, bool]:
    """Opens a new file, without a name where that is possible: killed, the process leaves nothing behind."""
    flags = os.O_RDWR | os.O_CLOEXEC
    # The umask takes its part of these permissions.
    permissions = 0o666
    # Without support this is EOPNOTSUPP or EISDIR; any other trouble comes up again below.
    with contextlib.suppress(OSError):
        return os.open(".", os.O_TMPFILE | flags, permissions, dir_fd=directory), False
    return os.open(temporary, os.O_CREAT | os.O_EXCL | flags, permissions, dir_fd=directory), True


def _read_back(file: BinaryIO) -> None:
    try:
        # Mapped, this reads what is pickled, and leaves the bytes of tensors on the disk.
        torch.load(_name_of(file.fileno()), map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:
        # Not every file system maps files.
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)


def _name_of(handle: int) -> str:
    """Gives the one name that an open file without a name has."""
    return f"/proc/self/fd/{handle}"


def _name_culprit(state: object, error: Exception) -> None:
    """Raises an error that names the place of the first value in ``state`` that can't be saved and loaded."""
    found = _culprit(state, "state", set())
    if found is None:
        return
    path, value = found
    message = (
        f"{path} is {_the(value)}, which can't be read back from a checkpoint as plain data. Nothing was "
        "saved. Save tensors, numbers, strings and None, in dicts, lists, tuples and sets"
        f"{_remedy(value)}. The cause: {_cause(error)}"
    )
    raise TypeError(message) from error


def _culprit(value: object, path: str, seen: set[int]) -> tuple[str, object] | None:
    if id(value) in seen:
        return None
    seen.add(id(value))
    for name, part in _parts(value, path):
        found = _culprit(part, name, seen)
        if found is not None:
            return found
    return None if _comes_back(value) else (path, value)


def _parts(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, item in cast("dict[object, object]", value).items():
            yield f"{path} (the key {key!r})", key
            yield f"{path}[{key!r}]", item
    elif isinstance(value, list | tuple):
        for index, item in enumerate(cast("list[object]", value)):
            yield f"{path}[{index}]", item
    elif isinstance(value, set | frozenset):
        for item in cast("set[object]", value):
            yield f"{path} (the item {item!r})", item
    if isinstance(value, OrderedDict | torch.Tensor):
        for name, item in vars(value).items():
            yield f"{path}.{name}", item


def _comes_back(value: object) -> bool:
    plain_tensor = type(value) in {torch.Tensor, torch.nn.Parameter}
    if plain_tensor and isinstance(value, torch.Tensor) and value.layout is torch.strided:
        # Its attributes have been looked at, and its bytes would be copied for nothing.
        return True
    # A container whose parts are all right is tried by itself.
    probe: object = type(value)() if type(value) in {dict, list, tuple, set, OrderedDict} else value
    buffer = io.BytesIO()
    try:
        torch.save(probe, buffer)
        _ = buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:
        return False
    return True


def _the(value: object) -> str:
    return f"of type {type(value).__module__}.{type(value).__qualname__}".replace("type builtins.", "type ")


def _remedy(value: object) -> str:
    kind = type(value)
    if callable(getattr(value, "item", None)) and not isinstance(value, torch.Tensor):
        return " (here: value.item())"
    for plain in (dict, list, tuple, str, int, float):
        if isinstance(value, plain):
            return f" (here: {plain.__name__}(value))"
    if isinstance(value, os.PathLike):
        return " (here: str(value))"
    if callable(getattr(value, "state_dict", None)):
        return " (here: value.state_dict())"
    if kind.__name__ == "Namespace" or hasattr(value, "__dataclass_fields__"):
        return " (here: vars(value))"
    return ""


def _cause(error: Exception) -> str:
    types = _types_it_needs(error)
    return f"torch.load would have to import {types}" if types is not None else _first_line(error)
