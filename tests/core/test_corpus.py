"""The profile of a corpus against counts made by hand, twins, and the definition of each number."""

from __future__ import annotations

import gzip
import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pichak_core.tune.corpus import BUCKETS, CorpusError, CorpusProfile, profile_corpus
from pichak_core.tune.row_lengths import (
    RowLengths,
    histogram,
    mean_interval,
    quantile,
    quantile_interval,
)
from pichak_core.tune.row_text import DEFECTS


def save(path: Path, rows: list, *, ascii_only: bool = True) -> Path:
    lines = (json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def pair(p: int, c: int) -> dict:
    return {"prompt": "p" * p, "completion": "c" * c}


def numbers(profile: CorpusProfile) -> dict:
    """What a twin of the file has to agree in."""
    record = profile.as_dict()
    for name in ("seconds", "defects", "file_kind", "place"):
        del record[name]
    return record


def test_counted_by_hand(tmp_path):
    rows = [pair(3, 2), pair(10, 5), {"prompt": "ä", "completion": "€"}]  # 5, 15, 2 + 3 bytes
    made = profile_corpus(save(tmp_path / "c.jsonl", rows), "bytes")
    assert (made.rows_seen, made.rows_total, made.sampled) == (3, 3, 3)
    assert (made.token_p50, made.token_p95, made.token_p99, made.token_max) == (5, 15, 15, 15)
    assert made.completion_p95 == 5
    assert (made.detected_format, made.loss_policy) == ("prompt_completion", "completion_only")
    assert made.seq_len == 256
    assert made.supervised_per_row == (2 + 5 + 3) / 3
    assert (made.scored_tokens, made.scored_tokens_lost, made.rows_truncated) == (10, 0, 0.0)
    assert made.formats == {"prompt_completion": 3}
    assert made.defects == {}
    assert "none of the 3 rows read is cut" in made.seq_source
    assert "all 3 rows" in made.seq_source


def test_a_900_token_prompt_with_a_one_token_label_scores_one_token(tmp_path):
    made = profile_corpus(save(tmp_path / "c.jsonl", [pair(900, 1)] * 8), "bytes")
    assert (made.seq_len, made.supervised_per_row) == (1024, 1.0)


def test_scored_tokens_behind_the_cut_do_not_count(tmp_path):
    # At 256: min(c, 256 - p) of each row is 10, 56, 0, and 20 of a row that ends exactly there.
    rows = [pair(100, 10), pair(200, 100), pair(256, 7), pair(236, 20)]
    made = profile_corpus(save(tmp_path / "c.jsonl", rows), "bytes", buckets=(256,))
    assert made.supervised_per_row == (10 + 56 + 0 + 20) / 4
    assert (made.scored_tokens, made.scored_tokens_lost) == (137, 51)
    assert (made.rows_truncated, made.rows_losing_scored, made.rows_unscored) == (0.5, 2, 1)
    assert made.over_last_bucket == 2
    assert made.defects["scored_cut"] == {"count": 1, "first_line": 3}
    assert "2 rows are longer than the last bucket, 256" in made.seq_source


def test_multi_turn_rows_score_every_assistant_turn_within_the_cut(tmp_path):
    def chat(*lengths: int) -> dict:
        roles = ("user", "assistant")
        turns = [{"role": roles[i % 2], "content": "x" * n} for i, n in enumerate(lengths)]
        return {"messages": turns}

    rows = [chat(100, 50, 50, 100), chat(10, 20), chat(100, 100, 56, 1)]
    made = profile_corpus(save(tmp_path / "c.jsonl", rows), "bytes", buckets=(256,))
    # 300 tokens: 50 + (256 - 200); 30 tokens: 20; 257 tokens: 100 + 0
    assert made.supervised_per_row == (50 + 56 + 20 + 100) / 3
    assert (made.detected_format, made.rows_losing_scored, made.rows_unscored) == ("messages", 2, 0)


def test_plain_text_scores_every_token_but_the_first_up_to_the_length(tmp_path):
    (tmp_path / "t.txt").write_text("\n".join(["a" * 300, "", "b" * 40]))
    made = profile_corpus(tmp_path / "t.txt", "bytes", buckets=(256,))
    assert (made.loss_policy, made.detected_format) == ("all_tokens", "plain_text")
    assert made.supervised_per_row == (255 + 39) / 2  # all but the first token of each row
    assert made.completion_p95 is None
    assert (made.rows_total, made.rows_losing_scored, made.scored_tokens_lost) == (2, 1, 44)
    assert made.defects["empty_row"] == {"count": 1, "first_line": 2}


def test_the_majority_decides_what_is_scored(tmp_path):
    some = [pair(10, 4)] * 4 + [{"text": "t" * 20}] * 4
    made = profile_corpus(save(tmp_path / "c.jsonl", some), "bytes")
    assert (made.loss_policy, made.supervised_per_row) == ("completion_only", 2.0)
    assert made.rows_unscored == 4
    few = [pair(10, 4)] * 3 + [{"text": "t" * 20}] * 5
    made = profile_corpus(save(tmp_path / "c.jsonl", few), "bytes")
    assert (made.loss_policy, made.supervised_per_row) == ("all_tokens", (3 * 13 + 5 * 19) / 8)


@pytest.mark.parametrize(("length", "seq_len"), [(1, 256), (256, 256), (257, 512), (99999, 16384)])
def test_the_length_is_rounded_up_to_a_bucket(tmp_path, length, seq_len):
    made = profile_corpus(save(tmp_path / "c.jsonl", [{"text": "x" * length}]), "bytes")
    assert made.seq_len == seq_len
    assert made.over_last_bucket == (length > BUCKETS[-1])


def test_the_quantile_is_the_callers(tmp_path):
    rows = [{"text": "x" * n} for n in range(1, 1001)]
    path = save(tmp_path / "c.jsonl", rows)
    lengths = {0.25: (250, 256), 0.5: (500, 512), 0.95: (950, 1024), 1.0: (1000, 1024)}
    for share, (wanted, seq_len) in lengths.items():
        made = profile_corpus(path, "bytes", sample=None, quantile=share)
        assert (made.quantile_tokens, made.seq_len) == (wanted, seq_len)
        assert made.quantile_low == made.quantile_high == wanted


class TestAnswersBehindTheCut:  # field case 75
    def test_they_are_counted_and_listed_when_no_longer_length_is_allowed(self, tmp_path):
        rows = [
            {
                "messages": [
                    {"role": "user", "content": "u" * 200},
                    {"role": "assistant", "content": "ok"},
                ]
            }
        ]
        made = profile_corpus(save(tmp_path / "c.jsonl", rows * 8), "bytes", buckets=(64,))
        assert (made.seq_len, made.rows_unscored, made.supervised_per_row) == (64, 8, 0.0)
        assert made.defects["scored_cut"] == {"count": 8, "first_line": 1}
        assert "8 rows keep no scored token" in made.seq_source

    def test_a_longer_length_is_picked_when_too_many_rows_would_keep_nothing(self, tmp_path):
        rows = [pair(40, 2)] * 92 + [pair(200, 2)] * 8
        path = save(tmp_path / "c.jsonl", rows)
        made = profile_corpus(path, "bytes", buckets=(64, 128, 256), quantile=0.9)
        assert made.quantile_tokens == 42
        assert (made.seq_len, made.rows_unscored) == (256, 0)
        assert "raised to 256, because at 128 8 % of the rows would keep no" in made.seq_source

    def test_a_few_such_rows_are_listed_only(self, tmp_path):
        rows = [pair(40, 2)] * 60 + [pair(200, 2)] * 3 + [pair(40, 2)] * 37
        made = profile_corpus(
            save(tmp_path / "c.jsonl", rows), "bytes", buckets=(64, 256), quantile=0.9
        )
        assert (made.seq_len, made.rows_unscored) == (64, 3)
        assert made.defects["scored_cut"] == {"count": 3, "first_line": 61}


def test_bom_crlf_and_compression_change_no_number(tmp_path):  # field case 62
    rows = [pair(random.Random(i).randrange(1, 600), 1 + i % 90) for i in range(900)]
    plain = save(tmp_path / "a.jsonl", rows)
    data = plain.read_bytes()
    twins = {
        "b.jsonl": b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n"),
        "c.jsonl.gz": gzip.compress(data),
        "d.json": json.dumps(rows).encode(),
        "e.json": json.dumps(rows, indent=3).encode(),
        "f.jsonl": data.replace(b"\n", b"\n\n \n"),
        "g.jsonl": data.rstrip(b"\n"),
    }
    for sample in (100, None):
        wanted = numbers(profile_corpus(plain, "bytes", sample=sample))
        for name, twin in twins.items():
            (tmp_path / name).write_bytes(twin)
            assert numbers(profile_corpus(tmp_path / name, "bytes", sample=sample)) == wanted, name
    made = profile_corpus(tmp_path / "b.jsonl", "bytes", sample=None)
    assert made.defects == {
        "crlf": {"count": 900, "first_line": 1},
        "bom": {"count": 1, "first_line": 1},
    }
    blank = profile_corpus(tmp_path / "f.jsonl", "bytes", sample=100).defects
    assert blank == {"empty_row": {"count": 1800, "first_line": 2}}


def test_a_sorted_file_and_its_shuffled_twin_give_the_same_answer(tmp_path):
    draw = random.Random(1)
    lengths = sorted(int(draw.lognormvariate(5, 0.8)) + 1 for _ in range(20_000))
    ordered = [{"text": "x" * n} for n in lengths]
    shuffled = draw.sample(ordered, len(ordered))
    wanted = {q: lengths[math.ceil(q * 20_000) - 1] for q in (0.5, 0.95)}
    for name, rows in (("sorted", ordered), ("shuffled", shuffled)):
        made = profile_corpus(save(tmp_path / f"{name}.jsonl", rows), "bytes", sample=2000)
        # Relative standard error of a sampled quantile, sqrt(q (1 - q) / n) / (density * value):
        # 2.2 % at the median and 3.8 % at p95 of this distribution; four of them are allowed.
        assert abs(made.token_p50 / wanted[0.5] - 1) < 4 * 0.022
        assert abs(made.token_p95 / wanted[0.95] - 1) < 4 * 0.038
        assert made.rows_total == 20_000
        assert made.quantile_low <= made.token_p95 <= made.quantile_high


def test_the_first_rows_alone_would_have_given_another_answer(tmp_path):
    rows = [pair(10, 10)] * 5000 + [pair(900, 10)] * 5000
    made = profile_corpus(save(tmp_path / "c.jsonl", rows), "bytes", sample=200)
    assert made.seq_len == 1024


def test_the_interval_of_a_sampled_quantile_covers():
    # Uniform on 0..999,999: the true 0.95 quantile is 949,999. 90 % of 400 intervals is 360,
    # with a standard deviation of 6; the ranks are rounded outwards, so more is no failure.
    draw = random.Random(3)
    covered = 0
    for _ in range(400):
        rising = sorted(draw.randrange(1_000_000) for _ in range(512))
        low, high = quantile_interval(rising, 0.95)
        covered += low <= 949_999 <= high
    assert covered >= 360 - 3 * 6


def test_the_interval_of_the_mean():
    values = [1, 2, 3, 4]
    low, high = mean_interval(sum(values), sum(v * v for v in values), 4)
    error = math.sqrt(5 / 3) / 2  # sample variance 5/3, over n = 4
    assert (low, high) == pytest.approx((2.5 - 1.645 * error, 2.5 + 1.645 * error))
    assert mean_interval(7, 49, 1) == (7, 7)


@given(st.lists(st.integers(0, 50), min_size=1), st.floats(0.001, 1))
def test_a_quantile_is_the_least_value_that_enough_values_do_not_exceed(values, q):
    found = quantile(sorted(values), q)
    enough = math.ceil(round(q * len(values), 9))
    assert sum(v <= found for v in values) >= enough
    assert sum(v < found for v in values) < enough


def test_quantiles_at_exact_shares():
    assert [quantile(range(1, 101), q) for q in (0.01, 0.07, 0.5, 0.95, 0.99, 1.0)] == [
        1, 7, 50, 95, 99, 100,
    ]  # fmt: skip


@given(st.lists(st.integers(0, 10**6), min_size=1))
def test_a_histogram_holds_each_value_once(values):
    bars = histogram(sorted(values))
    assert sum(rows for _, _, rows in bars) == len(values)
    for low, below, rows in bars:
        assert rows == sum(low <= max(1, v) < below for v in values)
    assert [bar[0] for bar in bars[1:]] == [bar[1] for bar in bars[:-1]]


@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=30),
    seq=st.integers(1, 60),
)
@settings(deadline=None)
def test_a_cut_against_its_definition(rows, seq):
    from pichak_core.tune.encoding import TokenRow

    lengths = RowLengths()
    for place, (p, c) in enumerate(rows, 1):
        spans = ((p, p + c),) if c else ()
        lengths.add(TokenRow((), spans, p + c, p + c, "x"), place)
    # Token j of a row is scored where it is the completion's and has one before it.
    scored = [[j for j in range(p, p + c) if j] for p, c in rows]
    kept = [sum(j < seq for j in row) for row in scored]
    cut = lengths.cut(seq, "completion_only")
    assert (cut.scored, cut.scored_before) == (sum(kept), sum(map(len, scored)))
    assert cut.scored_squared == sum(k * k for k in kept)
    assert cut.unscored == kept.count(0)
    assert cut.losing == sum(k < len(row) for k, row in zip(kept, scored, strict=True))
    assert cut.emptied == sum(len(row) > 0 == k for k, row in zip(kept, scored, strict=True))
    assert cut.truncated == sum(p + c > seq for p, c in rows)
    everything = lengths.cut(seq, "all_tokens")
    assert everything.scored == sum(max(0, min(p + c, seq) - 1) for p, c in rows)


