"""Sessions of clients of the older era: an id that any process can serve, and what one remembers.

The id itself says all that is needed to serve it: whose it is, for which server, which revision was
agreed on, and the session at the server that stands behind it. It is signed, so nobody can make
one, and bound to its principal, so nobody can use another's. What a process keeps besides is only
convenience, bounded and forgotten when idle: ids in flight, a server's newer session after one was
lost, and which ids were closed here.

In a fleet several processes may serve one session. Each tells the others now and then which ones
it uses (`on_used`), and none ends a session at its server for being idle here while another may
still have heard from its client, nor while it cannot hear the others.

Weakness: until processes share a store, an id closed in one of them is still known to the others,
where the server behind it says that it is gone.
"""

from __future__ import annotations

import base64
import hmac
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import orjson

from gateway.errors import NoSuchRoute
from gateway.units import MICRO
from gateway.wire import mcp

if TYPE_CHECKING:
    from gateway.call import Call, Principal
    from gateway.units import Micros

FORM = 1
"""Version of the id's own layout."""
TAG = 16
"""Bytes of the signature."""
LONGEST_ID = 2_048
"""Characters of an id that are looked at; what a server chose for its own is part of it."""
MOST_SESSIONS = 20_000
"""Sessions a process remembers something of; the one longest unused is forgotten first."""
MOST_CLOSED = 20_000
"""Closed ids remembered."""
IDLE: Micros = 1_800 * MICRO
"""Unused for so long, a session is closed, at its server too."""
TELL: Micros = IDLE // 6
"""In a fleet, the others hear at most so much later that a session is still used."""
LONGEST_LIFE = 86_400
"""Seconds after which no id is honored any more."""


@dataclass(slots=True)
class Session:
    """One client's session.

    Attributes:
        id: As the client sends it.
        server: Server of a single mount; "" for the federation.
        version: Revision agreed on.
        theirs: The session id of the server behind it, "" where it gave none.
        exclusive: A session at the server belongs to this one alone; else it borrows the pooled
            ones of its principal.
        tag: Of its principal.
        initialize: `params` of its own initialize, to begin anew when the server lost it; {} in a
            process that did not see it.
        again: What begins it anew at its server, while somebody does.
        in_flight: Ids of requests under way, with what cancels each.
        ended: Nobody honors its id any more.
        streams: Standing streams that are open.
        used: Instant of its last use, here or elsewhere in a fleet as far as it was told.
        told: When the fleet was last told of a use here.
    """

    id: str
    server: str
    version: str
    theirs: str = ""
    exclusive: bool = False
    tag: str = ""
    initialize: Any = field(default_factory=dict)
    again: Any = None
    in_flight: dict[bytes, Callable[[], None]] = field(default_factory=dict)
    ended: bool = False
    streams: int = 0
    used: Micros = 0
    told: Micros = 0

    @property
    def busy(self) -> bool:
        """Whether something of it is under way here."""
        return bool(self.in_flight) or self.streams > 0


