"""What changed between two runs, and whether noise explains it."""

from __future__ import annotations

import json

import pytest

from pichak_coordinator.changes import Change, by_node, changes, comparable
from pichak_coordinator.records import NodeRecord, Row
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured
from pichak_core.plan import Plan, Value


def trained(batch: int = 8, seconds: float = 0.5, scored: float = 100.0, rows: int = 36000) -> Plan:
    plan = Plan("m", "d")
    plan.set("micro_batch", batch, "ramp").set("seconds_per_step", seconds, "timed", unit="s")
    plan.set("rows_total", rows, "counted").set("supervised_per_row", scored, "mean")
    plan.set("tokens_per_second", batch * 512 / seconds, "timed", unit="tokens/s")
    return plan.set(
        "scored_tokens_per_second", batch * scored / seconds, "timed", unit="scored tokens/s"
    )


def reading(name: str, value, spread: float | None = None, unit: str = "MB/s", **more):
    return Measurement(name, value, unit, "s", spread=spread, samples=9, **more)


def one(*readings, plan: Plan | None = None, ramp=None) -> Row:
    made = Fingerprint()
    for each in readings:
        made.add(each)
    return Row(NodeRecord("n", "h"), made, plan, ramp)


def diff(old: Row, new: Row, *, notable: bool = True) -> list[Change]:
    return changes([new], {old.key: old}, notable=notable)


def test_a_change_beyond_the_spread() -> None:
    """Spreads 3 and 4 combine to 5; three of them are 15."""
    (change,) = diff(one(reading("a_mb_s", 100.0, 3.0)), one(reading("a_mb_s", 84.0, 4.0)))
    assert (change.before, change.after, change.spread) == (100.0, 84.0, 5.0)
    assert change.share == pytest.approx(-0.16)
    assert change.exceeds is True
    assert "100 → 84 MB/s (-16.0%, more than the measured spread of 5)" in change.sentence
    within = one(reading("a_mb_s", 86.0, 4.0))
    assert diff(one(reading("a_mb_s", 100.0, 3.0)), within) == []
    (told,) = diff(one(reading("a_mb_s", 100.0, 3.0)), within, notable=False)
    assert told.exceeds is False


def test_what_lacks_results_on_one_side_was_not_compared() -> None:
    some, gap = reading("a_mb_s", 1.0), Unmeasured("a_mb_s", Reason.TIMED_OUT, "it hung")
    odd = reading("a_mb_s", 9e9, suspect="above the ceiling")
    assert comparable(one(some), one(some))
    for other in (one(), one(gap), one(odd), one(reading("b_mb_s", 1.0)), None):
        assert not comparable(one(some), other)
        assert other is None or not comparable(other, one(some))
    assert comparable(one(plan=trained()), one(gap, plan=trained()))
    assert not comparable(one(plan=trained()), one(plan=Plan("other", "d")))
    # The task's own numbers say nothing of a device.
    task = Plan("m", "d").set("rows_total", 36000, "counted")
    assert not comparable(one(plan=trained()), one(plan=task))


def test_without_a_spread_five_percent_is_worth_a_line() -> None:
    old = one(reading("a_mb_s", 100.0))
    assert diff(old, one(reading("a_mb_s", 104.0))) == []
    (change,) = diff(old, one(reading("a_mb_s", 106.0)))
    assert change.exceeds is None


def test_percentages_change_by_points() -> None:
    old = one(reading("cpu.steal_percent", 0.1, unit="%"))
    assert diff(old, one(reading("cpu.steal_percent", 0.9, unit="%"))) == []
    assert len(diff(old, one(reading("cpu.steal_percent", 9.0, unit="%")))) == 1
    from_zero = one(reading("cpu.steal_percent", 0.0, unit="%"))
    (change,) = diff(from_zero, one(reading("cpu.steal_percent", 9.0, unit="%")))
    assert change.share is None


def test_text_and_gaps_are_changes() -> None:
    old = one(
        reading("software.driver", "550.90", unit=""),
        reading("disk.read_mb_s", 900.0),
        Unmeasured("gpu.h2d_mb_s", Reason.BUSY),
    )
    new = one(
        reading("software.driver", "555.42", unit=""),
        Unmeasured("disk.read_mb_s", Reason.NO_PERMISSION, "EPERM"),
        reading("gpu.h2d_mb_s", 12.0),
    )
    driver, disk, copies = diff(old, new)
    assert (driver.before, driver.after, driver.share) == ("550.90", "555.42", None)
    assert (disk.after, disk.reason) == (None, "no permission: EPERM")
    assert "900 → not measured" in disk.sentence
    assert (copies.before, copies.after) == (None, 12.0)


