"""Samples of audio files, on the file's own clock. FFmpeg decodes them, through PyAV.

A file may hold several streams of audio one after the other. A stretch is a part with one rate and one layout of
channels. Of several tracks at once, FFmpeg's choice is read: the one that is marked as the default. Times count from
the start of the file: silence fills the time where the audio begins late, pauses or is damaged.
"""

import contextlib
import errno
import functools
import io
import itertools
import math
import os
import re
import stat
from typing import NamedTuple

import av
import numpy as np

from jax_rnnt_speech.data import headers, names, rows
from jax_rnnt_speech.data.features import scaled
from jax_rnnt_speech.data.names import composed
from jax_rnnt_speech.data.utterances import shown
from jax_rnnt_speech.system import UserError, say_once

RATES = range(1000, 400_000)  # samples a second that a file may have
PLANES = 8  # above so many channels PyAV reads memory beyond those of a frame, and may end the process
PIECE = 16_384  # samples that are resampled at once, or more
SLACK = 0.1  # seconds that a segment may end after its file, as manifests round them
ALIKE = 0.05, 0.01  # seconds, and share, by which a file that was cut out of a longer one may differ from its times
JITTER = 0.1  # seconds by which clock and samples may differ before silence is put in: that of FFmpeg's aresample
RESET = 1  # seconds; a clock that goes back by more begins anew, and the audio goes on. No sample is ever dropped.
SILENCE = 3600  # seconds of silence that are put into a file at most: a damaged clock may say anything
LIVE = 60  # seconds; MP4 and Matroska count from 0, but live recordings from anywhere: theirs begin later than this
OPPOSED = 0.1  # share of the power that channels would have together if they were independent: less is cancelled
# Demuxers that read one file. Playlists, which name other files, are not among them.
FORMATS = "wav,w64,aiff,flac,mp3,ogg,mov,matroska,aac,amr,caf,au,asf,avi,mpegts,tta,wv,ape,flv,mpeg,ac3,eac3,voc"
FORMATS += ",nistsphere"
MOV, MATROSKA = "mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"
# Seconds by which the audio may fall short of what FFmpeg knows from the header. Elsewhere, FFmpeg estimates durations.
STATED = {"flac": 0, MOV: 0.25, "tta": 0.25, "wv": 0.25, "ape": 0.25, "nistsphere": 0}
# Formats whose last packet may be a part of one: their size has been checked, or they may end anywhere.
ENDLESS = "wav", "w64", "aiff", "caf", "au", "mpegts", "mpeg"
# Tags that are not UTF-8 do no harm; PyAV 19 has no such option.
TAGS = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
CUT, DAMAGED, FOREIGN = "audio that is cut off", "damaged audio", "no audio that FFmpeg knows"
UNREAD = "audio of a form that FFmpeg does not read"
CANCELLED = "opposed channels, of which the louder is read"
BEYOND = "a segment beyond the end of its file"
OVERRUN = "a segment that ends behind its file, at whose end it is cut"
ORIGINAL = "its times are those of the recording from which it was cut; all of it is read"


class AudioError(UserError):
    """The error of an unusable file. `reason` is the cause, without its name; if `passing`, it may be usable later."""

    def __init__(self, path, reason, passing=False):
        super().__init__(f"{shown(path)}: {reason}")
        self.reason, self.passing = reason, passing


class Beyond(AudioError):
    """The error of a segment that its file lacks, or lacks the end of; `length` has the seconds of the file."""

    def __init__(self, path, length):
        super().__init__(path, BEYOND)
        self.length = length


class Stretch(NamedTuple):
    rate: int
    channels: int
    samples: int
    opposed: bool = False  # whether somewhere its channels cancel each other


class Memory(io.BytesIO):
    """The bytes of a file that is on no disk, which may be read in place of a path."""

    def __init__(self, data, name):
        super().__init__(data)
        self.name = name

    def __str__(self):
        return self.name


