"""Checkpoints on disk: any cutting is read back under any other, and what is not whole is not committed.

The reference is the tensor that was cut, bit for bit, and for the files themselves the safetensors library.
"""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from saved import bits, piece, random_bits, refusal, save, save_small

from app.checkpoints.step_folders import Reader, begin, choose, commit, committed, verify, write_pieces
from app.checkpoints.tensor_file import TensorFile
from app.init.region import Piece, Region
from app.runs.claim import claim

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


# What is written is read -----------------------------------------------------------------------------------------------------

shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=3)
cuts = st.lists(st.integers(0, 125), max_size=6)


def cut(tensor: torch.Tensor, at: list[int], key: str, name: str, *, columns: bool = False) -> list[Piece]:
    """Cut a tensor into flat ranges, or by columns."""
    flat = tensor.reshape(-1)
    if columns and tensor.dim() > 1 and len(flat):
        width = len(flat) // len(tensor)
        edges = [0, *sorted({place % width for place in at} - {0}), width]
        regions = [Region.made(a, len(tensor) * (b - a), b - a, width) for a, b in pairwise(edges)]
        return [Piece(key, name, tuple(tensor.shape), region, region.take(tensor)) for region in regions]
    edges = [0, *sorted({min(place, flat.numel()) for place in at} - {0, flat.numel()}), flat.numel()]
    return [Piece(key, name, tuple(tensor.shape), Region.flat(a, b - a), flat[a:b]) for a, b in pairwise(edges)]


@settings(max_examples=40, deadline=None)
@given(shapes=shapes, ranks=st.integers(1, 4), data=st.data())
def test_any_cutting_is_read_back_bit_by_bit_under_any_other(
    shapes: list[tuple[int, ...]], ranks: int, data: st.DataObject
) -> None:
    written: list[list[Piece]] = [[] for _ in range(ranks + 1)]  # one more rank, whose share is empty
    tensors = {}
    for number, shape in enumerate(shapes):
        for key, dtype in zip(("weight", "exp_avg", "average"), DTYPES, strict=True):
            size = torch.Size(shape).numel()
            tensors[key, f"p{number}"] = random_bits(size, dtype, number).reshape(shape)
            for part in cut(tensors[key, f"p{number}"], data.draw(cuts), key, f"p{number}", columns=data.draw(st.booleans())):
                written[data.draw(st.integers(0, ranks - 1))].append(part)
    with tempfile.TemporaryDirectory() as directory:
        reader = Reader(save(Path(directory), 1, *written))
        assert reader.keys() == ["average", "exp_avg", "weight"]
        assert {name: it.shape for name, it in reader.tensors("weight").items()} == {
            f"p{number}": shape for number, shape in enumerate(shapes)
        }
        for (key, name), tensor in tensors.items():
            whole = b"".join(map(bytes, reader.contents(key)[name].chunks))
            assert [*whole] == bits(tensor.reshape(-1))
            for part in cut(torch.zeros_like(tensor), data.draw(cuts), key, name, columns=data.draw(st.booleans())):
                reader.read_into(part)
                assert bits(part.values) == bits(part.region.take(tensor))
        verify(reader.folder)


def test_the_files_are_what_safetensors_reads(tmp_path: Path) -> None:
    wide, narrow = random_bits(3, torch.float64, 0), random_bits(7, torch.bfloat16, 1)
    folder = save(tmp_path, 1, [piece(narrow, key="m", shape=[7]), piece(wide, name="v", shape=[3])], [])
    found = load_file(folder / "rank-00000.safetensors")
    assert {name: bits(tensor) for name, tensor in found.items()} == {"m/w@0": bits(narrow), "weight/v@0": bits(wide)}
    assert load_file(folder / "rank-00001.safetensors") == {}
    assert load_file(folder / "buffers.safetensors")["norm.count"].item() == 7


HEADERS = {
    "nested": '{"a": ' + "[" * 1_000_000,
    "negative offsets": '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
    "a huge tensor": '{"a": {"dtype": "F32", "shape": [1000000000000000000000], "data_offsets": [0, 4]}}',
    "another size": '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
    "no dtype": '{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
}


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_made_by_hand_is_refused(tmp_path: Path, header: str) -> None:
    text = HEADERS[header].encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    assert "a.safetensors is damaged, or not a safetensors file: it" in refusal(lambda: TensorFile(tmp_path / "a.safetensors"))


