"""What an error says of the rows that were being computed, and of arguments that were cut on a guess."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.nn import functional as F

import evenly
from modules import Calls, rows
from parity import REPLICAS, compare, wrap

WHERE = {2: ["rows 0 to 2", "rows 3 to 4"], 3: ["rows 0 to 1", "rows 2 to 3", "row 4"]}


def told(error):
    """All that a traceback shows of an exception itself."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@pytest.mark.parametrize("replicas", REPLICAS)
def test_an_error_says_which_replica_computed_which_rows_the_drivers_own_too(replicas):
    def function(layer, x, bad):
        if bool((x[:, 0] == bad).any()):
            raise KeyError("row")
        return layer(x)

    model = wrap(Calls(function), replicas)
    x = torch.arange(5.0)[:, None].expand(5, 3)
    row = 0
    for replica, where in enumerate(WHERE[replicas]):
        with pytest.raises(KeyError) as caught:
            model(x, float(row))
        assert f"raised by replica {replica} (cpu), which computed {where} of the batch's 5" in told(caught.value)
        row += (5 + replicas - 1 - replica) // replicas
    assert model(x, 7.0).shape == (5, 2)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_an_error_in_backward_says_so_too(replicas):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, bad):
            ctx.fails = bool((x[:, 0] == bad).any())
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if ctx.fails:
                raise KeyError("row")
            return gradient, None

    model = wrap(Calls(lambda layer, x, bad: Fails.apply(layer(x) * 0 + x[:, :2], bad)), replicas)
    x = torch.arange(5.0)[:, None].expand(5, 3)
    for replica, row in ((0, 0), (replicas - 1, 4)):
        output = model(x, float(row))
        with pytest.raises(KeyError) as caught:
            output.sum().backward()
        assert f"raised by replica {replica} (cpu), which computed {WHERE[replicas][replica]}" in told(caught.value)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_square_mask_that_was_cut_by_coincidence_is_named_when_forward_fails(replicas):
    def function(layer, x, mask):
        return layer(F.scaled_dot_product_attention(x, x, x, attn_mask=mask))

    x, mask = rows(5, 5, 3), torch.ones(5, 5).tril().bool()
    model = wrap(Calls(function), replicas)
    with pytest.raises(RuntimeError) as caught:
        model(x, mask)
    first = [3, 2][replicas - 2]
    text = told(caught.value)
    assert "cut, because they have as many rows as the batch" in text
    assert f"args[1] ([5, 5] into [{first}, 5])" in text
    assert "evenly.replicate(...)" in text
    assert "args[0] (" not in text  # that is the batch itself
    compare(model(x, evenly.replicate(mask)), model.module(x, mask))


def test_names_and_weights_that_were_cut_by_coincidence_are_named():
    def function(layer, x, *, options):
        return F.cross_entropy(layer(x), torch.zeros(len(x)).long(), weight=options["weight"]) * len(options["names"])

    model = wrap(Calls(function))
    options = {"weight": torch.ones(2), "names": ["a", "b"]}
    with pytest.raises(RuntimeError) as caught:
        model(rows(2), options=options)
    assert 'kwargs["options"]["weight"] ([2] into [1]), kwargs["options"]["names"] (2 items into 1)' in told(
        caught.value
    )


def test_nothing_is_said_of_arguments_that_the_user_spoke_of():
    def function(layer, x, y):
        return layer(x) @ y.sum(0) + torch.ones(len(x), 9)

    model = wrap(Calls(function), in_dims=(0, 0))
    with pytest.raises(RuntimeError) as caught:
        model(rows(5), rows(5, 2))
    assert "which computed rows" in told(caught.value)
    assert "as many rows as the batch" not in told(caught.value)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_outputs_that_cannot_be_joined_name_what_was_cut(replicas):
    def function(layer, x, table):
        return layer(x), table.sum(0).relu()  # a table that belongs to the whole batch

    table = rows(5, 5)
    model = wrap(Calls(function), replicas)
    with pytest.raises(ValueError, match="cannot be joined") as caught:
        model(rows(5), table)
    into = ["[3, 5] and [2, 5]", "[2, 5] and [1, 5]"][replicas - 2]
    assert f"args[1] ([5, 5] into {into})" in told(caught.value)
    assert "evenly.replicate(...)" in told(caught.value)
    compare(model(rows(5), evenly.replicate(table)), model.module(rows(5), table))


MIXING = {
    "rows less their mean": lambda layer, x: layer(x - x.mean(0)),
    "a row for each pair": lambda layer, x: x @ x.T,
    "rows of another order": lambda layer, x: layer(x).unflatten(1, (2, 1)).transpose(0, 1).flatten(0, 1),
}


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("count", [6, 5])
def test_out_dims_does_not_pass_off_as_rows_what_has_been_proven_to_mix_them(name, count, replicas):
    model = wrap(Calls(MIXING[name]), replicas, out_dims=0)
    with pytest.raises(
        ValueError, match=r"out_dims gives 0 for output, .* another value than .* whole batch"
    ) as caught:
        model(rows(count))
    assert "out_dims=" not in str(caught.value)  # no remedy here


@pytest.mark.skipif(sys.version_info >= (3, 11), reason="notes are part of exceptions there")
def test_what_is_noted_is_in_the_message_where_exceptions_have_no_notes():
    model = wrap(Calls(lambda layer, x: layer(x[:, :1])))
    with pytest.raises(RuntimeError, match="raised by replica 0"):
        model(rows(5))
