"""One connection for many batches: answers find their askers at any chunk boundary, or fail."""

from __future__ import annotations

import asyncio

import pytest

from gateway.admission.pipe import Pipe, StoreError, command

REPLIES = (
    b"$5\r\nhello\r\n-ERR no such thing\r\n$0\r\n\r\n+OK\r\n:12\r\n$-1\r\n$7\r\na\r\nb\r\nc\r\n"
)
MEANT = [b"hello", StoreError, b"", b"OK", b"12", b"", b"a\r\nb\r\nc"]


class Wire(asyncio.WriteTransport):
    """What was written, and whether it is closed."""

    def __init__(self):
        super().__init__()
        self.written = b""
        self.closed = False
        self.protocol = None

    def set_protocol(self, protocol):
        self.protocol = protocol

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.closed

    def abort(self):
        self.closed = True


class Writer:
    def __init__(self, transport):
        self.transport = transport


def opened(asked: int = len(MEANT)):
    wire, told = Wire(), []
    pipe = Pipe(Writer(wire))
    for _ in range(asked):
        pipe.send(command(b"PING"), told.append)
    return pipe, wire, told


def meaning(told):
    return [StoreError if isinstance(one, StoreError) else one for one in told]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_answers_come_in_order_at_any_chunk_boundary(size):
    pipe, wire, told = opened()
    for at in range(0, len(REPLIES), size):
        pipe.data_received(REPLIES[at : at + size])
    assert meaning(told) == MEANT
    assert str(told[1]) == "ERR no such thing"
    assert pipe.open
    assert wire.written == b"*1\r\n$4\r\nPING\r\n" * len(MEANT)


def test_who_waits_when_the_connection_ends_hears_so_once():
    pipe, _, told = opened(3)
    pipe.data_received(b"+1\r\n")
    pipe.connection_lost(None)
    pipe.connection_lost(None)
    assert told[0] == b"1"
    assert [type(one) for one in told[1:]] == [ConnectionError, ConnectionError]
    assert not pipe.open


def test_an_answer_that_is_none_ends_the_connection():
    pipe, wire, told = opened(2)
    pipe.data_received(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert wire.closed
    assert all(isinstance(one, ConnectionError) for one in told)
    assert len(told) == 2


def test_who_is_told_may_ask_again():
    pipe, wire, told = opened(0)
    pipe.send(command(b"A"), lambda reply: (told.append(reply), pipe.send(b"again", told.append)))
    pipe.send(command(b"B"), told.append)
    pipe.data_received(b"+a\r\n+b\r\n+c\r\n")
    assert told == [b"a", b"b", b"c"]
    assert wire.written.endswith(b"again")


def test_what_nobody_asked_for_is_kept_for_nobody():
    pipe, _, told = opened(1)
    pipe.data_received(b"+a\r\n+more\r\n")
    assert told == [b"a"]
