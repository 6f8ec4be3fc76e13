"""The gate of the tool plane in front of a real tool server, behind a real `tidegate serve`.

The server writes down every deed; what happened is what its book says, not what anybody answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.gateway import (
    Answer,
    Gateway,
    Process,
    Stage,
    Wire,
    ask,
    fetch,
    policy,
    request,
    run_command,
    scratch,
    until,
)

pytestmark = pytest.mark.integration

VERSION = "2026-07-28"
META = {
    "io.modelcontextprotocol/protocolVersion": VERSION,
    "io.modelcontextprotocol/clientCapabilities": {},
}
TOOLS = {
    "pay": {
        "cases": {
            "large": {
                "when": [{"path": "amount", "above": 50_000}],
                "approve": {"reason": "more than 50,000", "expires": "1h"},
            },
            "soon": {
                "when": [{"path": "amount", "min": 777, "max": 777}],
                "approve": {"reason": "short", "expires": "5s"},
            },
        },
        "arguments": [{"path": "amount", "money": True, "required": True}],
    },
    "look": {"effect": "read"},
    "booked": {"effect": "read"},
    "wire": {
        "effect": "queryable",
        "reconcile": {
            "tool": "booked",
            "arguments": {"ref": "ref"},
            "done": [{"path": "state", "one_of": ["booked"]}],
            "absent": [{"path": "state", "one_of": ["unknown"]}],
        },
    },
    "queue": {"effect": "read", "polling": True, "limits": [{"concurrency": 1}]},
}


class Ground:
    """Server, gateway, approver, and a client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.book = folder / "book"
        self.key = folder / "keys" / "approver.key"
        self.server = Process(folder, "server")
        self.gateway = Gateway(folder)
        self._serial = 0

    async def start(self, **changes: Any) -> None:
        line = await self.server.start(
            [sys.executable, "-m", "tests.fixtures.counting_server", "0", str(self.book)],
            os.environ, "ready: ",
        )  # fmt: skip
        made = await run_command("approvals", "key", "ann", "--key", str(self.key))
        assert made.status == 0, made.err
        public = made.out.split('ann: "')[1].split('"')[0]
        self.policy = policy(
            servers={"bank": {"url": f"http://127.0.0.1:{line.split()[1]}/mcp", "tools": TOOLS}},
            approvals={"approvers": {"ann": public}, "wait": "1s"},
            loops={"mode": "enforce", "window": "60s"},
            fairness="agent",
            agents={
                "tester": {"keys": [{"key": "${TESTER_KEY}"}]},
                "crowd": {"keys": [{"pattern": "crowd-*"}], "loopback_only": True},
            },
            **changes,
        )
        await self.gateway.serve(self.policy, upstream=9)

    async def stop(self) -> None:
        await self.gateway.stop()
        await self.server.kill()

    def deeds(self, **facts: Any) -> list[Any]:
        """What the server did with arguments that hold these facts."""
        if not self.book.exists():
            return []
        lines = [json.loads(line) for line in self.book.read_text().splitlines()]
        return [one for one in lines if facts.items() <= one[1].items()]

    def raw(
        self, tool: str, arguments: Any, headers: dict[str, str] | None = None, key: str = ""
    ) -> bytes:
        self._serial += 1
        message = {
            "jsonrpc": "2.0", "id": self._serial, "method": "tools/call",
            "params": {"name": tool, "arguments": arguments, "_meta": META},
        }  # fmt: skip
        return request(
            "/mcp/bank",
            message,
            key=key or self.gateway.key,
            headers={
                "accept": "application/json, text/event-stream", "mcp-protocol-version": VERSION,
                "mcp-method": "tools/call", "mcp-name": tool, "connection": "close",
                **(headers or {}),
            },
        )  # fmt: skip

    async def call(self, tool: str, headers: dict[str, str] | None = None, **arguments: Any) -> Any:
        return await ask(self.gateway.port, self.raw(tool, arguments, headers))

    async def cli(self, *words: str, good: bool = True) -> Any:
        ran = await run_command(*words, "--admin", f"http://127.0.0.1:{self.gateway.admin}")
        assert (ran.status == 0) is good, ran
        return ran


