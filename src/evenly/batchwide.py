"""Inside of ``forward``, where a replica sees only its shard: what has to be computed over the whole batch.

A mean over valid tokens, or over class weights, is not the mean of the shards' means, and batch normalisation
normalises with the statistics of all rows. So the replicas exchange a few numbers in the middle of forward:

- losses whose mean is not over rows (``F.cross_entropy`` and kin) divide by what all targets of the batch weigh; see
  :mod:`evenly.means`;
- ``F.batch_norm`` in training uses the whole batch's statistics, if the model was wrapped with ``sync_batchnorm``;
- :func:`whole_batch` is there for every other denominator.

[Note: scaled means] A 0-dim output that is a mean is joined as the mean of the replicas' values, weighted by rows. For
a loss normalised over the whole batch to come out right in that, alone or added to ordinary means, replica r returns
its numerator / whole denominator, times (rows of the batch / its own rows).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from evenly.divisors import DIVIDES, Divisors, note
from evenly.means import LOSSES
from evenly.team.exchange import ExchangeError

if TYPE_CHECKING:
    from evenly.team.exchange import Exchange


class Summer(Protocol):
    """Adds up a tensor over all replicas."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum; the same call is made in all replicas."""
        ...


class _Current(threading.local):
    """What the forward that runs in this thread is part of."""

    summer: Summer | None = None


_current = _Current()


Summand = TypeVar("Summand", Tensor, int, float)


def whole_batch(x: Summand) -> Summand:
    """The sum of ``x`` over all replicas, for use inside ``forward``; ``x`` itself in a bare module.

    Use it as the denominator of a mean that is not over rows::

        loss = (losses * mask).sum() / evenly.whole_batch(mask.sum())

    Args:
        x: A number, or a tensor of them, computed from this replica's rows; of the same shape and dtype in all
            replicas.

    Returns:
        A tensor or a number like ``x``. Gradients flow through it.

    Raises:
        TypeError: There is nothing to add up in ``x``.
        ExchangeError: Another replica did not get to this point.
    """
    summer = _current.summer
    if isinstance(x, Tensor) and x.dtype != torch.bool:
        return x if summer is None else cast("Tensor", cast("Any", _Sum).apply(x, summer))
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        what = "a tensor of booleans" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        message = f"evenly.whole_batch adds up numbers, got {what}: give it a count or a sum, like mask.sum()"
        raise TypeError(message)
    if summer is None:
        return x
    dtype = torch.int64 if isinstance(x, int) else torch.float64
    return type(x)(summer.sum(torch.tensor(x, dtype=dtype)).item())


class _Sum(torch.autograd.Function):
    """The sum over all replicas; its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, summer: Summer) -> Tensor:
        ctx.summer = summer
        return summer.sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return cast("Any", _Sum).apply(gradient, ctx.summer), None


@contextmanager
def _summing(summer: Summer | None) -> Generator[None]:
    """Let :func:`whole_batch` in this thread add up with ``summer``."""
    before, _current.summer = _current.summer, summer
    try:
        yield
    finally:
        _current.summer = before


Shard: TypeAlias = "tuple[int, float, bool]"
"""What a replica must know of its place in the batch: how many replicas take part, its share of the rows, and whether
batch normalisation is synchronised."""


class in_shard:  # noqa: N801 - used like a function
    """Around one replica's forward or backward, the ``number``-th, on its shard.

    A backward, too: sums over the batch sum up gradients there, and checkpointing runs parts of the forward again.
    """

    # A class, because it is entered twice a step: a generator costs several times as much.
    __slots__ = ("_before", "_exchange", "_mode", "_number", "_taking_part")

    def __init__(self, exchange: Exchange, number: int, shard: Shard) -> None:
        self._taking_part, share, sync_batchnorm = shard
        self._exchange = exchange
        self._number = number
        self._mode = WholeBatch(share, sync_batchnorm=sync_batchnorm)
        self._before = ThreadState()

    def __enter__(self) -> Divisors:
        """Returns what will have been divided by."""
        try:
            self._exchange.begin(self._number, self._taking_part)
            _current.summer = self._exchange
            self._mode.__enter__()
        except BaseException:  # Ctrl-C, too
            self.__exit__()
            raise
        return self._mode.divisors

    def __exit__(self, *failure: object) -> None:
        self._mode.over = True
        self._before.restore()
        self._exchange.end()


class ThreadState:
    """What a forward or backward changes around it, as it is now, to be so again afterwards.

    [Note: cut off] Ctrl-C can cut off Python code at the call of any function, that of a context manager's
    ``__exit__`` and those inside of torch that take a mode off its stack for a moment, too. So whoever starts a forward
    or backward puts all back by itself, in an ``except`` of its own, whatever has become of the managers inside. Even
    after that torch may put a mode back, when the frame is freed that took it off: one that is over does nothing, and
    goes with the next forward.
    """

    __slots__ = ("_modes", "_summer", "_threads")

    def __init__(self) -> None:
        self._summer = _current.summer
        self._modes = [mode for mode in _modes() if not (isinstance(mode, WholeBatch) and mode.over)]
        self._threads = torch.get_num_threads()

    def restore(self) -> None:
        """What sums up and what watches torch's functions in this thread."""
        _current.summer = self._summer
        if self._modes == _modes():
            return
        while _stack._len_torch_function_stack():
            _stack._pop_torch_function_stack()
        for mode in self._modes:
            _stack._push_on_torch_function_stack(mode)

    def restore_all(self) -> None:
        """That, and the share of the cores."""
        self.restore()
        torch.set_num_threads(self._threads)


