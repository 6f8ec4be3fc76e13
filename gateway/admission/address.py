"""Where the shared store is, as `TIDEGATE_REDIS_URL` names it. Pure.

    redis://[user:password@]host:port/0        one server; rediss:// with TLS, unix:///path
    redis+sentinel://host:port,host:port/NAME  the primary that the sentinels call NAME
    redis+cluster://host:port,host:port        a cluster; every pool lies in one slot

`valkey` may stand for `redis` in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster",
           "rediss+cluster")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the shared store is.

    Attributes:
        kind: "one", "sentinel" or "cluster".
        hosts: Of sentinels or of some nodes of the cluster.
        service: What the sentinels call the primary.
        url: As redis-py reads it, for one server.
        shown: Without the password, for messages.
    """

    kind: str
    hosts: tuple[tuple[str, int], ...]
    service: str
    url: str
    username: str | None
    password: str | None
    tls: bool
    shown: str


def parse(url: str) -> Address:
    """The address that a TIDEGATE_REDIS_URL names.

    Raises:
        ValueError: Not an address of a shared store; says what is allowed.
    """
    plain = url.replace("valkeys", "rediss", 1).replace("valkey", "redis", 1)
    scheme, found, rest = plain.partition("://")
    shown = f"{scheme}://{rest.rpartition('@')[2]}"
    if not found or scheme not in SCHEMES or not rest:
        raise ValueError(
            f"TIDEGATE_REDIS_URL={shown!r}: one of {', '.join(one + '://…' for one in SCHEMES)} "
            "is allowed"
        )
    kind = scheme.partition("+")[2] or "one"
    if kind == "one":
        return Address(
            kind=kind, hosts=(), service="", url=plain, username=None, password=None,
            tls=scheme == "rediss", shown=shown,
        )  # fmt: skip
    account, _, where = rest.rpartition("@")
    places, _, service = where.partition("/")
    hosts = []
    for place in places.split(","):
        one = urlsplit(f"//{place}")
        try:
            port = one.port or (26_379 if kind == "sentinel" else 6_379)
        except ValueError as error:
            raise ValueError(f"TIDEGATE_REDIS_URL={shown!r}: {place!r} has no port") from error
        if not one.hostname:
            raise ValueError(f"TIDEGATE_REDIS_URL={shown!r}: {place!r} names no host")
        hosts.append((one.hostname, port))
    if kind == "sentinel" and not service:
        raise ValueError(f"TIDEGATE_REDIS_URL={shown!r}: say which primary, as in …:26379/mymaster")
    username, _, password = account.partition(":")
    return Address(
        kind=kind, hosts=tuple(hosts), service=service, url="", username=username or None,
        password=password or None, tls=scheme.startswith("rediss"), shown=shown,
    )  # fmt: skip
