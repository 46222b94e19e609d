"""The augmentation against torchvision, image by image, and against itself in other batches, bit by bit."""

import math

import pytest
import torch
import waits
from torchvision.transforms import RandAugment, RandomErasing, v2
from torchvision.transforms import functional as TF
from torchvision.transforms.autoaugment import InterpolationMode, _apply_op

from app.data.draws import Draws
from app.tasks.image_classification.data.augment import OPERATIONS, Preparation, erased_mask, mixing_weights, randaugment
from app.tasks.image_classification.sections import AugmentRecipe, DataRecipe

CHANGES = {
    "nothing": AugmentRecipe(),
    "crop": AugmentRecipe(crop_padding=4),
    "flip": AugmentRecipe(flip=0.5),
    "randaugment": AugmentRecipe(randaugment_ops=2),
    "erase": AugmentRecipe(erase=0.5),
    "everything": AugmentRecipe(crop_padding=3, flip=0.5, randaugment_ops=3, randaugment_magnitude=7, erase=0.7),
}
MIXES = {
    "mixup": AugmentRecipe(mixup=0.2),
    "cutmix": AugmentRecipe(cutmix=1.0),
    "both": AugmentRecipe(crop_padding=3, flip=0.5, randaugment_ops=1, erase=0.5, mixup=0.8, cutmix=1.0),
}


def prepare(augment, channels=3, **data):
    return Preparation(DataRecipe(**data), augment, num_classes=10, channels=channels)


def trained(preparation, batch, seed=5):
    return preparation.train(batch, Draws(seed, batch["samples"], batch["numbers"]))


