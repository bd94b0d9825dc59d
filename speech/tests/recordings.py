"""Audio files of every format, archives, and cuts of Lhotse, for tests of what is read.

WAV is written by `wave`, a tar by `tarfile`, Parquet by pyarrow.
"""

import io
import tarfile
import wave

import av
import numpy as np
import pytest

RATE = 16000
TIMES = np.arange(3 * RATE) / RATE
SWEEP = 0.3 * np.sin(2 * np.pi * (300 + 200 * TIMES) * TIMES)  # tells places apart
FORMATS = {
    "wav": "pcm_s16le", "flac": "flac", "mp3": "libmp3lame", "opus": "libopus", "m4a": "aac", "mp4": "aac",
    "webm": "libopus", "aiff": "pcm_s16be", "aac": "aac",
}  # fmt: skip


def encode(path, x=SWEEP, rate=RATE, codec=None, container=None, **options):
    """Writes samples [S] or [2, S] in the format of the name."""
    codec, layout = codec or FORMATS[path.suffix[1:]], "mono" if np.ndim(x) == 1 else "stereo"
    container = container or {".opus": "ogg", ".aac": "adts", ".m4a": "ipod"}.get(path.suffix)
    with av.open(str(path), "w", format=container, options=options) as file:
        stream = file.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(np.atleast_2d(np.float32(x))), "fltp", layout)
        frame.sample_rate = rate
        size = stream.codec_context.frame_size or 1024
        resampler = av.AudioResampler(stream.format, stream.layout, rate, size)
        for part in [*resampler.resample(frame), *resampler.resample(None), None]:
            file.mux(stream.encode(part))


def cut(sources, supervisions, **more):
    recording = {"id": "r", "sources": sources, "sampling_rate": RATE, "num_samples": 48000, "duration": 3.0}
    common = {"id": "r-0", "start": 0.5, "duration": 2.0, "channel": 0, "type": "MonoCut"}
    return common | {"recording": recording, "supervisions": supervisions} | more


def wav(samples, rate=8000):
    """The bytes of a WAV of sixteen bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", ""))
        out.writeframes(np.round(samples).astype("<i2").tobytes())
    return file.getvalue()


def tar(members):
    """The bytes of a tar of (name, bytes), or of (name, the name of what it links to, the kind of the link)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as out:
        for name, data, *kind in members:
            info = tarfile.TarInfo(name)
            if kind:
                info.type, info.linkname = kind[0], data
                out.addfile(info)
            else:
                info.size = len(data)
                out.addfile(info, io.BytesIO(data))
    return file.getvalue()


def pack(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar(members))


def parquet(path, rows, **options):
    """A table of dictionaries; without pyarrow, the test is skipped."""
    arrow, files = (pytest.importorskip(x) for x in ("pyarrow", "pyarrow.parquet"))
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_table(arrow.Table.from_pylist(rows), path, **options)


def cut_of(name, text, seconds=0.25, **more):
    """A cut whose audio, in 8 kHz, is in an archive of Lhotse beside it."""
    recording = {"id": name, "sources": [{"type": "shar", "channels": [0], "source": ""}], "duration": seconds,
                 "sampling_rate": 8000}  # fmt: skip
    said = [{"id": f"s-{name}", "start": 0.0, "duration": seconds, "text": str(text)}]
    return {"id": name, "start": 0, "duration": seconds, "channel": 0, "recording": recording, "supervisions": said,
            "type": "MonoCut"} | more  # fmt: skip
