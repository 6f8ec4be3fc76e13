"""The player itself: its form refuses what it does not know, and its judge can fail.

A judge that cannot fail proves nothing, so the control program of the load tests, a pass-through
without any governance, is played too: what bytes alone decide must pass, what a gateway owes must
fail."""

from __future__ import annotations

import asyncio
import base64
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.cases import accounts, form, items, judge, rawjson, setup, sse
from tests.cases.player import Lane, play_all
from tests.cases.upstream import Upstream
from tests.fixtures.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def _file(tmp_path: Path, variant: str) -> Path:
    path = tmp_path / "sse.yaml"
    head = """\
        format: 1
        family: sse
        requests: {chat: {method: POST, path: /v1/chat/completions, body: '{"model":"${model}"}'}}
        answers: {ok: {status: 200, chunks: [x]}}
        cases:
        - id: one
          kind: k
          right: r
          seen_in: []
          request: {use: chat}
          variants:
        """
    path.write_text(textwrap.dedent(head) + textwrap.indent(textwrap.dedent(variant), "  "))
    return path


@pytest.mark.parametrize(
    ("variant", "word"),
    [
        ("- {id: a, upstraem: {answers: []}}", "upstraem"),
        ("- {id: a, expect: {client: {stauts: 200}}}", "stauts"),
        ("- {id: a, expect: {upstream: {every: {body_sam: true}}}}", "body_sam"),
        ("- {id: a, expect: {any_of: [{client: {ends: [clean]}}]}}", "ends"),
        ("- {id: a, expect: {accounting: {tokens: 1}}}", "tokens"),
        ("- {id: a, expect: {client: {end: [cleen]}}}", "cleen"),
        ("- {id: a, upstream: {answers: [{use: okay}]}}", "okay"),
        ("- {id: a, upstream: {answers: [{use: ok, end: crash}]}}", "crash"),
        ("- {id: a, upstream: {answers: [{chunks: [{fil: x}]}]}}", "fil"),
        ("- {id: a, calls: [{name: c, start: {after: b, event: tail}}]}", "tail"),
        ("- {id: a, request: {use: chat, hedaers: []}}", "hedaers"),
    ],
)
def test_an_unknown_word_is_an_error_that_names_it(tmp_path: Path, variant: str, word: str) -> None:
    with pytest.raises(form.FormError, match=word):
        form.read(_file(tmp_path, variant))


def test_a_variant_is_laid_over_its_case_and_templates_lie_beneath(tmp_path: Path) -> None:
    path = _file(
        tmp_path, "- {id: a, request: {headers: [[x-a, '1']]}, upstream: {answers: [{use: ok}]}}"
    )
    variant = form.read(path)[0]
    assert variant.calls[0]["request"]["path"] == "/v1/chat/completions"
    assert variant.calls[0]["request"]["headers"] == [["x-a", "1"]]
    assert variant.upstreams[0]["answers"][0]["chunks"] == ["x"]


def _byte_items(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "b64" in value:
            yield value
        for inner in value.values():
            yield from _byte_items(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _byte_items(inner)


def test_every_transcription_in_the_files_is_true() -> None:
    checked = 0
    for family in form.FAMILIES:
        content = yaml.safe_load((form.FOLDER / f"{family}.yaml").read_text(encoding="utf-8"))
        for item in _byte_items(content):
            data = base64.b64decode(item["b64"])
            if "is" in item:
                assert items.transcribed(item["is"]) == data
                checked += 1
            for coding, word in (
                ("gzip", "is_gzip_of"),
                ("zstd", "is_zstd_of"),
                ("br", "is_br_of"),
            ):
                if word in item:
                    assert items.unpack(coding, data) == items.transcribed(item[word])
                    checked += 1
    assert checked > 20


def test_json_ids_keep_their_exact_text() -> None:
    text = '{"jsonrpc":"2.0", "id" : 9007199254740993 ,"result":{"id":1}}'
    assert rawjson.member(text, "id") == "9007199254740993"
    assert rawjson.elements('[1.0, {"id": -7}]') == ["1.0", '{"id": -7}']


def test_only_insertions_between_events_count_as_added() -> None:
    upstream = b"data: 1\n\ndata: 2\n\n"
    assert sse.only_added(b": hi\ndata: 1\n\n: hi\ndata: 2\n\n", upstream, "comments") == ""
    assert sse.only_added(b"data: 1\n: hi\n\ndata: 2\n\n", upstream, "comments") != ""
    assert sse.only_added(b"event: ping\ndata: {}\n\n" + upstream, upstream, "pings") == ""
    assert sse.only_added(b": hi\n" + upstream, upstream, "nothing") != ""
    assert sse.only_added(upstream[:-1], upstream, "comments") != ""


def test_metrics_are_summed_over_labels_they_do_not_name() -> None:
    metric = accounts.TABLE["input_tokens"]
    labels = ",".join(f'{name}="{next(iter(values))}"' for name, values in metric.labels.items())
    page = f'{metric.name}{{{labels},model="a"}} 2\n{metric.name}{{{labels},model="b"}} 3\n'
    assert accounts.read(page)["input_tokens"] == 5
    assert accounts.read(page)["calls_ok"] == 0


def test_every_word_for_a_client_has_its_check() -> None:
    assert form.WORDS["client"] == judge.CLIENT.keys() | {"statuses"}


CONTROL_PASSES = (
    "sse/sse-stream-options/client-said-no",
    "http/signed-thinking",
    "http/body-limits/expect-continue",
    "http/stale-keep-alive/closed-after-the-answer",
    "tokens/special-tokens/end-of-text",
)
CONTROL_FAILS = (
    "http/hop-by-hop/named-by-connection",
    "http/hop-by-hop/in-the-answer",
    "http/compressed-request/label-without-compression",
    "http/stale-keep-alive/post-cut-on-a-fresh-connection",
    "sse/sse-cut-without-end/well-formed-http-but-no-end-mark",
    "sse/sse-client-gone/plain-call-while-upstream-thinks",
    "retry/429-not-retryable/insufficient-quota",
)


async def _control(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    upstream = Upstream()
    await upstream.start()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtests.control",
        "--upstream", f"http://127.0.0.1:{upstream.ports[0]}",
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port = int((await process.stdout.readline()).split()[1])
        lane = Lane(
            policy="plain",
            gateways=(("127.0.0.1", port),),
            upstream=upstream,
            key=setup.KEY,
            books=accounts.Accounts(admins=(("127.0.0.1", free_port()),)),
        )
        for _ in range(100):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            writer.close()
            break
        outcomes = await play_all(form.choose(form.read_all(), names), [lane], jobs=4)
    finally:
        process.terminate()
        await process.wait()
        await upstream.stop()
    return {outcome.variant.name: outcome.problems for outcome in outcomes}


def test_a_pass_through_passes_what_bytes_decide_and_fails_what_a_gateway_owes() -> None:
    played = asyncio.run(_control(CONTROL_PASSES + CONTROL_FAILS))
    for name, problems in played.items():
        if name.startswith(CONTROL_PASSES):
            assert not problems, (name, problems)
        else:
            seen = [problem for problem in problems if "not readable" not in problem]
            assert seen, f"{name}: the player found nothing wrong with a plain pass-through"
    assert len(played) >= len(CONTROL_PASSES + CONTROL_FAILS)
