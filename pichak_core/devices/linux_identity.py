"""Who a Linux machine is and what it runs on: distribution, machine id, hypervisor, container."""

from __future__ import annotations

import hashlib
import re
import socket
from pathlib import Path

from pichak_core.devices.cgroups import parse_mountinfo
from pichak_core.devices.host import HostKind, Identity

#: What firmware calls a virtual machine's maker -> the hypervisor.
_DMI_HYPERVISORS = (
    ("qemu", "qemu/kvm"),
    ("kvm", "kvm"),
    ("vmware", "vmware"),
    ("virtualbox", "virtualbox"),
    ("innotek", "virtualbox"),
    ("xen", "xen"),
    ("bochs", "bochs"),
    ("parallels", "parallels"),
    ("google compute engine", "kvm (Google)"),
    ("amazon ec2", "nitro/xen (Amazon)"),
    ("openstack", "kvm (OpenStack)"),
    ("alibaba cloud", "kvm (Alibaba)"),
    ("virtual machine", "hyper-v"),
)
_CLOCKSOURCES = (("kvm-clock", "kvm"), ("hyperv", "hyper-v"), ("xen", "xen"))
_CONTAINER_GROUP = re.compile(r"docker|kubepods|containerd|libpod|/lxc|crio|garden|ecs/")


def operating_system(root: Path) -> str:
    """PRETTY_NAME of os-release. `OSError` where there is none."""
    for place in ("etc/os-release", "usr/lib/os-release"):
        try:
            text = (root / place).read_text(errors="replace")
        except FileNotFoundError:
            continue
        fields = dict(re.findall(r"^([A-Z_]+)=(.*)$", text, re.MULTILINE))
        name = fields.get("PRETTY_NAME") or fields.get("NAME")
        if name:
            return str(name).strip().strip("\"'")
    raise FileNotFoundError(f"no os-release below {root}etc or {root}usr/lib names the system")


def identity(sys: Path, root: Path, in_container: bool) -> Identity:
    """A hashed id that outlives reboots: the machine id, the firmware's UUID, a network address,
    or the host name, whichever exists first.

    A container's image may carry a machine id that all its copies share, so there the firmware's
    UUID comes first, and the machine id counts only together with the container's host name.
    """
    machine_id = _first_text(root / "etc/machine-id", root / "var/lib/dbus/machine-id")
    if machine_id is not None and not re.fullmatch(r"[0-9a-f]{32}", machine_id):
        machine_id = None  # systemd writes "uninitialized" into images
    firmware = _first_text(sys / "class/dmi/id/product_uuid")
    name = socket.gethostname()
    if in_container:
        if firmware:
            return _hashed(
                firmware.lower(),
                "the firmware's UUID (a container's machine id may be its image's)",
            )
        if machine_id:
            return _hashed(f"{machine_id}:{name}", "the container's machine id and host name")
    elif machine_id:
        return _hashed(machine_id, "/etc/machine-id")
    elif firmware:
        return _hashed(firmware.lower(), "the firmware's UUID")
    for interface in sorted(sys.glob("class/net/*")):
        address = _first_text(interface / "address")
        if (interface / "device").exists() and address and address.strip("0:"):
            return _hashed(address, f"the address of {interface.name} (no machine id here)")
    if not name:
        raise OSError("no machine id, firmware UUID, network address or host name can be read")
    return _hashed(name, "the host name (no machine id, firmware UUID or network card here)")


def host_kind(proc: Path, sys: Path, root: Path) -> HostKind:
    """Bare metal, virtual machine, container or WSL2, and what says so.

    `OSError` when nothing at all can be read: silence is not bare metal.
    """
    release = _first_text(proc / "sys/kernel/osrelease") or ""
    contained = container_evidence(proc, root)
    hypervisor, evidence = _hypervisor(proc, sys)
    if "microsoft" in release.lower():
        return HostKind("wsl2", "hyper-v", (f"kernel release {release}", *contained))
    if contained:
        return HostKind("container", hypervisor or "unknown", (*contained, *evidence))
    if hypervisor is None:
        raise FileNotFoundError(
            f"{proc}/cpuinfo, {sys}/class/dmi and {sys}/hypervisor say nothing of a hypervisor"
        )
    return HostKind("bare metal" if hypervisor == "none" else "vm", hypervisor, tuple(evidence))


