"""The dashboard and the chat page."""
