"""The `tidegate` command. Each command imports only its own part, so that start stays short.

serve          the gateway, with the emulator beside it where the policy wants one
dev            the same with the shipped default policy, whatever TIDEGATE_POLICY says
emulate        the provider emulator alone
check, schema  policy files: every error at once; the JSON schema for editors
status         what the gateway does now, refreshing
explain        every verdict about one call, with rule, file and line
approvals      questions of agents to humans: list, show, grant, deny; an approver's key
effects        tool calls whose outcome is unknown: list, resolve
loops          reset what loop rules remember of a session or workflow
key            a new agent key and the line for the policy file
simulate       a scenario or a recorded trace in virtual time, under one or several policies
doctor         what this installation can and cannot do here
agent, guest   sandboxed agents on this machine: run, resume, register, logs; interpreters
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.settings import Settings

EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, not bound
ADMIN_HELP = "URL of the admin listener (default: by TIDEGATE_ADMIN_HOST and _PORT)"
ELSEWHERE = {"agent": (), "guest": ("guest",)}
"""Commands of the sandbox, which run as `python -m runtime`: rooms never import each other."""
MOST_WORKERS = 128
LATER = {
    "worker": "the execution tier",
    "task": "the execution tier",
    "dlq": "the execution tier",
    "schedules": "the execution tier",
    "store": "the execution tier",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: exit status 0 where the command did as asked, else 1 or 2 with the reason."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ELSEWHERE:
        run_elsewhere(arguments)
    if arguments and arguments[0] in LATER:
        name = arguments[0]
        fail(f"`tidegate {name}` comes with {LATER[name]}; this version cannot do it yet.")
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)


def run_elsewhere(arguments: list[str]) -> None:
    """Become `python -m runtime`, so that signals and exit status are its own."""
    words = [*ELSEWHERE[arguments[0]], *arguments[1:]]
    os.execv(sys.executable, [sys.executable, "-m", "runtime", *words])  # noqa: S606 - ourselves


def fail(message: str) -> None:
    """One clear sentence on standard error, exit status 2."""
    sys.exit(f"tidegate: {message}")


def read_settings() -> Settings:
    """The process settings, or one clear sentence."""
    from gateway import settings

    try:
        return settings.from_environment()
    except ValueError as error:
        fail(str(error))
        raise


def port(text: str) -> int:
    """A TCP port of the command line."""
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r}: a port from 0 to 65535 is allowed")
    return int(text)


def seed(text: str) -> int:
    """A seed of chance."""
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 0 to 2**63 - 1 is allowed")
    return int(text)


def jobs(text: str) -> int:
    """A number of processes."""
    if not text.isdecimal() or not 1 <= int(text) <= 256:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 1 to 256 is allowed")
    return int(text)


def admin_address(environ: dict[str, str] | None = None) -> str:
    """Where a gateway started with these variables listens for its operator."""
    from gateway import settings

    try:
        here = settings.from_environment(environ)
    except ValueError as error:
        fail(str(error))
        raise
    host = EVERY_ADDRESS.get(here.admin_host, here.admin_host)
    return (
        f"http://[{host}]:{here.admin_port}" if ":" in host else f"http://{host}:{here.admin_port}"
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="tidegate", description="Traffic governance for fleets of AI agents."
    )
    top.add_argument("--version", action="version", version=version())
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    for name, what in (
        ("serve", "start the gateway"),
        ("dev", "start the gateway with the shipped default policy"),
    ):
        serve = commands.add_parser(name, help=what, description=f"{what.capitalize()}.")
        if name == "serve":
            serve.add_argument(
                "--policy", type=Path, help="policy file or folder (else TIDEGATE_POLICY)"
            )
        serve.add_argument("--host", help="data listener's address")
        serve.add_argument("--port", type=port, help="data listener's port (0: a free one)")
        serve.add_argument("--admin-port", type=port, help="admin listener's port (0: a free one)")
        serve.add_argument("--workers", type=int, default=1, help="gateway processes (default 1)")
        serve.set_defaults(run=run_serve)

    emulate = commands.add_parser("emulate", help="start the provider emulator alone")
    emulate.add_argument("--config", type=Path, help="YAML or JSON file; default: generous limits")
    emulate.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    emulate.add_argument("--port", type=port, default=8486, help="default: 8486; 0: a free one")
    emulate.add_argument("--seed", type=int, help="answers and pacing repeat for equal seeds")
    emulate.add_argument("--fast", action="store_true", help="no pacing: answers come at once")
    emulate.add_argument("--with-parent", action="store_true", help=argparse.SUPPRESS)
    emulate.set_defaults(run=run_emulate)

    check = commands.add_parser("check", help="check a policy file or folder")
    check.add_argument("path", type=Path)
    check.add_argument(
        "--no-secrets", action="store_true", help="secrets are not here (CI): check their form only"
    )
    check.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    check.set_defaults(run=run_check)

    schema = commands.add_parser("schema", help="print the policy's JSON schema")
    schema.set_defaults(run=run_schema)

    status = commands.add_parser("status", help="pools, waiting, breakers, revision; refreshing")
    status.add_argument("--admin", default="", help=ADMIN_HELP)
    status.add_argument("--json", action="store_true", help="print once, as JSON")
    status.add_argument("--once", action="store_true", help="print once")
    status.set_defaults(run=run_status)

    explain = commands.add_parser("explain", help="every verdict about one call")
    explain.add_argument("call_id", help="value of the answer's tidegate-call-id header")
    explain.add_argument("--admin", default="", help=ADMIN_HELP)
    explain.add_argument("--json", action="store_true", help="print the record as JSON")
    explain.set_defaults(run=run_explain)

    loops_parser(commands)
    key = commands.add_parser("key", help="make an agent key and its stored form")
    key.add_argument("id", nargs="?", default="", help="letters and digits; default: random")
    key.set_defaults(run=run_key)

    approvals_parser(commands)
    effects_parser(commands)
    add_simulate(commands)

    doctor = commands.add_parser("doctor", help="what works here, what does not, and why")
    doctor.set_defaults(run=run_doctor)
    return top


def loops_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`tidegate loops …`."""
    loops = commands.add_parser("loops", help="let agents go on that were cut off by a loop rule")
    reset = loops.add_subparsers(required=True).add_parser(
        "reset", help="conversations and tasks begin anew, with nothing repeated and nothing used"
    )
    whose = reset.add_mutually_exclusive_group(required=True)
    whose.add_argument("name", nargs="?", default="", help="a session or a workflow")
    whose.add_argument("--all", action="store_true", help="every conversation and task")
    reset.add_argument("--admin", default="", help=ADMIN_HELP)
    reset.set_defaults(run=run_loops_reset)


