"""A stream's pieces are the text that the tokenizer gives for all tokens."""

from hypothesis import given
from hypothesis import strategies as st
from tiny_models import byte_tokenizer
from transformers import ByT5Tokenizer

from pipedraft.inference.text_stream import MAX_HELD, UNKNOWN, TextStream

FAST, SLOW = byte_tokenizer(), ByT5Tokenizer()
"""One of `tokenizers`, one written in Python."""
TEXTS = st.text(st.sampled_from(f"a b\n.é漢🙂{UNKNOWN}"), min_size=1, max_size=MAX_HELD // 4)


def pieces(tokenizer, ids):
    stream = TextStream(tokenizer)
    return stream, [stream.add(token) for token in ids]


@given(st.sampled_from([FAST, SLOW]), TEXTS, st.integers(0, 3))
def test_the_pieces_make_up_the_text(tokenizer, text, num_cut):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = ids[: max(1, len(ids) - num_cut)]  # the end of a text may lie inside a character
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    stream, found = pieces(tokenizer, ids)
    assert "".join(found) + stream.rest() == whole
    assert stream.length == len(whole)
    stream, found = pieces(tokenizer, ids)
    assert "".join(found) + stream.finish(whole) == whole


def test_bytes_that_never_become_a_character_do_not_stop_the_stream():
    part = FAST("é")["input_ids"][1]
    stream, found = pieces(FAST, [part] * (MAX_HELD + 1) + FAST(" on")["input_ids"])
    assert found[MAX_HELD - 1] == UNKNOWN * MAX_HELD
    assert found[-3:] == [f"{UNKNOWN} ", "o", "n"]


def test_special_tokens_give_no_text():
    ids = FAST("a<|end|>b")["input_ids"]
    assert pieces(FAST, ids)[1] == ["a", "", "b"]
