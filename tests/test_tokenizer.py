"""Training, loading and using tokenizers."""

import json
import os
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from data_prep.encode import TextEncoder
from data_prep.tokenizer import (
    SPECIAL_TOKENS,
    build_wordpiece,
    find_special_ids,
    load_given_tokenizer,
    load_text_tokenizer,
    train_tokenizer,
    vocabulary_size,
)
from sharebert.config import ConfigError
from sharebert.data.format import SpecialIds

TEXTS = [
    "The river carried the old boat past the mill, and nobody on the bank looked up.",
    "Nobody looked at the mill any more; the river had carried the miller's boat away.",
    "An old man mended nets by the river. He mended them well, and he mended them slowly.",
    "Ça va? Naïve café owners looked over the river, 20 boats at a time.",
] * 3

WORDS = ["see", "the", "mask", "[", "]", "a", "##s", "cls", "pad", "sep", "un", "##k", "b", "é"]


def given_vocab(tmp_path, tokens=(*SPECIAL_TOKENS, *WORDS), name="vocab.txt"):
    path = tmp_path / name
    path.write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return path


def saved(tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


TRAINING = """
import sys
from data_prep import python_docs
from data_prep.tokenizer import train_tokenizer
texts = list(python_docs.read_documents(python_docs.standard_library() / "pydoc_data"))
train_tokenizer(lambda: texts, 4096, lowercase=True).save(sys.argv[1])
"""


@pytest.mark.processes
def test_processes_with_different_hash_seeds_train_the_same_file(tmp_path):
    paths = [tmp_path / f"{seed}.json" for seed in (0, 1, 4242)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TRAINING, str(path)],
            env={**os.environ, "PYTHONHASHSEED": path.stem, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for path in paths
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    first, *others = [path.read_bytes() for path in paths]
    assert all(other == first for other in others)
    assert len(json.loads(first)["model"]["vocab"]) == 4096


def test_training_gives_the_five_special_tokens_the_first_ids():
    tokenizer = train_tokenizer(lambda: TEXTS, 120, lowercase=True)
    assert find_special_ids(tokenizer) == SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
    assert vocabulary_size(tokenizer) == tokenizer.get_vocab_size() == 120
    added = tokenizer.get_added_tokens_decoder()
    assert {identifier: token.content for identifier, token in added.items()} == dict(enumerate(SPECIAL_TOKENS))
    assert {"river", "mended", "##ed"} & set(tokenizer.get_vocab())


def test_a_trained_tokenizer_encodes_and_decodes_its_text_without_unknowns():
    tokenizer = train_tokenizer(lambda: TEXTS, 150, lowercase=True)
    encoding = tokenizer.encode("The miller's naïve boat")
    assert (encoding.tokens[0], encoding.tokens[-1]) == ("[CLS]", "[SEP]")
    assert "[UNK]" not in encoding.tokens
    assert tokenizer.decode(encoding.ids) == "the miller ' s naive boat"


def test_lowercasing_strips_accents_and_casing_keeps_them():
    uncased = train_tokenizer(lambda: TEXTS, 150, lowercase=True).get_vocab()
    cased = train_tokenizer(lambda: TEXTS, 150, lowercase=False).get_vocab()
    assert not {"é", "ï", "Ç", "N", "ç"} & set(uncased)
    assert {"##é", "##ï", "Ç", "N"} <= set(cased)


def test_punctuation_has_no_continuation_form():
    vocab = train_tokenizer(lambda: TEXTS, 150, lowercase=True).get_vocab()
    assert {",", ".", "'", "##a"} <= set(vocab)
    assert not {"##,", "##.", "##'"} & set(vocab)


def test_a_vocabulary_smaller_than_the_alphabet_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"data\.vocab_size=30: expected at least \d+ .*5 special tokens, \d+ char"):
        train_tokenizer(lambda: TEXTS, 30, lowercase=True)


def test_rare_characters_beyond_the_limit_become_unknown():
    common = "".join(chr(code) for code in range(0x1200, 0x1200 + 256) if chr(code).isalpha())
    padding = "".join(chr(code) for code in range(0x3400, 0x3400 + 256))
    tokenizer = train_tokenizer(lambda: [" ".join(padding)] * 3 + [common[0]], 600, lowercase=True)
    assert tokenizer.encode(padding[0], add_special_tokens=False).tokens == [padding[0]]
    assert tokenizer.encode(common[0], add_special_tokens=False).tokens == ["[UNK]"]


def test_text_that_spells_a_special_token_stays_text(tmp_path):
    path = saved(train_tokenizer(lambda: TEXTS + ["[MASK] [SEP] <pad>"] * 3, 150, lowercase=True), tmp_path)
    tokenizer = load_text_tokenizer(path)
    for spelled in SPECIAL_TOKENS:
        tokens = tokenizer.encode(f"the {spelled} boat", add_special_tokens=False).tokens
        assert tokens[1] == "["
        assert tokenizer.decode(tokenizer.encode(spelled, add_special_tokens=False).ids) != spelled
    encoded = TextEncoder(path).encode(["the [MASK] boat", "[CLS][SEP]", "[mask]"])
    assert not set(encoded.ids.tolist()) & {0, 2, 3, 4}


def test_a_special_token_that_a_given_file_holds_as_a_plain_word_becomes_unknown(tmp_path):
    vocab = {token: number for number, token in enumerate([*SPECIAL_TOKENS, "see"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    encoded = TextEncoder(saved(tokenizer, tmp_path)).encode(["see [MASK] see [PAD]", "", "see other"])
    assert encoded.ids.tolist() == [5, 1, 5, 1, 5, 1]
    assert encoded.lengths.tolist() == [4, 0, 2]


def test_a_vocab_txt_keeps_its_ids(tmp_path):
    tokens = ("[PAD]", "see", "[UNK]", "[CLS]", "[SEP]", "the", "[MASK]", "é")
    tokenizer = load_given_tokenizer(given_vocab(tmp_path, tokens), lowercase=False)
    assert find_special_ids(tokenizer) == SpecialIds(pad=0, unk=2, cls=3, sep=4, mask=6)
    assert tokenizer.encode("see the É é", add_special_tokens=False).ids == [1, 5, 2, 7]
    assert load_given_tokenizer(given_vocab(tmp_path), lowercase=True).encode("SEE").tokens[1] == "see"


def test_faults_of_a_given_tokenizer_are_named(tmp_path):
    cases = {
        "missing.txt": (None, "no such file"),
        "short.txt": ("[PAD]\n[UNK]\n[CLS]\n", r"no \[SEP\], \[MASK\]; expected all of"),
        "twice.txt": ("[PAD]\nsee\nsee\n", "'see' stands in lines 2 and 3"),
        "broken.json": ("{", r"not a tokenizer\.json"),
    }
    for name, (content, message) in cases.items():
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=rf"data\.tokenizer=.*{name}.*{message}"):
            load_given_tokenizer(tmp_path / name, lowercase=True)
    without_mask = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "<s>": 2, "</s>": 3}, unk_token="[UNK]"))
    with pytest.raises(ConfigError, match=r"no mask token; expected one of \[MASK\], <mask>"):
        load_given_tokenizer(saved(without_mask, tmp_path), lowercase=True)


