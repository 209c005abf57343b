"""The commands as a person runs them: answers, JSON, comparisons, and every kind of bad input."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outpace.cli import main as cli
from outpace.cli.app import NAMES, chosen, command, parse
from outpace.cli.command import Command, Group, UsageError
from outpace.drafters.catalogue import AUTO
from outpace.drafters.learned.shipped import BESIDE
from outpace.engine.engine import Engine
from outpace.errors import ParameterError
from outpace.measure import bench as measured
from outpace.measure.recommend import SIZES

PROMPTS = [
    {"id": "a", "category": "copy", "turns": ["Repeat after me: one two three one two three.", "Again, please."]},
    {"id": "b", "category": "prose", "prompt": "Name three colours."},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


def outpace(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    """Run the entry point in this process: exit code, standard output, standard error."""
    before = sys.argv, sys.stdin
    sys.argv = ["outpace", *map(str, args)]
    if not isinstance(sys.stdin, io.StringIO):  # pytest's own refuses to be read
        sys.stdin = io.StringIO()
    try:
        with pytest.raises(SystemExit) as left:
            cli.main()
    finally:
        sys.argv, sys.stdin = before
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def wait_for(happened: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def spawn(*args: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "outpace", *map(str, args)],
        stdout=-1,
        stderr=-1,
        stdin=subprocess.PIPE if args[0] == "chat" else subprocess.DEVNULL,
        text=True,
        env=os.environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job inherits it ignored
    )


def test_help_and_import_load_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['outpace', '--help']\nimport outpace\nfrom outpace.cli.main import main\n"
        "try: main()\nexcept SystemExit as e: assert not e.code\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'gguf', 'numpy'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout


def commands(group: Group | Command, *before: str) -> Iterator[tuple[str, ...]]:
    """The words that name each command."""
    if isinstance(group, Command):
        yield (*before, group.name)
    else:
        for its in group.commands:
            yield from commands(its, *before, group.name)


EACH = [words for name in NAMES for words in commands(command(name))]
GROUPS = [(name,) for name in NAMES if isinstance(command(name), Group)]


@pytest.mark.parametrize("words", [(), *GROUPS, *EACH], ids=" ".join)
def test_every_help_has_three_examples_that_mean_something(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """A shell and then Outpace take each; two at least are of the command itself."""
    monkeypatch.chdir(tmp_path)  # of files that --json would write
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = outpace(capsys, *words, "--help")
    assert code == 0
    examples = out.split("\nExamples:\n")[1].splitlines()
    assert len(examples) >= 3
    assert max(map(len, examples)) <= 80, "an example is one line that can be pasted"
    for line in examples:
        program, *rest = shlex.split(line.split(" < ")[0], comments=True)
        assert program == "outpace"
        assert callable(parse(rest))
    assert sum(line.startswith(" ".join(["  outpace", *words])) for line in examples) >= 2


def test_a_question_alone_is_answered_and_ollamas_words_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outpace(capsys, "Say hello to me.", "--json", "--max-tokens", "4")
    again = outpace(capsys, "run", "demo", "Say hello to me.", "--json", "--max-tokens", "4")
    assert code == again[0] == 0
    assert json.loads(out)["token_ids"] == json.loads(again[1])["token_ids"]
    for words, name in ((["run", "demo"], "chat"), (["run"], "chat"), (["ls"], "list"), (["rm", "a/b"], "cache")):
        assert chosen(words).name == name
        assert callable(parse(words))
    assert chosen(["Say\nhello."]).name == "generate"
    for words, says in (
        (["genrate", "Say hello."], "did you mean generate"),
        (["Why", "is", "it?"], "no command Why: a command comes first, as in outpace generate 'Hello\\?' -m demo"),
        (["-m", "demo", "Say hello."], "no option -m: a command comes first"),
        (["run", "demo", "-n", "4", "Say hello."], "it takes options alone; outpace generate 'TEXT'"),
    ):
        with pytest.raises(UsageError, match=says):
            parse(words)


def test_generate_json(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("generate", "Say hello.", "--json", "--max-tokens", "12", "--temperature", "0.7", "--seed", "5")
    code, out, _ = outpace(capsys, *args, "--logprobs", "2")
    assert code == 0
    value = json.loads(out)
    expected = (
        "text token_ids finish_reason prompt_tokens completion_tokens drafter acceptance backend dtype seed stats"
    )
    assert set(expected.split()) <= set(value)
    assert value["completion_tokens"] == len(value["token_ids"]) <= 12
    assert value["seed"] == 5
    assert all(len(entry["top"]) == 2 for entry in value["logprobs"])
    assert {"token", "text", "logprob"} <= set(value["logprobs"][0]["top"][0])
    assert [entry["token"] for entry in value["logprobs"]] == value["token_ids"]
    assert any(entry["text"] and entry["text"] in value["text"] for entry in value["logprobs"])
    assert value["stats"]["tokens"] == value["completion_tokens"]


def test_generate_holds_the_answer_to_a_grammar(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    file = tmp_path / "schema.json"
    limits = {"type": "integer", "minimum": 0, "maximum": 99}
    file.write_text(json.dumps({"type": "object", "properties": {"age": limits}, "required": ["age"]}))
    code, out, _ = outpace(capsys, "generate", "A person as JSON.", "--json-schema", str(file), "--json", "--compare")
    value = json.loads(out)
    assert code == 0
    assert value["compare"]["identical"]
    assert 0 <= json.loads(value["text"])["age"] <= 99
    code, out, _ = outpace(capsys, "generate", "Yes or no?", "--regex", "(yes|no), sir")
    assert code == 0
    assert out in ("yes, sir\n", "no, sir\n")
    outside = tmp_path / "outside.json"
    outside.write_text('{"$ref": "b.json"}')
    for args, says in (
        (("--regex", "("), "unclosed group"),
        (("--json-schema", str(outside)), "b.json leads to another document"),
        (("--json-schema", str(tmp_path / "gone")), "cannot be read"),
        (("--json-object", "--regex", "a"), "exclude one another"),
    ):
        code, _, err = outpace(capsys, "generate", "x", *args)
        assert code == 2
        assert says in err


def test_generate_streams_and_reads_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("The capital of France is"))
    code, out, err = outpace(capsys, "generate", "--raw", "--max-tokens", "6")
    assert code == 0
    assert "Paris" in out
    assert "tokens/s" in err


def test_generate_joins_what_is_piped_in_as_llm_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Simon Willison's ``llm`` 0.36 (llm/cli.py, read_prompt): what is piped in, a space, the argument."""

    def asked(piped: str, *args: str) -> str:
        more = ("--raw", "--json", "-n", "1", "--prompt-logprobs", "0")
        command = [sys.executable, "-m", "outpace", "generate", *args, *more]
        done = subprocess.run(command, input=piped.encode(), capture_output=True, check=True)
        return "".join(entry["text"] for entry in json.loads(done.stdout)["prompt_logprobs"] if entry)

    for piped, args, expected in (
        ("x The Nile flows north.\n", ["Say it again:"], " The Nile flows north.\n Say it again:"),
        ("x the whole\n", [], " the whole\n"),
        ("x the whole\n", ["-"], " the whole\n"),
        ("x the whole\n", ["--prompt", "-"], " the whole\n"),
        ("", ["x alone"], " alone"),
        ("\n", ["x alone"], " x alone"),
        ("x \tthe\r\nwhole\rtext  \r\n\n ", [], " \tthe\r\nwhole\rtext  \r\n\n "),
    ):
        assert asked(piped, *args) == expected


