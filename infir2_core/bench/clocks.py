"""SM clock, power and what holds the clock down, read from the driver while something runs.

A card at its power limit lowers its clock, so that a GEMM may run slower inside a step than alone: times of both can be
compared where the clock of both is known. The driver's library is asked through ctypes, pynvml need not be installed. A
thread does it that sleeps between readings; a reading takes microseconds and leaves the interpreter to the others.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
from dataclasses import dataclass, field
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
STEP_S, CALL_S = 0.05, 0.005  # between readings: a step lasts 0.1 to 3 s, a run of GEMMs tens of milliseconds
# Bits of nvmlDeviceGetCurrentClocksThrottleReasons; an idle card (bit 0) is no limit.
LIMITS = {
    0x02: "application clocks",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
_SM_CLOCK = 1  # NVML_CLOCK_SM
_POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT, milliwatts


@dataclass(frozen=True)
class Load:
    """How a card ran while something was measured; None and empty where it could not be read.

    Attributes:
        clock_mhz: median SM clock.
        power_w: median power of the board.
        limits: what held the clock down -> share of the readings in which it did.
    """

    clock_mhz: float | None = None
    power_w: float | None = None
    limits: dict[str, float] = field(default_factory=dict)

    def told(self) -> str:
        """For people, for example `1,650 MHz, 695 W, power cap 92 %`."""
        return ", ".join(cell for cell in self.cells() if cell != "-") or "not readable"

    def cells(self) -> list[str]:
        """Clock, power and limits, a dash for what is not known."""
        clock = "-" if self.clock_mhz is None else f"{self.clock_mhz:,.0f} MHz"
        power = "-" if self.power_w is None else f"{self.power_w:.0f} W"
        limits = (f"{name} {share:.0%}".replace("%", " %") for name, share in self.limits.items())
        return [clock, power, ", ".join(limits) or "-"]


class Meter:
    """Reads a card inside `with`, which may be entered again: readings add up. It never fails; what cannot be read is
    None.

    Args:
        device: torch's name of the card in this process; its UUID finds it in the driver, whatever
            CUDA_VISIBLE_DEVICES says. On `cpu` nothing is read.
        every_s: seconds between readings.
    """

    def __init__(self, device: str, every_s: float = STEP_S) -> None:
        self.every_s = every_s
        self._card = _Card.find(device)
        self._readings: list[tuple[float | None, float | None, int | None]] = []
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Meter:
        if self._card is not None:
            self._done.clear()
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _read(self) -> None:
        assert self._card is not None
        while not self._done.wait(self.every_s):  # asleep before it reads, so that the work has begun
            self._readings.append((self._card.clock_mhz(), self._card.power_w(), self._card.limits()))

    def load(self) -> Load:
        """Medians of the readings so far."""
        clocks = [clock for clock, _, _ in self._readings if clock is not None]
        powers = [power for _, power, _ in self._readings if power is not None]
        masks = [mask for _, _, mask in self._readings if mask is not None]
        shares = {name: sum(bool(mask & bit) for mask in masks) / len(masks) for bit, name in LIMITS.items() if masks}
        return Load(
            statistics.median(clocks) if clocks else None,
            statistics.median(powers) if powers else None,
            {name: share for name, share in shares.items() if share},
        )


def together(loads: list[Load]) -> Load:
    """Medians over turns; shares of limits are means."""
    clocks = [load.clock_mhz for load in loads if load.clock_mhz is not None]
    powers = [load.power_w for load in loads if load.power_w is not None]
    names = dict.fromkeys(name for load in loads for name in load.limits)
    return Load(
        statistics.median(clocks) if clocks else None,
        statistics.median(powers) if powers else None,
        {name: statistics.mean(load.limits.get(name, 0.0) for load in loads) for name in names},
    )


class _FieldValue(ctypes.Structure):
    """nvmlFieldValue_t."""

    _fields_ = [
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("kind", ctypes.c_int),
        ("result", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    ]


class _Card:
    """One card as the driver's library knows it; every figure is None where the library or the card lacks it."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    @staticmethod
    def find(device: str) -> _Card | None:
        """The card that torch calls `device`, or None if there is none or the driver cannot be asked."""
        if not device.startswith("cuda"):
            return None
        import torch

        try:
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
            library, handle = ctypes.CDLL(LIBRARY), ctypes.c_void_p()
            found = library.nvmlInit_v2() == 0
            found = found and library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) == 0
        except (OSError, AttributeError, RuntimeError, AssertionError):  # no driver, or a torch without CUDA
            return None
        return _Card(library, handle) if found else None

    def clock_mhz(self) -> float | None:
        """SM clock now."""
        return self._ask("nvmlDeviceGetClockInfo", ctypes.c_uint(), _SM_CLOCK)

    def power_w(self) -> float | None:
        """Power now; of older cards the mean of the last second, which is all that they know."""
        found = _FieldValue(field=_POWER_INSTANT)
        try:
            code = self._library.nvmlDeviceGetFieldValues(self._handle, 1, ctypes.byref(found))
        except AttributeError:
            code = 1
        if code == 0 and found.result == 0:
            return (found.value & 0xFFFFFFFF) / 1e3  # a union, of which this field fills 32 bits
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", ctypes.c_uint())
        return None if milliwatts is None else milliwatts / 1e3

    def limits(self) -> int | None:
        """Bits of `LIMITS`."""
        return self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong())

    def _ask(self, function: str, value: Any, *arguments: int) -> int | None:
        try:
            code = getattr(self._library, function)(self._handle, *arguments, ctypes.byref(value))
        except AttributeError:
            return None
        return int(value.value) if code == 0 else None
