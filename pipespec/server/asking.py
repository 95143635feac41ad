"""From the fields of a request to what the cluster is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipespec.client.answers import fresh_seed
from pipespec.client.registry import RunningCluster
from pipespec.client.served import ServedModel
from pipespec.client.settings import RequestSettings, group
from pipespec.core import Sampling
from pipespec.engine.grammar import Grammars
from pipespec.errors import ConfigError
from pipespec.sampling.spec import MAX_SEED, check_sampling, check_vocabulary
from pipespec.server.errors import refused
from pipespec.server.fields import ChatRequest, CompletionRequest, GenerationRequest
from pipespec.server.prompts import (
    TOO_LONG,
    check_token,
    check_tokens,
    conversation,
    decoded,
    encode,
)
from pipespec.server.structure import Form, checked, form_of
from pipespec.server.tools.use import ToolUse, offered, read_as

# The tokens of an answer to /v1/completions that names no number, as OpenAI says.
COMPLETION_TOKENS = 16
# To one HTTP request.
MAX_ANSWERS = 1024


@dataclass(frozen=True)
class Defaults:
    """What a request means that leaves fields out: OpenAI's defaults, but for settings of `verify`
    and `decode` with which the cluster was started.

    `seed` and `max_tokens` are None unless the cluster's settings name them.
    """

    sampling: Sampling
    seed: int | None
    max_tokens: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    priority: int

    @classmethod
    def of(cls, running: RunningCluster) -> Defaults:
        """Those of a cluster."""
        settings = RequestSettings.on(running, [])
        names = {text.partition("=")[0] for text in running.overrides}
        verified = any(group(text) == "verify" for text in running.overrides)
        decode = settings.decode
        return cls(
            settings.sampling(0)
            if verified
            else Sampling(temperature=1.0, grammar=settings.grammar),
            getattr(settings.verify, "seed", None),
            decode.max_new_tokens if "decode.max_new_tokens" in names else None,
            tuple(decode.stop),
            decode.ignore_eos,
            decode.priority,
        )


@dataclass(frozen=True)
class Ask:
    """What the cluster is asked for one HTTP request: `n` answers to each prompt.

    `prompts` are token ids, `texts` the prompts as text if `echo` asks for them. `max_tokens` is
    a number for each prompt, all 0 if nothing but the prompts is wanted. `prompt_logprobs` says
    how many most probable tokens are told of at each place of a prompt beside itself. Of all
    choices i has the prompt i // n and `samplings[i]`. `tools` says how calls of tools are read
    out of the answers, if any may be made.
    """

    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    n: int
    samplings: tuple[Sampling, ...]
    max_tokens: tuple[int, ...]
    stop: tuple[str, ...]
    eos: tuple[int, ...]
    priority: int
    prompt_logprobs: int | None
    tools: ToolUse | None = None

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(map(len, self.prompts))

    def prompt_of(self, choice: int) -> tuple[int, ...]:
        """The prompt that a choice answers."""
        return self.prompts[choice // self.n]


def check_supported(body: GenerationRequest) -> None:
    """Raise ApiError for a field that would change the text, and that nobody here honours, and for
    what would be without effect."""
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "stream_options is given, but stream is not true.")
    if body.prompt_logprobs is not None and body.stream:
        raise refused(
            "prompt_logprobs",
            f"prompt_logprobs is {body.prompt_logprobs}, but a stream does not tell of its prompt; "
            "leave it or stream out.",
        )
    found = body.unsupported
    if found:
        name, why = found
        raise refused(name, f"{name} {why}; leave it out.", "unsupported_field")


def num_choices(body: GenerationRequest) -> int:
    """How many answers a request wants. Raises ApiError."""
    n = body.n or 1
    prompts = len(body.prompt) if isinstance(body, CompletionRequest) else 1
    if isinstance(body, CompletionRequest) and (body.best_of or n) > n:
        raise refused(
            "best_of",
            f"best_of is {body.best_of}, but may not be above n={n}: all answers are given.",
        )
    if n * prompts > MAX_ANSWERS:
        raise refused(
            "n",
            f"n={n} answers to {prompts} prompts are asked for, but may be {MAX_ANSWERS} in all.",
        )
    return n * prompts


async def chat(
    body: ChatRequest,
    served: ServedModel,
    defaults: Defaults,
    grammars: Grammars,
    tool_parser: str | None = None,
) -> Ask:
    """What a chat asks; `tool_parser` reads its calls, unless the model's template tells which.

    Raises ApiError.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs", "top_logprobs is given, but logprobs is not true.")
    if body.max_completion_tokens and body.max_tokens not in (None, body.max_completion_tokens):
        raise refused(
            "max_tokens",
            f"max_tokens is {body.max_tokens}, but max_completion_tokens is "
            f"{body.max_completion_tokens}; leave one out.",
        )
    field = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    tools = offered(body)
    text = conversation(served, body.messages, tools)
    use = read_as(body, served, tool_parser) if tools else None
    prompt = await encode(served, text, "messages", special=False)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    wanted = body.max_completion_tokens or body.max_tokens or defaults.max_tokens
    ask = _ask(body, served, defaults, [prompt], (), logprobs, wanted, field)
    called = None if use is None or use.form is None else ("tools", use.form)
    return replace(await _formed(ask, body, served, grammars, called), tools=use)


