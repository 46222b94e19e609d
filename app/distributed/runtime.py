"""The process group, its device mesh and the device. Only this module builds an `Accelerator`.

Promises: the Accelerator is built from what the launcher promised and from the batch plan, never from defaults; on a
machine without an accelerator every preset runs on CPU through gloo, sharded as it would be on GPUs; `together` turns an
error of one rank into the same error of all; `close` leaves no process hanging. `handshake` then checks what was built.

The mesh's dimensions have Accelerate's names and order, the innermost last: `dp_replicate` (copies of the model), `dp_shard`
(shards of a copy), `tp` (parts of every large matrix) and `cp` (parts of every sequence). HSDP has (dp_replicate, dp_shard),
tensor parallelism (dp_shard, tp), with a dp_shard of size 1 if need be, and context parallelism (dp_shard, cp), where FSDP2
shards the model over both. Ranks of one node are neighbors: what is exchanged most, the innermost, stays within a node.

Messages of other libraries that appear at every start and that need no action are filtered by their text (torch 2.14,
deepspeed 0.19.8); all others are shown.

DeepSpeed compiles a C++ operator on first use. torch guards the folder of such an operator by a file named `lock`, which a
process that is killed while it compiles or loads leaves behind, so that every later one would wait for ever. So
`load_operators` does it before DeepSpeed asks for them, in one process at a time under a lock of the kernel's, which ends with
its holder: whoever has that finds a `lock` only if it is a dead process's. torch compiles with whatever `ninja` is on the PATH,
and one version compiles again what another one has: so it is always the one that DeepSpeed requires.

Most presets set few of DeepSpeed's keys, and Accelerate makes a DeepSpeed config of them; a preset can also name a config file.
"""

from __future__ import annotations

import fcntl
import io
import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    patch_environment,
    set_seed,
)
from torch.distributed import DistNetworkError
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from app.data.preprocessing import refuse_prepared
from app.distributed import handshake, model_preparation, numerics
from app.distributed.agreement import LONGEST_WAIT, Ranks, connecting, let_wait
from app.environment import deepspeed_file, host
from app.environment.launched import NO_FP16_ON_CPU, Launched
from app.errors import PresetError, TopologyError
from app.recipe.schema import BatchPlan

_RANK_0_LATE = timedelta(seconds=45)
"""Time by which rank 0 may start later than the others, if no launcher that waits for it started them."""
_MEETING = timedelta(minutes=30)
"""Time to wait for the others: torch's own time for gloo. Nodes read Python from a busy disk for minutes."""
_COLLECTIVE = timedelta(minutes=30)
"""Shortest time-out of a collective between devices: torch's own for gloo. For NCCL torch has 10 minutes."""


