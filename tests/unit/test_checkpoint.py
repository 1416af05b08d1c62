"""Checkpoints: what is read back is what was saved, at any number of ranks, and nothing half-written is ever chosen."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infir2_core.errors import InputError, MachineError
from infir2_core.train import manifest
from infir2_core.train.checkpoint import CheckpointStore
from infir2_core.train.shards import NAMES, Shard, ShardFile, row_shard, write_file


def every_dtype(seed: int = 0) -> dict[str, torch.Tensor]:
    """One tensor of each dtype that can be stored, with odd shapes: no dimension, no row, one element."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for index, dtype in enumerate(NAMES):
        shape = [(3, 5), (7,), (), (0, 4), (1,), (2, 3, 2)][index % 6]
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), generator=generator)
        tensors[f"t/{str(dtype)}"] = raw.to(torch.uint8).view(dtype).reshape(shape)
    return tensors


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes; NaNs with equal payloads count as equal."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return bytes(left.reshape(-1).view(torch.uint8).numpy()) == bytes(right.reshape(-1).view(torch.uint8).numpy())


def save(store: CheckpointStore, step: int, seed: int = 0) -> Path:
    store.save(step, every_dtype(seed), {"position": step * 7}, blocking=True)
    return store.folder / manifest.folder_name(step)


def test_round_trip_of_every_dtype_and_the_state(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    state = {"rng": [1, 2**40], "schedule": {"peak": 1.5e-4}, "recipe": "abc", "none": None}
    store.save(12, every_dtype(), state, blocking=True)
    path, reasons = CheckpointStore(tmp_path / "checkpoints").newest()
    assert path == tmp_path / "checkpoints" / "step-00000012" and reasons == []
    loaded = store.load(path)
    assert (loaded.step, loaded.state, loaded.path) == (12, state, path)
    assert loaded.tensors.keys() == every_dtype().keys()
    assert all(same_bits(loaded.tensors[name], tensor) for name, tensor in every_dtype().items())
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "rank-00000.safetensors"]


def test_files_agree_with_the_safetensors_library_both_ways(tmp_path: Path) -> None:
    record = write_file(tmp_path / "ours.safetensors", every_dtype())
    theirs = load_file(tmp_path / "ours.safetensors")
    assert all(same_bits(theirs[name], tensor) for name, tensor in every_dtype().items())
    data = (tmp_path / "ours.safetensors").read_bytes()
    assert record == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert b'"__metadata__":{"format":"pt"}' in data[:200]

    save_file({"w": torch.arange(12.0).reshape(4, 3).bfloat16()}, tmp_path / "theirs.safetensors")
    rows = torch.empty(2, 3, dtype=torch.bfloat16)
    ShardFile(tmp_path / "theirs.safetensors").read_rows("w", 1, rows)
    assert rows.tolist() == [[3, 4, 5], [6, 7, 8]]


def test_manifest_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 1)
    content = json.loads((path / "manifest.json").read_text())
    data = (path / "rank-00000.safetensors").read_bytes()
    assert content["files"] == {
        "rank-00000.safetensors": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    }


def test_updates_in_place_after_save_do_not_reach_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, gate = CheckpointStore(tmp_path), threading.Event()
    prepare = store._prepare
    monkeypatch.setattr(store, "_prepare", lambda job: (gate.wait(10), prepare(job))[1])
    weight, state = torch.arange(6.0).reshape(2, 3).t(), {"position": [1]}
    store.save(1, {"w": weight}, state)
    weight.add_(100)  # the step after the save, while the save has written nothing yet
    state["position"].append(2)
    gate.set()
    store.wait()
    loaded = store.load(tmp_path / "step-00000001")
    assert loaded.tensors["w"].tolist() == [[0, 3], [1, 4], [2, 5]] and loaded.state == {"position": [1]}

    store.save(2, {"w": weight}, state, blocking=True)  # the host buffer is used again
    assert store.load(tmp_path / "step-00000002").tensors["w"].tolist() == [[100, 103], [101, 104], [102, 105]]


