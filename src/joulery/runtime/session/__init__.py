"""Parts of a session that services and language models share: live policies, history, requests, progress."""
