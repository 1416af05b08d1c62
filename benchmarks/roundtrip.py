"""Converts a random model of a real size there and back, and casts it: seconds, MB/s and peak memory of each command.

    python benchmarks/roundtrip.py --size 1.5b --work DIR [--layers N] [--skip native] [--casts 3] [--small-disk]

Every command runs in a process of its own, as a user would type it. The model is written row by row; `infir2 convert
check` proves each way back bit for bit. DIR needs room for three copies of the model in bf16, four with `native`; with
`--small-disk` two and three, because the source is removed while a checkpoint is taken back and then made again from
its seed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from infir2_core import __version__
from infir2_core.config.hf_config import shape_to_hf
from infir2_core.config.presets import load_preset
from infir2_core.convert.folder import tensor_shapes
from infir2_core.convert.safefile import Writer

COMMAND = """
import re, sys
from infir2_cli.main import main
try: main()
finally: print("PEAK", re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1], file=sys.stderr)
"""


def write_model(size: str, layers: int | None, folder: Path) -> int:
    """A random model of a preset's shape; its bytes."""
    shape = load_preset(size).model
    shape = shape if layers is None else shape.model_copy(update={"layers": layers})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape_to_hf(shape)))
    shapes = tensor_shapes(shape)
    writer = Writer(folder / "model.safetensors", {name: (torch.bfloat16, s) for name, s in shapes.items()})
    generator = torch.Generator().manual_seed(1)
    for name, extents in shapes.items():
        step = max(1, (1 << 24) // math.prod(extents[1:]))
        for first in range(0, extents[0], step):
            rows = (min(step, extents[0] - first), *extents[1:])
            writer.write(name, (torch.randn(rows, generator=generator) * 0.02).bfloat16(), first)
    writer.close()
    return sum(2 * math.prod(extents) for extents in shapes.values())


def run(work: Path, nbytes: int, *words: str) -> dict[str, Any]:
    """Runs a command of infir2 and measures it; `load` is what else the machine did in the minute before."""
    load = round(os.getloadavg()[0], 1)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words], cwd=work, env=environment, capture_output=True, text=True
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"infir2 {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    peak = int(re.findall(r"PEAK (\d+)", done.stderr)[0]) / 1e6
    shown: dict[str, Any] = {
        "seconds": round(seconds, 1),
        "mb_per_s": round(nbytes / 1e6 / seconds),
        "peak_gb": round(peak, 2),
    }
    shown["load"] = load
    print(f"{' '.join(words):60} {shown}", file=sys.stderr, flush=True)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="1.5b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--skip", nargs="*", default=[], choices=["native", "megatron", "cast"])
    parser.add_argument("--casts", type=int, default=1, help="how often it is cast")
    parser.add_argument("--small-disk", action="store_true")
    options = parser.parse_args()
    work: Path = options.work
    nbytes = write_model(options.size, options.layers, work / "hf")
    result: dict[str, Any] = {"size": options.size, "layers": options.layers, "bytes": nbytes}
    result |= {
        "version": __version__,
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "machine": platform.processor(),
    }
    start = time.perf_counter()
    shutil.copytree(work / "hf", work / "copy")
    result["copy_mb_per_s"] = round(nbytes / 1e6 / (time.perf_counter() - start))
    shutil.rmtree(work / "copy")
    if "cast" not in options.skip:
        result["cast"] = []
        for _ in range(options.casts):
            shutil.rmtree(work / "fp8", ignore_errors=True)
            result["cast"].append(run(work, nbytes, "cast-fp8", "hf", "fp8", "--pow2-scale", "--device", "cpu"))
        result["verify"] = run(work, nbytes // 2, "convert", "verify", "fp8")
        shutil.rmtree(work / "fp8")
    for layout in ("native", "megatron"):
        if layout in options.skip:
            continue
        steps = {"there": run(work, nbytes, "convert", "from-hf", "hf", layout, "--layout", layout)}
        if options.small_disk:
            (work / "hf/model.safetensors").unlink()
        steps["back"] = run(work, nbytes, "convert", "to-hf", layout, "again", "--origin", "hf")
        shutil.rmtree(work / layout)
        if options.small_disk:
            write_model(options.size, options.layers, work / "hf")
        steps["check"] = run(work, nbytes, "convert", "check", "hf", "again")
        shutil.rmtree(work / "again")
        result[layout] = steps
    shutil.rmtree(work / "hf")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
