"""What error messages advise exists and works: options, commands, arguments, extras, files; and whoever follows them
gets on."""

from __future__ import annotations

import ast
import io
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outpace
from outpace import Engine, OutpaceError, SamplingParams, errors
from outpace.cli import main as cli
from outpace.cli.app import NAMES, command
from outpace.cli.command import Command
from outpace.common.habits import HOMES
from outpace.drafters.catalogue import COMMON, METHODS
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.engine.intake import EngineOptions
from outpace.models.options import LoadOptions
from tests.toy import ToyModel, ToyTokenizer
from tests.unit.test_types import REFUSED

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "outpace"
ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, OutpaceError)}


@dataclass(frozen=True)
class Message:
    """A message as the source has it. ``text``: with ``{...}`` for what is filled in; ``arguments``: its ``Argument``s,
    name and value, as far as they stand there; ``packages``: what ``install`` is called with."""

    where: Path
    line: int
    text: str
    arguments: tuple[tuple[str, Any], ...]
    packages: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where}:{self.line}: {self.text}"


def called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "id", getattr(function, "attr", ""))


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return (
        f"<{node.args[0].value}>" if called(node) == "Argument" and isinstance(node.args[0], ast.Constant) else "{...}"
    )  # type: ignore[attr-defined]


def messages() -> Iterator[Message]:
    """Of every error that is raised on purpose, and of texts that such a message is made of."""
    for path in sorted(SOURCE.rglob("*.py")):
        where = path.relative_to(SOURCE)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if called(node) not in {*ERRORS, "UsageError", "APIError"}:
                continue
            assert isinstance(node, ast.Call)
            inside = [each for argument in node.args for each in ast.walk(argument) if isinstance(each, ast.Call)]
            given = [
                (
                    each.args[0].value,
                    each.args[1].value if isinstance(each.args[1:2][:1] and each.args[1], ast.Constant) else ...,
                )  # type: ignore[attr-defined]
                for each in inside
                if called(each) == "Argument" and isinstance(each.args[0], ast.Constant)
            ]
            packages = [a.value for each in inside if called(each) == "install" for a in each.args]  # type: ignore[attr-defined]
            text = "".join(text_of(argument) for argument in node.args)
            yield Message(where, node.lineno, text, tuple(given), tuple(packages))


ALL = list(messages())
COMMANDS = {
    name: entry
    for top in NAMES
    for found in [command(top)]
    for name, entry in (
        [(top, found)] if isinstance(found, Command) else [(f"{top} {c.name}", c) for c in found.commands]
    )
}


def options(entry: Command) -> set[str]:
    """Names of a command's options, also those without which a flag is turned off."""
    found = {name for each in entry.options() for name in each.option or ()}
    return found | {"--help", "-h"} | {name.replace("--", "--no-", 1) for name in found if name.startswith("--")}


def test_there_are_messages() -> None:
    assert len(ALL) > 400


def test_options_in_messages_are_of_the_command_that_raises_them() -> None:
    """A message of what others call, too, has an ``Argument``, which each spells in its own way."""
    wrong = []
    for message in ALL:
        parts = message.where.with_suffix("").parts
        own: set[str] = set()
        if parts[0] in ("cli", "server"):
            top = parts[1] if parts[0] == "cli" else "serve"
            raisers = [entry for name, entry in COMMANDS.items() if name.split()[0] == top] or list(COMMANDS.values())
            own = set.union(*(options(entry) for entry in raisers))
        for found in re.finditer(r"(?<![\w-])--?[a-z][a-z-]*", message.text):
            before = re.findall(r"outpace ((?:[a-z]+ )*[a-z]+)", message.text[: found.start()])
            named = next((COMMANDS[name] for name in COMMANDS if before and before[-1].startswith(name)), None)
            behind = message.text[: found.start()].endswith("{...} ") and found[0] == "--force-reinstall"  # pip's
            if not behind and found[0] not in (options(named) if named is not None else own):
                wrong.append(f"{found[0]} in {message}")
    assert not wrong, "\n".join(wrong)


