"""Recipe files and overrides: precedence, types, and every error with its origin."""

import re

import pytest
import yaml

from app.errors import RecipeError
from app.recipe import recipe_file
from app.recipe.recipe_file import load
from app.recipe.schema import OptimRecipe, Recipe, TrainRecipe


@pytest.fixture
def write(tmp_path):
    """Write a recipe file and return its path; the origins in messages begin with it."""

    def write(text: str, name: str = "my.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def problems(path: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as raised:
        load(path, overrides)
    return [problem.replace(path, "my.yaml") for problem in raised.value.problems]


# Precedence ----------------------------------------------------------------------------------------------------------------


def test_an_empty_section_is_all_defaults(write):
    loaded = load(write("train:\n  # all of it a comment\n"))
    assert loaded.recipe == Recipe()
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.name == "my"


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "{}", "null"])
def test_an_empty_file_is_no_recipe(write, text):
    (problem,) = problems(write(text))
    assert problem.startswith("my.yaml")
    assert "empty" in problem


def test_a_key_twice_on_the_command_line(write):
    assert problems(write("seed: 1\n"), "optim.lr=0.25", "train.steps=3", "optim.lr=0.5") == [
        "optim.lr is given twice (command line: 0.25 and 0.5): keep one of them"
    ]


@pytest.mark.parametrize("words", [["optim.lr", "=", "0.1"], ["optim.lr=", "0.1"], ["optim.lr", "=0.1"]])
def test_spaces_around_the_sign(write, words):
    (problem,) = problems(write("seed: 1\n"), "seed=3", *words, "train.steps=3")
    assert problem == f"{' '.join(words)!r} (command line) contains spaces: write optim.lr=0.1"


def test_keys_in_quotes_and_in_braces_are_keys(write):
    recipe = Recipe(seed=3, optim=OptimRecipe(lr=0.5))
    assert load(write('"seed": 3\n\'optim\':\n  "lr": 0.5\n')).recipe == recipe
    assert load(write('{"seed": 3, "optim": {"lr": 0.5}}')).recipe == recipe
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


def test_warmup_in_the_other_unit(write):
    loaded = load(write("optim: {warmup_steps: 5}"), ["optim.warmup_epochs=2"])
    assert (loaded.recipe.optim.warmup_steps, loaded.recipe.optim.warmup_epochs) == (None, 2.0)
    assert loaded.origins["optim.warmup_steps"] == "default"


def test_both_durations_in_one_layer(write):
    path = write("train:\n  epochs: 5\n  steps: 7\n")
    assert problems(path) == [
        "train.epochs is 5 and train.steps is 7: give one of them (train.epochs: my.yaml:2, train.steps: my.yaml:3)"
    ]
    assert problems(write("train:\n"), "train.epochs=5", "train.steps=7") == [
        "train.epochs is 5 and train.steps is 7: give one of them (command line)"
    ]


# Values --------------------------------------------------------------------------------------------------------------------

VALUES = [
    ("optim.lr", "1e-3", 0.001),
    ("optim.lr", "1E-3", 0.001),
    ("optim.lr", ".5", 0.5),
    ("optim.lr", "1", 1.0),
    ("seed", "0", 0),
    ("seed", "9223372036854775807", 2**63 - 1),
    ("data.download", "true", True),
    ("data.download", "False", False),
    ("data.path", "null", None),
    ("data.path", "none", None),
    ("data.path", "~", None),
    ("data.path", "2024", "2024"),
    ("data.path", "no", "no"),
    ("data.path", "2024-01-01", "2024-01-01"),
    ("data.path", '"null"', "null"),
    ("data.path", "/data/a b", "/data/a b"),
    ("train.ema_decay", "0.99", 0.99),
    ("data.mean", "[0.1]", (0.1,)),
    ("data.mean", "0.1", (0.1,)),
    ("data.mean", "1", (1.0,)),
    ("model.channels", "[1, 2]", (1, 2)),
    ("model.channels", "1,2", (1, 2)),
    ("optim.decay_epochs", "1, 2.5,3e1", (1.0, 2.5, 30.0)),
    ("optim.name", "sgd", "sgd"),
]


