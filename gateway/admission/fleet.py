"""The only Redis client: addresses, the pool's function, news between gateways, start-up checks.

Nothing here decides; `shared.py` holds the pools. Addresses:

    redis://[user:password@]host:port/0        one server; rediss:// with TLS, unix:///path
    redis+sentinel://host:port,host:port/NAME  the primary that the sentinels call NAME
    redis+cluster://host:port,host:port        a cluster; every pool lies in one slot

`valkey` may stand for `redis` in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from redis import asyncio as aioredis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from gateway.admission.script import library
from gateway.errors import StoreUnavailable
from gateway.units import MICRO

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.units import Micros

OLDEST = 7
"""Functions came with Redis 7; every Valkey has them."""

CONNECT_S = 1.0
MOST_CONNECTIONS = 32
"""Pools that are asked at the same instant; one more waits for a free connection."""

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster",
           "rediss+cluster")  # fmt: skip

FAULTS: tuple[type[Exception], ...] = (exceptions.RedisError, OSError, TimeoutError)
"""What a store that does not answer looks like."""


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


class RedisLink:
    """Connections to one shared store. See `shared.Link` for what its users rely on."""

    def __init__(self, url: str, *, timeout: Micros) -> None:
        """Nothing is connected yet.

        Args:
            url: Where; see the module.
            timeout: An answer that takes longer is none.
        """
        self.address = parse(url)
        self._options: dict[str, Any] = {
            "socket_connect_timeout": CONNECT_S,
            "socket_timeout": timeout / MICRO,
            "max_connections": MOST_CONNECTIONS,
            "retry": Retry(NoBackoff(), 0),  # the pool's client repeats, and knows what it repeats
            "client_name": "tidegate",
            "protocol": 2,  # half the bytes of a greeting, and nothing of 3 is used
        }
        self._sentinel: Sentinel | None = None
        self._client = self._connect()
        self._pool = None if self.address.kind == "cluster" else self._client.connection_pool
        self._idle: list[Any] = []
        self._closed = False
        self._under_way = 0
        self._name, self._source = library()

    def _connect(self) -> Any:  # noqa: ANN401 - three unrelated client classes with one surface
        at, options = self.address, dict(self._options)
        if at.kind == "one":
            pool = aioredis.BlockingConnectionPool.from_url(at.url, **options, timeout=CONNECT_S)
            return aioredis.Redis.from_pool(pool)  # owns it: closed together
        account: dict[str, Any] = {"username": at.username, "password": at.password, "ssl": at.tls}
        if at.kind == "sentinel":
            self._sentinel = Sentinel(  # type: ignore[no-untyped-call]
                list(at.hosts), **options, **account
            )
            return self._sentinel.master_for(at.service)
        nodes = [aioredis.cluster.ClusterNode(host, port) for host, port in at.hosts]
        options.pop("retry")
        return aioredis.RedisCluster(
            startup_nodes=nodes, **options, **account,
            retry=Retry(NoBackoff(), 1),  # one more try follows a slot that has moved
        )  # fmt: skip

    async def call(self, base: str, batch: bytes, rules: bytes, channel: str) -> bytes:
        """The pool's function has run once; its answer.

        Raises:
            Any of `FAULTS`: It may have run or not.
        """
        try:
            return await self._run(base, batch, rules, channel)
        except exceptions.ResponseError as error:
            if "function not found" not in str(error).lower():
                raise
        await self._load()
        return await self._run(base, batch, rules, channel)

    async def _run(self, base: str, batch: bytes, rules: bytes, channel: str) -> bytes:
        command = ("FCALL", self._name, 1, base, batch, rules, channel)
        answer: bytes
        if self._pool is None or self._under_way >= MOST_CONNECTIONS:
            answer = await self._client.execute_command(*command)
            return answer
        # Half of what the client's own way costs goes into looking at a pooled connection before
        # use. Ours says by itself that it is gone, and the batch is sent again.
        connection = self._idle.pop() if self._idle else self._pool.make_connection()
        self._under_way += 1
        try:
            if not connection.is_connected:
                await connection.connect()
            await connection.send_command(*command, check_health=False)
            answer = await connection.read_response()
        except exceptions.ResponseError:
            await self._keep(connection)  # the server spoke: the connection is well
            raise
        except BaseException:
            gone, self._idle = [connection, *self._idle], []  # what idled beside it is no better
            for one in gone:
                await one.disconnect(nowait=True)
            raise
        else:
            await self._keep(connection)
        finally:
            self._under_way -= 1
        return answer

    async def _keep(self, connection: Any) -> None:  # noqa: ANN401 - the client's class
        """For the next batch; an answer that comes after the end leaves nothing open."""
        if self._closed:
            await connection.disconnect(nowait=True)
        else:
            self._idle.append(connection)

    async def _load(self) -> None:
        try:
            await self._client.function_load(self._source)
        except exceptions.ResponseError as error:
            if "already exists" not in str(error):
                raise

    async def check(self) -> str:
        """The store can be used; its name and version.

        Raises:
            StoreUnavailable: It is too old, does not let us in, or may throw keys away; says what
                to change.
            Any of `FAULTS`: It does not answer.
        """
        try:
            server = _one(await self._client.info("server"))
        except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
            raise StoreUnavailable(
                f"The store at {self.address.shown} does not accept our credentials: {error}"
            ) from error
        memory = _one(await self._client.info("memory"))
        name, version = "Valkey", server.get("valkey_version")
        if version is None:
            name, version = "Redis", str(server.get("redis_version", "0"))
        if int(str(version).split(".")[0]) < OLDEST:
            raise StoreUnavailable(
                f"{name} {version} at {self.address.shown} is too old: Redis 7 or Valkey is needed."
            )
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise StoreUnavailable(
                f"{name} at {self.address.shown} has maxmemory-policy {policy}: under memory "
                "pressure it would forget quotas and waiting calls. "
                "Set `maxmemory-policy noeviction`."
            )
        return f"{name} {version}"

    async def listen(
        self,
        channels: tuple[str, ...],
        heard: Callable[[str, bytes], None],
        ready: Callable[[], None],
    ) -> None:
        """Whatever is published there is heard, until this is cancelled or the connection ends."""
        client = self._client
        if self.address.kind == "cluster":
            await client.initialize()
            node = client.get_random_node()  # a cluster repeats what is published to every node
            client = aioredis.Redis(
                host=node.host, port=node.port, username=self.address.username,
                password=self.address.password, ssl=self.address.tls,
            )  # fmt: skip
        news = client.pubsub()
        try:
            await news.subscribe(*channels)
            ready()
            while True:
                message = await news.get_message(ignore_subscribe_messages=True, timeout=None)
                if message is not None:
                    heard(message["channel"].decode(), message["data"])
        finally:
            await news.aclose()
            if client is not self._client:
                await client.aclose()

    async def publish(self, channel: str, news: bytes) -> None:
        """Everybody who listens there hears it."""
        await self._client.execute_command("PUBLISH", channel, news)

    async def load(self, key: str) -> dict[str, bytes]:
        """The fields under that key."""
        found = await self._client.hgetall(key)
        return {field.decode(): value for field, value in found.items()}

    async def save(self, key: str, field: str, value: bytes, *, ttl_s: int) -> None:
        """The field holds the value for so long; the others keep theirs."""
        await self._client.hset(key, field, value)
        await self._client.expire(key, ttl_s)

    async def close(self) -> None:
        """No connection is left."""
        self._closed = True
        idle, self._idle = self._idle, []
        for one in idle:
            await one.disconnect()
        await self._client.aclose()
        if self._sentinel is not None:
            for one in self._sentinel.sentinels:
                await one.aclose()


def _one(info: dict[str, Any]) -> dict[str, Any]:
    """Of one node; a cluster answers for each of several."""
    first = next(iter(info.values()), None)
    return first if isinstance(first, dict) and "db0" not in info else info
