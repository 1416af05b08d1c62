"""SGLang serves the FP8 folders of both scale rules, against two forwards of ours with the same codes.

Our decoder with an FP8 recipe multiplies the codes that the cast writes by activations that it quantises the same way,
1x128. Which rule the server used for its activations is recorded: the one whose log-probabilities are closer. The
decoder rounds at other places than the server, which moves FP8 codes everywhere; `served` rounds where the server does,
so what is left is the order of sums, as between two servings.

    INFIR2_SGLANG_PYTHON=/path/to/python INFIR2_SGLANG_MODEL=HF_DIR pytest -s tests/gpu/test_sglang_fp8.py

The interpreter is that of an environment with SGLang; the model is a trained one in bf16.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from served import Served

pytestmark = pytest.mark.gpu

PYTHON, MODEL = os.environ.get("INFIR2_SGLANG_PYTHON", ""), os.environ.get("INFIR2_SGLANG_MODEL", "")
OPTIONS = (
    "--dtype bfloat16 --attention-backend triton --sampling-backend pytorch --grammar-backend none "
    "--fp8-gemm-backend triton --disable-cuda-graph --mem-fraction-static 0.3 --skip-server-warmup "
    # Short chunks, cut elsewhere in a batch than alone: whole prompts give the same bits at every batch size.
    "--chunked-prefill-size 96"
).split()
READY_S = 600.0


def free_port() -> int:
    """A free port below 50,000: the server opens another one 10,000 above it."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            port = random.randrange(20_000, 50_000)
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def server(folder: Path, log: Path) -> Iterator[str]:
    """A running server for `folder`; its address."""
    port = free_port()
    command = [PYTHON, "-m", "sglang.launch_server", "--model-path", str(folder), *OPTIONS]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
    environment.pop("PYTHONPATH", None)
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + READY_S
    try:
        while True:
            assert child.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(2)
        yield address
    finally:
        with suppress(ProcessLookupError):  # it died by itself, and the error above says of what
            os.killpg(child.pid, 15)
        child.wait(60)


def teacher_forced(address: str, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of every token after the one that begins each row, and the best token there; all rows in one request."""
    body = {
        "input_ids": rows, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }  # fmt: skip
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/generate", json.dumps(body).encode(), head)
    answers: Any = json.load(urllib.request.urlopen(request, timeout=600))
    infos = [answer["meta_info"] for answer in answers]
    scores = [float(entry[0]) for info in infos for entry in info["input_token_logprobs"][1:]]
    best = [int(entry[0][1]) for info in infos for entry in info["input_top_logprobs"][1:]]
    return torch.tensor(scores), torch.tensor(best)


def reference(
    folder: Path, activations: str, weights: str, rows: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the rows by our decoder with these scale rules, its best token, the gap of its two best."""
    from infir2_core.config.hf_config import shape_from_hf
    from infir2_core.data.batch import rows_to_batch
    from infir2_core.model.decoder import Decoder
    from infir2_core.model.hf import load_hf
    from infir2_core.precision.recipe import load_recipe

    recipe = load_recipe("infir2")
    rules = {"tile": activations, "square": weights}
    specs = {name: spec.model_copy(update={"scale": rules[name]}) for name, spec in recipe.specs.items()}
    shape = shape_from_hf(json.loads((folder / "config.json").read_text()), str(folder))
    model = Decoder(shape, recipe.model_copy(update={"specs": specs}), "cuda")
    load_hf(model, folder)
    with torch.no_grad():
        logits = [model.logits(rows_to_batch([torch.tensor(row)]).to("cuda")) for row in rows]
    return scored(logits, rows)


def scored(logits: list[torch.Tensor], rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the rows' tokens, the best token, the gap of the two best."""
    # The server multiplies by the head in bf16 and takes its softmax of what that leaves.
    scores = torch.cat(logits).bfloat16().float().log_softmax(-1).cpu()
    targets = torch.cat([torch.tensor(row[1:]) for row in rows])
    best = torch.cat(logits).log_softmax(-1).cpu().topk(2)
    return scores.gather(1, targets[:, None])[:, 0], best.indices[:, 0], best.values[:, 0] - best.values[:, 1]


@pytest.mark.parametrize("rule", ["pow2", "fp32"])
def test_served_log_probabilities_are_those_of_our_forward(tmp_path: Path, rule: str) -> None:
    if not PYTHON or not MODEL:
        pytest.skip("INFIR2_SGLANG_PYTHON and INFIR2_SGLANG_MODEL are not set")
    from infir2_core.convert.cast import cast
    from infir2_core.convert.cast_plan import plan_cast
    from infir2_core.convert.folder import open_folder
    from infir2_core.data.tokenizer import load_tokenizer

    source, folder = Path(MODEL), tmp_path / "fp8"
    cast(plan_cast(open_folder(source), rule == "pow2"), folder, "cuda")
    text = Path(shutil.__file__).read_text() + Path(json.__file__).read_text()
    ids = load_tokenizer(MODEL).encode(text)
    rows = [ids[start : start + 200] for start in range(0, 3200, 200)]
    with server(folder, tmp_path / "server.log") as address:
        together, chosen = teacher_forced(address, rows)
        alone = torch.cat([teacher_forced(address, [row])[0] for row in rows])
    noise = float((together - alone).abs().mean())
    found = {kind: reference(source, kind, rule, rows) for kind in ("pow2", "fp32")}
    deltas = {kind: float((together - scores).abs().mean()) for kind, (scores, _, _) in found.items()}
    used = min(deltas, key=deltas.__getitem__)
    same_rounding, *_ = scored([Served.load(folder, "cuda").logits(row[:-1]) for row in rows], rows)
    as_served = float((together - same_rounding).abs().mean())
    facts = {"weights": rule, "activations": used, "delta": deltas, "as_served": as_served, "noise": noise}
    print(json.dumps(facts))
    _, best, gap = found[used]
    assert torch.equal(chosen[gap > 0.1], best[gap > 0.1])
    assert used == "fp32"  # which `served` does
    assert deltas[used] <= 0.05
    assert as_served <= 2 * noise
