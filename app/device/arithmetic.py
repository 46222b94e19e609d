"""Checks that all ranks compute right: known answers are compared with the right result and with other ranks of the same
device kind.

A number further off than rounding takes it is wrong, and so are other bits where the same is computed again, or where a device
of the same kind (model, instructions, threads, torch) computes it: such devices round alike. Where all ranks of a kind of
accelerator give other bits each time, the kernel is one that may; then it is no fault of theirs.
"""

from __future__ import annotations

import platform
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from app.device.known_answers import Answer, Computed, Element, Operation, compute, first_difference
from app.errors import DeviceError
from app.place.cores import of_processor
from app.ranks.runtime import Runtime

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MOST_FAULTS = 4
"""Faults named in one message."""
_TRIED = ("cpu",)
"""Kinds of device on which these checks were seen to accept correct results and refuse wrong ones."""
IN_DOUBT = "These checks have never been tested on such a device"
"""Added to faults that are not certain (`is_certain`)."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What one rank computed."""

    rank: int
    host: str
    device: str
    kind: str
    """What must be alike for two devices to round alike."""
    answers: tuple[Answer, ...]
    elapsed_s: float
    failed: str = ""
    """Why the device could not compute the rest; that is not to compute wrongly."""


@dataclass(frozen=True)
class Fault:
    """A rank that computes something wrongly."""

    by: Answers
    answer: Answer
    text: str
    """What was computed, what was found and what was expected."""
    everywhere: bool
    """Whether all ranks compute it wrongly."""


def precisions(mixed_precision: str, weights: str) -> list[torch.dtype]:
    """Return the types that a run with weights of this type computes in; float32 always, in which losses are."""
    own: torch.dtype = getattr(torch, weights)
    return list(dict.fromkeys([torch.float32, own, _HALF.get(mixed_precision, own)]))


def examine(
    runtime: Runtime, types: Sequence[torch.dtype], operations: Sequence[Operation]
) -> tuple[list[Answers], list[Fault]]:
    """Compute on every rank in these types; return what all ranks gave, and what is wrong with it, the same on all of them."""
    start_s, failed = time.perf_counter(), ""
    computed: list[Computed] = []
    for precision in types:
        try:
            computed += compute(runtime.device, precision, operations)
        except RuntimeError as error:  # NotImplementedError is one: this kind of device may lack an operation
            failed = f"{str(precision).removeprefix('torch.')}: {str(error).splitlines()[0]}"
    own = Answers(
        rank=runtime.launched.rank,
        host=socket.gethostname(),
        device="cpu" if runtime.device.type == "cpu" else str(runtime.device),
        kind=kind_of(runtime.device),
        answers=tuple(each.answer for each in computed),
        elapsed_s=time.perf_counter() - start_s,
        failed=failed,
    )
    ranks: list[Answers] = runtime.gather(own)
    faults = judge(ranks)
    faulty = {fault.by.rank for fault in faults}
    for key, kind in differing([each for each in ranks if each.rank not in faulty]):
        mine = [each for each in computed if each.answer.key == key and own.kind == kind and own.rank not in faulty]
        everyone: list[list[Computed]] = runtime.gather(mine)
        faults += odd_ones({ranks[rank]: each[0] for rank, each in enumerate(everyone) if each})
    return ranks, faults


def check(runtime: Runtime, types: Sequence[torch.dtype], operations: Sequence[Operation]) -> None:
    """Raise DeviceError on all ranks if one of them computes an operation wrongly; it names the rank.

    Operations that a kind of device does not have cannot be checked, and some findings are in doubt (`is_certain`): rank 0 says
    so.
    """
    ranks, faults = examine(runtime, types, operations)
    if certain := [fault for fault in faults if is_certain(fault)]:
        raise DeviceError(sentence(certain))
    if runtime.is_main:
        if faults:
            sys.stderr.write(f"note: {sentence(faults)} {IN_DOUBT}: the run continues. Check its loss.\n")
        for failed in sorted({f"{each.device.partition(':')[0]}, {each.failed}" for each in ranks if each.failed}):
            sys.stderr.write(f"note: not all known answers could be computed on {failed}\n")


def is_certain(fault: Fault) -> bool:
    """Return whether it is the device that is wrong, and not what was expected of it.

    On a kind of device that was never tried the bound of rounding may be too narrow, and equal devices may round otherwise. A
    number beyond the bound on one rank, and within it on others, is wrong there too.
    """
    is_tried = fault.by.device.partition(":")[0] in _TRIED
    return is_tried or (fault.answer.wrong is not None and not fault.everywhere)


