"""The public gRPC service: messages to requests, results to messages. No decisions here."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc.aio import ServicerContext

from pd_engine.contracts import api_pb2 as api
from pd_engine.contracts import api_pb2_grpc
from pd_engine.errors import InvalidArgument
from pd_engine.sampling.params import MAX_CHOICES, MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from pd_engine.sequence import SampledToken, TokenLogprobs
from pd_engine.text.chat import ChatMessage
from pd_engine.text.defaults import SamplingFields
from pd_router.callers import Callers
from pd_router.dispatch import Dispatcher
from pd_router.placement_report import report_message
from pd_router.reply_writer import Reply, ReplyWriter, WritingTurn
from pd_router.request import MAX_MESSAGES, PlacementWish, Preparer, Prompt, RawRequest, Submission, TextPrompt
from pd_router.running import Reader, Result, RunningRequest
from pd_router.status import Status
from pd_router.stream import Chunk
from pd_router.trace_book import TraceBook
from pd_router.trace_message import trace_message
from pd_router.trace_parent import TraceParent

SERVICE_NAME = api.DESCRIPTOR.services_by_name["PdRelay"].full_name
MAX_ABORTS = 10_000
DEFAULT_TRACES = 10
MAX_TRACES = 100
HEALTH_PREFIX = "/grpc.health.v1.Health/"

Context = ServicerContext[Any, Any]


class PdRelayService(api_pb2_grpc.PdRelayServicer):
    def __init__(
        self, dispatcher: Dispatcher, preparer: Preparer, status: Status, callers: Callers, traces: TraceBook
    ) -> None:
        self._callers = callers
        self._traces = traces
        self._dispatcher = dispatcher
        self._preparer = preparer
        self._status = status
        self._turn = WritingTurn()

    async def Generate(  # type: ignore[override]  # gRPC takes either kind of handler
        self, request: api.GenerateRequest, context: Context
    ) -> None:
        """Writes to the context: replies that are yielded pass through a generator more, each of them."""
        check_counts(request, self._preparer)
        check_known_fields(request)
        caller = self._callers.of(authorization(context.invocation_metadata()))
        self._dispatcher.admit(caller, request.request_id)
        prepared = await self._preparer.prepare(parse_request(request), caller)
        parent = TraceParent.parse(metadata_value(context.invocation_metadata(), "traceparent"))
        async with self._dispatcher.run(prepared, caller, parent) as running:
            writer = ReplyWriter(context.write, _replies(running, prepared, streams=request.stream))
            on_news = functools.partial(self._turn.add, writer.on_news)
            running.listen(on_news)
            try:
                await writer.run()
            finally:
                running.unlisten(on_news)

    async def Explain(self, request: api.GenerateRequest, context: Context) -> api.PlacementReport:
        check_counts(request, self._preparer)
        check_known_fields(request)
        caller = self._callers.of(authorization(context.invocation_metadata()))
        prepared = await self._preparer.prepare(parse_request(request), caller)
        return report_message(await self._dispatcher.explain(prepared.choices[0]))

    async def Abort(self, request: api.AbortRequest, context: Context) -> api.AbortResponse:
        check_known_fields(request)
        if len(request.request_ids) > MAX_ABORTS:
            raise InvalidArgument(f"at most {MAX_ABORTS} request_ids are allowed, got {len(request.request_ids)}")
        caller = self._callers.of(authorization(context.invocation_metadata()))
        unknown = [one for one in request.request_ids if not self._dispatcher.abort(one, caller)]
        return api.AbortResponse(unknown_request_ids=unknown)

    async def GetModelInfo(self, request: api.GetModelInfoRequest, context: Context) -> api.GetModelInfoResponse:
        check_known_fields(request)
        return self._status.model_info()

    async def GetServerInfo(self, request: api.GetServerInfoRequest, context: Context) -> api.GetServerInfoResponse:
        check_known_fields(request)
        return self._status.server_info()

    async def GetLoads(self, request: api.GetLoadsRequest, context: Context) -> api.GetLoadsResponse:
        check_known_fields(request)
        return self._status.loads()

    async def GetTraces(self, request: api.GetTracesRequest, context: Context) -> api.GetTracesResponse:
        check_known_fields(request)
        caller = self._callers.of(authorization(context.invocation_metadata()))
        if request.request_id:
            traces = self._traces.of_request(caller.name, request.request_id)
        else:
            num_wanted = min(request.num_slowest or DEFAULT_TRACES, MAX_TRACES)
            traces = self._traces.slowest(caller.name, num_wanted)
        return api.GetTracesResponse(traces=[trace_message(trace) for trace in traces])


def _replies(
    running: RunningRequest, submission: Submission, *, streams: bool
) -> Iterator[Reply[api.GenerateResponse] | None]:
    """To a client that has sent this. None: nothing is new.

    Raises:
        PdRelayError: a choice was rejected or has failed, or the client has other tokens than there are.
    """
    reader = Reader(running, submission)
    while not reader.ended:
        update = reader.next()
        if update is None:
            yield None
            continue
        if update.chunk is not None and streams:
            begun_s = time.perf_counter()
            response = api.GenerateResponse(request_id=submission.request_id)
            fill_chunk(response.chunk, update.choice, update.chunk)
            running.choices[update.choice].streaming.note(time.perf_counter() - begun_s)
            yield Reply(response, may_follow=update.ended or len(running.choices) > 1)
        if update.ended:
            complete = complete_message(running.result(update.choice))
            yield Reply(api.GenerateResponse(request_id=submission.request_id, complete=complete), may_follow=True)


def authorization(metadata: Any) -> str | None:
    """Of a call's metadata, pairs of key and value."""
    return metadata_value(metadata, "authorization")


