"""What services and language models of a session share: policies in real time, their history, requests, progress."""