def opened(path):
    """Opens the file, which must not be empty."""
    path = path.loaded() if hasattr(path, "loaded") else path
    if isinstance(path, Memory):
        if not path.getbuffer().nbytes:
            raise AudioError(path, "an empty file")
        return contextlib.nullcontext(path)
    try:
        path = names.actual(path)
        kind = os.stat(path).st_mode
        if stat.S_ISDIR(kind):
            raise AudioError(path, "a folder, not a file")
        if not stat.S_ISREG(kind):
            raise AudioError(path, "a device or pipe, not a file")
        if not os.path.getsize(path):
            raise AudioError(path, "an empty file")
        return open(path, "rb")
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a name with \0 or half of a surrogate pair too
        raise AudioError(path, absent(path)) from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise AudioError(path, "no such file") from None
        raise AudioError(path, f"a file that cannot be opened ({error.strerror})", passing=True) from None


def absent(path):
    """Returns why there is no file of a name, as far as a second look at its folder shows."""
    if os.path.islink(path):
        return "a link to a file that is not there"
    name = composed(os.path.basename(path)).lower()
    alike = names.listing(os.path.dirname(path) or ".")[1].get(os.path.splitext(name)[0], ())
    if name in [x.lower() for x in alike]:
        return "no such file, but one with other capital letters"
    suffix = next((x for x in map(os.path.splitext, alike) if x[1].lower() in names.SUFFIXES), None)
    return "no such file" + (f", but {suffix[1]}" if suffix else "")


def unreadable(path, error):
    """Returns the error for a cause that may be gone later, of the storage or of too little memory."""
    return AudioError(path, f"a file that cannot be read ({error.strerror})", passing=True)


def blocks(path):
    """Yields (rate, weights of the channels, samples [channels, n]) of a file, one block after the other."""
    with opened(path) as file:
        try:
            places = [*headers.begins(file), file.seek(0, os.SEEK_END)]
            for begin, end in itertools.pairwise(places):
                part = headers.Part(file, begin, end)
                if not headers.correct(part):
                    raise AudioError(path, CUT)
                yield from placed(path, decoded(path, part))
        except OSError as error:
            raise unreadable(path, error) from None


