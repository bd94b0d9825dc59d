"""Samples of audio files. FFmpeg decodes them, through PyAV: the data count, and not what a header says of them.

A file may hold several streams of audio one after the other, at several rates. A stretch is a part of it with one rate
and one number of channels. Times are those of the decoded samples.
"""

import contextlib
import io
import itertools
import math
import mmap
import os
import re
import stat
import struct
from typing import NamedTuple

import av
import numpy as np

from jax_rnnt_speech.config import UserError
from jax_rnnt_speech.features import scaled
from jax_rnnt_speech.utterances import shown

RATES = range(1000, 400_000)  # samples a second that a file may have
PLANES = 8  # PyAV reads memory beyond the channels of a frame with more, and may end the process
PIECE = 16_384  # samples that are resampled at once, or more
SLACK = 0.1  # seconds that a segment may end after its file, as manifests round them
# Demuxers that read one file. Playlists, which name other files, are not among them.
FORMATS = "wav,w64,aiff,flac,mp3,ogg,mov,matroska,aac,amr,caf,au,asf,avi,mpegts,tta,wv,ape,flv,mpeg,ac3,eac3,voc"
# Seconds by which the data may fall short of the header, in formats whose header does not estimate.
EXACT = {"flac": 0, "aiff": 0, "w64": 0, "mov,mp4,m4a,3gp,3g2,mj2": 0.1, "matroska,webm": 0.1}
# Tags that are no UTF-8 do no harm; PyAV 19 has no option of it.
TAGS = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
# Begins of files that FFmpeg reads once, where several are joined.
JOINED = rb"RIFF.{4}WAVE[ -~]{4}", rb"fLaC[\0\x80]\0\0\x22", rb"FORM.{4}AIF[FC]", rb"\0\0\0.ftyp[ -~]{4}"
CUT, DAMAGED, FOREIGN = "audio that is cut off", "damaged audio", "no audio that FFmpeg knows"


class AudioError(UserError):
    """A file of which nothing can be used. `reason` says why, without its name."""

    def __init__(self, path, reason):
        super().__init__(f"{shown(path)}: {reason}")
        self.reason = reason


class Stretch(NamedTuple):
    rate: int
    channels: int
    samples: int


class Part:
    """Bytes of a file, as a file."""

    def __init__(self, file, begin, end):
        self.file, self.begin, self.end, self.name = file, begin, end, os.path.basename(file.name)
        file.seek(begin)

    def read(self, size):
        return self.file.read(max(0, min(size, self.end - self.file.tell())))

    def seek(self, offset, whence=os.SEEK_SET):
        place = (self.begin, self.file.tell(), self.end)[whence] + offset
        self.file.seek(max(self.begin, min(place, self.end)))  # damaged files lead anywhere
        return place - self.begin if place >= self.begin else -1

    def tell(self):
        return self.file.tell() - self.begin


class Memory(io.BytesIO):
    """The bytes of a file that is on no disk: may be read in the place of a path."""

    def __init__(self, data, name):
        super().__init__(data)
        self.name = name

    def __str__(self):
        return self.name


def opened(path):
    """The file, which must be one that has something in it."""
    if isinstance(path, Memory):
        if not path.getbuffer().nbytes:
            raise AudioError(path, "an empty file")
        return path
    try:
        kind = os.stat(path).st_mode
        if stat.S_ISDIR(kind):
            raise AudioError(path, "a folder, not a file")
        if not stat.S_ISREG(kind):
            raise AudioError(path, "a device or pipe, not a file")
        if not os.path.getsize(path):
            raise AudioError(path, "an empty file")
        return open(path, "rb")
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a name with \0 or half of a surrogate pair too
        raise AudioError(path, "no such file") from None
    except OSError as error:
        raise AudioError(path, f"a file that cannot be opened ({error.strerror})") from None


def parts(path, file):
    """(begin, end, options of FFmpeg) of each file in the file."""
    whole = isinstance(file, Memory)
    with file.getbuffer() if whole else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        begins = [0]
        for pattern in JOINED:
            if re.match(pattern, data[:16], re.DOTALL):
                begins = [x.start() for x in re.finditer(pattern, data, re.DOTALL)]
        for begin, end in itertools.pairwise([*begins, len(data)]):
            riff = data[begin : begin + 4] == b"RIFF"
            yield begin, end, {"ignore_length": "1"} if riff and not header_holds(path, data, begin, end) else {}


def header_holds(path, data, begin, end):
    """Whether the samples of a WAV end where its header says so; otherwise, they last to the end of the file."""
    place = begin + 12
    while place + 8 <= end:
        name, size = struct.unpack("<4sI", data[place : place + 8])
        place += 8 + size
        if name == b"data":
            if size == 0 or size >= 0x7FFFF000:  # what programs write that do not know it yet
                return False
            if place > end:
                raise AudioError(path, CUT)
            place += size % 2
            another = re.fullmatch(rb"[ -~]{4}.{4}", data[place : place + 8], re.DOTALL)
            behind = struct.unpack("<I", data[place + 4 : place + 8])[0] if another else 0
            return end - place < 4096 or (bool(another) and place + 8 + behind <= end + 1)
        place += size % 2
    return True


