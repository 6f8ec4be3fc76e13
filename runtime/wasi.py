"""Our own WASI preview 1, whose whole state is one plain value inside the snapshot.

wasmtime's WASI keeps its state in the host, where it cannot be serialized. Here a guest sees a
read-only tree in memory, logical time, seeded randomness, an empty standard input, and
`/dev/agent`,
the channel for host calls of guests without a custom import: write one JSON line, read one JSON
line. `fd_read` of the channel and `poll_oneoff` of a clock suspend. Everything that would create,
rename, remove or write a path answers EROFS, sockets and the rest ENOSYS. Descriptor numbers
survive a restore, because wasi-libc caches its preopens in guest memory.

Each function takes the guest and its unsigned arguments and answers an errno, or a `Pending`. A
pointer outside the guest's memory raises `BadPointer`, which the caller turns into EFAULT.

Source: WASI snapshot preview 1, witx.
"""

from __future__ import annotations

import posixpath
import struct
from typing import TYPE_CHECKING, Any, Final, Protocol

from runtime import abi
from runtime.abi import Pending, Record

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.abi import State

OK, BADF, EXIST, FAULT, INVAL, IO, ISDIR, MFILE, NOENT = 0, 8, 20, 21, 28, 29, 31, 33, 44
NOSPC, NOSYS, NOTDIR, ROFS, SPIPE = 51, 52, 54, 69, 70
CHANNEL: Final = "/dev/agent"
ROOT_FD: Final = 3
MAX_FDS: Final = 256
MAX_IOVECS: Final = 1_024
MAX_PATH: Final = 4_096
SLICE_OUTPUT: Final = 1 << 20
"""Bytes of output after which the guest is asked to yield, so that no slice commits much."""

CHARACTER, DIRECTORY, REGULAR = 2, 3, 4
SUSPENDING: Final = frozenset({"fd_read", "poll_oneoff", "proc_exit"})


class BadPointer(Exception):
    """An address outside the guest's memory."""


class Guest(Protocol):
    """What the shim needs of a sandbox."""

    state: State
    outbox: list[Record]

    def read(self, at: int, size: int) -> bytes:
        """Bytes of the guest's memory; `BadPointer` outside."""
        ...

    def write(self, at: int, data: bytes) -> None:
        """Into the guest's memory; `BadPointer` outside."""
        ...

    def ask_to_yield(self) -> None:
        """Yield at the next check."""
        ...

    def exit(self, code: int) -> int:
        """End the guest."""
        ...


# --- arguments, environment, time, chance ---------------------------------------------------------


def _sizes(guest: Guest, items: list[bytes], count: int, size: int) -> int:
    guest.write(count, struct.pack("<I", len(items)))
    guest.write(size, struct.pack("<I", sum(len(one) + 1 for one in items)))
    return OK


def _strings(guest: Guest, items: list[bytes], pointers: int, at: int) -> int:
    for number, item in enumerate(items):
        guest.write(pointers + 4 * number, struct.pack("<I", at & 0xFFFFFFFF))
        guest.write(at, item + b"\0")
        at += len(item) + 1
    return OK


def _argv(guest: Guest) -> list[bytes]:
    return [one.encode() for one in guest.state.argv]


def _env(guest: Guest) -> list[bytes]:
    return [f"{name}={value}".encode() for name, value in guest.state.env]


def args_sizes_get(guest: Guest, count: int, size: int) -> int:
    """Sizes of the arguments."""
    return _sizes(guest, _argv(guest), count, size)


def args_get(guest: Guest, pointers: int, at: int) -> int:
    """The arguments."""
    return _strings(guest, _argv(guest), pointers, at)


def environ_sizes_get(guest: Guest, count: int, size: int) -> int:
    """Sizes of the environment: what the recipe names, nothing of the host's."""
    return _sizes(guest, _env(guest), count, size)


def environ_get(guest: Guest, pointers: int, at: int) -> int:
    """The environment."""
    return _strings(guest, _env(guest), pointers, at)


def clock_res_get(guest: Guest, _clock: int, at: int) -> int:
    """One microsecond."""
    guest.write(at, struct.pack("<Q", 1_000))
    return OK


def clock_time_get(guest: Guest, clock: int, _precision: int, at: int) -> int:
    """Logical time, whatever the clock: no side channel, and equal wherever it was preempted."""
    if clock > 3:
        return INVAL
    guest.write(at, struct.pack("<Q", guest.state.now()))
    return OK


def random_get(guest: Guest, at: int, size: int) -> int:
    """Bytes of the task's seeded stream."""
    if size > 1 << 20:
        return INVAL
    guest.read(at, size)  # the pointer is checked before the stream advances
    guest.write(at, guest.state.random(size))
    return OK


