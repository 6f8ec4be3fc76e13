"""The process as its operator meets it: starting, refusing to start, reloading, stopping, dying."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fixtures.ports import free_port
from tests.fixtures.waiting import Turns
from tests.integration.gateway import (
    ROOT,
    Emulator,
    Gateway,
    NotStarted,
    Process,
    Stage,
    Wire,
    World,
    ask,
    by_day,
    command,
    emulation,
    environment,
    fetch,
    policy,
    request,
    run_command,
    scratch,
    staged,
    until,
    world,
)

pytestmark = pytest.mark.acceptance

HELLO = [{"role": "user", "content": "hello"}]
ONE_AT_A_TIME = policy(
    pools={"narrow": {"provider": "emulator", "limits": {"concurrency": 1}}},
    models={
        "gpt-narrow": {"provider": "emulator", "pool": "narrow"},
        "gpt-first": {"provider": "emulator", "pool": "narrow"},
    },
)


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as made:
        yield made


def chat(gateway: Gateway, model: str = "gpt-any", **more: Any) -> bytes:
    return request(
        "/v1/chat/completions", {"model": model, "messages": HELLO, **more}, key=gateway.key
    )


# --- starting ------------------------------------------------------------------------------------


def test_the_first_minute_needs_nothing_but_the_printed_lines(stage):
    """As `make run`: the shipped policy, its own emulator, lines to paste, a private key."""

    async def scenario() -> None:
        with scratch() as folder:
            gateway = Gateway(folder)
            env = environment(TIDEGATE_STATE_DIR=str(folder / "state"))
            arguments = command("serve", "--port", "0", "--admin-port", "0")
            ready = await gateway.start(arguments, env, "ready")
            lines = gateway.out.read_text().splitlines()
            assert [line.split("=")[0] for line in lines[:4]] == [
                "export OPENAI_BASE_URL", "export OPENAI_API_KEY",
                "export ANTHROPIC_BASE_URL", "export ANTHROPIC_API_KEY",
            ]  # fmt: skip
            assert lines[4].startswith("curl ")
            assert lines[5] == ready
            assert len(lines) == 6
            shell = await asyncio.create_subprocess_shell(
                lines[4], stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
            )
            out, _ = await shell.communicate()
            assert json.loads(out)["choices"][0]["message"]["content"]
            key = lines[1].partition("=")[2]
            files = [path for path in (folder / "state").rglob("*") if path.is_file()]
            assert any(key in path.read_text(errors="replace") for path in files)
            for path in files:
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
            assert key not in gateway.err.read_text()
            port = int(lines[0].rpartition(":")[2].partition("/")[0])
            streams = []
            for number in range(8):
                stream = await Wire.open(port)
                talk = [{"role": "user", "content": f"question {number}"}]
                body = {"model": "gpt-4o", "messages": talk, "stream": True, "max_tokens": 200}
                await stream.send(request("/v1/chat/completions", body, key=key))
                streams.append(stream)
            for stream in streams:
                await stream.wait_for(b'"content":"')
            gateway.interrupt()
            answers = await asyncio.gather(*(stream.answer() for stream in streams))
            done = [one.whole and b"data: [DONE]" in one.body for one in answers]
            assert all(done), "Ctrl-C lets what is under way finish, the emulator's side too"
            for stream in streams:
                await stream.close()
            assert await gateway.ended() == 0
            assert gateway.crashes() == []
            told = [one["event"] for one in gateway.events()]
            assert [one for one in told if one != "call"][-2:] == ["stopping", "drained"]
            children = await run_pgrep(gateway.pid)
            assert children == "", "the emulator beside it ended too"

    stage.run(scenario())


async def run_pgrep(parent: int) -> str:
    process = await asyncio.create_subprocess_exec(
        "ps", "-o", "pid=", "--ppid", str(parent), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return out.decode().strip()


@pytest.mark.parametrize("which", ["data", "admin"])
def test_a_busy_port_is_one_clear_sentence(stage, which):
    async def scenario() -> None:
        with scratch() as folder, socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen()
            taken = sock.getsockname()[1]
            ports = {"--port": "0", "--admin-port": "0"}
            ports["--port" if which == "data" else "--admin-port"] = str(taken)
            gateway = Gateway(folder)
            gateway.write(policy())
            env = environment(
                TIDEGATE_STATE_DIR=str(folder), UPSTREAM_URL="http://127.0.0.1:1",
                UPSTREAM_KEY="k", TESTER_KEY="tg-tester-0123456789",
            )  # fmt: skip
            ran = await run_command(
                "serve", "--policy", str(gateway.policy), *sum(ports.items(), ()), env=env
            )
            assert ran.status == 1
            assert ran.out == ""
            variable = "TIDEGATE_PORT" if which == "data" else "TIDEGATE_ADMIN_PORT"
            assert ran.err == (
                f"tidegate: The {which} listener 127.0.0.1:{taken} is already in use; free it or "
                f"choose another with {variable}.\n"
            )

    stage.run(scenario())


BROKEN = """\
version: 1
providers:
  up:
    kind: other
    base_url: http://127.0.0.1:9
    dialects: [openai]