class Sessions:
    """All sessions of this process.

    Args:
        key: Signs ids; processes of one fleet share it.
        now, wall: Of the clock.

    Attributes:
        on_deleted: Awaited with the id of a session that its client ended: the rest of a fleet is
            told.
        on_used: Called with the id of a session that is used here, every `TELL` at most, for the
            rest of a fleet; None: this process is alone.
        hears: Whether the others of a fleet can be heard now.
    """

    def __init__(self, key: bytes, *, now: Callable[[], Micros], wall: Callable[[], float]) -> None:
        self._key = key
        self._now = now
        self._wall = wall
        self._known: OrderedDict[str, Session] = OrderedDict()
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._serial = 0
        self.on_deleted: Callable[[str], Awaitable[None]] | None = None
        self.on_used: Callable[[str], None] | None = None
        self.hears: Callable[[], bool] = lambda: True
        self._missed: Micros | None = None

    def __len__(self) -> int:
        """Sessions remembered."""
        return len(self._known)

    def begin(
        self, principal: Principal, server: str, version: str, *, theirs: str | None = None,
        initialize: object = None, salt: bytes = b"",
    ) -> Session:  # fmt: skip
        """A new session, remembered.

        Args:
            principal: Whose it is.
            server: Of the mount; "" for the federation.
            version: Agreed on.
            theirs: The server's own id; None where the session borrows pooled ones.
            initialize: The client's parameters.
            salt: Random bytes: two sessions of one principal differ.
        """
        tag = _tag(principal)
        payload = [FORM, server, tag, version, theirs, int(self._wall()), salt.hex()]
        body = orjson.dumps(payload)
        text = base64.urlsafe_b64encode(self._sign(body) + body).rstrip(b"=").decode()
        session = Session(
            id=text,
            server=server,
            version=version,
            theirs=theirs or "",
            exclusive=theirs is not None,
            tag=tag,
            initialize=initialize or {},
            told=self._now(),  # nobody else knows of it yet
        )
        self._remember(session)
        return session

    def find(self, text: str, principal: Principal, server: str) -> Session:
        """The session of this id.

        Raises:
            NoSuchRoute: There is none, or it is another's: the two are not told apart.
        """
        session = self._known.get(text)
        if session is None and text not in self._closed:
            session = self._foreign(text)
        if session is None or session.server != server or session.tag != _tag(principal):
            raise no_such_session()
        self._remember(session)
        return session

    def of(self, call: Call) -> Session:
        """The session that a request of the older era names.

        Raises:
            ProtocolFault: It names none.
            NoSuchRoute: There is none of this name for this principal at this mount.
        """
        text = mcp.header_text(call.headers, mcp.H_SESSION)
        if not text:
            raise mcp.fault(
                mcp.INVALID_REQUEST,
                "No session is named and none is begun: initialize first, or speak "
                + ", ".join(mcp.STATELESS_VERSIONS),
                data={"supported": [*mcp.STATELESS_VERSIONS, *mcp.SESSION_VERSIONS]},
            )
        assert call.principal is not None  # noqa: S101 - identify ran
        return self.find(text, call.principal, call.path[len("/mcp/") :])

    def _foreign(self, text: str) -> Session | None:
        """A session begun in another process, or forgotten here."""
        payload = self._opened(text)
        if payload is None:
            return None
        return Session(
            id=text,
            server=payload[1],
            version=payload[3],
            theirs=payload[4] or "",
            exclusive=payload[4] is not None,
            tag=payload[2],
        )

    def _opened(self, text: str) -> Any:  # noqa: ANN401 - the payload
        """What an id says; None if it is none of ours, or too old."""
        if not text or len(text) > LONGEST_ID or not text.isascii():
            return None
        try:
            raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            if not hmac.compare_digest(self._sign(raw[TAG:]), raw[:TAG]):
                return None
            payload = orjson.loads(raw[TAG:])
        except ValueError:
            return None
        young = self._wall() - payload[5] < LONGEST_LIFE
        return payload if payload[0] == FORM and young else None

    def _sign(self, body: bytes) -> bytes:
        return blake2b(body, key=self._key[:64], digest_size=TAG).digest()

    def _remember(self, session: Session) -> None:
        self._use(session, self._now())
        self._known[session.id] = session
        self._known.move_to_end(session.id)
        while len(self._known) > MOST_SESSIONS:
            self._known.popitem(last=False)

    def _use(self, session: Session, now: Micros) -> None:
        session.used = now
        if self.on_used is not None and session.exclusive and now - session.told >= TELL:
            session.told = now
            self.on_used(session.id)

    def used_elsewhere(self, text: str) -> None:
        """Another process of the fleet has served it."""
        session = self._known.get(text)
        if session is not None:
            session.used = self._now()
            self._known.move_to_end(text)

    def missed(self) -> None:
        """What others told just now may not have been heard."""
        self._missed = self._now()

    async def delete(self, session: Session) -> None:
        """Its client ended it: closed here, and told to whoever else may serve it."""
        self.close(session)
        if self.on_deleted is not None:
            await self.on_deleted(session.id)

    def deleted_elsewhere(self, text: str) -> None:
        """Another process of the fleet was told to end it."""
        session = self._known.get(text)
        if session is not None:
            self.close(session)
        else:
            self._honor_no_more(text)

    def close(self, session: Session) -> None:
        """The id is honored no more; whatever it had under way is cancelled."""
        session.ended = True
        self._known.pop(session.id, None)
        self._honor_no_more(session.id)
        for cancel in list(session.in_flight.values()):
            cancel()

    def _honor_no_more(self, text: str) -> None:
        self._closed[text] = None
        while len(self._closed) > MOST_CLOSED:
            self._closed.popitem(last=False)

    def idle(self) -> list[Session]:
        """Sessions that nobody uses, forgotten here; the caller ends them at their servers.

        Alone, that is after `IDLE` without a use, and their ids are honored no more. In a fleet it
        is `TELL` later, since so late one may hear of a use elsewhere; and an id goes on to be
        honored, since another process may have heard from its client just now: then it is begun
        anew behind it.
        """
        now = self._now()
        until = now - IDLE
        for session in [one for one in self._known.values() if one.busy]:
            self._use(session, now)  # the fleet is told of it as of a call
            self._known.move_to_end(session.id)
        if self.on_used is not None:
            until -= TELL
            if not self.hears():
                self.missed()
            if self._missed is not None and self._missed > until:
                return []
        found = []
        for session in list(self._known.values()):
            if session.used > until:
                break
            found.append(session)
            if self.on_used is None:
                self.close(session)
            else:
                del self._known[session.id]
        return found


def no_such_session() -> NoSuchRoute:
    """What a client of the session era takes as the word to begin anew."""
    return NoSuchRoute(
        "There is no such session any more; initialize a new one.", code="no_such_session"
    )


def _tag(principal: Principal) -> str:
    return blake2b(principal.id.encode("utf-8", "surrogatepass"), digest_size=9).hexdigest()