def test_truncation_and_padding_of_a_given_tokenizer_are_off(tmp_path):
    tokenizer = build_wordpiece({token: number for number, token in enumerate((*SPECIAL_TOKENS, *WORDS))}, True)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    path = saved(tokenizer, tmp_path)
    for loaded in (load_given_tokenizer(path, True), load_text_tokenizer(path)):
        assert len(loaded.encode("see the mask see the mask", add_special_tokens=False).ids) == 6
        assert len(loaded.encode("see", add_special_tokens=False).ids) == 1


def test_byte_level_bpe_with_other_names_is_accepted(tmp_path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=names, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    path = saved(tokenizer, tmp_path)
    assert find_special_ids(load_given_tokenizer(path, True)) == SpecialIds(pad=1, unk=3, cls=0, sep=2, mask=4)
    encoded = TextEncoder(path).encode(["the <mask> boat</s>"])
    assert not set(encoded.ids.tolist()) & {0, 1, 2, 3, 4}
    assert load_text_tokenizer(path).id_to_token(int(encoded.ids[0])) == "Ġthe"


def test_forking_after_training_prints_no_warning(tmp_path):
    program = "import os, warnings\nfrom data_prep.tokenizer import train_tokenizer\n"
    program += f"t = train_tokenizer(lambda: {TEXTS!r}, 120, True)\nt.encode_batch(['the boat'] * 100)\n"
    program += "pid = os.fork()\nif pid == 0:\n    t.encode_batch(['the boat'] * 100)\n    os._exit(0)\n"
    program += "assert os.waitpid(pid, 0)[1] == 0\n"
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
