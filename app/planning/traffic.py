"""What a process sends in a step, by how the processes cooperate.

In a ring each of N processes sends (N-1)/N of the bytes for a reduce-scatter or an all-gather, and twice that for an all-reduce
(Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms, 2009). What is sent in a pass is that of section 7 of Rajbhandari
et al., ZeRO, 2020, arXiv:1910.02054: DDP, ZeRO-1 and FSDP2 add up a step's gradients before they send them, ZeRO-2 and ZeRO-3
send those of every pass.
"""

from __future__ import annotations

from dataclasses import dataclass

_FLOAT32 = 4
_GATHERS = 2
"""Of the weights in a pass: for the forward and for the backward pass."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that each process sends in a step."""

    within: float = 0.0
    """To those of its node, or along the ring that all are in, where that is one of them."""
    between: float = 0.0
    """Over the links between nodes, where that is another matter than `within`."""
    host: float = 0.0
    """To and from the memory of the host, for what is kept there."""
    formula: str = "nothing"
    """In letters: P parameters, e bytes of each where it is sent, N data-parallel processes, A passes a step, D processes that
    divide a copy of the model, C copies, t of tensor parallelism, n tokens of a pass, H the width, L blocks."""

    @property
    def total(self) -> float:
        """Of the network."""
        return self.within + self.between


def of_step(  # noqa: PLR0911, PLR0913 - one for each strategy, and what decides it
    strategy: str,
    *,
    parameters: int,
    data_ranks: int,
    replicas: int = 1,
    tensor_parallel: int = 1,
    accumulation: int = 1,
    precision: str = "no",
    block_outputs: int = 0,
    recomputed: bool = False,
) -> Traffic:
    """Return what a process sends in a step, in bytes.

    Args:
        strategy: `Case.strategy`.
        parameters: those that are trained.
        data_ranks: processes that divide the global batch.
        replicas: copies of the model (HSDP).
        tensor_parallel: processes that divide each layer.
        accumulation: passes of a step.
        precision: Accelerate's: no, bf16 or fp16.
        block_outputs: numbers that come out of all blocks in one pass, as rows x tokens x width x blocks.
        recomputed: whether blocks are computed once more in the backward pass.
    """
    sent = _FLOAT32 if precision == "no" else 2
    whole, ring = float(sent * parameters), _ring(data_ranks)
    if strategy == "ddp":  # the weights, and so their gradients, stay in float32
        return Traffic(2 * ring * _FLOAT32 * parameters, formula="2 (N-1)/N 4P")
    if strategy == "zero1":
        return Traffic(2 * ring * whole, formula="2 (N-1)/N eP")
    if strategy == "zero2":
        return Traffic((accumulation + 1) * ring * whole, formula="(A+1) (N-1)/N eP")
    if strategy in ("zero3", "zero3_offload"):
        of_all, own = (_GATHERS + 1) * accumulation * ring * whole, whole / data_ranks
        if strategy == "zero3":
            return Traffic(of_all, formula="3A (N-1)/N eP")
        host = (_GATHERS * accumulation + accumulation + 1) * own
        return Traffic(of_all, host=host, formula="3A (N-1)/N eP; to the host (3A+1) eP/N")
    gathers = _GATHERS * accumulation + 1
    if strategy == "fsdp2":
        return Traffic(gathers * ring * whole, formula="(2A+1) (N-1)/N eP")
    if strategy == "hsdp":
        shards = data_ranks // replicas
        within, between = gathers * _ring(shards) * whole, 2 * _ring(replicas) * whole / shards
        return Traffic(within, between, formula="(2A+1) (D-1)/D eP; between nodes 2 (C-1)/C eP/D")
    if strategy == "tensor_parallel":
        # Two sums of all processes in a block's forward pass and two in its backward pass: Shoeybi et al., Megatron-LM, 2019,
        # arXiv:1909.08053, section 3.
        sums = (6 if recomputed else 4) * accumulation
        within = sums * 2 * _ring(tensor_parallel) * sent * block_outputs
        between = gathers * ring * whole / tensor_parallel
        times = "6A" if recomputed else "4A"
        return Traffic(within, between, formula=f"{times} 2 (t-1)/t e n H L; between nodes (2A+1) (N-1)/N eP/t")
    return Traffic()


def _ring(size: int) -> float:
    return (size - 1) / size
