"""Threads of ours in processes that vLLM has bound to single cores. Any process."""

from __future__ import annotations

import logging
import os
import threading

logger = logging.getLogger(__name__)


def leave_inherited_core(*, nice: int = 0) -> None:
    """Let the calling thread run on every CPU the machine allows, optionally at low priority.

    vLLM binds its CPU workers to single cores and threads inherit that: a thread of ours on the
    compute core would take its time from the forward pass.
    """
    try:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        if nice:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    except OSError as exc:  # not permitted: slower, not wrong
        logger.debug("thread keeps its CPUs: %s", exc)
