"""Our own HTTP/1.1 client: asyncio protocols under httptools' parser, nothing between.

Why it exists: at 64 calls in flight the general client cost a quarter of a call, and one wake-up of
a task for every event of a stream (docs/adr/0030). What it may not do is what the fault suite says
of every `Transport`. From the bottom: `channel` is one connection, `dial` makes one, `pool` keeps
those of one upstream, `exchange` is one request with its answer, `transport` is all of it together.
"""
