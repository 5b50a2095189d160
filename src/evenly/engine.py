"""A model at work: the team behind it, what its replicas know of it, and what it has done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from evenly import bridge
from evenly.batch import SplitPlan
from evenly.call import Call, Work
from evenly.ends import bring
from evenly.probing import Outputs
from evenly.replicated import Replicated
from evenly.report import ReplicaReport
from evenly.team.presence import process_memory
from evenly.team.values import ask_report

if TYPE_CHECKING:
    from evenly.team.collectives import Kind
    from evenly.team.team import Team


_work: WeakKeyDictionary[Team, Work] = WeakKeyDictionary()
"""What the driver has computed as replica 0 of each team: for all models, as the other replicas count."""


class Engine:
    """Runs a module over a team's replicas.

    Args:
        module: The user's module.
        team: The replicas; they may still be starting.
        kind: How parameters get there and gradients back; by default what suits the devices.
        sync_batchnorm: Whether batch normalisation uses the statistics of the whole batch.
        out_dims, scalar_outputs: What the user said of the outputs.
    """

    def __init__(
        self,
        module: nn.Module,
        team: Team,
        *,
        kind: Kind | None,
        sync_batchnorm: bool,
        out_dims: Any,
        scalar_outputs: Any,
    ) -> None:
        self.team = team
        self.replicated = Replicated(module, team, kind=kind, sync_batchnorm=sync_batchnorm)
        self.outputs = Outputs(self.replicated, out_dims, scalar_outputs)
        self.work = _work.setdefault(team, Work())

    def run(self, plan: SplitPlan) -> Any:
        """The module's output for a batch that several replicas take part in."""
        team = self.team
        bring(team, plan)
        with team.lock:
            team.ensure_ready()
            self.replicated.sync()
            call = Call(self.replicated, plan, self.work)
            try:
                return bridge.run(call, partial(self.outputs.join, plan))
            except BaseException:  # Ctrl-C, too: before the call has come so far itself, perhaps
                self.replicated.settle()
                raise

    def run_alone(self, plan: SplitPlan) -> Any:
        """The module's output for a batch that is replica 0's alone."""
        started = time.perf_counter()
        args, kwargs = plan.shard(0)
        output = self.replicated.module(*args, **kwargs)
        self.work.rows += plan.size or 0
        self.work.seconds += time.perf_counter() - started
        return output

    def report(self) -> Sequence[ReplicaReport]:
        """What each replica has done and holds."""
        team = self.team
        mine = ReplicaReport(0, team.devices[0], self.work.rows, self.work.seconds, process_memory())
        with team.lock:
            team.ensure_ready()
            others = ask_report(team)
        return [
            mine,
            *(
                ReplicaReport(replica, team.devices[replica], rows, seconds, memory)
                for replica, (rows, seconds, memory, _) in enumerate(others, 1)
            ),
        ]
