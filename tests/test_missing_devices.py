"""Devices that are not there, in `device_ids`, in the model and in its arguments: named, with what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from evenly import DataParallel
from parity import compare, wrap

NO_ACCELERATOR = r"this machine has no accelerator; for replicas on the CPU say device_ids=\['cpu'\] \* n"


@pytest.fixture
def without_accelerators(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.fixture(params=[1, 2])
def accelerators(request, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: request.param)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    return request.param


@pytest.mark.parametrize("device", [0, 1, "cuda", "cuda:0", "xpu:1", "mps", "meta", torch.device("cuda", 3)], ids=str)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.usefixtures("without_accelerators")
def test_a_device_that_does_not_exist_is_named_with_what_was_found_and_the_remedy(device, place):
    devices = ["cpu", "cpu"]
    devices[place] = device
    shown = r"device\(type='cuda', index=3\)" if isinstance(device, torch.device) else repr(device)
    with pytest.raises(ValueError, match=rf"device_ids\[{place}\] is {shown}, but {NO_ACCELERATOR}"):
        DataParallel(nn.Linear(3, 2), device_ids=devices)


@pytest.mark.parametrize("device", [2, 7, "cuda:2", "xpu:0", "mps:0"])
def test_a_device_beyond_those_that_exist(device, accelerators):
    found = {1: "1 accelerator, cuda:0", 2: "2 accelerators, cuda:0 to cuda:1"}[accelerators]
    with pytest.raises(ValueError, match=rf"device_ids\[0\] is {device!r}, but this machine has {found}; .*'cpu'"):
        DataParallel(nn.Linear(3, 2), device_ids=[device])


@pytest.mark.usefixtures("accelerators")
def test_devices_that_exist_but_cannot_have_replicas_yet():
    with pytest.raises(ValueError, match=r"device_ids names cuda:0: replicas run on the CPU today .*'cpu'"):
        DataParallel(nn.Linear(3, 2), device_ids=[0])


def test_a_model_without_values_is_refused_with_its_parameter_and_the_remedy():
    model = wrap(nn.Linear(3, 2, device="meta"))
    with pytest.raises(ValueError, match=r"weight is on meta.*to_empty"):
        model(torch.ones(5, 3))
    model.module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    compare(model(torch.ones(5, 3)), model.module(torch.ones(5, 3)))


@pytest.mark.parametrize("count", [1, 5])
def test_arguments_without_values_are_refused_as_the_bare_module_refuses_them(count):
    model = wrap(nn.Linear(3, 2))
    x = torch.ones(count, 3, device="meta")
    with pytest.raises((RuntimeError, ValueError), match="meta"):
        model(x)
    compare(model(torch.ones(5, 3)), model.module(torch.ones(5, 3)))


def test_the_compilers_tensors_without_values_are_refused():
    model = wrap(nn.Linear(3, 2))
    with FakeTensorMode():
        x = torch.ones(5, 3)
    with pytest.raises((RuntimeError, TypeError, ValueError, AssertionError), match=r"(?i)fake"):
        model(x)
    compare(model(torch.ones(5, 3)), model.module(torch.ones(5, 3)))
