"""HTTP: the interface of OpenAI to a running cluster, and what to monitor."""