def test_suspect_and_passing_values_are_not_compared() -> None:
    old = one(reading("a_mb_s", 100.0, 1.0), reading("cpu.load_others_cores", 0.1, unit="cores"))
    new = one(
        reading("a_mb_s", 9000.0, 1.0, suspect="page cache"),
        reading("cpu.load_others_cores", 7.0, unit="cores"),
        reading("new_mb_s", 5.0),
    )
    assert diff(old, new, notable=False) == []


def test_plans_are_compared_for_the_same_task_only() -> None:
    old, new = trained(seconds=0.5), trained(seconds=1.0)
    names = {c.metric for c in diff(one(plan=old), one(plan=new))}
    # all tokens a second would say the same again
    assert names == {"plan.seconds_per_step", "plan.scored_tokens_per_second"}
    new.model = "another"
    assert diff(one(plan=old), one(plan=new)) == []


def test_step_times_are_held_against_the_ramps_spread() -> None:
    """Three timings spread by s: the median's standard error is 1.2533 s / √3."""
    ramp = {"seconds_per_step": 0.5, "seconds_spread": 0.02}
    old = one(plan=trained(seconds=0.50), ramp=ramp)
    error = 1.2533 * (0.02 / 0.5) / 3**0.5
    limit = 3 * error * (0.50**2 + 0.55**2) ** 0.5
    assert 0.05 < limit < 0.08  # so that both sides of it are tried
    same = one(plan=trained(seconds=0.55), ramp=ramp)
    assert "plan.seconds_per_step" not in {c.metric for c in diff(old, same)}
    slower = one(plan=trained(seconds=0.60), ramp=ramp)
    (step,) = [c for c in diff(old, slower) if c.metric == "plan.seconds_per_step"]
    assert step.exceeds is True


def test_values_with_intervals_differ_when_these_are_apart() -> None:
    def noise(value: float, low: float, high: float) -> Plan:
        return Plan().set("noise_scale_tokens", Value(value, "s", low=low, high=high))

    old = one(plan=noise(1000, 800, 1300))
    assert diff(old, one(plan=noise(1500, 1200, 2000))) == []
    (change,) = diff(old, one(plan=noise(2500, 2000, 3000)))
    assert change.exceeds is True


def test_a_new_node_has_no_changes_and_json_is_json() -> None:
    assert changes([one(reading("a_mb_s", 1.0))], {}) == []
    (change,) = diff(one(reading("a_mb_s", 1.0)), one(reading("a_mb_s", 2.0)))
    assert by_node([change]) == {"h": [change]}
    record = json.loads(json.dumps(change.as_dict(), allow_nan=False))
    assert (record["before"], record["after"], record["change"]) == (1.0, 2.0, 1.0)


def test_a_change_on_a_busy_machine_says_so() -> None:
    idle = reading("a_mb_s", 100.0, 3.0, conditions={"cpu.load_others_cores": 0.1})
    busy = reading("a_mb_s", 50.0, 4.0, conditions={"cpu.load_others_cores": 2.0})
    (change,) = diff(one(idle), one(busy))
    assert "-50.0%" in change.sentence
    assert "others used 2.00 cores now" in change.sentence
    (back,) = diff(one(busy), one(idle))
    assert "others used 2.00 cores before" in back.sentence
    ramps = [{"conditions": {"cpu.load_others_cores": cores}} for cores in (0.0, 1.0)]
    plans = [trained(seconds=seconds) for seconds in (0.5, 1.0)]
    old, new = (one(plan=p, ramp=r) for p, r in zip(plans, ramps, strict=True))
    slower = {c.metric: c for c in diff(old, new)}["plan.scored_tokens_per_second"]
    assert "others used 1.00 cores now" in slower.sentence


def test_another_micro_batch_is_one_change_and_not_seven() -> None:
    """The time of a step of 16 rows is no slower time of a step of 8."""
    old, new = one(plan=trained(8, 0.5)), one(plan=trained(16, 1.5))
    told = {change.metric: change.sentence for change in diff(old, new)}
    assert set(told) == {"plan.micro_batch", "plan.scored_tokens_per_second"}
    assert "1,600 → 1,067" in told["plan.scored_tokens_per_second"]
    assert "8 → 16 (×2)" in told["plan.micro_batch"]


def test_a_latency_at_another_depth_is_not_compared() -> None:
    def disk(depth: int, p99: float) -> Row:
        return one(
            reading("disk.read_best_depth", depth, unit="reads"),
            reading("disk.read_p99_ms", p99, unit="ms"),
        )

    assert {c.metric for c in diff(disk(32, 300.0), disk(2, 20.0))} == {"disk.read_best_depth"}
    assert {c.metric for c in diff(disk(2, 300.0), disk(2, 20.0))} == {"disk.read_p99_ms"}
