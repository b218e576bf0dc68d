"""The corpus: what is wrong with it is said by key, its split is frozen, its sequences are the same for all ranks."""

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.small_run import log, on_ranks, one_rank, small_spec, text, text_file, train_here
from tests.specs import train_spec
from train.__main__ import main
from train.corpus import TOKENS_FILE, Corpus, DataError, _chunks, prepare
from train.data import Sequences
from train.spec import TrainSpec

T = 64


def spec_of(path: Path | str, *overrides: str) -> TrainSpec:
    return train_spec("model=tiny", "data=text", f"data.path={path}", f"train.seq_len={T}", *overrides)


def corpus_of(path: Path | str, cache: Path, *overrides: str) -> Corpus:
    spec = spec_of(path, *overrides)
    return prepare(spec.data, spec.model, spec.train.seq_len, cache)


def tokens_of(corpus: Corpus) -> bytes:
    return (Path(corpus.folder) / TOKENS_FILE).read_bytes()


# What a user can mend.


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^data\.path=\S+/none\.txt: there is no such file or folder\. Set it to one"):
        corpus_of(tmp_path / "none.txt", tmp_path)


def test_every_path_of_a_list_must_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.txt: there is no such file or folder\."):
        corpus_of(f"[{text_file(tmp_path)},{tmp_path}/none.txt]", tmp_path / "cache")


def test_a_list_is_shown_as_it_is_typed(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"^data\.path=\[\S+/a\.txt,\S+/b\.txt\]: the files are empty"):
        corpus_of(f"[{tmp_path}/a.txt,{tmp_path}/b.txt]", tmp_path / "cache")


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty/within").mkdir(parents=True)
    with pytest.raises(DataError, match=r"^data\.path=\S+/empty: the folder holds no files\. Set it to a folder of"):
        corpus_of(tmp_path / "empty", tmp_path / "cache")


def test_empty_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"^data\.path=\S+/empty\.txt: the files are empty\. Set it to UTF-8 text"):
        corpus_of(tmp_path / "empty.txt", tmp_path / "cache")