def metadata_value(metadata: Any, name: str) -> str | None:
    for key, value in metadata or ():
        if key == name:
            return value if isinstance(value, str) else None
    return None


def authorizer(callers: Callers) -> Callable[[str, Any], None]:
    """For a server's calls: all but health need a key, where there are keys."""

    def authorize(path: str, metadata: Any) -> None:
        if not path.startswith(HEALTH_PREFIX):
            callers.of(authorization(metadata))

    return authorize


def check_counts(request: api.GenerateRequest, preparer: Preparer) -> None:
    """Before time is spent on each of what may be millions.

    Raises:
        InvalidArgument: there are more than can be right.
    """
    preparer.check_num_tokens(len(request.tokenized.input_ids))
    for choice in request.resume_output_ids[: MAX_CHOICES]:
        preparer.check_num_tokens(len(choice.ids))
    params = request.sampling_params
    for name, count, most in (
        ("messages", len(request.chat.messages), MAX_MESSAGES),
        ("numbers in resume_from", len(request.resume_from), MAX_CHOICES),
        ("lists in resume_output_ids", len(request.resume_output_ids), MAX_CHOICES),
        ("stop strings", len(params.stop), MAX_STOP_STRINGS),
        ("stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKEN_IDS),
        ("tokens in logit_bias", len(params.logit_bias), MAX_LOGIT_BIAS),
    ):
        if count > most:
            raise InvalidArgument(f"at most {most} {name} are allowed, got {count}")


def check_known_fields(message: Message) -> None:
    """A field that this server does not know would be dropped in silence.

    Raises:
        InvalidArgument: there is one, in the message or below it.
    """
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidArgument(f"{message.DESCRIPTOR.name} has no field number {unknown[0].field_number}")
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:  # our maps hold scalars
            continue
        for part in [value] if isinstance(value, Message) else value:
            check_known_fields(part)


def parse_request(request: api.GenerateRequest) -> RawRequest:
    """Raises:
    InvalidArgument: no prompt, or a field that cannot be right whatever the model.
    """
    if (request.resume_from or request.resume_output_ids) and not request.stream:
        raise InvalidArgument("resume_from and resume_output_ids are only for stream: true")
    kind = request.WhichOneof("input")
    placement = request.placement
    return RawRequest(
        prompts=(_parse_prompt(request, kind),),
        is_chat=kind == "chat",
        num_choices=request.sampling_params.n if request.sampling_params.HasField("n") else 1,
        sampling=parse_sampling(request.sampling_params),
        request_id=request.request_id,
        placement=PlacementWish(
            prefill_worker=placement.prefill_worker,
            decode_worker=placement.decode_worker,
            bypass_prefix_cache=placement.bypass_prefix_cache,
            report_block_checksums=placement.report_block_checksums,
            report_placement=placement.report_placement,
        ),
        cache_salt=request.cache_salt,
        resumable=request.resumable,
        resume_from=tuple(request.resume_from),
        resume_output_ids=tuple(tuple(choice.ids) for choice in request.resume_output_ids),
        priority=request.priority,
        user=request.user,
        ttft_target_ms=request.ttft_target_ms or None,
        itl_target_ms=request.itl_target_ms or None,
    )


def _parse_prompt(request: api.GenerateRequest, kind: str | None) -> Prompt:
    if kind == "text":
        return TextPrompt(
            text=request.text,
            parse_special=request.parse_special_tokens,
            add_bos=request.add_bos if request.HasField("add_bos") else None,
        )
    if request.parse_special_tokens or request.HasField("add_bos"):
        raise InvalidArgument("parse_special_tokens and add_bos are for a prompt that is given as text")
    if kind == "tokenized":
        return tuple(request.tokenized.input_ids)
    if kind == "chat":
        return tuple(ChatMessage(message.role, message.content) for message in request.chat.messages)
    raise InvalidArgument("a prompt is needed: one of tokenized, text or chat")


def parse_sampling(params: api.SamplingParams) -> SamplingFields:
    """Absent fields are None: a proto default is never a sampling default."""
    def given(name: str) -> Any:
        return getattr(params, name) if params.HasField(name) else None

    return SamplingFields(
        temperature=given("temperature"),
        top_p=given("top_p"),
        top_k=given("top_k"),
        seed=given("seed"),
        max_tokens=given("max_tokens"),
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=given("ignore_eos"),
        min_p=given("min_p"),
        repetition_penalty=given("repetition_penalty"),
        presence_penalty=given("presence_penalty"),
        frequency_penalty=given("frequency_penalty"),
        logit_bias=tuple(sorted(params.logit_bias.items())),
        min_tokens=given("min_tokens"),
        logprobs=given("logprobs"),
        speculate=given("speculate"),
    )


def fill_chunk(message: api.GenerateStreamChunk, choice: int, chunk: Chunk) -> None:
    """In place, as there is one a token."""
    message.choice = choice
    message.index = chunk.index
    message.text = chunk.text
    for token in chunk.tokens:
        message.token_ids.append(token.token_id)
        if token.logprobs is not None:
            message.logprobs.append(_token_logprobs(token.token_id, token.logprobs))


def complete_message(result: Result) -> api.GenerateComplete:
    complete = api.GenerateComplete(
        choice=result.request.choice,
        output_ids=[token.token_id for token in result.tokens],
        text=result.text,
        finish_reason=result.finish_reason.value,
        usage=api.Usage(
            prompt_tokens=len(result.request.prompt_ids),
            completion_tokens=len(result.tokens),
            cached_tokens=result.num_cached_tokens,
        ),
        seed=result.request.params.seed,
        logprobs=_logprobs(result.tokens),
        accepted_tokens=result.num_accepted,
        drafted_tokens=result.num_drafted,
        warnings=result.request.warnings,
        stop_reason=result.stop_reason,
    )
    if result.handoff is not None:
        complete.handoff.prefill_worker = result.handoff.prefill_worker
        complete.handoff.decode_worker = result.handoff.decode_worker
        complete.handoff.bytes = result.handoff.num_bytes
        complete.handoff.hidden_bytes = result.handoff.num_hidden_bytes
        complete.handoff.transport = result.handoff.transport
        complete.handoff.block_checksums.extend(result.handoff.block_checksums)
    if result.local_prefill is not None:
        complete.local_prefill.worker = result.local_prefill.worker
        complete.local_prefill.block_checksums.extend(result.local_prefill.block_checksums)
    if result.placement is not None:
        complete.placement.CopyFrom(report_message(result.placement))
    return complete


def _logprobs(tokens: Sequence[SampledToken]) -> list[api.TokenLogprobs]:
    return [
        _token_logprobs(token.token_id, token.logprobs) for token in tokens if token.logprobs is not None
    ]


def _token_logprobs(token_id: int, logprobs: TokenLogprobs) -> api.TokenLogprobs:
    return api.TokenLogprobs(
        token_id=token_id,
        logprob=logprobs.logprob,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )
