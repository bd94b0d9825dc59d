"""Commands as processes: imports, signals, pipes, one output, several processes, programs that are kept."""

import contextlib
import importlib
import io
import os
import re
import signal
import subprocess
import sys
import time

import jax
import pytest

from jax_rnnt_speech import runs
from jax_rnnt_speech.cli import transcribe
from jax_rnnt_speech.data import rows
from jax_rnnt_speech.system import hosts, outputs, programs
from support import asr, write_audio

# What takes most of a second to import, or tens of MiB, and is not for every command.
SLOW = "aiohttp", "av", "grain", "matplotlib", "orbax", "scipy", "sklearn", "sounddevice", "tensorboardX", "tokenizers"


def test_imports():
    """A step on a model of a file needs none of them; the command line starts without what one command needs."""
    code = f"""
import sys, jax_rnnt_speech.pretrained, jax_rnnt_speech.training.steps
print(*sorted(sys.modules.keys() & {SLOW}))
import jax_rnnt_speech.cli
print(*sorted(sys.modules.keys() & {SLOW}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["", "av"]


def test_programs_are_kept_in_new_folders(tmp_path, monkeypatch):
    """Of a run, whose folder is not there yet; else the user's. What JAX has already stays; what is old and much goes.

    Within them, a processor with other features has another folder, and one that runs faster the same.
    """
    names = []
    monkeypatch.setattr(programs, "PROCESSOR", tmp_path / "cpuinfo")
    for features, speed in (("avx2", 1), ("avx2", 2), ("avx2 avx512f", 1)):
        programs.PROCESSOR.write_text(f"processor : 0\nflags : fma {features}\ncpu MHz : {speed}\n" * 2)
        names.append(programs.machine())
    assert names[0] == names[1] != names[2]
    monkeypatch.setattr(programs, "MOST", 250)
    for age, size in enumerate((100, 100, 60, 100)):
        place = tmp_path / "runs/mine/programs" / names[2] / f"{age}-cache"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(bytes(size))
        os.utime(place, (1000 - age, 1000 - age))
    mine = tmp_path / "home/.cache/jax_rnnt_speech/programs"
    monkeypatch.setattr(programs.Path, "home", lambda: tmp_path / "home")
    before = jax.config.jax_compilation_cache_dir
    try:
        for folder, expected in (
            (tmp_path / "runs/mine/programs", None),
            (tmp_path / "full/run/programs", mine),
            (None, mine),
        ):
            jax.config.update("jax_compilation_cache_dir", None)
            monkeypatch.setattr(programs.os, "access", lambda path, mode: path.exists() and path.name != "full")
            (tmp_path / "full").mkdir(exist_ok=True)
            programs.keep(folder)
            assert jax.config.jax_compilation_cache_dir == str((expected or folder) / names[2])
        programs.keep(tmp_path / "runs/other/programs")
        assert jax.config.jax_compilation_cache_dir == str(mine / names[2])
        assert sorted(x.name for x in place.parent.iterdir()) == ["0-cache", "1-cache"]
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_lines_of_several_processes():
    stream = io.StringIO()
    numbered = hosts.Numbered(stream, "process 1: ")
    for text in ("a\nb", "c\n", "", "\n", "d"):
        print(text, end="", file=numbered, flush=True)
    assert stream.getvalue() == "process 1: a\nprocess 1: bc\nprocess 1: \nprocess 1: d" and not numbered.isatty()


def test_the_last_word_of_a_process():
    """What C++ says passes; where another process has died, advice comes last, whatever signals a scheduler sends."""
    lines, fatal = (
        "W1128 a.cc:1] slow\n",
        "F1128 client.h:9] Terminating: JAX distributed service detected fatal errors\n",
    )
    thrown = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what(): [enforce fail]\n"
    other = "terminate called after throwing an instance of 'std::bad_alloc'\n"
    for text, wanted in (("", ""), (fatal + "@ 0x1\n", "advice\n"), (thrown, "advice\n"), (other, other)):
        command = [sys.executable, "-S", "-c", hosts.RELAY, "advice"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            print(lines, end="", file=child.stdin, flush=True)
            first = child.stderr.readline()  # at once
            child.send_signal(signal.SIGTERM)
            assert first + child.communicate(text)[1] == lines + wanted


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_request_to_end_is_heard_as_ctrl_c(number, status, monkeypatch, signals, capsys):
    """Slurm and services send it: what a command has written is whole then, too; also as Python collects garbage.

    The status is 128 and the number of the signal, as shells have it, and no thread that computes has a say.
    """

    class Garbage:
        def __del__(self):
            signal.raise_signal(number)

    def command(args):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        Garbage()
        time.sleep(10)

    class Ended(Exception):
        pass

    def leave(found):
        raise Ended(found)

    parser = asr.cli.Parser(prog="rnnt-speech")
    parser.set_defaults(run=command)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(asr.cli, "main", lambda: parser.perform([]))
    monkeypatch.setattr(asr.system, "leave", leave)
    with pytest.raises(Ended) as ended:
        importlib.import_module("jax_rnnt_speech.__main__").main()
    assert ended.value.args == (status,) and capsys.readouterr().err == "rnnt-speech: interrupted\n"


def test_signals_that_nobody_should_hear(signals):
    """Ctrl-C where a shell has it ignored, and signals at all processes in workers, which end with the first one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with runs.interruptions() as heard:
        signal.raise_signal(signal.SIGINT)
    assert not heard and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    program = """
import multiprocessing, os, time
from jax_rnnt_speech.data import workers

def worker():
    workers.alone()
    for x in (2, 15):
        os.kill(os.getpid(), x)
    os.kill(os.getppid(), 9)
    time.sleep(60)

multiprocessing.get_context("fork").Process(target=worker).start()
time.sleep(60)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30)  # both have its pipes
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def lost():
    raise BrokenPipeError(32, "Broken pipe", "b.wav")  # another one than the standard output


@pytest.mark.parametrize(
    ("write", "reader", "status"),
    [
        (lambda: print("a"), False, 141),  # the end finds it out
        (lambda: print("a", flush=True), False, 141),
        (lambda: print("a" * 2**17), False, 141),
        (lambda: outputs.Screen().write("a\n"), False, 141),  # of transcribe and align
        (lambda: print("a"), True, 0),
        (lambda: lost(), True, 2),
        (["check"], False, 141),
        (["check", "--json"], False, 141),
    ],
)
def test_a_pipe_that_nobody_reads(write, reader, status, corpus, capsys):
    """`COMMAND | head`: the status is that of SIGPIPE, and nobody hears of a broken pipe, unless it is another one."""
    parser = asr.cli.Parser(prog="rnnt-speech")
    parser.set_defaults(run=lambda _: write() or 0)
    read, pipe = os.pipe()
    if not reader:
        os.close(read)
    with os.fdopen(pipe, "w") as stdout, contextlib.redirect_stdout(stdout), pytest.raises(SystemExit) as ended:
        asr.cli.main([*write, str(corpus / "all.jsonl")]) if isinstance(write, list) else parser.perform([])
    assert ended.value.code == status and ("ipe" in capsys.readouterr().err) == (status == 2)
    if reader:
        os.close(read)


def test_two_commands_with_one_output(tmp_path, refused):
    """The second one is refused before it reads anything, until the first one has ended, however it ends."""
    ways = {
        "o.txt": ["transcribe", "a.wav", "--output", "o.txt"],
        "o.srt": ["transcribe", "a.wav", "--format", "srt", "--output", "o.srt"],
        "o.tsv": ["test", "a", "--output", "o.tsv"],
        "o.ctm": ["align", "a", "--output", "o.ctm"],
        "o.arpa": ["ngram", "o.arpa", "a"],
        "model": ["convert", "model", "--model", "none"],
        "o.zip": ["export", "o.zip"],
    }
    program = "import sys, pathlib as p; from jax_rnnt_speech.system import outputs as o"
    program += "; [o.claim(p.Path(x), '') for x in sys.argv[1:]]; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, *(f"{tmp_path}/../{tmp_path.name}/{name}" for name in ways)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as other:
        assert other.stdout.readline() == b"\n"
        for name, way in ways.items():
            arguments = [tmp_path / x if x in (name, "none") else x for x in way]
            refused(arguments, f"{tmp_path / name}: another command is writing there")
        other.kill()
    outputs.claim(tmp_path / "o.txt", "")


TERMINALS = "standard error", "standard output"


@pytest.mark.parametrize(
    ("terminals", "output", "bar"),
    [
        ((), True, False), ((), False, False), (TERMINALS[:1], True, True), (TERMINALS[:1], False, True),
        (TERMINALS, True, True), (TERMINALS, False, False), (TERMINALS[1:], False, False),
    ],
)  # fmt: skip
def test_bars(terminals, output, bar, tmp_path, monkeypatch):
    """Those of `transcribe` are for terminals, unless texts go to the same one; pipes and files have none."""
    screens = {name: io.StringIO() for name in TERMINALS}
    for name, screen in screens.items():
        screen.isatty = lambda name=name: name in terminals
    write_audio(tmp_path / "a.wav", 1.0)
    to = transcribe.Writing(output=tmp_path / "o" if output else None)
    monkeypatch.setattr(sys, "stderr", screens["standard error"])
    monkeypatch.setattr(sys, "stdout", screens["standard output"])
    with transcribe.bar_of([rows.Entry("a", tmp_path / "a.wav", "")], to):
        pass
    wanted = r"recordings: +0%\|.*\| 0 of 1 s heard" if bar else "^$"
    assert re.search(wanted, screens["standard error"].getvalue()) and not screens["standard output"].getvalue()


@pytest.mark.slow
def test_memory_that_workers_share():
    """Python, which counts what is left in it at its end, says nothing after runs that take all batches, or some."""
    program = "import numpy as np; from jax_rnnt_speech.data import workers as w"
    program += "; f = lambda i: {'x': np.ones(i)}; print(*next(w.items(f, 30, 1, 1)))"
    program += "; print(*[len(y['x']) for y in w.items(f, 9, 1, 1)])"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert ended.stdout == "x\n0 1 2 3 4 5 6 7 8\n" and "leaked" not in ended.stderr
