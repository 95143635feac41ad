"""The command line: what it prints where, and the exit code, without decoding anything."""

import io
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from pipespec.cli import serve as serve_command
from pipespec.cli.generate import print_statistics
from pipespec.cli.main import main
from pipespec.config import choices
from pipespec.console.arguments import SETTINGS

PIPESPEC = [sys.executable, "-m", "pipespec"]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The sentence with which a command line is refused."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pipespec: ")
    assert err.count("\n") == 1
    return err


def test_options_of_other_tools_are_named_by_settings_that_exist():
    assert {*SETTINGS.values()} <= {each.name for each in choices.settings()}


@pytest.mark.parametrize("command", ["generate", "bench", "up", "serve"])
def test_help_lists_every_setting_with_its_default(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    out = capsys.readouterr().out
    for setting in choices.settings():
        assert f"{setting.name}={setting.default}" in out
        assert setting.note in out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("pipespec ")


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "No command"),
        (["generat"], "'generate', 'bench', 'plan', 'doctor', 'cache', 'up'"),
        (["generate"], "Pass the prompt in one way"),
        (["generate", "--prompt", "a", "-"], "Pass the prompt in one way"),
        (["generate", "--prompt"], "expected one argument"),
        (["generate", "--prompt", ""], "The prompt is empty"),
        (["generate", "--prompt", "\udcff"], "not UTF-8"),
        (["generate", "--prompt-file", "/no/such/file"], "No such file"),
        (["generate", "--prompt-file", "/"], "Is a directory"),
        (["generate", "--prompt", "a", "--jsn"], "did you mean --json?"),
        (["generate", "policy.width=0", "--json", "--prompt", "a", "--chat"], "policy.width is 0"),
        (
            ["generate", "--prompt", "a", "--draft", "/no", "-m", "/no/such"],
            "no model /no/such",
        ),
        (["serve", "nowhere/"], "no model nowhere"),
        (["up", "nowhere"], "'nowhere' is not a setting, as name=value, nor a model's folder"),
        (["bench", "/x", "/y"], "Targets are /x and /y; name the draft by --draft"),
        (["up", "--modle", "/x"], "did you mean --model?"),
        (["serve", "-m", "/x", "-md", "/y"], "'-md' does not exist; set model.draft=VALUE"),
        (
            ["serve", "--max-model-len", "512"],
            "'--max-model-len' does not exist; set model.context",
        ),
        (["bench", "--num-prompts", "few"], "invalid int value: 'few'"),
        (["bench", "--request-rate", "1e30"], "1000000000, or inf"),
        (["bench", "--dataset", "/no/such/file"], "No such file"),
        (["bench", "--output", "/no/such/folder/file"], "the folder of that file is missing"),
        (["bench", "--output", "/"], "must name a file"),
        (["bench", "policy.width"], "is not a setting"),
        (["up", "--name", ""], "The name of a cluster is ''"),
        (["up", "--name", "a/b"], "The name of a cluster is 'a/b'"),
        (["up", "trace=t.json"], "`pipespec up` writes no trace"),
        (["up", "policy.widht=3"], "did you mean policy.width?"),
        (["up", "--detatch"], "did you mean --detach?"),
        (["down", "nobody"], "No cluster named 'nobody' is up"),
        (["down", "lab", "policy=level"], "takes no settings, but got 'policy=level'"),
        (["status", "nobody"], "No cluster named 'nobody' is up"),
        (["bench", "--on", "nobody"], "No cluster named 'nobody' is up"),
        (["serve", "trace=t.json"], "`pipespec serve` writes no trace"),
        (["serve", "--on", "nobody"], "No cluster named 'nobody' is up"),
        (["serve", "--on", "lab", "policy=level"], "takes no settings, but got 'policy=level'"),
        (["serve", "--on", "lab", "--name", "b"], "takes no settings, but got '--name'"),
        (["serve", "--port", "70000"], "--port is 70000, but must be a whole number from 0"),
        (["serve", "--limit", "shutdown_timeout=nan"], "shutdown_timeout is nan"),
        (["serve", "--limit", "max_body_bytes=a"], "max_body_bytes=a is no number"),
        (["serve", "--limit", "patiance=1"], "did you mean patience?"),
        (["serve", "--served-model-name", ""], "--served-model-name is empty"),
        (["serve", "--api-key", "two words "], "An API key is empty"),
        (["serve", "--on", "nobody", "--api-key", ""], "An API key is empty"),
        (["doctor", "/no/such/hosts.yaml"], "No such file"),
        (["doctor", "model.tagret=a"], "did you mean model.target?"),
        (["doctor", "hosts.yaml", "--jsn"], "did you mean --json?"),
        (["doctor", "policy=level"], "for the hosts of a hosts file alone"),
        (["doctor", "--gpu", "cpu", "policy=level"], "takes no settings"),
        (["plan", "decode.stop=x"], "takes no setting 'decode.stop=x'"),
        (["plan", "stage_ms=8:1,1:2"], "rising numbers from 1"),
        (["plan", "spread=1"], "spread of the confidence is 1.0"),
        (["plan", "policy=levle"], "'levle' is not known"),
        (["plan", "--tokens", "99999999999"], "tokens is 99999999999"),
        (["plan", "stages=1000000000"], "stages is 1000000000"),
        (["plan", "policy.width=99999999"], "policy.width is 99999999"),
        (["plan", "curve=1:0.5,999999999:0.9"], "is 999999999"),
        (["plan", "policy.width=a"], "must be a number"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(argv, part, capsys):
    assert part in refused(capsys, *argv)


@pytest.mark.parametrize("more", [[], ["--on", "nobody"], ["--api-key", "a"]])
@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_api_key_in_the_environment_is_refused(value, more, monkeypatch, capsys):
    monkeypatch.setenv("PIPESPEC_API_KEY", value)
    told = refused(capsys, "serve", *more)
    assert "The variable PIPESPEC_API_KEY is empty; set it to a key, or unset it" in told


def test_a_prompt_file_that_is_not_text(tmp_path, capsys):
    file = tmp_path / "prompt"
    file.write_bytes(b"ab\xff")
    assert "it is not UTF-8 text at byte 2" in refused(
        capsys, "generate", "--prompt-file", str(file)
    )
    file.write_bytes(b"")
    assert "prompt is empty" in refused(capsys, "generate", "--prompt-file", str(file))


@pytest.mark.parametrize("argv", [["-"], ["--prompt-file", "-"]])
def test_the_prompt_can_come_from_standard_input(argv, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert "Standard input cannot be read: it is not UTF-8" in refused(capsys, "generate", *argv)


def test_user_without_a_home_folder_gets_a_sentence(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "")
    assert "no home folder: set HOME" in refused(capsys, "status")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # nobody has this number
    assert "no home folder: set HOME" in refused(capsys, "status")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["status"]) == 0


@pytest.mark.slow
def test_doctor_reports_what_the_machine_can_run(capsys):
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert findings["ok"] is True
    assert findings["problems"] == []
    assert findings["packages"]["torch"]
    assert findings["devices"][0]["name"] == "cpu"
    assert findings["devices"][0]["memory_gib"] >= findings["devices"][0]["free_gib"] > 0
    for backend in ("sdpa", "static"):
        assert findings["attention"][backend] == {"usable": True, "why_not": None}
    assert findings["attention"]["triton"]["usable"] == (len(findings["devices"]) > 1)
    assert findings["transport"]["gloo"]["usable"] is True
    assert findings["redis"]["version"][0].isdigit()


def test_doctor_prints_a_table(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("torch", "sdpa", "flashinfer", "gloo", "Redis", "cpu"))


@pytest.mark.parametrize(
    ("flag", "label"), [("lossy", "LOSSY"), ("emulated", "EMULATED"), ("synthetic", "SYNTHETIC")]
)
def test_what_is_not_the_plain_truth_is_labelled(flag, label, capsys):
    from pipespec.client.answers import Result

    for stated in (False, True):
        stats = {"lossy": False, "emulated": False, "synthetic": False, flag: stated}
        for full in (False, True):
            found = Result("a", [1], None, 1, 1, "length", {"tokens_per_step": None, **stats})
            print_statistics(found, full=full)
            assert (label in capsys.readouterr().err) is stated


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error_and_a_full_disk_is_one_sentence():
    full = "pipespec: Standard output cannot be written: No space left on device.\n"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as left, open("/dev/full", "w") as disk:
        table = ["plan", "policy=root", "--tokens", "5"]
        for out, argv, code, said in (
            (left, ["status", "--json"], 128 + signal.SIGPIPE, ""),
            (left, table, 128 + signal.SIGPIPE, ""),
            (disk, ["status", "--json"], 1, full),
        ):
            answer = subprocess.run(
                [*PIPESPEC, *argv], stdout=out, stderr=subprocess.PIPE, text=True
            )
            assert (answer.returncode, answer.stderr) == (code, said)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_without_a_traceback(number, tmp_path):
    prompt = tmp_path / "prompt"
    os.mkfifo(prompt)
    # Under nohup it is ignored, and so it would be there.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        process = subprocess.Popen(
            [*PIPESPEC, "generate", "--prompt-file", str(prompt)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(number, before)
    with process, prompt.open("w"):  # opens as soon as the command has opened it
        # Python would go on to read, and wait, after a signal that came just before.
        while psutil.Process(process.pid).status() != psutil.STATUS_SLEEPING:
            os.sched_yield()
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (128 + number, "", "")


IN_A_CALLBACK = """
import signal, sys
from pipespec.cli import main
from pipespec.extras.commands import doctor

class Callback:
    def __del__(self):
        signal.raise_signal(int(sys.argv[1]))

def run(arguments, rest):
    Callback()
    print("it was not raised here", flush=True)
    while True:
        pass

doctor.run = run
sys.exit(main.main(["doctor"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_meets_a_callback_is_not_lost(number):
    """Python can raise nothing there, and every import runs some."""
    answer = subprocess.run(
        [sys.executable, "-c", IN_A_CALLBACK, str(int(number))],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (answer.returncode, answer.stdout, answer.stderr) == (
        128 + number,
        "it was not raised here\n",
        "",
    )


def test_without_its_packages_serve_names_the_extra(capsys, monkeypatch):
    monkeypatch.setattr(serve_command, "NEEDS", ("json", "no_such_package"))
    assert "needs no_such_package, which is not installed; run pip install 'pipespec[serve]'" in (
        refused(capsys, "serve", "--on", "lab")
    )
