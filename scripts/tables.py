"""What is made from the code's definitions: ``python scripts/tables.py`` writes it, ``--check`` compares.

A table stands in a page of the docs between ``<!-- table: NAME -->`` and ``<!-- end -->``. A class of typed keywords
(Python's type checkers compute nothing) stands in a module, below a docstring that names this script.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from functools import partial
from inspect import Parameter, isclass, isfunction, signature
from pathlib import Path
from pydoc import locate
from textwrap import wrap
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from outpace import _native
from outpace.cli.app import NAMES, command
from outpace.cli.command import Command
from outpace.common.parameter import definitions
from outpace.drafters.catalogue import METHODS
from outpace.engine.engine import Engine
from outpace.engine.intake import EngineOptions
from outpace.models.architecture import Family
from outpace.models.families import FAMILIES, WRAPPERS
from outpace.models.options import LoadOptions
from outpace.params import PARAMETERS, SamplingParams
from outpace.server.fields import FIELDS

DOCS = Path(__file__).parents[1] / "docs"
OWN = ("on_step", "cost", "cache_dir", "cache_size")  # parameters of Engine that Engine.load hands on
TESTS = Path(__file__).parents[1] / "tests"
SOURCE = Path(__file__).parents[1] / "src" / "outpace"
_BETWEEN = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _code(*names: str) -> str:
    return " ".join(f"`{name}`" for name in names)


def parameters() -> str:
    """Every sampling parameter, as ``outpace.params`` defines it."""
    head = ("parameter", "default", "values", "applies to", "meaning", "option", "in requests", "elsewhere")
    rows = []
    for name, p in PARAMETERS.items():
        request = _code(p.request) if p.request else ""
        known = [alias for alias in p.names if alias != p.request]
        values = p.values.range + (", None" if p.none == "value" else "")
        default = _code(repr(p.default))
        rows.append(
            (_code(name), default, values, str(p.stage), p.meaning, _code(*p.option or ()), request, _code(*known))
        )
    return _rows(head, rows)


def settings(kind: type[Any]) -> str:
    """The options of a dataclass."""
    rows = (
        (_code(name), _code(repr(p.default)) if not callable(p.default) else "", p.values.range, p.meaning)
        for name, p in definitions(kind).items()
    )
    return _rows(("option", "default", "values", "meaning"), rows)


def _commands() -> dict[str, Command]:
    """Every command by its name, those of a group by both names."""
    found = {}
    for name in NAMES:
        entry = command(name)
        own = {entry.name: entry} if isinstance(entry, Command) else {f"{name} {c.name}": c for c in entry.commands}
        found.update(own)
    return found


def commands() -> str:
    rows = ((_code(f"outpace {name}"), " ".join(c.about.split("\n\n")[0].split())) for name, c in _commands().items())
    return _rows(("command", "does"), rows)


def options(name: str) -> str:
    """The options of a command but those of loading, of sampling and of everybody's, which have their own tables."""
    shared = set() if name == "generate" else {each.name for each in _commands()["generate"].options()}
    rows = []
    for each in sorted(_commands()[name].options(), key=lambda each: bool(each.group)):  # as help has them
        if each.name in shared or not each.option:
            continue
        plain = callable(each.default) or each.default in (None, False, "", ()) or "efault:" in each.meaning
        rows.append((_code(*each.option), "" if plain else _code(str(each.default)), each.meaning))
    return _rows(("option", "default", "meaning"), rows)


def drafters() -> str:
    """Every drafting method, as ``outpace.drafters.catalogue`` registers it."""
    titles, rows = re.findall(r"^## (.*)", (DOCS / "drafters.md").read_text(encoding="utf-8"), re.M), []
    for name, method in METHODS.items():
        spec = f"{name}:{method.short}" if method.short else name
        title = next(title for title in titles if _code(spec) in title)  # of several methods, perhaps
        link = f"[{_code(spec)}](#{re.sub(r'[^a-z -]', '', title.lower()).replace(' ', '-')})"
        rows.append((link, method.says, _code(*method.options), method.costs, method.use))
    rows.append(("[`a+b`](#compositions)", "several at once", "", "their sum", "`suffix+eagle:PATH`"))
    return _rows(("spec", "what drafts", "options", "costs", "use it for"), rows)


