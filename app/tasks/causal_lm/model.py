"""The network of a language model: one of transformers, by its configuration, that computes its loss itself.

Its last layer (`Head`) gives the loss without holding all logits. A head may be sharded over the vocabulary, so that each
process has the weights of some consecutive tokens. As in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3), the
processes then exchange three numbers a token, no logits.

Adapters of low rank next to frozen layers (LoRA, Hu et al. 2021, arXiv:2106.09685) are peft's. A layer `q_proj` then has its
own weights in `q_proj.base_layer.*`, and the trained ones in `q_proj.lora_A.default.weight` [rank, inputs] and
`q_proj.lora_B.default.weight` [outputs, rank].

Shapes: B rows, S tokens a row, T tokens in all, H numbers a token, V tokens in the vocabulary, of which this process has P.
transformers is imported when a model is built, and no more of it than that model needs.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from app.environment.topology import listed
from app.errors import PresetError, RecipeError, RunFolderError, did_you_mean
from app.files import other_libraries
from app.init import model_tensors
from app.task import Adapters, FileParts, LowRank
from app.tasks.causal_lm import context_parallel
from app.tasks.causal_lm.configuration import network_config
from app.tasks.causal_lm.sections import ModelRecipe

MIXTURES = frozenset({"gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})
"""Mixtures of experts that can be trained: routing uses no random numbers and no other rows."""
PLAIN = frozenset(
    {
        "gemma", "gpt2", "gpt_bigcode", "gpt_neox", "llama", "mistral", "olmo", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2",
        "qwen3", "smollm3", "stablelm", "starcoder2", *MIXTURES,
    }
)  # fmt: skip
"""Families whose logits are what the last layer makes of the base model's output, and nothing more: shown by a test for each.
Others scale or cap them, or may: all logits of these are computed, by their own `forward`."""
SPLIT = PLAIN - {"stablelm", *MIXTURES}
"""Families that context parallelism works with, shown by a test for each: layers pass the part of the rows on to attention."""
LARGE_VOCABULARY = 4096
"""From this number of tokens on the head computes in chunks: the logits then are several times what the layers keep for the
backward pass (a model of width H and L layers keeps about 34 H L bytes a token in half precision, Korthikanti et al. 2022,
arXiv:2205.05198, and logits with their gradient and logarithms 10 V), and the products are large enough for the chunks to cost
no time."""
IGNORED = -100
"""The label of tokens that do not count, as in torch and transformers."""
_HALF = (torch.bfloat16, torch.float16)
_FEWEST_LOGITS = 2**26
"""A chunk has at least as many, 256 MiB in float32. On an H100 the host takes 1 ms to start a chunk's kernels: with chunks of
256 tokens GPT-2 124M trained at 0.6 of the speed of whole logits. These keep the GPU busy for longer than that."""
_EXPERTS = "samerun"
"""Name of our function among transformers' implementations of experts."""
_ADAPTER = "default"
"""peft's default name for a single set of adapters."""


def build(recipe: ModelRecipe, facts: Mapping[str, Any], *, folder: Path | None = None) -> nn.Module:
    """Return the network for samples with these facts, in training mode. Raises RecipeError if it cannot be built.

    On torch's meta device, if that is the default one, it has no weights. Otherwise they are drawn from the global generator.
    With the `folder` of transformers that is the recipe's `path`, the network has its weights, no adapters, and is on the CPU
    in evaluation mode. Raises RunFolderError if the folder cannot be read.
    """
    config = network_config(recipe, vocab_size=facts["vocab_size"], sequence_length=facts["sequence_length"])
    chunked = recipe.head == "chunked" or (recipe.head == "auto" and config.vocab_size >= LARGE_VOCABULARY)
    is_plain = config.model_type in PLAIN
    if recipe.head == "chunked" and not is_plain:
        known = ", ".join(sorted(PLAIN))
        raise RecipeError(f"model.head is chunked, which works for {known}, not for {config.model_type}: set auto or whole")
    config._attn_implementation = recipe.attention
    if config.model_type in MIXTURES:
        _register_experts()
        config._experts_implementation = _EXPERTS
    try:
        kind = class_for(config)
        model: Any = kind(config) if folder is None else read_folder(folder, kind, config)
    except (ImportError, ValueError) as error:
        raise RecipeError(refused(config, recipe.attention, error)) from error
    last = model.get_output_embeddings()
    if is_plain and type(last) is nn.Linear:
        model.set_output_embeddings(Head(last, chunked=chunked))
    if folder is not None:
        return model.eval()  # type: ignore[no-any-return]
    if recipe.lora_rank:
        _add_adapters(model, recipe)
    return model.train()  # type: ignore[no-any-return]


