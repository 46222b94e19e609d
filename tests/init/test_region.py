"""Regions of tensors: those of all ranks are the whole, each element once, and what two have in common is what sets have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from app.errors import PresetError
from app.init import region
from app.init.model_tensors import digest_of
from app.init.region import Region


def places(it: Region) -> list[int]:
    """Indices of the elements, without the code under test."""
    return [it.start + run * it.stride + at for run in range(it.count // it.run if it.count else 0) for at in range(it.run)]


@st.composite
def regions(draw: st.DrawFn, size: int = 60) -> Region:
    """Any region of a tensor of this many elements."""
    run = draw(st.integers(1, 9))
    stride = draw(st.integers(run, 12))
    runs = draw(st.integers(0, (size - run) // stride + 1))
    start = draw(st.integers(0, size - run - max(0, runs - 1) * stride))
    return Region.made(start, runs * run, run, stride)


@given(regions())
def test_a_region_takes_its_elements_in_order(it: Region) -> None:
    whole = torch.arange(100)[5:65]  # a view, whose memory begins elsewhere
    assert it.take(whole).tolist() == [at + 5 for at in places(it)]
    assert it.end == max(places(it), default=it.start - 1) + 1
    assert it.runs <= 1 or it.run < it.stride


@given(regions(), st.integers(1, 5))
def test_shares_are_the_region(it: Region, count: int) -> None:
    shares = [it.part(*it.share(count, index)) for index in range(count)]
    assert [at for share in shares for at in places(share)] == places(it)
    unit = it.run if it.runs > 1 else 1
    assert max(share.count for share in shares) - min(share.count for share in shares) <= unit


@settings(max_examples=500)
@given(regions(), regions())
def test_what_two_regions_have_in_common(one: Region, other: Region) -> None:
    found = list(one.overlaps(other))
    assert all(part.count for part in found)
    assert sorted(at for part in found for at in places(part)) == sorted(set(places(one)) & set(places(other)))
    for it, part in itertools.product((one, other), found):
        assert [places(it)[at] for at in places(it.inside(part))] == places(part)


def test_a_digest_is_of_the_place_in_long_tensors_too() -> None:
    """Of more elements than are hashed at a time, whose ends are within a run."""
    whole = torch.arange(300 * 1001, dtype=torch.float32).view(300, 1001)
    left, right = Region.made(0, 300 * 990, 990, 1001), Region.made(990, 300 * 11, 11, 1001)
    found = digest_of("w", left.take(whole), left) + digest_of("w", right.take(whole), right)
    assert found & (2**64 - 1) == digest_of("w", whole)
    assert digest_of("w", left.take(whole), Region.flat(0, left.count)) != digest_of("w", left.take(whole), left)


# ---- What DTensor does --------------------------------------------------------------------------------------------------


def as_rank(rank: int, ranks: int) -> None:
    """Be one of so many processes, which answer nothing."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    _clear_sharding_prop_cache()  # it has meshes, as the rank before saw them
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    assert not torch.distributed.is_initialized()
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def divided(whole: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """A parameter as tensor parallelism and then FSDP2 leave it."""
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], (placement,), src_data_rank=None))
    fully_shard(module, mesh=mesh["dp_shard"])
    assert isinstance(module.weight, DTensor)
    return module.weight


LAYOUTS: list[tuple[tuple[int, ...], Any]] = [
    ((4,), (Shard(0),)),
    ((3,), (Shard(1),)),
    ((2, 2), (Replicate(), Shard(0))),
    ((2, 3), (Shard(0), Shard(1))),
    ((2, 2), (Shard(0), Shard(0))),
    ((2, 2), (Shard(0), Replicate())),
    ((2, 2), (Replicate(), Replicate())),
    # FSDP2 over tensor parallelism, also where nothing comes out even: then DTensor's own arithmetic of strided shards is not
    # what FSDP2 has done.
    *itertools.product([(1, 2), (2, 2), (3, 2), (2, 3)], [Shard(0), Shard(1), Replicate()]),
]


@pytest.mark.parametrize("shape", [(7, 5, 3), (4, 6, 2), (1, 3, 5), (8, 6), (3, 4)])
@pytest.mark.parametrize(("sizes", "layout"), LAYOUTS)
def test_a_dtensor_has_what_its_region_says(shape: tuple[int, ...], sizes: tuple[int, ...], layout: Any) -> None:
    whole = torch.arange(float(prod(shape))).view(shape)
    found = []
    for rank in range(prod(sizes)):
        as_rank(rank, prod(sizes))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_shard", "tp")[: len(sizes)])
        is_plain = isinstance(layout, tuple)
        tensor = distribute_tensor(whole, mesh, layout, src_data_rank=None) if is_plain else divided(whole, mesh, layout)
        it = Region.of(tensor)
        assert torch.equal(it.take(whole), tensor.to_local().detach().reshape(-1))
        count, index = region.copies(tensor)
        found.append((index, it))
    for copy in range(count):
        assert sorted(at for index, it in found if index == copy for at in places(it)) == list(range(whole.numel()))


@pytest.mark.parametrize("placements", [(Shard(2),), (_StridedShard(0, split_factor=2),), (Partial(),)], ids=str)
def test_other_layouts_are_refused(placements: Any) -> None:
    as_rank(0, 2)
    tensor = DTensor.from_local(torch.zeros(4, 4, 4), init_device_mesh("cpu", (2,)), placements)
    with pytest.raises(PresetError, match=r"block\.weight, .* neither rows nor columns"):
        Region.of(tensor, "block.weight")


def test_every_value_of_a_digest_stays_what_it_was() -> None:
    """Run folders have digests of the versions before."""
    assert digest_of("w", torch.arange(10.0)) == 18225559488494427560
    assert digest_of("w", torch.arange(4.0), Region.flat(6, 4)) == 7905625048522861872
    assert digest_of("w", torch.arange(10, dtype=torch.bfloat16)) == 7646614780339793167