def sentence(faults: Sequence[Fault]) -> str:
    """Return what is wrong, with what to do."""
    named = [f"rank {fault.by.rank} on {fault.by.host}, {fault.by.device}: {fault.text}" for fault in faults[:_MOST_FAULTS]]
    if len(faults) > _MOST_FAULTS:
        named.append(f"and {len(faults) - _MOST_FAULTS} more")
    layers = list(dict.fromkeys(fault.answer.where for fault in faults if fault.answer.where))
    if layers:
        remedy = (
            f"The model does this in {', '.join(layers)}: use larger samples (data.image_size), another "
            "model, or mixed_precision 'no'"
        )
    elif all(fault.everywhere for fault in faults) and len({fault.by.rank for fault in faults}) > 1:
        remedy = f"All ranks compute it wrongly, which points to torch {torch.__version__} and not to a machine"
    else:
        hosts = sorted({fault.by.host for fault in faults})
        remedy = f"Exclude {', '.join(hosts)}; run `samerun doctor` there to examine only the devices"
    return "the arithmetic is wrong.\n" + "\n".join(named) + f"\n{remedy}."


def judge(ranks: Sequence[Answers]) -> list[Fault]:
    """Return what each rank computed wrongly by itself: beyond rounding, or otherwise the second time."""
    faults = []
    for each in ranks:
        for answer in each.answers:
            same = [other for other in ranks if any(given.key == answer.key for given in other.answers)]
            if answer.wrong is not None:
                everywhere = all(_given(other, answer).wrong is not None for other in same)
                found = answer.wrong
                text = (
                    f"{_of(answer)} is {found.found:.9g} at {_at(found)}, but {found.expected:.9g} is "
                    f"correct, and rounding explains at most {found.allowed:.1g}"
                )
                faults.append(Fault(each, answer, text, everywhere))
            elif answer.unsteady is not None:
                alike = [other for other in same if other.kind == each.kind]
                everywhere = all(_given(other, answer).unsteady is not None for other in alike)
                if everywhere and each.device != "cpu":
                    continue  # a kernel that adds up in any order
                found = answer.unsteady
                text = f"{_of(answer)} is {found.expected:.9g} at {_at(found)} once and {found.found:.9g} the next time"
                faults.append(Fault(each, answer, text, everywhere))
    return faults


def differing(ranks: Sequence[Answers]) -> list[tuple[tuple[str, str, str, str], str]]:
    """Return what ranks of the same kind of device gave other bits for, and the kind."""
    digests: dict[tuple[tuple[str, str, str, str], str], set[str]] = defaultdict(set)
    for each in ranks:
        for answer in each.answers:
            if answer.unsteady is None:
                digests[answer.key, each.kind].add(answer.digest)
    return [key for key, found in digests.items() if len(found) > 1]


def odd_ones(given: dict[Answers, Computed]) -> list[Fault]:
    """Name the ranks whose bits are not those of most; of as many on both sides, those that are further off."""
    count = Counter(each.answer.digest for each in given.values())
    most = max(count.values())
    first, *others = [digest for digest in count if count[digest] == most]
    usual_rank = next(rank for rank, each in given.items() if each.answer.digest == first)
    if others:
        other = next(rank for rank, each in given.items() if each.answer.digest == others[0])
        here, there = _difference(given[usual_rank], given[other])
        if abs(here.found - here.expected) > abs(there - here.expected):
            first, usual_rank = others[0], other
    faults = []
    for rank, each in given.items():
        if each.answer.digest != first:
            element, usual = _difference(each, given[usual_rank])
            text = (
                f"{_of(each.answer)} is {element.found:.9g} at {_at(element)} and {usual:.9g} on rank "
                f"{usual_rank.rank}, and {element.expected:.9g} is correct: devices of the same kind should "
                "round in the same way"
            )
            faults.append(Fault(rank, each.answer, text, everywhere=False))
    return faults


def _difference(one: Computed, other: Computed) -> tuple[Element, float]:
    """Return the first number of `one` that is another in `other`, and what it is there."""
    element = first_difference(one.found, other.found, one.expected)
    return element, float(other.found[element.index])


def _given(each: Answers, to: Answer) -> Answer:
    return next(answer for answer in each.answers if answer.key == to.key)


def _of(answer: Answer) -> str:
    return f"{answer.operation} in {answer.precision}: the {answer.part}"


def _at(element: Element) -> str:
    return f"[{', '.join(map(str, element.index))}]"


def kind_of(device: torch.device) -> str:
    """Return what two devices have in common that give the same bits: model, instructions, threads and torch."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{found.name}, {found.multi_processor_count} multiprocessors, torch {torch.__version__}"
    if device.type != "cpu":
        return f"{device.type}, torch {torch.__version__}"
    told = " ".join(filter(None, map(of_processor, ("model name", "flags", "Features", "cache size"))))
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {told}, {capability}, {torch.get_num_threads()} threads, torch {torch.__version__}"