@pytest.mark.parametrize("command", ["generate", "generate --raw", "chat", "chat --json"])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_standard_input_that_is_no_text_is_refused_in_a_line(command: str, locale: str) -> None:
    """Python lets such bytes through in these two locales (PEP 538, PEP 540)."""
    done = subprocess.run(
        [sys.executable, "-m", "outpace", *command.split(), "-n", "1"],
        input="caf\xe9\n".encode("latin-1"), capture_output=True, env={**os.environ, "LC_ALL": locale},
    )  # fmt: skip
    assert done.returncode == 2
    assert re.fullmatch(r"outpace: standard input is not UTF-8 \(.*\): convert it\n", done.stderr.decode())


def test_generate_does_not_read_a_terminal_beside_a_prompt() -> None:
    """A terminal, and a closed standard input, are not waited for; a pipe that stays open and silent is named."""
    terminal, other = os.openpty()
    command = [sys.executable, "-m", "outpace", "generate", "Hello", "-n", "1"]
    done = subprocess.run(command, stdin=other, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shell = f"{shlex.join(command)} <&-"
    assert subprocess.run(shell, shell=True, capture_output=True, timeout=120).returncode == 0
    os.close(terminal)
    os.close(other)
    waits = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=-1, stderr=-1, text=True)
    assert waits.stderr is not None
    assert "waiting for the end of standard input (< /dev/null" in waits.stderr.readline()
    assert waits.communicate(timeout=120)[0]


def test_generate_takes_what_other_tools_mean_by_no_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """-1 is llama.cpp's: until the end of the answer, and a random seed."""
    for none in ("none", "None", "-1"):
        code, out, err = outpace(capsys, "generate", "Name a colour.", "-n", none, "--seed", none, "--json")
        assert code == 0, err
        assert json.loads(out)["finish_reason"] == "stop"


