"""The networks: all names build and give [B, K], sizes that do not suit are refused, and the loss is that of torch."""

import pytest
import torch
import torchvision
from accelerate import init_empty_weights
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from app import building
from app.distributed import model_preparation, numerics, sample_dropout
from app.distributed.runtime import Runtime
from app.environment.launched import Launched
from app.errors import RecipeError
from app.recipe import recipe_file
from app.recipe.schema import BatchPlan
from app.tasks.image_classification import models
from app.tasks.image_classification.sections import ModelRecipe

ZOO = torchvision.models.list_models(module=torchvision.models)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small models gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_convnet_takes_any_size_from_four_pixels_on():
    """And groups as many as divide its channels, up to eight."""
    for height, width in ((4, 4), (9, 15), (28, 28)):
        model = models.build(ModelRecipe(channels=(12, 7)), channels=2, image_size=(height, width), num_classes=7)
        assert model(torch.randn(3, 2, height, width)).shape == (3, 7)
        assert (model.norm1.num_groups, model.norm2.num_groups) == (6, 7)


def build(name: str, *, channels: int = 3, side: int = 64, **settings) -> nn.Module:
    torch.manual_seed(0)
    return models.build(ModelRecipe(name=name, **settings), channels=channels, image_size=(side, side), num_classes=7)


@pytest.mark.parametrize(
    ("kind", "norm"),
    [
        ("group", [nn.GroupNorm(8, 32), nn.GroupNorm(8, 64)]),
        ("batch", [nn.BatchNorm2d(32), nn.BatchNorm2d(64)]),
        ("identity", [nn.Identity(), nn.Identity()]),
    ],
)
def test_convnet_is_plain_torch(kind, norm):
    plain = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), norm[0], nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), norm[1], nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 7)),
    )
    model = build("convnet", channels=1, side=28, norm=kind)
    plain.load_state_dict(dict(zip(plain.state_dict(), model.state_dict().values(), strict=True)))
    images = torch.randn(4, 1, 28, 28)
    assert torch.equal(model(images), plain(images))


# Every family (but maxvit and vgg, which are slow) at the smallest size that it takes.
REAL = {
    "alexnet": 64, "convnext_tiny": 32, "densenet121": 32, "efficientnet_b0": 32, "googlenet": 32, "inception_v3": 75,
    "mnasnet0_5": 32, "mobilenet_v2": 32, "mobilenet_v3_small": 32, "regnet_y_400mf": 32, "resnet18": 28,
    "shufflenet_v2_x0_5": 32, "squeezenet1_0": 32, "swin_t": 32, "swin_v2_t": 32, "vit_b_16": 32,
}  # fmt: skip


# The variants of a family run the same code in other widths and depths.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in {*REAL, "maxvit_t", "vgg11"} else pytest.mark.long) for name in ZOO]
)
def test_every_model_of_torchvision_builds(name):
    """Without memory for the weights; `build` itself checks the shape of the output."""
    with init_empty_weights():
        model = build(name, channels=1, side=224)
    assert model.training
    assert next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d)).in_channels == 1


@pytest.mark.parametrize(("name", "side"), REAL.items())
def test_real_outputs_and_randomness(name, side):
    """[B, K] and finite; two passes over the same samples in training mode are alike, and draw nothing from torch."""
    model = build(name, channels=1, side=side)
    draws = sample_dropout.give_to_samples(model, 0)
    example = {"x": torch.empty(2, 1, side, side, device="meta"), "samples": torch.arange(2)}
    draws.look(lambda times: numerics.without_data(model)(sample_dropout.repeated(example, times)["x"]))
    assert not draws.left
    images = torch.randn(2, 1, side, side)
    with torch.no_grad():
        state, passes = torch.get_rng_state(), []
        for samples in ([4, 7], [4, 7], [4, 8]):
            draws.begin(torch.tensor(samples))
            passes.append(model(images))
        first, second, other = passes
        assert torch.equal(torch.get_rng_state(), state)
        logits = model.eval()(images)
    assert logits.shape == first.shape == (2, 7)
    assert logits.isfinite().all()
    assert torch.equal(first, second)
    assert torch.equal(first, other) == (not any(layer.p > 0 for layer in draws.layers))


def test_three_channels_leave_torchvisions_weights_untouched():
    model = build("resnet18")
    state = torch.get_rng_state()
    torch.manual_seed(0)
    plain = torchvision.models.resnet18(num_classes=7)
    assert torch.equal(torch.get_rng_state(), state), "checking the shapes draws nothing"
    assert model.training
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_0", "swin_t"])
def test_another_number_of_channels_keeps_the_scale_of_the_first_layer(name):
    """Outputs of the adapted first layer on noise are as large as those of torchvision's own."""
    sizes = {}
    for channels in (1, 3, 12):
        first = next(layer for layer in build(name, channels=channels).modules() if isinstance(layer, nn.Conv2d))
        assert first.in_channels == channels
        sizes[channels] = F.conv2d(torch.randn(2, channels, 64, 64), first.weight, stride=first.stride).std().item()
    assert sizes[1] == pytest.approx(sizes[3], rel=0.15)
    assert sizes[12] == pytest.approx(sizes[3], rel=0.15)


