"""Build the wheel, install it outside the checkout and use it there: every file and every pass must be in it.

The new environment sees the packages of .venv, so that torch is not installed twice, and not the checkout
that .venv has installed in editable mode: a directory named in a .pth file becomes importable, while the
.pth files inside it, and with them the editable install, are not read.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ("pyproject.toml", "README.md", "LICENSE", "ampopt", "passes")
IN_NO_WHEEL = (".pyc", ".md")

# Runs in the new environment. Prints the names of the passes that `ampopt.passes` exports.
IMPORT_EVERYTHING = """
import importlib, inspect, pkgutil, sys
from pathlib import Path
import ampopt, ampopt.passes
from ampopt.ir.transform import Pass

inside = Path(sys.argv[1])
def is_pass(thing):
    return inspect.isclass(thing) and issubclass(thing, Pass) and not inspect.isabstract(thing)

modules = [ampopt, ampopt.passes]
modules += [importlib.import_module(found.name) for found in pkgutil.walk_packages(ampopt.__path__, "ampopt.")
            if found.name != "ampopt.__main__"]
passes = [importlib.import_module(found.name)
          for found in pkgutil.iter_modules(ampopt.passes.__path__, "ampopt.passes.")]
for module in modules + passes:
    assert inside in Path(module.__file__).parents, f"{module.__name__} comes from {module.__file__}"
exported = {thing for thing in vars(ampopt.passes).values() if is_pass(thing)}
for module in passes:
    for thing in vars(module).values():
        if is_pass(thing) and thing.__module__ == module.__name__:
            assert thing in exported, f"ampopt.passes does not list {thing.__name__}"
print(*sorted(thing.__module__.rpartition(".")[2] for thing in exported), sep="\\n")
"""

LIST_BACKENDS = "import torch; print(*torch.compiler.list_backends())"


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command as a user far from the checkout would; return what it printed, or end with it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["COLUMNS"] = "200"  # a table must not cut the names that are looked for
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"failed: {' '.join(map(str, command[:3])).splitlines()[0]}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(work: Path) -> Path:
    """Build from a copy, into which nothing comes that an earlier build left in the checkout."""
    source = work / "source"
    source.mkdir()
    for name in INPUTS:
        if (ROOT / name).is_dir():
            unwanted = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=unwanted)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    # As in a checkout without links: the mapping in pyproject.toml brings the passes, not the link.
    (source / "ampopt" / "passes").unlink()
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", work, source, cwd=work)
    (wheel,) = work.glob("*.whl")
    return wheel


def install(wheel: Path, work: Path) -> tuple[Path, Path]:
    """Install the wheel, then make .venv's packages visible; return where scripts and packages went."""
    home = work / "venv"
    venv.create(home, symlinks=os.name != "nt", with_pip=False)
    places = {"base": str(home), "platbase": str(home)}
    scripts = Path(sysconfig.get_path("scripts", "venv", places))
    packages = Path(sysconfig.get_path("purelib", "venv", places))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", home)
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=work)
    (packages / "packages_of_the_checkout.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return scripts, packages


def missing_files(packages: Path) -> list[str]:
    """The files of the two packages in the checkout that the installed wheel lacks."""
    missing = []
    for source, package in ((ROOT / "ampopt", "ampopt"), (ROOT / "passes", "ampopt/passes")):
        for path in sorted(source.rglob("*")):  # does not follow the link ampopt/passes
            wanted = path.is_file() and path.suffix not in IN_NO_WHEEL
            if wanted and not (packages / package / path.relative_to(source)).is_file():
                missing.append(str(path.relative_to(ROOT)))
    return missing


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ampopt-wheel-") as directory:
        work = Path(directory).resolve()
        scripts, packages = install(build(work), work)
        if missing := missing_files(packages):
            sys.exit(f"not in the wheel: {', '.join(missing)}; see [tool.setuptools] in pyproject.toml")

        listed = run(scripts / "python", "-c", IMPORT_EVERYTHING, packages, cwd=work).split()
        files = sorted(path.stem for path in (ROOT / "passes").glob("*.py") if not path.stem.startswith("_"))
        if listed != files:
            sys.exit(f"one pass a file: passes/ has the files {files}, ampopt.passes lists those of {listed}")

        ampopt = scripts / "ampopt"
        run(ampopt, "--help", cwd=work)
        words = run(ampopt, "passes", cwd=work).split()
        if unnamed := [name for stem in files if (name := stem.replace("_", "-")) not in words]:
            sys.exit(f"`ampopt passes` does not name {', '.join(unnamed)}")
        backends = run(scripts / "python", "-c", LIST_BACKENDS, cwd=work)
        if "ampopt" not in backends.split():
            sys.exit(f"torch.compile does not know the backend ampopt, only {backends.strip()}")
    print(f"the wheel holds all files and {len(files)} passes, and works outside the checkout")


if __name__ == "__main__":
    main()
