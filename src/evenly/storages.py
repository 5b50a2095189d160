"""What a tensor holds on to, and how it is pickled with no more than its own bytes.

``torch.save`` writes the whole storage behind every tensor: a slice of one row drags the matrix along.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


def compact_pickling(state: object) -> Any:
    """Makes a ``pickle_module`` for ``torch.save`` that writes of each tensor its own bytes only.

    Tensors that share bytes share them in the file, too: tied weights stay tied. Strides are kept, except
    where the tensor leaves gaps (a column of a matrix), which becomes contiguous. Views that interleave, as
    two columns do, keep what lies between them. Accelerator tensors that have to be cut out of something
    larger go through the CPU, and are tagged so.

    Args:
        state: What is going to be saved, with this module and nothing in between.
    """
    finder = _TensorFinder()
    finder.dump(state)
    replacements = _own_bytes(finder.tensors, finder.whole_storages)

    class CompactPickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            replacement = replacements.get(id(obj))
            return NotImplemented if replacement is None else cast("Any", replacement).__reduce_ex__(2)

    return SimpleNamespace(__name__="pickle", Pickler=CompactPickler)


PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


class _Nowhere:
    def write(self, data: object) -> int:
        del data
        return 0


class _TensorFinder(pickle.Pickler):
    """Meets the tensors that pickling would meet, and writes nothing."""

    def __init__(self) -> None:
        super().__init__(_Nowhere(), protocol=2)
        self.tensors: dict[int, torch.Tensor] = {}
        self.whole_storages: set[int] = set()

    def persistent_id(self, obj: Any) -> str | None:
        if isinstance(obj, torch.Tensor):
            self.tensors[id(obj)] = obj
            # What hangs on a tensor as attributes is pickled with it. A subclass knows itself what it is
            # made of.
            return None if type(obj) in PLAIN_TYPES and vars(obj) else "tensor"
        if isinstance(obj, torch.UntypedStorage | torch.TypedStorage):
            self.whole_storages.add(obj.data_ptr())
            return "storage"
        return None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tells whether a new tensor over other bytes can stand for this one in every respect."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not vars(tensor)
    )


@dataclass
class _Region:
    """Bytes of one storage, from start to end, and the tensors over them."""

    start: int
    end: int
    tensors: list[torch.Tensor]


def _own_bytes(tensors: dict[int, torch.Tensor], whole: set[int]) -> dict[int, torch.Tensor]:
    """Gives those tensors that hold on to more bytes than they show a stand-in that does not."""
    by_storage: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors.values():
        if _is_plain(tensor):
            by_storage[_address(tensor)].append(tensor)
        elif tensor.layout is torch.strided and not tensor.is_meta and _has_storage(tensor):
            whole.add(_address(tensor))
    replacements: dict[int, torch.Tensor] = {}
    for address, sharers in by_storage.items():
        if address in whole:
            continue
        for region in _regions(sharers):
            replacements.update(_cut_out(region))
    return replacements


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _regions(tensors: Iterable[torch.Tensor]) -> list[_Region]:
    """Groups tensors over one storage into runs of bytes that overlap."""
    regions: list[_Region] = []
    for start, end, tensor in sorted(((*_extent(t), t) for t in tensors), key=lambda item: item[:2]):
        if regions and start < regions[-1].end:
            regions[-1].end = max(regions[-1].end, end)
            regions[-1].tensors.append(tensor)
        else:
            regions.append(_Region(start, end, [tensor]))
    return regions


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset())
    span = 0
    if tensor.numel():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in steps)
    return start * tensor.element_size(), (start + span) * tensor.element_size()


def _cut_out(region: _Region) -> dict[int, torch.Tensor]:
    first = region.tensors[0]
    layouts = {(t.storage_offset(), t.shape, t.stride(), t.dtype) for t in region.tensors}
    if len(layouts) == 1 and first.numel() * first.element_size() < region.end - region.start:
        # They are one and the same view, and it has gaps.
        shared = first.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {id(t): _like(t, shared.view_as(shared)) for t in region.tensors}
    whole = first.untyped_storage()
    # Bytes that are seen as several types torch.save refuses, and says so.
    if (region.start == 0 and region.end == whole.nbytes()) or len({t.dtype for t in region.tensors}) > 1:
        return {}
    as_bytes = torch.empty(0, dtype=torch.uint8, device=first.device).set_(whole)
    copy = as_bytes[region.start : region.end].cpu().clone().untyped_storage()
    return {
        id(t): _like(
            t,
            torch.empty(0, dtype=t.dtype).set_(
                copy, t.storage_offset() - region.start // t.element_size(), t.shape, t.stride()
            ),
        )
        for t in region.tensors
    }


def _like(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data.requires_grad_(tensor.requires_grad)