def test_commands_functions_and_pages_in_messages_are_there() -> None:
    def missing(text: str) -> Iterator[str]:
        for found in re.findall(r"\boutpace ((?:[a-z]+ ?)+)", text):
            words = found.split()
            if words[0] in NAMES and words[0] not in COMMANDS and " ".join(words[:2]) not in COMMANDS:
                yield f"outpace {found}"
        for found in re.findall(r"\boutpace\.([a-z]\w*)\(", text):
            if found not in outpace.__all__:
                yield f"outpace.{found}"
        for found in re.findall(r"\bEngine\.(\w+)|\b(generate_many)\b", text):
            if not hasattr(Engine, found[0] or found[1]):
                yield "".join(found)
        for found in re.findall(r"\bdocs/[\w./-]+", text):
            if not (ROOT / found).is_file():
                yield found

    wrong = [f"{found} in {message}" for message in ALL for found in missing(message.text)]
    assert not wrong, "\n".join(wrong)


def test_arguments_in_messages_are_taken_and_so_are_their_values() -> None:
    """By a public call, or by a command: somebody can give it."""
    taken = {name for names in HOMES.values() for name in names} | set(SamplingParams.__dataclass_fields__)
    taken |= {each.name for entry in COMMANDS.values() for each in entry.options()}
    taken |= set(re.findall(r"^    (\w+):", "".join(p.read_text() for p in SOURCE.glob("server/api/*.py")), re.M))
    here = {
        name: set(re.findall(r"\b\w+(?=\s*[:=])", (SOURCE / name).read_text(encoding="utf-8")))
        for name in {message.where for message in ALL}
    }
    wrong = []
    for message in ALL:
        for name, value in message.arguments:
            if name not in taken and (message.where.parts[0] == "cli" or name not in here[message.where]):
                wrong.append(f"{name}: {message}")
            for kind in (LoadOptions, EngineOptions, SamplingParams):
                if value is not ... and name in kind.__dataclass_fields__:
                    kind(**{name: value})
    assert not wrong, "\n".join(wrong)


def test_no_message_spells_an_argument_itself() -> None:
    """An ``Argument`` is spelled as whoever gave it does. Of specs, options are spelled in one way everywhere."""
    names = {
        *LoadOptions.__dataclass_fields__,
        *EngineOptions.__dataclass_fields__,
        *SamplingParams.__dataclass_fields__,
    }
    names -= {option for method in METHODS.values() for option in (*method.options, *COMMON)}
    there = re.compile(rf"(?<![\w(.])({'|'.join(names)})=(?!\w*\()")
    wrong = [str(message) for message in ALL if message.where.parts[0] != "integrations" and there.search(message.text)]
    assert not wrong, "\n".join(wrong)


def test_what_is_to_be_installed_is_there_and_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "scripts").iterdir() if path.is_file())
    wrong = []
    for message in ALL:
        for package in message.packages:
            extra = re.fullmatch(r"outpace\[(\w+)\]", package)
            if extra[1] not in project["optional-dependencies"] if extra else package not in scripts:
                wrong.append(f"{package}: {message}")
    assert not wrong, "\n".join(wrong)
    assert sum(bool(message.packages) for message in ALL) > 8


def test_variables_in_messages_are_read() -> None:
    """Ours by our own code; others' are Hugging Face's and those of the CPU's libraries."""
    code = "".join(
        path.read_text(encoding="utf-8") for path in [*SOURCE.rglob("*.py"), *(ROOT / "native").rglob("*.cpp")]
    )
    for message in ALL:
        for name in re.findall(r"\b(?:OUTPACE|HF)_[A-Z_]+\b", message.text):
            read = rf'environ[^"\n]*"{name}"|getenv\("{name}"'
            assert re.search(read, code) or name in ("HF_HOME", "HF_ENDPOINT", "HF_TOKEN"), message


# -- whoever follows a message gets on ---------------------------------------------------------------------------------