@contextlib.contextmanager
def played(**changes: Any) -> Iterator[tuple[Stage, Ground]]:
    with scratch() as folder, Stage() as stage:
        ground = Ground(folder)
        stage.run(ground.start(**changes))
        try:
            yield stage, ground
        finally:
            stage.run(ground.stop())


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Stage, Ground]]:
    with played() as made:
        yield made


def text_of(answer: Answer) -> str:
    return answer.json()["result"]["content"][0]["text"]


def error_of(answer: Answer) -> Any:
    return answer.json()["error"]


# --- effects


def test_a_key_runs_once_and_its_repetition_is_answered_under_its_own_id(scene):
    stage, ground = scene

    async def play():
        key = {"idempotency-key": "k-1"}
        first = await ground.call("pay", key, amount=1)
        again = await ground.call("pay", key, amount=1)
        spelled = await ask(
            ground.gateway.port, ground.raw("pay", {"amount": 1.0}, key)
        )  # the same amount
        other = await ground.call("pay", key, amount=2)
        return first, again, spelled, other

    first, again, spelled, other = stage.run(play())
    assert first.status == again.status == spelled.status == 200
    assert text_of(first) == text_of(again) == text_of(spelled)
    assert first.json()["id"] != again.json()["id"]
    assert again.header("tidegate-replayed") == "true"
    assert (other.status, error_of(other)["code"]) == (409, -31409)
    assert error_of(other)["data"]["reason"] == "determinism_violation"
    assert len(ground.deeds(amount=1)) == 1
    assert ground.deeds(amount=2) == []


def test_a_caller_that_vanishes_in_the_middle_gets_the_answer_when_it_comes_back(scene):
    stage, ground = scene

    async def play():
        key = {"idempotency-key": "k-cut"}
        wire = await Wire.open(ground.gateway.port)
        await wire.send(ground.raw("pay", {"amount": 3, "pause": 1.0}, key))
        await until(lambda: ground.deeds(amount=3))
        await wire.close()
        joined = await ground.call("pay", key, amount=3, pause=1.0)
        after = await ground.call("pay", key, amount=3, pause=1.0)
        return joined, after

    joined, after = stage.run(play())
    assert joined.status == after.status == 200
    assert text_of(joined) == text_of(after)
    assert len(ground.deeds(amount=3)) == 1


def test_a_broken_stream_is_answered_from_the_record(scene):
    stage, ground = scene

    async def play():
        key = {"idempotency-key": "k-stream"}
        wire = await Wire.open(ground.gateway.port)
        await wire.send(ground.raw("pay", {"amount": 4, "events": True}, key))
        await wire.wait_for(b"notifications/message")
        await wire.close()
        await asyncio.sleep(1)
        return await ground.call("pay", key, amount=4, events=True)

    again = stage.run(play())
    assert again.status == 200
    assert text_of(again).startswith("deed")
    assert len(ground.deeds(amount=4)) == 1


def test_of_many_that_ask_at_once_one_runs_and_all_are_answered(scene):
    stage, ground = scene

    async def play():
        key = {"idempotency-key": "k-many"}
        return await asyncio.gather(
            *(ground.call("pay", key, amount=5, pause=0.3) for _ in range(20))
        )

    answers = stage.run(play())
    assert {answer.status for answer in answers} == {200}
    assert len({text_of(answer) for answer in answers}) == 1
    assert len({answer.json()["id"] for answer in answers}) == 20
    assert len(ground.deeds(amount=5)) == 1


def test_an_answer_that_does_not_come_leaves_a_doubt_and_an_operator_ends_it(scene):
    stage, ground = scene

    async def play():
        key = {"idempotency-key": "k-doubt"}
        first = await ground.call("pay", key, amount=6, cut=True)
        again = await ground.call("pay", key, amount=6, cut=True)
        listed = await ground.cli("effects", "list")
        effect = next(line for line in listed.out.splitlines() if "bank/pay" in line).split()[0]
        resolved = await ground.cli("effects", "resolve", effect, "done", "--by", "ann: bank says")
        after = await ground.call("pay", key, amount=6, cut=True)
        return first, again, resolved, after

    first, again, resolved, after = stage.run(play())
    assert first.status in (502, 504)
    assert (again.status, error_of(again)["data"]["reason"]) == (409, "effect_in_doubt")
    assert "done" in resolved.out
    assert error_of(after)["data"]["reason"] == "effect_done"
    assert len(ground.deeds(amount=6)) == 1


