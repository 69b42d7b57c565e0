"""Settings: one schema, four sources, and errors that name the source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from octavo.cli.main import app
from octavo.errors import ConfigError
from octavo.server.config import ServerConfig, flag_options, load_config, settings, show_config
from tests.support.llms import environment

OTHER: dict[str, Any] = {"log_level": "debug", "log_format": "json", "policy": "lpm", "kv_dtype": "int8"}


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
    return 7.5 if "float" in kind else "else"


def as_flags(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag]
    return [part for item in (value if isinstance(value, list) else [value]) for part in (flag, str(item))]


def printed(*arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["serve", "--print-config", *arguments], env=env, prog_name="octavo")
    assert result.exit_code == 0, result.output
    loaded: dict[str, Any] = yaml.safe_load(result.stdout)
    return loaded


def test_every_setting_can_be_a_flag_a_variable_or_a_line_of_the_file(tmp_path: Path) -> None:
    for name, setting, _, default in flag_options():
        value = other_value(name, default)
        assert value != default
        shown = ["<hidden>"] * 2 if setting.secret else value
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


def test_the_file_can_be_named_by_a_variable_and_print_config_writes_such_a_file(tmp_path: Path) -> None:
    config = ServerConfig(port=1234, served_model_name=["a", "b"], queue_timeout=3.5, uds="/x")
    file = tmp_path / "octavo.yaml"
    file.write_text(show_config(config))
    assert load_config(environment={"OCTAVO_CONFIG": str(file)}) == config


def test_keys_are_never_printed() -> None:
    assert "s3cret" not in show_config(ServerConfig(api_key=["s3cret"]))


@pytest.mark.parametrize(
    ("arguments", "variables", "names"),
    [
        ({"port": 70_000}, {}, "--port=70000"),
        ({}, {"OCTAVO_PORT": "http"}, "OCTAVO_PORT='http'"),
        ({}, {"MODEL_ID": "smollm2", "PORT": "-1"}, "PORT='-1'"),
        ({"policy": "random"}, {}, "one of fcfs, priority, lpm"),
        ({"queue_timeout": float("nan")}, {}, "--queue-timeout"),
        ({}, {"OCTAVO_CONFIG": "/no/such/file"}, "/no/such/file"),
        ({"api_key": ["with blank"]}, {}, "without blanks"),
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


def test_a_refused_key_is_not_shown_in_the_error() -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"api_key": 5})
    assert "5" not in str(error.value)


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