@pytest.mark.parametrize("policy", ["completion_only", "all_tokens"])
def test_the_first_token_of_a_row_is_never_scored(tmp_path, policy):
    """A causal model scores n - 1 of n tokens: the workload's count of the same rows."""
    from pichak_core.tune.examples import ExampleStream
    from pichak_core.workload.batches import pad_right, targets_of

    scored_alone = policy == "completion_only"
    rows = [pair(0, 40) if scored_alone else pair(40, 0)] * 40
    path = save(tmp_path / "c.jsonl", rows)
    made = profile_corpus(path, "bytes")
    assert (made.loss_policy, made.supervised_per_row) == (policy, 39.0)
    drawn = ExampleStream(path, "bytes", made.seq_len).rows(40)
    assert [targets_of(row) for row in drawn] == [row.scored_tokens for row in drawn] == [39] * 40
    assert pad_right(drawn).scored_tokens == 40 * 39


def test_a_row_of_one_token_has_nothing_to_score_but_behind_a_bos(tmp_path):
    class WithBos:
        bos_token_id = 7

        def __call__(self, text):
            return {"input_ids": [7, *text.encode()]}

    path = save(tmp_path / "c.jsonl", [{"text": "a"}] * 3)
    made = profile_corpus(path, "bytes")
    assert (made.token_max, made.supervised_per_row, made.rows_unscored) == (1, 0.0, 3)
    made = profile_corpus(path, WithBos())
    assert (made.token_max, made.supervised_per_row, made.rows_unscored) == (2, 1.0, 0)


