"""Clock and power of a card while it is measured, asked of a library that stands in for the driver's."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infir2_core.bench import ceilings, clocks, compare, story, tune
from infir2_core.bench.arm import ArmSpec, ArmTimes, measure
from infir2_core.bench.clocks import Load, Meter

HERE, NEIGHBOUR = "0000aaaa-1111", "0000bbbb-2222"
SPEC = ArmSpec("tiny", "bf16", seq_len=100, rows=2)


class Driver:
    """NVML's functions of two cards; the neighbour idles at another clock."""

    def __init__(self, instant: bool = True) -> None:
        self.cards = [f"GPU-{NEIGHBOUR}", f"GPU-{HERE}"]
        self.masks = iter([0x4, 0x4, 0x4 | 0x20, 0x1])
        self.instant, self.asked = instant, 0

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        if uuid.decode() not in self.cards:
            return 6
        handle._obj.value = 1 + self.cards.index(uuid.decode())
        return 0

    def nvmlDeviceGetClockInfo(self, handle: ctypes.c_void_p, kind: int, found: Any) -> int:
        self.asked += 1
        found._obj.value = {1: 210, 2: 1650}[handle.value or 0] if kind == 1 else 0
        return 0

    def nvmlDeviceGetFieldValues(self, handle: ctypes.c_void_p, count: int, found: Any) -> int:
        assert count == 1 and found._obj.field == 186
        found._obj.result = 0 if self.instant else 3
        found._obj.value = 0xFFFFFFFF_00000000 | 695_500  # the union's upper half is not the field's
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: ctypes.c_void_p, found: Any) -> int:
        found._obj.value = 500_000
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: ctypes.c_void_p, found: Any) -> int:
        found._obj.value = next(self.masks, 0)
        return 0


def install(monkeypatch: pytest.MonkeyPatch, driver: Any, uuid: str = HERE) -> None:
    def load(name: str) -> Any:
        assert name == "libnvidia-ml.so.1"
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))


def test_the_card_that_this_process_sees_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its number is in the driver: CUDA_VISIBLE_DEVICES renumbers cards, UUIDs stay."""
    driver = Driver()
    install(monkeypatch, driver)
    meter = Meter("cuda:0", 0.001)
    for wanted in (2, 4):  # entered again, readings add up
        with meter:
            while driver.asked < wanted:
                time.sleep(0.001)
    asked = driver.asked
    time.sleep(0.01)
    assert driver.asked == asked, "nothing is read outside"
    load = meter.load()
    assert (load.clock_mhz, load.power_w) == (1650, 695.5)
    assert load.limits == {"power cap": 3 / asked, "thermal (software)": 1 / asked}
    install(monkeypatch, Driver(), NEIGHBOUR)
    other = Meter("cuda:0", 0.001)
    with other:
        time.sleep(0.05)
    assert other.load().clock_mhz == 210


def test_a_card_without_momentary_power_tells_its_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(instant=False)
    install(monkeypatch, driver)
    with Meter("cuda:0", 0.001) as meter:
        while driver.asked < 2:
            time.sleep(0.001)
    assert meter.load().power_w == 500


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize(
    "driver", [None, object(), SimpleNamespace(nvmlInit_v2=lambda: 9), Driver()], ids=["none", "old", "broken", "uuid"]
)
def test_what_cannot_be_read_is_no_failure(driver: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, driver, "not in the driver")
    with Meter(device, 0.001) as meter:
        time.sleep(0.01)
    assert meter.load() == Load() and meter.load().told() == "not readable"


def test_functions_that_a_library_lacks_are_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Driver()
    driver = SimpleNamespace(
        nvmlInit_v2=known.nvmlInit_v2,
        nvmlDeviceGetHandleByUUID=known.nvmlDeviceGetHandleByUUID,
        nvmlDeviceGetClockInfo=known.nvmlDeviceGetClockInfo,
    )
    install(monkeypatch, driver)
    with Meter("cuda:0", 0.001) as meter:
        while known.asked < 2:
            time.sleep(0.001)
    assert meter.load().cells() == ["1,650 MHz", "-", "-"] and meter.load().told() == "1,650 MHz"


def test_an_arm_carries_its_clock_into_the_row() -> None:
    ms = {"forward": [1.0], "backward": [2.0], "optimizer": [1.0]}
    turns = []
    for load in (Load(1600, 690, {"power cap": 1.0}), Load(1700, 700, {}), Load()):
        made = ArmTimes(ms=ms)
        made.load = load
        turns.append(ArmTimes(**json.loads(json.dumps(dataclasses.asdict(made)))))  # as it comes out of its process
    row = compare.summarise("bf16", SPEC, turns)
    assert (row.clock_mhz, row.power_w) == (1650, 695) and row.limits == {"power cap": pytest.approx(1 / 3)}
    assert json.loads(json.dumps(dataclasses.asdict(row)))["clock_mhz"] == 1650
    still = measure(ArmSpec("tiny", "bf16", 64, 2, layers=1, optimizer=False, warmup=1, steps=2, device="cpu"))
    assert still.load == Load()


def test_clocks_of_steps_and_of_gemms_alone_stand_in_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"bf16": Load(1980, 600, {}), "fp8": Load()}
    found = ceilings.Ceilings(4e3, {}, {}, {"bf16": 1.0, "fp8": 1.0}, alone)
    monkeypatch.setattr(ceilings, "measure", lambda *_: found)
    row = compare.summarise("infir2", SPEC, [ArmTimes(ms={"forward": [1.0], "backward": [2.0], "optimizer": [1.0]})])
    row.clock_mhz, row.power_w, row.limits = 1650.0, 695.4, {"power cap": 0.92}
    failed = compare.summarise("bf16", SPEC, [ArmTimes(failed="does not fit")])
    told = story.tell(story.Card("card", True, {}), SPEC, [row, failed])
    assert told.tables["Clock and power, medians"][1] == [
        ["infir2", "1,650 MHz", "695 W", "power cap 92 %"],
        ["bf16 GEMMs alone", "1,980 MHz", "600 W", "-"],
    ]
    assert json.loads(json.dumps(told.data))["gemm_load"]["bf16"]["clock_mhz"] == 1980
    row.clock_mhz, row.power_w, row.limits = None, None, {}
    alone["bf16"] = Load()
    assert "Clock and power, medians" not in story.tell(story.Card("card", True, {}), SPEC, [row]).tables


def test_a_table_of_gemm_rates_says_at_what_clock() -> None:
    assert tune.about("card", Load(1755, 512.4, {}))["load"] == "1,755 MHz, 512 W"
    assert "load" not in tune.about("card", Load())


def test_gemms_are_read_while_they_run_and_not_while_they_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        record = synchronize = lambda self: None

        def __init__(self, enable_timing: bool) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return 2.0

    class Recorded(Meter):
        def __enter__(self) -> Meter:
            happened.append("on")
            return self

        def __exit__(self, *_: object) -> None:
            happened.append("off")

    happened: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None, raising=False)
    assert ceilings.sustained([lambda: happened.append("call")], Recorded("cpu"), ms=4) == 2.0 / 6
    assert happened == ["call"] * 4 + ["on"] + ["call"] * 18 + ["off"]  # 3 calls took 2 ms, so 6 take 4
    assert clocks.CALL_S < clocks.STEP_S
