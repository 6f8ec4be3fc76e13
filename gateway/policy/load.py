"""YAML with positions in every error: files in, one checked `Policy` out. The one seat of PyYAML.

`load` reads one file or a folder merged in name order, refuses what YAML readers disagree on,
resolves secrets, validates every entry and then what entries are to each other, and reports all
mistakes at once; beside an invalid entry what does not depend on it is told too (`pruning.py`).
A policy that comes out can be compiled; `tidegate check` is this same loader.

PyYAML keeps the last of duplicate keys and reads `no` as false, so only its event stream is used:
values are made in `tree.py`. A secret is never part of an error: values in secret places are
wrapped before validation, and messages repeat no value from those places.
"""

from __future__ import annotations

import hashlib
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from gateway.errors import PolicyError, PolicyProblem
from gateway.policy.crosscheck import crosscheck
from gateway.policy.models import PolicyFile
from gateway.policy.problems import Report
from gateway.policy.pruning import Certain, pruned, texts_in
from gateway.policy.tree import MAX_DEPTH, MAX_SECRET, Converter, Node
from gateway.policy.wording import Schema, report_errors
from gateway.snapshot import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gateway.policy.problems import Path as ValuePath

MAX_FILE = 1 << 20
"""Bytes of one file."""

MAX_FILES = 200
MAX_EVENTS = 200_000
"""Events of one file, before aliases are followed."""

SUFFIXES = (".yaml", ".yml")

_LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy that holds together.

    Attributes:
        rules: The file's content.
        files: Names of the files read, in merging order.
        watched: Everything whose change may change the policy: files, folder, secret files.
        digest: Of the files' content; no secret enters it.
        fingerprint: Of content and secrets: differs when a secret has been rotated. Never shown.
        places: Rule ids to where they stand.
        warnings: Oddities that stop nothing.
    """

    rules: PolicyFile
    files: tuple[str, ...]
    watched: tuple[Path, ...]
    digest: str
    fingerprint: bytes = field(repr=False)
    places: Mapping[str, Place] = field(repr=False)
    warnings: tuple[PolicyProblem, ...] = ()


MAX_PLAIN = 1 << 20
"""Bytes of a file that is no policy."""


def load(
    path: Path,
    *,
    env: Mapping[str, str],
    read_secret: Callable[[str], str] | None = None,
) -> Policy:
    """The policy of that file or folder.

    Args:
        path: A YAML file, or a folder whose *.yaml and *.yml files are merged in name order.
        env: Variables that `${NAME}` may refer to.
        read_secret: Text of the file that `${file:…}` names; default: read it. Raises OSError or
            ValueError.

    Raises:
        PolicyError: With every problem found.
    """
    report = Report(str(path))
    sources = _read_all(path, report)
    return _held(sources, report, env, read_secret or _read_secret, watched=(path,))


def load_texts(
    texts: Mapping[str, bytes],
    *,
    env: Mapping[str, str],
    read_secret: Callable[[str], str] | None = None,
) -> Policy:
    """Like `load`, of contents already read, by name in merging order. Reads secret files only.

    Raises:
        PolicyError: With every problem found.
    """
    sources = [(Path(name), content) for name, content in texts.items()]
    report = Report(next(iter(texts), "policy"))
    return _held(sources, report, env, read_secret or _read_secret, watched=())


Strict = TypeVar("Strict", bound=BaseModel)


def load_strictly(
    path: Path, model: type[Strict], check: Callable[[Strict, Report], None]
) -> tuple[Strict, str]:
    """A file of another layout, read as strictly as a policy; with a digest of its content.

    Args:
        path: A YAML file. Nothing in it is a secret, and no variable is looked up.
        model: Its layout.
        check: Reports what entries are to each other.

    Raises:
        PolicyError: With every problem found.
    """
    report = Report(str(path))
    sources = _read_all(path, report)
    converter = Converter(
        report, lookup=lambda _name: None, read=_read_secret, sections=model.model_fields
    )
    raw = _merged(sources, report, converter)
    found = _validated(raw, report, model) if raw is not None else None
    if found is not None and not report.problems:
        check(found, report)
    if report.problems or found is None:
        raise PolicyError(tuple(sorted(report.problems, key=lambda p: (p.file, p.line, p.column))))
    return found, _digest(sources)


def _held(
    sources: list[tuple[Path, bytes]],
    report: Report,
    env: Mapping[str, str],
    read_secret: Callable[[str], str],
    *,
    watched: tuple[Path, ...],
) -> Policy:
    """The policy of these sources, if it holds."""
    converter = Converter(
        report, lookup=env.get, read=read_secret, sections=PolicyFile.model_fields
    )
    raw = _merged(sources, report, converter)
    rules = _validated(raw, report, PolicyFile) if raw is not None else None
    if rules is not None and not report.problems:
        crosscheck(rules, report, literals=converter.literals)
    elif raw is not None:
        _dangling(raw, report)
    if report.problems or rules is None:
        raise PolicyError(tuple(sorted(report.problems, key=lambda p: (p.file, p.line, p.column))))
    digest = _digest(sources)
    secrets = hashlib.sha256(digest.encode())
    for text in converter.resolved:
        secrets.update(len(text).to_bytes(4, "big") + text.encode("utf-8", "surrogatepass"))
    files = [source for source, _ in sources]
    secret_files = [Path(name) for name in sorted(converter.secret_files)]
    return Policy(
        rules=rules,
        files=tuple(str(source) for source in files),
        watched=tuple(dict.fromkeys((*watched, *files, *secret_files))),
        digest=digest,
        fingerprint=secrets.digest(),
        places=report.places(),
        warnings=tuple(report.warnings),
    )


def _validated(raw: dict[str, Any], report: Report, model: type[Strict]) -> Strict | None:
    def schema() -> Schema:
        """Made only where a key is unknown: it takes longer than all the rest."""
        return Schema(model.model_json_schema())

    try:
        return model.model_validate(raw)
    except ValidationError as wrong:
        records = wrong.errors(include_url=False)
        report_errors(records, report, schema, failed=set(report.failed))
        return None


MOST_PRUNED = 8
"""Rounds in which what is invalid is left out: without a part, the whole may be invalid too."""


def _dangling(raw: dict[str, Any], report: Report) -> None:
    """What is wrong between entries whatever the invalid ones say is reported beside them."""
    sound, failed = raw, set(report.invalid)
    invalid = set(failed)
    for _ in range(MOST_PRUNED):
        sound = pruned(sound, failed)
        try:
            rules = PolicyFile.model_validate(sound)
        except ValidationError as wrong:
            found = [tuple(record["loc"]) for record in wrong.errors(include_url=False)]
            failed = {loc[:-1] if loc[-1:] == ("[key]",) else loc for loc in found}
            invalid |= failed
            continue
        sections = [part for part in raw.values() if isinstance(part, dict)]
        known = {str(name) for part in sections for name in part} | report.dropped
        texts = None if report.partial else set(texts_in(raw))
        certain = Certain(report, known=known, invalid=invalid, texts=texts)
        crosscheck(rules, certain, literals=())
        return


# --- files ---


def _read_all(path: Path, report: Report) -> list[tuple[Path, bytes]]:
    """Names and contents, in name order."""
    try:
        if not path.is_dir():
            return [(path, _read_bounded(path, MAX_FILE))]
        names = sorted(
            entry
            for entry in path.iterdir()
            if entry.suffix in SUFFIXES and not entry.name.startswith(".") and entry.is_file()
        )
    except (OSError, ValueError) as wrong:
        report.error((), _reason(wrong))
        return []
    if not names:
        report.error((), "the folder holds no policy", allowed="files named *.yaml or *.yml")
    if len(names) > MAX_FILES:
        report.error((), f"the folder holds more than {MAX_FILES} policy files")
        return []
    found = []
    for name in names:
        try:
            found.append((name, _read_bounded(name, MAX_FILE)))
        except (OSError, ValueError) as wrong:
            report.error_at(Place(file=str(name), line=1), (), _reason(wrong))
    return found


def _reason(wrong: OSError | ValueError) -> str:
    if isinstance(wrong, OSError):
        return f"cannot be read: {wrong.strerror or type(wrong).__name__}"
    return f"cannot be read: {wrong}"


def _read_bounded(path: Path, limit: int) -> bytes:
    """The file's bytes.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no regular file (a pipe would hang the gateway) or too large.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("is not a regular file")
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"is larger than {limit} bytes")
    return content


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML or JSON file that is no policy, as a mapping: for the emulator's configuration.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no mapping, or not YAML; says where.
    """
    try:
        value = yaml.safe_load(_read_bounded(path, MAX_PLAIN))
    except yaml.YAMLError as wrong:
        raise ValueError(f"not YAML: {wrong}") from wrong
    if not isinstance(value, dict):
        raise ValueError("must be a mapping")  # noqa: TRY004 - one kind for all that is wrong
    return value


def _read_secret(name: str) -> str:
    """The file's text without its last line end."""
    try:
        text = _read_bounded(Path(name), MAX_SECRET).decode()
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise ValueError("is empty")
    return text


