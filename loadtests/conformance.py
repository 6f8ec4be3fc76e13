"""The official MCP conformance suite through the gateway, against our own fixture server.

`python -m loadtests.conformance --json` (about 25 s with the suite in the cache):

* `v2026_07_28`: scenarios that this revision requires, and the checks of three scenarios that the
  suite runs without scoring them though they are exactly a gateway's duties (header validation,
  mirrored arguments, JSON Schema 2020-12);
* `v2025_11_25`, `v0_1_16`: checks of all scenarios of the session era, by both suites.

The suite cannot send credentials: the policy knows an anonymous agent on loopback. Figures are null
where npm could not install the suite; `why` then says so.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from typing import Any

from loadtests import measure
from tests.acceptance.agents import SUITES, NotInstalled, Programs, Ran, cache
from tests.integration.tools import tool_world

REQUIRED = ("2026-07-28", "2025-11-25")
DUTIES = ("http-header-validation", "http-custom-header-server-validation", "json-schema-2020-12")
LIMIT = 120.0
LINE = re.compile(r"^\s*[✓✗] ([a-z0-9-]+): (\d+) passed, (\d+) failed", re.MULTILINE)
RESULT = re.compile(r"Passed: (\d+)/(\d+)")
UNSCORED = re.compile(r"[✓✗] ([a-z0-9-]+) \(")


def scenarios(ran: Ran) -> dict[str, tuple[int, int]]:
    """Checks passed and failed by scenario, as the summary has them."""
    summary = ran.out.partition("=== SUMMARY ===")[2]
    return {name: (int(good), int(bad)) for name, good, bad in LINE.findall(summary)}


def checks(found: dict[str, tuple[int, int]]) -> dict[str, int]:
    """Their checks together."""
    passed = sum(good for good, _ in found.values())
    return {
        "checks_passed": passed,
        "checks_total": passed + sum(bad for _, bad in found.values()),
    }


def required(ran: Ran) -> dict[str, tuple[int, int]]:
    """The scenarios that count: what the summary lists as unscored is left out."""
    unscored = ran.out.partition("Not scored for")[2]
    left_out = set(UNSCORED.findall(unscored))
    return {name: found for name, found in scenarios(ran).items() if name not in left_out}


async def run_all(programs: Programs, url: str) -> dict[str, Any]:
    new = await programs.suite(
        "conformance", "server", "--url", url, "--requirements", REQUIRED[0], limit=LIMIT
    )
    counted = required(new)
    made: dict[str, Any] = {
        "v2026_07_28": {
            "required_passed": sum(bad == 0 for _, bad in counted.values()),
            "required_total": len(counted),
        }
    }
    measure.say(f"{REQUIRED[0]}: exit {new.status}, {made['v2026_07_28']}")
    passed = total = 0
    for scenario in DUTIES:
        arguments = ("--spec-version", REQUIRED[0], "--scenario", scenario)
        one = await programs.suite("conformance", "server", "--url", url, *arguments, limit=LIMIT)
        found = RESULT.search(one.out)
        good, all_ = (int(found[1]), int(found[2])) if found else (0, 1)
        measure.say(f"{scenario}: {good}/{all_}")
        passed, total = passed + good, total + all_
    made["v2026_07_28"] |= {"header_checks_passed": passed, "header_checks_total": total}
    old = await programs.suite(
        "conformance", "server", "--url", url, "--requirements", REQUIRED[1], limit=LIMIT
    )
    made["v2025_11_25"] = checks(scenarios(old))
    measure.say(f"{REQUIRED[1]}: exit {old.status}, {made['v2025_11_25']}")
    oldest = await programs.suite("conformance_old", "server", "--url", url, limit=LIMIT)
    made["v0_1_16"] = checks(scenarios(oldest))
    measure.say(f"0.1.16: exit {oldest.status}, {made['v0_1_16']}")
    return made


async def measure_all() -> dict[str, Any]:
    """Every figure; null where the suite is not to be had."""
    programs = Programs(cache())
    try:
        await programs.install("conformance", "conformance_old")
    except NotInstalled as error:
        return dict.fromkeys(("v2026_07_28", "v2025_11_25", "v0_1_16")) | {"why": str(error)[:200]}
    sections = {
        "edge": {"anonymous": "guest"},
        "agents": {"guest": {"loopback_only": True}},
    }
    async with tool_world(**sections) as made:
        result = await run_all(programs, made.url())
    return result | {"suites": [SUITES["conformance"], SUITES["conformance_old"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON (always done)"
    )
    parser.parse_args()
    began = time.monotonic()
    measure.finish(asyncio.run(measure_all()), began=began)


if __name__ == "__main__":
    main()