@functools.cache
def _register_experts() -> None:
    """Register our function for the experts of a layer with transformers."""
    from transformers.integrations import moe

    def experts(layer: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Any:
        """Return the weighted sum of the chosen experts of each token, [T, H]; `chosen` and `weights` are [T, experts a token].

        torch 2.14 has no grouped products in float64 or without data: each token's products are computed, or counted, alone.
        Autocast does not cast for grouped products, so the weights are cast here.
        """
        if hidden.is_meta or hidden.dtype == torch.float64:
            return moe.batched_mm_experts_forward(layer, hidden, chosen, weights)
        if torch.is_autocast_enabled(hidden.device.type):
            dtype, layer = torch.get_autocast_dtype(hidden.device.type), copy.copy(layer)
            vars(layer)["_parameters"] = {name: it.to(dtype) for name, it in layer.named_parameters(recurse=False)}
        return moe.grouped_mm_experts_forward(layer, hidden, chosen, weights)

    moe.ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, experts)


def read_folder(folder: Path, kind: Any, config: Any = None) -> nn.Module:
    """Return the model that a class of transformers makes of a folder, with all its weights, and no others.

    Raises RunFolderError if it cannot, or if weights are missing, left over, contradictory or of another shape.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: nn.Module
    try:
        model, info = other_libraries.model(kind, folder, config=config)
    except Exception as error:  # whatever a library that reads files may raise
        why = str(error).strip().partition("\n")[0]
        raise RunFolderError(f"transformers cannot load the model of {folder}: {why}") from error
    if wrong := model_tensors.loading_differences(model, info):
        raise RunFolderError(
            f"the weights of {folder} belong to another model than its config.json: {listed([*wrong.values()])}. "
            "Save the whole model there again, or correct config.json"
        )
    return model


def refused(config: Any, attention: str, error: Exception) -> str:
    """Return the sentence for a network that transformers cannot build or compute, with the first line of its own."""
    why = str(error).strip().partition("\n")[0] or repr(error)
    if attention != "eager" and "does not support an attention implementation" in why:
        return f"transformers has no {config.model_type} with model.attention={attention}: set model.attention=eager"
    return f"transformers refuses a {config.model_type} with model.attention={attention}: {why}"


def check_routing(config: Any, recipe: ModelRecipe) -> None:
    """Raise RecipeError if routing or its loss would depend on the micro-batch, or if there are no experts to balance."""
    settings = recipe.settings or {}
    coefficient = settings.get("router_aux_loss_coef", 0)
    if getattr(config, "output_router_logits", False) or coefficient:
        found = f"router_aux_loss_coef {coefficient}" if coefficient else "output_router_logits true"
        raise RecipeError(
            f"the model's settings have {found}: transformers' balance loss is computed over a whole micro-batch, so it would "
            "depend on the number of processes and on accumulation. Set model.settings={output_router_logits: false}, without "
            "router_aux_loss_coef, and model.balance_loss, which is computed over each row"
        )
    if noise := getattr(config, "router_jitter_noise", 0):
        raise RecipeError(f"router_jitter_noise is {noise}, whose random numbers depend on the micro-batch: set it to 0")
    if recipe.balance_loss and config.model_type not in MIXTURES:
        known = ", ".join(sorted(MIXTURES))
        raise RecipeError(f"model.balance_loss is {recipe.balance_loss}, which is for {known}, not for {config.model_type}")


def initialize(model: Any, unit: nn.Module) -> None:
    """Draw the weights of a part of the model by transformers' rules for it, from torch's global generator; buffers too."""
    for tensor in (*unit.parameters(), *unit.buffers()):
        vars(tensor).pop("_is_hf_initialized", None)

    def draw(module: Any) -> None:
        vars(module).pop("_is_hf_initialized", None)
        model._init_weights(module)
        if _has_adapters(module):  # as peft draws them: the first at random, the second 0, so that nothing is added yet
            module.reset_lora_parameters(_ADAPTER, True)

    unit.apply(draw)  # children first: a rule for a whole, such as one that scales by the depth, comes after those of its parts


def file_names(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, FileParts]:
    """Return the names and parts of a mixture's tensors in transformers' files, as `app.task.Task.file_names`.

    The experts of a layer are one tensor [experts, rows, columns] in the model, and one or two matrices per expert in most
    files. transformers' conversion, applied to small tensors of consecutive numbers, two per expert, shows the layout.
    """
    if model.config.model_type not in MIXTURES:
        return {}
    from transformers.core_model_loading import revert_weight_conversion  # save_pretrained uses it (5.24)

    numbered, owners = {}, list[str]()
    for name, shape in shapes.items():
        size = (shape[0], 2, 1) if len(shape) == 3 else (1,)
        numbered[name] = torch.arange(len(owners), len(owners) + prod(size)).view(size)
        owners += [name] * prod(size)
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    numbers = list[int]()
    for file_name, part in sorted(revert_weight_conversion(model, numbered).items(), key=lambda named: int(named[1].min())):
        name = owners[len(numbers)]
        numbers += part.flatten().tolist()
        rows, *columns = shapes[name][-2:]
        is_matrix = part.ndim < numbered[name].ndim
        found.setdefault(name, {})[file_name] = (part.numel() * rows // 2, *columns) if is_matrix else shapes[name]
    assert numbers == list(range(len(owners))), "the parts of an expert's tensor are not consecutive in its file"
    return {name: parts for name, parts in found.items() if [*parts] != [name]}


class _ComputesLoss:
    """Mixed into a class of transformers: with labels, `forward` returns a loss without all logits."""

    _sequence_mesh: DeviceMesh | None = None
    """The processes that have the parts of each row, under context parallelism."""
    _is_eager = False

    def split_sequences(self: Any, mesh: DeviceMesh) -> None:
        """Compute the losses of rows, from now on, together with the other processes of a mesh of one dimension.

        Raises PresetError if the network cannot.
        """
        if self.config.model_type not in SPLIT:
            known = ", ".join(sorted(SPLIT))
            raise PresetError(
                f"context parallelism can split the sequences of {known}, and the network is a {self.config.model_type}: "
                "use fsdp2.yaml"
            )
        self._sequence_mesh, self._is_eager = mesh, self.config._attn_implementation == "eager"
        context_parallel.register(self)

    def forward(
        self, *args: Any, labels: Tensor | None = None, by_row: bool = False, balance: bool = False, **named: Any
    ) -> Any:
        """Return what transformers' own does; with labels, int64 [B, S], shifted already, their sum of nats, or [B] `by_row`.

        With `balance`, return the result of `_balance_loss` too.

        Labels of -100 do not count. There is neither a cache nor an attention mask then: with either, the documents of a row,
        whose `position_ids` begin anew, would see each other.
        """
        if labels is None:
            return super().forward(*args, **named)  # type: ignore[misc]
        if labels.is_meta:  # transformers would look where positions begin anew
            length = labels.shape[1]
            named["attention_mask"] = torch.empty(1, 1, length, length, dtype=torch.bool, device="meta")
            named |= {"position_ids": labels} if self.config.model_type == "opt" else {}  # type: ignore[attr-defined]  # or it counts them by the mask
        mesh = self._sequence_mesh
        if mesh is not None:
            labels, named = context_parallel.split(mesh, labels, named, is_eager=self._is_eager, ignored=IGNORED)
        head = self.get_output_embeddings()  # type: ignore[attr-defined]
        if isinstance(head, Head):
            named |= {"output_router_logits": True} if balance else {}
            found = self.base_model(*args, use_cache=False, **named)  # type: ignore[attr-defined]
            nats = head(found.last_hidden_state, labels, by_row=by_row)
            if balance:
                return nats, self._balance_loss(found.router_logits, labels)
        else:
            logits = super().forward(*args, use_cache=False, **named).logits  # type: ignore[misc]
            nats = nats_of(logits, labels, by_row=by_row)
        return nats if mesh is None else context_parallel.summed(nats, mesh)

    def _balance_loss(self, router_logits: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Return the sum of the rows' balance losses, each times its labels that count; `router_logits` are [T, E] per layer.

        A row's loss is DeepSeek-V3's sequence-wise loss without its factor (arXiv:2412.19437, equations 17 to 20), added over
        the layers: the sum over the E experts of f P, where P is an expert's mean probability in the row, and f its number of
        tokens relative to an even split.
        """
        of_rows: Any = 0
        for logits in router_logits:
            shares = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1).view(*labels.shape, -1)
            chosen = shares.topk(self.config.num_experts_per_tok).indices  # type: ignore[attr-defined]
            used = torch.zeros_like(shares).scatter(-1, chosen, shares.shape[-1] / chosen.shape[-1])
            of_rows = of_rows + (used.mean(1) * shares.mean(1)).sum(-1)
        return (of_rows * (labels != IGNORED).sum(1)).sum()  # type: ignore[no-any-return]


