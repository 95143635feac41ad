"""Other interfaces than OpenAI's chats and completions, each translated onto these."""
