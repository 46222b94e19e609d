"""A Python that has its own torch, and a folder of wheels with the little that it lacks: for machines without a network.

    python -m benchmarks.gpu.wheels bring FOLDER --python-version 3.12    where there is a network: `make gpu-wheels`
    python3 -m benchmarks.gpu.wheels use FOLDER --into ENVIRONMENT        there: `make gpu GPU_PYTHON=python3`

`use` makes a virtual environment that sees all packages of the Python that runs it, and installs in it the wheels whose
packages that Python has not. Nothing is changed in that Python, and what the environment's Python starts has the same packages,
whatever variables it is given. (`venv --system-site-packages` would see the packages of the Python below this one, if this one
is itself a virtual environment's.) Standard library and pip only.
"""

from __future__ import annotations

import argparse
import re
import site
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_REPOSITORY = Path(__file__).absolute().parents[2]
_MOST_MIB = 64
_BUILT = ("deepspeed", "hjson", "python-hostlist")
"""Published as sources; without compiled parts of their own."""
_DOWNLOADED = (
    *("datasets", "dill", "multiprocess", "xxhash", "pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    *("einops", "msgpack", "ninja", "py-cpuinfo", "hypothesis", "sortedcontainers", "pytest", "pytest-xdist", "execnet"),
    *("iniconfig", "pluggy"),
)
"""What a Python with torch, torchvision, accelerate and transformers may lack: requirements of ours, and theirs."""
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_12_x86_64")


def main(argv: list[str]) -> int:
    """Bring the wheels, or use them; return 0."""
    options = _parser().parse_args(argv)
    if options.what == "bring":
        _bring(options.folder, options.python_version)
    else:
        _use(options.folder, options.into)
    return 0


def _bring(folder: Path, python_version: str) -> None:
    """Fill the folder. Ends with a sentence if it is too large to be carried."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    built = ["env", "DS_BUILD_OPS=0", *pip, "wheel", "--no-deps", "--wheel-dir", str(folder), *map(_required, _BUILT)]
    subprocess.run(built, check=True)
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    download = [*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), *platforms]
    download += ["--implementation", "cp", "--python-version", python_version]
    # First those that say which versions of the others they need.
    asking = ("datasets", "pydantic", "pytest", "pytest-xdist")
    subprocess.run([*download, *map(_required, asking)], check=True)
    asked = {name: spec for wheel in folder.glob("*.whl") for name, spec in _requirements(wheel).items()}
    others = [name + asked.get(name, "") for name in _DOWNLOADED if name not in asking]
    subprocess.run([*download, *others], check=True)
    sizes = {wheel.name: wheel.stat().st_size / 2**20 for wheel in sorted(folder.glob("*.whl"))}
    total_mib = sum(sizes.values())
    for name, mib in sizes.items():
        sys.stdout.write(f"{mib:6.1f} MiB  {name}\n")
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
    lacking = {name: wheel for name, wheel in wheels.items() if not _is_there(name)}
    if lacking:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-index", "--no-deps"]
        subprocess.run([*pip, "--no-compile", "--target", str(own), *map(str, lacking.values())], check=True)
    sys.stdout.write(f"{environment}: {sys.executable} and {', '.join(sorted(lacking)) or 'no wheels'}\n")
    needed = re.findall(
        r'^    "([\w-]+)[<>=]', (_REPOSITORY / "pyproject.toml").read_text().partition("[project.optional")[0], re.M
    )
    missing = [
        name for name in (*needed, "pytest", "pytest-xdist") if not _is_there(_name(name)) and _name(name) not in lacking
    ]
    if missing:
        sys.exit(f"neither {sys.executable} nor {folder} has {', '.join(missing)}: `make gpu-wheels` brings what it can")


def _is_there(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _name(text: str) -> str:
    """Return the name of a package as it is compared."""
    return re.sub(r"[-_.]+", "-", text).lower()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.wheels", description="Wheels for a Python that has its own torch."
    )
    commands = parser.add_subparsers(dest="what", required=True)
    bring = commands.add_parser("bring", help="download what a Python with torch may lack")
    bring.add_argument("folder", type=Path)
    bring.add_argument("--python-version", default="3.12", help="of the machine that they are for (default: 3.12)")
    use = commands.add_parser("use", help="make an environment of this Python and what it lacks")
    use.add_argument("folder", type=Path)
    use.add_argument("--into", type=Path, required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
