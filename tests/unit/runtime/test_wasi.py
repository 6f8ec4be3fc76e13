"""The WASI shim against a table of answers, over a guest that is only memory."""

from __future__ import annotations

import json
import struct

import pytest

from runtime import abi, wasi
from runtime.abi import Pending, State
from runtime.wasi import BADF, FUNCTIONS, INVAL, NOENT, NOSYS, NOTDIR, OK, ROFS, SPIPE

PATH, OUT, IOV, DATA = 100, 200, 300, 400


class Guest:
    """A guest of 64 KiB."""

    def __init__(self) -> None:
        self.memory = bytearray(65_536)
        self.state = State(
            argv=["qjs", "ü"], files={"/agent/main.js": b"0123456789", "/lib/x": b""}
        )
        self.outbox: list = []
        self.yields = 0
        self.code = None

    def read(self, at: int, size: int) -> bytes:
        if at + size > len(self.memory):
            raise wasi.BadPointer
        return bytes(self.memory[at : at + size])

    def write(self, at: int, data: bytes) -> None:
        if at + len(data) > len(self.memory):
            raise wasi.BadPointer
        self.memory[at : at + len(data)] = data

    def ask_to_yield(self) -> None:
        self.yields += 1

    def exit(self, code: int) -> int:
        self.code = code
        return 0

    def number(self, at: int, form: str = "<I") -> int:
        return struct.unpack_from(form, self.memory, at)[0]

    def open(self, path: str, oflags: int = 0, directory: int = 3) -> int:
        raw = path.encode()
        self.write(PATH, raw)
        return FUNCTIONS["path_open"](self, directory, 0, PATH, len(raw), oflags, 0, 0, 0, OUT)

    def opened(self, path: str) -> int:
        assert self.open(path) == OK
        return self.number(OUT)

    def iov(self, *parts: tuple[int, int]) -> int:
        for n, part in enumerate(parts):
            self.write(IOV + 8 * n, struct.pack("<II", *part))
        return len(parts)

    def say(self, fd: int, data: bytes) -> int:
        self.write(DATA, data)
        return FUNCTIONS["fd_write"](self, fd, IOV, self.iov((DATA, len(data))), OUT)

    def hear(self, fd: int, size: int = 4_000) -> tuple[object, bytes]:
        answer = FUNCTIONS["fd_read"](self, fd, IOV, self.iov((DATA, size)), OUT)
        return answer, self.read(DATA, self.number(OUT))


@pytest.mark.parametrize(
    ("path", "oflags", "answer"),
    [
        ("agent/main.js", 0, OK),
        ("/agent/../agent/main.js", 0, OK),
        ("../../agent/main.js", 0, OK),
        ("agent", 2, OK),
        ("agent/main.js", 2, NOTDIR),
        ("agent/none.js", 0, NOENT),
        ("agent/new.js", 1, ROFS),
        ("agent/main.js", 8, ROFS),
        ("agent/main.js", 5, wasi.EXIST),
        ("etc/passwd", 0, NOENT),
        ("dev/agent", 0, OK),
    ],
)
def test_opening(path, oflags, answer):
    assert Guest().open(path, oflags) == answer


def test_opening_below_what_is_no_directory():
    guest = Guest()
    fd = guest.opened("agent/main.js")
    assert guest.open("x", 0, fd) == NOENT
    assert guest.open("x", 0, 77) == NOENT


def test_descriptors_are_bounded_and_never_used_again():
    guest = Guest()
    first = guest.opened("agent/main.js")
    assert FUNCTIONS["fd_close"](guest, first) == OK
    assert FUNCTIONS["fd_close"](guest, first) == BADF
    assert guest.opened("agent/main.js") == first + 1
    guest.state.fds |= {1_000 + n: ["/lib/x", 0] for n in range(wasi.MAX_FDS)}
    assert guest.open("agent/main.js") == wasi.MFILE


def test_a_file_is_read_in_parts_and_moved_in():
    guest = Guest()
    fd = guest.opened("agent/main.js")
    assert guest.hear(fd, 4) == (OK, b"0123")
    assert FUNCTIONS["fd_seek"](guest, fd, -2, 2, OUT) == OK
    assert guest.number(OUT, "<Q") == 8
    assert guest.hear(fd) == (OK, b"89")
    assert guest.hear(fd) == (OK, b"")
    assert FUNCTIONS["fd_seek"](guest, fd, -99, 0, OUT) == INVAL
    assert FUNCTIONS["fd_seek"](guest, fd, 0, 9, OUT) == INVAL
    assert FUNCTIONS["fd_seek"](guest, 1, 0, 0, OUT) == SPIPE
    assert guest.say(fd, b"no") == ROFS


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("fd_prestat_get", (3, OUT), OK),
        ("fd_prestat_get", (4, OUT), BADF),
        ("fd_fdstat_get", (9, OUT), BADF),
        ("fd_filestat_get", (9, OUT), BADF),
        ("fd_seek", (9, 0, 0, OUT), BADF),
        ("clock_time_get", (9, 0, OUT), INVAL),
        ("random_get", (OUT, 1 << 21), INVAL),
        ("poll_oneoff", (OUT, OUT, 0, OUT), INVAL),
        ("path_create_directory", (3, PATH, 1), ROFS),
        ("path_unlink_file", (3, PATH, 1), ROFS),
        ("sock_recv", (3, 0, 0, 0, 0, 0), NOSYS),
        ("fd_sync", (1,), OK),
        ("fd_sync", (9,), BADF),
        ("path_readlink", (3, PATH, 0, OUT, 5, OUT), INVAL),
        ("fd_readdir", (1, OUT, 10, 0, OUT), NOTDIR),
    ],
)
def test_answers(name, arguments, answer):
    assert FUNCTIONS[name](Guest(), *arguments) == answer


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("args_get", (65_533, 0)),
        ("clock_time_get", (0, 0, 65_530)),
        ("random_get", (65_530, 100)),
        ("fd_write", (1, 65_530, 5, OUT)),
        ("fd_write", (1, IOV, 5_000, OUT)),
        ("poll_oneoff", (65_500, OUT, 1, OUT)),
        ("path_filestat_get", (3, 0, 0xFFFF_FFF0, 100, OUT)),
    ],
)
def test_a_pointer_outside_is_noticed_and_changes_nothing(name, arguments):
    guest = Guest()
    before = guest.state.to_json()
    with pytest.raises(wasi.BadPointer):
        FUNCTIONS[name](guest, *arguments)
    if name != "clock_time_get":  # a failed reading of the clock is a reading
        assert guest.state.to_json() == before


