"""The fault cases (`*.yaml`, their form in `FORM.md`) and the program that plays them.

    form.py      files → variants; unknown words are errors
    items.py     byte items and `${variables}` → what is written, and when
    client.py    the client's side of a call, on a raw socket
    upstream.py  the scripted upstream, byte by byte, and its record of what it was sent
    accounts.py  neutral names of accounting → metrics of the gateway
    judge.py     expectations → sentences about what did not hold
    player.py    one variant, then many: what may run beside what
    setup.py     starts gateways with the policies of `policies/` and plays the matching variants
    skips.py     what cannot be played yet, by kind, each with its reason

Nothing here imports the gateway: the player judges a process from outside, and an HTTP library on
either side would repair what is under test.
"""
