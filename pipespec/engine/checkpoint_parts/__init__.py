"""Parts of checkpoints: fetched from the Hugging Face Hub or another host, and kept on disk."""
