"""The metrics of copies between host and GPU, read off what was measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pichak_core.devices.nvml import Gpu
from pichak_core.measure import Metric
from pichak_core.measure._copies import NAMES, TOGETHER_ROUNDS, Copies, Together
from pichak_core.measure._suspect import reasons
from pichak_core.measure._transfer_verdict import (
    Link,
    Picture,
    impossible,
    link_share,
    sentences,
)
from pichak_core.measurement import Measurement, Reading, Reason, Unmeasured
from pichak_core.plan import format_number

LARGE = {
    "h2d_pinned": Metric("gpu.h2d_pinned_mb_s", "MB/s", "host to GPU, pinned memory"),
    "d2h_pinned": Metric("gpu.d2h_pinned_mb_s", "MB/s", "GPU to host, pinned memory"),
    "h2d_pageable": Metric("gpu.h2d_pageable_mb_s", "MB/s", "host to GPU, pageable memory"),
    "d2h_pageable": Metric("gpu.d2h_pageable_mb_s", "MB/s", "GPU to host, pageable memory"),
}
SMALL = {
    "h2d_pinned": Metric("gpu.h2d_pinned_5mb_mb_s", "MB/s", "host to GPU, pinned, 5 MB a copy"),
    "d2h_pinned": Metric("gpu.d2h_pinned_5mb_mb_s", "MB/s", "GPU to host, pinned, 5 MB a copy"),
    "h2d_pageable": Metric("gpu.h2d_pageable_5mb_mb_s", "MB/s", "host to GPU, pageable, 5 MB"),
    "d2h_pageable": Metric("gpu.d2h_pageable_5mb_mb_s", "MB/s", "GPU to host, pageable, 5 MB"),
    "d2d": Metric("gpu.d2d_5mb_mb_s", "MB/s", "within the GPU, 5 MB a copy, caches included"),
}
BOTH = {
    "h2d_both": Metric("gpu.h2d_both_mb_s", "MB/s", "host to GPU while GPU to host runs"),
    "d2h_both": Metric("gpu.d2h_both_mb_s", "MB/s", "GPU to host while host to GPU runs"),
}
SHARE = Metric("gpu.link_share_percent", "%", "best pinned copy over what the link carries")
LINK = Metric("gpu.link_under_load", "", "PCIe generation and width while copies ran")
TOGETHER = Metric("gpu.copies_together_ratio", "", "rate with all GPUs copying over rate alone")
VERDICT = Metric("gpu.transfer_verdict", "", "what the copies say of the way to the GPU")
METRICS = (*LARGE.values(), *SMALL.values(), *BOTH.values(), SHARE, LINK, TOGETHER, VERDICT)


@dataclass(frozen=True)
class Measured:
    """Everything that one run of the measurement found."""

    small: Mapping[str, Copies]
    large: Mapping[str, Copies]
    loaded: list[Gpu]


def picture_of(
    large: Mapping[str, Copies], link: Link, together: Sequence[Together] = ()
) -> Picture:
    """What there is to judge."""
    rates = {path: copies.mb_s for path, copies in large.items()}
    clocks = [copies.clocks_differ for copies in large.values()]
    return Picture(rates, link, together, [text for text in clocks if text])


def doubt(copies: Copies, link: Link) -> str:
    """Why copies are suspect; "" when they are not."""
    return reasons(copies.wrong_content, impossible(copies.path, copies.mb_s, link))


def readings(
    found: Measured, link: Link, together: Sequence[Together] | Unmeasured
) -> Iterable[Reading]:
    """Every metric, from what was measured."""
    how = "wall clock, new content each round and checked; median"
    for table, copies in ((LARGE, found.large), (SMALL, found.small)):
        for path, metric in table.items():
            made = copies[path]
            size = f"{format_number(made.size_bytes / 1e6)} MB"
            yield _rate(metric, made, f"copies of {size} {NAMES[path]}, {how}", link)
    for path, metric in BOTH.items():
        made = found.large[path]
        source = (
            f"pinned copies of {format_number(made.size_bytes / 1e6)} MB both ways at once, by "
            "the GPU's clock; median"
        )
        yield _rate(metric, made, source, link)
    sound = {path: made for path, made in found.large.items() if not doubt(made, link)}
    several = () if isinstance(together, Unmeasured) else together
    picture = picture_of(sound, link, several)
    yield from _link_readings(picture, len(found.large["h2d_pinned"].wall_seconds))
    yield _together_reading(together)
    said = sentences(picture)
    bad = [f"{NAMES.get(p, p)}: {d}" for p, c in found.large.items() if (d := doubt(c, link))]
    yield Measurement(
        VERDICT.name,
        "; ".join(said) or "nothing unusual",
        "",
        "the rules of SPEC 3 over the rates of large copies",
        suspect="; ".join(bad),
        detail={"sentences": said, "link": link.describe()},
    )


def _rate(metric: Metric, made: Copies, source: str, link: Link) -> Measurement:
    return Measurement(
        metric.name,
        made.mb_s,
        metric.unit,
        source,
        samples=len(made.wall_seconds),
        spread=made.spread,
        suspect=doubt(made, link),
        detail=made.as_dict(),
    )


def _link_readings(picture: Picture, samples: int) -> Iterable[Reading]:
    link, share = picture.link, link_share(picture)
    if link.is_pcie and link.generation is None:
        reason = "NVML gives no link generation and width while copies run"
        yield Unmeasured(LINK.name, Reason.NOT_SUPPORTED, reason)
    else:
        yield Measurement(LINK.name, link.describe(), "", "NVML, read while large copies ran")
    if share is None:
        if not link.is_pcie:
            reason = f"{link.describe()}: no PCIe ceiling applies"
        elif link.loaded_mb_s is None:
            reason = "NVML gives no link generation and width while copies run"
        else:
            reason = f"copies are faster than the link that NVML shows ({link.describe()})"
        yield Unmeasured(SHARE.name, Reason.NOT_SUPPORTED, reason)
        return
    ceiling = format_number(link.loaded_mb_s or 0)
    source = f"best pinned copy over the {ceiling} MB/s of {link.describe()}, before headers"
    yield Measurement(SHARE.name, 100 * share, SHARE.unit, source, samples=samples)


def _together_reading(together: Sequence[Together] | Unmeasured) -> Reading:
    if isinstance(together, Unmeasured):
        return replace(together, name=TOGETHER.name)
    worst = min(together, key=lambda found: min(found.ratios))
    return Measurement(
        TOGETHER.name,
        min(worst.ratios),
        "",
        f"pinned copies of all {len(worst.devices)} GPUs at once over each one's own, lowest card "
        f"and direction; medians of {TOGETHER_ROUNDS}",
        samples=TOGETHER_ROUNDS,
        detail={
            found.direction: {
                "devices": list(found.devices),
                "alone_mb_s": list(found.alone_mb_s),
                "together_mb_s": list(found.together_mb_s),
            }
            for found in together
        },
    )
