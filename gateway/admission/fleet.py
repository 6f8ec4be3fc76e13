"""The only Redis client: the pool's function, news between gateways, sums, start-up checks.

Nothing here decides; `shared.py` holds the pools, `address.py` says where the store is.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from redis import asyncio as aioredis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from gateway.admission import script
from gateway.admission.address import parse
from gateway.admission.pipe import CLOSED, Pipe, StoreError, command
from gateway.errors import StoreUnavailable
from gateway.units import MICRO

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

    from gateway.admission.pipe import Told
    from gateway.units import Micros

    Spawn = Callable[[Coroutine[Any, Any, None]], object]

OLDEST = 7
"""Functions came with Redis 7; every Valkey has them."""

CONNECT_S = 1.0
MOST_CONNECTIONS = 32
"""For everything but batches, which share one; one more waits for a free connection."""

MOST_HEADS = 20_000
"""Pools whose beginning of a command is remembered; beyond it all are made anew."""

NOT_LOADED = "function not found"

MOVED_ON = ("READONLY", "MASTERDOWN", "LOADING")
"""Such a server is not, or not yet, the one to ask: the next connection may reach another."""

FAULTS: tuple[type[Exception], ...] = (exceptions.RedisError, OSError, TimeoutError)
"""What a store that does not answer, or not what it was asked, looks like. Anything else is a fault
of ours and ends the process."""

UNREADABLE = (
    ValueError, TypeError, AttributeError, LookupError,
    RuntimeError,  # also uvloop's word to whoever writes to a connection that has just ended
)  # fmt: skip
"""What redis-py and we raise where the answer is none that belongs to the question."""

P = ParamSpec("P")
T = TypeVar("T")


def understood(ask: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """A question whose answer, if it cannot be read, is one of `FAULTS` as well."""

    @wraps(ask)
    async def asked(*args: P.args, **named: P.kwargs) -> T:
        try:
            return await ask(*args, **named)
        except UNREADABLE as error:
            what = f"the store's answer cannot be read: {type(error).__name__}: {error}"
            raise exceptions.InvalidResponse(what) from error

    return asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """Amounts to be added to what the fleet keeps under a key.

    Attributes:
        key: Whole, prefix included.
        anew: What it held before is void.
        amounts: May be negative.
        ttl_s: Seconds after which a key that nobody added to is gone.
    """

    key: str
    anew: bool
    amounts: tuple[int, ...]
    ttl_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Fields to be set in what the fleet keeps under a key.

    Attributes:
        key: Whole, prefix included.
        own: Set whatever stood there.
        missing: Set only where nothing stands.
        ttl_s: Seconds after which a key that nobody set or read is gone.
    """

    key: str
    own: Mapping[str, bytes]
    missing: Mapping[str, bytes]
    ttl_s: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A value to be kept under a key.

    Attributes:
        key: Whole, prefix included.
        value: Empty: the key goes.
        ttl_s: Seconds after which it goes by itself.
    """

    key: str
    value: bytes
    ttl_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Items to be put at the end of a list that the fleet keeps under a key.

    Attributes:
        key: Whole, prefix included.
        anew: What it held before is void.
        items: May be none: the list is only read.
        most: Items kept, the last ones.
        ttl_s: Seconds after which a list that nobody extended is gone.
    """

    key: str
    anew: bool
    items: Sequence[bytes]
    most: int
    ttl_s: int