def test_a_tensor_that_is_not_there_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    reader = Reader(save_small(tmp_path, 1))
    into = torch.zeros(12)
    assert "has 'weight' for 1 parameters, but not for other" in refusal(lambda: reader.read_into(piece(into, name="other")))
    assert "weight/w@0 is torch.complex64, which cannot be saved" in refusal(
        lambda: write_pieces(begin(claim(tmp_path), 2), 0, [piece(into.to(torch.complex64))])
    )
    assert "w has the shape (3, 4) in this run's model and (12,) in" in refusal(
        lambda: reader.read_into(piece(into, shape=[3, 4]))
    )
    assert into.tolist() == [0.0] * 12


# What is not whole is refused ------------------------------------------------------------------------------------------------


COLUMNS = (Region.made(0, 6, 2, 4), Region.made(2, 6, 2, 4))


def flat(*ranges: tuple[int, int]) -> list[Region]:
    return [Region.flat(start, stop - start) for start, stop in ranges]


@pytest.mark.parametrize(
    ("regions", "problem"),
    [
        (flat((0, 5), (6, 12)), "1 of its 12 elements are missing from all files"),
        (flat((0, 7), (5, 12)), "elements 5 to 6 are in two files, one of them rank-00001.safetensors"),
        (flat((0, 12), (12, 13)), "it has 12 elements, and rank-00001.safetensors has more"),
        ([COLUMNS[1]], "6 of its 12 elements are missing from all files"),
        ([*COLUMNS, Region.flat(6, 1)], "elements 6 to 6 are in two files, one of them rank-00002.safetensors"),
    ],
)
def test_regions_that_do_not_cover_a_tensor_once_are_not_committed(tmp_path: Path, regions: list[Region], problem: str) -> None:
    before = save_small(tmp_path, 1)
    pieces = [[Piece("weight", "w", (3, 4), region, torch.zeros(region.count))] for region in regions]
    sentence = refusal(lambda: save(tmp_path, 2, *pieces))
    assert f"step-00000002 cannot be written: weight of w: {problem}." in sentence
    assert choose(tmp_path) == before


def test_ranges_alone_are_of_the_format_that_older_versions_read(tmp_path: Path) -> None:
    kinds = {"flat": [Region.flat(0, 12)], "columns": [*COLUMNS]}
    formats = {}
    for name, regions in kinds.items():
        folder = save(tmp_path / name, 1, *([Piece("weight", "w", (3, 4), it, torch.zeros(it.count))] for it in regions))
        content = json.loads((folder / "manifest.json").read_bytes())
        formats[name] = content["format"], content["tensors"]["weight"]["w"]["ranges"]
    files = [f"rank-0000{rank}.safetensors" for rank in range(2)]
    assert formats["flat"] == (1, [[0, 12, files[0]]])
    assert formats["columns"] == (2, [[0, 10, files[0], 2, 4], [2, 12, files[1], 2, 4]])


def test_ranks_that_differ_in_a_dtype_or_shape_are_not_committed(tmp_path: Path) -> None:
    for other, words in (
        (piece(torch.zeros(6, dtype=torch.float64), 6), "F64 (12,)"),
        (piece(torch.zeros(6), 6, shape=[3, 4]), "F32 (3, 4)"),
    ):
        sentence = refusal(lambda other=other: save(tmp_path, 1, [piece(torch.zeros(6))], [other]))
        assert f"weight of w is F32 (12,) on one rank and {words} in rank-00001" in sentence


def test_a_file_of_a_rank_that_does_not_share_the_folder_is_missed(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    ours = claim(tmp_path / "here")
    here, there = begin(ours, 1), begin(claim(tmp_path / "there"), 1)
    entries = [write_pieces(here, 0, [piece(torch.zeros(6))]), write_pieces(there, 1, [piece(torch.zeros(6), 6)])]
    said = refusal(lambda: commit(ours, 1, entries, state={}, buffers={}))
    assert "rank-00001.safetensors differs from what its rank has just written: the run folder must be on a file system" in said
    assert committed(tmp_path / "here") == []