def test_defects_are_counted_with_their_first_line_and_cost_only_their_row(tmp_path):
    lines = [
        json.dumps(pair(3, 2)),
        '{"prompt": "x", "completion": null}',
        "{broken",
        '{"prompt": "\\ud83d", "completion": "c"}',
        "3",
        '{"a": "1", "b": "2"}',
        '{"text": ""}',
        "{broken too",
    ]
    path = tmp_path / "c.jsonl"
    path.write_bytes("\n".join(lines).encode() + b'\n{"prompt": "caf\xe9", "completion": "c"}\n')
    made = profile_corpus(path, "bytes")
    assert (made.rows_total, made.sampled, made.rows_seen) == (9, 9, 4)
    assert made.defects == {
        "invalid_json": {"count": 2, "first_line": 3},
        "unknown_format": {"count": 2, "first_line": 5},
        "empty_row": {"count": 1, "first_line": 7},
        "invalid_utf8": {"count": 1, "first_line": 9},
        "lone_surrogate": {"count": 1, "first_line": 4},
        "no_completion": {"count": 1, "first_line": 2},
        "not_an_object": {"count": 1, "first_line": 5},
        "null_field": {"count": 1, "first_line": 2},
    }
    assert "2 × not valid JSON (left out), first at line 3" in made.describe()
    made.describe().encode("utf-8")


