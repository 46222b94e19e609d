"""Four processes save small weights, states and averages under each layout of a mesh and read them under every other.

    python tests/scripts/layouts.py FOLDER

Prints a line for each pair. Nothing is trained: gradients are given, so that the layouts are all that differs.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from app.checkpoints import checkpoint, step_folders, stored_weights
from app.checkpoints.sharded_state import Shards, WeightAverage
from app.init import model_tensors
from app.runs.claim import claim

RANKS = 4
SHAPES = {"up": (6, 5), "down": (5, 6), "odd": (7, 3), "bias": (9,), "norm": (2,), "single": (1,)}
PARTS = {"up": 0, "down": 1, "odd": 0}
"""Along which dimension tensor parallelism divides; the others it leaves to all ranks of a group."""
LAYOUTS = {"ddp": (), "fsdp2": (4,), "hsdp": (2, 2), "tp2_fsdp2": (2, 2), "tp4": (1, 4), "tp1_fsdp2": (4, 1)}


def gradient(name: str, step: int) -> Tensor:
    shape = SHAPES[name]
    return torch.sin(torch.arange(1.0, prod(shape) + 1).view(shape) * (step + 1) * len(name))


def build(layout: str, weights: float) -> nn.Module:
    module, sizes = nn.Module(), LAYOUTS[layout]
    for name in SHAPES:
        module.register_parameter(name, nn.Parameter(gradient(name, 7) * weights))
    if layout == "ddp":
        return module
    if layout == "fsdp2":
        return fully_shard(module)
    names = ("dp_replicate", "dp_shard") if layout == "hsdp" else ("dp_shard", "tp")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for name, dim in PARTS.items() if "tp" in names else ():
        whole = getattr(module, name).detach()
        setattr(module, name, nn.Parameter(distribute_tensor(whole, mesh["tp"], (Shard(dim),), src_data_rank=None)))
    return fully_shard(module, mesh=mesh if layout == "hsdp" else mesh["dp_shard"])


def parts(layout: str, weights: float) -> tuple[nn.Module, torch.optim.Optimizer, WeightAverage, Shards]:
    model = build(layout, weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    accelerator: Any = SimpleNamespace(num_processes=RANKS, process_index=dist.get_rank())
    prepared = SimpleNamespace(optimizer=optimizer)
    shards = Shards(accelerator, model, prepared)
    return model, optimizer, WeightAverage(shards, decay=0.9), shards


def trained(layout: str) -> Shards:
    model, optimizer, average, shards = parts(layout, 1.0)
    for step in range(2):
        for name, parameter in model.named_parameters():
            whole, parameter.grad = gradient(name, step), torch.zeros_like(parameter)
            of = model_tensors.local_pieces(model)[name]
            local = getattr(parameter.grad, "to_local", lambda grad=parameter.grad: grad)()
            local.view(-1).copy_(of.region.take(whole))
        optimizer.step()
        average.update()
    return shards


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, value)
    return found


def save(layout: str, run_dir: Path) -> Path:
    shards, rank = trained(layout), dist.get_rank()
    owned = shards.owned_pieces()
    run_dir.mkdir(parents=True, exist_ok=True)
    ours = claim(run_dir) if rank == 0 else None
    made = step_folders.begin(ours, 1) if ours else None
    (folder, *_) = gathered(made)
    entries = gathered(step_folders.write_pieces(folder, rank, owned))
    state = {"step": 1, "optimizer": shards.scalars()}
    if ours:
        step_folders.commit(ours, 1, entries, state=state, buffers={})
    dist.barrier()
    return step_folders.path_of(run_dir, 1)


def whole(folder: Path) -> dict[tuple[str, str], Tensor]:
    """All tensors of a checkpoint, as `samerun export` takes them."""
    reader = step_folders.Reader(folder)
    keys = reader.keys()
    return {
        (key, name): torch.frombuffer(bytearray().join(content.chunks), dtype=torch.float32).view(content.shape)
        for key in keys
        for name, content in reader.contents(key).items()
    }


def read(layout: str, folder: Path, expected: dict[tuple[str, str], Tensor]) -> str:
    """Take up a checkpoint and compare it bit for bit; return the digest of the weights that all ranks have then."""
    model, _, _, shards = parts(layout, 0.5)
    reader = step_folders.Reader(folder)
    shards.allocate_state(reader.keys(), reader.state["optimizer"])
    pieces = shards.pieces()
    for piece in pieces:
        reader.read_into(piece)
        assert torch.equal(piece.values, piece.region.take(expected[piece.key, piece.name])), (layout, folder, piece.name)
    assert {piece.key for piece in pieces} <= {"weight", "average", "exp_avg", "exp_avg_sq"}
    assert shards.scalars() == {"step": 2.0}
    stored = stored_weights.open_stored(folder)  # as `train.init_from` reads: the averages
    for name, it in model_tensors.local_pieces(model).items():
        fresh = torch.empty_like(it.values)
        stored[name].read_into(fresh, it.region)
        assert torch.equal(fresh, it.region.take(expected["average", name])), (layout, folder, name)
        assert torch.equal(checkpoint._gathered(gathered, it), expected["weight", name].flatten()), (layout, folder, name)
    return model_tensors.digest(model, gathered)


def be(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    folders = {layout: save(layout, Path(folder) / layout) for layout in LAYOUTS}
    reference = whole(folders["ddp"])
    for written, place in folders.items():
        expected = whole(place)
        assert expected.keys() == reference.keys()
        for at, values in expected.items():
            torch.testing.assert_close(values, reference[at], rtol=1e-6, atol=1e-7)
        digests = {layout: read(layout, place, expected) for layout in LAYOUTS}
        assert len({*gathered(tuple(digests.values()))}) == 1
        assert len({*digests.values()}) == 1, digests
        if rank == 0:
            print(f"{written}: {len(digests)}", flush=True)
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=be, args=(rank, sys.argv[1])) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))
