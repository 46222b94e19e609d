"""GPipe: a small transformer cut into stages, one for each process, through which a batch goes in micro-batches.

    torchrun --nproc-per-node 2 examples/gpipe/gpipe.py

trains it with 1, 2, 4 and 8 micro-batches, prints how long stages stand idle beside the formula, and how far the losses are
from those of one process, and draws the stages' time. README.md says what to look at.
"""

import argparse
import os
import statistics
import time
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from app.tasks.causal_lm.data.store import open_embedded

WIDTH, LAYERS, LENGTH, BATCH, CLIP = 128, 4, 64, 16, 0.5
TEXT = open_embedded("train")
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(TEXT.vocab_size, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens):
        return self.tokens(tokens) + self.places.weight


class Block(nn.TransformerEncoderLayer):
    def __init__(self):
        super().__init__(WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)

    def forward(self, hidden):
        return super().forward(hidden, nn.Transformer.generate_square_subsequent_mask(LENGTH, hidden.device), is_causal=True)


def layers(stage=0, stages=1):
    """The layers of a stage, with the weights that they have in the whole model."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TEXT.vocab_size))
    embedding, *blocks = Embedding(), *(Block() for _ in range(LAYERS))
    mine = blocks[LAYERS * stage // stages : LAYERS * (stage + 1) // stages]
    return nn.Sequential(*([embedding] if stage == 0 else []), *mine, *([head] if stage == stages - 1 else []))


def batch(step, device):
    """The global batch of a step: tokens and the tokens after them, int64 [BATCH, LENGTH] each."""
    tokens = torch.from_numpy(TEXT.tokens.astype("int64"))
    starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    rows = tokens[starts + torch.arange(LENGTH + 1)].to(device)
    return rows[:, :-1], rows[:, 1:]


def loss_of(logits, targets):
    """A micro-batch's part of the mean over the global batch: the parts add up to it, however many there are."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * LENGTH)


class Recorded(PipelineStage):
    """A stage that writes down when it computes: (F or B, micro-batch, begin, end), in nanoseconds of the host's clock."""

    events = ()

    def forward_one_chunk(self, number, *args, **more):
        return self._record("F", number, super().forward_one_chunk, args, more)

    def backward_one_chunk(self, number, *args, **more):
        return self._record("B", number, super().backward_one_chunk, args, more)

    def _record(self, what, number, compute, args, more):
        begin = time.perf_counter_ns()
        found = compute(number, *args, **more)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # a GPU works on after the call
        self.events += ((what, number, begin, time.perf_counter_ns()),)
        return found


