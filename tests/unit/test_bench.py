"""The arithmetic of comparisons: medians, ratios, regressions, gaps, and what is said about published figures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from infir2_core.bench import baseline, compare, story, tune
from infir2_core.bench.arm import ArmSpec, ArmTimes, guarded, measure, smaller, text_tokens
from infir2_core.bench.child import Child
from infir2_core.bench.profile import group_of, summarise
from infir2_core.config.presets import load_preset
from infir2_core.errors import InputError, MachineError
from infir2_core.report import bench as report

SPEC = ArmSpec("tiny", "bf16", seq_len=100, rows=2, device="cpu")


def times(scale: float, peak: float | None = 10.0) -> ArmTimes:
    ms = {"forward": [1.0, 3.0, 2.0], "backward": [4.0, 6.0, 5.0], "optimizer": [1.0, 1.0, 1.0]}
    return ArmTimes(ms={k: [scale * v for v in values] for k, values in ms.items()}, peak_gb=peak, reserved_gb=peak)


def fake(found: dict[str, list[ArmTimes]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hands out prepared results instead of starting processes; returns the order in which arms ran."""
    order: list[str] = []

    class Fake:
        def __init__(self, module: str, spec: ArmSpec) -> None:
            self.recipe = spec.recipe

        def tell(self) -> None:
            order.append(self.recipe)

        def result(self) -> ArmTimes:
            return found[self.recipe][order.count(self.recipe) - 1]

    monkeypatch.setattr(compare, "Child", Fake)
    return order


def test_medians_ratios_and_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order = fake({"bf16": [times(1), times(1)], "infir2": [times(0.5, 5.0), times(0.5, 4.0)]}, monkeypatch)
    base, ours = compare.run(compare.arms(SPEC, ["infir2"], peer=False), turns=2)
    assert order == ["bf16", "infir2", "bf16", "infir2"]
    assert base.ms == {"forward": 2.0, "backward": 5.0, "optimizer": 1.0, "forward+backward": 7.0, "step": 8.0}
    assert base.spread["step"] == [6.0, 10.0]
    assert ours.ratio["step"] == 0.5 and ours.ratio["tok_per_s"] == 2.0 and ours.ratio["peak_gb"] == 0.5
    assert base.tok_per_s == 200 / 8.0 * 1e3
    flops = load_preset("tiny").model.flops_per_token(100)
    assert base.tflops == pytest.approx(base.tok_per_s * flops / 1e12)


def test_an_arm_that_does_not_fit_is_a_row_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    full = ArmTimes(failed="does not fit: tried to allocate 20.00 GiB")
    order = fake({"bf16": [full], "infir2": [times(1), times(1)]}, monkeypatch)
    rows = compare.run(compare.arms(SPEC, ["infir2"], peer=False), turns=2)
    assert order == ["bf16", "infir2", "infir2"]  # what did not fit is not tried again
    assert rows[0].failed and not rows[1].failed and rows[1].ratio == {}
    assert "20.00 GiB" in report.table_rows(rows)[0][1]
    fake({"bf16": [full], "infir2": [full]}, monkeypatch)
    with pytest.raises(MachineError, match="20.00 GiB"):
        compare.run(compare.arms(SPEC, ["infir2"], peer=False), turns=1)


def test_a_process_that_dies_is_told_with_its_last_words() -> None:
    child = Child(compare.OURS, ArmSpec("huge", "bf16", 8, 1, device="cpu"))
    child.tell()
    failed = child.result().failed
    assert "ended with 1" in failed and "no preset for size 'huge'" in failed


