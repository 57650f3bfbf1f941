"""docs/reliability.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "reliability.md").read_text()
TABLE = TEXT.partition("## Kinds of faults")[2].partition("\n## ")[0]


def named() -> list[str]:
    return re.findall(r"`(tests/[\w/]+\.py::\w+)`", TABLE)


def names_in(path: Path) -> set[str]:
    """Test functions, and state machines' test cases, of a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in found if name.lower().startswith("test")}


@pytest.mark.parametrize("test", sorted(set(named())))
def test_a_named_test_exists(test: str) -> None:
    file, _, name = test.partition("::")
    path = ROOT / file
    assert path.is_file(), f"{file} is not there"
    assert name in names_in(path), f"{file} has no {name}"


def test_every_kind_of_fault_has_a_test() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ") and "**" not in line]
    assert len(rows) > 30
    without = [line for line in rows[1:] if not re.search(r"::\w+`", line)]
    assert not without
