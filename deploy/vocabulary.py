"""Put the tokenizer's files in place: `python deploy/vocabulary.py`, called by deploy/bootstrap.py.

tiktoken's wheel holds no vocabulary and would download it at first use, without a timeout. Here it
is taken from the pinned PyPI wheel `bpe-openai` (MIT), which is downloaded, never installed or run:
only two compressed data files are read out of it. Whatever they came through, each must have the
SHA-256 written below, the one tiktoken itself expects, before it is renamed to the name tiktoken
looks for.

Standard library and pip only. Quick when the files are there and right. It never fails a set-up:
without the files the gateway counts by estimate, and one line says so and how to repair it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(
    0, str(ROOT)
)  # by hand this also runs with a Python that knows nothing of the project

from gateway.settings import vocabulary_dir  # noqa: E402 - needs the line above

FILES = {
    "o200k_base": (
        "fb374d419588a4632f3f557e76b4b70aebbca790",
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    ),
    "cl100k_base": (
        "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    ),
}
"""Encoding: file name (SHA-1 of its address) and SHA-256; a test compares gateway/tokens.py."""

WHEEL = "bpe-openai==0.1.4"
WHEEL_SHA256 = "91dde48b7c27a155ec94563ef488d95267bd17e2e8db360aba299ca9819335ba"
PLATFORM = ("--platform", "manylinux2014_x86_64", "--python-version", "3.11", "--abi", "abi3")
"""Only data is read out of the wheel, so every machine takes the same one and one hash suffices."""

MAX_FILE = 16 * 1024 * 1024
"""Largest unpacked file; a bomb stops here. The largest real one has 3.6 MB."""

PATIENCE = 300
"""Seconds for the download of 42 MB."""


class Failure(Exception):
    """Why the files could not be put in place, as one line."""


def right(path: Path, sha256: str) -> bool:
    """Whether the file is there with that hash."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == sha256
    except OSError:
        return False


def fetch(folder: Path) -> Path:
    """The verified wheel, downloaded into the folder."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    limits = [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
        "--retries",
        "1",
        "--quiet",
    ]
    command = [*pip, *limits, *PLATFORM, "--dest", str(folder), "-r", str(wanted)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failure(f"pip download {WHEEL}: {type(error).__name__}") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no wheel"]
        raise Failure(f"pip download {WHEEL}: {lines[-1].strip()}")
    return wheels[0]


def unpack(wheel: Path, encoding: str) -> bytes:
    """The vocabulary of that encoding, with the right hash."""
    member = f"bpe_openai/data/{encoding}.tiktoken.gz"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed:
            data = gzip.GzipFile(fileobj=packed).read(MAX_FILE + 1)
    except (OSError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise Failure(f"{member} cannot be read: {error}") from error
    seen = hashlib.sha256(data).hexdigest()
    if seen != FILES[encoding][1]:
        raise Failure(f"{member} has SHA-256 {seen}, wanted {FILES[encoding][1]}")
    return data


def place(data: bytes, path: Path) -> None:
    """The file is there whole or not at all, whoever else writes it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def put(folder: Path, wheel: Path | None = None) -> list[str]:
    """The encodings newly put in place; those that are already right are left alone.

    Raises:
        Failure: They could not be had, or the folder could not be written.
    """
    missing = [name for name, (file, sha) in FILES.items() if not right(folder / file, sha)]
    if not missing:
        return []
    with tempfile.TemporaryDirectory(prefix="tidegate-vocabulary-") as scratch:
        source = wheel or fetch(Path(scratch))
        for encoding in missing:
            try:
                place(unpack(source, encoding), folder / FILES[encoding][0])
            except OSError as error:
                raise Failure(f"{folder} cannot be written: {error.strerror}") from error
    return missing


def main() -> None:
    """Put the files in place or say in one line why not; the exit status is 0 unless --strict."""
    parser = argparse.ArgumentParser(description="Put the tokenizer's vocabulary in place.")
    parser.add_argument("--wheel", type=Path, help=f"a {WHEEL} wheel that is already here")
    parser.add_argument("--strict", action="store_true", help="exit 1 when the files are not there")
    options = parser.parse_args()
    folder = vocabulary_dir(dict(os.environ))
    try:
        done = put(folder, options.wheel)
    except (Failure, OSError) as error:
        print(
            f"no tokenizer vocabulary, tokens will be estimated: {error}; "
            f"to repair: {sys.executable} {Path(__file__)}",
            file=sys.stderr,
        )
        sys.exit(1 if options.strict else 0)
    if done:
        print(f"tokenizer vocabulary {', '.join(done)} is in {folder}", file=sys.stderr)


if __name__ == "__main__":
    main()