def test_rows_of_an_array_are_numbered(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps([pair(1, 1), None, pair(1, 1)]))
    made = profile_corpus(tmp_path / "c.json", "bytes")
    assert made.place == "row"
    assert made.defects["not_an_object"] == {"count": 1, "first_line": 2}


def test_every_format_is_counted(tmp_path):
    rows = [
        pair(1, 1),
        {"instruction": "i", "input": "", "output": "o"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "p", "chosen": "c", "rejected": "rrr"},
        {"text": "t"},
        {"text": "u"},
    ]
    made = profile_corpus(save(tmp_path / "c.jsonl", rows), "bytes")
    assert made.formats == {
        "plain_text": 2,
        "prompt_completion": 1,
        "instruction": 1,
        "messages": 1,
        "conversations": 1,
        "preference": 1,
    }
    assert made.token_max == 4  # the preference pair's longer answer


def test_a_profile_survives_json(tmp_path):
    rows = [pair(300 + i, 5) for i in range(600)] + [{"prompt": None, "completion": "c"}]
    made = profile_corpus(save(tmp_path / "c.jsonl", rows), "bytes", sample=100, seed=3)
    again = CorpusProfile.from_dict(json.loads(json.dumps(made.as_dict(), allow_nan=False)))
    assert again == made
    with pytest.raises(ValueError, match="no field 'colour'"):
        CorpusProfile.from_dict({**made.as_dict(), "colour": 1})
    with pytest.raises(ValueError, match="seq_len"):
        CorpusProfile.from_dict({k: v for k, v in made.as_dict().items() if k != "seq_len"})


