"""Credentials → `Principal`: keys, JWT and JWT-SVID, cached.

The law of this room:

1. Rights come from the credential alone. Headers and body name sessions, workflows and wishes
   (`hints.py`); they never raise a right.
2. `Identities.principal` is synchronous for keys and for tokens verified before; it returns a
   coroutine only while a key set must be fetched.
3. What is remembered belongs to one policy revision: a reload revokes at once.
4. Every map keyed by what callers send is bounded and forgets. No message holds a credential.

`claims.py` decides about tokens without doing anything, `keysets.py` keeps issuers' keys,
`keyfiles.py` this process's own.
Source: RFC 6750, 7519, 8693; SPIFFE JWT-SVID; `protocols.md` §1.2 and §7.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import httpx

from gateway.call import Lines, Principal
from gateway.errors import Forbidden, GatewayError, MalformedCall, StoreUnavailable, Unauthenticated
from gateway.identity.claims import (
    Token,
    actors,
    choose_rule,
    claim,
    claims_problem,
    label,
    narrow,
    read_token,
    speaks_for,
    verify,
)
from gateway.identity.hints import HINTS, Baggage, baggage, hint, session_of, tier_wish
from gateway.identity.keyfiles import derive, dev_key, make_key, process_secret
from gateway.identity.keysets import JWKS_FIRST_PAUSE, JWKS_KEPT, Fetch, KeySets
from gateway.units import MICRO

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from gateway.call import HeaderList
    from gateway.clock import Clock
    from gateway.snapshot import AgentRule, JwtIssuer, Snapshot

__all__ = [
    "HINTS", "Baggage", "Identities", "JwksSource", "baggage", "derive", "dev_key", "make_key",
    "presented", "process_secret", "session_of", "tier_wish",
]  # fmt: skip

MAX_CREDENTIAL = 16 * 1024
"""Bytes of a credential; tokens with many claims reach 8 KiB."""

CACHED = 10_000
"""Verified credentials remembered per policy revision, in two generations of half as many."""

CACHE_SECONDS = 300.0

REFUSED = 1_024
"""Refused credentials remembered, so that a client in a loop costs one hash a call."""

REFUSED_SECONDS = 10.0

JWKS_BYTES = 512 * 1024


# --- what the request presents ----------------------------------------------------------------


def presented(headers: HeaderList) -> str:
    """The credential of a request, "" if it has none.

    Raises:
        MalformedCall: Two different credentials.
        Unauthenticated: One that cannot be read.
    """
    found = b""
    for name, value in headers:
        if name == b"x-api-key":
            token = value.strip()
        elif name == b"authorization":
            token = value[7:].strip() if value[:7] == b"Bearer " else _bearer(value)
        else:
            continue
        # Empty is what some SDKs send when they have no key.
        if token and found and token != found:
            raise MalformedCall(
                "Two different credentials: send one, as Authorization: Bearer or as x-api-key.",
                code="conflicting_credentials",
            )
        found = token or found
    # `find` and not `in`, which tries what it looks for as a number first: three times as dear.
    if len(found) > MAX_CREDENTIAL or found.find(b" ") >= 0:
        raise Unauthenticated("The credential is too long or holds a blank.")
    try:
        return found.decode()
    except UnicodeDecodeError:
        raise Unauthenticated("The credential is not UTF-8.") from None


def _bearer(value: bytes) -> bytes:
    scheme, _, token = value.strip().partition(b" ")
    if scheme and scheme.lower() != b"bearer":
        raise Unauthenticated("Authorization must be of the form: Bearer <key>.")
    return token.strip()


def loopback(peer: str) -> bool:
    """Whether the peer's address is this machine's own."""
    return peer.startswith(("127.", "::ffff:127.")) or peer == "::1"


_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip"})


def forwarded(headers: HeaderList) -> bool:
    """Whether a proxy passed the request on: then the peer's address is only the proxy's."""
    return not _FORWARDED.isdisjoint([name for name, _ in headers])


# --- principals -------------------------------------------------------------------------------


def principal_of(rule: AgentRule, *, credential: str, name: str, expires: float = 0.0) -> Principal:
    """The principal that a rule gives to a credential; `name` is the agent's in a rule of many."""
    rule = rule.concrete(name)
    return Principal(
        id=credential,
        agent=rule.id,
        tenant=rule.tenant,
        rule=rule,
        pools=(*rule.pools, *rule.tenant_pools),
        expires=expires,
    )


