"""Tests pip install .[jax] with only a compiler and CMake, for users without a wheel."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import jax.numpy as jnp, numpy as np
from tenon.jax.cpp_extensions.activation import act_lu
x = jnp.asarray(np.linspace(-4, 4, 66, dtype=np.float32).reshape(6, 1, 11))
y = np.asarray(act_lu(x, activation_type=("gelu",)), np.float64)
v = np.asarray(x, np.float64).reshape(6, 11)
want = 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))
assert np.abs(y - want).max() < 1e-6, (y, want)
print("act_lu is right")
"""


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="not run from a source tree")
def test_pip_install_from_source_with_jax(tmp_path):
    def run(*command):
        result = subprocess.run(
            [str(part) for part in command], cwd=tmp_path, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
        return result.stdout

    run(sys.executable, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env/bin/python"
    install = (python, "-m", "pip", "install", "--disable-pip-version-check")
    run(*install, f"{ROOT}[jax]", "jax==0.10.2")
    assert "act_lu is right" in run(python, "-c", PROGRAM)
    assert "gelu" in run(tmp_path / "env/bin/tenon", "show", "gelu")
