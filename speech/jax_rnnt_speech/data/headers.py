"""Handles what FFmpeg leaves to others: joined files, and headers that are wrong, or that it misunderstands."""

import os
import re
import struct

INITIAL = re.escape(bytes(x for x in range(256) if x & 8))  # bit in the flags of WavPack: the first block of a moment
# Begins of files that FFmpeg reads once, where several are joined. Patterns that begin in only one way are fast.
JOINED = (
    *(name + rb".{4}WAVE[ -~]{4}" for name in (b"RIFF", b"RIFX", b"RF64", b"BW64")),
    *(rb"FORM.{4}AIF[FC]", rb"riff\x2e\x91\xcf\x11", rb"caff\0\x01\0\0desc"),
    *(rb"fLaC[\0\x80]\0\0\x22", rb"\0\0\0.ftyp[ -~]{4}", rb"RIFF.{4}AVI LIST", rb"FLV\x01[\1\4\5]\0\0\0\x09"),
    *(rb"\.snd\0\0.{6}\0\0\0[\1-\x1b]", rb"TTA1[\1-\3]\0", rb"NIST_1A\n   \d{4}\n", rb"Creative Voice F"),
    rb"0&\xb2u\x8ef\xcf\x11\xa6\xd9\0\xaa\0\x62\xce\x6c",
    rb"wvpk.{12}\0\0\0\0.{5}[" + INITIAL + b"]",
)
BEGIN = 32  # more bytes than any pattern has
# FFmpeg neither says where a header ends the samples, nor doubts it. These are chunks by the first bytes of a file: the
# form of name and size, where the first is, how many bytes of these the size counts, and to which multiple it is filled
# up.
CHUNKS = {
    rb"(RIFF|RF64|BW64)....WAVE": ("<4sI", 12, 0, 2),
    rb"RIFX....WAVE|FORM....AIF": (">4sI", 12, 0, 2),
    rb"caff": (">4sq", 8, 0, 1),
    rb"riff": ("<16sq", 40, 24, 8),
}
# Larger sizes than these that exceed the file mean that the program that wrote it into a pipe did not know its size:
# SoX has 0x7F000000 for AIFF, others have 2^31 - 1 or 2^32 - 1, and as much of 64 bits.
UNKNOWN, WIDE = 0x7F000000, 2**48
ASF, SIZES = b"0&\xb2u\x8ef\xcf\x11", b"\xa1\xdc\xab\x8cG\xa9\xcf\x11"  # how a file and the chunk of its size begin
KNOWN = re.escape(ASF) + b"|" + b"|".join(CHUNKS)
KNOWN += rb"|RIFF....AVI |OggS|....ftyp|fLaC|ID3|\xff[\xe2-\xfb]|\x1aE\xdf\xa3|\.snd|NIST_1A|wvpk|TTA1"


class Part:
    """Bytes of a file, as a file, with some of them replaced: (place, bytes)."""

    def __init__(self, file, begin, end):
        self.file, self.begin, self.end, self.name = file, begin, end, os.path.basename(file.name)
        self.replaced, self.raw, self.error = [], None, None  # raw: options of FFmpeg, if the part is samples alone
        file.seek(begin)

    def read(self, size):
        place = self.tell()
        try:
            data = self.file.read(max(0, min(size, self.end - self.begin - place)))
        except OSError as error:  # an error of the storage: for FFmpeg, the file ends
            self.error = error
            return b""
        for at, new in self.replaced:
            first, last = max(at, place), min(at + len(new), place + len(data))
            if first < last:
                data = data[: first - place] + new[first - at : last - at] + data[last - place :]
        return data

    def at(self, place, size):
        self.seek(place)
        return self.read(size)

    def seek(self, offset, whence=os.SEEK_SET):
        place = (self.begin, self.file.tell(), self.end)[whence] + offset
        self.file.seek(max(self.begin, min(place, self.end)))  # damaged files lead anywhere
        return place - self.begin if place >= self.begin else -1

    def tell(self):
        return self.file.tell() - self.begin


