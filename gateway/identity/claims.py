"""Signed tokens, purely: key sets, signatures, claims, and the agent rule they choose.

Time is a parameter. An algorithm must be on the fixed list, on the issuer's, and fit the key's own
type and curve: neither "none" nor a public key taken for an HMAC secret (CVE-2015-9235) helps.
Source: RFC 7515, 7517, 7519, 8693; SPIFFE JWT-SVID; `protocols.md` §7.
Weakness: claims in a token can only take rights away from the rule that policy gives its agent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeGuard

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm
from jwt.utils import base64url_decode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.snapshot import AgentRule, JwtIssuer, Tier

MAX_LABEL = 256
"""Characters of an agent, tenant or actor name taken from a token."""

MAX_ACTORS = 4
LEEWAY = 30.0
"""Seconds that clocks may differ."""

JWKS_KEYS = 100
"""Keys of a set that are looked at."""

ALGORITHMS = frozenset(kind + bits for kind in ("RS", "ES", "PS") for bits in ("256", "384", "512"))


@dataclass(frozen=True, slots=True)
class VerifyingKey:
    """A public key of a set. `algorithm` is "" where the set does not fix one."""

    kid: str
    algorithm: str
    use: str
    key: rsa.RSAPublicKey | ec.EllipticCurvePublicKey

    def fits(self, algorithm: str) -> bool:
        """Whether tokens of that algorithm may be verified with it."""
        if self.algorithm not in ("", algorithm):
            return False
        if isinstance(self.key, rsa.RSAPublicKey):
            return algorithm[:2] in ("RS", "PS")
        return {"ES256": 256, "ES384": 384, "ES512": 521}.get(algorithm) == self.key.curve.key_size


def parse_jwks(body: bytes) -> tuple[VerifyingKey, ...]:
    """The usable public keys of a JSON Web Key Set.

    Keys of other kinds or uses, weak RSA keys and unreadable ones are left out, so that one of them
    does not cost the others.

    Raises:
        ValueError: It is no key set, or none of its keys is usable.
    """
    try:
        document = json.loads(body)
    except RecursionError:
        raise ValueError("the key set nests too deeply") from None
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError("a key set is an object with a list named keys")  # noqa: TRY004 - the caller maps it
    made = (_verifying_key(entry) for entry in entries[:JWKS_KEYS])
    keys = tuple(key for key in made if key is not None)
    if not keys:
        raise ValueError("the key set has no usable public key")
    return keys


def _verifying_key(entry: object) -> VerifyingKey | None:
    if not isinstance(entry, dict) or entry.get("use", "sig") not in ("sig", "jwt-svid"):
        return None
    kind = entry.get("kty")
    if kind not in ("RSA", "EC"):
        return None
    try:
        key = RSAAlgorithm.from_jwk(entry) if kind == "RSA" else ECAlgorithm.from_jwk(entry)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    if isinstance(key, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey):
        key = key.public_key()
    if isinstance(key, rsa.RSAPublicKey) and not 2048 <= key.key_size <= 8192:
        return None
    algorithm, kid = entry.get("alg", ""), entry.get("kid", "")
    if not isinstance(algorithm, str) or not isinstance(kid, str):
        return None
    return VerifyingKey(kid, algorithm, entry.get("use", "sig"), key)


@dataclass(frozen=True, slots=True)
class Token:
    """A token as it presents itself, unverified."""

    text: str
    algorithm: str
    kid: str
    claims: dict[str, Any]


def read_token(text: str) -> Token | None:
    """The token's own words; None if it is none, or uses what we do not support."""
    pieces = text.split(".")
    if len(pieces) != 3:
        return None
    header, claims = _object(pieces[0]), _object(pieces[1])
    if header is None or claims is None or "crit" in header or "b64" in header:
        return None
    algorithm, kid = header.get("alg"), header.get("kid", "")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS or not isinstance(kid, str):
        return None
    return Token(text, algorithm, kid, claims)


def _object(segment: str) -> dict[str, Any] | None:
    try:
        value = json.loads(base64url_decode(segment))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def verify(token: Token, key: VerifyingKey) -> bool:
    """Whether that key signed the token."""
    if not key.fits(token.algorithm):
        return False
    try:
        _JWS.decode(token.text, key.key, algorithms=[token.algorithm])
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
        return False
    return True


_JWS = jwt.PyJWS(algorithms=sorted(ALGORITHMS))


