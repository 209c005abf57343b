"""``outpace generate``: stream an answer; ``--compare`` proves that it is plain decoding's."""

from __future__ import annotations

import io
import select
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from outpace.cli.command import Command
from outpace.cli.options import SYSTEM, Common, Draft, Load, Sampling, system_message
from outpace.cli.summary import show_scores, summary
from outpace.cli.terminal import folded, reading_text
from outpace.common.parameter import argument, option
from outpace.errors import Argument, ParameterError

if TYPE_CHECKING:
    from outpace.common.arrays import I32
    from outpace.engine.engine import Engine
    from outpace.engine.results import Result
    from outpace.exact.sampling import TokenLogprob
    from outpace.params import LogitRule, Prompt, SamplingParams

_SILENT = 3.0  # seconds for which a pipe may say nothing before a person is told what is waited for
_FORM = "form of the answer"


def run(
    load: Load,
    draft: Draft,
    sampling: Sampling,
    common: Common,
    prompt: Annotated[
        str | None, argument("What to answer. What is piped in comes before it; alone, or for -, it is the prompt.")
    ] = None,
    system: Annotated[str | None, SYSTEM] = None,
    compare: Annotated[
        bool, option("Decode plainly, too: show both speeds, check that all tokens are the same.")
    ] = False,
    raw: Annotated[
        bool, option("Give the model the text itself, without a chat template; it may spell <|im_end|>.")
    ] = False,
    n: Annotated[int, option("How many samples to draw.", "--n", "--samples", group="sampling")] = 1,
    json_schema: Annotated[
        Path | None, option("The answer is JSON that this schema describes.", metavar="FILE", group=_FORM)
    ] = None,
    json_object: Annotated[bool, option("The answer is a JSON object.", group=_FORM)] = False,
    regex: Annotated[
        str | None, option("The answer is a text that this matches as a whole.", metavar="PATTERN", group=_FORM)
    ] = None,
    logprobs: Annotated[
        int | None, option("Show every token's log-probability, with N alternatives.", group="output")
    ] = None,
    prompt_logprobs: Annotated[int | None, option("The same of the prompt's tokens.", group="output")] = None,
    trace: Annotated[
        Path | None, option("Write every step to this file (outpace trace).", metavar="FILE", group="output")
    ] = None,
    trace_probabilities: Annotated[
        bool, option("The trace has probabilities and random numbers, too: what decided each token.", group="output")
    ] = False,
) -> int:
    """Answer a prompt."""
    prompt = _whole(prompt, raw)
    if not raw and not prompt.strip():
        raise ParameterError("the prompt is empty: give some text as an argument or on standard input")
    if system is not None and raw:
        raise ParameterError("--system needs the chat template, which --raw leaves out: give one of them")
    asked: Prompt = prompt if system is None else [*system_message(system), {"role": "user", "content": prompt}]
    scores = {"logprobs": logprobs is not None, "top_logprobs": logprobs or 0, "prompt_logprobs": prompt_logprobs}
    params = sampling.params(n=n, **scores)
    grammar = _grammar(json_schema, json_object, regex)
    if compare and n != 1:
        raise ParameterError(f"--compare compares one sample, not {n}: leave --n out")
    if compare:
        from outpace.measure.same import require_tokens

        require_tokens(draft.acceptance, params)
    if trace_probabilities and trace is None:
        raise ParameterError(Argument("trace_probabilities"), " is of a trace: give ", Argument("trace"), ", too")
    if trace is not None:
        from outpace.common.files import check_writable

        check_writable(trace, "JSON lines")
    reused = 0 if compare else None  # a prefix that is found again would favour whoever comes second
    with (
        load.engine(draft.drafter, size=draft.size, acceptance=draft.acceptance, prefix_rows=reused) as engine,
        _traced(engine, trace, load, trace_probabilities),
    ):
        tokens = engine.encode(asked, raw=raw)
        if grammar is not None:
            params = params.with_(rules=[grammar(engine)])
        if compare:
            from outpace.cli.compare import compared

            return compared(engine, tokens, params, common, report)
        results = _stream(engine, tokens, params, quiet=common.prints_json)
        reports = [report(engine, result) for result in results]
        common.emit(reports[0] if n == 1 else {"samples": reports})
    failed = [result.error for result in results if result.error]
    if failed:
        raise ParameterError(str(failed[0]))
    return 0