class Runtime:
    """The processes that train together, seen from one of them."""

    def __init__(
        self,
        launched: Launched,
        plan: BatchPlan,
        *,
        clip_norm: float | None = None,
        tf32: bool = False,
        deterministic: bool = False,
        hang_timeout_s: int | None = None,
        workers: int | None = None,
    ) -> None:
        """Join the process group and take a device, which computes as the recipe's `tf32` and `deterministic` say (`numerics`).

        `clip_norm` is the recipe's gradient clipping norm, `hang_timeout_s` that of the watchdog (0: it watches nothing), which
        is to see before any collective is over that the training stands still; `workers` is how many processes are to make this
        one's samples, None: as many as its cores allow. Raises PresetError if the preset contradicts the
        recipe, RecipeError if the environment does, and TopologyError if the processes cannot meet, or two of them would share
        a device.
        """
        self.launched = launched
        self.plan = plan
        self.workers = workers
        self.signs_of_life, self.step = 0, 0  # see `alive`
        os.environ.update(launched.variables)  # the only way to pass settings to Accelerate
        self._collective = _time_out(hang_timeout_s)
        on_cpu = launched.use_cpu or not torch.accelerator.is_available()
        if on_cpu and launched.mixed_precision == "fp16":
            found = "the preset asks for the CPU" if launched.use_cpu else f"torch {torch.__version__} finds no GPU here"
            raise PresetError(f"mixed_precision is fp16, and {found}: {NO_FP16_ON_CPU}.")
        silence_libraries(on_cpu=on_cpu)
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        try:
            if launched.variables and launched.rank != 0:  # torch would try for half an hour; a launcher's processes have met
                dist.TCPStore(str(address), int(port or 0), is_master=False, wait_for_workers=False, timeout=_RANK_0_LATE)
            store: dist.Store | None = None  # until the group, which has its own, is made: without a launcher rank 0 serves it
            if launched.world_size > 1:
                store, _, _ = next(dist.rendezvous("env://", timeout=_MEETING))
                handshake.check_devices(store, handshake.own_device(launched, on_cpu=on_cpu), launched.world_size)
            with connecting(launched.rank):
                self.accelerator = _build_accelerator(launched, plan, clip_norm or 0.0, self._collective, on_cpu=on_cpu)
        except DistNetworkError as error:
            raise TopologyError(
                f"rank {launched.rank} of {launched.world_size} on {socket.gethostname()} cannot join the others at "
                f"MASTER_ADDR={address}, MASTER_PORT={port}: {str(error).splitlines()[0]}. MASTER_ADDR must be the name or "
                "address of rank 0's machine, and MASTER_PORT must be free there; to change them, set both in the environment "
                "of all processes."
            ) from error
        del store
        self.mesh: DeviceMesh | None = self.accelerator.torch_device_mesh
        """The device mesh, if ranks have different tasks: (dp_replicate, dp_shard), (dp_shard, tp) or (dp_shard, cp)."""
        self._data_group: dist.ProcessGroup | None = None
        """Ranks over which values of samples are summed; None: all."""
        if launched.processes_per_rank > 1:
            shape = launched.data_ranks, launched.processes_per_rank
            names = ("dp_shard", "tp" if launched.tensor_parallel > 1 else "cp")
            self.mesh = init_device_mesh(self.accelerator.device.type, shape, mesh_dim_names=names)
            self._data_group = self.mesh.get_group("dp_shard")
        self._ranks = Ranks()
        # After Accelerate, which sets some of it.
        self.numerics = numerics.set_up(self.device, tf32=tf32, deterministic=deterministic)
        model_preparation.survive_compile_failures(self.accelerator)

    @property
    def is_main(self) -> bool:
        """True in the one process that writes."""
        return bool(self.accelerator.is_main_process)

    @property
    def device(self) -> torch.device:
        """This process's device, with its number: in a single process Accelerate's device has none, and threads ask for it."""
        device: torch.device = self.accelerator.device
        if device.type == "cpu" or device.index is not None:
            return device
        return torch.device(device.type, torch.get_device_module(device).current_device())

    def input_dtype(self, weights: torch.dtype) -> torch.dtype:
        """Return the dtype of the model's inputs: DeepSpeed casts weights to the preset's precision, but not inputs."""
        return numerics.HALF.get(self.launched.mixed_precision, weights) if self.launched.strategy == "deepspeed" else weights

    def seed(self, seed: int) -> None:
        """Seed the generators of Python, NumPy and torch, identically on every rank."""
        set_seed(seed % 2**32)

    def gather(self, value: Any) -> list[Any]:
        """Return the picklable `value` of every rank, in the order of the ranks."""
        return self._ranks.gather(value)

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum, over the data-parallel ranks, of what each has of its samples, in the tensor's shape and type."""
        if self._data_group is None:
            summed: torch.Tensor = self.accelerator.reduce(values, "sum")
            return summed
        summed = values.clone()
        torch.distributed.all_reduce(summed, group=self._data_group)
        return summed

    def gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows [N, ...] of all data-parallel ranks, one rank's after the other's; each has as many."""
        if self._data_group is None:
            gathered: torch.Tensor = self.accelerator.gather(rows)
            return gathered
        parts = [torch.empty_like(rows) for _ in range(self.launched.data_ranks)]
        torch.distributed.all_gather(parts, rows.contiguous(), group=self._data_group)
        return torch.cat(parts)

    def from_main(self, value: Any) -> Any:
        """Return the main process's picklable `value` on every rank."""
        return self._ranks.from_main(value)

    def greatest(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise maximum of the ranks' values. It does not use the devices, which continue meanwhile."""
        return self._ranks.greatest(values)

    def alive(self, *, step: int | None = None) -> None:
        """Give a sign of life, and the number of steps done. `watchdog` waits for these signs; any thread may give them."""
        self.signs_of_life += 1
        if step is not None:
            self.step = step

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the block on every rank and wait for all; if any raised a SamerunError, raise the first one on all."""
        with self._ranks.together():
            yield
        self.alive()

    def prepare(self, *objects: Any) -> Any:
        """Return the objects as `Accelerator.prepare` returns them: a single one, or a tuple."""
        with warnings.catch_warnings():
            # torch 2.15 has a new name for this option of DDP, which Accelerate 1.15 cannot pass on yet.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
            prepared = self.accelerator.prepare(*objects)
        wrapped = getattr(self.accelerator, "deepspeed_engine_wrapped", None)  # only under DeepSpeed
        if wrapped is not None:  # ZeRO's own group has torch's time-outs (deepspeed 0.19.8, utils/groups.py)
            let_wait(wrapped.engine.data_parallel_group, self._collective)
        return prepared

    def deal(self, loader: torch.utils.data.DataLoader) -> Any:
        """Return this data rank's shares of a loader's global micro-batches, as Accelerate deals them, in the process's memory.

        Accelerate would copy each on the stream that computes; `app.data.loader` does it while that is at work.
        """
        if self.launched.processes_per_rank == 1:
            return self.accelerator.prepare_data_loader(loader, device_placement=False)
        dealt = prepare_data_loader(
            loader,
            self.accelerator.device,
            num_processes=self.launched.data_ranks,
            process_index=self.launched.data_rank,
            split_batches=self.accelerator.split_batches,
            even_batches=self.accelerator.even_batches,
            put_on_device=False,
            rng_types=[],
        )
        self.accelerator._dataloaders.append(dealt)  # released at the end
        return dealt

    def average_buffers(self, model: torch.nn.Module) -> None:
        """Average floating-point buffers (running statistics of batch norms) over the ranks.

        Each rank has seen other samples. DDP would copy rank 0's, ZeRO and FSDP2 would leave them apart.
        """
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        if buffers and self.launched.data_ranks > 1:
            flat = self.reduce(torch.cat([buffer.detach().flatten().double() for buffer in buffers]))
            flat /= self.launched.data_ranks
            for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(mean.view_as(buffer))

    def close(self, *prepared: Any) -> None:
        """Leave the process group.

        The prepared objects must be released first: gloo with a live DDP model aborts at random at interpreter exit.
        """
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # the group must not be destroyed while the device still sends
        self.gather(None)
        self.accelerator.free_memory(*prepared)
        self._ranks.leave()
        self.accelerator.end_training()


def _time_out(hang_timeout_s: int | None) -> timedelta:
    """Return how long a collective between devices may take: well above the time after which the watchdog reports a hang."""
    return LONGEST_WAIT if hang_timeout_s == 0 else max(_COLLECTIVE, timedelta(seconds=2 * (hang_timeout_s or 0)))


def _build_accelerator(
    launched: Launched, plan: BatchPlan, clip_norm: float, collective: timedelta, *, on_cpu: bool
) -> Accelerator:
    # The preset's mesh has been read: to Accelerate a size of -1 is none, tensor parallelism breaks in it (1.15, `_prepare_tp`,
    # with transformers 5.23: ImportError), and its context parallelism drops attention masks, so documents would mix.
    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
    copies = None
    if launched.replicas > 1:
        shards = launched.world_size // launched.replicas
        copies = _Copies(dp_replicate_size=launched.replicas, dp_shard_size=shards, tp_size=1, cp_size=1, sp_size=1)
    joining = InitProcessGroupKwargs(timeout=collective)
    settings: dict[str, Any] = {
        # Handing over the plugin, not a number, is what keeps ACCELERATE_GRADIENT_ACCUMULATION_STEPS from winning silently.
        "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=plan.accumulation, sync_with_dataloader=False),
        # The samplers yield global micro-batches, Accelerate deals equal contiguous slices of them to the ranks.
        "dataloader_config": DataLoaderConfiguration(split_batches=True, even_batches=True),
        # Running statistics are averaged before they are used (`average_buffers`), so DDP need not send them every step.
        "kwargs_handlers": [DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True), joining],
    }
    if launched.strategy == "deepspeed":
        settings["deepspeed_plugin"] = _deepspeed_plugin(plan, clip_norm)
        load_operators()
    if on_cpu:
        return _accelerator_on_cpu(launched, settings, joining, copies)
    return Accelerator(parallelism_config=copies, **settings)


def load_operators() -> None:
    """Load, and compile if needed, the operator through which DeepSpeed's ranks on one machine exchange data on CPUs.

    Not its CPUAdam: torch's own optimizers step (`_deepspeed_plugin`). Raises PresetError where the folder of compiled
    operators cannot be used.
    """
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        return
    from ninja import BIN_DIR
    from torch.utils.cpp_extension import get_default_build_root  # on a machine without CUDA its import warns

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    try:
        root.mkdir(parents=True, exist_ok=True)
        refuse_prepared(root)  # what is compiled there is run here
        guard = (root / "samerun.flock").open("w")
    except OSError as error:
        raise PresetError(
            f"DeepSpeed compiles operators into {root}, which cannot be used ({error.strerror}): set "
            "TORCH_EXTENSIONS_DIR to a writable folder of your own"
        ) from error
    path = os.pathsep.join((BIN_DIR, os.environ.get("PATH", os.defpath)))
    with guard, patch_environment(path=path):
        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        if builder is not None and builder.is_compatible(verbose=False):
            if not any(root.glob(f"**/{builder.name}.so")):
                sys.stderr.write(f"compiling DeepSpeed's {builder.name} in {root}, once, in some minutes, or waiting for it\n")
            fcntl.flock(guard, fcntl.LOCK_EX)
            for leftover in root.glob(f"**/{builder.name}/lock"):
                leftover.unlink()
            builder.load(verbose=False)


def _deepspeed_plugin(plan: BatchPlan, clip_norm: float) -> DeepSpeedPlugin:
    """Return the preset's settings with those that the recipe and the plan decide. Raises PresetError."""
    plugin = DeepSpeedPlugin(gradient_accumulation_steps=plan.accumulation, gradient_clipping=clip_norm)
    config = plugin.deepspeed_config
    if problem := deepspeed_file.nvme_problem(config["zero_optimization"]):
        raise PresetError(problem)
    config |= {
        # DeepSpeed 0.19 clips at 1.0 unless it is given 0.0, and Accelerate does not pass 0.0 on.
        "gradient_clipping": clip_norm,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        # What steps on offloaded weights is torch's optimizer too. Accelerate 1.15 would put DeepSpeedCPUAdam in the place of
        # any, SGD as well (`map_pytorch_optim_to_deepspeed`). torch's fused AdamW is as fast: benchmarks/RESULTS.md.
        "zero_force_ds_cpu_optimizer": False,
    }
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return plugin


class _Copies(ParallelismConfig):
    """Accelerate's words for copies of a model, with the mesh's own name for their shards.

    Its own name is that of a dimension flattened out of one, of which torch 2.15 warns and which no mesh above it knows.
    """

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The dimensions over which FSDP2 keeps copies, and shards them."""
        return ["dp_replicate", "dp_shard"]


# ---- Only for machines without an accelerator ------------------------------------------------------------------------
# Presets are for GPUs. So that each of them can be tried and tested anywhere, this section makes the same sharding run on
# CPU through gloo; nothing outside it knows. The facts were measured with accelerate 1.15, deepspeed 0.19 and torch 2.15.


def _accelerator_on_cpu(
    launched: Launched, settings: dict[str, Any], joining: InitProcessGroupKwargs, copies: ParallelismConfig | None
) -> Accelerator:
    # Gathered and freed weights leave gaps that torch's aligned allocations do not fit into: half a model of extra memory.
    host.keep_freed(**({} if launched.strategy == "ddp" else {"most_bytes": 1 << 20}))
    if launched.strategy == "deepspeed":
        # With cpu=True Accelerate would drop DeepSpeed; without a backend it would see one process where DeepSpeed sees all.
        joining.backend = "gloo"
        # DeepSpeed has torch ask NVIDIA's library for GPUs before every optimizer step, in 0.2-0.5 ms.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
        # Small models stay below DeepSpeed's threshold for sharding a parameter: 0 shards all, as large models are.
        settings["deepspeed_plugin"].deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        with redirect_stdout(io.StringIO()):  # DeepSpeed prints that it has found an operator
            return Accelerator(**settings)
    if launched.strategy == "fsdp2":
        plugin = settings["fsdp_plugin"] = FullyShardedDataParallelPlugin()
        accelerator = Accelerator(cpu=True, **settings)
        # Accelerate knows FSDP on accelerators only and has fallen back to DDP. These attributes are all that it asks for.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        if copies is not None:  # this also refuses CPUs
            accelerator.state.parallelism_config = copies
            accelerator.state.device_mesh = copies.get_device_mesh("cpu")
        if launched.mixed_precision != "no":
            plugin.set_mixed_precision(launched.mixed_precision)
        return accelerator
    return Accelerator(cpu=True, **settings)


def silence_libraries(*, on_cpu: bool) -> None:
    """Leave out known messages; call it before DeepSpeed is imported, which Accelerate does under any preset."""
    # FSDP2 itself calls what torch has given new names, at every unit of every step.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    if on_cpu:
        logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
        cpp = logging.getLogger("torch.utils.cpp_extension")
        cpp.addFilter(lambda record: "No CUDA runtime is found" not in record.getMessage())
