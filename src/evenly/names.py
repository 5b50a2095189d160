"""Key names of state dicts: which parts of them come from wrappers, and how they look without.

``torch.nn.DataParallel``, ``DistributedDataParallel`` and ``AveragedModel`` put ``module.`` in front of the
keys of what they wrap, ``torch.compile`` puts ``_orig_mod.``. Both may stand anywhere in a key, because a
wrapper may sit anywhere in a model. A module may also have a submodule of its own that is called
``module``.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

WRAPPERS = frozenset({"module", "_orig_mod"})


def clean_names(keys: Collection[str]) -> Callable[[str], str]:
    """Finds the names that keys have without wrappers, with nothing but the keys themselves to go by.

    ``_orig_mod`` always goes. ``module`` goes where nothing lies beside it: a wrapper has one child only. So
    ``{"module.weight", "head.weight"}`` stays as it is, and a module of the user's whose *only* content is a
    submodule called ``module`` cannot be told from a wrapper.

    Args:
        keys: All the keys of one state dict.

    Returns:
        What takes a key, or the path of a module, to its clean name.
    """
    leaves = frozenset(keys)
    siblings: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    for key in keys:
        parts = tuple(key.split("."))
        for depth, part in enumerate(parts):
            siblings[parts[:depth]].add(part)

    def clean(name: str) -> str:
        parts = tuple(name.split("."))
        return ".".join(
            part
            for depth, part in enumerate(parts)
            if part not in WRAPPERS
            or (name in leaves and depth == len(parts) - 1)
            or (part == "module" and not siblings.get(parts[:depth], set()) <= {"module"})
        )

    return clean


def matching_names(keys: Collection[str], expected: Collection[str]) -> Callable[[str], str]:
    """Finds the names that keys have in the module that they are meant for.

    Two keys *mean the same* if they are equal without all their wrappers' parts. Decided in this order:

    1. Parts of wrappers that lead every key go if more of the keys are expected without them.
    2. A key that is expected as it is stays.
    3. Otherwise it becomes the expected key that means the same; if there are several, the one that differs
       least in length, then the first in alphabetical order. Wrappers' parts that the target has and the
       key lacks are added by this, too: a clean checkpoint fits a compiled module.
    4. Of a key that means nothing expected, the wrappers' parts go where the target has no such submodule.

    Args:
        keys: All the keys of one state dict.
        expected: The keys of the target's own state dict.

    Returns:
        What takes a key, or the path of a module, to its name in the target.
    """
    lead = _lead(keys, expected)
    leaves = frozenset(keys)
    wanted = _Names(expected, leaf=True)
    places = _Names({path for key in expected for path in _ancestors(key)} | {""}, leaf=False)

    def match(name: str) -> str:
        is_leaf = name in leaves
        found = (wanted if is_leaf else places).meant_by(_without_lead(name, lead))
        if found is not None:
            return found
        kept: list[str] = []
        parts = _without_lead(name, lead).split(".")
        for depth, part in enumerate(parts):
            last_of_key = is_leaf and depth == len(parts) - 1
            if part not in WRAPPERS or last_of_key or ".".join([*kept, part]) in places.names:
                kept.append(part)
        return ".".join(kept)

    return match


class _Names:
    """Names of a target that are found by what they mean."""

    def __init__(self, names: Iterable[str], *, leaf: bool) -> None:
        self.names = frozenset(names)
        self._leaf = leaf
        self._by_meaning: defaultdict[str, list[str]] = defaultdict(list)
        for name in sorted(self.names):
            self._by_meaning[self._meaning(name)].append(name)

    def meant_by(self, name: str) -> str | None:
        if name in self.names:
            return name
        same = self._by_meaning.get(self._meaning(name), [])
        length = name.count(".")
        # `min` keeps the first of equals, and the lists are sorted.
        return min(same, key=lambda other: abs(other.count(".") - length), default=None)

    def _meaning(self, name: str) -> str:
        parts = name.split(".")
        # A parameter may be called "module": the last part of a key is never a wrapper's.
        path, leaf = (parts[:-1], parts[-1:]) if self._leaf else (parts, [])
        return ".".join([*(part for part in path if part not in WRAPPERS), *leaf])


def _lead(keys: Collection[str], expected: Collection[str]) -> int:
    """Says how many parts in front of every key were put there by wrappers around the whole model."""
    most = min((_wrappers_in_front(key) for key in keys), default=0)
    wanted = frozenset(expected)
    hits = [sum(_without_lead(key, lead) in wanted for key in keys) for lead in range(most + 1)]
    return hits.index(max(hits))


def _wrappers_in_front(key: str) -> int:
    path = key.split(".")[:-1]
    return next((depth for depth, part in enumerate(path) if part not in WRAPPERS), len(path))


def _without_lead(name: str, lead: int) -> str:
    # The path of a module may be that of a wrapper itself, and be shorter than the lead.
    return ".".join(name.split(".")[lead:])


def _ancestors(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]
