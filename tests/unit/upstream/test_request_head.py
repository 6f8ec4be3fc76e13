"""The request head: bytes in, bytes out; nothing in it can be read as two requests."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.upstream import Outgoing, TransportFault, framing, request_head


async def nothing():
    yield b""


def out(**changes):
    fields = {"method": "POST", "base_url": "http://h", "target": b"/x", "headers": []}
    return Outgoing(**fields | changes)


def head(**changes):
    return request_head(out(**changes), prefix=b"", host=b"h")


def test_a_head_is_line_host_headers_framing():
    assert request_head(
        out(target=b"/v1/x?a=%2F", headers=[(b"a", b"1"), (b"b", b"2"), (b"a", b"3")], body=b"{}"),
        prefix=b"/api",
        host=b"h:81",
    ) == (
        b"POST /api/v1/x?a=%2F HTTP/1.1\r\nhost: h:81\r\na: 1\r\nb: 2\r\na: 3\r\n"
        b"content-length: 2\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"method": "GET"}, []),
        ({"method": "DELETE"}, [(b"content-length", b"0")]),
        ({"body": b"abc"}, [(b"content-length", b"3")]),
        ({"method": "GET", "body": b"abc"}, [(b"content-length", b"3")]),
        ({"upload": nothing()}, [(b"transfer-encoding", b"chunked")]),
        ({"upload": nothing(), "length": 7}, [(b"content-length", b"7")]),
        ({"upload": nothing(), "length": 0}, [(b"content-length", b"0")]),
    ],
)
def test_each_body_has_exactly_one_framing(changes, expected):
    assert framing(out(**changes)) == expected


names = st.from_regex(rb"\A[a-z][a-z0-9-]{0,20}\Z")
values = st.binary(max_size=40)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.binary(max_size=8) | names, values), max_size=8), st.binary(max_size=20)
)
def test_what_passes_the_check_is_one_head(headers, path):
    request = out(headers=headers, target=b"/" + path)
    with contextlib.suppress(TransportFault):
        assert_one_head(request_head(request, prefix=b"", host=b"h"), headers)


def assert_one_head(written, headers):
    lines = written.split(b"\r\n")
    assert lines[-2:] == [b"", b""]
    assert b"\r" not in written.replace(b"\r\n", b"")
    assert b"\n" not in written.replace(b"\r\n", b"")
    assert lines[0].count(b" ") == 2
    own = {b"host", b"content-length", b"transfer-encoding", b"connection", b"expect", b"upgrade"}
    kept = [b"%b: %b" % pair for pair in headers if pair[0] not in own]
    assert lines[2:-3] == kept
    assert lines[-3] == b"content-length: 0"


def test_the_fault_of_a_bad_header_does_not_quote_it():
    with pytest.raises(TransportFault) as caught:
        head(headers=[(b"authorization", b"Bearer s3cret\r\n")])
    assert "s3cret" not in str(caught.value)
