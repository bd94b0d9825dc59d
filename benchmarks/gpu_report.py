"""Judges and prints the measurements of benchmarks/gpu.py and the exit codes of the parts of benchmarks/gpu.sh.

python benchmarks/gpu_report.py RESULT.json [PARTS.tsv]     # adds the parts to the JSON; writes RESULT.md beside it
"""

import json
import sys
from pathlib import Path


def aims(record):
    """(what, value, aim, met) of every aim; value and met are None if it was not measured."""
    rows = []
    variants = {(v["case"], v["dtype"], v["lengths"]): v for v in record["variants"]}
    large = record["large"]
    bandwidth = record.get("bandwidth")

    def time_of(variant, name):
        return variant["times"].get(name, {}).get("median") if variant else None

    def judge(what, sign, limit, value):
        met = None if value is None else bool(value <= limit if sign == "<=" else value >= limit)
        rows.append((what, value, f"{sign} {limit}", met))

    def ratio(above, below):
        return above / below if above and below else None

    def share_of_bandwidth(variant, name, moved=None):
        bytes_moved = variant and variant["bytes"].get(moved or name)
        return ratio(bytes_moved, (time_of(variant, name) or 0) * (bandwidth or 0))

    for dtype in ("float32", "bfloat16"):
        for case in large:
            v = variants.get((case, dtype, "full"))
            for stage in ("forward", "backward"):
                what = f"{case}, {dtype}: emission {stage}, share of the copy bandwidth"
                judge(what, ">=", 0.85, share_of_bandwidth(v, f"stage: emission {stage}"))
    for dtype in ("float32", "bfloat16"):
        for case in large:
            v = variants.get((case, dtype, "full"))
            judge(f"{case}, {dtype}: step / floor", "<=", 1.25, ratio(1, share_of_bandwidth(v, "ours", "step")))
    for case in large:
        v = variants.get((case, "float32", "full"))
        judge(f"{case}, float32: torchaudio / ours", ">=", 3, ratio(time_of(v, "torchaudio"), time_of(v, "ours")))
    v = variants.get((large[0], "float32", "full"))
    judge(f"{large[0]}, float32: lattice / step", "<=", 0.1, ratio(time_of(v, "stage: lattice"), time_of(v, "ours")))
    for U, cycles in record.get("cycles_per_diagonal", {}).items():
        if int(U) <= 127:
            judge(f"cycles per diagonal, U = {U}", "<=", 120, cycles)
    for name in ("ours", "ours, in place", "value"):
        planes = v.get("extra_planes", {}).get(name) if v else None
        judge(f"{large[0]}, float32: {name}: extra memory, float32 planes", "<=", 4, planes)
    first, second = record.get("first_call") or (None, None)
    judge("first call beyond the second, ms", "<=", 50, None if first is None else (first - second) * 1e3)
    return rows


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|---|" + "--:|" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]) + "\n"


def show(x, digits=3):
    return "" if x is None else f"{x:.{digits}g}" if abs(x) < 10**digits else f"{x:.0f}"


def markdown(record):
    """The report of a record."""
    bandwidth = record.get("bandwidth")
    text = ["**Dry run: none of these numbers means anything.**\n"] if record["dry_run"] else []
    keys = ("device", "driver_version", "nvcc", "date", "commit", "sm_clock_mhz")
    text.append(table(("", ""), [(key, record.get(key)) for key in keys]))
    if record.get("parts"):
        text.append(table(("part", "seconds", "exit code"), record["parts"]))
    text.append("### Aims\n")
    words = {None: "not measured", True: "met", False: "MISSED"}
    text.append(table(("", "measured", "aim", ""), [(w, show(x), a, words[met]) for w, x, a, met in aims(record)]))
    ways = ", ".join(f"{name} {x / 1e9:.0f}" for name, x in record.get("copy_bandwidth", {}).items())
    text.append(f"Copy bandwidth, GB/s read and written: {ways}.\n")
    for v in record["variants"]:
        B, T, U1, V = v["shape"]
        text.append(f"### {v['case']}: B={B} T={T} U={U1 - 1} V={V}, {v['dtype']}, {v['lengths']} lengths\n")
        floors = {name: x / bandwidth for name, x in v["bytes"].items()} if bandwidth else {}
        ours = v["times"].get("ours", {}).get("median")
        rows = []
        for name, found in v["times"].items():
            floor = floors.get(name if name.startswith("stage") else "step")
            off = v["off_ours"].get(name, (None, None))[1]
            rows.append(
                (
                    name,
                    show(found["median"] * 1e3),
                    show(floor and found["median"] / floor),
                    show(ours and found["median"] / ours),
                    show(off, 1),
                    "host" if found["host_bound"] else "",
                )
            )
        text.append(table(("", "ms", "x floor", "x ours", "gradient off ours", "bound by"), rows))
        shares = f"{v['valid']:.0%} of the nodes inside the lengths, {v['rows_with_posterior']:.0%} with a posterior"
        text.append(f"Floor {show(floors.get('step', 0) * 1e3)} ms; {shares}.\n")
    if record.get("kernels"):
        rows = [(f"`{name[:90]}`", count, show(us)) for name, (count, us) in record["kernels"].items()]
        text += ["### Kernels of five steps at the first shape, by the profiler\n", table(("", "runs", "us"), rows)]
    if record.get("answers"):
        text.append("### Answers to small questions\n")
        rows = []
        for question in record["answers"]:
            for name, answer in question.items():
                if isinstance(answer, dict):
                    verdict = answer.get("error") or ("right" if answer["right"] else "WRONG")
                    off = [show(answer.get(key)) for key in ("loss_off", "gradient_off")]
                    rows.append((question["what"], name, *off, verdict))
        text.append(table(("", "who", "loss off", "gradient off", ""), rows))
    if record["errors"]:
        text += [
            "### What did not run\n",
            table(("", ""), [(w, e.replace("\n", " ")[:200]) for w, e in record["errors"]]),
        ]
    return "\n".join(text)


def write(record, file):
    """Writes the record with its aims, and the report beside it."""
    record = record | {"aims": [dict(zip(("what", "value", "aim", "met"), row)) for row in aims(record)]}
    file.write_text(json.dumps(record, indent=1) + "\n")
    file.with_suffix(".md").write_text(markdown(record))


def main():
    file, *parts = map(Path, sys.argv[1:])
    record = json.loads(file.read_text())
    if parts:
        record["parts"] = [line.split("\t") for line in parts[0].read_text().splitlines()]
    write(record, file)


if __name__ == "__main__":
    main()
