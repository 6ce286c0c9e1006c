"""Tokenizers and the encoder over them: ids counted by hand, one BOS, templates, fallbacks."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pichak_core.tune.encoding import Encoder
from pichak_core.tune.row_formats import normalise
from pichak_core.tune.row_stream import CorpusError
from pichak_core.tune.row_text import Row
from pichak_core.tune.tokenizers import BytesTokenizer, input_ids, load_tokenizer, tokenizer_name

BOS, EOS = 1, 2


class Stub:
    """A token a character; "<s>" is one token; puts BOS before every text and maybe EOS after."""

    bos_token = "<s>"

    def __init__(self, bos: bool = True, eos: bool = False) -> None:
        self.head, self.tail = [BOS] * bos, [EOS] * eos

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict:
        ids: list[int] = []
        while text:
            special = text.startswith("<s>")
            ids.append(BOS if special else ord(text[0]))
            text = text[3:] if special else text[1:]
        return {"input_ids": self.head + ids + self.tail if add_special_tokens else ids}


class BareStub:
    """As `Stub`, but cannot be told to leave its special tokens out."""

    def __init__(self, **options: bool) -> None:
        self._stub = Stub(**options)

    def __call__(self, text: str) -> dict:
        return self._stub(text)


class ChatStub(Stub):
    """With a chat template: ``<s>`` first, then ``U:…;`` and ``A:…;`` a turn.

    `refuses` names what makes it raise, as published templates do.
    """

    chat_template = "set"

    def __init__(self, *refuses: str, emits_bos: bool = True) -> None:
        super().__init__()
        self.refuses = refuses
        self.emits_bos = emits_bos

    def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False, **_):
        roles = [message["role"] for message in messages]
        if "system" in self.refuses and "system" in roles:
            raise ValueError("System role not supported")
        if "pairs" in self.refuses and any(
            role != ("user", "assistant")[i % 2] for i, role in enumerate(roles)
        ):
            raise RuntimeError("Conversation roles must alternate")
        if "all" in self.refuses:
            raise KeyError("template")
        text = "".join(f"{m['role'][0].upper()}:{m['content']};" for m in messages)
        return ("<s>" if self.emits_bos else "") + text + ("A:" if add_generation_prompt else "")


def encode(tokenizer, *rows):
    return list(Encoder(tokenizer).rows([normalise(row) for row in rows]))


def text_of(ids) -> str:
    return "".join({BOS: "<s>", EOS: "</s>"}.get(i, chr(i)) for i in ids)


def scored(row) -> list[str]:
    ids = row.ids()
    return [text_of(ids[start:end]) for start, end in row.spans]


@given(st.text(), st.text())
def test_bytes_tokenizer_counts_bytes(prompt, completion):
    tok = BytesTokenizer()
    assert tok(prompt)["input_ids"] == list(prompt.encode())
    assert tok([prompt, completion])["input_ids"] == [
        list(prompt.encode()),
        list(completion.encode()),
    ]
    assert tok.decode(tok(prompt)["input_ids"]) == prompt


def test_bytes_tokenizer_takes_a_lone_surrogate():  # field case 64
    assert BytesTokenizer()("\ud83d")["input_ids"] == [ord("?")]


@pytest.mark.parametrize("make", [Stub, BareStub])
@pytest.mark.parametrize("eos", [False, True])
def test_exactly_one_bos_in_raw_rows(make, eos):  # field case 73
    end = "</s>" if eos else ""
    pair, text = encode(make(eos=eos), {"prompt": "ab", "completion": "c"}, {"text": "abc"})
    assert text_of(pair.ids()) == text_of(text.ids()) == f"<s>abc{end}"
    assert pair.length == pair.longest == 4 + eos
    assert scored(pair) == [f"c{end}"]
    assert text.spans == ()


def test_rows_that_spell_their_bos_get_no_second_one():  # field case 73
    (row,) = encode(Stub(), {"text": "<s>abc"})
    assert text_of(row.ids()) == "<s>abc"


def test_a_text_that_begins_with_the_bos_id_by_chance_keeps_it():
    # One id for every word: nothing may be taken for a BOS that is none.
    (row,) = encode(lambda text: {"input_ids": [1] * len(text.split())}, {"text": "a b c"})
    assert row.length == 3


@pytest.mark.parametrize("emits_bos", [True, False])
def test_exactly_one_bos_in_chats(emits_bos):  # field case 73
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (row,) = encode(ChatStub(emits_bos=emits_bos), {"messages": messages})
    assert text_of(row.ids()) == "<s>U:a;A:b;"
    assert scored(row) == ["b;"]
    assert row.defects == ()


def test_every_assistant_turn_is_scored_with_its_end_mark():
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "dd")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    (made,) = encode(ChatStub(), row)
    assert text_of(made.ids()) == "<s>S:s;U:a;A:b;U:c;A:dd;"
    assert scored(made) == ["b;", "dd;"]
    (plain,) = encode("bytes", row)
    assert bytes(plain.ids()) == b"sabcdd"
    assert scored(plain) == ["b", "dd"]
    assert plain.defects == ("no_template",)


@pytest.mark.parametrize(
    ("refuses", "defects", "text"),
    [
        ((), (), "<s>S:s;U:a;A:b;U:c;U:d;"),
        (("system",), ("template_folded",), "<s>U:s\na;A:b;U:c\nd;"),
        (("pairs",), ("template_folded",), "<s>U:s\na;A:b;U:c\nd;"),
        (("all",), ("template_refused",), "<s>sabcd"),
    ],
)
def test_a_template_that_refuses_a_row_costs_the_row_its_template(refuses, defects, text):
    # field case 70: a published set has user/assistant/user/user
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("user", "d")]
    row = {"messages": [{"role": role, "content": said} for role, said in turns]}
    (made,) = encode(ChatStub(*refuses), row)
    assert (made.defects, text_of(made.ids())) == (defects, text)
    assert scored(made) == ["b" if "all" in refuses else "b;"]


def test_a_template_that_rewrites_earlier_turns():
    class Forgetful(ChatStub):
        def apply_chat_template(self, messages, **options):
            kept = [m for i, m in enumerate(messages) if m["role"] != "tool" or i > 3]
            return super().apply_chat_template(kept, **options)

    turns = [("user", "a"), ("tool", "t"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    row = {"messages": [{"role": role, "content": said} for role, said in turns]}
    (made,) = encode(Forgetful(), row)
    assert scored(made) == ["b;", "d;"]

    class Rewriting(ChatStub):
        def apply_chat_template(self, messages, **options):
            return f"[{len(messages)}]" + super().apply_chat_template(messages, **options)

    (made,) = encode(Rewriting(), row)
    assert scored(made) == ["b", "d"]


def test_tool_calls_reach_the_template_and_the_length():  # field case 71
    class Tools(ChatStub):
        def apply_chat_template(self, messages, tools=None, **options):
            called = [{**m, "content": str(m.get("tool_calls") or m["content"])} for m in messages]
            return f"{tools}" + super().apply_chat_template(called, **options)

    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    row = {"messages": [{"role": "user", "content": "a"}, call], "tools": [{"name": "f"}]}
    (made,) = encode(Tools(), row)
    assert "'tools'" not in text_of(made.ids())
    assert text_of(made.ids()).endswith("A:[{'function': {'name': 'f'}}];")
    assert "[{'name': 'f'}]" in text_of(made.ids())


def test_preference_pairs_are_as_long_as_the_longer_answer():
    (row,) = encode("bytes", {"prompt": "ab", "chosen": "c", "rejected": "defg"})
    assert (row.length, row.longest, row.spans) == (3, 6, ((2, 3),))


@pytest.mark.parametrize(
    "result",
    [{"input_ids": [5, 6]}, {"input_ids": (5, 6)}, {"input_ids": [[5, 6]]}],
)
def test_ids_from_what_tokenizers_return(result):
    assert input_ids(result) == [5, 6]


def test_ids_from_arrays():
    numpy = pytest.importorskip("numpy")
    assert input_ids({"input_ids": numpy.array([[5, 6]])}) == [5, 6]


@pytest.mark.parametrize("tokenizer", [lambda text: [1, 2], lambda text: None, lambda text: {}])
def test_what_returns_no_ids_is_refused(tokenizer):
    with pytest.raises(CorpusError, match="input_ids"):
        Encoder(tokenizer)


def test_no_tokenizer_is_refused(tmp_path):
    for spec, words in [
        (None, "name a tokenizer"),
        (3, "not a tokenizer"),
        (str(tmp_path / "none.json"), "no tokenizer at"),
    ]:
        with pytest.raises(CorpusError, match=words):
            load_tokenizer(spec)


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    for spec in (tmp_path / "tokenizer.json", tmp_path, "org/model"):
        with pytest.raises(CorpusError, match=r"pip install 'pichak-fleet\[hf\]'"):
            load_tokenizer(spec)


def test_loading_an_object_gives_it_back():
    tok = Stub()
    assert load_tokenizer(tok) is tok
    assert tokenizer_name(tok) == "Stub"
    assert tokenizer_name(load_tokenizer("bytes")) == "bytes"


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    """A small BPE trained here, with BOS, and truncation and padding switched on in the file."""
    tokenizers = pytest.importorskip("tokenizers")
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    tok.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    specials = ["<s>", "<|user|>", "<|assistant|>", "<|end|>"]
    tok.train_from_iterator(
        ["the cat sat on the mat", "a dog and the cat"],
        tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=specials,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tok.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tok.enable_truncation(8)
    tok.enable_padding(length=8)
    path = tmp_path_factory.mktemp("tok") / "tokenizer.json"
    tok.save(str(path))
    return path


def test_a_tokenizer_json_is_read_without_its_truncation_and_padding(tokenizer_json):
    tok = load_tokenizer(tokenizer_json)
    assert len(tok("x" * 100)["input_ids"]) == 101
    assert len(tok("x")["input_ids"]) == 2
    assert tok.bos_token == "<s>"
    assert tok.vocab_size >= 260
    encoder = Encoder(tok)
    assert encoder.batched
    assert (encoder.prefix, encoder.suffix) == ([0], [])


ROWS = [
    {"prompt": "the cat" * (i % 5 + 1), "completion": " sat on" * (i % 7 + 1)} for i in range(3000)
]


def test_batches_give_what_one_call_a_text_gives(tokenizer_json):
    backend = load_tokenizer(tokenizer_json)

    def slow(text, add_special_tokens=True):
        return backend(text, add_special_tokens=add_special_tokens)

    slow.bos_token = "<s>"
    rows = [normalise(row) for row in ROWS]
    fast = [(row.ids(), row.spans) for row in Encoder(backend).rows(rows)]
    assert fast == [(row.ids(), row.spans) for row in Encoder(slow).rows(rows)]
    pad = backend("the cat")["input_ids"]
    assert fast[0][0][: len(pad)] == pad


def test_a_hugging_face_folder(tokenizer_json, tmp_path):
    transformers = pytest.importorskip("transformers")
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_json), bos_token="<s>", model_max_length=16
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(tmp_path)
    tok = load_tokenizer(tmp_path)
    encoder = Encoder(tok)
    assert encoder.batched
    assert encoder.prefix == [0]
    chat = {
        "messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a"}]
    }
    rows = encode(tok, chat, {"text": "the cat sat" * 40}, {"text": "<s>the cat"})
    assert all(row.ids().count(0) == 1 and row.ids()[0] == 0 for row in rows)
    whole = tok.apply_chat_template(chat["messages"], tokenize=False)
    assert rows[0].ids() == tok(whole, add_special_tokens=False)["input_ids"]
    (span,) = rows[0].spans
    assert tok.convert_ids_to_tokens(rows[0].ids()[slice(*span)]) == ["a", "<|end|>"]
    assert rows[1].ids() == tok("the cat sat" * 40)["input_ids"]


def test_a_folder_that_holds_no_tokenizer(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(CorpusError, match="save_pretrained"):
        load_tokenizer(tmp_path)


def test_an_id_that_is_not_in_the_cache(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CorpusError, match="hf download no-such-org/no-such-model"):
        load_tokenizer("no-such-org/no-such-model")


def test_a_broken_tokenizer_json(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorpusError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_rows_of_one_batch_keep_their_order_and_their_defects():
    rows = [Row("plain_text", normalise("x" * n).segments, defects=(str(n),)) for n in range(1, 60)]
    made = list(Encoder("bytes").rows(iter(rows)))
    assert [(row.length, row.defects) for row in made] == [(n, (str(n),)) for n in range(1, 60)]
