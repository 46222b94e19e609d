"""Small files of the kind that each shipped recipe reads, made up."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from PIL import Image

TRAIN, TEST = 20, 9
"""Samples of each split."""


def keys_of(recipe: str, folder: Path) -> tuple[str, ...]:
    """Write what a shipped recipe needs below `folder`, and return the keys that point it there."""
    if recipe in ("mnist", "fashion_mnist"):
        write_idx(folder / recipe)
        return (f"data.path={folder / recipe}",)
    if recipe == "cifar10":  # only the true files pass torchvision's checksums
        write_pictures(folder / recipe, splits=("train", "test"), sizes=((32, 32),))
        return ("data.source=imagefolder", "data.image_size=32", f"data.path={folder / recipe}")
    if recipe in ("imagefolder", "imagenet_resnet50"):
        scored = ("val", "test") if recipe == "imagefolder" else ("val",)
        write_pictures(folder / recipe, splits=("train", *scored), sizes=((300, 240), (250, 400)))
        return (f"data.path={folder / recipe}",)
    if recipe == "finetune_lm":
        write_language_model(folder / recipe)
        return (*(f"{key}={folder / recipe}" for key in ("model.path", "train.init_from")), "data.path=null")
    if recipe.startswith(("gpt", "llama")):  # as small as the book is
        widths = ("model.intermediate_size=96", "model.key_value_heads=2") if recipe.startswith("llama") else ()
        book = ("data.path=null", "model.vocab_size=null")
        return (*book, "data.sequence_length=64", "model.hidden_size=32", "model.layers=2", "model.heads=4", *widths)
    return ()


def write_language_model(folder: Path) -> None:
    """A tiny Llama of transformers, for bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = LlamaConfig(**sizes, vocab_size=257, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(folder)


def write_idx(folder: Path) -> None:
    """The four files of MNIST (yann.lecun.org/exdb/mnist)."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for prefix, size in (("train", TRAIN), ("t10k", TEST)):
        for name, array in (
            ("images-idx3", random.integers(0, 256, (size, 28, 28), dtype=np.uint8)),
            ("labels-idx1", random.integers(0, 10, size, dtype=np.uint8)),
        ):
            header = struct.pack(f">I{array.ndim}I", 0x800 | array.ndim, *array.shape)
            (folder / f"{prefix}-{name}-ubyte").write_bytes(header + array.tobytes())


def write_pictures(folder: Path, *, splits: tuple[str, ...], sizes: tuple[tuple[int, int], ...]) -> None:
    """Class folders of JPEG and PNG files; `sizes` are width and height in pixels, in turn."""
    random = np.random.default_rng(0)
    for split in splits:
        for number in range(TRAIN if split == "train" else TEST):
            place = folder / split / ("ant", "bee", "cat")[number % 3]
            place.mkdir(parents=True, exist_ok=True)
            noise = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8))
            picture = noise.resize(sizes[number % len(sizes)], Image.Resampling.BICUBIC)
            picture.save(place / f"{number}.{('jpg', 'png')[number % 2]}")