async def completion(
    body: CompletionRequest, served: ServedModel, defaults: Defaults, grammars: Grammars
) -> Ask:
    """What a completion asks. Raises ApiError."""
    if body.max_tokens == 0 and not body.echo:
        raise refused(
            "max_tokens", "max_tokens is 0, but must be 1 at least unless echo asks for the prompt."
        )
    prompts = [
        await encode(served, prompt, "prompt")
        if isinstance(prompt, str)
        else check_tokens(served, prompt, "prompt")
        for prompt in body.prompt
    ]
    texts: tuple[str, ...] = ()
    if body.echo:
        texts = tuple(
            prompt if isinstance(prompt, str) else decoded(served, prompt) for prompt in body.prompt
        )
    wanted = body.max_tokens
    if wanted is None:
        wanted = defaults.max_tokens or COMPLETION_TOKENS
    ask = _ask(body, served, defaults, prompts, texts, body.logprobs, wanted, "max_tokens")
    return await _formed(ask, body, served, grammars)


async def _formed(
    ask: Ask,
    body: GenerationRequest,
    served: ServedModel,
    grammars: Grammars,
    called: tuple[str, Form] | None = None,
) -> Ask:
    """The same with answers held to the form that is asked for: that of calls which are demanded
    before all others. Raises ApiError."""
    found = called or form_of(body.response_format, body.structured_outputs)
    if found is None:
        return ask
    param, form = found
    if body.ignore_eos:
        raise refused(
            "ignore_eos",
            f"ignore_eos is true, but what {param} describes ends by itself; leave one out.",
        )
    made = await checked(grammars, param, form)
    samplings = tuple(replace(sampling, grammar=made) for sampling in ask.samplings)
    # The form says where the answer ends, so whoever ignores ends by default does not here.
    eos = ask.eos if set(served.eos) <= set(ask.eos) else (*served.eos, *ask.eos)
    return replace(ask, samplings=samplings, eos=eos)


def _ask(
    body: GenerationRequest,
    served: ServedModel,
    defaults: Defaults,
    prompts: Sequence[Sequence[int]],
    texts: tuple[str, ...],
    logprobs: int | None,
    wanted: int | None,
    field: str,
) -> Ask:
    n = body.n or 1
    ignore_eos = defaults.ignore_eos if body.ignore_eos is None else body.ignore_eos
    eos = () if ignore_eos else served.eos
    counts = [logprobs if texts else None, body.prompt_logprobs]
    sampling = replace(
        sampling_of(body, defaults.sampling),
        logprobs=logprobs,
        prompt_logprobs=max((count for count in counts if count is not None), default=None),
    )
    stop_ids = body.stop_token_ids or []
    for token in stop_ids:
        check_token(served, token, "stop_token_ids")
    try:
        check_sampling(sampling, section="")
        check_vocabulary(sampling, served.vocab_size, section="")
    except ConfigError as error:
        raise refused(str(error).partition(" ")[0], str(error)) from None
    return Ask(
        prompts=tuple(map(tuple, prompts)),
        texts=texts,
        n=n,
        samplings=len(prompts)
        * _seeded(sampling, defaults.seed if body.seed is None else body.seed, n),
        max_tokens=tuple(
            _room(served, len(prompt), wanted, body.min_tokens or 0, field) for prompt in prompts
        ),
        stop=(*(body.stop or defaults.stop),),
        eos=(*eos, *(token for token in stop_ids if token not in eos)),
        priority=defaults.priority if body.priority is None else body.priority,
        prompt_logprobs=body.prompt_logprobs,
    )


def sampling_of(body: GenerationRequest, default: Sampling) -> Sampling:
    """How tokens are to be drawn, without seed."""
    given = {
        name: value
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "min_tokens",
        )
        if (value := getattr(body, name)) is not None
    }
    if body.top_k is not None:
        given["top_k"] = max(body.top_k, 0)  # -1 is vLLM's way to say all
    if body.logit_bias:
        given["logit_bias"] = body.logit_bias
    return replace(default, **given)


def _seeded(sampling: Sampling, seed: int | None, n: int) -> tuple[Sampling, ...]:
    """Of n answers that differ, the first with the seed that was asked for."""
    first = fresh_seed() if seed is None else seed
    return tuple(replace(sampling, seed=(first + i) % (MAX_SEED + 1)) for i in range(n))


def _room(served: ServedModel, prompt: int, wanted: int | None, least: int, field: str) -> int:
    """How many tokens an answer to a prompt of so many may have. Raises ApiError."""
    room = served.context - prompt
    if wanted is not None and wanted > room:
        raise refused(
            field,
            f"{field} is {wanted}, but the context holds {served.context} tokens and the prompt "
            f"has {prompt}; ask for {room} at most.",
            TOO_LONG,
        )
    most = room if wanted is None else wanted
    if least > most:
        raise refused("min_tokens", f"min_tokens is {least}, but the answer has {most} at most.")
    return most
