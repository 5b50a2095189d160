"""The tensor that users see."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, cast

import torch
from torch import Tensor

from evenly.sharded.content import Again, Family, Parts, Pending, Shards, Window
from evenly.sharded.geometry import set_geometry, whole_geometry, writable
from evenly.team.values import Handle

if TYPE_CHECKING:
    from evenly.team.team import Team

_Tensor = cast("Any", torch.Tensor)  # what torch says of its types is not all that there is
_C = cast("Any", torch._C)
_throw_on_mutable_data_ptr = _C._set_throw_on_mutable_data_ptr

Content: TypeAlias = "Shards | Parts | Pending | Window | Tensor"
"""Shards; parts, or a number that is computed from them; a piece across the shards; or, once something needed the
whole in one place, a plain tensor."""


class ShardedTensor(torch.Tensor):
    """A tensor whose rows lie on several devices. It is used as the tensor of the whole batch that it stands for.

    Args:
        content: What it is made of.
        shape, stride, offset: The geometry of the whole tensor, in elements.
    """

    _content: Content
    # Everything that shares memory with this tensor, this one included; None as long as nothing else does.
    _family: Family | None
    # The tensor that this one is a view of, and how; an alias holds on to its tensor weakly, see [Note: aliases].
    _recipe: tuple[ShardedTensor | weakref.ref[ShardedTensor], Again] | None
    # What a plan may depend on.
    looks: tuple[Any, ...] | None

    __torch_function__ = _C._disabled_torch_function_impl

    @staticmethod
    def __new__(  # noqa: D102, PYI034 - a class method in all but name; see the class
        cls: type[ShardedTensor],
        content: Shards | Parts | Pending | Window,
        shape: Sequence[int],
        stride: Sequence[int],
        offset: int = 0,
    ) -> ShardedTensor:
        sample = content.values if isinstance(content, Window) else content.local
        dtype = sample.dtype
        self: ShardedTensor = _Tensor._make_wrapper_subclass(
            cls, shape, strides=stride, storage_offset=offset, dtype=dtype, device=sample.device
        )
        # Code in C++ that does not know of us would read memory that is not there: it gets an error instead.
        _throw_on_mutable_data_ptr(self)
        self._content = content
        self._family = None
        self._recipe = None
        if isinstance(content, Shards):
            self.looks = (*shape, *stride, offset, dtype, content.dim, content.rows)
        return self

    @classmethod
    def of_rows(cls, team: Team, local: Tensor, handle: Handle, dim: int, rows: tuple[int, ...]) -> ShardedTensor:
        """The tensor whose rows along ``dim`` are ``local`` here and ``handle`` in the other replicas."""
        shape, stride = whole_geometry(local, dim, rows)
        return cls(Shards(team, local, handle, dim, rows), shape, stride)

    @classmethod
    def of_parts(cls, parts: Parts) -> ShardedTensor:
        """The tensor whose value is made up of one part per replica, added when somebody looks."""
        return cls(parts, parts.local.shape, parts.local.stride())

    # ------------------------------------------------------------------ what it is made of

    @property
    def content(self) -> Content:
        """What it is made of, now."""
        return self._content

    @property
    def is_plain(self) -> bool:
        """Whether the whole tensor is here."""
        return isinstance(self._content, Tensor)

    @property
    def shards(self) -> Shards | None:
        """Where the rows are; None for a tensor that is not sharded (any more)."""
        content = self._content
        return content if type(content) is Shards else None

    @property
    def parts(self) -> Parts | Pending | None:
        """The parts of a value that has not been added up yet, or what is to be computed from them."""
        content = self._content
        return content if isinstance(content, (Parts, Pending)) else None

    def plain(self) -> Tensor:
        """The value as a plain tensor here, outside of autograd. Rows stay where they are; a sum is added up once."""
        content = self._content
        if isinstance(content, (Parts, Pending)):
            # Other numbers may be waiting for the value as it is now, and this one may be written to.
            value = content.value().clone()
            if self._family is not None:
                return value  # what shares memory has to become plain together
            self._content = content = value
        elif isinstance(content, Window):
            content = self._refreshed(content)
        elif isinstance(content, Shards):
            return content.gather(self.shape, writable(self.shape, self.stride()))
        return content

    def _refreshed(self, window: Window) -> Tensor:
        """A piece's values, fetched again if somebody has written to the tensor since."""
        assert self._recipe is not None  # noqa: S101 - a window is a view
        assert self._family is not None  # noqa: S101
        base, again = self._recipe
        assert isinstance(base, ShardedTensor)  # noqa: S101 - it is held on to
        if window.writes != self._family.writes:
            window.values, window.writes = again(base.plain()).clone(), self._family.writes
        return window.values

    def settle(self, *, overwrite: bool = False) -> Tensor:
        """Bring the whole tensor here for good, and with it all tensors that share its memory.

        Args:
            overwrite: All of it is about to be written: what it holds does not matter.
        """
        if overwrite and self._family is None and not self.is_plain:
            self._content = torch.empty_strided(
                self.shape, writable(self.shape, self.stride()), dtype=self.dtype, device=self.device
            )
        first_alias: dict[int, ShardedTensor] = {}
        for member in [self] if self._family is None else self._family.living():
            if not isinstance(member._content, Tensor):
                # A view's base stands before it, and so has been settled already.
                base, again = member._made_from(first_alias)
                member._content = member.plain() if base is member else again(plain(base))
        return cast("Tensor", self._content)

    def _made_from(self, first_alias: dict[int, ShardedTensor]) -> tuple[ShardedTensor, Again]:
        """What this is made from; itself, if it is no view. When a tensor is gone its first alias takes its place."""
        base, again = self._recipe or (self, _itself)
        if isinstance(base, ShardedTensor):
            return base, again
        living = base()
        return first_alias.setdefault(id(base), self) if living is None else living, again

    def full_tensor(self) -> Tensor:
        """The whole tensor as a plain one on this device. Gradients flow through it."""
        return cast("Any", _FullTensor).apply(self) if self.requires_grad else self.plain().clone()

    # ------------------------------------------------------------------ sharing memory

    def become_view(self, base: ShardedTensor, again: Again, *, copied: bool = False) -> ShardedTensor:
        """Note that this tensor shares memory (or, ``copied``, should) with ``base``, from which ``again`` makes it."""
        family = base._family
        if family is None:
            family = base._family = Family(base)
        family.add(self)
        family.copies |= copied
        self._family = family
        self._recipe = (base, again)
        return self

    def alias(self) -> Tensor:
        """Another tensor with the same content; costs nothing in the replicas.

        [Note: aliases] Autograd keeps an alias of the result of many operations (`exp`, `softmax`) in the very node
        that the result refers to. If that alias referred to the result in turn they would keep each other alive, out
        of the garbage collector's sight, unless the node is run backwards.
        """
        content = self._content
        if torch._C._current_graph_task_id() != -1 and (isinstance(content, (Parts, Pending)) or becomes_gradient()):
            content = self.plain()
        if isinstance(content, Tensor):
            return content.detach()
        other = ShardedTensor(content, self.shape, self.stride(), int(self.storage_offset()))
        other.become_view(self, _itself)
        if not isinstance(content, Window):
            other._recipe = (weakref.ref(self), _itself)
        return other

    @property
    def writes(self) -> int:
        """How often the memory that this tensor shares has been written to."""
        return 0 if self._family is None else self._family.writes

    @property
    def must_be_whole(self) -> bool:
        """Whether a write to this tensor would be missed by one that should see it, unless all are gathered.

        Raises:
            RuntimeError: It would be missed in any case.
        """
        self.check_writable()
        return self._family is not None and self._family.copies

    def share(self, other: str) -> None:
        """Note that ``other`` shares memory with this tensor, and would miss what is written to it."""
        if self._family is None:
            self._family = Family(self)
        self._family.other = other

    def check_writable(self) -> None:
        """Whether all that share memory with this tensor see what is written to it.

        Raises:
            RuntimeError: They do not.
        """
        if self._family is not None and self._family.other is not None:
            message = (
                f"an output of the model cannot be changed in place, because it shares its memory with "
                f"{self._family.other}, which would not change with it: change a copy of it (.clone())"
            )
            raise RuntimeError(message)

    def written(self) -> None:
        """Note that the rows have been written to, where they are."""
        if self._family is not None:
            self._family.writes += 1

    def replace(self, content: Parts | Pending) -> ShardedTensor | None:
        """Take another value, in place; None where others share this tensor's memory."""
        if self._family is not None and len(self._family.living()) > 1:
            return None
        self._content = content
        return self

    def follow(self, settled: Tensor) -> None:
        """Take over the shape of the plain tensor that this one stands for, after an operation has changed that."""
        if (self.shape, self.stride(), self.storage_offset()) == (
            settled.shape, settled.stride(), settled.storage_offset(),
        ):  # fmt: skip
            return
        set_geometry(self, settled)

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As for a plain tensor."""
        return cast("Tensor", _Tensor.data.__get__(self))

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.dtype != self.dtype or value.device != self.device:
            message = (
                f"data of a sharded {self.dtype} tensor on {self.device} cannot become {value.dtype} on "
                f"{value.device}: call .full_tensor() first"
            )
            raise RuntimeError(message)
        self.settle()  # others keep the memory that they share
        self._family = self._recipe = None
        self._content = value.settle() if isinstance(value, ShardedTensor) else value.detach()
        self.follow(self._content)

    # ------------------------------------------------------------------ operations

    @classmethod
    def __torch_dispatch__(
        cls,
        func: torch._ops.OpOverload[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for kind in types:
            if kind is not ShardedTensor:
                return NotImplemented
        return _dispatch(func, args, kwargs or {})

    # ------------------------------------------------------------------ what PyTorch does without dispatching

    def __repr__(self, *, tensor_contents: object = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        del tensor_contents
        text = repr(plain(self.detach()))
        if self.grad_fn is not None:
            return f"{text[:-1]}, grad_fn=<{self.grad_fn.name()}>)"
        return f"{text[:-1]}, requires_grad=True)" if self.requires_grad else text

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return format(self.item(), spec)
        return format(str(self), spec)

    def tolist(self) -> Any:
        """As for a plain tensor."""
        return cast("Any", plain(self.detach())).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """As for a plain tensor. The array shares memory with this tensor, which is gathered for good."""
        if not force and self.requires_grad:
            return cast("Any", torch.empty(0, requires_grad=True)).numpy()  # raises what a plain tensor raises
        return cast("Any", self.settle()).numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array: Any = self.numpy()
        return array.astype(dtype or array.dtype, copy=bool(copy))

    def __dlpack__(self, **options: Any) -> Any:
        shared: Any = self.settle().detach().requires_grad_(self.requires_grad and self.is_leaf)
        return shared.__dlpack__(**options)

    def data_ptr(self) -> int:
        """Address of the whole tensor, which is gathered for good."""
        return self.settle().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Memory of the whole tensor, which is gathered for good."""
        return cast("Any", self.settle()).untyped_storage()

    def storage(self) -> torch.TypedStorage:
        """Memory of the whole tensor, which is gathered for good."""
        return cast("Any", self.settle()).storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            message = (
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment; use .detach() first, as with a plain tensor"
            )
            raise RuntimeError(message)
        copy = self.plain().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        copy = plain(self.detach()).clone().requires_grad_(self.requires_grad)
        return cast("Any", copy).__reduce_ex__(protocol)

    # ------------------------------------------------------------------ as an argument of a wrapped model

    evenly_shards = True
    """Tells :mod:`evenly.batch` that this tensor cannot be narrowed, and to ask :meth:`evenly_cut`."""

    def evenly_cut(self, replica: int, rows: tuple[int, ...], dim: int) -> Tensor:
        """The rows of one replica as a plain tensor here (for the driver's own rows, without a copy)."""
        shards = self.shards
        if shards is not None and replica == 0 and shards.rows == rows and shards.dim == dim:
            return shards.local
        return torch.split(plain(self.detach()), list(rows), dim)[replica]