pools:
  main:
    provder: up
    limits: {rpm: 10, tokens_per_minute: 5}
models:
  gpt-*:
    provider: up
    pool: main
agents:
  one:
    keys: [{key: "${NOT_THERE}"}]
"""


def test_a_mistake_in_the_policy_is_told_with_its_place_and_nothing_starts(stage):
    async def scenario() -> None:
        with scratch() as folder:
            path = folder / "bad.yaml"
            path.write_text(BROKEN)
            env = environment(TIDEGATE_STATE_DIR=str(folder / "state"))
            arguments = ("--policy", str(path), "--port", "0", "--admin-port", "0")
            started, checked, told = await asyncio.gather(
                run_command("serve", *arguments, env=env),
                run_command("check", str(path), env=env),
                run_command("check", "--json", str(path), env=env),
            )
            assert (started.status, checked.status, told.status) == (1, 1, 1)
            assert started.out == ""
            assert f"{path}:9:5: pools.main.provder: unknown key" in started.err
            assert "did you mean 'provider'" in started.err
            assert f"{path}:10:" in started.err
            assert "tokens_per_minute" in started.err
            assert "NOT_THERE" in started.err
            assert "Traceback" not in started.err
            assert started.err.endswith("the policy above was refused; nothing was started.\n")
            for line in started.err.splitlines():
                if line.startswith(str(path)):
                    assert line in checked.out
            problems = json.loads(told.out)
            assert problems["ok"] is False

    stage.run(scenario())


def test_every_command_says_what_it_did_in_its_exit_status(stage):
    async def scenario() -> None:
        nowhere = f"http://127.0.0.1:{free_port()}"
        default = str(ROOT / "policies" / "default.yaml")
        with scratch() as folder:
            env = environment(TIDEGATE_STATE_DIR=str(folder / "state"))
            ran = await asyncio.gather(
                run_command("--version", env=env),
                run_command("schema", env=env),
                run_command("key", "robot", env=env),
                run_command("doctor", env=env),
                run_command("status", "--once", "--admin", nowhere, env=env),
                run_command("explain", "x", "--admin", nowhere, env=env),
                run_command("check", str(folder / "missing.yaml"), env=env),
                run_command("check", default, env=env),
                run_command("serve", "--workers", "0", env=env),
                run_command("no-such-command", env=env),
                run_command("worker", env=env),
            )
        version, schema, key, doctor, status, explain, missing, check, workers, no, later = ran
        for one in ran:
            assert "Traceback" not in one.err + one.out, one
        assert version.status == 0
        assert re.fullmatch(r"tidegate \d+\.\d+\.\d+\S*\n", version.out)
        assert schema.status == 0
        assert "providers" in json.loads(schema.out)["properties"]
        assert key.status == 0
        assert re.search(r"^  tg_robot_\S{20,}$", key.out, re.MULTILINE)
        assert re.search(r"sha256:[0-9a-f]+:[0-9a-f]{64}", key.out)
        assert doctor.status in (0, 1)
        assert "Python 3." in doctor.out
        assert status.status == 1
        assert explain.status == 1
        assert nowhere in status.err
        assert nowhere in explain.err
        assert missing.status == 1
        assert "missing.yaml" in missing.out + missing.err
        assert check.status in (0, 1)
        assert workers.status != 0
        assert "--workers" in workers.err
        assert no.status == 2
        assert later.status != 0
        assert "cannot do it yet" in later.err

    stage.run(scenario())


# --- a running one -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Stage, World]]:
    with staged(ONE_AT_A_TIME) as made:
        yield made


def test_status_and_explain_show_what_happened_to_a_call(scene):
    stage, world = scene

    async def scenario() -> None:
        answer = await ask(world.gateway.port, chat(world.gateway))
        call = answer.header("tidegate-call-id")
        admin = f"http://127.0.0.1:{world.gateway.admin}"
        await world.gateway.idle()
        shown, told, machine, unknown = await asyncio.gather(
            run_command("status", "--once", "--admin", admin),
            run_command("explain", call, "--admin", admin),
            run_command("explain", call, "--json", "--admin", admin),
            run_command("explain", "0" * 24, "--admin", admin),
        )
        assert shown.status == told.status == machine.status == 0
        assert "pool:wide" in shown.out
        assert "policy revision" in shown.out
        assert call in told.out
        assert "agents.tester" in told.out
        assert re.search(r"gateway\.yaml:\d+", told.out), told.out
        assert json.loads(machine.out)["status"] == 200
        assert unknown.status == 1
        assert "unknown" in unknown.err
        for secret in (*world.gateway.keys.values(), "sk-upstream"):
            assert all(secret not in one.out + one.err for one in (shown, told, machine))

    stage.run(scenario())


def test_the_admin_listener_is_not_on_the_data_port_nor_the_other_way_round(scene):
    stage, world = scene

    async def scenario() -> None:
        for path in ("/healthz", "/readyz", "/metrics", "/status"):
            assert (await fetch(world.gateway.admin, path)).status == 200
            assert (await fetch(world.gateway.port, path)).status == 404
        assert (await fetch(world.gateway.admin, "/v1/models")).status == 404

    stage.run(scenario())


def test_a_file_goes_on_with_the_length_it_came_with(scene):
    """A body that is relayed unread: servers exist that take no chunked request (411)."""
    stage, world = scene
    body = b"--x\r\n\r\n" + b"." * 200_000 + b"\r\n--x--\r\n"
    kind = {"content-type": "multipart/form-data; boundary=x"}

    async def scenario() -> None:
        plain = request("/v1/files", body, key=world.gateway.key)
        for data in (
            plain.replace(b"content-type: application/json", b"content-type: multipart/form-data"),
            request("/v1/files", None, method="POST", key=world.gateway.key,
                    headers={**kind, "transfer-encoding": "chunked"})
            + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
        ):  # fmt: skip
            assert (
                await ask(world.gateway.port, data)
            ).status == 404  # the emulator keeps no files
        # Heads alone: a server that refuses by the head need not have read the body.
        sent = b"\r\n".join(line.sent for line in world.upstream.lines)
        heads = re.findall(rb"POST /v1/files HTTP/1.1\r\n(.*?)\r\n\r\n", sent, re.DOTALL)
        known, chunked = ([*one.lower().split(b"\r\n")] for one in heads)
        assert b"content-length: %d" % len(body) in known
        assert not any(line.startswith(b"transfer-encoding") for line in known)
        assert b"transfer-encoding: chunked" in chunked
        assert not any(line.startswith(b"content-length") for line in chunked)

    stage.run(scenario())


def changed(**more: Any) -> dict[str, Any]:
    """The running policy with another agent's limit, so that its digest differs."""
    return {**ONE_AT_A_TIME, **more}


