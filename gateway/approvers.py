"""`tidegate approvals` and `tidegate effects`: an operator's terminal for the gate of tool calls.

An approver's private key never leaves the machine it was made on: what is to be signed comes from
the admin listener, is shown, and is signed here. The signed bytes are made anew from what was
shown, so a listener that shows one call and asks for a signature of another gets none.
"""

from __future__ import annotations

import base64
import json
import os
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gateway.terminal import Unanswered, complain, fetch, send
from scheduler.api import Document
from scheduler.api import approvals as decisions

if TYPE_CHECKING:
    from collections.abc import Mapping

EVENTS = {"grant": decisions.Move.GRANT, "deny": decisions.Move.DENY}


class KeyProblem(Exception):
    """The approver's key cannot be used; says why and what to do."""


def make_key(path: Path) -> str:
    """A new private key in that file, readable by its owner alone; the public half for policy.

    Raises:
        KeyProblem: There is a file already, or it cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    text = base64.b64encode(key.private_bytes_raw()) + b"\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise KeyProblem(f"{path} exists already; move it away first, or name another") from error
    except OSError as error:
        raise KeyProblem(f"{path} cannot be written: {error.strerror}") from error
    with os.fdopen(handle, "wb") as file:
        file.write(text)
    return public_text(key)


def public_text(key: Ed25519PrivateKey) -> str:
    """The public half as policy writes it."""
    return "ed25519:" + base64.b64encode(key.public_key().public_bytes_raw()).decode()


def read_key(path: Path) -> Ed25519PrivateKey:
    """The private key of that file.

    Raises:
        KeyProblem: There is none, or others may read it.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_bytes()
    except OSError as error:
        raise KeyProblem(
            f"{path} cannot be read ({error.strerror}); `tidegate approvals key` makes a key"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise KeyProblem(f"{path} can be read by others than its owner: chmod 600 {path}")
    try:
        return Ed25519PrivateKey.from_private_bytes(base64.b64decode(text.strip(), validate=True))
    except ValueError as error:
        raise KeyProblem(f"{path} holds no approver's key") from error


def key_path(given: Path | None, environ: Mapping[str, str]) -> Path:
    """Where the key is: as given, else in the user's configuration folder."""
    if given is not None:
        return given
    base = environ.get("XDG_CONFIG_HOME")
    folder = Path(base) if base else Path(environ.get("HOME", "~")).expanduser() / ".config"
    return folder / "tidegate" / "approver.key"


def document_of(value: Mapping[str, Any]) -> Document:
    """What is to be signed, as the listener wrote it."""
    return Document(
        id=value["id"],
        owner=value["owner"],
        agent=value["agent"],
        tenant=value["tenant"],
        tool=value["tool"],
        arguments=json.loads(value["arguments"]),
        policy=value["policy"],
        rule=value["rule"],
        expires=value["expires"],
        nonce=value["nonce"],
    )


def listed(admin: str, *, state: str, as_json: bool) -> int:
    """Print approvals. The exit status."""
    return _printed(f"{admin}/approvals?state={state}", as_json=as_json, lines=_rows)


def show(admin: str, approval: str, *, as_json: bool) -> int:
    """Print one approval with its arguments. The exit status."""
    return _printed(f"{admin}/approvals/{approval}", as_json=as_json, lines=_whole)


def doubts(admin: str, *, as_json: bool) -> int:
    """Print effects in doubt. The exit status."""
    return _printed(f"{admin}/effects", as_json=as_json, lines=_doubt_rows)


def _printed(url: str, *, as_json: bool, lines: Any) -> int:  # noqa: ANN401 - a function of JSON
    try:
        code, value = fetch(url)
    except Unanswered as error:
        return complain(error)
    if code != 200:
        return _refused(value)
    text = json.dumps(value, indent=2) if as_json else "\n".join(lines(value))
    sys.stdout.write(text + "\n")
    return 0


def _refused(value: Mapping[str, Any]) -> int:
    sys.stderr.write(f"tidegate: {value.get('detail', 'refused')}\n")
    return 1


def decide(admin: str, approval: str, decision: str, *, key: Path, note: str, sure: bool) -> int:
    """Sign and send a decision, after it was shown and confirmed. The exit status."""
    try:
        private = read_key(key)
        code, value = fetch(f"{admin}/approvals/{approval}")
        if code != 200:
            return _refused(value)
        sys.stdout.write("\n".join(_whole(value)) + "\n")
        if not sure and not _confirmed(decision):
            sys.stderr.write("tidegate: nothing was decided.\n")
            return 1
        message = document_of(value["document"]).signed(EVENTS[decision])
        signature = base64.b64encode(private.sign(message)).decode()
        body = {"decision": decision, "signature": signature, "note": note}
        code, value = send(f"{admin}/approvals/{approval}/decision", body)
    except Unanswered as error:
        return complain(error)
    except KeyProblem as error:
        sys.stderr.write(f"tidegate: {error}\n")
        return 2
    if code != 200:
        return _refused(value)
    if value["state"] == "pending":
        said = f"granted by {', '.join(value['granted_by'])}; {value['needed']} are needed"
    else:
        said = f"{value['state']} by {', '.join(value['granted_by']) or value['approver']}"
    sys.stdout.write(f"{value['id']}: {said}\n")
    return 0


def _confirmed(decision: str) -> bool:
    if not sys.stdin.isatty():
        sys.stderr.write("tidegate: not a terminal; say --yes to decide without being asked.\n")
        return False
    sys.stdout.write(f"{decision} this call? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def resolve(admin: str, key: str, *, outcome: str, by: str) -> int:
    """Say what became of an effect in doubt. The exit status."""
    try:
        code, value = send(f"{admin}/effects/{key}/resolve", {"outcome": outcome, "by": by})
    except Unanswered as error:
        return complain(error)
    if code != 200:
        return _refused(value)
    sys.stdout.write(f"{value['key']}: {outcome}\n")
    return 0


# --- lines ---


def _at(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "-"


def _rows(value: Mapping[str, Any]) -> list[str]:
    found = value["approvals"]
    if not found:
        return ["no approvals"]
    return [
        f"{one['id']}  {one['state']:<8} {_at(one['requested'])}  expires {_at(one['expires'])}  "
        f"{plain(one['agent'])}  {plain(one['tool'])}  {plain(one['reason'] or one['rule'])}"
        for one in found
    ]


def _doubt_rows(value: Mapping[str, Any]) -> list[str]:
    found = value["effects"]
    if not found:
        return ["no effects in doubt"]
    return [
        f"{one['key']}  {_at(one['reserved'])}  {plain(one['agent'])}  {plain(one['tool'])}  "
        f"call {one['call']}  {plain(one['note'])}"
        for one in found
    ]


def _whole(value: Mapping[str, Any]) -> list[str]:
    document = value["document"]
    arguments = json.dumps(json.loads(document["arguments"]), indent=2, ensure_ascii=True)
    lines = [
        f"approval   {value['id']}  {value['state']}",
        f"tool       {plain(document['tool'])}",
        f"agent      {plain(document['agent'])}  tenant {plain(document['tenant'])}",
        f"rule       {plain(document['rule'])}",
        f"reason     {plain(value['reason']) or '-'}",
        f"requested  {_at(value['requested'])}  expires {_at(value['expires'])}",
        f"policy     {document['policy'][:12]}",
        f"arguments  {arguments}",
    ]
    if value["granted_by"]:
        lines.append(f"granted by {', '.join(value['granted_by'])}  ({value['needed']} needed)")
    if value["approver"]:
        lines.append(f"decided    {_at(value['decided'])} by {value['approver']}  {value['note']}")
    return lines


def plain(text: str) -> str:
    """Text that cannot move the cursor: an agent wrote some of it."""
    return "".join(mark if mark.isprintable() else "?" for mark in text)
