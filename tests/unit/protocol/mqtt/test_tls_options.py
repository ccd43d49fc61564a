"""The TLS and password options of both programs."""

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from protocol.cli import access_options, config_option, read_access
from protocol.errors import ConfigError
from protocol.mqtt.tls import BrokerAccess

heard: list[BrokerAccess] = []


@click.command()
@config_option
@access_options
def command(**given: Any) -> None:
    """Take the options as a program does."""
    heard.append(read_access(**given))


def run(*arguments: str | Path, **environment: str) -> Result:
    variables = {f"PROTOFLEET_{name.upper()}": value for name, value in environment.items()}
    return CliRunner(env=variables).invoke(command, [*map(str, arguments)])


def access(*arguments: str | Path, **environment: str) -> BrokerAccess:
    done = run(*arguments, **environment)
    assert done.exit_code == 0, (done.output, done.exception)
    return heard.pop()


def test_authority_or_certificate_implies_tls() -> None:
    assert access() == BrokerAccess()
    assert access("--tls") == BrokerAccess(tls=True)
    assert access("--ca", "ca.crt") == BrokerAccess(tls=True, ca=Path("ca.crt"))
    given = access("--cert", "a.crt", "--key", "a.key")
    assert given == BrokerAccess(tls=True, certificate=Path("a.crt"), key=Path("a.key"))
    assert access(ca="ca.crt", username="shed-1") == BrokerAccess(
        tls=True, ca=Path("ca.crt"), username="shed-1"
    )


def test_password_comes_from_file_or_environment(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("of the file \nanother line\n")
    assert access("--username", "a", password="of the environment").password == "of the environment"
    given = access("--username", "a", "--password-file", file, password="of the environment")
    assert given.password == "of the file "
    assert run("--username", "a", "--password", "secret").exit_code == 2


def test_world_readable_password_file_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "password"
    file.write_text("secret")
    file.chmod(0o600)
    access("--username", "a", "--password-file", file)
    assert caplog.text == ""
    file.chmod(0o644)
    access("--username", "a", "--password-file", file)
    assert f"chmod 600 {file}" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cert", "a.crt"], "--cert and --key require each other"),
        (["--key", "a.key"], "--cert and --key require each other"),
        (["--password-file", "FILE"], "give --username"),
    ],
)
def test_half_of_an_option_pair_is_a_usage_error(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "password").write_text("secret")
    done = run(*(argument.replace("FILE", f"{tmp_path}/password") for argument in arguments))
    assert done.exit_code == 2
    assert said in done.output


def test_unusable_password_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "password"
    for content, said in ((None, "No such file"), (b"", "is empty"), (b"\n", "is empty"), (b"\xff", "UTF-8")):
        if content is not None:
            file.write_bytes(content)
        error = run("--username", "a", "--password-file", file).exception
        assert isinstance(error, ConfigError)
        assert said in str(error)
        assert str(file) in str(error)