def blocks(path):
    """(rate, samples [channels, n]) of a file, one block after the other."""
    with contextlib.nullcontext(path) if isinstance(path, Memory) else opened(path) as file:
        for begin, end, options in parts(path, file):
            for rate, samples in decoded(path, Part(file, begin, end), options):
                if rate not in RATES:
                    raise AudioError(path, f"a sample rate of {rate} Hz")
                try:
                    yield rate, scaled(samples)
                except ValueError as error:
                    raise AudioError(path, str(error)) from None


def decoded(path, part, options):
    """The blocks of one part, as they are stored. Some bad packets do no harm, as in a broken MP3."""
    seconds, packets, good, bad, announced = 0.0, 0, 0, 0, packets_announced(part)
    inside = 0  # bad packets before good ones: not those at the end of what is cut off
    try:
        with av.open(part, options=options | {"format_whitelist": FORMATS}, **TAGS) as container:
            if not container.streams.audio:
                raise AudioError(path, "a file without a track of audio")
            stream, kind = container.streams.audio[0], container.format.name
            if stream.codec_context is None:
                raise AudioError(path, "audio of an unknown codec")
            duration = stream.duration and stream.duration * stream.time_base
            promised = float(duration or (container.duration or 0) / av.time_base) if kind in EXACT else 0
            for packet in packets_of(container, stream):
                packets += packet.size > 0
                try:
                    frames = packet.decode()
                except av.error.FFmpegError:
                    bad += 1
                    continue
                good, inside = good + bool(frames), bad if frames else inside
                for frame in frames:
                    if frame.format.is_planar and frame.layout.nb_channels > PLANES:
                        raise AudioError(path, f"audio of more than {PLANES} channels")
                    seconds += frame.samples / (frame.rate or 1)
                    try:
                        samples = samples_of(frame)
                    except ValueError:  # of 64 bits, for example
                        raise AudioError(path, f"samples of an unknown form, {frame.format.name}") from None
                    yield frame.rate, samples
    except (av.error.EOFError, av.error.FFmpegError) as error:
        known = kind_of(part)
        ended = isinstance(error, av.error.EOFError) or known == "mov"
        raise AudioError(path, (CUT if ended else DAMAGED) if known else FOREIGN) from None
    if not good and kind_of(part) not in ("wav", "flac", "aiff", "ogg"):
        raise AudioError(path, FOREIGN)
    if promised > seconds + EXACT.get(kind, 0) + 1e-6 or packets < announced or page_is_cut(part):
        raise AudioError(path, DAMAGED if inside else CUT)
    if bad > 2 + good // 50:
        raise AudioError(path, DAMAGED if good else FOREIGN)


def packets_of(container, stream):
    """Those of a stream, until the data end or make no sense."""
    try:
        yield from container.demux(stream)
    except av.error.InvalidDataError:
        return


def samples_of(frame):
    x = frame.to_ndarray()
    return x if frame.format.is_planar else x.reshape(-1, frame.layout.nb_channels).T


def head(part, size=4096):
    part.seek(0)
    data = part.read(size)
    part.seek(0)
    return data


def kind_of(part):
    """The format whose first bytes a file has, or ''."""
    marks = {"ogg": b"OggS", "mov": b"....ftyp", "flac": b"fLaC", "mp3": b"ID3|\xff[\xe2-\xfb]", "wav": b"RIFF....WAVE"}
    marks |= {"webm": b"\x1aE\xdf\xa3", "aiff": b"FORM....AIF"}
    start = head(part, 16)
    return next((name for name, mark in marks.items() if re.match(mark, start, re.DOTALL)), "")


def packets_announced(part):
    """Packets that the first frame of an MP3 says there are, if it does; joined files have more."""
    if kind_of(part) not in ("mp3", ""):
        return 0
    found = re.search(rb"(?:Xing|Info)\0\0\0[\1\3\5\7\11\13\15\17](.{4})", head(part), re.DOTALL)
    return struct.unpack(">I", found[1])[0] if found else 0


def page_is_cut(part):
    """Whether an Ogg ends within a page."""
    if kind_of(part) != "ogg":
        return False
    size = part.end - part.begin
    part.seek(max(0, size - 2**17))
    data = part.read(2**17)
    page = data[data.rfind(b"OggS") :]
    lengths = page[27 : 27 + page[26]] if len(page) > 26 else b""
    return len(page) < 27 or len(page) < 27 + page[26] + sum(lengths)


def stretches(path):
    """What a file holds, found by decoding all of it."""
    shapes = ((rate, *samples.shape) for rate, samples in blocks(path))
    groups = itertools.groupby(shapes, lambda x: x[:2])
    return [Stretch(*key, sum(x[2] for x in group)) for key, group in groups]


def seconds(file):
    """How long the stretches of a file last."""
    return sum(x.samples / x.rate for x in file)


