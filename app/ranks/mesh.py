"""The device mesh, for models that are not sharded over all ranks. Only this module makes one.

Its dimensions have Accelerate's names and order, the innermost last: `dp_replicate` (copies of the model), `dp_shard` (shards
of a copy) and `tp` (parts of every large matrix). HSDP has (dp_replicate, dp_shard), tensor parallelism (dp_shard, tp), with
a dp_shard of size 1 if need be. Ranks of one node are neighbours: what is exchanged most, the innermost, stays within a node.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader

from app.place.launched import Launched


class _Copies(ParallelismConfig):
    """Accelerate's words for copies of a model, with the mesh's own name for their shards.

    Its own name is that of a dimension flattened out of one, of which torch 2.15 warns and which no mesh above it knows.
    """

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The dimensions over which FSDP2 keeps copies, and shards them."""
        return ["dp_replicate", "dp_shard"]


def of_copies(launched: Launched) -> ParallelismConfig | None:
    """Return what tells Accelerate of the copies of HSDP; None: there are none."""
    if launched.replicas == 1:
        return None
    return _Copies(
        dp_replicate_size=launched.replicas,
        dp_shard_size=launched.world_size // launched.replicas,
        tp_size=1,
        cp_size=1,
        sp_size=1,
    )


def build(accelerator: Accelerator, launched: Launched) -> DeviceMesh | None:
    """Return the mesh; None: the model is sharded over all ranks, or not at all. Called by all ranks together."""
    if launched.tensor_parallel == 1:
        mesh: DeviceMesh | None = accelerator.torch_device_mesh
        return mesh
    shape = launched.data_ranks, launched.tensor_parallel
    return init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("dp_shard", "tp"))


def deal(accelerator: Accelerator, launched: Launched, loader: DataLoader) -> Any:
    """Return this data-parallel rank's shares of a loader's global micro-batches, as Accelerate deals them."""
    if launched.tensor_parallel == 1:
        return accelerator.prepare_data_loader(loader, device_placement=False)
    dealt = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=launched.data_ranks,
        process_index=launched.data_rank,
        split_batches=accelerator.split_batches,
        even_batches=accelerator.even_batches,
        put_on_device=False,
        rng_types=[],
    )
    accelerator._dataloaders.append(dealt)  # which it lets go of at the end
    return dealt


def group_of_data(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the group of this rank over which what is of samples is added up; None: all ranks."""
    if mesh is None or "tp" not in (mesh.mesh_dim_names or ()):
        return None
    return mesh.get_group("dp_shard")
