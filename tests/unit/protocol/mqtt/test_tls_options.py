"""The options with which both programs are let in by a broker."""

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
    """Run the command, with nothing in the environment but this."""
    variables = {f"PROTOFLEET_{name.upper()}": value for name, value in environment.items()}
    return CliRunner(env=variables).invoke(command, [*map(str, arguments)])


def access(*arguments: str | Path, **environment: str) -> BrokerAccess:
    """What the command makes of its options."""
    done = run(*arguments, **environment)
    assert done.exit_code == 0, (done.output, done.exception)
    return heard.pop()


def test_a_certificate_means_encryption() -> None:
    """Who names an authority or a certificate need not ask for TLS as well."""
    assert access() == BrokerAccess()
    assert access("--tls") == BrokerAccess(tls=True)
    assert access("--ca", "ca.crt") == BrokerAccess(tls=True, ca=Path("ca.crt"))
    given = access("--cert", "a.crt", "--key", "a.key")
    assert given == BrokerAccess(tls=True, certificate=Path("a.crt"), key=Path("a.key"))
    assert access(ca="ca.crt", username="shed-1") == BrokerAccess(
        tls=True, ca=Path("ca.crt"), username="shed-1"
    )


def test_a_file_gives_them_too(tmp_path: Path) -> None:
    """The settings of `--config` have the same names."""
    (tmp_path / "password").write_text("secret\n")
    (tmp_path / "settings.toml").write_text(
        f'ca = "ca.crt"\ncert = "a.crt"\nkey = "a.key"\nusername = "a"\npassword-file = "{tmp_path}/password"\n'
    )
    given = access("--config", tmp_path / "settings.toml")
    assert given == BrokerAccess(
        tls=True,
        ca=Path("ca.crt"),
        certificate=Path("a.crt"),
        key=Path("a.key"),
        username="a",
        password="secret",
    )


def test_a_password_is_the_first_line_of_a_file_or_in_the_environment(tmp_path: Path) -> None:
    """No option takes the password itself; a file counts before the environment."""
    file = tmp_path / "password"
    file.write_text("of the file \nanother line\n")
    assert access("--username", "a", password="of the environment").password == "of the environment"
    given = access("--username", "a", "--password-file", file, password="of the environment")
    assert given.password == "of the file "
    assert run("--username", "a", "--password", "secret").exit_code == 2


def test_a_password_that_everybody_can_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is a line that names the file, and not what stands in it."""
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
def test_what_does_not_go_together_is_wrong_usage(tmp_path: Path, arguments: list[str], said: str) -> None:
    """Half of a pair ends with 2."""
    (tmp_path / "password").write_text("secret")
    done = run(*(argument.replace("FILE", f"{tmp_path}/password") for argument in arguments))
    assert done.exit_code == 2
    assert said in done.output


def test_a_password_file_that_is_none(tmp_path: Path) -> None:
    """One that is missing, empty or no text is an error that names it."""
    file = tmp_path / "password"
    for content, said in (
        (None, "No such file"),
        (b"", "which is empty"),
        (b"\n", "is empty"),
        (b"\xff", "UTF-8"),
    ):
        if content is not None:
            file.write_bytes(content)
        error = run("--username", "a", "--password-file", file).exception
        assert isinstance(error, ConfigError)
        assert said in str(error)
        assert str(file) in str(error)
