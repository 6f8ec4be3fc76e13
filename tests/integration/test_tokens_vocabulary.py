"""The real vocabulary: set-up puts it in place, the counter agrees with tiktoken's own encoders."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiktoken
import tiktoken_ext.openai_public as openai_public
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.clock import LoopClock
from gateway.settings import export_vocabulary_dir, from_environment
from gateway.tokens import PINNED, SLICE, Counted, Counter, Missing, Vocabulary, slices

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "deploy" / "vocabulary.py"


def program():
    spec = importlib.util.spec_from_file_location("vocabulary", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAM, *options],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def folder() -> Path:
    """The folder that set-up filled."""
    folder = from_environment().vocabulary_dir
    missing = [p.file for p in PINNED.values() if not (folder / p.file).exists()]
    if missing:
        pytest.skip(f"no vocabulary in {folder}: run deploy/vocabulary.py")
    return folder


@pytest.fixture(scope="module")
def reference(folder) -> dict[str, tiktoken.Encoding]:
    """tiktoken's own encoders, from the same files."""
    export_vocabulary_dir(folder)
    return {name: tiktoken.get_encoding(name) for name in PINNED}


@pytest.fixture(scope="module")
def ours(folder):
    return {name: Vocabulary(folder).open(name) for name in PINNED}


def test_set_up_and_gateway_name_the_same_files_and_hashes():
    assert {
        name: (pinned.file, pinned.sha256) for name, pinned in PINNED.items()
    } == program().FILES


@pytest.mark.parametrize("name", list(PINNED))
def test_names_hashes_and_patterns_are_tiktoken_s_own(name, monkeypatch):
    asked = {}

    def record(address, expected_hash=None):
        asked.update(file=hashlib.sha1(address.encode()).hexdigest(), sha256=expected_hash)
        return {}

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", record)
    made = openai_public.ENCODING_CONSTRUCTORS[name]()
    assert asked == {"file": PINNED[name].file, "sha256": PINNED[name].sha256}
    assert regrouped(made["pat_str"]) == PINNED[name].pattern


def regrouped(pattern: str) -> str:
    """tiktoken's pattern as ours is written: all but the last two alternatives in one group.

    Greedy as good as possessive: what follows each possessive part can begin with nothing that
    part could give back.
    """
    greedy = re.sub(r"(?:(?<=[?+*])|(?<=\d\}))\+", "", pattern)
    head, lookahead, last = greedy.rpartition(r"|\s+(?!\S)|")
    return f"(?:{head}){lookahead}{last}"


def test_set_up_writes_where_the_gateway_reads(tmp_path, folder):
    for environ in (
        {"TIKTOKEN_CACHE_DIR": str(tmp_path / "one"), "TIDEGATE_VOCABULARY_DIR": "/nowhere"},
        {"TIKTOKEN_CACHE_DIR": "", "TIDEGATE_VOCABULARY_DIR": str(tmp_path / "two")},
        {
            "TIKTOKEN_CACHE_DIR": "",
            "TIDEGATE_VOCABULARY_DIR": "",
            "XDG_CACHE_HOME": str(tmp_path / "three"),
        },
    ):
        done = run("--wheel", str(wheel(tmp_path, folder)), "--strict", **environ)
        assert done.returncode == 0, done.stderr
        read = Vocabulary(from_environment(environ).vocabulary_dir)
        assert not isinstance(read.open("cl100k_base"), Missing)


def wheel(tmp_path: Path, folder: Path) -> Path:
    """A wheel as the pinned one holds the files."""
    import gzip
    import zipfile

    path = tmp_path / "bpe_openai-0.1.4-py3-none-any.whl"
    if not path.exists():
        with zipfile.ZipFile(path, "w") as archive:
            for name, pinned in PINNED.items():
                data = gzip.compress((folder / pinned.file).read_bytes(), 1)
                archive.writestr(f"bpe_openai/data/{name}.tiktoken.gz", data)
    return path


def test_set_up_leaves_right_files_alone_and_replaces_wrong_ones(tmp_path, folder):
    environ = {"TIKTOKEN_CACHE_DIR": str(tmp_path / "v")}
    source = str(wheel(tmp_path, folder))
    assert "o200k_base, cl100k_base" in run("--wheel", source, **environ).stderr
    good, bad = (tmp_path / "v" / PINNED[name].file for name in ("o200k_base", "cl100k_base"))
    before = good.stat().st_mtime_ns
    bad.write_bytes(b"half a file")
    done = run("--wheel", source, **environ)
    assert "cl100k_base" in done.stderr
    assert "o200k_base" not in done.stderr
    assert hashlib.sha256(bad.read_bytes()).hexdigest() == PINNED["cl100k_base"].sha256
    assert good.stat().st_mtime_ns == before
    assert run(**environ).stderr == ""
    assert sorted(p.name for p in (tmp_path / "v").iterdir()) == sorted([good.name, bad.name])


@pytest.mark.parametrize(
    "content", [b"", b"no zip", None], ids=["empty", "no zip", "wrong vocabulary"]
)
def test_a_bad_wheel_never_fails_the_set_up_and_never_lands(tmp_path, content):
    import gzip
    import zipfile

    path = tmp_path / "bad.whl"
    if content is None:
        with zipfile.ZipFile(path, "w") as archive:
            for name in PINNED:
                archive.writestr(f"bpe_openai/data/{name}.tiktoken.gz", gzip.compress(b"YQ== 0"))
    else:
        path.write_bytes(content)
    done = run("--wheel", str(path), TIKTOKEN_CACHE_DIR=str(tmp_path / "v"))
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1
    assert "to repair:" in done.stderr
    assert not list((tmp_path / "v").glob("*"))
    assert run("--wheel", str(path), "--strict", TIKTOKEN_CACHE_DIR=str(tmp_path)).returncode == 1


