"""Weights that other programs saved: by the libraries themselves, on two processes; and files that are made to do harm."""

from __future__ import annotations

import functools
import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import SCRIPTS, run, train
from safetensors.torch import load_file, save_file
from saved import save_split
from scripts.saved_elsewhere import RECIPE, build
from torch.distributed import checkpoint as dcp

from app import export
from app.checkpoints import foreign_weights, initial_weights, stored_weights
from app.checkpoints.tensor_file import StoredWeights
from app.distributed.runtime import Runtime
from app.environment.launched import Launched
from app.errors import CheckpointError
from app.init.region import Region
from app.recipe import recipe_file
from app.recipe.schema import BatchPlan, Recipe, TrainRecipe
from app.tasks.image_classification.sections import Sections
from app.tasks.image_classification.task import ImageClassification

MODEL = {"recipe": {}, "facts": {"classes": [*"0123456789"], "channels": 1, "image_size": [8, 8]}}
TIED = {"conv1.tied.weight", "conv1.tied.bias"}
"""Other names of the last layer's parameters."""


def opened(place: Path) -> StoredWeights:
    return stored_weights.open_stored(place if place.is_file() else stored_weights.in_folder(place) or place)


def read_all(stored: StoredWeights) -> None:
    for it in stored.values():
        it.read_into(torch.empty(prod(it.shape)), Region.flat(0, prod(it.shape)))