def test_generate_says_what_an_answer_is_worth(capsys: pytest.CaptureFixture[str]) -> None:
    """Log-probabilities as a table; the seed only where it matters; a cut and a loop by their names."""
    code, out, err = outpace(capsys, "generate", "Say hello.", "-n", "3", "--logprobs", "2", "--prompt-logprobs", "0")
    assert code == 0
    lines = [line for line in out.splitlines() if re.match(r" +-\d+\.\d{3}  '", line)]
    assert len(lines) > 10
    assert all(line.count("' -") == 2 for line in lines[-3:])
    assert "seed" not in err
    assert "cut off after 3 tokens: --max-tokens allows more" in err
    _, _, err = outpace(capsys, "generate", "Say hello.", "-n", "3", "-T", "1", "--seed", "7")
    assert "seed 7" in err
    loop = ("generate", "--raw", "la la la la la la la la la la", "-n", "40", "--bad-word", ".")
    _, out, err = outpace(capsys, *loop)
    assert "40 tokens are a loop" in err, (out, err)


def test_compare_says_identical_and_shows_both_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "Repeat this line three times: the quick brown fox jumps over the lazy dog."
    code, out, _ = outpace(capsys, "generate", prompt, "--compare", "--max-tokens", "40")
    assert code == 0
    assert "identical" in out
    assert [line.split()[0] for line in out.splitlines() if "tokens/s" in line] == [
        "plain",
        "suffix+eagle:demo",
        "plain",
    ]
    said = re.search(r"took ([\d.]+) plain steps, its draft included, and brought ([\d.]+) tokens: .* = ([\d.]+)x", out)
    assert said is not None
    took, brought, ratio = map(float, said.groups())
    assert brought / took == pytest.approx(ratio, rel=0.03)
    code, out, _ = outpace(
        capsys, "generate", prompt, "--compare", "--json", "--max-tokens", "16", "-T", "1", "--seed", "3"
    )
    assert code == 0
    found = json.loads(out)["compare"]
    assert found["identical"] is True
    assert found["moved"] == (found["speedup"]["ratio"] > found["tokens_per_step"])
    assert found["speedup"]["ratio"] == found["decode_tokens_per_second"] / found["plain_decode_tokens_per_second"]
    assert found["control"]["low"] <= found["control"]["ratio"] <= found["control"]["high"]


def test_compare_also_says_how_fast_an_answer_was_before_its_loop(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.cli.compare._PATIENCE", 0)  # one round
    asked = ("generate", "--raw", "one two three four five six", "--ignore-eos", "--compare", "-d", "suffix")
    whole = json.loads(outpace(capsys, *asked, "-n", "60", "--json")[1])
    length = re.search(r"no loop .* in the (\d+) tokens", outpace(capsys, *asked, "-n", "60")[1])
    without = whole["compare"]["without_loop"]
    assert length is not None
    assert without["tokens"] == int(length[1]) == 60 - whole["repeated_tail"]
    _, out, _ = outpace(capsys, *asked, "-n", str(without["tokens"]), "--json")
    alone = json.loads(out)
    assert (alone["repeated_tail"], alone["token_ids"]) == (0, whole["token_ids"][: without["tokens"]])
    assert alone["compare"]["without_loop"] is None
    assert without["speedup"]["ratio"] == pytest.approx(
        without["decode_tokens_per_second"] / without["plain_decode_tokens_per_second"]
    )


@pytest.mark.parametrize(("ratio", "moved"), [(1.0, False), (40.0, True)])
def test_compare_says_when_tokens_a_step_cannot_explain_its_ratio(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ratio: float, moved: bool
) -> None:
    monkeypatch.setattr(measured, "speedup", lambda before, after: {"ratio": ratio, "low": 0.5, "high": 50.0})
    args = ("generate", "Name three colours.", "--compare", "--max-tokens", "8")
    _, out, _ = outpace(capsys, *args)
    assert f"{ratio:.2f}x (0.50-50.00)" in out
    assert ("40.000x is more than" in out) is moved
    assert ("tokens a step can give: the machine moved between the runs" in out) is moved
    _, out, _ = outpace(capsys, *args, "--json")
    assert json.loads(out)["compare"]["moved"] is moved


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", 'id,category,prompt\nx,lists,"Say one, two."\n,,Say hello.\n', [("x", "lists"), ("2", "all")]),
        ("a.txt", "Say one, two.\n\nSay hello.\n", [("1", "all"), ("3", "all")]),
    ],
)
def test_bench_takes_tables_and_texts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str, expected: list[tuple[str, str]]
) -> None:
    (tmp_path / name).write_text(text)
    args = ("bench", "--prompts", tmp_path / name, "--drafter", "none", "--max-tokens", "4", "--json")
    code, out, _ = outpace(capsys, *args)
    assert code == 0
    runs = [run for run in json.loads(out)["runs"] if run["config"] == "none"]
    assert [(run["id"], run["category"]) for run in runs] == expected
    assert runs[0]["prompt_tokens"] == runs[1]["prompt_tokens"] + 2  # " one, two" for " hello"


