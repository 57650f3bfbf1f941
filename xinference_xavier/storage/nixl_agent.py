"""A NIXL agent with the UCX backend, built for a process that computes: it does not spin.

Thin: every method is one NIXL call with errors turned into ``TransferError``. All of them belong
on one thread. NIXL is optional and imported on first use only.

NIXL's own Python class fixes its progress thread's delay at 0, which keeps a core busy; the
bindings below it take a delay. The thread only answers peers that reach us through software (tcp,
first contacts), and wakes up for them by itself, so a long delay costs no speed.
"""

from __future__ import annotations

import logging
import logging.config
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from xinference_xavier.storage.rank_memory import DescriptorTable
from xinference_xavier.types import TransferError

_BACKEND = "UCX"
_PROGRESS_DELAY_US = 1000
_INSTALL = "pip install 'xinference-xavier[nixl]'"


def nixl_problem() -> str | None:
    """Why replicas cannot share through NIXL here and what to do about it; None when they can.

    Starts an agent as sharing does, and ends it.
    """
    try:
        NixlAgent("probe").close()
    except TransferError as error:
        return str(error)
    return None


def _cannot_start(exc: Exception) -> str:
    if isinstance(exc, ModuleNotFoundError):
        return f"NIXL is not installed (no module {exc.name!r}); run: {_INSTALL}"
    return f"NIXL does not start ({type(exc).__name__}: {exc}); reinstall it: {_INSTALL}"


def _without_backend(agent: Any) -> str | None:
    plugins = agent.getAvailPlugins()
    if _BACKEND in plugins:
        return None
    found = ", ".join(plugins) or "none"
    return (
        f"NIXL has no {_BACKEND} backend (found: {found}); unset NIXL_PLUGIN_DIR or reinstall "
        f"it: {_INSTALL}"
    )


def _bindings() -> Any:
    """NIXL's extension module, imported so that the process stays the host's."""
    # UCX would take SIGHUP for its own debug mode: a closed terminal would end nothing any more.
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
    # UCX would watch the process's memory calls by rewriting the first instructions of ``madvise``
    # and its kin, under the feet of threads that are inside one: engines crashed at their start.
    # It wants to know when memory that it has registered is unmapped; ours outlives the agent.
    os.environ.setdefault("UCX_MEM_MMAP_HOOK_MODE", "none")
    with _host_logging_kept():
        import nixl._bindings

        return nixl._bindings


@contextmanager
def _host_logging_kept() -> Iterator[None]:
    """Importing NIXL configures logging: that closes the host's log files and hides log errors.

    Without it NIXL's Python part logs like any library.
    """
    configure, reports_errors = logging.config.dictConfig, logging.raiseExceptions

    def others_only(config: Any) -> None:
        if "nixl" not in config.get("loggers", ()):
            configure(config)

    logging.config.dictConfig = others_only
    try:
        yield
    finally:
        logging.config.dictConfig, logging.raiseExceptions = configure, reports_errors


