"""What the tests of the program share: commands that end as expected, a corpus, and a run on it."""

import asyncio
import contextlib
import inspect
import io
import json
import signal

import pytest

from support import CONVOLUTIONAL, arguments, random_model, run, saved, write_audio


def pytest_pyfunc_call(pyfuncitem):
    """Runs a test that is a coroutine."""
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        names = inspect.signature(pyfuncitem.obj).parameters
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
        return True


@pytest.fixture
def signals():
    """Ctrl-C and SIGTERM are heard as usual, also where a script has started the tests in its background."""
    before = {x: signal.signal(x, handler) for x, handler in (
        (signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL),
    )}  # fmt: skip
    yield
    for x, handler in before.items():
        signal.signal(x, handler)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder in LibriSpeech's layout: 10 utterances of 0.3 to 0.75 s. Manifests of all and of the last two."""
    folder, texts = tmp_path_factory.mktemp("corpus"), [f"{'ABC'[i % 3]}{'' if i < 5 else ' AB'}" for i in range(10)]
    for i in range(10):
        write_audio(folder / f"7/{i % 2}/7-{i % 2}-{i:04}.flac", 0.3 + 0.05 * i, seed=i)
        with (folder / f"7/{i % 2}/7-{i % 2}.trans.txt").open("a") as file:
            file.write(f"7-{i % 2}-{i:04} {texts[i]}\n")
    lines = [json.dumps({"audio": f"7/{i % 2}/7-{i % 2}-{i:04}.flac", "text": text}) for i, text in enumerate(texts)]
    (folder / "all.jsonl").write_text("\n".join(lines))
    (folder / "held-out.jsonl").write_text("\n".join(lines[-2:]))
    return folder


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory):
    """(folder of a run of 6 steps, what it printed). No test changes it, nor files of the corpus."""
    workdir, out = tmp_path_factory.mktemp("run"), io.StringIO()
    with contextlib.redirect_stdout(out):
        run(arguments(corpus, workdir))
    return workdir, out.getvalue()


@pytest.fixture(scope="session")
def talkative(tmp_path_factory):
    """The folder of a model with random weights that writes many words."""
    return saved(random_model(**CONVOLUTIONAL), tmp_path_factory.mktemp("talkative"))


@pytest.fixture(scope="session")
def served(talkative):
    """The server of the command line, with three slots."""
    pytest.importorskip("aiohttp")
    from jax_rnnt_speech.serving import server

    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "run", kept.append)
        limits = "--connections", 3, "--max-bytes", 40_000, "--max-seconds", 3, "--endpoint", 0.5
        run(["serve", "--model", talkative, "--name", "tiny", "--language", "en", *limits])
    return kept[0]