def test_the_seed_decides_and_is_printed(tmp_path):
    path = save(tmp_path / "c.jsonl", [pair(i % 700 + 1, 3) for i in range(3000)])
    one, same, other = (profile_corpus(path, "bytes", sample=64, seed=s) for s in (5, 5, 6))
    assert numbers(one) == numbers(same) != numbers(other)
    assert "seed 5" in one.seq_source
    assert "seed 5" in one.describe()


def test_progress_is_told(tmp_path):
    seen = []
    path = save(tmp_path / "c.jsonl", [pair(9, 3)] * 600)
    profile_corpus(path, "bytes", sample=None, on_progress=lambda *step: seen.append(step))
    assert ("counting rows (bytes)", path.stat().st_size, path.stat().st_size) in seen
    assert ("tokenising rows", 512, 600) in seen


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "holds no rows"),
        (b"\n \n", "holds no rows"),
        (b"[]", "holds no rows"),
        (b'{"a": 1}\n{"a": 2}\n', "none of the 2 rows read as JSON Lines can be used"),
    ],
)
def test_nothing_to_profile_is_a_sentence(tmp_path, data, words):
    (tmp_path / "c").write_bytes(data)
    with pytest.raises(CorpusError, match=words) as caught:
        profile_corpus(tmp_path / "c", "bytes")
    assert str(tmp_path / "c") in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"sample": 0}, {"quantile": 0}, {"quantile": 1.1}, {"buckets": ()}]
)
def test_arguments_out_of_range(tmp_path, options):
    path = save(tmp_path / "c.jsonl", [pair(1, 1)])
    with pytest.raises(ValueError, match="give"):
        profile_corpus(path, "bytes", **options)


