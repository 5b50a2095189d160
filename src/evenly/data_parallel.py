"""``DataParallel`` and ``data_parallel()``: a step, from the outside."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.utils._pytree import tree_leaves

from evenly.devices import Device, resolve_devices
from evenly.rows import split_rows
from evenly.team.presence import inside_replica
from evenly.untraced import untraced
from evenly.wrapping import CleanNames

if TYPE_CHECKING:
    from collections.abc import Iterable

    from evenly.engine import Engine
    from evenly.report import ReplicaReport
    from evenly.team.collectives import Kind
    from evenly.team.team import Team

_SCALARS = ("mean", "sum", "stack")

_MADE_FROM = frozenset({"module", "device_ids", "out_dims", "scalar_outputs", "sync_batchnorm", "collectives"})
"""Attributes that the engine is made from: who assigns another value wants another engine."""


class DataParallel(CleanNames, nn.DataParallel[nn.Module]):
    """Trains a module on several devices, one process each, as if it ran on one.

    A drop-in replacement of :class:`torch.nn.DataParallel`: a loop over ``DataParallel(module)`` computes what the
    same loop computes over ``module`` on the whole batch. The batch is split along ``dim``, outputs and losses stay
    where they are computed (:class:`evenly.ShardedTensor`), gradients are summed exactly.

    Args:
        module: The module to train. It stays the source of truth; its parameters keep their identity.
        device_ids: The devices, by index, name or :class:`torch.device`; one may be named several times. All
            accelerators by default; without any, the module runs directly. For replicas on the CPU say
            ``["cpu"] * n``.
        output_device: Where outputs appear to be; the first device by default, and the only choice today.
        dim: The batch dimension of the inputs.
        split: Weights of the devices when the batch is split; even by default. The last ones may be 0.
        in_dims: How arguments depend on the batch, as in :func:`torch.vmap`: the dimension of their rows, None (given
            whole), "samples" (a sequence with one item per row), `...` (found out), or a structure of these: a tuple
            for all positional arguments, or a dict of some, by their names in ``forward``. Found out by default.
        out_dims: How outputs depend on the batch: the dimension of their rows, None (the same on all replicas), `...`
            (found out), or a structure of these like the output. Found out by default.
        scalar_outputs: What single numbers among the outputs are: "mean" or "sum" over the rows, "stack" for one entry
            per replica, or a structure of these like the output. Found out by default.
        sync_batchnorm: Whether batch normalisation in training uses the statistics of the whole batch, as the bare
            module does. By default each replica uses those of its rows, and running statistics follow replica 0.
        collectives: How parameters get to the replicas and gradients back: "memory" (shared memory, for the CPU) or
            "gloo" (a private process group; replicas have their own copy of the parameters). By default what suits
            the devices.

    Attributes:
        module: The wrapped module.
        device_ids: The devices.

    Raises:
        ValueError: The devices make no sense, or another argument does not fit them.
        TypeError: What is wrapped is no module.

    Example:
        >>> model = DataParallel(MyModel(), device_ids=["cpu", "cpu"])
        >>> loss = criterion(model(x), y)
        >>> loss.backward()
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        split: Sequence[float] | None = None,
        in_dims: Any = None,
        out_dims: Any = ...,
        scalar_outputs: Any = None,
        sync_batchnorm: bool = False,
        collectives: Kind | None = None,
    ) -> None:
        nn.Module.__init__(self)
        if isinstance(module, DataParallel):
            module = module.module  # wrapping twice is harmless
        if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] - users do
            message = f"DataParallel wraps a torch.nn.Module, got a {type(module).__name__}"
            raise TypeError(message)
        devices = resolve_devices(device_ids, output_device)
        if split is not None and devices:  # without an accelerator there is nothing to split between
            _check_weights(split, len(devices))
        words = [word for word in tree_leaves(scalar_outputs) if word is not None and word not in _SCALARS]
        if words:
            message = f'scalar_outputs gives {words[0]!r}: "mean", "sum" and "stack" are possible'
            raise ValueError(message)
        self.module = module
        self.dim = dim
        self.device_ids = list(devices)
        self.output_device = devices[0] if devices else None
        self.split = None if split is None else tuple(split)
        self.in_dims = in_dims
        self.out_dims = out_dims
        self.scalar_outputs = scalar_outputs
        self.sync_batchnorm = sync_batchnorm
        self.collectives: Kind | None = collectives
        self._start()

    def _start(self) -> None:
        """Set up what does not travel: the team, and what is known of the model."""
        self._team: Team | None = None
        self._engine: Engine | None = None
        if len(self.device_ids) > 1 and not inside_replica():
            from evenly.team.teams import team_for

            self._team = team = team_for(self.device_ids)
            with team.lock:
                team.start()
            # Imported while the replicas start: whoever only builds the model need not wait for it.
            from evenly.engine import Engine

            self._engine = Engine(
                self.module,
                team,
                kind=self.collectives,
                sync_batchnorm=self.sync_batchnorm,
                out_dims=self.out_dims,
                scalar_outputs=self.scalar_outputs,
            )
        elif not self.device_ids:
            _say_once()

    def __setattr__(self, name: str, value: Any) -> None:
        started = "_engine" in self.__dict__
        if started and name == "device_ids":
            value = resolve_devices(value, None)
        super().__setattr__(name, value)
        if started and name in _MADE_FROM:
            self._start()

    # ------------------------------------------------------------------ a step

    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for the whole batch, computed by all replicas.

        Raises:
            ValueError: Arguments cannot be split, or outputs cannot be joined; it names the path.
            ReplicaDied: A replica has come to an end. The next call starts a new one.
            Exception: Whatever the module raises, in any replica.
        """
        from evenly.batch import plan_split
        from evenly.batchwide import inside_shard
        from evenly.marks import in_dims_of_call

        in_dims = self.in_dims
        if isinstance(in_dims, Mapping):
            in_dims = in_dims_of_call(cast("Mapping[Any, Any]", in_dims), self.module.forward, args, kwargs)
        engine = None if inside_shard() else self._engine  # a wrapped module inside of another's forward just runs
        split = partial(
            plan_split, args, kwargs, devices=1 if engine is None else len(self.device_ids), dim=self.dim,
            weights=None if engine is None else self.split, in_dims=in_dims,
        )  # fmt: skip
        plan = split()
        if 1 in plan.rows and plan.size != 1 and (least := self._rows_needed()) > 1:
            plan = split(min_rows=least)
        if engine is None:
            args, kwargs = plan.shard(0)
            return self.module(*args, **kwargs)
        return engine.run_alone(plan) if plan.replicas == 1 else engine.run(plan)

    def _rows_needed(self) -> int:
        """Batch normalisation cannot train on a single row, unless it sees the other replicas' rows, too."""
        if self.sync_batchnorm:
            return 1
        norms = (module for module in self.module.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))  # pyright: ignore[reportPrivateUsage]
        return 2 if any(norm.training for norm in norms) else 1

    # ------------------------------------------------------------------ what was done

    def report(self) -> list[ReplicaReport]:
        """What each replica has done and holds."""
        return [] if self._engine is None else list(self._engine.report())

    # ------------------------------------------------------------------ travelling

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_team", "_engine"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # pyright: ignore[reportUnknownMemberType]
        self._start()


