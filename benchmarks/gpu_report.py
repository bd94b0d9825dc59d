"""Judges and prints the measurements of gpu.py."""

import measure
from problems import cases

# Contestant, column of the table, sign and limit, for the large shapes with full lengths.
AIMS = (
    ("stage: emission forward", "x floor", "<=", 1.18),  # 85% of the bandwidth of a copy
    ("stage: emission backward", "x floor", "<=", 1.18),
    ("ours", "x floor", "<=", 1.25),
    ("torchaudio", "x ours", ">=", 3),
)


def ratios(variant, bandwidth):
    """{contestant: {column: ratio}}"""
    made, times = {}, variant["times"]
    for name, found in times.items():
        moved = variant["bytes"][name if name in variant["bytes"] else "step"]
        floor = found["median"] / (moved / bandwidth) if bandwidth else None
        made[name] = {"x floor": floor, "x ours": "ours" in times and found["median"] / times["ours"]["median"]}
    return made


def aims(record):
    """{what: [measured, aim, met or MISSED]}"""
    rows, large = {}, [case.name for case in cases.GPU_LARGE]

    def judge(what, sign, limit, value):
        if value is not None:
            met = value <= limit if sign == "<=" else value >= limit
            rows[what] = [float(f"{value:.3g}"), f"{sign} {limit}", "met" if met else "MISSED"]

    for variant in record["variants"]:
        if variant["case"] in large and variant["lengths"] == "full":
            found = ratios(variant, record.get("bandwidth"))
            for name, column, sign, limit in AIMS:
                if name in found:
                    what = f"{variant['case']}, {variant['dtype']}: {name}, {column}"
                    judge(what, sign, limit, found[name][column])
            if variant["case"] == large[0] and "stage: lattice" in found:
                judge(f"{large[0]}, {variant['dtype']}: lattice / step", "<=", 0.1, found["stage: lattice"]["x ours"])
    for U, cycles in record.get("cycles_per_diagonal", {}).items():
        if int(U) <= 127:
            judge(f"cycles per diagonal, U = {U}", "<=", 120, cycles)
    if first := record.get("first_call"):
        judge("first call beyond the second, ms", "<=", 50, (first[0] - first[1]) * 1e3)
    return rows


def show(x, digits=3):
    return "" if x is None else f"{x:.{digits}g}" if abs(x) < 10**digits else f"{x:.0f}"


def table_of(variant, bandwidth):
    found, rows = ratios(variant, bandwidth), []
    for name, times in variant["times"].items():
        off = variant["off_ours"].get(name, (None, None))[1]
        bound = "host" if times["host_bound"] else ""
        rows.append((name, show(times["median"] * 1e3), *map(show, found[name].values()), show(off, 1), bound))
    B, T, U1, V = variant["shape"]
    size = f"B={B} T={T} U={U1 - 1} V={V}, {variant['dtype']}, {variant['lengths']} lengths"
    nodes = f"{variant['valid']:.0%} of the nodes valid, {variant['rows_with_posterior']:.0%} with a posterior"
    table = measure.markdown(("", "ms", "x floor", "x ours", "gradient off ours", "bound by"), rows)
    return [f"### {variant['case']}: {size}; {nodes}\n", table]


def report(record):
    text = ["**Dry run: none of these numbers means anything.**\n"] if record["dry_run"] else []
    keys = ("device", "driver_version", "nvcc", "date", "commit", "sm_clock_mhz")
    text.append(measure.markdown(("", ""), [(key, record.get(key)) for key in keys]))
    rows = [(what, *row) for what, row in aims(record).items()]
    text += ["### Aims\n", measure.markdown(("", "measured", "aim", ""), rows)]
    ways = ", ".join(f"{name} {x / 1e9:.0f}" for name, x in record.get("copy_bandwidth", {}).items())
    text.append(f"Copy bandwidth, GB/s read and written: {ways}.\n")
    for variant in record["variants"]:
        text += table_of(variant, record.get("bandwidth"))
    if record.get("kernels"):
        rows = [(f"`{name[:90]}`", count, show(us)) for name, (count, us) in record["kernels"].items()]
        text += ["### Kernels of five steps at the first shape, by the profiler\n"]
        text += [measure.markdown(("", "runs", "us"), rows)]
    if record["errors"]:
        rows = [(what, why.replace("\n", " ")[:200]) for what, why in record["errors"]]
        text += ["### What did not run\n", measure.markdown(("", ""), rows)]
    return "\n".join(text)


def write(record, file):
    """Writes the record with its aims, and the report beside it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(measure.compact(record | {"aims": aims(record)}) + "\n")
    file.with_suffix(".md").write_text(report(record))
