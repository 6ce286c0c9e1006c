"""Rows out of files of every kind: the right value is the list of rows that was written."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pichak_core.tune import json_array, row_bytes
from pichak_core.tune.json_array import iter_elements
from pichak_core.tune.row_stream import CorpusError
from pichak_core.tune.rows import RawRow, decode_json, open_rows

ROWS = [{"prompt": f"p{i}", "completion": "ä\u2028" + "c" * (i % 7)} for i in range(100)]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def read(path: Path) -> list[RawRow]:
    return list(open_rows(path))


def jsonl(rows: list, **options) -> bytes:
    return "".join(json.dumps(row, **options) + "\n" for row in rows).encode()


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize(
    ("kind", "encode"),
    [
        ("JSON Lines", lambda rows, a: jsonl(rows, ensure_ascii=a)),
        ("JSON Lines", lambda rows, a: gzip.compress(jsonl(rows, ensure_ascii=a))),
        ("JSON array", lambda rows, a: json.dumps(rows, ensure_ascii=a).encode()),
        ("JSON array", lambda rows, a: json.dumps(rows, ensure_ascii=a, indent=2).encode()),
        ("JSON array", lambda rows, a: gzip.compress(json.dumps(rows, ensure_ascii=a).encode())),
    ],
)
def test_every_layout_gives_the_rows_that_were_written(tmp_path, kind, encode, ascii_only):
    file = open_rows(write(tmp_path / "anything", encode(ROWS, ascii_only)))
    assert file.kind == kind
    rows = list(file)
    assert [row.value for row in rows] == ROWS
    assert [row.place for row in rows] == list(range(1, 101))
    assert not any(row.defects for row in rows)
    assert file.count().rows == 100


def test_plain_text_is_a_row_a_line(tmp_path):
    path = write(tmp_path / "t.txt", b"one\n\n  \n{not json\n[x] y\nlast")
    assert [(row.place, row.value) for row in read(path)] == [
        (1, "one"),
        (4, "{not json"),
        (5, "[x] y"),
        (6, "last"),
    ]
    counted = open_rows(path).count()
    assert (counted.rows, counted.blank, counted.first_blank) == (4, 2, 2)


def test_bom_and_crlf_twin(tmp_path):  # field case 62
    plain = write(tmp_path / "plain.jsonl", jsonl(ROWS))
    odd = write(tmp_path / "odd.jsonl", b"\xef\xbb\xbf" + jsonl(ROWS).replace(b"\n", b"\r\n"))
    assert [row.value for row in read(odd)] == [row.value for row in read(plain)]
    assert [row.defects for row in read(odd)] == [("crlf", "bom")] + [("crlf",)] * 99


def test_a_bom_in_the_middle_of_joined_files(tmp_path):  # field case 62, its kind
    one = b'\xef\xbb\xbf{"text": "a"}\n'
    rows = read(write(tmp_path / "joined.jsonl", one + one))
    assert [(row.value, row.defects) for row in rows] == [({"text": "a"}, ("bom",))] * 2


@pytest.mark.parametrize("break_", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1e"])
def test_only_lf_ends_a_row(tmp_path, break_):  # field case 63
    text = f"a{break_}b"
    if break_ >= "\x20":  # control characters below it are not allowed unescaped in JSON
        line = f'{{"text":"{text}"}}\n'.encode()
        assert [row.value for row in read(write(tmp_path / "j.jsonl", line))] == [{"text": text}]
    assert [row.value for row in read(write(tmp_path / "t.txt", text.encode()))] == [text]


@pytest.mark.parametrize(
    ("escape", "text", "defects"),
    [
        (r"\ud83d cut", "\ufffd cut", ("lone_surrogate",)),
        (r"\ude00 cut", "\ufffd cut", ("lone_surrogate",)),
        (r"\uD83D", "\ufffd", ("lone_surrogate",)),
        (r"\ud83d\ude00", "😀", ()),
        (r"\\ud83d", r"\ud83d", ()),
    ],
)
def test_lone_surrogates_are_replaced(tmp_path, escape, text, defects):  # field case 64
    line = f'{{"text": "{escape}", "messages": [{{"{escape}": ["{escape}"]}}]}}\n'
    (row,) = read(write(tmp_path / "s.jsonl", line.encode()))
    assert row.value == {"text": text, "messages": [{text: [text]}]}
    assert row.defects == defects
    json.dumps(row.value, ensure_ascii=False).encode("utf-8")


def test_invalid_utf8_costs_one_row_its_bytes(tmp_path):  # field case 65
    good = b'{"text":"ok"}\n'
    rows = read(write(tmp_path / "u.jsonl", good * 2 + b'{"text":"caf\xe9"}\n' + good * 2))
    assert [row.value["text"] for row in rows] == ["ok", "ok", "caf\ufffd", "ok", "ok"]
    assert [(r.place, r.defects) for r in rows if r.defects] == [(3, ("invalid_utf8",))]


@pytest.mark.parametrize("bad", ["{", '{"a": }', "nonsense", '{"a": 1} {"b": 2}', "[" * 5000])
def test_a_broken_row_is_counted_at_its_line(tmp_path, bad):
    data = jsonl(ROWS[:3]) + bad.encode() + b"\n" + jsonl(ROWS[:2])
    rows = read(write(tmp_path / "b.jsonl", data))
    assert [row.usable for row in rows] == [True] * 3 + [False] + [True] * 2
    assert (rows[3].place, rows[3].defects) == (4, ("invalid_json",))


def test_rows_are_found_again_by_number(tmp_path, monkeypatch):
    monkeypatch.setattr(row_bytes, "CHUNK_BYTES", 256)
    for encode in (
        jsonl,
        lambda rows: json.dumps(rows).encode(),
        lambda r: gzip.compress(jsonl(r)),
    ):
        monkeypatch.setattr(json_array, "_CHUNK_BYTES", 256)
        file = open_rows(write(tmp_path / "f", encode(ROWS)))
        wanted = [99, 0, 17, 18, 50, 17]
        assert [(n, row.value) for n, row in file.fetch(wanted)] == [
            (n, ROWS[n]) for n in sorted(set(wanted))
        ]
        with pytest.raises(IndexError):
            list(file.fetch([100]))


@given(
    lines=st.lists(st.sampled_from([b"", b" ", b"\t\r", b"x", b"\xef\xbb\xbf", b"y" * 9, b"\x85"])),
    ends_with_lf=st.booleans(),
    chunk=st.integers(1, 12),
)
@settings(max_examples=150)
def test_counting_agrees_with_reading(tmp_path_factory, lines, ends_with_lf, chunk):
    data = b"\n".join(lines) + (b"\n" if ends_with_lf else b"")
    path = write(tmp_path_factory.mktemp("c") / "f.txt", data)
    full = [(i, line) for i, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_bytes, "CHUNK_BYTES", chunk)
        pieces = row_bytes.ByteRows(path, "lines")
        counted = pieces.count()
        assert counted.rows == len(full)
        got = [(n, piece.place, piece.data) for n, piece in pieces.fetch(range(len(full)))]
        assert got == [(n, place, line) for n, (place, line) in enumerate(full)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    rows=st.lists(JSON, max_size=6),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    chunk=st.integers(1, 40),
)
@example(rows=['a"\\', {"\\": "]}"}, [], None, 3], indent=None, ascii_only=True, chunk=1)
@settings(max_examples=150)
def test_an_array_is_cut_where_a_json_parser_cuts_it(rows, indent, ascii_only, chunk):
    data = json.dumps(rows, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_CHUNK_BYTES", chunk)
        elements = list(iter_elements(io.BytesIO(data)))
        assert [json.loads(element) for _, element in elements] == rows
        for number, (offset, element) in enumerate(elements):
            assert data[offset : offset + len(element)] == element
            reader = io.BytesIO(data)
            reader.seek(offset)
            assert list(iter_elements(reader, inside=True)) == elements[number:]


def test_an_array_that_ends_early_gives_its_rows_and_one_bad_one(tmp_path):
    rows = read(write(tmp_path / "cut.json", json.dumps(ROWS[:4]).encode()[:-20]))
    assert [row.value for row in rows[:3]] == ROWS[:3]
    assert (rows[3].place, rows[3].defects) == (4, ("invalid_json",))
    assert len(rows) == 4


def test_joined_arrays_are_one_corpus(tmp_path):
    data = json.dumps(ROWS[:2], indent=1) + "\n" + json.dumps(ROWS[2:5], indent=1)
    assert [row.value for row in read(write(tmp_path / "j.json", data.encode()))] == ROWS[:5]


def test_json_lines_of_lists_are_not_an_array(tmp_path):
    chats = [[{"role": "user", "content": str(i)}] for i in range(3)]
    file = open_rows(write(tmp_path / "l.jsonl", jsonl(chats)))
    assert (file.kind, [row.value for row in file]) == ("JSON Lines", chats)


@pytest.mark.parametrize("layout", ["lines", "array"])
def test_a_row_over_the_limit_is_counted_and_not_held(tmp_path, monkeypatch, layout):
    monkeypatch.setattr(row_bytes, "MAX_ROW_BYTES", 5000)
    monkeypatch.setattr(json_array, "_MAX_ELEMENT_BYTES", 5000)
    monkeypatch.setattr(row_bytes, "CHUNK_BYTES", 512)
    monkeypatch.setattr(json_array, "_CHUNK_BYTES", 512)
    rows = [{"text": "a"}, {"text": "b" * 9000, "x": ["}"] * 3}, {"text": "c"}]
    data = jsonl(rows) if layout == "lines" else json.dumps(rows).encode()
    file = open_rows(write(tmp_path / "big", data))
    assert [row.value for row in file] == [rows[0], None, rows[2]]
    assert [row.defects for row in file] == [(), ("too_large",), ()]
    assert [row.value for _, row in file.fetch([0, 2])] == [rows[0], rows[2]]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ('{"a": 1}'.encode("utf-16"), "UTF-16"),
        ('{"a": 1}'.encode("utf-16-le"), "NUL"),
        (b"PK\x03\x04rest", "zip"),
        (b"BZh91AY", "bzip2"),
        (b'{\n "data": [\n  {"text": "a"}\n ]\n}', "several lines"),
        (gzip.compress(jsonl(ROWS), mtime=0)[:-20], "ends early"),
        (gzip.compress(jsonl(ROWS), mtime=0)[:20] + b"garbage" * 9, "damaged"),
        (b"PAR1 but no parquet", "arquet"),
    ],
)
def test_what_is_no_corpus_is_refused_in_a_sentence(tmp_path, data, words):
    path = write(tmp_path / "x", data)
    with pytest.raises(CorpusError, match=words) as caught:
        list(open_rows(path))
    assert str(path) in str(caught.value)


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_rows(tmp_path / "none.jsonl")
    with pytest.raises(OSError):
        open_rows(tmp_path)


def test_zstandard_reads_or_names_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "z", b"\x28\xb5\x2f\xfd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(CorpusError, match="pip install zstandard"):
        open_rows(path)


def test_zstandard_rows(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    frames = [zstandard.ZstdCompressor().compress(jsonl(part)) for part in (ROWS[:60], ROWS[60:])]
    file = open_rows(write(tmp_path / "z", b"".join(frames)))
    assert [row.value for row in file] == ROWS
    assert [row.value for _, row in file.fetch([70, 3])] == [ROWS[3], ROWS[70]]
    with pytest.raises(CorpusError, match="damaged"):
        list(open_rows(write(tmp_path / "y", frames[0][:30] + b"x" * 40)))


def test_parquet_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CorpusError, match="pip install pyarrow"):
        open_rows(write(tmp_path / "p", b"PAR1"))


def test_parquet_rows(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    chats = [[{"role": "user", "content": f"{i}"}] for i in range(100)]
    images = [{"bytes": b"\x00" * 1000, "path": "x"}] * 100
    table = pa.table({"id": range(100), "messages": chats, "image": images})
    pq.write_table(table, tmp_path / "p.bin", row_group_size=30)
    file = open_rows(tmp_path / "p.bin")
    assert (file.kind, file.count().rows) == ("parquet", 100)
    wanted = [{"id": i, "messages": chats[i]} for i in range(100)]
    assert [row.value for row in file] == wanted
    assert [(n, row.place, row.value) for n, row in file.fetch([99, 29, 30])] == [
        (n, n + 1, wanted[n]) for n in (29, 30, 99)
    ]


SALAD = st.lists(
    st.binary(max_size=12)
    | st.sampled_from([b"\n", b"\r\n", b'{"text":"', b'"}', b"[", b"]", b"{", b"}", b'"', b"\\"])
    | st.sampled_from(
        [b"\xef\xbb\xbf", b"\xff\xfe", b"\\ud83d", b"\x1f\x8b", b"null", b",", b"\xe2"]
    ),
    max_size=14,
).map(b"".join)


@given(SALAD)
@settings(max_examples=200)
def test_no_bytes_crash_the_reader(tmp_path_factory, data):
    path = write(tmp_path_factory.getbasetemp() / "salad", data)
    try:
        file = open_rows(path)
        rows = list(file)
    except CorpusError:
        return
    assert file.count().rows == len(rows)
    assert [row for _, row in file.fetch(range(len(rows)))] == rows


def test_an_integer_of_thousands_of_digits_is_valid_json() -> None:
    digits = "7" * 5000
    row = decode_json(f'{{"prompt": {digits}, "completion": 12}}'.encode(), 1)
    assert row.usable
    assert row.value == {"prompt": digits, "completion": 12}
    assert not decode_json(b'{"prompt": 1', 1).usable


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "rows.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(CorpusError, match="more than once"), open_rows(pipe):
        pass