def _digest(sources: list[tuple[Path, bytes]]) -> str:
    digest = hashlib.sha256()
    for path, content in sources:
        name = path.name.encode("utf-8", "surrogateescape")
        digest.update(len(name).to_bytes(4, "big") + name)
        digest.update(len(content).to_bytes(4, "big") + content)
    return digest.hexdigest()


# --- YAML ---


def _merged(
    sources: list[tuple[Path, bytes]], report: Report, converter: Converter
) -> dict[str, Any] | None:
    """The sections of all files; a section of entries may be spread over files, an entry not.

    None where a file could not be read as YAML: what it lacks would only raise false alarms.
    """
    whole: dict[str, Any] = {}
    sound = bool(sources)
    for path, content in sources:
        root = _parsed(str(path), content, report)
        if root is None:
            sound = False
            continue
        if root.kind == "scalar" and not root.text and len(sources) > 1:
            continue
        if root.kind != "map":
            report.error_at(root.place, (), "the file holds no mapping", allowed="version: 1 …")
            sound = False
            continue
        for key, node in converter.pairs(root, ()):
            known = set(report.spots)
            value = converter.value(node, (key.text,), key.place)
            _join(whole, key, value, report, known)
    return whole if sound else None


def _join(
    whole: dict[str, Any], key: Node, value: object, report: Report, known: set[ValuePath]
) -> None:
    """The section is part of the whole; whatever stands in two files is reported."""
    before = whole.get(key.text)
    if before is None:
        whole[key.text] = value
    elif isinstance(before, dict) and isinstance(value, dict):
        for name in value:
            if name in before:
                _twice(report, (key.text, name), known)
        whole[key.text] = {**before, **value}
    elif key.text != "version" or before != value:
        _twice(report, (key.text,), known)


def _twice(report: Report, path: ValuePath, known: set[ValuePath]) -> None:
    report.error(
        path,
        "stands in two files" if path in known else "stands twice",
        allowed="each entry in one file",
        at_key=True,
    )


