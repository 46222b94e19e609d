"""A device that computes wrongly is found and named: by itself, beside others of its kind, at the start of a run, by doctor."""

from __future__ import annotations

import json
import platform
import runpy
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from processes import SCRIPTS, run
from torch import Tensor

from app.device import arithmetic, known_answers
from app.device.arithmetic import Answers
from app.device.known_answers import GENERAL, Computed, narrow_convolutions
from app.errors import DeviceError

CPU = torch.device("cpu")
BROKEN = SCRIPTS / "broken_device.py"
Broken: Any = runpy.run_path(str(BROKEN))["Broken"]
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
# operator, what it is part of, which of its tensors
OPERATORS = [
    ("mm", "matrix product", {"result", "gradient of the first factor", "gradient of the second factor"}),
    ("convolution", "convolution", {"result"}),
    ("convolution_backward", "convolution", {"gradient of the images", "gradient of the kernels"}),
    (ATTENTION, "attention", {"result"}),
    (f"{ATTENTION}_backward", "attention", {"gradient of the queries", "gradient of the keys"}),
    ("sum.dim_IntList", "reduction", {"result", "gradient of the weights"}),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several would wait for one another, on cores that others use too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def computed(precision: torch.dtype, operations: Sequence[known_answers.Operation] = GENERAL) -> list[Computed]:
    return list(known_answers.compute(CPU, precision, operations))


def as_rank(rank: int, found: list[Computed], *, kind: str = "cpu") -> Answers:
    answers = tuple(each.answer for each in found)
    return Answers(rank=rank, host=f"node{rank}", device="cpu", kind=kind, answers=answers, elapsed_s=0.1)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_this_processor_computes_right_and_alike_each_time(precision: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    first, second = computed(precision), computed(precision)
    assert len(first) == 4 + 3 * 3 + 3 + 3
    assert [each.answer for each in first if each.answer.wrong or each.answer.unsteady] == []
    assert [each.answer.digest for each in first] == [each.answer.digest for each in second]
    # A tolerance that lets anything pass would be none: of float32 it is far below the numbers.
    if precision == torch.float32:
        for each in first:
            assert float((each.found - each.expected).abs().max()) < 1e-4 * float(each.expected.abs().max())


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("operator", "operation", "parts"), OPERATORS, ids=[name for name, _, _ in OPERATORS])
def test_a_broken_kernel_is_found_whatever_it_computes(
    operator: str, operation: str, parts: set[str], precision: torch.dtype
) -> None:
    right = computed(precision)
    for fault in ("high", "old", "low"):
        with Broken(fault, operator):
            broken = computed(precision)
        of_it = [(good, bad) for good, bad in zip(right, broken, strict=True) if operation in bad.answer.operation]
        assert {bad.answer.part for good, bad in of_it if good.answer.digest != bad.answer.digest} >= parts
        faults = arithmetic.judge([as_rank(0, broken)])
        if fault == "low":  # within what rounding may do: only the others of its kind can tell
            assert faults == []
            differing = arithmetic.differing([as_rank(0, right), as_rank(1, broken)])
            assert {key[1] for key, _ in differing if operation in key[0]} >= parts
            assert arithmetic.differing([as_rank(0, right), as_rank(1, broken, kind="another")]) == []
        else:
            assert {each.answer.part for each in faults if operation in each.answer.operation} >= parts


def test_of_three_the_odd_one_is_named_and_of_two_the_one_that_is_further_off() -> None:
    right = computed(torch.float32)[0]
    off = right.found.clone()
    off[3, 4] += 1e-6
    assert abs(off[3, 4] - right.expected[3, 4]) > abs(right.found[3, 4] - right.expected[3, 4])
    odd = Computed(replace(right.answer, digest="other"), off, right.expected)
    for order in ([right, odd], [odd, right], [right, right, odd], [odd, right, right]):
        (fault,) = arithmetic.odd_ones({as_rank(rank, [each]): each for rank, each in enumerate(order)})
        assert (fault.by.rank, fault.by.host) == (order.index(odd), f"node{order.index(odd)}")
        assert f"matrix product in float32: the result is {float(off[3, 4]):.9g} at [3, 4]" in fault.text
        assert f"{float(right.found[3, 4]):.9g} on rank" in fault.text


def test_a_kernel_of_accelerators_that_adds_up_in_any_order_is_no_fault() -> None:
    with Broken("old", "mm"):
        found = computed(torch.float32, GENERAL[:1])
    unsteady = as_rank(0, [replace(each, answer=replace(each.answer, wrong=None)) for each in found])
    assert all(each.unsteady for each in unsteady.answers)
    steady = as_rank(1, computed(torch.float32, GENERAL[:1]))
    assert len(arithmetic.judge([unsteady])) == 3  # a CPU's never do
    on_gpu = [replace(each, device="cuda:0") for each in (unsteady, steady)]
    assert arithmetic.judge(on_gpu[:1]) == []
    assert {fault.by.rank for fault in arithmetic.judge(on_gpu)} == {0}


def test_on_a_kind_of_device_that_was_never_tried_only_a_rank_that_is_off_alone_is_refused() -> None:
    right = as_rank(0, computed(torch.float32, GENERAL[:1]))
    with Broken("high", "mm"):
        broken = as_rank(1, computed(torch.float32, GENERAL[:1]))

    def certain(device: str, *ranks: Answers) -> set[bool]:
        faults = arithmetic.judge([replace(each, device=device) for each in ranks])
        return {arithmetic.is_certain(fault) for fault in faults}

    assert certain("cpu", broken) == {True}
    assert certain("cuda:0", broken) == {False}
    assert certain("cuda:0", replace(broken, rank=0), broken) == {False}
    assert certain("cuda:0", right, broken) == {True}


@pytest.mark.parametrize(("size", "layers"), [(8, ["layer3.0.conv1", "layer4.0.conv1"]), (16, ["layer4.0.conv1"]), (32, [])])
def test_convolutions_on_maps_smaller_than_their_stride_are_found(size: int, layers: list[str]) -> None:
    model = torchvision.models.resnet18(num_classes=10)
    found = narrow_convolutions(model, lambda called: called(torch.empty(2, 3, size, size, device="meta")))
    assert [each.where for each in found] == layers
    assert all(each.name.endswith("with stride 2x2 on maps of 1x1") for each in found)
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_that_meets_a_broken_convolution_is_named_with_its_layer() -> None:
    model = torchvision.models.resnet18(num_classes=10)
    narrow = narrow_convolutions(model, lambda called: called(torch.empty(2, 3, 16, 16, device="meta")))
    with Broken("high", "convolution_backward"):
        faults = arithmetic.judge([as_rank(0, computed(torch.float32, narrow))])
    text = arithmetic.sentence(faults)
    assert "3x3 convolution of 256 to 512 channels with stride 2x2 on maps of 1x1 in float32: the gradient of the" in text
    assert "The model does this in layer4.0.conv1: use larger samples (data.image_size)" in text


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the GNU C library fills memory")
def test_memory_that_nobody_wrote_holds_something_else_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was there before: kernels that read what they did not write, as some of oneDNN do, cannot seem right."""
    clean = [torch.zeros(size) for size in (300, 85_000, 85_000, 2_000_000) for _ in range(3)]
    between = clean[::2]
    del clean  # leaves holes of zeros
    unwritten: list[list[Tensor]] = []

    def reads_before_it_writes(left: Tensor, right: Tensor) -> Tensor:
        unwritten.append([torch.empty(size) for size in (2_000, 84_000, 1_900_000)])
        return left @ right + sum(each[-1] for each in unwritten[-1])

    operation = replace(GENERAL[0], apply=reads_before_it_writes)
    result = computed(torch.float32, [operation])[0].answer
    assert [bool(found) for found in (result.wrong, result.unsteady)] == [True, True]
    once, again = unwritten[-2:]
    for first, second in zip(once, again, strict=True):
        assert float(first.abs().min()) > 1e38
        assert 1e4 < float(second.abs().min()) < 2e4
    assert all(float(each.abs().max()) == 0 for each in between)


RANK_1 = f"rank 1 on {socket.gethostname()}, cpu: "


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("preset", "fault", "operator", "words"),
    [
        ("multi_gpu", "high", "mm", f"{RANK_1}matrix product in float32: the result is "),
        ("fsdp2", "low", "convolution_backward", " on rank 0, and "),
        ("multi_gpu", "old", ATTENTION, f"{RANK_1}attention in float32: the result is "),
    ],
)
def test_a_run_with_a_broken_rank_ends_before_it_begins(
    preset: str, fault: str, operator: str, words: str, tmp_path: Path
) -> None:
    command = (str(BROKEN), "1", fault, operator, "app.train", "--recipe", "digits", "--run-dir", str(tmp_path / "run"))
    ended = run(preset, 2, *command)
    assert ended.returncode == DeviceError.exit_code, ended.output
    assert words in ended.output
    assert "is correct" in ended.output
    assert f"Exclude {socket.gethostname()}" in ended.output
    assert "Traceback" not in ended.output
    assert not (tmp_path / "run").exists()


@pytest.mark.multiproc
def test_doctor_names_a_broken_rank(tmp_path: Path) -> None:
    code = tmp_path / "code"
    command = (str(BROKEN), "1", "high", "convolution", "app.doctor.doctor", "--run-dir", str(tmp_path))
    ended = run("multi_gpu", 2, *command, "--exit-code-file", str(code), "--json").check()
    found = json.loads(ended.output[ended.output.index("{") :])
    assert code.read_text() == "1"
    assert {(problem["host"], problem["rank"]) for problem in found["problems"]} == {(socket.gethostname(), 1)}
    sentences = [problem["sentence"] for problem in found["problems"]]
    assert any("3x3 convolution with stride 2 in bfloat16: the result is" in each for each in sentences)
    assert [rank["known_answers_s"] > 0 for rank in found["ranks"]] == [True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_gpu_gives_known_answers_in_a_fraction_of_a_second(precision: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    first = list(known_answers.compute(device, precision, known_answers.GENERAL))
    start_s = time.perf_counter()
    second = list(known_answers.compute(device, precision, known_answers.GENERAL))
    elapsed_s = time.perf_counter() - start_s
    assert [each.answer for each in (*first, *second) if each.answer.wrong or each.answer.unsteady] == []
    assert [each.answer.digest for each in first] == [each.answer.digest for each in second]
    assert elapsed_s < 1.0