def sched_yield(guest: Guest) -> int:
    """Politeness is honored at the next check."""
    guest.ask_to_yield()
    return OK


# --- descriptors ----------------------------------------------------------------------------------


def _kind(guest: Guest, fd: int) -> int | None:
    """File type of a descriptor, None when closed."""
    if fd < ROOT_FD:
        return CHARACTER
    if fd == ROOT_FD:
        return DIRECTORY
    entry = guest.state.fds.get(fd)
    if entry is None:
        return None
    return _path_kind(guest, entry[0])


def _path_kind(guest: Guest, path: str) -> int | None:
    if path == CHANNEL:
        return CHARACTER
    if path in guest.state.files:
        return REGULAR
    prefix = path.rstrip("/") + "/"
    known = path in ("/", "/dev") or any(one.startswith(prefix) for one in guest.state.files)
    return DIRECTORY if known else None


def _resolve(guest: Guest, directory: int, at: int, size: int) -> str | None:
    """Absolute path of a name below a directory descriptor; `..` stops at the root."""
    if size > MAX_PATH or _kind(guest, directory) != DIRECTORY:
        return None
    above = "/" if directory == ROOT_FD else guest.state.fds[directory][0]
    name = guest.read(at, size).decode(errors="replace")
    path = posixpath.normpath(posixpath.join("/", above, name.lstrip("/")))
    return path[1:] if path.startswith("//") else path


def fd_fdstat_get(guest: Guest, fd: int, at: int) -> int:
    """Type and rights of a descriptor."""
    kind = _kind(guest, fd)
    if kind is None:
        return BADF
    guest.write(at, struct.pack("<BxHxxxxQQ", kind, 0, (1 << 30) - 1, (1 << 30) - 1))
    return OK


def fd_fdstat_set_flags(guest: Guest, fd: int, _flags: int) -> int:
    """Accepted and without effect: nothing here ever blocks."""
    return BADF if _kind(guest, fd) is None else OK


def fd_prestat_get(guest: Guest, fd: int, at: int) -> int:
    """The only preopened directory is the root."""
    if fd != ROOT_FD:
        return BADF
    guest.write(at, struct.pack("<II", 0, 1))
    return OK


def fd_prestat_dir_name(guest: Guest, fd: int, at: int, size: int) -> int:
    """`/`."""
    if fd != ROOT_FD or size < 1:
        return BADF if fd != ROOT_FD else INVAL
    guest.write(at, b"/")
    return OK


def _stat(guest: Guest, kind: int, path: str, at: int) -> int:
    size = len(guest.state.files.get(path, b""))
    guest.write(at, struct.pack("<QQB7xQQQQQ", 0, 0, kind, 1, size, 0, 0, 0))
    return OK


def fd_filestat_get(guest: Guest, fd: int, at: int) -> int:
    """Type and size of an open file."""
    kind = _kind(guest, fd)
    if kind is None:
        return BADF
    return _stat(guest, kind, guest.state.fds.get(fd, ["", 0])[0], at)


def path_filestat_get(
    guest: Guest, directory: int, _flags: int, at: int, size: int, out: int
) -> int:
    """Type and size of a path."""
    path = _resolve(guest, directory, at, size)
    kind = None if path is None else _path_kind(guest, path)
    if path is None or kind is None:
        return NOENT
    return _stat(guest, kind, path, out)


def path_readlink(
    guest: Guest, directory: int, at: int, size: int, _buffer: int, _room: int, _out: int
) -> int:
    """There are no links, so nothing that exists is one."""
    path = _resolve(guest, directory, at, size)
    return NOENT if path is None or _path_kind(guest, path) is None else INVAL


def path_open(
    guest: Guest, directory: int, _lookup: int, at: int, size: int, oflags: int,
    _rights: int, _inherited: int, _flags: int, out: int,
) -> int:  # fmt: skip
    """Open for reading, or the channel."""
    path = _resolve(guest, directory, at, size)
    kind = None if path is None else _path_kind(guest, path)
    if path is None or kind is None:
        return ROFS if oflags & 1 else NOENT
    if oflags & 4 and oflags & 1:
        return EXIST
    if oflags & 8 and kind == REGULAR:
        return ROFS
    if oflags & 2 and kind != DIRECTORY:
        return NOTDIR
    if len(guest.state.fds) >= MAX_FDS:
        return MFILE
    fd = guest.state.next_fd
    guest.write(out, struct.pack("<I", fd))
    guest.state.next_fd += 1
    guest.state.fds[fd] = [path, 0]
    return OK


