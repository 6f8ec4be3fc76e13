"""Reads the case files (FORM.md §2) into variants; every word that is not known is an error.

A player that skips what it does not know reports success it has not seen. So each mapping is
checked against the table of its words, after templates and overlays have been applied."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

FOLDER = Path(__file__).parent
FAMILIES = ("sse", "retry", "tokens", "http", "mcp", "more")

ITEM_WORDS = frozenset({"b64", "pause", "fill", "join", "bytewise", "repeat", "gzip_bomb"})
"""A mapping that holds one of these is a byte item: never merged, only replaced."""

_BYTES = ("body", "raw", "chunks")

_PLAY = frozenset(
    ["request", "upstream", "upstream_1", "expect", "calls", "abort", "sdk_retries", "limit",
     "limit_all", "linger", "unit_only", "rows", "policy"]
)  # fmt: skip
"""What a case may give as defaults and a variant may say itself."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


WORDS: dict[str, frozenset[str]] = {
    "file": _words("format family requests answers answer_sets cases"),
    "case": _words("id kind right seen_in variants") | _PLAY,
    "variant": _words("id note") | _PLAY,
    "policy": _words("name words"),
    "request": _words("method path headers headers_add headers_drop body framing to raw"),
    "abort": _words("after events text how"),
    "call": _words(
        "name start delay count capture wait hook expect request abort sdk_retries limit linger"
    ),
    "start": _words("after event"),
    "upstream": _words("answers then refuse"),
    "answer": _words(
        "match times status reason headers framing chunks gap delay before_head end end_delay "
        "claim_length reuse"
    ),
    "match": _words("method path_contains body_contains body_lacks header header_absent rpc tool"),
    "expect": _words(
        "client calls statuses any_of upstream accounting alive_within settle log codec name"
    ),
    "client": _words(
        "status status_not headers header_absent header_present header_values header_matches "
        "retry_after body body_same_as_upstream body_same_but_comments body_contains "
        "body_lacks body_contains_once body_json error_shape sse_data sse_count sse_names "
        "sse_first sse_all_json added_only coherent end within not_before first_byte_within "
        "within_ratio_of rpc exit output_contains statuses"
    ),
    "retry_after": _words("min max optional or_told_to_stop"),
    "coherent": _words("encoded coding"),
    "ratio": _words("call ratio plus"),
    "rpc": _words(
        "count id_raw ids_raw error error_or_is_error code code_not contains lacks min_tools"
    ),
    "seen": _words(
        "requests requests_on rpc_counts gap closed_within writes_max trap never_paths "
        "never_body every nth of_port"
    ),
    "each": _words(
        "body_same_as_client body body_contains body_lacks body_json headers header_values "
        "header_absent header_not header_single coherent path_ends method"
    ),
    "accounting": _words(
        "input_tokens output_tokens cache_read_tokens cache_write_tokens calls_ok "
        "calls_failed calls_cancelled breaker_failures estimated_settlements in_flight "
        "waiting resident_bytes resident_bytes_peak"
    ),
    "log": _words("lacks"),
    "item": _words(
        "b64 is is_gzip_of is_zstd_of is_br_of is_deflate_of pause fill times join bytewise "
        "every repeat gzip_bomb"
    ),
    "repeat": _words("times every item"),
    "bomb": _words("mib head tail"),
}

CHOICES: dict[str, frozenset[Any]] = {
    "framing of a request": frozenset({"length", "chunked"}),
    "framing of an answer": frozenset({"length", "chunked", "close", "raw"}),
    "before_head": _words("hold cut reset"),
    "end of an answer": frozenset({"clean", "close", "cut", "reset", "hold"}),
    "reuse": _words("close reset"),
    "how": _words("fin rst"),
    "event": _words("sent head body done"),
    "end of a call": frozenset({"clean", "aborted", "error_event", "no_response"}),
    "error_shape": _words("openai anthropic jsonrpc any"),
    "added_only": _words("nothing comments pings keepalives"),
}


