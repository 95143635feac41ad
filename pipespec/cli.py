"""The command line: `pipespec generate`, `pipespec plan`, `pipespec check`.

torch and transformers are imported only by the commands that need them, so that help and
mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from pipespec.errors import ConfigError, PipespecError, PromptError

if TYPE_CHECKING:
    from pipespec.generate import Result
    from pipespec.plan import Machine, Prediction

STDIN = "-"
# What a shell reports for a program that a signal ended.
SIGNALLED = 128


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C asked us to end; everything is cleaned up as for Ctrl-C."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


class OutputClosedError(Exception):
    """Whoever read our standard output has gone away."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    try:
        with _ended_by_signals():
            return _run(sys.argv[1:] if argv is None else list(argv))
    except PipespecError as error:
        print(f"pipespec: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        return SIGNALLED + getattr(interrupt, "number", signal.SIGINT)
    except OutputClosedError:
        # Python writes what is still buffered when it ends; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SIGNALLED + signal.SIGPIPE


def _run(argv: list[str]) -> int:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if arguments.version:
        from pipespec.check import package_version

        _write(f"pipespec {package_version('pipespec') or '(not installed)'}\n")
        return 0
    run: Callable[[argparse.Namespace, list[str]], int] | None = arguments.command
    if run is None:
        raise ConfigError("No command was given; see pipespec --help.")
    return run(arguments, rest)


# --- generate ---------------------------------------------------------------------------------


def generate(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Decode one prompt: the text as it comes, then the statistics."""
    overrides = _overrides(rest, arguments.known_options, stdin_allowed=True)
    prompt = _prompt(arguments.prompt, arguments.prompt_file, from_stdin=STDIN in rest)
    if arguments.chat:
        overrides.append("decode.chat=true")

    from pipespec.compose import compose

    config = compose(overrides)

    from pipespec.generate import generate as decode

    with _progress("loading") as on_loaded:
        on_text = _ignore if arguments.json else _write
        result = decode(config, prompt, on_text, on_loaded)
    if arguments.json:
        _write(json.dumps(asdict(result), allow_nan=False) + "\n")
    else:
        _write("\n")
        _print_statistics(result)
    return 0


def _ignore(_: str) -> None:
    """The text comes with the result."""


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal that goes when all is done; else nothing."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(
        console=console, transient=True, redirect_stdout=False, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=None)

        def show(done: int, of: int) -> None:
            progress.update(task, completed=done, total=of)
            if done == of:
                progress.stop()

        yield show


def _overrides(
    rest: list[str], known_options: Sequence[str], *, stdin_allowed: bool = False
) -> list[str]:
    """What argparse did not know, as overrides; an unknown option is refused."""
    for argument in rest:
        if argument.startswith("-") and not (argument == STDIN and stdin_allowed):
            name = argument.partition("=")[0]
            near = get_close_matches(name, known_options, n=1)
            hint = f"did you mean {near[0]}?" if near else "see --help."
            raise ConfigError(f"The option {name!r} does not exist; {hint}")
    return [argument for argument in rest if argument != STDIN]


def _prompt(text: str | None, file: str | None, *, from_stdin: bool) -> str:
    """The prompt from the one place where it was given. Raises PromptError."""
    if (text is not None) + (file is not None) + from_stdin != 1:
        raise PromptError(
            "Pass the prompt in one way: --prompt TEXT, --prompt-file FILE or - (standard input)."
        )
    if text is None:
        source = "standard input" if file in (None, STDIN) else f"The file {file!r}"
        try:
            data = (
                sys.stdin.buffer.read() if file in (None, STDIN) else Path(file or "").read_bytes()
            )
            text = data.decode("utf-8")
        except OSError as error:
            raise PromptError(f"{source} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise PromptError(f"{source} is not UTF-8 text at byte {error.start}.") from error
    if not text:
        raise PromptError("The prompt is empty; pass at least one character.")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise PromptError("The prompt is not UTF-8 text; save it as UTF-8 and pass --prompt-file.")
    return text


# Statistics that say what they are by more than their name.
LABELS = {
    "ttft_ms": "time to first token (ms)",
    "tbt_ms": "time between tokens (ms)",
    "tokens_per_s": "tokens per second",
    "control_ms_per_step": "controller per step (ms)",
    "stage_busy": "share of time each stage computed",
}


def _print_statistics(result: Result) -> None:
    from rich.console import Console
    from rich.table import Table

    # Times under a pace are those of an emulated machine and never look like measured ones.
    emulated = ", times EMULATED by pace" if result.stats["emulated"] else ""
    # Nor do guesses that were made from the answer look like those of a draft.
    synthetic = ", guesses SYNTHETIC" if result.stats["synthetic"] else ""
    # Nor a text that the target alone might not have said like one that it would.
    lossy = ", text LOSSY by the verifier" if result.stats["lossy"] else ""
    table = Table(
        "",
        "",
        title=f"{result.completion_tokens} tokens after {result.prompt_tokens} of the prompt, "
        f"ended by {result.finish_reason}{emulated}{synthetic}{lossy}",
        show_header=False,
        title_justify="left",
    )
    for name, value in result.stats.items():
        table.add_row(LABELS.get(name, name.replace("_", " ")), _shown(value))
    Console(stderr=True).print(table)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(_shown(item) for item in value)
    if isinstance(value, float):
        return f"{value:.2f}"
    return "-" if value is None else str(value)


# --- plan -------------------------------------------------------------------------------------


def plan(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Predict tokens per step, TBT and speed-up of every way to decode, and advise one."""
    if _overrides(rest, arguments.known_options):
        raise ConfigError(f"`pipespec plan` takes options and no settings, but got {rest[0]!r}.")

    from pipespec import plan as planning
    from pipespec.profile import Profile

    profile = Profile.read(arguments.profile) if arguments.profile else Profile()
    profile = profile.replaced(
        stages=arguments.stages,
        stage_ms=arguments.stage_ms,
        hop_ms=arguments.hop_ms,
        draft_ms=arguments.draft_ms,
        curve=arguments.curve,
        spread=arguments.spread,
    )
    machine, accuracy = profile.machine(), profile.accuracy()
    ways = list(
        planning.choices(arguments.policies, arguments.widths, arguments.children, arguments.rounds)
    )
    predictions = []
    with _progress("simulating") as show:
        for number, way in enumerate(ways):
            show(number, len(ways))
            predictions.append(
                planning.predict(
                    way, machine, accuracy, num_tokens=arguments.tokens, seed=arguments.seed
                )
            )
    advised = planning.recommend(predictions)
    if arguments.json:
        answer = {
            "profile": asdict(profile),
            "plain_tbt_ms": machine.plain_tbt_ms,
            "predictions": [asdict(prediction) for prediction in predictions],
            "recommended": None if advised is None else asdict(advised),
        }
        _write(json.dumps(answer, allow_nan=False) + "\n")
    else:
        with _output():
            _print_plan(machine, predictions, advised)
    return 0


def _print_plan(
    machine: Machine, predictions: Sequence[Prediction], advised: Prediction | None
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD,
        padding=0,
        title=f"{machine.num_stages} stages; plain pipeline parallelism: "
        f"{machine.plain_tbt_ms:.1f} ms between tokens",
        title_justify="left",
    )
    headings = "policy width top-k rounds tok/step ± bound hits rows TBT speed-up"
    for heading in headings.split():
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for p in predictions:
        table.add_row(
            p.policy,
            str(p.width),
            str(p.children),
            str(p.rounds),
            f"{p.tokens_per_step:.2f}",
            f"{p.error:.2f}",
            "" if p.equation is None else f"{p.equation:.2f}",
            f"{p.hit_rate:.2f}",
            f"{p.rows_per_step:.1f}",
            f"{p.tbt_ms:.1f}",
            f"{p.speedup:.2f}",
            style="bold" if p is advised else None,
        )
    console = Console()
    console.print(table)
    if advised is None:
        console.print("Speculation would lose here: use feed=root.")
        return
    console.print(f"Recommended: {' '.join(advised.settings)}", soft_wrap=True)
    losing = [p.policy for p in predictions if p.speedup < 1 and p.policy != "root"]
    if losing:
        console.print(f"{len(losing)} ways with a speed-up below 1 would lose.")


# --- check ------------------------------------------------------------------------------------


def check(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Say what this machine can run; 0 if `generate` can."""
    if _overrides(rest, arguments.known_options):
        raise ConfigError(f"`pipespec check` takes no settings, but got {rest[0]!r}.")

    from pipespec.check import survey, table

    findings = survey()
    if arguments.json:
        _write(json.dumps(findings, indent=2) + "\n")
    else:
        from rich.console import Console

        with _output():
            Console().print(table(findings))
    for problem in findings["problems"]:
        print(f"pipespec: {problem}", file=sys.stderr)
    return 0 if findings["ok"] else 1


# --- parts ------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are ConfigErrors.

    With `show_settings` its help ends with the settings of `conf/`, read only when asked for.
    """

    def __init__(self, *, show_settings: bool = False, **options: Any):
        super().__init__(allow_abbrev=False, **options)
        self._show_settings = show_settings

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"{message[:1].upper()}{message[1:].rstrip('.')}; see {self.prog} --help."
        )

    def format_help(self) -> str:
        text = super().format_help()
        if not self._show_settings:
            return text

        from pipespec.compose import settings

        lines = [f"  {s.name}={s.default}".ljust(34) + f"  {s.note}".rstrip() for s in settings()]
        return "\n".join([text, "settings and their defaults:", *lines, ""])


def _parser() -> Parser:
    parser = Parser(
        prog="pipespec",
        description="Lossless speculative decoding of one large model over a pipeline of stages.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and end")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    command = commands.add_parser(
        "generate",
        show_settings=True,
        help="decode one prompt",
        usage="pipespec generate (--prompt TEXT | --prompt-file FILE | -) [--chat] [--json] "
        "[SETTING=VALUE ...]",
        description="Decode one prompt: the text as it comes, then the statistics.",
    )
    command.add_argument("--prompt", metavar="TEXT", help="the prompt")
    command.add_argument(
        "--prompt-file", metavar="FILE", help="a UTF-8 file, taken as it is; - is standard input"
    )
    command.add_argument(
        "--chat", action="store_true", help="wrap the prompt in the tokenizer's chat template"
    )
    _finish(command, generate)

    command = commands.add_parser(
        "plan",
        help="predict what a cluster will do, and which way to decode suits it",
        description="Predict tokens per step, time between tokens and speed-up over plain pipeline "
        "parallelism for every policy, width and number of draft rounds. Nothing is run; "
        "docs/planning.md says how it is done.",
    )
    command.add_argument("--profile", metavar="FILE", help="JSON with what the options below give")
    command.add_argument("--stages", type=int, metavar="N", help="stages of the pipeline (8)")
    command.add_argument(
        "--stage-ms",
        type=_list(str),
        metavar="ROWS:MS,...",
        help="time of a stage by rows, as in 1:37.8,64:41; without a ROWS: it is the same for all",
    )
    command.add_argument("--hop-ms", type=float, metavar="MS", help="from stage to stage (0)")
    command.add_argument("--draft-ms", type=float, metavar="MS", help="one draft round (0)")
    command.add_argument(
        "--curve",
        type=_list(str),
        metavar="RANK:SHARE,...",
        help="accuracy of the draft: share of tokens among its RANK best (1:0.81,8:0.99)",
    )
    command.add_argument(
        "--spread", type=float, help="how much its confidence varies, from 0 to below 1 (0.5)"
    )
    command.add_argument(
        "--policies", type=_list(str), default=["root", "static_tree", "level", "best_first"]
    )
    command.add_argument("--widths", type=_list(int), default=[8, 16, 32, 64])
    command.add_argument("--children", type=_list(int), default=[8])
    command.add_argument(
        "--rounds", type=_list(_rounds), default=[1, 2, 3, 4], help="numbers or auto"
    )
    command.add_argument(
        "--tokens", type=int, default=500, help="simulated for each prediction (500)"
    )
    command.add_argument("--seed", type=int, default=0)
    _finish(command, plan)

    command = commands.add_parser("check", help="say what this machine can run")
    _finish(command, check)
    return parser


def _list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type: values with commas between them."""

    def parse(text: str) -> list[Any]:
        return [kind(part.strip()) for part in text.split(",")]

    parse.__name__ = f"list of {kind.__name__.lstrip('_')}"
    return parse


def _rounds(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _finish(command: Parser, run: Callable[[argparse.Namespace, list[str]], int]) -> None:
    command.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    known = [name for action in command._actions for name in action.option_strings]
    command.set_defaults(command=run, known_options=known)


def _write(text: str) -> None:
    """Show text at once. Raises OutputClosedError if nobody reads any more."""
    with _output():
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def _output() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise OutputClosedError from error
    except OSError as error:
        raise PipespecError(f"Standard output cannot be written: {error.strerror}.") from error


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that no process is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        raise Terminated(number)

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # and not what nohup or a caller has set
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