def test_any_callable_is_a_tokenizer(tmp_path):
    path = save(tmp_path / "c.jsonl", [{"prompt": "a b c", "completion": " d e"}])
    made = profile_corpus(path, lambda text: {"input_ids": text.split()})
    assert (made.token_max, made.supervised_per_row) == (5, 2.0)


LINES = st.sampled_from(
    [
        b'{"prompt": "a", "completion": "b"}',
        b'{"messages": [{"role": "assistant", "content": "x"}]}',
        b'{"text": "\\ud800"}',
        b"\xff\xfe",
        b"[1]",
        b"null",
        b'"s"',
        b"",
        b"\r",
    ]
) | st.binary(max_size=20)


@given(lines=st.lists(LINES, max_size=8), sample=st.sampled_from([None, 3]))
@settings(max_examples=150)
def test_no_file_crashes_the_profile_and_every_row_is_accounted_for(
    tmp_path_factory, lines, sample
):
    path = tmp_path_factory.getbasetemp() / "salad.jsonl"
    path.write_bytes(b"\n".join(lines))
    try:
        made = profile_corpus(path, "bytes", sample=sample)
    except CorpusError:
        return
    left_out = sum(
        found["count"]
        for name, found in made.defects.items()
        if "left out" in DEFECTS[name] and name not in ("not_an_object", "empty_row")
    )
    assert made.rows_seen + left_out <= made.sampled <= made.rows_total
    assert made.rows_seen + left_out + made.defects.get("empty_row", {"count": 0})["count"] >= (
        made.sampled
    )
    made.describe().encode("utf-8")
    json.dumps(made.as_dict(), allow_nan=False)


@pytest.mark.parametrize(("rows", "bounded"), [(5, False), (58, False), (59, True)])
def test_an_upper_end_needs_enough_rows(rows: int, bounded: bool) -> None:
    """All rows lie below the 95 % quantile with probability 0.95^n, which passes 5 % at n = 59."""
    from pichak_core.tune.length_choice import _interval

    assert ("too few for an upper end" in _interval(10, 90, rows, 0.95)) is not bounded


