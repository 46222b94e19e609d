"""What all tests share: which may be skipped, and where; the run that those of the labs are compared with."""

from __future__ import annotations

import random
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from installation import installed  # noqa: F401 - a fixture
from processes import end_warm, losses, train
from refusals import refused  # noqa: F401 - a fixture
from saved import small_disk  # noqa: F401 - a fixture
from slurm_lab import RECIPE, STEPS

# By the time that they take.
LONG_FILES = ["test_learn", "test_requeue_lab", "test_slurm_lab", "test_same_run", "test_lm_same_run", "test_hosts_lab",
              "test_resume", "test_divided_runs", "test_lora", "test_doctor", "test_bf16", "test_handshake",
              "test_sharded_state", "test_group", "test_failed_runs", "test_memory"]  # fmt: skip

SHOWN_FILES = 40
NO_GPU = "needs a CUDA device"

settings.register_profile("untimed", deadline=None)  # how long an example takes says more of the machine than of the code
settings.load_profile("untimed")


def pytest_configure() -> None:
    """Whatever the tests start hears Ctrl-C and SIGHUP: a shell's `&` and `nohup` have them ignored, and that is inherited."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--expect-all",
        action="store_true",
        help="fail if a test was skipped for any reason but a missing GPU",
    )
    parser.addoption("--seed", type=int, help="seed of the moments of kills; a failed test has printed it")
    parser.addoption("--seconds-per-file", action="store_true", help=f"print the {SHOWN_FILES} slowest files")
    parser.addoption("--figures", help="file that also gets the printed measurements")


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Keeps what a test has measured, at once: what comes next may be killed."""

    def keep(text: str) -> None:
        line, path = f"{request.node.name}: {text}\n", request.config.getoption("--figures")
        print(line, end="")
        if path:
            with Path(path).open("a") as file:
                file.write(line)

    return keep


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put the end of a failure's report into the file of measurements immediately: pytest may be ended before its summary."""
    report, path = (yield), item.config.getoption("--figures")
    if path and report.failed:
        with Path(path).open("a") as file:
            file.write(f"{item.name} FAILED in {report.when}: {report.longreprtext[-4000:]}\n")
    return report


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is unpacked or resized once is kept for these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAMERUN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _warm_processes_end(_own_cache: None) -> Iterator[None]:
    yield
    end_warm()


@pytest.fixture
def own_imports() -> Iterator[None]:
    """What a user's task file brings into this process is gone after the test: other tests have files of the same name."""
    before = list(sys.path)
    yield
    added = set(sys.path) - set(before)
    sys.path[:] = before
    for name, module in list(sys.modules.items()):
        if str(Path(getattr(module, "__file__", None) or "").parent) in added:
            del sys.modules[name]


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """What chooses the moments; `--seed` repeats a choice."""
    given = request.config.getoption("--seed")
    seed = random.SystemRandom().randrange(10**6) if given is None else given
    print(f"--seed {seed}")
    return random.Random(seed)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the lab's recipe in one process, on this machine."""
    run_dir = tmp_path_factory.mktemp("alone")
    train("cpu", run_dir, *RECIPE[:-2]).check()
    assert len(losses(run_dir)) == STEPS
    return losses(run_dir)


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, to read and to copy: the digits, two epochs in one process, in a line every 5 steps."""
    run_dir = tmp_path_factory.mktemp("finished") / "digits"
    train("cpu", run_dir, "--recipe", "digits", "train.epochs=2", "train.global_batch_size=64", "log.every_steps=5").check()
    return run_dir


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image folder."""
    from image_sources import write_folder  # torchvision and the libraries of the containers: 2 s that most tests do not need

    return write_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def containers(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same images in every container."""
    from image_sources import FORMATS, pack

    root = tmp_path_factory.mktemp("containers")
    return {source: pack(image_folder, root / source, source) for source in FORMATS}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # With several workers (`pytest -n 2 --dist loadfile`) none is left alone with a long file at the end.
    items.sort(key=lambda item: LONG_FILES.index(item.path.stem) if item.path.stem in LONG_FILES else len(LONG_FILES))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # its keywords hold the names of folders as well: a checkout may be called gpu
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not session.config.getoption("--expect-all") or reporter is None:
        return
    unexpected = [report.nodeid for report in reporter.stats.get("skipped", []) if NO_GPU not in str(report.longrepr)]
    if unexpected:
        reporter.write_line(f"skipped although --expect-all is given: {', '.join(unexpected)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--seconds-per-file"):
        return
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):  # three for a test: it is set up, called and torn down
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("seconds per file")
    for path in sorted(seconds, key=lambda path: -seconds[path])[:SHOWN_FILES]:
        terminalreporter.write_line(f"{seconds[path]:8.1f}  {path}")
    terminalreporter.write_line(f"{sum(seconds.values()):8.1f}  in all {len(seconds)} files, of all workers")