def alone(steps, device):
    """The losses of one process, without stages and micro-batches."""
    model, losses = layers().to(device), []
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        tokens, targets = batch(step, device)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def pipeline(schedule, micro_batches, steps, device):
    """The losses of the same training in stages, and the events of each step."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    model, losses, events = layers(rank, stages).to(device), [], []
    optimizer = torch.optim.AdamW(model.parameters())
    stage = Recorded(model, rank, stages, device)
    run = SCHEDULES[schedule](stage, micro_batches, loss_fn=loss_of, scale_grads=False)
    for step in range(steps):
        tokens, targets = batch(step, device)
        parts, stage.events = [], ()
        # This one call is the forward and the backward pass of all micro-batches.
        run.step(*([tokens] if stage.is_first else []), **({"target": targets, "losses": parts} if stage.is_last else {}))
        squares = sum(parameter.grad.square().sum() for parameter in model.parameters())
        both = torch.stack([squares, sum(parts, torch.zeros((), device=device)).detach()])
        dist.all_reduce(both)  # the norm is that of all stages' gradients, and only the last stage knows the loss
        for parameter in model.parameters():
            parameter.grad *= (CLIP / (both[0].sqrt() + 1e-6)).clamp(max=1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(both[1].item())
        events.append(stage.events)
    return losses, events


def idle_share(passes):
    """The share of the time in which stages stand idle, if they do these passes and wait for nothing but each other.

    `passes` has a dictionary for each stage: how long each (what, micro-batch) takes, in the order in which the stage did them.
    """
    ends, todo, free = {}, [list(each) for each in passes], [0] * len(passes)
    while any(todo):
        for stage, order in enumerate(todo):
            while order:
                what, number = order[0]
                source = stage - 1 if what == "F" else stage + 1  # whose output it needs
                if 0 <= source < len(passes) and (what, number, source) not in ends:
                    break
                begin = max(free[stage], ends.get((what, number, source), 0))
                free[stage] = ends[what, number, stage] = begin + passes[stage][order.pop(0)]
    return 1 - sum(sum(each.values()) for each in passes) / max(free) / len(passes)


def held(events):
    """The micro-batches whose activations a stage keeps, at most."""
    return max(accumulate(1 if what == "F" else -1 for what, *_ in events))


def took(by_stage):
    """How long a step takes, from its first pass to its last."""
    return max(events[-1][3] for events in by_stage) - min(events[0][2] for events in by_stage)


def figures(steps):
    """Four figures of the steps' events: idle share when every pass takes as long, with each pass's least time in any step,
    and by the clock (the median of the steps); and the micro-batches that a stage keeps at most."""
    slots = [{event[:2]: 1 for event in events} for events in steps[0]]
    least = [{key: min(event[3] - event[2] for step in steps for event in step[stage] if event[:2] == key) for key in keys}
             for stage, keys in enumerate(slots)]  # fmt: skip
    busy = [sum(end - begin for events in step for *_, begin, end in events) / took(step) / len(step) for step in steps]
    return idle_share(slots), idle_share(least), 1 - statistics.median(busy), max(map(held, steps[0]))


def draw(found, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1 + 1.3 * len(found)), layout="constrained")
    axes = figure.subplots(len(found), sharex=True, squeeze=False)[:, 0]
    for axis, (micro_batches, title, by_stage) in zip(axes, found, strict=True):
        origin = min(events[0][2] for events in by_stage)
        axis.set_title(f"M = {micro_batches}: {title}", loc="left", fontsize=10)
        axis.set_yticks(range(len(by_stage)), [f"stage {stage}" for stage in range(len(by_stage))])
        axis.set_ylim(len(by_stage) - 0.5, -0.5)
        for stage, events in enumerate(by_stage):
            axis.barh(stage, took(by_stage) / 1e6, color="0.9", label="idle" if stage == 0 else None)
            for what, colour, name in (("F", "tab:blue", "forward"), ("B", "tab:orange", "backward")):
                spans = [((begin - origin) / 1e6, (end - begin) / 1e6) for kind, _, begin, end in events if kind == what]
                label = name if stage == 0 else None
                axis.broken_barh(spans, (stage - 0.4, 0.8), facecolor=colour, edgecolor="white", label=label)
            for _, number, begin, end in events:
                axis.text(
                    ((begin + end) / 2 - origin) / 1e6, stage, number, ha="center", va="center", fontsize=8, color="white"
                )
    axes[-1].set_xlabel("time since the step began, ms")
    axes[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", choices=SCHEDULES, default="gpipe")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--picture", default="gpipe.png")
    options = parser.parse_args()
    dist.init_process_group()  # gloo between CPUs, NCCL between GPUs
    rank, stages = dist.get_rank(), dist.get_world_size()
    has_gpus = torch.cuda.device_count() >= stages
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if has_gpus else "cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    expected = alone(options.steps, device) if rank == 0 else []
    drawn = []
    if rank == 0:
        print(
            f"{options.schedule}, {stages} stages on {device.type}, loss {expected[0]:.4f} to {expected[-1]:.4f}; idle share:"
        )
        print("  M    slots  (S-1)/(M+S-1)  least times    clock   held  furthest loss")
    for micro_batches in options.micro_batches:
        if options.schedule == "1f1b" and micro_batches < stages:
            continue  # it needs at least as many as stages
        losses, events = pipeline(options.schedule, micro_batches, options.steps, device)
        gathered = [None] * stages
        dist.all_gather_object(gathered, events)
        if rank == 0:
            steps = list(zip(*gathered, strict=True))[1:]  # in the first one the stages ask each other for shapes
            slots, least, clock, kept = figures(steps)
            formula = (stages - 1) / (micro_batches + stages - 1)
            furthest = max(abs(one - other) / other for one, other in zip(losses, expected, strict=True))
            found = f"{slots:7.1%}  {formula:13.1%}  {least:11.1%}  {clock:7.1%}  {kept:5}  {furthest:13.1e}"
            print(f"{micro_batches:3}  {found}", flush=True)
            title = f"idle {slots:.1%} of the slots, {least:.1%} with each pass's least time, {clock:.1%} by the clock"
            drawn.append((micro_batches, title, min(steps, key=took)))
    if rank == 0:
        draw(drawn, options.picture)
        print(f"{options.picture} shows the fastest step of each.")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