def fd_close(guest: Guest, fd: int) -> int:
    """Forget a descriptor; its number is never used again."""
    if fd <= ROOT_FD:
        return OK
    return OK if guest.state.fds.pop(fd, None) else BADF


def fd_seek(guest: Guest, fd: int, offset: int, whence: int, out: int) -> int:
    """Move within a file."""
    entry = guest.state.fds.get(fd)
    if entry is None:
        return SPIPE if fd <= ROOT_FD else BADF
    if entry[0] not in guest.state.files:
        return SPIPE
    if whence > 2:
        return INVAL
    target = (0, entry[1], len(guest.state.files[entry[0]]))[whence] + offset
    if not 0 <= target < 1 << 62:
        return INVAL
    guest.write(out, struct.pack("<Q", target))
    entry[1] = target
    return OK


def fd_tell(guest: Guest, fd: int, out: int) -> int:
    """Where in a file."""
    return fd_seek(guest, fd, 0, 1, out)


def _known(guest: Guest, fd: int, *_rest: int) -> int:
    return BADF if _kind(guest, fd) is None else OK


def fd_readdir(guest: Guest, fd: int, at: int, size: int, cookie: int, out: int) -> int:
    """Entries of a directory of the tree."""
    if _kind(guest, fd) != DIRECTORY:
        return NOTDIR if _kind(guest, fd) is not None else BADF
    path = "/" if fd == ROOT_FD else guest.state.fds[fd][0]
    prefix = path.rstrip("/") + "/"
    names = sorted({
        one[len(prefix) :].partition("/")[0] for one in guest.state.files if one.startswith(prefix)
    })  # fmt: skip
    raw = bytearray()
    for number, name in enumerate(names[max(cookie, 0) :], max(cookie, 0)):
        text = name.encode()
        kind = _path_kind(guest, prefix + name) or REGULAR
        raw += struct.pack("<QQIB3x", number + 1, number + 1, len(text), kind) + text
        if len(raw) >= size:
            break
    part = bytes(raw[:size])
    guest.write(at, part)
    guest.write(out, struct.pack("<I", len(part)))
    return OK


def _iovecs(guest: Guest, at: int, count: int) -> list[tuple[int, int]]:
    if count > MAX_IOVECS:
        raise BadPointer
    raw = guest.read(at, 8 * count)
    return [struct.unpack_from("<II", raw, 8 * i) for i in range(count)]


def _scatter(guest: Guest, at: int, count: int, out: int, data: bytes) -> int:
    """Fill the guest's buffers; how much went in."""
    done = 0
    for start, size in _iovecs(guest, at, count):
        part = data[done : done + size]
        guest.write(start, part)
        done += len(part)
        if done >= len(data):
            break
    guest.write(out, struct.pack("<I", done))
    return done


def fd_write(guest: Guest, fd: int, at: int, count: int, out: int) -> int:
    """Standard output and error, committed with the slice; or a request on the channel."""
    state = guest.state
    vectors = _iovecs(guest, at, count)
    size = sum(length for _, length in vectors)
    if fd in (1, 2):
        if size > abi.MAX_OUTPUT or not abi.room_for_output(size, state):
            return NOSPC
        data = b"".join(guest.read(start, length) for start, length in vectors)
        guest.write(out, struct.pack("<I", size))
        state.sequence += 1
        guest.outbox.append(Record("stdout" if fd == 1 else "stderr", state.sequence, data))
        if sum(len(r.data) for r in guest.outbox[-64:] if isinstance(r.data, bytes)) > SLICE_OUTPUT:
            guest.ask_to_yield()
        return OK
    if (entry := state.fds.get(fd)) is None:
        return BADF
    if entry[0] != CHANNEL:
        return ROFS
    if len(state.request) + size > abi.MAX_REQUEST + 1:
        state.overlong = True
        data = b"".join(guest.read(start, length)[-1:] for start, length in vectors)
        state.request = state.request[:64] + (b"\n" if data.endswith(b"\n") else b"")
    else:
        state.request += b"".join(guest.read(start, length) for start, length in vectors)
    guest.write(out, struct.pack("<I", size & 0xFFFFFFFF))
    return OK


def fd_read(guest: Guest, fd: int, at: int, count: int, out: int) -> int | Pending:
    """A file, the end of standard input, or the reply to the request written before."""
    state = guest.state
    entry = state.fds.get(fd)
    if entry is None:
        if fd != 0:
            return BADF
        guest.write(out, bytes(4))
        return OK
    path = entry[0]
    if path != CHANNEL:
        if path not in state.files:
            return ISDIR
        entry[1] += _scatter(guest, at, count, out, state.files[path][entry[1] :])
        return OK
    if not state.inbox:
        line, newline, rest = state.request.partition(b"\n")
        if not newline:
            guest.write(out, bytes(4))  # nothing was asked: the end, not a wait without end
            return OK
        _iovecs(guest, at, count)
        state.request = rest
        if state.overlong:
            state.overlong = False
            line = b" " * (abi.MAX_REQUEST + 1)
        answer = abi.serve(line, state, guest.outbox)
        if isinstance(answer, abi.Request):
            return Pending(answer, {"via": "channel", "iov": [at, count, out]})
        state.inbox = answer + b"\n"
    return take(guest, at, count, out)


