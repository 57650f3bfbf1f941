"""Attach to Xinference: run a function of ours right after a host module was imported.

Covers: the import finder that the ``.pth`` file installs in every interpreter of an environment.
Does not cover: what the hooks do; they are named here and imported when their host module is.
Runs at interpreter start in every process, before ``__main__``: keep it free of imports beyond
what an interpreter has loaded anyway, and never let an error out.
"""

import os
import sys

#: Host module -> "module:function" called with that module right after its body ran.
HOOKS = {
    "xinference.engine_hooks": "xinference_xavier.host.engine.register:on_engine_hooks",
    "xinference.api.routers": "xinference_xavier.host.api:on_routers",
    "xinference.deploy.cmdline": "xinference_xavier.host.cli:on_cmdline",
    "xinference.deploy.api_worker": "xinference_xavier.host.drain:on_api_worker",
    "xinference.core.model": "xinference_xavier.host.identity:on_model",
    "xinference.core.supervisor": "xinference_xavier.host.supervisor:on_supervisor",
}

DISABLE_VARIABLE = "XINFERENCE_XAVIER_DISABLE"

#: Host module -> "active", or the reason why its hook is not. Read by ``xinference-xavier doctor``.
outcomes: dict[str, str] = {}


class HookFinder:
    """A ``sys.meta_path`` entry that costs other imports one dict probe.

    It finds nothing itself: for a module in ``hooks`` it asks the finders behind it and replaces
    ``exec_module`` on the loader they return, so that files, caches and ``spec`` stay the host's.
    """

    def __init__(self, hooks: dict[str, str]) -> None:
        self.hooks = hooks

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in self.hooks:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                _wrap_loader(name, spec.loader, self.hooks[name])
                return spec
        return None


def install() -> None:
    """Put the finder first on ``sys.meta_path``, once per interpreter.

    Does nothing when ``XINFERENCE_XAVIER_DISABLE`` is set to anything but "" or "0". ``site``
    runs a ``.pth`` file twice in a virtual environment, so a second call changes nothing.
    """
    if os.environ.get(DISABLE_VARIABLE, "0") not in ("", "0"):
        return
    if not any(isinstance(finder, HookFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, HookFinder(HOOKS))  # type: ignore[arg-type]


def _wrap_loader(name, loader, hook):  # type: ignore[no-untyped-def]
    """Make ``loader.exec_module`` call ``hook`` after the module's own body."""
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module):  # type: ignore[no-untyped-def]
        execute(module)
        _run(name, module, hook)

    try:
        loader.exec_module = exec_module
    except AttributeError:  # a loader with slots: import the host untouched
        outcomes[name] = f"its loader {type(loader).__name__} cannot be wrapped"


def _run(name, module, hook):  # type: ignore[no-untyped-def]
    """Call one hook. Its failure is logged once and leaves the host as it was released."""
    try:
        from importlib import import_module

        from . import compat

        missing = compat.missing_in(module)
        if missing:
            raise compat.HostChangedError(missing)
        hook_module, _, function = hook.partition(":")
        getattr(import_module(hook_module), function)(module)
        outcomes[name] = "active"
    except Exception as error:
        outcomes[name] = f"{type(error).__name__}: {error}"
        _log_failure(name, hook, error)


def _log_failure(name, hook, error):  # type: ignore[no-untyped-def]
    import logging

    logging.getLogger(__name__).warning(
        "xinference-xavier is not active in %s: %s failed with %s: %s. Xinference works as "
        "without it; run `xinference-xavier doctor` for what to do.",
        name,
        hook,
        type(error).__name__,
        error,
        exc_info=logging.getLogger(__name__).isEnabledFor(logging.DEBUG),
    )
