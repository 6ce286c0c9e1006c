"""The ramp on devices whose memory and speed are known."""

from __future__ import annotations

import gc
import json
import random
import weakref

import pytest

from pichak_core.testing import (
    GIB,
    MIB,
    FakeDevice,
    FakeStep,
    OutOfMemoryError,
    affine_memory,
    step_seconds,
)
from pichak_core.tune.ramp import DEFAULT_HEADROOM, ramp_micro_batch
from pichak_core.tune.ramp_result import (
    DoesNotFit,
    NoStepError,
    NotOutOfMemoryError,
    RampResult,
)


def device_for(edge: int, **options: object) -> FakeDevice:
    """A device on which `edge` rows fit and one more does not."""
    base, per_row = 400 * MIB, 50 * MIB
    return FakeDevice(
        base + per_row * edge + per_row // 2,
        affine_memory(base, per_row),
        held_bytes=300 * MIB,
        rounding_bytes=2 * MIB,
        **options,  # type: ignore[arg-type]
    )


def ramp(step: FakeStep, **options: object) -> RampResult:
    options = {"headroom": 0.0, "limit": 2000, **options}
    return ramp_micro_batch(step, backend=step.device, clock=step.device.clock, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("edge", "most"), [(23, 7), (100, 10), (1000, 13)])
def test_the_exact_edge_in_few_calls(edge: int, most: int) -> None:
    step = FakeStep(device_for(edge))
    result = ramp(step)
    assert result.micro_batch_max == edge
    assert result.limited_by == "memory"
    assert result.steps_run <= most
    assert result.refusals <= 2
    assert result.steps_run + result.repeat_steps == len(step.calls)
    assert step.calls[: result.steps_run] == [
        rung.batch for rung in result.tried[: result.steps_run]
    ]


def test_a_first_guess_from_an_identical_machine() -> None:
    first = ramp(FakeStep(device_for(100)))
    smaller = device_for(77)
    guess = first.guess_for(smaller.capacity_bytes)
    result = ramp(FakeStep(smaller), first_guess=guess)
    assert result.micro_batch_max == 77
    assert result.steps_run <= 3


def test_headroom_is_bytes_of_the_capacity_and_the_edge_is_exact() -> None:
    device = device_for(100)
    result = ramp(FakeStep(device), headroom=0.12)
    budget = int(device.capacity_bytes * 0.88)
    # By trying every size.
    edge = max(b for b in range(1, 101) if device.peak_of(b) <= budget)
    assert result.micro_batch_max == edge
    assert result.budget_bytes == budget
    assert result.headroom_bytes == device.capacity_bytes - budget
    assert result.peak_bytes == device.peak_of(edge)
    assert result.limited_by == "headroom"
    assert result.refusals == 0
    assert DEFAULT_HEADROOM == 0.12


def test_the_kept_size_ran_three_times_in_a_row_from_a_clean_state() -> None:
    step = FakeStep(device_for(23))
    result = ramp(step, keep="largest")
    assert step.calls[-3:] == [23, 23, 23]
    assert result.repeat_steps == 3
    assert result.micro_batch == result.micro_batch_max == 23
    assert result.seconds_per_step == pytest.approx(0.01 + 0.001 * 23)
    assert step.closed == 1


# field case 52
@pytest.mark.parametrize("start", [1, 128])
def test_a_limit_that_is_no_power_of_two_is_reached_exactly(start: int) -> None:
    step = FakeStep(device_for(5000))
    result = ramp(step, start=start, limit=100)
    assert result.micro_batch_max == 100
    assert result.limited_by == "limit"
    assert max(step.calls) == 100


# field case 52
@pytest.mark.parametrize("seed", range(10))
def test_the_answer_survives_noisy_memory(seed: int) -> None:
    noise = random.Random(seed)
    plain = affine_memory(100 * MIB, 50 * MIB)
    device = FakeDevice(
        plain(100), lambda rows: int(plain(rows) * (1 + 0.03 * noise.uniform(-1, 1)))
    )
    step = FakeStep(device)
    result = ramp(step, headroom=0.12)
    assert result.micro_batch in step.calls
    assert result.micro_batch_max in step.calls
    for _ in range(300):
        device.train(result.micro_batch_max)