def smooth_images(count, channels=3, height=32, width=32):
    """Images with edges, gradients and noise, of different brightness and contrast."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, channels, 4, 4, generator=generator) * torch.rand(count, 1, 1, 1, generator=generator)
    images = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic") * 255
    noise = torch.randn(count, channels, height, width, generator=generator) * 8
    return (images + noise).clamp(0, 255).to(torch.uint8)


def batch_of(count, channels=3, height=32, width=32, first_sample=10**7):
    generator = torch.Generator().manual_seed(1)
    samples = torch.arange(count) + first_sample
    return {
        "images": smooth_images(count, channels, height, width),
        "labels": torch.randint(0, 10, (count,), generator=generator),
        "samples": samples,
        "numbers": samples.numpy(),
    }


def on(device, batch):
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


# --- normalizing


@pytest.mark.parametrize(
    ("channels", "mean", "std"), [(1, (0.3,), (0.2,)), (3, (0.3,), (0.2,)), (3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
)
def test_images_are_normalized_as_torchvision_does(channels, mean, std):
    batch = batch_of(6, channels)
    kept = batch["images"].clone()
    preparation = prepare(AugmentRecipe(), channels, mean=mean, std=std)
    expected = TF.normalize(batch["images"] / 255, list(mean), list(std))
    inputs, targets = trained(preparation, batch)
    torch.testing.assert_close(inputs, expected, rtol=0, atol=2e-6)
    assert torch.equal(inputs, preparation.evaluate(batch))
    assert torch.equal(targets, batch["labels"])
    assert torch.equal(batch["images"], kept)


@pytest.mark.parametrize("augment", [*CHANGES.values(), *MIXES.values()])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_inputs_have_the_models_type_and_memory_order(augment, dtype, channels_last):
    batch = batch_of(8)
    preparation = Preparation(DataRecipe(), augment, num_classes=10, channels=3, dtype=dtype, channels_last=channels_last)
    inputs, targets = trained(preparation, batch)
    expected_inputs, expected_targets = trained(prepare(augment), batch)
    assert inputs.dtype == preparation.evaluate(batch).dtype == dtype
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    assert inputs.is_contiguous(memory_format=memory_format)
    assert preparation.evaluate(batch).is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(inputs.to(torch.float32), expected_inputs.to(dtype).to(torch.float32), atol=2e-6, rtol=0)
    torch.testing.assert_close(targets, expected_targets, check_dtype=False)


# --- what a sample becomes is its own affair


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", [*CHANGES, *MIXES])
def test_samples_become_the_same_in_any_batch(name, channels):
    """Those that are mixed, with the other of their pair."""
    batch, preparation = batch_of(16, channels, height=28, width=36), prepare({**CHANGES, **MIXES}[name], channels)
    inputs, targets = trained(preparation, batch)
    assert inputs.shape == batch["images"].shape
    alone = [] if name in MIXES else [*([place] for place in range(16)), [3, 8, 5]]
    for places in [[0, 1], [6, 7, 2, 3], [*range(8, 16), *range(8)], *alone]:
        part_inputs, part_targets = trained(preparation, {key: value[places] for key, value in batch.items()})
        assert torch.equal(part_inputs, inputs[places])
        assert torch.equal(part_targets, targets[places])


@pytest.mark.gpu
@pytest.mark.parametrize("augment", [*CHANGES.values(), *MIXES.values()])
def test_a_gpu_makes_the_same_images(augment):
    batch = batch_of(64)
    expected_inputs, expected_targets = trained(prepare(augment), batch)
    inputs, targets = trained(prepare(augment), on("cuda", batch))
    torch.testing.assert_close(targets.cpu(), expected_targets)
    # A rotation may take the other of two pixels, and a blend the next grey level, where rounding decides.
    off = (inputs.cpu() - expected_inputs).abs() > 1e-5
    assert off.double().mean() < (0.01 if augment.randaugment_ops else 1e-9)


# --- waiting for the device


@pytest.mark.parametrize("augment", [*CHANGES.values(), *MIXES.values()])
@pytest.mark.parametrize(("channels", "dtype"), [(1, torch.float32), (3, torch.bfloat16)])
def test_nothing_waits_for_the_device(augment, channels, dtype):
    preparation = Preparation(DataRecipe(), augment, num_classes=10, channels=channels, dtype=dtype, channels_last=True)
    batch = batch_of(64, channels)
    with waits.without_any(but_copies=True) as device:
        batch = on(device, batch)
        trained(preparation, batch)  # the first takes two constants to the device
    with waits.without_any():
        inputs, targets = trained(preparation, batch)
        preparation.evaluate(batch)
        with pytest.raises(waits.FOUND):
            inputs[0, 0, 0, 0].item()
    assert {inputs.device.type, targets.device.type} == {"cuda"}
    assert inputs.shape == batch["images"].shape


# --- crop and flip


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (20, 28)])
def test_crop_and_flip_are_torchvisions(channels, height, width):
    batch = batch_of(64, channels, height, width)
    preparation = prepare(AugmentRecipe(crop_padding=4, flip=0.5), channels, mean=(0.0,), std=(1.0,))
    changed = (trained(preparation, batch)[0] * 255).round().to(torch.uint8)
    draws = Draws(5, batch["samples"])
    tops, lefts = draws.integers("crop.top", 9).tolist(), draws.integers("crop.left", 9).tolist()
    flips = (draws.uniform("flip") < 0.5).tolist()
    assert set(tops) == set(lefts) == set(range(9))
    assert 16 < sum(flips) < 48
    for found, image, top, left, flip in zip(changed, batch["images"], tops, lefts, flips, strict=True):
        expected = TF.crop(TF.pad(image, [4]), top, left, height, width)
        assert torch.equal(found, TF.hflip(expected) if flip else expected)


# --- RandAugment

TORCHVISION_NAMES = list(RandAugment()._augmentation_space(31, (8, 8)))
GEOMETRIC = {"shear_x", "shear_y", "translate_x", "translate_y", "rotate"}
BLENDS = {"brightness", "color", "contrast", "sharpness"}


def torchvision_operation(image, name, negative, magnitude_bin):
    space = RandAugment()._augmentation_space(31, (image.shape[-2], image.shape[-1]))
    magnitudes, is_signed = space[name]
    magnitude = float(magnitudes[magnitude_bin]) if magnitudes.ndim else 0.0
    return _apply_op(image, name, -magnitude if negative and is_signed else magnitude, InterpolationMode.NEAREST, None)


def changed_by(images, operations, negative, *, magnitude):
    counts = operations.bincount(minlength=len(OPERATIONS)).tolist()
    return randaugment(images, operations, negative, counts=counts, magnitude=magnitude)


def test_the_operations_are_torchvisions():
    assert len(TORCHVISION_NAMES) == 14
    assert [name.replace("_", "") for name in OPERATIONS] == [name.lower() for name in TORCHVISION_NAMES]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("magnitude_bin", [0, 9, 30])
@pytest.mark.parametrize(("channels", "height", "width"), [(1, 28, 28), (3, 32, 32), (3, 25, 40), (3, 2, 2)])
def test_an_operation_does_what_torchvisions_does(operation, magnitude_bin, channels, height, width):
    images = torch.cat([smooth_images(10, channels, height, width), torch.full((2, channels, height, width), 77).byte()])
    place = list(OPERATIONS).index(operation)
    negative = torch.arange(12) % 2 == 1
    changed = changed_by(images, torch.full((12,), place), negative, magnitude=magnitude_bin / 3)
    expected = torch.stack(
        [
            torchvision_operation(image, TORCHVISION_NAMES[place], bool(sign), magnitude_bin)
            for image, sign in zip(images, negative, strict=True)
        ]
    )
    if operation in GEOMETRIC:  # a place halfway between two pixels may be rounded to the other one
        assert (changed != expected).double().mean() < 0.002
    elif operation in BLENDS:  # a whole number less a rounding error is cut to the one below, there more often than here
        assert (changed.int() - expected.int()).abs().max() <= 1
        assert (changed != expected).double().mean() < 0.02
    else:
        assert torch.equal(changed, expected)


def test_an_image_without_grey_levels_is_left_as_it_is():
    """More channels than three have no grey: saturation leaves them, the others work on every channel."""
    images = smooth_images(14, channels=4)
    changed = changed_by(images, torch.arange(14), torch.zeros(14, dtype=torch.bool), magnitude=9.0)
    color = list(OPERATIONS).index("color")
    assert torch.equal(changed[color], images[color])
    assert changed.shape == images.shape


# --- erasing


def boxes_of(mask):
    """Top, left, height and width float64 [n, 4] of the true pixels in bool [n, 1, H, W]; checks that they are boxes."""
    rows, columns = mask.any(3).squeeze(1), mask.any(2).squeeze(1)
    heights, widths = rows.sum(1), columns.sum(1)
    assert torch.equal(mask.sum((1, 2, 3)), heights * widths)
    return torch.stack([rows.int().argmax(1), columns.int().argmax(1), heights, widths], 1).double()


def check_means(ours, theirs):
    """The means of both, [4000, ...], differ by less than four standard deviations."""
    deviation = ((ours.var(0) + theirs.var(0)) / 4000).sqrt()
    assert ((ours.mean(0) - theirs.mean(0)).abs() < 4 * deviation).all()


@pytest.mark.parametrize(("height", "width"), [(32, 32), (48, 16)])
def test_erased_boxes_are_distributed_as_torchvisions(height, width):
    torch.manual_seed(0)
    ours = boxes_of(erased_mask(Draws(1, torch.arange(4000)), 1.0, height, width))
    image = torch.zeros(1, height, width)
    theirs = torch.tensor(
        [RandomErasing.get_params(image, (0.02, 0.33), (0.3, 3.3), [0.0])[:4] for _ in range(4000)], dtype=torch.float64
    )
    assert (ours[:, 2] < height).all()
    assert (ours[:, 3] < width).all()
    for moment in (lambda boxes: boxes, lambda boxes: boxes**2, lambda boxes: boxes[:, 2:3] * boxes[:, 3:4]):
        check_means(moment(ours), moment(theirs))


def test_erasing_sets_to_zero_and_leaves_the_rest():
    batch = batch_of(2000, 1, 8, 8)
    inputs, _ = trained(prepare(AugmentRecipe(erase=0.25), 1), batch)
    mask = erased_mask(Draws(5, batch["samples"]), 0.25, 8, 8)
    assert abs(mask.flatten(1).any(1).double().mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 2000)
    assert torch.equal(inputs, prepare(AugmentRecipe(), 1).evaluate(batch) * ~mask)


# --- mixing


def test_mixup_is_the_weighted_mean_of_a_pair():
    batch = batch_of(64)
    plain = prepare(AugmentRecipe()).evaluate(batch)
    inputs, targets = trained(prepare(AugmentRecipe(mixup=0.7)), batch)
    shares = Draws(5, batch["samples"][::2]).beta("mixup", 0.7).repeat_interleave(2)
    labels, other = torch.nn.functional.one_hot(batch["labels"], 10).float(), torch.arange(64) ^ 1
    torch.testing.assert_close(targets, torch.lerp(labels[other], labels, shares[:, None]))
    torch.testing.assert_close(inputs, torch.lerp(plain[other], plain, shares.view(-1, 1, 1, 1)))


def test_cutmix_takes_a_box_from_the_neighbour():
    batch = batch_of(64)
    batch["labels"] = torch.arange(64) % 2
    plain = prepare(AugmentRecipe()).evaluate(batch)
    inputs, targets = trained(prepare(AugmentRecipe(cutmix=1.0)), batch)
    neighbours = plain.view(32, 2, 3, 32, 32).flip(1).view_as(plain)
    taken = (inputs != plain).any(1)
    assert torch.equal(inputs, torch.where(taken[:, None], neighbours, plain))
    # Where both images agree in all channels the box does not show: the share may be off by those few pixels.
    share = 1 - taken.double().mean((1, 2))
    torch.testing.assert_close(targets.gather(1, batch["labels"][:, None])[:, 0].double(), share, atol=0.01, rtol=0)
    assert (share < 0.9).sum() > 20


def test_cutmix_boxes_are_distributed_as_torchvisions():
    torch.manual_seed(0)
    weights, shares = mixing_weights(Draws(1, torch.arange(4000)), AugmentRecipe(cutmix=1.0), 32, 20)
    torch.testing.assert_close(shares, weights.mean((1, 2)))
    boxes_of(weights.unsqueeze(1) == 0)
    theirs = v2.CutMix(num_classes=2, alpha=1.0)
    image = torch.zeros(1, 1, 32, 20)
    their_shares = torch.tensor([theirs.make_params([image])["lam_adjusted"] for _ in range(4000)])
    for power in (1, 2, 3):
        check_means(shares**power, their_shares**power)


def test_with_both_each_pair_gets_one_of_the_two():
    pairs = Draws(1, torch.arange(2000))
    both = mixing_weights(pairs, AugmentRecipe(mixup=0.4, cutmix=1.0), 16, 16)
    mixup = mixing_weights(pairs, AugmentRecipe(mixup=0.4), 16, 16)
    cutmix = mixing_weights(pairs, AugmentRecipe(cutmix=1.0), 16, 16)
    is_mixup = (both[0] == mixup[0]).flatten(1).all(1) & (both[1] == mixup[1])
    is_cutmix = (both[0] == cutmix[0]).flatten(1).all(1) & (both[1] == cutmix[1])
    assert (is_mixup | is_cutmix).all()
    assert abs(is_mixup.double().mean() - 0.5) < 0.06