# Several ranks


def save_in_ranks(folder: Path, world: int, step: int, full: dict[str, torch.Tensor], block: int) -> None:
    """All ranks of a run as threads: `adam.*` split by rows, the rest replicated."""
    barrier = threading.Barrier(world, timeout=20)
    stores = [
        CheckpointStore(folder, rank=r, world=world, barrier=lambda: barrier.wait() and None) for r in range(world)
    ]
    for rank, store in enumerate(stores):
        shards = {n: row_shard(tuple(t.shape), rank, world, block) for n, t in full.items() if n.startswith("adam")}
        local = {n: full[n][s.offset : s.offset + s.rows] for n, s in shards.items()}
        store.save(step, {**full, **local}, {"rank": rank}, shards)
    for store in stores:
        store.wait()


@pytest.mark.parametrize("written", [1, 2, 3])
@pytest.mark.parametrize("block", [1, 4])
def test_shards_load_whole_or_by_rows_at_any_world_size(tmp_path: Path, written: int, block: int) -> None:
    full = {
        "adam.m/a": torch.randn(13, 4),
        "adam.v/b": torch.randn(9).bfloat16(),
        "adam.m/tiny": torch.randn(1, 3),  # fewer rows than ranks: some write none
        "model/w": torch.randn(5, 2),
        "scalar": torch.tensor(3.5),
    }
    save_in_ranks(tmp_path, written, 4, full, block)
    path, reasons = CheckpointStore(tmp_path).newest()
    assert path is not None and reasons == []
    assert len(list(path.glob("*.safetensors"))) == written
    loaded = CheckpointStore(tmp_path).load(path)
    assert loaded.state == {"rank": 0}
    assert loaded.tensors.keys() == full.keys() and all(torch.equal(loaded.tensors[n], t) for n, t in full.items())
    for world in (1, 2, 3, 5):
        for rank in range(world):
            only = {n: row_shard(tuple(full[n].shape), rank, world) for n in full if n.startswith("adam")}
            part = CheckpointStore(tmp_path).load(path, {**only, "scalar": None}).tensors
            assert part.keys() == {*only, "scalar"}
            for name, shard in only.items():
                assert torch.equal(part[name], full[name][shard.offset : shard.offset + shard.rows])


def test_empty_parts_are_read_too(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {"w": torch.ones(5, 2), "narrow": torch.ones(4, 0)}, {}, blocking=True)
    only = {"w": Shard(3, 0, (5, 2)), "narrow": Shard(1, 2, (4, 0))}
    assert {n: tuple(t.shape) for n, t in store.load(tmp_path / "step-00000001", only).tensors.items()} == {
        "w": (0, 2),
        "narrow": (2, 0),
    }
    assert store.load(tmp_path / "step-00000001").tensors["narrow"].shape == (4, 0)


def test_row_shards_partition_the_rows_on_block_borders() -> None:
    for rows in range(0, 40):
        for world in range(1, 6):
            for block in (1, 4, 128):
                shards = [row_shard((rows, 2), rank, world, block) for rank in range(world)]
                covered = [row for shard in shards for row in range(shard.offset, shard.offset + shard.rows)]
                assert covered == list(range(rows))
                assert all(shard.offset % block == 0 for shard in shards if shard.rows)


