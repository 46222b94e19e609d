"""How the processes of a run shard a model, as one value. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from app.place.launched import Strategy


@dataclass(frozen=True)
class Sharding:
    """What each process keeps of a model and its training state."""

    kind: Strategy = "ddp"
    """What synchronizes the processes; one process under `ddp` needs nothing."""
    stage: int = 0
    """DeepSpeed's ZeRO stage; 0: each process keeps everything."""
    offload: bool = False
    """Whether any of it is kept in the host's memory."""
    replicas: int = 1
    """Copies of the model, each sharded over an equal number of processes (fsdp2)."""
    tensor_parallel: int = 1
    """Processes that split each large matrix (fsdp2)."""

    def remedy(self, processes: int, *, on_cpu: bool) -> str:
        """Return what shards more than this does. `on_cpu`: the host computes, so that offloading to it gains nothing."""
        devices = "machines" if on_cpu else "devices"
        if self.kind == "ddp" and processes == 1:
            return f"several {devices} with --preset fsdp2"
        if self.replicas > 1 or (self.kind != "fsdp2" and self.stage < 3):
            return "--preset fsdp2"
        can_offload = self.tensor_parallel == 1 and not (self.offload or on_cpu)
        return f"more {devices}" + (", or --preset deepspeed_zero3_offload" if can_offload else "")

    def what_to_change(self, processes: int, *, micro_batch: int, checkpoint_activations: str, on_cpu: bool) -> str:
        """Return what to change in a run that ended for lack of memory."""
        changes = [f"train.max_micro_batch={micro_batch // 2}"] if micro_batch > 1 else []
        changes += ["train.checkpoint_activations=blocks"] if checkpoint_activations == "none" else []
        return f"Change {', or '.join([*changes, self.remedy(processes, on_cpu=on_cpu)])}"