class TestBinaryFiles:
    def test_random_bytes_are_no_corpus(self, tmp_path):
        # 100 kB with 390 NULs, fewer than 1 %, and 7 % other control characters.
        data = random.Random(5).randbytes(100_000)
        for name, content in (("bin.jsonl", data), ("bin.jsonl.gz", gzip.compress(data))):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(CorpusError, match="binary") as caught:
                profile_corpus(tmp_path / name, "bytes")
            assert name in str(caught.value)

    @pytest.mark.parametrize("at", [0, 1, 2])
    def test_a_line_of_nuls_among_good_rows_is_one_bad_row(self, tmp_path, at):
        lines = [json.dumps(pair(3, 2)).encode()] * 2
        lines.insert(at, b"\0" * 3)
        (tmp_path / "c.jsonl").write_bytes(b"\n".join(lines))
        made = profile_corpus(tmp_path / "c.jsonl", "bytes")
        assert (made.file_kind, made.rows_total, made.rows_seen) == ("JSON Lines", 3, 2)
        assert made.defects == {"only_nuls": {"count": 1, "first_line": at + 1}}

    def test_a_line_of_nuls_after_text_is_one_bad_row(self, tmp_path):
        (tmp_path / "t.txt").write_bytes(b"one\ntwo\n\0\0\0\0\0\0")
        made = profile_corpus(tmp_path / "t.txt", "bytes")
        assert (made.file_kind, made.rows_total, made.rows_seen) == ("plain text", 3, 2)
        assert made.defects == {"only_nuls": {"count": 1, "first_line": 3}}

    def test_nuls_alone_are_no_corpus(self, tmp_path):
        (tmp_path / "c.jsonl").write_bytes(bytes(5000))
        with pytest.raises(CorpusError, match="binary"):
            profile_corpus(tmp_path / "c.jsonl", "bytes")

    def test_text_in_another_encoding_is_still_text(self, tmp_path):
        (tmp_path / "t.txt").write_bytes("привет мир\n".encode("cp1251") * 20)
        made = profile_corpus(tmp_path / "t.txt", "bytes")
        assert made.defects == {"invalid_utf8": {"count": 20, "first_line": 1}}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("c.jsonl", "named .jsonl, but its first lines are not JSON"),
        ("c.csv", "the header too"),
        ("c.tsv", "the header too"),
        ("c.txt", ""),
        ("c", ""),
    ],
)
def test_a_name_that_promises_other_rows_is_noted(tmp_path, name, words):
    (tmp_path / name).write_text("question,answer\na,b\n")
    made = profile_corpus(tmp_path / name, "bytes")
    assert (made.file_kind, made.rows_total) == ("plain text", 2)
    assert len(made.notes) == bool(words)
    assert words in "".join(made.notes)
    assert words in "".join(made.defect_lines())
    assert CorpusProfile.from_dict(json.loads(json.dumps(made.as_dict()))) == made


def test_a_json_file_with_its_own_name_gets_no_note(tmp_path):
    assert profile_corpus(save(tmp_path / "c.jsonl", [pair(3, 2)]), "bytes").notes == ()
    (tmp_path / "c.csv").write_text(json.dumps(pair(3, 2)))
    assert profile_corpus(tmp_path / "c.csv", "bytes").notes == ()


class TestTheRowsThatWereCounted:
    def test_the_quantile_says_that_it_is_of_the_usable_rows(self, tmp_path):
        path = save(tmp_path / "c.jsonl", [pair(3, 2)] * 8)
        path.write_text(path.read_text() + "{broken\n" * 5)
        source = profile_corpus(path, "bytes").seq_source
        assert "of the 8 usable rows of 13 is 5 tokens" in source
        assert "none of the 8 usable rows is cut" in source

    def test_of_a_sample_too(self, tmp_path):
        path = save(tmp_path / "c.jsonl", [pair(3, 2)] * 100)
        path.write_text(path.read_text() + "{broken\n" * 100)
        made = profile_corpus(path, "bytes", sample=50)
        assert 0 < made.rows_seen < made.sampled == 50
        words = f"{made.rows_seen} usable of 50 rows drawn uniformly from 200 (seed 0)"
        assert words in made.seq_source

    def test_one_row_and_one_token_are_singular(self, tmp_path):
        made = profile_corpus(save(tmp_path / "c.jsonl", [{"text": "a"}]), "bytes")
        assert "the length of the only row is 1 token," in made.seq_source
        assert "it is not cut" in made.seq_source
        made = profile_corpus(
            save(tmp_path / "d.jsonl", [{"text": "a" * 20}]), "bytes", buckets=(8,)
        )
        assert "1 row is longer than the last bucket, 8" in made.seq_source

    def test_a_refusal_says_what_the_place_counts(self, tmp_path):
        (tmp_path / "c.jsonl").write_text('{"a": 1\n{"a": 2\n')
        with pytest.raises(
            CorpusError, match=r"2 × not valid JSON \(left out\), first at line 1\)"
        ):
            profile_corpus(tmp_path / "c.jsonl", "bytes")
        (tmp_path / "c.json").write_text("[1]")
        with pytest.raises(CorpusError, match=r"the only row .* cannot be used .*at row 1\b"):
            profile_corpus(tmp_path / "c.json", "bytes")