def begins(file):
    """Returns where the files begin that are joined in a file, of kinds of which FFmpeg reads the first alone."""
    file.seek(0)
    start, places, tail, place = file.read(BEGIN), {0}, b"", 0
    for pattern in JOINED:
        if re.match(pattern, start, re.DOTALL):
            file.seek(0)
            while more := file.read(2**20):
                data = tail + more
                places |= {place - len(tail) + x.start() for x in re.finditer(pattern, data, re.DOTALL)}
                tail, place = data[1 - BEGIN :], place + len(more)
    return sorted(places)


def leave_out_tags(part):
    """Leaves out tags: before files in which FFmpeg expects none, and pictures that it would take for frames of MP3."""
    place = 0
    while (tag := part.at(place, 10))[:3] == b"ID3" and len(tag) == 10:
        place += 10 * (2 if tag[5] & 16 else 1) + sum(x % 128 << 7 * i for i, x in enumerate(tag[:5:-1]))
    if re.match(rb"OggS|wvpk|" + b"|".join(CHUNKS), part.at(place, 16), re.DOTALL):
        part.begin += place
    end = part.end - part.begin
    end -= 128 if part.at(max(0, end - 128), 3) == b"TAG" else 0
    tag = part.at(max(0, end - 32), 32)
    if tag[:8] == b"APETAGEX":
        size = int.from_bytes(tag[12:16], "little") + 32 * (tag[23] >> 7)
        part.end = part.begin + max(0, end - size)


def correct(part):
    """Replaces errors in the header of a part, and returns True if all the samples are there that it promises.

    A size is not believed if programs write it that do not know it yet, or if the bytes behind it are no other chunk.
    """
    leave_out_tags(part)
    start = part.at(0, 48)
    rows = (x for mark, x in CHUNKS.items() if re.match(mark, start, re.DOTALL))
    form, place, counted, filled = next(rows, (">4sI", 0, 0, 1))
    length, size = struct.calcsize(form), part.end - part.begin
    if start[:4] == b".snd" and len(start) >= 24:
        first, stated, field = *struct.unpack(">II", start[4:12]), (8, ">I")
    elif not place:
        return True
    else:
        while True:
            chunk, first = part.at(place, length), place + length
            if len(chunk) < length:
                return True  # there are no samples: FFmpeg says what is wrong
            name, stated = struct.unpack(form, chunk)
            stated -= counted
            if name[:4] in (b"data", b"SSND"):
                break
            if start[:4] == b"RIFX" and name == b"fmt ":
                part.raw = raw(part.at(first, 40))
            part.replaced += corrections(name[:4], first, part.at(first, 40))
            place = first + max(0, stated + -stated % filled)
        field = (place + length - struct.calcsize(form[-1:]), form[0] + form[-1:])
        if start[:4] in (b"RF64", b"BW64"):
            part.replaced.append((0, b"RF64"))  # the same format, but FFmpeg knows one name
            if stated == 0xFFFFFFFF:
                stated, field = *struct.unpack("<q", start[28:36]), (28, "<q")
    there, narrow = size - first, field[1][1] == "I"
    behind = part.at(first + stated + -stated % filled, length) if 0 <= stated <= there else b""
    another = len(behind) == length and re.match(rb"[ -~]{4}", behind)
    another = another and there - stated - length >= struct.unpack(form, behind)[1] - counted - 1
    another = another or re.match(rb"ID3[\2-\4]\0", behind)
    unknown = stated > there and stated >= (UNKNOWN if narrow else WIDE)
    if (stated < max(9, there - 4096) and not another) or unknown:
        stated = min(there + counted, 0xFFFFFFFF) if narrow else there + counted
        part.replaced.append((field[0], struct.pack(field[1], max(0, stated))))
        stated = there
    if part.raw or not stated:  # 0 means unknown to FFmpeg
        part.begin, part.end = part.begin + first * bool(part.raw), part.begin + first + stated
        part.replaced *= not part.raw
    return stated <= there