class RedisLink:
    """Connections to one shared store. See `shared.Link` for what its users rely on."""

    def __init__(
        self, url: str, *, timeout: Micros, library: tuple[str, bytes] | None = None
    ) -> None:
        """Nothing is connected yet.

        Args:
            url: Where; see the module.
            timeout: An answer that takes longer is none.
            library: Name and source of the function that batches call, the pool's by default.
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
        self._spawn: Spawn | None = None
        self._pipe: Pipe | None = None
        self._opening = False
        self._backlog: list[tuple[bytes, Told]] = []
        self._closed = False
        self._heads: dict[str, bytes] = {}
        self._name, self._source = library or script.library()

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

    # --- batches

    def start(self, spawn: Spawn | None) -> None:
        """Connections are opened by tasks that `spawn` owns; None: none are any more."""
        self._spawn = spawn

    def send(self, base: str, batch: bytes, rules: bytes, channel: str, told: Told) -> None:
        """The pool's function runs once.

        Args:
            base: Of the pool's keys.
            batch: What to do.
            rules: Of the pool, or nothing.
            channel: Prefix of the nudges.
            told: Called once, later, with the answer, or with one of `FAULTS`: then it may have run
                or not.
        """
        if self._pool is None:
            self._do(self._slowly(base, batch, rules, channel, told), told)
            return
        name = channel.encode()
        raw = b"%b$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
            self._heads.get(base) or self._head(base), len(batch), batch, len(rules), rules,
            len(name), name,
        )  # fmt: skip
        heard = _Heard(self, raw, told)
        pipe = self._pipe
        if pipe is not None and pipe.open:
            pipe.send(raw, heard)
            return
        self._backlog.append((raw, heard))
        if not self._opening:
            self._opening = True
            self._do(self._open(), told)

    def give_up(self, error: Exception) -> None:
        """The connection is closed; whatever waits for an answer has this error instead."""
        backlog, self._backlog = self._backlog, []
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close(error)
        for _, told in backlog:
            told(error)

    async def call(self, base: str, batch: bytes, rules: bytes, channel: str) -> bytes:
        """As `send`, awaited; for those who send one after the other.

        Raises:
            Any of `FAULTS`: It may have run or not.
        """
        gone = self._pipe is None or not self._pipe.open
        if self._pool is not None and gone and not self._opening:
            self._opening = True
            await self._open()
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def told(reply: bytes | Exception) -> None:
            if answer.done():
                return
            if isinstance(reply, Exception):
                answer.set_exception(reply)
            else:
                answer.set_result(reply)

        if self._pool is None:
            await self._slowly(base, batch, rules, channel, told)
        else:
            self.send(base, batch, rules, channel, told)
        return await answer

    def teach(self, raw: bytes, loaded: Told, told: Told) -> None:
        """The server lost the function (a restart, a failover): load it, then ask again."""
        pipe = self._pipe
        if pipe is None or not pipe.open:
            told(ConnectionError(CLOSED))
            return
        pipe.send(command(b"FUNCTION", b"LOAD", self._source), loaded)
        pipe.send(raw, told)

    def _do(self, work: Coroutine[Any, Any, None], told: Told) -> None:
        """That work is done by a task, or `told` hears that there will be no answer."""
        if self._spawn is not None and not self._closed:
            self._spawn(work)
            return
        work.close()
        self._opening = False
        self._backlog.clear()
        asyncio.get_running_loop().call_soon(told, ConnectionError(CLOSED))

    def _head(self, base: str) -> bytes:
        """How every call of that pool begins."""
        if len(self._heads) >= MOST_HEADS:
            self._heads.clear()
        words = command(b"FCALL", self._name.encode(), b"1", base.encode("utf-8", "surrogatepass"))
        head = self._heads[base] = b"*7" + words[2:]
        return head

    async def _open(self) -> None:
        """A connection for batches stands, and what waited for it has left; or has failed."""
        assert self._pool is not None  # noqa: S101 - the caller looked
        failure: Exception = ConnectionError(CLOSED)
        pipe: Pipe | None = None
        try:
            connection = self._pool.make_connection()
            await understood(connection.connect)()
            # redis-py has greeted the server; it keeps nothing of the connection but its options.
            writer: asyncio.StreamWriter = connection._writer  # noqa: SLF001 - it has no other door
            connection._reader = connection._writer = None  # noqa: SLF001
            pipe = self._pipe = Pipe(writer)
            if self._closed:
                pipe.close(failure)
        except FAULTS as error:
            failure = error
        finally:
            self._opening = False
        backlog, self._backlog = self._backlog, []
        for raw, told in backlog:
            if pipe is not None and pipe.open:
                pipe.send(raw, told)
            else:
                told(failure)

    async def _slowly(
        self, base: str, batch: bytes, rules: bytes, channel: str, told: Told
    ) -> None:
        """Through the client of a cluster, which knows where the pool's slot lies."""
        try:
            answer = await self.run((self._name, self._source), base, batch, rules, channel)
        except FAULTS as error:
            told(error)
        else:
            told(answer)

    @understood
    async def run(self, library: tuple[str, bytes], key: str, *words: str | int | bytes) -> Any:  # noqa: ANN401 - what the function returns
        """The answer of the library's function, which the server is taught if it lacks it.

        Args:
            library: Name of library and function, and the source; see `script.py`.
            key: The one key it works on.
            words: Its arguments.

        Raises:
            Any of `FAULTS`: It may have run or not.
        """
        name, source = library
        command = ("FCALL", name, 1, key, *words)
        try:
            return await self._client.execute_command(*command)
        except exceptions.ResponseError as error:
            if NOT_LOADED not in str(error).lower():
                raise
            await self._load(source)
            return await self._client.execute_command(*command)

    async def _load(self, source: bytes) -> None:
        try:
            await self._client.function_load(source)
        except exceptions.ResponseError as error:
            if "already exists" not in str(error):
                raise

    @understood
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
        """Whatever is published there is heard, until this is cancelled or the connection ends.

        Raises:
            Any of `FAULTS`: It ended. What `heard` or `ready` raise goes through as it is.
        """
        client = self._client
        if self.address.kind == "cluster":
            await understood(client.initialize)()
            node = client.get_random_node()  # a cluster repeats what is published to every node
            client = aioredis.Redis(
                host=node.host, port=node.port, username=self.address.username,
                password=self.address.password, ssl=self.address.tls,
            )  # fmt: skip
        news = client.pubsub()

        @understood
        async def told() -> tuple[str, bytes] | None:
            message = await news.get_message(ignore_subscribe_messages=True, timeout=None)
            return None if message is None else (message["channel"].decode(), message["data"])

        try:
            await understood(news.subscribe)(*channels)
            ready()
            while True:
                message = await told()
                if message is not None:
                    heard(*message)
        finally:
            await news.aclose()
            if client is not self._client:
                await client.aclose()

    @understood
    async def publish(self, channel: str, news: bytes) -> None:
        """Everybody who listens there hears it."""
        await self._client.execute_command("PUBLISH", channel, news)

    @understood
    async def load(self, key: str) -> dict[str, bytes]:
        """The fields under that key."""
        found = await self._client.hgetall(key)
        return {field.decode(): value for field, value in found.items()}

    @understood
    async def save(self, key: str, field: str, value: bytes, *, ttl_s: int) -> None:
        """The field holds the value for so long; the others keep theirs."""
        await self._client.hset(key, field, value)
        await self._client.expire(key, ttl_s)

    @understood
    async def add(self, additions: Sequence[Addition]) -> list[tuple[int, ...]]:
        """The sums after each addition, in one exchange with the store.

        Raises:
            Any of `FAULTS`: They may have been added or not.
        """
        pipeline = self._client.pipeline(transaction=False)
        for one in additions:
            if one.anew:
                pipeline.delete(one.key)
            for at, amount in enumerate(one.amounts):
                pipeline.hincrby(one.key, str(at), amount)
            pipeline.expire(one.key, one.ttl_s)
        answers = iter(await pipeline.execute())
        sums = []
        for one in additions:
            if one.anew:
                next(answers)
            sums.append(tuple([int(next(answers)) for _ in one.amounts]))
            next(answers)
        return sums

    @understood
    async def enter(self, entries: Sequence[Entry]) -> list[dict[bytes, bytes]]:
        """All that stands under each key then, in one exchange with the store.

        Raises:
            Any of `FAULTS`: The fields may have been set or not.
        """
        pipeline = self._client.pipeline(transaction=False)
        for one in entries:
            for field, value in one.own.items():
                pipeline.hset(one.key, field, value)
            for field, value in one.missing.items():
                pipeline.hsetnx(one.key, field, value)
            pipeline.expire(one.key, one.ttl_s)
            pipeline.hgetall(one.key)
        answers = iter(await pipeline.execute())
        found = []
        for one in entries:
            for _ in range(len(one.own) + len(one.missing) + 1):
                next(answers)
            found.append(next(answers))
        return found

    @understood
    async def extend(self, listings: Sequence[Listing]) -> list[list[bytes]]:
        """The lists after each was extended, in one exchange with the store.

        Raises:
            Any of `FAULTS`: They may have been extended or not.
        """
        pipeline = self._client.pipeline(transaction=False)
        for one in listings:
            if one.anew:
                pipeline.delete(one.key)
            if one.items:
                pipeline.rpush(one.key, *one.items)
                pipeline.ltrim(one.key, -one.most, -1)
                pipeline.expire(one.key, one.ttl_s)
            pipeline.lrange(one.key, 0, -1)
        answers = iter(await pipeline.execute())
        found = []
        for one in listings:
            for _ in range(one.anew + 3 * bool(one.items)):
                next(answers)
            found.append(list(next(answers)))
        return found

    @understood
    async def remember(self, kept: Sequence[Kept], read: Sequence[str]) -> list[bytes]:
        """What stands under the keys read, b"" where nothing does, in one exchange with the store.

        Raises:
            Any of `FAULTS`: The values may be kept or not.
        """
        pipeline = self._client.pipeline(transaction=False)
        for one in kept:
            if one.value:
                pipeline.set(one.key, one.value, ex=one.ttl_s)
            else:
                pipeline.delete(one.key)
        for key in read:
            pipeline.get(key)
        answers = await pipeline.execute()
        return [value or b"" for value in answers[len(kept) :]]

    async def close(self) -> None:
        """No connection is left."""
        self._closed = True
        self.give_up(ConnectionError(CLOSED))
        await self._client.aclose()
        if self._sentinel is not None:
            for one in self._sentinel.sentinels:
                await one.aclose()


class _Heard:
    """What becomes of a batch: its answer, unless the server must be taught the function first."""

    __slots__ = ("_link", "_raw", "_taught", "_told", "_why")

    def __init__(self, link: RedisLink, raw: bytes, told: Told) -> None:
        self._link = link
        self._raw = raw
        self._told = told
        self._taught = False
        self._why: StoreError | None = None

    def __call__(self, reply: bytes | Exception) -> None:
        if not isinstance(reply, StoreError):
            self._told(reply)
        elif NOT_LOADED not in str(reply).lower():
            self._told(reply)
            if str(reply).startswith(MOVED_ON):
                self._link.give_up(reply)
        elif self._taught:
            self._told(self._why or reply)
        else:
            self._taught = True
            self._link.teach(self._raw, self._loaded, self)

    def _loaded(self, reply: bytes | Exception) -> None:
        """Somebody else may have been faster; any other error says more than that it is missing."""
        if isinstance(reply, StoreError) and "already exists" not in str(reply):
            self._why = reply


def _one(info: dict[str, Any]) -> dict[str, Any]:
    """Of one node; a cluster answers for each of several."""
    first = next(iter(info.values()), None)
    return first if isinstance(first, dict) and "db0" not in info else info