def container_evidence(proc: Path, root: Path) -> list[str]:
    """Phrases that each say "this is a container"; empty when it is not one.

    A mark that an image carries (``/.dockerenv``) is not believed while the kernel's own threads
    are visible and / is no overlay: images are also started as whole machines.
    """
    found = []
    environment = _first_text(proc / "1/environ") or ""
    for entry in environment.split("\0"):
        if entry.startswith("container=") and entry != "container=":
            found.append(f"the first process has {entry}")
    groups = (_first_text(proc / "self/cgroup") or "") + (_first_text(proc / "1/cgroup") or "")
    match = _CONTAINER_GROUP.search(groups)
    if match:
        found.append(f"the control group path holds {match.group(0)!r}")
    marks = [m for m in (".dockerenv", "run/.containerenv") if (root / m).exists()]
    if marks and not (_sees_kernel_threads(proc) and not _root_is_overlay(proc)):
        found += [f"/{mark} exists" for mark in marks]
    return found


def _hypervisor(proc: Path, sys: Path) -> tuple[str | None, list[str]]:
    """("none", a name, "unknown", or None when nothing can be read; what was seen)."""
    cpuinfo = _first_text(proc / "cpuinfo") or ""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    flagged = "hypervisor" in flags.group(1).split() if flags else None
    name, evidence = _named_hypervisor(sys)
    if flagged:
        return name or "unknown", ["the CPU reports a hypervisor", *evidence]
    if flagged is False:
        return "none", ["the CPU reports no hypervisor"]
    if name:  # no CPU flag on this architecture to decide by
        return name, evidence
    vendor = _first_text(sys / "class/dmi/id/sys_vendor")
    if vendor:
        return "none", [f"the firmware's vendor is {vendor}"]
    return None, []


def _named_hypervisor(sys: Path) -> tuple[str | None, list[str]]:
    kind = _first_text(sys / "hypervisor/type")
    if kind:
        return kind, [f"{sys}/hypervisor/type is {kind}"]
    firmware = [_first_text(sys / "class/dmi/id" / n) for n in ("sys_vendor", "product_name")]
    words = " ".join(filter(None, firmware))
    for mark, name in _DMI_HYPERVISORS:
        # Amazon's bare metal has its virtual machines' vendor; its product ends in ".metal".
        if mark in words.lower() and ".metal" not in words:
            return name, [f"the firmware says {words}"]
    tree = _first_text(sys / "firmware/devicetree/base/hypervisor/compatible")
    if tree:
        return tree.strip("\0"), [f"the device tree names the hypervisor {tree.strip(chr(0))}"]
    clocks = _first_text(sys / "devices/system/clocksource/clocksource0/available_clocksource")
    for mark, name in _CLOCKSOURCES:
        if clocks and mark in clocks:
            return name, [f"the kernel offers the clock {mark}"]
    return None, []


def _sees_kernel_threads(proc: Path) -> bool:
    """Process 2 is the kernel's thread daemon, except inside a process namespace."""
    return _first_text(proc / "2/comm") == "kthreadd"


def _root_is_overlay(proc: Path) -> bool:
    mounts = parse_mountinfo(_first_text(proc / "self/mountinfo") or "")
    return any(m.point == "/" and m.fs_type in ("overlay", "aufs") for m in mounts)


def _hashed(identifier: str, what: str) -> Identity:
    digest = hashlib.sha256(f"pichak-fleet:{identifier}".encode()).hexdigest()[:16]
    return Identity(digest, f"hash of {what}")


def _first_text(*paths: Path) -> str | None:
    """The text of the first file that can be read and is not empty."""
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        if text:
            return text
    return None