def test_without_an_index_set_up_says_so_in_one_line(tmp_path):
    done = run(TIKTOKEN_CACHE_DIR=str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1
    assert "tokens will be estimated" in done.stderr


@pytest.mark.parametrize("damage", ["absent", "wrong"])
def test_a_damaged_vocabulary_is_named_and_never_touched(tmp_path, damage):
    path = tmp_path / PINNED["o200k_base"].file
    if damage == "wrong":
        path.write_bytes(b"YQ== 0\n")

    async def count():
        counter = Counter(Vocabulary(tmp_path).open, clock=LoopClock())
        (warning,) = await counter.preload(["o200k_base"])
        counted = counter.count(["words " * 9000], encoding="o200k_base", tenant="t")
        counter.close()
        return warning, counted

    warning, counted = asyncio.run(count())
    assert counted == Counted(-(-54000 * 10 // 34), exact=False, because="vocabulary")
    for part in (str(path), PINNED["o200k_base"].sha256, "deploy/vocabulary.py"):
        assert part in warning
    if damage == "wrong":
        assert hashlib.sha256(b"YQ== 0\n").hexdigest() in warning
        assert path.read_bytes() == b"YQ== 0\n"
    else:
        assert not path.exists()


ANY = st.text(st.characters(codec="utf-8"), max_size=300)
MARKUP = st.sampled_from(
    ["<|endoftext|>", "<|im_start|>", " the", "\n\n", "    ", "漢字", "a" * 50]
)


@pytest.mark.parametrize("name", list(PINNED))
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(pieces=st.lists(ANY | MARKUP, max_size=8))
def test_every_text_counts_as_tiktoken_counts_it(name, reference, ours, pieces):
    text = "".join(pieces)
    assert ours[name].encode_ordinary(text) == reference[name].encode(text, disallowed_special=())


BORDERS = (
    " \t\n\r\x0b\x0c\x1c\u00a0\u3000\u2028'sStTrReElLdDmM019\u00b2\u00bd.,/-_(){}aAzZ"
    "\u00e9\u00c9\u00df\u01c5\u02b0\u4e2d\u0301\u0e33\u017f\u212a\U0001f600\u200d\x00\ufeff"
)
"""Characters at which texts are split, or would be by a pattern that is a little wrong."""


@pytest.mark.parametrize("name", list(PINNED))
def test_texts_made_of_borders_alone_are_split_where_tiktoken_splits(name, reference, ours):
    rng = random.Random(7)
    for _ in range(20_000):
        text = "".join(rng.choices(BORDERS, k=rng.randrange(1, 14)))
        assert ours[name].encode_ordinary(text) == reference[name].encode_ordinary(text), text


@pytest.mark.parametrize("name", list(PINNED))
@pytest.mark.parametrize(
    "file", ["gateway/tokens.py", "uv.lock", "pyproject.toml", "gateway/call.py"]
)
def test_a_real_file_counts_the_same_in_slices(name, file, reference, ours):
    text = (ROOT / file).read_text()
    text *= 1 + 4 * SLICE // len(text)
    whole = len(reference[name].encode(text, disallowed_special=()))
    pieces = list(slices(text))
    assert len(pieces) > 3
    assert sum(len(ours[name].encode_ordinary(piece)) for piece in pieces) == whole


@pytest.mark.parametrize("name", list(PINNED))
@pytest.mark.parametrize(
    "unit", ["a", " ", "\n", "  x", "漢", "\u0301", "!", "Aa", "'", "0", "\t \n", "a\u0301", "A漢a"]
)
def test_no_slice_of_any_monotonous_text_makes_tiktoken_panic(name, unit, ours):
    text = (unit * SLICE)[:SLICE]
    assert 0 < len(ours[name].encode_ordinary(text)) <= len(text.encode())


@pytest.mark.parametrize("unit", ["a", " ", "漢"])
def test_a_million_equal_characters_are_counted_exactly_while_the_loop_runs(folder, unit):
    async def run_():
        counter = Counter(Vocabulary(folder).open, clock=LoopClock())
        await counter.preload(["o200k_base"])
        turns = 0

        async def turn():
            nonlocal turns
            while True:
                await asyncio.sleep(0.001)
                turns += 1

        async with asyncio.TaskGroup() as group:
            task = group.create_task(turn())
            counted = await counter.count([unit * 1_000_000], encoding="o200k_base", tenant="t")
            task.cancel()
        counter.close()
        return counted, turns

    counted, turns = asyncio.run(run_())
    assert counted.exact or counted.because == "slow"
    assert turns >= 5


def test_eight_large_prompts_at_once_do_not_stop_a_small_one(folder):
    async def run_():
        counter = Counter(Vocabulary(folder).open, clock=LoopClock())
        await counter.preload(["o200k_base"])
        text = "The quick brown fox. " * 190_000
        big = [
            asyncio.ensure_future(counter.count([text], encoding="o200k_base", tenant=str(n)))
            for n in range(8)
        ]
        await asyncio.sleep(0.05)
        small = counter.count(["hi"], encoding="o200k_base", tenant="t")
        before_the_big = not any(task.done() for task in big)
        await asyncio.gather(*big)
        counter.close()
        return small, before_the_big, [task.result() for task in big]

    small, before_the_big, big = asyncio.run(run_())
    assert small == Counted(1)
    assert before_the_big
    assert all(counted.exact or counted.because == "slow" for counted in big)
