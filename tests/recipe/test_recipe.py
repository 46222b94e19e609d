"""Recipe files and overrides: precedence, types, and every error with its origin."""

import os
import re
from operator import attrgetter

import pytest
from refusals import Refused, put

from app.errors import RecipeError
from app.recipe.recipe_file import load
from app.recipe.schema import OptimRecipe, Recipe, TrainRecipe


@pytest.fixture
def write(tmp_path):
    """Write a recipe file and return its path; the origins in messages begin with it."""

    def write(text: str | bytes) -> str:
        return str(put(tmp_path, "my.yaml", text))

    return write


def problems(path: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as raised:
        load(path, overrides)
    return [problem.replace(path, "my.yaml") for problem in raised.value.problems]


# Precedence ----------------------------------------------------------------------------------------------------------------


def test_keys_in_quotes_in_braces_and_with_dots_are_keys(write):
    assert load(write("train:\n  # all of it a comment\n")).recipe == Recipe()
    recipe = Recipe(seed=3, optim=OptimRecipe(lr=0.5))
    for text in ('"seed": 3\n\'optim\':\n  "lr": 0.5\n', '{"seed": 3, "optim": {"lr": 0.5}}', "optim.lr: 0.5\nseed: 3\n"):
        assert load(write(text)).recipe == recipe
    assert load(write("seed: 1\n"), ["'seed'=3", '"optim.lr"=0.5']).recipe == recipe


def test_defaults_then_file_then_command_line(write):
    path = write("seed: 1\noptim:\n  lr: 0.5\n  momentum: 0.8\n")
    loaded = load(path, ["train.steps=3", "optim.lr=0.125"])
    assert loaded.recipe == Recipe(seed=1, optim=OptimRecipe(lr=0.125, momentum=0.8), train=TrainRecipe(steps=3))
    assert loaded.origins["seed"] == f"{path}:1"
    assert loaded.origins["optim.momentum"] == f"{path}:4"
    assert loaded.origins["optim.lr"] == loaded.origins["train.steps"] == "command line"
    assert loaded.origins["optim.eps"] == "default"


@pytest.mark.parametrize(
    ("overrides", "epochs", "steps"),
    [([], 5, None), (["train.steps=7"], None, 7), (["train.epochs=6"], 6, None), (["train.steps=null"], 5, None)],
)
def test_a_duration_on_the_command_line_replaces_the_one_in_the_file(write, overrides, epochs, steps):
    train = load(write("train: {epochs: 5}"), overrides).recipe.train
    assert (train.epochs, train.steps) == (epochs, steps)


# Values --------------------------------------------------------------------------------------------------------------------

VALUES = [
    ("optim.lr", "1e-3", 0.001),
    ("seed", "9223372036854775807", 2**63 - 1),
    ("data.download", "true", True),
    ("data.path", "2024-01-01", "2024-01-01"),
    ("data.path", '"null"', "null"),
    ("data.mean", "[0.1]", (0.1,)),
    ("optim.decay_epochs", "1, 2.5,3e1", (1.0, 2.5, 30.0)),
    ("train.skip_steps", "[[5, 9], [10, 11]]", ((5, 9), (10, 11))),
    ("train.skip_steps", "null", None),
    ("train.max_micro_batch", "auto", "auto"),
    ("train.max_micro_batch", "8", 8),
    ("optim.settings", "{amsgrad: true}", {"amsgrad": True}),
    ("optim.groups", '{"*.b": {lr_factor: 2}, c: {weight_decay: 0}}', {"*.b": {"lr_factor": 2.0}, "c": {"weight_decay": 0.0}}),
]


def given(write, place: str, key: str, text: str) -> tuple[str, ...]:
    """Return the arguments of `load` for a recipe with this value, in a file or on the command line."""
    section, _, name = key.rpartition(".")
    if place == "command line":
        return write("train:\n"), f"{key}={text}"
    return (write(f"{section}:\n  {name}: {text}\n" if section else f"\n{name}: {text}\n"),)


@pytest.mark.parametrize(("key", "text", "expected"), VALUES)
@pytest.mark.parametrize("place", ["file", "command line"])
def test_values_are_read_as_the_type_of_their_key(write, key, text, expected, place):
    path, *overrides = given(write, place, key, text)
    recipe = load(path, overrides).recipe
    found = attrgetter(key)(recipe.sections if key.startswith(("data.", "model.")) else recipe)
    assert repr(found) == repr(expected)  # 1 is not 1.0


def test_text_on_the_command_line_is_taken_unchanged(write):
    assert load(write("train:\n"), ["train.freeze=[*.bias]"]).recipe.train.freeze == ("*.bias",)
    for path in ("/a: b", "/a #1", "*.zip", "@x", "a=b", "{x}"):
        assert load(write("train:\n"), [f"data.path={path}"]).recipe.sections.data.path == path


def test_a_mapping_without_a_type_has_the_types_of_its_values(write):
    path = write("task: causal_lm\nmodel:\n  settings: {a: 1e-5, b: 8, c: yes, d: [1, '2'], e: {f: null}}\n")
    settings = load(path).recipe.sections.model.settings
    assert settings == {"a": 1e-5, "b": 8, "c": "yes", "d": [1, "2"], "e": {"f": None}}
    assert [type(settings[name]) for name in "ab"] == [float, int]


# Errors: each is one sentence, with its place ------------------------------------------------------------------------------

WRONG = [
    ("seed", "true", "a whole number"),
    ("optim.lr", ".nan", "a number"),
    ("train.max_micro_batch", "Auto", "a whole number, auto or null"),
    ("data.download", "yes", "true or false"),
    ("data.train_split", "[a]", "text"),
    ("optim.schedule", "cos", "one of cosine, linear, wsd, inverse_sqrt, polynomial, step, constant; did you mean cosine?"),
    ("optim.groups", "[a]", 'a mapping such as {"name": 0.1} or null'),
    *(
        ("train.skip_steps", text, "a list of pairs of whole numbers such as [[10, 20], [30, 31]] or null")
        for text in ("5", "[5, 9]", "[[5, 9], [10]]", "[[5, 9, 12]]", "[[5, a]]")
    ),
]


@pytest.mark.parametrize(("key", "text", "expected"), WRONG)
@pytest.mark.parametrize("place", ["file", "command line"])
def test_wrong_types(write, key, text, expected, place):
    origin = "my.yaml:2" if place == "file" else place
    assert problems(*given(write, place, key, text)) == [f"{key} is {text} ({origin}): expected {expected}"]


FILES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "my.yaml: the file is empty"),
    "a list": ("- a\n- b\n", "my.yaml:1: the file is [a, b]: expected lines of `key: value`"),
    "latin-1": (b"seed: 1\n# caf\xe9\n", "my.yaml:2: it is not UTF-8 (byte 0xe9): save it as UTF-8"),
    "two documents": ("seed: 1\n---\nseed: 2\n", "my.yaml:2: it is not YAML: but found another document"),
    "a key twice": ("seed: 1\nseed: 2\n", "seed is given twice (my.yaml:1 and my.yaml:2): keep one of them"),
    "a name twice": ("optim:\n  settings: {a: 1, a: 2}\n", "optim.settings is a mapping (my.yaml:2): it has a twice"),
    "a mapping that holds itself": ("optim: {settings: &a {b: *a}}", "optim.settings is a mapping (my.yaml:1): it is nested"),
    "an unknown key": ("'optim':\n  'momentun': 1\n", "optim.momentun (my.yaml:2): there is no such key; did you mean"),
    "a decimal comma": ("optim: {lr: 0,1}", "no such key; within braces a comma begins another key, so write a decimal number"),
    "a key of TRL": ("bf16: true\n", "bf16 (my.yaml:1): there is no such key; `samerun launch` has --mixed-precision bf16"),
    "a tag of Python": ("seed: !!python/object/apply:os.system [ls]\n", "my.yaml:1: it is not YAML: the tag !!python/object/"),
    "lists without end": ("seed: " + "[" * 3000, "my.yaml: it is not YAML: maximum recursion depth"),
    "two durations": ("train:\n  epochs: 1\n  steps: 2\n", "train.epochs is 1 and train.steps is 2: give one of them "
                      "(train.epochs: my.yaml:2, train.steps: my.yaml:3)"),
    "unlike lists": ("data: {mean: [1,2]}\n", "data.mean is [1.0, 2.0] and data.std is [0.25]: give each one value per"),
    "a default of what is wrong": ("data:\n  image_size: big\n  resize_size: 256\n", "data.image_size is big (my.yaml:2)"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), FILES.values(), ids=FILES)
