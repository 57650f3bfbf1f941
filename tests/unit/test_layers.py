"""The layer table of docs/architecture.md, enforced on every import in the syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import xinference_xavier

PACKAGE = Path(xinference_xavier.__file__).parent
ROOT = Path(__file__).parents[2]

#: From the bottom to the top: a layer imports from itself and from those before it.
LAYERS = (
    "types",
    "config",
    "metrics",
    "budgets",
    "threads",
    "swallowed",
    "policy",
    "storage",
    "actors",
    "engine",
    "host",
    "ui",
)

#: Hosts and heavy libraries, which each layer may or may not know.
WATCHED = {
    "torch", "numpy", "triton", "nixl", "xoscar", "vllm", "xinference", "fastapi", "gradio",
    "click", "pydantic", "aioprometheus",
}  # fmt: skip
ALLOWED = {
    "types": set(),
    "config": {"pydantic"},
    "metrics": set(),
    "budgets": set(),
    "threads": set(),
    "swallowed": set(),
    "policy": set(),
    "storage": {"torch", "numpy", "triton", "nixl"},
    "actors": {"numpy", "xoscar"},
    "engine": {"torch", "numpy", "vllm", "xoscar", "pydantic"},
    "host": {
        "xinference", "vllm", "torch", "xoscar", "fastapi", "click", "pydantic", "nixl",
        "aioprometheus",
    },
    "ui": {"gradio", "fastapi", "pydantic"},
}  # fmt: skip
#: The policy decides from its arguments alone: no clock, no chance, no files, no network.
IMPURE = {"time", "datetime", "random", "secrets", "os", "io", "pathlib", "socket", "asyncio"}


def sources() -> list[Path]:
    return sorted(p for p in [*PACKAGE.rglob("*.py"), *(ROOT / "ui").rglob("*.py")])


def module_of(path: Path) -> str:
    """Dotted name, with ``ui/`` where it is installed."""
    if path.is_relative_to(PACKAGE):
        parts = ("xinference_xavier", *path.relative_to(PACKAGE).with_suffix("").parts)
    else:
        parts = ("xinference_xavier", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def layer_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "types"


def imports(path: Path) -> set[str]:
    """Absolute names of all imported modules, also those inside functions."""
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(parents) if node.level else ""
            name = ".".join(part for part in (base, node.module or "") if part)
            found.add(name)
            found |= {f"{name}.{alias.name}" for alias in node.names}
    return found


def violations(path: Path) -> list[str]:
    layer = layer_of(module_of(path))
    below = set(LAYERS[: LAYERS.index(layer) + 1])
    found = []
    for name in sorted(imports(path)):
        top = name.partition(".")[0]
        if name.startswith("xinference_xavier."):
            target = name.split(".")[1]
            if target in LAYERS and target not in below:
                found.append(f"{layer} imports the layer {target} above it ({name})")
        elif top in WATCHED - ALLOWED[layer]:
            found.append(f"{layer} must not know {top} ({name})")
        elif layer == "policy" and top in IMPURE:
            found.append(f"the policy must stay pure: {name}")
    return found


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_point_down_only(path: Path) -> None:
    assert violations(path) == []


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_modules_say_what_they_cover(path: Path) -> None:
    text = path.read_text()
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "a module starts with a docstring"


def test_every_part_of_the_package_has_a_layer() -> None:
    parts = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert parts - {"__init__"} <= {*LAYERS}


def test_the_table_in_the_documentation_names_every_layer_in_order() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("## Layers")[2]
    places = [table.index(name) for name in ("types.py", "policy/", "storage/", "actors/")]
    places += [table.index(name) for name in ("engine/ ", "host/ ", "ui/ ")]
    assert places == sorted(places)


SAMPLES = [
    ("policy/order.py", "import torch", "policy must not know torch"),
    ("policy/order.py", "from time import monotonic", "must stay pure"),
    ("policy/order.py", "from xinference_xavier.storage import slab", "layer storage above"),
    ("storage/slab.py", "import vllm.config", "storage must not know vllm"),
    ("storage/slab.py", "def f():\n    import xoscar", "storage must not know xoscar"),
    ("engine/spec.py", "from xinference.core import model", "engine must not know xinference"),
    ("engine/spec.py", "from ..host import cli", "layer host above"),
    ("actors/tracker.py", "from .. import engine", "layer engine above"),
]


@pytest.mark.parametrize(("place", "source", "message"), SAMPLES)
def test_the_check_finds_violations(
    place: str, source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / place
    path.parent.mkdir()
    path.write_text(source)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    assert [v for v in violations(path) if message in v]


def named_above(path: Path) -> list[str]:
    """Modules of layers above that a module names in a string, to be imported at run time."""
    layer = layer_of(module_of(path))
    above = LAYERS[LAYERS.index(layer) + 1 :]
    texts = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
    names = [text for text in texts if isinstance(text, str) and " " not in text]
    return [n for n in names if n.startswith(tuple(f"xinference_xavier.{name}" for name in above))]


def test_one_place_names_the_layer_above_it() -> None:
    """Imports by name would pass the check of imports: there is one, and it is documented."""
    found = {module_of(path): names for path in sources() if (names := named_above(path))}
    assert found == {"xinference_xavier.host.parts": ["xinference_xavier.ui:join"]}
    assert "`host/parts.py`" in (ROOT / "docs" / "architecture.md").read_text()
