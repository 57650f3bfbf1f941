"""Our options on ``xinference launch``.

Covers: the flags and their help text, the check before any request is made, and a refusal by the
server shown as a usage error (exit status 2). Does not cover: sending the request; the host's own
code does that from ``ctx.args``, to which our values are added. Runs in the CLI process.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import click

from xinference_xavier.config import OPTIONS, SWITCH, XavierOptions
from xinference_xavier.host.options import check_payload
from xinference_xavier.types import OptionError

#: Host options of ``launch`` that our conflicts look at; their names are those of the payload.
_PAYLOAD_PARAMETERS = ("model_type", "model_engine")


def on_cmdline(module: ModuleType) -> None:
    """Add the options to the ``launch`` command of ``xinference.deploy.cmdline``, once."""
    launch = module.cli.commands["launch"]
    if any(parameter.name == SWITCH for parameter in launch.params):
        return
    launch.params.extend(_option(name) for name in OPTIONS)
    launch.callback = _wrap(launch.callback, module.handle_click_args_type)


def _option(name: str) -> click.Option:
    """One flag, in the dashed spelling and in the underscored one of the host's extra options."""
    field = XavierOptions.model_fields[name]
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    spellings = [f"--{name.replace('_', '-')}", f"--{name}", name]
    if name == SWITCH:
        # A bare flag, that also takes the value which the host's extra options need.
        return click.Option(
            spellings, is_flag=False, flag_value="true", metavar="[true]", help=field.description
        )
    default = str(extra.get("default_text", field.default))
    return click.Option(
        spellings,
        metavar=str(extra.get("metavar")),
        help=f"{field.description}  [default: {default}]",
    )


def _wrap(callback: Callable[..., Any], read_argument: Callable[[str], Any]) -> Callable[..., Any]:
    """``callback`` with our values taken out of its arguments and checked first."""

    @functools.wraps(callback)
    def launch(*args: Any, **kwargs: Any) -> Any:
        context = click.get_current_context()
        given = {name: kwargs.pop(name) for name in OPTIONS if kwargs.get(name) is not None}
        for name in OPTIONS:
            kwargs.pop(name, None)
        payload = {name: kwargs.get(name) for name in _PAYLOAD_PARAMETERS}
        payload |= {"envs": dict(kwargs.get("env") or ())}
        payload |= _extra_arguments(context.args, read_argument)
        payload |= {name: read_argument(value) for name, value in given.items()}
        switched_on = _check(payload, context)
        # In front, so that a stray extra argument stays the last one, as the host expects it.
        context.args[:0] = [part for name in given for part in (f"--{name}", given[name])]
        if not switched_on:
            return callback(*args, **kwargs)
        return _launch_with_refusals(callback, context, args, kwargs)

    return launch


def _extra_arguments(arguments: list[str], read: Callable[[str], Any]) -> dict[str, Any]:
    """The pairs that the host will read from its extra arguments. It reports stray ones itself."""
    pairs = zip(arguments[::2], arguments[1::2], strict=False)
    return {name[2:]: read(value) for name, value in pairs if name.startswith("--")}


def _check(payload: dict[str, Any], context: click.Context) -> bool:
    """Refuse or warn; True when the launch has our switch."""
    try:
        options, warnings = check_payload(payload)
    except OptionError as error:
        raise click.UsageError(str(error), context) from error
    for warning in warnings:
        click.echo(f"Warning: {warning}", err=True)
    return options is not None


def _launch_with_refusals(
    callback: Callable[..., Any], context: click.Context, args: Any, kwargs: Any
) -> Any:
    """Call the host; an HTTP 400 of the server becomes a usage error with its sentence."""
    try:
        return callback(*args, **kwargs)
    except RuntimeError as error:
        if _http_status(error) != 400:
            raise
        raise click.UsageError(_sentence(error), context) from error


def _http_status(error: BaseException) -> int | None:
    """Status of the response that Xinference's client raised ``error`` for.

    The client puts only the text into its exception, so the frames it passed are asked.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        status = getattr(frame.f_locals.get("response"), "status_code", None)
        if status is not None:
            return int(status)
    return None


def _sentence(error: BaseException) -> str:
    return str(error).removeprefix("Failed to launch model, detail: ")
