"""A Python that has its own torch, and a folder of wheels with the little that it lacks: for machines without a network.

    python -m benchmarks.gpu.wheels bring FOLDER --python-version 3.12    where there is a network: `make gpu-wheels`
    python3 -m benchmarks.gpu.wheels use FOLDER --into ENVIRONMENT        there: `make gpu GPU_PYTHON=python3`

`use` makes a virtual environment that sees all packages of the Python that runs it, and installs in it the wheels whose
packages that Python does not have. Nothing is changed in that Python, and processes that the environment's Python starts have
the same packages, whatever variables they get. (`venv --system-site-packages` would see the packages of the Python below this
one, if this one is itself a virtual environment's.) Standard library and pip only.
"""

from __future__ import annotations

import argparse
import re
import site
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

_REPOSITORY = Path(__file__).absolute().parents[2]
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
_MOST_MIB = 64
_BUILT = ("deepspeed", "hjson")
"""Published as sources; without compiled parts of their own."""
_DOWNLOADED = (
    *("datasets", "dill", "multiprocess", "xxhash", "pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    *("einops", "msgpack", "ninja", "py-cpuinfo", "hypothesis", "sortedcontainers", "pytest", "pytest-xdist", "execnet"),
    *("iniconfig", "pluggy"),
)
"""Packages that a Python with torch, torchvision, accelerate and transformers can lack: our requirements, and theirs."""
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_12_x86_64")


def main(argv: list[str]) -> None:
    """Bring the wheels, or use them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.wheels", description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("bring", "use"), help="download wheels, or make an environment with those it lacks")
    parser.add_argument("folder", type=Path, help="of the wheels")
    parser.add_argument("--python-version", default="3.12", help="of the machine that they are for (default: 3.12)")
    parser.add_argument("--into", type=Path, help="the environment that `use` makes")
    options = parser.parse_args(argv)
    if options.what == "bring":
        _bring(options.folder, options.python_version)
    else:
        _use(options.folder, options.into)


def _bring(folder: Path, python_version: str) -> None:
    """Fill the folder. Ends with a sentence if it is too large to be carried."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    built = ["env", "DS_BUILD_OPS=0", *_PIP, "wheel", "--no-deps", "--wheel-dir", str(folder), *map(_required, _BUILT)]
    subprocess.run(built, check=True)
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    download = [*_PIP, "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), *platforms]
    download += ["--implementation", "cp", "--python-version", python_version]
    # First those that say which versions of the others they need.
    asking = ("datasets", "pydantic", "pytest", "pytest-xdist")
    subprocess.run([*download, *map(_required, asking)], check=True)
    asked = {name: spec for wheel in folder.glob("*.whl") for name, spec in _requirements(wheel).items()}
    others = [name + asked.get(name, "") for name in _DOWNLOADED if name not in asking]
    subprocess.run([*download, *others], check=True)
    total_mib = sum(wheel.stat().st_size for wheel in folder.glob("*.whl")) / 2**20
    sys.stdout.write(f"{total_mib:6.1f} MiB in {folder}\n")
    if total_mib > _MOST_MIB:
        sys.exit(f"{folder} holds {total_mib:.0f} MiB, more than the {_MOST_MIB} that may be carried: leave some of it out")


def _required(name: str) -> str:
    """Return it as pyproject.toml requires it, or just its name."""
    found = re.search(rf'"({re.escape(name)}[<>=!~][^"]*)"', (_REPOSITORY / "pyproject.toml").read_text())
    return found[1] if found else name


def _requirements(wheel: Path) -> dict[str, str]:
    """Return the versions that a wheel needs of others, by their names, without those of its extras."""
    with zipfile.ZipFile(wheel) as archive:
        (file,) = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        lines = archive.read(file).decode().splitlines()
    found = (re.fullmatch(r"Requires-Dist: ([\w.-]+)(?:\[\w+\])?\s*\(?([<>=!~][^;)]*)\)?\s*(;.*)?", line) for line in lines)
    return {_name(each[1]): each[2].strip() for each in found if each and "extra" not in (each[3] or "")}


def _use(folder: Path, environment: Path) -> None:
    """Make the environment. Ends with a sentence if a library that is needed is neither there nor in the folder."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(environment)], check=True)
    (own,) = environment.glob("lib/python*/site-packages")
    places = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    theirs = [f"import site; site.addsitedir({place!r})" for place in places]
    (own / "theirs.pth").write_text("\n".join([*theirs, str(_REPOSITORY), ""]))
    wheels = {_name(wheel.name.partition("-")[0]): wheel for wheel in sorted(folder.glob("*.whl"))}
    installed = {_name(found.name) for found in distributions()}
    lacking = {name: wheel for name, wheel in wheels.items() if name not in installed}
    if lacking:
        install = [*_PIP, "install", "--no-index", "--no-deps", "--no-compile", "--target", str(own)]
        subprocess.run([*install, *map(str, lacking.values())], check=True)
    sys.stdout.write(f"{environment}: {sys.executable} and {', '.join(sorted(lacking)) or 'no wheels'}\n")
    required = (_REPOSITORY / "pyproject.toml").read_text().partition("[project.optional")[0]
    needed = (*re.findall(r'^    "([\w-]+)[<>=]', required, re.M), "pytest", "pytest-xdist")
    missing = [name for name in needed if _name(name) not in installed | lacking.keys()]
    if missing:
        sys.exit(f"neither {sys.executable} nor {folder} has {', '.join(missing)}: `make gpu-wheels` brings what it can")


def _name(text: str) -> str:
    """Return the name of a package as it is compared."""
    return re.sub(r"[-_.]+", "-", text).lower()


if __name__ == "__main__":
    main(sys.argv[1:])