def test_files(write, text, sentence):
    (problem,) = problems(write(text))
    assert sentence in problem


WORDS: dict[str, str] = {
    "optim.lr:0.1": "'optim.lr:0.1' (command line): expected key=value without spaces, as in optim.lr=0.1",
    "optim={lr:1}": "optim is a section; give its keys one by one, as in optim.name=...",
    "lr=1": "lr (command line): there is no such key; give optim.lr=...",
    "OPTIM.LR=1": "OPTIM.LR (command line): there is no such key; give optim.lr=...",
    "train.batch_size=8": "there is no such key; give train.global_batch_size=..., over all processes",
    "trainer.max_epochs=8": "there is no such key; give train.epochs=...",
    "train.init_from=": "'train.init_from=' (command line): there is no value; give one, or train.init_from=null",
    "task=causal_lm model.name=gpt2": "there is no such key; give model.architecture=... for random weights, or model.path=",
    "data.dir=x": "there is no such key; give data.path=...",
    "model.n_layers=2": "there is no such key; model has name, norm, ",
    "data.source=image_folder": "tfrecord, arrays; did you mean imagefolder?",
    "= ": "'=' (command line): expected key=value without spaces",
    "model.name=resnet-18": "model.name is 'resnet-18': no such model; did you mean resnet18",
    "augment.mixup=0.2 train.global_batch_size=63": "it must be a multiple of 2, because augment.mixup and augment.cutmix",
    "optim.nesterov=true optim.momentum=0": "optim.nesterov is true and optim.momentum is 0.0: nesterov needs a momentum",
    "task=causal_lm augment.flip=1": "there is no such key; a recipe has seed, task, data, model, train, optim, ",
    "profile.steps=20:10": 'profile.steps is "20:10": it must be the first and the last step to record',
    "train.skip_steps=[[0,2]]": "train.skip_steps is [[0, 2]]: it must list ranges of steps from 1 on, each with its first",
    "train.skip_steps=[[2,2]]": "train.skip_steps is [[2, 2]]: it must list",
    "train.skip_steps=[[4,6],[1,3]]": "in order and without overlap, as in [[10, 20], [30, 31]] (command line)",
    "train.skip_steps=[[1,4],[3,6]]": "in order and without overlap",
    "train.skip_steps=[[1,4],[8,12]] train.steps=10": "and train.steps is 10: skip only steps of the run",
    "train.init_allow=a.*": 'train.init_allow is ["a.*"] and train.init_from is null: init_allow needs init_from',
    "data.image_size=9 data.resize_size=3": "is 3 and data.image_size is 9: resize_size must be at least image_size",
    "augment.resized_crop_min_area=0.5": "and data.image_size is null: give data.image_size, the size in pixels of the crop",
}  # fmt: skip


