"""What the tests of the program share: commands that end as expected, a corpus, and a run on it."""

import contextlib
import io
import json
import signal

import pytest

from support import arguments, run, write_audio


@pytest.fixture
def signals():
    """Ctrl-C and SIGTERM are heard as usual, also where a script has started the tests in its background."""
    before = {x: signal.signal(x, handler) for x, handler in (
        (signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL),
    )}  # fmt: skip
    yield
    for x, handler in before.items():
        signal.signal(x, handler)


@pytest.fixture
def refused(said):
    """Asserts that a command says one line with this message, and ends with this status.

    Lines before it may say which files are read, and how.
    """

    def check(arguments, message, status=2):
        *before, error = said(arguments, status).err.strip().splitlines()
        assert message in error and all(x.startswith(("reading ", "train ")) for x in before)

    return check


@pytest.fixture
def said(capsys):
    """What a command that ends with this status writes: its output, and its errors."""

    def call(arguments, status=0):
        capsys.readouterr()
        run(arguments, status)
        return capsys.readouterr()

    return call


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