# field case 49
def test_rows_in_the_data_end_the_ramp() -> None:
    step = FakeStep(device_for(10**9))
    result = ramp(step, rows=32, limit=10**8)
    assert result.micro_batch_max == 32
    assert result.limited_by == "rows"
    assert "the rows in the data" in result.source
    assert max(step.calls) == 32


# field case 50
def test_a_step_that_trains_only_once_is_an_error() -> None:
    step = FakeStep(device_for(23), trains=lambda call: call == 0)
    with pytest.raises(NoStepError, match="did not train at 1 row"):
        ramp(step)
    assert step.closed == 1


# field case 50
def test_a_step_that_never_trains_is_an_error() -> None:
    step = FakeStep(device_for(23), trains=lambda _: False)
    with pytest.raises(NoStepError, match=r"1 row\(s\)"):
        ramp(step)


# field case 50
def test_a_size_that_trains_nothing_does_not_pass() -> None:
    class Loader(FakeStep):
        """Drops the last incomplete batch of its 40 rows."""

        def __call__(self, rows: int) -> None:
            if rows <= 40:
                super().__call__(rows)

    result = ramp(Loader(device_for(1000)))
    assert result.micro_batch_max == 40
    assert result.limited_by == "no step"


def test_a_step_without_a_counter_that_allocates_nothing_does_not_pass() -> None:
    device = device_for(1000)
    result = ramp_micro_batch(
        lambda rows: device.train(rows) if rows <= 40 else None,
        backend=device,
        clock=device.clock,
        headroom=0.0,
    )
    assert result.micro_batch_max == 40
    assert result.limited_by == "no step"


# field case 54
def test_optimizer_state_that_appears_behind_the_first_step_counts() -> None:
    peaks = [6.0, 7.4, 7.4]
    device = FakeDevice(
        7 * GIB, lambda rows: int((peaks[1] + rows - 1) * GIB), state_bytes=int(1.4 * GIB)
    )
    with pytest.raises(DoesNotFit) as caught:
        ramp(FakeStep(device))
    assert caught.value.tried[0].verdict == "ok"
    assert caught.value.tried[0].peak_bytes == pytest.approx(6.0 * GIB)
    assert "consecutive" in caught.value.tried[-1].why


# field case 53
def test_a_leak_is_said_and_the_kept_size_runs_with_it() -> None:
    plain = device_for(100)
    device = device_for(100, leak_bytes=int(0.003 * plain.capacity_bytes))
    step = FakeStep(device)
    result = ramp(step, keep="largest")
    assert step.calls[-3:] == [result.micro_batch_max] * 3
    assert result.micro_batch_max < 100
    assert any("keeps tensors alive" in note for note in result.notes)
    assert ramp(FakeStep(plain)).notes == ()


# field case 48
def test_nothing_of_a_refused_step_survives() -> None:
    device = device_for(23)
    held: list[weakref.ref[object]] = []
    kept: list[BaseException] = []

    class Tensor:
        """Stands for 100 MB that a frame of the failed step holds."""

    class Step(FakeStep):
        def __call__(self, rows: int) -> None:
            assert all(reference() is None for reference in held)
            tensor = Tensor()
            if rows > 23:
                held.append(weakref.ref(tensor))
                try:
                    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 100.00 MiB")
                except OutOfMemoryError as error:
                    kept.append(error)  # a trainer that remembers its last error
                    raise
            super().__call__(rows)

    gc.collect()
    gc.disable()  # what goes must go by itself
    try:
        result = ramp(Step(device))
    finally:
        gc.enable()
    assert held
    assert result.micro_batch_max == 23


