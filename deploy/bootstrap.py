"""Set up the project's environment on a fresh machine: `python3 deploy/bootstrap.py .venv`.

Standard library only. Takes the first rung that holds:
  1. `uv sync --locked`, where uv is on PATH;
  2. `python -m venv` with pip;
  3. `venv --without-pip` and the system's pip (Debian packages ensurepip apart);
  4. `venv --without-pip` and the pip wheel that uv.lock names, verified by its hash;
  5. one sentence that names what to install.
Everything installed is pinned and hashed. Afterwards the tokenizer's vocabulary is put in place.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def say(text: str) -> None:
    """Progress, to standard error."""
    print(text, file=sys.stderr, flush=True)


def run(*command: str | Path, env: dict[str, str] | None = None) -> bool:
    """Whether the command succeeded; its output is shown only when it failed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    if done.returncode != 0:
        say(f"  {' '.join(str(part) for part in command[:6])} … failed")
        say("\n".join((done.stdout + done.stderr).strip().splitlines()[-6:]))
    return done.returncode == 0


def with_uv(target: Path) -> bool:
    """Rung 1."""
    uv = shutil.which("uv")
    if uv is None:
        return False
    env = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(target.resolve())}
    env.pop("VIRTUAL_ENV", None)
    extras = ("--extra", "otel")
    return run(uv, "sync", "--locked", *extras, "--extra", "worker", env=env) or run(
        uv, "sync", "--locked", *extras, env=env
    )


def install(pip: list[str | Path], python: Path) -> bool:
    """The pinned world, the worker's part if the machine can have it, then this checkout."""
    pinned = ["--require-hashes", "--no-deps", "--quiet"]
    strict = ["--only-binary", ":all:", *pinned]
    if not run(*pip, "install", *strict, "-r", "requirements/dev.txt"):
        return False
    source = ["--no-build-isolation", *pinned, "-r", "requirements/source.txt"]
    if not run(*pip, "install", *source):
        say("  the detector of blocking calls is not available here; its tests will say so")
    if not run(*pip, "install", *strict, "-r", "requirements/worker.txt"):
        say("  the worker's packages are not available here; the gateway works without them")
    quiet = ["--quiet", "--no-deps", "--no-build-isolation", "--editable", "."]
    return run(*pip, "install", *quiet) and python.exists()


def with_venv(target: Path) -> bool:
    """Rung 2."""
    python = target / "bin" / "python"
    if not python.exists() and not run(sys.executable, "-m", "venv", target):
        return False
    if not run(python, "-m", "pip", "--version"):
        return False
    return install([python, "-m", "pip", "--disable-pip-version-check"], python)


def bare(target: Path) -> Path:
    """An environment without pip."""
    if not (target / "bin" / "python").exists():
        venv.create(target, with_pip=False, symlinks=True)
    return target / "bin" / "python"


def with_system_pip(target: Path) -> bool:
    """Rung 3."""
    if shutil.which("pip3") is None and shutil.which("pip") is None:
        return False
    pip = shutil.which("pip3") or shutil.which("pip") or "pip"
    python = bare(target)
    return install([pip, "--disable-pip-version-check", "--python", python], python)


def with_fetched_pip(target: Path) -> bool:
    """Rung 4: a wheel is a zip that runs as it is; uv.lock knows pip's address and hash."""
    import tomllib  # noqa: PLC0415 - absent before 3.11, where main() has to say so

    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    pip = next((entry for entry in lock["package"] if entry["name"] == "pip"), None)
    if pip is None:
        return False
    wheel = pip["wheels"][0]
    try:
        with urllib.request.urlopen(wheel["url"], timeout=120) as answer:
            data = answer.read()
    except OSError as error:
        say(f"  no pip from the index: {error}")
        return False
    if "sha256:" + hashlib.sha256(data).hexdigest() != wheel["hash"]:
        say("  the pip wheel does not match its hash in uv.lock")
        return False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / wheel["url"].rsplit("/", 1)[1]
        path.write_bytes(data)
        python = bare(target)
        return install([python, path / "pip", "--disable-pip-version-check"], python)


def main() -> None:
    """Make the environment or say in one sentence what is missing."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this is where an old Python is told
        sys.exit(
            f"Tidegate needs Python 3.11 or newer, this is {sys.version.split()[0]}; "
            "call `make PYTHON=python3.12 …` with a newer one."
        )
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ".venv")
    say(f"setting up {target} (once) …")
    for rung in (with_uv, with_venv, with_system_pip, with_fetched_pip):
        if rung(target):
            break
        if target.exists() and not (target / "bin" / "tidegate").exists():
            shutil.rmtree(target, ignore_errors=True)
    else:
        sys.exit(
            "no way to install packages: install python3-venv (Debian, Ubuntu: apt install "
            "python3-venv) or uv, or allow access to a Python package index."
        )
    vocabulary = ROOT / "deploy" / "vocabulary.py"
    if vocabulary.exists():
        subprocess.run([str(target / "bin" / "python"), str(vocabulary)], cwd=ROOT, check=False)


if __name__ == "__main__":
    main()