def test_directories_list_their_entries():
    guest = Guest()
    assert FUNCTIONS["fd_readdir"](guest, 3, DATA, 500, 0, OUT) == OK
    raw = guest.read(DATA, guest.number(OUT))
    assert b"agent" in raw
    assert b"lib" in raw
    assert FUNCTIONS["fd_readdir"](guest, 3, DATA, 500, 2, OUT) == OK
    assert guest.number(OUT) == 0


def test_output_is_kept_in_order_and_bounded():
    guest = Guest()
    assert guest.say(1, b"one") == OK
    assert guest.say(2, b"two") == OK
    assert [(r.kind, r.sequence, r.data) for r in guest.outbox] == [
        ("stdout", 1, b"one"),
        ("stderr", 2, b"two"),
    ]
    guest.state.written = abi.MAX_OUTPUT - 2
    assert guest.say(1, b"one") == wasi.NOSPC
    assert len(guest.outbox) == 2


def test_much_output_asks_for_a_yield():
    guest = Guest()
    for _ in range(30):
        assert guest.say(1, b"x" * 40_000) == OK
    assert guest.yields > 0


def test_standard_input_is_empty():
    assert Guest().hear(0) == (OK, b"")


def channel(guest: Guest, request: object) -> tuple[int, object, bytes]:
    fd = guest.opened("dev/agent")
    assert guest.say(fd, json.dumps(request).encode() + b"\n") == OK
    return (fd, *guest.hear(fd))


def test_a_local_operation_on_the_channel_is_answered_at_once():
    _, answer, data = channel(Guest(), {"v": 1, "op": "now", "args": {}})
    assert answer == OK
    assert json.loads(data)["ok"] == 1_000


def test_an_effect_on_the_channel_waits_and_its_reply_is_read_in_parts():
    guest = Guest()
    fd, answer, _ = channel(guest, {"v": 1, "op": "memory.get", "args": {"key": "k"}})
    assert isinstance(answer, Pending)
    guest.iov((DATA, 5))
    assert wasi.deliver(guest, answer.window, b'{"ok":null}') == OK
    assert guest.read(DATA, guest.number(OUT)) == b'{"ok"'
    assert guest.hear(fd) == (OK, b":null}\n")
    assert guest.hear(fd) == (OK, b""), "nothing was asked: the end, not a wait without end"


def test_an_overlong_request_is_refused_and_the_next_one_served():
    guest = Guest()
    fd = guest.opened("dev/agent")
    for _ in range(40):
        assert guest.say(fd, b"x" * 32_000) == OK
    assert guest.say(fd, b"\n") == OK
    assert len(guest.state.request) <= abi.MAX_REQUEST + 1
    _, data = guest.hear(fd)
    assert json.loads(data)["error"]["code"] == "too_large"
    assert guest.say(fd, b'{"v":1,"op":"now"}\n') == OK
    assert b'"ok"' in guest.hear(fd)[1]


def subscription(user: int, tag: int, timeout: int = 0, flags: int = 0) -> bytes:
    if tag:
        return struct.pack("<QB7xI28x", user, tag, 1)
    return struct.pack("<QB7xI4xQQH6x", user, 0, 1, timeout, 0, flags)


def test_a_clock_suspends_and_its_event_arrives():
    guest = Guest()
    guest.write(DATA, subscription(42, 0, 5_000_000))
    answer = FUNCTIONS["poll_oneoff"](guest, DATA, DATA + 500, 1, OUT)
    assert isinstance(answer, Pending)
    assert answer.request.args == {"ms": 5}
    assert wasi.deliver(guest, answer.window, b"") == OK
    assert guest.number(OUT) == 1
    assert guest.number(DATA + 500, "<Q") == 42


def test_descriptors_are_ready_before_any_clock():
    guest = Guest()
    guest.write(DATA, subscription(1, 0, 10**9) + subscription(2, 2))
    assert FUNCTIONS["poll_oneoff"](guest, DATA, DATA + 500, 2, OUT) == OK
    assert (guest.number(OUT), guest.number(DATA + 500, "<Q")) == (1, 2)


def test_exit_ends_the_guest():
    guest = Guest()
    FUNCTIONS["proc_exit"](guest, 3)
    assert guest.code == 3