@pytest.mark.parametrize(("words", "sentence"), WORDS.items(), ids=WORDS)
def test_words(write, words, sentence):
    (problem,) = problems(write("train:\n"), *words.split())
    assert sentence in problem


def test_all_problems_at_once_with_their_origins(write):
    path = write("seed: -1\noptim:\n  lr: fast\n  foo: 1\ntrain:\n  epochs: 0\n  epochs: 1\nseed: 2\n")
    found = problems(path, "seed", "optim.momentum=2", "augment.flip=x")
    assert [re.sub(r"key;.*", "key", problem) for problem in found] == [
        "optim.foo (my.yaml:4): there is no such key",
        "train.epochs is given twice (my.yaml:6 and my.yaml:7): keep one of them",
        "seed is given twice (my.yaml:1 and my.yaml:8): keep one of them",
        "'seed' (command line): expected key=value without spaces, as in optim.lr=0.1",
        "optim.lr is fast (my.yaml:3): expected a number",
        "augment.flip is x (command line): expected a number",
        "seed is -1: it must be at least 0 and at most 9,223,372,036,854,775,807 (my.yaml:1)",
        "train.epochs is 0: it must be greater than 0 (my.yaml:6)",
        "optim.momentum is 2.0: it must be at least 0 and at most 1 (command line)",
    ]


@pytest.mark.parametrize(
    ("name", "sentence", "code"),
    [
        ("fifo", "fifo: it is not a text file", 3),
        ("digts", "there is no recipe or file of that name; did you mean digits?", 3),
        ("", "--recipe is empty", 2),
    ],
)
@pytest.mark.parametrize("command", [["samerun", "launch", "--dry-run"], ["app.train"]], ids=["launch", "train"])
def test_both_programs_refuse_what_is_no_recipe(command, name, sentence, code, refused: Refused):
    os.mkfifo("fifo")
    refused([*command, "--recipe", name], sentence, code)
