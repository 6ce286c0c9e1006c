"""Sentences over recorded rates: what each says, and what none of them says."""

from __future__ import annotations

import pytest

from pichak_core.devices.nvml import Gpu
from pichak_core.measure._copies import Together
from pichak_core.measure._transfer_verdict import (
    Link,
    Picture,
    impossible,
    link_of,
    link_share,
    sentences,
)

X16 = Link(4, 16, 4, 16)


def picture(up: float, down: float, link: Link = X16, **more: object) -> Picture:
    pageable = {"h2d_pageable": up / 2, "d2h_pageable": down / 2}
    return Picture({"h2d_pinned": up, "d2h_pinned": down, **pageable}, link, **more)  # type: ignore[arg-type]


def said(one: Picture) -> str:
    return "; ".join(sentences(one))


def test_a_healthy_card_has_nothing_said_about_it() -> None:
    assert sentences(picture(25_000, 25_500)) == []
    assert link_share(picture(25_000, 25_500)) == pytest.approx(25_500 / 31_507, rel=1e-3)


def test_an_idle_link_is_not_what_the_copies_had() -> None:
    # field case 25: P8 before the copies, generation 4 during them
    before = Gpu(0, {"pcie_generation": 1, "pcie_width": 16, "pcie_generation_max": 4,
                     "pcie_width_max": 16})  # fmt: skip
    during = [
        Gpu(0, {"pcie_generation": 1, "pcie_width": 16}),
        Gpu(0, {"pcie_generation": 4, "pcie_width": 16}),
    ]
    link = link_of(during, before)
    assert (link.generation, link.width) == (4, 16)
    assert sentences(picture(25_000, 25_500, link)) == []
    # without a reading under load nothing is said of the link, and no share is formed
    unread = link_of([], before)
    assert (unread.generation, unread.generation_max) == (None, 4)
    assert link_share(picture(25_000, 25_500, unread)) is None
    assert sentences(picture(25_000, 25_500, unread)) == []
    # a lagging reading is not taken for a link that is exceeded
    lagging = link_of(during[:1], before)
    assert link_share(picture(25_000, 25_500, lagging)) is None
    assert impossible("h2d_pinned", 25_000, lagging) == ""
    assert "read while it idled" in said(picture(25_000, 25_500, lagging))


def test_a_guest_sees_its_hypervisors_link() -> None:
    # field cases 21 and 25: N/A, or the emulated root port's generation 1
    assert link_of([Gpu(0)], Gpu(0)) == Link()
    shown = Gpu(0, {"pcie_generation_max": 1, "pcie_width_max": 1, "virtualisation_mode": 1})
    link = link_of([Gpu(0, {"pcie_generation": 1, "pcie_width": 1})], shown)
    assert impossible("h2d_pinned", 25_000, link) == ""
    text = said(picture(25_000, 25_000, link))
    assert "the hypervisor shows is not the one" in text
    assert "x1" not in text.replace("PCIe 1.0 x1 under load", "")


def test_only_the_card_in_the_slow_slot_is_called_x1() -> None:
    # field case 96: 12.8, 12.8 and 0.8 GB/s in one node, widths 16, 16, 1
    cards = [
        picture(12_800, 13_000, Link(3, 16, 3, 16)),
        picture(12_800, 13_000, Link(3, 16, 3, 16)),
        picture(800, 810, Link(3, 1, 3, 16)),
    ]
    assert [("x1" in said(card)) for card in cards] == [False, False, True]
    assert sentences(cards[0]) == sentences(cards[1]) == []
    # by its measured rate, where nobody gives a width
    assert "as slow as an x1 slot or riser" in said(picture(800, 810, Link()))
    assert "x1" not in said(picture(6_000, 6_000, Link()))
    # an x16 link that is slow is slow, and not x1
    slow = said(picture(800, 810, Link(3, 16, 3, 16)))
    assert "x1 " not in slow
    assert "5% of what its link carries" in slow