@pytest.mark.parametrize("how", ["edit", "signal", "request"])
def test_a_new_policy_is_taken_without_losing_levels_waiters_or_calls_in_flight(scene, how):
    stage, world = scene
    gateway = world.gateway

    async def scenario() -> None:
        gateway.write(ONE_AT_A_TIME)
        await reloaded(gateway, "request")
        before = await gateway.status()
        await world.emulator.faults(
            {"action": "stall", "after_events": 4, "seconds": 2, "models": ["gpt-first"]}
        )
        first = await Wire.open(gateway.port)
        await first.send(chat(gateway, "gpt-first", stream=True))
        await first.wait_for(b'"content":"')
        new = policy(
            **{key: ONE_AT_A_TIME[key] for key in ("pools", "models")},
            agents={"second": {"keys": [{"key": "${TESTER_KEY}"}]}},
        )
        del new["agents"]["tester"]
        new["retry"] = {"attempts": {"edit": 1, "signal": 2, "request": 4}[how]}
        with world.upstream.holding("gpt-first"):
            waiting = asyncio.create_task(ask(gateway.port, chat(gateway, "gpt-narrow")))
            await until(lambda: one_waits(gateway))
            gateway.write(new)
            await reloaded(gateway, how, before["policy"]["revision"])
            status = await gateway.status()
            assert status["policy"]["digest"] != before["policy"]["digest"]
            [narrow] = [one for one in status["pools"] if one["name"] == "pool:narrow"]
            held = (narrow["in_flight"], sum(narrow["waiting"]))
            assert held == (1, 1), "nobody lost their place"
            later = await ask(gateway.port, chat(gateway))
            assert later.status == 200
        assert (await first.answer()).whole, "a call under way finishes as it began"
        assert (await waiting).status == 200
        await first.close()
        await gateway.idle()
        old, young = before["policy"]["revision"], status["policy"]["revision"]
        ended = {("gpt-first", old, "tester"), ("gpt-narrow", old, "tester"),
                 ("gpt-any", young, "second")}  # fmt: skip

        def logged() -> bool:
            lines = gateway.events("call")
            return ended <= {(one["model"], one["revision"], one["agent"]) for one in lines}

        await until(logged)
        used = {one["name"]: one["dimensions"] for one in before["pools"]}["pool:wide"]
        now = {one["name"]: one["dimensions"] for one in status["pools"]}["pool:wide"]
        assert now[0]["used"] >= used[0]["used"], "what was used is not forgotten"

    stage.run(scenario())


