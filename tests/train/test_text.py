"""Text to tokens, tokens to windows: files found, entropy, an order that ranks do not change."""

import json
import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data import TokenFiles
from shardwise.errors import ConfigError
from shardwise.train.text import (
    BYTES,
    WindowSampler,
    find_documents,
    load_tokenizer,
    open_stream,
    read_texts,
    read_windows,
    unigram_entropy,
    write_stream,
)


def test_the_entropy_of_equal_counts_is_the_log_of_their_number():
    assert unigram_entropy(np.array([3, 3, 0, 3, 3])) == pytest.approx(math.log(4))
    assert unigram_entropy(np.array([0, 7])) == 0


def test_bytes_survive_the_round_trip():
    assert BYTES.decode(list(BYTES.encode("naïve\n"))) == "naïve\n"


def test_a_stream_is_the_documents_with_a_zero_after_each(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "b.txt").write_text("BB")
    (tmp_path / "text" / "a.txt").write_text("A")
    (tmp_path / "text" / "picture.bin").write_bytes(b"\0\1\2")
    (tmp_path / "text" / "latin.dat").write_bytes(b"\xe9t\xe9")
    (tmp_path / "text" / ".hidden").write_text("no")
    write_stream(find_documents(tmp_path / "text"), BYTES, tmp_path / "run")
    files, entropy = open_stream(tmp_path / "run", seq=1)
    assert bytes(files.rows[0]) == b"A\0BB\0"
    assert entropy == pytest.approx(unigram_entropy(np.array([2, 1, 2])))


def test_a_stream_is_written_again_only_when_the_text_changed(tmp_path):
    text, run = tmp_path / "a.txt", tmp_path / "run"
    text.write_text("one")
    write_stream([text], BYTES, run)
    before = (run / "tokens.bin").stat().st_mtime_ns
    write_stream([text], BYTES, run)
    assert (run / "tokens.bin").stat().st_mtime_ns == before
    text.write_text("three")
    os.utime(text, ns=(1, 1))
    write_stream([text], BYTES, run)
    assert bytes(open_stream(run, seq=1)[0].rows[0]) == b"three\0"
    assert sorted(path.name for path in run.iterdir()) == ["tokens.bin", "tokens.json"]


def test_token_files_are_mapped_where_they_are(tmp_path):
    (tmp_path / "tokens").mkdir()
    rows = np.arange(10, dtype=np.uint16), np.full(7, 255, dtype=np.int64)
    for name, row in zip("ab", rows, strict=True):
        np.save(tmp_path / "tokens" / f"{name}.npy", row)
    write_stream(find_documents(tmp_path / "tokens"), BYTES, tmp_path / "run")
    files, _ = open_stream(tmp_path / "run", seq=3)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokens.json"]
    assert len(files) == 3 + 2
    ids, targets = read_windows(files, [2, 3])
    assert ids.tolist() == [[6, 7, 8], [255] * 3] and targets.tolist()[0] == [7, 8, 9]
    np.save(tmp_path / "big.npy", np.array([3, 256]))
    with pytest.raises(ConfigError, match=r"big\.npy has token 256, and the tokenizer 256"):
        write_stream([tmp_path / "big.npy"], BYTES, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_jsonl_gives_its_text_fields(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one"}) + "\n\n" + json.dumps({"text": "two"}) + "\n")
    assert list(read_texts(path)) == ["one", "two"]


@pytest.mark.parametrize("line", ['{"body": "x"}', "nonsense", '{"text": 3}', "[1]"])
def test_a_bad_line_of_jsonl_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl line 2: expected an object"):
        list(read_texts(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "naïve".encode("utf-16"), r"a\.txt is not UTF-8 text .*UTF-16.*iconv -f UTF-16"),
        ("a.txt", "naïve".encode("latin-1"), r"a\.txt is not UTF-8 text \(at byte 2\).*iconv"),
        ("a.md", b"a\0b", r"a\.md is not UTF-8 text \(it has a zero byte at 1\)"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), r"a\.jsonl line 1 is not UTF-8 text.*UTF-16"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', r"a\.jsonl line 2 is not UTF-8 text"),
    ],
)
def test_a_text_file_that_is_not_utf8_is_named_with_what_to_do(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        write_stream([tmp_path / name], BYTES, tmp_path / "run")


def test_the_standard_library_is_found_without_packages_and_tests():
    documents = find_documents(None)
    assert any(path.name == "argparse.py" for path in documents)
    assert not any("site-packages" in path.parts or "test" in path.parts for path in documents)


def test_no_text_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="expected a text file or a folder of text"):
        find_documents(tmp_path / "nowhere")
    (tmp_path / "a.bin").write_bytes(b"\0")
    with pytest.raises(ConfigError, match="no UTF-8 text in 1 files"):
        write_stream([tmp_path / "a.bin"], BYTES, tmp_path / "run")


def test_a_missing_tokenizer_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'shardwise\[tokenizers\]'"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_tokenizer_file_is_used(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[U]": 0, "hello": 1}, "[U]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.vocab == 2
    assert list(tokenizer.encode("hello there")) == [1, 0]
    assert tokenizer.decode([1]) == "hello"


def test_a_bad_tokenizer_file_is_named(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")


@given(data=st.data(), seed=st.integers(0, 1000))
def test_an_epoch_is_every_window_but_the_held_out(data, seed):
    eval_windows = data.draw(st.integers(0, 20))
    num_windows = data.draw(st.integers(max(1, 2 * eval_windows), 90))
    sampler = WindowSampler(num_windows, eval_windows, seed)
    held_out = {sampler.eval_window(index) for index in range(eval_windows)}
    trained = [sampler.train_window(1, i, sampler.train_windows) for i in range(num_windows)]
    assert len(held_out) == eval_windows
    assert sorted([*held_out, *trained[: sampler.train_windows]]) == list(range(num_windows))


def test_another_epoch_has_another_order():
    sampler = WindowSampler(num_windows=60, eval_windows=0, seed=0)
    first, second = ([sampler.train_window(step, i, 60) for i in range(60)] for step in (1, 2))
    assert first != second


def test_too_little_text_is_an_error(tmp_path):
    np.save(tmp_path / "few.npy", np.zeros(100, dtype=np.uint8))
    with pytest.raises(ConfigError, match="at least 8 windows of seq 16"):
        WindowSampler.over(TokenFiles([tmp_path / "few.npy"], 16), eval_windows=4, seed=0)