def _grammar(schema: Path | None, json_object: bool, regex: str | None) -> Callable[[Engine], LogitRule] | None:
    """What compiles the grammar that was asked for, once there is a tokenizer. Raises ParameterError."""
    if (schema is not None) + json_object + (regex is not None) > 1:
        raise ParameterError("--json-schema, --json-object and --regex exclude one another: give one of them")
    if schema is None and not json_object and regex is None:
        return None
    text = None
    if schema is not None:
        try:
            text = schema.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ParameterError(f"--json-schema: {schema} cannot be read ({error}): name a file in UTF-8") from error

    def compiled(engine: Engine) -> LogitRule:
        from outpace.text.grammar import Grammars

        grammars = Grammars.of(engine)
        if text is not None:
            return grammars.json_schema(text)
        return grammars.json_object() if regex is None else grammars.regex(regex)

    return compiled


def _traced(engine: Engine, path: Path | None, load: Load, probabilities: bool) -> AbstractContextManager[Any]:
    if path is None:
        return nullcontext()
    from outpace.measure.trace import tracing

    return tracing(engine, path, load=load.load_options(), scores=True, probabilities=probabilities)


def _whole(given: str | None, raw: bool) -> str:
    """The prompt: what is piped in, a space, and what was ``given``, as ``llm`` joins them; what is blank counts only
    where it is ``raw``. A terminal is read only where nothing, or "-", was given. Raises ParameterError."""
    given = None if given == "-" else given
    stream = sys.stdin
    if given is not None and stream.isatty():
        return given or ""
    if stream.isatty():
        print("type the prompt; Ctrl-D on a new line ends it", file=sys.stderr)
    elif given is not None:
        _say_if_it_waits(stream)
    if raw and isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(newline="")  # line ends are part of the text
    with reading_text():
        piped = stream.read()
    return " ".join(part for part in (piped, given) if part and (raw or part.strip()))


def _say_if_it_waits(stream: TextIO) -> None:
    """Name what is waited for, where a pipe that nobody writes to was left open."""
    try:
        waits = not select.select([stream], [], [], _SILENT)[0]
    except (OSError, ValueError):  # no file: it is read at once
        return
    if waits:
        print("outpace: waiting for the end of standard input (< /dev/null: there is none)", file=sys.stderr)


def report(engine: Engine, result: Result) -> dict[str, Any]:
    """What ``--json`` prints."""
    from outpace.common.arrays import repeated_tail

    out: dict[str, Any] = {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "drafter": result.drafter,
        "acceptance": result.acceptance,
        "backend": engine.model.info.backend,
        "dtype": engine.model.info.dtype,
        "seed": result.seed,
        "repeated_tail": repeated_tail(result.token_ids),
        "stats": result.stats.to_dict(),
    }
    if result.logprobs:
        out["logprobs"] = [scored(entry) for entry in result.logprobs]
    if result.prompt_logprobs:
        out["prompt_logprobs"] = [None if entry is None else scored(entry) for entry in result.prompt_logprobs]
    if result.notes or result.error:
        out |= {"notes": list(result.notes), "error": result.error}
    return out


def scored(entry: TokenLogprob) -> dict[str, Any]:
    """A token's log-probability, and the alternatives', for JSON."""
    top = [{"token": other.token, "text": other.text, "logprob": other.logprob} for other in entry.top]
    return {"token": entry.token, "text": entry.text, "logprob": entry.logprob, "top": top}


def _stream(engine: Engine, tokens: I32, params: SamplingParams, *, quiet: bool) -> list[Result]:
    results = []
    alone = params.n == 1
    for delta in engine.stream(tokens.tolist(), params, errors="return"):
        if not quiet and alone:
            print(delta.text, end="", flush=True)
        if delta.result is not None:
            results.append(delta.result)
    results.sort(key=lambda result: result.sample)
    if not quiet:
        for result in results:
            print("" if alone else f"[{result.sample}] {result.text}")
            show_scores(result)
        for line in summary(engine, results[0], params):
            print(folded(f"[{line}]", sys.stderr), file=sys.stderr)
    return results


COMMAND = Command(
    "generate",
    run,
    "outpace generate 'Write a haiku about rivers.' --compare\n"
    "outpace generate 'Summarise this text:' < notes.txt\n"
    "outpace generate -m model.gguf -T 0.8 --top-p 0.95 -n 500 'Tell me a story.'\n"
    "outpace generate -d suffix --json answer.json 'Name three rivers.'",
)
