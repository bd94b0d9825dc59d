"""Audio files as they come: containers x codecs x what may be wrong, against the samples that were written."""

import contextlib
import errno
import fractions
import functools
import io
import json
import re
import struct

import av
import numpy as np
import pytest
import scipy.io.wavfile

from jax_rnnt_speech.data import audio, corpora, features, index, memory
from jax_rnnt_speech.data.archives import storage
from recordings import RATE, encode
from support import configuration

SECONDS = 2
TIMES = np.arange(SECONDS * RATE) / RATE
SWEEP = 0.3 * np.sin(2 * np.pi * (300 + 600 * TIMES) * TIMES)  # tells places apart
PCM = np.int16(np.round(SWEEP * 2**15))


def film(path, container, codec, sounds=(SWEEP,), video=None, late=0.0, pause=(0, 0), begin=0.0, rate=RATE, **options):
    """Writes sounds as tracks; the last is the default. Returns the first sample after the pause (when, how long)."""
    with av.open(str(path), "w", format=container, options=options) as file:
        packets, tracks = [], [file.add_stream(codec, rate=rate, layout="mono") for _ in sounds]
        if video:
            kinds = {"webm": "libvpx", "mpegts": "mpeg2video", "mpeg": "mpeg2video", "flv": "flv"}
            kind = kinds.get(container, "mpeg4")
            fps = 25 if kind == "mpeg2video" else 5
            pictures = file.add_stream(kind, rate=fps)
            pictures.width = pictures.height = 16
            pictures.pix_fmt = "yuv420p"
            for i in range(round(fps * video)):
                frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 5 * i % 250, np.uint8), "rgb24")
                frame.pts, frame.time_base = round(fps * begin) + i, fractions.Fraction(1, fps)
                packets += pictures.encode(frame)
            packets += pictures.encode(None)
        for x, track in zip(sounds, tracks):
            track.format = {"wavpack": "s16p", "tta": "s16"}.get(codec, track.format)
            track.disposition = av.stream.Disposition.default if x is sounds[-1] else av.stream.Disposition(0)
            x = np.interp(np.arange(SECONDS * rate) / rate, TIMES, x)
            size, place = track.codec_context.frame_size or 1000, 0
            for part in [x[i : i + size] for i in range(0, len(x), size)]:
                frame = av.AudioFrame.from_ndarray(np.float32(part)[None], "fltp", "mono")
                frame.sample_rate = rate
                (frame,) = av.AudioResampler(track.format, "mono", rate).resample(frame)
                time = begin + late + (pause[1] if place >= pause[0] * rate else 0)
                frame.pts, frame.time_base = place + round(time * rate), fractions.Fraction(1, rate)
                packets, place = packets + track.encode(frame), place + size
            packets += track.encode(None)
        for x in sorted((x for x in packets if x.dts is not None), key=lambda x: x.dts * x.time_base):
            file.mux(x)
    return -(-round(pause[0] * rate) // size) * size


def riff(data, bits, valid=0, channels=1, order="<", tag=1, mask=0):
    """Bytes of a WAV or RIFX; `valid`: with the longer header, which has the number of valid bits."""
    width = channels * bits // 8
    form = struct.pack(order + "HHIIHH", 0xFFFE if valid else tag, channels, RATE, RATE * width, width, bits)
    if valid:
        guid = struct.pack(order + "IHH", tag, 0, 16) + bytes.fromhex("800000aa00389b71")
        form += struct.pack(order + "HHI", 22, valid, mask) + guid
    chunks = b"WAVEfmt " + struct.pack(order + "I", len(form)) + form + b"data" + struct.pack(order + "I", len(data))
    name = b"RIFF" if order == "<" else b"RIFX"
    return name + struct.pack(order + "I", len(chunks) + len(data)) + chunks + data


def rf64(name):
    sizes = struct.pack("<IQQQI", 28, 72 + PCM.nbytes, PCM.nbytes, len(PCM), 0)
    head = name + b"\xff\xff\xff\xffWAVEds64" + sizes + riff(b"", 16)[12:36] + b"data\xff\xff\xff\xff"
    return head + PCM.tobytes()


def sphere(data, coding="pcm", width=2, order="01"):
    fields = {"sample_count": len(PCM), "sample_rate": RATE, "channel_count": 1, "sample_n_bytes": width}
    lines = [f"{name} -i {x}\n" for name, x in (fields | {"sample_sig_bits": 8 * width}).items()]
    lines += [f"{name} -s{len(x)} {x}\n" for name, x in (("sample_byte_format", order), ("sample_coding", coding))]
    return "".join(["NIST_1A\n   1024\n", *lines, "end_head\n"]).encode().ljust(1024) + data


# Kind: container, codec, samples by which FFmpeg's encoder delays without saying so.
FILMS = {
    "mkv": ("matroska", "pcm_s16le", 0), "webm": ("webm", "libopus", 0), "mka": ("matroska", "aac", 0),
    "mov": ("mov", "alac", 0), "mp4": ("mp4", "aac", 0), "ts": ("mpegts", "mp2", 481), "mpg": ("mpeg", "mp2", 481),
    "flv": ("flv", "aac", 1024),
}  # fmt: skip
ALONE = {
    "wav": ("wav", "pcm_s16le", 0), "w64": ("w64", "pcm_s16le", 0), "aiff": ("aiff", "pcm_s16be", 0),
    "caf": ("caf", "pcm_s16be", 0), "caf_alac": ("caf", "alac", 0), "au": ("au", "pcm_s16be", 0),
    "avi": ("avi", "pcm_s16le", 0), "mkv_wv": ("matroska", "wavpack", 0), "avi_mp3": ("avi", "libmp3lame", 1105),
    "asf": ("asf", "pcm_s16le", 0),
    "voc": ("voc", "pcm_s16le", 0), "flac": ("flac", "flac", 0), "oga": ("ogg", "flac", 0), "wv": ("wv", "wavpack", 0),
    "tta": ("tta", "tta", 0), "opus": ("ogg", "libopus", 0), "mp3": ("mp3", "libmp3lame", 0), "m4a": ("ipod", "aac", 0),
    "aac": ("adts", "aac", 1024),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Bytes of a whole file of a kind."""
    folder = tmp_path_factory.mktemp("whole")

    @functools.cache
    def made(kind):
        if kind in BY_HAND:
            return BY_HAND[kind]()
        container, codec, _ = (FILMS | ALONE)[kind]
        film(folder / kind, container, codec, rate=rate_of(codec))
        return (folder / kind).read_bytes()

    return made


def rate_of(codec):
    return 48000 if codec == "libopus" else RATE


BY_HAND = {
    "rifx": lambda: riff(PCM.astype(">i2").tobytes(), 16, order=">"),
    "rf64": lambda: rf64(b"RF64"),
    "bw64": lambda: rf64(b"BW64"),
    "sph": lambda: sphere(PCM.tobytes()),
}
EXACT = {"pcm_s16le", "pcm_s16be", "flac", "alac", "wavpack", "tta"}


def read(data, name="x"):
    return audio.read(audio.Memory(data, name), RATE)


def assert_heard(x, places, delay=0, exact=True):
    """The sweep's parts are in their places, (seconds, first sample, one after the last), and nothing else is."""
    expected = np.zeros(len(x))
    for start, first, last in places:
        near = max(0, round(start * RATE) + delay - 200)
        lag = near + int(np.correlate(x[near : near + 8400], SWEEP[first : first + 8000], "valid").argmax())
        assert abs(lag - round(start * RATE) - delay) <= (0 if exact else 48), (lag, start, delay)
        expected[lag : lag + last - first] = SWEEP[first:last][: len(x) - lag]
    error = (x - expected)[: None if exact else lag + last - first]
    assert np.abs(error).max() < 2e-5 if exact else np.std(error) < 0.03, np.abs(error).argmax()
    assert (0 if exact else -700) <= len(x) - lag - (last - first) <= (0 if exact else 2000)


def assert_cut(data, why="audio that is cut off"):
    with pytest.raises(audio.AudioError) as caught:
        read(data)
    assert caught.value.reason == why


@pytest.mark.parametrize("kind", [*FILMS, *ALONE, *BY_HAND])
def test_whole_cut_joined(whole, kind):
    """All samples are read, twice where two files are joined; a file that is cut says so, if it can know."""
    _, codec, delay = (FILMS | ALONE).get(kind, ("", "pcm_s16le", 0))
    data, exact = whole(kind), codec in EXACT
    assert_heard(read(data), [(0, 0, len(PCM))], delay, exact)
    if kind in ("ts", "mpg", "aac"):  # nothing in them says how long they are
        assert len(read(data[: len(data) * 2 // 3])) == pytest.approx(SECONDS * RATE * 2 / 3, abs=3000)
    else:
        assert_cut(data[: len(data) * 2 // 3])
    for less in range(20, 900, 40) if kind in ("mov", "mp4", "m4a") else ():  # within what lists the tracks
        with contextlib.suppress(audio.AudioError):
            assert len(read(data[:-less])) == len(read(data))
            continue
        assert_cut(data[:-less])
    once, twice = read(data), read(data + data)
    assert len(twice) == pytest.approx(2 * len(once), abs=0 if exact else 2000)
    assert_heard(twice[: len(once)], [(0, 0, len(PCM))], delay, exact)
    assert not exact or (twice[len(once) :] == once).all()
    if kind == "wav":
        assert index.seconds_by_header(audio.Memory(data + data, "x")) == 2 * len(PCM) / RATE


SIZES = {  # where the size is, its form, and what it counts beyond the samples
    "wav": (b"data", 4, "<I", 0), "rifx": (b"data", 4, ">I", 0), "aiff": (b"SSND", 4, ">I", 8),
    "caf": (b"data", 4, ">q", 4), "w64": (b"data", 16, "<q", 24), "rf64": (b"ds64", 16, "<q", 0),
    "au": (b".snd", 8, ">I", 0),
}  # fmt: skip


@pytest.mark.parametrize("kind", SIZES)
def test_sizes(whole, kind):
    """Sizes of 0, unknown, or less than there is, are not believed; more than there is means that the file is cut."""
    mark, behind, form, more = SIZES[kind]
    data = whole(kind)
    place = data.index(mark) + behind
    unknown = {"I": (0, 2**32 - 1, 0x7FFFFFFF, 0x7FFFF000, 0x80000000, 0x7F000008), "q": (0, -1, 2**63 - 1)}[form[1]]
    for told in (*unknown, PCM.nbytes // 2 + more, more):
        changed = data[:place] + struct.pack(form, told) + data[place + struct.calcsize(form) :]
        if kind == "aiff":  # the number of samples is as wrong
            count = data.index(b"COMM") + 10
            changed = changed[:count] + struct.pack(">I", told) + changed[count + 4 :]
        assert_heard(read(changed), [(0, 0, len(PCM))])
        assert abs(index.seconds_by_header(audio.Memory(changed, "x"))) == pytest.approx(len(PCM) / RATE, abs=0.01), (
            told
        )
    assert_cut(data[:place] + struct.pack(form, 2 * PCM.nbytes + more) + data[place + struct.calcsize(form) :])
    if kind == "wav":  # a tag that is no UTF-8
        tag = b"LIST" + struct.pack("<I4s4sI", 16, b"INFO", b"INAM", 4) + b"\xc4\xd6\xdc\0"
        assert_heard(read(data[: place - 4] + tag + data[place - 4 :]), [(0, 0, len(PCM))])
    if form[1] == "I" and kind != "au":
        tail = b"LIST" + struct.pack(form, 9000) + bytes(9000)
        assert_heard(read(data + tail), [(0, 0, len(PCM))])
        empty = data[:place] + struct.pack(form, more) + data[place + 4 : place + 4 + more] + tail
        assert not len(read(empty))


def test_numbers_of_samples(whole, tmp_path):
    """Those of FLAC, SPHERE and MP3: 0 and too few are not believed, and too many mean that the file is cut."""
    flac, mp3, sph = whole("flac"), whole("mp3"), whole("sph")
    for count in (0, len(PCM) // 2):
        assert_heard(read(flac[:22] + struct.pack(">I", count) + flac[26:]), [(0, 0, len(PCM))])
        assert_heard(read(sph.replace(b"-i 32000", b"-i %05d" % count)), [(0, 0, len(PCM))])
    assert_cut(flac[:22] + struct.pack(">I", 2 * len(PCM)) + flac[26:])
    assert_cut(sph.replace(b"-i 32000", b"-i 64000"))
    place = re.search(rb"(?:Xing|Info)\0\0\0.", mp3, re.DOTALL).end()
    (count,) = struct.unpack(">I", mp3[place : place + 4])
    assert_heard(read(mp3[:place] + struct.pack(">I", count + 1) + mp3[place + 4 :]), [(0, 0, len(PCM))], exact=False)
    less = read(mp3[:place] + struct.pack(">I", count // 2) + mp3[place + 4 :])  # FFmpeg drops the padding behind these
    assert_heard(less[:15000], [(0, 0, 15000)], exact=False)
    assert len(less) == pytest.approx(len(PCM), abs=1152)
    assert_cut(mp3[:place] + struct.pack(">I", 2 * count) + mp3[place + 4 :])
    film(tmp_path / "x", "mp3", "libmp3lame", write_xing="0")
    bare = (tmp_path / "x").read_bytes()  # without that frame, and with junk before
    for data in (bare, np.random.default_rng(0).bytes(5000) + bare):
        assert_heard(read(data), [(0, 0, len(PCM))], 1105, exact=False)


@pytest.mark.parametrize("kind", ["mp3", "wav", "aiff", "oga", "wv", "flac", "tta"])
def test_tags(whole, kind):
    """Tags of MP3 before and behind any file, zeros behind one: all samples are read, and nothing of a picture."""
    data, exact = whole(kind), kind != "mp3"
    picture = whole("mp3")[3000:11000] + bytes(150_000)  # may be taken for frames, and hides what is before it
    size = bytes(len(picture) >> x & 127 for x in (21, 14, 7, 0))
    id3, old = b"ID3\3\0\0" + size + picture, b"TAG".ljust(128, b"\0")
    ape = [struct.pack("<8sIIII8x", b"APETAGEX", 2000, len(picture) + 32, 1, flags << 29) for flags in (5, 4)]
    small = b"ID3\4\0\0\0\0\0\5" + bytes(5)
    behind = (old, b"".join((ape[0], picture, ape[1])), picture + ape[1][:23] + b"\0" + bytes(8) + old)
    for before, after in [(x, b"") for x in (id3, small + id3)] + [(b"", x) for x in (*behind, bytes(3000))]:
        assert_heard(read(before + data + after)[: len(PCM)], [(0, 0, len(PCM))], exact=exact)
        assert len(read(before + data + after)) - len(PCM) <= (0 if exact and kind != "aiff" else 1152)
    if kind in ("wav", "aiff", "oga"):  # without an end
        assert len(read(data + id3)) == len(PCM)


@pytest.mark.parametrize("kind", FILMS)
def test_clock(tmp_path, kind):
    """Audio that begins late or pauses keeps its place, wherever the clock begins and however long the video is."""
    container, codec, delay = FILMS[kind]
    exact, rate, end = codec in EXACT, rate_of(codec), len(PCM)
    late, far = {"video": 3.6, "late": 1.0}, {"begin": 5000.0}
    unsaid = 1024 if kind == "mp4" else delay  # FFmpeg writes one edit: that of the time before, or of the delay
    for options, start, lag in (
        ({"video": 3.0}, 0.0, delay),
        ({"video": 1.0}, 0.0, delay),
        (late, 1.0, 0),
        (late | far, 1.0, 0),
        (far, 0.0, unsaid),
        ({"late": 1.0}, *((1.0, 0) if container not in ("mpegts", "mpeg", "flv") else (0.0, delay))),
    ):
        film(tmp_path / "x", container, codec, rate=rate, **options)
        assert_heard(audio.read(tmp_path / "x", RATE), [(start, 0, end)], lag, exact)
    if kind != "mov":  # whose lossless tracks have no place for a pause
        split = film(tmp_path / "x", container, codec, rate=rate, video=3.0, pause=(1.0, 0.7)) * RATE // rate
        x, again, near = audio.read(tmp_path / "x", RATE), split + round(0.7 * RATE), 1200  # a frame
        assert_heard(x[: split - near + delay], [(0, 0, split - near)], delay, exact)
        assert_heard(x[again + near + delay :], [(0, split + near, end)], 0, exact)
        assert np.abs(x[split + near + delay : again - near]).max() < 1e-3


def test_clocks_that_are_wrong():
    """Small differences and single wrong times put in nothing; one that begins anew drops nothing; hours are wrong."""
    x = np.float32(np.arange(3000)[None])

    def placed(*times):
        frames = [(time, 1000, (1.0,), x[:, 500 * i : 500 * i + 500]) for i, time in enumerate(times)]
        return np.concatenate([y[0] for *_, y in audio.placed("a", frames)])

    for times in (
        (0.0, 0.52, 0.97, 1.5, 2.08, 2.5),  # rounded
        (0.0, 0.5, 9999.0, 1.5, 2.0, 2.5),  # damaged
        (0.0, 0.5, -9999.0, 1.5, 2.0, 2.5),
        (7e5, 0.5, 1.0, 1.5, 2.0, 2.5),
        (0.0, 0.5, 1.0, 0.8, 1.3, 1.8),  # overlapping
        (5.0, 5.5, 6.0, 0.0, 0.5, 1.0),  # anew
    ):
        silence = 5000 if times[0] == 5 else 0
        np.testing.assert_array_equal(placed(*times), np.concatenate([np.zeros(silence), x[0]]))
    expected = np.concatenate([x[0, :1000], np.zeros(250), x[0, 1000:2000], np.zeros(1000), x[0, 2000:]])
    np.testing.assert_array_equal(placed(0.0, 0.5, 1.25, 1.75, 3.25, 3.75), expected)
    with pytest.raises(audio.AudioError, match="a clock that pauses for more than 60 minutes"):
        placed(0.0, 0.5, 1.0, 9999.0, 9999.5, 10000.0)
    sizes = [y.shape[1] for *_, y in audio.placed("a", [(3599.0, 48000, (1.0,), x)])]
    assert sum(sizes) == 3599 * 48000 + 3000 and max(sizes) <= 16384


@pytest.mark.parametrize("kind", ["mkv", "mp4", "mov", "webm"])
def test_tracks(tmp_path, kind):
    """Of several tracks, the one that is marked as the default is read; a manifest's segment is of its clock."""
    container, codec, _ = FILMS[kind]
    path, exact = tmp_path / "x", codec in EXACT
    sounds = [np.zeros_like(SWEEP), SWEEP[::-1].copy(), SWEEP]
    film(path, container, codec, sounds, rate=rate_of(codec), video=1.0, late=0.5)
    assert_heard(audio.read(path, RATE), [(0.5, 0, len(PCM))], exact=exact)
    (file,) = audio.stretches(path)
    part = audio.read(path, RATE, 1.0, 2.0)
    assert audio.size([file], RATE, 1.0, 2.0) == len(part) == RATE
    assert_heard(part[:15000], [(0.0, 8000, 23000)], exact=exact)
    assert_heard(read(path.read_bytes()), [(0.5, 0, len(PCM))], exact=exact)


def test_samples_of_every_width(tmp_path):
    """Integers of every width and order, also with room for more bits, and floats, mean the same sound."""
    x = np.round(SWEEP * 100) / 128
    types = {np.uint8: (128, 128), np.int16: (2**15, 0), np.int32: (2**31, 0), np.float32: (1, 0), np.float64: (1, 0)}
    for kind, (scale, zero) in types.items():
        stored = (x * scale + zero).astype(kind)
        scipy.io.wavfile.write(tmp_path / "a.wav", RATE, stored)
        np.testing.assert_allclose(audio.read(tmp_path / "a.wav", RATE), x, atol=1e-6)
        np.testing.assert_allclose(features.scaled(stored), x, atol=1e-6)
    wide = np.int32(x * 2**31)
    for order in "<>":
        swapped = wide.astype(order + "i4").tobytes()
        narrow = np.frombuffer(swapped, np.uint8).reshape(-1, 4)[:, slice(1, 4) if order == "<" else slice(3)].tobytes()
        short, real = np.int16(x * 2**15).astype(order + "i2").tobytes(), x.astype(order + "f4").tobytes()
        cases = [riff(swapped, 32, order=order), riff(np.uint8(128 + x * 128).tobytes(), 8, order=order)]
        cases += [riff(swapped, 32, valid, order=order, mask=4) for valid in (32, 24, 20)]
        cases += [riff(narrow, 24, valid, order=order) for valid in (0, 20)]
        cases += [riff(short, 16, valid, order=order) for valid in (16, 12, 8)]
        cases += [riff(real, 32, valid, order=order, tag=3) for valid in (0, 32)]
        cases += [sphere(short, order="01" if order == "<" else "10")]
        for i, data in enumerate(cases):
            np.testing.assert_allclose(read(data), x, atol=1e-6, err_msg=f"{order} {i}")
    form = struct.pack(">d4sIIIII", RATE, b"lpcm", 2, 4, 1, 1, 24)  # CAF: 24 of 32 bits, the low byte first
    caf = b"caff\0\1\0\0desc" + struct.pack(">q", 32) + form + b"data" + struct.pack(">qI", 4 + wide.nbytes, 0)
    np.testing.assert_allclose(read(caf + wide.astype("<i4").tobytes()), x, atol=1e-6)
    encode(tmp_path / "b.flac", x, codec="flac")
    with pytest.raises(ValueError, match="samples must be integers or floats, got complex128"):
        features.scaled(x + 0j)
    ulaw = read(sphere(bytes([0x00, 0x80, 0xFF, 0x7F]) * 8000, "ulaw", 1, "1"))
    np.testing.assert_allclose(ulaw[:4], np.array([-32124, 32124, 0, 0]) / 2**15, atol=1e-6)  # G.711
    assert_cut(sphere(b"ajkg" + bytes(9999), "pcm,embedded-shorten-v2.00"), "damaged audio")
    assert_cut(sphere(bytes(9999), "pcm", 3, "010"), "audio of a form that FFmpeg does not read")


def test_channels(tmp_path, capsys):
    """FFmpeg's weights where the layout is known, in sum 1, else equal ones; of opposed channels, the louder one."""
    places = {"FL": 0.7071, "FR": 0.7071, "FC": 1.0, "LFE": 0.0, "BL": 0.5, "BR": 0.5}  # ITU-R BS.775, as FFmpeg has it
    total = sum(places.values())
    tones = [0.2 * np.sin(2 * np.pi * 200 * (i + 1) * TIMES[:RATE]) for i in range(6)]
    frames = np.int16(np.round(np.stack(tones, 1) * 2**15)).tobytes()
    for mask, weights in ((0x3F, [x / total for x in places.values()]), (0, [1 / 6] * 6)):
        expected = sum(weight * x for weight, x in zip(weights, tones))
        np.testing.assert_allclose(read(riff(frames, 16, 16, 6, mask=mask)), expected, atol=1e-4)
    third = audio.read(audio.Memory(riff(frames, 16, channels=6), "x"), RATE, channel=3)
    np.testing.assert_allclose(third, tones[3], atol=1e-4)
    assert not capsys.readouterr().err
    noise = 0.1 * np.random.default_rng(0).normal(size=(2, len(SWEEP)))
    half = np.where(TIMES < 1, 1, -1)
    for name, pair, expected in (
        ("opposed", (SWEEP, -0.9 * SWEEP), SWEEP),
        ("louder", (-0.9 * SWEEP, SWEEP), SWEEP),
        ("partly", (SWEEP, half * SWEEP), SWEEP),
        ("one", (SWEEP, 0 * SWEEP), SWEEP / 2),
        ("independent", noise, noise.mean(0)),
        ("three", (SWEEP, -SWEEP, 0 * SWEEP), SWEEP),
    ):
        path = tmp_path / f"{name}.wav"
        path.write_bytes(riff(np.int16(np.round(np.stack(pair, 1) * 2**15)).tobytes(), 16, channels=len(pair)))
        np.testing.assert_allclose(audio.read(path, RATE), expected, atol=1e-4, err_msg=name)
        whole = np.concatenate(list(audio.pieces(path, 8000)))
        np.testing.assert_array_equal(whole, audio.read(path, 8000))
        list(audio.pieces(path, 8000))
        said, opposed = capsys.readouterr().err, name not in ("one", "independent")
        assert said.count("opposed channels, of which the louder is read") == said.count("\n") == opposed, said
        assert audio.stretches(path)[0].opposed == opposed
        assert_heard(audio.read(path, RATE, 0.75, 1.75), [(0, 12000, 28000)]) if opposed else None
        np.testing.assert_allclose(audio.read(path, RATE, channel=1), pair[1], atol=1e-4)
    rows = [{"audio": f"{x}.wav", "text": "A"} for x in ("opposed", "one", "opposed")]
    rows.append({"audio": "louder.wav", "channel": 1, "text": "A"})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = corpora.Recordings(tmp_path / "a.jsonl", configuration(rate=RATE)).report
    reason = "used all the same, opposed channels, of which the louder is read"
    assert [*report.lines()] == [f"{reason}: 1 ({tmp_path / 'opposed.wav'})"]
    assert not report.names


def test_storage(tmp_path, monkeypatch):
    """What is wrong with the storage is no fact about a file: it is said, and tried again at the next start."""
    monkeypatch.setattr(storage, "WAITS", (0, 0))
    audio.write(tmp_path / "a.wav", SWEEP, RATE)
    (tmp_path / "b.wav").write_bytes((tmp_path / "a.wav").read_bytes()[:20000])

    class Broken(io.FileIO):
        """A file whose storage fails behind its first bytes."""

        def read(self, size):
            if self.tell() > 9000:
                raise OSError(errno.EIO, "Input/output error")
            return super().read(min(size, 8192))

    def refused(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    failures = {"cannot be opened (Too many open files)": refused}
    failures["cannot be read (Input/output error)"] = Broken
    for reason, how in failures.items():
        folder = tmp_path / reason[:14]
        with monkeypatch.context() as patched:
            patched.setattr(audio, "open", how, raising=False)
            assert corpora.stretches_of(tmp_path / "a.wav").reason == f"a file that {reason}"
        assert corpora.stretches_of(tmp_path / "b.wav").reason == "audio that is cut off"
        # Features are made again at the next start.
        (tmp_path / "c.jsonl").write_text('{"audio": "a.wav", "text": "A"}\n{"audio": "c.wav", "text": "B"}\n')
        audio.write(tmp_path / "c.wav", SWEEP[::-1], RATE)
        config = configuration(rate=RATE, valid=str(tmp_path / "c.jsonl"))
        with monkeypatch.context() as patched:
            patched.setattr(audio, "open", lambda *x: (how if "c.wav" in str(x[0]) else open)(*x), raising=False)
            corpus = memory.held_out(config, folder, folder / "kept", 0)
            assert [x.text for x in corpus.utterances] == ["A"] and corpus.load(0, None) is not None
        assert dict(corpus.report.names) == {f"a file that {reason}": ["c.wav"]}
        for _ in range(2):
            corpus = memory.held_out(config, folder, folder / "kept", 0)
            assert len(corpus.utterances) == 2 and corpus.load(1, None) is not None and not corpus.report.names
