"""What the tests of identity stand on: keys, tokens, issuers and a fetch that counts."""

from __future__ import annotations

import asyncio
import json
from functools import cache

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from gateway.identity import Identities
from gateway.snapshot import AgentRule, ApiKey, JwtIssuer, Snapshot, hash_key
from tests.unit.tokens.ground import HandClock

NOW = 1_800_000_000.0
CURVES = {"ES256": ec.SECP256R1, "ES384": ec.SECP384R1, "ES512": ec.SECP521R1}
RULE = AgentRule(id="worker", tenant="acme")
ISSUER = JwtIssuer(
    name="corp",
    issuer="https://id.corp",
    audience="tidegate",
    jwks_url="https://id.corp/jwks",
    agents=(RULE,),
    because="jwt.corp",
)


@cache
def signing_key(algorithm: str, number: int = 0):
    if algorithm in CURVES:
        return ec.generate_private_key(CURVES[algorithm]())
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def key_of(algorithm: str, number: int = 0):
    return signing_key(algorithm if algorithm in CURVES else "RSA", number)


def jwk(algorithm: str, kid: str = "", number: int = 0, **more) -> dict:
    reader = ECAlgorithm if algorithm in CURVES else RSAAlgorithm
    made = json.loads(reader.to_jwk(key_of(algorithm, number).public_key()))
    made.pop("key_ops", None)
    return {**made, **({"kid": kid} if kid else {}), **more}


def jwks(*keys: dict) -> bytes:
    return json.dumps({"keys": keys}).encode()


def token(algorithm: str = "ES256", kid: str = "", number: int = 0, **claims) -> str:
    all_claims = {
        "iss": ISSUER.issuer,
        "aud": "tidegate",
        "sub": "worker-7",
        "exp": NOW + 600,
        **claims,
    }
    return jwt.encode(
        {name: value for name, value in all_claims.items() if value is not None},
        key_of(algorithm, number),
        algorithm=algorithm,
        headers={"kid": kid} if kid else None,
    )


class Source:
    """A fetch that counts, answers what is set, and may be held."""

    def __init__(self, body: bytes | Exception = b"") -> None:
        self.body = body
        self.fetches = 0
        self.gate: asyncio.Event | None = None

    async def __call__(self, issuer: JwtIssuer) -> bytes:
        self.fetches += 1
        if self.gate is not None:
            await self.gate.wait()
        if isinstance(self.body, Exception):
            raise self.body
        return self.body


def identities(source: Source | None = None, clock: HandClock | None = None) -> Identities:
    return Identities(clock=clock or HandClock(), fetch=source or Source())


def snapshot(*keys: ApiKey, revision: int = 1, **more) -> Snapshot:
    return Snapshot(revision=revision, digest="", keys=keys, **more)


def stored(key: str, *, name: str = "k", rule: AgentRule = RULE, salt: bytes = b"s", **more):
    return ApiKey(id=name, salt=salt, digest=hash_key(salt, key), agent=rule, **more)


def bearer(credential: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", b"Bearer " + credential.encode())]
