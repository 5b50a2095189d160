"""Who trains: one trainer per contender. All share one loop; what differs is the wrapping and the data.

This is the side of the worker processes; `processes.py` starts them.
"""

from __future__ import annotations

import threading
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from workloads import Batch, Workload


class Trainer:
    """The bare model on the whole batch; the other contenders change one line each.

    Args:
        workload: What to train.
        rank: Number of this process among those of the contender.
        replicas: Number of shards that a batch is cut into.
    """

    def __init__(self, workload: Workload, rank: int, replicas: int) -> None:
        self.workload = workload
        self.rank = rank
        self.replicas = replicas
        self.module = workload.module()
        self.initial = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        self.model = self.wrap(self.module)
        self.optimizer = self._make_optimizer()
        self.batches = [self.shard(batch) for batch in workload.batches()]
        self.done = 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """The model that the loop calls."""
        return module

    def shard(self, batch: Batch) -> Batch:
        """What this process sees of a batch."""
        return batch

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.module.parameters(), lr=0.01, momentum=0.9)

    def reset(self) -> None:
        """Back to the initial parameters."""
        with torch.no_grad():
            self.module.load_state_dict(self.initial)
        self.optimizer = self._make_optimizer()
        self.done = 0

    def upcoming(self, count: int) -> list[Batch]:
        """Batches of the next steps, as new tensors: a loader never hands out the same ones twice."""
        chosen = [self.batches[(self.done + i) % len(self.batches)] for i in range(count)]
        self.done += count
        return [(x.clone(), y.clone()) for x, y in chosen]

    def step(self, x: Tensor, y: Tensor) -> None:
        """One step of the loop that everybody writes."""
        self.optimizer.zero_grad()
        out = self.model(x)
        loss = self.workload.loss(out, y)
        loss.backward()
        if self.workload.update:
            self.optimizer.step()

    def labelled_step(self, x: Tensor, y: Tensor) -> None:
        """The same step with a label on each line, for a profiler."""
        with record_function("step"):
            with record_function("zero_grad"):
                self.optimizer.zero_grad()
            with record_function("forward"):
                out = self.model(x)
            with record_function("loss"):
                loss = self.workload.loss(out, y)
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                if self.workload.update:
                    self.optimizer.step()


class Limit(Trainer):
    """Its own shard, its own model, its own optimizer: as fast as replicas could be if they did not talk."""

    def shard(self, batch: Batch) -> Batch:
        """Rows of this process, contiguous."""
        x, y = batch
        return x.tensor_split(self.replicas)[self.rank], y.tensor_split(self.replicas)[self.rank]


class DDP(Limit):
    """`DistributedDataParallel` over gloo; the process group exists already."""

    def wrap(self, module: nn.Module) -> nn.Module:
        """The wrapper as its documentation recommends it."""
        return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)


class Evenly(Trainer):
    """`evenly.DataParallel`: the whole batch, and replicas of its own."""

    def wrap(self, module: nn.Module) -> nn.Module:
        """The one line."""
        from evenly import DataParallel

        return DataParallel(module, device_ids=["cpu"] * self.replicas)


class Threads(Trainer):
    """What `nn.DataParallel` does, on CPU devices, which it refuses itself."""

    def wrap(self, module: nn.Module) -> nn.Module:
        """Its likeness."""
        return ThreadedDataParallel(module, self.replicas)


class ThreadedDataParallel(nn.Module):
    """`nn.DataParallel` step by step: scatter, replicate, one new thread per replica, gather.

    On several GPUs each has an autograd thread of its own. The CPU has one for all, so the backward of the replicas
    runs one after the other; it gets all cores instead.
    """

    def __init__(self, module: nn.Module, replicas: int) -> None:
        super().__init__()
        self.module = module
        self.replicas = replicas
        self.cores = torch.get_num_threads()

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.DataParallel.forward`, for one tensor."""
        shards = x.tensor_split(self.replicas)
        replicas = _replicate(self.module, self.replicas)
        outputs: list[Any] = [None] * self.replicas

        def run(index: int) -> None:
            torch.set_num_threads(1)
            try:
                outputs[index] = replicas[index](shards[index])
            except Exception as error:
                outputs[index] = error

        threads = [threading.Thread(target=run, args=(index,)) for index in range(self.replicas)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.set_num_threads(self.cores)
        for output in outputs:
            if isinstance(output, Exception):
                raise output
        return torch.cat(outputs)


class _Broadcast(torch.autograd.Function):
    """Parameters to copies for each replica but the first; the gradients of all copies add up."""

    @staticmethod
    def forward(ctx: Any, replicas: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.replicas, ctx.count = replicas, len(parameters)
        first = [parameter.view_as(parameter) for parameter in parameters]
        return (*first, *(parameter.clone() for _ in range(replicas - 1) for parameter in parameters))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        totals = [gradient.clone() for gradient in gradients[: ctx.count]]
        for replica in range(1, ctx.replicas):
            torch._foreach_add_(totals, gradients[replica * ctx.count : (replica + 1) * ctx.count])
        return (None, *totals)


def _replicate(network: nn.Module, count: int) -> list[nn.Module]:
    """As `torch.nn.parallel.replicate`, which knows accelerators only."""
    parameters = list(network.parameters())
    copies = cast("tuple[Tensor, ...]", _Broadcast.apply(count, *parameters))
    position = {id(parameter): index for index, parameter in enumerate(parameters)}
    modules = list(network.modules())
    replicas: list[nn.Module] = []
    for replica in range(count):
        mine = {module: cast("Any", module)._replicate_for_data_parallel() for module in modules}
        for module, own in mine.items():
            for name, child in module._modules.items():
                setattr(own, name, None if child is None else mine[child])
            for name, parameter in module._parameters.items():
                if parameter is None:
                    own._parameters[name] = None
                else:
                    setattr(own, name, copies[replica * len(parameters) + position[id(parameter)]])
            for name, buffer in module._buffers.items():
                own._buffers[name] = buffer if replica == 0 or buffer is None else buffer.clone()
        replicas.append(mine[network])
    return replicas


TRAINERS: dict[str, type[Trainer]] = {
    "bare": Trainer,
    "limit": Limit,
    "ddp": DDP,
    "evenly": Evenly,
    "threads": Threads,
}