def test_bench_writes_what_it_says(capsys: pytest.CaptureFixture[str], prompts: Path, tmp_path: Path) -> None:
    out_file = tmp_path / "out.json"
    args = ("bench", "--prompts", prompts, "--drafter", "none", "--drafter", "ngram:size=3", "--max-tokens", "12")
    code, out, _ = outpace(capsys, *args, "--all-turns", "--json", out_file, "--plot", tmp_path / "out.svg")
    assert code == 0
    assert "tokens/step" in out
    assert "end to end over none's: ngram:size=3" in out
    value = json.loads(out_file.read_text())
    assert {"model", "backend", "dtype", "threads", "max_tokens", "temperature", "configs", "runs"} <= set(value)
    plain, ngram = value["configs"]
    assert (plain["name"], ngram["name"], ngram["size"]) == ("none", "ngram:size=3", 3)
    assert ngram["prompts"] == ngram["identical"] + ngram["near_ties"] == 3  # two turns and one
    assert set(ngram["by_category"]) == {"copy", "prose"}
    fields = (
        "prompts identical tokens decode_tokens_per_second end_to_end_tokens_per_second tokens_per_step "
        "acceptance_rate speedup end_to_end_speedup"
    )
    for figures in (ngram, ngram["by_category"]["copy"]):
        assert set(fields.split()) <= set(figures)
    assert [run["config"] for run in value["runs"]] == ["none", "ngram:size=3", "control"] * 3
    assert value["interrupted"] is False
    assert value["threads"] >= 1
    assert value["machine"]["cores"] >= 1
    assert (tmp_path / "out.svg").read_text().startswith("<?xml")