class NixlAgent:
    """One agent. Its name is unique: peers refuse a second agent under a known one."""

    def __init__(self, name: str) -> None:
        """Make the agent; takes about half a second.

        Raises:
            TransferError: NIXL or its UCX backend is not to be had.
        """
        try:
            self._nixl = _bindings()
            self._agent = self._nixl.nixlAgent(name, self._config())
        except Exception as exc:
            raise TransferError(_cannot_start(exc)) from exc
        problem = _without_backend(self._agent)
        if problem is not None:
            raise TransferError(problem)
        self._memory_types = {"DRAM": self._nixl.DRAM_SEG, "VRAM": self._nixl.VRAM_SEG}
        try:
            self._backends = [self._agent.createBackend(_BACKEND, {})]
        except Exception as exc:
            raise _failure("start", exc) from exc

    def _config(self) -> Any:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = _PROGRESS_DELAY_US
        return config

    def register(self, memory_type: str, address: int, nbytes: int, device_id: int) -> None:
        """Let peers that get the metadata reach this memory; touches none of its pages.

        Raises:
            TransferError: the backend refuses it.
        """
        region = [(address, nbytes, device_id, "")]
        try:
            regions = self._nixl.nixlRegDList(self._memory_types[memory_type], region)
            self._agent.registerMem(regions, self._backends)
        except Exception as exc:
            raise _failure(f"register {nbytes} bytes of {memory_type}", exc) from exc

    def metadata(self) -> bytes:
        """What a peer needs to reach the registered memory."""
        metadata: bytes = self._agent.getLocalMD()
        return metadata

    def add_peer(self, metadata: bytes) -> None:
        """Make a peer known; a dead one is refused here or on first use.

        Raises:
            TransferError: no connection, or the metadata is not understood.
        """
        try:
            self._agent.loadRemoteMD(metadata)
        except Exception as exc:
            raise _failure("reach the peer", exc) from exc

    def remove_peer(self, name: str) -> None:
        """Forget a peer without transfers in flight; harmless for an unknown one."""
        try:
            self._agent.invalidateRemoteMD(name)
        except Exception as exc:
            _note("forget a peer", exc)

    def prepare(self, name: str, memory_type: str, table: DescriptorTable) -> int:
        """Handle of a strided descriptor list; ``name`` is a peer's, or empty for our side.

        Raises:
            TransferError: the memory is not registered, or the peer is gone.
        """
        side = name or self._nixl.NIXL_INIT_AGENT
        kind = self._memory_types[memory_type]
        try:
            return int(self._agent.prepXferDlist(side, kind, table, self._backends))
        except Exception as exc:
            raise _failure("prepare the rows", exc) from exc

    def release_prepared(self, handle: int) -> None:
        """Free a descriptor list."""
        self._agent.releasedDlistH(handle)

    def make_read(
        self,
        own_side: int,
        own: npt.NDArray[np.int32],
        peer_side: int,
        peer: npt.NDArray[np.int32],
    ) -> int:
        """Handle of a read of ``peer[i]`` into ``own[i]``; neighbours on both sides are merged.

        Raises:
            TransferError: NIXL refuses it.
        """
        arguments = (own_side, own, peer_side, peer, "", self._backends)
        try:
            return int(self._agent.makeXferReq(self._nixl.NIXL_READ, *arguments))
        except Exception as exc:
            raise _failure("make the read", exc) from exc

    def post(self, handle: int) -> None:
        """Start a read. Between processes of one host it blocks until the last byte is there.

        Raises:
            TransferError: the peer is gone.
        """
        try:
            status = self._agent.postXferReq(handle, "")
        except Exception as exc:
            raise _failure("read", exc) from exc
        self._check(status)

    def finished(self, handle: int) -> bool:
        """Whether all bytes of a started read have landed.

        Raises:
            TransferError: it failed, and nothing of it will land any more.
        """
        try:
            status = self._agent.getXferStatus(handle)
        except Exception as exc:
            raise _failure("read", exc) from exc
        self._check(status)
        return bool(status == self._nixl.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        """Free a read that has finished or failed. Never one that may still land bytes."""
        try:
            self._agent.releaseXferReq(handle)
        except Exception as exc:
            _note("release a read", exc)

    def close(self) -> None:
        """Destroy the agent: nothing lands after it, and registrations end."""
        self._agent = None

    def _check(self, status: Any) -> None:
        if status not in (self._nixl.NIXL_SUCCESS, self._nixl.NIXL_IN_PROG):
            raise TransferError(f"NIXL could not read: {status}")


def _failure(action: str, exc: Exception) -> TransferError:
    if type(exc).__name__ in ("nixlRemoteDisconnectError", "nixlNotFoundError"):
        return TransferError(f"the peer is gone (NIXL could not {action}: {exc})")
    return TransferError(f"NIXL could not {action}: {type(exc).__name__}: {exc}")


def _note(action: str, exc: Exception) -> None:
    logging.getLogger(__name__).debug("NIXL could not %s: %s: %s", action, type(exc).__name__, exc)