def test_a_server_that_can_be_asked_answers_for_what_it_did(scene):
    stage, ground = scene

    async def play():
        key = {"idempotency-key": "k-wire"}
        first = await ground.call("wire", key, ref="r-1", cut=True)
        again = await ground.call("wire", key, ref="r-1", cut=True)
        once_more = await ground.call("wire", key, ref="r-1", cut=True)
        return first, again, once_more

    first, again, once_more = stage.run(play())
    assert first.status in (502, 504)
    assert again.status == once_more.status == 200
    result = again.json()["result"]
    assert result["structuredContent"] == {"state": "booked", "ref": "r-1"}
    assert result["_meta"] == {"tidegate/reconciled": "booked"}
    assert again.header("tidegate-replayed") == "true"
    assert once_more.json()["result"] == result  # from the record, without asking again
    assert len(ground.deeds(ref="r-1")) == 1


def test_a_server_that_did_nothing_so_far_is_not_believed_while_it_may_still(scene):
    stage, ground = scene

    async def play():
        key = {"idempotency-key": "k-lost"}
        first = await ground.call("wire", key, ref="r-2", lose=True)
        return first, await ground.call("wire", key, ref="r-2", lose=True)

    first, again = stage.run(play())
    assert first.status in (502, 504)
    assert (again.status, error_of(again)["data"]["reason"]) == (409, "effect_under_way")
    assert ground.deeds(ref="r-2") == []


def test_a_call_that_never_left_frees_its_key(scene):
    stage, ground = scene

    async def play():
        key = {"idempotency-key": "k-free"}
        refused = await ground.call("pay", key, amount=-1)
        return refused, await ground.call("pay", key, amount=7)

    refused, good = stage.run(play())
    assert refused.status == 400
    assert good.status == 200
    assert len(ground.deeds(amount=7)) == 1


def test_killed_between_intent_and_outcome_it_is_in_doubt_and_never_runs_again():
    with played() as (stage, ground):

        async def play():
            key = {"idempotency-key": "k-kill"}
            done = await ground.call("pay", {"idempotency-key": "k-done"}, amount=1)
            running = asyncio.ensure_future(ground.call("pay", key, amount=8, pause=3.0))
            await until(lambda: ground.deeds(amount=8))
            ground.gateway.signal(signal.SIGKILL)
            with contextlib.suppress(Exception):
                await running
            await ground.gateway.ended()
            await ground.gateway.again()
            again = await ground.call("pay", key, amount=8, pause=3.0)
            replayed = await ground.call("pay", {"idempotency-key": "k-done"}, amount=1)
            listed = await ground.cli("effects", "list", "--json")
            return done, again, replayed, json.loads(listed.out)

        done, again, replayed, listed = stage.run(play())
        assert (again.status, error_of(again)["data"]["reason"]) == (409, "effect_in_doubt")
        assert text_of(replayed) == text_of(done)
        assert len(ground.deeds(amount=8)) == 1
        assert len(ground.deeds(amount=1)) == 1
        [doubt] = listed["effects"]
        assert doubt["note"] == "the gateway ended while it was under way"
        assert "effect_in_doubt" in ground.gateway.err.read_text()


# --- approvals


async def pending(ground: Ground, **arguments: Any) -> str:
    """The id of the question that this call raises."""
    answer = await ground.call("pay", **arguments)
    assert (answer.status, error_of(answer)["code"]) == (403, -31403), answer
    data = error_of(answer)["data"]
    assert data["reason"] == "approval_pending"
    assert data["retryAfterMs"] > 0
    return data["approval"]