# field case 46
def test_a_refusal_that_is_reported_late_and_differently_each_time() -> None:
    device = device_for(23)
    texts = [
        "CUDA error: device not ready",
        'handle_0 INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp"',
        "CUDA error: out of memory",
    ]

    class Step(FakeStep):
        late = False

        def __call__(self, rows: int) -> None:
            if self.late:
                self.late = False
                self.calls.append(rows)
                raise RuntimeError("CUDA error: device not ready")
            if rows > 23:
                self.late = True
                self.calls.append(rows)
                device.occupy(device.capacity_bytes - 200 * MIB)
                raise RuntimeError(texts[len(self.calls) % 3])
            super().__call__(rows)

    result = ramp(Step(device))
    assert result.micro_batch_max == 23
    assert result.limited_by == "memory"


# field case 44
def test_a_look_alike_with_memory_free_is_raised_with_a_hint() -> None:
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate")
    step = FakeStep(device_for(1000), errors={1: lambda: error})
    with pytest.raises(NotOutOfMemoryError, match="embedding's rows") as caught:
        ramp(step)
    assert caught.value.__cause__ is error
    assert step.closed == 1


def test_a_mistake_of_the_step_is_raised_as_it_is() -> None:
    error = ValueError("shape '[4, 7]' is invalid")
    with pytest.raises(ValueError, match="shape") as caught:
        ramp(FakeStep(device_for(1000), errors={2: lambda: error, 16: lambda: error}))
    assert caught.value is error


# field case 56
def test_a_kernels_own_limit_is_not_a_lack_of_memory() -> None:
    device = FakeDevice(10 * GIB, affine_memory(GIB, 1000), held_bytes=GIB)

    class Step(FakeStep):
        def __call__(self, rows: int) -> None:
            if rows > 65535:
                self.calls.append(rows)
                raise RuntimeError("CUDA error: invalid configuration argument")
            super().__call__(rows)

    result = ramp(Step(device), limit=10**6)
    assert result.micro_batch_max == 65535
    assert result.limited_by == "kernel"
    with pytest.raises(RuntimeError, match="invalid configuration"):
        ramp(Step(device), start=70000, limit=10**6)


# field case 56
def test_host_memory_is_part_of_the_fit() -> None:
    device = device_for(1000, host_bytes=16 * GIB, host_bytes_of=lambda rows: rows * 200 * MIB)
    result = ramp(FakeStep(device))
    assert result.micro_batch_max == (16 * GIB - 512 * MIB) // (200 * MIB)
    assert result.limited_by == "host memory"


def test_host_memory_that_is_refused_is_named() -> None:
    def refuse() -> BaseException:
        return MemoryError("Unable to allocate 3.00 GiB for an array")

    errors = dict.fromkeys(range(33, 3000), refuse)
    result = ramp(FakeStep(device_for(10**6), errors=errors))
    assert result.micro_batch_max == 32
    assert result.limited_by == "host memory"


# field case 36
def test_a_peak_above_the_card_is_paging_though_nothing_was_raised() -> None:
    base = affine_memory(GIB, GIB)
    device = FakeDevice(16 * GIB, base, pages=True, paging_factor=1.0)
    result = ramp(FakeStep(device))
    assert result.micro_batch_max == 15
    assert result.limited_by == "paging"
    assert result.spilled
    over = [rung for rung in result.tried if rung.batch > 15]
    assert all(rung.verdict == "over capacity" for rung in over)
    assert result.refusals == 0


# field case 35
def test_a_collapse_of_the_throughput_is_paging_without_any_counter() -> None:
    device = FakeDevice(100 * GIB, affine_memory(GIB, GIB), pages=True, dedicated_bytes=3 * GIB)
    result = ramp(FakeStep(device))
    assert result.micro_batch_max == 2
    assert result.spilled
    assert result.limited_by == "paging"
    assert any(rung.verdict == "slow" for rung in result.tried)