def checked(path, file, start, end, channel):
    """Raises where a file, by its stretches, lacks a segment or a channel."""
    length = seconds(file)
    if start >= length or (end is not None and end > length + SLACK):
        raise AudioError(path, "a segment beyond the end of its file")
    missing = [x for x in channels_of(channel) if any(x >= y.channels for y in file)]
    if missing:
        raise AudioError(path, f"no channel {missing[0]}: the first is 0, and the file has {file[0].channels}")


def channels_of(channel):
    return [] if channel is None else [channel] if isinstance(channel, int) else list(channel)


def bounds(begin, rate, start, end):
    """First sample of a segment, and the one after its last, counted from the begin of a stretch."""
    return max(0, round((start - begin) * rate)), math.inf if end is None else max(0, round((end - begin) * rate))


def resampled_size(samples, found, rate):
    common = math.gcd(found, rate)
    return -(-samples * (rate // common) // (found // common))


def size(file, rate, start=0.0, end=None):
    """Samples that `read` finds at a rate in a segment of a file, by its stretches."""
    total, begin = 0, 0.0
    for stretch in file:
        first, last = bounds(begin, stretch.rate, start, end)
        total += resampled_size(max(0, min(last, stretch.samples) - first), stretch.rate, rate)
        begin += stretch.samples / stretch.rate
    return total


def read(path, rate, start=0.0, end=None, channel=None):
    """Samples float32 [S] in [-1, 1] at a rate, as `pieces` has them."""
    return np.concatenate([np.zeros(0, np.float32), *pieces(path, rate, start, end, channel)])


def pieces(path, rate, start=0.0, end=None, channel=None):
    """Samples float32 [n] in [-1, 1] at a rate, one piece after the other, as the file is decoded.

    A segment from `start` to `end` in seconds, by default all; one channel, or the mean of several, by default of all.
    What is wrong with the file is an error where it is met, which may be its end.
    """
    file, begin = [], 0.0
    for (found, channels), group in itertools.groupby(blocks(path), lambda x: (x[0], len(x[1]))):
        (first, last), read = bounds(begin, found, start, end), []
        wanted = [i for i in channels_of(channel) if i < channels] or slice(None)
        yield from resampled_pieces(segment((x[wanted] for _, x in group), first, last, found, read), found, rate)
        samples = sum(read)
        file.append(Stretch(found, channels, samples))
        begin += samples / found
        if samples > last + found:
            break
    if (start, end, channel) != (0.0, None, None):
        checked(path, file, start, end, channel)


def segment(some, first, last, slack, read):
    """The samples from `first` to `last` of blocks [channels, n], in the mean of the channels; sizes go to `read`."""
    place = 0
    for x in some:
        piece = x[:, max(0, first - place) : max(0, min(last - place, x.shape[1]))]
        place += x.shape[1]
        read.append(x.shape[1])
        if piece.size:
            yield piece.mean(0)
        if place > last + slack:  # what comes then cannot matter
            return


def resampled_pieces(some, found, rate):
    """Pieces whose samples are, bit for bit, those that `resampled` makes of all pieces."""
    if found == rate:
        yield from some
        return
    up, down = (x // math.gcd(found, rate) for x in (rate, found))
    # SciPy's filter sees 10 max(up, down) samples at the rate of both; begins are multiples of `down`.
    margin = -(-(10 * max(up, down) // up + 2) // down) * down
    held, size, before = [], 0, 0  # samples, of which `before` have been resampled and are seen again
    for piece in itertools.chain(some, [None]):
        if piece is not None:
            held.append(piece)
            size += len(piece)
            if size - before < max(PIECE, 8 * margin) + margin:
                continue
        if not size:
            return
        x = np.concatenate(held)
        done = size if piece is None else (size - margin) // down * down
        yield resampled(x, found, rate)[before // down * up : -(-done * up // down)]
        before = min(margin, done)
        held, size = [x[done - before :]], size - done + before


def resampled(samples, found, rate):
    if found == rate:
        return samples
    from scipy.signal import resample_poly  # a second: not at every start

    common = math.gcd(found, rate)
    return resample_poly(samples, rate // common, found // common).astype(np.float32)


def write(path, samples, rate):
    """Writes samples in [-1, 1], [S] or [channels, S], with 16 bits, as FLAC or WAV by the name of the file."""
    samples = np.atleast_2d(np.clip(np.round(np.float64(samples) * 2**15), -(2**15), 2**15 - 1).astype(np.int16))
    with av.open(str(path), "w") as container:
        layout = {1: "mono", 2: "stereo"}.get(len(samples), f"{len(samples)}C")
        stream = container.add_stream(container.default_audio_codec, rate=rate, format="s16", layout=layout)
        container.start_encoding()
        for start in range(0, samples.shape[1], 4096):
            part = np.ascontiguousarray(samples[:, start : start + 4096].T).reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(part, "s16", layout)
            frame.sample_rate, frame.pts = rate, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
