"""Small real tokenizers, learnt from a few sentences, that merge text at the edges of placeholders."""

import json
from collections.abc import Iterable
from functools import cache
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

Vocabulary = Literal["byte_level", "metaspace"]
# Where "metaspace" writes the space that sentencepiece puts before a text: before the whole text, before every
# stretch between special tokens (the fast llama tokenizers of old), or nowhere (Gemma).
Prefix = Literal["first", "legacy", "never"]

PAD, BOS, EOS, UNK = CONTROL = ("<pad>", "<s>", "</s>", "<unk>")

_SENTENCES = """\
What is in the picture? A red circle is left of the blue square, and the green one is on the right.
Describe the image in detail. Is there a dog in the second video? Yes, there is: it runs for 12.5 seconds.
The first frame is from 00:01, the last frame is from 00:07; between them 24 frames were shown.
USER: Hello, what do you see here?
ASSISTANT: I see two pictures and a video, don't I?
You are a helpful assistant. Answer in one word, please: yes or no.
Here is the original image and here are some crops to help you see better.
You are provided the following series of eight frames from a 0:00:08 [H:MM:SS] video.
<p>Text with <b>tags</b> &amp; signs: (a) 1 + 2 = 3, "b" is 50% of {c}, d_e = f/g|h.</p>
0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz é ü ß 中文 .,:;!?-+*/=<>|()[]{}_#@$%^&'"~`
"""
# What stands left and right of placeholders, so common here that one token reaches over the edge.
_EDGES: tuple[str, ...] = ("\n\n", "\n\n\n", ":\n", ".\n\n", "\nWhat", "?\n", "]\n", "\n[", "\nFrame from 00:0")
_EDGES += ("a<", ">a", "> ", " <", "><", "<|", "|>", ". ", ": ", " a", "  ", "Frame", "Frame1: ")
_EDGES += ("<0", ".0 seconds", ".5 seconds", "seconds>")
_SIZE = 800


def small_tokenizer(
    vocabulary: Vocabulary, tokens: Iterable[str], texts: Iterable[str] = (), *, prefix: Prefix = "first", bos: bool
) -> Tokenizer:
    """A tokenizer with the special `tokens` and the plain added `texts`; with `bos`, it starts texts with BOS."""
    tokenizer = Tokenizer.from_str(_plain(vocabulary, prefix))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS}:0 $A:0",
            pair=f"{BOS}:0 $A:0 {BOS}:1 $B:1",
            special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
        )
    return tokenizer


def unigram_tokenizer(vocabulary: Vocabulary, pieces: Iterable[str]) -> Tokenizer:
    """A tokenizer that finds `pieces` inside of the text, after the space that it always puts first.

    Fuyu's is of this kind: its image tokens are pieces of the vocabulary, not added tokens, and its processor
    relies on the space.
    """
    plain = Tokenizer.from_str(_plain(vocabulary, "first"))
    words = sorted(plain.get_vocab().items(), key=lambda item: item[1])
    byte_pieces = set(_byte_pieces())
    # Fewer and earlier learnt pieces score higher. Byte pieces must not be found in text, except if they are asked for.
    scores = {word: -99.0 if word in byte_pieces else -9.0 - id_ / 1000 for word, id_ in words}
    scores.update(dict.fromkeys(pieces, 0.0))
    model = models.Unigram(list(scores.items()), unk_id=CONTROL.index(UNK), byte_fallback=vocabulary == "metaspace")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(vocabulary, add_prefix_space=True)
    tokenizer.decoder = plain.decoder
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    return tokenizer


@cache
def _plain(vocabulary: Vocabulary, prefix: Prefix) -> str:
    """The tokenizer without a family's tokens, as JSON."""
    metaspace = vocabulary == "metaspace"
    alphabet, merges = _learn(vocabulary)
    words = [*CONTROL, *(_byte_pieces() if metaspace else ()), *alphabet, *("".join(merge) for merge in merges)]
    ids = {word: id_ for id_, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token=UNK, fuse_unk=metaspace, byte_fallback=metaspace)
    )
    if not metaspace:
        tokenizer.pre_tokenizer = _pre_tokenizer(vocabulary)
        tokenizer.decoder = decoders.ByteLevel()
    elif prefix == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = _metaspace_decoder()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
        tokenizer.decoder = _metaspace_decoder(adds_space=prefix != "never")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    if metaspace:  # as in Gemma, where runs of newlines are added tokens; a single one is a byte here, as in llama
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("\n\n", "\n\n\n")])
    return str(tokenizer.to_str())


@cache
def _learn(vocabulary: Vocabulary) -> tuple[list[str], list[tuple[str, str]]]:
    """The characters and the merges of the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(vocabulary)
    trainer = trainers.BpeTrainer(
        vocab_size=_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if vocabulary == "byte_level" else [],
        max_token_length=12,
        show_progress=False,
    )
    corpus = [*_SENTENCES.splitlines(), *(_EDGES * 20)]
    if vocabulary == "metaspace":  # newlines are left to the byte pieces
        corpus = [text.replace("\n", "") for text in corpus]
    tokenizer.train_from_iterator(corpus, trainer)
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    merges = [(left, right) for left, right in model["merges"]]
    learnt = {left + right for left, right in merges}
    return [word for word in model["vocab"] if word not in learnt], merges


def _pre_tokenizer(vocabulary: Vocabulary, *, add_prefix_space: bool = False) -> Any:
    """No pattern splits words, so merges reach over punctuation, spaces and newlines."""
    if vocabulary == "byte_level":
        return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    return pre_tokenizers.Metaspace(prepend_scheme="always" if add_prefix_space else "first", split=False)


def _metaspace_decoder(*, adds_space: bool = True) -> Any:
    """`adds_space`: the tokenizer has put a space before the text, which is taken away again."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)


def _byte_pieces() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]