# field case 33
def test_shared_memory_that_grows_with_the_time_is_paging() -> None:
    # 12.1 s a step until 23 GiB, 437 s with 8 GiB in shared memory.
    device = FakeDevice(
        1000 * GIB,
        affine_memory(GIB, 2 * GIB),
        seconds_of=lambda _: 12.1,
        pages=True,
        dedicated_bytes=23 * GIB,
        paging_factor=437 / 12.1,
        counters=True,
    )
    result = ramp(FakeStep(device), limit=64)
    assert result.micro_batch_max == 11
    assert result.spilled
    assert {rung.verdict for rung in result.tried if rung.batch > 11} == {"paging"}


# field case 33
def test_a_machine_whose_counters_stay_flat_is_not_accused() -> None:
    # Slower a row beyond 8, and the counters say that nothing was moved; pinned memory is no spill.
    device = FakeDevice(
        1000 * GIB,
        affine_memory(GIB, GIB),
        seconds_of=lambda rows: rows * (1.0 if rows <= 8 else 2.5),
        counters=True,
        may_page=True,
        pinned_bytes=2 * GIB,
    )
    result = ramp(FakeStep(device), limit=64)
    assert not result.spilled
    assert result.micro_batch_max == 64
    assert result.micro_batch <= 8 or result.micro_batch in (16, 32)


def test_one_slow_timing_accuses_nobody() -> None:
    for slow_call in range(12):
        device = device_for(23, may_page=True)
        calls = iter(range(10**6))
        device.seconds_of = lambda rows, c=calls, s=slow_call: (
            (0.01 + 0.001 * rows) * (5 if next(c) == s else 1)
        )
        result = ramp(FakeStep(device), keep="largest")
        assert result.micro_batch_max == 23
        assert not result.spilled


def test_jitter_never_stops_a_ramp() -> None:
    for seed in range(200):
        pace = step_seconds(1e-6, 0.0, jitter=0.2, seed=seed)
        device = device_for(23, seconds_of=pace, may_page=True)
        assert ramp(FakeStep(device), keep="largest").micro_batch_max == 23


# field case 3
def test_where_memory_is_the_systems_the_ramp_stops_before_it() -> None:
    device = device_for(100, unified=True)
    step = FakeStep(device)
    result = ramp(step, headroom=0.12)
    budget = int(device.capacity_bytes * 0.88)
    assert result.micro_batch_max == max(b for b in range(1, 101) if device.peak_of(b) <= budget)
    assert max(device.peak_of(rows) for rows in step.calls) < device.capacity_bytes
    assert result.refusals == 0


