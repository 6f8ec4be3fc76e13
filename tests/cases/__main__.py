"""`python -m tests.cases URL`: plays the fault cases against a running gateway.

The gateway at URL must run the plain set-up of FORM.md §5 (or the one named by `--setup`) with its
upstream at the port given by `--upstream-port`; `policies/` holds those set-ups as files. Without a
URL the player starts the gateways it needs itself, one set-up after the other.

The last line is `N passed, M failed`; variants that cannot be played here are listed before it,
each with its reason, and count as neither. Exit code 0 means that nothing failed."""

# ruff: noqa: T201 - a command: its printed lines are its result

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

from tests.cases import form, setup, skips
from tests.cases.accounts import Accounts
from tests.cases.player import Lane, Outcome, play_all
from tests.cases.upstream import Upstream


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cases", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "url", nargs="*", help="gateway, e.g. http://127.0.0.1:8484; more of a fleet"
    )
    parser.add_argument("--only", action="append", default=[], metavar="FAMILY[/CASE[/VARIANT]]")
    parser.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="NAME",
        help="with URL: the set-up it runs (default plain); without: only these",
    )
    parser.add_argument(
        "--upstream-port",
        type=int,
        default=9100,
        metavar="P",
        help="the scripted upstream listens on P and P+1 (default 9100)",
    )
    parser.add_argument("--admin", metavar="URL", help="admin listener (default: port of URL + 1)")
    parser.add_argument(
        "--key",
        default=os.environ.get("TIDEGATE_KEY", ""),
        help="client key without limits (default: TIDEGATE_KEY)",
    )
    parser.add_argument(
        "--pid", type=int, action="append", default=[], help="gateway process, for memory"
    )
    parser.add_argument("--log", type=Path, help="file that the gateway logs to")
    parser.add_argument("--jobs", type=int, default=8, help="variants played side by side")
    parser.add_argument("--lanes", type=int, default=2, help="without URL: gateways per set-up")
    parser.add_argument(
        "--scrape-age",
        type=float,
        default=1.1,
        metavar="S",
        help="how old a page of metrics may be",
    )
    parser.add_argument("--all", action="store_true", help="play what skips.py sets apart as well")
    parser.add_argument(
        "--list", action="store_true", help="list variants and set-ups, play nothing"
    )
    return parser.parse_args(arguments)  # fmt: skip


def address(url: str) -> tuple[str, int]:
    """Host and port of a URL."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    if not parts.hostname:
        raise SystemExit(f"{url!r} is no URL of a gateway; e.g. http://127.0.0.1:8484")
    return parts.hostname, parts.port or 80


def tell(outcome: Outcome) -> None:
    """One line per variant, more for a failure."""
    word = "skip" if outcome.skipped else "pass" if outcome.passed else "FAIL"
    print(f"{word}  {outcome.seconds:6.2f} s  {outcome.variant.name}", flush=True)
    for problem in outcome.problems:
        print(f"        {problem}", flush=True)


async def play_url(chosen: list[form.Variant], args: argparse.Namespace) -> list[Outcome]:
    """Against gateways that run already."""
    setups = set(args.setup or ["plain"])
    gateways = tuple(address(url) for url in args.url)
    admin = address(args.admin) if args.admin else (gateways[0][0], gateways[0][1] + 1)
    skipped, playable = [], []
    for variant in chosen:
        why = "" if args.all else skips.reason(variant)
        if not why and variant.policy not in setups:
            why = f"needs the set-up {variant.policy} (declare it with --setup {variant.policy})"
        if not why and "log" in variant.expect and args.log is None:
            why = "reads the gateway's log (name it with --log FILE)"
        if not why and any(
            int(c.get("request", {}).get("to", 0)) >= len(gateways) for c in variant.calls
        ):
            why = "needs more gateways of one fleet"
        if not why and any("hook" in one for one in variant.calls):
            why = "its hooks need a gateway that the player starts itself (give no URL)"
        if why:
            skipped.append(Outcome(variant=variant, skipped=why))
        else:
            playable.append(variant)
    upstream = Upstream(ports=(args.upstream_port, args.upstream_port + 1))
    await upstream.start()
    try:
        lane = Lane(
            policy="/".join(sorted(setups)),
            gateways=gateways,
            upstream=upstream,
            key=args.key or "tg-test",
            books=Accounts(admins=(admin,), pids=tuple(args.pid), stale=args.scrape_age),
            log=setup.log_reader(args.log) if args.log else None,
        )
        return skipped + await play_all(playable, [lane], jobs=args.jobs, tell=tell)
    finally:
        await upstream.stop()


def report(outcomes: list[Outcome]) -> int:
    """The summary; its last line is the contract."""
    skipped = [outcome for outcome in outcomes if outcome.skipped]
    failed = [outcome for outcome in outcomes if outcome.problems]
    if skipped:
        print(f"\n{len(skipped)} not played:")
        reasons: dict[str, list[str]] = {}
        for outcome in skipped:
            reasons.setdefault(outcome.skipped, []).append(outcome.variant.name)
        for why, names in sorted(reasons.items()):
            print(f"  {len(names):3}  {why}: {', '.join(names)}")
    if failed:
        print(f"\n{len(failed)} failed:")
        for outcome in sorted(failed, key=lambda one: one.variant.name):
            print(f"  {outcome.variant.name}")
            for problem in outcome.problems:
                print(f"      {problem}")
    print(f"{sum(one.passed for one in outcomes)} passed, {len(failed)} failed", flush=True)
    return 1 if failed else 0


def main(arguments: list[str] | None = None) -> int:
    """Play, report, and say by the exit code whether anything failed."""
    args = options(arguments)
    try:
        chosen = list(form.choose(form.read_all(), args.only))
    except form.FormError as error:
        print(error, file=sys.stderr)
        return 2
    if args.list:
        for variant in chosen:
            print(f"{variant.name}  [{variant.policy}]  {skips.reason(variant)}")
        return 0
    if args.url:
        outcomes = asyncio.run(play_url(chosen, args))
    else:
        outcomes = asyncio.run(
            setup.play_setups(
                chosen,
                only=args.setup,
                lanes=args.lanes,
                jobs=args.jobs,
                everything=args.all,
                tell=tell,
            )
        )
    return report(outcomes)


if __name__ == "__main__":
    sys.exit(main())
