"""How outputs are joined: what a probe finds out, and what the rules check."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from evenly.outputs import (
    Constant,
    Mean,
    PackedRows,
    Rows,
    SampleList,
    Stack,
    Sum,
    Unknown,
    check_and_join_values,
    check_tensor_metas,
    override_rules,
)
from evenly.packed import join_samples, layout_of
from evenly.probe import infer_rules, rules_from_shapes

X = torch.arange(1.0, 13.0, dtype=torch.float64).view(3, 4).sin()
Pair = namedtuple("Pair", ["left", "right"])


def probe(module, x=X, **options):
    """The rules for a module, found on three rows in parts of two and one."""
    return infer_rules(module(x), module(x[:2]), module(x[2:]), (2, 1), **options)


def rule_of(module, x=X, **options):
    (rule,), tree = probe(module, x, **options)
    assert tree.is_leaf
    return rule


def test_the_batch_dimension_is_the_one_that_follows_the_rows():
    assert rule_of(lambda x: x) == Rows(0)
    assert rule_of(lambda x: x.T) == Rows(1)
    assert rule_of(lambda x: x.unsqueeze(0).repeat(2, 1, 1)) == Rows(1)
    assert rule_of(lambda x: x.argmax(1)) == Rows(0)
    assert rule_of(lambda x: torch.full_like(x, float("nan"))) == Rows(0)


def test_several_entries_per_row_are_rows_too():
    assert rule_of(lambda x: x.reshape(-1)) == Rows(0, 4)


def test_rows_that_come_out_interleaved_are_not_joined():
    rule = rule_of(lambda x: x.T.reshape(-1))
    assert isinstance(rule, Unknown)
    assert "one after the other" in rule.reason


def test_random_values_leave_the_shapes_to_decide():
    assert rule_of(torch.rand_like) == Rows(0)
    assert isinstance(rule_of(lambda _: torch.rand(())), Unknown)


def test_rows_that_depend_on_each_other_are_found_out_by_a_second_run():
    def normalised(x):
        return x - x.mean(0)

    assert rule_of(normalised) == Rows(0)
    assert isinstance(rule_of(normalised, again=normalised(X)), Unknown)
    assert rule_of(torch.rand_like, again=torch.rand_like(X)) == Rows(0)


def test_a_pairwise_matrix_is_unknown():
    assert "depends on all others" in rule_of(lambda x: x @ x.T).reason


def test_a_loss_is_a_mean_or_a_sum():
    assert rule_of(lambda x: x.square().mean()) == Mean()
    assert rule_of(lambda x: x.square().sum()) == Sum()
    assert rule_of(lambda x: x.square().mean().view(1)) == Mean()
    assert rule_of(lambda x: x.sum() / 128) == Sum()
    assert rule_of(lambda x: x.square().mean().to(torch.bfloat16)) == Mean()
    assert rule_of(lambda x: x.mean(0)) == Mean()


def test_a_loss_over_valid_labels_only_is_neither():
    labels = torch.tensor([0, -100, 2])
    targets = {3: labels, 2: labels[:2], 1: labels[2:]}
    rule = rule_of(lambda x: F.cross_entropy(x, targets[len(x)]))
    assert isinstance(rule, Unknown)
    assert "whole_batch" in rule.reason


def test_a_loss_of_zero_leaves_open_what_it_is():
    rule = rule_of(lambda x: x.sum() * 0)
    assert set(rule.candidates) == {Constant(), Mean(), Sum()}
    assert isinstance(rule_of(lambda x: x.sum() * float("nan")), Unknown)


def test_a_mean_that_happens_to_be_equal_is_still_a_mean():
    assert rule_of(lambda _: torch.tensor(1.0)) == Mean()


def test_values_without_rows_are_constants():
    assert rule_of(lambda _: torch.arange(5)) == Constant()
    assert rule_of(lambda _: torch.tensor(7)) == Constant()
    assert rule_of(lambda _: "name") == Constant()
    assert rule_of(lambda _: None) == Constant()
    assert rule_of(lambda _: 3) == Constant()


def test_counts_are_sums():
    assert rule_of(len) == Sum()
    assert rule_of(lambda x: torch.tensor(len(x))) == Sum()
    assert probe(lambda x: x.shape)[0] == [Sum(), Constant()]
    assert rule_of(lambda x: x.mean().item()) == Mean()


def test_lists_that_follow_the_rows_are_one_leaf():
    rules, tree = probe(lambda x: {"names": [["a"] * i for i in range(len(x))], "pair": [x, x.sum()]})
    assert rules == [SampleList(), Rows(0), Sum()]
    assert tree.paths("output") == ['output["names"]', 'output["pair"][0]', 'output["pair"][1]']
    assert tree.flatten_up_to({"names": ["x"], "pair": [1, 2]}, "output") == [["x"], 1, 2]
    assert rule_of(lambda x: tuple({"boxes": row} for row in x)) == SampleList()
    assert rule_of(lambda x: [0] * (2 * len(x))) == SampleList(2)


class Cache:
    """As in transformers: no container, but full of tensors."""

    def __init__(self, keys):
        self.layers = [Layer(keys), Layer(keys * 2)]


class Layer:
    def __init__(self, keys):
        self.keys, self.device, self.seen = keys, keys.device, 1


def test_objects_that_hold_tensors_are_joined_by_their_attributes():
    rules, tree = probe(lambda x: {"cache": Cache(x)})
    assert rules == [Rows(0), Constant(), Constant()] * 2
    leaves, full = tree.fit({"cache": Cache(X)}, "output")
    again = full.rebuild(leaves)["cache"]
    assert isinstance(again, Cache)
    assert again.layers[1].keys is leaves[3]
    rules, tree = probe(lambda x: torch.distributions.Normal(x, 1.0))
    assert dict(zip(tree.paths("output"), rules, strict=True))["output.loc"] == Rows(0)


def test_objects_that_refer_to_themselves_stay_closed():
    def looped(x):
        cache = Cache(x)
        cache.me = cache
        return cache

    assert isinstance(rule_of(looped), Unknown)


def test_outputs_whose_structure_changes_are_refused_with_the_path():
    with pytest.raises(ValueError, match=r"output\[1\] is a list of 2"):
        probe(lambda x: (x, [0] * (2 if len(x) == 3 else 1)))
    with pytest.raises(ValueError, match=r'output\["h"\] is None for \[1\] rows'):
        probe(lambda x: {"h": None if len(x) == 1 else x})
    with pytest.raises(ValueError, match="types"):
        probe(lambda x: x if len(x) > 1 else "text")


def test_packed_outputs_are_packed_rows():
    def pack(x):
        return pack_sequence(list(x), enforce_sorted=False)

    assert rule_of(pack) == PackedRows()


def test_padding_to_the_longest_of_a_shard_is_explained_when_it_happens():
    lengths = {3: 4, 2: 4, 1: 2}
    rule = rule_of(lambda x: x[:, : lengths[len(x)]])
    assert rule == Rows(0)
    with pytest.raises(ValueError, match=r"dimension 1 on replica 0 and 2 on replica 1.*total_length="):
        check_tensor_metas("output", rule, [((2, 4), torch.float32), ((1, 2), torch.float32)], (2, 1))


# Without a probe


def test_uneven_shards_tell_by_their_shapes():
    outputs = [
        {
            "y": torch.ones(n, 5, device="meta"),
            "h": torch.ones(2, n, 3),
            "loss": torch.tensor(1.0),
            "c": torch.ones(7),
        }
        for n in (3, 2, 2)
    ]
    rules, _ = rules_from_shapes(outputs, (3, 2, 2))
    assert rules[:2] == [Rows(0), Rows(1)]
    assert rules[2].candidates == (Mean(), Sum())
    assert rules[3] == Constant()


def test_even_shards_do_not_tell():
    (rule,), _ = rules_from_shapes([torch.ones(2, 4)] * 2, (2, 2))
    assert rule.candidates == (Rows(0), Rows(1, 2), Constant())


# Checks and joins


def test_metas_give_the_shape_of_the_whole():
    f32 = torch.float32
    assert check_tensor_metas("output", Rows(1), [((2, 3), f32), ((2, 2), f32)], (3, 2)) == (2, 5)
    assert check_tensor_metas("output", Rows(0, 4), [((12, 2), f32), ((8, 2), f32)], (3, 2)) == (20, 2)
    assert check_tensor_metas("output", Mean(), [((), f32), ((), f32)], (3, 2)) == ()
    assert check_tensor_metas("output", Stack(), [((), f32), ((), f32)], (3, 2)) == (2,)
    assert check_tensor_metas("output", PackedRows(), [((9, 4), f32), ((5, 4), f32)], (3, 2)) == (14, 4)


@pytest.mark.parametrize(
    ("rule", "metas", "message"),
    [
        (
            Rows(0),
            [((3, 2), torch.float32), ((3, 2), torch.float32)],
            "size 3 along dimension 0 on replica 1",
        ),
        (Rows(0), [((3,), torch.float32), ((2,), torch.float64)], r"float32 on replica 0 and torch\.float64"),
        (Rows(0), [((3, 1), torch.float32), ((2,), torch.float32)], "2 dimensions on replica 0"),
        (Rows(2), [((3, 1), torch.float32), ((2, 1), torch.float32)], "no dimension 2"),
        (Constant(), [((3,), torch.float32), ((2,), torch.float32)], "no dimension that follows the rows"),
        (
            Unknown("it varies"),
            [((), torch.float32), ((), torch.float32)],
            "because it varies.*scalar_outputs=",
        ),
    ],
)
def test_metas_that_do_not_fit_are_refused(rule, metas, message):
    with pytest.raises(ValueError, match=rf"(?s)output\[0\].*{message}"):
        check_tensor_metas("output[0]", rule, metas, (3, 2))


def test_values_are_joined_by_their_rules():
    assert check_and_join_values("output", SampleList(), [["a", "b"], ["c"]], (2, 1)) == ["a", "b", "c"]
    assert check_and_join_values("output", SampleList(), [("a", "b"), ("c",)], (2, 1)) == ("a", "b", "c")
    assert check_and_join_values("output", Constant(), [None, None], (2, 1)) is None
    assert check_and_join_values("output", Constant(), [float("nan")] * 2, (2, 1)) != 0
    assert check_and_join_values("output", Sum(), [2, 2], (2, 2)) == 4
    assert check_and_join_values("output", Mean(), [1.0, 4.0], (2, 1)) == 2.0
    assert check_and_join_values("output", Stack(), [1, 2], (2, 1)) == [1, 2]
    assert (
        check_and_join_values("output", Constant(), [torch.device("cpu"), torch.device("cuda:1")], (2, 1)).type == "cpu"
    )
    assert check_and_join_values("output", Unknown("0", (Constant(), Sum())), [0, 0], (2, 1)) == 0


@pytest.mark.parametrize(
    ("rule", "values", "message"),
    [
        (Constant(), ["a", "b"], "'a' on replica 0 and 'b' on replica 1"),
        (Constant(), [None, "b"], "None on replica 0"),
        (Constant(), [1, 1.0], "1 on replica 0"),
        (Mean(), [1.0, None], "None on replica 1"),
        (SampleList(), [["a"], ["b"]], "list of 1 on replica 0, expected a list of 2"),
        (SampleList(), [["a", "b"], ("c",)], "tuple of 1 on replica 1, expected a list of 1"),
        (Unknown("0", (Constant(), Sum())), [3, 3], "cannot be joined"),
    ],
)
def test_values_that_do_not_fit_are_refused_with_both(rule, values, message):
    with pytest.raises(ValueError, match=rf'output\["x"\].*{message}'):
        check_and_join_values('output["x"]', rule, values, (2, 1))


@pytest.mark.parametrize("lengths", [[5, 4, 3, 2, 1], [2, 5, 1, 4, 3]])
def test_packed_outputs_join_in_the_order_of_the_rows(lengths):
    steps = [torch.randn(length, 2, requires_grad=True) for length in lengths]
    ordered = lengths == sorted(lengths, reverse=True)
    whole = pack_sequence(steps, enforce_sorted=ordered)
    parts = [pack_sequence(part, enforce_sorted=ordered) for part in (steps[:3], steps[3:])]
    index, layout = join_samples([layout_of(part) for part in parts], None)
    joined = layout.pack(torch.cat([part.data for part in parts])[index])
    assert torch.equal(joined.data, whole.data)
    assert torch.equal(joined.batch_sizes, whole.batch_sizes)
    assert (joined.sorted_indices is None) == (whole.sorted_indices is None)
    assert torch.equal(pad_packed_sequence(joined)[1], torch.tensor(lengths))
    joined.data.sum().backward()
    assert all(step.grad is not None for step in steps)


# Overrides


def test_the_user_can_say_what_an_output_is():
    output = {
        "loss": torch.tensor(0.0),
        "h": torch.ones(2, 3),
        "pair": Pair(torch.ones(3), torch.tensor(1.0)),
    }
    rules, tree = probe(lambda x: {"loss": x.sum() * 0, "h": x, "pair": Pair(x, x.sum())})
    leaves = tree.flatten_up_to(output)

    def said(**options):
        return override_rules(tree, leaves, rules, **options)

    assert said(scalar_outputs="mean") == [Mean(), Rows(0), Rows(0), Mean()]
    assert said(scalar_outputs={"loss": "sum"}) == [Sum(), Rows(0), Rows(0), Sum()]
    assert said(scalar_outputs={"pair": Pair(None, "stack")})[3] == Stack()
    assert said(out_dims={"h": 1})[1] == Rows(1)
    assert said(out_dims={"h": None, "pair": (0, ...)})[1:3] == [Constant(), Rows(0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out_dims": {"nobody": 0}}, r"out_dims names \['nobody'\] in output, which has only \['loss', 'h'\]"),
        ({"out_dims": {"h": 5}}, r"out_dims gives 5 for output\[\"h\"\]"),
        ({"scalar_outputs": "median"}, "scalar_outputs gives 'median'"),
    ],
)
def test_overrides_that_do_not_fit_are_refused(options, message):
    rules, tree = probe(lambda x: {"loss": x.sum(), "h": x})
    with pytest.raises(ValueError, match=message):
        override_rules(tree, [torch.tensor(1.0), torch.ones(2, 3)], rules, **options)
