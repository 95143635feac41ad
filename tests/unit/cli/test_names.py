"""Names that are too long, or that a terminal should not show, wherever they enter."""

import pytest

from pipespec.cli.main import main
from pipespec.cli.serve import read_keys
from pipespec.config import entries
from pipespec.errors import ConfigError
from pipespec.server.options import ServerOptions
from pipespec.system.exit_codes import LONGEST_MESSAGE, one_line

LONG, CONTROL = "a" * 5000, "x\ny\x1b[31m"
START = ("generate", "--prompt", "x")


@pytest.mark.parametrize("name", [LONG, CONTROL], ids=["long", "control"])
@pytest.mark.parametrize(
    "command",
    [
        *((*START, f"{setting}={{}}") for setting in ("model.target", "model.draft", "policy")),
        *((*START, setting) for setting in ("cluster.devices=[{}]", "controller.namespace={}")),
        *((command, "--on", "{}") for command in ("generate", "bench", "serve")),
        ("up", "--name", "{}"),
        *((command, "{}") for command in ("down", "status", "logs", "invite", "join")),
        ("join", "p", "--name", "{}"),
        ("doctor", "{}.yaml"),
        ("cache", "prune", "{}"),
        ("cache", "fetch", "model.target={}"),
        ("serve", "--host", "{}"),
        ("serve", "--served-model-name", "{}", "--port", "0"),
        ("serve", "--api-key", "{}", "--port", "0"),
    ],
    ids=lambda command: " ".join(command)[:40],
)
def test_wrong_name_is_one_bounded_line(capsys, command, name):
    assert main([word.replace("{}", name) for word in command]) in (1, 2)
    line = capsys.readouterr().err.removesuffix("\n")
    assert line.isprintable() and len(line) <= LONGEST_MESSAGE + 20
    assert "internal error" not in line


def test_message_is_shown_whole_up_to_a_length():
    assert one_line("é: “x” is wrong") == "é: “x” is wrong"
    assert one_line("a\nb\x1b") == "a\\nb\\x1b"
    assert one_line("a" + LONG + "b").startswith("aaa") and one_line(LONG + "b").endswith("ab")


def test_names_of_a_server_and_of_hosts_have_a_length():
    ServerOptions(("m" * 512,), api_keys=("k" * 1024,))
    for names, keys in ((("m" * 513,), ()), (("m",), ("k" * 1025,)), (("m",), ("a\x00b",))):
        with pytest.raises(ConfigError):
            ServerOptions(names, api_keys=keys)
    assert entries.host_name("name", "h" * 64) == "h" * 64
    with pytest.raises(ConfigError, match="name has 65 characters, but may have 64"):
        entries.host_name("name", "h" * 65)


def test_keys_of_a_file_may_have_names(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPESPEC_API_KEY", "last")
    file = tmp_path / "keys"
    file.write_text("alice: sk-1\n\nsk-2\nsk:3=\n")
    assert read_keys([f"@{file}", "first"]) == [
        *(("", "first"), ("alice", "sk-1"), ("", "sk-2"), ("", "sk:3="), ("", "last"))
    ]
