"""The server's settings: one schema for flags, OCTAVO_* variables and the YAML file.

Flags win over variables, variables over the file, the file over the defaults. Each value is checked where it comes
from, so that an error names the flag, the variable or the key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
from msgspec import Meta

from octavo import limits
from octavo.chat.formats import AUTO, NONE, REASONING_PARSERS, TOOL_PARSERS
from octavo.engine.memory import parse_bytes
from octavo.errors import ConfigError, InvalidParameterError

ENV_PREFIX = "OCTAVO_"


@dataclass(frozen=True, slots=True)
class Setting:
    """How a field is given outside of Python. tgi: the variable of the TGI launcher that means the same."""

    flags: tuple[str, ...]
    help: str
    tgi: str | None = None
    secret: bool = False


def _set(*flags: str, help: str, tgi: str | None = None, secret: bool = False) -> Setting:
    return Setting(flags, help, tgi, secret)


_Port = Annotated[int, Meta(ge=0, le=65_535)]
_Count = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(gt=0, le=limits.MAX_TIMEOUT_SECONDS)]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of `octavo serve`. Seconds and bytes unless a name says otherwise; None: no such bound."""

    # The model and its engine
    model: Annotated[
        str,
        _set(
            *("--model", "-m", "--model-id"),
            help="A known name, a .gguf file, a Hugging Face folder, org/name or org/name:file.gguf.",
            tgi="MODEL_ID",
        ),
    ] = "smollm2"
    served_model_name: Annotated[
        list[str], _set("--served-model-name", help="Name in the API; may be given again. The model's own otherwise.")
    ] = []
    revision: Annotated[
        str | None, _set("--revision", help="Branch, tag or commit of a model on the Hub.", tgi="REVISION")
    ] = None
    weights: Annotated[str, _set("--weights", help="auto, f32, q8 or q4; auto keeps the file's class.")] = "auto"
    kv_dtype: Annotated[
        str, _set("--kv-dtype", "--kv-cache-dtype", help="auto (f16), f16, f32 or int8.", tgi="KV_CACHE_DTYPE")
    ] = "f16"
    kv_memory: Annotated[
        str | None, _set("--kv-memory", help="Memory for KV blocks, e.g. 2GiB; half of the free memory otherwise.")
    ] = None
    max_model_len: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        _set(
            "--max-model-len", "--max-total-tokens", help="Longest prompt + output in tokens.", tgi="MAX_TOTAL_TOKENS"
        ),
    ] = None
    max_input_tokens: Annotated[
        _Count | None,
        _set("--max-input-tokens", "--max-input-length", help="Longest prompt in tokens.", tgi="MAX_INPUT_TOKENS"),
    ] = None
    max_num_seqs: Annotated[
        Annotated[int, Meta(ge=1, le=limits.MAX_BATCH_SEQUENCES)],
        _set("--max-num-seqs", "--max-batch-size", help="Most sequences in one step.", tgi="MAX_BATCH_SIZE"),
    ] = limits.MAX_BATCH_SEQUENCES
    threads: Annotated[_Count | None, _set("--threads", help="Worker threads; a core each otherwise.")] = None
    tool_call_parser: Annotated[
        str,
        _set(
            "--tool-call-parser",
            help="How tool calls are written: auto (as the chat template has it), hermes, llama3_json, mistral, none.",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        _set(
            "--reasoning-parser",
            help="How reasoning is marked: auto (as the chat template has it), deepseek_r1, qwen3, mistral, none.",
        ),
    ] = "auto"
    enable_auto_tool_choice: Annotated[
        bool,
        _set(
            "--enable-auto-tool-choice", help="Let the model choose whether to call a tool; off: only where required."
        ),
    ] = True
    kernels: Annotated[str, _set("--kernels", help="auto, scalar, avx2, avx512 or amx; same bits.")] = "auto"
    policy: Annotated[
        str, _set("--policy", "--scheduling-policy", help="fcfs, priority, or lpm (longest cached prefix first).")
    ] = "fcfs"
    enable_prefix_caching: Annotated[
        bool, _set("--enable-prefix-caching", help="Compute once what prompts begin with in common; same answers.")
    ] = True
    jump_forward: Annotated[
        bool, _set("--jump-forward", help="Append tokens that a grammar forces without a step for each; same answers.")
    ] = True
    inter_token_target: Annotated[
        _Seconds, _set("--inter-token-target", help="Seconds between tokens of a stream that prompts may take up.")
    ] = 0.1
    stall_timeout: Annotated[
        _Seconds, _set("--stall-timeout", help="An engine silent for longer than this is restarted (plus step size).")
    ] = 10.0

    # Where it listens
    host: Annotated[str, _set("--host", "--hostname", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[_Port, _set("--port", "-p", help="Port; 0 takes a free one.", tgi="PORT")] = 8000
    uds: Annotated[str | None, _set("--uds", help="Listen on this unix socket instead of host and port.")] = None
    ops_host: Annotated[str, _set("--ops-host", help="Address of the ops listener.")] = "127.0.0.1"
    ops_port: Annotated[
        _Port | None,
        _set(
            "--ops-port",
            "--prometheus-port",
            help="Also serve /livez, /readyz and /metrics here, without key.",
            tgi="PROMETHEUS_PORT",
        ),
    ] = None

    # Who may use it
    api_key: Annotated[
        list[str],
        _set("--api-key", help="Key that clients must send; may be given again.", tgi="API_KEY", secret=True),
    ] = []
    api_key_file: Annotated[
        str | None, _set("--api-key-file", help="File of named, hashed keys; read again when it changes.")
    ] = None
    share_prefix_cache: Annotated[
        bool, _set("--share-prefix-cache", help="Let clients with different keys share cached prefixes.")
    ] = False
    cors_origin: Annotated[
        list[str],
        _set(
            *("--cors-origin", "--cors-allow-origin", "--allowed-origins"),
            help="Web origin that browsers may call from; may be given again.",
            tgi="CORS_ALLOW_ORIGIN",
        ),
    ] = []

    # How much of it
    max_concurrent_requests: Annotated[
        _Count | None,
        _set("--max-concurrent-requests", help="Most requests at once; 429 beyond.", tgi="MAX_CONCURRENT_REQUESTS"),
    ] = None
    max_queued_requests: Annotated[
        Annotated[int, Meta(ge=1, le=limits.MAX_QUEUED_REQUESTS)],
        _set("--max-queued-requests", help="Most requests that wait for their first token; 429 beyond."),
    ] = 512
    max_queued_tokens: Annotated[
        _Count, _set("--max-queued-tokens", help="Most prompt tokens that wait for computing; 429 beyond.")
    ] = 1 << 20
    max_body_bytes: Annotated[
        Annotated[int, Meta(ge=1024, le=limits.MAX_BODY_BYTES_SETTING)],
        _set("--max-body-bytes", "--payload-limit", help="Longest request body; 413 beyond.", tgi="PAYLOAD_LIMIT"),
    ] = limits.MAX_BODY_BYTES
    max_connections: Annotated[_Count, _set("--max-connections", help="Most connections at once.")] = 4096

    # How long it may take
    queue_timeout: Annotated[
        _Seconds | None, _set("--queue-timeout", help="Seconds a request may wait in the queue; also most to ask for.")
    ] = None
    first_token_timeout: Annotated[
        _Seconds | None, _set("--first-token-timeout", help="Seconds to the first token; also most to ask for.")
    ] = None
    request_timeout: Annotated[
        _Seconds | None, _set("--request-timeout", help="Seconds for a whole request; also most to ask for.")
    ] = None
    header_timeout: Annotated[_Seconds, _set("--header-timeout", help="Seconds for a request's header.")] = 10.0
    body_timeout: Annotated[_Seconds, _set("--body-timeout", help="Seconds for a request's body.")] = 30.0
    idle_timeout: Annotated[_Seconds, _set("--idle-timeout", help="Seconds an idle connection is kept.")] = 75.0
    slow_client_timeout: Annotated[
        _Seconds,
        _set("--slow-client-timeout", help="Seconds a client may leave its answer unread before it is cut off."),
    ] = 20.0
    keep_alive_interval: Annotated[
        _Seconds, _set("--keep-alive-interval", help="Seconds between comments in a stream that pauses.")
    ] = 5.0
    drain_timeout: Annotated[
        _Seconds, _set("--drain-timeout", "--graceful-termination-timeout", help="Seconds to finish after SIGTERM.")
    ] = 60.0

    # What it says
    log_level: Annotated[str, _set("--log-level", help="debug, info, warning or error.", tgi="LOG_LEVEL")] = "info"
    log_format: Annotated[str, _set("--log-format", help="plain, or json: an object a line.")] = "plain"
    log_requests: Annotated[
        bool, _set("--log-requests", "--enable-log-requests", help="Log a line for each request (never its content).")
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        _set(
            "--otlp-traces-endpoint",
            help="Send OpenTelemetry traces there, as OTLP over HTTP; needs pip install octavo[otel].",
        ),
    ] = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            problem = _problem(name, getattr(self, name))
            if problem is not None:
                raise ConfigError(_shown(name, name, getattr(self, name)), problem)

    def __repr__(self) -> str:
        shown = (
            f"{name}={'<hidden>' if settings()[name][0].secret else repr(getattr(self, name))}"
            for name in self.__struct_fields__
        )
        return f"ServerConfig({', '.join(shown)})"

    @property
    def model_names(self) -> list[str]:
        """What clients may call the model; the first is what answers say."""
        return list(self.served_model_name) or [self.model]


CHOICES: Mapping[str, tuple[str, ...]] = {
    "weights": ("auto", "f32", "q8", "q4"),
    "kv_dtype": ("auto", "f16", "f32", "int8"),
    "kernels": ("auto", "scalar", "avx2", "avx512", "amx"),
    "policy": ("fcfs", "priority", "lpm"),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("plain", "json"),
    "tool_call_parser": (AUTO, NONE, *TOOL_PARSERS),
    "reasoning_parser": (AUTO, NONE, *REASONING_PARSERS),
}
_OTHER_WORDS = {"log_level": {"trace": "debug", "warn": "warning", "critical": "error"}}  # of TGI and Python


def _problem(name: str, value: Any) -> str | None:
    """What is allowed, where a value of the right type is not."""
    if name in CHOICES and value not in CHOICES[name]:
        return "one of " + ", ".join(CHOICES[name])
    if name == "kv_memory" and value is not None:
        try:
            parse_bytes(name, value)
        except InvalidParameterError as error:
            return error.allowed
    if name == "otlp_traces_endpoint" and value is not None and not re.fullmatch(r"https?://[^/\s@]+(/\S*)?", value):
        return "an address that begins with http:// or https://; a password for it goes in OTEL_EXPORTER_OTLP_HEADERS"
    if name == "api_key" and not all(map(_can_be_a_key, value)):
        return f"keys of 1 to {limits.MAX_API_KEY_CHARS} printable ASCII characters without blanks and commas"
    return None


def _can_be_a_key(text: str) -> bool:
    """Without commas, as they divide the keys in a variable."""
    printable = text.isascii() and text.isprintable() and " " not in text and "," not in text
    return printable and 1 <= len(text) <= limits.MAX_API_KEY_CHARS


def _shown(source: str, name: str, value: Any) -> str:
    is_secret = settings()[name][0].secret or re.search("://[^/]*@", str(value))  # a key, or an address with a password
    return source if is_secret else f"{source}={value!r}"


@cache
def settings() -> dict[str, tuple[Setting, Any]]:
    """Each field's Setting and type."""
    found = {}
    for name, hint in get_type_hints(ServerConfig, include_extras=True).items():
        kind, *metadata = get_args(hint)
        setting = next(item for item in metadata if isinstance(item, Setting))
        bounds = [item for item in metadata if isinstance(item, Meta)]  # typing flattens nested Annotated
        found[name] = (setting, Annotated[kind, bounds[0]] if bounds else kind)
    return found


def load_config(
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    file: str | Path | None = None,
) -> ServerConfig:
    """Puts the sources together. `flags`: the fields that were given. Raises ConfigError, which names the source."""
    flags = dict(flags or {})
    environment = environment or {}
    variable = ENV_PREFIX + "CONFIG"
    values = {}
    if file or environment.get(variable):
        path = Path(file or environment[variable])
        values = _from_file(path, f"--config {path}" if file else f"{variable}={path}")
    values |= _from_environment(environment, tgi="MODEL_ID" in environment)
    for name, value in flags.items():
        values[name] = _checked(name, value, settings()[name][0].flags[0])
    return ServerConfig(**values)


def _from_file(path: Path, source: str) -> dict[str, Any]:
    """Errors tell where in the file, never what stands there: it may be a key."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Numbers and dates stay texts, which are read as the setting's type: as variables are."""

        yaml_implicit_resolvers = {  # noqa: RUF012
            first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in ("bool", "null", "merge")]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    try:
        if path.stat().st_size > limits.MAX_SERVER_CONFIG_BYTES:
            raise ConfigError(source, f"a file of at most {limits.MAX_SERVER_CONFIG_BYTES} bytes")
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise ConfigError(source, f"a file that can be read ({error.strerror})") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f"; something is wrong at line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(source, f"a YAML file in UTF-8{where}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(source, "a YAML mapping of settings to values")
    values = {}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name not in settings():
            raise ConfigError(f"{path}: {key}", f"a setting; they are {', '.join(settings())}")
        values[name] = _checked(name, value, f"{path}: {key}")
    return values


def _from_environment(environment: Mapping[str, str], *, tgi: bool) -> dict[str, Any]:
    """OCTAVO_* variables. TGI's bare names count only beside MODEL_ID: on its own, PORT may be another program's.

    An empty variable counts as none, but for secrets: a key that failed to be filled in must not open the door.
    """
    values = {}
    for name, (setting, kind) in settings().items():
        theirs, ours = setting.tgi if tgi else None, ENV_PREFIX + name.upper()
        for variable in (theirs, ours):
            text = None if variable is None else environment.get(variable)
            if variable is None or text is None or (not text and not setting.secret):
                continue
            one = _is_list(kind) and variable == theirs  # TGI divides no lists
            values[name] = _checked(name, [text] if one else text, variable)
    return values


def _checked(name: str, value: Any, source: str) -> Any:
    """The value as the setting's type. Raises ConfigError, which names the source."""
    setting, kind = settings()[name]
    given = value
    if _is_list(kind) and isinstance(value, str):
        value = [item.strip() for item in value.split(",") if item.strip()]
        if setting.secret and not value:
            raise ConfigError(source, "a key: it is set, but there is none in it")
    if name in CHOICES and isinstance(value, str):
        value = _OTHER_WORDS.get(name, {}).get(value.lower(), value.lower())
    try:
        value = msgspec.convert(value, kind, strict=False)
        problem = _problem(name, value)
    except msgspec.ValidationError as error:
        problem = str(error)
    if problem is not None:
        raise ConfigError(_shown(source, name, given), problem)
    return value


def _is_list(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is list


def show_config(config: ServerConfig) -> str:
    """The settings as the YAML file that would give them, without keys: a comment says that there were some."""
    import yaml

    values = msgspec.to_builtins(config)
    hidden = {name: values.pop(name) for name, (setting, _) in settings().items() if setting.secret}
    notes = [
        f"# {name.replace('_', '-')}: {len(value)} set, which this file does not tell: give them again beside it\n"
        for name, value in hidden.items()
        if value
    ]
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True) + "".join(notes)


def flag_options() -> Iterator[tuple[str, Setting, Any, Any]]:
    """Field, Setting, type and default, for the command line."""
    defaults = ServerConfig()
    for name, (setting, kind) in settings().items():
        yield name, setting, kind, getattr(defaults, name)
