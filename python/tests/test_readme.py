"""Runs the Python programs of the README and of docs/python.md."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/python.md")
PROGRAMS = [
    pytest.param(program, id=f"{page}-{i}")
    for page in PAGES
    for i, program in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    )
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_run(program: str) -> None:
    for module in ("torch", "jax"):
        if f"import {module}" in program:
            pytest.importorskip(module)
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 6
