"""Nested user values as trees: taken apart into leaves, put together again with every container's type kept.

A batch, or the output of a model, is whatever its author likes: a tensor, a dict of lists, a dataclass, a
`BatchEncoding`. The rest of the package works on flat lists of leaves, and leaves the shape of things to this
module.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch

from evenly.containers import ATOMS, DICT, OBJECT, TUPLE, Kind, kind_of, opens_as_object


class Tree:
    """The structure of a nested value without its leaves.

    Two trees are equal, and hash alike, when containers, keys and the places of the leaves are; leaves
    themselves do not count. Container types are compared by their qualified names, because a class that
    travelled to another process by value is another object there.

    A tree may refer to the containers it was made from (their attributes have to be in the rebuilt ones). To
    remember a structure for long, keep `tree.without_values()`, or `tree.signature`, which is only names.

    Attributes:
        kind: How the container is handled; None for a leaf.
        type: The container's type; None for a leaf.
        keys: One key per child: index, dict key or attribute name.
        children: One tree per child.
        count: Number of leaves.
    """

    __slots__ = ("_signature", "children", "count", "extra", "is_call", "keys", "kind", "template", "type")

    def __init__(
        self,
        kind: Kind | None = None,
        cls: type | None = None,
        keys: Sequence[Any] = (),
        children: tuple[Tree, ...] = (),
        extra: Any = None,
        template: Any = None,
    ) -> None:
        self.kind = kind
        self.type = cls
        self.keys = keys
        self.children = children
        self.count: int = sum([child.count for child in children]) if kind else 1
        self.extra = extra
        self.template = template
        # ((leaf, ...), {}), the arguments of nearly every call of a module, is rebuilt on a faster path.
        self.is_call = False
        self._signature: tuple[Any, ...] | None = None

    @property
    def is_leaf(self) -> bool:
        """Whether this tree is a single leaf."""
        return self.kind is None

    @property
    def signature(self) -> tuple[Any, ...]:
        """The structure as nested tuples of names and keys: hashable, small enough to send and to keep."""
        if self._signature is None:
            if self.kind is None or self.type is None:
                self._signature = ()
            else:
                self._signature = (
                    _name_of(self.type),
                    tuple(self.keys),
                    _comparable(self.extra),
                    *[child.signature for child in self.children],
                )
        return self._signature

    def __eq__(self, other: object) -> bool:
        """Whether the other tree has the same structure."""
        return isinstance(other, Tree) and (self is other or self.signature == other.signature)

    def __hash__(self) -> int:
        """A hash of the signature."""
        return hash(self.signature)

    def __repr__(self) -> str:
        """The tree as the value would be written, with `*` for the leaves."""
        if self.kind is None or self.type is None:
            return "*"
        pairs = (f"{key!r}: {child!r}" for key, child in zip(self.keys, self.children, strict=True))
        return f"{self.type.__name__}({', '.join(pairs)})"

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The nested value of this structure with the given leaves.

        Args:
            leaves: As many as `count`, in the order of `flatten`.

        Returns:
            New containers, of the types that were flattened.

        Raises:
            ValueError: If the number of leaves is wrong.
        """
        if len(leaves) != self.count:
            raise ValueError(f"this structure has {self.count} leaves, got {len(leaves)}: {self!r}")
        if self.is_call:
            return tuple(leaves), {}
        return self._build(iter(leaves))

    def _build(self, leaves: Iterator[Any]) -> Any:
        kind = self.kind
        if kind is None:
            return next(leaves)
        children = [next(leaves) if child.kind is None else child._build(leaves) for child in self.children]
        return kind.pack(self, children)

    def paths(self, root: str | Sequence[str]) -> list[str]:
        """The path of each leaf as a user would write it, such as `output[1]["loss"]` or `output.logits`.

        Args:
            root: The name of the whole value, or one name per child (`("args", "kwargs")`).
        """
        if isinstance(root, str):
            if self.kind is None:
                return [root]
            root = [root + self.step(key) for key in self.keys]
        return [path for name, child in zip(root, self.children, strict=True) for path in child.paths(name)]

    def step(self, key: Any) -> str:
        """How a user goes from this container to the child at `key`: `[0]`, `["img"]` or `.loss`."""
        return f".{key}" if self.kind is not None and self.kind.by_attribute else _subscript(key)

    def flatten_up_to(self, value: Any, root: str = "value") -> list[Any]:
        """The parts of `value` that stand where this tree has its leaves; they may be containers themselves.

        Args:
            value: A nested value that has at least this structure.
            root: The name of the value in error messages.

        Raises:
            ValueError: If the value has another structure; the message names the path and both structures.
        """
        return self.fit(value, root)[0]

    def fit(self, value: Any, root: str = "value") -> tuple[list[Any], Tree]:
        """The leaves as by `flatten_up_to`, and this tree around the containers of `value`.

        Rebuilding with that tree keeps the attributes that containers of this very value have beside their
        items.
        """
        if self.kind is None:
            return [value], self
        node = unpack(value, objects=self.kind.name == OBJECT.name)
        if node is None or not same_node(self, node.tree):
            found = describe(node.tree) if node else _short(value)
            raise ValueError(f"{root} is {found}, expected {describe(self)}")
        leaves: list[Any] = []
        trees: list[Tree] = []
        for key, child, part in zip(self.keys, self.children, node.children, strict=True):
            if child.kind is None:
                leaves.append(part)
                trees.append(child)
            else:
                more, tree = child.fit(part, root + self.step(key))
                leaves += more
                trees.append(tree)
        return leaves, node.close(trees)

    def without_values(self) -> Tree:
        """This tree, keeping none of the containers it was made from alive: fit to compare and to `fit`."""
        if self.kind is None:
            return self
        children = tuple([child.without_values() for child in self.children])
        return Tree(self.kind, self.type, self.keys, children, self.extra)