async def one_waits(gateway: Gateway) -> bool:
    return any(sum(one["waiting"]) for one in (await gateway.status())["pools"])


async def reloaded(gateway: Gateway, how: str, revision: int = 0) -> None:
    if how == "signal":
        gateway.signal(signal.SIGHUP)
    elif how == "request":
        assert (await fetch(gateway.admin, "/reload", {})).status == 200

    async def newer() -> bool:
        return (await gateway.status())["policy"]["revision"] > revision

    await until(newer)


def test_a_bad_file_changes_nothing_and_is_told_everywhere(scene):
    stage, world = scene
    gateway = world.gateway

    async def scenario() -> None:
        gateway.write(ONE_AT_A_TIME)
        await reloaded(gateway, "request")
        before = (await gateway.status())["policy"]
        errors = await gateway.total("tidegate_policy_reload_errors_total")
        gateway.write(BROKEN)
        gateway.signal(signal.SIGHUP)

        async def refused() -> Any:
            now = (await gateway.status())["policy"]
            return now if now["refused"] > before["refused"] else None

        now = await until(refused)
        assert (now["revision"], now["digest"]) == (before["revision"], before["digest"])
        assert f"{gateway.policy}:9:5: " in now["last_error"]
        told = await until(lambda: gateway.events("policy_refused"))
        assert told[-1]["problems"] == now["last_error"]
        assert await gateway.total("tidegate_policy_reload_errors_total") > errors
        shown = await run_command(
            "status", "--once", "--admin", f"http://127.0.0.1:{gateway.admin}"
        )
        assert "REFUSED" in shown.out
        asked = await fetch(gateway.admin, "/reload", {})
        assert asked.status == 422
        assert asked.header("content-type") == "application/problem+json"
        assert (await ask(gateway.port, chat(gateway))).status == 200
        gateway.write(ONE_AT_A_TIME)
        await reloaded(gateway, "request")
        assert (await gateway.status())["policy"]["last_error"] == ""

    stage.run(scenario())


def test_a_reader_that_never_reads_is_bounded_and_harms_nobody(scene):
    """What the provider sends waits in the provider, not in the gateway's memory."""
    stage, world = scene
    gateway = world.gateway

    async def scenario() -> None:
        await world.emulator.faults(
            {"action": "flood", "after_events": 2, "size": 32 * 2**20, "models": ["gpt-flood"]}
        )
        # the first call makes a fresh process read the vocabulary: that is no reader's memory
        assert (await ask(gateway.port, chat(gateway))).status == 200
        before = gateway.rss_mib()
        wires = []
        for _ in range(8):
            wire = await Wire.open(gateway.port, limit=1024)
            wire.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF,
                                                            4096)  # fmt: skip
            wire.writer.transport.pause_reading()
            await wire.send(chat(gateway, "gpt-flood", stream=True))
            wires.append(wire)
        await until(lambda: len(world.upstream.exchanges("gpt-flood")) == 8)
        await asyncio.sleep(1.0)
        grown = gateway.rss_mib() - before
        assert grown < 96, f"{grown:.0f} MiB for 8 readers of 32 MiB each"
        assert (await ask(gateway.port, chat(gateway))).status == 200
        for wire in wires:
            wire.drop()
        await gateway.idle()
        world.upstream.forget()

    stage.run(scenario())