def approvals_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`tidegate approvals …`."""
    group = commands.add_parser("approvals", help="calls that need a human's consent")
    deeds = group.add_subparsers(dest="deed", required=True, metavar="DEED")

    listed = deeds.add_parser("list", help="questions, oldest first")
    listed.add_argument("--state", default="pending",
                        help="pending, granted, used, denied, expired, void, or all")  # fmt: skip
    show = deeds.add_parser("show", help="one question with its arguments")
    grant = deeds.add_parser("grant", help="sign that the call may go")
    deny = deeds.add_parser("deny", help="sign that it may not")
    for deed in (show, grant, deny):
        deed.add_argument("id")
    for deed in (listed, show):
        deed.add_argument("--json", action="store_true", help="print JSON")
    for deed in (listed, show, grant, deny):
        deed.add_argument("--admin", default="", help=ADMIN_HELP)
    for deed in (grant, deny):
        deed.add_argument("--note", default="", help="for the agent and the record")
        deed.add_argument("--yes", action="store_true", help="do not ask")
    key = deeds.add_parser("key", help="make an approver's key and the line for policy")
    key.add_argument("name", nargs="?", default="me", help="the approver's name in policy")
    for deed in (grant, deny, key):
        deed.add_argument("--key", type=Path, help="key file (default: ~/.config/tidegate/…)")
    group.set_defaults(run=run_approvals)


def effects_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`tidegate effects …`."""
    group = commands.add_parser("effects", help="tool calls whose outcome is unknown")
    deeds = group.add_subparsers(dest="deed", required=True, metavar="DEED")
    listed = deeds.add_parser("list", help="effects in doubt, oldest first")
    listed.add_argument("--json", action="store_true", help="print JSON")
    resolve = deeds.add_parser("resolve", help="say what became of one")
    resolve.add_argument("key")
    resolve.add_argument("outcome", choices=["done", "not_done"])
    resolve.add_argument("--by", required=True, help="who knows, and from where")
    for deed in (listed, resolve):
        deed.add_argument("--admin", default="", help=ADMIN_HELP)
    group.set_defaults(run=run_effects)


def add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command line of `simulate`."""
    simulate = commands.add_parser(
        "simulate", help="play a scenario or a recorded trace in virtual time"
    )
    simulate.add_argument("scenario", type=Path, nargs="+", help="YAML files; docs/simulation.md")
    simulate.add_argument(
        "--policy", type=Path, action="append", default=[],
        help="policy file or folder instead of the scenario's; several are compared side by side",
    )  # fmt: skip
    simulate.add_argument("--trace", type=Path, help="access log or JSONL to replay as the demand")
    simulate.add_argument(
        "--seed", type=seed, action="append", default=[],
        help="instead of the scenario's; several are several runs",
    )  # fmt: skip
    simulate.add_argument("--json", action="store_true", help="one JSON object as the last line")
    simulate.add_argument("--html", type=Path, help="write the report as one page")
    simulate.add_argument("--jobs", type=jobs, default=1, help="runs at once (default 1)")
    simulate.set_defaults(run=run_simulate)


def version() -> str:
    """The distribution's version."""
    from gateway import __version__

    return f"tidegate {__version__}"


