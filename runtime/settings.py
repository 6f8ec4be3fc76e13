"""Settings of the worker and of the local agent commands, from TIDEGATE_* variables, read once.

The secret is the fleet's one secret (`TIDEGATE_SECRET_FILE`, else made in the state folder at
first start, mode 0600): the snapshot key derives from it, so a snapshot continues on any machine
that shares it, and nowhere else.
"""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from runtime.errors import SettingsError

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a process is told by its environment.

    Attributes:
        cache_dir: Registered modules, machine code, interpreters; 0700, ours alone.
        state_dir: The secret, logs of local runs.
        secret_file: None means in `state_dir`.
        gateway: Base URL of the gateway.
        agent_key: Identity of local runs; never in guest memory, never logged.
        model: For `llm.chat` calls of local runs that name none.
        slots: Slot threads; 0 is one a core.
    """

    cache_dir: Path
    state_dir: Path
    secret_file: Path | None = None
    gateway: str = "http://127.0.0.1:8484"
    agent_key: str = ""
    model: str = "gpt-5.4-mini"
    slots: int = 0

    def secret(self) -> bytes:
        """The fleet's secret, made when there is none.

        Raises:
            SettingsError: It is unreadable, too short, or others can read it.
        """
        path = self.secret_file or self.state_dir / "secret"
        try:
            if not path.exists() and self.secret_file is None:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(made, "wb") as file:
                    file.write(secrets.token_hex(SECRET_BYTES).encode())
            content = path.read_bytes().strip()
            if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) and self.secret_file is None:
                raise SettingsError(f"{path} can be read by others: chmod 600 it")
        except FileExistsError:
            return self.secret()
        except OSError as error:
            raise SettingsError(f"the secret {path} cannot be used: {error.strerror}") from None
        if len(content) < 16:
            raise SettingsError(f"the secret {path} is shorter than 16 bytes")
        return content


def from_environment(environ: dict[str, str] | None = None) -> Settings:
    """The settings of this process.

    Raises:
        SettingsError: A variable cannot be read; names it and what is allowed.
    """
    env = dict(os.environ) if environ is None else environ
    home = Path(env.get("HOME", "~")).expanduser()

    def folder(variable: str, xdg: str, fallback: str) -> Path:
        if env.get(variable):
            return Path(env[variable])
        base = Path(env[xdg]) if env.get(xdg) else home / fallback
        return base / "tidegate"

    state = folder("TIDEGATE_STATE_DIR", "XDG_STATE_HOME", ".local/state")
    cache = folder("TIDEGATE_CACHE_DIR", "XDG_CACHE_HOME", ".cache") / "runtime"
    gateway = env.get("TIDEGATE_GATEWAY", "http://127.0.0.1:8484").rstrip("/")
    parts = urlsplit(gateway)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(f"TIDEGATE_GATEWAY={gateway!r}: a URL http://host:port is allowed")
    slots = env.get("TIDEGATE_SLOTS", "0")
    if not slots.isdigit() or int(slots) > 256:
        raise SettingsError(f"TIDEGATE_SLOTS={slots!r}: a number from 0 to 256 is allowed")
    secret = env.get("TIDEGATE_SECRET_FILE", "")
    return Settings(
        cache_dir=cache,
        state_dir=state,
        secret_file=Path(secret) if secret else None,
        gateway=gateway,
        agent_key=env.get("TIDEGATE_AGENT_KEY", ""),
        model=env.get("TIDEGATE_MODEL", "") or "gpt-5.4-mini",
        slots=int(slots),
    )


def child_environment() -> dict[str, str]:
    """What a bounded child gets: where programs and packages are, and no secret."""
    kept = ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR")
    own = {name: os.environ[name] for name in kept if name in os.environ}
    cores = min(4, os.cpu_count() or 1)
    return {**own, "BINARYEN_CORES": str(cores), "PYTHONDONTWRITEBYTECODE": "1"}