def _parsed(name: str, content: bytes, report: Report) -> Node | None:
    """The file's one document, or None and a problem."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        line = content[: wrong.start].count(b"\n") + 1
        report.error_at(Place(file=name, line=line), (), "the file is not UTF-8")
        return None
    try:
        return _Builder(name, report).document(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as wrong:
        mark = wrong.problem_mark or wrong.context_mark
        place = Place(file=name, line=mark.line + 1, column=mark.column + 1) if mark else None
        what, allowed = _worded(wrong.problem or "cannot be read", text, place)
        report.error_at(place or Place(file=name, line=1), (), f"not YAML: {what}", allowed=allowed)
    except yaml.YAMLError:
        report.error_at(_unprintable(name, text), (), "not YAML: a character that it cannot hold")
    except _Unbuildable as wrong:
        report.error_at(wrong.place, (), wrong.what)
    return None


def _worded(problem: str, text: str, place: Place | None) -> tuple[str, str]:
    """The parser's word, and what is allowed, for those who think in lines and not in tokens."""
    if place is not None:
        line = text.split("\n")[place.line - 1 :][:1]
        if line and line[0][place.column - 1 :].startswith("\t"):
            return "a tab", "spaces to indent with"
    if problem.startswith(_MISPLACED):
        return problem, "keys of one mapping equally far to the right, each followed by ': '"
    return problem, ""


_MISPLACED = ("mapping values are not allowed", "did not find expected key", "could not find")
"""What the parser says where a line is indented wrongly."""


def _unprintable(name: str, text: str) -> Place:
    for number, line in enumerate(text.split("\n"), 1):
        for column, char in enumerate(line, 1):
            if not char.isprintable() and char not in "\t\r":
                return Place(file=name, line=number, column=column)
    return Place(file=name, line=1)


class _Unbuildable(Exception):
    def __init__(self, place: Place, what: str) -> None:
        super().__init__(what)
        self.place = place
        self.what = what


class _Builder:
    """Events to nodes, without recursion and within bounds."""

    def __init__(self, name: str, report: Report) -> None:
        self._name = name
        self._report = report
        self._anchors: dict[str, Node] = {}
        self._stack: list[tuple[Node, str]] = []
        self._keys: list[Node | None] = []
        self._root: Node | None = None

    def document(self, events: Iterator[Any]) -> Node:
        """The root of the only document; an empty scalar where there is none."""
        documents = 0
        for number, event in enumerate(events):
            if number >= MAX_EVENTS:
                raise _Unbuildable(self._place(event), "the file is too long")
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _Unbuildable(self._place(event), "a second document (---)")
            else:
                self._take(event)
        return self._root or Node("scalar", Place(file=self._name, line=1))

    def _place(self, event: Any) -> Place:  # noqa: ANN401 - events have no common public type
        mark = event.start_mark
        return Place(file=self._name, line=mark.line + 1, column=mark.column + 1)

    def _take(self, event: Any) -> None:  # noqa: ANN401
        if isinstance(event, yaml.ScalarEvent):
            node = Node(
                "scalar",
                self._place(event),
                text=event.value,
                plain=event.style in (None, ""),
                tag=event.tag or "",
            )
            self._add(node, event.anchor)
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            if len(self._stack) >= MAX_DEPTH:
                raise _Unbuildable(self._place(event), f"nested deeper than {MAX_DEPTH} levels")
            mapping = isinstance(event, yaml.MappingStartEvent)
            node = Node("map" if mapping else "list", self._place(event), tag=event.tag or "")
            self._stack.append((node, event.anchor or ""))
            self._keys.append(None)
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            node, anchor = self._stack.pop()
            self._keys.pop()
            self._add(node, anchor)
        elif isinstance(event, yaml.AliasEvent):
            # An anchor is known only once its node is complete, so no node can contain itself.
            found = self._anchors.get(event.anchor or "")
            if found is None:
                raise _Unbuildable(self._place(event), "an alias without an anchor before it")
            self._add(found, "")

    def _add(self, node: Node, anchor: str | None) -> None:
        if anchor:
            self._anchors[anchor] = node
        if not self._stack:
            self._root = node
            return
        parent, _ = self._stack[-1]
        if parent.kind == "list":
            parent.items.append(node)
        elif self._keys[-1] is None:
            self._keys[-1] = node
        else:
            parent.pairs.append((self._keys[-1], node))
            self._keys[-1] = None