def test_ctrl_c_in_an_answer_is_one_line() -> None:
    running = spawn("generate", "Tell me a very long story.", "--max-tokens", "4000", "--ignore-eos")
    assert running.stdout is not None
    assert running.stdout.read(1)  # it has begun to speak
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert err == "outpace: interrupted\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(ParameterError("no more"), 2, "outpace: no more\n"), (KeyboardInterrupt(), 130, "outpace: interrupted: kept ")],
)
def test_a_bench_that_ends_midway_keeps_what_it_has(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    calls, real, out_file = iter(range(100)), Engine.generate_many, tmp_path / "out.json"

    def failing(self: Engine, *args: Any, **options: Any) -> Any:
        if next(calls) == 6:  # two warm up, three answer the first prompt
            assert json.loads(out_file.read_text())["interrupted"] is True  # so that a killed run keeps it, too
            raise error
        return real(self, *args, **options)

    monkeypatch.setattr(Engine, "generate_many", failing)
    found, out, err = outpace(capsys, "bench", "--prompts", prompts, "--max-tokens", "4", "--json", out_file)
    assert (found, err.startswith(said), err.count("\n")) == (code, True, 1)
    value = json.loads(out_file.read_text())
    assert value["interrupted"] is True
    assert [run["id"] for run in value["runs"]] == ["a", "a", "a"]
    assert value["configs"][0]["prompts"] == 1
    assert "tokens/step" in out
    assert not list(tmp_path.glob(".*.tmp"))


def test_verify(capsys: pytest.CaptureFixture[str], prompts: Path) -> None:
    code, out, _ = outpace(capsys, "verify", "--prompts", prompts, "--max-tokens", "16", "--json", "-T", "0.9")
    value = json.loads(out)
    assert code == 0
    assert value["identical"] + value["near_ties"] == 2
    assert value["different"] == 0


def test_verify_fails_on_a_difference(
    capsys: pytest.CaptureFixture[str], prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check can fail: a rule that accepts whatever was drafted is found out."""
    import numpy as np

    from outpace.exact.drafts import Verdict, Verdicts
    from outpace.models.base import Output
    from outpace.models.native.output import NativeOutput

    true_verdicts = NativeOutput.verify

    def gullible(self: Any, drafts: Any, *rest: Any) -> Verdicts:
        rows = []
        for i, verdict in enumerate(true_verdicts(self, drafts, *rest)):
            tokens = drafts.row(i).tokens
            accepted = Verdict(np.append(tokens, np.int32(17)), np.arange(len(tokens), dtype=np.int32))
            rows.append(accepted if len(tokens) else verdict)
        return Verdicts.of(rows)

    monkeypatch.setattr(NativeOutput, "verify", gullible)
    monkeypatch.setattr(NativeOutput, "decide", Output.decide)  # so that it is asked
    code, out, _ = outpace(capsys, "verify", "--prompts", prompts, "--max-tokens", "16", "--drafter", "ngram:size=7")
    assert code == 1
    assert "DIFFERENT" in out


def test_chat_keeps_the_conversation() -> None:
    running = spawn("chat", "--json", "--max-tokens", "20")
    out, err = running.communicate("My name is Bob.\nWhat is my name?\n/reset\nHello.\n/quit\n", timeout=120)
    assert running.returncode == 0, err
    first, second, third = [json.loads(line) for line in out.splitlines()]
    assert first["reused_tokens"] == 0
    # All that the first turn wrote but its last token is reused.
    assert second["reused_tokens"] >= first["prompt_tokens"] + first["stats"]["tokens"] - 2
    assert third["prompt_tokens"] < second["prompt_tokens"]


def test_a_message_of_several_lines_ends_with_the_input() -> None:
    running = spawn("chat", "--json", "-n", "1")
    out, err = running.communicate('"""a\nb', timeout=120)
    whole, _ = spawn("chat", "--json", "-n", "1").communicate('"""a\nb"""\n', timeout=120)
    assert [json.loads(line)["prompt_tokens"] for line in out.splitlines()] == [json.loads(whole)["prompt_tokens"]], err


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["generate hi -n 1", "chat", "cache"])
def test_a_stream_that_is_closed_is_one_that_holds_nothing(command: str, closed: str) -> None:
    done = subprocess.run(
        f"{shlex.quote(sys.executable)} -m outpace {command} {closed}", shell=True, input=b"", capture_output=True
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert b"error" not in done.stdout + done.stderr


def test_chat_takes_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    typed = "/stats|/help|/drafter|Say a b a b a b.|/drafter none|/drafter pigeon|Again.|/stats|/system|" \
        "/system Be brief.|/system|Say hello.|/hlep|/etc/passwd?|/quit|never read"  # fmt: skip
    lines = iter(typed.split("|"))
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    out_file = tmp_path / "turns.json"
    code, _, err = outpace(capsys, "chat", "-d", "suffix", "-n", "8", "--json", out_file)
    # But for the lines of /help, and those about an answer.
    said = [line for line in err.splitlines() if not line.startswith(("/", "[", '"""', "Ctrl-C"))]
    drafters = "suffix, ngram, none"
    assert code == 0
    assert said[:2] == ["no answer yet", f"suffix drafts; there are {drafters}"]
    assert said[2] == f"none drafts; there are {drafters}"
    assert said[3].startswith(f"outpace: pigeon is not loaded: choose one of {drafters}")
    assert said[4].startswith("last answer, none: ")
    assert said[5].startswith("all: ")
    assert said[6:9] == ["no system message", "started over", "system message: Be brief."]
    assert said[9].startswith("outpace: there is no /hlep: /help lists what there is")
    turns = json.loads(out_file.read_text())
    assert [len(turns), err.count("\n/")] == [4, 6]  # what has another slash is no command
    assert "[cut off after 8 tokens: --max-tokens allows more]" in err
    assert turns[1]["prompt_tokens"] > turns[0]["prompt_tokens"] > turns[2]["prompt_tokens"]


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on() -> None:
    running = spawn("chat", "--max-tokens", "4000", "--ignore-eos")
    assert running.stdin is not None
    assert running.stdout is not None
    running.stdin.write("Tell me a very long story.\n")
    running.stdin.flush()
    assert running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    running.stdin.write("/quit\n")
    _, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    running = spawn("chat")
    assert running.stdin is not None
    running.stdin.write("/reset\nSay hi.\n")
    running.stdin.flush()
    assert running.stdout is not None
    assert running.stdout.read(1)
    wait_for(lambda: running.poll() is not None or _sent(running))  # at the prompt Ctrl-C leaves
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert "Traceback" not in err


def _sent(running: subprocess.Popen[str]) -> bool:
    running.send_signal(signal.SIGINT)
    time.sleep(0.3)
    return False


def test_only_the_new_turn_is_tokenised_while_the_text_stands() -> None:
    from outpace.cli.conversation import Conversation
    from outpace.params import SamplingParams

    params = SamplingParams(max_tokens=12)
    with Engine.load("demo", drafter="ngram", prefix_rows=1) as engine:
        assert engine.tokenizer is not None
        encoded: list[str] = []
        real = engine.tokenizer.encode

        def counting(text: str, **options: bool) -> Any:
            encoded.append(text)
            return real(text, **options)

        engine.tokenizer.encode = counting  # type: ignore[method-assign, assignment]
        talk = Conversation(engine)
        first = talk.say("My name is Bob.", params)
        second = talk.say("Tell me my name.", params.with_(stop="name"))
        assert "Bob" not in encoded[1]
        assert encoded[1].endswith("Tell me my name.<|im_end|>\n<|im_start|>assistant\n")
        assert second.stats.reused_tokens >= first.prompt_tokens + first.completion_tokens - 2
        third = talk.say("And again.", params)
        if isinstance(second.stopped_by, str):  # its ids say more than its text: encoded anew
            assert "Bob" in encoded[2]
        assert third.stats.reused_tokens >= first.prompt_tokens
        engine.check()


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outpace(capsys, "doctor", "--json")
    value = json.loads(out)
    assert code == 0
    assert value["model"]["ok"]
    assert value["model"]["name"] == "demo"
    assert {"python", "packages", "cpu", "memory", "backends"} <= set(value)
    assert (
        len(value["model"]["cost"]["widths"]) == len(value["model"]["cost"]["seconds"]) > 1
    )  # fewer on a busy machine
    if value["model"]["backend"] == "native":
        assert 1 <= value["model"]["team"]["size"] <= value["model"]["threads"]
        assert set(value["model"]["team"]["hand_over_seconds"]) == {"asleep", "awake"}
        assert value["model"]["learnt"]["curves"]
        assert bool(value["amx"]["off"]) != ("avx512-amx" in value["instruction_sets"]["usable"])
        shown = outpace(capsys, "doctor")[1]
        drafter = value["model"]["drafter"]
        assert drafter["auto"] in (AUTO, BESIDE)
        assert (
            f"drafter       auto stands for {drafter['auto']}: {drafter['why']}\n" in shown
        )  # the demo model: always a why
        off = value["amx"]["off"]
        assert "amx           " + (f"not used: {off}" if off else "permitted and checked") in shown


def test_doctor_of_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outpace(capsys, "doctor", "--model", "./nope")
    assert (code, "FAILED: ./nope does not exist: check the path, or use --model demo" in out) == (1, True)


def test_help_lists_every_drafter(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from outpace.drafters.catalogue import listed

    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = outpace(capsys, "generate", "--help")
    for spelled, says in listed():
        assert re.search(rf"^  {re.escape(spelled)} +{re.escape(says)}$", out, re.M)


def test_every_argument_in_a_message_is_spelled_as_an_option() -> None:
    from outpace.cli.app import chosen
    from outpace.errors import Argument

    for argument, expected in (
        (Argument("max_tokens", 0), "--max-tokens 0"),
        (Argument("stop_ids"), "--stop-id"),
        (Argument("bad_words"), "--bad-word"),
        (Argument("raw", True), "--raw"),
        (Argument("temperature", 1), "--temperature 1"),
        (Argument("model", "a b"), "--model 'a b'"),
        (Argument("seed", -1), "--seed -1"),
        (Argument("model", "-x"), "--model=-x"),
        (Argument("allowed_tokens", [1]), "allowed_tokens=[1]"),
    ):
        assert chosen(["generate", "hi"]).spell(argument) == expected
    assert chosen(["chat"]).spell(Argument("raw", True)) == "outpace generate --raw"
    assert chosen(["train", "eagle"]).spell(Argument("steps", 3)) == "--steps 3"
    assert chosen(["train", "eagle"]).spell(Argument("max_tokens", 0)) == "max_tokens=0"


def test_a_system_message_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("generate", "Say hello.", "--json", "-n", "4", "--prompt-logprobs", "0")
    plain = json.loads(outpace(capsys, *asked)[1])
    found = json.loads(outpace(capsys, *asked, "--system", "You are a pirate, and say so at every turn.")[1])
    assert found["prompt_tokens"] != plain["prompt_tokens"]
    assert "pirate" in "".join(entry["text"] for entry in found["prompt_logprobs"] if entry)


def test_what_is_asked_for_is_what_comes(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("generate", "The capital of France is", "--raw", "--json", "-n", "30", "--stop", "e")
    plain = json.loads(outpace(capsys, *asked)[1])
    assert "Paris" in plain["text"]
    more = ("--bad-word", "Paris", "--min-tokens", "20", "--include-stop", "--compare")
    found = json.loads(outpace(capsys, *asked, *more)[1])
    assert "Paris" not in found["text"]
    assert plain["completion_tokens"] < 20 <= found["completion_tokens"]
    assert found["text"].endswith("e") or found["finish_reason"] == "length"
    assert found["compare"]["identical"]


def test_drafters_are_predicted_and_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))  # of what is measured
    page, drafters = tmp_path / "page.html", ("-d", "ngram:min=2", "-d", "suffix:size=3", "-d", "layers:1")
    asked = ("drafters", "demo", "-n", "48", "--prompts", prompts)
    code, out, err = outpace(capsys, *asked, *drafters, "--measure", "--sizes", "--price-per-hour", "2", "--json")
    assert code == 0, err
    found = json.loads(out)
    settings = {entry["name"]: entry for entry in found["settings"]}
    assert {"none", "ngram:min=2", "layers:1", *(f"ngram:min=2 --size {n}" for n in SIZES)} <= set(settings)
    ran = {name: entry for name, entry in settings.items() if "measured" in entry}
    assert set(ran) >= {"none", "ngram:min=2", "suffix:size=3 --size 3", "layers:1"}
    for name, entry in ran.items():  # of the ratio, which was predicted, and not of tokens/s
        if "error" in entry and entry["over_plain"]["ratio"]:
            assert entry["error"] == pytest.approx(entry["speedup"] / entry["over_plain"]["ratio"] - 1), name
    assert settings["none"]["over_plain"]["ratio"] == settings["none"]["speedup"] == 1.0
    assert settings["none"]["price_per_million_tokens"] == pytest.approx(2e6 / 3600 / settings["none"]["measured"])
    assert "own forwards" in found["not_predicted"]["layers:1"]
    assert found["recommended"] in (None, *ran)
    if found["recommended"]:
        assert settings[found["recommended"]]["over_plain"]["low"] > 1
    assert outpace(capsys, *asked, *drafters, "--readers", "2", "--html", page)[0] == 0
    assert "<svg" in page.read_text()
    assert "http" not in page.read_text().replace("http://www.w3.org/2000/svg", "")
    far = json.loads(outpace(capsys, *asked, *drafters, "--card", "H100", "--json")[1])
    assert far["machine"] == {"card": "H100"}
    assert all("measured" not in entry for entry in far["settings"])


def test_a_datastore_from_answers_to_drafts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts, answers, store = (str(tmp_path / name) for name in ("prompts.jsonl", "answers.jsonl", "store"))
    Path(prompts).write_text('{"prompt": "Say hello."}\n{"prompt": "Count to five."}\n')
    made = ("datastore", "answers", "--prompts", prompts, "-n", "16", "-t", "1", answers)
    assert outpace(capsys, *made)[:2] == (0, f"{answers}: 2 answers\n")
    written = Path(answers).read_text()
    assert outpace(capsys, *made)[0] == 0
    assert Path(answers).read_text() == written  # nothing is answered twice
    Path(answers).write_text(written[:-9])  # killed in the middle of a line
    code, out, err = outpace(capsys, *made)
    assert (code, out) == (0, f"{answers}: 2 answers\n")
    assert "the last line was cut short" in err
    assert Path(answers).read_text() == written
    code, out, _ = outpace(capsys, "datastore", "build", "--corpus", answers, "-t", "1", store)
    assert code == 0
    assert f"retrieval:{store}" in out
    asked = ("generate", "Say hello.", "-n", "16", "-t", "1", "--json", "--compare", "--size", "4")
    code, out, _ = outpace(capsys, *asked, "--drafter", f"retrieval:{store}")
    found = json.loads(out)
    assert code == 0
    assert found["compare"]["identical"]
    assert found["stats"]["accepted"] > 4  # it has read the answer


BAD = {
    "no datastore": (("generate", "hi", "--drafter", "retrieval:nowhere"), "no datastore"),
    "datastore of nothing": (("datastore", "build", "--corpus", "nowhere.txt", "OUT"), "nowhere.txt"),
    "empty prompt": (("generate", ""), "empty"),
    "unknown drafter": (("generate", "hi", "--drafter", "ngrm"), "did you mean ngram"),
    "measuring elsewhere": (("drafters", "demo", "--measure", "--cores", "4"), "on this machine"),
    "sizes without measuring": (("drafters", "demo", "--prompts", "x", "--sizes"), "give both"),
    "no rows": (("drafters", "demo", "--measure", "--limit", "0"), "--limit 0 is out of range"),
    "an unknown card": (("drafters", "demo", "--prompts", "x", "--card", "H1"), "A100"),
    "figures of a server": (("serve", "--json"), "leave it out"),
    "other tokenizer": (
        ("generate", "hi", "--drafter", "model:demo-gemma", "--acceptance", "rejection", "-T", "1"),
        "model:demo-gemma has another tokenizer",
    ),
    "top-p": (("generate", "hi", "--top-p", "0"), "--top-p 0.0 leaves no token: for the likeliest one use --temp"),
    "system without a template": (("generate", "hi", "--system", "x", "--raw"), "--system needs the chat template"),
    "no trace": (("generate", "hi", "--trace", "/nope/x.trace"), "cannot be written"),
    "kv dtype": (("generate", "hi", "--kv-dtype", "int2"), "--kv-dtype int2 is not known"),
    "logit bias": (("generate", "hi", "--logit-bias", "x"), "token id and a number"),
    "memory": (("generate", "hi", "--kv-memory", "lots"), "not an amount of memory"),
    "too little memory": (("generate", "hi", "--kv-memory", "4KiB"), "--kv-memory"),
    "long prompt": (("generate", "hi", "--max-length", "20"), "shorten the prompt"),
    "stop id": (("generate", "hi", "--stop-id", "999999"), "--stop-id has token id 999999"),
    "no model there": (("generate", "hi", "--model", "/"), "no config.json"),
    "several samples": (("generate", "hi", "--compare", "--n", "2"), "leave --n out"),
    "nothing to verify": (
        ("verify", "--prompts", "PROMPTS", "--acceptance", "rejection", "-T", "1"),
        "not the same tokens",
    ),
    "context": (("verify", "--prompts", "PROMPTS", "--max-length", "10"), "prompt a has"),
    "bench context": (("bench", "--prompts", "PROMPTS", "--max-length", "10"), "prompt a has"),
    "missing argument": (("drafters",), "MODEL"),
    "unknown command": (("benhc",), "benhc"),
    "unknown option": (("generate", "hi", "--bogus"), "--bogus"),
    "no prompts file": (("bench", "--prompts", "/nope.jsonl"), "cannot be read"),
    "rm of nothing": (("rm",), "--remove"),
    "a cache folder and a download": (("cache", "--cache-dir", ".", "--remove", "a/b"), "leave it out for --remove"),
    "a cache folder and drafters": (("cache", "--cache-dir", ".", "--forget"), "leave it out for --forget"),
    "no cache folder": (("cache", "--cache-dir", "/nope"), "is no folder: give that of outpace serve --cache-dir"),
    "no amount": (("serve", "--cache-dir", "/tmp", "--cache-size", "lots"), "--cache-size: 'lots' is not an amount"),
    "twice": (("bench", "--prompts", "PROMPTS", "-d", "none", "-d", "none"), "twice"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_with_a_remedy(capsys: pytest.CaptureFixture[str], case: str, prompts: Path) -> None:
    args, expected = BAD[case]
    code, out, err = outpace(capsys, *(prompts if a == "PROMPTS" else a for a in args))
    assert code == 2
    assert out == ""
    assert err.startswith("outpace: ")
    assert err.count("\n") == 1
    assert expected.lower() in err.lower()


@pytest.mark.parametrize("precious", ["# Notes\n", "[a](b)\n"])
def test_a_file_of_another_kind_is_not_written_over(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, precious: str
) -> None:
    for name, kind, args in (
        ("notes.md", "JSON", ("generate", "hi", "--json", "FILE")),
        ("notes.md", "JSON", ("cache", "--json", "FILE")),
        ("notes.md", "JSON lines", ("generate", "hi", "--trace", "FILE")),
        ("notes.md", "JSON lines", ("datastore", "answers", "--prompts", "FILE", "FILE")),
        ("run.trace", "HTML", ("trace", "view", "FILE", "--out", "FILE")),
        ("notes.md", "HTML", ("report", "FILE", "--out", "FILE")),
        ("a-dark.svg", "SVG", ("report", "FILE", "--out", tmp_path / "new.html", "--chart", tmp_path / "a")),
    ):
        file = tmp_path / name
        file.write_text(precious)
        code, _, err = outpace(capsys, *(file if arg == "FILE" else arg for arg in args))
        assert code == 2
        assert err.startswith(f"outpace: {file} is there already, and is no {kind}: give another name")
        assert file.read_text() == precious


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        ('{"prompt": "a"}\n\n[1]\n', "line 3: not an object"),
        ('{"id": 1}\n', "line 1: needs turns"),
        ('{"turns": []}\n', "line 1: needs turns"),
        ("\n", "has no prompts"),
    ],
)
def test_bad_prompts_files_name_the_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, expected: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    code, _, err = outpace(capsys, "verify", "--prompts", path)
    assert code == 2
    assert expected in err


def test_prompts_that_are_not_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "\xff\xfe"}\n')
    code, _, err = outpace(capsys, "verify", "--prompts", path)
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot be read" in err
    path.write_text('{"id": "x", "prompt": "\\ud800"}\n')  # JSON may say half a character
    code, _, err = outpace(capsys, "verify", "--prompts", path)
    assert code == 2
    assert "prompt x: the text is not valid Unicode" in err


def test_nothing_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outpace(capsys)
    assert code == 2
    assert "generate" in out
    assert err == ""


def test_a_fault_of_our_own_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:

    for error, code, expected in (
        (ZeroDivisionError("oops"), 70, "internal error, ZeroDivisionError: oops: please report what --debug shows"),
        (MemoryError(), 2, "out of memory"),
        (OSError(28, "No space left on device"), 2, "No space left"),
    ):

        def fail(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(Engine, "encode", fail)
        got, _, err = outpace(capsys, "generate", "hi")
        assert got == code
        assert expected in err
        assert err.count("\n") == 1


def test_verbose_shows_what_loading_takes() -> None:
    running = spawn("generate", "hi", "--max-tokens", "1", "--verbose")
    _, err = running.communicate(timeout=60)
    assert running.returncode == 0
    assert "memory: target " in err
    assert ", KV " in err


def test_debug_shows_the_traceback() -> None:
    running = spawn("generate", "hi", "--model", "nope.gguf", "--debug")
    _, err = running.communicate(timeout=60)
    assert running.returncode != 0
    assert "Traceback" in err
