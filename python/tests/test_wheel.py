"""Tests of the installed package: size, import time, types, the command."""

import email
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

DIST = Path(__file__).resolve().parents[2] / "dist"


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


needs_wheel = pytest.mark.skipif(
    not list(DIST.glob("*.whl")), reason="no wheel in dist/; ./dev wheel makes it"
)


@needs_wheel
def test_the_wheel_is_small_and_for_every_python():
    (wheel,) = DIST.glob("*.whl")
    assert wheel.stat().st_size <= 10_000_000
    assert wheel.name.startswith("tenon_kernels-") and "-py3-none-manylinux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    for part in ("tenon/py.typed", "tenon/lib/libtenon.so", "tenon/include/tenon/tenon.h"):
        assert part in names
    assert any(n.endswith("tenon-config.cmake") for n in names)


@needs_wheel
def test_the_wheel_names_its_licence():
    """pip show prints the field License, or its expression. The text is a file."""
    (wheel,) = DIST.glob("*.whl")
    files = zipfile.ZipFile(wheel)
    (info,) = (n for n in files.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(files.read(info))
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License"] is None
    assert metadata.get_all("License-File") == ["LICENSE"]
    text = files.read(info.replace("METADATA", "licenses/LICENSE")).decode()
    assert "Apache License" in text and "APPENDIX" in text


def test_import_needs_neither_torch_nor_jax():
    code = "import sys, tenon; print([m for m in ('torch', 'jax') if m in sys.modules])"
    assert run(sys.executable, "-c", code).stdout.strip() == "[]"


def test_python_m_tenon_runs_the_command():
    import tenon._cli

    if not tenon._cli.command_path().exists():
        pytest.skip("no command beside the library")
    result = run(sys.executable, "-m", "tenon", "--version")
    assert result.returncode == 0 and result.stdout.strip() == __import__("tenon").__version__


@pytest.mark.parametrize("other", ["torch", "jax"])
def test_other_libraries_may_be_loaded_after_it(other):
    # Symbols of the C++ runtime inside of libtenon must not replace those of other libraries.
    pytest.importorskip(other)
    result = run(sys.executable, "-c", f"import tenon, {other}; print(tenon.names()[0])")
    assert result.returncode == 0, result.stderr


def test_the_library_shows_its_own_names_only():
    from tenon import _lib

    if shutil.which("nm") is None:
        pytest.skip("no nm")
    listed = run("nm", "-D", "-C", "--defined-only", str(_lib.lib._name)).stdout.splitlines()
    names = [line.split(maxsplit=2)[2] for line in listed]
    assert "tenon_forward" in names and "tenon_ActLu" in names
    prefix = r"((typeinfo|typeinfo name|vtable) for )?tenon(::|_)"
    assert [n for n in names if not re.match(prefix, n)] == []
