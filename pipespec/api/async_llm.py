"""`AsyncLLM`: a cluster of this process, or one that is up, for an event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, Self

from anyio import CancelScope

from pipespec.api.outputs import PendingRequest, RequestOutput, output_of
from pipespec.api.own_cluster import ClusterThread, check_policy, overrides_of
from pipespec.api.prompts import (
    Conversation,
    Message,
    Prompt,
    Tokenized,
    tokenize_chats,
    tokenize_prompts,
)
from pipespec.api.sampling_params import Sampling, SamplingParams
from pipespec.client import registry
from pipespec.client.answers import Answer, fresh_seed
from pipespec.client.async_client import AsyncAnswer, AsyncClient, attach
from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import RunningCluster
from pipespec.client.request_settings import RequestSettings
from pipespec.client.sync_client import PATIENCE_S
from pipespec.cluster.decide import decide
from pipespec.cluster.deployment.deployment import Deployment
from pipespec.config.compose import compose
from pipespec.core import Request
from pipespec.core import SamplingParams as RequestParams
from pipespec.errors import ConfigError, PipespecError, RankFailed
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.limits import check_whole
from pipespec.sampling.params import check_vocabulary
from pipespec.text import FinalText
from pipespec.timing.clock import monotonic_ns


class AsyncLLM:
    """Generates texts with a model on a cluster of this process. For the tasks of one event loop.

        async with AsyncLLM("org/model", draft="org/draft", stages=4) as llm:
            outputs = await llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))
            async for piece in llm.stream("Once upon a time"):
                print(piece, end="")

    Any number of calls may run at once; the cluster decodes `scheduler.max_num_seqs` requests at
    the same time, the others wait in its queue. A call that is cancelled cancels its requests.

    Args:
        model: a folder, a GGUF file or a hub id; None: the demo pair.
        draft: the draft model; None: that of the demo pair, and for a model of your own none
            (`proposer=suffix`), unless `settings` say otherwise.
        stages: how many ranks the model's layers are cut over, on this machine; None: one for each
            GPU, and without GPUs one.
        hosts: a hosts file, for several machines; not together with `stages`.
        settings: further settings by name, as {"policy": "level", "policy.width": 64}.
        policy: a speculation policy of your own instead of `settings["policy"]`; its class is in a
            module that the ranks can import, in the working folder or on PYTHONPATH.

    Raises ConfigError for settings that are wrong; what fails later is raised by `start`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        draft: str | os.PathLike[str] | None = None,
        stages: int | None = None,
        hosts: str | os.PathLike[str] | None = None,
        settings: Mapping[str, Any] | None = None,
        policy: SpeculationPolicy | None = None,
    ):
        self._overrides = overrides_of(model, draft, stages, hosts, settings or {})
        check_policy(policy, settings or {})
        self._policy = policy
        self._running: RunningCluster | None = None  # one that another process runs
        self._own: ClusterThread | None = None
        self._serving: asyncio.Task[None] | None = None
        self._ending: asyncio.Event
        self._client: AsyncClient
        self._defaults: RequestSettings

    @classmethod
    def connect(cls, name: str | None = None) -> AsyncLLM:
        """The cluster that `pipespec up` has started under this name; None: the only one. Raises
        ConfigError if there is none, or it is not ready."""
        llm = cls()
        llm._running = registry.find(name)
        return llm

    async def start(self) -> None:
        """Start the cluster, or connect to it; `async with` does it too.

        Raises:
            ConfigError, Unreachable, HostFailed: before any rank starts.
            RankFailed: a rank failed while it loaded.
        """
        if self._serving is not None:
            raise PipespecError("The LLM was started before; make a new one.")
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ending = asyncio.Event()
        self._serving = asyncio.create_task(self._serve(started))
        try:
            await started
        except BaseException:
            with CancelScope(shield=True):  # anyio cancels a waiting task again and again
                await self.close()
            raise

    async def close(self) -> None:
        """Cancel what is under way and end the cluster, if it is of this process; harmless when
        called again."""
        if self._serving is None:
            return
        self._ending.set()
        await asyncio.wait([self._serving])

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- texts --------------------------------------------------------------------------------

    async def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Sampling = None
    ) -> list[RequestOutput]:
        """The answers to one prompt or several, in their order.

        A prompt is a text or a list of token ids. `sampling_params` are of all prompts, or a list
        with one for each; without them the cluster's own settings `decode` and `sampling` hold.

        Raises:
            PromptError: a prompt is empty or too long; ConfigError: a parameter is out of range.
            RankFailed, Unreachable: the cluster has ended, or its Redis.
        """
        return await self._answer(tokenize_prompts(self.model_info, prompts), sampling_params)

    async def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Sampling = None,
    ) -> list[RequestOutput]:
        """The next message of one conversation or of several, by the model's chat template. A
        conversation is a list of {"role": ..., "content": ...}. Raises as `generate`."""
        return await self._answer(tokenize_chats(self.model_info, messages), sampling_params)

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[str]:
        """The answer to one prompt, piece by piece; joined they are its text. Closing the iterator
        cancels the request. Raises as `generate`."""
        async for piece in self._pieces(tokenize_prompts(self.model_info, prompt), sampling_params):
            yield piece

    async def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[str]:
        """The next message of a conversation, piece by piece."""
        async for piece in self._pieces(tokenize_chats(self.model_info, messages), sampling_params):
            yield piece

    @property
    def model_info(self) -> ModelInfo:
        """The model: its tokenizer, context and end tokens. Raises PipespecError if the LLM is not
        started or closed, RankFailed if its cluster has ended."""
        if self._serving is None or self._serving.done() or self._ending.is_set():
            raise PipespecError("The LLM is closed, or was not started; make a new one.")
        if self._own is not None:
            self._own.check()
        return self._client.served

    # --- the cluster --------------------------------------------------------------------------

    async def _serve(self, started: asyncio.Future[None]) -> None:
        try:
            async with (
                self._cluster() as running,
                attach(running, PATIENCE_S, follows_restarts=False, own=self._own) as client,
            ):
                await client.log.look()  # whether its Redis answers
                self._client = client
                self._defaults = RequestSettings.on(running, ())
                if not started.done():
                    started.set_result(None)
                await self._ending.wait()
        except asyncio.CancelledError:  # the event loop ends
            started.cancel()
            raise
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            elif not started.cancelled():  # else the caller has given the start up
                raise

    @asynccontextmanager
    async def _cluster(self) -> AsyncIterator[RunningCluster]:
        if self._running is not None:
            yield self._running
            return
        deployment = await asyncio.to_thread(self._deployment)
        cluster = self._own = ClusterThread(deployment, self._overrides)
        ready: asyncio.Future[Any] = asyncio.wrap_future(cluster.ready)
        # A caller that gives the start up does not read why it failed.
        ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        ending: asyncio.Future[Any] = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait({ready, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise RankFailed("The LLM was closed before its cluster was ready.")
            yield ready.result()
        finally:
            ending.cancel()
            cluster.stop()
            await asyncio.shield(asyncio.wrap_future(cluster.ended))

    def _deployment(self) -> Deployment:
        config = compose(self._overrides)
        return decide(config if self._policy is None else replace(config, policy=self._policy))

    # --- requests -----------------------------------------------------------------------------

    async def _answer(
        self, asked: Sequence[Tokenized], sampling_params: Sampling
    ) -> list[RequestOutput]:
        chosen = for_each(sampling_params, len(asked))
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = self._params(sampling_params, len(asked))  # a grammar is compiled once
        else:
            params = [self._params(each, 1)[0] for each in chosen]
        async with self._client.follow() as followed:
            requests = [
                await self._submit(followed, *each)
                for each in zip(asked, params, chosen, strict=True)
            ]
            by_number = {one.number: one for ones in requests for one in ones}
            while len(followed):
                for number, event in await followed.next():
                    by_number[number].receive(event)
            outputs = []
            for prompt, ones in zip(asked, requests, strict=True):
                finished = [(one, await self._client.reports(one.number)) for one in ones]
                outputs.append(output_of(self.model_info, prompt, finished))
            return outputs

    async def _pieces(
        self, asked: Sequence[Tokenized], sampling_params: SamplingParams | None
    ) -> AsyncGenerator[str]:
        (prompt,) = asked
        (chosen,) = for_each(sampling_params, 1)
        (params,) = self._params(chosen, 1)
        if len(params) > 1:
            raise PipespecError(f"A stream has one answer, but n is {len(params)}; leave it out.")
        async with self._client.follow() as followed:
            (request,) = await self._submit(followed, prompt, params, chosen)
            while len(followed):
                for _, event in await followed.next():
                    if piece := request.receive(event):
                        yield piece

    def _params(self, chosen: SamplingParams | None, num_prompts: int) -> list[list[RequestParams]]:
        """How the tokens of each answer to each prompt are drawn. Raises ConfigError."""
        seeds = [fresh_seed() for _ in range(num_prompts)]
        if chosen is None:
            return [[self._defaults.params(fresh_seed=seed)] for seed in seeds]
        params, size = chosen.answers(seeds), self.model_info.vocab_size
        for one in chain(*params[:1]):
            check_vocabulary(one, size, section="")
        for token in chosen.stop_token_ids:
            check_whole("stop_token_ids", token, 0, size - 1)
        return params

    async def _submit(
        self,
        followed: AsyncAnswer,
        prompt: Tokenized,
        params: Sequence[RequestParams],
        chosen: SamplingParams | None,
    ) -> list[PendingRequest]:
        """Submit all answers to a prompt together: the log stores once what they have in common."""
        served, decode, began = self.model_info, self._defaults.decode, monotonic_ns()
        fields, stop = self._defaults.fields(served), decode.stop
        if chosen is not None:
            eos, stop = () if chosen.ignore_eos else served.eos, [*chosen.stop]
            fields = {
                "max_new_tokens": chosen.max_tokens or decode.max_new_tokens,
                "stop": stop,
                "eos": (*eos, *(token for token in chosen.stop_token_ids if token not in eos)),
                "priority": chosen.priority,
            }
        numbers = await followed.submit_all(
            [Request(0, tuple(prompt.token_ids), sampling=one, **fields) for one in params]
        )
        texts = (FinalText(served.tokenizer, prompt.token_ids, stop, p.min_tokens) for p in params)
        return [
            PendingRequest(one, number, began, Answer(text))
            for one, number, text in zip(params, numbers, texts, strict=True)
        ]


def for_each(given: Sampling, num_prompts: int) -> list[SamplingParams | None]:
    """Those of each prompt. Raises ConfigError."""
    if given is None or isinstance(given, SamplingParams):
        return [given] * num_prompts
    chosen: list[Any] = [*given] if isinstance(given, list | tuple) else [given]
    if len(chosen) != num_prompts or not all(isinstance(e, SamplingParams) for e in chosen):
        raise ConfigError(
            f"sampling_params must be one SamplingParams, or a list of {num_prompts}, one for each "
            "prompt."
        )
    return chosen