# field case 3
def test_a_prediction_that_ends_the_ramp_is_said() -> None:
    device = FakeDevice(int(11.5 * GIB), affine_memory(GIB, GIB), held_bytes=GIB // 2, unified=True)
    step = FakeStep(device)
    result = ramp(step, headroom=0.04)
    assert result.micro_batch_max == 10
    assert result.limited_by == "prediction"
    assert max(step.calls) == 10
    assert "was predicted to pass" in result.source


def test_the_fastest_of_those_that_fit_is_kept() -> None:
    device = device_for(100, seconds_of=lambda rows: rows * (0.010 if rows <= 60 else 0.013))
    result = ramp(FakeStep(device))
    assert result.micro_batch == 50
    assert result.micro_batch_max == 100
    assert result.seconds_per_step == pytest.approx(0.5)
    assert result.peak_bytes == device.peak_of(50)
    assert result.micro_batch in {rung.batch for rung in result.tried}
    assert "which train faster" in result.source


def test_within_the_noise_the_largest_is_kept() -> None:
    for seed in range(20):
        device = device_for(100, seconds_of=step_seconds(0.0, 0.001, jitter=0.02, seed=seed))
        assert ramp(FakeStep(device)).micro_batch == 100


def test_a_step_may_be_limited_in_time() -> None:
    device = device_for(1000, seconds_of=lambda rows: 0.5 + 0.1 * rows)
    step = FakeStep(device)
    result = ramp(step, step_seconds_limit=3.0, keep="largest")
    assert result.limited_by == "time"
    assert max(0.5 + 0.1 * rows for rows in step.calls) <= 3.0
    assert 23 <= result.micro_batch_max <= 25
    assert "longer than the 3 s allowed" in result.source


def test_one_slow_step_does_not_end_a_ramp_that_is_limited_in_time() -> None:
    """The first step warms up, or a neighbour is busy: it is timed again before it is believed."""
    slow_once = iter([60.0])
    device = device_for(40, seconds_of=lambda rows: next(slow_once, 0.01 * rows))
    result = ramp(FakeStep(device), step_seconds_limit=3.0, keep="largest")
    assert result.micro_batch_max == 40
    assert result.limited_by != "time"


@pytest.mark.parametrize(
    ("phase", "advice"),
    [
        ("forward", "gradient checkpointing"),
        ("backward", "gradient checkpointing"),
        ("optimizer", "optimizer with less state"),
        ("state", "optimizer with less state"),
    ],
)
def test_one_row_that_does_not_fit_names_the_phase_and_what_to_cut(phase: str, advice: str) -> None:
    class Step(FakeStep):
        def __call__(self, rows: int) -> None:
            self.phase = phase
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    step = Step(device_for(23))
    with pytest.raises(DoesNotFit, match=f"1 row does not fit.*in {phase}.*{advice}") as caught:
        ramp(step, start=4)
    assert caught.value.phase == phase
    assert caught.value.limited_by == "memory"
    assert [rung.batch for rung in caught.value.tried] == [4, 2, 1]
    assert step.closed == 1


def test_one_row_that_leaves_no_headroom_says_so() -> None:
    device = FakeDevice(GIB, affine_memory(int(0.9 * GIB), MIB))
    with pytest.raises(DoesNotFit, match="lower headroom") as caught:
        ramp(FakeStep(device), headroom=0.12)
    assert caught.value.limited_by == "headroom"


def test_an_interrupted_ramp_closes_the_step() -> None:
    step = FakeStep(device_for(23), errors={2: KeyboardInterrupt, 16: KeyboardInterrupt})
    step.errors.update(dict.fromkeys(range(2, 50), KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ramp(step)
    assert step.closed == 1


def test_a_result_survives_json() -> None:
    result = ramp(FakeStep(device_for(23)), tokens_per_row=128)
    assert RampResult.from_dict(json.loads(json.dumps(result.as_dict()))) == result
    assert "tokens/s" in result.source


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"limited_by": "luck"}, "limited_by 'luck'"),
        ({"tried": [{"batch": 1}]}, "not a ramp's result"),
    ],
)
def test_what_is_no_result_is_refused(change: dict[str, object], match: str) -> None:
    record = ramp(FakeStep(device_for(3))).as_dict()
    with pytest.raises(ValueError, match=match):
        RampResult.from_dict({**record, **change})


def test_the_source_tells_every_rung_and_progress_is_shown() -> None:
    lines: list[str] = []
    result = ramp(FakeStep(device_for(23)), on_progress=lines.append)
    assert len(lines) == len(result.tried)
    for rung in result.tried:
        assert f"{rung.batch} row" in result.source
        assert rung.why in result.source
    assert "24 was refused" in result.source


def test_rows_that_do_not_show_in_the_memory_are_noted() -> None:
    device = FakeDevice(GIB, lambda _: MIB)
    result = ramp(FakeStep(device), limit=64)
    assert result.micro_batch_max == 64
    assert any("the same at every size" in note for note in result.notes)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"start": 0}, "start is 0"),
        ({"limit": 0}, "limit is 0"),
        ({"rows": 0}, "rows is 0"),
        ({"headroom": 1.0}, "headroom is 1.0"),
        ({"headroom": -0.1}, "headroom is -0.1"),
        ({"step_seconds_limit": 0.0}, "step_seconds_limit"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ramp(FakeStep(device_for(3)), **options)