NUMBER = r"(-?[\d.e+]+)"
REMEDIES: tuple[tuple[str, Callable[[str, re.Match[str]], list[dict[str, Any]]]], ...] = (
    # what a remedy says, and the values by which whoever reads it for the parameter ``name`` may replace the wrong one
    (rf"give a number at least {NUMBER} and at most {NUMBER}", lambda n, m: [{n: float(m[1])}, {n: float(m[2])}]),
    (rf"give a number above {NUMBER} and at most {NUMBER}", lambda n, m: [{n: float(m[1]) + 1e-9}, {n: float(m[2])}]),
    (rf"give a whole number from {NUMBER} to {NUMBER}", lambda n, m: [{n: int(m[1])}, {n: int(m[2])}]),
    (rf"use 0 \(greedy\) or at least {NUMBER}", lambda n, m: [{n: 0}, {n: float(m[1])}]),
    (rf"give a whole number of at least {NUMBER}, or leave it out", lambda n, m: [{n: int(m[1])}, {}]),
    (rf"give at least {NUMBER}, or None", lambda n, m: [{n: float(m[1])}, {n: None}]),
    (rf"give at least {NUMBER}$", lambda n, m: [{n: int(m[1])}]),
    (r"give one, or leave it out", lambda n, m: [{n: "cpu"}, {}]),
    (r"give seconds above 0, or None", lambda n, m: [{n: 0.001}, {n: None}]),
    (r"neither True nor False: give one of them", lambda n, m: [{n: True}, {n: False}]),
    (r"None (draws one|decodes to the end of the context)", lambda n, m: [{n: None}]),
    (r"give a list of token ids", lambda n, m: [{n: [1, 2]}]),
    (
        r"give whole numbers from 0 on",
        lambda n, m: [{n: {0: 1.0}} if n == "logit_bias" else {n: [[0]] if n == "bad_words" else [0]}],
    ),
    (r"give at least one id, or None", lambda n, m: [{n: [1]}, {n: None}]),
    (r"give \{token id: bias\}", lambda n, m: [{n: {1: 0.5}}]),
    (
        rf"give a number from {NUMBER} to {NUMBER}, or -inf to forbid the token",
        lambda n, m: [{n: {1: float(value)}} for value in (m[1], m[2], "-inf")],
    ),
    (r"give a string or a list of strings", lambda n, m: [{n: "a"}, {n: ["a", "b"]}]),
    (r"give texts, or lists of token ids", lambda n, m: [{n: ["a"]}, {n: [[1, 2]]}]),
    (r"give a list of logit rules", lambda n, m: [{n: []}, {n: [len]}]),
    (r": remove it$", lambda n, m: [{n: []}]),
    (r"use (\w+)=(\w+) (or|and) (\w+)=(\w+)", lambda n, m: instead(n, m)),
    (r"use one of ([\w, ]+)$", lambda n, m: [{n: value} for value in m[1].split(", ")]),
    (r"lower it, or raise (\w+)$", lambda n, m: [{n: 1}, {m[1]: 1024, n: 300}]),
    (r"draft 0 \(plain decoding\) to (\d+) tokens a step", lambda n, m: [{n: 0}, {n: int(m[1])}]),
    (r"tokens a step, or auto$", lambda n, m: [{n: "auto"}]),
    (r"0 is usual, more goes first", lambda n, m: [{n: 0}, {n: 3}]),
    (r"give a name, or '' for the common one", lambda n, m: [{n: "a"}, {n: ""}]),
    (r"this engine has ([\w, ]+)$", lambda n, m: [{n: value} for value in m[1].split(", ")]),
)


def instead(name: str, found: re.Match[str]) -> list[dict[str, Any]]:
    one, other = ({found[i]: {"True": True}.get(found[i + 1]) or int(found[i + 1])} for i in (1, 4))
    return [one, other] if found[3] == "or" else [one | other]


def remedies(name: str, message: str) -> list[dict[str, Any]]:
    """The keywords that ``message`` advises in the place of ``name``."""
    return [given for text, values in REMEDIES if (found := re.search(text, message)) for given in values(name, found)]


