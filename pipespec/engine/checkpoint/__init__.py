"""What is stored of a model: config, tokenizer and tensors, whatever the format of its files."""
