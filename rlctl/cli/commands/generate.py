"""``rlctl generate``: prompts to routable stages, as by a trainer's SDK."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import click

from rlctl.cli.app import message_options
from rlctl.cli.app.connection import connected
from rlctl.cli.app.global_options import Command, global_options, pass_settings
from rlctl.cli.app.message_options import Field
from rlctl.cli.app.settings import Settings
from rlctl.cli.app.types import ParamType
from rlctl.cli.render import values as text
from rlctl.cli.render.printer import View, show, show_tables
from rlctl.cli.render.tables import Table
from rlctl.contract.enums import short_name
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.rollout_pb2 import FinishType, GenerateResponse, Sample, SamplingParams, VersionSpan

GENERATE_S = 60.0

_ADVICE = {"PAUSED": "rlctl continue", "STALE": "rlctl heal", "DIRTY": "rlctl heal"}
_ADVICE |= {"ASLEEP": "rlctl memory resume", "disabled": "rlctl enable"}
"""Command that makes a stage routable again, by the cause."""

_OWN = (
    "--model",
    "--adapter",
    "--rid",
    "--stream",
    "--logprobs",
    "--input-ids",
    "--min-version-seq",
    "--top-logprobs-num",
    "--engine-field",
    "--engine-meta",
    "--help",
)


class TokenIdsType(ParamType):
    """Token ids with commas: 1,15,7."""

    name = "ids"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            ids = [int(part) for part in str(value).split(",")]
        except ValueError:
            ids = [-1]
        if min(ids) < 0:
            self.fail(f"{value!r} is no list of token ids such as 1,15,7", param, ctx)
        return ids


class EngineFieldType(ParamType):
    """A field of an engine: NAME=VALUE, the value as JSON, or else as text."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not name or not equals:
            self.fail(f"{value!r} is no NAME=VALUE", param, ctx)
        try:
            return name, json.loads(text)
        except ValueError:
            return name, text


def _sampling_fields() -> list[Field]:
    reserved_flags = {name for option in global_options() for name in option.opts} | set(_OWN)
    return message_options.fields_of(SamplingParams.DESCRIPTOR, reserved_flags)


def _run(
    settings: Settings,
    prompts: tuple[str, ...],
    input_ids: tuple[list[int], ...],
    model: str,
    adapter: str,
    rid: str,
    logprobs: bool,
    top_logprobs_num: int,
    min_version_seq: int,
    engine_fields: tuple[tuple[str, Any], ...],
    engine_meta: bool,
    stream: bool,
    **sampling: Any,
) -> None:
    inputs: list[str | list[int]] = [*prompts, *input_ids]
    if not inputs:
        raise click.UsageError("give a PROMPT or --input-ids")
    if len(inputs) > 1 and (stream or rid):
        raise click.UsageError("--stream and --rid are for one prompt")
    params = SamplingParams()
    for field in _sampling_fields():
        message_options.assign(params, field, sampling[field.parameter])
    arguments: dict[str, Any] = {field.name: value for field, value in params.ListFields()}
    arguments |= {
        "model": model,
        "adapter": adapter,
        "return_logprob": logprobs or bool(top_logprobs_num),
        "top_logprobs_num": top_logprobs_num,
        "min_version_seq": min_version_seq,
        "engine_fields": dict(engine_fields) or None,
        "return_engine_meta": engine_meta,
        "timeout_s": settings.timeout_s or GENERATE_S,
    }
    if settings.dry_run:
        settings.say(f"Nothing was sent: {len(inputs)} prompts, {' '.join(str(params).split()) or 'default sampling'}.")
        return
    with connected(settings) as fleet, _telling_what_it_waits_for(settings):
        if not stream:
            responses = fleet.generate_batch(inputs, rid=rid, **arguments)
            _print(settings, responses)
            return
        with contextlib.closing(fleet.generate_stream(inputs[0], rid=rid, **arguments)) as parts:
            _print_stream(settings, parts)


class _Notices(logging.Handler):
    """Prints the SDK's log records while no stage is routable, with the command that helps."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._said = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record on stderr, once: the SDK repeats the record during a long wait."""
        message = record.getMessage()
        if message == self._said:
            return
        self._said = message
        next_steps = dict.fromkeys(advice for why, advice in _ADVICE.items() if why in message)
        self._settings.say(f"{message} ({', '.join(next_steps) or 'rlctl status'})")


@contextlib.contextmanager
def _telling_what_it_waits_for(settings: Settings) -> Iterator[None]:
    from rlctl.rollout import dispatch

    notices, level = _Notices(settings), dispatch.log.level
    dispatch.log.addHandler(notices)
    dispatch.log.setLevel(logging.INFO)
    try:
        yield
    finally:
        dispatch.log.setLevel(level)
        dispatch.log.removeHandler(notices)


