"""Examples drawn from a corpus: the rows' own tokens, each row once, scored as the profile says."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pytest

from pichak_core.tune import examples as examples_module
from pichak_core.tune.corpus import CorpusError, profile_corpus
from pichak_core.tune.examples import ExampleStream

ROWS = [{"prompt": f"p{i:04}", "completion": "c" * (i % 300 + 1)} for i in range(1000)]


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "c.jsonl"
    made.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return made


def number_of(example) -> int:
    return int(bytes(example.input_ids[1:5]))


def drain(stream, n=7):
    drawn = []
    while batch := stream.rows(n):
        assert len(batch) <= n
        drawn += batch
    return drawn


def test_an_epoch_holds_every_row_once_cut_and_scored(path):
    drawn = drain(ExampleStream(path, "bytes", 200))
    assert sorted(number_of(example) for example in drawn) == list(range(1000))
    for example in drawn:
        completion = ROWS[number_of(example)]["completion"]
        ids = (f"p{number_of(example):04}" + completion).encode()[:200]
        assert example.input_ids == list(ids)
        assert example.scored == [False] * 5 + [True] * (len(ids) - 5)
        assert example.scored_tokens == min(len(completion), 195)


def test_the_mean_scored_tokens_are_the_profiles(path):
    drawn = drain(ExampleStream(path, "bytes", 256))
    made = profile_corpus(path, "bytes", sample=None, buckets=(256,))
    assert sum(e.scored_tokens for e in drawn) / len(drawn) == made.supervised_per_row


def test_the_end_gives_fewer_and_then_none(path):
    stream = ExampleStream(path, "bytes", 16)
    sizes = [len(stream.rows(300)) for _ in range(5)]
    assert sizes == [300, 300, 300, 100, 0]
    assert sum(1 for _ in ExampleStream(path, "bytes", 16)) == 1000


def test_the_seed_decides_the_order_and_not_the_rows(path):
    first, again, other = (
        [number_of(e) for e in ExampleStream(path, "bytes", 16, seed=s).rows(50)] for s in (1, 1, 2)
    )
    assert first == again != other
    assert first != sorted(first)


def test_draws_are_uniform_over_the_file(path):
    # 60 seeds of 50 rows: 3,000 draws, 300 of them expected in each tenth of the file, with a
    # standard deviation of 16.
    tenths = Counter(
        number_of(e) // 100 for s in range(60) for e in ExampleStream(path, "bytes", 8, s).rows(50)
    )
    assert max(abs(tenths[i] - 300) for i in range(10)) < 5 * 16


def test_compressed_and_array_twins_give_the_same_examples(path, tmp_path, monkeypatch):
    monkeypatch.setattr(examples_module, "_COMPRESSED_WINDOW_ROWS", 256)
    (tmp_path / "c.gz").write_bytes(gzip.compress(path.read_bytes()))
    (tmp_path / "c.json").write_text(json.dumps(ROWS))
    wanted = ExampleStream(path, "bytes", 64).rows(400)
    for twin in ("c.gz", "c.json"):
        assert ExampleStream(tmp_path / twin, "bytes", 64).rows(400) == wanted


def test_text_is_scored_but_for_its_first_token_and_a_policy_can_be_given(tmp_path, path):
    (tmp_path / "t.txt").write_text("abc\nabcdefgh\n")
    stream = ExampleStream(tmp_path / "t.txt", "bytes", 5)
    assert stream.loss_policy == "all_tokens"
    assert sorted(e.scored_tokens for e in stream.rows(9)) == [2, 4]
    given = ExampleStream(path, "bytes", 64, loss_policy="all_tokens").rows(1)[0]
    assert all(given.scored)


def test_every_assistant_turn_is_scored(tmp_path):
    turns = [("user", "aa"), ("assistant", "b"), ("user", "c"), ("assistant", "dd")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    (tmp_path / "m.jsonl").write_text(json.dumps(row))
    (example,) = ExampleStream(tmp_path / "m.jsonl", "bytes", 64).rows(1)
    assert bytes(example.input_ids) == b"aabcdd"
    assert example.scored == [False, False, True, False, True, True]
    assert all(type(token) is int for token in example.input_ids)


def test_rows_that_cannot_be_used_are_passed_over_and_counted(tmp_path):
    lines = ['{"text": "a"}', "{broken", '{"x": "1", "y": "2"}', '{"text": "b"}', '{"text": ""}']
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    stream = ExampleStream(tmp_path / "c.jsonl", "bytes", 8)
    assert sorted(bytes(e.input_ids) for e in stream.rows(10)) == [b"a", b"b"]
    assert stream.skipped == 3
    assert stream.rows_total == 5


def test_bad_arguments_are_refused(tmp_path, path):
    with pytest.raises(ValueError, match="at least 1"):
        ExampleStream(path, "bytes", 0)
    with pytest.raises(ValueError, match="at least 1"):
        ExampleStream(path, "bytes", 8).rows(0)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(CorpusError, match="holds no rows"):
        ExampleStream(tmp_path / "empty", "bytes", 8)