# --- stopping ------------------------------------------------------------------------------------


def test_sigterm_lets_streams_finish_and_those_who_wait_know_within_five_seconds(stage):
    faults = [
        {"action": "stall", "after_events": 3, "seconds": seconds, "models": [model]}
        for model, seconds in (("gpt-slow", 5), ("gpt-first", 60))
    ]
    chosen = policy(
        pools={"narrow": {"provider": "emulator", "limits": {"concurrency": 1}}},
        models={
            name: {"provider": "emulator", "pool": "narrow"} for name in ("gpt-narrow", "gpt-first")
        },
        edge={"drain": "8s"},
    )

    async def scenario() -> None:
        told_after: list[float] = []
        async with (
            world(chosen, provider=emulation(faults=faults)) as made,
            contextlib.AsyncExitStack() as stack,
        ):
            gateway = made.gateway
            plug = await Wire.open(gateway.port)
            await plug.send(chat(gateway, "gpt-first", stream=True))
            await plug.wait_for(b'"content":"')
            streams = []
            for _ in range(20):
                wire = await Wire.open(gateway.port)
                await wire.send(chat(gateway, "gpt-slow", stream=True))
                streams.append(wire)
            for wire in streams:
                await wire.wait_for(b'"content":"')
            with made.upstream.holding("gpt-slow"):
                waiting = [
                    asyncio.create_task(ask(gateway.port, chat(gateway, "gpt-narrow")))
                    for _ in range(50)
                ]
                await until(lambda: thus(gateway, waiting=50, in_flight=71))
                since = await stack.enter_async_context(Turns())
                gateway.signal(signal.SIGTERM)
                told = asyncio.gather(*waiting)
                told.add_done_callback(lambda _: told_after.append(since.seconds))
                await until(lambda: thus(gateway, draining=True))
            assert (await fetch(gateway.admin, "/readyz")).status == 503
            late = await ask(gateway.port, chat(gateway))
            assert late.status == 503
            assert late.header("x-should-retry") == "true"
            finished = await asyncio.gather(*(wire.answer() for wire in streams))
            assert all(one.whole and b"data: [DONE]" in one.body for one in finished)
            for answer in await told:
                assert answer.status == 503
                assert answer.header("x-should-retry") == "true"
                assert int(answer.header("retry-after")) >= 1
                assert b"Tidegate" in answer.body
            assert told_after[0] < 5.0
            cut = await plug.answer()
            assert not cut.whole, "what outlives the drain is broken off, not ended as if whole"
            assert await gateway.ended() == 0
            assert since.seconds < 11.0
            assert gateway.crashes() == []
            assert gateway.events("drained")[-1]["cut"] == 1
            for wire in (plug, *streams):
                await wire.close()

    stage.run(scenario())


async def thus(gateway: Gateway, **wanted: Any) -> bool:
    status = await gateway.status()
    return all(status[name] == value for name, value in wanted.items())


# --- dying ---------------------------------------------------------------------------------------


