"""Where a webhook may go, and how it is signed. The guard is tested against the usual evasions."""

from __future__ import annotations

import asyncio
from ipaddress import ip_address

import pytest

from gateway.clock import LoopClock
from gateway.errors import Forbidden, MalformedCall
from gateway.snapshot import Secret, WebhookRules
from gateway.units import MICRO
from gateway.webhooks import (
    MAX_TRIES,
    Delivered,
    Undelivered,
    Webhooks,
    check,
    listed,
    next_try,
    reachable,
    signature,
    signing_key,
    target,
)

KEY = Secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")


def rules(*hosts: str, networks: tuple[str, ...] = ()) -> WebhookRules:
    return WebhookRules(secret=KEY, hosts=hosts, networks=networks)


@pytest.mark.parametrize(
    "url",
    [
        "", "hooks.example/x", "//hooks.example/x", "ftp://hooks.example/", "file:///etc/passwd",
        "https://", "https:///x", "https://u:p@hooks.example/", "https://hooks.example@evil.example/",
        "https://hooks.example/#x", "https://hooks.example:0/", "https://hooks.example:99999/",
        "https://hooks.example/ x", "https://hooks.example\\@evil.example/", "https://höoks.example/",
        "https://hooks.example/\r\nhost: evil", "https://0x7f000001/", "https://2130706433/",
        "https://127.1/", "https://0177.0.0.1/", "https://1.2.3/", "https://[::1/",
        "https://hooks.example/" + "a" * 3_000, "javascript:alert(1)",
    ],
)  # fmt: skip
def test_what_is_no_plain_url_is_refused_and_not_repeated(url):
    with pytest.raises(MalformedCall) as wrong:
        target(url)
    assert wrong.value.param == "tidegate-webhook"
    assert "evil" not in wrong.value.message


def test_a_url_is_taken_apart_as_it_will_be_called():
    one = target("https://Hooks.Example.:8443/a/b?c=d")
    assert (one.host, one.port, one.path) == ("hooks.example", 8443, "/a/b?c=d")
    assert one.authority == "hooks.example:8443"
    assert target("https://[2001:db8::1]/").authority == "[2001:db8::1]"
    assert target("http://h.example").port == 80


@pytest.mark.parametrize(
    ("url", "hosts", "allowed"),
    [
        ("https://h.example/x", ("h.example",), True),
        ("https://h.example:443/x", ("h.example",), True),
        ("https://h.example:8443/x", ("h.example",), False),
        ("https://h.example:8443/x", ("h.example:8443",), True),
        ("https://h.example/x", ("h.example:8443",), False),
        ("https://h.example:8443/x", ("h.example:*",), True),
        ("https://h.example:22/x", ("h.example:*",), False),
        ("https://h.example:6379/x", ("h.example:6379",), False),
        ("https://a.h.example/x", ("h.example",), False),
        ("https://a.h.example/x", ("*.h.example",), True),
        ("https://a.b.h.example/x", ("*.h.example",), True),
        ("https://h.example/x", ("*.h.example",), False),
        ("https://evilh.example/x", ("*.h.example",), False),
        ("https://h.example.evil/x", ("h.example", "*.h.example"), False),
        ("https://[fd00::1]:99/x", ("[fd00::1]:99",), True),
        ("https://h.example/x", (), False),
    ],
)  # fmt: skip
def test_only_listed_hosts_on_listed_ports_may_be_named(url, hosts, allowed):
    assert listed(target(url), hosts) is allowed
    if not allowed:
        with pytest.raises(Forbidden, match="not allowed"):
            check(url, rules(*hosts))


def test_without_a_key_nothing_may_be_named():
    with pytest.raises(Forbidden):
        check("https://h.example/", WebhookRules(hosts=("h.example",)))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "0.0.0.0", "255.255.255.255", "224.0.0.1", "192.0.2.1", "198.18.0.1", "240.0.0.1", "::1",
        "::", "fe80::1", "fd00::1", "ff02::1", "2001:db8::1", "::ffff:127.0.0.1",
        "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
    ],
)  # fmt: skip
def test_an_address_inside_is_not_reachable_in_any_of_its_forms(address):
    assert not reachable(ip_address(address), ())


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700:4700::1111", "64:ff9b::101:101"])
def test_a_public_address_is_reachable(address):
    assert reachable(ip_address(address), ())


def test_a_listed_network_is_reachable_and_only_that():
    assert reachable(ip_address("10.1.2.3"), ("10.1.0.0/16",))
    assert reachable(ip_address("::ffff:10.1.2.3"), ("10.1.0.0/16",))
    assert not reachable(ip_address("10.2.0.1"), ("10.1.0.0/16", "fd00::/8"))


def test_the_signature_is_that_of_the_specifications_example():
    made = signature(
        signing_key(KEY.reveal()), id="msg_p5jXN8AQM9LWM0D4loKWxJek", timestamp=1614265330,
        body=b'{"test": 2432232314}',
    )  # fmt: skip
    assert made == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_key_that_is_no_base64_is_taken_as_it_is():
    assert signing_key("whsec_not base64") == b"whsec_not base64"
    assert signing_key("plain text of a key") == b"plain text of a key"


def test_tries_are_spread_further_and_further_and_end():
    waits = [next_try(tries, share=0.0) for tries in range(1, MAX_TRIES + 1)]
    assert waits[-1] is None
    given = [wait for wait in waits if wait is not None]
    assert given == sorted(given)
    assert given[0] == 5 * MICRO
    assert next_try(1, share=0.5) == 5_500_000
    assert next_try(1, share=0.0, retry_after=90 * MICRO) == 90 * MICRO
    assert next_try(1, share=0.0, retry_after=10**12) == 3_600 * MICRO


# --- the way of one delivery, up to the socket ---------------------------------------------------


def sent(url: str, one: WebhookRules, *addresses: str, error: OSError | None = None):
    """What became of it, without a network: nothing may be connected to."""

    async def resolve(_host: str, _port: int) -> list[str]:
        if error is not None:
            raise error
        return list(addresses)

    async def main() -> Delivered | Undelivered:
        hooks = Webhooks(LoopClock(), resolve)
        hooks._post = _never  # type: ignore[method-assign]
        return await hooks.send(target(url), b"{}", id="d", rules=one)

    return asyncio.run(main())


async def _never(*_: object) -> Delivered:
    return Delivered(299)


@pytest.mark.parametrize(
    "addresses", [("10.0.0.1",), ("1.1.1.1", "127.0.0.1"), ("2606:4700::1", "fe80::1%eth0")]
)
def test_a_name_with_one_address_inside_is_not_called_at_all(addresses):
    outcome = sent("https://h.example/secret-path", rules("h.example"), *addresses)
    assert outcome == Undelivered(
        "h.example resolves to an address that is not public", again=False
    )


def test_plain_http_goes_into_listed_networks_only():
    inside = rules("h.example", networks=("10.0.0.0/8",))
    assert sent("http://h.example/", inside, "10.0.0.1") == Delivered(299)
    outcome = sent("http://h.example/", inside, "1.1.1.1")
    assert isinstance(outcome, Undelivered)
    assert not outcome.again


def test_a_name_that_does_not_resolve_now_is_tried_again():
    for outcome in (
        sent("https://h.example/", rules("h.example"), error=OSError(-2, "unknown")),
        sent("https://h.example/", rules("h.example")),
    ):
        assert isinstance(outcome, Undelivered)
        assert outcome.again


def test_nothing_is_sent_unsigned():
    assert sent("https://h.example/", WebhookRules(), "1.1.1.1") == Undelivered(
        "no signing key", again=False
    )
