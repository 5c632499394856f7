"""The table, the targets and the plot, from the JSON that the measurements gave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Found = dict[str, Any]


def table(found: Found) -> str:
    """Everything that was measured, as text."""
    facts = found["facts"]
    lines = [f"{facts['date']}  {'; '.join(facts['gpus'])}  {facts['versions']}"]
    if "insertion" in found:
        lines += _insertion(found["insertion"])
    if "single" in found:
        lines += ["", "single calls: host us (p10, p90), us until done"]
        lines += [
            f"  {name:40} {row['host_us']:9.1f} {row['p10_p90']!s:18} {row['total_us']:9.1f}"
            for name, row in found["single"].items()
        ]
    if "output" in found:
        lines += ["", "output path: host us, then GPU us on the compute stream"]
        lines += [
            f"  {name:40} {row['host_us']:9.1f} {row['p10_p90']}" for name, row in found["output"]["host"].items()
        ]
        lines += [f"  GPU, {name:35} {us:9.1f}" for name, us in found["output"]["gpu_us_on_compute_stream"].items()]
    if "stages" in found:
        lines += ["", "stages of an insertion, us"]
        for case, row in found["stages"].items():
            parts = ", ".join(f"{name} {us:.0f}" for name, us in row.items())
            lines.append(f"  {case:10} {parts}; sum {sum(row.values()):.0f}")
    rows = found.get("gap") or found.get("hal-gap") or found.get("rows")
    if rows:
        lines += _gap(rows, found.get("ranks", 1))
    if "broadcast" in found:
        lines += ["", f"NCCL broadcast, {found['ranks']} ranks: {found['broadcast']}"]
    if "soak" in found:
        lines += [
            "",
            f"{found['soak']['inserts']} insertions in {found['soak']['seconds']} s: {found['soak']['growth']}",
        ]
    lines += ["", *targets(found)]
    return "\n".join(lines)


def _insertion(found: Found) -> list[str]:
    lines = ["", f"insertion, medians of {found['rounds']}: host us idle (p10, p90), host us behind 20 ms, GPU us"]
    for row in found["rows"]:
        case = f"{row['requests']} x {row['tokens']}"
        idle = f"{row['host_idle_us']:10.1f} {row['host_idle_p10_p90']!s:20}"
        others = [f"{us:10.1f}" if us is not None else f"{'-':>10}" for us in (row["host_busy_us"], row["gpu_us"])]
        lines.append(f"  {case:11} {row['way']:20} {idle} {' '.join(others)}")
    wrong = found["differences"]
    return [*lines, f"  all ways leave the same state: {wrong or 'yes'}"]


def _gap(rows: list[Found], ranks: int) -> list[str]:
    lines = ["", f"decode gap, {ranks} rank(s): ms (p90), host ms a step"]
    for row in rows:
        head = f"{row['way']:20} {row['decode_ms']:4.0f} ms, {row['inserts']:2} inserts, {row['mode']:10}"
        lines.append(f"  {head} {row['gap_ms']:8.3f} {row['gap_p90_ms']:8.3f} {row['host_ms']:8.3f}")
        if row["host_parts_us"] and row["inserts"] in (1, 16):
            lines.append(f"    host us: {', '.join(f'{name} {us:.0f}' for name, us in row['host_parts_us'].items())}")
    return lines


def _row(rows: list[Found], **wanted: object) -> Found:
    return next(row for row in rows if all(row[key] == value for key, value in wanted.items()))


def targets(found: Found) -> list[str]:
    """Return the targets against the measurements."""
    checks: list[tuple[str, float, float]] = []
    if "insertion" in found:
        rows = found["insertion"]["rows"]
        big = _row(rows, requests=128, way="hal")
        checks += [
            ("insert 128 x 1024, host us", big["host_idle_us"], 200),
            ("insert 128 x 1024, host us, GPU busy", big["host_busy_us"], 200),
            ("insert 128 x 1024, GPU us", big["gpu_us"], 50),
            ("insert 1 x 1024, host us", _row(rows, requests=1, way="hal")["host_idle_us"], 50),
        ]
        for way, least in (("(b) per field", 300), ("(c) staged", 100)):
            ratio = _row(rows, requests=128, way=way)["host_idle_us"] / big["host_idle_us"]
            checks.append((f"insert 128 x 1024, hal / {way}, parts in 1000", 1000 / ratio, 1000 / least))
    if "single" in found:
        single = found["single"]
        checks.append(("async_set_value of a scalar, host us", single["scalar: hal"]["host_us"], 8))
        best = single["1 MB: hal"]["total_us"]
        checks.append(
            ("1 MB / driver copy from pinned", best / single["1 MB: driver copy from pinned"]["total_us"], 1.2)
        )
        apart = single["1 MB: memcpy to pinned, driver copy"]["total_us"]
        checks.append(("1 MB / memcpy to pinned and driver copy", best / apart, 1.2))
    if "output" in found:
        checks.append(("save_output, host us", found["output"]["host"]["save_output, discarded"]["host_us"], 20))
    rows = found.get("gap") or found.get("hal-gap") or found.get("rows") or []
    if rows:
        several = "ranks" in found
        for mode, limit in (("overlapped", 0.3 if several else 0.03), ("waits", 0.4)):
            ours = [r["gap_ms"] for r in rows if r["way"] == "hal" and r["inserts"] == 16 and r["mode"] == mode]
            checks.append((f"gap at 16 inserts, {mode}, ms (worst of the steps)", max(ours), limit))
    return [
        f"{'reached' if value <= limit else 'MISSED ':7} {name}: {value:.3g} (at most {limit:.3g})"
        for name, value, limit in checks
    ]


def plot(out: Path) -> None:
    """Draw ``gpu-bench.png`` from the JSON files found; print a line if matplotlib is missing."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        print("matplotlib is not installed: no plot")
        return
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    one, several = _read(out / "gpu-bench.json"), _read(out / "gpu-bench-ranks.json")
    figure, axes = plt.subplots(2, 2, figsize=(13, 9))
    if "insertion" in one:
        for axis, key, title in (
            (axes[0][0], "host_idle_us", "Insertion: host time, GPU idle (us)"),
            (axes[0][1], "gpu_us", "Insertion: GPU time (us)"),
        ):
            _bars(axis, one["insertion"]["rows"], lambda r: f"{r['requests']} x {r['tokens']}", key, title)
    for axis, found, title in (
        (axes[1][0], one.get("gap", []), "1 rank"),
        (axes[1][1], several.get("rows", []), f"{several.get('ranks', '?')} ranks meeting each step"),
    ):
        chosen = [r for r in found if r["inserts"] == 16]
        name = f"Gap between decode steps, 16 inserts a step, {title} (ms)"
        _bars(axis, chosen, lambda r: f"{r['decode_ms']:.0f} ms\n{r['mode']}", "gap_ms", name)
    gpu = (one or several).get("facts", {})
    figure.suptitle(f"{'; '.join(gpu.get('gpus', [])[:1])}, {gpu.get('date', '')}")
    figure.tight_layout()
    figure.savefig(out / "gpu-bench.png", dpi=80)


def _read(path: Path) -> Found:
    found: Found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def _bars(axis: Any, rows: list[Found], case: Any, key: str, title: str) -> None:  # noqa: ANN401 (matplotlib's)
    cases = list(dict.fromkeys(case(row) for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    for at, way in enumerate(ways):
        heights = {case(row): row[key] for row in rows if row["way"] == way and row[key] is not None}
        places = [i + (at - (len(ways) - 1) / 2) * 0.16 for i, c in enumerate(cases) if c in heights]
        axis.bar(places, [heights[c] for c in cases if c in heights], 0.15, label=way)
    axis.set_xticks(range(len(cases)), cases, fontsize=8)
    axis.set_yscale("log")
    axis.set_title(title, fontsize=10)
    if rows:
        axis.legend(fontsize=7)