@pytest.mark.parametrize(("key", "text", "expected"), VALUES)
@pytest.mark.parametrize("place", ["file", "command line"])
def test_values_are_read_as_the_type_of_their_key(write, key, text, expected, place):
    section, _, name = key.rpartition(".")
    if place == "file":
        loaded = load(write(f"{section}:\n  {name}: {text}\n" if section else f"{name}: {text}\n"))
    else:
        loaded = load(write("train:\n"), [f"{key}={text}"])
    recipe = loaded.recipe
    holder = recipe.sections if section and hasattr(recipe.sections, section) else recipe
    found = getattr(getattr(holder, section) if section else holder, name)
    assert found == expected
    assert type(found) is type(expected)
    if isinstance(expected, tuple):
        assert [type(element) for element in found] == [type(element) for element in expected]


def test_a_path_on_the_command_line_is_taken_as_it_stands(write):
    for path in ("/a: b", "/a #1", "*.zip", "@x", "a=b", "{x}"):
        assert load(write("train:\n"), [f"data.path={path}"]).recipe.sections.data.path == path


def test_dotted_keys_are_keys_in_a_file_too(write):
    assert load(write("optim.lr: 0.5\ntrain:\n  epochs: 3\n")).recipe == Recipe(
        optim=OptimRecipe(lr=0.5), train=TrainRecipe(epochs=3)
    )


WRONG = [
    ("seed", "true", "a whole number"),
    ("seed", "1.5", "a whole number"),
    ("seed", "1e3", "a whole number"),
    ("seed", "'5'", "a whole number, without quotes"),
    ("seed", "", "a whole number"),
    ("seed", "null", "a whole number"),
    ("seed", "[1]", "a whole number"),
    ("optim.lr", "true", "a number"),
    ("optim.lr", "fast", "a number"),
    ("optim.lr", ".nan", "a number"),
    ("optim.lr", "inf", "a number"),
    ("data.download", "1", "true or false"),
    ("data.download", "yes", "true or false"),
    ("data.train_split", "null", "text"),
    ("data.train_split", "[a]", "text"),
    ("data.image_size", "big", "a whole number or null"),
    ("model.channels", "3", "a list of 2 whole numbers"),
    ("model.channels", "[1, 2, 3]", "a list of 2 whole numbers"),
    ("data.mean", "[]", "a list of numbers"),
    ("data.mean", "[a]", "a list of numbers"),
    ("data.mean", "[[1]]", "a list of numbers"),
]


@pytest.mark.parametrize(("key", "text", "expected"), WRONG)
@pytest.mark.parametrize("place", ["file", "command line"])
def test_wrong_types(write, key, text, expected, place):
    section, _, name = key.rpartition(".")
    if place == "file":
        found = problems(write(f"{section}:\n  {name}: {text}\n" if section else f"\n{name}: {text}\n"))
        origin = "my.yaml:2"
    else:
        found, origin = problems(write("train:\n"), f"{key}={text}"), "command line"
    (problem,) = found
    assert problem.startswith(f"{key} is {text or 'empty'}".replace("[[1]]", "[...]"))
    assert problem.endswith(f"({origin}): expected {expected}")


def test_wrong_type_of_a_mapping_and_of_an_endless_list(write):
    assert problems(write("seed: {a: 1}")) == ["seed is a mapping (my.yaml:1): expected a whole number"]
    assert problems(write("data:\n  mean: &a [*a]")) == ["data.mean is [...] (my.yaml:2): expected a list of numbers"]


# Errors --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("lr=1", "lr (command line): there is no such key; did you mean optim.lr?"),
        ("optim.learning_rate=1", "optim has name, lr, "),
        ("optim.momentun=1", "did you mean optim.momentum?"),
        ("optimizer.lr=1", "did you mean optim.lr"),
        ("optim.epochs=1", "did you mean train.epochs"),
        ("model.dtype=float64", "did you mean train.dtype?"),
        ("model.sync_batchnorm=true", "did you mean train.sync_batchnorm?"),
        ("model.channels_last=true", "did you mean train.channels_last"),
        ("train.label_smoothing=0.1", "did you mean augment.label_smoothing?"),
        ("log.train_accuracy=false", "did you mean log.train_scores?"),
        ("log.images=0", "did you mean log.examples?"),
        ("batch_size=1", "did you mean train.global_batch_size?"),
        ("xyz=1", "a recipe has seed, task, data, augment, model, train, optim, log"),
        ("optim.lr", "'optim.lr' (command line): expected key=value, as in optim.lr=0.1"),
        ("optim={lr: 1}", "optim is a section; give its keys one by one, as in optim.name=..."),
    ],
)
def test_overrides_that_name_no_key(write, override, expected):
    (problem,) = problems(write("train:\n"), override)
    assert expected in problem


