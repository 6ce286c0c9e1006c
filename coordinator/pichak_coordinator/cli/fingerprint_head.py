"""The head of a fingerprint's page: which machine and which GPU this is, in a few lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pichak_core.measurement import Measurement

if TYPE_CHECKING:
    from pichak_core.measurement import Fingerprint

#: What the head says, so that the page need not say it again.
HEAD_METRICS = frozenset(
    {
        "software.os",
        "software.kernel",
        "software.driver",
        "software.cuda_driver",
        "software.cuda",
        "software.torch",
        "host.kind",
        "host.hypervisor",
        "gpu.name",
        "gpu.uuid",
        "gpu.pci_bus_id",
        "gpu.vbios",
        "gpu.compute_capability",
        "gpu.virtualisation_mode",
        "gpu.driver_model",
        "gpu.vgpu_licensed",
    }
)
_LABEL = 10


def head_lines(fingerprint: Fingerprint, width: int, title: str = "") -> list[str]:
    """The title, and a line each for machine, software, driver and GPU where they were read."""
    lines = textwrap.wrap(title, width) if title else []
    for label, text in _parts(fingerprint):
        lines += textwrap.wrap(
            text,
            width,
            initial_indent=f"  {label:<{_LABEL}}",
            subsequent_indent=" " * (_LABEL + 2),
            break_on_hyphens=False,
        )
    return lines


def _parts(fingerprint: Fingerprint) -> Iterator[tuple[str, str]]:
    said = fingerprint.text
    name = said("gpu.name")
    if name:
        yield "GPU", name + _joined(", compute capability ", said("gpu.compute_capability"))
        yield from _line("UUID", said("gpu.uuid"))
        place = _listed(said("gpu.pci_bus_id"), _joined("VBIOS ", said("gpu.vbios")))
        yield from _line("PCI", place)
        yield from _line("virtual", _virtual(fingerprint))
        reading = fingerprint["gpu.name"]
        if isinstance(reading, Measurement) and reading.suspect:
            yield "SUSPECT", reading.suspect
    driver = said("software.driver")
    model = said("gpu.driver_model")
    yield from _line(
        "driver",
        _listed(
            driver and f"{driver}{f' ({model})' if model else ''}",
            _joined("for CUDA up to ", said("software.cuda_driver")),
        ),
    )
    yield from _line(
        "torch", _listed(said("software.torch"), _joined("built for CUDA ", said("software.cuda")))
    )
    kind, hypervisor = said("host.kind"), said("host.hypervisor")
    below = f" ({hypervisor})" if hypervisor and hypervisor != "none" else ""
    yield from _line(
        "host",
        _listed(
            kind and f"{kind}{below}",
            said("software.os"),
            _joined("kernel ", said("software.kernel")),
        ),
    )


def _virtual(fingerprint: Fingerprint) -> str:
    mode = fingerprint.text("gpu.virtualisation_mode")
    if mode is None:
        return "not known"
    licence = fingerprint.get("gpu.vgpu_licensed")
    if isinstance(licence, Measurement):
        return f"{mode}, {'licensed' if licence.value else 'NOT licensed'}"
    return f"{mode}, licence not known" if mode == "vGPU" else mode


def _joined(before: str, text: str | None) -> str:
    return f"{before}{text}" if text else ""


def _listed(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part)


def _line(label: str, text: str | None) -> Iterator[tuple[str, str]]:
    if text:
        yield label, text
