"""The code blocks of Markdown pages, and a folder in which those of one page are run in order.

Fenced blocks have one of `LANGUAGES`. The lines before a block may say how it is run:

    <!-- not run: REASON -->    it is skipped
    <!-- slow -->               it is run by `make test-all` only
    <!-- background -->         its only command goes on until the page's end, and has answered once
                                it prints a line
    <!-- exit: N -->            its last command ends with this exit code
    <!-- file: NAME -->         the block is written into this file of the folder

In `console` blocks lines after `$ ` are commands, which go on where a quotation, a here-document or
a backslash does. Other lines are what the command prints: `...` stands for anything, numbers and
line breaks are not compared. Port 8000 is replaced by a free one.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from markdown_it import MarkdownIt

from pipespec.config.hosts import load_hosts
from pipespec.controller.tls_proxy import free_port
from tests.helpers.sandbox import Sandbox
from tests.helpers.waiting import until

ROOT = Path(__file__).parents[2]
RUN = ("console", "bash", "python")
PARSED = ("yaml", "json")
LANGUAGES = (*RUN, *PARSED, "text", "nginx")
MARK = re.compile(r"^<!-- (not run|slow|background|exit|file)(?:: (.*?))? -->$")
PROMPT = "$ "
PORT = "8000"  # of `pipespec serve`, unless it is given
PATIENCE_S = 300
# What a page may name in the folder that it is run in: a checkout, without what is generated.
CHECKOUT = ("benchmarks", "conf", "demo", "docs", "examples", "launch", "lua", "tests", "tools")


@dataclass(frozen=True)
class Block:
    """A code block; `line` is that of its opening fence, `page` relative to the repository."""

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def not_run(self) -> str | None:
        """Why it is not run."""
        return self.marks.get("not run")

    @property
    def slow(self) -> bool:
        return "slow" in self.marks

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a console block, and what it is documented to print."""

    text: str
    output: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    marks: dict[str, str] = {}
    text = page.read_text(encoding="utf-8")
    lines = text.splitlines()
    for token in MarkdownIt().parse(text):
        first, end = token.map or (0, 0)
        place = f"{page}:{first + 1}"
        if token.type == "html_block":
            for line in token.content.splitlines():
                if mark := MARK.match(line.strip()):
                    marks[mark[1]] = mark[2] or ""
        elif token.type == "fence":
            assert lines[end - 1].strip() == "```", f"{place}: the block has no end"
            found.append(Block(_name(page), first + 1, token.info, token.content, marks))
            marks = {}
        elif token.type == "inline":
            assert not marks, f"{place}: {marks} belongs to no block"
    return found


def indented_commands(page: Path) -> list[str]:
    """Commands in blocks without fences, which no test would see."""
    command = re.compile(r"(\$ |pipespec |python |make |pip |\.venv/bin/)")
    return [
        f"{_name(page)}:{token.map[0] + 1 + number}"
        for token in MarkdownIt().parse(page.read_text(encoding="utf-8"))
        if token.type == "code_block" and token.map
        for number, line in enumerate(token.content.splitlines())
        if command.match(line)
    ]


def commands(text: str) -> list[Command]:
    """The commands of a console block."""
    found: list[Command] = []
    lines = text.splitlines()
    assert not lines or lines[0].startswith(PROMPT), "a console block begins with `$ `"
    while lines:
        command = lines.pop(0).removeprefix(PROMPT)
        while lines and not _complete(command):
            command += "\n" + lines.pop(0).removeprefix("> ")
        output = []
        while lines and not lines[0].startswith(PROMPT):
            output.append(lines.pop(0))
        found.append(Command(command, "\n".join(output)))
    return found


def _complete(command: str) -> bool:
    if command.endswith("\\"):
        return False
    if here := re.search(r"<<-?\s*['\"]?(\w+)['\"]?", command):
        return command.splitlines()[-1].strip() == here[1]
    try:
        shlex.split(command, comments=True)
    except ValueError:  # within a quotation
        return False
    return True


def printed_as_documented(documented: str, printed: str) -> bool:
    """Whether a command printed what a page says, which may leave parts out by `...`."""
    rest = _loosely(printed)
    for part in filter(None, map(_loosely, re.split(r"\.\.\.|…", documented))):
        _, found, rest = rest.partition(part)
        if not found:
            return False
    return True


def _loosely(text: str) -> str:
    """A text without numbers, line breaks, or the lengths of drawn lines."""
    text = re.sub(r"([─━═┄-])\1+", r"\1", text)
    return " ".join(re.sub(r"[.\d][\d.,]*", "#", text).split())


