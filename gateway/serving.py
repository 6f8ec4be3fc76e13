"""Listeners: sockets bound by us, uvicorn behind them, signals and draining in one place.

uvicorn is run without its own signal handling, so that a SIGTERM first drains (`protocols.md` §10:
held requests get a soft refusal within 5 s) and only then closes the listeners.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import socket
from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:
    from collections.abc import Iterator

KEEP_ALIVE_S = 75
"""uvicorn's default of 5 s races with pooled clients."""
BACKLOG = 4096
WANTED_FILES = 65_536


class PortBusy(Exception):
    """The address cannot be bound; the message is one clear sentence."""


def bind(host: str, port: int, *, what: str, variable: str) -> socket.socket:
    """A listening socket on that address; port 0 takes a free one.

    Raises:
        PortBusy: In use, not permitted or not ours; names the address and the variable to change.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        why = {
            errno.EADDRINUSE: "is already in use",
            errno.EACCES: "may not be used by this user",
            errno.EADDRNOTAVAIL: "is not an address of this machine",
        }.get(error.errno or 0, f"cannot be used ({error.strerror})")
        if error.errno == errno.EADDRINUSE:
            mend = f"free it or choose another with {variable}"
        else:
            mend = f"choose another with {variable.replace('PORT', 'HOST')} or {variable}"
        text = f"The {what} {host}:{port} {why}; {mend}."
        raise PortBusy(text) from error
    sock.setblocking(False)  # noqa: FBT003 - the standard library's signature
    return sock


def inherited(number: int) -> socket.socket:
    """The listening socket that our supervisor opened for all of its workers."""
    sock = socket.socket(fileno=number)
    sock.setblocking(False)  # noqa: FBT003 - the standard library's signature
    return sock


class Listener(uvicorn.Server):
    """A uvicorn server that leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """No signal handlers: `app.py` owns them."""
        yield


def told(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's is news: Codex asks for a WebSocket first, each time.

    Such a request is refused by the edge (426) and logged by it; uvicorn would add two warnings,
    one of them advice to install a library that this gateway does not use.
    """
    return not str(record.msg).startswith(("Unsupported upgrade", "No supported WebSocket"))


def listener(app: Any, *, http: Any = "httptools") -> Listener:  # noqa: ANN401 - ASGI, uvicorn
    """A server for an ASGI app, tuned as `performance.md` §1 and §10 measure.

    Args:
        app: ASGI, without lifespan.
        http: uvicorn's protocol class; the data listener brings `connection.protocol`.
    """
    logging.getLogger("uvicorn.error").addFilter(told)  # added once, however often it is asked
    return Listener(
        uvicorn.Config(
            app,
            interface="asgi3",  # uvicorn's guess takes a partial or a lambda for ASGI 2
            loop="none",
            http=http,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=True,
            proxy_headers=False,  # the peer decides what counts as loopback; never a header
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=BACKLOG,
            timeout_graceful_shutdown=10,
            h11_max_incomplete_event_size=65_536,
        )
    )


def announce(host: str, port: int, *, key: str, model: str) -> str:
    """The lines that `make run` prints once ready: ready to be pasted into a shell.

    Args:
        host: As bound; an address that stands for all is shown as loopback.
        port: As bound.
        key: The development key; "" where the policy does not know it.
        model: A model to try.
    """
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104 - only shown
    base = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
    if not key:
        return (
            f"export OPENAI_BASE_URL={base}/v1\nexport ANTHROPIC_BASE_URL={base}\n"
            "# keys: those of the policy's agents (`tidegate key NAME` makes one)"
        )
    message = '[{"role":"user","content":"Say hello."}]'
    body = f'{{"model":"{model}","messages":{message}}}'
    lines = [
        f"export OPENAI_BASE_URL={base}/v1",
        f"export OPENAI_API_KEY={key}",
        f"export ANTHROPIC_BASE_URL={base}",
        f"export ANTHROPIC_API_KEY={key}",
        f"curl -sS {base}/v1/chat/completions -H 'authorization: Bearer {key}' "
        f"-H 'content-type: application/json' -d '{body}'",
    ]
    return "\n".join(lines)


def raise_file_limit() -> int:
    """The soft limit of open files raised as far as allowed; returns it. A stream takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
