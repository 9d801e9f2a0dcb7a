"""From text to a prepared corpus: sources, cleaning, tokenizer, tokenising, cache."""