_stack: Any = cast("Any", torch)._C


def _modes() -> list[TorchFunctionMode]:
    return [_stack._get_function_stack_at(place) for place in range(_stack._len_torch_function_stack())]


def inside_shard() -> bool:
    """Whether a replica's forward or backward is running in this thread."""
    return _current.summer is not None


PROBE_RUNS = 4
"""How often a probe runs the module."""


def probed(
    module: nn.Module, calls: Iterable[tuple[Any, Any]], rows: tuple[int, int], *, sync_batchnorm: bool
) -> tuple[list[Any], list[Divisors]]:
    """Outputs of a probe: for all rows, the first part, the second part, and all rows again; and their divisors.

    In the parts, sums over the whole batch are those that the run over all rows found in the same order, so that the
    parts return what replicas would.
    """
    total = sum(rows)
    record = _Record()
    again = _Record()
    summers = (record, _Replay(record.sums), _Replay(record.sums), again)
    outputs: list[Any] = []
    divisors: list[Divisors] = []
    for (args, kwargs), summer, count in zip(calls, summers, (total, *rows, total), strict=True):
        with _summing(summer), WholeBatch(count / total, sync_batchnorm=sync_batchnorm) as mode:
            outputs.append(module(*args, **kwargs))
        divisors.append(mode.divisors)
    whole, part_a, part_b, _ = (summer.count for summer in summers)
    if part_a and part_b and part_a + part_b == whole:
        raise SumsPerRowError(whole, total)
    return outputs, divisors


class SumsPerRowError(ValueError):
    """Each row has sums over the whole batch of its own: they would be added to those of other replicas' rows."""

    def __init__(self, sums: int, rows: int) -> None:
        super().__init__(
            f"forward computes {sums} means over the whole batch (F.cross_entropy, evenly.whole_batch) for {rows} "
            "rows, one by one in a loop: each would be normalised together with another replica's row. Give it all "
            'rows at once, or use reduction="sum" and divide by the number of each row\'s own labels'
        )
        self.sums, self.rows = sums, rows

    def __reduce__(self) -> tuple[type[SumsPerRowError], tuple[int, int]]:
        return type(self), (self.sums, self.rows)


class _Record:
    """The sums of a run over all rows."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []

    @property
    def count(self) -> int:
        return len(self.sums)

    def sum(self, tensor: Tensor) -> Tensor:
        self.sums.append(tensor.detach().clone())
        return tensor.detach().clone()


class _Replay:
    """Gives the sums that another run recorded."""

    def __init__(self, sums: list[Tensor]) -> None:
        self._sums = sums
        self.count = 0

    def sum(self, tensor: Tensor) -> Tensor:
        if self.count == len(self._sums) or self._sums[self.count].shape != tensor.shape:
            message = "what is summed over the whole batch depends on the rows"
            raise ExchangeError(message)
        self.count += 1
        return self._sums[self.count - 1].clone()


class WholeBatch(TorchFunctionMode):
    """Computes over the whole batch what means something else on a shard.

    Args:
        share: This replica's rows as a fraction of the batch's.
        sync_batchnorm: Whether batch normalisation uses the statistics of the whole batch.

    Attributes:
        divisors: By what it has seen functions divide; see :mod:`evenly.divisors`.
        over: Whether the forward has ended.
    """

    def __init__(self, share: float, *, sync_batchnorm: bool = False) -> None:
        super().__init__()
        self.share = share
        self.divisors: Divisors = {}
        self.over = False
        self.sync_batchnorm = sync_batchnorm

    def __torch_function__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Pass on all calls but those that the class is about."""
        del types
        if func not in _WATCHED or self.over:
            return func(*args, **kwargs) if kwargs else func(*args)
        if func in DIVIDES and not torch.compiler.is_compiling():
            divisor = DIVIDES[func](*args, **(kwargs or {}))
            if divisor is not None:
                note(self.divisors, divisor)
        loss = LOSSES.get(func)
        if loss is not None:
            return loss(self.mean, *args, **(kwargs or {}))
        if func is F.batch_norm:
            return _batch_norm(self, *args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)

    def mean(self, numerator: Tensor, denominator: Tensor) -> Tensor:
        """A sum divided by a count, over the whole batch; see [Note: scaled means]."""
        return numerator / whole_batch(denominator).to(numerator.dtype) / self.share


_WATCHED = frozenset({*LOSSES, *DIVIDES, F.batch_norm})


def _batch_norm(
    mode: WholeBatch,
    input: Tensor,  # noqa: A002 - as in F.batch_norm
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training or not mode.sync_batchnorm or _current.summer is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    dims = [dim for dim in range(input.dim()) if dim != 1]
    shape = [1, -1, *[1] * (input.dim() - 2)]
    # Means first, then squares of what deviates from them: a sum of squares alone would cancel.
    x = input.double() if input.dtype == torch.float64 else input.float()
    count = torch.tensor([x.numel() // x.shape[1]], dtype=x.dtype)
    sums = whole_batch(torch.cat([x.sum(dims), count]))
    total, mean = sums[-1].detach(), sums[:-1] / sums[-1]
    centred = x - mean.view(shape)
    variance = whole_batch(centred.square().sum(dims)) / total
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = variance * (total / (total - 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    out = centred * scale.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    return out.to(input.dtype)
