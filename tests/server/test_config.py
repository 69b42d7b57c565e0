"""Settings: one schema, four sources, and errors that name the source."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from octavo.cli.main import app
from octavo.engine.memory import parse_bytes
from octavo.errors import ConfigError
from octavo.server.config import CHOICES, ServerConfig, flag_options, load_config, settings, show_config
from tests.support.llms import environment

OTHER: dict[str, Any] = {
    "log_level": "debug",
    "log_format": "json",
    "policy": "lpm",
    "kv_dtype": "int8",
    "kv_memory": "1.5GiB",
    "weights": "q4",
    "kernels": "scalar",
    "tool_call_parser": "llama3_json",
    "reasoning_parser": "deepseek_r1",
}
SECRET = "s3cr3t-k3y"


def other_value(name: str, default: Any) -> Any:
    """A value of the setting's type that is not its default."""
    kind = str(settings()[name][1])
    if name in OTHER:
        return OTHER[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, list):
        return ["one", "two"]
    if "int" in kind:
        return 200 if default is None else max(default // 2, 1) + 1024 * (name == "max_body_bytes")
    if name == "otlp_traces_endpoint":
        return "http://collector:4318/v1/traces"
    return 7.5 if "float" in kind else "else"


def as_flags(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [part for item in (value if isinstance(value, list) else [value]) for part in (flag, str(item))]


def printed(*arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["serve", "--print-config", *arguments], env=env, prog_name="octavo")
    assert result.exit_code == 0, result.output
    loaded: dict[str, Any] = yaml.safe_load(result.stdout)
    keys = re.search(r"^# api-key: (\d) ", result.stdout, re.MULTILINE)
    return {**loaded, "api_key": int(keys[1]) if keys else 0}


def test_every_setting_can_be_a_flag_a_variable_or_a_line_of_the_file(tmp_path: Path) -> None:
    for name, setting, _, default in flag_options():
        value = other_value(name, default)
        assert value != default
        shown = 2 if setting.secret else value
        text = ",".join(value) if isinstance(value, list) else str(value)
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump({name.replace("_", "-"): value}))
        for flag in setting.flags:
            assert printed(*as_flags(flag, value))[name] == shown, flag
        assert printed(env={f"OCTAVO_{name.upper()}": text})[name] == shown, name
        assert printed("--config", str(file))[name] == shown, name


def test_flags_win_over_variables_over_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text("port: 1\nhost: file\nmax-num-seqs: 3\n")
    config = load_config({"port": 3}, {"OCTAVO_PORT": "2", "OCTAVO_HOST": "env"}, file)
    assert (config.port, config.host, config.max_num_seqs, config.model) == (3, "env", 3, "smollm2")


def test_print_config_writes_a_file_that_gives_the_same_configuration_but_no_key(tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    for name, setting, _, default in flag_options():
        config = ServerConfig(**{name: other_value(name, default)})
        file.write_text(show_config(config))
        again = load_config(environment={"OCTAVO_CONFIG": str(file)})
        assert again.api_key == []
        assert again == msgspec.structs.replace(config, api_key=[]), name
        assert all(value not in file.read_text() for value in config.api_key)
        if setting.secret:
            assert "# api-key: 2 set" in file.read_text()


@pytest.mark.parametrize("name", ["1234", "1e3", "0x10", "yes", "null", "2026-01-01", "a, b", "# x", "é", "*a", "<<"])
def test_print_config_keeps_texts_that_look_like_something_else(name: str, tmp_path: Path) -> None:
    config = ServerConfig(model=name, served_model_name=[name, "x"], revision=name, uds=name)
    file = tmp_path / "octavo.yaml"
    file.write_text(show_config(config))
    assert load_config(file=file) == config


@pytest.mark.parametrize(
    "line",
    [
        'api-key: "{}',
        "api-key: [{}",
        "api-key: !{} x",
        "api-key: *{}",
        "api-key: &{} &{}",
        "a: b: {}",
        "{{{}: }}: {}",
        "- {}",
        "{}",
        "api-key: {{{}: 1}}",
        "api-key: [[{}]]",
        "api-key: [{} {}, 'with blank {}']",
        'api-key: "\\{}"',
        "api-key: [{}é]",
        "api-key: {},'{}é'",
        "api-key: \x01{}",
        "api-key:\n\t{}",
        "%{} 1\n--- {}",
    ],
)
def test_no_error_about_a_file_shows_what_is_in_it(line: str, tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text("port: 1\n" + line.replace("{}", SECRET).replace("{{", "{").replace("}}", "}"))
    with pytest.raises(ConfigError, match=r"octavo\.yaml") as error:
        load_config(file=file)
    assert SECRET not in str(error.value)


def test_an_error_in_the_syntax_of_a_file_tells_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text("port: 1\nhost: [a, b\nuds: x\n")
    with pytest.raises(ConfigError, match="line 3, column 4"):
        load_config(file=file)


@pytest.mark.parametrize("key", ["with blank", "é" + SECRET, "x" * 513, "a,b", ""])
@pytest.mark.parametrize("source", ["--api-key", "API_KEY", "octavo.yaml: api-key"])
def test_a_key_that_cannot_be_one_is_refused_by_its_source_and_not_shown(source: str, key: str, tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text(yaml.safe_dump({"api-key": [key]} if source.startswith("octavo") else {}))
    variables = {"API_KEY": key, "MODEL_ID": "m"} if source == "API_KEY" else {}
    with pytest.raises(ConfigError, match=source) as error:
        load_config({"api_key": [key]} if source == "--api-key" else {}, variables, file)
    assert key == "" or key not in str(error.value)


@pytest.mark.parametrize(
    "variables", [{"OCTAVO_API_KEY": ""}, {"OCTAVO_API_KEY": " , "}, {"API_KEY": "", "MODEL_ID": "m"}]
)
def test_a_variable_for_keys_that_holds_none_does_not_open_the_door(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="API_KEY"):
        load_config(environment=variables)


def test_keys_are_not_in_the_representation_of_a_configuration() -> None:
    config = ServerConfig(api_key=[SECRET], host="somewhere")
    assert SECRET not in f"{config!r} {config!s}"
    assert "somewhere" in repr(config)


@pytest.mark.parametrize(
    ("arguments", "variables", "names"),
    [
        ({"port": 70_000}, {}, "--port=70000"),
        ({}, {"OCTAVO_PORT": "http"}, "OCTAVO_PORT='http'"),
        ({}, {"MODEL_ID": "smollm2", "PORT": "-1"}, "PORT='-1'"),
        ({"policy": "random"}, {}, "--policy='random' is not allowed: one of fcfs, priority, lpm"),
        ({}, {"OCTAVO_LOG_LEVEL": "LOUD"}, "OCTAVO_LOG_LEVEL='LOUD'"),
        ({}, {"MODEL_ID": "m", "KV_CACHE_DTYPE": "fp8_e5m2"}, "KV_CACHE_DTYPE='fp8_e5m2'"),
        ({}, {"OCTAVO_KV_MEMORY": "much"}, "OCTAVO_KV_MEMORY='much'"),
        ({}, {"OCTAVO_WEIGHTS": "q9"}, "OCTAVO_WEIGHTS='q9'"),
        ({"kernels": "sse"}, {}, "--kernels='sse'"),
        ({"queue_timeout": float("nan")}, {}, "--queue-timeout"),
        ({}, {"OCTAVO_CONFIG": "/no/such/file"}, "OCTAVO_CONFIG=/no/such/file"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_source(
    arguments: dict[str, Any], variables: dict[str, str], names: str
) -> None:
    with pytest.raises(ConfigError, match=names.replace("[", r"\[")):
        load_config(arguments, variables)


@pytest.mark.parametrize("text", ["- a list", "port: [", "prot: 8000", "port: many", "!!python/object:os.system {}"])
def test_a_wrong_file_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"octavo\.yaml"):
        load_config(file=file)


def test_the_error_about_a_value_in_a_file_names_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    for line in ("log-level: LOUD", "kv-memory: -1", "policy: 3", "max-model-len: 1", "kv-memory: [2]"):
        file.write_text(line)
        with pytest.raises(ConfigError, match=rf"octavo\.yaml: {line.split(':')[0]}"):
            load_config(file=file)


def test_words_may_be_written_in_any_case() -> None:
    variables = {"MODEL_ID": "m", "LOG_LEVEL": "INFO", "OCTAVO_KV_DTYPE": "Int8", "OCTAVO_WEIGHTS": "Q8"}
    config = load_config({"policy": "FCFS"}, variables)
    assert (config.log_level, config.kv_dtype, config.weights, config.policy) == ("info", "int8", "q8", "fcfs")
    for word, level in {"WARN": "warning", "trace": "debug", "Critical": "error", "Debug": "debug"}.items():
        assert load_config(environment={"OCTAVO_LOG_LEVEL": word}).log_level == level


def test_the_words_for_engine_settings_are_those_the_engine_knows() -> None:
    from octavo import _native
    from octavo.scheduler.policy import POLICIES
    from octavo.weights.precision import CHOICES as weights

    assert CHOICES["weights"] == weights
    kernels = {name for name in _native.kernel_names() if not name.startswith("faulty")}  # of development builds
    assert set(CHOICES["kernels"]) >= {"auto", *kernels}
    assert set(CHOICES["policy"]) == set(POLICIES)


@pytest.mark.parametrize("arguments", [["--print-config"], ["/no/such/model.gguf"], ["--port", "x"]])
def test_a_command_that_does_not_serve_leaves_the_signals_alone(arguments: list[str]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    CliRunner().invoke(app, ["serve", *arguments], prog_name="octavo")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("written", ["2147483648", '"2GiB"', "2GiB"])
def test_memory_in_a_file_is_a_number_of_bytes_or_what_the_flag_takes(written: str, tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text(f"kv-memory: {written}\nmax-num-seqs: 3\nqueue-timeout: 1e2\n")
    config = load_config(file=file)
    assert config.kv_memory is not None
    assert parse_bytes("kv_memory", config.kv_memory) == 1 << 31
    assert (config.max_num_seqs, config.queue_timeout) == (3, 100.0)


def test_tgi_variables_count_only_beside_model_id() -> None:
    assert load_config(environment={"PORT": "9", "MAX_TOTAL_TOKENS": "77"}).port == 8000
    config = load_config(environment={"MODEL_ID": "m", "PORT": "9", "MAX_TOTAL_TOKENS": "77", "HOSTNAME": "a1b2"})
    assert (config.model, config.port, config.max_model_len, config.host) == ("m", 9, 77, "127.0.0.1")
    assert load_config(environment={"MODEL_ID": "m", "PORT": "9", "OCTAVO_PORT": "8"}).port == 8


def test_vllm_and_tgi_command_lines_are_understood() -> None:
    vllm = printed("tiny", "--host", "0.0.0.0", "--max-model-len", "64", "--kv-cache-dtype", "auto", "--api-key", "k")
    assert (vllm["model"], vllm["max_model_len"], vllm["kv_dtype"]) == ("tiny", 64, "auto")
    tgi = printed(
        "--model-id", "tiny", "--hostname", "::", "-p", "80", "--max-total-tokens", "9", "--payload-limit=2000"
    )
    assert (tgi["host"], tgi["port"], tgi["max_model_len"], tgi["max_body_bytes"]) == ("::", 80, 9, 2000)


def test_wrong_usage_is_one_line_and_no_traceback() -> None:
    command = [sys.executable, "-m", "octavo", "serve", "--policy", "x", "--print-config"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