def test_a_rank_that_fails_stops_the_save_on_all_and_hangs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = threading.Barrier(2, timeout=20)
    stores = [CheckpointStore(tmp_path, rank=r, world=2, barrier=lambda: barrier.wait() and None) for r in range(2)]

    def broken(job: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(stores[1], "_write", broken)
    for store in stores:
        store.save(3, {"w": torch.ones(2)}, {})
    with pytest.raises(MachineError, match="rank 1 did not finish"):
        stores[0].wait()
    with pytest.raises(MachineError, match="Input/output error"):
        stores[1].wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([Shard(0, 2, (5,)), Shard(3, 2, (5,))], "do not meet"),  # row 2 is nobody's
        ([Shard(0, 3, (5,)), Shard(2, 3, (5,))], "do not meet"),  # row 2 is written twice
        ([Shard(0, 2, (5,)), Shard(2, 2, (5,))], "4 rows written"),
        ([Shard(0, 2, (4,)), Shard(2, 3, (5,))], "another dtype or shape"),
    ],
)
def test_rows_that_do_not_cover_the_tensor_are_refused(tmp_path: Path, shards: list[Shard], message: str) -> None:
    barrier = threading.Barrier(2, timeout=20)
    stores = [CheckpointStore(tmp_path, rank=r, world=2, barrier=lambda: barrier.wait() and None) for r in range(2)]
    for store, shard in zip(stores, shards, strict=True):
        store.save(1, {"w": torch.ones(shard.rows)}, {}, {"w": shard})
    with pytest.raises(ValueError, match=message):
        stores[0].wait()
    with pytest.raises(MachineError, match="not completed"):
        stores[1].wait()
    assert CheckpointStore(tmp_path).newest() == (None, [])


def test_a_tensor_that_only_rank_1_has_is_not_lost_in_silence(tmp_path: Path) -> None:
    barrier = threading.Barrier(2, timeout=20)
    stores = [CheckpointStore(tmp_path, rank=r, world=2, barrier=lambda: barrier.wait() and None) for r in range(2)]
    stores[0].save(1, {"w": torch.ones(1)}, {})
    stores[1].save(1, {"w": torch.ones(1), "extra": torch.ones(1)}, {})
    with pytest.raises(ValueError, match="extra"):
        stores[0].wait()


# Damage


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 2)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def reformat(file: Path) -> None:
    file.write_text(file.read_text().replace('"format": 1', '"format": 99'))


def redigit(file: Path) -> None:
    text = file.read_text()
    assert '"position": 70' in text
    file.write_text(text.replace('"position": 70', '"position": 71'))


def drop_tensor(file: Path) -> None:
    """A tensor file without one tensor, with a manifest that knows its new size and hash."""
    record = write_file(file, dict(list(every_dtype().items())[1:]))
    content = json.loads((file.parent / "manifest.json").read_text())
    del content["sha256"]
    content["files"][file.name] = record
    (file.parent / "manifest.json").write_text(manifest.seal(content))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("manifest.json", Path.unlink, "manifest is missing"),
        ("manifest.json", truncate, "manifest is damaged"),
        ("manifest.json", redigit, "does not match its sha256"),
        ("manifest.json", reformat, "checkpoint format 99 is unknown"),
        ("rank-00000.safetensors", Path.unlink, "missing"),
        ("rank-00000.safetensors", truncate, "truncated"),
        ("rank-00000.safetensors", flip, "sha256"),
    ],
)
def test_damage_is_named_and_the_checkpoint_before_it_is_used(tmp_path: Path, file: str, damage, message: str) -> None:
    store = CheckpointStore(tmp_path)
    older, newer = save(store, 5), save(store, 10)
    damage(newer / file)
    with pytest.raises(InputError, match=message) as caught:
        store.load(newer)
    assert str(newer / file) in caught.value.where and caught.value.exit_code == 3
    path, reasons = store.newest()
    assert path == older
    assert len(reasons) == 1 and "step-00000010" in reasons[0] and message in reasons[0]
    assert store.load(older).step == 5


def test_a_tensor_missing_from_its_file_or_from_the_manifest_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save(store, 1)
    with pytest.raises(InputError, match="'t/torch.float33' is missing") as caught:
        store.load(path, {"t/torch.float33": None})
    assert "t/torch.float32" in caught.value.hint
    with pytest.raises(InputError, match=r"is \[3, 5\] here, \[4, 5\] is expected"):
        store.load(path, {"t/torch.float64": Shard(0, 1, (4, 5))})
    drop_tensor(path / "rank-00000.safetensors")
    with pytest.raises(InputError, match="'t/torch.float64' is missing"):
        store.load(path)