def _check_weights(split: Any, devices: int) -> None:
    weights: list[Any] = list(cast("Iterable[Any]", split)) if hasattr(split, "__iter__") else [None]
    if not all(isinstance(weight, Real) for weight in weights):
        message = f"split is {split!r}: give a list of weights, one for each device, like [2, 1]"
        raise ValueError(message)
    if len(weights) != devices:
        message = f"split has {len(weights)} weights for {devices} devices: give one for each"
        raise ValueError(message)
    split_rows(devices, devices, weights)  # refuses weights that make no sense


_said = False


def _say_once() -> None:
    global _said  # noqa: PLW0603 - once per process
    if not _said:
        _said = True
        warnings.warn(
            "there is no accelerator, so DataParallel runs the module directly; "
            'for replicas on the CPU say device_ids=["cpu"] * n',
            stacklevel=4,
        )


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run a module once over several devices; see :class:`DataParallel`, which is the better choice for a loop.

    Args:
        module: The module.
        inputs: Its positional arguments: a tuple, or one that is not a tuple.
        device_ids: As for :class:`DataParallel`.
        output_device: As for :class:`DataParallel`.
        dim: As for :class:`DataParallel`.
        module_kwargs: Its keyword arguments.
    """
    arguments = cast(
        "tuple[Any, ...]", inputs if isinstance(inputs, tuple) else (inputs,) if inputs is not None else ()
    )
    wrapped = DataParallel(module, device_ids, output_device, dim)
    return wrapped(*arguments, **(module_kwargs or {}))
