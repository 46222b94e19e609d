"""Loss and gradient of every family of networks with the rows split over two processes, against whole rows on one.

    python tests/scripts/context_parallel.py OUT.json

Rows have an odd number of tokens, in three documents. Weights are float64.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tasks" / "causal_lm"))
STARTS = (0, 4, 15, 23)
"""First tokens of the documents, and the number of tokens: one document is in both parts, which have 12 tokens and 11."""
MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
WINDOWS: dict[str, dict[str, Any]] = {
    **{family: {"sliding_window": 5} for family in ("mistral", "phi3", "starcoder2")},
    **{family: {"use_sliding_window": True, **MIXED} for family in ("qwen2", "qwen3", "smollm3")},
    "olmo3": MIXED,
}


def main(out: str) -> None:
    import torch

    from app.tasks.causal_lm.model import SPLIT

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
    cases = [(family, "sdpa") for family in sorted(SPLIT)] + [(family, "eager") for family in ("gpt2", "llama", "olmo3")]
    found = {f"{family}, {kind}": compared(family, kind, mesh) for family, kind in cases}
    found["wrong"] = compared("llama", "sdpa", mesh, wrong=True)
    if torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    torch.distributed.barrier()
    os._exit(0)


def compared(family: str, kind: str, mesh: Any, *, wrong: bool = False) -> dict[str, float]:
    """Return the largest differences between parts and whole rows, each as a share of the largest value.

    `wrong`: of networks that differ by one weight, which shows that a difference would be seen.
    """
    import torch
    from test_lm_model import built, rows

    network: Any = built(family, attention=kind, **({"settings": WINDOWS[family]} if family in WINDOWS else {}))
    tokens, labels = (it[:, : STARTS[-1]] for it in rows())
    spans = [slice(*pair) for pair in itertools.pairwise(STARTS)]
    documents = {"position_ids": torch.cat([torch.arange(it.stop - it.start) for it in spans]).expand(3, -1)}

    def passed(**named: Any) -> list[Any]:
        network.zero_grad()
        nats = network(input_ids=tokens, labels=labels, by_row=True, **named)
        nats.sum().backward()
        gradients = [it.grad.flatten() for it in network.parameters() if it.grad is not None]
        return [nats.detach(), torch.cat(gradients), network(input_ids=tokens, use_cache=False).logits.detach()]

    in_documents = {} if family == "opt" else documents  # whose documents see each other: a run with masks is refused
    whole = [*passed(**in_documents), *passed()]
    alone = sum(network(input_ids=tokens[:, it], labels=labels[:, it], by_row=True).detach() for it in spans)
    network.split_sequences(mesh)
    if wrong:
        next(network.parameters()).data[:, 0] += 1e-3
    parts = [*passed(**in_documents), *passed()]
    for gradient in (parts[1], parts[4]):
        torch.distributed.all_reduce(gradient)
        gradient.div_(2)  # the mean, as FSDP2 takes it
    names = ("documents", "gradient of documents", "generated", "nats", "gradient", "generated again")
    differences = {
        name: float((part - one).abs().max() / one.abs().max()) for name, part, one in zip(names, parts, whole, strict=True)
    }
    against = parts[0] if in_documents else alone
    return {**differences, "each document alone": float((against - alone).abs().max() / alone.abs().max())}


if __name__ == "__main__":
    main(sys.argv[1])