def test_damage_done_after_a_check_is_seen(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save(store, 1)
    assert store.newest()[0] == path
    flip(path / "rank-00000.safetensors")
    assert store.newest()[0] is None
    with pytest.raises(InputError, match="sha256"):
        store.load(path)


def test_a_damaged_step_is_replaced_when_training_reaches_it_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save(store, 5)
    flip(path / "rank-00000.safetensors")
    assert store.newest()[0] is None
    save(store, 5, seed=1)
    assert store.newest() == (path, [])
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]
    assert all(same_bits(store.load(path).tensors[n], t) for n, t in every_dtype(1).items())


# Housekeeping


def steps(folder: Path) -> list[int]:
    return sorted(int(p.name.split("-")[1]) for p in folder.iterdir())


def test_retire_keeps_the_newest_and_the_milestones_until_decay_is_done(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_every=100)
    for step in (50, 100, 150, 200, 220, 240):
        save(store, step)
    removed = store.retire(decay_done=False)
    assert steps(tmp_path) == [100, 200, 220, 240] and {p.name for p in removed} == {"step-00000050", "step-00000150"}
    assert store.retire(decay_done=False) == []
    store.retire(decay_done=True)
    assert steps(tmp_path) == [220, 240]


def test_retire_never_counts_a_damaged_checkpoint_as_one_to_keep(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_every=0)
    for step in (1, 2, 3, 4):
        save(store, step)
    truncate(tmp_path / "step-00000004" / "rank-00000.safetensors")
    flip(tmp_path / "step-00000003" / "rank-00000.safetensors")
    assert store.newest()[0] == tmp_path / "step-00000002"
    store.retire(decay_done=True)
    assert steps(tmp_path) == [2, 3, 4]