def pattern_name(credential: str) -> str:
    """The agent's name of a key accepted by pattern: the key itself, which is no secret then."""
    plain = credential.isascii() and credential.replace("-", "").replace("_", "").isalnum()
    if plain and len(credential) <= 64:
        return credential
    return "key-" + sha256(credential.encode()).hexdigest()[:16]


def token_principal(issuer: JwtIssuer, claims: dict[str, Any], snapshot: Snapshot) -> Principal:
    """The principal of verified and timely claims.

    Raises:
        Unauthenticated: A claim that must be there is not, or cannot be read.
        Forbidden: No agent of the policy fits.
    """
    because = issuer.because
    chain = actors(claims)
    if chain is None:
        raise Unauthenticated("The token's act chain is malformed or too long.", because=because)
    mapped = {ours: claim(claims, path) for ours, path in issuer.claims}
    subject = claims.get("sub", "")
    agent = mapped.get("agent", subject)
    if not label(agent):
        raise Unauthenticated("The token names no agent.", because=because)
    rule = choose_rule(issuer, claims)
    if rule is None:
        raise Forbidden("No agent of the policy fits this token.", because=because)
    rule = narrow(rule, mapped, snapshot.tiers)
    if rule is None:
        raise Unauthenticated("The token's tier, models or tools are unreadable.", because=because)
    who = subject if issuer.spiffe else f"{issuer.name}:{subject or agent}"
    principal = principal_of(
        rule, credential=f"jwt:{hint(who)}", name=str(agent), expires=float(claims["exp"])
    )
    session, workflow = (
        hint(value) if isinstance(value, str) else ""
        for value in (mapped.get("session"), mapped.get("workflow"))
    )
    return replace(principal, actors=chain, session=session, workflow=workflow)


# --- where key sets come from ------------------------------------------------------------------


class JwksSource:
    """Fetches key sets over HTTP or from a file, bounded in size; its caller bounds the time."""

    def __init__(self) -> None:
        self._client: httpx.AsyncClient | None = None

    async def __call__(self, issuer: JwtIssuer) -> bytes:
        """The body of the issuer's key set. Raises OSError or ValueError."""
        if not issuer.jwks_url:
            return await asyncio.to_thread(_read_file, issuer.jwks_file)
        if self._client is None:
            # In a thread, because it reads the machine's certificates; and this machine itself is
            # never reached through a proxy.
            self._client = await asyncio.to_thread(_client)
        try:
            async with self._client.stream("GET", issuer.jwks_url) as answer:
                answer.raise_for_status()
                return await _bounded(answer)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """No connection is left."""
        if self._client is not None:
            await self._client.aclose()


