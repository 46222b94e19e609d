"""The tensors of a run under each strategy: the elements of each parameter, of its optimizer state and average on this rank.

Under one process and DDP a rank holds whole parameters; under ZeRO-1/2/3 flat ranges of them, without the padding of
partitions; under FSDP2 rows, which are flat ranges too; under tensor parallelism rows or columns, or rows of those. `Shards`
returns all of them as `Piece`s: the full-precision weights, every state tensor of the optimizer, and the moving average of
the weights. State tensors have the parameter's shape, except with optimizers that step on whole parameters only
(`app/recipe/optimizers.py`). `check_optimizer` compares the prepared optimizer with the recipe.

DeepSpeed has no public access to these tensors. Its private attributes are used here and nowhere else; they were read in
deepspeed 0.19.8 (runtime/zero/stage_1_and_2.py and stage3.py, utils/tensor_fragment.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from app.distributed import model_preparation
from app.distributed.runtime import Runtime
from app.environment.topology import listed
from app.errors import CheckpointError, PresetError
from app.init.region import AVERAGE, WEIGHT, Piece, Region, copies
from app.optim import foreign
from app.optim.parameter_groups import Rule, set_rate

_SHOWN = 3
"""Differences that a message names."""
_REMEDY = "Try an unchanged preset of accelerate_configs/."


@dataclass(frozen=True)
class Fragment:
    """The elements of a parameter that this rank steps on."""

    name: str
    shape: tuple[int, ...]
    region: Region
    stepped: torch.Tensor
    """The tensor in the optimizer: the parameter itself, or a flat partition with elements of many."""
    offset: int = 0
    """Index of the first element in this rank's `stepped`."""
    copies: tuple[int, int] = (1, 0)
    """Number of ranks that hold the same elements, and this rank's index among them."""

    def piece(self, key: str, tensor: torch.Tensor) -> Piece:
        """Return the live view of these elements in a tensor with the layout of `stepped`."""
        local = tensor.detach()
        if isinstance(local, DTensor):
            local = local.to_local()
        values = local.view(-1).narrow(0, self.offset, self.region.count)  # `view`, unlike `reshape`, never copies
        return Piece(key, self.name, self.shape, self.region, values, self.copies)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside the wrappers of compiling and `prepare`.

    Accelerate's `unwrap_model` imports DeepSpeed under every strategy. That takes a second, and makes torch look for GPUs in a
    way that costs 0.2-0.5 ms in every optimizer step without a GPU (PYTORCH_NVML_BASED_CUDA_CHECK, torch 2.15).
    """
    inner: Any = model_preparation.uncompiled(model)
    if isinstance(inner, DistributedDataParallel) or type(inner).__module__.startswith("deepspeed."):
        inner = inner.module
    return model if inner is model else unwrapped(inner)


class Shards:
    """The tensors of a prepared model and optimizer, addressed by what they are."""

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, rule: Rule | type[Rule] = Rule
    ) -> None:
        """Find the tensors of a prepared `model` and `optimizer`. Raises PresetError if they are not accessible there.

        `rule` names scalar states: by its shape one could be that of a scalar parameter. Without, they are torch's.
        """
        self._scalars, self._counted = rule.scalars, rule.counted
        self.model, self._holder = unwrapped(model), optimizer.optimizer
        self.averages: list[torch.Tensor] | None = None
        """The moving averages of `weights`, in the same order, which `WeightAverage` sets."""
        parameters = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        is_plain = isinstance(self._holder, torch.optim.Optimizer)
        self.stepper: torch.optim.Optimizer = self._holder if is_plain else self._holder.optimizer
        """The optimizer that steps, inside the wrappers of `prepare`."""
        if is_plain:  # one process, DDP and FSDP2: it steps on the parameters themselves
            self._zero_flats = None
            is_sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())
            # A whole parameter among sharded ones is not a copy: nothing adds up its gradients.
            alike = (1, 0) if is_sharded else (accelerator.num_processes, accelerator.process_index)
            fragments = []
            for name, parameter in parameters.items():
                number = copies(parameter, name) if isinstance(parameter, DTensor) else alike
                fragments.append(Fragment(name, tuple(parameter.shape), Region.of(parameter, name), parameter, copies=number))
        else:
            self._zero_flats = _partitions(self._holder)
            find = _stage_3_fragments if _is_stage_3(self._holder) else _stage_1_and_2_fragments
            fragments = list(find(self._holder, parameters, accelerator.process_index))
        self.fragments = [fragment for fragment in fragments if fragment.region.count > 0]
        """This rank's elements of each parameter of which it has any."""
        # Every rank counts the steps of all parameters, even if it has no elements of one.
        self._stepped = [fragment.stepped for fragment in fragments] if self._zero_flats is None else self._zero_flats

    @property
    def weights(self) -> list[torch.Tensor]:
        """The live full-precision weights that this rank steps on, each 1-D; the average has the same order."""
        return [fragment.piece(WEIGHT, fragment.stepped).values for fragment in self.fragments]

    def pieces(self) -> list[Piece]:
        """Return this rank's share of all tensors of the run, as live views: a checkpoint is read into them."""
        found = []
        for index, fragment in enumerate(self.fragments):
            weight = fragment.piece(WEIGHT, fragment.stepped)
            found.append(weight)
            for key, state in self.states(fragment.stepped):
                if state.shape == fragment.stepped.shape:
                    found.append(fragment.piece(key, state))
                else:  # of a whole parameter, because other optimizers were refused
                    whole = Region.flat(0, state.numel())
                    found.append(Piece(key, weight.name, tuple(state.shape), whole, state.view(-1), weight.copies))
            if self.averages is not None:
                found.append(replace(weight, key=AVERAGE, values=self.averages[index]))
        return found

    def owned_pieces(self) -> list[Piece]:
        """Return the pieces that this rank writes. Together the ranks write every element of every tensor exactly once.

        Where several ranks hold the same elements, each writes an even share of every tensor. If the optimizer has weights for
        evaluation, these are written as averages.
        """
        pieces = self.pieces()
        if foreign.has_modes(self.stepper):
            with self.evaluated():
                pieces += [replace(it, key=AVERAGE, values=it.values.clone()) for it in pieces if it.key == WEIGHT]
        return [share for piece in pieces if (share := piece.share()).region.count > 0]

    def scalars(self) -> dict[str, float]:
        """Return the optimizer's scalars: the number of steps, and values derived from it; the same for all weights."""
        counts = [
            {key: float(value) for key, value in state.items() if key in self._scalars}
            for state in (self.stepper.state.get(tensor) for tensor in self._stepped)
            if state
        ]
        counts = [count for count in counts if count]  # Muon's matrices count no steps
        assert all(count == counts[0] for count in counts), f"some parameters were updated more often than others: {counts}"
        return counts[0] if counts else {}

    def counts(self) -> list[dict[str, Any]]:
        """Return, for each parameter group, the settings that the optimizer's own steps change."""
        groups = ({key: group[key] for key in self._counted} for group in self.stepper.param_groups)
        return [{key: it.item() if torch.is_tensor(it) else it for key, it in group.items()} for group in groups]

    def allocate_state(
        self, keys: Collection[str], scalars: Mapping[str, float], counts: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Give a fresh optimizer state to read into: zeros, and the checkpoint's `scalars` and `counts`.

        `keys` are the keys of the checkpoint's pieces; weights and average are skipped. The optimizer creates its state itself,
        in a step with a learning rate and gradients of zero, as in torch.distributed.checkpoint.state_dict: only it knows the
        types and devices. Raises CheckpointError if its state has other keys than the checkpoint's.
        """
        expected = set(keys) - {WEIGHT, AVERAGE}
        if not expected and not scalars:
            return  # an optimizer without state, or a checkpoint from before the first step
        self._step_on_zeros()
        found = {key for tensor in self._stepped for key, _ in self.states(tensor)}
        numbers = {key for tensor in self._stepped for key in self.stepper.state[tensor] if key in self._scalars}
        if self._stepped and (found != expected or numbers != scalars.keys()):
            theirs, ours = (" and ".join(sorted(keys)) or "nothing" for keys in (expected, found))
            raise CheckpointError(
                f"the checkpoint holds {theirs} for each weight, but this run's optimizer, {type(self.stepper).__name__}, "
                f"uses {ours}: resume with the optimizer of the checkpoint (optim.name, optim.momentum, optim.settings)."
            )
        for tensor in self._stepped:
            state = self.stepper.state[tensor]
            for _, values in self.states(tensor):
                values.zero_()  # SGD's momentum has the decay of the weights
            for key in scalars.keys() & state.keys():
                value = scalars[key]
                state[key] = state[key].fill_(value) if torch.is_tensor(state[key]) else type(state[key])(value)
        for group, own in zip(self.stepper.param_groups, counts, strict=False):
            group.update({key: group[key].fill_(it) if torch.is_tensor(group[key]) else it for key, it in own.items()})

    @torch.no_grad()
    def publish(self) -> None:
        """Make the forward pass use the full-precision weights as they are now. Called by all ranks together."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # weights gathered for an evaluation would be used again
        if self._zero_flats is not None:
            if _is_stage_3(self._holder):
                _publish_stage_3(self._holder)
            else:
                self._holder.update_lp_params()

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the model's buffers by their plain names, as in model.safetensors: live, and whole on every rank.

        Each rank's running statistics are of its own samples. Call `Runtime.average_buffers` first and write those of rank 0:
        running statistics are linear in the samples, so training from their mean gives the same mean later.
        """
        persistent = self.model.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in persistent}

    def groups(self) -> dict[int, Mapping[str, Any]]:
        """Return the optimizer's groups by the `id` of each tensor in them; ZeRO-3 removes the tensors between steps."""
        groups = self.stepper.param_groups
        if self._zero_flats is None:
            return {id(tensor): group for group in groups for tensor in group["params"]}
        group_of = self._holder.sub_group_to_group_id if _is_stage_3(self._holder) else range(len(groups))
        return {id(flat): groups[group_of[index]] for index, flat in enumerate(self._zero_flats)}

    def states(self, stepped: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return the optimizer's state tensors for one of its tensors, without scalars; of a quantized one, its parts."""
        state = self.stepper.state.get(stepped, {})
        found = ((key, value) for key, value in state.items() if key not in self._scalars and torch.is_tensor(value))
        return [part for key, value in found for part in _parts(key, value)]

    def _step_on_zeros(self) -> None:
        rates = [(group, float(group["lr"])) for group in self.stepper.param_groups]
        gradients = [(tensor, tensor.grad) for tensor in self._stepped]
        for group, _ in rates:
            set_rate(group, 0.0)
        for tensor, _ in gradients:
            tensor.grad = torch.zeros_like(tensor)
        if self._zero_flats is None:
            self.stepper.step()
        else:
            for index in range(len(self._zero_flats)):
                self._holder._optimizer_step(index)
        for tensor, gradient in gradients:
            tensor.grad = gradient
        for group, rate in rates:
            set_rate(group, rate)

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Give the model the weights that its optimizer has for evaluations, if any, inside the block, and its own after it.

        Its own are the same to the bit: the optimizer would compute them again, with other rounding.
        """
        if not foreign.has_modes(self.stepper):
            yield
            return
        stepper: Any = self.stepper
        own = [weights.clone() for weights in self.weights]
        with torch.no_grad():
            stepper.eval()
        self.publish()
        try:
            yield
        finally:
            with torch.no_grad():
                stepper.train()
            torch._foreach_copy_(self.weights, own)
            self.publish()


def _parts(key: str, state: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return a state tensor, or the plain tensors inside a subclass of torch's, as torchao has them, each with its name."""
    if isinstance(state, DTensor) or not hasattr(state, "__tensor_flatten__"):
        return [(key, state)]
    inner, _ = state.__tensor_flatten__()
    return [(f"{key}.{name}", getattr(state, name)) for name in inner]


class WeightAverage:
    """The exponential moving average of a prepared model's weights: average = decay * average + (1 - decay) * weights."""

    def __init__(self, shards: Shards, *, decay: float | None) -> None:
        """Begin with the weights of `shards`; None: there is no average, and the model always has its own weights."""
        self._shards, self._decay, self._live = shards, decay, shards.weights
        self.tensors = [] if decay is None else [weights.clone() for weights in self._live]
        shards.averages = None if decay is None else self.tensors

    @torch.no_grad()
    def update(self, skipped: torch.Tensor | bool = False) -> None:
        """Add the weights after an optimizer step to the average, unless the step was `skipped` (as `Step.skipped`)."""
        if not self.tensors or self._decay is None or skipped is True:  # a rank can have only padding
            return
        rate = 1.0 - self._decay
        if skipped is False:
            torch._foreach_lerp_(self.tensors, self._live, rate)
            return
        # Only torch's fused optimizer kernels take a flag on the device, and SGD's can average: with the weights as gradients
        # and a weight decay of -1 on the average, it adds `rate` times the difference to the average.
        torch._fused_sgd_(
            self.tensors, self._live, [], lr=-rate, weight_decay=-1.0, momentum=0.0, dampening=0.0, nesterov=False,
            maximize=False, is_first_step=False, found_inf=skipped,
        )  # fmt: skip

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights inside the block, and its own after it."""
        if self._decay is None:
            with self._shards.evaluated():
                yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for live, average in zip(self._live, self.tensors, strict=True):
            own = live.clone()
            live.copy_(average)
            average.copy_(own)
        self._shards.publish()


def check_optimizer(runtime: Runtime, rule: Rule, optimizer: Any, shards: Shards, *, dtype: torch.dtype) -> None:
    """Check that the optimizer is the one that `rule` makes, with weights and states of `dtype`, and updates each weight once.

    `prepare` can replace it: Accelerate exchanges optimizers for DeepSpeed's under some configs, and DeepSpeed regroups and
    flattens parameters. So the innermost optimizer is examined.

    `optimizer` is as `prepare` returned it, before its first step; `shards` are of the same. Called by all ranks together.
    Raises PresetError, on all of them, with the differences.
    """
    with runtime.together():
        stepper, groups = shards.stepper, shards.groups()
        if type(stepper) is not rule.kind:
            asked, found = (f"{it.__module__.split('.')[0]}'s {it.__name__}" for it in (rule.kind, type(stepper)))
            raise PresetError(f"the recipe's optimizer is {asked} (optim.name), but {found} would be used. {_REMEDY}")
        differences = []
        if [id(group) for group in optimizer.param_groups] != [id(group) for group in stepper.param_groups]:
            differences.append("learning rates are set on parameter groups that would not be used")
        for it in shards.fragments:
            differences += _differences(it, groups.get(id(it.stepped), {}), shards.states(it.stepped), rule, dtype)
        if differences:
            raise PresetError(f"the prepared optimizer differs from the recipe's: {listed(differences, _SHOWN)}. {_REMEDY}")
    counts = dict.fromkeys(rule.sizes, 0)
    for it in shards.fragments:
        first, stop = it.region.share(*it.copies)
        counts[it.name] += stop - first
    updated = runtime.accelerator.reduce(torch.tensor([*counts.values()], device=runtime.device), "sum").tolist()
    wrong = [
        f"{count} elements of {name} instead of {size}"
        for (name, size), count in zip(rule.sizes.items(), updated, strict=True)
        if count != size
    ]
    if wrong:
        raise PresetError(
            f"the {runtime.launched.world_size} processes would not update each parameter once: together they "
            f"update {listed(wrong, _SHOWN)}. {_REMEDY}"
        )


def _differences(
    fragment: Fragment, settings: Mapping[str, Any], states: list[tuple[str, torch.Tensor]], rule: Rule, dtype: torch.dtype
) -> Iterator[str]:
    name = fragment.name
    if not settings:
        yield f"no optimizer updates {name}"
        return
    factor = rule.lr_factors.get(name, 1.0)
    decay = rule.weight_decays.get(name, "nothing, because it is not trained")
    wanted = {**rule.settings, "lr": rule.settings["lr"] * factor, "lr_factor": factor, "weight_decay": decay}
    for setting, value in wanted.items():
        if (found := settings.get(setting, "not set")) != value:
            yield f"{setting} of {name} is {found}, not {value}"
    for what, tensor in [("the weights", fragment.stepped), *states]:
        if tensor.dtype != dtype:
            yield f"{what} of {name} are {tensor.dtype}, not {dtype}"


# ---- ZeRO: DeepSpeed's optimizer holds flat partitions in full precision, on which torch's or its own optimizer steps -----


def _is_stage_3(zero: Any) -> bool:
    return hasattr(zero, "fp32_partitioned_groups_flat")


def _partitions(zero: Any) -> list[torch.Tensor]:
    """Return the flat tensors that the optimizer steps on, one for each of its (sub-)groups."""
    on_nvme = _is_stage_3(zero) and (zero.swap_optimizer or zero.params_in_nvme_and_cpu)
    name = "fp32_partitioned_groups_flat" if _is_stage_3(zero) else "single_partition_of_fp32_groups"
    flats: list[torch.Tensor] | None = None if on_nvme else getattr(zero, name, None)
    if flats is None:
        raise PresetError(
            f"DeepSpeed keeps the weights in a {type(zero).__name__}, or on NVMe, where checkpoints and "
            "weight averages cannot access them: use zero_stage 1, 2 or 3, and offload only to the CPU."
        )
    return flats


def _stage_1_and_2_fragments(zero: Any, parameters: Mapping[str, Any], _rank: int) -> Iterator[Fragment]:
    for name, parameter in parameters.items():
        mapping = parameter._hp_mapping
        if mapping is not None:  # other ranks hold all of it
            flat = zero.single_partition_of_fp32_groups[mapping.param_group_index]
            whole, own = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield Fragment(name, tuple(parameter.shape), Region.flat(whole.start, own.numel), flat, own.start)


def _stage_3_fragments(zero: Any, parameters: Mapping[str, Any], rank: int) -> Iterator[Fragment]:
    for name, parameter in parameters.items():
        group, offset, length = zero.grad_position[zero.get_param_id(parameter)]
        # Every rank has `length` elements; those past the parameter's end are padding.
        start = min(length * rank, parameter.ds_numel)
        count = min(length, parameter.ds_numel - start)
        flat = zero.fp32_partitioned_groups_flat[group]
        yield Fragment(name, tuple(parameter.ds_shape), Region.flat(start, count), flat, offset)


def _publish_stage_3(zero: Any) -> None:
    # As its steps do, in the same order. Between steps it can keep gathered weights for their next use.
    zero.empty_partition_cache()
    for group, flat in enumerate(zero.fp32_partitioned_groups_flat):
        if flat.numel():
            zero.fp16_partitioned_groups_flat[group].data.copy_(flat.data)
        parts = zero.unflatten(zero.fp16_partitioned_groups_flat[group], zero.fp16_partitioned_groups[group])
        for part, values in zip(zero.fp16_partitioned_groups[group], parts, strict=True):
            part.data = values.data
    # Parameters below the persistence threshold, which every rank keeps whole, must be gathered again.
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
