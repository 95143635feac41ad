"""From the fields of a request to token ids, sampling parameters and a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipespec.client.answers import fresh_seed, seeds_from
from pipespec.client.model_info import PromptTooLong
from pipespec.client.registry import RunningCluster
from pipespec.client.request_settings import RequestSettings
from pipespec.core import SamplingParams
from pipespec.engine.grammar_probe import GrammarProbe
from pipespec.errors import ConfigError, PromptError
from pipespec.sampling.params import check_sampling, check_vocabulary
from pipespec.server.api_errors import invalid_field
from pipespec.server.chat_prompt import (
    ToolUse,
    offered_tools,
    render_chat,
    switched_off,
    tool_use_of,
)
from pipespec.server.reasoning import ReasoningUse, reasoning_use
from pipespec.server.request_schema import ChatRequest, CompletionRequest, GenerationRequest
from pipespec.server.response_format import OutputConstraint, output_constraint
from pipespec.text import decode

# The tokens of an answer to /v1/completions without max_tokens, as with OpenAI.
COMPLETION_TOKENS = 16
TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True)
class ParsedRequest:
    """What the cluster computes for one HTTP request: `n` answers to each prompt. Choice i answers
    the prompt i // n with `sampling_params[i]`.

    Attributes:
        echo_texts: the prompts, if `echo` asks for them.
        max_tokens: for each prompt, all 0 if the request wants nothing but the prompts.
        prompt_logprobs: how many of the most probable tokens to report for each token of a prompt.
    """

    prompts: tuple[tuple[int, ...], ...]
    echo_texts: tuple[str, ...]
    n: int
    sampling_params: tuple[SamplingParams, ...]
    max_tokens: tuple[int, ...]
    stop: tuple[str, ...]
    eos: tuple[int, ...]
    priority: int
    prompt_logprobs: int | None
    cache_salt: str = ""
    tool_use: ToolUse | None = None
    reasoning: ReasoningUse | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def prompt_of(self, choice: int) -> tuple[int, ...]:
        return self.prompts[choice // self.n]


class RequestParser:
    """Parses the requests to one cluster. Fields that a request leaves out have OpenAI's defaults,
    but for settings of `sampling` and `decode` with which the cluster was started."""

    def __init__(self, running: RunningCluster, tool_parser: str | None = None):
        self._served = served = running.served
        self._tool_parser = tool_parser
        self._grammars = GrammarProbe(served.tokenizer, served.vocab_size, served.eos)
        self._settings = settings = RequestSettings.on(running, [])
        named = {text.partition("=")[0] for text in running.overrides}
        self._sampling = settings.params(0)
        if not named & {"sampling", "sampling.temperature"}:
            self._sampling = replace(self._sampling, temperature=1.0)
        max_new_tokens = settings.decode.max_new_tokens
        self._default_tokens = max_new_tokens if "decode.max_new_tokens" in named else None

    def parse(self, body: GenerationRequest, *, clamps: bool = False) -> ParsedRequest:
        """Parse a request. With `clamps` a limit of tokens beyond the context is lowered, and
        completions have none by default. Raises ApiError."""
        if isinstance(body, ChatRequest):
            return self._chat(body, clamps)
        assert isinstance(body, CompletionRequest)
        return self._completion(body, clamps)

    def _chat(self, body: ChatRequest, clamps: bool) -> ParsedRequest:
        newer = body.max_completion_tokens
        tools = offered_tools(body)
        text = render_chat(self._served, body, tools)
        prompt = self._prompt(text, "messages", special=False)
        tool_use, constraint = None, None
        if tools:
            tool_use, constraint = tool_use_of(body, tools, self._served, self._tool_parser)
        parsed = self._parse(
            body,
            [prompt],
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            max_tokens=newer or body.max_tokens or self._default_tokens,
            max_tokens_field="max_completion_tokens" if newer else "max_tokens",
            clamps=clamps,
        )
        template = self._served.chat_template(tools=bool(tools)) or ""
        reasoning = reasoning_use(
            template, text, body.messages[-1].continued if body.continue_final_message else ""
        )
        if reasoning is not None and not reasoning.begun and switched_off(self._served, body):
            reasoning = replace(reasoning, hold=0)
        parsed = replace(parsed, tool_use=tool_use, reasoning=reasoning)
        # A required call takes precedence over other constraints.
        return self._with_grammar(parsed, body, constraint)

    def count_tokens(self, body: ChatRequest) -> int:
        text = render_chat(self._served, body, offered_tools(body))
        return len(self._served.tokenizer.encode(text, add_special_tokens=False))

    def _completion(self, body: CompletionRequest, clamps: bool) -> ParsedRequest:
        served, special = self._served, body.add_special_tokens is not False
        answer = 0 if body.max_tokens == 0 else 1  # 0: only the prompt is wanted
        prompts = [
            self._prompt(prompt, "prompt", special=special, answer=answer) for prompt in body.prompt
        ]
        echo_texts = [
            prompt if isinstance(prompt, str) else decode(served.tokenizer, prompt, special=True)
            for prompt in (body.prompt if body.echo else ())
        ]
        max_tokens = body.max_tokens
        if max_tokens is None:
            max_tokens = self._default_tokens or (None if clamps else COMPLETION_TOKENS)
        parsed = self._parse(
            body,
            prompts,
            echo_texts=tuple(echo_texts),
            logprobs=body.logprobs,
            max_tokens=max_tokens,
            clamps=clamps,
        )
        return self._with_grammar(parsed, body, None)

    # --- prompts ------------------------------------------------------------------------------

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        try:
            self._served.check_tokens(tokens, param)
        except PromptError as error:
            raise invalid_field(str(error), param=param) from None

    def _prompt(
        self, prompt: str | Sequence[int], param: str, *, special: bool = True, answer: int = 1
    ) -> Sequence[int]:
        """The token ids of a prompt that leaves room for so many tokens of an answer. Raises
        ApiError."""
        try:
            if isinstance(prompt, str):
                return self._served.tokenize(prompt, param, special=special, answer=answer)
            self._served.check_prompt(prompt, param, answer=answer)
        except PromptError as error:
            code = TOO_LONG if isinstance(error, PromptTooLong) else None
            raise invalid_field(str(error), code, param=param) from None
        return prompt

    # --- parameters ---------------------------------------------------------------------------

    def _parse(
        self,
        body: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        *,
        echo_texts: tuple[str, ...] = (),
        logprobs: int | None,
        max_tokens: int | None,
        max_tokens_field: str = "max_tokens",
        clamps: bool,
    ) -> ParsedRequest:
        served, decode = self._served, self._settings.decode
        if clamps and max_tokens is not None:
            max_tokens = min(max_tokens, served.context - max(map(len, prompts)))
        n = body.n or 1
        ignore_eos = decode.ignore_eos if body.ignore_eos is None else body.ignore_eos
        eos = () if ignore_eos else served.eos
        counts = [logprobs if echo_texts else None, body.prompt_logprobs]
        sampling = replace(
            _sampling_params(body, self._sampling),
            logprobs=logprobs,
            prompt_logprobs=max((count for count in counts if count is not None), default=None),
        )
        stop_ids = body.stop_token_ids or []
        self.check_tokens(stop_ids, "stop_token_ids")
        try:
            check_sampling(sampling, section="")
            check_vocabulary(sampling, served.vocab_size, section="")
        except ConfigError as error:
            raise invalid_field(str(error)) from None
        seed = self._settings.sampling.seed if body.seed is None else body.seed
        return ParsedRequest(
            prompts=tuple(map(tuple, prompts)),
            echo_texts=echo_texts,
            n=n,
            sampling_params=tuple(
                replace(sampling, seed=each)
                for _ in prompts
                for each in seeds_from(fresh_seed() if seed is None else seed, n)
            ),
            max_tokens=tuple(
                self._max_tokens(len(prompt), max_tokens, body.min_tokens or 0, max_tokens_field)
                for prompt in prompts
            ),
            stop=(*(body.stop or decode.stop),),
            eos=(*eos, *(token for token in stop_ids if token not in eos)),
            priority=decode.priority if body.priority is None else body.priority,
            prompt_logprobs=body.prompt_logprobs,
            cache_salt=body.cache_salt or "",
        )

    def _max_tokens(
        self, num_prompt_tokens: int, wanted: int | None, min_tokens: int, field: str
    ) -> int:
        context = self._served.context
        room = context - num_prompt_tokens
        if wanted is not None and wanted > room:
            raise invalid_field(
                f"{field} is {wanted}, but the context holds {context} tokens and the prompt has "
                f"{num_prompt_tokens}; ask for {room} at most.",
                TOO_LONG,
            )
        most = room if wanted is None else wanted
        if min_tokens > most:
            raise invalid_field(f"min_tokens is {min_tokens}, but the answer has {most} at most.")
        return most

    def _with_grammar(
        self, parsed: ParsedRequest, body: GenerationRequest, constraint: OutputConstraint | None
    ) -> ParsedRequest:
        """The same with answers that must match `constraint`; if it is None, that of the body, and
        else that of the cluster. Raises ApiError."""
        if constraint is None:
            constraint = output_constraint(body.response_format, body.structured_outputs)
        if constraint is not None:
            grammar, described = constraint.grammar(self._grammars), constraint.param
        elif grammar := self._settings.grammar:
            described = "the cluster's grammar"
        else:
            return parsed
        if body.ignore_eos:
            raise invalid_field(
                f"ignore_eos is true, but what {described} describes ends by itself; leave one out."
            )
        if parsed.reasoning is not None:
            grammar = parsed.reasoning.grammar(self._served.tokenizer, grammar)
            parsed = replace(parsed, reasoning=replace(parsed.reasoning, hold=0))
        # The grammar decides where the answer ends, also if `decode.ignore_eos` is the default.
        eos = parsed.eos
        if not set(self._served.eos) <= set(eos):
            eos = (*self._served.eos, *eos)
        sampling_params = (replace(each, grammar=grammar) for each in parsed.sampling_params)
        return replace(parsed, sampling_params=tuple(sampling_params), eos=eos)


def _sampling_params(body: GenerationRequest, default: SamplingParams) -> SamplingParams:
    names = ("temperature", "top_p", "min_p", "min_tokens")
    penalties = (f"{kind}_penalty" for kind in ("presence", "frequency", "repetition"))
    values = {name: getattr(body, name) for name in (*names, *penalties)}
    given = {name: value for name, value in values.items() if value is not None}
    if body.top_k is not None:
        given["top_k"] = max(body.top_k, 0)  # -1 means all tokens, as in vLLM
    if body.logit_bias:
        given["logit_bias"] = body.logit_bias
    return replace(default, **given)