def test_unknown_keys_in_a_file_say_their_line(write):
    assert problems(write("seed: 1\noptm:\n  lr: 1\ntrain:\n  epoch: 3\n")) == [
        "optm (my.yaml:2): there is no such key; did you mean optim?",
        "train.epoch (my.yaml:5): there is no such key; did you mean train.epochs?",
    ]


def test_duplicate_keys(write):
    text = "train:\n  epochs: 1\n  epochs: 2\nseed: 1\nseed: 2\ntrain:\n  max_micro_batch: 3\n"
    assert yaml.safe_load(text) == {"train": {"max_micro_batch": 3}, "seed": 2}  # what PyYAML makes of it, without a word
    assert problems(write(text)) == [
        "train.epochs is given twice (my.yaml:2 and my.yaml:3): keep one of them",
        "seed is given twice (my.yaml:4 and my.yaml:5): keep one of them",
        "train is given twice (my.yaml:1 and my.yaml:6): keep one of them",
    ]
    assert problems(write("optim:\n  lr: 1\noptim.lr: 2\n")) == [
        "optim.lr is given twice (my.yaml:2 and my.yaml:3): keep one of them"
    ]


def test_all_problems_at_once_with_their_origins(write):
    path = write("seed: -1\noptim:\n  lr: fast\n  foo: 1\ntrain:\n  epochs: 0\n")
    found = problems(path, "seed", "optim.momentum=2", "augment.flip=x")
    assert sorted(found) == sorted(
        [
            "'seed' (command line): expected key=value, as in optim.lr=0.1",
            "seed is -1: it must be at least 0 and at most 9,223,372,036,854,775,807 (my.yaml:1)",
            "optim.lr is fast (my.yaml:3): expected a number",
            next(problem for problem in found if problem.startswith("optim.foo (my.yaml:4): there is no such key")),
            "augment.flip is x (command line): expected a number",
            "optim.momentum is 2.0: it must be at least 0 and at most 1 (command line)",
            "train.epochs is 0: it must be greater than 0 (my.yaml:6)",
        ]
    )


def test_nothing_is_said_about_the_default_of_a_key_that_could_not_be_read(write):
    path = write("data:\n  image_size: big\n  resize_size: 256\n")
    assert problems(path) == ["data.image_size is big (my.yaml:2): expected a whole number or null"]


@pytest.mark.parametrize(
    ("text", "line"), [("seed: [1\n", 2), ("seed: 1\n\tlr: 2\n", 2), ("a: b: c\n", 1), ("--- 1\n--- 2\n", 2), ("x: \0", 1)]
)
def test_text_that_is_not_yaml(write, text, line):
    (problem,) = problems(write(text))
    assert re.match(f"my.yaml:{line}: .", problem)


def test_a_file_that_holds_no_mapping(write):
    assert problems(write("[1, 2]")) == ["my.yaml:1: the file is [1, 2]: expected lines of `key: value`"]
    assert problems(write("train: 3")) == ["my.yaml:1: section train is 3: expected lines of `key: value`"]


def test_bytes_that_are_not_text(tmp_path):
    (tmp_path / "my.yaml").write_bytes(b"seed: 1\nmodel: {name: caf\xe9}\n")
    assert problems(str(tmp_path / "my.yaml"))[0].startswith("my.yaml:2: it is not UTF-8 (byte 0xe9): save it as UTF-8")


def test_recipes_that_are_not_there(tmp_path):
    (problem,) = problems("fashion_mist")
    assert "there is no recipe and no file of that name; did you mean fashion_mnist" in problem
    assert problem.endswith("the package has " + ", ".join(recipe_file.names()))
    assert "there is no such file" in problems(str(tmp_path / "none.yaml"))[0]
    assert "that is a folder" in problems(str(tmp_path))[0]


@pytest.mark.parametrize("said", ["none", "blocks"])
def test_a_word_that_may_mean_nothing_is_a_choice_where_it_is_one(said: str) -> None:
    assert load("lm_tiny", [f"train.checkpoint_activations={said}"]).recipe.train.checkpoint_activations == said