class Node(NamedTuple):
    """One container, opened: its children, and a tree of one level over them."""

    tree: Tree
    children: Sequence[Any]

    def close(self, trees: Sequence[Tree]) -> Tree:
        """The same container over children that have structures of their own."""
        tree = self.tree
        return Tree(tree.kind, tree.type, tree.keys, tuple(trees), tree.extra, tree.template)

    def paths(self, root: str) -> list[str]:
        """The path of each child."""
        return [root + self.tree.step(key) for key in self.tree.keys]


def flatten(
    value: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    root: str | Sequence[str] = "value",
    *,
    objects: bool = False,
) -> tuple[list[Any], Tree]:
    """Takes a nested value apart.

    Leaves are tensors of any subclass, `PackedSequence`, modules, None, strings, numbers, and every object
    that is not a known container: list, tuple, deque, any mapping, namedtuple, dataclass instance, a node
    registered with `torch.utils._pytree`.

    Args:
        value: Anything.
        is_leaf: Says of a container that it should not be opened.
        root: The name of the value, or one name per child, for error messages.
        objects: As for `unpack`.

    Returns:
        The leaves and the tree; `tree.rebuild(leaves)` is the value again.

    Raises:
        ValueError: If a container contains itself.
    """
    if type(value) is tuple:
        args, *rest = cast("tuple[Any, ...]", value) or (None,)
        if type(args) is tuple and len(rest) == 1 and type(rest[0]) is dict and not rest[0]:
            for arg in cast("tuple[Any, ...]", args):
                if not isinstance(arg, torch.Tensor):
                    break
            else:
                return list(cast("tuple[Any, ...]", args)), _call_tree(len(cast("tuple[Any, ...]", args)))
    leaves: list[Any] = []
    try:
        tree = _flatten(value, leaves, is_leaf, objects, set())
    except _ContainsItselfError as error:
        start, steps = (root, error.steps) if isinstance(root, str) else (root[error.place], error.steps[1:])
        path = start + "".join(steps)
        raise ValueError(f"{path} contains itself: a value must be a tree to be split or joined") from None
    return leaves, tree


def unpack(value: Any, *, objects: bool = False) -> Node | None:
    """One container opened by one level, or None when the value is a leaf.

    Args:
        value: Anything.
        objects: Whether instances of plain classes that hold tensors are containers of their attributes.
    """
    kind = kind_of(value)
    if kind is None and objects and opens_as_object(value):
        kind = OBJECT
    if kind is None:
        return None
    keys, children, extra = kind.unpack(value)
    return Node(Tree(kind, cast("Any", type(value)), keys, (LEAF,) * len(children), extra, value), children)


def is_record(value: Any) -> bool:
    """Whether a value is a container whose children have names: a mapping, namedtuple, dataclass."""
    kind = kind_of(value)
    return kind is not None and (kind.by_attribute or kind.name == "mapping")


def describe(tree: Tree) -> str:
    """One container in words: its type, and its keys or its length."""
    if tree.kind is None or tree.type is None:
        return "a leaf"
    if tree.kind.by_attribute or tree.kind.name == "mapping":
        return f"a {tree.type.__name__} with {list(tree.keys)!r}"
    return f"a {tree.type.__name__} of {len(tree.keys)}"


class _ContainsItselfError(Exception):
    """Raised at a container that is its own ancestor; the path grows while the walk unwinds."""

    def __init__(self) -> None:
        super().__init__()
        self.place = 0
        self.steps: list[str] = []


def _flatten(
    value: Any, leaves: list[Any], is_leaf: Callable[[Any], bool] | None, objects: bool, above: set[int]
) -> Tree:
    stop = type(value) in ATOMS or (is_leaf is not None and is_leaf(value))
    kind = None if stop else kind_of(value)
    if kind is None and objects and not stop and opens_as_object(value):
        kind = OBJECT
    if kind is None:
        leaves.append(value)
        return LEAF
    if id(value) in above:
        raise _ContainsItselfError
    above.add(id(value))
    keys, children, extra = kind.unpack(value)
    trees: list[Tree] = []
    for child in children:
        try:
            trees.append(_flatten(child, leaves, is_leaf, objects, above))
        except _ContainsItselfError as error:
            key = keys[len(trees)]
            error.place = len(trees)
            error.steps.insert(0, f".{key}" if kind.by_attribute else _subscript(key))
            raise
    above.discard(id(value))
    return Tree(kind, cast("Any", type(value)), keys, tuple(trees), extra, value)


def _name_of(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _comparable(extra: Any) -> Hashable:
    if callable(extra) and hasattr(extra, "__qualname__"):
        return _name_of(extra)
    try:
        hash(extra)
    except TypeError:
        return repr(extra)
    return extra


def same_node(expected: Tree, found: Tree) -> bool:
    """Whether two containers agree, whatever is in them: type, keys and the like."""
    return (
        (expected.type is found.type or _name_of(expected.type) == _name_of(found.type))
        and tuple(expected.keys) == tuple(found.keys)
        and _comparable(expected.extra) == _comparable(found.extra)
    )


def _subscript(key: Any) -> str:
    return f'["{key}"]' if isinstance(key, str) else f"[{key!r}]"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"  # noqa: PLR2004


LEAF = Tree()


@lru_cache(maxsize=256)
def _call_tree(count: int) -> Tree:
    args = Tree(TUPLE, tuple, range(count), (LEAF,) * count)
    tree = Tree(TUPLE, tuple, range(2), (args, Tree(DICT, dict, (), ())))
    tree.is_call = True
    return tree
