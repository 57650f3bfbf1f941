"""Models whose blocks are not one row of one rank: sliding windows, and tensor parallel ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversation import PROMPTS, Said, answer, converse
from server import QWEN, ROOT, Xinference, flags

pytestmark = pytest.mark.slow

GEMMA = ("--model-name", "gemma-3-1b-it")
SWITCH = "--enable-xavier-gpu"
#: Engines that forget all but one or two prompts, and device tiers that hold four: 256 rows of
#: 64 KiB, of which a prompt takes 63; or 2,048 of 16 KiB, of which it takes 63 in each KV group.
SMALL = ("--xavier-gpu-budget", "16MiB", "--num_gpu_blocks_override", "136")
SLIDING = ("--xavier-gpu-budget", "32MiB", "--num_gpu_blocks_override", "600")
#: A host tier for everything, and a check of every copy.
COMMON = ("--xavier-cpu-budget", "64MiB", "--xavier-self-check", "1")


@pytest.fixture(scope="module")
def sliding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random fp32 Gemma 3: five layers with a window of 128 tokens, and a full one."""
    path = tmp_path_factory.mktemp("models") / "sliding"
    script = ROOT / "examples" / "tiny_model.py"
    subprocess.run([sys.executable, script, "--size", "gemma3", path], check=True, timeout=120)
    return path


@pytest.fixture(scope="module")
def two_core_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Xinference]:
    """vLLM's CPU build wants a core per rank to be named."""
    server = Xinference(tmp_path_factory.mktemp("two"), VLLM_CPU_OMP_THREADS_BIND="0|1")
    yield server
    assert server.stop() == []


def launch(server: Xinference, uid: str, path: Path, *options: str, **kwargs: Any) -> None:
    launched = server.launch(uid, path, *options, **kwargs)
    assert launched.returncode == 0, launched.stderr
    server.wait_ready(uid)


def ask_again(server: Xinference, uid: str, plain: Said) -> dict[str, Any]:
    """The conversation and its prompts once more; returns the statistics."""
    assert converse(server, uid) == plain
    order = (*range(PROMPTS), 3, 0, 5, 1, 4, 2)
    assert [answer(server, uid, n) for n in order] == [plain.answers[n] for n in order]
    stats = server.stats(uid)
    counters = stats["counters"]
    for name in ("hits_gpu_blocks", "hits_cpu_blocks", "demotions", "promotions"):
        assert counters[name] > 0, (name, counters)
    assert (counters["failed_copies"], counters["mismatches"]) == (0, 0)
    return stats


def test_sliding_window_model(server: Xinference, sliding_model: Path) -> None:
    hybrid = flags({"disable_hybrid_kv_cache_manager": False})
    launch(
        server, "slide-plain", sliding_model, "--tensor_parallel_size", "1", *hybrid, model=GEMMA
    )
    plain = converse(server, "slide-plain")
    server.terminate("slide-plain")

    launch(
        server,
        "slide",
        sliding_model,
        SWITCH,
        *SLIDING,
        *COMMON,
        *hybrid,
        model=GEMMA,
    )
    assert ask_again(server, "slide", plain)["kv_groups"] == 6
    server.terminate("slide")


def test_budget_that_only_the_engine_knows_to_be_too_small(
    server: Xinference, sliding_model: Path
) -> None:
    """Rows of a hybrid model are known once its cache is laid out, after the launch has ended."""
    hybrid = flags({"disable_hybrid_kv_cache_manager": False, "xavier_gpu_budget": 1000})
    launched = server.launch("too-small", sliding_model, SWITCH, *hybrid, model=GEMMA)
    assert launched.returncode == 0, launched.stderr
    with pytest.raises(RuntimeError, match=r"xavier_gpu_budget=1000 is below one row: .* 16384 "):
        server.wait_ready("too-small")
    # The host keeps a record of models that failed, with the reason.
    view = server.client.get("/v1/xavier/too-small").json()
    assert (view["enabled"], view["replicas"]) == (False, [])
    assert "did not start" in view["detail"]
    assert "xavier_gpu_budget=1000 is below one row" in view["detail"]


def test_two_tensor_parallel_ranks(two_core_server: Xinference, tiny_model: Path) -> None:
    parallel = flags({"tensor_parallel_size": 2})
    launch(two_core_server, "two-plain", tiny_model, *parallel, model=QWEN)
    plain = converse(two_core_server, "two-plain")
    two_core_server.terminate("two-plain")

    launch(two_core_server, "two", tiny_model, SWITCH, *SMALL, *COMMON, *parallel)
    stats = ask_again(two_core_server, "two", plain)
    assert (stats["ranks"], stats["row_bytes"]) == (2, 65_536)
    assert stats["tiers"]["gpu"]["rows"] == 16 * 1024**2 // 65_536