def _values(hint: Any) -> str:
    """The JSON values of a type, in a few words."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Annotated:
        bounds = {name: value for more in inner[1].metadata for name, value in asdict(more).items()}
        if "ge" in bounds:
            return f"`{bounds['ge']:g}`"
        return "empty" if bounds.get("max_length") == 0 else _values(inner[0])
    if kind is Literal:
        return ", ".join(_code(json.dumps(value)) for value in inner)
    if kind is UnionType:
        return " or ".join(map(_values, inner))
    words = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number"}
    return {**words, bool: "true or false"}[kind or hint]


def request_fields() -> str:
    """Fields of other servers' requests: what is taken of them, and why no more is."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, other in FIELDS.items():
        values = "" if other.takes is None else _values(other.takes)
        alike.setdefault((values, other.why), []).append(name)
    rows = ((_code(*names), values, why) for (values, why), names in alike.items())
    return _rows(("fields", "taken, and change nothing", "else refused"), sorted(rows, key=lambda row: not row[1]))


def _kinds(family: Family) -> str:
    """What a family's layers have beyond attention to all positions and a dense feed-forward."""
    there = {
        "windows": family.windows, "latent attention": family.latent, "sinks": family.sinks,
        "gated delta nets": family.delta, "short convolutions": family.conv, "state spaces": family.scan,
        "experts": family.mixture, "inputs for each layer": family.inputs,
    }  # fmt: skip
    return ", ".join(kind for kind, has in there.items() if has)


def models() -> str:
    """Every family, as ``outpace.models.families`` describes it."""
    others = {
        name: (each.gguf, when)
        for each in FAMILIES
        for name, when in (
            (each.windowed, "with windows"), (each.mixed, "with experts"), (each.softmax, "with softmax"),
        )
    }  # fmt: skip
    rows = []
    for family in FAMILIES:
        wrapped = [name for name, kind in WRAPPERS.items() if kind == family.transformers]
        files = _code(*(name for name in (family.gguf, family.gguf_mixed) if name))
        if family.name in others:
            files = f"{_code(str(others[family.name][0]))} {others[family.name][1]}"
        torch = "our decoder"
        if family.modules or family.scan or family.latent or family.grows or family.mixture is not None:
            torch = "transformers' modules"
        if family.recurrent or family.varied:
            torch += ", folders"
        rows.append(
            (family.name, _code(family.model, *wrapped), files, _kinds(family), torch, "`mtp`" if family.heads else "")
        )
    head = ("family", "classes in folders", "`general.architecture` in GGUF", "layers", "Transformers backend")
    return _rows((*head, "drafts"), rows)


def types() -> str:
    """Types of matrices that the native backend reads."""
    rows = ((_code(name), f"{8 * size / values:.3g}") for name, values, size in _native.source_types().values())
    return _rows(("type", "bits a weight in the file"), rows)


def clients() -> str:
    """Others' clients and what they did, as tests/server/table.py recorded it."""
    found = json.loads((TESTS / "server" / "clients" / "table.json").read_text(encoding="utf-8"))
    kinds = ("chat", "stream", "tool", "structured", "whole task")
    rows = []
    for name, row in sorted(found.items(), key=lambda each: ("whole task" in each[1]["did"], each[0].lower())):
        without = row.get("without", ())
        done = ("yes" if kind in row["did"] else "has no such thing" if kind in without else "" for kind in kinds)
        rows.append((name, _code(row["package"]), row["version"], *done))
    head = ("client", "package", "version", "chats", "streams", "calls a tool", "structured answer", "whole task")
    return _rows(head, rows)


def peers(name: str) -> str:
    """Test functions of another server, by what becomes of them here."""
    table = tomllib.loads((TESTS / "server" / "peers" / f"{name}.toml").read_text(encoding="utf-8"))
    words = Counter(word for file in table["tests"].values() for test, word in file.items() if "[" not in test)
    said = {"runs": "run", "words": "run, but for the words of their model", **table["reasons"]}
    rows = [(said[word], str(count)) for word, count in words.most_common()]
    return _rows((f"tests of {table['package']} {table['version']}: {words.total()}", "functions"), rows)


def api() -> str:
    """What docs/api.md has by name: where pages are shown without the site's directives, as on GitHub, too."""
    rows = []
    for path in re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.M):
        found = locate(path)
        if isclass(found) or callable(found):
            about = " ".join((found.__doc__ or "").split("\n\n")[0].split()).replace("``", "`")
            own = [name for name, value in vars(found).items() if name[0] != "_" and isfunction(_bare(value))]
            rows.append((_code(path), about, _code(*own) if isclass(found) else ""))
    return _rows(("name", "is", "methods"), rows)