def take(guest: Guest, at: int, count: int, out: int) -> int:
    """Bytes of the inbox into the guest's buffers."""
    done = _scatter(guest, at, count, out, guest.state.inbox)
    guest.state.inbox = guest.state.inbox[done:]
    return OK


def poll_oneoff(
    guest: Guest, subscriptions: int, events: int, count: int, out: int
) -> int | Pending:
    """Descriptors are ready at once; the earliest clock otherwise, which suspends."""
    if not 0 < count <= 64:
        return INVAL
    ready, clocks = [], []
    now = guest.state.clock_ns
    for number in range(count):
        raw = guest.read(subscriptions + 48 * number, 48)
        user, tag = struct.unpack_from("<QB", raw)
        if tag == 0:
            timeout, flags = struct.unpack_from("<Q", raw, 24)[0], raw[40]
            clocks.append((max(0, timeout - now) if flags & 1 else timeout, user))
        elif tag in (1, 2):
            known = _kind(guest, struct.unpack_from("<I", raw, 16)[0]) is not None
            ready.append(struct.pack("<QHB5xQHxxxxxx", user, OK if known else BADF, tag, 1, 0))
        else:
            return INVAL
    if not ready:
        delay, user = min(clocks)
        if delay > abi.MAX_SLEEP_MS * 1_000_000:
            return INVAL
        event = struct.pack("<QHB21x", user, OK, 0)
        if delay > 0:
            if guest.state.next_ordinal >= abi.MAX_EFFECTS:
                raise abi.BudgetGone
            guest.read(events, 32)
            guest.read(out, 4)
            wanted = abi.request("sleep", {"ms": -(-delay // 1_000_000)}, guest.state.next_ordinal)
            guest.state.next_ordinal += 1
            return Pending(wanted, {"via": "poll", "event": event.hex(), "at": [events, out]})
        ready.append(event)
    guest.write(events, b"".join(ready))
    guest.write(out, struct.pack("<I", len(ready)))
    return OK


def proc_exit(guest: Guest, code: int) -> int:
    """Unwind and never rewind."""
    return guest.exit(code)


def _read_only(_guest: Guest, *_arguments: int) -> int:
    return ROFS


def _absent(_guest: Guest, *_arguments: int) -> int:
    return NOSYS


def deliver(guest: Guest, window: dict[str, Any], reply: bytes) -> int:
    """Complete a suspended import: its answer goes where it was wanted, checked again."""
    if window["via"] == "poll":
        events, out = window["at"]
        guest.write(events, bytes.fromhex(window["event"]))
        guest.write(out, struct.pack("<I", 1))
        return OK
    guest.state.inbox = reply + b"\n"
    return take(guest, *window["iov"])


FUNCTIONS: Final[dict[str, Callable[..., int | Pending]]] = {
    one.__name__: one
    for one in (
        args_sizes_get, args_get, environ_sizes_get, environ_get, clock_res_get, clock_time_get,
        random_get, sched_yield, fd_fdstat_get, fd_fdstat_set_flags, fd_prestat_get,
        fd_prestat_dir_name, fd_filestat_get, path_filestat_get, path_readlink, path_open,
        fd_close, fd_seek,
        fd_tell, fd_readdir, fd_write, fd_read, poll_oneoff, proc_exit,
    )
}  # fmt: skip
FUNCTIONS.update(
    dict.fromkeys(("fd_advise", "fd_sync", "fd_datasync", "fd_fdstat_set_rights"), _known),
)
FUNCTIONS.update(
    dict.fromkeys(
        (
            "path_create_directory", "path_filestat_set_times", "path_link",
            "path_remove_directory",
            "path_rename", "path_symlink", "path_unlink_file", "fd_allocate",
            "fd_filestat_set_size", "fd_filestat_set_times", "fd_pwrite",
        ),
        _read_only,
    )
)  # fmt: skip
FUNCTIONS.update(
    dict.fromkeys(
        (
            "fd_pread", "fd_renumber", "proc_raise", "sock_accept", "sock_recv",
            "sock_send", "sock_shutdown",
        ),
        _absent,
    )
)  # fmt: skip
