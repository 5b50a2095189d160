"""Several Python threads over the same replicas, and forked children of the driver."""

from __future__ import annotations

import os
import threading
import traceback

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from evenly import DataParallel
from orders import Obedient, X, expect_working
from parity import REPLICAS


@pytest.fixture(params=REPLICAS)
def model(request):
    model = DataParallel(Obedient(), device_ids=["cpu"] * request.param)
    model(X)
    return model


@pytest.fixture(scope="module", autouse=True)
def replicas():
    """Starting them takes seconds: they live as long as this file runs."""
    models = [DataParallel(Obedient(), device_ids=["cpu"] * count) for count in REPLICAS]
    yield
    models.clear()


def all_of(count, work):
    """Run ``work(0)`` … in threads at once; what they return, or what the first of them raised."""
    results, failures, together = [None] * count, [], threading.Barrier(count)

    def run(number):
        try:
            together.wait()
            results[number] = work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]
    return results


def test_threads_that_call_one_model_get_their_own_rows_results(model):
    def work(number):
        x = X + number
        return [(x, model(x).full_tensor().detach()) for _ in range(20)]

    for results in all_of(4, work):
        for x, found in results:
            torch.testing.assert_close(found, model.module(x).detach())


def test_threads_that_differentiate_at_once(model):
    def work(number):
        x = (X + number).requires_grad_()
        for _ in range(10):
            (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
        return x, gradient

    for x, gradient in all_of(4, work):
        (wanted,) = torch.autograd.grad(model.module(x).square().sum(), x)
        torch.testing.assert_close(torch.as_tensor(gradient), wanted)


def test_threads_with_two_models_on_the_same_devices(model):
    models = [model, DataParallel(Obedient(), device_ids=["cpu", "cpu"])]

    def work(number):
        for _ in range(10):
            models[number].zero_grad()
            models[number](X).square().mean().backward()

    all_of(2, work)
    for each in models:
        expect_working(each)


def test_a_failure_in_one_thread_is_that_threads_own(model):
    from orders import FAIL, on

    def work(number):
        for _ in range(10):
            if number:
                model(X).full_tensor()
                continue
            with pytest.raises(ZeroDivisionError):
                model(X, on("second", FAIL))

    all_of(2, work)
    expect_working(model)


# ---------------------------------------------------------------------- forks


def in_child(work):
    """What ``work`` returns, or the traceback of what it raises, in a forked child that then ends without a word."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = str(work())
        except BaseException:
            answer = traceback.format_exc()
        os.write(theirs, answer.encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        answer = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return answer


def test_a_forked_child_that_calls_the_model_is_told_why_not(model):
    answer = in_child(lambda: model(X))
    assert "RuntimeError: the replicas belong to process" in answer
    assert "use the bare module here" in answer
    expect_working(model)


def test_a_forked_child_can_use_the_bare_module(model):
    assert in_child(lambda: model.module(X).shape) == "torch.Size([8, 2])"
    expect_working(model)


def test_a_forked_child_that_looks_at_a_sharded_tensor_is_told_why_not(model):
    out = model(X)

    def compute():
        return (out * 2).sum()

    for work in (out.full_tensor, compute):
        assert "RuntimeError: the replicas belong to process" in in_child(work)
    torch.testing.assert_close(out.full_tensor(), model.module(X))


def test_a_fork_while_another_thread_is_in_a_call(model):
    with model._team.lock:
        forked = threading.Thread(target=lambda: answers.append(in_child(lambda: model(X))))
        answers = []
        forked.start()
        forked.join(30)
    assert "the replicas belong to process" in answers[0]


def test_a_forked_child_can_have_replicas_of_its_own(model):
    def work():
        torch.set_num_threads(1)
        own = DataParallel(Obedient(), device_ids=["cpu", "cpu"])
        pids = own._team.pids()
        own(X).full_tensor()
        from evenly.team import shutdown

        shutdown()
        return pids

    assert str(model._team.pids()) != in_child(work)
    expect_working(model)


def test_a_child_that_ends_as_programs_do_does_not_disturb_its_parents_replicas(model):
    pid = os.fork()
    if pid == 0:
        import atexit
        import gc

        del model
        gc.collect()
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    expect_working(model)


def loader():
    return DataLoader(TensorDataset(X), batch_size=4, num_workers=2, multiprocessing_context="fork")


@pytest.mark.filterwarnings("ignore:This process")  # Python 3.12 warns of forks beside threads
@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_data_loader_with_workers_made_before_and_after_wrapping(replicas):
    before = loader()
    early = iter(before)
    model = DataParallel(Obedient(), device_ids=["cpu"] * replicas)
    for batches in (early, before, loader()):
        for (x,) in batches:
            torch.testing.assert_close(model(x).full_tensor(), model.module(x))
    expect_working(model)
