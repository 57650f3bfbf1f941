"""Runs real vLLM with and without the cache, and writes down what happened as JSON.

A process of its own (``test_real_vllm`` starts it): vLLM wants its environment set before its
import. Scheduler and, with one rank, the worker run in this process, so that their state can be
read. ``python real_vllm.py SCENARIO MODEL RESULT``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

BLOCK = 32

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
    PYTHONHASHSEED="7",
)

#: Per scenario: ranks, engine arguments, whether the model has several KV groups, faults.
SCENARIOS: dict[str, dict[str, Any]] = {
    "qwen2": {"tp": 1, "faults": "move:1,load:1"},
    "gemma3": {
        "tp": 1,
        "faults": "move:1,load:1",
        "engine": {"disable_hybrid_kv_cache_manager": False, "num_gpu_blocks_override": 241},
    },
    "qwen2-tp2": {"tp": 2, "faults": "move:1@rank1,load:1@rank1"},
}
#: Bytes of one block over all ranks.
ROW_BYTES = {"qwen2": 65536, "qwen2-tp2": 65536, "gemma3": 2 * 32 * 2 * 32 * 4}


def text(number: int, length: int) -> list[int]:
    return [10 + (number * 7 + i * (number + 1)) % 200 for i in range(length)]


def around_a_block() -> list[tuple[list[int], int]]:
    """Prompts, and prompts with outputs, that end one before, at and one after a block's end."""
    prompts = [(text(extra + 2, 5 * BLOCK + extra), 4) for extra in (-1, 0, 1)]
    return prompts + [(text(extra + 6, 5 * BLOCK - 9), 9 + extra) for extra in (-1, 0, 1)]


def long() -> list[tuple[list[int], int]]:
    """Together more than the engine's own pool holds, and more than one step computes."""
    return [(text(10 + i, 700 + 33 * i), 8) for i in range(4)]


class Engine:
    """One engine; with ``options`` it has the cache."""

    def __init__(self, scenario: str, model: str, options: dict[str, Any] | None) -> None:
        from vllm import LLM, SamplingParams

        from xinference_xavier.config import XavierOptions
        from xinference_xavier.engine.settings import EngineSettings

        setup = SCENARIOS[scenario]
        engine = {
            "block_size": BLOCK,
            "max_model_len": 1024,
            "max_num_batched_tokens": 512,
            "num_gpu_blocks_override": 41,
            "enforce_eager": True,
            "dtype": "float32",
            "prefix_caching_hash_algo": "sha256_cbor",
            "tensor_parallel_size": setup["tp"],
            "seed": 0,
            **setup.get("engine", {}),
        }
        if options is not None:
            chosen = XavierOptions(enable_xavier_gpu=True, xavier_self_check=1.0, **options)
            engine["kv_transfer_config"] = EngineSettings(chosen).transfer_config()
        self.llm = LLM(model=model, **engine)
        self._params = SamplingParams

    @property
    def connector(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler.connector

    def ask(self, work: list[tuple[list[int], int]]) -> list[list[int]]:
        """One after the other."""
        return [self.ask_together([item])[0] for item in work]

    def ask_together(self, work: list[tuple[list[int], int]]) -> list[list[int]]:
        answers = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in work],
            [self._params(temperature=0, max_tokens=count, ignore_eos=True) for _, count in work],
            use_tqdm=False,
        )
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def forget(self) -> None:
        assert self.llm.reset_prefix_cache()

    def stats(self) -> dict[str, Any]:
        connector = self.connector
        for _ in range(200):  # `generate` stops at the last answer, whose store may be on its way
            if not connector.has_pending_push_work():
                break
            self.llm.llm_engine.step()
        connector._manager.index.validate()
        stats: dict[str, Any] = connector._stats.collect()
        stats["pins"] = sum(connector._manager.index.gpu.pins)
        stats["pins"] += sum(connector._manager.index.cpu.pins)
        return stats

    def verified(self) -> int:
        """Loaded blocks whose checksum was compared, with one rank."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        verified: int = get_kv_transfer_group()._worker.copier._check.verified
        return verified

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        gc.collect()


def rounds(engine: Engine) -> dict[str, Any]:
    """The same questions three times, the last of them once more, then a chat's next turns."""
    asked = around_a_block() + long()
    answers = [engine.ask(asked)]
    for _ in range(2):
        engine.forget()
        answers.append(engine.ask(asked))
    engine.forget()
    last = engine.ask(asked[-1:])
    engine.forget()
    turns = [
        ([*prompt, *answer, 77, 78], 4)
        for (prompt, _), answer in zip(asked, answers[0], strict=True)
    ]
    return {"answers": answers, "last": last, "next": engine.ask(turns)}


def budgets(scenario: str) -> dict[str, int]:
    """A GPU tier that holds two of the long prompts, a CPU tier that holds everything."""
    groups = 6 if scenario == "gemma3" else 1
    row_bytes = ROW_BYTES[scenario]
    return {
        "xavier_gpu_budget": 60 * groups * row_bytes,
        "xavier_cpu_budget": 400 * groups * row_bytes,
    }


def run(scenario: str, model: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    engine = Engine(scenario, model, None)
    result["plain"] = rounds(engine)
    engine.close()

    engine = Engine(scenario, model, budgets(scenario))
    result["cached"] = rounds(engine)
    engine.forget()
    engine.ask_together(long() * 2)  # more than the pool holds at once: preempts
    result["stats"] = engine.stats()
    if SCENARIOS[scenario]["tp"] == 1:
        result["verified"] = engine.verified()
    engine.close()

    os.environ["XINFERENCE_XAVIER_FAULTS"] = SCENARIOS[scenario]["faults"]
    engine = Engine(scenario, model, budgets(scenario))
    result["faulty"] = rounds(engine)
    result["faulty_stats"] = engine.stats()
    engine.close()
    return result


def main() -> None:
    scenario, model, target = sys.argv[1:]
    if SCENARIOS[scenario]["tp"] == 2:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    Path(target).write_text(json.dumps(run(scenario, model)))


if __name__ == "__main__":
    main()