def _print(settings: Settings, responses: Sequence[GenerateResponse]) -> None:
    if settings.output != "table":
        data = responses[0] if len(responses) == 1 else list(responses)
        show(settings, View(data, lambda _: [_wide(responses)], lambda: [response.rid for response in responses]))
        return
    several = len(responses) > 1 or len(responses[0].samples) > 1
    for number, response in enumerate(responses):
        for sample in response.samples:
            description = _about(response, sample)
            if several:
                click.echo(f"--- prompt {number}, sample {sample.index}: {description}")
            click.echo(sample.text if sample.text or not sample.output_ids else text.joined(sample.output_ids))
            if not several:
                settings.say(f"[{description}]")
            if sample.output_logprobs:
                show_tables(settings, [_logprobs(sample)])


def _print_stream(settings: Settings, parts: Any) -> None:
    last: tuple[GenerateResponse, Sample] | None = None
    spans: list[VersionSpan] = []
    version = WeightVersion()
    for part in parts:
        if part.HasField("weight_version"):
            version = part.weight_version
        if settings.output != "table":
            show(settings, _part_view(part))
            continue
        for sample in part.samples:
            click.echo(sample.text, nl=False)
            spans.extend(sample.versions)
            last = (part, sample)
    if last is not None:
        click.echo()
        del last[1].versions[:]
        last[1].versions.extend(spans)
        last[0].weight_version.CopyFrom(version)
        settings.say(f"[{_about(*last)}]")


def _part_view(part: GenerateResponse) -> View:
    return View(part, lambda _: [_wide([part])], lambda: [part.rid])


def _about(response: GenerateResponse, sample: Sample) -> str:
    """Return slot, versions, length and finish reason of a sample."""
    versions = _versions(response, sample)
    facts = [response.slot, versions, f"{sample.completion_tokens} tokens", _finish(sample)]
    return ", ".join(fact for fact in facts if fact)


def _versions(response: GenerateResponse, sample: Sample) -> str:
    """Return the versions of weights and adapter: step-42#7+a-3. For a sample without tokens: the stage's version."""
    if not sample.versions:
        return text.version(response.weight_version)
    versions = (
        text.version(span.version) + (f"+{span.adapter_version}" if span.adapter_version else "")
        for span in sample.versions
    )
    return text.joined(dict.fromkeys(versions))


def _finish(sample: Sample) -> str:
    return short_name(FinishType.DESCRIPTOR, sample.finish_reason.type)


def _wide(responses: Sequence[GenerateResponse]) -> Table:
    rows = [
        [
            response.rid,
            response.slot,
            str(sample.index),
            _versions(response, sample),
            str(response.prompt_tokens),
            str(sample.completion_tokens),
            _finish(sample),
            text.duration(response.elapsed),
            repr(sample.text),
        ]
        for response in responses
        for sample in response.samples
    ]
    return Table(("RID", "SLOT", "SAMPLE", "VERSION", "PROMPT", "TOKENS", "FINISH", "ELAPSED", "TEXT"), rows)


def _logprobs(sample: Sample) -> Table:
    rows = [
        [
            str(entry.token_id),
            f"{entry.logprob:.4f}" if entry.HasField("logprob") else "",
            text.joined(f"{top.token_id}:{top.logprob:.4f}" for top in entry.top),
        ]
        for entry in sample.output_logprobs
    ]
    return Table(("TOKEN", "LOGPROB", "TOP"), rows, frozenset({"TOP"}))


generate = Command(
    "generate",
    params=[
        click.Argument(["prompts"], nargs=-1, metavar="PROMPT..."),
        click.Option(
            ["--input-ids"], type=TokenIdsType(), multiple=True, help="A prompt as token ids, 1,15,7 say.  [repeatable]"
        ),
        click.Option(["--model"], default="", metavar="NAME", help="Model to generate with.  [default: any]"),
        click.Option(["--adapter"], default="", metavar="NAME", help="LoRA adapter of the model.  [default: none]"),
        click.Option(["--rid"], default="", metavar="ID", help="Request id of your choice, for `rlctl abort --rid`."),
        click.Option(["--stream"], is_flag=True, help="Print output as it arrives."),
        click.Option(["--logprobs"], is_flag=True, help="Print the log probability of every output token."),
        click.Option(
            ["--top-logprobs-num"],
            type=click.IntRange(min=0),
            default=0,
            help="Also the log probabilities of this many most likely tokens at each position.",
        ),
        click.Option(
            ["--min-version-seq"],
            type=click.IntRange(min=0),
            default=0,
            help="Only stages whose version has at least this sequence number.",
        ),
        click.Option(
            ["--engine-field", "engine_fields"],
            type=EngineFieldType(),
            multiple=True,
            metavar="NAME=VALUE",
            help="Request field in the engine's own name; the value is JSON, or a text.  [repeatable]",
        ),
        click.Option(
            ["--engine-meta"],
            is_flag=True,
            help="Return the engine's own metadata of each sample, shown with -o json.",
        ),
        *map(message_options.option, _sampling_fields()),
    ],
    callback=pass_settings(_run),
    help="""Generate from prompts, side by side, on the routable stages in turn.

    The text goes to stdout; slot, version and finish reason go to stderr. -o json prints the whole response, or an
    array of responses for several prompts. While no stage is routable, the command waits and prints the cause. It
    ends with exit code 6 after 60 s, or after --timeout.""",
)
