//! Text without a tokenizer.
