"""What control groups allow, on trees whose answer is known and in real groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pichak_core.devices.cgroups import (
    cpu_quotas,
    group_chains,
    io_read_bytes,
    memory_bounds,
    parse_membership,
    parse_mountinfo,
)
from pichak_core.devices.linux import usable_cores, usable_memory_bytes

MIB = 2**20
GIB = 2**30
V2 = "0::{group}\n"
V2_MOUNT = "30 1 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_UNLIMITED = 9223372036854771712


class Tree:
    """A /proc and a /sys below a folder, holding what a test writes into them."""

    def __init__(self, base: Path) -> None:
        self.proc, self.sys = base / "proc", base / "sys"
        self.write(self.proc / "meminfo", "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")

    def write(self, path: Path, text: str | int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def join(self, membership: str, mounts: str) -> None:
        self.write(self.proc / "self/cgroup", membership)
        self.write(self.proc / "self/mountinfo", mounts)

    def group(self, path: str, **files: str | int) -> None:
        """Files of a group by name; "__" stands for the dot."""
        for name, text in files.items():
            self.write(self.sys / "fs/cgroup" / path / name.replace("__", "."), text)

    def memory(self) -> tuple[int, str]:
        return usable_memory_bytes(self.proc, self.sys)

    def cores(self, affinity: int) -> tuple[int, str]:
        return usable_cores(self.proc, self.sys, affinity=affinity)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_version_2_limit_counts_without_reclaimable_cache(tree: Tree) -> None:
    # field case 94: 1 GiB for the container while the host shows 32 GiB
    tree.join(V2.format(group="/job"), V2_MOUNT.format(root="/"))
    tree.group(
        "job",
        memory__max="1073741824",
        memory__current=600 * MIB,
        memory__stat=f"anon 1\ninactive_file {100 * MIB}\nactive_file 7",
    )
    available, why = tree.memory()
    assert available == GIB - (600 - 100) * MIB
    assert "memory.max" in why
    assert "1,024 MiB" in why


@pytest.mark.parametrize("limit", ["max", str(V1_UNLIMITED), str(2**63 - 2**16), str(2**64 - 1)])
def test_no_limit_is_no_bound(tree: Tree, limit: str) -> None:
    # field case 94: "max" and version 1's sentinel for 4 and 64 KiB pages
    tree.join(V2.format(group="/job"), V2_MOUNT.format(root="/"))
    tree.group("job", memory__max=limit, memory__current=5)
    assert memory_bounds(tree.proc, tree.sys) == []
    available, why = tree.memory()
    assert available == 33554432 * 1024
    assert "MemAvailable" in why


def test_a_parents_limit_binds_its_children(tree: Tree) -> None:
    # field case 94: the tightest level is neither the first nor the last
    tree.join(V2.format(group="/a/b/c"), V2_MOUNT.format(root="/"))
    tree.group("a/b/c", memory__max=8 * GIB, memory__current=1 * GIB)
    tree.group("a/b", memory__max=4 * GIB, memory__current=3 * GIB)
    tree.group("a", memory__max=16 * GIB, memory__current=3 * GIB)
    assert tree.memory()[0] == 1 * GIB


def test_the_soft_limit_counts_since_past_it_the_kernel_throttles(tree: Tree) -> None:
    tree.join(V2.format(group="/job"), V2_MOUNT.format(root="/"))
    tree.group("job", memory__max=8 * GIB, memory__high=2 * GIB, memory__current=GIB)
    available, why = tree.memory()
    assert available == GIB
    assert "memory.high" in why


def test_more_in_use_than_allowed_leaves_nothing(tree: Tree) -> None:
    tree.join(V2.format(group="/job"), V2_MOUNT.format(root="/"))
    tree.group("job", memory__max=GIB, memory__current=2 * GIB)
    assert tree.memory()[0] == 0


def test_version_1_beside_a_version_2_hierarchy_without_controllers(tree: Tree) -> None:
    tree.join(
        "4:memory:/job/7\n1:cpu,cpuacct:/job\n0::/job/7\n",
        "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    )
    tree.group(
        "memory/job/7",
        memory__limit_in_bytes=V1_UNLIMITED,
        memory__usage_in_bytes=GIB,
        memory__stat=f"inactive_file 1\ntotal_inactive_file {GIB // 4}",
    )
    tree.group(
        "memory/job",
        memory__limit_in_bytes=3 * GIB,
        memory__usage_in_bytes=2 * GIB,
        memory__use_hierarchy=1,
        memory__stat=f"inactive_file 1\ntotal_inactive_file {GIB // 2}",
    )
    tree.group("cpu,cpuacct/job", cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000)
    tree.group("unified/job/7", cgroup__procs="1")
    # hierarchical figures, since a version 1 group's plain ones leave its children out
    assert tree.memory()[0] == 3 * GIB - (2 * GIB - GIB // 2)
    assert tree.cores(64)[0] == 3


def test_version_1_parents_that_opted_out_do_not_bind(tree: Tree) -> None:
    tree.join(
        "4:memory:/job/7\n", "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    )
    tree.group("memory/job/7", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=0)
    tree.group(
        "memory/job",
        memory__limit_in_bytes=GIB,
        memory__usage_in_bytes=0,
        memory__use_hierarchy=0,
    )
    assert tree.memory()[0] == 2 * GIB


def test_a_container_that_sees_its_hosts_path(tree: Tree) -> None:
    # Only the container's own subtree is mounted, and the path is the host's.
    tree.join(
        "4:memory:/docker/abc\n",
        "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
    )
    tree.group(
        "memory",
        memory__limit_in_bytes=V1_UNLIMITED,
        memory__usage_in_bytes=GIB,
        memory__stat=f"hierarchical_memory_limit {5 * GIB}\ntotal_inactive_file 0",
    )
    # An ancestor that is not mounted here shows in the hierarchical limit alone.
    assert tree.memory()[0] == 4 * GIB


def test_a_path_outside_the_namespace_reads_the_mounts_top(tree: Tree) -> None:
    tree.join(V2.format(group="/../other"), V2_MOUNT.format(root="/"))
    tree.group("", memory__max=GIB, memory__current=0)
    assert tree.memory()[0] == GIB


def test_without_mountinfo_the_usual_places_are_read(tree: Tree) -> None:
    tree.write(tree.proc / "self/cgroup", "0::/job\n4:memory:/job\n")
    tree.group("memory/job", memory__limit_in_bytes=GIB, memory__usage_in_bytes=0)
    tree.group("job", cpu__max="100000 50000")
    assert tree.memory()[0] == GIB
    assert tree.cores(8)[0] == 2


@settings(max_examples=40)
@given(
    levels=st.lists(
        st.tuples(
            st.one_of(st.none(), st.integers(0, 2**45)),
            st.integers(0, 2**45),
            st.integers(0, 2**45),
        ),
        min_size=1,
        max_size=6,
    ),
    host_kib=st.integers(0, 2**35),
)
def test_the_smallest_bound_of_any_chain_wins(
    levels: list[tuple[int | None, int, int]],
    host_kib: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tree = Tree(tmp_path_factory.mktemp("chain"))
    tree.write(tree.proc / "meminfo", f"MemAvailable: {host_kib} kB")
    names = [f"g{i}" for i in range(len(levels))]
    tree.join(V2.format(group="/" + "/".join(names)), V2_MOUNT.format(root="/"))
    expected = [host_kib * 1024]
    for depth, (limit, current, cache) in enumerate(levels, start=1):
        tree.group(
            "/".join(names[:depth]),
            memory__max="max" if limit is None else limit,
            memory__current=current,
            memory__stat=f"inactive_file {cache}",
        )
        if limit is not None:
            expected.append(max(0, limit - max(0, current - cache)))
    assert tree.memory()[0] == min(expected)


@pytest.mark.parametrize(
    ("quota", "affinity", "cores"),
    [
        ("150000 100000", 24, 2),  # field case 95: a quota is time; it is rounded up
        ("150000 100000", 1, 1),
        ("50000 100000", 24, 1),
        ("1000 100000", 24, 1),
        ("2400000 100000", 24, 24),
        ("9600000 100000", 24, 24),
        ("max 100000", 24, 24),
    ],
)
def test_cores_are_the_smaller_of_affinity_and_quota(
    tree: Tree, quota: str, affinity: int, cores: int
) -> None:
    tree.join(V2.format(group="/job"), V2_MOUNT.format(root="/"))
    tree.group("job", cpu__max=quota)
    assert tree.cores(affinity)[0] == cores


def test_a_parents_quota_binds_and_is_named(tree: Tree) -> None:
    tree.join(V2.format(group="/a/b"), V2_MOUNT.format(root="/"))
    tree.group("a/b", cpu__max="800000 100000")
    tree.group("a", cpu__max="60000 20000")
    cores, why = tree.cores(64)
    assert cores == 3
    assert "60000 us in every 20000 us" in why
    assert f"{tree.sys}/fs/cgroup/a:" in why


def test_version_1_without_a_quota(tree: Tree) -> None:
    tree.join("1:cpu:/job\n", "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n")
    tree.group("cpu/job", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert cpu_quotas(tree.proc, tree.sys) == []
    assert tree.cores(5)[0] == 5


def test_a_system_without_affinity_masks(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    # field case 95: macOS and Windows have no sched_getaffinity
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    assert usable_cores(tree.proc, tree.sys)[0] == 192
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tree.proc, tree.sys)[0] == 1


def test_the_affinity_mask_is_counted_not_the_machine(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    # field case 95: 192 CPUs seen, 24 allowed
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(24, 48)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    assert usable_cores(tree.proc, tree.sys)[0] == 24


def test_mounts_and_memberships_are_read_as_the_kernel_writes_them() -> None:
    mounts = parse_mountinfo(
        "36 35 98:0 /my\\040root /mnt/a\\040b rw,noatime shared:1 master:2 - ext4 /dev/root rw\n"
        "a line without a dash\n"
    )
    assert [(m.root, m.point, m.fs_type) for m in mounts] == [("/my root", "/mnt/a b", "ext4")]
    groups = parse_membership("9:name=systemd:/x\n3:cpu,cpuacct:/y:z\n0::/w\nnonsense\n")
    assert groups == {"name=systemd": "/x", "cpu": "/y:z", "cpuacct": "/y:z", "": "/w"}


def test_bytes_read_by_device_in_both_versions(tree: Tree) -> None:
    # field case 80: io.stat stands in where a container is shown no block devices
    tree.join(
        "0::/job\n2:blkio:/old\n",
        V2_MOUNT.format(root="/")
        + "33 1 0:30 / /sys/fs/cgroup/blkio rw - cgroup cgroup rw,blkio\n",
    )
    assert io_read_bytes(tree.proc, tree.sys) == {}
    tree.group(
        "job",
        io__stat="8:0 rbytes=1459200 wbytes=314773504 rios=192 wios=353 dbytes=0 dios=0\n"
        "8:16 \n259:3 rbytes=5 wbytes=7 rios=1 wios=1",
    )
    tree.group(
        "blkio/old",
        blkio__throttle__io_service_bytes="7:0 Read 4096\n7:0 Write 99\n7:0 Total 4195\nTotal 4195",
    )
    assert io_read_bytes(tree.proc, tree.sys) == {"8:0": 1459200, "259:3": 5, "7:0": 4096}


def test_this_process_is_in_some_group_or_there_are_none() -> None:
    if not Path("/proc/self/cgroup").exists():
        pytest.skip("no control groups here")
    chains = group_chains("memory", Path("/proc"), Path("/sys"))
    assert all(chain[-1] in chain[0].parents or chain == chain[:1] for chain in chains)
