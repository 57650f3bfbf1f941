"""docs/options.md and the options say the same."""

from __future__ import annotations

import re
from pathlib import Path

from xinference_xavier.config import HASH_ALGORITHM, HOST_OPTIONS, XavierOptions, parse_size
from xinference_xavier.host.options import VLLM_SUPPORTED

TEXT = (Path(__file__).parents[2] / "docs" / "options.md").read_text()


def rows() -> dict[str, tuple[str, str, str]]:
    """Field -> CLI spelling, default and meaning, from the first table."""
    found = {}
    for line in TEXT.splitlines():
        cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and cells[0].startswith("`--"):
            found[cells[1].strip("`")] = (cells[0].strip("`"), cells[2], cells[3])
    return found


def test_the_table_lists_every_option_in_order() -> None:
    assert list(rows()) == list(XavierOptions.model_fields)


def test_flags_defaults_and_meanings_agree() -> None:
    for name, field in XavierOptions.model_fields.items():
        cli, default, meaning = rows()[name]
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        flag, _, metavar = cli.partition(" ")
        assert flag == f"--{name.replace('_', '-')}"
        assert metavar == extra.get("metavar", "")
        assert meaning == field.description
        assert default == extra.get("default_text", str(field.default).lower())


def test_documented_defaults_are_the_real_ones() -> None:
    defaults = {name: default for name, (_, default, _) in rows().items()}
    parsed = XavierOptions(**defaults)
    assert parsed == XavierOptions()
    assert parse_size(defaults["xavier_gpu_budget"]) == parsed.xavier_gpu_budget


def test_host_names_and_versions_are_documented() -> None:
    internal = {"xavier_config"}
    assert all(f"`{name}`" in TEXT for name in HOST_OPTIONS - internal)
    (lowest, above) = VLLM_SUPPORTED
    assert f"older than 0.{lowest[1]} or newer than 0.{above[1] - 1}" in TEXT
    assert f"`{HASH_ALGORITHM}`" in TEXT