def test_a_granted_call_runs_once_and_its_next_one_is_another_question(scene):
    stage, ground = scene

    async def play():
        approval = await pending(ground, amount=60_001)
        shown = await ground.cli("approvals", "show", approval)
        listed = await ground.cli("approvals", "list")
        await ground.cli(
            "approvals", "grant", approval, "--key", str(ground.key), "--yes", "--note", "fine"
        )
        done = await ground.call("pay", amount=60_001)
        second = await pending(ground, amount=60_001)
        return approval, shown, listed, done, second

    approval, shown, listed, done, second = stage.run(play())
    assert "60001" in shown.out
    assert "more than 50,000" in shown.out
    assert approval in listed.out
    assert done.status == 200
    assert done.header("tidegate-approval") == approval
    assert second != approval
    assert len(ground.deeds(amount=60_001)) == 1


def test_a_call_that_waits_goes_on_the_moment_it_is_granted(scene):
    stage, ground = scene

    async def play():
        first = await pending(ground, amount=60_002)
        waiting = asyncio.ensure_future(ground.call("pay", amount=60_002))
        await asyncio.sleep(0.2)
        await ground.cli("approvals", "grant", first, "--key", str(ground.key), "--yes")
        answer = await waiting
        if answer.status == 403:  # the command took longer than the call waits: it comes back
            answer = await ground.call("pay", amount=60_002)
        return answer

    assert stage.run(play()).status == 200
    assert len(ground.deeds(amount=60_002)) == 1


def test_a_denied_call_stays_denied_and_says_by_whom_and_why(scene):
    stage, ground = scene

    async def play():
        approval = await pending(ground, amount=60_003)
        await ground.cli(
            "approvals", "deny", approval, "--key", str(ground.key), "--yes", "--note", "too much"
        )
        answer = await ground.call("pay", amount=60_003)
        late = await ground.cli(
            "approvals", "grant", approval, "--key", str(ground.key), "--yes", good=False
        )
        return answer, late

    answer, late = stage.run(play())
    assert answer.status == 403
    assert error_of(answer)["data"]["reason"] == "approval_denied"
    assert "ann" in error_of(answer)["message"]
    assert "too much" in error_of(answer)["message"]
    assert "denied" in late.err
    assert ground.deeds(amount=60_003) == []


def test_an_expired_question_is_a_denial_and_no_client_timeout_decides_before(scene):
    stage, ground = scene

    async def play():
        first = await pending(ground, amount=777)
        wire = await Wire.open(ground.gateway.port)
        await wire.send(ground.raw("pay", {"amount": 777}))
        await wire.close()  # a client that will not wait changes nothing
        shown = (await fetch(ground.gateway.admin, f"/approvals/{first}")).json()
        await asyncio.sleep(5)
        late = await ground.cli(
            "approvals", "grant", first, "--key", str(ground.key), "--yes", good=False
        )
        return shown, late

    shown, late = stage.run(play())
    assert shown["state"] == "pending"
    assert "expired" in late.err
    assert ground.deeds(amount=777) == []


def test_changed_arguments_do_not_run_and_void_what_was_granted(scene):
    stage, ground = scene

    async def play():
        approval = await pending(ground, amount=60_004)
        await ground.cli("approvals", "grant", approval, "--key", str(ground.key), "--yes")
        other = await pending(ground, amount=60_005)
        named = await ground.call("pay", {"tidegate-approval": approval}, amount=60_006)
        after = await ground.call("pay", {"tidegate-approval": approval}, amount=60_004)
        return approval, other, named, after

    approval, other, named, after = stage.run(play())
    assert other != approval
    assert error_of(named)["data"]["reason"] == "approval_void"
    assert after.status == 403
    for amount in (60_004, 60_005, 60_006):
        assert ground.deeds(amount=amount) == []


