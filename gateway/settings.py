"""Process settings from TIDEGATE_* variables, read once at start; policy is YAML, not here."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

TRANSPORTS = ("http1", "aiohttp")
"""Our own client, and aiohttp's pool should anything be wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a process is told by its environment.

    Attributes:
        policy: File or folder; None means the shipped default.
        host, port: Data listener.
        admin_host, admin_port: Admin listener.
        state_dir: Where the development key, the secret and later the store live.
        secret_file: The one secret all signing keys derive from; None means in `state_dir`.
        redis_url: Shared store; "" is the embedded one, unless policy names one.
        redis_new: The shared store began with this process's supervisor: what it does not know, it
            has not lost.
        data_fd: A listening socket inherited from the supervisor; -1 for none.
        otlp_endpoint, trace_ratio: Where spans go ("" for nowhere); share of new traces kept.
        transport: How bytes reach providers: one of `TRANSPORTS`.
        vocabulary_dir: Folder of the tokenizer's files.
        environment: The variables policy may name in `${…}`; never logged.
    """

    policy: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8484
    admin_host: str = "127.0.0.1"
    admin_port: int = 8485
    state_dir: Path = Path()
    secret_file: Path | None = None
    redis_url: str = ""
    redis_new: bool = False
    data_fd: int = -1
    transport: str = "http1"
    vocabulary_dir: Path = Path()
    log_level: str = ""
    otlp_endpoint: str = ""
    trace_ratio: float = 1.0
    environment: dict[str, str] = field(default_factory=dict, repr=False)


def user_dir(environ: dict[str, str], variable: str, fallback: str) -> Path:
    """The XDG folder of that variable, else the fallback under the home folder."""
    base = environ.get(variable)
    return Path(base) if base else Path(environ.get("HOME", "~")).expanduser() / fallback


def vocabulary_dir(environ: dict[str, str]) -> Path:
    """Where the tokenizer's files are: the one rule, for this process and for set-up."""
    named = environ.get("TIKTOKEN_CACHE_DIR") or environ.get("TIDEGATE_VOCABULARY_DIR")
    cache = user_dir(environ, "XDG_CACHE_HOME", ".cache") / "tidegate" / "vocabulary"
    return Path(named) if named else cache


def from_environment(environ: dict[str, str] | None = None) -> Settings:
    """The settings of this process.

    Raises:
        ValueError: A variable holds something that cannot be read; names it and what is allowed.
    """
    env = dict(os.environ) if environ is None else environ

    def number(name: str, default: int) -> int:
        text = env.get(name, "")
        if not text:
            return default
        if not text.isdigit() or not 0 <= int(text) <= 65535:
            raise ValueError(f"{name}={text!r}: a port from 0 to 65535 is allowed")
        return int(text)

    def share(name: str, default: float) -> float:
        text = env.get(name, "")
        try:
            value = float(text) if text else default
        except ValueError:
            value = -1.0
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}={text!r}: a number from 0 to 1 is allowed")
        return value

    def one_of(name: str, allowed: tuple[str, ...]) -> str:
        text = env.get(name, "") or allowed[0]
        if text not in allowed:
            raise ValueError(f"{name}={text!r}: one of {', '.join(allowed)} is allowed")
        return text

    policy = env.get("TIDEGATE_POLICY", "")
    state = env.get("TIDEGATE_STATE_DIR", "")
    secret = env.get("TIDEGATE_SECRET_FILE", "")
    return Settings(
        policy=Path(policy) if policy else None,
        host=env.get("TIDEGATE_HOST", "127.0.0.1"),
        port=number("TIDEGATE_PORT", 8484),
        admin_host=env.get("TIDEGATE_ADMIN_HOST", "127.0.0.1"),
        admin_port=number("TIDEGATE_ADMIN_PORT", 8485),
        state_dir=Path(state)
        if state
        else user_dir(env, "XDG_STATE_HOME", ".local/state") / "tidegate",
        secret_file=Path(secret) if secret else None,
        redis_url=env.get("TIDEGATE_REDIS_URL", ""),
        redis_new=env.get("TIDEGATE_REDIS_NEW", "") == "1",
        data_fd=int(env.get("TIDEGATE_DATA_FD") or -1),
        transport=one_of("TIDEGATE_TRANSPORT", TRANSPORTS),
        vocabulary_dir=vocabulary_dir(env),
        log_level=env.get("TIDEGATE_LOG_LEVEL", ""),
        otlp_endpoint=env.get("TIDEGATE_OTLP_ENDPOINT", ""),
        trace_ratio=share("TIDEGATE_TRACE_RATIO", 1.0),
        environment=env,
    )


def export_vocabulary_dir(folder: Path) -> None:
    """Let tiktoken look here and nowhere else; call before it is first used."""
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)


def default_policy() -> Path:
    """The shipped default: in the checkout, else inside the installed package."""
    here = Path(__file__).resolve().parent
    checkout = here.parent / "policies" / "default.yaml"
    return checkout if checkout.exists() else here / "_policies" / "default.yaml"
