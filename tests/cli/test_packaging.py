"""The wheel and the editable install are complete, find the recipes, and load every module once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from setuptools.config.pyprojecttoml import read_configuration

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("linattn_cli", "kernels", "tasks", "recipes")
SITE_PACKAGES = sysconfig.get_path("purelib")

LOAD_EVERYTHING = """
import collections, importlib, json, pkgutil, sys
names = ["linattn_cli"]
for top in ("linattn_cli", "linattn_cli.kernels", "linattn_cli.tasks", "linattn_cli.recipes"):
    names.append(top)
    package = importlib.import_module(top)
    names += [found.name for found in pkgutil.walk_packages(package.__path__, top + ".")]
for name in names:
    importlib.import_module(name)
files = collections.Counter(m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None))
ours = [m for n, m in list(sys.modules.items()) if n.split(".")[0] in ("linattn_cli", "kernels", "tasks", "recipes")]
print(json.dumps({
    "names": sorted(n for n in sys.modules if n.split(".")[0] in ("linattn_cli", "kernels", "tasks", "recipes")),
    "twice": [m.__file__ for m in ours if getattr(m, "__file__", None) and files[m.__file__] > 1],
    "files": [m.__file__ for m in ours if getattr(m, "__file__", None)],
}))
"""


def checked(*command: str | Path, **options) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=300, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what a clone holds, so that no build output of the working tree leaks into the wheel."""
    copy = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def from_wheel(source, tmp_path_factory) -> list[str]:
    """A Python in which the wheel is installed, and not the editable install of this environment."""
    out, target = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("target")
    checked(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source)
    (wheel,) = out.glob("linattn-*.whl")
    checked(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel)
    # -S leaves .pth files unread, among them the finder of the editable install, which would fill any gap.
    return ["env", f"PYTHONPATH={target}{os.pathsep}{SITE_PACKAGES}", sys.executable, "-S"]


@pytest.fixture(scope="module")
def from_editable(source, tmp_path_factory) -> list[str]:
    """A Python in which a copy of the source is installed with `pip install -e`."""
    venv = tmp_path_factory.mktemp("venv")
    checked(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    libraries = Path(checked(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (libraries / "dependencies.pth").write_text(SITE_PACKAGES + "\n")
    checked(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-deps", "--no-build-isolation", "--ignore-installed", "--editable", source),
    )
    return [str(python)]


@pytest.fixture(params=["from_wheel", "from_editable"])
def installed(request) -> list[str]:
    return request.getfixturevalue(request.param)


def recipes_of_the_source() -> list[str]:
    return sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))


def packages_of_the_source() -> set[str]:
    """Every folder with an __init__.py, under the name it is installed by."""
    found = {path.parent.relative_to(ROOT).parts for top in FOLDERS for path in (ROOT / top).rglob("__init__.py")}
    return {".".join(parts if parts[0] == "linattn_cli" else ("linattn_cli", *parts)) for parts in found}


def test_every_package_is_listed():
    listed = read_configuration(ROOT / "pyproject.toml")["tool"]["setuptools"]["packages"]
    assert set(listed) == packages_of_the_source()
    assert len(listed) == len(set(listed))


def test_every_folder_of_modules_is_a_package():
    for top in FOLDERS:
        for path in (ROOT / top).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} has modules but no __init__.py"


@pytest.mark.slow
def test_recipes_are_found(installed, tmp_path):
    document = json.loads(checked(*installed, "-m", "linattn_cli", "list", "recipes", "--json", cwd=tmp_path))
    assert [row["name"] for row in document["results"]] == recipes_of_the_source()
    assert document["status"] == "ok"


@pytest.mark.slow
def test_every_module_is_there_and_loaded_once(installed, tmp_path):
    loaded = json.loads(checked(*installed, "-c", LOAD_EVERYTHING, cwd=tmp_path).splitlines()[-1])
    assert not [file for file in loaded["files"] if file.startswith(str(ROOT) + os.sep)]
    assert loaded["twice"] == []
    assert not [name for name in loaded["names"] if not name.startswith("linattn_cli")]
    expected = {
        ".".join(("linattn_cli", *parts) if parts[0] != "linattn_cli" else parts)
        for top in FOLDERS
        for path in (ROOT / top).rglob("*.py")
        for parts in [path.relative_to(ROOT).with_suffix("").parts]
        if parts[-1] != "__init__"
    }
    assert expected <= set(loaded["names"])


@pytest.mark.slow
def test_type_checkers_find_the_types(installed, tmp_path):
    code = "from importlib import resources; print((resources.files('linattn_cli') / 'py.typed').is_file())"
    assert checked(*installed, "-c", code, cwd=tmp_path) == "True\n"


def test_this_test_run_loads_no_module_twice():
    assert not {"kernels", "tasks", "recipes"} & set(sys.modules)


@pytest.mark.slow
def test_the_command_runs_a_task_and_a_check(installed, tmp_path):
    document = json.loads(checked(*installed, "-m", "linattn_cli", "doctor", "--device", "cpu", "--json", cwd=tmp_path))
    assert document["summary"]["checks_passed"] == document["summary"]["checks"]
    # a copy outside a repository has no commit to report
    assert document["env"]["commit"] is None