def test_clean_removes_leftovers_and_restores_a_checkpoint_caught_between_renames(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    one, two = save(store, 1), save(store, 2)
    (tmp_path / "step-00000003.tmp").mkdir()
    (tmp_path / "step-00000003.tmp" / "rank-00000.safetensors").write_bytes(b"half")
    shutil.copytree(one, tmp_path / "step-00000000.retired.tmp")
    two.rename(tmp_path / "step-00000002.replaced.tmp")
    assert store.newest() == (one, [])
    assert {p.name for p in store.clean()} == {"step-00000000.retired.tmp", "step-00000003.tmp"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    assert store.newest() == (two, [])


# Full disk, no permission, arguments that cannot be saved


def test_a_file_size_limit_is_reported_with_bytes_and_earlier_checkpoints_stay(tmp_path: Path) -> None:
    script = """
        import resource, sys, torch
        from pathlib import Path
        from infir2_core.errors import MachineError
        from infir2_core.train.checkpoint import CheckpointStore
        store = CheckpointStore(Path(sys.argv[1]))
        store.save(1, {"w": torch.ones(10)}, {}, blocking=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        store.save(2, {"w": torch.ones(100_000)}, {})  # returns: the writing is in the background
        try:
            store.save(3, {"w": torch.ones(10)}, {})
        except MachineError as error:
            print(error.exit_code, error)
        store.save(3, {"w": torch.full((10,), 3.0)}, {}, blocking=True)  # and the store still works
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 no room for checkpoint step-00000002: it needs 1448576 bytes")
    assert str(tmp_path / "step-00000002") in done.stdout
    assert steps(tmp_path) == [1, 3]
    store = CheckpointStore(tmp_path)
    assert store.load(tmp_path / "step-00000001").tensors["w"].tolist() == [1.0] * 10
    assert store.newest()[0] == tmp_path / "step-00000003"


def test_a_full_disk_is_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    older = save(store, 1)
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("infir2_core.train.checkpoint.shutil.disk_usage", lambda path: usage)
    with pytest.raises(MachineError, match=r"needs \d+ bytes .*, 1000 are free"):
        save(store, 2)
    assert store.newest() == (older, []) and steps(tmp_path) == [1]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_really_full_file_system(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this container may not mount")
    try:
        store = CheckpointStore(tmp_path)
        older = save(store, 1)
        with pytest.raises(MachineError, match="no room"):
            store.save(2, {"w": torch.ones(600_000)}, {}, blocking=True)
        assert store.newest() == (older, []) and steps(tmp_path) == [1]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_no_permission_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    store = CheckpointStore(tmp_path / "checkpoints")
    if os.geteuid() == 0:  # root may write anywhere, so the refusal is played
        monkeypatch.setattr(Path, "mkdir", refuse)
    else:
        tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="no permission") as caught:
        store.save(1, {"w": torch.ones(1)}, {}, blocking=True)
    assert "Permission denied" in caught.value.where and "make" in caught.value.hint


def test_arguments_that_cannot_be_saved_are_refused_at_once(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(ValueError, match="complex64"):
        store.save(1, {"w": torch.ones(1, dtype=torch.complex64)}, {})
    with pytest.raises(ValueError, match="its shard says"):
        store.save(1, {"w": torch.ones(3)}, {}, {"w": Shard(0, 2, (4,))})
    with pytest.raises(ValueError, match="JSON"):
        store.save(1, {}, {"loss": float("nan")})
    with pytest.raises(ValueError, match="needs a barrier"):
        CheckpointStore(tmp_path, world=2)
    store.wait()
    assert list(tmp_path.iterdir()) == []


# Kills

WRITER = """
import sys
from pathlib import Path
import torch
from infir2_core.train.checkpoint import CheckpointStore

store = CheckpointStore(Path(sys.argv[1]), keep_last=2, keep_every=10)
store.clean()
path, reasons = store.newest()
step = 0
if path is not None:
    loaded = store.load(path)
    step = loaded.step
    assert loaded.state["step"] == step and all(int(t.flatten()[0]) == step for t in loaded.tensors.values())
print("start", step, flush=True)
while step < int(sys.argv[2]):
    step += 1
    tensors = {f"w{i}": torch.full((50, 50), float(step)) for i in range(4)}
    store.save(step, tensors, {"step": step})
    store.retire(decay_done=False)
    print(step, flush=True)
store.wait()
"""


def run_writer(folder: Path, until: int, fault: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(until)],
        env={**os.environ, "INFIR2_FAULT": fault, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def check_consistent(folder: Path) -> int:
    """The newest checkpoint is whole and of one step; returns that step (0: none)."""
    store = CheckpointStore(folder)
    store.clean()
    assert not list(folder.glob("*.tmp"))
    path, reasons = store.newest()
    assert reasons == []  # a kill leaves nothing that looks like a checkpoint and is none
    if path is None:
        return 0
    loaded = store.load(path)
    assert loaded.step == loaded.state["step"] == manifest.step_of(path)
    assert {int(value) for t in loaded.tensors.values() for value in t.flatten()} == {loaded.step}
    return loaded.step


def test_kills_at_each_point_of_a_save_and_at_random_times_lose_at_most_the_save_under_way(tmp_path: Path) -> None:
    expected = 0
    for place, kept in (("after-tensors", 0), ("before-rename", 0), ("after-rename", 1)):
        target = expected + 4
        process = run_writer(tmp_path, 10_000, f"kill:save:{place}@step={target}")
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        # (The main thread may have been removing an old one when the process died.)
        left_aside = [p.name for p in tmp_path.glob("*.tmp") if ".retired" not in p.name]
        assert left_aside == ([] if kept else [f"step-{target:08d}.tmp"])
        expected = check_consistent(tmp_path)
        assert expected == target - 1 + kept

    source = random.Random(7)
    for _ in range(7):
        process = run_writer(tmp_path, 10_000)
        assert process.stdout is not None
        assert process.stdout.readline() == f"start {expected}\n"
        time.sleep(source.uniform(0.0, 0.15))
        process.kill()
        printed = [int(line) for line in process.communicate()[0].split()]
        reached = check_consistent(tmp_path)
        # A printed step was handed to the writer after the save before it had ended.
        assert reached >= (printed[-1] - 1 if printed else expected)
        expected = reached

    process = run_writer(tmp_path, expected + 2)
    process.communicate(timeout=60)
    assert process.returncode == 0 and check_consistent(tmp_path) == expected + 2
