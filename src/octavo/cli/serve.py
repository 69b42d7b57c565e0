"""`octavo serve`: the HTTP server. Its options are the fields of `server.config.ServerConfig`."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from octavo.cli import terminal
from octavo.logs import say, set_up_logging
from octavo.server.config import ServerConfig, flag_options, load_config, show_config

if TYPE_CHECKING:
    from octavo.engine.ipc import EngineInfo

log = logging.getLogger("octavo")


def _serve(model: str | None, config: Path | None, print_config: bool, given: dict[str, Any]) -> None:
    """Serve a model over HTTP, to OpenAI's and TGI's clients.

    Every option can also be a variable (OCTAVO_PORT=8001) or a line of a YAML file (port: 8001). Options win over
    variables, variables over the file. The variables of TGI's launcher count when MODEL_ID is set.
    """
    flags = {name: value for name, value in given.items() if value not in (None, [])}
    if model is not None:
        if "model" in flags:
            raise typer.BadParameter("give the model once: as MODEL or with --model")
        flags["model"] = model
    loaded = load_config(flags, os.environ, config)
    if print_config:
        print(show_config(loaded), end="")
    else:
        _run(loaded)


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(0)


def _run(config: ServerConfig) -> None:
    # The first process of a container has no such default. The server's own handlers come later, and stay to its end.
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _run_server(config)
    except BaseException:
        for number, handler in before.items():
            signal.signal(number, handler)
        raise


def _run_server(config: ServerConfig) -> None:
    set_up_logging(config.log_level, config.log_format)
    _tell(config, terminal.dim(f"octavo: loading {config.model} ...", sys.stderr))
    from octavo.server.lifecycle import run

    code = run(config, lambda info, where: _announce(config, info, where))
    if code:
        raise typer.Exit(code)


def _announce(config: ServerConfig, info: EngineInfo, where: str) -> None:
    has_key = bool(config.api_key or config.api_key_file)
    key = ' -H "authorization: Bearer $KEY"' if has_key else ""
    call = f"--unix-socket {config.uds} http://octavo" if config.uds is not None else where
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    lines = [
        f"  {info.kv_memory}",
        f"  curl {call}/v1/chat/completions{key} -H 'content-type: application/json' -d '{body}'",
    ]
    if not has_key and config.uds is None and config.host not in ("127.0.0.1", "::1", "localhost"):
        lines.append("  anybody who reaches this address may use the server: --api-key asks for a key")
    name = config.model_names[0]
    _tell(config, f"octavo: {name} is ready at {where} (loaded in {info.load_seconds:.1f} s)")
    _tell(config, terminal.dim("\n".join(lines), sys.stderr))


def _tell(config: ServerConfig, text: str) -> None:
    if config.log_format == "json":
        log.info("%s", text.strip())
    else:
        say(text)


def _command() -> Callable[..., None]:
    """The function with an option for each setting. None or an empty list: not given."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        _parameter("positional_model", str | None, typer.Argument(metavar="MODEL", help="The same as --model.")),
        _parameter("config", Path | None, typer.Option("--config", help="YAML file of settings.", dir_okay=False)),
        inspect.Parameter(
            "print_config",
            keyword,
            default=False,
            annotation=Annotated[bool, typer.Option("--print-config", help="Print the settings as YAML and exit.")],
        ),
    ]
    for name, setting, kind, default in flag_options():
        is_list, is_bool = isinstance(default, list), isinstance(default, bool)
        flags = (f"{setting.flags[0]}/--no-{setting.flags[0][2:]}", *setting.flags[1:]) if is_bool else setting.flags
        help = setting.help if is_list or is_bool or default is None else f"{setting.help}  [default: {default}]"
        plain: Any = list[str] if is_list else bool if is_bool else _plain(kind)
        parameters.append(_parameter(name, plain | None, typer.Option(*flags, help=help, show_default=False)))

    def serve(**given: Any) -> None:
        _serve(given.pop("positional_model"), given.pop("config"), given.pop("print_config"), given)

    serve.__doc__ = _serve.__doc__
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return serve


def _parameter(name: str, kind: Any, info: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info])


def _plain(kind: Any) -> type:
    """int, float or str, as the parser checks it; bounds and choices are the schema's."""
    text = str(kind)
    return int if "int" in text else float if "float" in text else str


serve = _command()