def placed(path, frames):
    """Yields blocks of frames (time, rate, weights, samples), with silence where the clock says that there is some."""
    clock = silence = 0.0
    for (time, rate, weights, x), following in itertools.pairwise(itertools.chain(frames, [None])):
        then = following[0] if following else None
        gap = time - clock
        if gap > JITTER and (then is None or then >= time):  # else this time alone is wrong
            silence += gap
            if silence > SILENCE:
                raise AudioError(path, f"a clock that pauses for more than {SILENCE // 60} minutes")
            missing = round(gap * rate)
            for size in (*[PIECE] * (missing // PIECE), missing % PIECE):
                yield rate, weights, np.zeros((len(x), size), np.float32)
            clock += missing / rate
        elif gap < -RESET and (then is None or then < clock - RESET):
            clock = time
        clock += x.shape[1] / rate
        yield rate, weights, x


@functools.lru_cache
def weights_of(layout, channels):
    """Returns each channel's weight in FFmpeg's mix, in sum 1; equal ones if nothing says which channel is which."""
    if channels > 2 and not re.fullmatch(r"\d+ channels", layout):
        with contextlib.suppress(av.error.FFmpegError, ValueError):
            frame = av.AudioFrame.from_ndarray(np.eye(channels, dtype=np.float32).reshape(1, -1), "flt", layout)
            frame.sample_rate, mixer = 48000, av.AudioResampler("flt", "mono")
            mixed_down = [x.to_ndarray()[0] for x in (*mixer.resample(frame), *mixer.resample(None))]
            mixed_down = np.concatenate([np.zeros(0), *mixed_down])
            if len(mixed_down) == channels and mixed_down.sum() > 0:
                return tuple((mixed_down / np.abs(mixed_down).sum()).tolist())
    return (1 / channels,) * channels


def decoded(path, part):
    """Yields (time, rate, weights, samples [channels, n]) of each frame of one file. A few bad packets do no harm."""
    good, bad, inside = 0, 0, 0  # inside: bad packets before good ones, not those at the end of what is cut off
    zero, first, last, begin, end, latest = None, None, None, 0.0, 0.0, -math.inf  # seconds of the file's clock
    is_audio = part.raw or re.match(headers.KNOWN, part.at(0, 16), re.DOTALL)
    form, options = part.raw or (None, {"format_whitelist": FORMATS})
    part.seek(0)
    try:
        with av.open(part, format=form, options=options, **TAGS) as container:
            if not container.streams.audio:
                raise AudioError(path, CUT if headers.atoms_are_cut(part) else "a file without a track of audio")
            stream = container.streams.best("audio") or container.streams.audio[0]
            if stream.codec_context is None:
                raise AudioError(path, CUT if headers.atoms_are_cut(part) else "audio of an unknown codec")
            if (container.format.name, stream.codec_context.name) == ("caf", "alac"):
                # The last packet is as long as its audio: FFmpeg would cut some of it as padding, but there is none.
                stream.codec_context.flags2 |= av.codec.context.Flags2.skip_manual
            bases = [float(x.time_base or 0) for x in container.streams]  # fractions are slow
            for packet in packets_of(container):
                if packet.pts is not None:
                    latest = max(latest, (packet.pts + (packet.duration or 0)) * bases[packet.stream_index])
                if packet.stream_index != stream.index or (not packet.size and packet.dts is not None):
                    continue
                first, last = first or packet, packet if packet.size else last
                try:
                    frames = packet.decode()
                except av.error.FFmpegError:
                    bad += 1
                    continue
                good, inside = good + bool(frames), bad if frames else inside
                for frame in frames:
                    samples = samples_of(path, frame)
                    time = end if frame.pts is None else frame.pts * bases[stream.index]
                    if zero is None:
                        begin, zero = time, start_of(container, first, time)
                    end = time + frame.samples / frame.rate
                    latest = max(latest, end)  # packets of WavPack do not say how long they are
                    yield time - zero, frame.rate, weights_of(frame.layout.name, len(samples)), samples
            short = falls_short(part, container, stream, first, last, end - begin, latest)
    except av.error.FFmpegError as error:
        if part.error or isinstance(error, MemoryError):
            raise unreadable(path, part.error or error) from None
        ended = isinstance(error, av.error.EOFError) or part.at(4, 4) == b"ftyp"
        reason = UNREAD if isinstance(error, av.error.PatchWelcomeError) else CUT if ended else DAMAGED
        raise AudioError(path, reason if is_audio else FOREIGN) from None
    if part.error:
        raise unreadable(path, part.error)
    if not good and (bad or not is_audio):
        raise AudioError(path, DAMAGED if is_audio else FOREIGN)
    if short or headers.is_cut(part):
        raise AudioError(path, DAMAGED if inside else CUT)
    if bad > 2 + good // 50:
        raise AudioError(path, DAMAGED)


def packets_of(container):
    """Yields the packets of all tracks, until the data end or make no sense."""
    try:
        yield from container.demux()
    except av.error.InvalidDataError:
        return


def samples_of(path, frame):
    """Returns the samples float32 [channels, n] of a frame."""
    if frame.format.is_planar and frame.layout.nb_channels > PLANES:
        raise AudioError(path, f"audio of more than {PLANES} channels")
    if frame.rate not in RATES:
        raise AudioError(path, f"a sample rate of {frame.rate} Hz")
    try:
        x = frame.to_ndarray()
    except ValueError:  # such as samples of 64 bits
        raise AudioError(path, f"samples of an unknown form, {frame.format.name}") from None
    try:
        return scaled(x if frame.format.is_planar else x.reshape(-1, frame.layout.nb_channels).T)
    except ValueError as error:
        raise AudioError(path, str(error)) from None


def start_of(container, packet, time):
    """Returns where a file's clock begins: as for players, with the earliest track. The first frame comes at `time`."""
    first = float((packet.pts or 0) * packet.time_base)
    start = first if container.start_time is None else container.start_time / av.time_base
    if container.format.name in (MOV, MATROSKA) and start < LIVE:
        start = min(start, 0)
    return time if first - start <= JITTER else start  # what a decoder skips is no silence


def falls_short(part, container, stream, first, last, length, latest):
    """Returns True if the audio, with this length and its first and last packets, ends before its file says.

    `latest` is the end of all tracks. FFmpeg estimates some durations from sizes, and does not say which.
    """
    kind, duration = container.format.name, stream.duration and float(stream.duration * stream.time_base)
    if last is not None and last.is_corrupt and kind not in ENDLESS:
        return True
    if kind == "mp3" and first is not None:  # a header in the frame before the first one says how many there are
        header = part.at(max(0, (first.pos or 0) - 4096), min(first.pos or 0, 4096))
        said = (headers.frames_of_mp3(header) or 0) * float((first.duration or 0) * first.time_base)
        return length + 0.25 < min(said, duration or 0)  # FFmpeg's is an estimate where much follows the last frame
    if kind in (MATROSKA, "flv"):  # duration of the longest track; Matroska may have one of each as a tag
        start = (container.start_time or 0) / av.time_base if kind == "flv" else 0
        tags = (x.split(":") for name, x in stream.metadata.items() if name.startswith("DURATION"))
        said = container.duration / av.time_base if duration is None and container.duration else 0
        with contextlib.suppress(ValueError, IndexError):
            said = min([said, *(3600 * float(x[0]) + 60 * float(x[1]) + float(x[2]) for x in tags)])
        return latest - start + 0.25 < said
    return kind in STATED and length + STATED[kind] + 1e-6 < (duration or 0)


def stretches(path):
    """Returns the stretches of a file, by decoding all of it."""
    parts, opposed = [], []
    for (rate, weights), group in itertools.groupby(blocks(path), lambda x: x[:2]):
        before = len(opposed)
        samples = sum(len(x) for x in mixed((x for *_, x in group), rate, weights, lambda: opposed.append(True)))
        parts.append(Stretch(rate, len(weights), samples, len(opposed) > before))
    return parts


def mixed(some, rate, weights, said):
    """Yields samples [n] of blocks [channels, n]: their mix, or where channels cancel each other the loudest so far.

    This is decided for half a second at a time, however the blocks are cut; then `said` is called.
    """
    if len(weights) == 1:
        yield from (x[0] for x in some)
        return
    gains = np.maximum(weights, 1 / len(weights)) ** 2  # a channel that the mix leaves out counts too
    total = np.zeros(len(weights))
    for x in halves(some, max(1, rate // 2)):
        mix = sum(np.float32(weight) * channel for weight, channel in zip(weights, x))
        power = gains * np.einsum("cn,cn->c", x, x)
        total += power
        if mix @ mix < OPPOSED * power.sum():
            mix = x[total.argmax()]
            said()
        yield mix


def halves(some, size):
    """Yields blocks [channels, n] of the same size, except the last one, from other blocks."""
    held = None
    for x in some:
        held = x if held is None else np.concatenate([held, x], 1)
        while held.shape[1] >= size:
            yield np.ascontiguousarray(held[:, :size])
            held = held[:, size:]
    if held is not None and held.shape[1]:
        yield np.ascontiguousarray(held)


def seconds(file):
    """Returns how long the stretches of a file last."""
    return sum(x.samples / x.rate for x in file)


def within(path, length, start, end, least=0.5):
    """Returns the part of a file that the times of a row mean: (start, end, None or a note of what was changed).

    The times of a row count from the start of its file, or from the start of the recording from which the file was cut,
    as in MLS, AMI and GigaSpeech. Keys do not tell which; the length of the file, in seconds, does:

    * A segment that ends within the file, or up to `SLACK` behind it, is a part of the file.
    * Where the file ends before the segment does, but is as long as the segment (within 0.05 s and 1%), it was cut
      from a longer recording, and all of it is read. Near the start of a file both may be true: the closer one is.
    * A recording within its row, as in Parquet, is a clip. Where the segment does not fit, all of it is read.
    * A segment that begins within the file and ends behind it is cut at the end of the file, if at least this share of
      the segment is there: half of it where a text says what all of it is.
    * Anything else is an error.
    """
    behind = end - length if end is not None and rows.later(end, length) else 0.0
    cut_out = behind and abs(length - (end - start)) < min(behind, ALIKE[0] + ALIKE[1] * length)
    if cut_out or (getattr(path, "clip", False) and (start >= length or behind > SLACK)):
        return 0.0, None, ORIGINAL
    if start >= length:
        raise Beyond(path, length)
    if behind <= SLACK:
        return start, end, None
    if length - start < least * (end - start):
        raise Beyond(path, length)
    return start, None, OVERRUN


def checked(path, file, start, end, channel):
    """Raises an error if a file, by its stretches, lacks a channel, or a segment that `within` would change."""
    length = seconds(file)
    if start >= length or within(path, length, start, end)[2]:
        raise Beyond(path, length)
    lacks_channel(path, file, channel)


def lacks_channel(path, file, channel):
    """Raises an error where a file, by its stretches, lacks a channel."""
    missing = [x for x in channels_of(channel) if any(x >= y.channels for y in file)]
    if missing:
        raise AudioError(path, f"no channel {missing[0]}: the first is 0, and the file has {file[0].channels}")


def channels_of(channel):
    return [] if channel is None else [channel] if isinstance(channel, int) else list(channel)


def bounds(begin, rate, start, end):
    """Returns the first sample of a segment, and the one after its last, counted from the begin of a stretch."""
    return max(0, round((start - begin) * rate)), math.inf if end is None else max(0, round((end - begin) * rate))


def resampled_size(samples, own_rate, rate):
    common = math.gcd(own_rate, rate)
    return -(-samples * (rate // common) // (own_rate // common))


def size(file, rate, start=0.0, end=None):
    """Returns how many samples `read` gets at a rate in a segment of a file, by its stretches."""
    total, begin = 0, 0.0
    for stretch in file:
        first, last = bounds(begin, stretch.rate, start, end)
        total += resampled_size(max(0, min(last, stretch.samples) - first), stretch.rate, rate)
        begin += stretch.samples / stretch.rate
    return total


def read(path, rate, start=0.0, end=None, channel=None):
    """Returns samples float32 [S] in [-1, 1] at a rate, as `pieces` does; the listing reports opposed channels."""
    return np.concatenate([np.zeros(0, np.float32), *pieces(path, rate, start, end, channel, lambda: None)])


def read_noted(path, rate, start=0.0, end=None, channel=None):
    """Returns (samples, None or a note) for the part that the times of a row mean, as `within` decides."""
    try:
        return read(path, rate, start, end, channel), None
    except Beyond as error:
        start, end, note = within(path, error.length, start, end)
        return read(path, rate, start, end, channel), note


def pieces(path, rate, start=0.0, end=None, channel=None, said=None):
    """Yields samples float32 [n] in [-1, 1] at a rate, one piece after the other, as the file is decoded.

    The segment is from `start` to `end` in seconds, by default all; it has one channel, or the mean of several, by
    default FFmpeg's mix of all. A fault of the file is an error where it is met, which may be its end. `said` is called
    where channels cancel each other; by default a line says so.
    """
    file, begin, said = [], 0.0, said or functools.partial(say_once, f"{shown(path)}: {CANCELLED}")
    for (own_rate, weights), group in itertools.groupby(blocks(path), lambda x: x[:2]):
        (first, last), read = bounds(begin, own_rate, start, end), []
        if wanted := [i for i in channels_of(channel) if i < len(weights)]:
            some, chosen = (x[wanted] for *_, x in group), (1 / len(wanted),) * len(wanted)
        else:
            some, chosen = (x for *_, x in group), weights
        yield from resampled_pieces(
            segment(mixed(some, own_rate, chosen, said), first, last, own_rate, read), own_rate, rate
        )
        samples = sum(read)
        file.append(Stretch(own_rate, len(weights), samples))
        begin += samples / own_rate
        if samples > last + own_rate:
            break
    if (start, end, channel) != (0.0, None, None):
        checked(path, file, start, end, channel)


def segment(some, first, last, slack, read):
    """Yields the samples from `first` to `last` of blocks [n]; their sizes go to `read`."""
    place = 0
    for x in some:
        piece = x[max(0, first - place) : max(0, min(last - place, len(x)))]
        place += len(x)
        read.append(len(x))
        if piece.size:
            yield piece
        if place > last + slack:  # later samples cannot matter
            return


def resampled_pieces(some, own_rate, rate):
    """Yields pieces whose samples are, bit for bit, those that `resampled` makes of all pieces."""
    if own_rate == rate:
        yield from some
        return
    up, down = (x // math.gcd(own_rate, rate) for x in (rate, own_rate))
    # SciPy's filter sees 10 max(up, down) samples at the rate of both; begins are multiples of `down`.
    margin = -(-(10 * max(up, down) // up + 2) // down) * down
    held, size, before = [], 0, 0  # samples, of which `before` have been resampled and are read again
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
        yield resampled(x, own_rate, rate)[before // down * up : -(-done * up // down)]
        before = min(margin, done)
        held, size = [x[done - before :]], size - done + before


def resampled(samples, own_rate, rate):
    from scipy.signal import resample_poly  # a second: not at every start

    common = math.gcd(own_rate, rate)
    return resample_poly(samples, rate // common, own_rate // common).astype(np.float32)


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