def test_nobody_but_an_approver_can_decide(scene, tmp_path):
    stage, ground = scene

    async def play():
        approval = await pending(ground, amount=60_007)
        stranger = tmp_path / "stranger.key"
        made = await run_command("approvals", "key", "eve", "--key", str(stranger))
        assert made.status == 0
        refused = await ground.cli(
            "approvals", "grant", approval, "--key", str(stranger), "--yes", good=False
        )
        again = await run_command("approvals", "key", "eve", "--key", str(stranger))
        stranger.chmod(0o644)
        readable = await ground.cli(
            "approvals", "grant", approval, "--key", str(stranger), "--yes", good=False
        )
        return refused, again, readable, await ground.call("pay", amount=60_007)

    refused, again, readable, answer = stage.run(play())
    assert "no approver" in refused.err
    assert again.status != 0
    assert "exists already" in again.err
    assert "chmod 600" in readable.err
    assert error_of(answer)["data"]["reason"] == "approval_pending"
    assert stat.S_IMODE(ground.key.stat().st_mode) == 0o600
    assert ground.deeds(amount=60_007) == []


def test_a_question_and_its_grant_survive_kill_9():
    with played() as (stage, ground):

        async def play():
            approval = await pending(ground, amount=60_008)
            ground.gateway.signal(signal.SIGKILL)
            await ground.gateway.ended()
            await ground.gateway.again()
            await ground.cli("approvals", "grant", approval, "--key", str(ground.key), "--yes")
            ground.gateway.signal(signal.SIGKILL)
            await ground.gateway.ended()
            await ground.gateway.again()
            return await ground.call("pay", amount=60_008)

        assert stage.run(play()).status == 200
        assert len(ground.deeds(amount=60_008)) == 1


# --- fairness


def test_ten_agents_share_one_seat_of_a_tool_alike_however_much_one_asks(scene):
    stage, ground = scene

    async def play():
        async def one(agent: int, number: int, pause: float = 0.02) -> int:
            raw = ground.raw("queue", {"who": agent, "n": number, "pause": pause}, None,
                             f"crowd-{agent}")  # fmt: skip
            return (await ask(ground.gateway.port, raw)).status

        async def all_wait() -> bool:
            return (await ground.gateway.status())["waiting"] == 57

        first = asyncio.ensure_future(one(0, 0, 5.0))
        await until(lambda: ground.deeds(who=0))
        greedy = [asyncio.ensure_future(one(0, n)) for n in range(1, 40)]
        modest = [asyncio.ensure_future(one(agent, n)) for agent in range(1, 10) for n in range(2)]
        await until(all_wait)
        return await asyncio.gather(first, *modest, *greedy)

    statuses = stage.run(play())
    assert set(statuses) == {200}
    order = [one[1]["who"] for one in ground.deeds() if one[0] == "queue"]
    assert len(order) == 58
    # The eighteen calls of the nine modest agents are served long before the greedy one's forty.
    last = max(at for at, who in enumerate(order) if who != 0)
    assert last < 30


# --- loops, contract, drain


def test_a_runaway_is_cut_and_the_server_is_spared(scene):
    stage, ground = scene

    async def play():
        return [await ground.call("look", q="same") for _ in range(6)]

    answers = stage.run(play())
    assert [one.status for one in answers] == [200] * 3 + [429] * 3
    assert len(ground.deeds(q="same")) == 3


def test_a_broken_contract_never_reaches_the_server(scene):
    stage, ground = scene

    async def play():
        return [
            await ground.call("pay", amount="60000"),
            await ground.call("pay", amount=-5),
            await ground.call("pay", to="x"),
        ]

    before = len(ground.deeds())
    answers = stage.run(play())
    assert [error_of(one)["code"] for one in answers] == [-32602] * 3
    assert len(ground.deeds()) == before


def test_a_stopping_gateway_lets_an_effect_end_and_records_it():
    with played(edge={"drain": "5s"}) as (stage, ground):

        async def play():
            key = {"idempotency-key": "k-drain"}
            running = asyncio.ensure_future(ground.call("pay", key, amount=9, pause=1.0))
            await until(lambda: ground.deeds(amount=9))
            ground.gateway.signal(signal.SIGTERM)
            answer = await running
            assert await ground.gateway.ended() == 0
            await ground.gateway.again()
            return answer, await ground.call("pay", key, amount=9, pause=1.0)

        answer, again = stage.run(play())
        assert text_of(answer) == text_of(again)
        assert len(ground.deeds(amount=9)) == 1