class FormError(Exception):
    """A case file says something this player does not know; names file, place and word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One variant with its case's defaults and all templates applied.

    Attributes:
        policy: Name of the set-up it needs; "plain" where none is named.
        calls: At least one; each with its own complete `request` unless it is a wait or a hook.
        upstreams: Answers of the scripted upstream and of the one on the next port.
        expect: What must hold, §4.
    """

    family: str
    case: str
    id: str
    note: str
    policy: str
    calls: tuple[Mapping[str, Any], ...]
    upstreams: tuple[Mapping[str, Any], ...]
    expect: Mapping[str, Any]
    limit_all: float | None
    unit_only: str
    rows: tuple[Mapping[str, Any], ...]

    @property
    def name(self) -> str:
        """`family/case/variant`, as on the command line."""
        return f"{self.family}/{self.case}/{self.id}"

    @property
    def model(self) -> str:
        """The model name nobody else uses, because failures open breakers."""
        return f"m-{self.case}-{self.id}"


def merge(below: Any, above: Any) -> Any:
    """`above` laid over `below`: mappings key by key, everything else replaces."""
    if not (isinstance(below, dict) and isinstance(above, dict)) or ITEM_WORDS & above.keys():
        return above
    merged = dict(below)
    for key, value in above.items():
        merged[key] = value if key in _BYTES else merge(below.get(key), value)
    return merged