def speaks_for(issuer: JwtIssuer, claims: dict[str, Any]) -> bool:
    """Whether the claims say they come from this issuer.

    SPIFFE identities need no `iss`; their trust domain is in `sub`, and the keys of one domain must
    not speak for another.
    """
    subject = claims.get("sub")
    if not issuer.spiffe:
        return bool(issuer.issuer) and claims.get("iss") == issuer.issuer
    if not isinstance(subject, str) or not subject.startswith("spiffe://"):
        return False
    domain = issuer.issuer.removeprefix("spiffe://").rstrip("/")
    return not domain or subject.startswith(f"spiffe://{domain}/")


def claims_problem(issuer: JwtIssuer, claims: dict[str, Any], now: float) -> str:
    """Why the claims do not let the token in; "" if they do.

    Args:
        issuer: Whose key signed it.
        claims: Verified.
        now: Wall-clock seconds.
    """
    audience = claims.get("aud")
    audiences = audience if isinstance(audience, list) else [audience]
    if not issuer.audience or issuer.audience not in audiences:
        return "The token is for another audience."
    expires = claims.get("exp")
    if not _number(expires) or not now < expires + LEEWAY:
        return "The token has expired or has no exp."
    for name in ("nbf", "iat"):
        at = claims.get(name)
        if at is not None and not (_number(at) and at <= now + LEEWAY):
            return "The token is not valid yet."
    return ""


def _number(value: object) -> TypeGuard[float]:
    """Whether it is a moment; NaN and numbers beyond a float, which JSON can hold, are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15


def actors(claims: dict[str, Any]) -> tuple[str, ...] | None:
    """The `act` chain (RFC 8693 §4.1), outermost first; None if malformed or too long."""
    chain: list[str] = []
    act = claims.get("act")
    while act is not None:
        if not isinstance(act, dict) or len(chain) == MAX_ACTORS:
            return None
        name = act.get("sub", act.get("client_id"))
        if not label(name):
            return None
        chain.append(name)
        act = act.get("act")
    return tuple(chain)


def label(value: object) -> TypeGuard[str]:
    """Whether the value can name an agent, tenant or actor."""
    return isinstance(value, str) and 0 < len(value) <= MAX_LABEL and value.isprintable()


def claim(claims: dict[str, Any], path: str) -> Any:  # noqa: ANN401 - a claim is any JSON
    """The claim of that name, else the one at that dotted path; None if absent."""
    if path in claims:
        return claims[path]
    value: Any = claims
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value


def choose_rule(issuer: JwtIssuer, claims: dict[str, Any]) -> AgentRule | None:
    """The first agent of the issuer whose every match fits; a list claim fits by any element."""

    def fits(path: str, pattern: str) -> bool:
        value = claim(claims, path)
        values = value if isinstance(value, list) else [value]
        return any(isinstance(one, str) and fnmatchcase(one, pattern) for one in values)

    tenant_path = dict(issuer.claims).get("tenant")
    for rule in issuer.agents:
        if tenant_path and rule.tenant not in ("", claim(claims, tenant_path)):
            continue
        if all(fits(path, pattern) for path, pattern in rule.match):
            return rule
    return None


def narrow(rule: AgentRule, mapped: dict[str, Any], tiers: Sequence[Tier]) -> AgentRule | None:
    """The rule with what its token's claims take away; None if such a claim cannot be read."""
    if (tier := mapped.get("tier")) is not None:
        names = {one.name: one.number for one in tiers}
        number = names.get(tier) if isinstance(tier, str) else tier
        if type(number) is not int or number not in (1, 2, 3):
            return None
        rule = replace(rule, tier_cap=max(rule.tier_cap, number))
    for name in ("models", "tools"):
        if not isinstance(mapped.get(name, []), list | None):
            return None
    return replace(
        rule,
        models=_kept(mapped.get("models"), rule.models),
        tools=_kept(mapped.get("tools"), rule.tools),
    )


def _kept(wanted: list[Any] | None, allowed: tuple[str, ...]) -> tuple[str, ...]:
    if wanted is None:
        return allowed
    return tuple(one for one in wanted if isinstance(one, str) and _within(one, allowed))


def _within(pattern: str, allowed: tuple[str, ...]) -> bool:
    """Whether all that the pattern names is allowed; a pattern must be allowed literally."""
    if "*" in allowed or pattern in allowed:
        return True
    return not set(pattern) & set("*?[") and any(fnmatchcase(pattern, one) for one in allowed)