# A compiler that looks into the calls of a compiled function should not look into ours.
_FRAMES = _C._dynamo.eval_frame
_FRAMES.set_code_exec_strategy(
    cast("Any", ShardedTensor.__torch_dispatch__).__func__.__code__,
    _FRAMES._FrameExecStrategy(_FRAMES._FrameAction.SKIP, _FRAMES._FrameAction.SKIP),
)


class _FullTensor(torch.autograd.Function):
    """Gathering as an operation that gradients flow through."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> Tensor:  # noqa: ARG004
        return tensor.plain().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004 # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


def _first_dispatch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rules know this module, and so are imported by the first operation; to import costs, each time."""
    global _dispatch  # noqa: PLW0603 - found once
    from evenly.sharded.dispatch import dispatch

    _dispatch = dispatch
    return dispatch(function, args, kwargs)


_dispatch = _first_dispatch


def plain(tensor: Tensor) -> Tensor:
    """A plain tensor with the value of ``tensor``, outside of autograd."""
    return tensor.plain() if isinstance(tensor, ShardedTensor) else tensor


def becomes_gradient() -> bool:
    """Whether autograd is about to make a tensor the gradient of a plain leaf, which is to be plain, too."""
    node: Any = _C._current_autograd_node()
    variable = getattr(node, "variable", None)
    return isinstance(variable, Tensor) and not isinstance(variable, ShardedTensor)


def _itself(tensor: Tensor) -> Tensor:
    return tensor