def _bare(method: Any) -> Any:
    return method.__func__ if isinstance(method, classmethod | staticmethod) else method


TABLES: dict[str, Callable[[], str]] = {
    **{f"peers-{name}": partial(peers, name) for name in ("llama", "vllm")},
    "api": api,
    "models": models,
    "types": types,
    "clients": clients,
    "drafters": drafters,
    "parameters": parameters,
    "engine": partial(settings, EngineOptions),
    "request-fields": request_fields,
    "loading": partial(settings, LoadOptions),
    "commands": commands,
    **{f"options-{name.replace(' ', '-')}": partial(options, name) for name in _commands()},
}


def _fields(kind: type[Any]) -> dict[str, str]:
    """The types of a dataclass's fields, as they are written, or what is taken by name."""
    taken = {name: parameter.keyword for name, parameter in definitions(kind).items()}
    return {field.name: taken.get(field.name) or field.type for field in fields(kind)}


def _named(function: Callable[..., Any]) -> dict[str, str]:
    """The types of a function's parameters that are given by name, as they are written."""
    own = signature(function).parameters.values()
    return {p.name: p.annotation.replace("SequenceOf", "Sequence") for p in own if p.kind is Parameter.KEYWORD_ONLY}


def keywords() -> Mapping[tuple[str, str], Mapping[str, str]]:
    """Module and name of each class of typed keywords, with the types of its names."""
    own = _named(Engine.__init__)
    return {
        ("params.py", "SamplingKeywords"): _fields(SamplingParams),
        ("models/options.py", "LoadKeywords"): _fields(LoadOptions),
        ("engine/request.py", "EngineKeywords"): _fields(EngineOptions),
        ("engine/request.py", "OwnKeywords"): {name: own[name] for name in OWN},
        ("engine/request.py", "OwnRequestKeywords"): _named(Engine.prepare),
    }


def typed(source: str, name: str, types: Mapping[str, str]) -> str:
    """``source`` with the body of its class ``name`` made anew."""
    head = rf'(class {name}\(.*\):\n    """[^"]*"""\n)(?:\n(?:    \w+: .*\n)+)?'
    body = "".join(f"    {key}: {kind}\n" for key, kind in types.items())
    written, count = re.subn(head, lambda found: f"{found[1]}\n{body}", source)
    assert count == 1, name
    return written


def homes() -> dict[str, list[str]]:
    """Who takes which keywords, but for sampling parameters."""
    load = [name for name in signature(Engine.load).parameters if name != "options"]
    options = [each.name for kind in (LoadOptions, EngineOptions) for each in fields(kind)]
    many, one, request = (_named(method) for method in (Engine.generate_many, Engine.generate, Engine.prepare))
    return {
        "Engine.generate_many": [name for name in many if name not in one],
        "Engine.generate, generate_many or stream": list(one),
        "Engine.load": [*load, *options, *OWN],
        "a request (Engine.generate, stream or add)": list(request),
    }


def with_homes(source: str) -> str:
    """``source`` of habits.py with ``HOMES`` made anew."""
    lines = []
    for home, names in homes().items():
        text = " ".join(f'"{name}",' for name in names)
        lines += [f'    "{home}": (', *(f"        {line}" for line in wrap(text, 110)), "    ),"]
    written, count = re.subn(
        r"(HOMES: [^\n]*\n).*?(}  # fmt: skip)", rf"\g<1>{chr(10).join(lines)}\n\2", source, flags=re.S
    )
    assert count == 1
    return written


def filled(page: str) -> str:
    """The page with every table made anew. Raises KeyError for a table that there is none of."""
    return _BETWEEN.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


def stale() -> dict[Path, str]:
    """Files that are not what the definitions give, with what they should be."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    made = {path: filled(page) for path, page in texts.items()}
    for (module, name), types in keywords().items():
        path = SOURCE / module
        texts.setdefault(path, path.read_text(encoding="utf-8"))
        made[path] = typed(made.get(path, texts[path]), name, types)
    path = SOURCE / "common" / "habits.py"
    texts[path] = path.read_text(encoding="utf-8")
    made[path] = with_homes(texts[path])
    return {path: text for path, text in made.items() if text != texts[path]}


def main() -> int:
    found = stale()
    if "--check" in sys.argv:
        for path in found:
            print(f"{path.name} is not what the code defines: run python scripts/tables.py", file=sys.stderr)
        return 1 if found else 0
    for path, text in found.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