async def _bounded(answer: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in answer.aiter_bytes():
        body += chunk
        if len(body) > JWKS_BYTES:
            raise ValueError("the key set is too large")
    return bytes(body)


def _client() -> httpx.AsyncClient:
    direct = {"all://127.0.0.1": None, "all://localhost": None, "all://[::1]": None}
    return httpx.AsyncClient(timeout=3.0, mounts=direct)


def _read_file(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - pathlib has no bounded read
        body = file.read(JWKS_BYTES + 1)
    if len(body) > JWKS_BYTES:
        raise ValueError("the key set is too large")
    return body


# --- the cache and the door -------------------------------------------------------------------


@dataclass(slots=True)
class _Book:
    """What is remembered under one policy revision."""

    snapshot: Snapshot
    new: dict[bytes, tuple[Principal, float]] = field(default_factory=dict)
    old: dict[bytes, tuple[Principal, float]] = field(default_factory=dict)
    refused: dict[bytes, tuple[str, float]] = field(default_factory=dict)

    def find(self, digest: bytes, now: float) -> Principal | None:
        """The principal of that credential, if still good."""
        entry = self.new.get(digest)
        if entry is None:
            entry = self.old.pop(digest, None)
            if entry is None:
                return None
            self.keep(digest, *entry)
        return entry[0] if now < entry[1] else None

    def keep(self, digest: bytes, principal: Principal, until: float) -> None:
        """The principal is remembered until then."""
        if len(self.new) >= CACHED // 2:
            self.old, self.new = self.new, {}
        self.new[digest] = (principal, until)

    def refuse(self, digest: bytes, message: str, until: float) -> None:
        """The refusal is remembered until then."""
        if len(self.refused) >= REFUSED:
            self.refused.clear()
        self.refused[digest] = (message, until)


class Identities:
    """Who calls. One per process.

    Args:
        clock: Bounds fetches of key sets.
        fetch: How key sets are fetched, usually a `JwksSource`.
    """

    def __init__(self, *, clock: Clock, fetch: Fetch) -> None:
        self._sets = KeySets(fetch, clock)
        self._book: _Book | None = None
        self._last: _Book | None = None

    def principal(
        self, snapshot: Snapshot, headers: HeaderList, peer: str, now: float
    ) -> Principal | Awaitable[Principal]:
        """The principal at once, or a coroutine while a key set must be fetched.

        Args:
            snapshot: The policy the call is pinned to.
            headers: The request's.
            peer: Address the connection came from, without a port.
            now: Wall-clock seconds.

        Raises:
            Unauthenticated, MalformedCall: As the credential deserves.
            Forbidden: A good credential that may not be used here.
            StoreUnavailable: No key set could be had to judge it by.
        """
        digest = headers.digest if isinstance(headers, Lines) else None
        if digest is None:
            credential = presented(headers)
            if not credential:
                return _anonymous(snapshot, headers, peer)
            digest = sha256(credential.encode()).digest()
            if isinstance(headers, Lines):
                headers.digest = digest
        book = self._book
        if book is None or book.snapshot is not snapshot:
            book = self._turn_to(snapshot)
        principal = book.find(digest, now)
        if principal is None:
            found = self._judge(book, presented(headers), digest, now)
            if not isinstance(found, Principal):
                return _here_later(found, headers, peer)
            principal = found
        return _here(principal, headers, peer) if principal.rule.loopback_only else principal

    def key_set_faults(self, snapshot: Snapshot) -> dict[str, str]:
        """Issuer → why its key set could not be fetched lately: for status and readiness."""
        faults = {issuer.name: self._sets.of(issuer).fault for issuer in snapshot.jwt}
        return {name: fault for name, fault in faults.items() if fault}

    def _turn_to(self, snapshot: Snapshot) -> _Book:
        """The book of that snapshot; the one before is kept for calls still pinned to it."""
        last = self._last
        if last is not None and last.snapshot is snapshot:
            return last
        book = _Book(snapshot)
        self._last, self._book = self._book, book
        books = [one for one in (self._last, book) if one is not None]
        self._sets.keep(issuer for one in books for issuer in one.snapshot.jwt)
        return book

    def _judge(
        self, book: _Book, credential: str, digest: bytes, now: float
    ) -> Principal | Awaitable[Principal]:
        refusal = book.refused.get(digest)
        if refusal is not None and now < refusal[1]:
            raise Unauthenticated(refusal[0])
        found = _by_key(book.snapshot, credential, now)
        if found is None and book.snapshot.jwt and credential.count(".") == 2:
            return self._by_token(book, credential, digest, now)
        found = found or _by_pattern(book.snapshot, credential)
        if isinstance(found, Principal):
            book.keep(digest, found, min(found.expires or now + CACHE_SECONDS, now + CACHE_SECONDS))
            return found
        message = found or "This gateway does not know that API key."
        book.refuse(digest, message, now + REFUSED_SECONDS)
        raise Unauthenticated(message)

    def _by_token(
        self, book: _Book, credential: str, digest: bytes, now: float
    ) -> Principal | Awaitable[Principal]:
        token = read_token(credential)
        issuers = [] if token is None else [
            issuer
            for issuer in book.snapshot.jwt
            if token.algorithm in issuer.algorithms and speaks_for(issuer, token.claims)
        ]  # fmt: skip
        if token is None or not issuers:
            message = "The token is malformed, or no issuer in the policy signs such tokens."
            book.refuse(digest, message, now + REFUSED_SECONDS)
            raise Unauthenticated(message)
        if any(self._sets.of(issuer).due(token.kid, now) for issuer in issuers):
            return self._after_fetch(book, token, issuers, digest, now)
        return self._verified(book, token, issuers, digest, now)

    async def _after_fetch(
        self, book: _Book, token: Token, issuers: list[JwtIssuer], digest: bytes, now: float
    ) -> Principal:
        for issuer in issuers:
            # Again where the caller that fetched for all has hung up meanwhile.
            while self._sets.of(issuer).due(token.kid, now):
                await self._sets.fetch(issuer, now)
        return self._verified(book, token, issuers, digest, now)

    def _verified(
        self, book: _Book, token: Token, issuers: list[JwtIssuer], digest: bytes, now: float
    ) -> Principal:
        refusal: GatewayError | None = None
        for issuer in issuers:
            keys = self._sets.of(issuer)
            if not keys.keys or now - keys.fetched > JWKS_KEPT:
                refusal = refusal or StoreUnavailable(
                    f"The key set of issuer {issuer.name!r} cannot be fetched.",
                    because=issuer.because,
                    retry_after=round(JWKS_FIRST_PAUSE) * MICRO,
                )
                continue
            candidates = [key for key in keys.keys if not token.kid or key.kid in ("", token.kid)]
            if not any(verify(token, key) for key in candidates):
                refusal = refusal or Unauthenticated(
                    "The token is signed by no key of its issuer.", because=issuer.because
                )
                continue
            problem = claims_problem(issuer, token.claims, now)
            if problem:
                raise Unauthenticated(problem, because=issuer.because)
            principal = token_principal(issuer, token.claims, book.snapshot)
            book.keep(digest, principal, min(principal.expires, now + CACHE_SECONDS))
            return principal
        raise refusal or Unauthenticated("The token has no issuer.")


def _anonymous(snapshot: Snapshot, headers: HeaderList, peer: str) -> Principal:
    rule = snapshot.edge.anonymous
    if rule is None or not loopback(peer) or forwarded(headers):
        raise Unauthenticated("No API key: send Authorization: Bearer <key>, or x-api-key.")
    return principal_of(rule, credential="anonymous", name="anonymous")


def _by_key(snapshot: Snapshot, credential: str, now: float) -> Principal | str | None:
    """The principal of a stored key, why it is refused, or None if it is no stored key."""
    key = snapshot.find_key(credential)
    if key is None:
        return None
    if key.expires and now >= key.expires:
        return "This API key has expired."
    return principal_of(key.agent, credential=f"key:{key.id}", name=key.id, expires=key.expires)


def _by_pattern(snapshot: Snapshot, credential: str) -> Principal | None:
    for pattern in snapshot.key_patterns:
        if fnmatchcase(credential, pattern.pattern):
            name = pattern_name(credential)
            return principal_of(pattern.agent, credential=f"key:{name}", name=name)
    return None


def _here(principal: Principal, headers: HeaderList, peer: str) -> Principal:
    """The principal, if its rule lets it call from there."""
    if principal.rule.loopback_only and (not loopback(peer) or forwarded(headers)):
        raise Forbidden(
            f"Agent {principal.agent!r} may call from this machine only.",
            because=principal.rule.because,
        )
    return principal


async def _here_later(found: Awaitable[Principal], headers: HeaderList, peer: str) -> Principal:
    return _here(await found, headers, peer)
