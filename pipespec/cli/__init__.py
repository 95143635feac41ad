"""What a person types: one module per command, the parser and what is printed."""