def test_float64_starts_at_the_weights_of_float32():
    runtime = Runtime(Launched(use_cpu=True), BatchPlan(global_batch_size=8, data_ranks=1, accumulation=1))
    recipes = [recipe_file.load("digits", [f"train.dtype={dtype}"]).recipe for dtype in ("float32", "float64")]
    task, data = building.open_data(runtime, recipes[0])
    single, double = (building.build_model(runtime, recipe, task, data.train.facts)[0] for recipe in recipes)
    for one, two in zip(single.parameters(), double.parameters(), strict=True):
        assert two.dtype == torch.float64
        assert torch.equal(one.double(), two)


@pytest.mark.parametrize(
    ("name", "image_size", "reason"),
    [
        ("alexnet", (28, 28), r"28x28 pixels .*Output size is too small.*data\.image_size"),
        ("vit_b_16", (28, 28), "28x28 pixels .*indivisible by patch size"),
        ("vit_b_16", (32, 48), "32x48 pixels.*square"),
        ("convnet", (3, 8), "at least 4x4 pixels; these have 3x8"),
    ],
)
def test_a_size_that_does_not_suit(name, image_size, reason):
    with pytest.raises(RecipeError, match=rf"(?s)model\.name is {name}.*{reason}"), init_empty_weights():
        models.build(ModelRecipe(name=name), channels=3, image_size=image_size, num_classes=7)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["convnet", "resnet50"])
def test_gradients_of_channels_last_images_have_the_strides_of_the_weights(name, channels):
    model = models.build(ModelRecipe(name=name), channels=channels, image_size=(8, 8), num_classes=10)
    numerics.order_small_kernels(model)
    images = torch.zeros(2, channels, 8, 8, dtype=torch.uint8).to(torch.float32, memory_format=torch.channels_last)
    model(images).sum().backward()
    for parameter in model.parameters():
        assert parameter.is_contiguous()
        assert parameter.grad.stride() == parameter.stride()


class KernelsSeen(TorchDispatchMode):
    """Keeps the type of the kernels that convolutions are given, and whether they are in channels_last order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution.default:
            self.seen.append((args[1].dtype, args[1].is_contiguous(memory_format=torch.channels_last)))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["convnet", "mobilenet_v3_small"])
def test_the_kernels_that_autocast_makes_are_in_channels_last_order(name):
    torch.manual_seed(0)
    model = models.build(ModelRecipe(name=name), channels=3, image_size=(32, 32), num_classes=10).eval()
    images = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(images)
    numerics.take_channels_last(model)
    with KernelsSeen() as kernels, torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
    assert set(kernels.seen) == {(torch.bfloat16, True)}
    assert torch.allclose(logits, expected, rtol=0.05, atol=0.02)
    logits.sum().backward()
    for parameter in model.parameters():
        assert (parameter.is_contiguous(), parameter.grad.is_contiguous(), parameter.grad.dtype) == (True, True, torch.float32)


def test_own_layers_keep_names_weights_mode_and_sharing():
    model = build("resnet18").eval()
    twice = model.again = model.layer1[0].conv1
    before, order, state = dict(model.named_parameters()), list(model.state_dict()), torch.get_rng_state()
    numerics.take_channels_last(model)
    numerics.normalize_in_float(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model.layer1[0].conv1) is not type(twice)
    assert type(model.bn1) is not torch.nn.BatchNorm2d
    assert model.again is model.layer1[0].conv1
    assert list(model.state_dict()) == order
    assert all(value is before[name] for name, value in model.named_parameters())
    assert not any(layer.training for layer in model.modules())


def test_sync_batchnorm_removes_the_dependence_on_the_topology():
    model = build("resnet18")
    (batch,) = model_preparation.topology_dependence(model)
    assert batch.startswith("20 batch normalization layers (bn1, ...)")
    assert model_preparation.topology_dependence(build("convnet")) == []
    with pytest.raises(RecipeError, match=r"train\.sync_batchnorm is true, but the run is on CPU"):
        model_preparation.synchronize_batchnorm(model, device_type="cpu")
    converted = model_preparation.synchronize_batchnorm(model, device_type="cuda")
    assert isinstance(converted.bn1, nn.SyncBatchNorm)
    assert model_preparation.topology_dependence(converted) == []
    with pytest.raises(RecipeError, match="the model, Sequential, has no batch normalization"):
        model_preparation.synchronize_batchnorm(build("convnet"), device_type="cuda")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_loss_against_the_formula_in_float64(dtype, smoothing):
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(6, 4, generator=generator, dtype=torch.float64)).to(dtype)
    indices = torch.randint(0, 4, (6,), generator=generator)
    wanted = (1 - smoothing) * F.one_hot(indices, 4).double() + smoothing / 4
    log_shares = logits.double() - logits.double().exp().sum(1, keepdim=True).log()
    expected = -(wanted * log_shares).sum() / 6

    loss = models.mean_loss(logits, indices, label_smoothing=smoothing)
    assert loss.shape == ()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0)

    mixed = models.mean_loss(logits, F.one_hot(indices, 4).float(), label_smoothing=smoothing)
    torch.testing.assert_close(mixed, loss)
