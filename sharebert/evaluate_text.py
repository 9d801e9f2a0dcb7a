"""The verb `evaluate`: held-out masked-LM loss and accuracy of a checkpoint on any text files."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from data_prep.encode import TextEncoder
from data_prep.prepare import tokenize_files
from sharebert.checkpoint import TOKENIZER_FILE
from sharebert.config import ConfigError, DataConfig, EngineConfig, MaskingConfig, from_dict
from sharebert.data.loader import evaluation_batches
from sharebert.data.masking import build_vocabulary
from sharebert.evaluate import Evaluator
from sharebert.launch import EXIT_FINISHED, Ranks
from sharebert.precision import resolve_device, resolve_precision
from sharebert.train_state import load_model


def main(arguments: Sequence[str]) -> int:
    """Parse the flags, evaluate and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="sharebert evaluate", description="Masked-LM loss and accuracy of a checkpoint on text files."
    )
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or the link `latest`")
    parser.add_argument("--files", nargs="+", required=True, help="txt, jsonl or parquet files, also gzipped; globs")
    parser.add_argument("--text-column", default="text", help="column or key that holds the text (default: text)")
    parser.add_argument("--seq-len", type=int, help="tokens in a sequence (default: as in training)")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences in a forward pass (default: 32)")
    parser.add_argument("--max-sequences", type=int, default=2000, help="at most so many (default: 2000)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--precision", default="auto", choices=("auto", "bf16", "fp16", "fp32"))
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    options = parser.parse_args(arguments)
    for name, least in (("seq_len", 8), ("batch_size", 1), ("max_sequences", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')}={value}: expected at least {least}")
    figures = evaluate_files(options)
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:<24}{value:,.4f}".rstrip("0").rstrip(".") for name, value in figures.items()))
    return EXIT_FINISHED


def evaluate_files(options: argparse.Namespace) -> dict[str, float]:
    """Figures named `eval/...` of ``options.checkpoint`` on ``options.files``.

    Raises:
        CheckpointError: the checkpoint is damaged.
        ConfigError: a pattern matches nothing.
        DataError: a file cannot be read.
    """
    model, _, meta = load_model(options.checkpoint)
    config, tokenizer = meta["config"], options.checkpoint / TOKENIZER_FILE
    seq_len, positions = options.seq_len or config["data"]["seq_len"], config["model"]["max_position_embeddings"]
    if seq_len > positions:
        raise ConfigError(f"--seq-len={seq_len}: expected at most {positions}, the positions of the model")
    device = resolve_device(EngineConfig(device=options.device), Ranks())
    precision = resolve_precision(EngineConfig(precision=options.precision), device)
    masking = from_dict(MaskingConfig, config["masking"])
    encoder = TextEncoder(tokenizer)
    files = DataConfig(
        source="text_files",
        files=list(options.files),
        text_column=options.text_column,
        txt_documents=config["data"]["txt_documents"],
        validation_fraction=0.0,
    )
    with tempfile.TemporaryDirectory(prefix="sharebert-") as folder:
        store = tokenize_files(files, tokenizer, Path(folder) / "tokens")
        batches = evaluation_batches(
            store,
            build_vocabulary(tokenizer, encoder.special_ids, encoder.vocab_size, masking.whole_word),
            seq_len=seq_len,
            masking=masking,
            max_sequences=options.max_sequences,
            batch_size=options.batch_size,
            rank=0,
            world_size=1,
            cross_document_attention=config["data"]["cross_document_attention"],
        )
        figures = Evaluator(batches, encoder.vocab_size, precision).evaluate(model.to(device))
    assert figures is not None, "nobody asked it to stop"
    return figures