class _Reader:
    """Turns one parsed file into variants; knows where it is, for its errors."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self.path = path
        self.content = content
        self.where = path.name

    def fail(self, what: str) -> FormError:
        return FormError(f"{self.where}: {what}")

    def known(self, mapping: Any, table: str) -> Mapping[str, Any]:
        if not isinstance(mapping, dict):
            raise self.fail(f"{table}: a mapping is wanted, not {mapping!r}")
        unknown = [str(key) for key in mapping if key not in WORDS[table]]
        if unknown:
            raise self.fail(f"{table}: unknown words {', '.join(unknown)}")
        return mapping

    def choice(self, value: Any, table: str) -> None:
        for one in value if isinstance(value, list) else [value]:
            if one not in CHOICES[table]:
                raise self.fail(f"{table}: {one!r} is none of {', '.join(sorted(CHOICES[table]))}")

    def template(self, kind: str, value: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
        """The mapping with what it uses beneath it."""
        rest = {key: inner for key, inner in value.items() if key != "use"}
        if "use" not in value:
            return rest
        templates = self.content.get(kind, {})
        if value["use"] not in templates or depth > 8:
            raise self.fail(f"{kind}: no template named {value['use']!r}")
        merged = merge(self.template(kind, templates[value["use"]], depth + 1), rest)
        return dict(merged)

    # --- byte items ---

    def items(self, value: Any) -> None:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                self.item(item)
            elif not isinstance(item, str | int):
                raise self.fail(f"no byte item: {item!r}")

    def item(self, item: Mapping[str, Any]) -> None:
        self.known(item, "item")
        if not ITEM_WORDS & item.keys():
            raise self.fail(f"no byte item: {item!r}")
        if "repeat" in item:
            self.items(self.known(item["repeat"], "repeat")["item"])
        if "gzip_bomb" in item:
            self.known(item["gzip_bomb"], "bomb")
        for word in ("join", "bytewise"):
            if word in item:
                self.items(item[word])

    # --- what is played ---

    def request(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        request = self.known(self.template("requests", value), "request")
        if "raw" not in request and not {"method", "path"} <= request.keys():
            raise self.fail("request: neither raw nor method and path")
        self.choice(request.get("framing", "length"), "framing of a request")
        for word in ("body", "raw"):
            if word in request:
                self.items(request[word])
        return request

    def abort(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        self.choice(self.known(value, "abort").get("how", "fin"), "how")
        return value

    def calls(self, value: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
        defaults = {
            key: value[key] for key in ("abort", "sdk_retries", "limit", "linger") if key in value
        }
        made = []
        for raw in value.get("calls") or [{"name": "call"}]:
            call = {**defaults, **self.known(raw, "call")}
            if isinstance(call.get("start"), dict):
                self.choice(self.known(call["start"], "start").get("event", "done"), "event")
            elif call.get("start", "with_previous") != "with_previous":
                raise self.fail(f"start: {call['start']!r}")
            if "abort" in call:
                self.abort(call["abort"])
            if "expect" in call:
                self.client(call["expect"])
            if "wait" not in call and "hook" not in call:
                call["request"] = self.request(
                    merge(value.get("request", {}), call.get("request", {}))
                )
            made.append(call)
        return tuple(made)

    def upstream(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        self.known(value, "upstream")
        answers = [self.template("answers", answer) for answer in value.get("answers", [])]
        if "then" in value:
            sets = self.content.get("answer_sets", {})
            if value["then"] not in sets:
                raise self.fail(f"then: no answer set named {value['then']!r}")
            answers += [self.template("answers", answer) for answer in sets[value["then"]]]
        for answer in answers:
            self.answer(answer)
        return {"answers": tuple(answers), "refuse": bool(value.get("refuse", False))}

    def answer(self, answer: Mapping[str, Any]) -> None:
        self.known(answer, "answer")
        self.known(answer.get("match", {}), "match")
        self.choice(answer.get("framing", "length"), "framing of an answer")
        self.choice(answer.get("end", "clean"), "end of an answer")
        for word in ("before_head", "reuse"):
            if word in answer:
                self.choice(answer[word], word)
        if "chunks" in answer:
            self.items(answer["chunks"])

    # --- what is expected ---

    def expect(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        self.known(value, "expect")
        for alternative in value.get("any_of", []):
            self.expect(alternative)
        for name, inner in {**value.get("calls", {}), "client": value.get("client", {})}.items():
            self.client(inner if inner is not None else self.known(inner, name))
        if "upstream" in value:
            seen = self.known(value["upstream"], "seen")
            for each in [seen.get("every", {}), *seen.get("nth", {}).values()]:
                self.known(each, "each")
                self.known(each.get("coherent", {}), "coherent")
        self.known(value.get("accounting", {}), "accounting")
        self.known(value.get("log", {}), "log")
        return value

    def client(self, value: Mapping[str, Any]) -> None:
        self.known(value, "client")
        for word, table in (
            ("retry_after", "retry_after"), ("coherent", "coherent"), ("within_ratio_of", "ratio"),
            ("rpc", "rpc"),
        ):  # fmt: skip
            self.known(value.get(word, {}), table)
        self.choice(value.get("end", []), "end of a call")
        for word in ("error_shape", "added_only"):
            if word in value:
                self.choice(value[word], word)

    # --- whole files ---

    def variants(self) -> Iterator[Variant]:
        self.known(self.content, "file")
        if self.content.get("format") != 1 or self.content.get("family") not in FAMILIES:
            raise self.fail("format 1 and a known family are wanted")
        for case in self.content["cases"]:
            self.where = f"{self.path.name}: {case.get('id')}"
            self.known(case, "case")
            defaults = {key: case[key] for key in _PLAY if key in case}
            for raw in case["variants"]:
                self.where = f"{self.path.name}: {case['id']}/{raw.get('id')}"
                self.known(raw, "variant")
                yield self.variant(case["id"], merge(defaults, raw))

    def variant(self, case: str, value: Mapping[str, Any]) -> Variant:
        policy = self.known(value.get("policy", {"name": "plain"}), "policy")
        unit_only = str(value.get("unit_only", ""))
        return Variant(
            family=self.content["family"],
            case=case,
            id=str(value["id"]),
            note=str(value.get("note", "")),
            policy=policy["name"],
            calls=() if unit_only else self.calls(value),
            upstreams=tuple(
                self.upstream(value.get(name, {})) for name in ("upstream", "upstream_1")
            ),
            expect=self.expect(value.get("expect", {})),
            limit_all=value.get("limit_all"),
            unit_only=unit_only,
            rows=tuple(value.get("rows", ())),
        )


def read(path: Path) -> tuple[Variant, ...]:
    """All variants of one file.

    Raises:
        FormError: The file uses a word, a template or a value the player does not know.
    """
    return tuple(_Reader(path, yaml.safe_load(path.read_text(encoding="utf-8"))).variants())


def read_all(folder: Path = FOLDER) -> tuple[Variant, ...]:
    """All variants of all families; names are unique."""
    found = tuple(variant for family in FAMILIES for variant in read(folder / f"{family}.yaml"))
    names = [variant.name for variant in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise FormError(f"two variants of one name: {', '.join(sorted(twice))}")
    return found


def choose(variants: Iterable[Variant], only: Iterable[str]) -> tuple[Variant, ...]:
    """Those named by `FAMILY`, `FAMILY/CASE` or `FAMILY/CASE/VARIANT`; all where nothing is named.

    Raises:
        FormError: A name chooses nothing.
    """
    variants = tuple(variants)
    wanted = [name.strip("/") for name in only]
    for name in wanted:
        if not any(f"{variant.name}/".startswith(f"{name}/") for variant in variants):
            raise FormError(f"--only {name}: no such family, case or variant")
    return tuple(
        variant
        for variant in variants
        if not wanted or any(f"{variant.name}/".startswith(f"{name}/") for name in wanted)
    )