BAD_TEXTS: dict[str, list[Any]] = {"raw": ["no", 1, None], "add_special_tokens": ["no", 0, None]}
BAD_REQUESTS: dict[str, list[Any]] = BAD_TEXTS | {
    "reuse_prefix": [3], "verify_resume": ["x"], "size": [-1, 64, "many", 2.5, True],
    "acceptance": ["typcal", 5], "deadline": [0, -1, "1", True], "priority": [1.5, "high", None], "owner": [5],
    "cache_scope": [None], "drafter": ["sufix", 5],
}  # fmt: skip
BAD_LOADS: dict[str, list[Any]] = {
    "backend": ["cuda", None, 5, ["native"]], "dtype": ["int8", "fp16"], "kv_dtype": ["int2"], "quantize": ["int2"],
    "threads": [0, -1, 1.5, True, "2"], "max_length": [0, 1, "9"], "kv_memory": [0, -1, 2.5, True],
    "strict": ["no", 1, None], "offline": ["yes"], "trust_remote_code": ["no"], "allow_pickle": ["no"],
    "device": [3, None], "revision": [5],
}  # fmt: skip
BAD_ENGINES: dict[str, list[Any]] = {
    "max_rows": [0, "9", True], "prefill_chunk": [0, 1.5], "prefix_rows": [-1, None], "prefill_delay": [0, "1", True],
    "step_stretch": [0.5, "1"], "size": [64, "x"], "acceptance": ["x", None],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        ("SamplingParams", REFUSED | {"max_tokens": [0, -1]}), ("request", BAD_REQUESTS), ("text", BAD_TEXTS),
        ("LoadOptions", BAD_LOADS), ("EngineOptions", BAD_ENGINES),
    ],
)  # fmt: skip
def test_the_values_that_a_message_advises_are_taken(kind: str, table: dict[str, list[Any]]) -> None:
    with Engine(ToyModel(6), ToyTokenizer(), drafter=NgramDrafter(), size="auto") as engine:  # type: ignore[arg-type]
        calls: dict[str, Callable[..., Any]] = {
            "SamplingParams": SamplingParams,
            "request": lambda **given: engine.prepare("ab", **given),
            "text": lambda **given: engine.encode("ab", **given),
            "LoadOptions": LoadOptions,
            "EngineOptions": EngineOptions,
        }
        call = calls[kind]
        for name, value in ((name, value) for name, values in table.items() for value in values):
            with pytest.raises(OutpaceError) as caught:
                call(**{name: value})
            message = str(caught.value)
            assert name in message
            assert "\n" not in message
            advised = remedies(name, message)
            assert advised, message
            for given in advised:
                room = {"max_tokens": None} if "min_tokens" in given else {}
                call(**{**room, **given})  # nothing is refused