@pytest.mark.parametrize(("content", "position"), [(b"\xff\xfe" + b"a" * 999, 0), (b"abc\xe9 " * 99, 3)])
def test_a_file_that_is_not_utf8_is_named_with_the_byte(content: bytes, position: int, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    text_file(tmp_path / "texts")
    (tmp_path / "texts/latin.txt").write_bytes(content)
    why = rf"^data\.path=\S+/texts: \S+/latin\.txt is not UTF-8 at byte {position}\. Convert it, or name only"
    with pytest.raises(DataError, match=why):
        corpus_of(tmp_path / "texts", tmp_path / "cache")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    # Reading this one fails for root too.
    with pytest.raises(DataError, match=r"^data\.path=/proc/self/mem: /proc/self/mem cannot be read \(Input/output"):
        corpus_of("/proc/self/mem", tmp_path)


@pytest.mark.parametrize(("size", "part"), [(T - 1, "training"), (T * 2, "held-out")])
def test_text_shorter_than_a_sequence_is_refused_with_both_lengths(size: int, part: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a" * size, encoding="utf-8")
    why = rf"^data\.path=\S+/short\.txt: its {part} part has \d+ tokens, .* train\.seq_len \+ 1 = 65\. Give it more"
    with pytest.raises(DataError, match=why):
        corpus_of(tmp_path / "short.txt", tmp_path / "cache")


def test_the_shortest_text_that_is_accepted_gives_one_sequence_each(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a" * 2 * (T + 1), encoding="utf-8")
    corpus = corpus_of(tmp_path / "short.txt", tmp_path / "cache", "data.eval_fraction=0.5")
    sequences = Sequences(corpus, T, 0)
    assert (sequences.num_train, sequences.num_eval) == (1, 1)
    sequences.close()


def test_a_failed_preparation_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(tmp_path, {"a": 0})
    with pytest.raises(DataError, match=r"^data\.tokenizer=\S+: it cannot encode"):
        corpus_of(text_file(tmp_path), tmp_path / "cache", f"data.tokenizer={tokenizer}")
    assert list((tmp_path / "cache").iterdir()) == []


# The frozen split.


def _pieces(folder: Path, names: list[str]) -> Path:
    folder.mkdir()
    for index, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text()[index * 20_000 : (index + 1) * 20_000], encoding="utf-8")
        os.utime(path, (index, index))
    return folder


def test_the_split_depends_on_the_content_alone(tmp_path: Path) -> None:
    first = corpus_of(_pieces(tmp_path / "a", ["1", "2", "3", "4"]), tmp_path / "cache")
    other = corpus_of(_pieces(tmp_path / "b", ["z", "y/x", "y/a", "b"]), tmp_path / "other")
    assert (first.data_fingerprint, first.eval_fingerprint) == (other.data_fingerprint, other.eval_fingerprint)
    assert tokens_of(first) == tokens_of(other)


def test_the_order_of_a_list_does_not_change_the_split(tmp_path: Path) -> None:
    folder = _pieces(tmp_path / "a", ["1", "2", "3"])
    first = corpus_of(f"[{folder}/1,{folder}/2,{folder}/3]", tmp_path / "cache")
    other = corpus_of(f"[{folder}/3,{folder}/1,{folder}/2]", tmp_path / "other")
    assert first.data_fingerprint == other.data_fingerprint


def test_another_content_gives_other_fingerprints(tmp_path: Path) -> None:
    path = text_file(tmp_path)
    first = corpus_of(path, tmp_path / "cache")
    path.write_text(text() + "!", encoding="utf-8")
    assert corpus_of(path, tmp_path / "cache").data_fingerprint != first.data_fingerprint


def test_training_and_held_out_tokens_are_all_the_bytes_of_the_text(tmp_path: Path) -> None:
    corpus = corpus_of(text_file(tmp_path), tmp_path / "cache", "data.eval_fraction=0.1")
    assert tokens_of(corpus) == text().encode()
    assert corpus.eval_tokens == int(len(text().encode()) * 0.1)
    assert corpus.train_tokens + corpus.eval_tokens == len(text().encode())
    assert corpus.eval_text_bytes == corpus.eval_tokens


def test_the_same_files_are_read_once(tmp_path: Path) -> None:
    path = text_file(tmp_path)
    first = corpus_of(path, tmp_path / "cache")
    made = os.stat(Path(first.folder) / TOKENS_FILE).st_mtime_ns
    assert corpus_of(path, tmp_path / "cache") == first
    assert os.stat(Path(first.folder) / TOKENS_FILE).st_mtime_ns == made


def test_the_standard_library_is_a_corpus(tmp_path: Path) -> None:
    spec = train_spec("model=tiny", "data=stdlib")
    corpus = prepare(spec.data, spec.model, spec.train.seq_len, tmp_path)
    assert corpus.train_tokens > 5_000_000
    assert corpus.documents > 500
    assert corpus.eval_tokens == int((corpus.train_tokens + corpus.eval_tokens) * 0.05)


@given(st.text(alphabet="aß€\n", max_size=300), st.integers(1, 40))
def test_chunks_are_the_text_in_pieces_no_longer_than_asked(content: str, size: int) -> None:
    chunks = list(_chunks(content, size))
    assert "".join(chunks) == content
    assert all(0 < len(chunk) <= size for chunk in chunks)


# Tokenizers.


def bpe_tokenizer(folder: Path, size: int = 400) -> Path:
    """A byte-level BPE trained on the text: any text is encoded, and decoded to the same."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([text()], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def word_tokenizer(folder: Path, vocabulary: dict[str, int]) -> Path:
    """A tokenizer of whole words, which knows no others."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "words.json"))
    return folder / "words.json"


def test_a_tokenizer_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^data\.tokenizer=none\.json: there is no such file\. Set it to bytes or to"):
        corpus_of(text_file(tmp_path), tmp_path / "cache", "data.tokenizer=none.json")


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    path = text_file(tmp_path)
    why = r"^data\.tokenizer=\S+/text\.txt: not a tokenizer file \(.+\)\. Set it to a Hugging Face tokenizer\.json"
    with pytest.raises(DataError, match=why):
        corpus_of(path, tmp_path / "cache", f"data.tokenizer={path}")


def test_a_text_that_the_tokenizer_cannot_encode_is_named(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(tmp_path, {"a": 0})
    why = r"^data\.tokenizer=\S+/words\.json: it cannot encode \S+/text\.txt \(.+\)\. Set it to a tokenizer with"
    with pytest.raises(DataError, match=why):
        corpus_of(text_file(tmp_path), tmp_path / "cache", f"data.tokenizer={tokenizer}")


def test_a_vocabulary_larger_than_the_models_is_refused_with_both_sizes(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer(tmp_path, 400)
    why = r"^model\.vocab_size=256: data\.tokenizer=\S+/tokenizer\.json has 400 tokens\. Set it to 400 or more"
    with pytest.raises(DataError, match=why):
        corpus_of(text_file(tmp_path), tmp_path / "cache", f"data.tokenizer={tokenizer}")


def test_a_vocabulary_with_gaps_counts_to_its_highest_number(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(tmp_path, {"a": 0, "b": 70_000})
    (tmp_path / "ab.txt").write_text("a b " * 2000, encoding="utf-8")
    overrides = (tmp_path / "ab.txt", tmp_path / "cache", f"data.tokenizer={tokenizer}")
    with pytest.raises(DataError, match=r"^model\.vocab_size=256: .* has 70001 tokens\. Set it to 70001 or more"):
        corpus_of(*overrides)
    assert corpus_of(*overrides, "model.vocab_size=70001").token_dtype == "uint32"


def test_tokens_of_a_tokenizer_stand_for_the_text(tmp_path: Path) -> None:
    file = bpe_tokenizer(tmp_path)
    corpus = corpus_of(text_file(tmp_path), tmp_path / "cache", f"data.tokenizer={file}", "model.vocab_size=400")
    assert corpus.token_dtype == "uint16"
    ids = memoryview(tokens_of(corpus)).cast("H").tolist()
    tokenizer = Tokenizer.from_file(str(file))
    assert tokenizer.decode(ids) == text()
    held_out = tokenizer.decode(ids[corpus.train_tokens :])
    # Within the document that is cut, bytes are shared out evenly over its tokens.
    assert corpus.eval_text_bytes == pytest.approx(len(held_out.encode()), rel=0.02)


def test_held_out_bytes_are_exact_where_no_document_is_cut(tmp_path: Path) -> None:
    file = bpe_tokenizer(tmp_path)
    folder = _pieces(tmp_path / "texts", ["1", "2"])
    whole = corpus_of(folder, tmp_path / "cache", f"data.tokenizer={file}", "model.vocab_size=400")
    ids = memoryview(tokens_of(whole)).cast("H").tolist()
    tokenizer = Tokenizer.from_file(str(file))
    last = next(
        len(encoded)
        for path in folder.iterdir()
        if ids[-len(encoded := tokenizer.encode(path.read_text(encoding="utf-8")).ids) :] == encoded
    )
    share = f"data.eval_fraction={last / len(ids)!r}"
    cut = corpus_of(folder, tmp_path / "cache", f"data.tokenizer={file}", "model.vocab_size=400", share)
    held_out = tokenizer.decode(ids[cut.train_tokens :])
    assert cut.eval_text_bytes == pytest.approx(len(held_out.encode()), abs=4)


def test_nats_per_byte_count_the_bytes_behind_the_tokens(tmp_path: Path) -> None:
    tokenizer = f"data.tokenizer={bpe_tokenizer(tmp_path)}"
    spec = small_spec(tmp_path, tokenizer, "model.vocab_size=400", "budget.max_steps=2")
    with one_rank():
        report = train_here(spec, tmp_path / "run")
    corpus = prepare(spec.data, spec.model, T, tmp_path / "cache")
    assert report.final_eval_loss is not None
    assert corpus.eval_tokens < corpus.eval_text_bytes
    expected = report.final_eval_loss * corpus.eval_tokens / corpus.eval_text_bytes
    assert report.final_eval_nats_per_byte == pytest.approx(expected)


# Sequences.


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """97 training sequences of 64 bytes, 9 held out; every two neighbours in the text differ."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(1)
    (folder / "text.txt").write_bytes(bytes(rng.randrange(1, 128) for _ in range(6831)))
    return corpus_of(folder / "text.txt", folder / "cache", "data.eval_fraction=0.09")


@pytest.fixture
def sequences(corpus: Corpus) -> Iterator[Sequences]:
    opened = Sequences(corpus, T, seed=0)
    yield opened
    opened.close()


def test_an_epoch_has_every_training_sequence_exactly_once(sequences: Sequences, corpus: Corpus) -> None:
    stream = tokens_of(corpus)
    expected = Counter(stream[i * T : (i + 1) * T] for i in range(sequences.num_train))
    assert sequences.num_train == (corpus.train_tokens - 1) // T
    for epoch in range(3):
        inputs, _ = sequences.train(epoch * sequences.num_train, sequences.num_train)
        assert Counter(bytes(row) for row in inputs.tolist()) == expected


def test_epochs_and_seeds_differ_in_their_order(sequences: Sequences, corpus: Corpus) -> None:
    other = Sequences(corpus, T, seed=1)
    orders = [
        sequences.train(0, sequences.num_train)[0].tolist(),
        sequences.train(sequences.num_train, sequences.num_train)[0].tolist(),
        other.train(0, other.num_train)[0].tolist(),
    ]
    other.close()
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


def test_a_batch_across_the_end_of_an_epoch_is_made_of_both(sequences: Sequences) -> None:
    last = sequences.num_train - 1
    across = sequences.train(last, 3)[0].tolist()
    assert across == sequences.train(last, 1)[0].tolist() + sequences.train(last + 1, 2)[0].tolist()


def test_targets_are_the_inputs_one_token_later(sequences: Sequences, corpus: Corpus) -> None:
    stream = tokens_of(corpus)
    for inputs, targets in zip(*sequences.train(0, sequences.num_train), strict=True):
        start = stream.index(bytes(inputs.tolist()))
        assert bytes(targets.tolist()) == stream[start + 1 : start + T + 1]


def test_held_out_sequences_follow_the_training_tokens_in_order(sequences: Sequences, corpus: Corpus) -> None:
    inputs, targets = sequences.held_out(0, sequences.num_eval)
    held_out = tokens_of(corpus)[corpus.train_tokens :]
    assert bytes(inputs.flatten().tolist()) == held_out[: sequences.num_eval * T]
    assert bytes(targets.flatten().tolist()) == held_out[1 : sequences.num_eval * T + 1]


def test_no_training_target_is_held_out(sequences: Sequences, corpus: Corpus) -> None:
    assert sequences.num_train * T + 1 <= corpus.train_tokens


def _recording(spec_file: str, run_dir: str) -> int:
    """A rank that also writes which positions of the data it took."""
    taken = (Path(run_dir) / f"taken.{os.environ['RANK']}").open("w", encoding="utf-8")
    read = Sequences.train

    def train(self: Sequences, first: int, count: int) -> object:
        print(json.dumps([first, count]), file=taken, flush=True)
        return read(self, first, count)

    Sequences.train = train  # type: ignore[method-assign, assignment]
    return main([spec_file, run_dir])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "micro_batch", "grad_accum"), [(1, 3, 2), (2, 3, 1), (2, 1, 3), (3, 2, 1)])
def test_the_ranks_of_a_step_share_its_sequences_out(
    ranks: int, micro_batch: int, grad_accum: int, tmp_path: Path
) -> None:
    spec = small_spec(
        tmp_path,
        f"parallel.devices_per_node={ranks}",
        f"train.micro_batch={micro_batch}",
        f"train.grad_accum={grad_accum}",
        "budget.max_steps=2",
    )
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "spec.json").write_text(spec.model_dump_json(), encoding="utf-8")
    assert set(on_ranks(ranks, run_dir, _recording, str(run_dir / "spec.json"), str(run_dir))) == {0}, log(run_dir)
    steps: list[list[int]] = [[], []]
    for rank in range(ranks):
        calls = [json.loads(line) for line in (run_dir / f"taken.{rank}").read_text(encoding="utf-8").splitlines()]
        for index, (first, count) in enumerate(calls):
            steps[index // grad_accum] += range(first, first + count)
    assert [sorted(step) for step in steps] == [list(range(6)), list(range(6, 12))]