def test_fewer_lanes_or_a_lower_generation_under_load_are_said() -> None:
    text = said(picture(6_000, 6_100, Link(3, 8, 4, 16)))
    assert "8 of 16 lanes" in text
    assert "PCIe 3.0 under load, and could at 4.0" in text
    assert sentences(picture(12_000, 12_100, Link(3, 16, 3, 16))) == []


@pytest.mark.parametrize(("up", "down"), [(25_000.0, 11_000.0), (11_000.0, 25_000.0)])
def test_asymmetry_beyond_two_is_a_note(up: float, down: float) -> None:
    (text,) = sentences(picture(up, down))
    assert "2.3 times as fast" in text
    assert "nothing about PCIe explains it" in text
    assert text.startswith(f"copies {'to' if up > down else 'from'} the GPU")


def test_asymmetry_below_two_is_none() -> None:
    # field case 97
    assert sentences(picture(19_000, 11_000)) == []


def test_single_and_simultaneous_directions_are_shown_apart() -> None:
    # field case 97: 25 and 25 alone, 11 and 25 together; neither is called a fault
    rates = {"h2d_pinned": 25_000, "d2h_pinned": 25_000, "h2d_both": 11_000, "d2h_both": 25_000}
    (text,) = sentences(Picture(rates, X16))
    assert text == (
        "both directions at once: 11,000 to the GPU and 25,000 MB/s from it, 72% of what they "
        "give one after the other"
    )


def test_pinning_that_buys_nothing_is_a_fabric() -> None:
    rates = {"h2d_pinned": 5_000, "d2h_pinned": 5_000, "h2d_pageable": 4_000}
    assert "a fabric, not a bus" in said(Picture({**rates, "d2h_pageable": 4_800}, Link()))
    assert "fabric" not in said(Picture({**rates, "d2h_pageable": 4_500}, Link()))
    assert "fabric" not in said(Picture(rates, Link()))  # what was not measured says nothing


def test_cards_that_share_a_bus_fall_together() -> None:
    shared = Together("h2d", ("cuda:0", "cuda:1"), (12_000, 12_000), (6_100, 5_900))
    own = Together("d2h", ("cuda:0", "cuda:1"), (12_000, 12_000), (11_900, 12_000))
    text = said(picture(12_000, 12_000, Link(3, 16, 3, 16), together=(shared, own)))
    assert "copies to all 2 GPUs at once fall to 49% of a card's own rate: a shared bus" in text
    assert "cuda:1 12,000 alone and 5,900" in text
    assert "copies from all 2 GPUs at once keep 99%" in text


def test_unified_and_coherent_memory_have_no_link() -> None:
    unified = picture(90_000, 30_000, Link(1, 1, 1, 1, unified=True))
    (text,) = sentences(unified)
    assert "one memory, over no link" in text
    assert unified.link.describe() == "memory shared with the system"
    assert link_share(unified) is None
    coherent = link_of([], Gpu(0, {"c2c_enabled": True, "pcie_generation_max": 5,
                                   "pcie_width_max": 16}))  # fmt: skip
    assert impossible("h2d_pinned", 400_000, coherent) == ""
    assert impossible("h2d_pinned", 400_000, Link(5, 16, 5, 16)) != ""


def test_clocks_that_disagree_are_told() -> None:
    assert "the clocks disagree: a text" in said(picture(25_000, 25_000, clocks=("a text",)))


@pytest.mark.parametrize(
    ("link", "text"),
    [
        (Link(), "PCIe, of unknown generation and width"),
        (Link(4, 16, 4, 16), "PCIe 4.0 x16 under load"),
        (Link(3, 8, 4, 16), "PCIe 3.0 x8 under load (at most 4.0 x16)"),
    ],
)
def test_links_describe_themselves(link: Link, text: str) -> None:
    assert link.describe() == text