# per case: a call that is refused, what the message has, and what follows from it
DEMO: dict[str, tuple[Callable[[Engine], Any], str, Callable[[Engine], Any]]] = {
    "a list": (
        lambda e: e.generate(["a", "b"], max_tokens=1), "use generate_many",
        lambda e: e.generate_many(["a", "b"], max_tokens=1),
    ),
    "one text": (
        lambda e: e.generate_many("a", max_tokens=1), "use generate", lambda e: e.generate("a", max_tokens=1),
    ),
    "samples": (
        lambda e: e.generate("a", n=2, max_tokens=1), "use generate_many",
        lambda e: e.generate_many(["a"], n=2, max_tokens=1),
    ),
    "no list": (
        lambda e: e.generate_many(5), "give a list of prompts", lambda e: e.generate_many([[5]], max_tokens=1),
    ),
    "prompts in a prompt": (
        lambda e: e.stream([[1], [2]]).__next__(), "several prompts go to generate_many",
        lambda e: e.generate_many([[1], [2]], max_tokens=1),
    ),
    "no prompt": (lambda e: e.generate(""), "give some text", lambda e: e.generate("a", max_tokens=1)),
    "no ids": (lambda e: e.generate([]), "give a token id", lambda e: e.generate([5], max_tokens=1)),
    "not a prompt": (
        lambda e: e.generate(None), "give text, token ids, or chat messages",
        lambda e: [e.generate(p, max_tokens=1) for p in ("a", [5], [{"role": "user", "content": "a"}])],
    ),
    "bytes, which are no ids": (
        lambda e: e.generate(bytearray(b"hi")), "give text, token ids, or chat messages",
        lambda e: e.generate("hi", max_tokens=1),
    ),
    "an array of no dimension": (
        lambda e: e.generate(np.array(5)), "give text, token ids, or chat messages",
        lambda e: e.generate(np.array([5]), max_tokens=1),
    ),
    "a long prompt": (lambda e: e.generate([5] * 99), "shorten the prompt", lambda e: e.generate([5] * 9)),
    "an id": (lambda e: e.generate([10**6]), "ids go from 0 to 49151", lambda e: e.generate([49151], max_tokens=1)),
    "a message": (
        lambda e: e.generate([{"rol": "user"}]), "give a mapping with 'role' and 'content'",
        lambda e: e.generate([{"role": "user", "content": "a"}], max_tokens=1),
    ),
    "a template": (
        lambda e: e.generate([{"role": "user"}]), "give plain text with raw=True",
        lambda e: e.generate("a", raw=True, max_tokens=1),
    ),
    "a larger size": (
        lambda e: e.generate("a", size=9), "make the engine with a larger one",
        lambda e: Engine.load("demo", drafter="ngram", size=9, threads=1).generate("a", size=9, max_tokens=1),
    ),
    "size auto": (
        lambda e: e.generate("a", size="auto"), "needs an engine made with it",
        lambda e: Engine.load("demo", drafter="ngram", size="auto", threads=1).generate("a", size="auto", max_tokens=1),
    ),
    "resume": (
        lambda e: e.generate("a", resume=[5], temperature=1), "give seed",
        lambda e: e.generate("a", resume=[5], temperature=1, seed=1, max_tokens=2),
    ),
    "no resume": (
        lambda e: e.generate("a", resume=5), "give the ids", lambda e: e.generate("a", resume=[5], max_tokens=2),
    ),
    "parameters": (
        lambda e: e.generate("a", {"max_tokens": 1}), "keywords such as max_tokens=8",
        lambda e: e.generate("a", max_tokens=8),
    ),
    "a name": (lambda e: Engine.load("dmeo"), "did you mean demo?", lambda e: Engine.load("demo")),
    "a path": (lambda e: Engine.load("./no"), "use model='demo'", lambda e: Engine.load(model="demo")),
    "a dtype": (
        lambda e: Engine.load("demo", backend="native", dtype="float16"), ": leave out dtype='float16'",
        lambda e: Engine.load("demo", backend="native"),
    ),
    "a device": (
        lambda e: Engine.load("demo", backend="native", device="cuda"), ": leave out device='cuda'",
        lambda e: Engine.load("demo", backend="native"),
    ),
    "rounded": (
        lambda e: Engine.load("demo", dtype="bfloat16", quantize="int8"), "give one of the two",
        lambda e: Engine.load("demo", quantize="int8"),
    ),
    "threads": (
        lambda e: Engine.load("demo", threads=999), "give 1 to 256",
        lambda e: [Engine.load("demo", threads=n).close() for n in (1, 256)],
    ),
    "memory": (
        lambda e: Engine.load("demo", kv_memory="lots"), "2GiB, 512MB or 1073741824",
        lambda e: [Engine.load("demo", kv_memory=m).close() for m in ("2GiB", "512MB", "1073741824")],
    ),
    "too little memory": (
        lambda e: Engine.load("demo", kv_memory="64KiB").generate("a"), "raise kv_memory, or lower max_tokens",
        lambda e: Engine.load("demo", kv_memory="64MiB").generate("a", max_tokens=1),
    ),
    "a tokenizer": (
        lambda e: Engine.load("demo", tokenizer="x"), "one that is loaded by name has its own",
        lambda e: Engine.load("demo"),
    ),
    "one drafter": (
        lambda e: Engine.load("demo", drafters="ngram"), "give a list",
        lambda e: Engine.load("demo", drafters=["ngram"]),
    ),
    "no drafter": (
        lambda e: Engine.load("demo", drafter=5), "text such as 'ngram'",
        lambda e: Engine.load("demo", drafter="ngram"),
    ),
    "a drafter's name": (
        lambda e: Engine.load("demo", drafter="ngrm"), "did you mean ngram?",
        lambda e: Engine.load("demo", drafter="ngram"),
    ),
    "a drafter's argument": (
        lambda e: Engine.load("demo", drafter="eagle"), "or demo: the one that comes for the demo model",
        lambda e: Engine.load("demo", drafter="eagle:demo"),
    ),
    "a drafter's option": (
        lambda e: Engine.load("demo", drafter="ngram:least=2"), "it takes min=, max=, candidates=, size=, fallback=",
        lambda e: Engine.load("demo", drafter="ngram:min=2,max=3,candidates=2,size=2"),
    ),
    "a drafter's range": (
        lambda e: Engine.load("demo", drafter="eagle:demo,branch=99"), "give 1 to 16",
        lambda e: [Engine.load("demo", drafter=f"eagle:demo,branch={n}").close() for n in (1, 16)],
    ),
    "a drafter's history": (
        lambda e: Engine.load("demo", drafter="suffix:file=no/such"), "add history=1",
        lambda e: Engine.load("demo", drafter="suffix:history=1"),
    ),
    "a rejecting draft model": (
        lambda e: Engine.load("demo", drafter="lookahead", acceptance="rejection"), "use acceptance='coupled'",
        lambda e: Engine.load("demo", drafter="lookahead", acceptance="coupled"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with Engine.load("demo", drafter="ngram", size=4, max_length=64, threads=1) as engine:
        yield engine


@pytest.mark.parametrize("case", DEMO)
def test_who_follows_a_message_gets_on(case: str, demo: Engine) -> None:
    wrong, advice, right = DEMO[case]
    with pytest.raises(OutpaceError) as caught:
        wrong(demo)
    message = str(caught.value)
    assert advice in message, message
    assert "\n" not in message
    found = right(demo)
    if isinstance(found, Engine):
        found.close()


LINES: dict[str, tuple[str, str, tuple[str, ...]]] = {  # a command line, what its message has, lines that follow
    "a command": ("generat hi", "did you mean generate?", ("generate hi",)),
    "an option": ("generate hi --temperatur 1", "did you mean --temperature?", ("generate hi --temperature 1",)),
    "a spec": ("generate hi -d ngrm", "did you mean ngram?", ("generate hi -d ngram",)),
    "threads": (
        "generate hi --threads 0", "--threads 0 is out of range: give a whole number of at least 1, or leave it out",
        ("generate hi --threads 1", "generate hi"),
    ),
    "top-p": (
        "generate hi --top-p 0", "use --temperature 0 or --top-k 1",
        ("generate hi --temperature 0", "generate hi --top-k 1"),
    ),
    "min-tokens": (
        "generate hi --min-tokens 9", "--min-tokens 9 is more than --max-tokens 2: lower it, or raise --max-tokens",
        ("generate hi --min-tokens 1", "generate hi --min-tokens 9 --max-tokens 9"),
    ),
    "a backend": (
        "generate hi --backend cuda", "--backend cuda is not known: use one of auto, native, transformers",
        ("generate hi --backend auto", "generate hi --backend native"),
    ),
    "raw": (
        "generate hi --system x --raw", "--system needs the chat template, which --raw leaves out: give one of them",
        ("generate hi --system x", "generate hi --raw"),
    ),
    "samples": ("generate hi --compare --n 2", "leave --n out", ("generate hi --compare",)),
    "a size": (
        "generate hi --size 64", "--size 64 is out of range: draft 0 (plain decoding) to 63 tokens a step, or auto",
        ("generate hi --size 0", "generate hi --size 63", "generate hi --size auto"),
    ),
    "a dtype": (
        "generate hi --backend native --dtype float16", "leave out --dtype float16", ("generate hi --backend native",),
    ),
    "a bias": ("generate hi --logit-bias x", "like 42=-1.5", ("generate hi --logit-bias 42=-1.5",)),
    "acceptance": (
        "generate hi -T 1 --acceptance rejecton", "use one of coupled, rejection",
        tuple(f"generate hi -T 1 --acceptance {name}" for name in ("coupled", "rejection")),
    ),
    "lookahead": (
        "generate hi -T 1 -d lookahead --acceptance rejection", "use --acceptance coupled",
        ("generate hi -T 1 -d lookahead --acceptance coupled",),
    ),
    "drafters twice": (
        "bench --prompts PROMPTS -d none -d none", "name each configuration once", ("bench --prompts PROMPTS -d none",),
    ),
    "nothing to compare": (
        "verify --prompts PROMPTS -T 1 --acceptance rejection", "use --acceptance coupled",
        ("verify --prompts PROMPTS -T 1 --acceptance coupled",),
    ),
    "a prompt too long": (
        "bench --prompts PROMPTS --max-length 8", "shorten it, or leave it out", ("bench --prompts PROMPTS",),
    ),
    "a limit": (
        "bench --prompts PROMPTS --limit 0", "--limit 0 is out of range: give at least 1",
        ("bench --prompts PROMPTS --limit 1",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LINES)
def test_who_follows_a_message_of_a_command_gets_on(
    case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Count to ten."}\n')

    def run(line: str) -> tuple[int, str]:
        words = line.replace("PROMPTS", str(prompts)).split()
        asked = [] if "--max-tokens" in words or words[0] not in COMMANDS else ["--max-tokens", "2"]
        monkeypatch.setattr(sys, "argv", ["outpace", *words, *asked])
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        with pytest.raises(SystemExit) as left:
            cli.main()
        return int(left.value.code or 0), capsys.readouterr().err

    wrong, advice, right = LINES[case]
    code, message = run(wrong)
    assert (code, message.count("\n")) == (2, 1), message
    assert advice in message
    for line in right:
        assert run(line)[0] == 0, line
