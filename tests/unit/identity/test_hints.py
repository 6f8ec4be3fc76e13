"""gateway/identity/hints.py: what callers say about themselves; and keys made from given bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.call import Fields
from gateway.errors import MalformedCall
from gateway.identity import Baggage, baggage, derive, make_key, session_of, tier_wish
from gateway.identity.hints import MAX_HINT
from gateway.snapshot import Tier, hash_key, parse_stored_key

BYTES = st.binary(max_size=300)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from([
            b"baggage", b"priority", b"session-id", b"thread-id", b"mcp-session-id", b"x-api-key",
        ]),
        BYTES
        | st.lists(
            st.sampled_from([
                b"u=", b"3", b",", b";", b"=", b" ", b"i", b"agent.id=", b"%", b"%C3%A9", b"\xff",
            ]),
            max_size=12,
        ).map(b"".join),
    ),
    max_size=6,
)  # fmt: skip


@given(headers=HEADERS)
def test_no_hint_fails_or_is_unbounded(headers):
    found = baggage(headers)
    for text in (session_of(headers), found.agent, found.tenant, found.workflow):
        assert len(text) <= MAX_HINT
        assert text.isprintable()
    assert tier_wish(headers) in (None, 1, 2, 3)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (b"u=0", 1), (b"u=2", 1), (b"u=3", 2), (b"u=4", 2), (b"u=5", 3), (b"u=7, i", 3),
        (b"i", 2), (b"", 2), (b"u=8", 2), (b"u=-1", 2), (b"u=x", 2), (b"u", 2), (b"u=12", 2),
        (b"i, u=1", 1), (b"u=1;x=2", 1), (b"u=7,u=0", 1), (b"U=0", 2), (b" u = 0 ", 1),
    ],
)  # fmt: skip
def test_an_urgency_is_a_tier_and_an_unreadable_one_is_the_default(value, wanted):
    assert tier_wish([(b"priority", value)]) == wanted


def test_without_a_header_there_is_no_wish():
    assert tier_wish([(b"host", b"x")]) is None


def test_the_last_urgency_of_several_headers_counts():
    assert tier_wish([(b"priority", b"u=0"), (b"priority", b"u=6")]) == 3


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(b"1", 1), (b" 3 ", 3), (b"batch", 3), (b"Interactive", 1), (b"standard", 2)],
)
def test_tidegate_tier_wins_by_number_or_name(value, wanted):
    assert tier_wish([(b"priority", b"u=4"), (b"tidegate-tier", value)]) == wanted


def test_the_policy_s_own_tier_names_are_known_and_the_default_ones_no_more():
    tiers = [Tier(name="Gold", number=1), Tier(name="tin", number=2), Tier(name="bulk", number=3)]
    assert tier_wish([(b"tidegate-tier", b"gold")], tiers) == 1
    with pytest.raises(MalformedCall, match="gold, tin, bulk"):
        tier_wish([(b"tidegate-tier", b"batch")], tiers)


@pytest.mark.parametrize("value", [b"0", b"4", b"", b"urgent", b"1.5", b"\xff" * 500, "²".encode()])
def test_a_tier_that_does_not_exist_is_an_error_not_another_tier(value):
    with pytest.raises(MalformedCall) as caught:
        tier_wish([(b"tidegate-tier", value)])
    assert "allowed: 1, 2, 3" in caught.value.message
    assert len(caught.value.message) < 300


def test_baggage_gives_three_labels_decoded():
    headers = [
        (b"baggage", b"agent.id=caf%C3%A9;ttl=5 , other=x"),
        (b"baggage", b"tenant.id = acme,workflow.id=w=1,agent.id=second,broken"),
    ]
    assert baggage(headers) == Baggage(agent="caf\u00e9", tenant="acme", workflow="w=1")


def test_baggage_is_read_up_to_its_limit():
    headers = [(b"baggage", b"a=" + b"x" * 8190), (b"baggage", b"agent.id=late")]
    assert baggage(headers) == Baggage()
    assert baggage([(b"baggage", b"a=1," * 3000 + b"agent.id=late")]) == Baggage()


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ([(b"session-id", b"codex"), (b"x-claude-code-session-id", b"claude")], "claude"),
        ([(b"thread-id", b"thread"), (b"session-id", b"codex")], "codex"),
        ([(b"mcp-session-id", b"mcp"), (b"session_id", b"old")], "old"),
        ([(b"mcp-session-id", b"mcp")], "mcp"),
        ([(b"session-id", b""), (b"thread-id", b"thread")], "thread"),
        ([(b"baggage", b"workflow.id=flow")], "flow"),
        ([], "body"),
    ],
)
def test_the_best_header_names_the_session_then_baggage_then_the_body(headers, wanted):
    assert session_of(headers, Fields(model="m", session="body")) == wanted


def test_nothing_names_no_session():
    assert session_of([], None) == session_of([], Fields(model="m")) == ""


def test_long_and_unprintable_sessions_stay_distinct():
    names = {session_of([(b"session-id", b"x" * 500 + bytes([48 + n]))]) for n in range(10)}
    names |= {session_of([(b"session-id", bytes([n]) * 3)]) for n in range(1, 9)}
    assert len(names) == 18
    assert all(len(name) <= MAX_HINT and name.isprintable() for name in names)


# --- keys from given bytes --------------------------------------------------------------------


def counted(size: int) -> bytes:
    return bytes(range(size))


def test_a_new_key_is_found_by_its_stored_form():
    key, stored = make_key(counted, "team-7")
    salt, digest = parse_stored_key(stored)
    assert key.startswith("tg_team-7_")
    assert len(key.rsplit("_", 1)[1]) == 40
    assert hash_key(salt, key) == digest
    assert key not in stored


@pytest.mark.parametrize("bad", ["", "a_b", "a b", "é", "x" * 65, "-", "a.b"])
def test_an_id_that_would_blur_the_key_is_refused(bad):
    with pytest.raises(ValueError, match="letters, digits and hyphens"):
        make_key(counted, bad)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "sha256:",
        "sha256::" + "0" * 64,
        "sha256:zz:" + "0" * 64,
        "sha256:00:0011",
        "md5:00:00",
    ],
)
def test_another_form_is_no_stored_key_and_is_not_repeated(text):
    with pytest.raises(ValueError, match="sha256:<salt in hex>") as caught:
        parse_stored_key(text)
    assert not text or text not in str(caught.value).replace("sha256:<salt in hex>", "")


def test_every_purpose_has_a_key_of_its_own_and_always_the_same():
    secret = b"s" * 32
    keys = {derive(secret, purpose) for purpose in ("place", "mcp", "cursor", "resume")}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {32}
    assert derive(secret, "place") == derive(secret, "place") != derive(b"t" * 32, "place")


def test_deriving_is_hkdf():
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    hkdf = HKDF(algorithm=SHA256(), length=32, salt=b"tidegate", info=b"place")
    assert hkdf.derive(b"secret") == derive(b"secret", "place")
