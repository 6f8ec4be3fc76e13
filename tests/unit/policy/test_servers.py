"""The section `servers` of a policy: what is refused with its place, and what it compiles to."""

from __future__ import annotations

import base64

import pytest

from gateway.errors import PolicyError
from gateway.policy.compile import compile as compiled
from gateway.policy.load import load_texts
from gateway.units import MICRO

BASE = """\
version: 1
providers:
  up: {kind: openai, base_url: http://provider.test, keys: [{id: main, value: uk}]}
models:
  m: {provider: up, pool: per_model}
agents:
  load: {keys: [{key: "${KEY}"}], tools: %s}
servers:
%s
"""


def loaded(servers, tools="['*']"):
    lines = "\n".join("  " + line for line in servers.splitlines())
    env = {"KEY": "tg_a_0123456789abcdef", "TOKEN": "server-token", "URL": "http://h:1/x/mcp"}
    return compiled(load_texts({"p.yaml": (BASE % (tools, lines)).encode()}, env=env), revision=1)


def test_a_remote_server_is_compiled_with_its_path_credential_and_limits():
    made = loaded(
        "git:\n  url: ${URL}\n  key: ${TOKEN}\n  headers: {x-team: a}\n"
        "  limits: {rpm: 60, concurrency: 3}\n  tools: {'*': {}, wipe: {deny: true}}\n"
    ).servers["git"]
    assert (made.provider.base_url, made.target) == ("http://h:1", b"/x/mcp")
    assert made.provider.credentials[0].secret.reveal() == "server-token"
    assert "server-token" not in repr(made)
    (pool,) = made.pools
    assert (pool.name, pool.concurrency) == ("server:git", 3)
    assert pool.concurrency_because == "servers.git.limits.concurrency"
    assert [rule.pattern for rule in made.tools] == ["wipe", "*"]
    assert made.rule("wipe").deny
    assert not made.rule("read").deny


def test_a_command_is_compiled_with_its_bounds():
    made = loaded(
        "time:\n  command: [python, -m, mcp_server_time]\n  env: {TOKEN: '${TOKEN}'}\n"
        "  process: {memory: 1GiB, open_files: 64, cpu: 60s}\n  era: session\n"
    ).servers["time"]
    assert made.command == ("python", "-m", "mcp_server_time")
    assert made.provider.base_url == ""
    assert (made.child.memory, made.child.open_files, made.child.cpu) == (1 << 30, 64, 60 * MICRO)
    assert made.era == "session"


@pytest.mark.parametrize(
    ("servers", "path", "word"),
    [
        ("a: {}", "servers.a", "url or command"),
        ("a: {url: 'http://h/mcp', command: [x]}", "servers.a", "url or command"),
        ("a: {url: 'http://h/mcp', env: {A: b}}", "servers.a.env", "without command"),
        ("a: {command: [x], key: '${TOKEN}'}", "servers.a.key", "without url"),
        ("A_b: {command: [x]}", "servers", "no name of a server"),
        ("a: {url: 'ftp://h/mcp'}", "servers.a.url", "http"),
        ("a: {url: 'http://u:p@h/mcp'}", "servers.a.url", "credentials"),
        ("a: {command: [x], limits: {}}", "servers.a.limits", "limits nothing"),
        ("a: {command: [x], tools: {'*': {}, 're*': {}}}", "servers.a.tools", "never reached"),
        ("a: {command: [x], wrong: 1}", "servers.a", "wrong"),
        ("a: {url: 'http://h/mcp', headers: {authorization: x}}", "servers.a.headers", "auth"),
    ],
)
def test_a_server_that_cannot_work_is_refused_with_its_place(servers, path, word):
    with pytest.raises(PolicyError) as caught:
        loaded(servers)
    text = "\n".join(str(problem) for problem in caught.value.problems)
    assert path in text
    assert word in text
    assert "p.yaml:" in text


def test_an_agents_tool_that_no_server_has_is_refused():
    with pytest.raises(PolicyError, match="fits no tool of any server"):
        loaded("a: {command: [x]}", tools="[b__read]")


APPROVERS = """
approvals: {approvers: {ann: "ed25519:%s", bob: "ed25519:%s"}}
"""


@pytest.mark.parametrize(
    ("approve", "able"), [("{signatures: 3}", 2), ("{approvers: [ann], signatures: 2}", 1)]
)
def test_a_rule_wants_no_more_signatures_than_there_are_who_may_give_them(approve, able):
    keys = tuple(base64.b64encode(name * 32).decode() for name in (b"a", b"b"))
    servers = f"  bank:\n    url: http://h:1/\n    tools: {{pay: {{approve: {approve}}}}}\n"
    text = BASE % ("['*']", servers) + APPROVERS % keys
    with pytest.raises(PolicyError) as refused:
        load_texts({"p.yaml": text.encode()}, env={"KEY": "tg_a_0123456789abcdef"})
    assert f"at most {able}" in str(refused.value)
    fits = text.replace("signatures: 3", "signatures: 2").replace("[ann]", "[ann, bob]")
    load_texts({"p.yaml": fits.encode()}, env={"KEY": "tg_a_0123456789abcdef"})


RECONCILE = (
    "{tool: %s, arguments: {ref: order.ref}, done: [{path: state, one_of: [ok]}], "
    "absent: [{path: state, one_of: [none]}]}"
)


def bank(pay, find="{effect: read}"):
    return f"bank:\n  url: http://h:1/\n  tools:\n    pay: {pay}\n    find: {find}\n"


def test_a_queryable_tool_is_compiled_with_what_its_server_is_asked():
    made = loaded(bank("{effect: queryable, reconcile: %s}" % (RECONCILE % "find")))
    rule = made.servers["bank"].rule("pay")
    assert not rule.repeatable
    assert rule.reconcile.tool == "find"
    assert rule.reconcile.arguments == (("ref", ("order", "ref")),)
    assert rule.reconcile.because == "servers.bank.tools.pay.reconcile"


@pytest.mark.parametrize(
    ("servers", "word"),
    [
        (bank("{effect: queryable}"), "go together"),
        (bank("{reconcile: %s}" % (RECONCILE % "find")), "go together"),
        (bank("{effect: queryable, reconcile: %s}" % (RECONCILE % "gone")), "read only"),
        (bank("{effect: queryable, reconcile: %s}" % (RECONCILE % "find"), "{}"), "read only"),
    ],
    ids=["no reconcile", "another effect", "no such tool", "it may act"],
)
def test_a_queryable_tool_names_one_that_only_reads_and_nobody_else_does(servers, word):
    with pytest.raises(PolicyError) as refused:
        loaded(servers)
    assert word in str(refused.value)