def test_the_next_arm_gets_ready_while_one_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card; and what is ready for an arm that failed meanwhile, or that an error leaves over, is ended."""
    happened: list[str] = []

    class Recorded:
        def __init__(self, module: str, spec: ArmSpec) -> None:
            self.recipe = spec.recipe
            happened.append(f"start {spec.recipe}")

        def tell(self) -> None:
            happened.append(f"tell {self.recipe}")

        def result(self) -> ArmTimes:
            happened.append(f"result {self.recipe}")
            if happened.count("result bf16") == 2:
                raise KeyboardInterrupt
            return ArmTimes(failed="does not fit") if self.recipe == "infir2" else times(1)

        def end(self) -> None:
            happened.append(f"end {self.recipe}")

    monkeypatch.setattr(compare, "Child", Recorded)
    on_card = dataclasses.replace(SPEC, device="cuda:0")
    with pytest.raises(KeyboardInterrupt):
        compare.run(compare.arms(on_card, ["infir2"], peer=False), turns=2)
    assert happened == [
        "start bf16", "tell bf16", "start infir2", "result bf16", "tell infir2", "start bf16", "result infir2",
        "tell bf16", "start infir2", "result bf16", "end bf16", "end infir2",
    ]  # fmt: skip


def test_a_child_ends_when_nobody_is_left_to_tell_it() -> None:
    child = Child(compare.OURS, dataclasses.replace(SPEC, device="cpu"))
    assert child._process.stdin is not None
    child._process.stdin.close()
    assert child._process.wait(60) == 0
    child.end()


def test_recipes_are_checked_before_anything_runs() -> None:
    with pytest.raises(InputError, match="cannot run"):
        compare.arms(SPEC, ["nvfp4"], peer=False)
    with pytest.raises(MachineError, match="transformer-engine"):
        compare.arms(SPEC, ["infir2"], peer=True)


def test_a_regression_is_what_noise_does_not_explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = baseline.path_for(tmp_path, "NVIDIA H200")
    assert path.name == "nvidia-h200.json"
    quiet = ArmTimes(ms={"forward": [10.0], "backward": [20.0], "optimizer": [1.0]})
    slow = ArmTimes(ms={"forward": [10.5], "backward": [21.0], "optimizer": [1.05]})
    noisy = ArmTimes(ms={"forward": [9.0, 10.5, 12.0], "backward": [19.0, 21.0, 23.0], "optimizer": [1.05] * 3})

    def rows(ours: ArmTimes) -> list[compare.Row]:
        fake({"bf16": [quiet], "infir2": [ours]}, monkeypatch)
        return compare.run(compare.arms(SPEC, ["infir2"], peer=False), turns=1)

    with pytest.raises(InputError, match="no baseline"):
        baseline.regressions(path, "key", rows(quiet), "step")
    baseline.accept(path, "key", rows(quiet))
    assert baseline.regressions(path, "key", rows(quiet), "step") == []
    (found,) = baseline.regressions(path, "key", rows(slow), "step")
    assert found.arm == "infir2" and found.found == pytest.approx(1.05)
    assert baseline.regressions(path, "key", rows(noisy), "step") == []
    with pytest.raises(InputError, match="other"):
        baseline.regressions(path, "other", rows(quiet), "step")
    for text in ("{", "[]", '{"key": 1}', '{"key": {"infir2": {"step": "fast"}}}'):
        path.write_text(text)
        with pytest.raises(InputError, match="cannot be read"):
            baseline.regressions(path, "key", rows(quiet), "step")


def test_noise_shrinks_with_the_number_of_steps() -> None:
    def rows(count: int) -> list[compare.Row]:
        times = [10.0, 11.0] * count
        arm = ArmTimes(ms={"forward": times, "backward": times, "optimizer": times})
        return [compare.summarise(name, SPEC, [arm]) for name in ("bf16", "infir2")]

    few, many = (baseline.noise(rows(count), "infir2", "step") for count in (1, 25))
    assert few / many == pytest.approx(5.0) and 0.01 < many < 0.02


def test_memory_is_checked_and_the_peer_is_not(tmp_path: Path) -> None:
    path, ran = tmp_path / "card.json", ArmTimes(ms={"forward": [10.0], "backward": [20.0], "optimizer": [1.0]})
    rows = [compare.summarise(name, SPEC, [ran]) for name in ("bf16", "infir2", f"{compare.PEER_NAME} fp8")]
    for row in rows[1:]:
        row.ratio = {"forward+backward": 0.8, "step": 0.8, "peak_gb": 0.95}
    baseline.accept(path, "key", rows)
    baseline.accept(path, "key", rows[:1])  # a comparison with fewer arms forgets none
    assert baseline.regressions(path, "key", rows, "step") == []
    for row in rows[1:]:
        row.ratio["peak_gb"] = 0.99
    (worse,) = baseline.regressions(path, "key", rows, "step")
    assert worse.arm == "infir2" and "0.990 of BF16's peak_gb" in worse.told()


def test_a_failed_arm_is_a_regression_and_a_failed_base_an_error(tmp_path: Path) -> None:
    path, ran = tmp_path / "card.json", ArmTimes(ms={"forward": [10.0], "backward": [20.0], "optimizer": [1.0]})
    rows = [compare.summarise(name, SPEC, [ran]) for name in ("bf16", "infir2")]
    rows[1].ratio = {"forward+backward": 0.8, "step": 0.8}
    baseline.accept(path, "key", [*rows, compare.summarise("other", SPEC, [ArmTimes(failed="died")])])
    rows[1] = compare.summarise("infir2", SPEC, [ArmTimes(failed="died")])
    (worse,) = baseline.regressions(path, "key", rows, "step")
    assert worse.found is None and "infir2 has no result" in worse.told()
    rows[0] = compare.summarise("bf16", SPEC, [ArmTimes(failed="died")])
    for call in (lambda: baseline.accept(path, "key", rows), lambda: baseline.regressions(path, "key", rows, "step")):
        with pytest.raises(MachineError, match="no ratio to BF16: died"):
            call()


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"shapes": [{"kind": "2d", "m": 1, "n": 1, "k": 1, "tflops": {}}]}', None]
)
def test_a_broken_table_of_gemm_rates(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infir2_core.ops.hopper import gemm

    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("INFIR2_GEMM_TABLE", str(path))
    gemm.table.cache_clear()
    try:
        with pytest.raises(InputError, match="table of GEMM rates"):
            gemm.table()
    finally:
        gemm.table.cache_clear()


def test_published_rows_are_marked_unless_they_match() -> None:
    row = compare.published("1.5b", 8192)
    assert row is not None and compare.published("tiny", 256) is None
    ratio = sum(row["fp8"][k] for k in ("forward_ms", "backward_ms")) / sum(
        row["bf16"][k] for k in ("forward_ms", "backward_ms")
    )
    assert ratio == pytest.approx(0.78, abs=0.005)  # as the source prints it
    reasons = compare.not_comparable(row, rows=1, layers=4, card="NVIDIA H200")
    assert "MBS 2" in reasons and "4 layers here" in reasons and any("80 GB" in reason for reason in reasons)
    assert "TP 1" not in reasons
    other = compare.published("7b", 32768)
    assert other is not None and "TP 4" in compare.not_comparable(other, 1, 0, "NVIDIA H200")


def test_gaps_and_groups_of_a_profile() -> None:
    ms = 1_000_000
    events = [("nvjet_sm90_qqtst_128", 0, 2 * ms), ("infir2_tiles", 1 * ms, 2 * ms), ("mystery", 5 * ms, ms)]
    found = summarise(events)
    assert found.span == 6.0 and found.gaps == 2.0  # nothing ran from 3 to 5; kernels that overlap are no gap
    assert found.groups == {"fp8 gemm": 2.0, "quantise": 2.0, "other": 1.0}
    assert found.kernels[-1] == ("mystery", 1.0, 1)
    named = {
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": "attention",
        "nvjet_sm90_tst_192x192_64x4": "gemm",
        "nvjet_sm90_qqsss_128x128_128x6_2x1_v_bz_coopA_algo2_Avec128": "fp8 gemm",
        "infir2_square": "quantise",
        "infir2_tiles": "quantise",
        "infir2_norm_backward": "norm and rope",
        "infir2_column_sum": "norm and rope",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<": "optimizer",
        "Memcpy DtoD (Device -> Device)": "copies and zeros",
    }
    assert {name: group_of(name) for name in named} == named


def test_groups_of_the_peers_kernels() -> None:
    """Names of TransformerEngine 2.20.2's libraries and of what Inductor makes of Megatron-core's elementwise code."""
    te = "void transformer_engine::"
    named = {
        f"{te}(anonymous namespace)::block_scaled_1d_cast_transpose_kernel<true, float, __nv_fp8_e4m3>": "quantise",
        f"{te}(anonymous namespace)::block_scaled_cast_transpose_kernel<__nv_bfloat16, __nv_fp8_e4m3>": "quantise",
        f"{te}fp8_block_scaling_recipe::fp8_block_scaling_partial_cast_kernel<float, __nv_fp8_e4m3>": "quantise",
        f"{te}fp8_block_scaling_recipe::fp8_block_scaling_compute_partial_amax_kernel<float>": "quantise",
        "void (anonymous namespace)::transpose_optimized_kernel<unsigned char>": "quantise",
        f"{te}normalization::rmsnorm_bwd_finalize_tuned_kernel<Traits>": "norm and rope",
        f"{te}normalization::rmsnorm_fwd_tuned_kernel<Traits>": "norm and rope",
        f"{te}fused_rope_forward_kernel<__nv_bfloat16>": "norm and rope",
        f"{te}fused_qkv_rope_backward_kernel<__nv_bfloat16>": "norm and rope",
        f"{te}multi_tensor_apply_kernel<{te}multi_tensor_adam::AdamFunctorMaster<__nv_fp8_e4m3>>": "optimizer",
        f"{te}multi_tensor_apply_kernel<{te}multi_tensor_l2norm::L2NormFunctor<float>>": "optimizer",
        f"{te}multi_tensor_transpose_to_bhsd::transpose_to_bhsd_kernel<2>": "attention",
        f"{te}flash_attention::prepare_kernel_fwd<__nv_bfloat16>": "attention",
        f"{te}fused_attn::populate_rng_state_kernel": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128": "attention",
        "cross_entropy_forward_kernel": "head loss",
        "cross_entropy_backward_kernel": "head loss",
        f"{te}gated_act_kernel<8, __nv_bfloat16>": "swiglu",
        "triton_poi_fused__to_copy_mul_silu_split_0": "swiglu",
        "triton_poi_fused_add_cat_mul_rsub_sigmoid_0": "swiglu",
        "triton_poi_fused__to_copy_add_0": "elementwise",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "elementwise",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": "copies and zeros",
        "nvjet_sm90_qqtst_128x128_128x6_1x2_h_bz_coopA_NTT": "fp8 gemm",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<128u>": "fp8 gemm",
        "nvjet_sm90_tss_128x256_64x4_1x2_h_bz_coopA_NTN": "gemm",
        f"{te}fused_router::fused_topk_forward_simple_kernel<float>": "other",
    }
    assert {name: group_of(name) for name in named} == named
    found = summarise([("cross_entropy_forward_kernel", 0, 3_000_000)])
    assert found.told() == {"head loss": 3.0, "span": 3.0, "gaps": 0.0}


def test_an_arm_trains_on_real_text_and_times_every_phase() -> None:
    assert bytes(text_tokens(200)).isascii() and text_tokens(50) == text_tokens(200)[:50]
    assert len(text_tokens(200_000_000 // 1000)) == 200_000
    arm = measure(ArmSpec("tiny", "infir2", seq_len=64, rows=2, layers=1, warmup=1, steps=4, device="cpu"))
    assert [len(values) for values in arm.ms.values()] == [4, 4, 4] and arm.losses[-1] < arm.losses[0]
    assert all(value > 0 for values in arm.ms.values() for value in values)
    assert any(gemm.startswith("wgrad e4m3") for gemm in arm.by)
    still = measure(ArmSpec("tiny", "bf16", 64, 2, layers=1, optimizer=False, warmup=1, steps=2, device="cpu"))
    assert still.parameters == arm.parameters and set(still.by.values()) == {"torch", "sdpa"}


def test_what_does_not_fit_says_what_would_make_it_smaller() -> None:
    def full() -> ArmTimes:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.31 GiB. GPU 0 has a total capacity of")

    spec = ArmSpec("7b", "infir2-lean", 32768, 1, recompute="full")
    assert guarded(spec, full).failed.endswith("2.31 GiB; try a shorter --seq-len or fewer --layers")
    assert smaller(ArmSpec("7b", "infir2", 32768, 2)).startswith("fewer --rows, --recompute full, recipe infir2-lean")


def test_options_that_exclude_each_other() -> None:
    with pytest.raises(InputError, match="--accept"):
        story.checked("none", None, True)
    with pytest.raises(InputError, match="whole layers"):
        story.checked("selective", "megatron-te", False)
    story.checked("full", "megatron-te", False)


def test_what_is_told_without_a_gpu() -> None:
    with pytest.raises(MachineError, match="FP8"):
        story.card(False, "tiny")
    with pytest.raises(InputError, match="tiny and small"):
        story.card(True, "7b")
    with pytest.raises(InputError, match="recomputation"):
        story.checked("all", None, False)
    with pytest.raises(InputError, match="peer"):
        story.checked("none", "nemo", False)
    card = story.card(True, "tiny")
    assert not card.gpu and card.versions["torch"]
    spec = ArmSpec("1.5b", "bf16", 8192, 2)
    told = story.tell(card, spec, [compare.summarise("bf16", spec, [times(1)])])
    (name,) = told.tables
    assert name.startswith("Published, not comparable") and "80 GB" in name
    assert told.tables[name][1][1][:4] == ["InfiR2 fp8", "529", "1061", "1590"]


def test_the_page_holds_everything_and_fetches_nothing(tmp_path: Path) -> None:
    row = compare.summarise("bf16", SPEC, [times(1)])
    picture = report.png([row], "a title")
    assert picture.startswith(b"\x89PNG")
    text = report.page("a <title>", ["note"], {"times": (report.COLUMNS, report.table_rows([row]))}, picture)
    assert "&lt;title&gt;" in text and "http" not in text and "2.0 (1.0-3.0)" in text
    paths = report.write(tmp_path / "new", "stem", {"a": 1}, picture, text)
    assert [path.suffix for path in paths] == [".json", ".png", ".html"] and json.loads(paths[0].read_text()) == {
        "a": 1
    }
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        report.write(tmp_path / "file", "stem", {}, picture, text)


def test_a_table_of_gemm_rates_keeps_other_shapes(tmp_path: Path) -> None:
    model = load_preset("1.5b").model
    found = tune.shapes(model, 16384)
    assert {"kind": "1d", "m": 1536, "n": 8960, "k": 16384} in found
    assert len(found) == len({tuple(entry.values()) for entry in found}) == 11  # o's fprop and dgrad are one shape
    path, about = tmp_path / "table.json", {"hardware": "card"}
    one = {"kind": "2d", "m": 1, "n": 2, "k": 3, "tflops": {"cublaslt": 5, "deepgemm": 6}}
    assert tune.merge(path, [one], about) == 1
    assert tune.merge(path, [one | {"tflops": {"cublaslt": 9}}, one | {"m": 7}], about) == 2
    written = json.loads(path.read_text())
    assert written["hardware"] == "card" and written["shapes"][0]["tflops"] == {"cublaslt": 9}
    path.write_text("[]")
    with pytest.raises(InputError, match="cannot be updated"):
        tune.merge(path, [one], about)
    ours = one | {"kind": "1d", "tflops": {"infir2": 8, "cublaslt": 7}}
    cells = [["2d", "1 x 2 x 3", "5", "6", "-"], ["1d", "1 x 2 x 3", "7", "-", "8"]]
    assert tune.table_rows([one, ours]) == cells and tune.LIBRARIES == ("cublaslt", "deepgemm", "infir2")


def test_the_committed_table_is_complete() -> None:
    """Every FP8 GEMM of the presets that were measured, by both libraries; by our kernel those that it takes."""
    from infir2_core.ops.hopper.gemm import OWN, table

    have = {tuple(entry[key] for key in tune.KEYS) for entry in table()}
    missing = {tuple(s.values()) for s in tune.shapes(load_preset("1.5b").model, 16384)} - have
    assert {entry[1:] for entry in missing} <= {(16384, 1536, 8960)}  # not yet measured by both
    for entry in table():
        assert set(entry["tflops"]) - ({OWN} if entry["kind"] == "1d" else set()) == {"cublaslt", "deepgemm"}