def corrections(name, first, body):
    """Yields corrections of a chunk that FFmpeg misreads: (place, bytes). Samples may have fewer bits than room."""
    if name == b"fmt " and len(body) >= 28 and body[:2] == b"\xfe\xff":
        yield first + 18, body[14:16]
    if name == b"desc" and len(body) >= 32 and body[8:12] == b"lpcm":
        width, _, channels = struct.unpack(">III", body[16:28])
        yield first + 28, struct.pack(">I", 8 * width // max(1, channels) % 2**32)
    if name == b"COMM":
        yield first + 2, bytes(4)  # the number of samples, which the data determine


def raw(body):
    """Returns options of FFmpeg for the samples of a RIFX, whose bytes it does not swap."""
    tag, channels, rate, _, _, bits = struct.unpack(">HHIIHH", body[:16].ljust(16, b"\0"))
    long = tag == 0xFFFE and len(body) == 40
    codec = max(body[24:28]) if long else tag  # in whatever order the GUID is
    form = {1: f"s{bits}be", 3: f"f{bits}be", 6: "alaw", 7: "mulaw"}.get(codec, "") if bits > 8 or codec > 3 else "u8"
    mask = int.from_bytes(body[20:24], "big") if long else 0
    return form, {"sample_rate": str(rate), "ch_layout": hex(mask) if mask else f"{channels}C"}


def frames_of_mp3(header):
    """Returns how many frames follow, by what encoders write into the first one, or None."""
    count = re.search(rb"(?:Xing|Info)\0\0\0[\1\3\5\7\x09\x0b\x0d\x0f](.{4})|VBRI.{10}(.{4})", header, re.DOTALL)
    return count and int.from_bytes(count[1] or count[2], "big")


def atoms_are_cut(part):
    """Returns True if an MP4 ends before its last atom does, which may be the one that lists the tracks."""
    place = 0
    while len(head := part.at(place, 16)) >= 8 and part.at(4, 4) == b"ftyp":
        size = int.from_bytes(head[:4], "big")
        size = int.from_bytes(head[8:], "big") if size == 1 else size
        if size < 8:  # the atom goes up to the end
            return False
        place += size
    return place > part.end - part.begin


def is_cut(part):
    """Returns True if an AVI, ASF or Ogg ends before its header says, or within a page: FFmpeg does not report it."""
    size, head = part.end - part.begin, part.at(0, 2**16)
    if re.match(b"RIFF....AVI ", head, re.DOTALL) and (place := head.find(b"movi")) > 0:
        stated = int.from_bytes(head[place - 4 : place], "little")
        return stated < 0x7FFFF000 and place + stated > size
    if head.startswith(ASF) and (place := head.find(SIZES)) > 0:
        live = head[place + 88 : place + 89] in (b"\1", b"\3")  # a live one has no size
        return not live and int.from_bytes(head[place + 40 : place + 48], "little") > size
    data = part.at(max(0, size - 2**17), 2**17) if part.at(0, 4) == b"OggS" else b""
    page = data[max(0, data.rfind(b"OggS")) :]  # it may be far before the end, and whole
    return page[:4] == b"OggS" and (len(page) < 27 or len(page) < 27 + page[26] + sum(page[27 : 27 + page[26]]))


def seconds(start, size):
    """Returns the seconds of FLAC and of WAV, or None where they are in an unusual place, or need not be all."""
    if start[:4] == b"fLaC" and len(start) >= 26 and start[4] & 127 == 0:
        rate = int.from_bytes(start[18:21], "big") >> 4
        samples = int.from_bytes(start[21:26], "big") & (2**36 - 1)
        return samples / rate if rate and samples else None
    if re.match(rb"RIFF....WAVEfmt ", start, re.DOTALL):
        a_second, place = int.from_bytes(start[28:32], "little"), 12
        while len(chunk := start[place : place + 8]) == 8:
            length, place = int.from_bytes(chunk[4:], "little"), place + 8
            if chunk[:4] == b"data":  # much that follows may be more samples, as `correct` finds, or another file
                whole = a_second and length > size - place - 4096
                return min(length, size - place) / a_second if whole and length else None
            place += length + length % 2
    return None