def assert_same(stored: StoredWeights, expected: dict[str, torch.Tensor]) -> None:
    """All bits are those that were saved, read whole and in parts of rows and of columns."""
    last = {f"conv1.tied.{name.partition('.')[2]}": it for name, it in expected.items() if name.startswith("head.")}
    assert stored.keys() - TIED == expected.keys() - ({"head.weight", "head.bias"} - stored.keys())
    for name, it in stored.items():
        whole = (expected | last)[name]
        assert (it.shape, it.dtype) == (tuple(whole.shape), whole.dtype), name
        columns = prod(it.shape[1:])
        regions = [Region.flat(0, whole.numel()), Region.flat(whole.numel() // 3, whole.numel() // 2)]
        if len(it.shape) > 1:
            regions.append(Region.made(1, it.shape[0] * (columns // 2), columns // 2, columns))
        for region in regions:
            values = torch.empty(region.count, dtype=it.dtype)
            it.read_into(values, region)
            assert torch.equal(values, region.take(whole)), (name, region)


def saved(preset: str, folder: Path) -> Path:
    """Return the folder of what a preset saves, once."""
    place = folder / preset
    if not place.exists():
        place.mkdir()
        run(preset, 2, str(SCRIPTS / "saved_elsewhere.py"), str(place)).check()
    return place


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(Launched(use_cpu=True), BatchPlan(global_batch_size=8, data_ranks=1, accumulation=1))


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize(("source", "preset"), [("fsdp2", "deepspeed_zero3"), ("deepspeed_zero3", "fsdp2")])
def test_a_sharded_run_reads_what_was_saved(folder: Path, tmp_path: Path, source: str, preset: str) -> None:
    place = saved(source, folder)
    words = ("data.source=fakedata", "data.image_size=8", "data.fake_channels=1", "data.fake_train_samples=64", "optim.lr=0",
             "data.fake_test_samples=8", "train.global_batch_size=32", "model.norm=batch", "model.hidden=15",
             "train.init_allow=[conv1.tied.*]", "train.steps=1")  # fmt: skip
    train(preset, tmp_path / "run", *words, f"train.init_from={place / 'state'}", processes=2).check()
    expected, found = load_file(place / "expected.safetensors"), load_file(tmp_path / "run" / "model.safetensors")
    for name in found.keys() - {name for name in found if "running" in name or "tracked" in name}:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("preset", "places"),
    [
        ("fsdp2", ("state", "nested", "flat")),
        ("deepspeed_zero3", ("state",)),
        pytest.param("deepspeed_zero2", ("state", "state/pytorch_model"), marks=pytest.mark.slow),
        pytest.param("multi_gpu", ("state", "nested", "flat"), marks=pytest.mark.long),
    ],
)
def test_what_libraries_save_on_two_processes_is_read(folder: Path, preset: str, places: tuple[str, ...]) -> None:
    """Parameters of odd sizes, tied and frozen ones, and buffers."""
    place = saved(preset, folder)
    expected = load_file(place / "expected.safetensors")
    for name in places:
        assert_same(opened(place / name), expected)


def test_parts_of_any_rectangle_are_joined() -> None:
    """Every cut of a tensor of four dimensions into parts by one or two of them."""
    whole = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    for dims in ((0,), (1,), (2,), (3,), (0, 2), (1, 3), (2, 3)):
        cuts = [[slice(None)] if dim not in dims else [slice(0, 1), slice(1, None)] for dim in range(4)]
        values = torch.full_like(whole, -1)
        for at in [(a, b, c, d) for a in cuts[0] for b in cuts[1] for c in cuts[2] for d in cuts[3]]:
            part, first = whole[at].contiguous(), [it.start or 0 for it in at]
            begin = 0
            for region in foreign_weights._rectangle((2, 3, 4, 5), tuple(first), tuple(part.shape)):
                region.rows(values).copy_(part.view(-1)[begin : begin + region.count].view(region.runs, region.run))
                begin += region.count
        assert torch.equal(values, whole), dims


class Progress:
    """An object of a program's own class, in its state."""

    def __init__(self) -> None:
        self.steps, self.seen = [3], {1, 2}


def lightning(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The content of a file that Lightning writes (pytorch_lightning/trainer/connectors/checkpoint_connector.py, 2.5)."""
    return {
        "epoch": 1, "global_step": 7, "pytorch-lightning_version": "2.5.5", "loops": {"fit_loop": {"state": Progress()}},
        "state_dict": OrderedDict({f"net._orig_mod.{name}": it for name, it in weights.items()} | {"loss.pos": torch.ones(2)}),
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best": Path("x"), "kind": Progress}}, "lr_schedulers": [],
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}}], "hyper_parameters": {"open": functools.partial(open)},
    }  # fmt: skip


def test_a_file_of_lightning_fills_a_model_whatever_objects_it_has(runtime: Runtime, tmp_path: Path) -> None:
    expected = build(seed=3).to(memory_format=torch.channels_last).state_dict()  # type: ignore[call-overload]
    torch.save(lightning(expected), tmp_path / "last.ckpt")
    model = build(seed=4)
    recipe = TrainRecipe(init_from=str(tmp_path / "last.ckpt"), init_allow=("loss.pos",))
    initial_weights.load(runtime, ImageClassification(Sections(model=RECIPE)), model, recipe, resumed=None)
    for name, it in model.state_dict().items():
        assert torch.equal(it, expected[name]), name


# ---- Files that are made to do harm ------------------------------------------------------------------------------------------


class Calls:
    """Pickled as a call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def rebuilt(shape: Any, strides: Any, first: Any = 0) -> Calls:
    """A tensor of torch.save with these numbers, and a storage of 4 elements."""
    return Calls(torch._utils._rebuild_tensor_v2, torch.ones(4)._typed_storage(), first, shape, strides, False, OrderedDict())


SINGLE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def folder_of_dcp(tmp_path: Path) -> Path:
    dcp.save({"model": {"a": torch.ones(4, 3), "b": torch.ones(2)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def changed(folder: Path, change: Callable[[Any], None]) -> Path:
    """Write the metadata of DCP again, with a change."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))
    return folder


def infos(metadata: Any, **values: Any) -> None:
    for info in metadata.storage_data.values():
        vars(info).update(values)


def chunks(metadata: Any, **values: Any) -> None:
    for chunk in metadata.state_dict_metadata["model.a"].chunks:
        vars(chunk).update(values)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that a call would make; no test makes it."""
    yield tmp_path / "ran"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (lambda ran: Calls(os.system, f"touch {ran}"), "has no tensors by name"),
        (lambda ran: Calls(torch._utils._rebuild_parameter, Calls(os.system, f"touch {ran}"), 0, {}), "has no tensors by name"),
        (lambda _: rebuilt((2**40,), (1,)), r"a tensor of the shape \(1099511627776,\) is larger than its part of the file"),
        (lambda _: rebuilt((2,), (2**62,)), "is larger than its part of the file"),
        (lambda _: rebuilt((2,), (1,), -1), "is larger than its part of the file"),
        (lambda _: rebuilt((2,), (1,), "x"), "is larger than its part of the file"),
        (lambda _: rebuilt((-2,), (1,)), "a shape is invalid"),
        (lambda _: rebuilt((2,), (1, 1)), r"zip\(\)"),
        (lambda _: Calls(torch._utils._rebuild_tensor_v2, ("storage", Progress, "0", "cpu", 9), 0, (1,), (1,)), "Progress"),
        (lambda _: Calls(torch._utils._rebuild_tensor_v2, 3, 0, (1,), (1,)), "int"),
    ],
)
def test_a_pickle_calls_nothing_and_reads_nothing_outside_of_its_storages(
    tmp_path: Path, marker: Path, value: Callable[[Path], Any], why: str
) -> None:
    torch.save({"state_dict": {"a": value(marker)}}, tmp_path / "file.ckpt")
    with pytest.raises(CheckpointError, match=why):
        opened(tmp_path / "file.ckpt")


def test_safetensors_are_no_pickle_whatever_the_size_of_their_header(tmp_path: Path) -> None:
    """A pickle begins with 128, and so does a size of 128, 384, 640 bytes and so on."""
    weights, begins = {"a": torch.arange(3.0)}, set()
    for padding in range(0, 320, 8):
        save_file(weights, tmp_path / "it.safetensors", metadata={"": "-" * padding})
        begins.add((tmp_path / "it.safetensors").read_bytes()[0])
        assert opened(tmp_path / "it.safetensors").keys() == weights.keys()
    assert 128 in begins


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(100)}, good := tmp_path / "good.pt")
    content = good.read_bytes()
    with zipfile.ZipFile(good) as archive, zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as small:
        for info in archive.infolist():
            small.writestr(info.filename, archive.read(info))
    torch.save({"a": torch.ones(100)}, old := io.BytesIO(), _use_new_zipfile_serialization=False)
    files = {
        "half.pt": content[: len(content) // 2],
        "old.pt": old.getvalue()[:-100],
        "flipped.pt": content.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"),
        "endian.pt": content.replace(b"little", b"bigbig"),
        "bare.pt": pickle.dumps({"a": 3}),
    }
    for name, damaged in files.items():
        (tmp_path / name).write_bytes(damaged)
    for name in ("small.pt", *files):
        with pytest.raises(CheckpointError, match=f"{name} is damaged, or has no weights that can be read"):
            opened(tmp_path / name)


@SINGLE
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda it: infos(it, relative_path="../../etc/passwd"),
            "names '../../etc/passwd', which is not a file in",
        ),
        (lambda it: infos(it, relative_path="/etc/passwd"), "which is not a file in its folder"),
        (lambda it: infos(it, relative_path=".."), "which is not a file in its folder"),
        (lambda it: infos(it, relative_path="none.distcp"), "none.distcp cannot be read"),
        (lambda it: infos(it, offset=-8), r"is not in \d+ bytes at"),
        (lambda it: infos(it, length=2**50), r"is not in \d+ bytes at"),
        (lambda it: infos(it, length=20), r"a, \(4, 3\), is not in 20 bytes at"),
        (lambda it: infos(it, transform_descriptors=["zstd"]), r"is stored as \['zstd'\]"),
        (lambda it: chunks(it, sizes=torch.Size([4, 2])), "4 of its 12 elements are missing"),
        (lambda it: chunks(it, sizes=torch.Size([2**40, 3])), "is not in"),
        (lambda it: chunks(it, sizes=(-4, -3)), "a shape is invalid"),
        (lambda it: chunks(it, sizes=(5, 3)), "is not inside of the shape"),
        (
            lambda it: setattr(it.state_dict_metadata["model.a"].properties, "dtype", torch.int32),
            "it has no torch.int32",
        ),
        (lambda it: setattr(it, "storage_data", {}), "missing or unknown"),
        (lambda it: setattr(it, "planner_data", {"model.a": 3}), "damaged"),
        (lambda it: setattr(it, "state_dict_metadata", Calls(os.system, "touch ran")), "has no tensors by name|an object of"),
    ],
)
def test_metadata_of_dcp_names_nothing_outside_of_its_files(
    folder_of_dcp: Path, marker: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None], why: str
) -> None:
    monkeypatch.chdir(marker.parent)  # where `touch ran` would make it
    folder = changed(folder_of_dcp, change)
    with pytest.raises(CheckpointError, match=why):
        read_all(opened(folder))


def test_hostile_folders_of_deepspeed_are_refused(tmp_path: Path, marker: Path) -> None:
    """ZeRO-2 of two ranks: one is missing, a part is short or runs something, and `latest` names another folder."""
    module, about = tmp_path / "mp_rank_00_model_states.pt", {"module": {}, "buffer_names": [], "shared_params": {}}
    group = {"zero_stage": 2, "partition_count": 2}

    def write(*parts: Any) -> None:
        torch.save({**about, "param_shapes": [{"a": torch.Size([4])}]}, module)
        for rank, part in enumerate(parts):
            state = {**group, "single_partition_of_fp32_groups": [part]}
            file = tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": state}, file)

    write(torch.ones(2))
    with pytest.raises(CheckpointError, match="2 ranks wrote it, and it has files of 1"):
        opened(tmp_path)
    write(torch.ones(2), torch.ones(1))
    with pytest.raises(CheckpointError, match="a has 4 elements, and the files have 3"):
        opened(tmp_path)
    write(torch.ones(2), Calls(os.system, f"touch {marker}"))
    with pytest.raises(CheckpointError, match="a part of a rank is not a tensor"):
        opened(tmp_path)
    write(torch.ones(2), torch.ones(2))
    assert_same(opened(tmp_path), {"a": torch.ones(4)})
    (tmp_path / "zero_pp_rank_0_mp_rank_01_optim_states.pt").touch()
    with pytest.raises(CheckpointError, match="is of a model that DeepSpeed had split"):
        opened(tmp_path)
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match=r"latest names '\.\./elsewhere', which is not in its folder"):
        opened(tmp_path)


# ---- samerun export --to dcp -------------------------------------------------------------------------------------------------


@SINGLE
def test_a_checkpoint_is_exported_for_dcp(tmp_path: Path) -> None:
    source = build(seed=5)
    weights, buffers = (
        {name: it.detach() for name, it in found} for found in (source.named_parameters(), source.named_buffers())
    )
    state = {"step": 2, "recipe": recipe_file.flat(Recipe()), "model": MODEL, "best": None}
    save_split(tmp_path, 2, {"weight": weights}, state=state, buffers=buffers)
    assert export.main([str(tmp_path), "--to", "dcp"]) == 0
    out, model = tmp_path / "exported" / "step-00000002-dcp", build(seed=6)
    found = model.state_dict()
    dcp.load(found, checkpoint_id=out, no_dist=True)
    for name, it in source.state_dict().items():
        assert torch.equal(found[name], it), name
    assert_same(opened(out), source.state_dict())
    with pytest.raises(Exception, match="exists already: choose another --out, or replace it by --force"):
        export.main([str(tmp_path), "--to", "dcp"])
    assert export.main([str(tmp_path), "--to", "dcp", "--force"]) == 0
