"""A device that computes wrongly is found and named: alone, compared with others of its kind, at a start in bf16, by doctor."""

from __future__ import annotations

import runpy
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from processes import SCRIPTS, run

from app.checks import arithmetic
from app.checks.arithmetic import OPERATIONS, Answer, compare, narrow_convolutions
from app.distributed import numerics
from app.errors import DeviceError

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
    """Several threads would wait for each other, on cores that others use too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def computed(precision: torch.dtype, *, device: str = "cpu", only: slice = slice(None)) -> list[Answer]:
    return [answer for each in OPERATIONS[only] for answer in arithmetic.compute(torch.device(device), precision, each)]


def faults(*ranks: list[Answer], kind: str = "cpu") -> list[tuple[int, str]]:
    return [(fault.rank, fault.text) for fault in compare([(f"node{rank}", kind, each) for rank, each in enumerate(ranks)])]


@pytest.mark.parametrize(("precision", "threads"), [(torch.float32, 2), (torch.bfloat16, 1), (torch.float16, 1)], ids=str)
def test_this_processor_computes_right_and_alike_each_time(precision: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    first = computed(precision)
    assert len(first) == 4 + 3 * 3 + 3 + 3
    assert faults(first, computed(precision)) == []


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("operator", "operation", "parts"), OPERATORS, ids=[name for name, _, _ in OPERATORS])
def test_a_broken_kernel_is_found_whatever_it_computes(
    operator: str, operation: str, parts: set[str], precision: torch.dtype
) -> None:
    right = computed(precision)

    def found(broken: list[Answer], *others: list[Answer], kind: str = "cpu") -> set[str]:
        texts = [text for rank, text in faults(*others, broken, kind=kind) if rank == len(others)]
        return {part for part in parts if any(operation in text and f": {part} " in text for text in texts)}

    with Broken("high", operator):
        assert found(computed(precision)) == parts
    with Broken("low", operator):  # within rounding: only a comparison with other ranks finds it
        broken = computed(precision)
    assert found(broken) == set()
    assert found(broken, right, right) == parts


def test_the_rank_with_other_bits_than_most_is_named() -> None:
    right = computed(torch.float32, only=slice(1))[0]
    odd = replace(right, digest="other", error=right.error + 1)
    for order in ([right, odd], [odd, right], [right, right, odd], [odd, right, right]):
        text = f"matrix product in float32: result has other bits than on rank {order.index(right)}"
        assert faults(*([each] for each in order)) == [(order.index(odd), text)]
    # A kernel of an accelerator can add in any order; another kind of device rounds in another way.
    assert faults([right], [odd], kind="H100") == []
    assert [rank for rank, _ in faults([right], [right], [odd], kind="H100")] == [2]
    assert compare([("a", "cpu 1", [right]), ("b", "cpu 2", [odd])]) == []


@pytest.mark.parametrize("tf32", [False, True])
def test_factors_rounded_to_tf32_are_wrong_unless_they_were_asked_for(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """A product that is as far from the right one as factors of TF32 make it, but in float64."""
        return left @ right * (1 if left.dtype == torch.float64 else 1 + 2**-11)

    monkeypatch.setattr(numerics, "rounds_to_tf32", lambda _: tf32)
    operation = replace(OPERATIONS[0], apply=matmul)
    answers = list(arithmetic.compute(torch.device("cpu"), torch.float32, operation))
    assert {bool(answer.wrong) for answer in answers} == {not tf32}


@pytest.mark.parametrize(("size", "layers"), [(8, ["layer3.0.conv1", "layer4.0.conv1"]), (16, ["layer4.0.conv1"]), (32, [])])
def test_convolutions_on_maps_smaller_than_their_stride_are_found(size: int, layers: list[str]) -> None:
    model = torchvision.models.resnet18(num_classes=10)
    found = narrow_convolutions(model, lambda called: called(torch.empty(2, 3, size, size, device="meta")))
    assert [each.layer for each in found] == layers
    assert all(each.name.endswith("with stride 2x2 on maps of 1x1") for each in found)
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.multiproc
def test_a_start_in_bf16_refuses_a_narrow_convolution_that_is_computed_wrongly(tmp_path: Path) -> None:
    arguments = ("--recipe", "digits", "--run-dir", str(tmp_path / "run"), "model.name=resnet18", "train.steps=1")
    command = (str(BROKEN), "1", "high", "convolution_backward", "app.train", *arguments)
    ended = run("multi_gpu", 2, *command, env={"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert ended.returncode == DeviceError.exit_code, ended.output
    host = socket.gethostname()
    name = "3x3 convolution of 128 to 256 channels with stride 2x2 on maps of 1x1 in bfloat16: gradient of the"
    assert f"rank 1 on {host}: {name}" in ended.output
    assert "layer4.0.conv1: use larger samples (data.image_size), another model, or mixed_precision 'no'" in ended.output
    # Some processors compute it wrongly by themselves: then there is no host to exclude.
    assert ("or exclude" in ended.output) == (f"rank 0 on {host}" not in ended.output)
    assert "Traceback" not in ended.output
    assert not (tmp_path / "run").exists()


@pytest.mark.multiproc
def test_doctor_names_a_broken_rank(tmp_path: Path) -> None:
    code = tmp_path / "code"
    command = (str(BROKEN), "1", "high", "convolution", "app.checks.doctor", "--exit-code-file", str(code))
    ended = run("multi_gpu", 2, *command).check()
    assert code.read_text() == "1"
    assert f"WRONG rank 1 on {socket.gethostname()}: 3x3 convolution with stride 2 in bfloat16: result is " in ended.output


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_computes_right(precision: torch.dtype) -> None:
    assert [answer.wrong for answer in computed(precision, device="cuda") if answer.wrong] == []