def class_for(config: Any) -> type[nn.Module]:
    """Return the class of transformers for a configuration, which computes its loss itself. Raises RecipeError."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if name is None:
        raise RecipeError(f"the network is a {config.model_type}, for which transformers has no causal language model")
    return _class_with_loss(getattr(transformers, name))


@functools.cache
def _class_with_loss(base: Any) -> type[nn.Module]:
    """Return a class of transformers with `_ComputesLoss`, under its own name, which its config.json and `generate` use."""

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        return _ComputesLoss.forward(self, *args, **named)

    forward = functools.wraps(base.forward)(forward)  # its signature says what `generate` may pass
    own = {"__module__": base.__module__, "__doc__": base.__doc__, "forward": forward}
    return type(base.__name__, (_ComputesLoss, base), own)


class Head(nn.Linear):
    """A linear layer with the parameters of the one that it takes the place of, ties included.

    The loss is computed in its `forward`, so that FSDP2 and ZeRO-3 gather its weights for that as for the logits.
    """

    divides_itself: ClassVar[bool] = True
    """Under tensor parallelism its weights are a part of the vocabulary's: this knows what to do with them."""

    def __init__(self, like: nn.Linear, *, chunked: bool) -> None:
        super().__init__(like.in_features, like.out_features, bias=like.bias is not None, device="meta")
        self.weight = like.weight
        self.bias = like.bias
        self.chunked = chunked

    def forward(self, hidden: Tensor, labels: Tensor | None = None, *, by_row: bool = False) -> Tensor:
        """Return the logits [B, S, V]; with labels int64 [B, S] the sum of nats of all, or `by_row` of each row [B]."""
        if isinstance(self.weight, DTensor):
            return self._in_parts(hidden, labels, self.weight, by_row=by_row)
        if labels is None:
            return super().forward(hidden)
        if not self.chunked or hidden.is_meta:  # without data logits cost nothing, and their FLOPs are counted
            return nats_of(super().forward(hidden), labels, by_row=by_row)
        if torch.is_autocast_enabled(hidden.device.type) or self.weight.dtype in _HALF:
            return self._by_chunks(hidden, labels, by_row=by_row)
        found = F.linear_cross_entropy(
            hidden.flatten(0, 1).to(self.weight.dtype),
            self.weight,
            labels.reshape(-1),
            linear_bias=self.bias,
            reduction="none" if by_row else "sum",
            ignore_index=IGNORED,
            options=nn.LinearCrossEntropyOptions(),
        )
        return found.view(labels.shape).sum(1) if by_row else found

    def _by_chunks(self, hidden: Tensor, labels: Tensor, *, by_row: bool) -> Tensor:
        """Compute the logits of some tokens at a time, and once more in the backward pass.

        torch's own function does without the second time, but adds half-precision losses up in half precision: 17,408
        instead of 18,518 for 2,048 tokens (torch 2.15).
        """

        def nats(tokens: Tensor, targets: Tensor) -> Tensor:
            logits = F.linear(tokens, self.weight, self.bias)
            return nats_of(logits[:, None], targets[:, None], by_row=by_row)

        parts = self._parts(nats, hidden, labels)
        return torch.cat(parts).view(labels.shape).sum(1) if by_row else torch.stack(parts).sum()

    def _in_parts(self, hidden: Tensor, labels: Tensor | None, weight: DTensor, *, by_row: bool) -> Tensor:
        """Do the same as `forward` with a part of the vocabulary, together with the processes that have the others."""
        if labels is None:
            logits: Tensor = super().forward(_replicated(hidden, weight)).full_tensor()  # type: ignore[attr-defined]
            return logits
        own, bias = weight.to_local(), self.bias.to_local() if isinstance(self.bias, DTensor) else None

        def nats(tokens: Tensor, targets: Tensor) -> Tensor:
            return _nats_of_part(F.linear(tokens, own, bias), targets, weight)

        # The gradient of the hidden states is the sum of the processes' gradients.
        shared: Tensor = _replicated(hidden, weight).to_local(grad_placements=[Partial()])
        found = torch.cat(self._parts(nats, shared, labels))
        return found.view(labels.shape).sum(1) if by_row else found.sum()

    def _parts(self, nats: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, labels: Tensor) -> list[Tensor]:
        """Return what `nats` makes of some tokens at a time, which it computes once more in the backward pass."""
        tokens, targets = hidden.flatten(0, 1), labels.reshape(-1)
        if not self.chunked:
            return [nats(tokens, targets)]
        size = max(_FEWEST_LOGITS, tokens.numel()) // self.out_features or 1  # as much memory as `hidden` takes, or more
        pairs = zip(tokens.split(size), targets.split(size), strict=True)
        return [checkpoint(nats, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]


def nats_of(logits: Tensor, labels: Tensor, *, by_row: bool) -> Tensor:
    """Return the sum of nats of labels int64 [B, S] by logits [B, S, V], or `by_row` of each row [B]; in float32 at least."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    found = F.cross_entropy(exact, labels.reshape(-1), ignore_index=IGNORED, reduction="none" if by_row else "sum")
    return found.view(labels.shape).sum(1) if by_row else found


def _replicated(hidden: Tensor, weight: DTensor) -> DTensor:
    return DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)


def _nats_of_part(logits: Tensor, targets: Tensor, weight: DTensor) -> Tensor:
    """Return the nats [T] of all targets int64 [T], 0 where they are ignored, by this process's logits [T, P]."""
    mesh, count = weight.device_mesh, logits.shape[1]
    first = mesh.get_local_rank() * count
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    greatest = DTensor.from_local(exact.detach().amax(1), mesh, [Partial("max")], run_check=False).full_tensor()
    is_own = (targets >= first) & (targets < first + count)
    own = exact.gather(1, (targets - first).where(is_own, 0)[:, None])[:, 0].where(is_own, 0.0)
    parts = torch.stack([(exact - greatest[:, None]).exp().sum(1), own])
    total, wanted = DTensor.from_local(parts, mesh, [Partial()], run_check=False).full_tensor()
    nats: Tensor = total.log() + greatest - wanted
    return nats.where(targets != IGNORED, 0.0)


def _lora_config(recipe: ModelRecipe, model: Any) -> Any:
    targets: Any = "all-linear" if recipe.lora_targets is None else list(recipe.lora_targets)
    if recipe.lora_targets is None and model.config.model_type in MIXTURES:
        targets = _attention_layers(model)
    alpha = 2 * (recipe.lora_rank or 0) if recipe.lora_alpha is None else recipe.lora_alpha
    try:
        return other_libraries.lora_config(r=recipe.lora_rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    except ImportError as error:
        raise RecipeError('model.lora_rank is set, which needs peft: pip install -e ".[lora]"') from error


def _attention_layers(model: nn.Module) -> list[str]:
    attention = (module for name, module in model.named_modules() if name.endswith(".self_attn"))
    return sorted({name for module in attention for name, _ in module.named_children() if name.endswith("_proj")})


def _add_adapters(model: Any, recipe: ModelRecipe) -> None:
    """Give the chosen layers adapters, and freeze all else. Raises RecipeError for layers that cannot have them."""
    names = {f".{name}": module for name, module in model.named_modules()}
    for target in recipe.lora_targets or ():  # peft refuses a name only if all are wrong
        if not any(name.endswith(f".{target}") for name in names):
            layers = {name.rpartition(".")[2] for name, it in names.items() if type(it).__name__ in ("Linear", "Conv1D")}
            hint = did_you_mean(target, layers, then=f"its layers are {listed(sorted(layers), 20)}")
            raise RecipeError(f"model.lora_targets has {target}, and no layer of the model has that name; {hint}")
        known = _attention_layers(model)
        if model.config.model_type in MIXTURES and target.rpartition(".")[2] not in known:  # peft could adapt experts too
            raise RecipeError(
                f"model.lora_targets has {target}, and in a mixture of experts only {', '.join(known)} can have adapters"
            )
    try:
        with warnings.catch_warnings():  # layers of GPT-2 hold their weights transposed, which peft corrects with a warning
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False", category=UserWarning)
            other_libraries.add_lora(_lora_config(recipe, model), model, _ADAPTER)
    except ValueError as error:
        raise RecipeError(f"model.lora_targets is {recipe.lora_targets}: {error}") from error


def _has_adapters(module: nn.Module) -> bool:
    return hasattr(module, "reset_lora_parameters")  # every kind of layer that peft puts in the place of others


def adapters(model: nn.Module, recipe: ModelRecipe) -> Adapters:
    """Return how the weights of a model with adapters go into files."""
    names: dict[str, str] = {}
    sums: dict[str, LowRank] = {}
    layers: Any = model.named_modules()
    for place, layer in layers:
        if not _has_adapters(layer):
            continue
        names |= {f"{place}.base_layer.{name}": f"{place}.{name}" for name, _ in layer.base_layer.named_parameters()}
        down, up = f"{place}.lora_A.{_ADAPTER}.weight", f"{place}.lora_B.{_ADAPTER}.weight"
        sums[f"{place}.weight"] = LowRank(down, up, layer.scaling[_ADAPTER], bool(layer.fan_in_fan_out))
    matrices = [name for low in sums.values() for name in (low.down, low.up)]
    alone = {name: f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}" for name in matrices}
    config = _lora_config(recipe, model)  # adapter_config.json: peft needs it to add the adapters to the layers again
    config.inference_mode, config.fan_in_fan_out = True, any(low.transposed for low in sums.values())
    about = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return Adapters(names, sums, alone, about)