def test_a_killed_gateway_starts_again_with_the_same_key_and_an_orphaned_emulator_ends(stage):
    async def scenario() -> None:
        with scratch() as folder:
            gateway = Gateway(folder)
            env = environment(TIDEGATE_STATE_DIR=str(folder / "state"))
            arguments = command("serve", "--port", "0", "--admin-port", "0")
            await gateway.start(arguments, env, "ready")
            first = gateway.out.read_text()
            emulator = int(await run_pgrep(gateway.pid))
            await gateway.kill()
            await until(lambda: not alive(emulator))
            await gateway.start(arguments, env, "ready")
            second = gateway.out.read_text()
            key = re.compile(r"OPENAI_API_KEY=(\S+)")
            assert key.findall(first) == key.findall(second)
            assert await gateway.stop() == 0

    stage.run(scenario())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_dead_provider_is_an_honest_error_and_comes_back(stage):
    async def scenario() -> None:
        chosen = policy(
            retry={"attempts": 1},
            breakers={"base": "5s", "cap": "5s"},  # the twelve calls below take less
            tiers={"standard": {"number": 2, "max_wait": "200ms"}},
        )
        async with world(chosen) as made:
            gateway = made.gateway
            assert (await ask(gateway.port, chat(gateway))).status == 200
            await made.emulator.kill()
            seen = [await ask(gateway.port, chat(gateway)) for _ in range(12)]
            assert {one.status for one in seen} <= {502, 503}
            assert seen[0].status == 502
            assert seen[-1].status == 503, "the breaker spares everybody the trying"
            assert all(one.json()["error"]["message"].startswith("Tidegate") for one in seen)
            claude = await ask(
                gateway.port,
                request(
                    "/v1/messages",
                    {"model": "claude-x", "max_tokens": 9, "messages": HELLO},
                    key=gateway.key,
                ),
            )
            assert claude.status in (502, 529)
            assert claude.json()["type"] == "error"
            assert (await fetch(gateway.admin, "/healthz")).status == 200
            await made.emulator.serve(emulation())
            made.upstream.target = made.emulator.port

            async def served() -> bool:
                return (await ask(gateway.port, chat(gateway))).status == 200

            await until(served)
            await gateway.idle()

    stage.run(scenario())


def test_a_policy_folder_and_a_signal_during_start_are_fine(stage):
    async def scenario() -> None:
        with scratch() as folder:
            parts = folder / "policy"
            parts.mkdir()
            whole = policy()
            agents = {"agents": whole.pop("agents")}
            (parts / "10-main.yaml").write_text(yaml.safe_dump(whole))
            (parts / "20-agents.yaml").write_text(yaml.safe_dump(agents))
            env = environment(
                TIDEGATE_STATE_DIR=str(folder / "state"), UPSTREAM_URL="http://127.0.0.1:9",
                UPSTREAM_KEY="k", TESTER_KEY="tg-tester-0123456789",
            )  # fmt: skip
            arguments = command("serve", "--policy", str(parts), "--port", "0", "--admin-port", "0")
            process = Process(folder, "folder")
            await process.start(arguments, env, "ready")
            process.signal(signal.SIGTERM)
            assert await process.ended() == 0
            early = Process(folder, "early")
            starting = asyncio.create_task(early.start(arguments, env, "ready"))
            await until(lambda: early.process is not None)
            await asyncio.sleep(0.6)
            early.signal(signal.SIGTERM)
            with contextlib.suppress(NotStarted):
                await starting
            assert await early.ended() in (0, -signal.SIGTERM)
            assert "Traceback" not in early.err.read_text()

    stage.run(scenario())


def test_an_emulator_of_its_own_ends_by_signal(stage):
    async def scenario() -> None:
        with scratch() as folder:
            emulator = await Emulator(folder).serve(emulation())
            assert (await emulator.ledger())["requests"] == 0
            emulator.signal(signal.SIGINT)
            assert await emulator.ended() == 0
            assert emulator.err.read_text() == ""

    stage.run(scenario())


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_daily_budget_outlasts_the_process(stage, end):
    """Stopped or killed (two seconds after the last call): what was spent today stays spent."""
    spender = "tg-spender-0123456789"
    budget = policy(
        agents={
            "spender": {
                "keys": [{"key": "${SPENDER_KEY}"}],
                "budgets": [{"tokens": 2_000, "per": "day", "utc_offset": by_day()}],
            },
        }
    )  # fmt: skip

    async def scenario() -> None:
        async with world(budget, keys={"SPENDER_KEY": spender}) as made:
            body = {"model": "gpt-any", "messages": HELLO, "max_tokens": 300}
            spend = request("/v1/chat/completions", body, key=spender)
            answers = [await ask(made.gateway.port, spend)]
            while answers[-1].status == 200 and len(answers) < 40:
                answers.append(await ask(made.gateway.port, spend))
            assert answers[-1].status == 429
            if end == "kill":
                await asyncio.sleep(4)
                await made.gateway.kill()
            else:
                await made.gateway.stop()
            await made.gateway.again()
            again = await ask(made.gateway.port, spend)
            assert again.status == 429
            assert b"budget" in again.body

    stage.run(scenario())