def parse(block: Block, folder: Path) -> None:
    """Read a block that is data; raises if it cannot be read."""
    if block.language == "json":
        text = block.text.strip()
        json.loads(text if text.startswith(("{", "[")) else f"{{{text}}}")
    elif block.language == "yaml":
        found = yaml.safe_load(block.text)
        if isinstance(found, dict) and "hosts" in found:
            file = folder / f"hosts-{block.line}.yaml"
            file.write_text(block.text)
            load_hosts(str(file))


class Page:
    """A folder that looks like a checkout, in which the blocks of a page are run in order.

    Environment variables and the working folder go on from command to command.
    """

    def __init__(self, sandbox: Sandbox):
        self._sandbox = sandbox
        self._folder = sandbox.folder / "checkout"
        self._state = sandbox.folder / "shell"
        self._port = free_port(["127.0.0.1"])
        self._count = 0
        ignored = shutil.ignore_patterns("__pycache__", "images", "*.svg", "*.png")
        for name in CHECKOUT:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self._folder / name, ignore=ignored)
        for file in ROOT.iterdir():
            if file.is_file() and not file.name.startswith("."):
                shutil.copy(file, self._folder)
        self._state.mkdir()
        # Without an option curl takes a reply like 400 for a success.
        (self._state / ".curlrc").write_text("fail-with-body\n")

    def run(self, block: Block) -> None:
        """Run a block; raises AssertionError if a command fails, or prints something else."""
        if name := block.marks.get("file"):
            (self._folder / name).write_text(block.text)
        if block.language in PARSED:
            parse(block, self._folder)
        elif block.language == "console":
            self._run_commands(block, commands(block.text))
        elif block.language == "bash":
            self._run_commands(block, [Command(block.text, "")])
        elif block.language == "python":
            self._count += 1
            file = self._state / f"block{self._count}.py"
            file.write_text(self._with_port(block.text))
            self._run_commands(block, [Command(f"python {file}", "")])

    def _run_commands(self, block: Block, found: list[Command]) -> None:
        for number, command in enumerate(found, 1):
            if "background" in block.marks:
                assert len(found) == 1, f"{block.place}: a background block has one command"
                self._start(block, command)
                continue
            expected = int(block.marks.get("exit", "0")) if number == len(found) else 0
            code, printed = self._execute(command)
            said = f"{block.place}: {command.text}\n{printed}"
            assert code == expected, f"{said}\nexit code {code}, not {expected}"
            assert printed_as_documented(command.output, printed), f"{said}\nnot {command.output}"

    def _start_shell(self, command: str, out: Path, err: Path | None) -> subprocess.Popen[bytes]:
        # Into files: what a command leaves running would keep a pipe open.
        with out.open("w") as file, (err or Path(os.devnull)).open("w") as errors:
            return subprocess.Popen(
                ["bash", "-c", self._script(command)],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=errors if err else subprocess.STDOUT,
            )

    def _execute(self, command: Command) -> tuple[int, str]:
        output = self._state / "output"
        with self._start_shell(command.text, output, None) as process:
            try:
                code = process.wait(PATIENCE_S)
            finally:
                process.kill()
        return code, output.read_text(errors="replace")

    def _start(self, block: Block, command: Command) -> None:
        self._count += 1
        output = self._state / f"background{self._count}"
        errors = output.with_suffix(".errors")
        process = self._start_shell(command.text, output, errors)
        until(lambda: output.stat().st_size > 0 or process.poll() is not None, PATIENCE_S)
        assert process.poll() is None, f"{block.place}: {command.text}\n{errors.read_text()}"

    def _script(self, command: str) -> str:
        """A command between what restores and what keeps variables and the working folder."""
        variables, folder = self._state / "variables", self._state / "folder"
        return (
            f'[ ! -f {variables} ] || {{ . {variables}; cd "$(cat {folder})"; }}\n'
            f"{self._with_port(command)}\n"
            f"code=$?; export -p > {variables}; pwd > {folder}; exit $code"
        )

    def _with_port(self, text: str) -> str:
        text = re.sub(rf"\b{PORT}\b", str(self._port), text)
        serve = re.compile(r"pipespec serve(?!.*--port)(.*)")
        return serve.sub(rf"pipespec serve --port {self._port}\1", text)

    @property
    def _environment(self) -> dict[str, str]:
        environment = self._sandbox.environment
        programs = Path(sys.executable).parent
        path = f"{programs}:{environment['PATH']}"
        return environment | {"PATH": path, "COLUMNS": "100", "CURL_HOME": str(self._state)}


def pages() -> list[Path]:
    """What is documentation: what the repository says of itself."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
