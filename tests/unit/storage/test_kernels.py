"""The CUDA kernel's logic, run in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernel_equals_torch_indexing_in_the_interpreter() -> None:
    # A process of its own: the interpreter is chosen when triton is imported.
    pytest.importorskip("triton", reason="the CUDA copier's kernel needs triton")
    script = Path(__file__).with_name("interpret_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "kernels ok" in done.stdout
