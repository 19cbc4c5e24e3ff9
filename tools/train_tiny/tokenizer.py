"""echo-tiny's tokenizer: byte-level BPE of 2,048 entries, single digits, and one token for each key word.

`python -m tools.train_tiny.tokenizer TRAIN_TXT MODEL_DIR` writes tokenizer.json, tokenizer_config.json and
chat_template.jinja. Key words are plain vocabulary entries that no merge builds: `ignore_merges` takes a whole word
that is in the vocabulary as it stands, so they cost one entry each and decode like any other token.
"""

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.train_tiny.keywords import KEY_WORDS, PASSKEY

VOCAB_SIZE = 2048
BOS, EOS, PAD, USER, ASSISTANT, SYSTEM = range(6)
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>")

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '<|assistant|>' + message['content'] + eos_token -}}
{%- elif message['role'] == 'system' -%}
{{- '<|system|>' + message['content'] -}}
{%- else -%}
{{- '<|user|>' + message['content'] -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


def train_tokenizer(text_path: Path) -> Tokenizer:
    """Train on one text file. Deterministic for given text."""
    words = [f"\u0120{word}" for word in (*KEY_WORDS, PASSKEY)]  # \u0120: the byte-level letter for a space
    base = Tokenizer(models.BPE())
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    base.pre_tokenizer = split
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(words),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    phrases = " is # The number of\nQuestion: What is the number?\nAnswer: The number Remember this: the"
    lines = text_path.read_text(encoding="utf-8").splitlines()
    base.train_from_iterator([*lines, *([phrases] * 2000)], trainer)
    state = json.loads(base.to_str())
    vocab = state["model"]["vocab"]
    for word in words:
        assert word not in vocab, f"{word} is already in the vocabulary"
        vocab[word] = len(vocab)
    assert len(vocab) == VOCAB_SIZE, "the text is too small for the vocabulary"
    state["model"]["ignore_merges"] = True
    tokenizer: Tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL_TOKENS[BOS]} $A", pair=None, special_tokens=[(SPECIAL_TOKENS[BOS], BOS)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, model_dir: Path) -> None:
    """Write the three tokenizer files of a Hugging Face model folder."""
    model_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(model_dir / "tokenizer.json"), pretty=False)
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "pad_token": SPECIAL_TOKENS[PAD],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 40960,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (model_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("model_dir", type=Path)
    args = parser.parse_args()
    save_tokenizer(train_tokenizer(args.text), args.model_dir)


if __name__ == "__main__":
    main()