def run_serve(options: argparse.Namespace) -> None:
    """Start the gateway; return when it has drained."""
    if not 1 <= options.workers <= MOST_WORKERS:
        fail(f"--workers {options.workers}: 1 to {MOST_WORKERS} processes are allowed")
    from dataclasses import replace

    from gateway.settings import default_policy

    settings = read_settings()
    if options.command == "dev":
        options.policy = default_policy()
    changes = {
        "policy": options.policy,
        "host": options.host,
        "port": options.port,
        "admin_port": options.admin_port,
    }
    settings = replace(
        settings, **{key: value for key, value in changes.items() if value is not None}
    )
    if options.workers > 1:
        from gateway.supervisor import supervise

        sys.exit(supervise(settings, options.workers))
    from gateway.app import serve

    sys.exit(serve(settings))


def run_emulate(options: argparse.Namespace) -> None:
    """Start the emulator; return when it has stopped."""
    from gateway.emulator import process

    mapping = None
    if options.config is not None:
        from gateway.policy.load import read_mapping

        try:
            mapping = read_mapping(options.config)
        except (OSError, ValueError) as error:
            fail(f"{options.config}: {error}")
    try:
        config = process.configured(mapping, seed=options.seed, fast=options.fast)
    except process.ConfigError as error:
        fail("\n".join(error.problems))
        raise
    sys.exit(
        process.run(config, host=options.host, port=options.port, with_parent=options.with_parent)
    )


def run_check(options: argparse.Namespace) -> None:
    """Print every error of a policy; exit 1 if there is any."""
    from gateway.policy.check import check

    result = check(options.path, read_settings().environment, secrets=not options.no_secrets)
    sys.stdout.write(result.json() if options.json else result.text())
    sys.exit(0 if result.ok else 1)


def run_schema(_options: argparse.Namespace) -> None:
    """Print the schema."""
    from gateway.policy.check import json_schema

    sys.stdout.write(json_schema())


def run_status(options: argparse.Namespace) -> None:
    """Show the gateway's state until interrupted."""
    from gateway.terminal import status

    sys.exit(status(options.admin or admin_address(), once=options.once, as_json=options.json))


def run_explain(options: argparse.Namespace) -> None:
    """Show one call's verdicts."""
    from gateway.terminal import explain

    sys.exit(explain(options.admin or admin_address(), options.call_id, as_json=options.json))


def run_approvals(options: argparse.Namespace) -> None:
    """List, show, decide, or make a key."""
    from gateway import approvers

    path = None
    if options.deed in ("grant", "deny", "key"):
        path = approvers.key_path(options.key, read_settings().environment)
    if options.deed == "key":
        try:
            public = approvers.make_key(path or Path())
        except approvers.KeyProblem as error:
            fail(str(error))
            raise
        print(f"private key: {path} (keep it; mode 0600)\n")
        print(f'policy (approvals.approvers):\n  {options.name}: "{public}"')
        return
    admin = (options.admin or admin_address()).rstrip("/")
    if options.deed == "list":
        state = "" if options.state == "all" else options.state
        sys.exit(approvers.listed(admin, state=state, as_json=options.json))
    if options.deed == "show":
        sys.exit(approvers.show(admin, options.id, as_json=options.json))
    sys.exit(
        approvers.decide(
            admin, options.id, options.deed, key=path or Path(), note=options.note, sure=options.yes
        )
    )


def run_effects(options: argparse.Namespace) -> None:
    """List effects in doubt, or resolve one."""
    from gateway import approvers

    admin = (options.admin or admin_address()).rstrip("/")
    if options.deed == "list":
        sys.exit(approvers.doubts(admin, as_json=options.json))
    sys.exit(approvers.resolve(admin, options.key, outcome=options.outcome, by=options.by))


def run_loops_reset(options: argparse.Namespace) -> None:
    """Reset what loop rules remember."""
    from gateway.terminal import reset_loops

    sys.exit(reset_loops(options.admin or admin_address(), options.name))


def run_key(options: argparse.Namespace) -> None:
    """Print a new key once, and the line that policy stores."""
    import secrets

    from gateway.identity import make_key

    try:
        key, stored = make_key(secrets.token_bytes, options.id or secrets.token_hex(4))
    except ValueError as error:
        fail(str(error))
        raise
    print(f"key (give it to the agent; it is shown only now):\n  {key}\n")
    print(f'policy (agents.NAME.keys):\n  - "{stored}"')


def run_simulate(options: argparse.Namespace) -> None:
    """Play the scenarios and print what came of them."""
    from gateway.simulation import Failed, Wish, play

    wish = Wish(
        scenarios=tuple(options.scenario),
        policies=tuple(options.policy),
        trace=options.trace,
        seeds=tuple(options.seed),
        jobs=options.jobs,
        html=options.html,
        as_json=options.json,
    )
    try:
        sys.stdout.write(play(wish))
    except Failed as wrong:
        fail(str(wrong))


def run_doctor(_options: argparse.Namespace) -> None:
    """Say what works here."""
    from gateway.doctor import examine

    sys.exit(examine(read_settings()))
