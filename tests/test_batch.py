"""How a batch is split: which rows go where, and what is refused."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from evenly.batch import plan_split, replicate, samples, split_rows


def shards(*args, devices=2, **options):
    kwargs = options.pop("kwargs", {})
    plan = plan_split(args, kwargs, devices=devices, **options)
    return [plan.shard(r) for r in range(plan.replicas)]


def first(*args, **options):
    """The first positional argument of each replica."""
    return [args[0] for args, _ in shards(*args, **options)]


@dataclass
class Pair:
    image: torch.Tensor
    names: list


# Rows


@pytest.mark.parametrize(
    ("size", "devices", "rows"),
    [
        (64, 2, (32, 32)),
        (9, 4, (3, 2, 2, 2)),
        (3, 4, (1, 1, 1)),
        (1, 4, (1,)),
        (0, 4, (0,)),
        (5, 1, (5,)),
    ],
)
def test_shards_differ_by_at_most_one_row_and_none_is_empty(size, devices, rows):
    assert split_rows(size, devices) == rows


@pytest.mark.parametrize(("size", "rows"), [(1, (1,)), (2, (2,)), (3, (3,)), (5, (3, 2)), (9, (3, 2, 2, 2))])
def test_no_shard_of_one_row_is_left_to_a_batch_norm_in_training(size, rows):
    assert split_rows(size, 4, min_rows=2) == rows


def test_weights_give_proportions():
    assert split_rows(12, 3, [3, 2, 1]) == (6, 4, 2)
    assert split_rows(7, 2, [0.75, 0.25]) == (5, 2)
    assert split_rows(10, 3, [1, 1, 0]) == (5, 5)
    assert split_rows(3, 3, [0.01, 0.98, 0.01]) == (1, 1, 1)


@pytest.mark.parametrize("weights", [[0, 1], [1, 0, 1], [1, -1], [1, 1, 1, 1]])
def test_weights_that_leave_out_the_wrong_replica_are_refused(weights):
    with pytest.raises(ValueError, match="split weights"):
        split_rows(8, 3 if len(weights) != 2 else 2, weights)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 3))
def test_rows_always_add_up_and_are_even(size, devices, min_rows):
    rows = split_rows(size, devices, min_rows=min_rows)
    assert sum(rows) == size
    assert max(rows) - min(rows) <= 1
    assert list(rows) == sorted(rows, reverse=True)
    assert len(rows) == 1 or min(rows) >= min_rows


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(1, 2))
def test_weighted_rows_always_add_up(size, weights, min_rows):
    rows = split_rows(size, len(weights), weights, min_rows)
    assert sum(rows) == size
    assert len(rows) == 1 or min(rows) >= min_rows


# Tensors


def test_tensors_are_cut_into_views():
    x = torch.arange(9.0).view(9, 1)
    parts = first(x, devices=4)
    assert [len(part) for part in parts] == [3, 2, 2, 2]
    assert torch.equal(torch.cat(parts), x)
    assert all(part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in parts)


def test_tensors_without_rows_are_given_whole():
    scalar, position = torch.tensor(2.0), torch.ones(1, 5)
    for args, kwargs in shards(torch.ones(8, 5), scalar, kwargs={"position": position}):
        assert args[1] is scalar
        assert kwargs["position"] is position


def test_a_mask_over_time_beside_a_batch_is_refused_with_the_remedies():
    with pytest.raises(ValueError, match=r"kwargs\[\"mask\"\] has size 5 .*batch has 8 rows \(args\[0\]") as error:
        shards(torch.ones(8, 5), kwargs={"mask": torch.ones(5, 5)})
    assert "in_dims=" in str(error.value)
    assert "evenly.replicate(" in str(error.value)


@pytest.mark.parametrize("other", [4, 2, 7, 16])
def test_never_a_part_of_a_batch_beside_another_size(other):
    with pytest.raises(ValueError, match=r"args\[1\] has size"):
        shards(torch.ones(8, 3), torch.ones(other, 3))


def test_a_first_tensor_of_one_row_does_not_hide_a_batch_of_eight():
    with pytest.raises(ValueError, match=r"has size 8 .* has 1 rows"):
        shards(torch.ones(1, 3), torch.ones(8, 3))
    assert [len(args[1]) for args, _ in shards(replicate(torch.ones(1, 3)), torch.ones(8, 3))] == [4, 4]


def test_on_a_single_device_nothing_is_refused():
    args = (torch.ones(8, 5), torch.ones(5, 5), deque())
    assert shards(*args, devices=1)[0][0] is not None
    assert all(given is arg for given, arg in zip(shards(*args, devices=1)[0][0], args, strict=True))


def test_another_batch_dimension_goes_for_all_tensors():
    hidden = torch.ones(2, 6, 4)
    assert [part.shape for part in first(hidden, dim=1)] == [(2, 3, 4), (2, 3, 4)]
    with pytest.raises(ValueError, match="has no dimension 1"):
        shards(hidden, torch.ones(6), dim=1)
    assert [part.shape for part in first(torch.ones(3, 6), dim=-1)] == [(3, 3), (3, 3)]


def test_an_empty_batch_and_a_call_without_tensors_go_to_replica_0_alone():
    assert plan_split((torch.ones(0, 3), torch.ones(1, 3)), {}, devices=4).rows == (0,)
    plan = plan_split((3, ["a", "b"]), {"flag": True}, devices=4)
    assert (plan.size, plan.rows) == (None, (1,))
    assert plan.shard(0) == ((3, ["a", "b"]), {"flag": True})
    assert plan_split((), {}, devices=4).shard(0) == ((), {})


def test_coo_tensors_are_cut_and_other_sparse_ones_refused():
    dense = torch.eye(5)
    parts = first(dense.to_sparse())
    assert all(part.layout is torch.sparse_coo for part in parts)
    assert torch.equal(torch.cat([part.to_dense() for part in parts]), dense)
    with pytest.raises(ValueError, match=r"sparse_csr .*COO"):
        shards(dense.to_sparse_csr())


def test_an_already_sharded_tensor_cuts_itself():
    class Sharded(torch.Tensor):
        evenly_shards = ()

        def evenly_cut(self, replica, rows, dim):
            return ("cut", replica, rows, dim)

    value = torch.ones(7, 2).as_subclass(Sharded)
    assert first(value) == [("cut", 0, (4, 3), 0), ("cut", 1, (4, 3), 0)]


# Structures


def test_every_container_keeps_its_type():
    x = torch.arange(4.0)
    for index, part in enumerate(first({"a": UserDict(x=x), "b": OrderedDict(x=x), "c": Pair(x, ["a"] * 4)})):
        assert isinstance(part["a"], UserDict)
        assert isinstance(part["b"], OrderedDict)
        assert part["c"].names == ["a", "a"]
        assert torch.equal(part["c"].image, x[2 * index : 2 * index + 2])


def test_strings_and_lengths_beside_tensors_are_split_item_by_item():
    batch = {
        "img": torch.ones(8, 2),
        "txt": list("abcdefgh"),
        "len": tuple(range(8)),
        "ids": [[i] for i in range(8)],
    }
    parts = first(batch)
    assert [part["txt"] for part in parts] == [list("abcd"), list("efgh")]
    assert [part["len"] for part in parts] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert parts[1]["ids"] == [[4], [5], [6], [7]]


def test_a_list_of_another_length_is_given_whole_as_the_same_object():
    layers = [1, 2, 3]
    assert all(args[1] is layers for args, _ in shards(torch.ones(8), layers))


def test_a_deque_that_forward_appends_to_is_the_drivers_own():
    memory = deque(maxlen=3)
    assert shards(torch.ones(4), kwargs={"memory": memory})[0][1]["memory"] is memory


def test_targets_as_a_list_of_dicts_of_tensors_go_with_their_rows():
    targets = [{"boxes": torch.full((i + 1, 4), i), "id": i} for i in range(3)]
    plan = plan_split((torch.ones(3, 8), targets), {}, devices=2)
    assert [t["id"] for t in plan.shard(0)[0][1]] == [0, 1]
    assert plan.shard(1)[0][1][0]["boxes"] is targets[2]["boxes"]
    leaf = plan.tensor_leaves()[2]
    assert (leaf.path, plan.cut(leaf, 0) is leaf.value, plan.cut(leaf, 1)) == (
        'args[1][1]["boxes"]',
        True,
        None,
    )


def test_one_dict_per_layer_is_no_list_of_samples():
    caches = [{"k": torch.ones(8, 2)} for _ in range(3)]
    assert [len(args[1][0]["k"]) for args, _ in shards(torch.ones(8), caches)] == [4, 4]


def test_as_many_layers_as_rows_is_ambiguous_until_said():
    caches = [{"k": torch.ones(2, 5)} for _ in range(2)]
    with pytest.raises(ValueError, match="one item per row or one batch per item"):
        shards(torch.ones(2), caches)
    assert [len(args[1]) for args, _ in shards(torch.ones(2), samples(caches))] == [1, 1]
    assert [len(args[1]) for args, _ in shards(torch.ones(2), caches, in_dims=(0, 0))] == [2, 2]


def test_images_of_different_sizes_are_samples_when_said_so():
    images = [torch.ones(3, 4 + i, 5) for i in range(4)]
    assert [len(part) for part in first(samples(images))] == [2, 2]
    assert [len(part) for part in first(images, in_dims=("samples",))] == [2, 2]


def test_samples_of_a_tensor_or_a_string_are_refused():
    for wrong in (torch.ones(3), "abc"):
        with pytest.raises(TypeError, match=r"evenly\.samples"):
            samples(wrong)


def test_replicated_containers_are_the_same_object():
    cache = {"k": torch.ones(5, 5)}
    assert all(args[1] is cache for args, _ in shards(torch.ones(8), replicate(cache)))


def test_packed_sequences_can_be_replicated_and_be_samples():
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    assert all(args[1] is packed for args, _ in shards(torch.ones(4), replicate(packed)))
    plan = plan_split((samples([packed] * 4),), {}, devices=2)
    mine = [None if (part := plan.cut(leaf, 1)) is None else part * 2 for leaf in plan.tensor_leaves()]
    assert [item.data.tolist() for item in plan.build(1, mine)[0][0]] == [[2, 2, 2]] * 2


def test_nested_tensors_are_refused_with_the_remedy():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"args\[0\] is a nested tensor.*unbind"):
        shards(nested)


def test_a_single_row_runs_on_what_the_user_gave():
    batch = {"x": torch.ones(1, 2), "log": []}
    assert shards(batch)[0][0][0] is batch


# in_dims


def test_in_dims_names_the_dimension_of_each_argument():
    (a, ka), (b, _) = shards(
        torch.ones(6, 2),
        (torch.ones(3, 6), torch.ones(5)),
        kwargs={"x": torch.ones(6)},
        in_dims=(0, (1, None)),
    )
    assert [a[0].shape, a[1][0].shape, a[1][1].shape, ka["x"].shape] == [(3, 2), (3, 3), (5,), (3,)]
    assert b[1][0].shape == (3, 3)


def test_in_dims_as_a_dict_names_only_some_arguments():
    kwargs = {"mask": torch.ones(5, 5), "h": {"c": torch.ones(2, 8), "n": torch.ones(8)}}
    for args, kw in shards(torch.ones(8, 5), kwargs=kwargs, in_dims={"mask": None, "h": {"c": 1}}):
        assert (len(args[0]), kw["mask"].shape, kw["h"]["c"].shape, kw["h"]["n"].shape) == (
            4,
            (5, 5),
            (2, 4),
            (4,),
        )


@pytest.mark.parametrize(
    ("in_dims", "message"),
    [
        ((0,), "in_dims has 1 entry, but the call has 2 positional arguments: give one for each"),
        ((0, 2), r"dimension 2 for args\[1\], which has 1 dimensions"),
        ((1, 0), r"args\[1\] has size 4 along dimension 0"),
        ({"nobody": 0}, r"in_dims names \['nobody'\]"),
        (("rows", 0), r"in_dims gives 'rows' for args\[0\]"),
        (((0, 0), 0), r"in_dims gives \(0, 0\) for args\[0\]"),
        (("samples", 0), r"\"samples\" for args\[0\], but that is a Tensor"),
    ],
)
def test_in_dims_that_do_not_fit_are_refused_with_the_path(in_dims, message):
    with pytest.raises(ValueError, match=message):
        shards(torch.ones(4, 3), torch.ones(4), in_dims=in_dims)


def test_in_dims_for_a_string_is_refused():
    with pytest.raises(ValueError, match=r'dimension 0 for args\[0\]\["t"\], but that is a str'):
        shards({"x": torch.ones(4), "t": "text"}, in_dims=(0,))


# Packed sequences


def ragged(lengths, **options):
    steps = [torch.randn(length, 2) for length in lengths]
    return steps, pack_sequence(steps, **options)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [([5, 4, 2, 2, 1], {"enforce_sorted": True}), ([2, 5, 1, 4, 2], {"enforce_sorted": False})],
)
def test_packed_sequences_are_split_by_samples_in_the_users_order(lengths, options):
    steps, packed = ragged(lengths, **options)
    for rows, part in zip(([0, 1, 2], [3, 4]), first(packed), strict=True):
        assert isinstance(part, PackedSequence)
        padded, found = pad_packed_sequence(part, batch_first=True)
        assert found.tolist() == [lengths[row] for row in rows]
        for sample, row in zip(padded, rows, strict=True):
            assert torch.equal(sample[: lengths[row]], steps[row])


def test_a_packed_shard_is_what_packing_the_rows_gives():
    steps, packed = ragged([2, 5, 1, 4], enforce_sorted=False)
    expected = pack_sequence(steps[2:], enforce_sorted=False)
    part = first(packed)[1]
    assert torch.equal(part.data, expected.data)
    assert torch.equal(part.batch_sizes, expected.batch_sizes)
    assert torch.equal(part.sorted_indices, expected.sorted_indices)


def test_a_packed_sequence_runs_through_an_rnn_and_lets_gradients_through():
    lengths = torch.tensor([2, 4, 3])
    x = torch.randn(3, 4, 2, requires_grad=True)
    lstm = torch.nn.LSTM(2, 3)
    whole, _ = pad_packed_sequence(lstm(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0])
    (expected,) = torch.autograd.grad(whole.square().sum(), x)
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    parts = [lstm(part)[0].data.square().sum() for part in first(packed)]
    (found,) = torch.autograd.grad(sum(parts), x)
    assert torch.allclose(found, expected, atol=1e-6)


def test_a_packed_sequence_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"args\[1\] is a PackedSequence of 3 samples"):
        shards(torch.ones(4), ragged([3, 2, 1])[1])


# Around the plan


def test_any_rows_can_be_selected():
    plan = plan_split((torch.arange(6), list("abcdef"), ragged([6, 5, 4, 3, 2, 1])[1]), {}, devices=2)
    (x, names, packed), _ = plan.select([4, 1])
    assert x.tolist() == [4, 1]
    assert names == ["e", "b"]
    assert pad_packed_sequence(packed)[1].tolist() == [2, 5]
    assert plan.select([1, 2])[0][0].tolist() == [1, 2]


def test_a_shard_can_be_built_around_other_tensors():
    args = ({"x": torch.ones(4), "n": torch.tensor(1.0)}, ragged([2, 2, 1, 1])[1], ["a"] * 4)
    plan = plan_split(args, {"k": torch.ones(4)}, devices=2)
    assert [(leaf.path, leaf.dim) for leaf in plan.tensor_leaves()] == [
        ('args[0]["x"]', 0),
        ('args[0]["n"]', None),
        ("args[1].data", 0),
        ('kwargs["k"]', 0),
    ]
    mine = [plan.cut(leaf, 1).clone() for leaf in plan.tensor_leaves()]
    (batch, packed, names), kwargs = plan.build(1, mine)
    assert batch["x"] is mine[0]
    assert batch["n"] is mine[1]
    assert packed.data is mine[2]
    assert kwargs["k"] is mine[3]
    assert names == ["a", "a"]


def test_gradients_of_parts_merge_into_the_gradient_of_the_whole():
    plan = plan_split((torch.ones(3, 2), torch.ones(1, 2), ragged([1, 3, 2], enforce_sorted=False)[1]), {}, devices=2)
    rows, whole, packed = plan.tensor_leaves()
    assert plan.merge(rows, [torch.ones(2, 2), None]).tolist() == [[1, 1], [1, 1], [0, 0]]
    assert plan.merge(whole, [torch.ones(1, 2), torch.ones(1, 2)]).tolist() == [[2, 2]]
    assert torch.equal(plan.merge(packed, [plan.cut(packed, 0), plan.cut(packed, 1)]), packed.value)
    assert plan.merge(rows, [None, None]) is None


def test_a_plan_says_how_each_argument_is_treated():
    plan = plan_split((torch.ones(4), 3, replicate(torch.ones(2)), ["a"] * 4), {}, devices=2)
    assert [(leaf.path, leaf.treatment) for leaf in plan.leaves] == [
        ("args[0]", "split"),
        ("args[1]", "object"),
        ("args[2]", "whole"),
        ("args[3]", "samples"),
    ]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5))
def test_every_row_goes_to_exactly_one_replica(size, devices):
    x, names = torch.arange(size), [str(i) for i in range(size)]
    parts = shards({"x": x, "names": names, "n": 3}, devices=devices)
    assert torch.cat([args[0]["x"] for args, _ in parts]).tolist() == list(range(size))
    assert [name for args, _ in parts for name in args[0]["names"]] == names
